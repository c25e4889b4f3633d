"""The backward for Hopper by tiles of 64 keys, for head dimensions of 192 with up to 128 of v: dk and dv; dq is
`backward_drawn_rows`'.

Grid: one program a multiprocessor, which draws tiles of keys (the first keys first) until none is left. As in
`backward_roles`, one warpgroup has S, P and dV, the other dP, dS and dK, and weights pass through shared memory. Here S
and dP of the next rows are issued before these are folded, so that the matrix unit is busy meanwhile; K lies in the
registers of the one and V in those of the other, since S and dP read as much of shared memory as it gives; so the next
keys come, and dk and dv leave through a place of their own, while others are worked on.

Source: Shah et al., FlashAttention-3, 2024, https://arxiv.org/abs/2407.08608; measurements in docs/hopper-backward.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)  # fmt: skip

from tilewise.backends.hopper.backward_rings import (
    ENTRY,
    FIELDS,
    RING,
    add_products,
    line_sums,
    note,
    number,
    operands_of,
    product_with,
    store_chunks,
    tiles_of,
    zeros_of,
)  # fmt: skip
from tilewise.backends.hopper.backward_shared import produce, weights
from tilewise.backends.hopper.rings import barriers, put, slots_of


@gluon.jit
def early_producer(
    counter_ptr, descs, room, slots, signals, kv_empty, sizes, tables, offsets, data, NC: gl.constexpr,
    NV: gl.constexpr, W: gl.constexpr, ST: gl.constexpr, HAS_MASK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr,
):  # fmt: skip
    """One warp: draws tiles of keys until none is left. A number below 0 of row tiles says that there is none."""
    n, ti = 0, 0
    total = tiles_of(sizes, VARLEN)
    t = gl.program_id(0)
    while t < total:
        n, t = produce(
            t, n, 0, (ti & 1) * FIELDS, descs, room, slots, signals, kv_empty, (ti & 1) ^ 1, counter_ptr, sizes, tables,
            offsets, data, 64, 64, NC, NV, W, ST, HAS_MASK, VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, False,
            True, False, (0, 0, 0), False)  # fmt: skip
        t += gl.num_programs(0)
        ti += 1
    mbarrier.wait(kv_empty, (ti & 1) ^ 1)
    put(slots[0], (ti & 1) * FIELDS, -1)
    mbarrier.arrive(signals[0].index(0), count=1)


@gluon.jit
def weigher(
    dv_out, marks_ptr, room, p_s, stage_s, slots, signals, kv_empty, passes, sizes, scale, data, NC: gl.constexpr,
    NV: gl.constexpr, W: gl.constexpr, ST: gl.constexpr, HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """One warpgroup: S^T, P^T, dV."""
    q_s, do_s, k_s, _, m_s, _ = room
    about_s, entry_s = slots
    kv_full, q_full, q_empty, do_full, do_empty = signals
    p_full, p_empty = passes
    dt: gl.constexpr = q_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16]
    )
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    batch, heads, group, _, _, _, _, _ = sizes
    n, ti = 0, 0
    mbarrier.wait(kv_full.index(0), 0)
    count = number(about_s, 0)
    while count >= 0:
        at = (ti & 1) * FIELDS
        k = operands_of(k_s, 0, NC, W, SL)
        dv = zeros_of(NV, 64, W, OL)
        mbarrier.wait(q_full.index(n % ST), (n // ST) & 1, pred=count > 0)
        s = product_with(k, q_s, n % ST * NC, NC, W, SL)
        s = warpgroup_mma_wait(0, deps=(s,))
        # What a product has taken has arrived in registers.
        mbarrier.arrive(kv_empty, count=1)
        for it in range(n, n + count):
            st, slot = it % ST, it & 1
            ahead = it + 1
            mbarrier.wait(q_full.index(ahead % ST), (ahead // ST) & 1, pred=ahead < n + count)
            s_ahead = product_with(k, q_s, ahead % ST * NC, NC, W, SL)
            mbarrier.wait(p_empty.index(slot), ((it >> 1) & 1) ^ 1)
            entry = (it % RING) * ENTRY
            code, h = number(entry_s, entry), number(entry_s, entry + 2)
            m = m_s.index(st).load(SL)
            p, slope = weights(s, m, code, h, 0, about_s, at, scale, data, HAS_MASK, HAS_TERMS,
                               HAS_MASK or HAS_TERMS or VARLEN)  # fmt: skip
            mbarrier.arrive(q_empty.index(st), count=1)
            pb = p.to(dt)
            if HAS_TERMS:
                p_s.index(slot).store(gl.where(p == 0, 0.0, p * slope).to(dt))
            else:
                p_s.index(slot).store(pb)
            mbarrier.arrive(p_full.index(slot), count=1)
            mbarrier.wait(do_full.index(st), (it // ST) & 1)
            dv = add_products(dv, gl.convert_layout(pb, PL), do_s, st * NV, NV, W)
            if NV == 1:
                dv0, s = warpgroup_mma_wait(0, deps=(dv[0], s_ahead))
                dv = (dv0,)
            else:
                dv0, dv1, s = warpgroup_mma_wait(0, deps=(dv[0], dv[1], s_ahead))
                dv = (dv0, dv1)
            mbarrier.arrive(do_empty.index(st), count=1)
        n += count
        b, g, j0 = number(about_s, at + 1), number(about_s, at + 2), number(about_s, at + 3)
        n_k, row = number(about_s, at + 4), number(about_s, at + 5) + j0
        tb = 0 if VARLEN else b
        note(marks_ptr, line_sums(dv, NV), b, g * group, group, heads, batch)
        tma.store_wait(0)
        store_chunks(dv_out, dv, 1.0, stage_s, 0, tb, g, row, n_k - j0, NV, W, OL, VARLEN)
        ti += 1
        mbarrier.wait(kv_full.index(0), ti & 1)
        count = number(about_s, (ti & 1) * FIELDS)
    tma.store_wait(0)


@gluon.jit
def sloper(
    dk_out, marks_ptr, room, p_s, stage_s, slots, signals, kv_empty, passes, sizes, scale, NC: gl.constexpr,
    NV: gl.constexpr, W: gl.constexpr, ST: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """The other warpgroup: dP^T, dS^T, dK."""
    q_s, do_s, _, v_s, _, delta_s = room
    about_s, _ = slots
    kv_full, q_full, q_empty, do_full, do_empty = signals
    p_full, p_empty = passes
    dt: gl.constexpr = q_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16]
    )
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    batch, heads, group, _, _, _, _, _ = sizes
    n, ti = 0, 0
    mbarrier.wait(kv_full.index(0), 0)
    count = number(about_s, 0)
    while count >= 0:
        at = (ti & 1) * FIELDS
        v = operands_of(v_s, 0, NV, W, SL)
        dk = zeros_of(NC, 64, W, OL)
        mbarrier.wait(do_full.index(n % ST), (n // ST) & 1, pred=count > 0)
        dp = product_with(v, do_s, n % ST * NV, NV, W, SL)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(kv_empty, count=1)
        for it in range(n, n + count):
            st, slot = it % ST, it & 1
            ahead = it + 1
            mbarrier.wait(do_full.index(ahead % ST), (ahead // ST) & 1, pred=ahead < n + count)
            dp_ahead = product_with(v, do_s, ahead % ST * NV, NV, W, SL)
            dp = dp - delta_s.index(st).load(SL)
            mbarrier.arrive(do_empty.index(st), count=1)
            mbarrier.wait(p_full.index(slot), (it >> 1) & 1)
            ds = (p_s.index(slot).load(SL).to(gl.float32) * dp).to(dt)
            mbarrier.arrive(p_empty.index(slot), count=1)
            mbarrier.wait(q_full.index(st), (it // ST) & 1)
            dk = add_products(dk, gl.convert_layout(ds, PL), q_s, st * NC, NC, W)
            dk0, dk1, dk2, dp = warpgroup_mma_wait(0, deps=(dk[0], dk[1], dk[2], dp_ahead))
            dk = (dk0, dk1, dk2)
            mbarrier.arrive(q_empty.index(st), count=1)
        n += count
        b, g, j0 = number(about_s, at + 1), number(about_s, at + 2), number(about_s, at + 3)
        n_k, row = number(about_s, at + 4), number(about_s, at + 5) + j0
        tb = 0 if VARLEN else b
        note(marks_ptr, line_sums(dk, NC), b, g * group, group, heads, batch)
        tma.store_wait(0)
        store_chunks(dk_out, dk, scale, stage_s, NV, tb, g, row, n_k - j0, NC, W, OL, VARLEN)
        ti += 1
        mbarrier.wait(kv_full.index(0), ti & 1)
        count = number(about_s, (ti & 1) * FIELDS)
    tma.store_wait(0)


@gluon.jit
def early_program(
    q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, marks_ptr, counter_ptr,
    q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, batch,
    heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles, swizzle, q_offset, k_offset, size_d, size_dv, scale, data,
    HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr, NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr,
    ST: gl.constexpr, VARLEN: gl.constexpr, USED_Q: gl.constexpr,
    USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, WORKER: gl.constexpr,
    LOADER: gl.constexpr,
):  # fmt: skip
    """The roles, 64 keys at a time, and the producer. WORKER, LOADER: registers of a thread of each."""
    dt: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dt, [ST * NC, 1, 1, 64, W], q_desc.layout)
    do_s = gl.allocate_shared_memory(dt, [ST * NV, 1, 1, 64, W], do_desc.layout)
    k_s = gl.allocate_shared_memory(dt, [NC, 1, 1, 64, W], k_desc.layout)
    v_s = gl.allocate_shared_memory(dt, [NV, 1, 1, 64, W], v_desc.layout)
    m_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], m_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], delta_desc.layout)
    p_s = gl.allocate_shared_memory(dt, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    # dv and dk leave from here while the next keys are worked on.
    stage_s = gl.allocate_shared_memory(dt, [NV + NC, 1, 1, 64, W], k_desc.layout)
    slots = (slots_of(2 * FIELDS), slots_of(RING * ENTRY))
    kv_full, kv_empty = barriers(1, 1), barriers(1, 2).index(0)
    q_full, q_empty, do_full, do_empty = barriers(ST, 1), barriers(ST, 2), barriers(ST, 1), barriers(ST, 2)
    passes = (barriers(2, 1), barriers(2, 1))
    fence_async_shared()
    sizes = (batch, heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles, swizzle)
    tables = (cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr)
    offsets = (q_offset, q_offset_ptr, k_offset, k_offset_ptr)
    descs = (q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc)
    dk_out = (dk_desc, dk_ptr, dk_b, dk_h, dk_n, size_d)
    dv_out = (dv_desc, dv_ptr, dv_b, dv_h, dv_n, size_dv)
    room = (q_s, do_s, k_s, v_s, m_s, delta_s)
    signals = (kv_full, q_full, q_empty, do_full, do_empty)
    # Constants survive in a tuple only where it is written inside the call.
    gl.warp_specialize([
        (weigher, (
            dv_out, marks_ptr, room, p_s, stage_s, slots, signals, kv_empty, passes, sizes, scale, data, NC, NV, W, ST,
            HAS_MASK, HAS_TERMS, VARLEN)),
        (sloper, (
            dk_out, marks_ptr, room, p_s, stage_s, slots, signals, kv_empty, passes, sizes, scale, NC, NV, W, ST,
            VARLEN)),
        (early_producer, (
            counter_ptr, descs, room, slots, signals, kv_empty, sizes, tables, offsets, data, NC, NV, W, ST, HAS_MASK,
            VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET)),
    ], [4, 1], [WORKER, LOADER])  # fmt: skip
