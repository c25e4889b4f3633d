"""The loops that both passes share, in Numba: products over tiles, rows of q, runs of tiles of one class, dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from numba import njit, types

from tilewise.backends.cpu.dropout import drop_strip
from tilewise.backends.cpu.isa import STRIP
from tilewise.backends.cpu.micro import (
    DEPTH,
    ROW,
    SHORT,
    Micro,
    indirect,
    load_f32,
    load_i64,
    store_f32,
    store_i32,
    store_i64,
)
from tilewise.backends.cpu.parameters import LANES, NUMBER, SEGMENT, TABLE, P

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewise.backends.cpu.isa import Isa

EMPTY, FULL = 0, 2
CLASS_KEYS = 64
"""Keys of one tile of the classification; runs of one class become one block."""
JIT = {
    "nogil": True, "error_model": "numpy", "inline": "never", "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
    "_nrt": False,
}  # fmt: skip
"""Called from compiled code alone, on numbers alone: neither wrappers for Python nor counted references."""
f32, i32 = types.float32, types.int32
call_fold = indirect(types.void, 7)
call_classify = indirect(types.int64, 6)


def kernel(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function whose body is kernels: Numba reads what it defines, and its arguments are their constants."""
    return builder


def row_of_q(isa: Isa) -> int:
    """Bytes of a row of q transposed, as `pack` lays it: the lanes that a product takes at once are side by side, so
    that all sets of the first-level cache hold them."""
    return 4 * isa.wide if isa.wide == STRIP else ROW


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


@kernel
def build_products(isa: Isa, micro: Micro) -> tuple[Any, Any]:
    """scores(K, row bytes, Q^T, D, S, top, keys, strips) and weighted(V, row bytes, P, row bytes, bytes
    between strips, keys, acc, alpha, D_v, strips)."""
    wide = isa.wide // STRIP
    vectors = isa.wide // isa.lanes
    narrow = STRIP // isa.lanes
    s6, s4, s2, s1 = (micro.product(r, vectors, "scores") for r in (6, 4, 2, 1))
    n12, n4, n2, n1 = (micro.product(r, narrow, "scores") for r in (12 if wide > 1 else 6, 4, 2, 1))
    o6, o4, o2, o1 = (micro.product(r, vectors, "scaled") for r in (6, 4, 2, 1))
    p12, p4, p2, p1 = (micro.product(r, narrow, "scaled") for r in (12 if wide > 1 else 6, 4, 2, 1))
    tall = 12 if wide > 1 else 6
    q_row = row_of_q(isa)

    @njit(**JIT)
    def part_of_scores(k, k_row, qt, q_strip, dim, s, top, keys, strips, ahead, part):
        """One part of the head: `dim` numbers of it from k and qt on; q_strip: bytes between strips of q."""
        strip = 0
        while strip < strips:
            at, q = strip * STRIP * 4, qt + strip * q_strip
            j = 0
            if wide > 1 and strips - strip < wide:
                while j + tall <= keys:
                    n12(k + j * k_row, k_row, 4, q, q_row, dim, s + j * ROW + at, ROW, top + at, ahead, part)
                    j += tall
                while j + 4 <= keys:
                    n4(k + j * k_row, k_row, 4, q, q_row, dim, s + j * ROW + at, ROW, top + at, ahead, part)
                    j += 4
                if (keys - j) & 2:
                    n2(k + j * k_row, k_row, 4, q, q_row, dim, s + j * ROW + at, ROW, top + at, ahead, part)
                    j += 2
                if (keys - j) & 1:
                    n1(k + j * k_row, k_row, 4, q, q_row, dim, s + j * ROW + at, ROW, top + at, ahead, part)
                strip += 1
            else:
                while keys - j >= 6 and keys - j != 8:
                    s6(k + j * k_row, k_row, 4, q, q_row, dim, s + j * ROW + at, ROW, top + at, ahead, part)
                    j += 6
                while keys - j >= 4:
                    s4(k + j * k_row, k_row, 4, q, q_row, dim, s + j * ROW + at, ROW, top + at, ahead, part)
                    j += 4
                if (keys - j) & 2:
                    s2(k + j * k_row, k_row, 4, q, q_row, dim, s + j * ROW + at, ROW, top + at, ahead, part)
                    j += 2
                if (keys - j) & 1:
                    s1(k + j * k_row, k_row, 4, q, q_row, dim, s + j * ROW + at, ROW, top + at, ahead, part)
                strip += wide

    @njit(**JIT)
    def scores(k, k_row, qt, dim, s, top, keys, strips, ahead):
        depth = SHORT // 2 if dim <= SHORT else DEPTH
        q_strip = STRIP * 4 if wide > 1 else dim * q_row
        for d in range(0, max(dim, 1), depth):
            part = (1 if d > 0 else 0) + (2 if d + depth < dim else 0)
            n, q = min(depth, dim - d), qt + d * q_row
            part_of_scores(k + d * 4, k_row, q, q_strip, n, s, top, keys, strips, ahead, part)

    @njit(**JIT)
    def weighted(v, v_row, p, p_row, p_strip, keys, acc, alpha, dim, strips, ahead):
        strip = 0
        while strip < strips:
            at, pp = strip * STRIP * 4, p + strip * p_strip
            d = 0
            if wide > 1 and strips - strip < wide:
                while d + tall <= dim:
                    p12(v + d * 4, 4, v_row, pp, p_row, keys, acc + d * ROW + at, ROW, alpha + at, ahead)
                    d += tall
                while d + 4 <= dim:
                    p4(v + d * 4, 4, v_row, pp, p_row, keys, acc + d * ROW + at, ROW, alpha + at, ahead)
                    d += 4
                if (dim - d) & 2:
                    p2(v + d * 4, 4, v_row, pp, p_row, keys, acc + d * ROW + at, ROW, alpha + at, ahead)
                    d += 2
                if (dim - d) & 1:
                    p1(v + d * 4, 4, v_row, pp, p_row, keys, acc + d * ROW + at, ROW, alpha + at, ahead)
                strip += 1
            else:
                while dim - d >= 6 and dim - d != 8:
                    o6(v + d * 4, 4, v_row, pp, p_row, keys, acc + d * ROW + at, ROW, alpha + at, ahead)
                    d += 6
                while dim - d >= 4:
                    o4(v + d * 4, 4, v_row, pp, p_row, keys, acc + d * ROW + at, ROW, alpha + at, ahead)
                    d += 4
                if (dim - d) & 2:
                    o2(v + d * 4, 4, v_row, pp, p_row, keys, acc + d * ROW + at, ROW, alpha + at, ahead)
                    d += 2
                if (dim - d) & 1:
                    o1(v + d * 4, 4, v_row, pp, p_row, keys, acc + d * ROW + at, ROW, alpha + at, ahead)
                strip += wide

    return scores, weighted


@kernel
def build_loops(isa: Isa, micro: Micro) -> Loops:
    """The shared loops for one target and storage type."""
    lanes, size, wide, q_row = isa.lanes, micro.size, isa.wide > STRIP, row_of_q(isa)
    scores, weighted = build_products(isa, micro)
    widen_vector, pack_square, element_load = micro.widen_vector, micro.pack_square, micro.element_load
    dropped, fill_vectors = drop_strip(micro), micro.fill
    count_rows, place_rows = micro.count_rows, micro.place_rows

    @njit(**JIT)
    def fill(base, count, value):
        """`count` float32, a multiple of lanes."""
        fill_vectors(base, count, value)

    @njit(**JIT)
    def widen(source, row_bytes, rows, dim, to, to_bytes):
        for r in range(rows):
            at, row = source + r * row_bytes, to + r * to_bytes
            d = 0
            while d + lanes <= dim:
                widen_vector(at + d * size, row + d * 4)
                d += lanes
            while d < dim:
                store_f32(row, d, element_load(at, d))
                d += 1

    @njit(**JIT)
    def segment_of(a, task):
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
    def set_lanes(a, w, seg, unit, first, lanes_used):
        """Rows, positions and heads of the lanes that begin at row `first` of the head or group `unit`."""
        group, packed = load_i64(a, P.group), load_i64(a, P.packed)
        total = load_i64(seg, SEGMENT.rows) * (group if packed else 1)
        offset = load_i64(seg, SEGMENT.q_offset)
        q_h, q_n = load_i64(a, P.q_h), load_i64(a, P.q_n)
        base = load_i64(a, P.q) + load_i64(seg, SEGMENT.tensor_b) * load_i64(a, P.q_b)
        base += load_i64(seg, SEGMENT.row0) * q_n
        if packed:
            for x in range(lanes_used):
                r = min(first + x, total - 1)
                i, h = r // group, unit * group + r % group
                store_i32(w + LANES.i, x, i32(i))
                store_i32(w + LANES.q, x, i32(i + offset))
                store_i32(w + LANES.h, x, i32(h))
                store_i64(w + LANES.row_address, x, base + h * q_h + i * q_n)
        else:
            count_rows(w + LANES.i, lanes_used, first, total - 1, 1)
            count_rows(w + LANES.q, lanes_used, first + offset, total - 1 + offset, 1)
            count_rows(w + LANES.h, lanes_used, unit, unit, 0)
            place_rows(w + LANES.row_address, w + LANES.i, lanes_used, base + unit * q_h, q_n)
        last = min(first + lanes_used, total) - 1
        n = w + LANES.numbers
        store_i32(n, NUMBER.b, i32(load_i64(seg, SEGMENT.b)))
        store_i32(n, NUMBER.g, i32(unit if packed else unit // group))
        store_i32(n, NUMBER.h_first, i32(unit * group if packed else unit))
        store_i32(n, NUMBER.h_last, i32(unit * group + group - 1 if packed else unit))
        store_i32(n, NUMBER.q_offset, i32(offset))
        store_i32(n, NUMBER.k_offset, i32(load_i64(seg, SEGMENT.k_offset)))
        store_i64(n, TABLE.address, load_i64(seg, SEGMENT.table))
        store_i64(n, TABLE.columns, load_i64(seg, SEGMENT.columns))
        store_i64(n, TABLE.first, 0)
        store_i64(n, TABLE.end, 1 << 32)
        store_i64(n, TABLE.asks, 0)
        for place in (TABLE.leaf, TABLE.slope):
            store_i64(n, place, w)
            store_i64(n, place + 1, 0)
        if packed:
            return first // group, last // group
        return first, last

    @njit(**JIT)
    def pack(addresses, dim, to, scale, strips):
        """Rows given by address, transposed: to[d][lane] = row[d] * scale, strip by strip where products take one."""
        for x in range(0, strips * STRIP, lanes):
            at = to + (x * 4 if wide else x // STRIP * dim * STRIP * 4 + x % STRIP * 4)
            d = 0
            while d + lanes <= dim:
                pack_square(addresses + x * 8, d * size, at + d * q_row, q_row, scale)
                d += lanes
            while d < dim:
                for y in range(lanes):
                    store_f32(at + d * q_row, y, element_load(load_i64(addresses, x + y), d) * scale)
                d += 1

    @njit(**JIT)
    def next_run(a, w, rows, j, end, block):
        """(class, keys) of the longest run of one class that begins at key j, at most `block` keys."""
        classify, spec = load_i64(a, P.classify), load_i64(a, P.spec)
        if classify == 0:
            return FULL, min(block, end - j)
        # Keys behind padding begin anywhere; tiles of one class end at multiples of CLASS_KEYS.
        n = min(CLASS_KEYS - j % CLASS_KEYS, end - j)
        kind = call_classify(classify, spec, w, rows[0], rows[1], j, j + n - 1)
        # A long way of nothing is crossed by steps that double; the host's tables know single tiles only.
        doubles = kind == EMPTY and load_i64(w + LANES.numbers, TABLE.address) == 0
        limit, step = (1 << 30) if kind == EMPTY else block, CLASS_KEYS
        while n + CLASS_KEYS <= limit and j + n < end:
            more = min(step, end - j - n)
            if call_classify(classify, spec, w, rows[0], rows[1], j + n, j + n + more - 1) == kind:
                n += more
                step = 2 * step if doubles else step
            elif step > CLASS_KEYS:
                step = CLASS_KEYS
            else:
                break
        return kind, n

    @njit(**JIT)
    def drop(a, w, seg, s, j, keys, strips):
        """Dropout on a tile of weights whose first key is column j of the segment."""
        store_i64(w + LANES.counter, 0, load_i64(a, P.h_offset))
        store_i64(w + LANES.counter, 1, load_i64(seg, SEGMENT.b) + load_i64(a, P.b_offset))
        store_i64(w + LANES.counter, 2, load_i64(a, P.threshold))
        first, factor = load_i64(seg, SEGMENT.k_offset) + j, load_f32(a, 2 * P.factor)
        for strip in range(strips):
            at = strip * STRIP * 4
            dropped(s + at, w + LANES.q + at, w + LANES.h + at, w + LANES.counter, a + P.seed_low * 8, first, keys,
                    factor)  # fmt: skip

    return Loops(scores, weighted, widen, segment_of, set_lanes, pack, next_run, fill, drop)
