"""dq's sums on their way: cleared before tiles of keys add to them, and collected behind them, while others still run.

A call of many heads needs the sums of all of them, but never at once. With each tile of keys one more warp clears a
share of the sums of a unit (a batch entry's KV head) that is `lead` units on, and looks whether all has been added to
those of the unit `lag` units back; a share of these then becomes dq in the halves, between two tiles. So neither waits
for memory with the matrix unit idle, and sums are read while they lie in the second-level cache. What is in the first
`lead` units and the last `lag`, or was not ready, is left to the kernels before and after.

Counters in memory, one for each section of units whose tiles run abreast: shares that are clear, and tiles that have
added. Whoever waits, waits for tiles drawn before its own by programs that run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise.backends.hopper.backward_rings import (
    ENTRY,
    FIELDS,
    RING,
    add_constraints,
    add_fragments,
    fragment_places,
    line_sums,
    note,
    number,
    number_here,
    turn_at,
    write_fragments,
)  # fmt: skip
from tilewise.backends.hopper.names import tma_reduce_add, tma_store
from tilewise.backends.hopper.rings import put


@gluon.jit
def add_in_turn(target, dq, n, w: gl.constexpr, entry_s, turns, NQ: gl.constexpr, WQ: gl.constexpr,
                ORDER: gl.constexpr, BULK: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    """Add half of dq of row tile number n to memory: WQ of the NQ columns that there is room for. BULK: by the copy
    engine, from shared memory, in the same order as from registers. WHOLE: both halves fill that room, and the first in
    order writes."""
    sums_desc, dq_ptr, dq_s = target
    tile = number(entry_s, (n % RING) * ENTRY + 1)
    if BULK:
        tma.store_wait(0)
        in_order = dq.reshape([4, 2, 8, WQ // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([WQ // 4, 256])
        place = dq_s.index(w)
        if WQ == 32:
            place = place.slice(0, 8, 0)
        place.store(in_order)
        fence_async_shared()
        row = (tile * 2 + w) * (NQ // 4)
        for part in gl.static_range(WQ // 32):
            tma_reduce_add(sums_desc, [row + part * 8, 0], dq_s.index(w).slice(part * 8, 8, 0))
    else:
        place = dq_ptr + (tile.to(gl.int64) * 2 + w) * (64 * NQ)
        if ORDER:
            mbarrier.wait(turns[0], n & 1)
            if WHOLE:
                # The first needs nothing that was cleared.
                if number(entry_s, (n % RING) * ENTRY + 3) == 0:
                    write_fragments(place, dq, WQ // 2)
                else:
                    add_fragments(place, dq, WQ // 2)
            else:
                add_fragments(place, dq, WQ // 2)
            mbarrier.arrive(turns[1], count=1)
        else:
            add_fragments(place, dq, WQ // 2)


@gluon.jit
def announce(ptr):
    """Add 1 to a number in memory, from one warp: who acquires it finds what the warp did or saw before."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l; bar.warp.sync 0xffffffff; fence.acq_rel.gpu; mov.u32 l, %laneid; "
        "setp.eq.u32 p, l, 0; @p red.relaxed.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l", [ptr.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def await_number(ptr, n):
    """Wait until a number in memory is n or more."""
    seen = turn_at(ptr)
    while seen < n:
        seen = turn_at(ptr)


@gluon.jit
def clear_blocks(ptr, first, n):
    """Zeros into n blocks of 1024 floats, from one warp."""
    at = ptr + first.to(gl.int64) * 1024 + gl.arange(0, 1024, layout=gl.BlockedLayout([4], [32], [1], [0]))
    for _ in range(0, n):
        gl.store(at, gl.zeros([1024], gl.float32, gl.BlockedLayout([4], [32], [1], [0])))
        at += 1024


@gluon.constexpr_function
def read_text(n):
    """Assembler text that reads n floats as `add_fragments` adds them."""
    text = [
        f"ld.global.cg.v4.f32 {{${4 * i}, ${4 * i + 1}, ${4 * i + 2}, ${4 * i + 3}}}, [${2 * n}+{2048 * i}];"
        for i in range(n // 4)
    ]
    return " ".join(["{", *text, "}"])


@gluon.jit
def read_fragments(ptr, x, N: gl.constexpr):
    """A tile like x that `add_fragments` added up."""
    asm: gl.constexpr = read_text(N)
    constraints: gl.constexpr = add_constraints(N)
    places = fragment_places(ptr, x)
    return gl.inline_asm_elementwise(asm, constraints, [x, places], dtype=gl.float32, is_pure=False, pack=N)


@gluon.jit
def clear_and_collect(
    shared, slots, signals, steps, sizes, BM: gl.constexpr, D: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    """One warp: with each tile of keys it clears a share of dq's sums of the unit (a batch entry's KV head) `lead`
    units on, and hands the halves a share of those of the unit `lag` units back, if all has been added to it. It says
    what is clear, and what has been added; it waits for no other program."""
    dq_ptr, clear_ptr, done_ptr, taken_ptr, lead, lag = shared
    about_s, _ = slots
    kv_full, kv_empty, _, _, _, _ = signals
    noted, added = steps
    batch, heads, group, _, _, row_tiles, key_tiles, swizzle = sizes
    units, rows = batch * (heads // group), group * row_tiles
    per = gl.cdiv(rows, key_tiles)
    ti = 0
    mbarrier.wait(kv_full.index(0), 0)
    count = number_here(about_s, 0)
    while count >= 0:
        at = (ti & 1) * FIELDS
        t = number_here(about_s, at + 10)
        unit = t // key_tiles
        a = gl.minimum((t - unit * key_tiles) * per, rows)
        n = gl.minimum(rows - a, per)
        back = unit - lag
        taken = 0
        if back >= 0:
            section = back // swizzle
            first = section * swizzle
            if turn_at(done_ptr + section) == (gl.minimum(first + swizzle, units) - first) * key_tiles:
                gl.store(taken_ptr + (t - lag * key_tiles), 1)
                taken = n
        put(about_s, at + 11, back * rows + a)
        put(about_s, at + 12, taken)
        mbarrier.arrive(noted, count=1)
        on = unit + lead
        if on < units:
            clear_blocks(dq_ptr, (on * rows + a) * (BM * D // 1024), n * (BM * D // 1024))
            announce(clear_ptr + on // swizzle)
        mbarrier.wait(added, ti & 1)
        announce(done_ptr + t // (key_tiles * swizzle))
        mbarrier.arrive(kv_empty.index(ti % KV), count=1)
        ti += 1
        mbarrier.wait(kv_full.index(ti % KV), (ti // KV) & 1)
        count = number_here(about_s, (ti & 1) * FIELDS)


@gluon.jit
def await_clear(t, shared, sizes):
    """Wait until the sums that tile t of keys adds to are clear; tiles drawn before it clear them."""
    _, clear_ptr, _, _, lead, _ = shared
    batch, heads, group, _, _, _, key_tiles, swizzle = sizes
    section = t // (key_tiles * swizzle)
    first = section * swizzle
    last = gl.minimum(first + swizzle, batch * (heads // group))
    await_number(clear_ptr + section, (last - gl.maximum(first, lead)) * key_tiles)


@gluon.jit
def leave_rows(
    w: gl.constexpr, sums, found, count, n, dq_desc, dq_ptr, marks_ptr, ds_s, q_empty, sizes, scale, BM: gl.constexpr,
    ST: gl.constexpr,
):  # fmt: skip
    """Half of `count` row tiles of dq to memory, of which the first half is in `sums`. They pass through where the next
    dS will lie: both halves have made dq of what lay there."""
    _, heads, _, _, _, row_tiles, _, _ = sizes
    batch = sizes[0]
    mbarrier.wait(q_empty.index((n + ST - 1) % ST), ((n - 1) // ST) & 1, pred=n > 0)
    place = ds_s.index(n & 1)._reinterpret(ds_s.dtype, [BM // 32, 1, 1, 64, 64], dq_desc.layout).index(w)
    for r in range(0, count):
        if r > 0:
            sums = read_fragments(dq_ptr + ((found + r).to(gl.int64) * 2 + w) * 4096, sums, 32)
            tma.store_wait(0)
        unit = (found + r) // row_tiles
        b = unit // heads
        h = unit - b * heads
        m = found + r - unit * row_tiles
        place.reshape([64, 64]).store((sums * scale).to(ds_s.dtype))
        fence_async_shared()
        if BM == 128:
            tma_store(dq_desc, [b, h, m * 128 + w * 64, 0], place)
        else:
            tma_store(dq_desc, [b, h, m * 64, w * 64], place)
        note(marks_ptr, line_sums((sums,), 1), b, h, 1, heads, batch)
