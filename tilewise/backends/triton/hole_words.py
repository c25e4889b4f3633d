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


@triton.constexpr_function
def repeated(bits, period, turned):
    """A pattern of `period` bits over and over, 64 in all; turned: bit -n for bit n."""
    own = [bits >> (-n % period if turned else n) & 1 for n in range(period)]
    return sum(own[n % period] << n for n in range(64))


@triton.jit
def in_pattern(row, column, row_start, column_start, PERIOD: tl.constexpr, BITS: tl.constexpr):
    """Whether bit (column - row) % PERIOD of BITS is set, of numbers inside a tile and where it begins, modulo PERIOD,
    which is below 32.

    Along the first axis, of which a thread has few numbers, each has the pattern turned to where the other axis
    begins, 32 numbers a word. Of the numbers along that axis the lowest three bits are the thread's, the others the
    same for all threads: a word is shifted by the former, and then one and the same bit is tested by all.
    """
    ROWS_FIRST: tl.constexpr = row.shape[1] == 1
    reciprocal: tl.constexpr = (2**16 + PERIOD - 1) // PERIOD
    period = tl.full((), PERIOD, tl.int32)
    if ROWS_FIRST:
        turn = column_start - residue(row, row_start, period, reciprocal)
        along = column
    else:
        turn = row_start - residue(column, column_start, period, reciprocal)
        along = row
    bits = tl.full((), repeated(BITS, PERIOD, not ROWS_FIRST), tl.uint64)
    turn = tl.where(turn < 0, turn + PERIOD, turn)
    word = (bits >> turn.to(tl.uint64)).to(tl.uint32)
    for n in tl.static_range(1, (row.shape[1] * column.shape[1]) // 32):
        turn += 32 % PERIOD
        turn = tl.where(turn >= PERIOD, turn - PERIOD, turn)
        word = tl.where(along >= 32 * n, (bits >> turn.to(tl.uint64)).to(tl.uint32), word)
    shifted = word >> low_bits(along, 7).to(tl.uint32)
    return (shifted & (tl.full((), 1, tl.uint32) << (along & 24).to(tl.uint32))) != 0
