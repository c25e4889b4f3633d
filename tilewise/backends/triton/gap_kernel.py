"""Out and lse of packed tokens that belong to no sequence, or lie past its used length: 0 and -inf.

Grid: x = gaps, one before the first sequence and one after each, y = programs that share a gap. The rest of out and
lse is not touched, so nothing is written twice.
"""

import triton
import triton.language as tl

TOKENS = tl.constexpr(16)


@triton.jit
def fill_gaps(
    out_ptr, lse_ptr, cu_ptr, used_ptr, o_n, o_h, o_d, l_h, total, batch, heads, size_dv,
    USED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out (tokens, heads, size_dv) and lse (heads, tokens); cu (batch + 1,), clamped to the tokens; used (batch,)."""
    gap = tl.program_id(0)
    last = tl.maximum(gap - 1, 0)
    start, stop = gap * 0, total
    if gap > 0:
        first = tl.minimum(tl.maximum(tl.load(cu_ptr + last).to(tl.int32), 0), total)
        end = tl.minimum(tl.maximum(tl.load(cu_ptr + gap).to(tl.int32), 0), total)
        length = tl.maximum(end - first, 0)
        if USED:
            length = tl.minimum(length, tl.maximum(tl.load(used_ptr + last).to(tl.int32), 0))
        start = first + length
        if gap < batch:
            stop = end
    else:
        stop = tl.minimum(tl.maximum(tl.load(cu_ptr).to(tl.int32), 0), total)
    d = tl.arange(0, BLOCK_D)
    for begin in range(start + tl.program_id(1) * TOKENS, stop, tl.num_programs(1) * TOKENS):
        token = begin + tl.arange(0, TOKENS)
        alive = token < stop
        for h in range(heads):
            row = out_ptr + token.to(tl.int64) * o_n + h * o_h
            zeros = tl.zeros((TOKENS, BLOCK_D), tl.float32)
            tl.store(row[:, None] + d[None, :] * o_d, zeros, mask=alive[:, None] & (d < size_dv)[None, :])
            gone = tl.full((TOKENS,), float("-inf"), tl.float32)
            tl.store(lse_ptr + h * l_h + token, gone, mask=alive)
