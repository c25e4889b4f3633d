"""What the Hopper forward writes where a packed call's tokens belong to no sequence, or lie past its used length: 0 to
out, -inf to lse. All programs share the work, before their first tile, while its loads are on their way: each looks at
SEARCH gaps, of which it clears its share of the tokens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SEARCH = gl.constexpr(128)
"""Gaps looked at together: one a thread."""
TOKENS = gl.constexpr(16)


@gluon.jit
def fill_gaps(out_ptr, lse_ptr, gaps, strides, size_dv, USED: gl.constexpr):
    """One warpgroup. gaps: table of starts, used lengths, sequences, heads, tokens; gap n lies before sequence n.

    out (tokens, heads, size_dv), lse (heads, tokens); strides: of a token and a head of out, of a head of lse.
    """
    cu_ptr, used_ptr, batch, heads, total = gaps
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    program, programs, parts = gl.program_id(0), gl.num_programs(0), gl.cdiv(batch + 1, SEARCH)
    for part in range(program % parts, parts, programs):
        share = (program // parts, (programs - 1 - part) // parts + 1)
        n = part * SEARCH + gl.arange(0, SEARCH, layout=lanes)
        inside = n <= batch
        stop = gl.load(cu_ptr + n, mask=inside & (n < batch), other=total).to(gl.int32)
        stop = gl.minimum(gl.maximum(stop, 0), total)
        begin = gl.load(cu_ptr + n - 1, mask=inside & (n > 0), other=0).to(gl.int32)
        begin = gl.minimum(gl.maximum(begin, 0), total)
        end = gl.load(cu_ptr + n, mask=inside & (n > 0), other=0).to(gl.int32)
        end = gl.minimum(gl.maximum(end, 0), total)
        length = gl.maximum(end - begin, 0)
        if USED:
            used = gl.load(used_ptr + n - 1, mask=inside & (n > 0), other=0).to(gl.int32)
            length = gl.minimum(length, gl.maximum(used, 0))
        begin = begin + length
        missing = gl.where(inside, gl.maximum(stop - begin, 0), 0)
        at = gl.max(gl.where(missing > 0, n, -1), 0)
        while at >= 0:
            first = gl.max(gl.where(n == at, begin, 0), 0)
            last = gl.max(gl.where(n == at, stop, 0), 0)
            clear(out_ptr, lse_ptr, first, last, share, heads, strides, size_dv)
            at = gl.max(gl.where((missing > 0) & (n < at), n, -1), 0)


@gluon.jit
def clear(out_ptr, lse_ptr, first, stop, share, heads, strides, size_dv):
    """0 and -inf for a share of the tokens first .. stop - 1: (which, of how many)."""
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_n, o_h, l_h = strides
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, tile))[None, :]
    which, many = share
    for begin in range(first + which * TOKENS, stop, many * TOKENS):
        token = begin + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, tile))
        alive = token < stop
        for h in range(heads):
            row = (out_ptr + h.to(gl.int64) * o_h) + token.to(gl.int64) * o_n
            zeros = gl.zeros([TOKENS, 128], gl.float32, tile).to(out_ptr.dtype.element_ty)
            for column in range(0, size_dv, 128):
                gl.store(row[:, None] + (column + d), zeros, mask=alive[:, None] & (column + d < size_dv))
            gone = gl.full([TOKENS], float("-inf"), gl.float32, gl.SliceLayout(1, tile))
            gl.store(lse_ptr + h.to(gl.int64) * l_h + token, gone, mask=alive)
