"""The interval form of a mask: which tiles of pairs are EMPTY, PARTIAL or FULL, without looking at the pairs.

A tile is a run of rows times a run of columns, over a range of batch entries and all heads. Its class is an
over-approximation: EMPTY means no pair is visible, FULL that every pair is; PARTIAL promises nothing. All
tiles of a call are classified at once, in O(tiles + leaf elements) and without anything of the size of the
scores. Leaves are summarised where they live; only tables of one entry per block come to the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.spec import expression as ex
from tilewise.spec.interval import Interval, evaluate, everything, float_interval, int_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

EMPTY, PARTIAL, FULL = 0, 1, 2

_ROW, _COLUMN = ex.variable("i"), ex.variable("j")


@dataclass(frozen=True)
class TileGrid:
    """How a call's pairs are cut into tiles.

    Row i has position i + offset, where the offset is somewhere in q_offset_lo..q_offset_hi (it may differ
    per batch entry); columns likewise. Batch entries b_lo..b_hi inclusive. The last tiles may be ragged.
    Of the tiles along the rows those from slab_first to slab_stop are looked at; slab_stop 0: all of them.
    """

    block_q: int
    block_k: int
    seqlen_q: int
    seqlen_k: int
    q_offset_lo: int = 0
    q_offset_hi: int = 0
    k_offset_lo: int = 0
    k_offset_hi: int = 0
    b_lo: int = 0
    b_hi: int = 0
    num_heads_q: int = 1
    num_heads_kv: int = 1
    slab_first: int = 0
    slab_stop: int = 0

    @property
    def num_q_tiles(self) -> int:
        """Tiles along the rows."""
        return (self.slab_stop or -(-self.seqlen_q // self.block_q)) - self.slab_first

    @property
    def num_k_tiles(self) -> int:
        """Tiles along the columns."""
        return -(-self.seqlen_k // self.block_k)

    def rows(self) -> Interval:
        """First and last row of each tile, (num_q_tiles, 1)."""
        rows = _blocks(self.seqlen_q, self.block_q, (-1, 1))
        slab = slice(self.slab_first, self.slab_stop or None)
        return Interval(rows.lo[slab], rows.hi[slab])

    def slabs(self, most: int) -> Iterator[TileGrid]:
        """The grid in slabs of about so many tiles, for who looks at one after another."""
        step = max(most // max(self.num_k_tiles, 1), 1)
        for first in range(0, self.num_q_tiles, step):
            yield replace(self, slab_first=first, slab_stop=min(first + step, self.num_q_tiles))

    def columns(self) -> Interval:
        """First and last column of each tile, (1, num_k_tiles)."""
        return _blocks(self.seqlen_k, self.block_k, (1, -1))

    def variables(self) -> dict[str, Interval]:
        """The range of every variable a mask may read, over each tile."""
        i, j = self.rows(), self.columns()
        return {
            "i": i,
            "j": j,
            "q": int_interval(i.lo + self.q_offset_lo, i.hi + self.q_offset_hi),
            "k": int_interval(j.lo + self.k_offset_lo, j.hi + self.k_offset_hi),
            "b": Interval(_number(self.b_lo), _number(self.b_hi)),
            "h": Interval(_number(0), _number(self.num_heads_q - 1)),
            "g": Interval(_number(0), _number(self.num_heads_kv - 1)),
        }


def _number(value: int) -> Tensor:
    return torch.tensor(value, device="cpu")


def _blocks(length: int, block: int, shape: tuple[int, int]) -> Interval:
    first = torch.arange(0, length, block, device="cpu")
    return Interval(first.reshape(shape), (first + block - 1).clamp(max=length - 1).reshape(shape))


def bounds(
    root: ex.Node, tiles: TileGrid, leaves: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> Interval:
    """Bounds of any tree over each tile; arguments as for `classify_tiles`."""

    def load(node: ex.Node, indices: tuple[Interval, ...]) -> Interval:
        return _load(leaves[int(node.value)].detach(), node, indices, tiles)  # type: ignore[arg-type]

    return evaluate(root, tiles.variables(), ints, floats, load)


def classify_tiles(
    keep: ex.Node | None,
    tiles: TileGrid,
    leaves: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
) -> Tensor:
    """Class of every tile.

    Args:
        keep: the mask; None hides nothing.
        tiles: the grid.
        leaves, ints, floats: the mask's data by slot, as the spec numbers them. A leaf on a GPU costs one
            transfer of its table; a leaf on the meta device counts as unknown.

    Returns: (num_q_tiles, num_k_tiles) uint8 on the CPU, of EMPTY, PARTIAL, FULL.
    """
    shape = (tiles.num_q_tiles, tiles.num_k_tiles)
    if keep is None or 0 in shape:
        return torch.full(shape, FULL, dtype=torch.uint8, device="cpu")
    with torch.no_grad():
        visible = bounds(keep, tiles, leaves, ints, floats)
        classes = visible.hi.to(torch.uint8) + visible.lo.to(torch.uint8)
    return classes.expand(shape).contiguous()


def census(classes: Tensor) -> tuple[int, int, int]:
    """Numbers of (EMPTY, PARTIAL, FULL) tiles."""
    empty, partial, full = torch.bincount(classes.flatten().long(), minlength=3).tolist()
    return empty, partial, full


def visible_pairs(classes: Tensor, tiles: TileGrid) -> tuple[int, int]:
    """Bounds on the visible pairs of one head and batch entry: in FULL tiles, in tiles not EMPTY."""
    i, j = tiles.rows(), tiles.columns()
    pairs = (i.hi - i.lo + 1) * (j.hi - j.lo + 1)
    return int(pairs[classes == FULL].sum()), int(pairs[classes != EMPTY].sum())


# ---- leaves ------------------------------------------------------------------------------------------------


def _load(leaf: Tensor, node: ex.Node, indices: tuple[Interval, ...], tiles: TileGrid) -> Interval:
    """Bounds of a leaf's elements at the indices of each tile."""
    if leaf.device.type == "meta" or leaf.numel() == 0:
        return everything(node.type)
    indices = tuple(Interval(*torch.broadcast_tensors(index.lo, index.hi)) for index in indices)
    if leaf.is_floating_point() and leaf.element_size() == 1:
        leaf = leaf.to(torch.float32)
    if leaf.dtype in (torch.uint16, torch.uint32, torch.uint64):
        leaf = leaf.to(torch.int64)  # torch finds no extremes of these
    leaf, kept, constant = _restrict(leaf, indices)
    lo = leaf.amin(constant) if constant else leaf
    hi = leaf.amax(constant) if constant else leaf
    # Rows and columns are reduced per block where the leaf lives, so that only small tables travel.
    blocks = {_ROW: (tiles.seqlen_q, tiles.block_q), _COLUMN: (tiles.seqlen_k, tiles.block_k)}
    for dim, n in enumerate(kept):
        if node.args[n] in blocks:
            lo = _block_extreme(lo, dim, *blocks[node.args[n]], torch.amin)
            hi = _block_extreme(hi, dim, *blocks[node.args[n]], torch.amax)
            if node.args[n] is _ROW:
                lo, hi = (t.narrow(dim, tiles.slab_first, tiles.num_q_tiles) for t in (lo, hi))
    dtype = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}[node.type]
    lo, hi = torch.stack((lo, hi)).to(dtype).cpu()
    for dim, n in enumerate(kept):
        if node.args[n] not in blocks:
            lo = _range_extreme(lo, dim, indices[n], torch.minimum)
            hi = _range_extreme(hi, dim, indices[n], torch.maximum)
    lo, hi = (_over_tiles(t, [indices[n] for n in kept]) for t in (lo, hi))
    if node.type == "bool":
        return Interval(lo, hi)
    return int_interval(lo, hi) if node.type == "int" else float_interval(lo, hi)


def _restrict(leaf: Tensor, indices: tuple[Interval, ...]) -> tuple[Tensor, list[int], list[int]]:
    """The elements the call can reach; dimensions that vary from tile to tile; the others.

    A dimension varies by rows, by columns, or by both. What varies in two dimensions along one axis of the
    tiles is kept once; the other dimension counts with all that is reached.
    """
    kept: list[int] = []
    constant: list[int] = []
    taken: set[int] = set()
    for dim, index in enumerate(indices):
        last = leaf.shape[dim] - 1
        axes = {axis for axis in range(index.lo.ndim) if index.lo.shape[axis] > 1}
        if last > 0 and axes and not axes & taken:
            kept.append(dim)
            taken |= axes
            continue
        constant.append(dim)
        first = min(max(int(index.lo.min()), 0), last)
        leaf = leaf.narrow(dim, first, min(max(int(index.hi.max()), 0), last) - first + 1)
    return leaf, kept, constant


def _block_extreme(table: Tensor, dim: int, length: int, block: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Extreme of each run of `block` entries along a dimension, for indices 0..length-1."""
    size = table.shape[dim]
    if size < length:
        # An index past the end reads the last element.
        table = table.index_select(dim, torch.arange(length, device=table.device).clamp(max=size - 1))
    whole = length // block * block
    parts = []
    if whole:
        parts.append(reduce(table.narrow(dim, 0, whole).unflatten(dim, (-1, block)), dim + 1))
    if length > whole:
        parts.append(reduce(table.narrow(dim, whole, length - whole), dim, keepdim=True))
    return torch.cat(parts, dim)


def _range_extreme(table: Tensor, dim: int, index: Interval, extreme: Callable[..., Tensor]) -> Tensor:
    """Extreme of the entries index.lo..index.hi (clamped) along a dimension, for every tile of the index.

    Level p holds the extremes of 2^p entries from each place on; any range is covered by two of one level.
    """
    table = table.movedim(dim, 0)
    last = table.shape[0] - 1
    lo, hi = index.lo.squeeze().clamp(0, last), index.hi.squeeze().clamp(0, last)
    level = torch.frexp((hi - lo + 1).double())[1].long() - 1
    levels = [table]
    for p in range(int(level.max())):
        previous = levels[-1]
        later = torch.arange(last + 1, device=table.device).add(2**p).clamp(max=last)
        levels.append(extreme(previous, previous[later]))
    stacked = torch.stack(levels)
    found = extreme(stacked[level, lo], stacked[level, hi - 2**level + 1])
    return found.movedim(0, dim) if lo.ndim == 1 else found


def _over_tiles(table: Tensor, indices: list[Interval]) -> Tensor:
    """The table, whose dimensions follow `indices`, as it broadcasts over (num_q_tiles, num_k_tiles)."""
    if table.ndim == len(indices) == 1:
        return table[:, None] if indices[0].lo.shape[0] > 1 else table[None, :]
    return table.mT if len(indices) == 2 and indices[0].lo.shape[0] == 1 else table
