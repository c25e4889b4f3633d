"""The backward for Hopper by tiles of 64 keys, for wide heads: dk and dv; dq is `backward_row_kernel`'s.

Grid: KV heads x tiles of keys, the first keys first. dk and dv of 64 keys are all that the registers of two warpgroups
hold, so work is divided by product, not by keys: one warpgroup has S, P and dV, the other dP, dS and dK; weights pass
through shared memory. A warp produces, as in `backward_kernel`. All products are transposed (keys x rows).

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
    product_of,
    store_chunks,
    zeros_of,
)  # fmt: skip
from tilewise.backends.hopper.backward_shared import produce, weights
from tilewise.backends.hopper.rings import barriers, slots_of


@gluon.jit
def roles_producer(
    descs, room, slots, signals, sizes, tables, offsets, data, NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr,
    ST: gl.constexpr, HAS_MASK: gl.constexpr, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr,
    Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr,
):  # fmt: skip
    """One warp: the program's only tile of keys."""
    produce(
        gl.program_id(0), 0, 0, 0, descs, room, slots, signals, signals[4].index(0), 1, 0, sizes, tables, offsets, data,
        64, 64, NC, NV, W, ST, HAS_MASK, VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, False, False,
        False, (0, 0, 0), False)  # fmt: skip


@gluon.jit
def weigher(
    dv_out, marks_ptr, room, p_s, slots, signals, p_full, p_empty, sizes, scale, data, NC: gl.constexpr,
    NV: gl.constexpr, W: gl.constexpr, ST: gl.constexpr, HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `roles`: S^T, P^T, dV."""
    q_s, do_s, k_s, _, m_s, _ = room
    about_s, entry_s = slots
    kv_full, q_full, q_empty, do_full, do_empty = signals
    dt: gl.constexpr = q_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16]
    )
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    batch, heads, group, _, _, _, _, _ = sizes
    dv = zeros_of(NV, 64, W, OL)
    mbarrier.wait(kv_full.index(0), 0)
    count = number(about_s, 0)
    mbarrier.wait(q_full.index(0), 0, pred=count > 0)
    s = product_of(k_s, 0, q_s, 0, NC, W, SL)
    s = warpgroup_mma_wait(0, deps=(s,))
    for it in range(0, count):
        st, slot = it % ST, it & 1
        zero = it >> 30
        entry = (it % RING) * ENTRY
        code, h = number(entry_s, entry), number(entry_s, entry + 2)
        m = m_s.index(st).load(SL)
        p, slope = weights(s, m, code, h, 0, about_s, 0, scale, data, HAS_MASK, HAS_TERMS,
                           HAS_MASK or HAS_TERMS or VARLEN)  # fmt: skip
        mbarrier.arrive(q_empty.index(st), count=1)
        pb = p.to(dt)
        mbarrier.wait(p_empty.index(slot), ((it >> 1) & 1) ^ 1)
        if HAS_TERMS:
            p_s.index(slot).store(gl.where(p == 0, 0.0, p * slope).to(dt))
        else:
            p_s.index(slot).store(pb)
        mbarrier.arrive(p_full.index(slot), count=1)
        mbarrier.wait(do_full.index(st), (it // ST) & 1)
        dv = add_products(dv, gl.convert_layout(pb, PL), do_s, st * NV, NV, W)
        ahead = it + 1
        mbarrier.wait(q_full.index(ahead % ST), (ahead // ST) & 1, pred=ahead < count)
        s = product_of(k_s, zero, q_s, ahead % ST * NC, NC, W, SL)
        dv = warpgroup_mma_wait(1, deps=dv)
        mbarrier.arrive(do_empty.index(st), count=1)
        s = warpgroup_mma_wait(0, deps=(s,))
    b, g, j0, n_k = number(about_s, 1), number(about_s, 2), number(about_s, 3), number(about_s, 4)
    note(marks_ptr, line_sums(dv, NV), b, g * group, group, heads, batch)
    row = number(about_s, 5) + j0
    tb = 0 if VARLEN else b
    store_chunks(dv_out, dv, 1.0, k_s, 0, tb, g, row, n_k - j0, NV, W, OL, VARLEN)
    tma.store_wait(0)


@gluon.jit
def sloper(
    dk_out, marks_ptr, room, p_s, stage_s, slots, signals, p_full, p_empty, sizes, scale, NC: gl.constexpr,
    NV: gl.constexpr, W: gl.constexpr, ST: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `roles`: dP^T, dS^T, dK."""
    q_s, do_s, _, v_s, _, delta_s = room
    about_s, _ = slots
    kv_full, q_full, q_empty, do_full, do_empty = signals
    dt: gl.constexpr = q_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16]
    )
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    batch, heads, group, _, _, _, _, _ = sizes
    dk = zeros_of(NC, 64, W, OL)
    mbarrier.wait(kv_full.index(0), 0)
    count = number(about_s, 0)
    mbarrier.wait(do_full.index(0), 0, pred=count > 0)
    dp = product_of(v_s, 0, do_s, 0, NV, W, SL)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    for it in range(0, count):
        st, slot = it % ST, it & 1
        zero = it >> 30
        dp = dp - delta_s.index(st).load(SL)
        mbarrier.arrive(do_empty.index(st), count=1)
        mbarrier.wait(p_full.index(slot), (it >> 1) & 1)
        ds = (p_s.index(slot).load(SL).to(gl.float32) * dp).to(dt)
        mbarrier.arrive(p_empty.index(slot), count=1)
        mbarrier.wait(q_full.index(st), (it // ST) & 1)
        dk = add_products(dk, gl.convert_layout(ds, PL), q_s, st * NC, NC, W)
        ahead = it + 1
        mbarrier.wait(do_full.index(ahead % ST), (ahead // ST) & 1, pred=ahead < count)
        dp = product_of(v_s, zero, do_s, ahead % ST * NV, NV, W, SL)
        dk = warpgroup_mma_wait(1, deps=dk)
        mbarrier.arrive(q_empty.index(st), count=1)
        dp = warpgroup_mma_wait(0, deps=(dp,))
    b, g, j0, n_k = number(about_s, 1), number(about_s, 2), number(about_s, 3), number(about_s, 4)
    note(marks_ptr, line_sums(dk, NC), b, g * group, group, heads, batch)
    row = number(about_s, 5) + j0
    tb = 0 if VARLEN else b
    store_chunks(dk_out, dk, scale, stage_s, 0, tb, g, row, n_k - j0, NC, W, OL, VARLEN)
    tma.store_wait(0)


@gluon.jit
def roles_program(
    q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, marks_ptr,
    q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, batch,
    heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles, swizzle, q_offset, k_offset, size_d, size_dv, scale, data,
    HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr, NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr,
    ST: gl.constexpr, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr,
    K_OFFSET: gl.constexpr, WORKER: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """The roles, 64 keys, and the producer. WORKER, LOADER: registers of a thread of each."""
    dt: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dt, [ST * NC, 1, 1, 64, W], q_desc.layout)
    do_s = gl.allocate_shared_memory(dt, [ST * NV, 1, 1, 64, W], do_desc.layout)
    k_s = gl.allocate_shared_memory(dt, [NC, 1, 1, 64, W], k_desc.layout)
    v_s = gl.allocate_shared_memory(dt, [NV, 1, 1, 64, W], v_desc.layout)
    m_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], m_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], delta_desc.layout)
    p_s = gl.allocate_shared_memory(dt, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    # dk leaves through the room of v; where it is wider than v, through a room of its own.
    stage_s = v_s
    if NC > NV:
        stage_s = gl.allocate_shared_memory(dt, [NC, 1, 1, 64, W], k_desc.layout)
    slots = (slots_of(FIELDS), slots_of(RING * ENTRY))
    kv_full = barriers(1, 1)
    q_full, q_empty, do_full, do_empty = barriers(ST, 1), barriers(ST, 2), barriers(ST, 1), barriers(ST, 2)
    p_full, p_empty = barriers(2, 1), barriers(2, 1)
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
            dv_out, marks_ptr, room, p_s, slots, signals, p_full, p_empty, sizes, scale, data, NC, NV, W, ST, HAS_MASK,
            HAS_TERMS, VARLEN)),
        (sloper, (
            dk_out, marks_ptr, room, p_s, stage_s, slots, signals, p_full, p_empty, sizes, scale, NC, NV, W, ST,
            VARLEN)),
        (roles_producer, (
            descs, room, slots, signals, sizes, tables, offsets, data, NC, NV, W, ST, HAS_MASK, VARLEN, USED_Q, USED_K,
            Q_OFFSET, K_OFFSET)),
    ], [4, 1], [WORKER, LOADER])  # fmt: skip
