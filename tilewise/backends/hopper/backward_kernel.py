"""The backward for Hopper by tiles of 128 keys, for head dimensions up to 128: dk, dv and the sums of dq.

Grid: one program a multiprocessor, which draws tiles of keys of a KV head (the first keys first) until none is left. Of
a tile it walks the rows that see some of it, BM at a time, for each head of the group. One warp produces
(`backward_shared.produce`); two warpgroups have 64 of the keys each. All products are transposed (keys x rows), so that
weights and slopes are operands as they stand:

    S^T = K Q^T    P^T = exp(S^T - m)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dV += P^T dO    dK += dS^T Q

dS meets in shared memory, and each warpgroup makes half of dq = dS K (half of the columns of 64 rows, or half of 128
rows), which it adds to a float32 buffer in the order in which threads hold it: shared memory is as busy as the matrix
unit, and additions from registers do not pass through it. That product is issued an iteration late, so that no half
waits for the other; S of the next rows is issued behind dK of these, so that the matrix unit does not wait for the
loop; k and v of the next tile are loaded, and dk and dv of the last one leave, while this one is worked on. Where bits
must repeat (ORDER), one warp more keeps the order: it waits until the tile of keys before this one has added to a row
tile, says so to the halves, and passes the turn on behind their additions; neither the halves nor the producer wait for
memory.
State in registers: dk, dv and scores. Shared memory: k, v, rings of q, do and the rows' numbers.

Source: Shah et al., FlashAttention-3, 2024, https://arxiv.org/abs/2407.08608; measurements in docs/hopper-backward.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from tilewise.backends.hopper.backward_first_shared import half_seen, nothing_seen
from tilewise.backends.hopper.backward_rings import (
    ENTRY,
    FIELDS,
    FLIPPED,
    RING,
    add_over,
    note,
    number,
    number_here,
    part_sums,
    pass_turn,
    product_over,
    store_parts,
    tiles_of,
    turn_at,
    wait_for,
)  # fmt: skip
from tilewise.backends.hopper.backward_shared import produce, turn_of, weights
from tilewise.backends.hopper.backward_split import SECOND, share_sums
from tilewise.backends.hopper.backward_sums import (
    add_in_turn,
    await_clear,
    clear_and_collect,
    leave_rows,
    read_fragments,
)  # fmt: skip
from tilewise.backends.hopper.rings import barriers, put, slots_of


@gluon.jit
def halves_producer(
    counter_ptr, shared, descs, room, slots, signals, kv_empty, sizes, split, tables, offsets, data, BM: gl.constexpr,
    D: gl.constexpr, ST: gl.constexpr, KV: gl.constexpr, HAS_MASK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, ORDER: gl.constexpr,
    AHEAD: gl.constexpr, SPLIT: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    """One warp: draws tiles of keys until none is left. A number below 0 of row tiles says that there is none."""
    n, ti = 0, 0
    kv_full = signals[0]
    total = tiles_of(sizes, VARLEN)
    if SPLIT:
        total = split[0] + split[2]
    t, drawn = gl.program_id(0), gl.num_programs(0)
    if ORDER or AHEAD or SPLIT:
        # A tile waits for those before it: programs that run have drawn them all, however few run at once.
        t, drawn = gl.atomic_add(counter_ptr, 1, sem="relaxed"), 0
    while (t % SECOND if SPLIT else t) < total:
        if AHEAD:
            await_clear(t, shared, sizes)
        n, t = produce(
            t, n, ti % KV, (ti & 1) * FIELDS, descs, room, slots, signals, kv_empty.index(ti % KV),
            ((ti // KV) & 1) ^ 1, counter_ptr, sizes, tables, offsets, data, BM, 128, 1, 1, D, ST, HAS_MASK, VARLEN,
            USED_Q, USED_K, Q_OFFSET, K_OFFSET, ORDER, True, SPLIT, split, SKIP)  # fmt: skip
        t += drawn
        ti += 1
    mbarrier.wait(kv_empty.index(ti % KV), ((ti // KV) & 1) ^ 1)
    put(slots[0], (ti & 1) * FIELDS, -1)
    mbarrier.arrive(kv_full.index(ti % KV), count=1)


@gluon.jit
def keeper(
    turns_ptr, slots, signals, turns, key_tiles, data, BM: gl.constexpr, KV: gl.constexpr, HAS_MASK: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """One warp: tiles of keys add to a row tile in the order of their numbers. What the next turn needs is found while
    the halves add."""
    about_s, entry_s = slots
    kv_full, kv_empty, _, _, _, ds_full = signals
    turn, added = turns
    n, ti = 0, 0
    mbarrier.wait(kv_full.index(0), 0)
    count = number_here(about_s, 0)
    while count >= 0:
        at = (ti & 1) * FIELDS
        own, flip = number_here(about_s, at + 3) // 128, 0
        if ORDER == FLIPPED:
            flip = number_here(about_s, at + 11)
            own = gl.where(flip > 0, key_tiles - 1 - own, own)
        about = (
            number_here(about_s, at + 1), number_here(about_s, at + 2), number_here(about_s, at + 8),
            number_here(about_s, at + 4), number_here(about_s, at + 6), number_here(about_s, at + 7), flip,
            key_tiles)  # fmt: skip
        place, before = turns_ptr, own
        if count > 0:
            place, before = turn_of(n, own, about, turns_ptr, entry_s, ds_full, data, BM, HAS_MASK, ORDER)
        for it in range(n, n + count):
            while turn_at(place) != before:
                pass
            put(entry_s, (it % RING) * ENTRY + 3, before)
            mbarrier.arrive(turn, count=1)
            place_ahead, before_ahead = place, before
            if it + 1 < n + count:
                place_ahead, before_ahead = turn_of(
                    it + 1, own, about, turns_ptr, entry_s, ds_full, data, BM, HAS_MASK, ORDER)  # fmt: skip
            mbarrier.wait(added, it & 1)
            pass_turn(place, own + 1)
            place, before = place_ahead, before_ahead
        n += count
        mbarrier.arrive(kv_empty.index(ti % KV), count=1)
        ti += 1
        mbarrier.wait(kv_full.index(ti % KV), (ti // KV) & 1)
        count = number_here(about_s, (ti & 1) * FIELDS)


@gluon.jit
def sums_keeper(
    turns_ptr, shared, slots, signals, turns, sizes, data, BM: gl.constexpr, D: gl.constexpr, KV: gl.constexpr,
    HAS_MASK: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """The warp that sees to dq's sums: that they are added to in order, or cleared and collected on the way."""
    if ORDER:
        keeper(turns_ptr, slots, signals, turns, sizes[6], data, BM, KV, HAS_MASK, ORDER)
    else:
        clear_and_collect(shared, slots, signals, turns, sizes, BM, D, KV)


@gluon.jit
def half(
    w: gl.constexpr, dk_out, dv_out, dq_desc, target, out_s, marks_ptr, room, ds_s, slots, signals, turns, sizes,
    parts, scale, data, BM: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, ST: gl.constexpr, KV: gl.constexpr,
    HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr, VARLEN: gl.constexpr, ADD: gl.constexpr, ORDER: gl.constexpr,
    AHEAD: gl.constexpr, BULK: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 of 128 keys, and half of the columns of dq."""
    _, _, k_s, v_s, _, _ = room
    about_s, _ = slots
    _, dq_ptr, _ = target
    kv_full, kv_empty, _, q_empty, _, ds_full = signals
    D1: gl.constexpr = 64 if D2 > 0 else D
    NQ: gl.constexpr = D // 2 if BM == 64 else D
    WQ: gl.constexpr = D2 if (w == 1) & (D2 > 0) else NQ
    QL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WQ, 16]
    )
    batch, heads, group, _, _, _, _, _ = sizes
    n, ti = 0, 0
    mbarrier.wait(kv_full.index(0), 0)
    count = number(about_s, 0)
    while count >= 0:
        kv = ti % KV
        at = (ti & 1) * FIELDS
        dk, dv = walk(
            w, n, count, ti, target, room, ds_s, slots, signals, turns, scale, data, BM, D, D2, ST, KV, HAS_MASK,
            HAS_TERMS, HAS_MASK or HAS_TERMS or VARLEN, ADD, ORDER, BULK)  # fmt: skip
        n += count
        if AHEAD:
            mbarrier.wait(turns[0], ti & 1)
            found, taken = gl.maximum(number(about_s, at + 11), 0), number(about_s, at + 12)
            sums = read_fragments(
                dq_ptr + (found.to(gl.int64) * 2 + w) * (64 * NQ), gl.zeros([64, NQ], gl.float32, QL),
                NQ // 2)  # fmt: skip
        b, g, j0 = number(about_s, at + 1), number(about_s, at + 2), number(about_s, at + 3)
        row = number(about_s, at + 5) + j0 + w * 64
        left = number(about_s, at + 4) - (j0 + w * 64)
        tb = 0 if VARLEN else b
        if SPLIT:
            opens = number(about_s, at + 12)
            dk, dv = share_sums(dk, dv, w, number(about_s, at + 11), opens, parts, D, D1, D2)
            left = gl.where(opens < 0, 0, left)
        stage, stage_s = kv * 2 + w, v_s
        if BULK:
            # dk and dv leave from a place of their own, so that the next keys come meanwhile.
            stage, stage_s = w, out_s
        if ADD:
            if count > 0:
                dq = last_slopes(w, n, kv, k_s, ds_s, ds_full, BM, D, NQ, WQ, QL)
                if not BULK:
                    # dv leaves meanwhile.
                    store_parts(dv_out, dv, 1.0, stage_s, stage, tb, g, row, left, D1, D2, VARLEN, SPLIT)
                dq = warpgroup_mma_wait(0, deps=(dq,))
                if BULK:
                    mbarrier.arrive(kv_empty.index(0), count=1)
                add_in_turn(target, dq, n - 1, w, slots[1], turns, NQ, WQ, ORDER, BULK, D2 == 0)
                if BULK:
                    tma.store_wait(0)
                    store_parts(dv_out, dv, 1.0, stage_s, stage, tb, g, row, left, D1, D2, VARLEN, SPLIT)
            else:
                if BULK:
                    mbarrier.arrive(kv_empty.index(0), count=1)
                    tma.store_wait(0)
                store_parts(dv_out, dv, 1.0, stage_s, stage, tb, g, row, left, D1, D2, VARLEN, SPLIT)
        else:
            store_parts(dv_out, dv, 1.0, stage_s, stage, tb, g, row, left, D1, D2, VARLEN, SPLIT)
        if AHEAD:
            mbarrier.arrive(turns[1], count=1)
        note(marks_ptr, part_sums(dk, D2) + part_sums(dv, D2), b, g * group, group, heads, batch)
        tma.store_wait(0)
        store_parts(dk_out, dk, scale, stage_s, stage, tb, g, row, left, D1, D2, VARLEN, SPLIT)
        if AHEAD:
            leave_rows(
                w, sums, found, taken, n, dq_desc, dq_ptr, marks_ptr, ds_s, q_empty, sizes, scale, BM, ST)  # fmt: skip
        if KV == 1 and not BULK:
            tma.store_wait(0)
            mbarrier.arrive(kv_empty.index(0), count=1)
        ti += 1
        mbarrier.wait(kv_full.index(ti % KV), (ti // KV) & 1)
        count = number(about_s, (ti & 1) * FIELDS)
    tma.store_wait(0)


@gluon.jit
def slopes_of(ds_s, slot, w: gl.constexpr, BM: gl.constexpr):
    """Of dS^T, what a half makes dq of: all, or the columns of its 64 of 128 rows."""
    both = ds_s.index(slot)
    if BM == 128:
        both = both.slice(w * 64, 64, 1)
    return both.permute((1, 0))


@gluon.jit
def keys_of(k, w: gl.constexpr, BM: gl.constexpr, NQ: gl.constexpr, WQ: gl.constexpr):
    """Of the keys, what goes with it: half of the columns (of the second half WQ), or all."""
    if BM == 64:
        k = k.slice(w * NQ, WQ, 1)
    return k


@gluon.jit
def last_slopes(
    w: gl.constexpr, n, kv, k_s, ds_s, ds_full, BM: gl.constexpr, D: gl.constexpr, NQ: gl.constexpr,
    WQ: gl.constexpr, QL: gl.constexpr,
):  # fmt: skip
    """Issue dq of the last tile of rows, number n - 1."""
    last = n - 1
    mbarrier.wait(ds_full.index(last & 1), (last >> 1) & 1)
    return warpgroup_mma(
        slopes_of(ds_s, last & 1, w, BM), keys_of(k_s.index(kv).reshape([128, D]), w, BM, NQ, WQ),
        gl.zeros([64, WQ], gl.float32, QL), use_acc=False, is_async=True)  # fmt: skip


@gluon.jit
def step(
    w: gl.constexpr, it, n0, count, kv, at, dk, dv, s, target, room, ds_s, slots, signals, turns, scale, data,
    BM: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, ST: gl.constexpr, HAS_MASK: gl.constexpr,
    HAS_TERMS: gl.constexpr, CUT: gl.constexpr, ADD: gl.constexpr, ORDER: gl.constexpr, BULK: gl.constexpr,
):  # fmt: skip
    """One tile of rows: (dk, dv, S of the next). CUT: the mask or the sequence's end hides some of its pairs."""
    q_s, do_s, k_s, v_s, m_s, delta_s = room
    about_s, entry_s = slots
    _, _, q_full, q_empty, do_full, ds_full = signals
    dt: gl.constexpr = q_s.dtype
    D1: gl.constexpr = 64 if D2 > 0 else D
    NQ: gl.constexpr = D // 2 if BM == 64 else D
    WQ: gl.constexpr = D2 if (w == 1) & (D2 > 0) else NQ
    # Products of an accumulator's parts are on their way one by one.
    LATER: gl.constexpr = 2 if D2 > 0 else 1
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    L1: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D1, 16]
    )
    L2: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D2 if D2 > 0 else D1, 16]
    )
    QL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WQ, 16]
    )
    st = it % ST
    # The compiler does not know that it never changes: else it keeps addresses in registers that it lacks.
    here = kv + (it >> 30)
    k = k_s.index(here).reshape([128, D])
    kw = k.slice(w * 64, 64, 0)
    vw = v_s.index(here * 2 + w).reshape([64, D])
    q = q_s.index(st).reshape([BM, D])
    do = do_s.index(st).reshape([BM, D])
    last, ahead = it - 1, it + 1
    mbarrier.wait(do_full.index(st), (it // ST) & 1)
    dp = product_over(vw, do, gl.zeros([64, BM], gl.float32, SL), D1, D2)
    entry = (it % RING) * ENTRY
    code, h = 0, 0
    if CUT or HAS_TERMS:
        code = number(entry_s, entry)
        h = number(entry_s, entry + 2)
    m = m_s.index(st).load(SL)
    p, slope = weights(s, m, code, h, w, about_s, at, scale, data, HAS_MASK, HAS_TERMS, CUT)
    pa = gl.convert_layout(p.to(dt), gl.DotOperandLayout(0, L1, 2))
    delta = delta_s.index(st).load(SL)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    dv = add_over(dv, pa, do, L1, L2, D1, D2)
    ds = p * (dp - delta)
    if HAS_TERMS:
        ds = gl.where(p == 0, 0.0, ds * slope)
    ds = ds.to(dt)
    if ADD:
        # Both halves have made dq of what lay here.
        mbarrier.wait(q_empty.index((it + ST - 1) % ST), (last // ST) & 1, pred=it > 0)
        ds_s.index(it & 1).slice(w * 64, 64, 0).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(it & 1), count=1)
        mbarrier.wait(ds_full.index(ahead & 1), (last >> 1) & 1, pred=it > n0)
        dq = warpgroup_mma(
            slopes_of(ds_s, ahead & 1, w, BM), keys_of(k, w, BM, NQ, WQ), gl.zeros([64, WQ], gl.float32, QL),
            use_acc=False, is_async=True)  # fmt: skip
    dk = add_over(dk, ds, q, L1, L2, D1, D2)
    dv = wait_for(dv, LATER + 1 if ADD else LATER, D2)
    mbarrier.wait(q_full.index(ahead % ST), (ahead // ST) & 1, pred=ahead < n0 + count)
    s = product_over(kw, q_s.index(ahead % ST).reshape([BM, D]), gl.zeros([64, BM], gl.float32, SL), D1, D2)
    if ADD:
        dq = warpgroup_mma_wait(2 * LATER, deps=(dq,))
        if it > n0:
            add_in_turn(target, dq, last, w, entry_s, turns, NQ, WQ, ORDER, BULK, D2 == 0)
    if D2 == 0:
        first, s = warpgroup_mma_wait(0, deps=(dk[0], s))
        dk = (first,)
    else:
        first, second, s = warpgroup_mma_wait(0, deps=(dk[0], dk[1], s))
        dk = (first, second)
    mbarrier.arrive(q_empty.index(st), count=1)
    return dk, dv, s


@gluon.jit
def walk(
    w: gl.constexpr, n0, count, ti, target, room, ds_s, slots, signals, turns, scale, data, BM: gl.constexpr,
    D: gl.constexpr, D2: gl.constexpr, ST: gl.constexpr, KV: gl.constexpr, HAS_MASK: gl.constexpr,
    HAS_TERMS: gl.constexpr, CUT: gl.constexpr, ADD: gl.constexpr, ORDER: gl.constexpr, BULK: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys over `count` tiles of rows, of which the first is number n0.

    dq of a tile of rows is made when the next is folded, so that no half waits for the other."""
    q_s, _, k_s, _, _, _ = room
    about_s, _ = slots
    _, kv_empty, q_full, q_empty, _, ds_full = signals
    D1: gl.constexpr = 64 if D2 > 0 else D
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    L1: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D1, 16]
    )
    L2: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D2 if D2 > 0 else D1, 16]
    )
    kv = ti % KV
    at = (ti & 1) * FIELDS
    dk = (gl.zeros([64, D1], gl.float32, L1),)
    dv = (gl.zeros([64, D1], gl.float32, L1),)
    if D2 > 0:
        dk = dk + (gl.zeros([64, D2], gl.float32, L2),)
        dv = dv + (gl.zeros([64, D2], gl.float32, L2),)
    kw = k_s.index(kv).reshape([128, D]).slice(w * 64, 64, 0)
    begin = n0
    if w == 1 and HAS_MASK and ADD and not ORDER and not BULK:
        # What the second half does not see of the first row tile it leaves to the other one; of long walks, whose
        # kernels spill more with it, that is little.
        begin = n0 + number(about_s, at + 13)
        if begin > n0:
            # Rows of dq may still be on their way from where zeros and dS go (`leave_rows`).
            tma.store_wait(0)
            if BM == 64:
                nothing_seen(n0, ds_s, q_empty, ds_full, ST)
            else:
                dk, dv = half_seen(
                    n0, kv, at, room, ds_s, slots, signals, scale, data, D, ST, HAS_MASK, HAS_TERMS)  # fmt: skip
    mbarrier.wait(q_full.index(begin % ST), (begin // ST) & 1, pred=begin < n0 + count)
    s = product_over(kw, q_s.index(begin % ST).reshape([BM, D]), gl.zeros([64, BM], gl.float32, SL), D1, D2)
    if KV > 1:
        # Gradients of the keys before these have left by now.
        tma.store_wait(0)
        mbarrier.arrive(kv_empty.index((ti + KV - 1) % KV), count=1, pred=ti > 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    split = begin
    if CUT:
        # Pairs may be hidden in the first row tiles only: the others are walked without a branch.
        split = n0 + number(about_s, at + 9)
        for it in range(begin, split):
            dk, dv, s = step(
                w, it, n0, count, kv, at, dk, dv, s, target, room, ds_s, slots, signals, turns, scale, data, BM, D, D2,
                ST, HAS_MASK, HAS_TERMS, True, ADD, ORDER, BULK)  # fmt: skip
    for it in range(split, n0 + count):
        dk, dv, s = step(
            w, it, n0, count, kv, at, dk, dv, s, target, room, ds_s, slots, signals, turns, scale, data, BM, D, D2,
            ST, HAS_MASK, HAS_TERMS, False, ADD, ORDER, BULK)  # fmt: skip
    return dk, dv


@gluon.jit
def halves_program(
    q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_desc, sums_desc, dq_ptr,
    marks_ptr, counter_ptr, turns_ptr, clear_ptr, done_ptr, taken_ptr, parts_ptr, said_ptr, q_offset_ptr, k_offset_ptr,
    cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, batch, heads, group, seqlen_q,
    seqlen_k, row_tiles, key_tiles, swizzle, lead, lag, first, span, ranges, q_offset, k_offset, size_d, size_dv, scale,
    data, HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, D2: gl.constexpr,
    ST: gl.constexpr, KV: gl.constexpr, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr,
    Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, ADD: gl.constexpr, ORDER: gl.constexpr, WORKER: gl.constexpr,
    LOADER: gl.constexpr, AHEAD: gl.constexpr, BULK: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Two halves of 128 keys, and the producer. BM: rows of a tile. D2: 0, or of 64 + D2 columns those after the
    first 64. KV: tiles of keys in shared memory. WORKER, LOADER: registers of a thread of each. ORDER: additions to
    dq in one of three fixed orders; turns_ptr: whose turn it is, a number below which all tiles of keys have added to
    a row tile.
    AHEAD: dq's sums are cleared and collected on the way (`backward_sums`). BULK: the copy engine adds to them. SPLIT:
    the last tiles are cut (`backward_split`)."""
    dt: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dt, [ST, 1, 1, BM, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(dt, [ST, 1, 1, BM, D], do_desc.layout)
    k_s = gl.allocate_shared_memory(dt, [KV, 1, 1, 128, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dt, [2 * KV, 1, 1, 64, D], v_desc.layout)
    m_s = gl.allocate_shared_memory(gl.float32, [ST, 1, BM], m_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [ST, 1, BM], delta_desc.layout)
    ds_s = gl.allocate_shared_memory(dt, [2, 128, BM], gl.NVMMASharedLayout(128, 16, 2))
    out_s, dq_s = v_s, ds_s
    if BULK:
        # Sums that the copy engine adds, and dk and dv, leave from a place of their own.
        out_s = gl.allocate_shared_memory(dt, [2, 1, 1, 64, D], v_desc.layout)
        dq_s = out_s._reinterpret(gl.float32, [2, 16, 256], gl.NVMMASharedLayout(0, 32, 2))
    slots = (slots_of(2 * FIELDS), slots_of(RING * ENTRY))
    kv_full, kv_empty = barriers(KV, 1), barriers(KV, 3 if ORDER or AHEAD else 2)
    q_full, q_empty, do_full, ds_full = barriers(ST, 1), barriers(ST, 2), barriers(ST, 1), barriers(2, 2)
    turns = (kv_full.index(0), kv_full.index(0))
    if ORDER or AHEAD:
        turns = (barriers(1, 1).index(0), barriers(1, 2).index(0))
    fence_async_shared()
    sizes = (batch, heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles, swizzle)
    tables = (cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr)
    offsets = (q_offset, q_offset_ptr, k_offset, k_offset_ptr)
    descs = (q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc)
    dk_out = (dk_desc, dk_ptr, dk_b, dk_h, dk_n, size_d)
    dv_out = (dv_desc, dv_ptr, dv_b, dv_h, dv_n, size_dv)
    room = (q_s, do_s, k_s, v_s, m_s, delta_s)
    signals = (kv_full, kv_empty, q_full, q_empty, do_full, ds_full)
    loads = (kv_full, q_full, q_empty, do_full, q_empty)
    target = (sums_desc, dq_ptr, dq_s)
    shared = (dq_ptr, clear_ptr, done_ptr, taken_ptr, lead, lag)
    parts = (parts_ptr, said_ptr)
    # Constants survive in a tuple only where it is written inside the call.
    if ORDER or AHEAD:
        gl.warp_specialize([
            (half, (
                0, dk_out, dv_out, dq_desc, target, out_s, marks_ptr, room, ds_s, slots, signals, turns, sizes, parts,
                scale, data, BM, D, D2, ST, KV, HAS_MASK, HAS_TERMS, VARLEN, ADD, ORDER, AHEAD, BULK, SPLIT)),
            (half, (
                1, dk_out, dv_out, dq_desc, target, out_s, marks_ptr, room, ds_s, slots, signals, turns, sizes, parts,
                scale, data, BM, D, D2, ST, KV, HAS_MASK, HAS_TERMS, VARLEN, ADD, ORDER, AHEAD, BULK, SPLIT)),
            (halves_producer, (
                counter_ptr, shared, descs, room, slots, loads, kv_empty, sizes, (first, span, ranges), tables,
                offsets, data, BM, D, ST, KV, HAS_MASK, VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, ORDER, AHEAD,
                SPLIT, HAS_MASK and ADD and not ORDER and not BULK)),
            (sums_keeper, (turns_ptr, shared, slots, signals, turns, sizes, data, BM, D, KV, HAS_MASK, ORDER)),
        ], [4, 1, 1], [WORKER, LOADER, LOADER])  # fmt: skip
    else:
        gl.warp_specialize([
            (half, (
                0, dk_out, dv_out, dq_desc, target, out_s, marks_ptr, room, ds_s, slots, signals, turns, sizes, parts,
                scale, data, BM, D, D2, ST, KV, HAS_MASK, HAS_TERMS, VARLEN, ADD, ORDER, AHEAD, BULK, SPLIT)),
            (half, (
                1, dk_out, dv_out, dq_desc, target, out_s, marks_ptr, room, ds_s, slots, signals, turns, sizes, parts,
                scale, data, BM, D, D2, ST, KV, HAS_MASK, HAS_TERMS, VARLEN, ADD, ORDER, AHEAD, BULK, SPLIT)),
            (halves_producer, (
                counter_ptr, shared, descs, room, slots, loads, kv_empty, sizes, (first, span, ranges), tables,
                offsets, data, BM, D, ST, KV, HAS_MASK, VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, ORDER, AHEAD,
                SPLIT, HAS_MASK and ADD and not ORDER and not BULK)),
        ], [4, 1], [WORKER, LOADER])  # fmt: skip
