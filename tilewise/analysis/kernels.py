"""The kernels that ordinary attention is made of, on a memory of two levels: a product, and softmax over strips.

Each stands beside its price: the elements that it moves, from sizes and tiles alone. A product's tiles are those
of the textbook: a tile of the result stays while tiles of both factors pass. With one tile of the inner dimension
the left factor's tile stays as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.analysis.two_level import Range, Traffic, TwoLevelMemory, ranges

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Blocks", "Operand", "price_product", "price_rows", "run_product", "run_softmax"]


class Blocks(NamedTuple):
    """Tile of a product: rows and columns of the result, and the inner dimension."""

    rows: int
    columns: int
    inner: int


class Operand(NamedTuple):
    """A region of a stored matrix, as a factor or a result; `transposed` as the product sees it."""

    name: str
    rows: Range
    columns: Range
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns as the product sees them."""
        stored = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return stored[::-1] if self.transposed else stored

    def where(self, rows: Range, columns: Range) -> tuple[Range, Range]:
        """A part, given as the product sees it, in the indices of the stored matrix."""
        first, second = (columns, rows) if self.transposed else (rows, columns)
        a, b = self.rows[0], self.columns[0]
        return (first[0] + a, first[1] + a), (second[0] + b, second[1] + b)

    def tile(self, memory: TwoLevelMemory, rows: Range, columns: Range) -> Tensor:
        """A part, through the fast memory."""
        tile = memory.read(self.name, *self.where(rows, columns))
        return tile.mT if self.transposed else tile


def price_product(rows: int, columns: int, inner: int, blocks: Blocks, accumulate: bool = False) -> Traffic:
    """Traffic of ``result (rows, columns) = left (rows, inner) @ right (inner, columns)`` in these tiles.

    The left factor is read once if its rows fit whole, else for each tile of columns; the right one for each tile
    of rows; the result is written once, and read before if it is added to.
    """
    count = [-(-n // block) for n, block in zip((rows, columns, inner), blocks, strict=True)]
    left = rows * inner * (1 if count[2] == 1 else count[1])
    right = inner * columns * (1 if count[1] * count[2] == 1 else count[0])
    result = rows * columns
    return Traffic(left + right + accumulate * result, result)


def run_product(
    memory: TwoLevelMemory,
    result: Operand,
    factors: tuple[Operand, Operand],
    blocks: Blocks,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """``result (+)= scale * left @ right``, tile by tile."""
    left, right = factors
    one_right = right.shape[1] <= blocks.columns and left.shape[1] <= blocks.inner
    for rows in ranges(left.shape[0], blocks.rows):
        for columns in ranges(right.shape[1], blocks.columns):
            where = result.where(rows, columns)
            for inner in ranges(left.shape[1], blocks.inner):
                # What stays is touched before anything else is loaded, or it would be the oldest.
                if one_right:
                    right.tile(memory, inner, columns)
                a = left.tile(memory, rows, inner)
                sofar = memory.read(result.name, *where) if inner[0] or accumulate else None
                product = scale * (a @ right.tile(memory, inner, columns))
                memory.write(result.name, where, product if sofar is None else sofar + product)


def price_rows(rows: int, columns: int, matrices: int, capacity: int) -> Traffic:
    """Traffic of an operation on whole rows of `matrices` matrices, one of which it replaces.

    One pass where a row of each fits into the fast memory; else two, as in the two-pass online softmax
    (Milakov and Gimelshein 2018, algorithm 3, https://arxiv.org/abs/1805.02867).
    """
    passes = 1 if strip_rows(columns, matrices, capacity) else 2
    return Traffic(passes * matrices * rows * columns, rows * columns)


def strip_rows(columns: int, matrices: int, capacity: int, numbers: int = 0) -> int:
    """Rows of a strip that fits whole, with `numbers` numbers for each row; 0 if not even one does."""
    return capacity // (columns * matrices + numbers)


def run_softmax(
    memory: TwoLevelMemory, scores: Operand, keep: Tensor | None, statistics: str | None = None
) -> None:
    """Replace a region of scores by their weights, a strip of rows at a time.

    statistics: None normalises the rows; else weights are exp(s - m), and m and l of the rows go to the tensors
    `statistics`.m and .l, whose rows are counted from the region's first. keep hides pairs of the stored matrix.
    """
    count, width = scores.shape
    strip = strip_rows(width, 1, memory.capacity)
    for rows in ranges(count, strip or 1):
        parts = [(0, width)] if strip else ranges(width, memory.capacity)
        m = torch.full((rows[1] - rows[0],), -torch.inf, dtype=torch.float64)
        l = torch.zeros_like(m)  # noqa: E741  # the letter of the literature
        for part in parts:
            s = hide(scores.tile(memory, rows, part), scores.where(rows, part), keep)
            top = torch.maximum(m, s.amax(-1))
            pivot = top.masked_fill(top == -torch.inf, 0.0)
            l = l * torch.exp(m - pivot) + torch.exp(s - pivot[:, None]).sum(-1)  # noqa: E741
            m = top
        below = torch.ones_like(l) if statistics else l.masked_fill(l == 0, 1.0)
        pivot = m.masked_fill(m == -torch.inf, 0.0)
        for part in parts:
            where = scores.where(rows, part)
            s = hide(scores.tile(memory, rows, part), where, keep)
            memory.write(scores.name, where, torch.exp(s - pivot[:, None]) / below[:, None])
        if statistics:
            memory.write(f"{statistics}.m", (rows,), m)
            memory.write(f"{statistics}.l", (rows,), l)


def hide(scores: Tensor, where: tuple[Range, Range], keep: Tensor | None) -> Tensor:
    """-inf where `keep` (N_q, N_k) is False. A mask is a formula: evaluated on the chip, it moves nothing."""
    if keep is None:
        return scores
    return scores.masked_fill(~keep[slice(*where[0]), slice(*where[1])], -torch.inf)
