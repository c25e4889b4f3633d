"""The walk over a call's tiles: sizes, order, classes, and the cuts of its tensors.

Tile sizes are a function of the shape alone; tiles that the mask hides altogether are not visited.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.reference import tile as t
from tilewise.backends.reference.pages import Pages
from tilewise.backends.reference.segments import Segment, segments, uniform
from tilewise.backends.reference.tile import TileFold
from tilewise.problem import Inputs, Problem
from tilewise.spec.expression import loads
from tilewise.spec.tiles import EMPTY, FULL, PARTIAL, TileGrid, classify_tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKSPACE_ELEMENTS = 1 << 22
"""Scores of one tile over all its heads and batch entries: 16 MiB in float32."""


class Blocks(NamedTuple):
    """Tile sizes and how many batch entries go through one product."""

    block_q: int
    block_k: int
    entries: int


def choose_blocks(problem: Problem) -> Blocks:
    """Sizes from the shape alone, so that results repeat bit by bit.

    256 x 512 keeps the products efficient and a tile of eight heads in a second-level cache
    (measured among 64..512 x 128..1024 on two CPU cores); many heads shrink it to the workspace.
    """
    heads = max(problem.shape.num_heads_q, 1)
    block_q, block_k = 256, 512
    while heads * block_q * block_k > WORKSPACE_ELEMENTS and block_q > 32:
        block_q //= 2
    while heads * block_q * block_k > WORKSPACE_ELEMENTS and block_k > 64:
        block_k //= 2
    if problem.options.batch_invariant or problem.options.layout == "varlen" or problem.options.pages:
        return Blocks(block_q, block_k, 1)
    rows = min(block_q, max(problem.shape.seqlen_q, 1))
    columns = min(block_k, max(problem.shape.seqlen_k, 1))
    entries = WORKSPACE_ELEMENTS // (heads * rows * columns)
    # Vector code treats the end of an array apart: whole multiples keep an entry's bits where a call is cut.
    return Blocks(block_q, block_k, entries // 64 * 64 if entries >= 64 else max(entries, 1))


def span(offset: int | Tensor) -> tuple[int, int]:
    """Least and greatest offset of a segment."""
    if not isinstance(offset, Tensor):
        return int(offset), int(offset)
    low, high = torch.aminmax(offset)
    return int(low), int(high)


def tile_classes(
    problem: Problem, inputs: Inputs, segment: Segment, blocks: Blocks
) -> list[list[int]] | None:
    """EMPTY, PARTIAL or FULL for each tile of a segment; None if there is no mask."""
    if problem.spec.keep is None:
        return None
    if t.capturing(inputs.q.device) and _needs_host(problem, inputs):
        rows, columns = -(-segment.seqlen_q // blocks.block_q), -(-segment.seqlen_k // blocks.block_k)
        return [[PARTIAL] * columns] * rows
    q_low, q_high = span(segment.q_offset)
    k_low, k_high = span(segment.k_offset)
    grid = TileGrid(
        blocks.block_q, blocks.block_k, segment.seqlen_q, segment.seqlen_k, q_low, q_high, k_low, k_high,
        segment.first_batch, segment.first_batch + segment.entries - 1,
        problem.shape.num_heads_q, problem.shape.num_heads_kv,
    )  # fmt: skip
    return classify_tiles(problem.spec.keep, grid, inputs.leaves, inputs.ints, inputs.floats).tolist()


def _needs_host(problem: Problem, inputs: Inputs) -> bool:
    """Whether classifying tiles reads tensors: the mask's leaves, or offsets given as tensors."""
    tensors = isinstance(inputs.q_offset, Tensor) or isinstance(inputs.k_offset, Tensor)
    return tensors or (problem.spec.keep is not None and bool(loads(problem.spec.keep)))


class Walk:
    """Visits the tiles of a call in the order of the schedule, and cuts its tensors to them."""

    def __init__(self, problem: Problem, inputs: Inputs, dots: tuple[Tensor | None, ...] = ()) -> None:
        self.problem, self.inputs = problem, inputs
        self.blocks = choose_blocks(problem)
        self.fold = TileFold(problem, inputs, dots)
        self.dtype = problem.compute_dtype
        self.heads_kv = problem.shape.num_heads_kv
        self.q, self.k, self.v = (uniform(problem, x) for x in (inputs.q, inputs.k, inputs.v))
        self.pages = Pages(problem, inputs) if problem.options.pages else None

    def segments(self) -> Iterator[Segment]:
        return segments(self.problem, self.inputs, self.blocks.entries)

    def row_tiles(
        self, segment: Segment
    ) -> Iterator[tuple[tuple[int, int], list[tuple[tuple[int, int], int]]]]:
        """Each range of rows with its ranges of columns and their classes, EMPTY ones left out."""
        classes = tile_classes(self.problem, self.inputs, segment, self.blocks) if segment.seqlen_k else None
        columns = _ranges(segment.seqlen_k, self.blocks.block_k)
        # Padding is cut off; a class of the whole tile holds for what is left of it.
        columns = [(max(start, min(segment.first_key, stop)), stop) for start, stop in columns]
        for n, rows in enumerate(_ranges(segment.seqlen_q, self.blocks.block_q)):
            kinds = [FULL] * len(columns) if classes is None else classes[n]
            pairs = zip(columns, kinds, strict=True)
            yield rows, [(c, kind) for c, kind in pairs if kind != EMPTY and c[0] < c[1]]

    def cut_rows(self, x: Tensor, segment: Segment, rows: tuple[int, int]) -> Tensor:
        """Part of a q-, out- or lse-like (B, H, N, ...) view."""
        return x[segment.batch, :, segment.rows.start + rows[0] : segment.rows.start + rows[1]]

    def _cut_columns(self, x: Tensor, segment: Segment, columns: tuple[int, int]) -> Tensor:
        """Part of a k- or v-like (B, H_kv, N, ...) view."""
        return x[segment.batch, :, segment.keys.start + columns[0] : segment.keys.start + columns[1]]

    def keys(self, x: Tensor, segment: Segment, columns: tuple[int, int]) -> Tensor:
        """Columns of a k-like tensor in the compute type, (b, H_kv, columns, D), as the call means them: scaled."""
        return self._read(x, segment, columns, self.inputs.k_scale)

    def values(self, x: Tensor, segment: Segment, columns: tuple[int, int]) -> Tensor:
        """The same of a v-like tensor."""
        return self._read(x, segment, columns, self.inputs.v_scale)

    def _read(self, x: Tensor, segment: Segment, columns: tuple[int, int], scale: Tensor | None) -> Tensor:
        if self.pages is None:
            return self.wide(self._cut_columns(x, segment, columns))
        return self.pages.read(x, segment, columns, scale)

    def add_keys(self, total: Tensor, segment: Segment, columns: tuple[int, int], tile: Tensor) -> None:
        """Add a tile of dk to dk, which has k's shape."""
        self._add(total, segment, columns, tile, self.inputs.k_scale)

    def add_values(self, total: Tensor, segment: Segment, columns: tuple[int, int], tile: Tensor) -> None:
        """The same of dv."""
        self._add(total, segment, columns, tile, self.inputs.v_scale)

    def _add(
        self, total: Tensor, segment: Segment, columns: tuple[int, int], tile: Tensor, scale: Tensor | None
    ) -> None:
        if self.pages is None:
            self._cut_columns(uniform(self.problem, total), segment, columns).add_(tile)
        else:
            self.pages.add(total, segment, columns, tile, scale)

    def wide(self, x: Tensor) -> Tensor:
        """A tile in the compute type, contiguous: the products then do not depend on the caller's strides."""
        return x.to(self.dtype, memory_format=torch.contiguous_format).contiguous()


def _ranges(length: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def tile_scores(walk: Walk, q: Tensor, k: Tensor, kind: int) -> Tensor:
    """Scores after terms and masks, natural units; q carries the scale. -inf = hidden."""
    s = t.scores(q, k)
    if walk.fold.trees.has_terms:
        s = walk.fold.trees.score(walk.fold.env(s=s))[0].expand_as(s)
    return hide(walk, s, kind)


def hide(walk: Walk, s: Tensor, kind: int) -> Tensor:
    """-inf where the mask hides the pair; FULL tiles are left alone."""
    if kind == FULL:
        return s
    hidden = walk.fold.hidden()
    return s if hidden is None else s.masked_fill(hidden, -math.inf)


def drop(dp: Tensor, factor: Tensor | None) -> Tensor:
    """dp of dropped weights is 0, whatever v holds there."""
    return dp if factor is None else torch.where(factor != 0, dp * factor, 0.0)


def absorb_sink(m: Tensor, l: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: E741
    """(m, l, alpha) after one more key per head whose logit is `sink`; alpha rescales what was summed before."""
    logit = sink.to(m.dtype).view(1, -1, 1)
    top = torch.maximum(m, logit)
    pivot = top.masked_fill(top == -math.inf, 0.0)
    alpha = torch.exp2((m - pivot) * t.LOG2E)
    # A sink that is all a row has weighs 1, infinite as it may be; beside keys, an infinite one is an infinite score.
    below = (logit - pivot).masked_fill((logit == math.inf) & (m == -math.inf), 0.0)
    return top, l * alpha + torch.exp2(below * t.LOG2E), alpha


def sink_weight(sink: Tensor, m: Tensor, low: Tensor) -> Tensor:
    """The sink's weight in each row of these statistics, in which it is. Where it is infinite so is m, and `low` tells
    whether there were keys beside it."""
    logit = sink.to(m.dtype).view(1, -1, 1)
    below = (logit - m).masked_fill(logit == math.inf, 0.0)
    return torch.exp2(below * t.LOG2E - low).masked_fill(logit == -math.inf, 0.0)
