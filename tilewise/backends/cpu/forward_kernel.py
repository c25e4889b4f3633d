"""The forward tile loops in Numba.

One task is a segment, a head and 64 rows of q (the rows of a whole group of heads where there are few), over
one chunk of the keys. Loop order: keys inner; (m, l, acc) stay in the thread's scratch:

    score tile -> fold terms and, on PARTIAL tiles, the mask -> absorb

Memory of a thread: acc and q transposed, (D + D_v) x 64 float32, a score tile of `key_block` x 64 and its weights;
2-byte types add a float32 copy of the block's keys and values, unless all were widened before. Everything stays in the
second-level cache.

Source: Dao et al., FlashAttention-2, 2023, algorithm 1, https://arxiv.org/abs/2307.08691; with transposed
tiles, so that the softmax needs no horizontal reduction.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numba import njit

from tilewise.backends.cpu.isa import BLOCK_ROWS, LINE, STRIP, uses_pairs
from tilewise.backends.cpu.loops import EMPTY, FULL, JIT, Loops, build_loops, call_fold, f32, kernel
from tilewise.backends.cpu.micro import ROW, Micro, load_f32, load_i32, load_i64, store_f32, store_i64, take
from tilewise.backends.cpu.page_rows import build_gather, build_sources
from tilewise.backends.cpu.pair_forward import build_pair_attend
from tilewise.backends.cpu.pairs import Pairs
from tilewise.backends.cpu.parameters import LANES, SEGMENT, TABLE, P
from tilewise.backends.cpu.widen_kernel import widened_rows

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

FOUND = 32
"""A head of at most this size comes as fast without being asked for: 1.004 to 1.013 times the speed (Zen 5)."""


@kernel
def build_close(isa: Isa, micro: Micro) -> Any:
    """close_rows(...): lse of a task's finished rows, and where their out goes."""
    lanes, close, copy, place_rows, fill = isa.lanes, micro.close, micro.copy, micro.place_rows, micro.fill

    @njit(**JIT)
    def close_rows(a, w, seg, split, count, strips):
        """Fills out_address and inverse, writes lse; returns whether the rows are a split's part, in float32."""
        heads, total, tensor_b = (
            load_i64(a, P.heads),
            load_i64(a, P.total_rows),
            load_i64(seg, SEGMENT.tensor_b),
        )
        part, sink, dim_v = load_i64(seg, SEGMENT.splits) > 1, load_i64(a, P.sink), load_i64(a, P.head_dim_v)
        out, row0, used = load_i64(a, P.out), load_i64(seg, SEGMENT.row0), strips * STRIP
        first = split * heads * total + load_i64(seg, SEGMENT.flat) + row0
        if part:
            base, head_bytes, row_bytes = load_i64(a, P.part_out), total * dim_v * 4, dim_v * 4
            base += first * row_bytes
            lse, lse_head = load_i64(a, P.part_lse) + first * 4, total * 4
        else:
            head_bytes, row_bytes = load_i64(a, P.out_h), load_i64(a, P.out_n)
            base = out + tensor_b * load_i64(a, P.out_b) + row0 * row_bytes
            lse, lse_head = (
                load_i64(a, P.lse) + tensor_b * load_i64(a, P.lse_b) + row0 * 4,
                load_i64(a, P.lse_h),
            )
        # Rows of one head follow one another.
        h0, i0, alone = load_i32(w + LANES.h, 0), load_i32(w + LANES.i, 0), load_i64(a, P.packed) == 0
        if alone:
            place_rows(w + LANES.out_address, w + LANES.i, used, base + h0 * head_bytes, row_bytes)
            fill(w + LANES.sink, used, load_f32(sink, h0) if sink and not part else f32(-math.inf))
        else:
            for x in range(used):
                h = load_i32(w + LANES.h, x)
                at = base + h * head_bytes + load_i32(w + LANES.i, x) * row_bytes
                store_i64(w + LANES.out_address, x, at)
                store_f32(w + LANES.sink, x, load_f32(sink, h) if sink and not part else f32(-math.inf))
        for x in range(0, used, lanes):
            at = w + x * 4
            close(at + LANES.m, at + LANES.l, at + LANES.sink, at + LANES.inverse, at + LANES.lse)
        if alone:
            copy(w + LANES.lse, lse + h0 * lse_head + i0 * 4, count)
        else:
            for x in range(count):
                at = lse + load_i32(w + LANES.h, x) * lse_head
                store_f32(at, load_i32(w + LANES.i, x), load_f32(w + LANES.lse, x))
        return part

    return close_rows


@kernel
def build_write(isa: Isa, micro: Micro) -> Any:
    """write(...): finished rows of a task to where they belong."""
    lanes, micro_size, close_rows = isa.lanes, micro.size, build_close(isa, micro)
    unpack_narrow, unpack_wide = micro.unpack_square(micro.dtype), micro.unpack_square("fp32")
    element_store = micro.element_store

    @njit(**JIT)
    def write(a, w, seg, split, count, strips):
        """The finished rows: to out and lse, or to this split's part in float32."""
        dim_v, acc = load_i64(a, P.head_dim_v), w + LANES.tile
        part = close_rows(a, w, seg, split, count, strips)
        wide_out = part or load_i64(a, P.wide_out)
        wrong = 0
        d = 0
        while d + lanes <= dim_v:
            for x in range(0, strips * STRIP, lanes):
                tile, inverse, to = (
                    acc + d * ROW + x * 4,
                    w + LANES.inverse + x * 4,
                    w + LANES.out_address + x * 8,
                )
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

    return write


@kernel
def build_attend(isa: Isa, micro: Micro, loops: Loops, paged: bool) -> Any:
    """attend(...): one block of rows against a run of keys, into m, l and the tile acc. Keys in pages are copied."""
    lanes, half, wide = isa.lanes, micro.dtype != "fp32", isa.wide > STRIP
    (sources, _), gather = build_sources(micro), build_gather(isa, micro)
    scores, weighted, widen, fill, drop = loops.scores, loops.weighted, loops.widen, loops.fill, loops.drop
    next_run, pack, advance, weights = loops.next_run, loops.pack, micro.advance, micro.weights()
    whole = BLOCK_ROWS // STRIP if wide else 0
    weights_of_all, plain_weights = micro.weights(max(whole, 1)), micro.weights(max(whole, 1), plain=True)

    @njit(**JIT)
    def absorb(a, w, seg, tiles, column, v, stands, strips, plain):
        """One block into (m, l, acc): tiles = (score tile, acc, scratch for v, room for addresses, for weights),
        column = (first key, keys, end of the keys); v as `sources` gives it, or where it `stands` in float32."""
        s, acc, spare, listed, close = tiles
        j, keys, end = column
        # Weights of a strip lie close, so that all sets of the first-level cache hold them beside v; where products
        # take several strips at once, those are beside each other.
        drops = load_i64(a, P.dropout)
        p, p_row, p_strip = (s, ROW, 4 * STRIP) if drops or wide else (close, 4 * STRIP, keys * 4 * STRIP)
        for x in range(0, strips * STRIP, lanes):
            at = w + x * 4
            advance(at + LANES.top, at + LANES.m, at + LANES.pivot, at + LANES.l, at + LANES.alpha)
        # A row with one key only meets no such block: its weight is 1, and out is v, bit for bit.
        if strips == whole and plain:
            plain_weights(s, p, p_row, w + LANES.pivot, w + LANES.l, keys)
        elif strips == whole:
            weights_of_all(s, p, p_row, w + LANES.pivot, w + LANES.l, keys)
        else:
            for strip in range(strips):
                at, tile, to = w + strip * STRIP * 4, s + strip * STRIP * 4, p + strip * p_strip
                weights(tile, to, p_row, at + LANES.pivot, at + LANES.l, keys)
        if drops:
            drop(a, w, seg, s, j, keys, strips)
        dim_v, v_row = load_i64(a, P.head_dim_v), v[1]
        copied = load_i64(a, P.copied) != 0 and not stands
        at, v_bytes = v[0] + j * v_row, dim_v * 4 + LINE
        if paged:
            gather(v, (j, end), keys, dim_v, spare, v_bytes, listed)
        elif copied:
            widen(at, v_row, keys, dim_v, spare, v_bytes)
        if paged or copied:
            at, v_row = spare, v_bytes
        ahead = 0 if paged or copied or dim_v <= FOUND else keys * v_row
        weighted(at, v_row, p, p_row, p_strip, keys, acc, w + LANES.alpha, dim_v, strips, ahead)

    @njit(**JIT)
    def hold(w, k, v, own, sizes, heads, seg, end):
        """The thread's own copy of a head, in float32, up to key `end`."""
        at, (dim, dim_v) = w + LANES.numbers, sizes
        if load_i64(at, TABLE.held_segment) != seg or load_i64(at, TABLE.held_head) != heads:
            store_i64(at, TABLE.held_segment, seg)
            store_i64(at, TABLE.held_head, heads)
            store_i64(at, TABLE.held, 0)
        j = load_i64(at, TABLE.held)
        if j < end:
            widen(k[0] + j * k[1], k[1], end - j, dim, own[0] + j * own[1], own[1])
            widen(v[0] + j * v[1], v[1], end - j, dim_v, own[2] + j * own[3], own[3])
            store_i64(at, TABLE.held, end)

    @njit(**JIT)
    def attend(a, w, seg, rows, heads, keys, strips):
        """All blocks of the keys [keys[0], keys[1]) for the block of rows set up in the scratch."""
        dim, dim_v, block = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v), load_i64(a, P.key_block)
        acc = w + LANES.tile
        qt = acc + dim_v * ROW
        s = qt + dim * ROW
        spare = s + block * ROW
        pack(w + LANES.row_address, dim, qt, load_f32(a, 2 * P.scale), strips)
        listed = spare + block * (max(dim, dim_v) * 4 + LINE)
        close = listed + 8 * block + 256
        spec = load_i64(a, P.spec)
        k, v = sources(a, seg, heads)
        ready = half and not paged and load_i64(a, P.turned_v) != 0
        if ready:
            rows_k, row_k, rows_v, row_v = widened_rows(a, seg, heads)
            k, v = (rows_k, row_k) + k[2:], (rows_v, row_v) + v[2:]
        # A copy begins at the segment's first key.
        held = half and not paged and keys[0] == 0 and keys[1] <= load_i64(a, P.own)
        own_k = close + block * ROW
        own = (own_k, dim * 4, own_k + load_i64(a, P.own) * dim * 4, dim_v * 4 + LINE)
        used = strips * STRIP
        if strips * 2 > BLOCK_ROWS // STRIP:
            fill(acc, dim_v * BLOCK_ROWS, f32(0.0))
        else:
            for d in range(dim_v):
                fill(acc + d * ROW, used, f32(0.0))
        fill(w + LANES.m, used, f32(-math.inf))
        fill(w + LANES.l, used, f32(0.0))
        j = keys[0]
        while j < keys[1]:
            kind, n = next_run(a, w, rows, j, keys[1], block)
            if kind != EMPTY:
                at, row = k[0] + j * k[1], k[1]
                if paged:
                    gather(k, (j, keys[1]), n, dim, spare, dim * 4, listed)
                elif held:
                    hold(w, k, v, own, (dim, dim_v), heads, seg, j + n)
                    at, row = own[0] + j * own[1], own[1]
                elif half and not ready:
                    widen(at, row, n, dim, spare, dim * 4)
                if paged or (half and not ready and not held):
                    at, row = spare, dim * 4
                fill(w + LANES.top, used, f32(-math.inf))
                ahead = 0 if paged or (half and not (ready or held)) or dim <= FOUND else n * row
                scores(at, row, qt, dim, s, w + LANES.top, n, strips, ahead)
                fold = load_i64(a, P.fold_full) if kind == FULL else load_i64(a, P.fold_partial)
                if fold:
                    call_fold(fold, spec, w, s, w + LANES.top, n, j, strips)
                stands = ready or held
                from_v = (own[2], own[3]) + v[2:] if held else v
                plain, tiles = kind == FULL and fold == 0 and n > 1, (s, acc, spare, listed, close)
                absorb(a, w, seg, tiles, (j, n, keys[1]), from_v, stands, strips, plain)
            j += n

    return attend


@kernel
def build_forward(isa: Isa, dtype: str, paged: bool = False) -> Any:
    """The worker of the forward pass: worker(parameters). paged: keys lie in pages that a table names."""
    micro = Micro(isa, dtype)
    loops = build_loops(isa, micro)
    segment_of, set_lanes, write = loops.segment_of, loops.set_lanes, build_write(isa, micro)
    pairs = Pairs(isa)
    on_pairs = uses_pairs(isa, dtype) and not paged
    attend = build_pair_attend(isa, micro, loops) if on_pairs else build_attend(isa, micro, loops, paged)
    configure, release = pairs.configure, pairs.release

    def forward(a):
        if on_pairs:
            configure(0)
        w = load_i64(a, P.scratch) + take(a + P.thread * 8) * load_i64(a, P.scratch_bytes)
        group, packed, most = load_i64(a, P.group), load_i64(a, P.packed), load_i64(a, P.block_rows)
        store_i64(w + LANES.numbers, TABLE.held_segment, 0)
        while True:
            task = take(a + P.task * 8)
            if task >= load_i64(a, P.num_tasks):
                break
            seg = segment_of(a, task)
            splits, keys, chunk = (
                load_i64(seg, SEGMENT.splits),
                load_i64(seg, SEGMENT.keys),
                load_i64(seg, SEGMENT.chunk),
            )
            total = load_i64(seg, SEGMENT.rows) * (group if packed else 1)
            blocks = (total + most - 1) // most
            local = task - load_i64(seg, SEGMENT.first_task)
            split = local % splits
            # The last rows first: under a causal mask they are the longest.
            first = (blocks - 1 - local // splits % blocks) * most
            unit = local // splits // blocks
            count = min(most, total - first)
            strips = (count + STRIP - 1) // STRIP
            rows = set_lanes(a, w, seg, unit, first, strips * STRIP)
            attend(
                a,
                w,
                seg,
                rows,
                unit if packed else unit // group,
                (max(split * chunk, load_i64(seg, SEGMENT.first)), min(keys, split * chunk + chunk)),
                strips,
            )
            write(a, w, seg, split, count, strips)
        if on_pairs:
            release(0)

    return forward
