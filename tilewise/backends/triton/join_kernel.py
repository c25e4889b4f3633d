"""The join kernel: merges two attentions over disjoint keys of the same queries, as the cascade wants it.

Grid: x = tiles of rows (all batch entries, heads and query rows in one line). One program owns BLOCK_M rows. The first
part may lie in any order; the sink enters here, once. State in registers: out (BLOCK_M, DV), float32.

Source: the monoid of `tilewise.state`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewise.backends.triton.words import LN2, LOG2E


@triton.jit
def join(a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, out_ptr, lse_ptr, sink_ptr, a_b, a_h, a_n, al_b, al_h, al_n, b_b, b_h,
         b_n, bl_b, bl_h, bl_n, o_b, o_h, o_n, lines, heads, seqlen_q, size_dv, BLOCK_M: tl.constexpr,
         DV_PAD: tl.constexpr, PDL: tl.constexpr, REHEARSED: tl.constexpr):  # fmt: skip
    """out = the merge of (a, a_lse) and (b, b_lse), natural logarithms; lse is contiguous (batch, heads, rows).

    PDL, REHEARSED: as in `decode_kernel.merge_program`.
    """
    turns = tl.minimum(lines, 1) + 1 if REHEARSED else 1
    for turn in range(0, turns):
        real = turn == turns - 1
        if PDL:
            if real:
                gdc_wait()
                gdc_launch_dependents()
        line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        alive = (line < lines) & real
        n = line % seqlen_q
        h = line // seqlen_q % heads
        batch = (line // seqlen_q // heads).to(tl.int64)
        d = tl.arange(0, DV_PAD)
        inside = alive[:, None] & (d < size_dv)[None, :]
        first = tl.load(a_lse_ptr + batch * al_b + h * al_h + n * al_n, mask=alive, other=-float("inf"))
        second = tl.load(b_lse_ptr + batch * bl_b + h * bl_h + n * bl_n, mask=alive, other=-float("inf"))
        a = tl.load(a_ptr + (batch * a_b + h * a_h + n * a_n)[:, None] + d[None, :], mask=inside, other=0.0)
        b = tl.load(b_ptr + (batch * b_b + h * b_h + n * b_n)[:, None] + d[None, :], mask=inside, other=0.0)
        top = tl.maximum(first, second)
        third = tl.full([BLOCK_M], -float("inf"), tl.float32)
        if sink_ptr is not None:
            third = tl.load(sink_ptr + h, mask=alive, other=0.0).to(tl.float32)
            top = tl.maximum(top, third)
        pivot = tl.where(top == -float("inf"), 0.0, top)
        # A sink that is all a row has weighs 1, infinite as it may be.
        alone = (third == float("inf")) & (first == -float("inf")) & (second == -float("inf"))
        first, second = tl.exp2((first - pivot) * LOG2E), tl.exp2((second - pivot) * LOG2E)
        total = first + second + tl.exp2(tl.where(alone, 0.0, third - pivot) * LOG2E)
        empty = total == 0
        inverse = 1.0 / tl.where(empty, 1.0, total)
        # A part without visible keys adds nothing, whatever it holds.
        out = tl.where((first > 0)[:, None], a * (first * inverse)[:, None], 0.0)
        out += tl.where((second > 0)[:, None], b * (second * inverse)[:, None], 0.0)
        place = out_ptr + (batch * o_b + h * o_h + n * o_n)[:, None] + d[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(lse_ptr + line, tl.where(empty, -float("inf"), pivot + tl.log2(total) * LN2), mask=alive)
