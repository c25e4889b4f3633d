"""A small picture of the tiles that a plan visits, drawn with characters: empty, partial, full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.cli.problem_flags import Sizes, parse_mask
from tilewise.cli.terminal import characters
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.tiles import EMPTY, FULL, PARTIAL, TileGrid, classify_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.plan import Plan

LINES, CHARACTERS = 32, 64
"""The picture's size at most; a character is twice as high as wide."""
WIDEST_CELL = 4


def draw(plan: Plan, sizes: Sizes, q_offset: int | None) -> tuple[list[str], str]:
    """(lines, legend) of the plan's tiles, batch entries and heads laid over each other; no lines without a plan."""
    if plan.schedule is None:
        return [], ""
    block = (
        min(max(plan.schedule.block_q, 1), sizes.seqlen_q),
        min(max(plan.schedule.block_k, 1), sizes.seqlen_k),
    )
    cells, (down, across) = shrink(tile_classes(block, sizes, q_offset), block)
    width = round(2 * across * block[1] / (down * block[0]))
    width = max(1, min(width, CHARACTERS // cells.shape[1], WIDEST_CELL))
    marks = characters("·░█", ".+#")
    lines = ["".join(marks[kind] * width for kind in row) for row in cells.tolist()]
    one = f"{width} characters are a tile" if width > 1 else "a character is a tile"
    cell = one if down == across == 1 else f"{one.removesuffix(' a tile')} {down} x {across} tiles"
    legend = f"{marks[FULL]} full   {marks[PARTIAL]} partial   {marks[EMPTY]} empty, skipped"
    return lines, f"{legend}   (queries down, keys across; {cell})"


def tile_classes(block: tuple[int, int], sizes: Sizes, q_offset: int | None) -> Tensor:
    """Class of every tile of block[0] queries x block[1] keys, (query tiles, key tiles) uint8."""
    offset = sizes.seqlen_k - sizes.seqlen_q if q_offset is None else q_offset
    grid = TileGrid(
        *block, sizes.seqlen_q, sizes.seqlen_k, q_offset_lo=offset, q_offset_hi=offset, b_hi=sizes.batch - 1,
        num_heads_q=sizes.heads, num_heads_kv=sizes.heads_kv,
    )  # fmt: skip
    mask = parse_mask(sizes.mask).build(sizes.seqlen_q, sizes.seqlen_k)
    if mask is None or mask.term is None:
        return classify_tiles(None, grid, (), (), ())
    spec = AttentionSpec.parse(spec_text(mask, (), False, False))
    return classify_tiles(spec.keep, grid, mask.term.leaves, mask.term.ints, mask.term.floats)


def shrink(classes: Tensor, block: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """(classes of cells, tiles in a cell down and across); EMPTY or FULL if all its tiles are, else PARTIAL."""
    down = -(-classes.shape[0] // LINES)
    # Cells about half as wide as high, in tokens: a causal mask looks like a triangle with equal sides.
    across = max(-(-classes.shape[1] // CHARACTERS), round(down * block[0] / block[1] / 2), 1)
    shape = -(-classes.shape[0] // down), -(-classes.shape[1] // across)
    cells = torch.empty(shape, dtype=torch.uint8)
    for n, band in enumerate(classes.split(down, 0)):
        for m, part in enumerate(band.split(across, 1)):
            lowest, highest = int(part.min()), int(part.max())
            cells[n, m] = lowest if lowest == highest else PARTIAL
    return cells, (down, across)
