"""The order in which a trace visits its tiles, and the bytes that have moved after each step.

Conventions are those of `io_model`: on-chip memory holds the tiles in flight, caches are absent, a tensor that is read
again is counted again. What stays on the chip decides the rest:

    forward, queries outer    q, m, l, acc stay; k and v are read by every tile. FlashAttention-2's order.
    forward, keys outer       k, v stay; q is read, and m, l, acc are read and written, by every tile.
                              FlashAttention-1's order (which divides acc at every step; here it is divided once).
    backward, queries outer   q, do, lse, delta, dq stay; k and v are read, dk and dv read and written, by every tile.
    backward, keys outer      k, v, dk, dv stay; q, do, lse, delta are read, dq read and written, by every tile.
                              The order of both papers.

A state or a gradient is not read at its first tile and leaves in its final form at its last; in between it travels in
the computing type. Tiles that the mask hides altogether are not visited.

Source: Dao et al. 2022, "FlashAttention" (https://arxiv.org/abs/2205.14135), algorithms 1 and 4; Dao 2023,
"FlashAttention-2" (https://arxiv.org/abs/2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..spec.tiles import EMPTY
from .io_model import bytes_ordinary

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOPS = ("queries outer", "keys outer")
PASSES_BACKWARD = 7
"""Passes over an N_q x N_k matrix by an ordinary backward that kept P: P is read for dV; dP is written; P and dP are
read, dS is written; dS is read for dQ and for dK."""


class Step(NamedTuple):
    """One step of a run.

    Fields:
        kind: "tile", or "finish" (a row tile's division and its result), or "delta" (before the backward).
        row, column: numbers of the tile; -1 where none is meant.
        moves: (name, bytes), in the order in which they happen; bytes below zero are written.
        tiled, ordinary: bytes moved so far, by this schedule and by ordinary attention that has come equally far.
    """

    kind: str
    row: int
    column: int
    moves: tuple[tuple[str, int], ...]
    tiled: int
    ordinary: int


@dataclass(frozen=True)
class Sizes:
    """Lengths and head dimensions of one head; bytes of an element as given (itemsize) and as computed (wide)."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    itemsize: int
    wide: int
    block_q: int
    block_k: int

    def rows(self, tile: int) -> int:
        """Rows of a row tile; the last one may be ragged."""
        return min(self.block_q, self.seqlen_q - tile * self.block_q)

    def columns(self, tile: int) -> int:
        """Keys of a column tile."""
        return min(self.block_k, self.seqlen_k - tile * self.block_k)


class _Raw(NamedTuple):
    kind: str
    row: int
    column: int
    moves: tuple[tuple[str, int], ...]


class _Order:
    """The visited tiles of a loop order, each with what is first and last about it."""

    def __init__(self, classes: Sequence[Sequence[int]], loop: str) -> None:
        self.num_rows, self.num_columns = len(classes), len(classes[0])
        inner = [(i, j) for i in range(self.num_rows) for j in range(self.num_columns)]
        every = inner if loop == "queries outer" else sorted(inner, key=lambda tile: tile[::-1])
        self.place = {tile: n for n, tile in enumerate(every)}
        self.tiles = [(i, j) for i, j in every if classes[i][j] != EMPTY]
        self.of_row = {
            i: [j for j in range(self.num_columns) if classes[i][j] != EMPTY] for i in range(self.num_rows)
        }
        self.of_column = {
            j: [i for i in range(self.num_rows) if classes[i][j] != EMPTY] for j in range(self.num_columns)
        }


def forward_steps(sizes: Sizes, classes: Sequence[Sequence[int]], loop: str) -> list[Step]:
    """The forward pass; with queries outer the last step's `tiled` is `io_model.bytes_tiled`."""
    order = _Order(classes, loop)
    rows_outer = loop == "queries outer"
    raw: list[_Raw] = []
    waiting = [i for i in range(order.num_rows) if not order.of_row[i]]
    for i, j in order.tiles:
        while rows_outer and waiting and waiting[0] < i:
            raw.append(_unseen(sizes, waiting.pop(0)))
        first_of_row, last_of_row = order.of_row[i][0] == j, order.of_row[i][-1] == j
        moves = [("q", _q(sizes, i))] if first_of_row or not rows_outer else []
        if rows_outer or order.of_column[j][0] == i:
            moves += _keys(sizes, j)
        if not rows_outer and not first_of_row:
            moves.append(("m, l, acc", _state(sizes, i)))
        if not rows_outer and not last_of_row:
            moves.append(("m, l, acc", -_state(sizes, i)))
        raw.append(_Raw("tile", i, j, tuple(moves)))
        if last_of_row:
            raw.append(_Raw("finish", i, j, _results(sizes, i)))
    raw += [_unseen(sizes, i) for i in waiting]
    one = {
        "batch": 1,
        "num_heads_q": 1,
        "num_heads_kv": 1,
        "seqlen_q": sizes.seqlen_q,
        "seqlen_k": sizes.seqlen_k,
    }
    total = bytes_ordinary(
        **one, head_dim=sizes.head_dim, head_dim_v=sizes.head_dim_v, itemsize=sizes.itemsize
    )
    ends = (
        sizes.seqlen_q * sizes.head_dim + sizes.seqlen_k * (sizes.head_dim + sizes.head_dim_v)
    ) * sizes.itemsize
    return _count(raw, order, sizes, (ends, total, 4))


def backward_steps(sizes: Sizes, classes: Sequence[Sequence[int]], loop: str) -> list[Step]:
    """The backward pass: delta first, then the tiles; tiles and rows without a visible pair get zeros."""
    order = _Order(classes, loop)
    rows_outer = loop == "queries outer"
    width = sizes.head_dim_v * sizes.itemsize
    n = sizes.seqlen_q
    raw = [_Raw("delta", -1, -1, (("out", n * width), ("do", n * width), ("delta", -n * sizes.wide)))]
    for i, j in order.tiles:
        row, column = order.of_row[i], order.of_column[j]
        moves = _queries(sizes, i) if not rows_outer or row[0] == j else []
        moves += _keys(sizes, j) if rows_outer or column[0] == i else []
        if rows_outer:
            last = column[-1] == i
            grads = sizes.columns(j) * (sizes.head_dim + sizes.head_dim_v)
            moves += [("dk, dv", grads * sizes.wide)] if column[0] != i else []
            moves.append(("dk, dv", -grads * (sizes.itemsize if last else sizes.wide)))
            moves += [("dq", -_q(sizes, i))] if row[-1] == j else []
        else:
            grads = sizes.rows(i) * sizes.head_dim
            moves += [("dq", grads * sizes.wide)] if row[0] != j else []
            moves.append(("dq", -grads * (sizes.itemsize if row[-1] == j else sizes.wide)))
            moves += [(f"d{name}", -size) for name, size in _keys(sizes, j)] if column[-1] == i else []
        raw.append(_Raw("tile", i, j, tuple(moves)))
    ends = (sizes.seqlen_q + sizes.seqlen_k) * (sizes.head_dim + sizes.head_dim_v) * sizes.itemsize
    back = (
        sizes.seqlen_q * sizes.head_dim + sizes.seqlen_k * (sizes.head_dim + sizes.head_dim_v)
    ) * sizes.itemsize
    matrix = PASSES_BACKWARD * sizes.seqlen_q * sizes.seqlen_k * sizes.itemsize
    return _count(raw, order, sizes, (ends, ends + back + matrix, PASSES_BACKWARD))


def _count(raw: list[_Raw], order: _Order, sizes: Sizes, ordinary: tuple[int, int, int]) -> list[Step]:
    """Running sums. ordinary: bytes read at the start, bytes in all, passes over the matrix.

    Ordinary attention has come equally far when it has passed the same part of the matrix, hidden tiles included:
    it stores them like all others. Its result is counted at the last step.
    """
    start, total, passes = ordinary
    areas = {(i, j): sizes.rows(i) * sizes.columns(j) for i, j in order.place}
    passed, sums = 0, []
    for tile in order.place:
        passed += areas[tile]
        sums.append(passed)
    steps, tiled = [], 0
    far = -1
    for n, step in enumerate(raw):
        tiled += sum(abs(size) for _, size in step.moves)
        far = max(far, order.place.get((step.row, step.column), -1))
        matrix = passes * sizes.itemsize * (sums[far] if far >= 0 else 0)
        steps.append(Step(*step, tiled, total if n == len(raw) - 1 else start + matrix))
    return steps


def _unseen(sizes: Sizes, i: int) -> _Raw:
    """A row tile in which nothing is visible: its answer is 0, whatever the keys are."""
    return _Raw("finish", i, -1, (("q", _q(sizes, i)), *_results(sizes, i)))


def _q(sizes: Sizes, i: int) -> int:
    return sizes.rows(i) * sizes.head_dim * sizes.itemsize


def _queries(sizes: Sizes, i: int) -> list[tuple[str, int]]:
    rows = sizes.rows(i)
    do = rows * sizes.head_dim_v * sizes.itemsize
    return [("q", _q(sizes, i)), ("do", do), ("lse", rows * sizes.wide), ("delta", rows * sizes.wide)]


def _keys(sizes: Sizes, j: int) -> list[tuple[str, int]]:
    keys = sizes.columns(j) * sizes.itemsize
    return [("k", keys * sizes.head_dim), ("v", keys * sizes.head_dim_v)]


def _state(sizes: Sizes, i: int) -> int:
    return sizes.rows(i) * (2 + sizes.head_dim_v) * sizes.wide


def _results(sizes: Sizes, i: int) -> tuple[tuple[str, int], ...]:
    rows = sizes.rows(i)
    return (("out", -rows * sizes.head_dim_v * sizes.itemsize), ("lse", -rows * sizes.wide))
