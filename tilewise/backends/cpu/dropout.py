"""Dropout on tiles of weights: Philox4x32-10 by vectors of rows, bit for bit `tilewise.spec.dropout.philox4x32`.

One counter gives the words of four keys. Its parts are (k >> 2, q, h, b): lanes are rows of q, so that of the first
three rounds all that depends on the row alone is computed once per row, and all that depends on the key alone once
for all rows, as scalars; 16 of 20 products are left to each vector. Between rounds the even and the odd lanes stand
apart in 64-bit lanes, where a product needs no exchange: its high half is a shift, its low half is where it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from tilewise.backends.cpu.micro import ROW, Micro, _emit, f32, i64
from tilewise.backends.cpu.words import I32, I64

if TYPE_CHECKING:
    from tilewise.backends.cpu.words import Words

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_KEYS = 4
"""Keys of one counter."""


def _product(w: Words, x: ir.Value, which: int) -> tuple[ir.Value, ir.Value]:
    """(high, low) of a round's product of one half."""
    p = w.low_product(x, w.wide(_MULTIPLIERS[which]))
    return w.b.lshr(p, w.wide(32)), p


def _scalar_product(b: ir.IRBuilder, x: ir.Value, which: int) -> tuple[ir.Value, ir.Value]:
    p = b.mul(b.and_(x, I64(_LOW)), I64(_MULTIPLIERS[which]))
    return b.lshr(p, I64(32)), b.and_(p, I64(_LOW))


def drop_strip(micro: Micro) -> Any:
    """drop(tile, q, h, numbers, seed, first, keys, factor): dropout on one strip of a tile, whose first key stands at
    position `first`.

    q and h: int32 positions and heads of the strip's rows; numbers: int64, what is added to h, the batch entry, the
    threshold; seed: int64, its two words. Kept weights are multiplied by factor.
    """
    vectors, step = micro.strip_vectors, micro.vector_bytes

    def body(b, tile, q, h, numbers, seed, first, keys, factor):
        w = micro.words(b)
        low = [b.and_(w.load(seed, 8 * n, I64), I64(_LOW)) for n in (0, 1)]
        rounds = [
            [b.and_(b.add(low[n], I64(r * _WEYL[n] & _LOW)), I64(_LOW)) for n in (0, 1)]
            for r in range(_ROUNDS)
        ]
        round_keys = [[w.splat_wide(key) for key in pair] for pair in rounds]
        h_offset, batch, threshold = (b.trunc(w.load(numbers, 8 * n, I64), I32) for n in range(3))
        batch, threshold, scale = b.zext(batch, I64), w.splat(threshold), w.splat(factor)
        rows = [
            _row_part(
                w, w.load(q, v * step, w.i), b.add(w.load(h, v * step, w.i), w.splat(h_offset)), round_keys
            )
            for v in range(vectors)
        ]
        end = b.add(first, keys)
        counter = b.ashr(first, I64(2))
        count = b.sub(b.ashr(b.add(end, I64(_KEYS - 1)), I64(2)), counter)
        with cgutils.for_range(b, count, intp=I64) as loop:
            k = b.mul(b.add(counter, loop.index), I64(_KEYS))
            shared = _key_part(b, b.add(counter, loop.index), batch, rounds)
            row = b.add(tile, b.mul(b.sub(k, first), I64(ROW)))
            inside = [
                b.and_(
                    b.icmp_signed("<=", first, b.add(k, I64(n))), b.icmp_signed("<", b.add(k, I64(n)), end)
                )
                for n in range(_KEYS)
            ]
            words = _last_rounds(w, rows, [w.splat_wide(x) for x in shared], round_keys)
            for n in range(_KEYS):
                with b.if_then(inside[n], likely=True):
                    for v in range(vectors):
                        kept, at = b.icmp_unsigned(">=", words[v][n], threshold), n * ROW + v * step
                        value = b.fmul(w.load(row, at), scale)
                        w.store(b.select(kept, value, w.k(0.0)), row, at)

    return _emit(types.void(*[i64] * 7, f32), body, "tile, q, h, numbers, seed, first, keys, factor")


def _row_part(w: Words, q: ir.Value, h: ir.Value, keys: list) -> list[tuple[ir.Value, ...]]:
    """Of each half: what rounds 1 and 2 make of the row alone, (c1 ^ k0, high ^ k1, low)."""
    b, found = w.b, []
    for part_q, part_h in zip(w.halves(q), w.halves(h), strict=True):
        high, c1 = _product(w, part_h, 1)
        c0 = b.xor(b.xor(high, part_q), keys[0][0])
        high, low = _product(w, c0, 0)
        found.append((b.xor(c1, keys[1][0]), b.xor(high, keys[1][1]), low))
    return found


def _key_part(b: ir.IRBuilder, counter: ir.Value, batch: ir.Value, keys: list) -> tuple[ir.Value, ...]:
    """What rounds 1 and 2 make of the key alone: (high of the second product, its low, low of the first)."""
    high, low = _scalar_product(b, counter, 0)
    high2, low2 = _scalar_product(b, b.xor(b.xor(high, batch), keys[0][1]), 1)
    return high2, low2, low


def _last_rounds(w: Words, rows: list, shared: list[ir.Value], keys: list) -> list[list[ir.Value]]:
    """Of each vector of rows the four words of one counter, from the third round on."""
    b = w.b
    # The chain of rounds is long: all halves of all vectors go side by side.
    states = [
        [b.xor(own[0], shared[0]), shared[1], b.xor(own[1], shared[2]), own[2]] for row in rows for own in row
    ]
    for r in range(2, _ROUNDS):
        products = [(_product(w, c[0], 0), _product(w, c[2], 1)) for c in states]
        states = [
            [b.xor(b.xor(high1, c[1]), keys[r][0]), low1, b.xor(b.xor(high0, c[3]), keys[r][1]), low0]
            for ((high0, low0), (high1, low1)), c in zip(products, states, strict=True)
        ]
    pairs = zip(states[::2], states[1::2], strict=True)
    return [[w.join(even[n], odd[n]) for n in range(_KEYS)] for even, odd in pairs]
