"""dq for Hopper by tiles of 128 rows, nothing added to memory: for wide heads, and where bits must repeat.

Grid: heads x tiles of rows, the last rows first. One program owns 128 rows of one head, a warpgroup for each 64, and
walks the blocks of 64 keys that some of them see. One warp produces: it counts and finds the blocks that are not EMPTY
by the mask's interval form, 32 at once, and loads k and v by the copy engine.

    S = Q K^T    P = exp(S - m)    dP = dO V^T    dS = P (dP - delta)    dQ += dS K

S of the next block is issued behind dQ of this one. State in registers: dq and scores. Shared memory: q, do, rings of k
and v.

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
    product_of,
    store_chunks,
    zeros_of,
)  # fmt: skip
from tilewise.backends.hopper.forward_place import offset_of
from tilewise.backends.hopper.rings import barriers, put, slots_of
from tilewise.backends.hopper.rows_shared import BM, BN, FIELDS, RING, blocks, next_code, row_tile, weights


@gluon.jit
def producer(
    q_desc, do_desc, k_desc, v_desc, q_s, do_s, k_s, v_s, about_s, code_s, q_full, k_full, k_empty, v_full, v_empty,
    sizes, tables, offsets, data, NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr, KST: gl.constexpr,
    VST: gl.constexpr, HAS_MASK: gl.constexpr, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr,
    Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr,
):  # fmt: skip
    """One warp: finds the key blocks, loads, and tells the consumers."""
    b, h, tile, row0, n_q, key0, n_k = row_tile(gl.program_id(0), sizes, tables, VARLEN, USED_Q, USED_K)
    g = h // sizes[2]
    q_offset = offset_of(offsets[0], offsets[1], b, n_k - n_q, Q_OFFSET)
    k_offset = offset_of(offsets[2], offsets[3], b, 0, K_OFFSET)
    i0 = tile * BM
    i1 = gl.minimum(i0 + BM, n_q) - 1
    count = blocks(i0, i1, i0 < n_q, n_k, q_offset, k_offset, b, h, g, data, HAS_MASK)
    about = (count, b, h, i0, n_q, n_k, row0, q_offset, k_offset)
    for f in gl.static_range(FIELDS):
        put(about_s, f, about[f])
    tb = 0 if VARLEN else b
    mbarrier.expect(q_full, BM * W * (NC + NV) * 2)
    for part in gl.static_range(2):
        load_chunks(q_desc, q_s, q_full, tb, h, row0 + i0 + part * 64, part * NC, NC, W)
        load_chunks(do_desc, do_s, q_full, tb, h, row0 + i0 + part * 64, part * NV, NV, W)
    code = -4
    for it in range(0, count):
        if HAS_MASK:
            code = next_code(code // 4, i0, i1, n_k, q_offset, k_offset, b, h, g, data)
        else:
            code = it * 4 + (it * BN + BN > n_k).to(gl.int32) * 2
        row = key0 + (code // 4) * BN
        sk, sv = it % KST, it % VST
        mbarrier.wait(k_empty.index(sk), ((it // KST) & 1) ^ 1)
        put(code_s, it % RING, code)
        mbarrier.expect(k_full.index(sk), BN * W * NC * 2)
        load_chunks(k_desc, k_s, k_full.index(sk), tb, g, row, sk * NC, NC, W)
        mbarrier.wait(v_empty.index(sv), ((it // VST) & 1) ^ 1)
        mbarrier.expect(v_full.index(sv), BN * W * NV * 2)
        load_chunks(v_desc, v_s, v_full.index(sv), tb, g, row, sv * NV, NV, W)


@gluon.jit
def rows_of(
    w: gl.constexpr, dq_out, m_ptr, delta_ptr, marks_ptr, q_s, do_s, k_s, v_s, about_s, code_s,
    q_full, k_full, k_empty, v_full, v_empty, sizes, scale, data, NC: gl.constexpr, NV: gl.constexpr,
    W: gl.constexpr, KST: gl.constexpr, VST: gl.constexpr, HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 of the rows."""
    dt: gl.constexpr = q_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16]
    )
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    batch, heads, group, _, _, _, line_tiles, _ = sizes
    dq = zeros_of(NC, 64, W, OL)
    columns = gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
    mbarrier.wait(q_full, 0)
    count, b, h, i0 = number(about_s, 0), number(about_s, 1), number(about_s, 2), number(about_s, 3)
    n_q, row0 = number(about_s, 4), number(about_s, 6)
    about = (b, h // group, number(about_s, 5), number(about_s, 7), number(about_s, 8))
    rows = i0 + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SL))
    first = row0 // 64 + b if VARLEN else b * heads * line_tiles
    line = (first + h * line_tiles).to(gl.int64) * 64 + rows
    m = gl.load(m_ptr + line, mask=rows < n_q, other=float("-inf"))[:, None]
    delta = gl.load(delta_ptr + line, mask=rows < n_q, other=0.0)[:, None]
    mbarrier.wait(k_full.index(0), 0, pred=count > 0)
    s = product_of(q_s, w * NC, k_s, 0, NC, W, SL)
    s = warpgroup_mma_wait(0, deps=(s,))
    for it in range(0, count):
        sk, sv = it % KST, it % VST
        zero = it >> 30
        mbarrier.wait(v_full.index(sv), (it // VST) & 1)
        dp = product_of(do_s, zero + w * NV, v_s, sv * NV, NV, W, SL)
        code = number(code_s, it % RING)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(v_empty.index(sv), count=1)
        p, slope = weights(s, m, code, rows[:, None], h, about, scale, data, columns, HAS_MASK, HAS_TERMS)
        ds = p * (dp - delta)
        if HAS_TERMS:
            ds = gl.where(p == 0, 0.0, ds * slope)
        dq = add_products(dq, gl.convert_layout(ds.to(dt), PL), k_s, sk * NC, NC, W)
        ahead = it + 1
        mbarrier.wait(k_full.index(ahead % KST), (ahead // KST) & 1, pred=ahead < count)
        s = product_of(q_s, zero + w * NC, k_s, ahead % KST * NC, NC, W, SL)
        if NC == 1:
            # A single one comes back bare.
            dq = (warpgroup_mma_wait(1, deps=dq),)
        else:
            dq = warpgroup_mma_wait(1, deps=dq)
        mbarrier.arrive(k_empty.index(sk), count=1)
        s = warpgroup_mma_wait(0, deps=(s,))
    note(marks_ptr, line_sums(dq, NC), b, h, 1, heads, batch)
    tb = 0 if VARLEN else b
    at = i0 + w * 64
    row = row0 + at
    store_chunks(dq_out, dq, scale, q_s, w * NC, tb, h, row, n_q - at, NC, W, OL, VARLEN)
    tma.store_wait(0)


@gluon.jit
def rows_program(
    q_desc, do_desc, k_desc, v_desc, dq_desc, dq_ptr, m_ptr, delta_ptr, marks_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr,
    cu_k_ptr, used_q_ptr, used_k_ptr, dq_b, dq_h, dq_n, batch, heads, group, seqlen_q, seqlen_k, row_tiles, line_tiles,
    swizzle, q_offset, k_offset, size_d, scale, data, HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr,
    NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr, KST: gl.constexpr, VST: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr,
    WORKER: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """Two warpgroups and the producer. WORKER, LOADER: registers of a thread of each."""
    dt: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dt, [2 * NC, 1, 1, 64, W], q_desc.layout)
    do_s = gl.allocate_shared_memory(dt, [2 * NV, 1, 1, 64, W], do_desc.layout)
    k_s = gl.allocate_shared_memory(dt, [KST * NC, 1, 1, BN, W], k_desc.layout)
    v_s = gl.allocate_shared_memory(dt, [VST * NV, 1, 1, BN, W], v_desc.layout)
    about_s, code_s = slots_of(FIELDS), slots_of(RING)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    k_full, k_empty, v_full, v_empty = barriers(KST, 1), barriers(KST, 2), barriers(VST, 1), barriers(VST, 2)
    fence_async_shared()
    sizes = (batch, heads, group, seqlen_q, seqlen_k, row_tiles, line_tiles, swizzle)
    tables = (cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr)
    offsets = (q_offset, q_offset_ptr, k_offset, k_offset_ptr)
    dq_out = (dq_desc, dq_ptr, dq_b, dq_h, dq_n, size_d)
    gl.warp_specialize([
        (rows_of, (
            0, dq_out, m_ptr, delta_ptr, marks_ptr, q_s, do_s, k_s, v_s, about_s, code_s, q_full,
            k_full, k_empty, v_full, v_empty, sizes, scale, data, NC, NV, W, KST, VST, HAS_MASK, HAS_TERMS,
            VARLEN)),
        (rows_of, (
            1, dq_out, m_ptr, delta_ptr, marks_ptr, q_s, do_s, k_s, v_s, about_s, code_s, q_full,
            k_full, k_empty, v_full, v_empty, sizes, scale, data, NC, NV, W, KST, VST, HAS_MASK, HAS_TERMS,
            VARLEN)),
        (producer, (
            q_desc, do_desc, k_desc, v_desc, q_s, do_s, k_s, v_s, about_s, code_s, q_full, k_full, k_empty, v_full,
            v_empty, sizes, tables, offsets, data, NC, NV, W, KST, VST, HAS_MASK, VARLEN, USED_Q, USED_K, Q_OFFSET,
            K_OFFSET)),
    ], [4, 1], [WORKER, LOADER])  # fmt: skip
