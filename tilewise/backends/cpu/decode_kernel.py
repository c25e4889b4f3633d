"""The tile loops for few rows of q over long keys: one task is a segment, a KV head and one split of its keys.

All rows of the head's group go together, so that k and v are read once; lanes are the numbers of a head, and both
products read whole rows in order. Loop order: keys inner; (m, l, acc) stay in the thread's scratch:

    scores by key -> fold terms and, on PARTIAL tiles, the mask -> absorb

Memory of a thread: q and acc, 16 x (D + D_v) float32, and a tile of scores. While one product reads, the memory of
the next is asked for: the time is that of reading k and v.

Source: Dao et al., Flash-Decoding, 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html: the keys are
split, and the parts merged by their lse.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numba import njit

from tilewise.backends.cpu.forward_kernel import build_close
from tilewise.backends.cpu.isa import STRIP
from tilewise.backends.cpu.loops import EMPTY, FULL, JIT, Loops, build_loops, call_fold, f32, kernel
from tilewise.backends.cpu.micro import ROW, load_f32, load_i64, store_i64, take
from tilewise.backends.cpu.parameters import LANES, SEGMENT, P
from tilewise.backends.cpu.row_micro import ROWS, RowMicro

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

AHEAD = 4096
"""Bytes of k and of v asked for in advance: a page, where the processor's own foresight ends."""
SPAN = 8
"""Keys whose rows of v are met once for each column of acc: at D = 128 they are 4 KiB, which the first-level cache
keeps. 8 to 64 keys and 4 to 16 KiB in advance are within the noise of the measurement, about 10 %."""


@kernel
def build_absorb(isa: Isa, micro: RowMicro, loops: Loops) -> Any:
    """absorb(...): one block of keys into (m, l, acc) of the rows."""
    lanes, size = isa.lanes, micro.size
    scores_4, scores_1 = micro.scores(ROWS), micro.scores(1)
    weighted_4, weighted_1 = micro.weighted(ROWS), micro.weighted(1)
    peak, advance, weigh_vector = micro.peak, micro.advance, micro.weigh_vector
    drop, fill = loops.drop, loops.fill

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
        sources = (k, row bytes, v, row bytes)."""
        q, acc, s, q_row, acc_row = tiles
        k, k_row, v, v_row = sources
        n = run[2]
        dim, dim_v = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v)
        ahead_k, ahead_v = k_row * (1 + AHEAD // (dim * size)), v_row * (1 + AHEAD // (dim_v * size))
        for r in range(0, rows, ROWS):
            # Where one row is left, three quarters of a step would be idle.
            if rows - r == 1:
                scores_1(k, k_row, n, q + r * q_row, q_row, dim, s + r * 4, ahead_k)
            else:
                scores_4(k, k_row, n, q + r * q_row, q_row, dim, s + r * 4, ahead_k)
        fold = load_i64(a, P.fold_full) if run[0] == FULL else load_i64(a, P.fold_partial)
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
        else:
            for x in range(0, rows, lanes):
                peak(s + x * 4, w + LANES.top + x * 4, n)
        s += first * ROW
        for x in range(0, rows, lanes):
            at = w + x * 4
            advance(at + LANES.top, at + LANES.m, at + LANES.pivot, at + LANES.l, at + LANES.alpha)
            weigh_vector(s + x * 4, at + LANES.pivot, at + LANES.l, n)
        if load_i64(a, P.dropout):
            drop(a, w, seg, s, run[1] + first, n, 1)
        v += first * v_row
        j = 0
        while j == 0 or j < n:
            # Few keys at once, so that their rows of v are in the first-level cache for every column.
            part = min(SPAN, n - j)
            for r in range(0, rows, ROWS):
                to, p, alpha = acc + r * acc_row, s + j * ROW + r * 4, w + LANES.alpha + r * 4
                if rows - r == 1:
                    weighted_1(v + j * v_row, v_row, part, p, alpha, to, acc_row, dim_v, ahead_v)
                else:
                    weighted_4(v + j * v_row, v_row, part, p, alpha, to, acc_row, dim_v, ahead_v)
            fill(w + LANES.alpha, STRIP, f32(1.0))
            j += SPAN

    return absorb


@kernel
def build_decode(isa: Isa, dtype: str) -> Any:
    """The worker for few rows of q: worker(parameters)."""
    micro = RowMicro(isa, dtype)
    loops = build_loops(isa, micro)
    absorb, close_rows = build_absorb(isa, micro, loops), build_close(isa, micro)
    segment_of, set_lanes, next_run, fill = loops.segment_of, loops.set_lanes, loops.next_run, loops.fill
    pack_row, finish_narrow, finish_wide = micro.pack_row, micro.finish_row, RowMicro(isa, "fp32").finish_row
    lanes = isa.lanes

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
        fill(acc, STRIP * acc_row // 4, f32(0.0))
        fill(s, (block + STRIP) * ROW // 4, f32(0.0))
        fill(w + LANES.m, STRIP, f32(-math.inf))
        fill(w + LANES.l, STRIP, f32(0.0))
        head = unit if load_i64(a, P.packed) else unit // load_i64(a, P.group)
        key0, tensor_b = load_i64(seg, SEGMENT.key0), load_i64(seg, SEGMENT.tensor_b)
        k_row, v_row = load_i64(a, P.k_n), load_i64(a, P.v_n)
        k = load_i64(a, P.k) + tensor_b * load_i64(a, P.k_b) + head * load_i64(a, P.k_h) + key0 * k_row
        v = load_i64(a, P.v) + tensor_b * load_i64(a, P.v_b) + head * load_i64(a, P.v_h) + key0 * v_row
        j = keys[0]
        while j < keys[1]:
            kind, n = next_run(a, w, rows, j, keys[1], block)
            if kind != EMPTY:
                absorb(
                    a, w, seg, (q, acc, s, q_row, acc_row), (kind, j, n),
                    (k + j * k_row, k_row, v + j * v_row, v_row), count,
                )  # fmt: skip
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
            span = (split * chunk, min(keys, split * chunk + chunk))
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
