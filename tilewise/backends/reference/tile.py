"""One tile of scores: its variables, the fold of the spec's trees over it, and sums that hidden values cannot enter.

Shapes: a tile of scores is (b, H, rows, columns); with GQA it is also seen as (b, H_kv, group * rows, columns),
so that the query heads of a group share one matrix product and K and V are never expanded.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.spec import expression as ex
from tilewise.spec.derivative import differentiate, tangent
from tilewise.spec.dropout import keep_tile
from tilewise.spec.print_torch import Env, compile_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.backends.reference.segments import Segment
    from tilewise.problem import Inputs, Problem
    from tilewise.spec.attention import AttentionSpec

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


class Trees:
    """The spec's trees, compiled to torch: mask, score, its derivatives, and their tangents."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.keep = None if spec.keep is None else compile_torch((spec.keep,))
        self.has_terms = spec.score is not None
        score = spec.score if spec.score is not None else ex.variable("s")
        derivative = differentiate(score)
        self.sites = tuple(site for site, _ in derivative.loads)
        adjoints = tuple(adjoint for _, adjoint in derivative.loads)
        roots = (score, derivative.s, *adjoints)
        dots = tuple(tangent(root, len(spec.leaves)) for root in roots)
        self.score = compile_torch((score,))
        self.score_and_slopes = compile_torch(roots, self.sites)
        self.all_and_dots = compile_torch(roots + dots, self.sites)
        self.num_nodes = (
            sum(bool(n.args) and n.type == "float" for n in ex.topological(score)) if self.has_terms else 0
        )
        self.names = spec.variables - {"s"}


@functools.lru_cache(maxsize=512)
def trees_of(spec: AttentionSpec) -> Trees:
    """The compiled trees of a spec; lengths and numbers are not part of it."""
    return Trees(spec)


class TileFold:
    """Folds the spec over the tile of one segment, one range of rows and one range of columns."""

    def __init__(self, problem: Problem, inputs: Inputs, dots: Sequence[Tensor | None] = ()) -> None:
        self.problem, self.inputs, self.trees = problem, inputs, trees_of(problem.spec)
        self.dtype = problem.compute_dtype
        self.device = inputs.q.device
        self.leaves = (*inputs.leaves, *dots)

    def at(self, segment: Segment, rows: tuple[int, int], columns: tuple[int, int]) -> TileFold:
        """Move to another tile (rows and columns are relative to the segment)."""
        self.segment, self.rows, self.columns = segment, rows, columns
        self._env: Env | None = None
        return self

    def _range(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.arange(low, high, dtype=torch.int32, device=self.device).view(shape)

    def _offset(self, offset: int | Tensor) -> int | Tensor:
        return offset.to(torch.int32).view(-1, 1, 1, 1) if isinstance(offset, Tensor) else offset

    def _variable(self, name: str) -> Tensor:
        heads = self.problem.shape.num_heads_q
        match name:
            case "i":
                return self._range(*self.rows, (1, 1, -1, 1))
            case "j":
                return self._range(*self.columns, (1, 1, 1, -1))
            case "q":
                return self._variable("i") + self._offset(self.segment.q_offset)
            case "k":
                return self._variable("j") + self._offset(self.segment.k_offset)
            case "h":
                return self._range(0, heads, (1, -1, 1, 1))
            case "g":
                return self._range(0, heads, (1, -1, 1, 1)) // max(self.problem.group, 1)
        first = self.segment.first_batch
        return self._range(first, first + self.segment.entries, (-1, 1, 1, 1))

    def env(self, **values: Tensor) -> Env:
        """The environment of this tile with s (and s_dot) set."""
        if self._env is None:
            first = self.segment.first_batch
            self._env = Env(
                {name: self._variable(name) for name in self.trees.names},
                {"b": (first, first + self.segment.entries), "h": (0, self.problem.shape.num_heads_q),
                 "i": self.rows, "j": self.columns},
                self.leaves, self.inputs.ints, self.inputs.floats, self.dtype,
            )  # fmt: skip
        self._env.variables.update(values)
        return self._env

    def hidden(self) -> Tensor | None:
        """True where the mask hides the pair, broadcastable to the tile; None if there is no mask."""
        if self.trees.keep is None:
            return None
        # A mask without variables is a number on the CPU.
        return ~self.trees.keep(self.env())[0].to(self.device)

    def dropout(self) -> Tensor | None:
        """Factor of each weight, 0 or 1 / (1 - p); None without dropout."""
        if not self.problem.spec.dropout:
            return None
        p, inputs, first = self.inputs.dropout, self.inputs, self.segment.first_batch
        heads = self._range(0, self.problem.shape.num_heads_q, (1, -1, 1, 1)) + inputs.h_offset
        batches = self._range(first, first + self.segment.entries, (-1, 1, 1, 1)) + inputs.b_offset
        k0 = self._offset(self.segment.k_offset) + self.columns[0]
        k0 = k0.to(torch.int64) if isinstance(k0, Tensor) else k0
        kept = keep_tile(
            inputs.seed,  # type: ignore[arg-type]  # dropout has a seed
            p, self._variable("q").to(torch.int64), k0, self.columns[1] - self.columns[0],
            heads.to(torch.int64), batches.to(torch.int64),
        )  # fmt: skip
        return kept.to(self.dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


# ---- products ------------------------------------------------------------------------------------------------


def by_kv_head(t: Tensor, num_heads_kv: int) -> Tensor:
    """(b, H, rows, x) as (b, H_kv, group * rows, x); a view where t is contiguous."""
    b, heads, rows, x = t.shape
    return t.reshape(b, num_heads_kv, heads // num_heads_kv * rows if num_heads_kv else rows, x)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q k^T per head, (b, H, rows, columns); q (b, H, rows, D), k (b, H_kv, columns, D)."""
    heads_kv = k.shape[1]
    product = torch.matmul(by_kv_head(q, heads_kv), k.transpose(-1, -2))
    return product.view(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def over_keys(w: Tensor, x: Tensor, visible: Tensor | None = None) -> Tensor:
    """sum over columns of w x per head; w (b, H, rows, columns), x (b, H_kv, columns, D)."""
    b, heads, rows, _ = w.shape
    heads_kv = x.shape[1]
    seen = None if visible is None else by_kv_head(visible, heads_kv)
    return weighted_sum(by_kv_head(w, heads_kv), x, seen).view(b, heads, rows, x.shape[-1])


def over_rows(w: Tensor, x: Tensor, num_heads_kv: int, visible: Tensor | None = None) -> Tensor:
    """(b, H_kv, columns, D): sum of w x over rows and the group's heads; w (b, H, rows, columns), x (b, H, rows, D)."""
    seen = None if visible is None else by_kv_head(visible, num_heads_kv).transpose(-1, -2)
    return weighted_sum(by_kv_head(w, num_heads_kv).transpose(-1, -2), by_kv_head(x, num_heads_kv), seen)


def weighted_sum(w: Tensor, x: Tensor, visible: Tensor | None) -> Tensor:
    """w @ x, where an entry of x that is not finite reaches exactly the sums that see it.

    w is 0 where `visible` is False. `visible` is None when x is known to be finite: then it is one product.
    The rest is arithmetic of infinities counted by products of zeros and ones, so that 0 * NaN never happens.
    """
    if visible is None:
        return torch.matmul(w, x)
    bad = ~torch.isfinite(x)
    total = torch.matmul(w, x.masked_fill(bad, 0))

    def meets(chosen: Tensor, values: Tensor) -> Tensor:
        return torch.matmul(chosen.to(x.dtype), values.to(x.dtype)) > 0

    above, below = x == math.inf, x == -math.inf
    up = meets(w > 0, above) | meets(w < 0, below)
    down = meets(w > 0, below) | meets(w < 0, above)
    neither = meets(visible, torch.isnan(x)) | meets(visible & (w == 0), above | below) | (up & down)
    total = torch.where(up, math.inf, torch.where(down, -math.inf, total))
    return torch.where(neither, math.nan, total)


def capturing(device: torch.device) -> bool:
    """True inside a CUDA graph capture, where nothing may be read on the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def all_finite(*tensors: Tensor | None) -> bool:
    """False if an entry may be NaN or infinite (sums overflow only towards False). Reads one number per tensor;
    under graph capture nothing is read and the answer is False, which is always right and costs time only."""
    if any(t is not None and capturing(t.device) for t in tensors):
        return False
    return all(t is None or bool(torch.isfinite(t.sum(dtype=_wide(t)))) for t in tensors)


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
