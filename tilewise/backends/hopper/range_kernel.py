"""Where the keys of each tile of rows lie, for masks that read tensors: looked at before the Hopper forward.

For each tile: the first key block that some row sees, one past the last, and what `codes_of` says of the 32 before it.

Grid: one program a tile of 64 * NWG rows and, where the mask tells heads apart, a head. A program asks the mask's
interval form about every key block that comparisons leave, 128 at once. Memory: RECORD int32 a program, O(N / rows).
Without it the forward's producer, one warp, would look at all blocks of a tile before it could say which is the last,
and what a block's bounds are is a chain of loads that takes it as long as five blocks take the consumers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.forward_place import BLOCKS, CODES, RECORD, heads_of, offset_of
from tilewise.backends.hopper.forward_shared import codes_of, kinds, reach
from tilewise.backends.hopper.rings import hidden

WIDTH = gl.constexpr(128)
"""Key blocks looked at together: one a thread."""
FAR = gl.constexpr(2**30)


@gluon.jit
def ranges_program(
    range_ptr, q_offset_ptr, k_offset_ptr, heads, group, seqlen_q, seqlen_k, row_tiles, q_offset, k_offset, data,
    NWG: gl.constexpr, BN: gl.constexpr, PACK: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr,
):  # fmt: skip
    """range (batch * heads, row_tiles, RECORD); the first block is 2^30 and the last 0 where a tile sees none.

    heads: units of a batch entry, 1 where the mask is the same for all of them.
    """
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    unit = gl.program_id(0) // row_tiles
    tile = gl.program_id(0) - unit * row_tiles
    b = unit // heads
    head = unit - b * heads
    q_pos = offset_of(q_offset, q_offset_ptr, b, seqlen_k - seqlen_q, Q_OFFSET)
    k_pos = offset_of(k_offset, k_offset_ptr, b, 0, K_OFFSET)
    g, h0, h1 = heads_of(head, group, PACK)
    last_row = gl.minimum((tile * (64 * NWG) + 64 * NWG - 1) // PACK, seqlen_q - 1)
    low, high = reach(tile * (64 * NWG) // PACK, last_row, q_pos, k_pos, b, h0, h1, g, data)
    begin = low // BN
    end = (gl.minimum(high, seqlen_k - 1) + BN) // BN
    first = gl.full([WIDTH], FAR, gl.int32, lanes)
    last = gl.full([WIDTH], 0, gl.int32, lanes)
    for start in range(begin, end, WIDTH):
        block = start + gl.arange(0, WIDTH, layout=lanes)
        j0 = block * BN
        j1 = gl.minimum(j0 + BN, seqlen_k) - 1
        seen = block < 0
        for w in range(hidden(NWG)):
            row = tile * (64 * NWG) + w * 64
            i0 = row // PACK
            i1 = gl.minimum((row + 63) // PACK, seqlen_q - 1)
            kind = kinds(gl.minimum(i0, i1), i1, j0, j1, q_pos, k_pos, b, h0, h1, g, data)
            seen |= ((kind & 1) != 0) & (i0 < seqlen_q)
        seen = seen & (block < end)
        first = gl.minimum(first, gl.where(seen, block, FAR))
        last = gl.maximum(last, gl.where(seen, block + 1, 0))
    low, top = gl.min(first, 0), gl.max(last, 0)
    at = range_ptr + gl.program_id(0) * RECORD
    gl.store(at, low)
    gl.store(at + 1, top)
    base = tile * (64 * NWG)
    codes = codes_of(
        top, low, top, b, head, base, seqlen_q, seqlen_k, q_pos, k_pos, group, data, NWG, BN, PACK, 4
    )
    gl.store(at + CODES + gl.arange(0, BLOCKS, layout=gl.BlockedLayout([1], [32], [4], [0])), codes)
