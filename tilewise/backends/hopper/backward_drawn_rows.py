"""dq for Hopper by tiles of 128 rows that are drawn, nothing added to memory: for head dimensions of 192 with up to 128
of v.

Grid: one program a multiprocessor, which draws tiles of rows of a head (the last rows first) until none is left. As in
`backward_row_kernel` a warpgroup has 64 of the rows, and a warp produces:

    S = Q K^T    P = exp(S - m)    dP = dO V^T    dS = P (dP - delta)    dQ += dS K

Here Q lies in registers, since S and dP read as much of shared memory as it gives, so the next rows come while these
are worked on, and dq leaves through a place of its own.

Source: Dao, FlashAttention-2, 2023, algorithm 2, https://arxiv.org/abs/2307.08691; docs/hopper-backward.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.backward_rings import (
    add_products,
    line_sums,
    load_chunks,
    note,
    number,
    operands_of,
    product_of,
    product_with,
    store_chunks,
    zeros_of,
)  # fmt: skip
from tilewise.backends.hopper.forward_place import offset_of
from tilewise.backends.hopper.rings import barriers, put, slots_of
from tilewise.backends.hopper.rows_shared import BM, BN, FIELDS, RING, blocks, next_code, row_tile, weights


@gluon.jit
def produce_rows(
    t, n, at, phase, descs, room, slots, signals, sizes, tables, offsets, data, NC: gl.constexpr, NV: gl.constexpr,
    W: gl.constexpr, KST: gl.constexpr, VST: gl.constexpr, HAS_MASK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr,
):  # fmt: skip
    """One warp: loads tile t of rows when there is room, finds its key blocks and loads them, and tells the consumers,
    about the tile in the slots from `at` on; n blocks came before. Returns how many have come."""
    q_desc, do_desc, k_desc, v_desc = descs
    q_s, do_s, k_s, v_s = room
    about_s, code_s = slots
    q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty = signals
    b, h, tile, row0, n_q, key0, n_k = row_tile(t, sizes, tables, VARLEN, USED_Q, USED_K)
    g = h // sizes[2]
    q_offset = offset_of(offsets[0], offsets[1], b, n_k - n_q, Q_OFFSET)
    k_offset = offset_of(offsets[2], offsets[3], b, 0, K_OFFSET)
    i0 = tile * BM
    i1 = gl.minimum(i0 + BM, n_q) - 1
    count = blocks(i0, i1, i0 < n_q, n_k, q_offset, k_offset, b, h, g, data, HAS_MASK)
    mbarrier.wait(q_empty, phase)
    about = (count, b, h, i0, n_q, n_k, row0, q_offset, k_offset)
    for f in gl.static_range(FIELDS):
        put(about_s, at + f, about[f])
    tb = 0 if VARLEN else b
    mbarrier.expect(q_full, BM * W * NC * 2)
    for part in gl.static_range(2):
        load_chunks(q_desc, q_s, q_full, tb, h, row0 + i0 + part * 64, part * NC, NC, W)
    mbarrier.wait(do_empty, phase)
    mbarrier.expect(do_full, BM * W * NV * 2)
    for part in gl.static_range(2):
        load_chunks(do_desc, do_s, do_full, tb, h, row0 + i0 + part * 64, part * NV, NV, W)
    code = -4
    for it in range(n, n + count):
        if HAS_MASK:
            code = next_code(code // 4, i0, i1, n_k, q_offset, k_offset, b, h, g, data)
        else:
            code = (it - n) * 4 + ((it - n) * BN + BN > n_k).to(gl.int32) * 2
        row = key0 + (code // 4) * BN
        sk, sv = it % KST, it % VST
        mbarrier.wait(k_empty.index(sk), ((it // KST) & 1) ^ 1)
        put(code_s, it % RING, code)
        mbarrier.expect(k_full.index(sk), BN * W * NC * 2)
        load_chunks(k_desc, k_s, k_full.index(sk), tb, g, row, sk * NC, NC, W)
        mbarrier.wait(v_empty.index(sv), ((it // VST) & 1) ^ 1)
        mbarrier.expect(v_full.index(sv), BN * W * NV * 2)
        load_chunks(v_desc, v_s, v_full.index(sv), tb, g, row, sv * NV, NV, W)
    return n + count


@gluon.jit
def producer(
    counter_ptr, descs, room, slots, signals, sizes, tables, offsets, data, NC: gl.constexpr, NV: gl.constexpr,
    W: gl.constexpr, KST: gl.constexpr, VST: gl.constexpr, HAS_MASK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr,
):  # fmt: skip
    """One warp: draws tiles of rows until none is left. A number below 0 of key blocks says that there is none."""
    batch, heads, _, _, _, row_tiles, _, _ = sizes
    total = heads * (1 if VARLEN else batch) * row_tiles
    n, ti = 0, 0
    t = gl.program_id(0)
    while t < total:
        n = produce_rows(
            t, n, (ti & 1) * FIELDS, (ti & 1) ^ 1, descs, room, slots, signals, sizes, tables, offsets, data, NC, NV, W,
            KST, VST, HAS_MASK, VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET)  # fmt: skip
        t = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        ti += 1
    mbarrier.wait(signals[1], (ti & 1) ^ 1)
    put(slots[0], (ti & 1) * FIELDS, -1)
    mbarrier.arrive(signals[0], count=1)


@gluon.jit
def rows_of(
    w: gl.constexpr, dq_out, m_ptr, delta_ptr, marks_ptr, room, stage_s, slots, signals, sizes, scale, data,
    NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr, KST: gl.constexpr, VST: gl.constexpr,
    HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 of the rows."""
    q_s, do_s, k_s, v_s = room
    about_s, code_s = slots
    q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty = signals
    dt: gl.constexpr = q_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16]
    )
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    batch, heads, group, _, _, _, line_tiles, _ = sizes
    columns = gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
    n, ti = 0, 0
    mbarrier.wait(q_full, 0)
    count = number(about_s, 0)
    while count >= 0:
        at = (ti & 1) * FIELDS
        q = operands_of(q_s, w * NC, NC, W, SL)
        dq = zeros_of(NC, 64, W, OL)
        b, h, i0 = number(about_s, at + 1), number(about_s, at + 2), number(about_s, at + 3)
        n_q, row0 = number(about_s, at + 4), number(about_s, at + 6)
        about = (b, h // group, number(about_s, at + 5), number(about_s, at + 7), number(about_s, at + 8))
        rows = i0 + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SL))
        first = row0 // 64 + b if VARLEN else b * heads * line_tiles
        line = (first + h * line_tiles).to(gl.int64) * 64 + rows
        m = gl.load(m_ptr + line, mask=rows < n_q, other=float("-inf"))[:, None]
        delta = gl.load(delta_ptr + line, mask=rows < n_q, other=0.0)[:, None]
        mbarrier.wait(k_full.index(n % KST), (n // KST) & 1, pred=count > 0)
        s = product_with(q, k_s, n % KST * NC, NC, W, SL)
        s = warpgroup_mma_wait(0, deps=(s,))
        # What a product has taken has arrived in registers.
        mbarrier.arrive(q_empty, count=1)
        mbarrier.wait(do_full, ti & 1)
        for it in range(n, n + count):
            sk, sv = it % KST, it % VST
            zero = it >> 30
            mbarrier.wait(v_full.index(sv), (it // VST) & 1)
            dp = product_of(do_s, zero + w * NV, v_s, sv * NV, NV, W, SL)
            code = number(code_s, it % RING)
            p, slope = weights(
                s, m, code, rows[:, None], h, about, scale, data, columns, HAS_MASK, HAS_TERMS)  # fmt: skip
            dp = warpgroup_mma_wait(0, deps=(dp,))
            mbarrier.arrive(v_empty.index(sv), count=1)
            ds = p * (dp - delta)
            if HAS_TERMS:
                ds = gl.where(p == 0, 0.0, ds * slope)
            dq = add_products(dq, gl.convert_layout(ds.to(dt), PL), k_s, sk * NC, NC, W)
            ahead = it + 1
            mbarrier.wait(k_full.index(ahead % KST), (ahead // KST) & 1, pred=ahead < n + count)
            s = product_with(q, k_s, ahead % KST * NC, NC, W, SL)
            dq = warpgroup_mma_wait(NC, deps=dq)
            mbarrier.arrive(k_empty.index(sk), count=1)
            s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(do_empty, count=1)
        n += count
        note(marks_ptr, line_sums(dq, NC), b, h, 1, heads, batch)
        tb = 0 if VARLEN else b
        here = i0 + w * 64
        tma.store_wait(0)
        store_chunks(dq_out, dq, scale, stage_s, w * NC, tb, h, row0 + here, n_q - here, NC, W, OL, VARLEN)
        ti += 1
        mbarrier.wait(q_full, ti & 1)
        count = number(about_s, (ti & 1) * FIELDS)
    tma.store_wait(0)


@gluon.jit
def rows_program(
    q_desc, do_desc, k_desc, v_desc, dq_desc, dq_ptr, m_ptr, delta_ptr, marks_ptr, counter_ptr, q_offset_ptr,
    k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, dq_b, dq_h, dq_n, batch, heads, group, seqlen_q, seqlen_k,
    row_tiles, line_tiles, swizzle, q_offset, k_offset, size_d, scale, data, HAS_MASK: gl.constexpr,
    HAS_TERMS: gl.constexpr, NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr, KST: gl.constexpr,
    VST: gl.constexpr, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr,
    K_OFFSET: gl.constexpr, WORKER: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """Two warpgroups and the producer. WORKER, LOADER: registers of a thread of each."""
    dt: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dt, [2 * NC, 1, 1, 64, W], q_desc.layout)
    do_s = gl.allocate_shared_memory(dt, [2 * NV, 1, 1, 64, W], do_desc.layout)
    k_s = gl.allocate_shared_memory(dt, [KST * NC, 1, 1, BN, W], k_desc.layout)
    v_s = gl.allocate_shared_memory(dt, [VST * NV, 1, 1, BN, W], v_desc.layout)
    stage_s = gl.allocate_shared_memory(dt, [2 * NC, 1, 1, 64, W], q_desc.layout)
    slots = (slots_of(2 * FIELDS), slots_of(RING))
    q_full, q_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    do_full, do_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    k_full, k_empty, v_full, v_empty = barriers(KST, 1), barriers(KST, 2), barriers(VST, 1), barriers(VST, 2)
    fence_async_shared()
    sizes = (batch, heads, group, seqlen_q, seqlen_k, row_tiles, line_tiles, swizzle)
    tables = (cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr)
    offsets = (q_offset, q_offset_ptr, k_offset, k_offset_ptr)
    dq_out = (dq_desc, dq_ptr, dq_b, dq_h, dq_n, size_d)
    descs = (q_desc, do_desc, k_desc, v_desc)
    room = (q_s, do_s, k_s, v_s)
    signals = (q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize([
        (rows_of, (
            0, dq_out, m_ptr, delta_ptr, marks_ptr, room, stage_s, slots, signals, sizes, scale, data, NC, NV, W, KST,
            VST, HAS_MASK, HAS_TERMS, VARLEN)),
        (rows_of, (
            1, dq_out, m_ptr, delta_ptr, marks_ptr, room, stage_s, slots, signals, sizes, scale, data, NC, NV, W, KST,
            VST, HAS_MASK, HAS_TERMS, VARLEN)),
        (producer, (
            counter_ptr, descs, room, slots, signals, sizes, tables, offsets, data, NC, NV, W, KST, VST, HAS_MASK,
            VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET)),
    ], [4, 1], [WORKER, LOADER])  # fmt: skip
