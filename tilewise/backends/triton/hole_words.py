"""The words that a mask's holes are printed in: remainders of positions, and patterns that repeat."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter knows no instructions of a device."""


@triton.jit
def low_bits(x, BITS: tl.constexpr):
    """x & BITS of numbers inside a tile, as something that the compiler does not look into: then numbers a multiple of
    BITS + 1 apart are seen to be the same, where it would rather add up first and cut off once."""
    low = x & BITS
    if not INTERPRETED:
        low = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [low], dtype=tl.int32, is_pure=True, pack=1
        )
    return low


@triton.jit
def residue(x, start, period, reciprocal):
    """(x + start) % period of numbers x of 0 .. 255 inside a tile and 0 <= start < period < 32; reciprocal: 2 ** 16 /
    period rounded up."""
    # Exact: y times what the reciprocal is rounded up by is less than 2 ** 16.
    y = x + start
    return y - (y * reciprocal >> 16) * period


@triton.jit
def in_pattern(row, column, period, bits):
    """Whether bit (column - row) % period of bits is set, of remainders by a period below 32."""
    bits, row = bits.to(tl.uint32), row.to(tl.uint32)
    turned = (bits << row) | (bits >> (period.to(tl.uint32) - row))
    return (turned & (tl.full((), 1, tl.uint32) << column.to(tl.uint32))) != 0
