"""The tile loops for few rows of q over long keys: one task is a segment, a KV head and one split of its keys.

All rows of the head's group go together, so that k and v are read once; lanes are the numbers of a head, and both
products read whole rows in order. Loop order: keys inner; (m, l, acc) stay in the thread's scratch:

    scores by key -> fold terms and, on PARTIAL tiles, the mask -> absorb

Memory of a thread: q and acc, 16 x (D + D_v) float32, a tile of scores, and the addresses of a block's rows of k and
v, which come from the table of pages where there is one. While one product reads, the rows of the next are asked for:
the time is that of reading k and v.

Source: Dao et al., Flash-Decoding, 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html: the keys are
split, and the parts merged by their lse.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numba import njit

from tilewise.backends.cpu.forward_kernel import build_close
from tilewise.backends.cpu.isa import LINE, STRIP
from tilewise.backends.cpu.loops import EMPTY, FULL, JIT, Loops, build_loops, call_fold, f32, kernel
from tilewise.backends.cpu.micro import ROW, load_f32, load_i64, store_i64, take
from tilewise.backends.cpu.page_rows import build_sources
from tilewise.backends.cpu.parameters import DECODE_BLOCK, LANES, SEGMENT, P
from tilewise.backends.cpu.row_micro import ROWS, RowMicro

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

AHEAD = 4096
"""Bytes of k and of v asked for in advance: 2 to 8 KiB are equal within the noise of the measurement."""
CLOSE, FEW = 4 * STRIP, 4 * ROWS
"""Bytes of a row of scores that no code of the spec folds, and of weights; FEW where there are ROWS rows at most."""
MOST_AHEAD = 64
"""Rows asked for in advance, at most: the addresses of so many more than a block's keys are written down."""
ADDRESSES = 8 * (DECODE_BLOCK + MOST_AHEAD + 16 + 8)
"""Bytes of the addresses of a block's rows; 16 is the most that one step of `scores` takes, 8 what
is written with a vector."""
SPAN = 4096
"""Bytes of v that are met once for each column of acc: the first-level cache keeps them."""
SCORED = 16
"""Keys that meet one group of rows of q after another, where there are several."""


@kernel
def build_absorb(isa: Isa, micro: RowMicro, loops: Loops) -> Any:
    """absorb(...): one block of keys into (m, l, acc) of the rows."""
    lanes, size = isa.lanes, micro.size
    scores_4, scores_1 = micro.scores(ROWS), micro.scores(1)
    weighted_4, weighted_1 = micro.weighted(ROWS), micro.weighted(1)
    peak, advance, weigh_vector = micro.peak, micro.advance, micro.weigh_vector
    peak_few, weigh_few = micro.peak_few, micro.weigh_few
    drop, fill = loops.drop, loops.fill

    @njit(**JIT)
    def rows_ahead(row):
        return max(1, min(AHEAD // row, MOST_AHEAD))

    @njit(**JIT)
    def hidden(s, key, rows):
        """Whether no row sees the key."""
        seen = False
        for x in range(rows):
            seen |= load_f32(s + key * ROW, x) != f32(-math.inf)
        return not seen

    @njit(**JIT)
    def absorb(a, w, seg, tiles, run, sources, rows):
        """tiles = (q, acc, s, bytes of a row of q, of acc); run = (class, first key, keys);
        sources = (addresses of the rows of k, of v)."""
        q, acc, s, q_row, acc_row = tiles
        k, v = sources
        n = run[2]
        fold = load_i64(a, P.fold_full) if run[0] == FULL else load_i64(a, P.fold_partial)
        drops = load_i64(a, P.dropout)
        close = FEW if rows <= ROWS else CLOSE
        s_row, p_row = ROW if fold or drops else close, ROW if drops else close
        dim, dim_v = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v)
        ahead, ahead_v = rows_ahead(dim * size), rows_ahead(dim_v * size)
        lines, lines_v = (dim * size + LINE - 1) // LINE, (dim_v * size + LINE - 1) // LINE
        # Rows of k that several groups of rows of q meet stay in the first-level cache between them.
        step = n if rows <= ROWS else SCORED
        for j in range(0, n, step):
            part, from_k, to = min(step, n - j), k + j * 8, s + j * s_row
            for r in range(0, rows, ROWS):
                asked = lines if r == 0 else 0
                # Where one row is left, three quarters of a step would be idle.
                if rows - r == 1:
                    scores_1(from_k, part, q + r * q_row, q_row, dim, to + r * 4, s_row, ahead, asked)
                else:
                    scores_4(from_k, part, q + r * q_row, q_row, dim, to + r * 4, s_row, ahead, asked)
        first = 0
        if fold:
            call_fold(fold, load_i64(a, P.spec), w, s, w + LANES.top, n, run[1], 1)
            if run[0] != FULL:
                # What no row sees at the ends of a block, padding above all, is not read.
                while n > 0 and hidden(s, n - 1, rows):
                    n -= 1
                while first < n and hidden(s, first, rows):
                    first += 1
                n -= first
        elif s_row == FEW:
            peak_few(s, w + LANES.top, n)
        else:
            for x in range(0, rows, lanes):
                peak(s + x * 4, s_row, w + LANES.top + x * 4, n)
        s += first * s_row
        p = s  # rows that are closer lie before those they come from
        for x in range(0, rows, lanes):
            at = w + x * 4
            advance(at + LANES.top, at + LANES.m, at + LANES.pivot, at + LANES.l, at + LANES.alpha)
            if s_row != FEW:
                weigh_vector(s + x * 4, s_row, p + x * 4, p_row, at + LANES.pivot, at + LANES.l, n)
        if s_row == FEW:
            weigh_few(s, w + LANES.pivot, w + LANES.l, n)
        if drops:
            drop(a, w, seg, s, run[1] + first, n, 1)
        v += first * 8
        span = max(SPAN // (dim_v * size), 8)
        j = 0
        while j == 0 or j < n:
            # Few keys at once, so that their rows of v are in the first-level cache for every column.
            part = min(span, n - j)
            for r in range(0, rows, ROWS):
                to, from_p, alpha = acc + r * acc_row, p + j * p_row + r * 4, w + LANES.alpha + r * 4
                asked = lines_v if r == 0 else 0
                if rows - r == 1:
                    weighted_1(v + j * 8, part, from_p, p_row, alpha, to, acc_row, dim_v, ahead_v, asked)
                else:
                    weighted_4(v + j * 8, part, from_p, p_row, alpha, to, acc_row, dim_v, ahead_v, asked)
            fill(w + LANES.alpha, STRIP, f32(1.0))
            j += span

    return absorb


@kernel
def build_decode(isa: Isa, dtype: str) -> Any:
    """The worker for few rows of q: worker(parameters)."""
    micro = RowMicro(isa, dtype)
    loops = build_loops(isa, micro)
    absorb, close_rows = build_absorb(isa, micro, loops), build_close(isa, micro)
    segment_of, set_lanes, next_run, fill = loops.segment_of, loops.set_lanes, loops.next_run, loops.fill
    pack_row, finish_narrow, finish_wide = micro.pack_row, micro.finish_row(dtype), micro.finish_row("fp32")
    lanes, (sources, rows_of) = isa.lanes, build_sources(micro)

    @njit(**JIT)
    def attend(a, w, seg, rows, unit, keys, count):
        """All blocks of the keys [keys[0], keys[1]) for the rows set up in the scratch."""
        dim, dim_v, block = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v), load_i64(a, P.key_block)
        q_row, acc_row = (dim + lanes - 1) // lanes * lanes * 4, (dim_v + lanes - 1) // lanes * lanes * 4
        q = w + LANES.tile
        acc = q + STRIP * q_row
        s = acc + STRIP * acc_row
        scale = load_f32(a, 2 * P.scale)
        for x in range((count + ROWS - 1) // ROWS * ROWS):
            # Rows past the last one are the last one again.
            pack_row(load_i64(w + LANES.row_address, x), dim, q + x * q_row, scale)
        fill(acc, (count + ROWS - 1) // ROWS * ROWS * (acc_row // 4), f32(0.0))
        # Lanes that are no rows are read too. A split may end before the first key that is no padding.
        most = max(min(block, keys[1] - keys[0]), 0)
        fill(s, most * STRIP, f32(0.0))
        if load_i64(a, P.fold_full) | load_i64(a, P.fold_partial) | load_i64(a, P.dropout):
            for x in range(most):
                fill(s + x * ROW, STRIP, f32(0.0))
        fill(w + LANES.m, STRIP, f32(-math.inf))
        fill(w + LANES.l, STRIP, f32(0.0))
        rows_k = s + (block + STRIP) * ROW
        rows_v = rows_k + ADDRESSES
        head = unit if load_i64(a, P.packed) else unit // load_i64(a, P.group)
        from_k, from_v = sources(a, seg, head)
        j = keys[0]
        while j < keys[1]:
            kind, n = next_run(a, w, rows, j, keys[1], block)
            if kind != EMPTY:
                rows_of(from_k, (j, keys[1]), n + MOST_AHEAD + 16, rows_k)
                rows_of(from_v, (j, keys[1]), n + MOST_AHEAD + 16, rows_v)
                absorb(a, w, seg, (q, acc, s, q_row, acc_row), (kind, j, n), (rows_k, rows_v), count)
            j += n
        return acc, acc_row

    def decode(a):
        w = load_i64(a, P.scratch) + take(a + P.thread * 8) * load_i64(a, P.scratch_bytes)
        group, packed, dim_v = load_i64(a, P.group), load_i64(a, P.packed), load_i64(a, P.head_dim_v)
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
            count = load_i64(seg, SEGMENT.rows) * (group if packed else 1)
            local = task - load_i64(seg, SEGMENT.first_task)
            split, unit = local % splits, local // splits
            rows = set_lanes(a, w, seg, unit, 0, STRIP)
            span = (max(split * chunk, load_i64(seg, SEGMENT.first)), min(keys, split * chunk + chunk))
            acc, acc_row = attend(a, w, seg, rows, unit, span, count)
            part = close_rows(a, w, seg, split, count, 1)
            wrong = 0
            for x in range(count):
                inverse, to = load_f32(w + LANES.inverse, x), load_i64(w + LANES.out_address, x)
                if inverse == f32(0.0):
                    fill(acc + x * acc_row, acc_row // 4, f32(0.0))
                if part or load_i64(a, P.wide_out):
                    wrong |= finish_wide(acc + x * acc_row, dim_v, inverse, to)
                else:
                    wrong |= finish_narrow(acc + x * acc_row, dim_v, inverse, to)
            if wrong:
                store_i64(a, P.flag, 1)

    return decode
