"""The forward tile loops in Numba.

One task is a segment, a head and 64 rows of q (the rows of a whole group of heads where there are few), over
one chunk of the keys. Loop order: keys inner; (m, l, acc) stay in the thread's scratch:

    score tile -> fold terms and, on PARTIAL tiles, the mask -> absorb

Memory of a thread: q and acc transposed, (D + D_v) x 64 float32, and a score tile of `key_block` x 64; 2-byte
types add a float32 copy of the block's keys and values. Everything stays in the second-level cache.

Source: Dao et al., FlashAttention-2, 2023, algorithm 1, https://arxiv.org/abs/2307.08691; with transposed
tiles, so that the softmax needs no horizontal reduction.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from numba import njit, types

from tilewise.backends.cpu.isa import BLOCK_ROWS, STRIP
from tilewise.backends.cpu.micro import (
    ROW, Micro, indirect, load_f32, load_i32, load_i64, store_f32, store_i32, store_i64, take,
)  # fmt: skip
from tilewise.backends.cpu.parameters import LANES, NUMBER, SEGMENT, TABLE, P

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

EMPTY, FULL = 0, 2
CLASS_KEYS = 64
"""Keys of one tile of the classification; runs of one class become one block."""
JIT = {"nogil": True, "error_model": "numpy", "inline": "never"}
f32, i32 = types.float32, types.int32
call_fold = indirect(types.void, 7)
call_classify = indirect(types.int64, 6)


class Loops(NamedTuple):
    """The loops both passes share: matrix products over tiles and the setting up of a block of rows."""

    scores: Any
    weighted: Any
    widen: Any
    segment_of: Any
    set_lanes: Any
    pack: Any
    next_run: Any
    fill: Any
    drop: Any


def build_products(isa: Isa, micro: Micro) -> tuple[Any, Any]:
    """scores(K, row bytes, Q^T, D, S, top, keys, strips) and weighted(V, row bytes, P, keys, acc, alpha, D_v, strips)."""
    wide = isa.wide // STRIP
    vectors = isa.wide // isa.lanes
    narrow = STRIP // isa.lanes
    s6, s4, s2, s1 = (micro.product(r, vectors, "scores") for r in (6, 4, 2, 1))
    n12, n4, n2, n1 = (micro.product(r, narrow, "scores") for r in (12 if wide > 1 else 6, 4, 2, 1))
    o6, o4, o2, o1 = (micro.product(r, vectors, "scaled") for r in (6, 4, 2, 1))
    p12, p4, p2, p1 = (micro.product(r, narrow, "scaled") for r in (12 if wide > 1 else 6, 4, 2, 1))
    tall = 12 if wide > 1 else 6

    @njit(**JIT)
    def scores(k, k_row, qt, dim, s, top, keys, strips):  # noqa: ANN001, ANN202
        strip = 0
        while strip < strips:
            at = strip * STRIP * 4
            j = 0
            if wide > 1 and strips - strip < wide:
                while j + tall <= keys:
                    n12(k + j * k_row, k_row, 4, qt + at, ROW, dim, s + j * ROW + at, ROW, top + at)
                    j += tall
                while j + 4 <= keys:
                    n4(k + j * k_row, k_row, 4, qt + at, ROW, dim, s + j * ROW + at, ROW, top + at)
                    j += 4
                if (keys - j) & 2:
                    n2(k + j * k_row, k_row, 4, qt + at, ROW, dim, s + j * ROW + at, ROW, top + at)
                    j += 2
                if (keys - j) & 1:
                    n1(k + j * k_row, k_row, 4, qt + at, ROW, dim, s + j * ROW + at, ROW, top + at)
                strip += 1
            else:
                while j + 6 <= keys:
                    s6(k + j * k_row, k_row, 4, qt + at, ROW, dim, s + j * ROW + at, ROW, top + at)
                    j += 6
                if keys - j >= 4:
                    s4(k + j * k_row, k_row, 4, qt + at, ROW, dim, s + j * ROW + at, ROW, top + at)
                    j += 4
                if (keys - j) & 2:
                    s2(k + j * k_row, k_row, 4, qt + at, ROW, dim, s + j * ROW + at, ROW, top + at)
                    j += 2
                if (keys - j) & 1:
                    s1(k + j * k_row, k_row, 4, qt + at, ROW, dim, s + j * ROW + at, ROW, top + at)
                strip += wide

    @njit(**JIT)
    def weighted(v, v_row, p, keys, acc, alpha, dim, strips):  # noqa: ANN001, ANN202
        strip = 0
        while strip < strips:
            at = strip * STRIP * 4
            d = 0
            if wide > 1 and strips - strip < wide:
                while d + tall <= dim:
                    p12(v + d * 4, 4, v_row, p + at, ROW, keys, acc + d * ROW + at, ROW, alpha + at)
                    d += tall
                while d + 4 <= dim:
                    p4(v + d * 4, 4, v_row, p + at, ROW, keys, acc + d * ROW + at, ROW, alpha + at)
                    d += 4
                if (dim - d) & 2:
                    p2(v + d * 4, 4, v_row, p + at, ROW, keys, acc + d * ROW + at, ROW, alpha + at)
                    d += 2
                if (dim - d) & 1:
                    p1(v + d * 4, 4, v_row, p + at, ROW, keys, acc + d * ROW + at, ROW, alpha + at)
                strip += 1
            else:
                while d + 6 <= dim:
                    o6(v + d * 4, 4, v_row, p + at, ROW, keys, acc + d * ROW + at, ROW, alpha + at)
                    d += 6
                if dim - d >= 4:
                    o4(v + d * 4, 4, v_row, p + at, ROW, keys, acc + d * ROW + at, ROW, alpha + at)
                    d += 4
                if (dim - d) & 2:
                    o2(v + d * 4, 4, v_row, p + at, ROW, keys, acc + d * ROW + at, ROW, alpha + at)
                    d += 2
                if (dim - d) & 1:
                    o1(v + d * 4, 4, v_row, p + at, ROW, keys, acc + d * ROW + at, ROW, alpha + at)
                strip += wide

    return scores, weighted


def build_loops(isa: Isa, micro: Micro) -> Loops:
    """The shared loops for one target and storage type."""
    lanes, size = isa.lanes, micro.size
    scores, weighted = build_products(isa, micro)
    widen_vector, pack_square, element_load = micro.widen_vector, micro.pack_square, micro.element_load
    drop_four = micro.drop_four

    @njit(**JIT)
    def fill(base, count, value):  # noqa: ANN001, ANN202
        for n in range(count):
            store_f32(base, n, value)

    @njit(**JIT)
    def widen(source, row_bytes, rows, dim, to):  # noqa: ANN001, ANN202
        for r in range(rows):
            at, row = source + r * row_bytes, to + r * dim * 4
            d = 0
            while d + lanes <= dim:
                widen_vector(at + d * size, row + d * 4)
                d += lanes
            while d < dim:
                store_f32(row, d, element_load(at, d))
                d += 1

    @njit(**JIT)
    def segment_of(a, task):  # noqa: ANN001, ANN202
        low, high = 0, load_i64(a, P.num_segments)
        base = load_i64(a, P.segments)
        while high - low > 1:
            middle = (low + high) // 2
            if load_i64(base + middle * SEGMENT.size * 8, SEGMENT.first_task) <= task:
                low = middle
            else:
                high = middle
        return base + low * SEGMENT.size * 8

    @njit(**JIT)
    def set_lanes(a, w, seg, unit, first):  # noqa: ANN001, ANN202
        """Rows, positions and heads of the 64 lanes that begin at row `first` of the head or group `unit`."""
        group, packed = load_i64(a, P.group), load_i64(a, P.packed)
        total = load_i64(seg, SEGMENT.rows) * (group if packed else 1)
        offset = load_i64(seg, SEGMENT.q_offset)
        for x in range(BLOCK_ROWS):
            r = min(first + x, total - 1)
            i = r // group if packed else r
            h = unit * group + r % group if packed else unit
            store_i32(w + LANES.i, x, i32(i))
            store_i32(w + LANES.q, x, i32(i + offset))
            store_i32(w + LANES.h, x, i32(h))
            row = load_i64(a, P.q) + load_i64(seg, SEGMENT.tensor_b) * load_i64(a, P.q_b)
            store_i64(w + LANES.row_address, x, row + h * load_i64(a, P.q_h) + (load_i64(seg, SEGMENT.row0) + i) * load_i64(a, P.q_n))
        last = min(first + BLOCK_ROWS, total) - 1
        n = w + LANES.numbers
        store_i32(n, NUMBER.b, i32(load_i64(seg, SEGMENT.b)))
        store_i32(n, NUMBER.g, i32(unit if packed else unit // group))
        store_i32(n, NUMBER.h_first, i32(unit * group if packed else unit))
        store_i32(n, NUMBER.h_last, i32(unit * group + group - 1 if packed else unit))
        store_i32(n, NUMBER.q_offset, i32(offset))
        store_i32(n, NUMBER.k_offset, i32(load_i64(seg, SEGMENT.k_offset)))
        store_i64(n, TABLE.address, load_i64(seg, SEGMENT.table))
        store_i64(n, TABLE.columns, load_i64(seg, SEGMENT.columns))
        if packed:
            return first // group, last // group
        return first, last

    @njit(**JIT)
    def pack(addresses, dim, to, scale, strips):  # noqa: ANN001, ANN202
        """Rows given by address, transposed: to[d][lane] = row[d] * scale."""
        for x in range(0, strips * STRIP, lanes):
            d = 0
            while d + lanes <= dim:
                pack_square(addresses + x * 8, d * size, to + d * ROW + x * 4, scale)
                d += lanes
            while d < dim:
                for y in range(x, x + lanes):
                    store_f32(to + d * ROW, y, element_load(load_i64(addresses, y), d) * scale)
                d += 1

    @njit(**JIT)
    def next_run(a, w, rows, j, end, block):  # noqa: ANN001, ANN202
        """(class, keys) of the longest run of one class that begins at key j, at most `block` keys."""
        classify, spec = load_i64(a, P.classify), load_i64(a, P.spec)
        if classify == 0:
            return FULL, min(block, end - j)
        n = min(CLASS_KEYS, end - j)
        kind = call_classify(classify, spec, w, rows[0], rows[1], j, j + n - 1)
        limit = (1 << 30) if kind == EMPTY else block
        while n + CLASS_KEYS <= limit and j + n < end:
            more = min(CLASS_KEYS, end - j - n)
            if call_classify(classify, spec, w, rows[0], rows[1], j + n, j + n + more - 1) != kind:
                break
            n += more
        return kind, n

    @njit(**JIT)
    def drop(a, w, seg, s, j, keys, strips):  # noqa: ANN001, ANN202
        """Dropout on a tile of weights whose first key is column j of the segment."""
        first = load_i64(seg, SEGMENT.k_offset) + j
        factor = load_f32(a, 2 * P.factor)
        store_i64(w + LANES.counter, 1, load_i64(seg, SEGMENT.b) + load_i64(a, P.b_offset))
        store_i64(w + LANES.counter, 2, load_i64(a, P.threshold))
        for x in range(BLOCK_ROWS):
            # Heads with their offset, in the lanes of `pivot`, which the tile no longer needs.
            store_i32(w + LANES.pivot, x, i32(load_i32(w + LANES.h, x) + load_i64(a, P.h_offset)))
        k = first >> 2
        while k * 4 < first + keys:
            store_i64(w + LANES.counter, 0, k)
            low, high = max(0, first - k * 4), min(4, first + keys - k * 4)
            row = s + (k * 4 - first) * ROW
            for x in range(0, strips * STRIP, lanes):
                drop_four(row + x * 4, w + LANES.q + x * 4, w + LANES.pivot + x * 4, w + LANES.counter,
                          a + P.seed_low * 8, low, high, factor)  # fmt: skip
            k += 1

    return Loops(scores, weighted, widen, segment_of, set_lanes, pack, next_run, fill, drop)


def build_forward(isa: Isa, dtype: str) -> Any:
    """The worker of the forward pass: worker(parameters)."""
    micro = Micro(isa, dtype)
    loops = build_loops(isa, micro)
    lanes, half = isa.lanes, dtype != "fp32"
    scores, weighted, widen, fill, drop = loops.scores, loops.weighted, loops.widen, loops.fill, loops.drop
    segment_of, set_lanes, pack, next_run = loops.segment_of, loops.set_lanes, loops.pack, loops.next_run
    advance, close = micro.advance, micro.close
    exponentials = micro.exponentials
    unpack_narrow, unpack_wide = micro.unpack_square(dtype), micro.unpack_square("fp32")
    element_store = micro.element_store

    @njit(**JIT)
    def absorb(a, w, seg, tiles, column, v, strips):  # noqa: ANN001, ANN202
        """One block into (m, l, acc): tiles = (score tile, acc, scratch for v), column = (first key, keys)."""
        s, acc, spare = tiles
        j, keys = column
        for x in range(0, strips * STRIP, lanes):
            at = w + x * 4
            advance(at + LANES.top, at + LANES.m, at + LANES.pivot, at + LANES.l, at + LANES.alpha)
        for strip in range(strips):
            at = w + strip * STRIP * 4
            exponentials(s + strip * STRIP * 4, at + LANES.pivot, at + LANES.l, keys)
        if load_i64(a, P.dropout):
            drop(a, w, seg, s, j, keys, strips)
        dim_v, v_row = load_i64(a, P.head_dim_v), load_i64(a, P.v_n)
        at = v + j * v_row
        if half:
            widen(at, v_row, keys, dim_v, spare)
            at, v_row = spare, dim_v * 4
        weighted(at, v_row, s, keys, acc, w + LANES.alpha, dim_v, strips)

    @njit(**JIT)
    def attend(a, w, seg, rows, heads, keys, strips):  # noqa: ANN001, ANN202
        """All blocks of the keys [keys[0], keys[1]) for the block of rows set up in the scratch."""
        dim, dim_v, block = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v), load_i64(a, P.key_block)
        qt = w + LANES.tile
        acc = qt + dim * ROW
        s = acc + dim_v * ROW
        spare = s + block * ROW
        k_row, spec = load_i64(a, P.k_n), load_i64(a, P.spec)
        key0 = load_i64(seg, SEGMENT.key0)
        tensor_b = load_i64(seg, SEGMENT.tensor_b)
        k = load_i64(a, P.k) + tensor_b * load_i64(a, P.k_b) + heads * load_i64(a, P.k_h) + key0 * k_row
        v = load_i64(a, P.v) + tensor_b * load_i64(a, P.v_b) + heads * load_i64(a, P.v_h) + key0 * load_i64(a, P.v_n)
        fill(acc, dim_v * BLOCK_ROWS, f32(0.0))
        fill(w + LANES.m, BLOCK_ROWS, f32(-math.inf))
        fill(w + LANES.l, BLOCK_ROWS, f32(0.0))
        j = keys[0]
        while j < keys[1]:
            kind, n = next_run(a, w, rows, j, keys[1], block)
            if kind != EMPTY:
                at, row = k + j * k_row, k_row
                if half:
                    widen(at, row, n, dim, spare)
                    at, row = spare, dim * 4
                fill(w + LANES.top, BLOCK_ROWS, f32(-math.inf))
                scores(at, row, qt, dim, s, w + LANES.top, n, strips)
                fold = load_i64(a, P.fold_full) if kind == FULL else load_i64(a, P.fold_partial)
                if fold:
                    call_fold(fold, spec, w, s, w + LANES.top, n, j, strips)
                absorb(a, w, seg, (s, acc, spare), (j, n), v, strips)
            j += n

    @njit(**JIT)
    def write(a, w, seg, split, count, strips):  # noqa: ANN001, ANN202
        """The finished rows: to out and lse, or to this split's part in float32."""
        dim, dim_v = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v)
        acc = w + LANES.tile + dim * ROW
        heads, total, tensor_b = load_i64(a, P.heads), load_i64(a, P.total_rows), load_i64(seg, SEGMENT.tensor_b)
        part, sink = load_i64(seg, SEGMENT.splits) > 1, load_i64(a, P.sink)
        for x in range(strips * STRIP):
            h = load_i32(w + LANES.h, x)
            row = load_i64(seg, SEGMENT.row0) + load_i32(w + LANES.i, x)
            logit = f32(-math.inf)
            if part:
                flat = (split * heads + h) * total + tensor_b * load_i64(seg, SEGMENT.rows) + row
                store_i64(w + LANES.out_address, x, load_i64(a, P.part_out) + flat * dim_v * 4)
            else:
                at = tensor_b * load_i64(a, P.out_b) + h * load_i64(a, P.out_h) + row * load_i64(a, P.out_n)
                store_i64(w + LANES.out_address, x, load_i64(a, P.out) + at)
                if sink:
                    logit = load_f32(sink, h)
            store_f32(w + LANES.sink, x, logit)
        for x in range(0, strips * STRIP, lanes):
            at = w + x * 4
            close(at + LANES.m, at + LANES.l, at + LANES.sink, at + LANES.inverse, at + LANES.lse)
        for x in range(count):
            h = load_i32(w + LANES.h, x)
            row = load_i64(seg, SEGMENT.row0) + load_i32(w + LANES.i, x)
            if part:
                flat = (split * heads + h) * total + tensor_b * load_i64(seg, SEGMENT.rows) + row
                store_f32(load_i64(a, P.part_lse), flat, load_f32(w + LANES.lse, x))
            else:
                at = load_i64(a, P.lse) + tensor_b * load_i64(a, P.lse_b) + h * load_i64(a, P.lse_h)
                store_f32(at, row, load_f32(w + LANES.lse, x))
        wide_out = part or load_i64(a, P.wide_out)
        wrong = 0
        d = 0
        while d + lanes <= dim_v:
            for x in range(0, strips * STRIP, lanes):
                tile, inverse, to = acc + d * ROW + x * 4, w + LANES.inverse + x * 4, w + LANES.out_address + x * 8
                if wide_out:
                    wrong |= unpack_wide(tile, inverse, to, d * 4, count - x)
                else:
                    wrong |= unpack_narrow(tile, inverse, to, d * micro_size, count - x)
            d += lanes
        while d < dim_v:
            for x in range(count):
                inverse = load_f32(w + LANES.inverse, x)
                value = load_f32(acc + d * ROW, x) * inverse if inverse != f32(0.0) else f32(0.0)
                wrong |= 0 if value - value == f32(0.0) else 1
                if wide_out:
                    store_f32(load_i64(w + LANES.out_address, x), d, value)
                else:
                    element_store(load_i64(w + LANES.out_address, x), d, value)
            d += 1
        if wrong:
            store_i64(a, P.flag, 1)

    micro_size = micro.size

    def forward(a):  # noqa: ANN001, ANN202
        w = load_i64(a, P.scratch) + take(a + P.thread * 8) * load_i64(a, P.scratch_bytes)
        group, packed = load_i64(a, P.group), load_i64(a, P.packed)
        while True:
            task = take(a + P.task * 8)
            if task >= load_i64(a, P.num_tasks):
                break
            seg = segment_of(a, task)
            splits, keys, chunk = load_i64(seg, SEGMENT.splits), load_i64(seg, SEGMENT.keys), load_i64(seg, SEGMENT.chunk)
            total = load_i64(seg, SEGMENT.rows) * (group if packed else 1)
            blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
            local = task - load_i64(seg, SEGMENT.first_task)
            split = local % splits
            # The last rows first: under a causal mask they are the longest.
            first = (blocks - 1 - local // splits % blocks) * BLOCK_ROWS
            unit = local // splits // blocks
            count = min(BLOCK_ROWS, total - first)
            strips = (count + STRIP - 1) // STRIP
            rows = set_lanes(a, w, seg, unit, first)
            pack(w + LANES.row_address, load_i64(a, P.head_dim), w + LANES.tile, load_f32(a, 2 * P.scale), strips)
            attend(a, w, seg, rows, unit if packed else unit // group, (split * chunk, min(keys, split * chunk + chunk)), strips)
            write(a, w, seg, split, count, strips)

    return forward


def build_combine(isa: Isa, dtype: str) -> Any:
    """The worker that merges the splits of the keys, one row of one head a task, in the order of the splits."""
    micro = Micro(isa, dtype)
    segment_of = build_loops(isa, micro).segment_of
    element_store, close = micro.element_store, micro.close

    def combine(a):  # noqa: ANN001, ANN202
        w = load_i64(a, P.scratch) + take(a + P.thread * 8) * load_i64(a, P.scratch_bytes)
        heads, total, dim_v = load_i64(a, P.heads), load_i64(a, P.total_rows), load_i64(a, P.head_dim_v)
        while True:
            task = take(a + P.task * 8)
            if task >= load_i64(a, P.num_segments) * heads:
                break
            seg = load_i64(a, P.segments) + task // heads * SEGMENT.size * 8
            h, splits, tensor_b = task % heads, load_i64(seg, SEGMENT.splits), load_i64(seg, SEGMENT.tensor_b)
            if splits <= 1:
                continue
            for i in range(load_i64(seg, SEGMENT.rows)):
                row = load_i64(seg, SEGMENT.row0) + i
                flat = tensor_b * load_i64(seg, SEGMENT.rows) + row
                lse, out = load_i64(a, P.part_lse), load_i64(a, P.part_out)
                sink = load_f32(load_i64(a, P.sink), h) if load_i64(a, P.sink) else f32(-math.inf)
                # The parts' lse are logits of the merged softmax: sum them as the rows of one tile would be.
                best = sink
                for split in range(splits):
                    best = max(best, load_f32(lse, (split * heads + h) * total + flat))
                weights = w + LANES.tile
                l = f32(0.0)  # noqa: E741
                base = best if best != f32(-math.inf) else f32(0.0)
                for split in range(splits):
                    part = load_f32(lse, (split * heads + h) * total + flat)
                    share = exp_(part - base)
                    store_f32(weights, split, share)
                    l += share  # noqa: E741
                store_f32(w + LANES.m, 0, base)
                store_f32(w + LANES.l, 0, l)
                store_f32(w + LANES.sink, 0, sink)
                close(w + LANES.m, w + LANES.l, w + LANES.sink, w + LANES.inverse, w + LANES.lse)
                at = load_i64(a, P.lse) + tensor_b * load_i64(a, P.lse_b) + h * load_i64(a, P.lse_h)
                store_f32(at, row, load_f32(w + LANES.lse, 0))
                inverse = load_f32(w + LANES.inverse, 0)
                to = load_i64(a, P.out) + tensor_b * load_i64(a, P.out_b) + h * load_i64(a, P.out_h) + row * load_i64(a, P.out_n)
                for d in range(dim_v):
                    value = f32(0.0)
                    for split in range(splits):
                        share = load_f32(weights, split)
                        if share != f32(0.0):
                            value += share * load_f32(out, ((split * heads + h) * total + flat) * dim_v + d)
                    value = value * inverse if inverse != f32(0.0) else f32(0.0)
                    if load_i64(a, P.wide_out):
                        store_f32(to, d, value)
                    else:
                        element_store(to, d, value)

    exp_ = micro.scalar_exp
    return combine
