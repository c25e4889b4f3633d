"""Where the visible tiles of each tile of keys, and of rows, begin and end: looked at before the backward's kernels.

Grid: x = heads that the mask tells apart (1 if it is the same for all) * (key tiles + row tiles) (of all batch entries,
or of the packed tokens). One program owns a tile and asks the mask's interval form about every tile that it meets,
CHUNK at once. Memory: RUN int32 a tile.

Without it every program of `key_kernel` and `row_kernel`, of every head, would do the same before its first product,
and hold the registers for it in its loops.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.backward_words import CHUNK, RUN, column_kinds, locate, row_kinds
from tilewise.backends.triton.forward_kernel import position_offset


@triton.jit
def _survey(
    first_a, past_a, full_a, after_a, live_a, fulls_a, first_b, past_b, full_b, after_b, live_b, fulls_b
):  # fmt: skip
    return (
        tl.minimum(first_a, first_b), tl.maximum(past_a, past_b), tl.minimum(full_a, full_b),
        tl.maximum(after_a, after_b), live_a + live_b, fulls_a + fulls_b
    )  # fmt: skip


@triton.jit
def survey(found, kind, t, count):
    """(first, past, full, after, live, fulls) of what was found so far and tiles t of a kind each: the least and one
    past the greatest live tile, the same of FULL ones, how many of both."""
    live, fulls = (kind != 0).to(tl.int32), (kind == 2).to(tl.int32)
    low, high = tl.where(kind != 0, t, count), tl.where(kind != 0, t + 1, 0)
    full_low, full_high = tl.where(kind == 2, t, count), tl.where(kind == 2, t + 1, 0)
    first, past, full, after, live, fulls = tl.reduce(
        (low, high, full_low, full_high, live, fulls), 0, _survey
    )
    return (
        tl.minimum(found[0], first), tl.maximum(found[1], past), tl.minimum(found[2], full),
        tl.maximum(found[3], after), found[4] + live, found[5] + fulls
    )  # fmt: skip


@triton.jit
def look(
    unit, tile, places, numbers, data, classify, KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    VARLEN: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """What `survey` finds out about all tiles that a tile of keys, or of rows, meets."""
    cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, q_offset_ptr, k_offset_ptr = places
    batch, heads, group, seqlen_q, seqlen_k, q_offset, k_offset = numbers
    b, h, tile, _, _, n_q, _, n_k = locate(
        unit, tile, batch, heads, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, seqlen_q, seqlen_k, KEYS,
        BLOCK_N if KEYS else BLOCK_M, VARLEN)  # fmt: skip
    q_offset = position_offset(q_offset, q_offset_ptr, b, n_k - n_q, LAST)
    k_offset = position_offset(k_offset, k_offset_ptr, b, 0, False)
    place = (n_q, n_k, q_offset, k_offset, b, h, h // group)
    if KEYS:
        count = tl.where(tile * BLOCK_N < n_k, tl.cdiv(n_q, BLOCK_M), 0)
    else:
        count = tl.where(tile * BLOCK_M < n_q, tl.cdiv(n_k, BLOCK_N), 0)
    found = (count, 0, count, 0, 0, 0)
    for chunk in range(0, count, CHUNK):
        t = chunk + tl.arange(0, CHUNK)
        if KEYS:
            kind = row_kinds(t, count, tile, place, data, classify, BLOCK_M, BLOCK_N)
        else:
            kind = column_kinds(t, count, tile, place, data, classify, BLOCK_M, BLOCK_N)
        found = survey(found, kind, t, count)
    return found


@triton.jit
def runs_program(
    runs_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, batch, heads, group, seqlen_q,
    seqlen_k, key_tiles, row_tiles, q_offset, k_offset, data, classify, VARLEN: tl.constexpr, LAST: tl.constexpr,
    KEYS_M: tl.constexpr, KEYS_N: tl.constexpr, ROWS_M: tl.constexpr, ROWS_N: tl.constexpr,
):  # fmt: skip
    """One program: one tile of keys (KEYS_N of them, which meet KEYS_M rows at a time), or of rows.

    Written: first, full, after, past, and whether live tiles are first .. past - 1, of which full .. after - 1 are FULL
    and no others.
    """
    tiles = key_tiles + row_tiles
    unit = tl.program_id(0) // tiles
    tile = tl.program_id(0) - unit * tiles
    places = (cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, q_offset_ptr, k_offset_ptr)
    numbers = (batch, heads, group, seqlen_q, seqlen_k, q_offset, k_offset)
    if tile < key_tiles:
        found = look(unit, tile, places, numbers, data, classify, True, KEYS_M, KEYS_N, VARLEN, LAST)
    else:
        found = look(
            unit, tile - key_tiles, places, numbers, data, classify, False, ROWS_M, ROWS_N, VARLEN, LAST
        )
    first, past, full, after, live, fulls = found
    simple = (live == past - first) & ((fulls == 0) | (fulls == after - full))
    past = tl.maximum(past, first)
    at = runs_ptr + tl.program_id(0).to(tl.int64) * RUN
    tl.store(at, first)
    tl.store(at + 1, tl.where(fulls > 0, full, past))
    tl.store(at + 2, tl.where(fulls > 0, after, past))
    tl.store(at + 3, past)
    tl.store(at + 4, simple.to(tl.int32))
