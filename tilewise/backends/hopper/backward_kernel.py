"""The backward for Hopper by tiles of keys: dk and dv, and for head dimensions up to 128 dq as well.

Grid: KV heads x tiles of keys, the first keys first. One program owns a tile of keys of one KV head and walks the rows
that see some of it, 64 at a time, for each head of the group. One warp produces: it counts and finds the row tiles that
are not EMPTY by the mask's interval form, 32 at once, loads q and do by the copy engine, and says with each which rows
they are. All products are transposed (keys x rows), so that weights and slopes are operands as they stand:

    S^T = K Q^T    P^T = exp(S^T - m)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dV += P^T dO    dK += dS^T Q

halves     128 keys, a warpgroup for each half of them, dq = dS K by both, half of its columns each, added to
           a float32 buffer in the order in which threads hold it: the multiprocessor's shared memory is as busy as its
           matrix unit, and additions from registers do not pass through it. dS meets in shared memory.
roles      64 keys, for wider heads: one warpgroup has S, P and dV, another dP, dS and dK, a third dq, added as above;
           P and dS pass through shared memory.

S of the next rows is issued behind dK of these, so that the matrix unit does not wait for the loop.
State in registers: dk, dv and scores. Shared memory: k, v, rings of q, do and the rows' numbers.

Source: Shah et al., FlashAttention-3, 2024, https://arxiv.org/abs/2407.08608; measurements in docs/hopper-backward.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from tilewise.backends.hopper.backward_rings import (
    ENTRY,
    FIELDS,
    RING,
    add_fragments,
    add_products,
    any_wrong,
    key_tile,
    load_chunks,
    meet,
    note,
    number,
    product_of,
    same,
    store_chunks,
    zeros_of,
)  # fmt: skip
from tilewise.backends.hopper.backward_roles import adder, sloper
from tilewise.backends.hopper.forward_place import offset_of
from tilewise.backends.hopper.names import tma_load
from tilewise.backends.hopper.plain import classify, derive, keep
from tilewise.backends.hopper.rings import barriers, put, slots_of

LOG2 = gl.constexpr(1.4426950408889634)

# ---- the producer --------------------------------------------------------------------------------------------


@gluon.jit
def codes_of(chunk, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data):
    """A number for each of 32 row tiles of the group's heads: -1 if EMPTY, else its own times 4, plus 2 if PARTIAL."""
    unit = chunk * 32 + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    member = gl.minimum(unit // n_m, group - 1)
    i0 = (unit - member * n_m) * 64
    i1 = gl.minimum(i0 + 64, n_q) - 1
    h = g * group + member
    kind = classify(gl.minimum(i0, i1), i1, j0, j1, q_offset, k_offset, b, h, h, g, data)
    return gl.where((kind > 0) & (unit < units), unit * 4 + (kind == 1).to(gl.int32) * 2, -1)


@gluon.jit
def next_code(u, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data):
    """The number of the first row tile after u that is not EMPTY, of which there is one."""
    chunk = (u + 1) // 32
    found = units * 4
    while (found == units * 4) & (chunk * 32 < units):
        codes = codes_of(chunk, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data)
        found = gl.min(gl.where(codes > u * 4 + 3, codes, units * 4), 0)
        chunk += 1
    return same(found)


@gluon.jit
def producer(
    descs, room, slots, signals, sizes, tables, offsets, data, BN: gl.constexpr, NC: gl.constexpr,
    NV: gl.constexpr, W: gl.constexpr, ST: gl.constexpr, HAS_MASK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr,
):  # fmt: skip
    """One warp: finds the row tiles, loads, and tells the consumers."""
    q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc = descs
    q_s, do_s, k_s, v_s, m_s, delta_s = room
    about_s, entry_s = slots
    kv_full, q_full, q_empty, do_full, do_empty = signals
    b, g, n, row0, n_q, key0, n_k, first = key_tile(sizes, tables, VARLEN, USED_Q, USED_K, BN)
    _, heads, group, _, _, row_tiles, _, _ = sizes
    q_offset = offset_of(offsets[0], offsets[1], b, n_k - n_q, Q_OFFSET)
    k_offset = offset_of(offsets[2], offsets[3], b, 0, K_OFFSET)
    j0 = n * BN
    j1 = gl.minimum(j0 + BN, n_k) - 1
    n_m = gl.cdiv(n_q, 64)
    units = gl.where(j0 < n_k, n_m * group, 0)
    count = units
    if HAS_MASK:
        count = 0
        for chunk in range(0, gl.cdiv(units, 32)):
            codes = codes_of(chunk, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data)
            count += gl.sum((codes >= 0).to(gl.int32), 0)
    count = same(count)
    about = (count, b, g, j0, n_k, key0, q_offset, k_offset)
    for f in gl.static_range(FIELDS):
        put(about_s, f, about[f])
    tb = 0 if VARLEN else b
    mbarrier.expect(kv_full, BN * W * (NC + NV) * 2)
    load_chunks(k_desc, k_s, kv_full, tb, g, key0 + j0, 0, NC, W)
    for part in gl.static_range(BN // 64):
        load_chunks(v_desc, v_s, kv_full, tb, g, key0 + j0 + part * 64, part * NV, NV, W)
    cut = (j0 + BN > n_k).to(gl.int32) * 2
    # Without a mask, neighbours begin at different rows: fewer additions to one place at once.
    turn = 0
    if not HAS_MASK:
        turn = (n * (BN // 64)) % gl.maximum(n_m, 1)
    u = -1
    for it in range(0, count):
        kind = cut
        if HAS_MASK:
            code = next_code(u, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data)
            u = code // 4
            kind = cut | (code & 2)
        else:
            u += 1
        member = u // n_m
        m = u - member * n_m + turn
        m = gl.where(m >= n_m, m - n_m, m)
        h = g * group + member
        tile = first + h * row_tiles + m
        st = it % ST
        full = q_full.index(st)
        mbarrier.wait(q_empty.index(st), ((it // ST) & 1) ^ 1)
        entry = (it % RING) * ENTRY
        put(entry_s, entry, m * 4 + kind)
        put(entry_s, entry + 1, tile)
        put(entry_s, entry + 2, h)
        mbarrier.expect(full, 64 * W * NC * 2 + 256)
        load_chunks(q_desc, q_s, full, tb, h, row0 + m * 64, st * NC, NC, W)
        tma_load(m_desc, [0, tile * 64], full, m_s.index(st))
        full = do_full.index(st)
        mbarrier.wait(do_empty.index(st), ((it // ST) & 1) ^ 1)
        mbarrier.expect(full, 64 * W * NV * 2 + 256)
        load_chunks(do_desc, do_s, full, tb, h, row0 + m * 64, st * NV, NV, W)
        tma_load(delta_desc, [0, tile * 64], full, delta_s.index(st))


# ---- the consumers -------------------------------------------------------------------------------------------


@gluon.jit
def about_of(about_s):
    """b, KV head, keys, positions of the first row and key: read when wanted, rather than kept in registers."""
    return number(about_s, 1), number(about_s, 2), number(about_s, 4), number(about_s, 6), number(about_s, 7)


@gluon.jit
def weights(
    s, m, code, h, w: gl.constexpr, about_s, scale, data, HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr
):
    """(p, slope of the terms) of a transposed tile of raw scores; hidden pairs of a PARTIAL tile have weight 0.

    m: minus the rows' lse, in powers of two; -inf in rows that take no part. w: which 64 of the program's keys."""
    SL: gl.constexpr = s.type.layout
    slope = s
    if HAS_TERMS:
        b, g, n_k, q_offset, k_offset = about_of(about_s)
        i = ((code // 4) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, SL)))[None, :]
        j = (number(about_s, 3) + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SL)))[:, None]
        found = derive(s * scale, i, j, i + q_offset, j + k_offset, b, h, g, data)
        p = gl.exp2(gl.fma(found[0], gl.full_like(s, LOG2), m + gl.zeros_like(s)))
        slope = found[1]
    else:
        p = gl.exp2(gl.fma(s, gl.zeros_like(s) + scale * LOG2, m + gl.zeros_like(s)))
    if (code & 2) != 0:
        b, g, n_k, q_offset, k_offset = about_of(about_s)
        i = ((code // 4) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, SL)))[None, :]
        j = (number(about_s, 3) + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SL)))[:, None]
        seen = j < n_k
        if HAS_MASK:
            seen = keep(s, i, j, i + q_offset, j + k_offset, b, h, g, data) & seen
        p = gl.where(seen, p, 0.0)
    return p, slope


@gluon.jit
def half(
    w: gl.constexpr, dk_out, dv_out, dq_ptr, marks_ptr, room, ds_s, slots, signals, sizes, scale, data,
    D: gl.constexpr, ST: gl.constexpr, HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr, VARLEN: gl.constexpr,
    HELD: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 of 128 keys, and half of the columns of dq. HELD: k and v stay in registers."""
    q_s, do_s, k_s, v_s, m_s, delta_s = room
    about_s, entry_s = slots
    kv_full, q_full, q_empty, do_full, _ = signals
    dt: gl.constexpr = q_s.dtype
    NQ: gl.constexpr = D // 2
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    QL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, NQ, 16]
    )
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    batch, heads, group, _, _, _, _, _ = sizes
    dk = gl.zeros([64, D], gl.float32, OL)
    dv = gl.zeros([64, D], gl.float32, OL)
    mbarrier.wait(kv_full, 0)
    count = number(about_s, 0)
    kw = k_s.index(0).reshape([128, D]).slice(w * 64, 64, 0)
    if HELD:
        kw = kw.load(gl.DotOperandLayout(0, SL, 2))
        vw = v_s.index(w).reshape([64, D]).load(gl.DotOperandLayout(0, SL, 2))
    zeros = gl.zeros([64, 64], gl.float32, SL)
    mbarrier.wait(q_full.index(0), 0, pred=count > 0)
    s = warpgroup_mma(kw, q_s.index(0).reshape([64, D]).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    for it in range(0, count):
        st = it % ST
        # Zero, and the compiler does not know: else it keeps addresses that never change in registers that it lacks.
        zero = it >> 30
        k = k_s.index(zero).reshape([128, D])
        if not HELD:
            kw = k.slice(w * 64, 64, 0)
            vw = v_s.index(zero + w).reshape([64, D])
        q = q_s.index(st).reshape([64, D])
        do = do_s.index(st).reshape([64, D])
        mbarrier.wait(do_full.index(st), (it // ST) & 1)
        dp = warpgroup_mma(
            vw, do.permute((1, 0)), gl.zeros([64, 64], gl.float32, SL), use_acc=False, is_async=True)  # fmt: skip
        entry = (it % RING) * ENTRY
        code, tile = number(entry_s, entry), number(entry_s, entry + 1)
        h = 0
        if HAS_MASK or HAS_TERMS:
            h = number(entry_s, entry + 2)
        m = m_s.index(st).load(SL)
        p, slope = weights(s, m, code, h, w, about_s, scale, data, HAS_MASK, HAS_TERMS)
        pa = gl.convert_layout(p.to(dt), PL)
        delta = delta_s.index(st).load(SL)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        dv = warpgroup_mma(pa, do, dv, is_async=True)
        ds = p * (dp - delta)
        if HAS_TERMS:
            ds = gl.where(p == 0, 0.0, ds * slope)
        ds = ds.to(dt)
        if ADD:
            both = ds_s.index(it & 1)
            both.slice(w * 64, 64, 0).store(ds)
            fence_async_shared()
            meet(8, 256)
            dq = warpgroup_mma(
                both.permute((1, 0)), k.slice(w * NQ, NQ, 1), gl.zeros([64, NQ], gl.float32, QL), use_acc=False,
                is_async=True)  # fmt: skip
        dk = warpgroup_mma(gl.convert_layout(ds, PL), q, dk, is_async=True)
        dv = warpgroup_mma_wait(2 if ADD else 1, deps=(dv,))
        ahead = it + 1
        mbarrier.wait(q_full.index(ahead % ST), (ahead // ST) & 1, pred=ahead < count)
        s = warpgroup_mma(
            kw, q_s.index(ahead % ST).reshape([64, D]).permute((1, 0)), gl.zeros([64, 64], gl.float32, SL),
            use_acc=False, is_async=True)  # fmt: skip
        if ADD:
            dq = warpgroup_mma_wait(2, deps=(dq,))
            add_fragments(dq_ptr + (tile.to(gl.int64) * 2 + w) * (64 * NQ), dq, NQ // 2)
        dk, s = warpgroup_mma_wait(0, deps=(dk, s))
        mbarrier.arrive(q_empty.index(st), count=1)
    b, g, j0, n_k = number(about_s, 1), number(about_s, 2), number(about_s, 3), number(about_s, 4)
    note(marks_ptr, gl.maximum(any_wrong((dk,), 1), any_wrong((dv,), 1)), b, g, heads, group, batch)
    tb = 0 if VARLEN else b
    row = number(about_s, 5) + j0 + w * 64
    left = n_k - (j0 + w * 64)
    store_chunks(dv_out, (dv,), 1.0, v_s, w, tb, g, row, left, 1, D, OL, VARLEN)
    store_chunks(dk_out, (dk,), scale, v_s, w, tb, g, row, left, 1, D, OL, VARLEN)


@gluon.jit
def weigher(
    dv_out, marks_ptr, room, p_s, slots, signals, p_full, p_empty, done, sizes, scale, data, NC: gl.constexpr,
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
    mbarrier.wait(kv_full, 0)
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
        p, slope = weights(s, m, code, h, 0, about_s, scale, data, HAS_MASK, HAS_TERMS)
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
    note(marks_ptr, any_wrong(dv, NV), b, g, heads, group, batch)
    mbarrier.wait(done, 0)  # k is not read any more: dv leaves through its room
    row = number(about_s, 5) + j0
    tb = 0 if VARLEN else b
    store_chunks(dv_out, dv, 1.0, k_s, 0, tb, g, row, n_k - j0, NV, W, OL, VARLEN)


# ---- the programs --------------------------------------------------------------------------------------------


@gluon.jit
def halves_program(
    q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_ptr, marks_ptr,
    q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, batch,
    heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles, swizzle, q_offset, k_offset, size_d, size_dv, scale, data,
    HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, HELD: gl.constexpr,
    ADD: gl.constexpr, WORKER: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """Two halves of 128 keys, and the producer. WORKER, LOADER: registers of a thread of each."""
    dt: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dt, [ST, 1, 1, 64, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(dt, [ST, 1, 1, 64, D], do_desc.layout)
    k_s = gl.allocate_shared_memory(dt, [1, 1, 1, 128, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dt, [2, 1, 1, 64, D], v_desc.layout)
    m_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], m_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], delta_desc.layout)
    ds_s = gl.allocate_shared_memory(dt, [2, 128, 64], gl.NVMMASharedLayout(128, 16, 2))
    slots = (slots_of(FIELDS), slots_of(RING * ENTRY))
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    q_full, q_empty, do_full = barriers(ST, 1), barriers(ST, 2), barriers(ST, 1)
    fence_async_shared()
    sizes = (batch, heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles, swizzle)
    tables = (cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr)
    offsets = (q_offset, q_offset_ptr, k_offset, k_offset_ptr)
    descs = (q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc)
    dk_out = (dk_desc, dk_ptr, dk_b, dk_h, dk_n, size_d)
    dv_out = (dv_desc, dv_ptr, dv_b, dv_h, dv_n, size_dv)
    room = (q_s, do_s, k_s, v_s, m_s, delta_s)
    signals = (kv_full, q_full, q_empty, do_full, q_empty)
    # Constants survive in a tuple only where it is written inside the call.
    gl.warp_specialize([
        (half, (
            0, dk_out, dv_out, dq_ptr, marks_ptr, room, ds_s, slots, signals, sizes, scale, data, D, ST,
            HAS_MASK, HAS_TERMS, VARLEN, HELD, ADD)),
        (half, (
            1, dk_out, dv_out, dq_ptr, marks_ptr, room, ds_s, slots, signals, sizes, scale, data, D, ST,
            HAS_MASK, HAS_TERMS, VARLEN, HELD, ADD)),
        (producer, (
            descs, room, slots, signals, sizes, tables, offsets, data, 128, 1, 1, D, ST, HAS_MASK, VARLEN, USED_Q,
            USED_K, Q_OFFSET, K_OFFSET)),
    ], [4, 1], [WORKER, LOADER])  # fmt: skip


@gluon.jit
def roles_program(
    q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_ptr, marks_ptr,
    q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, batch,
    heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles, swizzle, q_offset, k_offset, size_d, size_dv, scale, data,
    HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr, NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr,
    ST: gl.constexpr, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr,
    K_OFFSET: gl.constexpr, WORKER: gl.constexpr, ADDER: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """The roles, 64 keys, and the producer. WORKER, ADDER, LOADER: registers of a thread of each."""
    dt: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dt, [ST * NC, 1, 1, 64, W], q_desc.layout)
    do_s = gl.allocate_shared_memory(dt, [ST * NV, 1, 1, 64, W], do_desc.layout)
    k_s = gl.allocate_shared_memory(dt, [NC, 1, 1, 64, W], k_desc.layout)
    v_s = gl.allocate_shared_memory(dt, [NV, 1, 1, 64, W], v_desc.layout)
    m_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], m_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], delta_desc.layout)
    p_s = gl.allocate_shared_memory(dt, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    ds_s = gl.allocate_shared_memory(dt, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    # dk leaves through the room of v; where it is wider than v, through a room of its own.
    stage_s = v_s
    if NC > NV:
        stage_s = gl.allocate_shared_memory(dt, [NC, 1, 1, 64, W], k_desc.layout)
    slots = (slots_of(FIELDS), slots_of(RING * ENTRY))
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    q_full, q_empty, do_full, do_empty = barriers(ST, 1), barriers(ST, 2), barriers(ST, 1), barriers(ST, 2)
    p_full, p_empty, ds_full, ds_empty = barriers(2, 1), barriers(2, 1), barriers(2, 1), barriers(2, 1)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
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
            dv_out, marks_ptr, room, p_s, slots, signals, p_full, p_empty, done, sizes, scale, data, NC, NV, W, ST,
            HAS_MASK, HAS_TERMS, VARLEN)),
        (sloper, (
            dk_out, marks_ptr, room, p_s, ds_s, stage_s, slots, signals, p_full, p_empty, ds_full, ds_empty, sizes,
            scale, NC, NV, W, ST, VARLEN)),
        (adder, (dq_ptr, k_s, ds_s, slots, kv_full, ds_full, ds_empty, done, NC, W)),
        (producer, (
            descs, room, slots, signals, sizes, tables, offsets, data, 64, NC, NV, W, ST, HAS_MASK, VARLEN, USED_Q,
            USED_K, Q_OFFSET, K_OFFSET)),
    ], [4, 4, 1], [WORKER, ADDER, LOADER])  # fmt: skip
