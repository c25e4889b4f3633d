"""Score terms of the conformance cases, each as the library's object and as a dense formula written by hand
on a `Grid`.

`score(s, grid, *leaves)` takes the scores (B, H, Nq, Nk) after the terms before it and returns the new ones;
it is differentiable in s and in the float leaves. Every float leaf gets a gradient in the suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.testing.cases_masks import Draw, no_leaves
from tilewise.testing.grid import Grid, gather


def _tw() -> Any:
    import tilewise

    return tilewise


@dataclass(frozen=True)
class ScoreFeature:
    """name; make(*leaves) -> tilewise score term; score(s, grid, *leaves) -> s; draw(Draw) -> leaves."""

    name: str
    make: Callable[..., Any]
    score: Callable[..., Tensor]
    draw: Callable[[Draw], tuple[Tensor, ...]] = no_leaves
    pairwise: bool = (
        False  # its one leaf has a cell for every (b, h, i, j): cells of hidden pairs can be poisoned
    )
    positional: bool = True


def _add_bias(s: Tensor, grid: Grid, t: Tensor) -> Tensor:
    return s + gather(t, grid.b, grid.h, grid.i, grid.j)


def _bias(
    name: str, pick: Callable[[Draw], tuple[int, int, int, int]], pairwise: bool = False
) -> ScoreFeature:
    return ScoreFeature(
        name,
        lambda t: _tw().bias(t),
        _add_bias,
        lambda d: (d.normal(*pick(d)).to(d.dtype),),
        pairwise=pairwise,
        positional=False,
    )


BIAS_FULL = _bias("bias_full", lambda d: (d.batch, d.heads[0], *d.lengths), pairwise=True)
BIAS_HEAD = _bias("bias_head", lambda d: (1, d.heads[0], *d.lengths))
BIAS_COLUMN = _bias("bias_column", lambda d: (d.batch, 1, 1, d.lengths[1]))
BIAS_ROW = _bias("bias_row", lambda d: (1, d.heads[0], d.lengths[0], 1))
BIAS_SCALAR = _bias("bias_scalar", lambda d: (1, 1, 1, 1))


def _hiding(d: Draw) -> tuple[Tensor]:
    t = d.normal(d.batch, 1, *d.lengths)
    t[d.coins(0.4, *t.shape)] = -math.inf
    return (t.to(d.dtype),)


BIAS_HIDING = ScoreFeature("bias_minus_inf", lambda t: _tw().bias(t), _add_bias, _hiding, positional=False)


def _slopes(d: Draw, *size: int) -> Tensor:
    return (d.normal(*size).abs() * 0.2 + 0.05).to(d.leaf_dtype)


def _alibi(s: Tensor, grid: Grid, m: Tensor) -> Tensor:
    slope = gather(m, grid.h) if m.ndim == 1 else gather(m, grid.b, grid.h)
    return s - slope * (grid.q - grid.k).abs()


ALIBI = ScoreFeature("alibi", lambda m: _tw().alibi(m), _alibi, lambda d: (_slopes(d, d.heads[0]),))
ALIBI_BATCH = ScoreFeature(
    "alibi_batch", lambda m: _tw().alibi(m), _alibi, lambda d: (_slopes(d, d.batch, d.heads[0]),)
)


def softcap(c: float) -> ScoreFeature:
    """c * tanh(s / c)."""
    return ScoreFeature(f"softcap_{c:g}", lambda: _tw().softcap(c), lambda s, grid: c * torch.tanh(s / c))


def relative(radius: int) -> ScoreFeature:
    """table[h, clamp(k - q, -R, R) + R]."""

    def score(s: Tensor, grid: Grid, table: Tensor) -> Tensor:
        return s + gather(table, grid.h, (grid.k - grid.q).clamp(-radius, radius) + radius)

    return ScoreFeature(
        f"relative_{radius}",
        lambda table: _tw().relative(table),
        score,
        lambda d: (d.normal(d.heads[0], 2 * radius + 1).to(d.leaf_dtype),),
    )


def _bucketed(s: Tensor, grid: Grid, table: Tensor, bucket: Tensor) -> Tensor:
    reach = bucket.shape[0] // 2
    return s + gather(table, grid.h, gather(bucket, (grid.k - grid.q).clamp(-reach, reach) + reach).long())


RELATIVE_BUCKET = ScoreFeature(
    "relative_bucket",
    lambda table, bucket: _tw().relative(table, bucket),
    _bucketed,
    lambda d: (d.normal(d.heads[0], 5).to(d.leaf_dtype), d.integers(0, 5, 15).to(torch.int32)),
)


def _head_slope(s: Any, h: Any, q: Any, k: Any, slope: Any) -> Any:
    return s - slope[h] * abs(q - k)


CUSTOM_SLOPE = ScoreFeature(
    "custom_slope",
    lambda slope: _tw().custom_score(_head_slope, slope),
    lambda s, grid, slope: s - gather(slope, grid.h) * (grid.q - grid.k).abs(),
    lambda d: (_slopes(d, d.heads[0]),),
)


def _gate(s: Any, h: Any, q: Any, k: Any, gain: Any) -> Any:
    return _tw().where((q + k) % 2 == 0, s * gain[h], s * s * 0.25 - s)


CUSTOM_GATE = ScoreFeature(
    "custom_gate",
    lambda gain: _tw().custom_score(_gate, gain),
    lambda s, grid, gain: torch.where(
        torch.remainder(grid.q + grid.k, 2) == 0, s * gather(gain, grid.h), s * s * 0.25 - s
    ),
    lambda d: ((d.normal(d.heads[0]).abs() + 0.5).to(d.leaf_dtype),),
)


def _row_and_column(s: Any, b: Any, h: Any, i: Any, j: Any, row: Any, column: Any) -> Any:
    return s + row[b, i] * column[h, j]


CUSTOM_OUTER = ScoreFeature(
    "custom_row_column",
    lambda row, column: _tw().custom_score(_row_and_column, row, column),
    lambda s, grid, row, column: s + gather(row, grid.b, grid.i) * gather(column, grid.h, grid.j),
    lambda d: (
        d.normal(d.batch, d.lengths[0]).to(d.leaf_dtype),
        d.normal(d.heads[0], d.lengths[1]).to(d.leaf_dtype),
    ),
    positional=False,
)


def _scattered(s: Any, q: Any, k: Any, g: Any, table: Any) -> Any:
    return s + table[g, (q * 3 + k * 5) % 7]


CUSTOM_SCATTER = ScoreFeature(  # any other gather: no ordered reduction fits its gradient
    "custom_scatter",
    lambda table: _tw().custom_score(_scattered, table),
    lambda s, grid, table: s + gather(table, grid.g, torch.remainder(grid.q * 3 + grid.k * 5, 7)),
    lambda d: (d.normal(d.heads[1], 7).to(d.leaf_dtype),),
)


def _smooth(s: Any, q: Any, k: Any, c: Any) -> Any:
    return _tw().minimum(s, c[0]) + _tw().tanh(s) * _tw().exp2(-abs(q - k) / 8)


CUSTOM_WORDS = ScoreFeature(
    "custom_words",
    lambda c: _tw().custom_score(_smooth, c),
    lambda s, grid, c: (
        torch.where(s <= c[0], s, c[0]) + torch.tanh(s) * torch.exp2(-(grid.q - grid.k).abs().to(c.dtype) / 8)
    ),
    lambda d: (torch.tensor([0.7], dtype=d.leaf_dtype),),
)


def _grouped(s: Any, g: Any, h: Any, w: Any) -> Any:
    return s * w[g] + h


CUSTOM_GROUP = ScoreFeature(
    "custom_group",
    lambda w: _tw().custom_score(_grouped, w),
    lambda s, grid, w: s * gather(w, grid.g) + grid.h,
    lambda d: ((d.normal(d.heads[1]).abs() + 0.5).to(d.leaf_dtype),),
)
