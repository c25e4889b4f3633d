"""Scores of few rows of q by one key after another, for heads of known sizes: each line of a row is asked for right
before another is met.

So a core reads on as a plain loop does. Where several keys are met at once and their lines asked for by fours, requests
come in bursts, of which a core of Zen 5 takes fewer: 0.88 to 0.91 of the speed in bf16 (measured, together with the
same step of the weighted sums; docs/performance.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba.core import cgutils

from tilewise.backends.cpu.isa import LINE
from tilewise.backends.cpu.words import I64

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import llvmlite.ir as ir

    from tilewise.backends.cpu.row_micro import RowMicro
    from tilewise.backends.cpu.words import Words

HEADS = (128,)
"""Head sizes that have such a loop. Others take several keys at once."""
KEPT = 16
"""Vectors of q that stay in registers; where there are more, they are loaded for each key."""


def scores_by_key(
    micro: RowMicro, w: Words, arguments: Sequence[ir.Value], rows: int, dim: int, dot: Callable | None
) -> None:
    """`RowMicro.scores` for heads of `dim` numbers. dot: multiplies pairs of bf16 numbers, None where numbers are
    widened to float32."""
    k, k_off, keys, q, q_row, _, s, s_row, asked, asked_off, _, scale = arguments
    b, factor = w.b, None if dot is None else w.splat(scale)
    vectors = dim // (w.lanes if dot is None else 2 * w.lanes)
    step = dim * micro.size // vectors
    from_q = [b.add(q, b.mul(q_row, I64(r))) for r in range(rows)]

    def row_of_q(n: int) -> list[ir.Value]:
        kind = w.f if dot is None else w.i
        return [w.load(base, n * micro.vector_bytes, kind) for base in from_q]

    kept = [row_of_q(n) for n in range(vectors)] if rows * vectors <= KEPT else None
    with cgutils.for_range(b, keys, intp=I64) as loop:
        at = b.mul(loop.index, I64(8))
        later, address = b.add(w.load(asked, at, I64), asked_off), b.add(w.load(k, at, I64), k_off)
        sums = [w.k(0.0)] * rows
        for n in range(vectors):
            if n * step % LINE == 0:
                # What is unknown keeps its place among the products.
                later, address = w.unknown(later), w.unknown(address)
                micro.prefetch(b, b.add(later, I64(n * step)))
            numbers = (
                w.widen(address, n * step, micro.dtype) if dot is None else w.load(address, n * step, w.i)
            )
            for r, row in enumerate(kept[n] if kept else row_of_q(n)):
                sums[r] = w.fma(numbers, row, sums[r]) if dot is None else dot(w, sums[r], numbers, row)
        micro._store_scores(w, sums, b.add(s, b.mul(loop.index, s_row)), s_row, rows, factor)
