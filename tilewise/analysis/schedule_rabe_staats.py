"""Rabe and Staats' attention on a memory of two levels: linear memory, but not least traffic.

Queries and keys are cut into chunks; each pair of chunks is ordinary attention whose weights are left undivided,
and its out, m and l, a summary, go to the slow memory until the chunks of a row of queries are merged. The chunks'
size comes from N (its square root), not from the fast memory: a small one sends the scores of a chunk to the slow
memory and back, like ordinary attention; a large one lies idle. Backward, each pair is computed again (gradient
checkpointing) and followed by ordinary attention's backward, whose gradients are summed in the slow memory.

Source: Rabe and Staats 2021, "Self-attention does not need O(n^2) memory" (https://arxiv.org/abs/2112.05682),
sections 2 and 3; what it moves, beside FlashAttention: Dao et al. 2022 (https://arxiv.org/abs/2205.14135), B.5.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import torch

from tilewise.analysis import schedule_ordinary as ordinary
from tilewise.analysis.kernels import (
    Blocks,
    Operand,
    hide,
    price_product,
    run_product,
    run_softmax,
    strip_rows,
)
from tilewise.analysis.sizes import Sizes, Tiles
from tilewise.analysis.two_level import Range, Traffic, TwoLevelMemory, ranges

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["predict", "run", "run_backward", "tiles_for"]


def tiles_for(sizes: Sizes, capacity: int, backward: bool = False) -> Tiles:
    """Chunks of sqrt(N) queries and keys, whatever the fast memory."""
    return Tiles(math.isqrt(sizes.seqlen_q - 1) + 1, math.isqrt(sizes.seqlen_k - 1) + 1)


def _fits(chunk: Sizes, capacity: int, backward: bool) -> bool:
    """Whether all that a pair of chunks touches lies in the fast memory at once."""
    n, m, d, dv = chunk
    if backward:
        return 2 * n * m + n * (2 * d + dv + 2) + 2 * m * (d + dv) <= capacity
    return n * m + n * (d + dv + 2) + m * (d + dv) <= capacity


def _largest(sizes: Sizes, tiles: Tiles) -> Sizes:
    return sizes._replace(
        seqlen_q=min(tiles.block_q, sizes.seqlen_q), seqlen_k=min(tiles.block_k, sizes.seqlen_k)
    )


def _inner(sizes: Sizes, tiles: Tiles, capacity: int, backward: bool) -> Tiles:
    """Tiles of the kernels within a pair of chunks: the whole pair, or what fits."""
    chunk = _largest(sizes, tiles)
    if _fits(chunk, capacity, backward):
        return Tiles(*chunk[:2], max(chunk.head_dim, chunk.head_dim_v))
    return ordinary.kernel_tiles(chunk, capacity, backward)


def predict(sizes: Sizes, tiles: Tiles, capacity: int, backward: bool = False) -> Traffic:
    """Elements moved, from sizes and chunks."""
    together = _fits(_largest(sizes, tiles), capacity, backward)
    inner = _inner(sizes, tiles, capacity, backward)
    price = _price_backward if backward else _price
    chunks = -(-sizes.seqlen_k // tiles.block_k)
    total = Traffic(0, 0)
    for (n, top), rows in _lengths(sizes.seqlen_q, tiles.block_q).items():
        for (m, left), columns in _lengths(sizes.seqlen_k, tiles.block_k).items():
            chunk = sizes._replace(seqlen_q=n, seqlen_k=m)
            total = total.plus(price(chunk, inner, capacity, together, (left, top)).times(rows * columns))
        if backward:
            total = total.plus(Traffic(2 * n * sizes.head_dim_v, n).times(rows))
        else:
            summaries = chunks * n * (sizes.head_dim_v + 2)
            total = total.plus(Traffic(summaries, n * (sizes.head_dim_v + 1)).times(rows))
    return total


def _lengths(length: int, block: int) -> Counter[tuple[int, bool]]:
    """How many chunks there are of each (length, whether it is the first)."""
    return Counter((stop - start, start == 0) for start, stop in ranges(length, block))


def _price(chunk: Sizes, inner: Tiles, capacity: int, together: bool, first: tuple[bool, bool]) -> Traffic:
    """One pair of chunks, forward."""
    n, m, d, dv = chunk
    summary = n * (dv + 2)
    if together:
        return Traffic(m * (d + dv) + first[0] * n * d, summary)
    steps = ordinary.price_kernels(chunk, inner, capacity, False)
    return Traffic(steps.loads, steps.stores + 2 * n)


def _price_backward(
    chunk: Sizes, inner: Tiles, capacity: int, together: bool, first: tuple[bool, bool]
) -> Traffic:
    """One pair of chunks, backward: S, its weights, and the five kernels of ordinary attention."""
    n, m, d, dv = chunk
    if together:
        keys = m * (d + dv)
        return Traffic(keys * (1 if first[1] else 2) + first[0] * n * (d + dv + 2), keys + first[0] * n * d)
    bq, bk, c = inner
    steps = [
        price_product(n, m, d, Blocks(bq, bk, c)),
        Traffic(n * m + n, n * m),
        price_product(m, dv, n, Blocks(bk, c, bq), not first[1]),
        price_product(n, m, dv, Blocks(bq, bk, c)),
        Traffic(2 * n * m + n, n * m),
        price_product(n, d, m, Blocks(bq, c, bk), not first[0]),
        price_product(m, d, n, Blocks(bk, c, bq), not first[1]),
    ]
    return Traffic(sum(step.loads for step in steps), sum(step.stores for step in steps))


def run(memory: TwoLevelMemory, sizes: Sizes, tiles: Tiles, scale: float, keep: Tensor | None = None) -> None:
    """Forward: reads q, k, v, fills out and lse."""
    d, dv = (0, sizes.head_dim), (0, sizes.head_dim_v)
    together = _fits(_largest(sizes, tiles), memory.capacity, False)
    bq, bk, c = _inner(sizes, tiles, memory.capacity, False)
    memory.place("s", torch.zeros(sizes.seqlen_q, sizes.seqlen_k, dtype=torch.float64))
    for rows in ranges(sizes.seqlen_q, tiles.block_q):
        names = []
        for number, columns in enumerate(ranges(sizes.seqlen_k, tiles.block_k)):
            names.append(f"part{number}")
            for name, width in ((names[-1], (dv[1],)), (f"{names[-1]}.m", ()), (f"{names[-1]}.l", ())):
                memory.place(name, torch.zeros(rows[1] - rows[0], *width, dtype=torch.float64))
            scores, summary = Operand("s", rows, columns), Operand(names[-1], (0, rows[1] - rows[0]), dv)
            factors = Operand("q", rows, d), Operand("k", columns, d, True)
            if together:  # it stays for the whole row of chunks, and would be the oldest
                memory.read("q", rows, d)
            run_product(memory, scores, factors, Blocks(bq, bk, c), scale=scale)
            ordinary.end_kernel(memory, together)
            run_softmax(memory, scores, keep, names[-1])
            ordinary.end_kernel(memory, together)
            run_product(memory, summary, (scores, Operand("v", columns, dv)), Blocks(bq, c, bk))
            memory.discard("s")
            ordinary.end_kernel(memory, together)
        memory.flush()
        _merge(memory, rows, dv, names)


def _merge(memory: TwoLevelMemory, rows: Range, dv: Range, names: list[str]) -> None:
    """out and lse of a chunk of queries, from its summaries; as many rows at a time as fit."""
    strip = max(memory.capacity // (2 * (dv[1] + 2) + 1), 1)
    for part in ranges(rows[1] - rows[0], strip):
        state: Tensor | None = None
        for name in names:
            before = None if state is None else memory.held("state")
            top, total = memory.read(f"{name}.m", part), memory.read(f"{name}.l", part)
            state = torch.cat([memory.read(name, part, dv), top[:, None], total[:, None]], 1)
            if before is not None:
                m = torch.maximum(before[:, -2], top)
                pivot = m.masked_fill(m == -torch.inf, 0.0)
                old, fresh = torch.exp(before[:, -2] - pivot), torch.exp(top - pivot)
                state = old[:, None] * before + fresh[:, None] * state
                state[:, -2] = m
            memory.hold("state", state)
        state = memory.release("state")
        l = state[:, -1]  # noqa: E741
        where = (part[0] + rows[0], part[1] + rows[0])
        memory.write("out", (where, dv), state[:, :-2] / l.masked_fill(l == 0, 1.0)[:, None])
        memory.write("lse", (where,), state[:, -2] + torch.log(l))
    memory.flush()


def run_backward(
    memory: TwoLevelMemory, sizes: Sizes, tiles: Tiles, scale: float, keep: Tensor | None = None
) -> None:
    """Backward: reads q, k, v, out, lse, do, fills dq, dk, dv; delta is a pass of its own."""
    d, dv = (0, sizes.head_dim), (0, sizes.head_dim_v)
    together = _fits(_largest(sizes, tiles), memory.capacity, True)
    inner = _inner(sizes, tiles, memory.capacity, True)
    for name in ("s", "dp"):
        memory.place(name, torch.zeros(sizes.seqlen_q, sizes.seqlen_k, dtype=torch.float64))
    for rows in ranges(sizes.seqlen_q, tiles.block_q):
        _row_sums(memory, rows, dv)
        for columns in ranges(sizes.seqlen_k, tiles.block_k):
            if together:  # what stays for the whole row of chunks is touched first, or it would be the oldest
                for name, where in (("q", d), ("do", dv), *[("dq", d)] * (columns[0] > 0)):
                    memory.read(name, rows, where)
                for name in ("lse", "delta"):
                    memory.read(name, rows)
            _pair_backward(memory, (rows, columns, d, dv), (inner, scale, keep), together)
            memory.discard("s")
            memory.discard("dp")
        memory.flush()


def _pair_backward(
    memory: TwoLevelMemory,
    where: tuple[Range, Range, Range, Range],
    how: tuple[Tiles, float, Tensor | None],
    together: bool,
) -> None:
    """One pair of chunks: scores and weights again, then the five kernels of ordinary attention's backward."""
    rows, columns, d, dv = where
    (bq, bk, c), scale, keep = how
    q, do = Operand("q", rows, d), Operand("do", rows, dv)
    k, v = Operand("k", columns, d), Operand("v", columns, dv)
    p, dp = Operand("s", rows, columns), Operand("dp", rows, columns)
    matrix, by_keys = Blocks(bq, bk, c), Blocks(bk, c, bq)
    later = rows[0] > 0
    run_product(memory, p, (q, k._replace(transposed=True)), matrix, scale=scale)
    ordinary.end_kernel(memory, together)
    _by_rows(memory, p, None, "lse", keep)
    ordinary.end_kernel(memory, together)
    run_product(memory, v._replace(name="dv"), (p._replace(transposed=True), do), by_keys, accumulate=later)
    ordinary.end_kernel(memory, together)
    run_product(memory, dp, (do, v._replace(transposed=True)), matrix)
    ordinary.end_kernel(memory, together)
    _by_rows(memory, dp, p, "delta", None)
    ordinary.end_kernel(memory, together)
    first = columns[0] == 0
    run_product(memory, q._replace(name="dq"), (dp, k), Blocks(bq, c, bk), scale=scale, accumulate=not first)
    ordinary.end_kernel(memory, together)
    turned = dp._replace(transposed=True)
    run_product(memory, k._replace(name="dk"), (turned, q), by_keys, scale=scale, accumulate=later)
    ordinary.end_kernel(memory, together)


def _row_sums(memory: TwoLevelMemory, rows: Range, dv: Range) -> None:
    """delta = rowsum(do * out) of a chunk of queries, as many rows at a time as fit."""
    for part in ranges(rows[1] - rows[0], max(memory.capacity // (2 * dv[1] + 1), 1), rows[0]):
        delta = (memory.read("do", part, dv) * memory.read("out", part, dv)).sum(-1)
        memory.write("delta", (part,), delta)
    memory.flush()


def _by_rows(
    memory: TwoLevelMemory, changed: Operand, beside: Operand | None, number: str, keep: Tensor | None
) -> None:
    """Replace a chunk, a strip of rows at a time: scores by exp(s - lse), or dp by p (dp - delta), p beside it."""
    count, width = changed.shape
    matrices = 1 if beside is None else 2
    strip = strip_rows(width, matrices, memory.capacity, 1)
    for rows in ranges(count, strip or 1):
        for part in [(0, width)] if strip else ranges(width, (memory.capacity - 1) // matrices):
            where = changed.where(rows, part)
            low = memory.read(number, where[0])[:, None]
            tile = changed.tile(memory, rows, part)
            if beside is None:
                low = low.masked_fill(low == -torch.inf, 0.0)
                fresh = torch.exp(hide(tile, where, keep) - low)
            else:
                fresh = beside.tile(memory, rows, part) * (tile - low)
            memory.write(changed.name, where, fresh)
