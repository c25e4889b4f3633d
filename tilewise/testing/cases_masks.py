"""Masks of the conformance cases, each in two forms: the library's object and a dense formula written by hand
on a `Grid`.

A `MaskFeature` holds no tensors. `draw` makes the leaf values from a seeded generator; `make` builds the
library's mask from leaves; `keep` and `padding` say which pairs may attend. Padding is held apart because `|`
and `~` never reveal it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewise.testing.grid import Grid, gather


@dataclass(frozen=True)
class Draw:
    """What a feature may draw its leaves from: a seeded generator, the sizes and the problem's dtype."""

    generator: torch.Generator
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    dtype: torch.dtype

    @property
    def leaf_dtype(self) -> torch.dtype:
        """dtype of small float leaves (slopes, tables, sinks): float64 for float64 problems, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        """Uniform int64 in [low, high)."""
        return torch.randint(low, max(high, low + 1), size, generator=self.generator)

    def coins(self, chance: float, *size: int) -> Tensor:
        """True with the given chance."""
        return torch.rand(*size, generator=self.generator, dtype=torch.float64) < chance


def no_leaves(draw: Draw) -> tuple[Tensor, ...]:
    """The leaves of a feature without any."""
    return ()


@dataclass(frozen=True)
class MaskFeature:
    """name; draw(Draw) -> leaves; make(*leaves) -> tilewise mask; keep(grid, *leaves) -> bool; padding(grid,
    *leaves) -> bool.
    """

    name: str
    make: Callable[..., Any]
    keep: Callable[..., Tensor]
    draw: Callable[[Draw], tuple[Tensor, ...]] = no_leaves
    padding: Callable[..., Tensor] | None = None
    leaf_count: int = 0
    causal: bool = False  # no query sees a key at a later position
    positional: bool = True  # False: rows, columns or per-batch tensors, so a key shard must slice its leaves

    def dense(self, grid: Grid, leaves: tuple[Tensor, ...]) -> Tensor:
        """Pairs that may attend, bool, expanded to (B, H, Nq, Nk)."""
        keep = self.keep(grid, *leaves).expand(grid.shape)
        return keep if self.padding is None else keep & self.padding(grid, *leaves)


def _pair(
    name: str, left: MaskFeature, right: MaskFeature, combine: Callable[[Any, Any], Any]
) -> MaskFeature:
    cut = left.leaf_count

    def padding(grid: Grid, *leaves: Tensor) -> Tensor:
        seen = torch.ones(grid.shape, dtype=torch.bool)
        for part, own in ((left, leaves[:cut]), (right, leaves[cut:])):
            if part.padding is not None:
                seen = seen & part.padding(grid, *own)
        return seen

    return MaskFeature(
        name,
        make=lambda *leaves: combine(left.make(*leaves[:cut]), right.make(*leaves[cut:])),
        keep=lambda grid, *leaves: combine(left.keep(grid, *leaves[:cut]), right.keep(grid, *leaves[cut:])),
        draw=lambda d: left.draw(d) + right.draw(d),
        padding=padding,
        leaf_count=cut + right.leaf_count,
        positional=left.positional and right.positional,
    )


def both(left: MaskFeature, right: MaskFeature, name: str = "") -> MaskFeature:
    """left & right, in the library's operators and in the formula."""
    feature = _pair(name or f"{left.name}_and_{right.name}", left, right, lambda a, b: a & b)
    return replace(feature, causal=left.causal or right.causal)


def either(left: MaskFeature, right: MaskFeature, name: str = "") -> MaskFeature:
    """left | right; padding of both sides stays ANDed."""
    return _pair(name or f"{left.name}_or_{right.name}", left, right, lambda a, b: a | b)


def negated(inner: MaskFeature, name: str = "") -> MaskFeature:
    """~inner; padding stays ANDed."""
    return replace(
        inner,
        name=name or f"not_{inner.name}",
        make=lambda *leaves: ~inner.make(*leaves),
        keep=lambda grid, *leaves: ~inner.keep(grid, *leaves),
        causal=False,
    )


def _tw() -> Any:
    import tilewise  # the public names, looked up late: this module is imported by tools that only list cases

    return tilewise


CAUSAL = MaskFeature("causal", lambda: _tw().causal(), lambda grid: grid.k <= grid.q, causal=True)


def window(left: int | None, right: int | None) -> MaskFeature:
    """q - left <= k <= q + right; None is unbounded."""

    def keep(grid: Grid) -> Tensor:
        low = grid.k >= grid.q - left if left is not None else grid.k == grid.k
        high = grid.k <= grid.q + right if right is not None else grid.q == grid.q
        return low & high

    words = ["inf" if x is None else str(x).replace("-", "m") for x in (left, right)]
    causal = right is not None and right <= 0
    return MaskFeature(
        f"window_{words[0]}_{words[1]}", lambda: _tw().window(left, right), keep, causal=causal
    )


def prefix(n: int) -> MaskFeature:
    """k < n."""
    return MaskFeature(f"prefix_{n}", lambda: _tw().prefix(n), lambda grid: grid.k < n)


PREFIX_TENSOR = MaskFeature(
    "prefix_tensor",
    lambda n: _tw().prefix(n),
    lambda grid, n: grid.k < gather(n, grid.b),
    lambda d: (d.integers(0, d.lengths[1] + 1, d.batch).to(torch.int32),),
    leaf_count=1,
)


def sink_tokens(n: int) -> MaskFeature:
    """The first n positions."""
    return MaskFeature(f"sink_tokens_{n}", lambda: _tw().sink_tokens(n), lambda grid: grid.k < n)


def chunk(c: int) -> MaskFeature:
    """q // c == k // c, rounding down."""

    def keep(grid: Grid) -> Tensor:
        return torch.div(grid.q, c, rounding_mode="floor") == torch.div(grid.k, c, rounding_mode="floor")

    return MaskFeature(f"chunk_{c}", lambda: _tw().chunk(c), keep)


def _document_keep(grid: Grid, ids_q: Tensor, ids_k: Tensor) -> Tensor:
    left, right = gather(ids_q, grid.b, grid.i), gather(ids_k, grid.b, grid.j)
    return (left == right) & (left >= 0)


def _document_ids(d: Draw) -> tuple[Tensor, Tensor]:
    # Sorted so that documents are runs, with a few negative (hidden) rows and columns.
    ids_q = d.integers(-1, 4, d.batch, d.lengths[0]).sort(dim=1).values
    ids_k = d.integers(-1, 4, d.batch, d.lengths[1]).sort(dim=1).values
    return ids_q.to(torch.int32), ids_k.to(torch.int32)


DOCUMENT = MaskFeature(
    "document",
    lambda a, b: _tw().document(a, b),
    _document_keep,
    _document_ids,
    positional=False,
    leaf_count=2,
)
DOCUMENT_SELF = MaskFeature(
    "document_self",
    lambda ids: _tw().document(ids),
    lambda grid, ids: _document_keep(grid, ids, ids),
    lambda d: (d.integers(-1, 4, d.batch, d.lengths[0]),),
    positional=False,
    leaf_count=1,
)


def _always(grid: Grid, *leaves: Tensor) -> Tensor:
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def _lengths(d: Draw) -> tuple[Tensor]:
    lengths = d.integers(0, d.lengths[1] + 1, d.batch)
    if d.batch > 1:
        lengths[-1] = 0  # one sequence sees nothing at all
    return (lengths.to(torch.int32),)


PADDING_LENGTHS = MaskFeature(
    "padding_lengths",
    lambda n: _tw().key_padding(n),
    _always,
    _lengths,
    lambda grid, n: grid.j < gather(n, grid.b),
    positional=False,
    leaf_count=1,
)
PADDING_BOOL = MaskFeature(
    "padding_bool",
    lambda m: _tw().key_padding(m),
    _always,
    lambda d: (d.coins(0.6, d.batch, d.lengths[1]),),
    lambda grid, m: gather(m, grid.b, grid.j),
    positional=False,
    leaf_count=1,
)
DENSE_FULL = MaskFeature(
    "dense_full",
    lambda m: _tw().dense(m),
    lambda grid, m: gather(m, grid.b, grid.h, grid.i, grid.j),
    lambda d: (d.coins(0.5, d.batch, d.heads[0], *d.lengths),),
    positional=False,
    leaf_count=1,
)
DENSE_SHARED = MaskFeature(
    "dense_shared",
    lambda m: _tw().dense(m),
    lambda grid, m: gather(m, grid.b, grid.h, grid.i, grid.j),
    lambda d: (d.coins(0.3, 1, 1, *d.lengths),),
    positional=False,
    leaf_count=1,
)
DENSE_COLUMNS = MaskFeature(
    "dense_columns",
    lambda m: m,  # a bool tensor given as `mask` is dense
    lambda grid, m: gather(m, grid.b, grid.h, grid.i, grid.j),
    lambda d: (d.coins(0.5, d.batch, 1, 1, d.lengths[1]),),
    positional=False,
    leaf_count=1,
)


def block_sparse(block_q: int, block_k: int | None = None, *, by_head: bool = False) -> MaskFeature:
    """layout[i // block_q, j // block_k], or layout[b, h, ...] when by_head."""
    sizes = (block_q, block_q if block_k is None else block_k)

    def draw(d: Draw) -> tuple[Tensor]:
        blocks = [-(-n // size) for n, size in zip(d.lengths, sizes, strict=True)]
        return (d.coins(0.5, *((d.batch, d.heads[0]) if by_head else (1, 1)), *blocks),)

    return MaskFeature(
        "block_sparse_" + "x".join(map(str, sizes)) + "_by_head" * by_head,
        lambda layout: _tw().block_sparse(layout, block_q if block_k is None else sizes),
        lambda grid, layout: gather(layout, grid.b, grid.h, grid.i // sizes[0], grid.j // sizes[1]),
        draw,
        leaf_count=1,
        positional=False,
    )


def _dilated(q: Any, k: Any) -> Any:
    return (q - k) % 3 == 0


CUSTOM_DILATED = MaskFeature(
    "custom_dilated", lambda: _tw().custom(_dilated), lambda grid: torch.remainder(grid.q - grid.k, 3) == 0
)


def _head_reach(q: Any, k: Any, h: Any, reach: Any) -> Any:
    return abs(q - k) <= reach[h]


CUSTOM_HEAD_REACH = MaskFeature(
    "custom_head_reach",
    lambda reach: _tw().custom(_head_reach, reach),
    lambda grid, reach: (grid.q - grid.k).abs() <= gather(reach, grid.h),
    lambda d: (d.integers(0, 9, d.heads[0]).to(torch.int32),),
    leaf_count=1,
)
NOTHING = MaskFeature(
    "nothing", lambda: _tw().prefix(0) & _tw().causal(), lambda grid: (grid.k < 0) & (grid.k <= grid.q)
)
STREAMING = both(CAUSAL, either(window(7, 0), sink_tokens(2)), "streaming")
PREFIX_LM = either(CAUSAL, prefix(5), "prefix_lm")
