"""What the backward's kernels by tiles of keys share that depends on the spec: the producer, and the weights.

One warp produces: it counts and finds the row tiles that are not EMPTY by the mask's interval form, 32 at once, loads q
and do by the copy engine, and says with each which rows they are. A template of `source`: kernels import from its
printed form.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.hopper.backward_rings import (
    ENTRY,
    FLIPPED,
    RING,
    SIDE_BY_SIDE,
    key_tile,
    load_chunks,
    number,
    number_here,
    same,
    tiles_of,
)
from tilewise.backends.hopper.backward_split import SECOND, piece_of
from tilewise.backends.hopper.forward_place import offset_of
from tilewise.backends.hopper.names import tma_load
from tilewise.backends.hopper.plain import classify, derive, keep
from tilewise.backends.hopper.rings import put

LOG2 = gl.constexpr(1.4426950408889634)


@gluon.jit
def place_of(unit, n_m, group, flip, ORDER: gl.constexpr):
    """(head of the group, row tile) of a number: head by head, or the heads of a group SIDE_BY_SIDE: where each tile of
    keys has a shorter walk than the one before it, it would wait for that one at each head again. flip: whether row
    tiles are counted from the last, if FLIPPED; there are no groups then."""
    if ORDER == SIDE_BY_SIDE:
        m = unit // group
        member = unit - m * group
    elif ORDER == FLIPPED:
        m = gl.where(flip > 0, gl.maximum(n_m - 1 - unit, 0), unit)
        member = unit * 0
    else:
        member = gl.minimum(unit // n_m, group - 1)
        m = unit - member * n_m
    return member, m


@gluon.jit
def codes_of(
    chunk, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data, flip, BM: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """A number for each of 32 row tiles of the group's heads: -1 if EMPTY, else its own times 4, plus 2 if PARTIAL."""
    unit = chunk * 32 + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    member, m = place_of(unit, n_m, group, flip, ORDER)
    i0 = m * BM
    i1 = gl.minimum(i0 + BM, n_q) - 1
    h = g * group + member
    kind = classify(gl.minimum(i0, i1), i1, j0, j1, q_offset, k_offset, b, h, h, g, data)
    return gl.where((kind > 0) & (unit < units), unit * 4 + (kind == 1).to(gl.int32) * 2, -1)


@gluon.jit
def next_code(u, wanted, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data, BM: gl.constexpr):
    """The number of the first row tile after u that is not EMPTY, of which there is one; wanted: 2 if it is to be
    PARTIAL, 0 if FULL, 1 if either."""
    chunk = (u + 1) // 32
    found = units * 4
    while (found == units * 4) & (chunk * 32 < units):
        codes = codes_of(chunk, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data, 0, BM, 0)
        fits = (codes > u * 4 + 3) & (((codes & 2) == wanted) | (wanted == 1))
        found = gl.min(gl.where(fits, codes, units * 4), 0)
        chunk += 1
    return same(found)


@gluon.jit
def code_before(
    u, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data, flip, BM: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """The number of the last row tile before u that is not EMPTY, of which there is one."""
    chunk = (u - 1) // 32
    found = -1
    while (found < 0) & (chunk >= 0):
        codes = codes_of(
            chunk, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data, flip, BM, ORDER
        )
        found = gl.max(gl.where(codes < u * 4, codes, -1), 0)
        chunk -= 1
    return same(found)


@gluon.jit
def later_hidden(code, n_m, j0, j1, n_q, group, q_offset, k_offset, b, g, data, BM: gl.constexpr):
    """1 if row tile `code` is PARTIAL and none of its first 64 rows sees a key from j0 + 64 on, else 0."""
    unit = code // 4 + gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    member, m = place_of(unit, n_m, group, 0, 0)
    i0 = m * BM
    i1 = gl.minimum(i0 + 64, n_q) - 1
    h = g * group + member
    kind = classify(gl.minimum(i0, i1), i1, gl.minimum(j0 + 64, j1), j1, q_offset, k_offset, b, h, h, g, data)
    # The kind may be one number for all, where the mask reads no row.
    hidden = ((kind == 0) | (j0 + 64 > j1)) & ((code & 2) != 0) & (unit >= 0)
    return same(gl.max(hidden.to(gl.int32), 0))


@gluon.jit
def produce(
    t, n0, kv, at, descs, room, slots, signals, free, phase, counter_ptr, sizes, tables, offsets, data,
    BM: gl.constexpr, BN: gl.constexpr, NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr, ST: gl.constexpr,
    HAS_MASK: gl.constexpr, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr,
    K_OFFSET: gl.constexpr, ORDER: gl.constexpr, DRAW: gl.constexpr, SPLIT: gl.constexpr, split,
    SKIP: gl.constexpr,
):  # fmt: skip
    """One warp: loads tile t of keys into place kv, which is free when `free` is past `phase`, finds its row tiles and
    loads them, and tells the consumers, about the tile in the slots from `at` on; n0 row tiles came before. Returns how
    many have come, and, if DRAW, what was drawn for the next tile."""
    q_desc, do_desc, k_desc, v_desc, m_desc, delta_desc = descs
    q_s, do_s, k_s, v_s, m_s, delta_s = room
    about_s, entry_s = slots
    kv_full, q_full, q_empty, do_full, do_empty = signals
    tile = t
    if SPLIT:
        rows = gl.cdiv(sizes[3], BM) * sizes[2]
        left = tiles_of(sizes, VARLEN) - split[0]
        tile, piece, rows, part, opens, goes_on = piece_of(t, rows, left, split)
    b, g, n, row0, n_q, key0, n_k, first = key_tile(tile, sizes, tables, VARLEN, USED_Q, USED_K, BM, BN)
    if VARLEN and DRAW:
        # Tiles without keys are nobody's; where none is left, one behind all keys does nothing.
        total = tiles_of(sizes, VARLEN)
        while (n * BN >= n_k) & (t < total):
            t = gl.atomic_add(counter_ptr, 1, sem="relaxed") + (0 if ORDER else gl.num_programs(0))
            b, g, n, row0, n_q, key0, n_k, first = key_tile(
                gl.minimum(t, total - 1), sizes, tables, VARLEN, USED_Q, USED_K, BM, BN)  # fmt: skip
            n = gl.where(t < total, n, total)
    _, heads, group, _, _, row_tiles, _, _ = sizes
    q_offset = offset_of(offsets[0], offsets[1], b, n_k - n_q, Q_OFFSET)
    k_offset = offset_of(offsets[2], offsets[3], b, 0, K_OFFSET)
    flip = 0
    if ORDER == FLIPPED:
        flip, n = flipped(t, n, sizes)
    j0 = n * BN
    j1 = gl.minimum(j0 + BN, n_k) - 1
    n_m = gl.cdiv(n_q, BM)
    units = gl.where(j0 < n_k, n_m * group, 0)
    cut = (j0 + BN > n_k).to(gl.int32) * 2
    # Row tiles come by their numbers, from `start`, which is not among them. Where additions have an order the last
    # rows come first: if later keys are hidden, all tiles of keys see those, and one begins as soon as the one before
    # it has passed a tile of rows. If tiles of keys are flipped, the first rows do.
    count, partial, start = units, 0, -1
    if ORDER:
        start = units
    if SPLIT:
        count = gl.where(j0 < n_k, rows, 0)
        start = piece - 1
    half = 0
    if HAS_MASK:
        count = 0
        start = -1 if ORDER else units * 4
        for chunk in range(0, gl.cdiv(units, 32)):
            codes = codes_of(
                chunk, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data, flip, BM, ORDER)  # fmt: skip
            count += gl.sum((codes >= 0).to(gl.int32), 0)
            partial += gl.sum(((codes >= 0) & ((codes & 2) != 0)).to(gl.int32), 0)
            if ORDER:
                start = gl.maximum(start, gl.max(codes, 0))
            else:
                start = gl.minimum(start, gl.min(gl.where(codes >= 0, codes, units * 4), 0))
        if SKIP:
            half = later_hidden(start, n_m, j0, j1, n_q, group, q_offset, k_offset, b, g, data, BM)
        # Scans begin behind what nobody sees.
        start = same(start) // 4 + (1 if ORDER else -1)
    count = same(count)
    # Row tiles of which nothing is hidden come last, and are walked without asking; where additions have an order, all
    # come in theirs.
    mixed = cut > 0
    if ORDER and HAS_MASK:
        mixed = cut >= 0
    partial = same(gl.where(mixed, count, partial))
    # All this was found while the others still work on the keys that lie there.
    mbarrier.wait(free, phase)
    about = (count, b, g, j0, n_k, key0, q_offset, k_offset, n_q, partial, t)
    for f in gl.static_range(11):
        put(about_s, at + f, about[f])
    if SKIP:
        put(about_s, at + 13, gl.where(count > 0, half, 0))
    if ORDER == FLIPPED:
        put(about_s, at + 11, flip)
    if SPLIT:
        put(about_s, at + 11, part)
        put(about_s, at + 12, opens)
    tb = 0 if VARLEN else b
    full = kv_full.index(kv)
    mbarrier.expect(full, BN * W * (NC + NV) * 2)
    load_chunks(k_desc, k_s, full, tb, g, key0 + j0, kv * NC, NC, W)
    for part in gl.static_range(BN // 64):
        load_chunks(
            v_desc, v_s, full, tb, g, key0 + j0 + part * 64, (kv * (BN // 64) + part) * NV, NV, W)  # fmt: skip
    # Without a mask, neighbours begin at different rows: fewer additions to one place at once.
    turn = 0
    if not (HAS_MASK or ORDER):
        turn = (n * (BN // BM)) % gl.maximum(n_m, 1)
    u = start
    # The next tile is drawn late: who draws with much to do takes from those that soon have nothing.
    following = t
    last = n0 + gl.maximum(count - 2, 0)
    if SPLIT:
        # A range that goes on is its program's.
        following = t + SECOND
        last = gl.where(goes_on, -1, last)
    for it in range(n0, n0 + count):
        if DRAW and not ORDER:
            if it == last:
                following = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        kind = cut
        if HAS_MASK:
            if ORDER:
                code = code_before(
                    u, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data, flip, BM, ORDER)  # fmt: skip
            else:
                wanted = gl.where(mixed, 1, gl.where(it < n0 + partial, 2, 0))
                u = gl.where((wanted == 0) & (it == n0 + partial), start, u)
                code = next_code(
                    u, wanted, n_m, units, j0, j1, n_q, group, q_offset, k_offset, b, g, data, BM
                )
            u = code // 4
            kind = cut | (code & 2)
        elif ORDER:
            u -= 1
        else:
            u += 1
        member, m = place_of(u, n_m, group, flip, ORDER)
        m += turn
        m = gl.where(m >= n_m, m - n_m, m)
        h = g * group + member
        row_tile = first + h * row_tiles + m
        st = it % ST
        full = q_full.index(st)
        mbarrier.wait(q_empty.index(st), ((it // ST) & 1) ^ 1)
        entry = (it % RING) * ENTRY
        put(entry_s, entry, m * 4 + kind)
        put(entry_s, entry + 1, row_tile)
        put(entry_s, entry + 2, h)
        mbarrier.expect(full, BM * W * NC * 2 + BM * 4)
        load_chunks(q_desc, q_s, full, tb, h, row0 + m * BM, st * NC, NC, W)
        tma_load(m_desc, [0, row_tile * BM], full, m_s.index(st))
        full = do_full.index(st)
        mbarrier.wait(do_empty.index(st), ((it // ST) & 1) ^ 1)
        mbarrier.expect(full, BM * W * NV * 2 + BM * 4)
        load_chunks(do_desc, do_s, full, tb, h, row0 + m * BM, st * NV, NV, W)
        tma_load(delta_desc, [0, row_tile * BM], full, delta_s.index(st))
    if DRAW:
        if ORDER or count == 0:
            following = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    return n0 + count, following


@gluon.jit
def flipped(t, n, sizes):
    """(whether tile t of keys is flipped, its number then); n: what it is else.

    Where later keys are hidden and a tile of rows is as long as one of keys, a tile of keys has one row tile less than
    the one before it, and is one behind: those that begin together end together, and the next ones wait again. From
    the last keys to the first, and from the first rows, each is at a row tile one step after the one before it.
    But the longest tiles come last then, so the last heads go the other way."""
    batch, heads, group, _, _, _, key_tiles, swizzle = sizes
    units = batch * (heads // group)
    flip = (t // (key_tiles * swizzle) < gl.cdiv(units, swizzle) - 1).to(gl.int32)
    return flip, gl.where(flip > 0, key_tiles - 1 - n, n)


@gluon.jit
def keys_before(
    own, m, n_q, n_k, q_offset, k_offset, b, h, g, data, flip, key_tiles, BM: gl.constexpr, BN: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """Of tile `own` of keys, by the order of additions: 1 + the number of the last one before it of which row tile m
    sees some; 0 if there is none. flip: whether that order is from the last keys to the first."""
    i1 = gl.minimum(m * BM + BM, n_q) - 1
    i0 = gl.minimum(m * BM, i1)
    found, end = 0, own
    while (found == 0) & (end > 0):
        block = end - 1 - gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        at = gl.maximum(block, 0)
        there = block >= 0
        if ORDER == FLIPPED:
            at = gl.where(flip > 0, key_tiles - 1 - at, at)
            there = there & (at * BN < n_k)
            at = gl.minimum(at, gl.cdiv(n_k, BN) - 1)
        j0 = at * BN
        j1 = gl.minimum(j0 + BN, n_k) - 1
        kind = classify(i0, i1, j0, j1, q_offset, k_offset, b, h, h, g, data)
        found = gl.max(gl.where((kind > 0) & there, block + 1, 0), 0)
        end -= 32
    return same(found)


@gluon.jit
def turn_of(
    n, own, about, turns_ptr, entry_s, ds_full, data, BM: gl.constexpr, HAS_MASK: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """Of row tile number n: where its turn stands, and what stands there when it is the turn of tile `own` of keys."""
    b, g, n_q, n_k, q_offset, k_offset, flip, key_tiles = about
    mbarrier.wait(ds_full.index(n & 1), (n >> 1) & 1)
    entry = (n % RING) * ENTRY
    before = own
    if HAS_MASK:
        m, h = number_here(entry_s, entry) // 4, number_here(entry_s, entry + 2)
        before = keys_before(
            own, m, n_q, n_k, q_offset, k_offset, b, h, g, data, flip, key_tiles, BM, 128, ORDER
        )
    return turns_ptr + number_here(entry_s, entry + 1), before


@gluon.jit
def about_of(about_s, at):
    """b, KV head, keys, positions of the first row and key: read when wanted, rather than kept in registers."""
    return (
        number(about_s, at + 1), number(about_s, at + 2), number(about_s, at + 4), number(about_s, at + 6),
        number(about_s, at + 7))  # fmt: skip


@gluon.jit
def weights(
    s, m, code, h, w: gl.constexpr, about_s, at, scale, data, HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr,
    CUT: gl.constexpr,
):  # fmt: skip
    """(p, slope of the terms) of a transposed tile of raw scores; hidden pairs of a PARTIAL tile have weight 0.

    m: minus the rows' lse, in powers of two; -inf in rows that take no part. w: which 64 of the tile's keys, about
    which the slots from `at` on tell. CUT: keys beyond the sequence are not zeros that change nothing."""
    SL: gl.constexpr = s.type.layout
    BM: gl.constexpr = s.shape[1]
    slope = s
    if HAS_TERMS:
        b, g, n_k, q_offset, k_offset = about_of(about_s, at)
        i = ((code // 4) * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, SL)))[None, :]
        j = (number(about_s, at + 3) + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SL)))[:, None]
        found = derive(s * scale, i, j, i + q_offset, j + k_offset, b, h, g, data)
        p = gl.exp2(gl.fma(found[0], gl.full_like(s, LOG2), m + gl.full_like(s, -0.0)))
        slope = found[1]
    else:
        # Adding -0.0 changes no number, and the compiler drops it.
        nothing = gl.full_like(s, -0.0)
        p = gl.exp2(gl.fma(s, nothing + scale * LOG2, m + nothing))
    if CUT:
        if (code & 2) != 0:
            b, g, n_k, q_offset, k_offset = about_of(about_s, at)
            i = ((code // 4) * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, SL)))[None, :]
            j = (number(about_s, at + 3) + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SL)))[:, None]
            seen = j < n_k
            if HAS_MASK:
                seen = keep(s, i, j, i + q_offset, j + k_offset, b, h, g, data) & seen
            p = gl.where(seen, p, 0.0)
    return p, slope
