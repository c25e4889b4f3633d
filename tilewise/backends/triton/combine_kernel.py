"""The combine kernel: merges the partial results of the splits of the keys.

Grid: x = tiles of rows (all batch entries, heads and rows in one line). One program owns BLOCK_M rows and adds the
splits in their order, so bits do not depend on which finished first. The sink enters here, once.

Source: the monoid of `tilewise.state`; Dao et al., Flash-Decoding, 2023.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.forward_kernel import absorb_sink
from tilewise.backends.triton.words import LN2, LOG2E


@triton.jit
def combine(part_ptr, part_lse_ptr, out_ptr, lse_ptr, sink_ptr, o_b, o_h, o_n, o_d, lines, heads, seqlen_q, splits,
            size_dv, BLOCK_M: tl.constexpr, DV_PAD: tl.constexpr):  # fmt: skip
    """part (splits, lines, DV) and part_lse (splits, lines) float32; line = (batch * heads + head) * seqlen_q + row."""
    line = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    alive = line < lines
    d = tl.arange(0, DV_PAD)
    columns = (d < size_dv)[None, :]
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for split in range(0, splits):
        at = tl.cast(split, tl.int64) * lines + line
        lse = tl.load(part_lse_ptr + at, mask=alive, other=-float("inf"))
        part = tl.load(
            part_ptr + at[:, None] * size_dv + d[None, :], mask=alive[:, None] & columns, other=0.0
        )
        top = tl.maximum(m, lse)
        pivot = tl.where(top == -float("inf"), 0.0, top)
        alpha = tl.exp2((m - pivot) * LOG2E)
        weight = tl.exp2((lse - pivot) * LOG2E)
        l = l * alpha + weight  # noqa: E741
        # A split that saw nothing wrote 0 and takes no part, whatever its weight.
        acc = acc * alpha[:, None] + part * weight[:, None]
        m = top
    head = line // seqlen_q % heads
    if sink_ptr is not None:
        logit = tl.load(sink_ptr + head, mask=alive, other=0.0).to(tl.float32)
        m, l, alpha = absorb_sink(m, l, logit, LOG2E)  # noqa: E741
        acc = acc * alpha[:, None]
    empty = l == 0
    out = acc / tl.where(empty, 1.0, l)[:, None]
    tl.store(lse_ptr + line, tl.where(empty, -float("inf"), m + tl.log2(l) * LN2), mask=alive)
    b, row = line // seqlen_q // heads, line % seqlen_q
    place = out_ptr + (b * o_b + head * o_h + row * o_n)[:, None] + (d.to(tl.int64) * o_d)[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=alive[:, None] & columns)
