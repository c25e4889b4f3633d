"""The merge kernel: attention over two disjoint sets of keys becomes attention over both, in one launch.

Grid: x = tiles of rows (all batch entries, heads and rows in one line). One program owns BLOCK_M rows. The sink
enters here, once. Memory: BLOCK_M x DV in registers.

Source: the monoid of `tilewise.state`; Juravsky et al. 2024, Hydragen, https://arxiv.org/abs/2402.05099.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.words import LN2, LOG2E


@triton.jit
def part_of(ptr, lse_ptr, strides, lse_strides, b, h, n, d, inside, alive):
    """(out, m) of rows of one part, m in powers of two; a row that saw nothing is 0, whatever it holds."""
    s_b, s_h, s_n, s_d = strides
    l_b, l_h, l_n = lse_strides
    at = b.to(tl.int64) * s_b + h.to(tl.int64) * s_h + n.to(tl.int64) * s_n
    line = b.to(tl.int64) * l_b + h.to(tl.int64) * l_h + n.to(tl.int64) * l_n
    m = tl.load(lse_ptr + line, mask=alive, other=-float("inf")) * LOG2E
    out = tl.load(ptr + at[:, None] + (d * s_d)[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where((m == -float("inf"))[:, None], 0.0, out), m


@triton.jit
def merge_two(
    a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, sink_ptr, out_ptr, lse_ptr,
    a_b, a_h, a_n, a_d, al_b, al_h, al_n, b_b, b_h, b_n, b_d, bl_b, bl_h, bl_n, o_b, o_h, o_n, o_d, ol_b, ol_h, ol_n,
    lines, heads, rows, size_dv, BLOCK_M: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """out, lse of the union of parts a and b and, if there is one, the sink (heads,)."""
    line = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    alive = line < lines
    n, h, b = line % rows, line // rows % heads, line // rows // heads
    d = tl.arange(0, DV_PAD)
    inside = alive[:, None] & (d < size_dv)[None, :]
    first, m_first = part_of(a_ptr, a_lse_ptr, (a_b, a_h, a_n, a_d), (al_b, al_h, al_n), b, h, n, d, inside, alive)
    rest, m_rest = part_of(b_ptr, b_lse_ptr, (b_b, b_h, b_n, b_d), (bl_b, bl_h, bl_n), b, h, n, d, inside, alive)
    top = tl.maximum(m_first, m_rest)
    logit = -float("inf") + tl.zeros_like(top)
    if sink_ptr is not None:
        logit = tl.load(sink_ptr + h, mask=alive, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(top, logit)
    pivot = tl.where(top == -float("inf"), 0.0, top)
    w_first, w_rest = tl.exp2(m_first - pivot), tl.exp2(m_rest - pivot)
    l = w_first + w_rest + tl.exp2(logit - pivot)  # noqa: E741
    empty = l == 0
    inverse = tl.div_rn(1.0 + tl.zeros_like(l), tl.where(empty, 1.0, l))
    out = first * (w_first * inverse)[:, None] + rest * (w_rest * inverse)[:, None]
    to = b.to(tl.int64) * o_b + h.to(tl.int64) * o_h + n.to(tl.int64) * o_n
    place = out_ptr + to[:, None] + (d * o_d)[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)
    to = b.to(tl.int64) * ol_b + h.to(tl.int64) * ol_h + n.to(tl.int64) * ol_n
    tl.store(lse_ptr + to, tl.where(empty, -float("inf"), (top + tl.log2(l)) * LN2), mask=alive)
