"""What the Hopper forward does again: tiles of 64 rows that met something not finite.

A weight of 0 times a hidden NaN is NaN. It is rare, so the loop over keys does not look for it: a warpgroup whose
sums are not finite leaves its tile, and the program does it again when all its tiles are done, or at D=256 a second
launch. The tiles that a warpgroup left form a list, whose links lie where the tiles' lse will. The first consumer's
warps do this, 32 keys and 64 columns of v at a time: few registers rather than speed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.forward_finish import LOWEST, close_rows, store_rows
from tilewise.backends.hopper.forward_place import line_of, lines_of, offset_of, place
from tilewise.backends.hopper.forward_shared import LINES, fold, marks_of, parts_of, seen_blocks
from tilewise.backends.hopper.forward_state import raise_top, top_of, weigh
from tilewise.backends.hopper.names import tma_load
from tilewise.backends.hopper.rings import fetch, get, here, hidden, load_tile


@gluon.jit
def absorb_values(acc, p, seen, v_s, BN: gl.constexpr, E0: gl.constexpr, OL: gl.constexpr):
    """acc + p v for 32 keys and 64 columns. An entry of v that is not finite makes NaN of the rows that see it, and of
    no other: in the first stage of v it becomes 0, in the second a mark."""
    VL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    dt: gl.constexpr = v_s.dtype
    clean = v_s.index(0).reshape([BN, E0]).slice(0, 32).slice(0, 64, 1)
    marks = v_s.index(1).reshape([BN, E0]).slice(0, 32).slice(0, 64, 1)
    v = clean.load(VL).to(gl.float32)
    finite = (v - v) == 0.0
    clean.store(gl.where(finite, v, 0.0).to(dt))
    marks.store(gl.where(finite, 0.0, 1.0).to(dt))
    fence_async_shared()
    gl.thread_barrier()
    acc = warpgroup_mma(gl.convert_layout(p.to(dt), PL), clean, acc, is_async=True)
    met = gl.full([64, 64], 0.0, gl.float32, OL)
    met = warpgroup_mma(gl.convert_layout(seen.to(dt), PL), marks, met, use_acc=False, is_async=True)
    acc, met = warpgroup_mma_wait(0, deps=(acc, met))
    gl.thread_barrier()
    return gl.where(met > 0.0, float("nan"), acc)


@gluon.jit
def careful_block(
    n, c, tile_of, tb, g, parts, acc, m, l, use, q, q2, k_desc, k_desc2, v_desc, k_s, k_s2, v_s,  # noqa: E741
    loaded, scale, data,
    FUSED: gl.constexpr, BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, SL: gl.constexpr,
    OL: gl.constexpr,
):  # fmt: skip
    """(acc, m, l) after 32 keys from n on."""
    b, head, key0, n_k, q_offset, k_offset, rows, h = tile_of
    mbarrier.expect(loaded.index(0), BN * (D0 + D1 + E0) * 2)
    fetch(k_desc, k_desc2, k_s.index(0), k_s2.index(0), loaded.index(0), (tb, g, key0 + n), D0, D1)
    tma_load(v_desc, (tb, g, key0 + n, c * 64), loaded.index(0), v_s.index(0))
    mbarrier.wait(loaded.index(0), use & 1)
    s = gl.full([64, 32], 0.0, gl.float32, SL)
    k = k_s.index(0).reshape([BN, D0]).slice(0, 32)
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    if D1 > 0:
        k2 = k_s2.index(0).reshape([BN, D1]).slice(0, 32)
        s = warpgroup_mma(q2, k2.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    # 32 keys as a block of their own, of which no condition is FULL.
    code = ((n // 32) << 10) | 144
    marks = marks_of(code, 0, parts, rows, h, b, g, q_offset, k_offset, scale, data, 32, SL)
    s, rate, shift = fold(
        s, code, 0, marks, parts, rows, h, b, g, n_k, q_offset, k_offset, scale, data, True, FUSED,
        False, 32, SL)  # fmt: skip
    m, alpha = raise_top(m, top_of(s, rate, shift), 0.0, False)
    p = weigh(s, m, rate, shift)
    l = gl.fma(l, alpha, gl.sum(p, 1))  # noqa: E741
    seen = gl.where(s != float("-inf"), 1.0, 0.0)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]
    acc = absorb_values(acc, p, seen, v_s, BN, E0, OL)
    return acc, m, l


@gluon.jit
def careful_columns(
    c, tile_of, span, q_s, q_s2, k_desc, k_desc2, v_desc, k_s, k_s2, v_s, loaded, use, scale, group, data,
    FUSED: gl.constexpr, BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, PACK: gl.constexpr,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """(acc of 64 columns from 64 * c on, m, l, use) of the 64 rows whose q lies in shared memory; use: loads so far."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 32, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 64, 16])
    b, head, key0, n_k, q_offset, k_offset, rows, h = tile_of
    begin, end = span
    tb = 0 if VARLEN else b
    g = head if PACK > 1 else head // group
    parts = parts_of(rows, q_offset, b, h, g, scale, data)
    q = q_s.index(0).reshape([64, D0])
    q2 = q_s2.index(0).reshape([64, D1 if D1 > 0 else D0])
    m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, SL))
    l = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, SL))  # noqa: E741
    acc = gl.full([64, 64], 0.0, gl.float32, OL)
    # All blocks between the ends that the mask's lines leave, whatever else it says: one copy of the printed code less.
    block = end - 1
    while block >= begin:
        for part in range(BN // 32):
            acc, m, l = careful_block(  # noqa: E741
                block * BN + part * 32, c, tile_of, tb, g, parts, acc, m, l, use, q, q2, k_desc, k_desc2, v_desc, k_s,
                k_s2, v_s, loaded, scale, data, FUSED, BN, D0, D1, E0, SL, OL)  # fmt: skip
            use += 1
        block -= 1
    return acc, m, l, use


@gluon.jit
def again_tile(
    t, w, use, loaded, q_desc, q_desc2, k_desc, k_desc2, v_desc, q_s, q_s2, k_s, k_s2, v_s, out_ptr, lse_ptr, sink_ptr,
    sizes, tables, offsets, strides, group, split_tiles, size_dv, scale, data, FUSED: gl.constexpr, NWG: gl.constexpr,
    BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """Do tile t of warpgroup w again: (the one to be done after it, loads so far)."""
    RL: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 32, 16]))
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 64, 16])
    RO: gl.constexpr = gl.SliceLayout(1, OL)
    q_offset0, q_offset_ptr, k_offset0, k_offset_ptr = offsets
    o_s0, o_b, o_h, o_n, l_s, l_b, l_h = strides
    b, head, base, split, row0, n_q, key0, n_k = place(t, sizes, tables, VARLEN, USED_Q, USED_K, NWG, PACK, 4)
    q_offset = offset_of(here(q_offset0), q_offset_ptr, b, n_k - n_q, Q_OFFSET)
    k_offset = offset_of(here(k_offset0), k_offset_ptr, b, 0, K_OFFSET)
    blocks = gl.cdiv(n_k, BN)
    each = gl.where(split_tiles > 0, split_tiles, gl.cdiv(blocks, sizes[6]))
    begin = split * each
    end = gl.minimum(begin + each, blocks)
    if LINES:
        begin, end = seen_blocks(
            begin, end, b, head, base, n_q, q_offset, k_offset, group, data, NWG, BN, PACK)  # fmt: skip
    tb = 0 if VARLEN else b
    rows, h_rows = lines_of(head, base, w, PACK, RL)
    h = h_rows[:, None] if PACK > 1 else head
    alive = rows < n_q
    first = line_of(base, w) // PACK
    lse_line = lse_ptr + split.to(gl.int64) * l_s + tb * l_b + row0
    h0 = head * PACK if PACK > 1 else head
    link = gl.load(lse_line + h0.to(gl.int64) * l_h + first).to(gl.int32, bitcast=True)
    if PACK > 1:
        at = (tb, head, row0 + first, 0)
    else:
        at = (tb, head // group, row0 + first, head % group)
    load_tile(q_desc, q_desc2, q_s.index(0), q_s2.index(0), loaded.index(0), at, D0, D1, 64)
    mbarrier.wait(loaded.index(0), use & 1)
    use += 1
    # All have read the link before anyone writes lse.
    gl.thread_barrier()
    pointers = out_ptr + split.to(gl.int64) * o_s0 + tb * o_b + row0 * o_n
    pointers = pointers + h_rows.to(gl.int64) * o_h + rows.to(gl.int64) * o_n
    tile_of = (b, head, key0, n_k, q_offset, k_offset, rows, h)
    for c in range(gl.cdiv(size_dv, 64)):
        acc, m, l, use = careful_columns(  # noqa: E741
            c, tile_of, (begin, end), q_s, q_s2, k_desc, k_desc2, v_desc, k_s, k_s2, v_s, loaded, use, scale,
            group, data, FUSED, BN, D0, D1, E0, PACK, VARLEN)  # fmt: skip
        lse, inverse = close_rows(m, l, h_rows, alive, sink_ptr, SINK)
        gl.store(lse_line + h_rows.to(gl.int64) * l_h + rows, lse, mask=alive)
        store_rows(
            gl.convert_layout(pointers, RO), acc, gl.convert_layout(inverse, RO),
            gl.convert_layout(alive, RO), size_dv, c * 64, 64, OL)  # fmt: skip
    return link, use


@gluon.jit
def repeat(
    again_s, loaded, q_desc, q_desc2, k_desc, k_desc2, v_desc, q_s, q_s2, k_s, k_s2, v_s, out_ptr, lse_ptr, sink_ptr,
    sizes, tables, offsets, strides, group, split_tiles, size_dv, scale, data, FUSED: gl.constexpr, NWG: gl.constexpr,
    BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """Do the tiles again that the warpgroups of this program left: again_s holds the last one of each, or -1."""
    batch, heads, seqlen_q, seqlen_k, row_tiles, swizzle, splits, early = sizes
    # Hidden, so that the compiler does not make for both what the producer makes of them and keep it meanwhile.
    sizes = (
        here(batch), here(heads), here(seqlen_q), here(seqlen_k), here(row_tiles), here(swizzle), here(splits),
        here(early),
    )  # fmt: skip
    group, split_tiles = here(group), here(split_tiles)
    use = 0
    for w in range(hidden(NWG)):
        t = get(again_s, w)
        while t >= 0:
            t, use = again_tile(
                t, w, use, loaded, q_desc, q_desc2, k_desc, k_desc2, v_desc, q_s, q_s2, k_s, k_s2, v_s, out_ptr,
                lse_ptr, sink_ptr, sizes, tables, offsets, strides, group, split_tiles, size_dv, scale, data,
                FUSED, NWG, BN, D0, D1, E0, PACK, VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, SINK)  # fmt: skip
