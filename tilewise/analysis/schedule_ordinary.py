"""Ordinary attention on a memory of two levels: the score matrix is a tensor, and each step a kernel.

Forward: S = Q K^T, P = softmax(S) in place, O = P V. Backward, with P kept from the forward: dV = P^T dO,
dP = dO V^T, dS = P (dP - rowsum(P dP)), dQ = dS K, dK = dS^T Q. The products are tiled as well as a memory of M
elements allows. The fast memory does not survive a kernel, unless the whole problem fits into it.

Source: Dao et al. 2022 (https://arxiv.org/abs/2205.14135), algorithms 0 and 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilewise.analysis.kernels import (
    Blocks,
    Operand,
    price_product,
    price_rows,
    run_product,
    run_softmax,
    strip_rows,
)
from tilewise.analysis.sizes import Sizes, Tiles
from tilewise.analysis.two_level import Traffic, TwoLevelMemory, ranges
from tilewise.errors import OptionError, message

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fits", "predict", "run", "run_backward", "tiles_for"]


def fits(sizes: Sizes, capacity: int, backward: bool = False) -> bool:
    """Whether every tensor of the problem, the matrix included, lies in the fast memory at once."""
    if not backward:
        return sizes.matrix + sizes.tensors <= capacity
    gradients = sizes.seqlen_q * (2 * sizes.head_dim + sizes.head_dim_v) + 2 * sizes.seqlen_k * sizes.widths
    return 2 * sizes.matrix + gradients <= capacity


def tiles_for(sizes: Sizes, capacity: int, backward: bool = False) -> Tiles:
    """The tiles that move least among those that fit, by the model's own price."""
    if fits(sizes, capacity, backward):
        return Tiles(sizes.seqlen_q, sizes.seqlen_k, max(sizes.head_dim, sizes.head_dim_v))
    return kernel_tiles(sizes, capacity, backward)


def kernel_tiles(sizes: Sizes, capacity: int, backward: bool = False) -> Tiles:
    """Tiles for kernels that run one after another, nothing surviving in between.

    Raises: OptionError if no tile fits.
    """
    candidates = list(_candidates(sizes, capacity))
    if not candidates:
        raise OptionError(message(f"a fast memory of {capacity} elements holds no tile of a product"))
    return min(candidates, key=lambda tiles: price_kernels(sizes, tiles, capacity, backward).total)


def _candidates(sizes: Sizes, capacity: int) -> Iterator[Tiles]:
    """Tiles whose three sides fill the fast memory: chunk by halving, keys by doubling, queries from the rest."""
    chunk = max(sizes.head_dim, sizes.head_dim_v)
    while True:
        block_k = 1
        while True:
            block_q = min((capacity - block_k * chunk) // (chunk + block_k + 2), sizes.seqlen_q)
            if block_q >= 1:
                wider = (capacity - block_q * (chunk + 2)) // (chunk + block_q)
                yield Tiles(block_q, min(max(block_k, wider), sizes.seqlen_k), chunk)
            if block_k >= sizes.seqlen_k:
                break
            block_k *= 2
        if chunk == 1:
            return
        chunk = -(-chunk // 2)


def predict(sizes: Sizes, tiles: Tiles, capacity: int, backward: bool = False) -> Traffic:
    """Elements moved, from sizes and tiles."""
    if fits(sizes, capacity, backward):
        return _fitting(sizes, backward)
    return price_kernels(sizes, tiles, capacity, backward)


def price_kernels(sizes: Sizes, tiles: Tiles, capacity: int, backward: bool) -> Traffic:
    """The kernels one by one: 4 N^2 forward, or 7 N^2 backward, beside what the products read."""
    n, m, d, dv = sizes
    bq, bk, c = tiles
    if not backward:
        steps = [
            price_product(n, m, d, Blocks(bq, bk, c)),
            price_rows(n, m, 1, capacity),
            price_product(n, dv, m, Blocks(bq, c, bk)),
        ]
    else:
        steps = [
            price_product(m, dv, n, Blocks(bk, c, bq)),
            price_product(n, m, dv, Blocks(bq, bk, c)),
            price_rows(n, m, 2, capacity),
            price_product(n, d, m, Blocks(bq, c, bk)),
            price_product(m, d, n, Blocks(bk, c, bq)),
        ]
    return Traffic(sum(step.loads for step in steps), sum(step.stores for step in steps))


def _fitting(sizes: Sizes, backward: bool) -> Traffic:
    n, m, d, dv = sizes
    if not backward:
        return Traffic(n * d + m * (d + dv), n * dv)
    return Traffic(n * m + n * (d + dv) + m * (d + dv), n * d + m * (d + dv))


def run(memory: TwoLevelMemory, sizes: Sizes, tiles: Tiles, scale: float, keep: Tensor | None = None) -> None:
    """Forward: reads q, k, v, fills out; s is the matrix. All are placed in the slow memory, (N, D), float64."""
    n, m, d, dv = sizes
    bq, bk, c = tiles
    together = fits(sizes, memory.capacity)
    scores = Operand("s", (0, n), (0, m))
    q, k, v = (
        Operand("q", (0, n), (0, d)),
        Operand("k", (0, m), (0, d), True),
        Operand("v", (0, m), (0, dv)),
    )
    run_product(memory, scores, (q, k), Blocks(bq, bk, c), scale=scale)
    end_kernel(memory, together)
    run_softmax(memory, scores, keep)
    end_kernel(memory, together)
    run_product(memory, Operand("out", (0, n), (0, dv)), (scores, v), Blocks(bq, c, bk))
    memory.discard("s")
    memory.flush()


def run_backward(memory: TwoLevelMemory, sizes: Sizes, tiles: Tiles, scale: float) -> None:
    """Backward: reads q, k, v, do and the kept weights s, fills dq, dk, dv; dp is a second matrix."""
    n, m, d, dv = sizes
    bq, bk, c = tiles
    together = fits(sizes, memory.capacity, True)
    p, dp = Operand("s", (0, n), (0, m)), Operand("dp", (0, n), (0, m))
    do = Operand("do", (0, n), (0, dv))
    turned = p._replace(transposed=True), dp._replace(transposed=True)
    run_product(memory, Operand("dv", (0, m), (0, dv)), (turned[0], do), Blocks(bk, c, bq))
    end_kernel(memory, together)
    run_product(memory, dp, (do, Operand("v", (0, m), (0, dv), True)), Blocks(bq, bk, c))
    end_kernel(memory, together)
    run_softmax_backward(memory, p, dp)
    end_kernel(memory, together)
    k, q = Operand("k", (0, m), (0, d)), Operand("q", (0, n), (0, d))
    run_product(memory, Operand("dq", (0, n), (0, d)), (dp, k), Blocks(bq, c, bk), scale=scale)
    end_kernel(memory, together)
    run_product(memory, Operand("dk", (0, m), (0, d)), (turned[1], q), Blocks(bk, c, bq), scale=scale)
    memory.discard("dp")
    memory.flush()


def end_kernel(memory: TwoLevelMemory, together: bool) -> None:
    """The fast memory dies with its kernel, unless all steps run in one that holds everything."""
    if not together:
        memory.flush()


def run_softmax_backward(memory: TwoLevelMemory, p: Operand, dp: Operand) -> None:
    """Replace dp by ds = p (dp - rowsum(p dp)), a strip of rows at a time."""
    count, width = p.shape
    strip = strip_rows(width, 2, memory.capacity)
    for rows in ranges(count, strip or 1):
        parts = [(0, width)] if strip else ranges(width, memory.capacity // 2)
        delta = sum((p.tile(memory, rows, part) * dp.tile(memory, rows, part)).sum(-1) for part in parts)
        for part in parts:
            weights = p.tile(memory, rows, part)
            slope = dp.tile(memory, rows, part) - delta[:, None]  # type: ignore[index]  # never an empty sum
            memory.write(dp.name, dp.where(rows, part), weights * slope)
