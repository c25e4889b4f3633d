"""How large an error may be: a multiple of ordinary attention's own error, plus one rounding of the largest
value.

error  = |result - truth|,   truth = float64 on the same (already rounded) inputs
    budget = factor * |ordinary - truth| + eps * max|truth|

where |ordinary - truth| is the largest over a few equally ordinary orders of its operations (a single one is
sometimes exact by luck, most of all in small tensors), with factor 2 for out and lse and 3 for gradients, eps
the spacing of the tensor's dtype at 1, and max or root mean square taken over the whole tensor. float64
problems have no finer truth: their budget is 1e-11 * max(1, max|truth|).
Source: the rule of FlashAttention-2's tests (2x forward, 3x gradients), with one rounding as floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
FLOAT64_BUDGET = 1e-11


@dataclass(frozen=True)
class Line:
    """Error of one tensor, as (max, rms) pairs in the tensor's own units."""

    name: str
    error: tuple[float, float]
    ordinary: tuple[float, float]
    budget: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The larger of error / budget over max and rms; at most 1 is within budget."""
        return max(_ratio(e, b) for e, b in zip(self.error, self.budget, strict=True))

    def __str__(self) -> str:
        pairs = zip(("max", "rms"), self.error, self.ordinary, self.budget, strict=True)
        words = [
            f"{word} {error:.2e} (ordinary {own:.2e}, budget {budget:.2e})"
            for word, error, own, budget in pairs
        ]
        return f"{self.name:<10} ratio {self.ratio:5.2f}  " + "  ".join(words)


def _ratio(error: float, budget: float) -> float:
    if error == 0.0:
        return 0.0
    return error / budget if budget > 0.0 else float("inf")


@dataclass(frozen=True)
class Report:
    """Errors of one run of one case on one backend; `refused` holds the text of an UnsupportedProblem, with
    no lines.
    """

    case: str
    backend: str
    lines: tuple[Line, ...] = ()
    refused: str = ""

    @property
    def worst(self) -> float:
        """Largest error / budget over all tensors; 0 if refused."""
        return max((line.ratio for line in self.lines), default=0.0)

    def __str__(self) -> str:
        head = f"{self.case} on {self.backend}" + (f": refused, {self.refused}" if self.refused else "")
        return "\n".join([head, *(f"  {line}" for line in self.lines)])


def measure(t: Tensor) -> tuple[float, float]:
    """(max, root mean square) of |t| in float64; (0, 0) for an empty tensor. NaN stays NaN."""
    if t.numel() == 0:
        return 0.0, 0.0
    t = t.detach().to(torch.float64).abs()
    return float(t.max()), float(t.square().mean().sqrt())


def compare(name: str, result: Tensor, ordinary: Sequence[Tensor], truth: Tensor) -> Line:
    """Hold one tensor to its budget. truth is float64; entries that are -inf in it (lse of empty rows) must
    be -inf in result too.

    Raises AssertionError if result is not finite where truth is, or finite where it is not.
    """
    result = result.detach().cpu()
    if not torch.equal(torch.isneginf(result), torch.isneginf(truth)):
        raise AssertionError(f"{name}: -inf stands in other places than in the float64 result")
    finite = truth.isfinite()
    if not result[finite].isfinite().all():
        wrong = int((~result[finite].isfinite()).sum())
        raise AssertionError(f"{name}: {wrong} of {result.numel()} entries are NaN or infinite")
    eps = torch.finfo(result.dtype).eps
    error = measure(result[finite].double() - truth[finite])
    errors = [measure(t.detach().cpu()[finite].double() - truth[finite]) for t in ordinary]
    own = (max(e[0] for e in errors), max(e[1] for e in errors))
    largest = measure(truth[finite])[0]
    factor = FORWARD_FACTOR if name in ("out", "lse") else GRADIENT_FACTOR
    if result.dtype == torch.float64:
        budget = (FLOAT64_BUDGET * max(1.0, largest),) * 2
    else:
        budget = tuple(factor * e + eps * largest for e in own)
    return Line(name, error, own, budget)
