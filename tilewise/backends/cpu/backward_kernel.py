"""The backward tile loops in Numba: dq, dk, dv and the gradients of leaves in one pass over the tiles.

One task is a segment, a KV head and one split of its keys. Loop order: super-blocks of keys outer, whose dk and
dv are summed in the thread's scratch; then the heads of the group, blocks of 64 rows, blocks of keys. dq is
summed per split and block of rows, transposed, and the splits are added in order by `finish`; so nothing is
atomic, and bits do not depend on threads.

lse = m + ln l is rounded to the size of m and out to its own type; weights from lse and delta from out carry both
roundings into the gradients. Where all keys of a segment lie in one super-block, m, l and delta are
computed afresh in a first pass over the tiles, whose s and dp stay for the second; where they cannot (bf16 pairs, a
spec with slopes of its own), two products come beside the five. Longer rows have the error of any backward pass
from lse.

Per tile: s and dp (keys x rows) -> p and ds (fold the terms' derivatives) -> dv += p do, dk += ds q, dq += ds k.

Source: Dao et al., FlashAttention-2, 2023, algorithm 2, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numba import njit, types

from tilewise.backends.cpu.backward_micro import BackwardMicro
from tilewise.backends.cpu.backward_rows import Operands, build_prepare, build_statistics
from tilewise.backends.cpu.isa import BLOCK_ROWS, LINE, STRIP, uses_pairs
from tilewise.backends.cpu.loops import EMPTY, FULL, JIT, Loops, build_loops, call_fold, kernel, row_of_q
from tilewise.backends.cpu.micro import (
    DEPTH,
    FORESEEN,
    ROW,
    SHORT,
    Micro,
    indirect,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
    take,
    touch,
)  # fmt: skip
from tilewise.backends.cpu.pair_backward import build_pair_operands
from tilewise.backends.cpu.pairs import Pairs
from tilewise.backends.cpu.parameters import LANES, SEGMENT, TABLE, P
from tilewise.memory import HUGE

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

f32 = types.float32
call_slopes = indirect(types.void, 9)


@kernel
def build_outer(isa: Isa, micro: Micro) -> Any:
    """outer(A, B, C, row of C in bytes, keys, columns, asked, row bytes): C[j] += sum_q A[j, q] B[q], B as `natural`
    lays it. asked: where a tile of numbers lies, of rows q and so many keys, that is asked for meanwhile."""
    vectors, narrow, wide = isa.wide // isa.lanes, STRIP // isa.lanes, isa.wide
    g6, g4, g2, g1 = (micro.product(r, vectors, "added") for r in (6, 4, 2, 1))
    n6, n2, n1 = (micro.product(r, narrow, "added") for r in (6, 2, 1))

    @njit(**JIT)
    def outer(a, b, c, c_row, keys, columns, asked, asked_row):
        lines, steps, all_ = (keys * 4 + asked % LINE + LINE - 1) // LINE, max(keys // 6 - 1, 1), BLOCK_ROWS
        d = 0
        while d < columns:
            at, j, n, to = b + d * ROW, 0, 0, c + d * 4
            if wide > STRIP and columns - d < wide:
                row = STRIP * 4
                while j + 6 <= keys:
                    n6(a + j * ROW, ROW, 4, at, row, all_, to + j * c_row, c_row, 0, a, 0)
                    j += 6
                while j + 2 <= keys:
                    n2(a + j * ROW, ROW, 4, at, row, all_, to + j * c_row, c_row, 0, a, 0)
                    j += 2
                if j < keys:
                    n1(a + j * ROW, ROW, 4, at, row, all_, to + j * c_row, c_row, 0, a, 0)
                d += STRIP
            else:
                row = wide * 4
                while keys - j >= 6 and keys - j != 8:
                    near, step = a, 0
                    if d == 0:
                        near, step = asked + min(n * lines // steps, lines - 1) * LINE, asked_row
                        near += n % 2 * 2 * step
                    g6(a + j * ROW, ROW, 4, at, row, all_, to + j * c_row, c_row, 0, near, step)
                    j, n = j + 6, n + 1
                while keys - j >= 4:
                    g4(a + j * ROW, ROW, 4, at, row, all_, to + j * c_row, c_row, 0, a, 0)
                    j += 4
                if (keys - j) & 2:
                    g2(a + j * ROW, ROW, 4, at, row, all_, to + j * c_row, c_row, 0, a, 0)
                    j += 2
                if (keys - j) & 1:
                    g1(a + j * ROW, ROW, 4, at, row, all_, to + j * c_row, c_row, 0, a, 0)
                d += wide

    return outer


@kernel
def build_rows(isa: Isa, micro: Micro) -> Any:
    """natural(addresses, dim, to): 64 rows given by address as float32, zeros up to whole strips of columns.

    What one product reads lies side by side: the 64 rows of the first `wide` columns, then those of the next; columns
    past the last `wide` ones in strips. Whole rows of 512 bytes would fall into a few of the cache's sets."""
    lanes, size, wide = isa.lanes, micro.size, isa.wide
    widen_vector, element_load = micro.widen_vector, micro.element_load

    @njit(**JIT)
    def natural(addresses, dim, to):
        padded = (dim + STRIP - 1) // STRIP * STRIP
        for x in range(BLOCK_ROWS):
            source, first = load_i64(addresses, x), 0
            while first < padded:
                width = wide if padded - first >= wide else STRIP
                row, end = to + first * ROW + (x * width - first) * 4, min(first + width, dim)
                d = first
                while d + lanes <= end:
                    widen_vector(source + d * size, row + d * 4)
                    d += lanes
                while d < first + width:
                    store_f32(row, d, element_load(source, d) if d < dim else f32(0.0))
                    d += 1
                first += width

    return natural


@kernel
def build_write_keys(isa: Isa, micro: Micro) -> Any:
    """write_keys(...): finished rows of dk or dv."""
    lanes, size = isa.lanes, micro.size
    narrow_vector, element_store = micro.narrow_vector, micro.element_store

    @njit(**JIT)
    def write_keys(a, source, padded, dim, to, row_bytes, keys, factor):
        wrong = 0
        for j in range(keys):
            d = 0
            while d + lanes <= dim:
                wrong |= narrow_vector(source + (j * padded + d) * 4, to + j * row_bytes + d * size, factor)
                d += lanes
            while d < dim:
                value = load_f32(source, j * padded + d) * factor
                wrong |= 0 if value - value == f32(0.0) else 1
                element_store(to + j * row_bytes, d, value)
                d += 1
        if wrong:
            store_i64(a, P.flag, 1)

    return write_keys


@kernel
def build_operands(isa: Isa, micro: BackwardMicro, loops: Loops) -> Operands:
    """The products in float32; 2-byte types are widened, and rows far apart copied, once for all rows of q."""
    outer, natural, wide = build_outer(isa, micro), build_rows(isa, micro), isa.wide > STRIP
    scores, widen, fill, drop, weighted = loops.scores, loops.widen, loops.fill, loops.drop, loops.weighted
    dot, lanes, copy_strip = micro.lane_dot, isa.lanes, micro.copy_strip
    together = BLOCK_ROWS if wide else lanes
    slopes = micro.slopes(together // lanes)
    q_row = row_of_q(isa)

    @njit(**JIT)
    def numbers(dim):
        """float32 of a row of dk or dv: whole strips, and a line that keeps rows apart in the cache's sets."""
        return (dim + STRIP - 1) // STRIP * STRIP + LINE // 4

    @njit(**JIT)
    def areas(a, w):
        dim, dim_v, block = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v), load_i64(a, P.key_block)
        row, row_v, most = numbers(dim), numbers(dim_v), load_i64(a, P.superblock)
        # `tile` knows the first place: there a strip of ds lies close.
        qt = w + LANES.tile + block * STRIP * 4
        gt = qt + dim * ROW
        qn = gt + dim_v * ROW
        gn = qn + row * ROW
        ot = gn + row_v * ROW
        s = ot + dim_v * ROW
        dp = s + block * ROW
        wide_k = dp + block * ROW
        wide_v = wide_k + most * (dim * 4 + LINE)
        sum_k = wide_v + most * (dim_v * 4 + LINE)
        sum_v = sum_k + most * row * 4
        return qt, gt, qn, gn, ot, s, dp, wide_k, wide_v, sum_k, sum_v, row, row_v, sum_v + most * row_v * 4

    @njit(**JIT)
    def turn_keys(a, k, k_row, v, v_row, keys, areas):
        if load_i64(a, P.copied):
            dim, dim_v = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v)
            widen(k, k_row, keys, dim, areas[7], dim * 4 + LINE)
            widen(v, v_row, keys, dim_v, areas[8], dim_v * 4 + LINE)

    @njit(**JIT)
    def lane_dot(x, y, dim_v, to):
        # In the parts in which scores are summed: where a row sees one key, dp - delta is 0 then.
        depth = SHORT // 2 if dim_v <= SHORT else DEPTH
        for lane in range(0, BLOCK_ROWS, lanes):
            at = lane * 4 if wide else lane // STRIP * dim_v * STRIP * 4 + lane % STRIP * 4
            for d in range(0, dim_v, depth):
                here = at + d * q_row
                dot(x + here, y + here, q_row, min(depth, dim_v - d), to + lane * 4, d)

    @njit(**JIT)
    def standing(a, buffers, sources):
        """(k, row bytes, v, row bytes) of a block, in the tensors or in their copies."""
        if load_i64(a, P.copied):
            k_row, v_row = load_i64(a, P.head_dim) * 4 + LINE, load_i64(a, P.head_dim_v) * 4 + LINE
            return buffers[2] + sources[7] * k_row, k_row, buffers[3] + sources[7] * v_row, v_row
        return sources[0], sources[1], sources[2], sources[3]

    @njit(**JIT)
    def products(a, w, seg, tiles, buffers, run, sources):
        """s and dp of one block of keys. run = (class, first key, keys); sources as in `tile`."""
        s, dp, n, strips = buffers[0], buffers[1], run[2], BLOCK_ROWS // STRIP
        k, k_row, v, v_row = standing(a, buffers, sources)
        fill(w + LANES.top, BLOCK_ROWS, f32(-math.inf))
        scores(v, v_row, tiles[1], load_i64(a, P.head_dim_v), dp, w + LANES.alpha, n, strips, 0)
        scores(k, k_row, tiles[0], load_i64(a, P.head_dim), s, w + LANES.top, n, strips, 0)
        if load_i64(a, P.dropout):
            drop(a, w, seg, dp, run[1], n, strips)

    @njit(**JIT)
    def fold(a, w, s, run):
        """Terms and mask over the tile of scores, by its class."""
        code = load_i64(a, P.fold_full) if run[0] == FULL else load_i64(a, P.fold_partial)
        if code:
            call_fold(code, load_i64(a, P.spec), w, s, w + LANES.top, run[2], run[1], BLOCK_ROWS // STRIP)

    @njit(**JIT)
    def add_dq(w, k, k_row, dp, n, dq, dim):
        """dq += ds k."""
        fill(w + LANES.alpha, BLOCK_ROWS, f32(1.0))
        if wide:
            weighted(k, k_row, dp, ROW, 4 * STRIP, n, dq, w + LANES.alpha, dim, BLOCK_ROWS // STRIP, 0)
        else:
            close = w + LANES.tile
            for x in range(0, ROW, 4 * STRIP):
                copy_strip(dp + x, close, n)
                weighted(k, k_row, close, 4 * STRIP, 0, n, dq + x, w + LANES.alpha, dim, 1, 0)

    @njit(**JIT)
    def tile(a, w, seg, tiles, buffers, run, sources, task, kept):
        """One block of keys: p and ds from s and dp, then the three products. kept: s and dp stand there, folded.

        sources = (k, row bytes, v, row bytes, dk rows, dv rows, dq tile, first key in the super-block)."""
        s, dp, n = buffers[0], buffers[1], run[2]
        dim, dim_v = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v)
        row, row_v, strips = numbers(dim), numbers(dim_v), BLOCK_ROWS // STRIP
        if not kept:
            products(a, w, seg, tiles, buffers, run, sources)
        slope = load_i64(a, P.slopes_full if run[0] == FULL else P.slopes_partial)
        if slope:
            call_slopes(
                slope, load_i64(a, P.spec), w, s, dp, n, run[1], strips, load_i64(a, P.leaf_parts), task
            )
        else:
            if not kept:
                fold(a, w, s, run)
            for x in range(0, BLOCK_ROWS, together):
                at = w + x * 4
                slopes(s + x * 4, dp + x * 4, at + LANES.m, at + LANES.low, at + LANES.delta, n)
        if load_i64(a, P.dropout):
            drop(a, w, seg, s, run[1], n, strips)
        leaf, slope = w + LANES.numbers + 8 * TABLE.leaf, w + LANES.numbers + 8 * TABLE.slope
        outer(s, tiles[3], sources[5], row_v * 4, n, row_v - LINE // 4, load_i64(leaf, 0), load_i64(leaf, 1))
        outer(dp, tiles[2], sources[4], row * 4, n, row - LINE // 4, load_i64(slope, 0), load_i64(slope, 1))
        k, k_row = standing(a, buffers, sources)[:2]
        add_dq(w, k, k_row, dp, n, sources[6], dim)

    asks = int(lanes in FORESEEN)
    return Operands(lanes, True, asks, areas, loops.pack, natural, lane_dot, turn_keys, products, fold, tile)


@kernel
def build_backward(isa: Isa, dtype: str) -> Any:
    """The worker of the backward pass: worker(parameters)."""
    micro = BackwardMicro(isa, dtype)
    loops, pairs, on_pairs = build_loops(isa, micro), Pairs(isa), uses_pairs(isa, dtype)
    operands = (build_pair_operands if on_pairs else build_operands)(isa, micro, loops)
    prepare, areas, tile, turn_keys = (
        build_prepare(operands),
        operands.areas,
        operands.tile,
        operands.turn_keys,
    )
    statistics, settle_rows, write_sink = build_statistics(micro, operands)
    keeps, asks = operands.keeps, operands.asks
    fill, write_keys = loops.fill, build_write_keys(isa, micro)
    segment_of, set_lanes, next_run = loops.segment_of, loops.set_lanes, loops.next_run
    configure, release = pairs.configure, pairs.release

    @njit(**JIT)
    def keys_of(a, w, seg, unit, split, span, task):
        """One super-block of keys [span[0], span[1]) of one KV head against all rows of its group."""
        dim, dim_v, block = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v), load_i64(a, P.key_block)
        dq_rows = load_i64(a, P.dq_rows)
        where = areas(a, w)
        qt, gt, qn, gn, ot, s, dp, spare, more, sum_k, sum_v, padded, padded_v, kept_s = where
        keys = span[1] - span[0]
        # Whole groups of 32 keys, which is how pairs are added.
        fill(sum_k, (keys + 31) // 32 * 32 * padded, f32(0.0))
        fill(sum_v, (keys + 31) // 32 * 32 * padded_v, f32(0.0))
        group, packed = load_i64(a, P.group), load_i64(a, P.packed)
        total = load_i64(seg, SEGMENT.rows) * (group if packed else 1)
        blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
        tensor_b, key0 = load_i64(seg, SEGMENT.tensor_b), load_i64(seg, SEGMENT.key0)
        k_row, v_row = load_i64(a, P.k_n), load_i64(a, P.v_n)
        k = load_i64(a, P.k) + tensor_b * load_i64(a, P.k_b) + unit * load_i64(a, P.k_h) + key0 * k_row
        v = load_i64(a, P.v) + tensor_b * load_i64(a, P.v_b) + unit * load_i64(a, P.v_h) + key0 * v_row
        turn_keys(a, k + span[0] * k_row, k_row, v + span[0] * v_row, v_row, keys, where)
        exact = load_i64(a, P.exact) and load_i64(seg, SEGMENT.keys) <= load_i64(a, P.superblock)
        # What pass 0 made of s and dp stays for pass 1, unless the spec's slopes want s as it was.
        kept = keeps and exact and load_i64(a, P.slopes_full) == 0 and load_i64(a, P.slopes_partial) == 0
        kept_dp = kept_s + load_i64(a, P.superblock) * ROW
        for member in range(1 if packed else group):
            head = unit if packed else unit * group + member
            dq = load_i64(a, P.part_dq) + split * load_i64(a, P.total_rows) * dq_rows * ROW
            dq += (load_i64(seg, SEGMENT.first_tile) + head * blocks) * dq_rows * ROW
            for number in range(blocks):
                rows = set_lanes(a, w, seg, head, number * BLOCK_ROWS, BLOCK_ROWS)
                if span[0] == split * load_i64(seg, SEGMENT.chunk):
                    # The first keys of a task: here and not all at once, so that zeros are met before they leave.
                    fill(dq + number * dq_rows * ROW, dq_rows * BLOCK_ROWS, f32(0.0))
                store_i64(w + LANES.numbers, TABLE.first, span[0])
                store_i64(w + LANES.numbers, TABLE.end, span[1])
                store_i64(w + LANES.numbers, TABLE.asks, asks)
                ready = False
                # With `exact` the rows' statistics come first: they are pass 0, their gradients pass 1.
                for step in range(0 if exact else 1, 2):
                    j = span[0]
                    while j < span[1]:
                        kind, n = next_run(a, w, rows, j, span[1], block)
                        if kind != EMPTY:
                            if not ready:
                                prepare(a, w, seg, (qt, gt, qn, gn, ot), number * BLOCK_ROWS)
                                if step == 0:
                                    fill(w + LANES.m, BLOCK_ROWS, f32(-math.inf))
                                    fill(w + LANES.l, BLOCK_ROWS, f32(0.0))
                                    fill(w + LANES.delta, BLOCK_ROWS, f32(0.0))
                                elif load_i64(a, P.sink):
                                    write_sink(a, w, seg, number * BLOCK_ROWS)
                                ready = True
                            at = j - span[0]
                            sums = (
                                sum_k + at * padded * 4,
                                sum_v + at * padded_v * 4,
                                dq + number * dq_rows * ROW,
                                at,
                            )
                            sources = (k + j * k_row, k_row, v + j * v_row, v_row, *sums)
                            tiles, run = (qt, gt, qn, gn, ot), (kind, j, n)
                            buffers = (s, dp, spare, more)
                            if kept:
                                buffers = (kept_s + at * ROW, kept_dp + at * ROW, spare, more)
                            if step == 0:
                                statistics(a, w, seg, tiles, buffers, run, sources, s)
                            else:
                                tile(a, w, seg, tiles, buffers, run, sources, task, kept)
                        j += n
                    if step == 0 and ready:
                        settle_rows(a, w, seg, number * BLOCK_ROWS)
                        if load_i64(a, P.sink):
                            write_sink(a, w, seg, number * BLOCK_ROWS)
        first = key0 + span[0]
        to = (
            load_i64(a, P.dk)
            + tensor_b * load_i64(a, P.dk_b)
            + unit * load_i64(a, P.dk_h)
            + first * load_i64(a, P.dk_n)
        )
        write_keys(a, sum_k, padded, dim, to, load_i64(a, P.dk_n), keys, load_f32(a, 2 * P.scale))
        to = (
            load_i64(a, P.dv)
            + tensor_b * load_i64(a, P.dv_b)
            + unit * load_i64(a, P.dv_h)
            + first * load_i64(a, P.dv_n)
        )
        write_keys(a, sum_v, padded_v, dim_v, to, load_i64(a, P.dv_n), keys, f32(1.0))

    def backward(a):
        if on_pairs:
            configure(0)
        w = load_i64(a, P.scratch) + take(a + P.thread * 8) * load_i64(a, P.scratch_bytes)
        # Tasks of one head write the same pages at the same time: each thread would wait for all of them to be cleared.
        while True:
            page = take(a + P.untouched * 8)
            if page >= load_i64(a, P.fresh_pages):
                break
            touch(load_i64(a, P.fresh) + page * HUGE)
        while True:
            task = take(a + P.task * 8)
            if task >= load_i64(a, P.num_tasks):
                break
            seg = segment_of(a, task)
            keys, chunk = load_i64(seg, SEGMENT.keys), load_i64(seg, SEGMENT.chunk)
            splits = load_i64(seg, SEGMENT.splits)
            local = task - load_i64(seg, SEGMENT.first_task)
            split, unit = local % splits, local // splits
            j, end = split * chunk, min(keys, split * chunk + chunk)
            while j < end:
                stop = min(end, j + load_i64(a, P.superblock))
                keys_of(a, w, seg, unit, split, (j, stop), task)
                j = stop
        if on_pairs:
            release(0)

    return backward


@kernel
def build_finish(isa: Isa, dtype: str) -> Any:
    """The worker that adds the splits of dq in order and writes it, one segment and head (or group) a task."""
    micro = Micro(isa, dtype)
    loops = build_loops(isa, micro)
    lanes, set_lanes, fill = isa.lanes, loops.set_lanes, loops.fill
    unpack, element_store, add_vector = micro.unpack_square(dtype), micro.element_store, micro.add_vector
    size = micro.size

    def finish(a):
        w = load_i64(a, P.scratch) + take(a + P.thread * 8) * load_i64(a, P.scratch_bytes)
        group, packed, dim = load_i64(a, P.group), load_i64(a, P.packed), load_i64(a, P.head_dim)
        units = load_i64(a, P.heads_kv) if packed else load_i64(a, P.heads)
        dq_rows = load_i64(a, P.dq_rows)
        stride = load_i64(a, P.total_rows) * dq_rows * ROW
        fill(w + LANES.inverse, BLOCK_ROWS, load_f32(a, 2 * P.scale))
        while True:
            task = take(a + P.task * 8)
            if task >= load_i64(a, P.num_segments) * units:
                break
            seg, unit = load_i64(a, P.segments) + task // units * SEGMENT.size * 8, task % units
            total = load_i64(seg, SEGMENT.rows) * (group if packed else 1)
            blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
            wrong = 0
            for number in range(blocks):
                set_lanes(a, w, seg, unit, number * BLOCK_ROWS, BLOCK_ROWS)
                tile = (
                    load_i64(a, P.part_dq)
                    + (load_i64(seg, SEGMENT.first_tile) + unit * blocks + number) * dq_rows * ROW
                )
                for split in range(1, load_i64(seg, SEGMENT.splits)):
                    for x in range(0, dim * BLOCK_ROWS, lanes):
                        add_vector(tile + x * 4, tile + split * stride + x * 4)
                b, row0 = load_i64(seg, SEGMENT.tensor_b), load_i64(seg, SEGMENT.row0)
                count = min(BLOCK_ROWS, total - number * BLOCK_ROWS)
                for x in range(BLOCK_ROWS):
                    at = b * load_i64(a, P.dq_b) + load_i32(w + LANES.h, x) * load_i64(a, P.dq_h)
                    at += (row0 + load_i32(w + LANES.i, x)) * load_i64(a, P.dq_n)
                    store_i64(w + LANES.out_address, x, load_i64(a, P.dq) + at)
                d = 0
                while d + lanes <= dim:
                    for x in range(0, BLOCK_ROWS, lanes):
                        place = w + LANES.out_address + x * 8
                        wrong |= unpack(
                            tile + d * ROW + x * 4, w + LANES.inverse + x * 4, place, d * size, count - x
                        )
                    d += lanes
                while d < dim:
                    for x in range(count):
                        value = load_f32(tile + d * ROW, x) * load_f32(a, 2 * P.scale)
                        wrong |= 0 if value - value == f32(0.0) else 1
                        element_store(load_i64(w + LANES.out_address, x), d, value)
                    d += 1
            if wrong:
                store_i64(a, P.flag, 1)

    return finish
