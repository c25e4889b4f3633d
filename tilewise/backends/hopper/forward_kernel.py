"""The forward kernel for Hopper: out and lse of tiles of 64 * NWG rows.

Grid: one program a multiprocessor, which draws tiles of rows (the last rows first) until none is left. Inside, one
warp produces: it finds the key blocks of a tile that are not EMPTY, from last to first, by the mask's interval form on
32 blocks at once, loads them by the copy engine, and sends each block's number with it. NWG warpgroups of 64 rows
consume: S = q k^T of a block is issued together with O += P v of the block before, and the softmax runs under them.
State in registers: acc (64, DV), m and l (64), P as operand. Shared memory: q, rings of ST blocks of k and v, out. A
head dimension is D0 + D1 columns, of which each is a power of two (96 = 64 + 32).

Source: Shah et al., FlashAttention-3, 2024, https://arxiv.org/abs/2407.08608; measurements in docs/hopper.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.forward_again_shared import repeat
from tilewise.backends.hopper.forward_finish import LOWEST, close_rows, leave, write_out
from tilewise.backends.hopper.forward_gaps import fill_gaps
from tilewise.backends.hopper.forward_loads import (
    FIELDS,
    first_seen,
    here_all,
    load_keys,
    load_rows,
    load_values,
    next_seen,
    tell,
    tell_end,
    tiles_of,
)
from tilewise.backends.hopper.forward_place import line_of, lines_of, looked_at, offset_of, place, unlooked
from tilewise.backends.hopper.forward_shared import (
    CROWDED,
    LEAPS,
    LINES,
    fold,
    marks_of,
    next_code,
    parts_here,
    parts_of,
    seen_blocks,
    tight,
    weights_of,
)
from tilewise.backends.hopper.forward_state import (
    GROWTH,
    add_values,
    grow,
    held_rows,
    raise_top,
    scores_of,
    settle,
    settle_all,
    top_of,
    whole_sums,
)
from tilewise.backends.hopper.rings import (
    after,
    barriers,
    get,
    give_back,
    here,
    put_wide,
    release,
    rescale,
    slots_of,
    write,
)

# ---- the producer --------------------------------------------------------------------------------------------


@gluon.jit
def load_one_tile(
    t, ti, it, last, q_desc, q_desc2, k_desc, k_desc2, v_desc, v_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, tile_s,
    code_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, counter_ptr, ranges, sizes,
    tables, offsets, group, split_tiles, data, NWG: gl.constexpr, BN: gl.constexpr, D0: gl.constexpr,
    D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, ST: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, RANGES: gl.constexpr,
):  # fmt: skip
    """Load tile t, after `ti` tiles and `it` blocks, of which the values of the one that lies at `last` are still to be
    loaded: (what was drawn for the next tile, ti, it, last)."""
    q_offset, q_offset_ptr, k_offset, k_offset_ptr = offsets
    range_ptr, range_b, range_h = ranges
    v_b, v_g, v_n = last
    sizes_here = here_all(sizes)
    b, head, base, split, row0, n_q, key0, n_k = place(
        t, sizes_here, tables, VARLEN, USED_Q, USED_K, NWG, PACK, 1
    )
    raw = 0
    if base < n_q * PACK:
        tb = 0 if VARLEN else b
        g = head if PACK > 1 else head // group
        q_pos = here(offset_of(q_offset, q_offset_ptr, b, n_k - n_q, Q_OFFSET))
        k_pos = here(offset_of(k_offset, k_offset_ptr, b, 0, K_OFFSET))
        blocks = gl.cdiv(n_k, BN)
        each = gl.where(split_tiles > 0, split_tiles, gl.cdiv(blocks, sizes_here[6]))
        begin = split * each
        end = gl.minimum(begin + each, blocks)
        none = begin
        if RANGES:
            begin, end, top, codes = looked_at(
                range_ptr + b * range_b + head * range_h, base // (64 * NWG), begin, end
            )
        elif LINES:
            begin, end = seen_blocks(begin, end, b, head, base, n_q, q_pos, k_pos, group, data, NWG, BN, PACK)
        if not RANGES:
            top, codes = unlooked(end)
        code = -1
        below = end
        fresh = True
        going = True
        while going:
            follow, top, codes = next_code(
                below, top, codes, begin, end, b, head, base, n_q, n_k, q_pos, k_pos, group, data, NWG, BN,
                PACK, 1)  # fmt: skip
            if code < 0:
                # The first round finds the first block. A tile without keys is one block of which nothing is seen.
                code = gl.where(follow < 0, (none << 10) | (63 << 4), follow)
            else:
                going = follow >= 0
                if follow < 0:
                    raw = gl.atomic_add(counter_ptr, 1, sem="relaxed")
                n = key0 + (code >> 10) * BN
                load_keys(
                    it, code | (follow < 0).to(gl.int32), (tb, g, n), k_desc, k_desc2, k_s, k_s2, code_s, k_full,
                    k_empty, D0, D1, BN, ST)  # fmt: skip
                if it > 0:
                    load_values(
                        it, (v_b, v_g, v_n), v_desc, v_desc2, v_s, v_s2, v_full, v_empty, E0, E1, BN,
                        ST)  # fmt: skip
                if fresh:
                    tell(ti, (b, head, g, base, split, row0, n_q, n_k, t), tile_s, tile_full, tile_empty)
                    load_rows(
                        ti, tb, head, g, base, row0, group, q_desc, q_desc2, q_s, q_s2, q_full, q_empty, D0, D1,
                        NWG, PACK)  # fmt: skip
                fresh = False
                v_b, v_g, v_n = tb, g, n
                it += 1
                code = follow
            below = code >> 10
        ti += 1
    else:
        raw = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    return raw, ti, it, v_b, v_g, v_n


@gluon.jit
def producer(
    q_desc, q_desc2, k_desc, k_desc2, v_desc, v_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, tile_s, code_s, q_full,
    q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, counter_ptr, ranges, sizes, tables, offsets,
    group, split_tiles, data, NWG: gl.constexpr, BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    E0: gl.constexpr, E1: gl.constexpr, ST: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, RANGES: gl.constexpr,
):  # fmt: skip
    """One warp: draws tiles, finds their key blocks, loads q, k and v, and tells the consumers.

    The key block of use n is loaded before the value block of use n - 1, over the borders of tiles too.
    """
    it = 0
    ti = 0
    v_b, v_g, v_n = 0, 0, 0
    t = gl.program_id(0)
    while t < tiles_of(sizes, VARLEN):
        raw, ti, it, v_b, v_g, v_n = load_one_tile(
            t, ti, it, (v_b, v_g, v_n), q_desc, q_desc2, k_desc, k_desc2, v_desc, v_desc2, q_s, q_s2, k_s, k_s2,
            v_s, v_s2, tile_s, code_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty,
            counter_ptr, ranges, sizes, tables, offsets, group, split_tiles, data, NWG, BN, D0, D1, E0, E1, ST,
            PACK, VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, RANGES)  # fmt: skip
        # Every tile is drawn for once; the last draw leaves the counter as the next call wants it.
        if raw == tiles_of(sizes, VARLEN) - 1:
            gl.atomic_xchg(counter_ptr, 0, sem="relaxed")
        t = after(raw)
    if it > 0:
        load_values(
            it, (v_b, v_g, v_n), v_desc, v_desc2, v_s, v_s2, v_full, v_empty, E0, E1, BN, ST)  # fmt: skip
    tell_end(ti, tile_s, tile_full, tile_empty)


# ---- the consumers -------------------------------------------------------------------------------------------


@gluon.jit
def next_block(
    it, m, l, acc, acc2, weights, q_of, q2_of, w, k_s, k_s2, v_s, v_s2, code_s, k_full, k_empty, v_full,  # noqa: E741
    v_empty, parts, rows, h, b, g, n_k, q_offset, k_offset, scale, data, FUSED: gl.constexpr, BN: gl.constexpr,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, ST: gl.constexpr, ORDER: gl.constexpr,
    LAZY: gl.constexpr, APART: gl.constexpr, BOUNDED: gl.constexpr, TIGHT: gl.constexpr, FRESH: gl.constexpr,
    SL: gl.constexpr, OL: gl.constexpr, OL2: gl.constexpr,
):  # fmt: skip
    """S of the next block under O += P v of the one before, and its softmax: (use, code, m, l, acc, acc2, weights)."""
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    PL2: gl.constexpr = gl.DotOperandLayout(0, OL2, 2)
    AHEAD: gl.constexpr = 2 if E1 > 0 else 1
    sv = it % ST
    phase = (it // ST) & 1
    it += 1
    st = it % ST
    if ORDER <= 0:
        mbarrier.wait(k_full.index(st), (it // ST) & 1)
    code = get(code_s, st)
    if LEAPS and E0 + E1 == 64:
        it, code, st = next_seen(it, w, code, code_s, k_full, k_empty, v_full, v_empty, ST)
    s = scores_of(q_of, q2_of, k_s, k_s2, st, BN, D0, D1, SL)
    mbarrier.wait(v_full.index(sv), phase)
    acc, acc2 = add_values(acc, acc2, weights, v_s, v_s2, sv, BN, E0, E1, PL, PL2)
    parts = parts_here(parts, TIGHT)
    marks = marks_of(code, w, parts, rows, h, b, g, q_offset, k_offset, scale, data, BN, SL)
    gl.thread_barrier()  # All warps have read the code before the stage is given back: here, where they wait anyway.
    if ORDER < 0:
        s, acc, acc2 = settle_all(s, acc, acc2, E1)
        release(v_empty.index(sv))
    else:
        s = warpgroup_mma_wait(AHEAD, deps=(s,))
    release(k_empty.index(st))
    s, rate, shift = fold(
        s, code, w, marks, parts, rows, h, b, g, n_k, q_offset, k_offset, scale, data, False, FUSED, BOUNDED, BN, SL,
        FRESH)  # fmt: skip
    alpha = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, SL))
    if not BOUNDED:
        m, alpha = raise_top(m, top_of(s, rate, shift), GROWTH, LAZY)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    if ORDER == 5:
        p, sums = weights_of(s, m, rate, shift, BOUNDED, APART, BN, RL, k_s.dtype)
        l = grow(l, alpha, sums, APART)  # noqa: E741
    if ORDER > 0:
        ahead = it + 1
        mbarrier.wait(k_full.index(ahead % ST), (ahead // ST) & 1, pred=(code & 1) == 0)
    if ORDER >= 0:
        acc, acc2 = settle(acc, acc2, E1)
        release(v_empty.index(sv))
    if not BOUNDED:
        if E1 > 0:
            acc2 = rescale(acc2, gl.convert_layout(alpha, gl.SliceLayout(1, OL2)), LAZY, E1 // 2)
        acc = rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, OL)), LAZY, E0 // 2)
    if ORDER != 5:
        p, sums = weights_of(s, m, rate, shift, BOUNDED, APART, BN, RL, k_s.dtype)
        l = grow(l, alpha, sums, APART)  # noqa: E741
    return it, code, m, l, acc, acc2, p


@gluon.jit
def one_tile(
    it, ti, b, w, o_desc, o_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, o_s, o_s2, tile_s, code_s, again_s, broken_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, out_ptr, lse_ptr, sink_ptr, strides,
    offsets, group, seqlen_q, seqlen_k, size_dv, scale, data, FUSED: gl.constexpr, NWG: gl.constexpr,
    BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, ST: gl.constexpr,
    PACK: gl.constexpr, VARLEN: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, SINK: gl.constexpr,
    CARE: gl.constexpr, STORE: gl.constexpr, SHARED_OUT: gl.constexpr, ORDER: gl.constexpr, LAZY: gl.constexpr,
    HELD: gl.constexpr, APART: gl.constexpr, BOUNDED: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """Tile ti of a warpgroup, whose batch entry is b: the use of the rings after it."""
    dt: gl.constexpr = q_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, E0, 16])
    OL2: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, E1 if E1 > 0 else 16, 16])  # fmt: skip
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    PL2: gl.constexpr = gl.DotOperandLayout(0, OL2, 2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    q_offset0, q_offset_ptr, k_offset0, k_offset_ptr = offsets
    o_s0, o_b, o_h, o_n, l_s, l_b, l_h = strides
    q = q_s.index(w).reshape([64, D0])
    q2 = q_s2.index(w).reshape([64, D1 if D1 > 0 else D0])
    slot = ti & 1
    at = slot * FIELDS
    head, g, base = get(tile_s, at + 1), get(tile_s, at + 2), get(tile_s, at + 3)
    n_q, n_k = seqlen_q, seqlen_k
    if VARLEN:
        n_q, n_k = get(tile_s, at + 6), get(tile_s, at + 7)
    q_offset = offset_of(q_offset0, q_offset_ptr, b, n_k - n_q, Q_OFFSET)
    k_offset = offset_of(k_offset0, k_offset_ptr, b, 0, K_OFFSET)
    # Where accumulators leave few registers, nothing of a thread's rows is kept from tile to tile.
    AFRESH: gl.constexpr = FRESH or (E0 == 256 and (VARLEN or CROWDED)) or (E0 == 64 and CROWDED)
    rows, h_rows = lines_of(head, base, w, PACK, RL, AFRESH)
    h = h_rows[:, None] if PACK > 1 else head
    parts = parts_of(rows, q_offset, b, h, g, scale, data)

    # ---- the first block of which this warpgroup sees anything ----
    mbarrier.wait(q_full.index(w), ti & 1)
    q_of, q2_of = held_rows(q, q2, HELD, D0, SL)
    it, code = first_seen(it, w, code_s, k_full, k_empty, v_full, v_empty, ST)
    st = it % ST
    s = scores_of(q_of, q2_of, k_s, k_s2, st, BN, D0, D1, SL)
    marks = marks_of(code, w, parts, rows, h, b, g, q_offset, k_offset, scale, data, BN, SL)
    gl.thread_barrier()
    s = warpgroup_mma_wait(0, deps=(s,))
    release(k_empty.index(st))
    if HELD == D0 + D1 and not SHARED_OUT:
        # Products have q in registers: loads of all warps are over, which a barrier alone does not wait for.
        release(q_empty.index(w))
    s, rate, shift = fold(
        s, code, w, marks, parts, rows, h, b, g, n_k, q_offset, k_offset, scale, data, True, FUSED, BOUNDED, BN, SL,
        FRESH)  # fmt: skip
    if BOUNDED:
        m = shift
    else:
        # A finite maximum, so that -inf minus it is -inf in rows that see nothing.
        m = gl.maximum(top_of(s, rate, shift), LOWEST)
    weights, l = weights_of(s, m, rate, shift, BOUNDED, APART, BN, RL, dt)  # noqa: E741
    acc = gl.full([64, E0], 0.0, gl.float32, OL)
    acc2 = gl.full([64, E1 if E1 > 0 else 16], 0.0, gl.float32, OL2)
    if ORDER > 0:
        mbarrier.wait(k_full.index((it + 1) % ST), ((it + 1) // ST) & 1, pred=(code & 1) == 0)

    # ---- the others ----
    while (code & 1) == 0:
        it, code, m, l, acc, acc2, weights = next_block(  # noqa: E741
            it, m, l, acc, acc2, weights, q_of, q2_of, w, k_s, k_s2, v_s, v_s2, code_s, k_full, k_empty, v_full,
            v_empty, parts, rows, h, b, g, n_k, q_offset, k_offset, scale, data, FUSED, BN, D0, D1, E0, E1, ST,
            ORDER, LAZY, APART, BOUNDED, FRESH or tight(PACK, VARLEN, E0), FRESH, SL, OL, OL2)  # fmt: skip
    if HELD < D0 + D1 and not SHARED_OUT:
        give_back(q_empty.index(w))
    sv = it % ST
    mbarrier.wait(v_full.index(sv), (it // ST) & 1)
    acc, acc2 = add_values(acc, acc2, weights, v_s, v_s2, sv, BN, E0, E1, PL, PL2)

    # ---- finish: what was said about the tile is read again, rather than kept in registers ----
    b, head, g = get(tile_s, at), get(tile_s, at + 1), get(tile_s, at + 2)
    base, split, row0 = get(tile_s, at + 3), get(tile_s, at + 4), 0
    if VARLEN:
        row0, n_q = get(tile_s, at + 5), get(tile_s, at + 6)
    if not CARE:
        give_back(tile_empty.index(slot))
    rows, h_rows = lines_of(head, base, w, PACK, RL, AFRESH)
    alive = rows < n_q
    lse, inverse = close_rows(m, whole_sums(l, APART, RL), h_rows, alive, sink_ptr, SINK)
    tb = 0 if VARLEN else b
    first = line_of(base, w) // PACK
    lse_line = lse_ptr + split.to(gl.int64) * l_s + tb * l_b + row0
    gl.store(lse_line + h_rows.to(gl.int64) * l_h + rows, lse, mask=alive)
    mbarrier.wait(v_full.index(sv), (it // ST) & 1)
    acc, acc2 = settle(acc, acc2, E1)
    release(v_empty.index(sv))
    broken = write_out(
        o_desc, o_desc2, o_s.index(w), o_s2.index(w), out_ptr, (o_s0, o_b, o_h, o_n),
        (split, tb, row0, n_q, first, head, g, group), acc, acc2, inverse, rows, h_rows, size_dv,
        broken_s.index(here(w) if AFRESH else w), not SHARED_OUT, CARE, STORE, VARLEN, PACK, E0, E1, OL,
        OL2, FRESH)  # fmt: skip
    if CARE:
        if broken != 0:
            about = (get(tile_s, at), get(tile_s, at + 1), get(tile_s, at + 3), get(tile_s, at + 4))
            row0, n_q = get(tile_s, at + 5), get(tile_s, at + 6)
            leave(again_s, w, about, get(tile_s, at + 8), row0, n_q, lse_ptr, strides, PACK, VARLEN)
        give_back(tile_empty.index(slot))
    if SHARED_OUT:
        tma.store_wait(0)
        give_back(q_empty.index(w))
    return it + 1


@gluon.jit
def consumer(
    w: gl.constexpr, o_desc, o_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, o_s, o_s2, tile_s, code_s, again_s, broken_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, out_ptr, lse_ptr, sink_ptr, strides,
    offsets, group, seqlen_q, seqlen_k, size_dv, scale, gaps, data, FUSED: gl.constexpr, NWG: gl.constexpr,
    BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, ST: gl.constexpr,
    PACK: gl.constexpr, VARLEN: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, SINK: gl.constexpr,
    CARE: gl.constexpr, STORE: gl.constexpr, SHARED_OUT: gl.constexpr, ORDER: gl.constexpr, LAZY: gl.constexpr,
    HELD: gl.constexpr, APART: gl.constexpr, BOUNDED: gl.constexpr, FRESH: gl.constexpr, GAPS: gl.constexpr,
    USED_Q: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each tile.

    ORDER: O += P v of the block before is waited for early (0), after the row maximum (4) or after the exponentials
    (5): a wait for a barrier in between keeps the compiler from moving it up. With S (-1), which frees the registers
    of P for folds that need many. BOUNDED: scores are a bounded number of powers of two above or below the row's
    shift, so weights are taken without a maximum, and the state is never rescaled. HELD: columns of q that products
    read from registers; its memory is free after the first S. APART: a row's sum of weights stays with its four
    threads until the end.
    """
    o_s0, o_b, o_h, o_n, l_s, l_b, l_h = strides
    it = 0
    ti = 0
    if CARE:
        put_wide(again_s, w, -1)
    if GAPS and w == 0:
        fill_gaps(out_ptr, lse_ptr, gaps, (o_n, o_h, l_h), size_dv, USED_Q)
    mbarrier.wait(tile_full.index(0), 0)
    b = get(tile_s, 0)
    while b >= 0:
        it = one_tile(
            it, ti, b, gl.to_tensor(w), o_desc, o_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, o_s, o_s2, tile_s, code_s,
            again_s, broken_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, out_ptr,
            lse_ptr, sink_ptr, strides, offsets, group, seqlen_q, seqlen_k, size_dv, scale, data, FUSED, NWG, BN, D0,
            D1, E0, E1, ST, PACK, VARLEN, Q_OFFSET, K_OFFSET, SINK, CARE, STORE, SHARED_OUT, ORDER, LAZY, HELD, APART,
            BOUNDED, FRESH)  # fmt: skip
        ti += 1
        mbarrier.wait(tile_full.index(ti & 1), (ti >> 1) & 1)
        b = get(tile_s, (ti & 1) * FIELDS)
    tma.store_wait(0)


@gluon.jit
def forward_program(
    q_desc, q_desc2, k_desc, k_desc2, v_desc, v_desc2, o_desc, o_desc2, out_ptr, lse_ptr, sink_ptr, counter_ptr,
    q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, range_ptr, again_ptr, o_s, o_b, o_h, o_n,
    l_s, l_b, l_h, batch, heads, group, seqlen_q, seqlen_k, row_tiles, swizzle, splits, split_tiles, early, range_b,
    range_h, q_offset, k_offset, size_dv, scale, data, FUSED: gl.constexpr, NWG: gl.constexpr, BN: gl.constexpr,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, ST: gl.constexpr, PACK: gl.constexpr,
    VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr,
    SINK: gl.constexpr, CARE: gl.constexpr, STORE: gl.constexpr, SHARED_OUT: gl.constexpr, RANGES: gl.constexpr,
    ORDER: gl.constexpr, LAZY: gl.constexpr, HELD: gl.constexpr, APART: gl.constexpr, BOUNDED: gl.constexpr,
    FRESH: gl.constexpr, GAPS: gl.constexpr, LATER: gl.constexpr, WORKER: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """The partitions: NWG consumers and the producer. WORKER, LOADER: registers of a thread of each. LATER: another
    launch does again what was left; it finds each program's lists at again_ptr, (programs, NWG) int32."""
    dt: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dt, [NWG] + q_desc.block_shape, q_desc.layout)
    k_s = gl.allocate_shared_memory(dt, [ST] + k_desc.block_shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(dt, [ST] + v_desc.block_shape, v_desc.layout)
    q_s2, k_s2, v_s2 = q_s, k_s, v_s
    if D1 > 0:
        q_s2 = gl.allocate_shared_memory(dt, [NWG] + q_desc2.block_shape, q_desc2.layout)
        k_s2 = gl.allocate_shared_memory(dt, [ST] + k_desc2.block_shape, k_desc2.layout)
    if E1 > 0:
        v_s2 = gl.allocate_shared_memory(dt, [ST] + v_desc2.block_shape, v_desc2.layout)
    o_t, o_t2 = q_s, q_s2
    if STORE == "tiles":
        if not SHARED_OUT:
            o_t = gl.allocate_shared_memory(dt, [NWG] + o_desc.block_shape, o_desc.layout)
            if E1 > 0:
                o_t2 = gl.allocate_shared_memory(dt, [NWG] + o_desc2.block_shape, o_desc2.layout)
    tile_s, code_s, again_s = slots_of(2 * FIELDS), slots_of(ST), slots_of(NWG)
    broken_s = gl.allocate_shared_memory(gl.int32, [NWG, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = barriers(NWG, 1), barriers(NWG, 1)
    k_full, k_empty = barriers(ST, 1), barriers(ST, NWG)
    v_full, v_empty = barriers(ST, 1), barriers(ST, NWG)
    tile_full, tile_empty = barriers(2, 1), barriers(2, NWG)
    loaded = k_full
    if CARE and not LATER:
        loaded = barriers(1, 1)
    fence_async_shared()
    sizes = (batch, heads, seqlen_q, seqlen_k, row_tiles, swizzle, splits, early)
    tables = (cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr)
    offsets = (q_offset, q_offset_ptr, k_offset, k_offset_ptr)
    ranges = (range_ptr, range_b, range_h)
    strides = (o_s, o_b, o_h, o_n, l_s, l_b, l_h)
    gaps = (cu_q_ptr, used_q_ptr, batch, heads * PACK, seqlen_q)
    # Constants survive in a tuple only where it is written inside the call.
    if NWG == 2:
        gl.warp_specialize([
            (consumer, (
                0, o_desc, o_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, o_t, o_t2, tile_s, code_s, again_s, broken_s,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, out_ptr, lse_ptr, sink_ptr,
                strides, offsets, group, seqlen_q, seqlen_k, size_dv, scale, gaps, data, FUSED, NWG, BN, D0, D1, E0, E1,
                ST, PACK, VARLEN, Q_OFFSET, K_OFFSET, SINK, CARE, STORE, SHARED_OUT, ORDER, LAZY, HELD, APART,
                BOUNDED, FRESH, GAPS, USED_Q)),
            (consumer, (
                1, o_desc, o_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, o_t, o_t2, tile_s, code_s, again_s, broken_s,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, out_ptr, lse_ptr, sink_ptr,
                strides, offsets, group, seqlen_q, seqlen_k, size_dv, scale, gaps, data, FUSED, NWG, BN, D0, D1, E0, E1,
                ST, PACK, VARLEN, Q_OFFSET, K_OFFSET, SINK, CARE, STORE, SHARED_OUT, ORDER, LAZY, HELD, APART,
                BOUNDED, FRESH, GAPS, USED_Q)),
            (producer, (
                q_desc, q_desc2, k_desc, k_desc2, v_desc, v_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, tile_s, code_s,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, counter_ptr, ranges, sizes,
                tables, offsets, group, split_tiles, data, NWG, BN, D0, D1, E0, E1, ST, PACK,
                VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, RANGES)),
        ], [4, 1], [WORKER, LOADER])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (
                0, o_desc, o_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, o_t, o_t2, tile_s, code_s, again_s, broken_s,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, out_ptr, lse_ptr, sink_ptr,
                strides, offsets, group, seqlen_q, seqlen_k, size_dv, scale, gaps, data, FUSED, NWG, BN, D0, D1, E0, E1,
                ST, PACK, VARLEN, Q_OFFSET, K_OFFSET, SINK, CARE, STORE, SHARED_OUT, ORDER, LAZY, HELD, APART,
                BOUNDED, FRESH, GAPS, USED_Q)),
            (consumer, (
                1, o_desc, o_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, o_t, o_t2, tile_s, code_s, again_s, broken_s,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, out_ptr, lse_ptr, sink_ptr,
                strides, offsets, group, seqlen_q, seqlen_k, size_dv, scale, gaps, data, FUSED, NWG, BN, D0, D1, E0, E1,
                ST, PACK, VARLEN, Q_OFFSET, K_OFFSET, SINK, CARE, STORE, SHARED_OUT, ORDER, LAZY, HELD, APART,
                BOUNDED, FRESH, GAPS, USED_Q)),
            (consumer, (
                2, o_desc, o_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, o_t, o_t2, tile_s, code_s, again_s, broken_s,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, out_ptr, lse_ptr, sink_ptr,
                strides, offsets, group, seqlen_q, seqlen_k, size_dv, scale, gaps, data, FUSED, NWG, BN, D0, D1, E0, E1,
                ST, PACK, VARLEN, Q_OFFSET, K_OFFSET, SINK, CARE, STORE, SHARED_OUT, ORDER, LAZY, HELD, APART,
                BOUNDED, FRESH, GAPS, USED_Q)),
            (producer, (
                q_desc, q_desc2, k_desc, k_desc2, v_desc, v_desc2, q_s, q_s2, k_s, k_s2, v_s, v_s2, tile_s, code_s,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, counter_ptr, ranges, sizes,
                tables, offsets, group, split_tiles, data, NWG, BN, D0, D1, E0, E1, ST, PACK,
                VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, RANGES)),
        ], [4, 4, 1], [WORKER, WORKER, LOADER])  # fmt: skip
    if CARE and LATER:
        for w in gl.static_range(NWG):
            write(again_ptr + gl.program_id(0) * NWG + w, get(again_s, w))
    elif CARE:
        repeat(
            again_s, loaded, q_desc, q_desc2, k_desc, k_desc2, v_desc, q_s, q_s2, k_s, k_s2, v_s, out_ptr, lse_ptr,
            sink_ptr, sizes, tables, offsets, strides, group, split_tiles, size_dv, scale, data, FUSED, NWG, BN, D0, D1,
            E0, PACK, VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, SINK)  # fmt: skip
