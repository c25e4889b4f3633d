"""Measure all contenders on one problem: latency by `tilewise.cli.timing`, peak memory, and a look at the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tilewise.cli import timing
from tilewise.cli.bench_contenders import Skipped, contender, reference_rows, visible_pairs
from tilewise.cli.memory import count_peak
from tilewise.cli.problem_flags import parse_mask
from tilewise.errors import UnsupportedProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tilewise.cli.problem_flags import Sizes

DIRECTIONS = ("forward", "backward")
ALLOWED = 32.0
"""Largest difference to float64 that still counts as the same function, in units of eps(dtype) * max|out|: far
beyond rounding, far below what a wrong mask does."""


@dataclass
class Row:
    """One contender on one problem in one direction.

    status: "ok", "skipped" (reason says why), or "wrong" (another function or an error of ours).
    memory: peak bytes beyond inputs and results, of the forward pass or of forward and backward together.
    difference: largest difference to float64 over sampled rows. flops: matrix products on visible pairs.
    """

    name: str
    backend: str | None
    sizes: Sizes
    device: str
    direction: str
    status: str = "ok"
    reason: str = ""
    timing: timing.Timing | None = None
    memory: int | None = None
    difference: float | None = None
    flops: int = 0

    @property
    def key(self) -> tuple:
        """What two runs are compared by."""
        return (self.name, *self.sizes, self.device, self.direction)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, text and dicts."""
        return {
            "name": self.name,
            "backend": self.backend,
            "problem": {**self.sizes._asdict(), "device": self.device},
            "direction": self.direction,
            "status": self.status,
            "reason": self.reason,
            "timing": self.timing.to_dict() if self.timing else None,
            "memory_bytes": self.memory,
            "difference": self.difference,
            "flops": self.flops,
        }


def resolve(name: str, sizes: Sizes, device: torch.device, backward: bool) -> tuple[str | None, bool]:
    """(the backend that a Tilewise contender runs, whether it is a slow one); (None, False) for the others."""
    import tilewise as tw
    from tilewise.dispatch import registry

    if not name.startswith("tilewise"):
        return None, False
    mask = parse_mask(sizes.mask).build(sizes.seqlen_q, sizes.seqlen_k)
    options = {"mask": mask, "backend": name.partition(":")[2] or "auto", "backward": backward}
    plan = tw.explain(*sizes.shapes, dtype=sizes.torch_dtype, device=device.type, **options)
    return plan.backend, plan.backend is not None and registry.is_slow(plan.backend)


def measure(
    sizes: Sizes,
    names: Sequence[str],
    device: torch.device,
    limits: timing.Limits,
    step: Callable[[str], None],
) -> list[Row]:
    """Rows of every contender on one problem, forward then backward. `step(text)` is called before each piece."""
    with timing.side_stream(device):
        return _measure(sizes, names, device, limits, step)


def _measure(
    sizes: Sizes,
    names: Sequence[str],
    device: torch.device,
    limits: timing.Limits,
    step: Callable[[str], None],
) -> list[Row]:
    q, k, v = draw(sizes, device)
    leaves = tuple(t.clone().requires_grad_() for t in (q, k, v))
    dout = torch.randn(*q.shape[:3], sizes.head_dim_v, dtype=q.dtype, device=device)
    pairs = visible_pairs(parse_mask(sizes.mask), sizes, device)
    rows: list[Row] = []
    prepared: dict[str, Callable[..., Tensor]] = {}
    for direction in DIRECTIONS:
        made = {name: _row(name, sizes, device, direction, pairs) for name in names}
        calls: dict[str, Callable[[], Any]] = {}
        whole: dict[str, Callable[[], Any]] = {}
        for name, row in made.items():
            step(f"{sizes.seqlen_q}: {name} {direction}, first call")
            try:
                if name not in prepared:
                    prepared[name] = contender(name, parse_mask(sizes.mask), sizes, device)
                if direction == "forward":
                    calls[name] = whole[name] = partial(_forward, prepared[name], (q, k, v))
                    _look(row, calls[name](), (q, k, v))
                else:
                    calls[name] = _backward(prepared[name], leaves, dout)
                    whole[name] = partial(_both, prepared[name], leaves, dout)
            except Exception as error:
                _refuse(row, error)
                calls.pop(name, None)
        timings = {}
        step(f"{sizes.seqlen_q}: timing {direction}")
        if calls:
            timings = timing.time_calls(calls, device, limits)
        for name, found in timings.items():
            made[name].timing = found
            step(f"{sizes.seqlen_q}: memory of {name} {direction}")
            del calls[name]  # its graph would count as memory in use
            made[name].memory = count_peak(whole[name], device).extra
        rows += made.values()
    return rows


def draw(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v, the same on every machine: drawn on the CPU from one seed."""
    generator = torch.Generator().manual_seed(0)
    shapes = sizes.shapes
    return tuple(torch.randn(shape, generator=generator).to(device, sizes.torch_dtype) for shape in shapes)  # type: ignore[return-value]


def _row(name: str, sizes: Sizes, device: torch.device, direction: str, pairs: int) -> Row:
    from tilewise.analysis import attention_flops

    back = direction == "backward"
    flops = attention_flops(pairs, sizes.head_dim, sizes.head_dim_v, sizes.heads, sizes.batch, backward=back)
    return Row(name, resolve(name, sizes, device, back)[0], sizes, str(device), direction, flops=flops)


def _forward(attend: Callable[..., Tensor], qkv: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        return attend(*qkv)


def _backward(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> Callable[[], Any]:
    """The backward pass alone, on a graph that is kept; it has run once."""
    out = attend(*leaves)

    def call() -> Any:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    call()
    return call


def _both(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> Any:
    out = attend(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, dout)


def _look(row: Row, out: Tensor, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """Hold a sample of the output against float64; another function is no contender."""
    rows, wanted = reference_rows(qkv, parse_mask(row.sizes.mask), row.sizes)
    if not len(rows):
        return
    row.difference = float((out[0, 0][rows].double() - wanted).abs().max())
    allowed = ALLOWED * torch.finfo(out.dtype).eps * float(wanted.abs().max())
    if not row.difference <= allowed:
        raise ArithmeticError(
            f"its output differs from float64 by {row.difference:.1e}, allowed {allowed:.1e}"
        )


def _refuse(row: Row, error: Exception) -> None:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    wrong = isinstance(error, ArithmeticError) or row.name.startswith("tilewise")
    if isinstance(error, UnsupportedProblem):
        row.status, row.reason = "skipped", "; ".join(lines[:3])
    elif isinstance(error, (Skipped, torch.OutOfMemoryError)):
        row.status, row.reason = "skipped", lines[0]
    else:
        if row.name == "flex":
            torch._dynamo.reset()  # after a failure compiled code may give way to an unfused path, silently
        row.status, row.reason = ("wrong" if wrong else "skipped"), lines[0]
