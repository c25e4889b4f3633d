"""The tile loops for few rows of q over long keys: one task is a segment, a KV head and one split of its keys, or
several heads where their rows of a few keys lie side by side in memory, and those of one head far apart.

All rows of the head's group go together, so that k and v are read once; lanes are the numbers of a head, and both
products read whole rows in order. Loop order: keys inner; (m, l, acc) stay in the thread's scratch:

    scores by key -> fold terms and, on PARTIAL tiles, the mask -> absorb

Memory of a thread: q and acc, 16 x (D + D_v) float32 a head, a tile of scores, and the addresses of a block's rows of
k and v, which come from the table of pages where there is one. While one product reads, the rows of the next are asked
for: the time is that of reading k and v.

Source: Dao et al., Flash-Decoding, 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html: the keys are
split, and the parts merged by their lse.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numba import njit

from tilewise.backends.cpu.combine_kernel import build_merge
from tilewise.backends.cpu.dot_rows import build_rows
from tilewise.backends.cpu.forward_kernel import build_close
from tilewise.backends.cpu.isa import LINE, STRIP
from tilewise.backends.cpu.loops import EMPTY, FULL, JIT, Loops, build_loops, call_fold, f32, kernel
from tilewise.backends.cpu.micro import ROW, arrive, load_f32, load_i64, store_i64, take, take_some
from tilewise.backends.cpu.page_rows import build_sources
from tilewise.backends.cpu.parameters import DECODE_BLOCKS, LANES, SEGMENT, P
from tilewise.backends.cpu.row_micro import ROWS, WEIGHED, RowMicro

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

AHEAD = {16: 8192}
"""Bytes of k and of v asked for in advance, by lanes, 4096 for others: a core of Zen 5 reads 40 GB/s, and waits for
what is asked for 4 KiB ahead (0.87 of the speed). Of v those of a span at least: its rows are met one column after
another, so that those asked for later come too late (spans of 8 and 16 KiB, 4 KiB ahead, took up to 1.2 times as
long)."""
POSITION = LANES.numbers + 192
"""Where a head's scratch holds the next key that it meets."""
RUN = 8192
"""Keys of the tasks that a thread takes at once: of 4096 keys of eight heads a quarter, of long caches one task. What a
thread holds that another process keeps from running waits with it."""
CLOSE, FEW = 4 * STRIP, 4 * ROWS
"""Bytes of a row of scores that no code of the spec folds, and of weights; FEW where there are ROWS rows at most."""
MOST_AHEAD = 64
"""Rows asked for in advance, at most: the addresses of so many more than a block's keys are written down."""
ADDRESSES = 8 * (max(DECODE_BLOCKS.values()) + MOST_AHEAD + 16 + 8)
"""Bytes of the addresses of a block's rows; 16 is the most that one step of `scores` takes, 8 what
is written with a vector."""
SPANS, SPAN = {(16, 2): 8192}, 4096
"""Bytes of v that are met once for each column of acc, by lanes and bytes of a number, and of others: the first-level
cache keeps them. 8 KiB gave keys in one piece 3 % and took 4 % from pages of 16 on Zen 3; on Zen 5 1.02 to 1.04 times
the speed in bf16, pages no less, and 0.95 in fp32."""
PAGE, LEAST_TOUCHED = 1 << 12, 1 << 10
"""Bytes of memory whose place a processor looks up at once, and the shortest run of rows whose beginning is worth
asking for early: pages of 16 keys took 0.91 of the time (measured on Zen 3, bf16 heads of 128)."""
SCORED = 16
"""Keys that meet one group of rows of q after another, where there are several."""


@kernel
def build_parts(isa: Isa, micro: RowMicro) -> tuple[Any, Any, Any, Any]:
    """What is done with a block of keys: score(...), weigh(...), add(...); span_of(...)."""
    lanes, size = isa.lanes, micro.size
    scores_4, scores_1 = micro.scores(ROWS), micro.scores(1)
    weighted_4, weighted_1 = micro.weighted(ROWS), micro.weighted(1)
    peak, advance, weigh_vector = micro.peak, micro.advance, micro.weigh_vector
    peak_few, weigh_few = micro.peak_few, micro.weigh_few
    span_bytes = SPANS.get((lanes, size), SPAN)

    @njit(**JIT)
    def score(a, tiles, s_row, source, asked, n, rows):
        """Scores of n keys: tiles = (q, acc, s, bytes of a row of q, of acc); source, asked = (addresses of rows, what
        is added to them)."""
        q, _, s, q_row, _ = tiles
        dim = load_i64(a, P.head_dim)
        lines, scale = (dim * size + LINE - 1) // LINE, load_f32(a, 2 * P.scale)
        # Rows of k that several groups of rows of q meet stay in the first-level cache between them.
        step = n if rows <= ROWS else SCORED
        for j in range(0, n, step):
            part, at, to, ask = min(step, n - j), source[0] + j * 8, s + j * s_row, asked[0] + j * 8
            for r in range(0, rows, ROWS):
                more = lines if r == 0 else 0
                from_q, to_s = q + r * q_row, to + r * 4
                # Where one row is left, three quarters of a step would be idle.
                if rows - r == 1:
                    scores_1(at, source[1], part, from_q, q_row, dim, to_s, s_row, ask, asked[1], more, scale)
                else:
                    scores_4(at, source[1], part, from_q, q_row, dim, to_s, s_row, ask, asked[1], more, scale)

    @njit(**JIT)
    def weigh(w, s, s_row, p_row, n, rows, topped, asked, lines):
        """Weights in place of n scores, m, l and alpha moved on; topped: whether their largest are known. asked, lines:
        rows that are asked for meanwhile, as in `weigh_few`."""
        if not topped and s_row == FEW:
            peak_few(s, w + LANES.top, n)
        elif not topped:
            for x in range(0, rows, lanes):
                peak(s + x * 4, s_row, w + LANES.top + x * 4, n)
        for x in range(0, rows, lanes):
            at = w + x * 4
            advance(at + LANES.top, at + LANES.m, at + LANES.pivot, at + LANES.l, at + LANES.alpha)
            if s_row != FEW:
                # Rows that are closer lie before those they come from.
                weigh_vector(s + x * 4, s_row, s + x * 4, p_row, at + LANES.pivot, at + LANES.l, n)
        if s_row == FEW:
            weigh_few(s, w + LANES.pivot, w + LANES.l, n, asked, lines)

    @njit(**JIT)
    def span_of(a):
        """Keys whose rows of v stay in the first-level cache for every column."""
        return max(span_bytes // (load_i64(a, P.head_dim_v) * size), 8)

    @njit(**JIT)
    def add(a, w, tiles, p, p_row, source, asked, n, rows):
        """The rows of v of n keys times their weights to acc; alpha is 1 after that."""
        _, acc, _, _, acc_row = tiles
        dim_v, alpha, span = load_i64(a, P.head_dim_v), w + LANES.alpha, span_of(a)
        lines = (dim_v * size + LINE - 1) // LINE
        # Several groups of rows meet the keys of a span one after another.
        step = max(n, 1) if rows <= ROWS else span
        for j in range(0, max(n, 1), step):
            part, v, ask, at = min(step, n - j), source[0] + j * 8, asked[0] + j * 8, p + j * p_row
            for r in range(0, rows, ROWS):
                more, to, factor, of = lines if r == 0 else 0, acc + r * acc_row, alpha + r * 4, at + r * 4
                if rows - r == 1:
                    weighted_1(
                        v, source[1], part, span, of, p_row, factor, to, acc_row, dim_v, ask, asked[1], more
                    )  # fmt: skip
                else:
                    weighted_4(
                        v, source[1], part, span, of, p_row, factor, to, acc_row, dim_v, ask, asked[1], more
                    )  # fmt: skip

    return score, weigh, add, span_of


@kernel
def build_absorb(isa: Isa, micro: RowMicro, loops: Loops) -> tuple[Any, Any]:
    """absorb(...): one block of keys into (m, l, acc) of the rows of a head; absorb_heads(...): of several heads."""
    size, drop, far, few = micro.size, loops.drop, AHEAD.get(isa.lanes, 4096), isa.lanes // ROWS
    spread = micro.spread
    score, weigh, add, span_of = build_parts(isa, micro)

    @njit(**JIT)
    def lines_of(dim):
        return (dim * size + LINE - 1) // LINE

    @njit(**JIT)
    def rows_ahead(row):
        return max(1, min(far // row, MOST_AHEAD))

    @njit(**JIT)
    def heads_ahead(each, together):
        """Heads between the rows that are met and those that are asked for, `each` bytes of every one."""
        return min(max(far // max(each, 1), 1), together)

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
        s, (k, v), n = tiles[2], sources, run[2]
        fold = load_i64(a, P.fold_full) if run[0] == FULL else load_i64(a, P.fold_partial)
        drops = load_i64(a, P.dropout)
        close = FEW if rows <= ROWS else CLOSE
        s_row, p_row = ROW if fold or drops else close, ROW if drops else close
        ahead = rows_ahead(load_i64(a, P.head_dim) * size)
        # Rows of a span are met together: those of the next one are asked for.
        ahead_v = min(max(rows_ahead(load_i64(a, P.head_dim_v) * size), span_of(a)), MOST_AHEAD)
        score(a, tiles, s_row, (k, 0), (k + ahead * 8, 0), n, rows)
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
        s, v = s + first * s_row, v + first * 8
        # Memory goes on reading beside the weights: what is asked for there is not asked for again.
        lines_v = lines_of(load_i64(a, P.head_dim_v))
        more = (n + few - 1) // few * WEIGHED // lines_v
        if not spread or close != FEW or fold or drops or ahead_v + more > MOST_AHEAD:
            more = lines_v = 0
        weigh(w, s, s_row, p_row, n, rows, fold != 0, v + ahead_v * 8, lines_v)
        ahead_v += more
        if drops:
            drop(a, w, seg, s, run[1] + first, n, 1)
        add(a, w, tiles, s, p_row, (v, 0), (v + ahead_v * 8, 0), n, rows)

    @njit(**JIT)
    def absorb_heads(a, w, heads, tiles, n, sources, rows):
        """n keys that all rows of several heads see, whose rows are read in the order in which they lie: heads =
        (their number, bytes of a head's scratch, of its scores, keys that lie together); tiles as above, of the
        first head."""
        q, acc, s, q_row, acc_row = tiles
        together, each, s_each, chunk = heads
        k, v = sources
        s_row = FEW if rows <= ROWS else CLOSE
        # Beside the rows of a head those of a later one are asked for, in the end of the next keys.
        later = heads_ahead(load_i64(a, P.head_dim) * size * chunk, together)
        later_v = heads_ahead(load_i64(a, P.head_dim_v) * size * chunk, together)
        if load_i64(a, P.page_size) > 1 and chunk <= span_of(a):
            # A span is met column by column: the last rows that were asked for beside the one before come too late.
            later_v = min(max(later_v, 2), together)
        k_h, v_h = load_i64(a, P.k_h), load_i64(a, P.v_h)
        for c in range(0, n, chunk):
            end = min(c + chunk, n)
            for t in range(together):
                at = (q + t * each, acc, s + t * s_each + c * s_row, q_row, acc_row)
                wraps = t + later >= together
                beside = (k + (end if wraps else c) * 8, (t + later - (together if wraps else 0)) * k_h)
                score(a, at, s_row, (k + c * 8, t * k_h), beside, end - c, rows)
        for t in range(together):
            weigh(w + t * each, s + t * s_each, s_row, s_row, n, rows, False, 0, 0)
        for c in range(0, n, chunk):
            end = min(c + chunk, n)
            for t in range(together):
                at = (q, acc + t * each, s, q_row, acc_row)
                wraps = t + later_v >= together
                more, offset = v + (end if wraps else c) * 8, (t + later_v - (together if wraps else 0)) * v_h
                weights, source = s + t * s_each + c * s_row, (v + c * 8, t * v_h)
                add(a, w + t * each, at, weights, s_row, source, (more, offset), end - c, rows)

    return absorb, absorb_heads, span_of


@kernel
def build_window(isa: Isa, micro: RowMicro, loops: Loops) -> Any:
    """attend(...): all keys of a task."""
    (absorb, absorb_heads, span_of), next_run = build_absorb(isa, micro, loops), loops.next_run
    sources, rows_of = build_sources(micro)
    touch = micro.touch

    @njit(**JIT)
    def touch_pages(rows, source, key, n):
        """Ask for where the pages begin that the next block meets beyond the rows asked for beside this one."""
        row, size = source[1], source[4]
        step = min(max(PAGE // max(row, 1), 1), size)
        if step * row >= LEAST_TOUCHED:
            end = n + MOST_AHEAD + 16
            for x in range(end - n + (n - end - key) % step, end, step):
                touch(load_i64(rows, x))

    @njit(**JIT)
    def list_rows(a, seg, unit, keys, n, tables, follows):
        """Addresses of the rows of n keys from keys[0] on and of those that come after them, up to keys[1] and then of
        the task that follows: (its segment, 0 where none does, unit, first key, end)."""
        packed, group = load_i64(a, P.packed), load_i64(a, P.group)
        from_k, from_v = sources(a, seg, unit if packed else unit // group)
        count = n + MOST_AHEAD + 16
        rows_of(from_k, keys, count, tables[0])
        rows_of(from_v, keys, count, tables[1])
        if from_k[3]:
            touch_pages(tables[0], from_k, keys[0], n)
            touch_pages(tables[1], from_v, keys[0], n)
        there = keys[1] - keys[0]
        if there < count and follows[0]:
            from_k, from_v = sources(a, follows[0], follows[1] if packed else follows[1] // group)
            rows_of(from_k, follows[2:], count - there, tables[0] + there * 8)
            rows_of(from_v, follows[2:], count - there, tables[1] + there * 8)

    @njit(**JIT)
    def agreed(a, w, each, rows, key, end, block):
        """Keys that all rows of all heads see from `key` on, as one run; 0 where the heads are not one."""
        if load_i64(a, P.fold_full) | load_i64(a, P.dropout):
            return 0
        kind, n = next_run(a, w, rows, key, end, block)
        if kind != FULL:
            return 0
        for t in range(1, load_i64(a, P.together)):
            at = w + t * each
            if load_i64(at + POSITION, 0) != key:
                return 0
            other, m = next_run(a, at, rows, key, end, block)
            if other != FULL or m != n:
                return 0
        return n

    @njit(**JIT)
    def chunk_of(a):
        """Keys of a head that lie together, in whole spans."""
        span = span_of(a)
        if load_i64(a, P.k_h) < load_i64(a, P.k_n):
            return span
        return max(min(load_i64(a, P.page_size), MOST_AHEAD) // span, 1) * span

    @njit(**JIT)
    def attend(a, w, seg, unit, rows, span, count, shared, tables, follows):
        """span = (first key, end); shared = (bytes of a head's scratch, of a row of q, of acc, scores, bytes of a
        head's); tables = (room for addresses of rows of k, of v); follows: as in `list_rows`."""
        each, q_row, acc_row, s, s_each = shared
        together, block = load_i64(a, P.together), load_i64(a, P.key_block)
        behind = span[0]
        while behind < span[1]:
            n = agreed(a, w, each, rows, behind, span[1], block) if together > 1 else 0
            q = w + LANES.tile
            if n:
                list_rows(a, seg, unit, (behind, span[1]), n, tables, follows)
                tiles = (q, q + STRIP * q_row, s, q_row, acc_row)
                absorb_heads(a, w, (together, each, s_each, chunk_of(a)), tiles, n, tables, count)
            here, least = behind, span[1]
            for t in range(together):
                at = w + t * each
                key = load_i64(at + POSITION, 0)
                if n:
                    key += n
                elif key == here:
                    q = at + LANES.tile
                    kind, m = next_run(a, at, rows, key, span[1], block)
                    if kind != EMPTY:
                        later = (follows[0], follows[1] + t, follows[2], follows[3])
                        list_rows(a, seg, unit + t, (key, span[1]), m, tables, later)
                        tiles = (q, q + STRIP * q_row, s, q_row, acc_row)
                        absorb(a, at, seg, tiles, (kind, key, m), tables, count)
                    key += m
                store_i64(at + POSITION, 0, key)
                least = min(least, key)
            behind = least

    return attend


@kernel
def build_decode(isa: Isa, dtype: str) -> Any:
    """The worker for few rows of q: worker(parameters)."""
    micro = build_rows(isa, dtype)
    loops = build_loops(isa, micro)
    attend, close_rows = build_window(isa, micro, loops), build_close(isa, micro)
    merge = build_merge(isa, micro)
    segment_of, set_lanes, fill, pack_row = loops.segment_of, loops.set_lanes, loops.fill, micro.pack_row
    finish_narrow, finish_wide, lanes = micro.finish_row(dtype), micro.finish_row("fp32"), isa.lanes

    @njit(**JIT)
    def begin(a, w, seg, unit, count, q_row, acc_row):
        """(first, last row) of a head whose q, m, l and acc are set up in the scratch w."""
        rows = set_lanes(a, w, seg, unit, 0, STRIP)
        q = w + LANES.tile
        whole, scale = (count + ROWS - 1) // ROWS * ROWS, load_f32(a, 2 * P.scale)
        for x in range(whole):
            # Rows past the last one are the last one again.
            pack_row(load_i64(w + LANES.row_address, x), load_i64(a, P.head_dim), q + x * q_row, scale)
        fill(q + STRIP * q_row, whole * (acc_row // 4), f32(0.0))
        fill(w + LANES.m, STRIP, f32(-math.inf))
        fill(w + LANES.l, STRIP, f32(0.0))
        return rows

    @njit(**JIT)
    def clear(a, s, keys, count, several):
        """Lanes that are no rows are read too: all but those of a few rows, which are met together. A split may end
        before the first key that is no padding. several: whether these scores are met with those of other heads,
        which no code of the spec folds."""
        most = max(min(load_i64(a, P.key_block), keys), 0)
        folds = load_i64(a, P.fold_full) | load_i64(a, P.fold_partial) | load_i64(a, P.dropout)
        if several:
            folds = 0
        if count > ROWS or folds:
            fill(s, most * STRIP, f32(0.0))
        elif count == 1:
            fill(s, (most + STRIP) // STRIP * STRIP * ROWS, f32(0.0))
        if folds:
            for x in range(most):
                fill(s + x * ROW, STRIP, f32(0.0))

    @njit(**JIT)
    def finish(a, w, seg, split, count, acc_row, acc):
        part, dim_v = close_rows(a, w, seg, split, count, 1), load_i64(a, P.head_dim_v)
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

    @njit(**JIT)
    def merge_last(a, w, seg, unit):
        """Where this was the last of a head's splits to be done, their merge, in the order of the splits."""
        number = (seg - load_i64(a, P.segments)) // (SEGMENT.size * 8)
        at = load_i64(a, P.arrived) + (number * load_i64(a, P.heads) + unit) * 8
        if arrive(at) + 1 == load_i64(seg, SEGMENT.splits):
            store_i64(at, 0, 0)
            group = load_i64(a, P.group) if load_i64(a, P.packed) else 1
            for h in range(unit * group, unit * group + group):
                merge(a, w, seg, h)

    @njit(**JIT)
    def next_task(a, task, left):
        """(task, tasks from it on that are this thread's, 0 where none is left). A thread takes several short ones at
        once, up to half of its share of what is left: so it reads on where it is, and asks for the next task's rows."""
        if left > 1:
            return task + 1, left - 1
        total = load_i64(a, P.num_tasks)
        some = max((total - load_i64(a, P.task)) // (2 * load_i64(a, P.threads)), 1)
        some = min(some, max(RUN // load_i64(load_i64(a, P.segments), SEGMENT.chunk), 1))
        task = take_some(a + P.task * 8, some)
        return task, max(min(some, total - task), 0)

    @njit(**JIT)
    def place_of(a, task):
        """(segment, split, first head, first key, end of the keys) of a task."""
        seg = segment_of(a, task)
        splits, chunk = load_i64(seg, SEGMENT.splits), load_i64(seg, SEGMENT.chunk)
        local = task - load_i64(seg, SEGMENT.first_task)
        split = local % splits
        first = max(split * chunk, load_i64(seg, SEGMENT.first))
        end = min(load_i64(seg, SEGMENT.keys), split * chunk + chunk)
        return seg, split, local // splits * load_i64(a, P.together), first, end

    def decode(a):
        w = load_i64(a, P.scratch) + take(a + P.thread * 8) * load_i64(a, P.scratch_bytes)
        group, together, block = load_i64(a, P.group), load_i64(a, P.together), load_i64(a, P.key_block)
        q_row = (load_i64(a, P.head_dim) + lanes - 1) // lanes * lanes * 4
        acc_row = (load_i64(a, P.head_dim_v) + lanes - 1) // lanes * lanes * 4
        each, s_each = LANES.tile + STRIP * (q_row + acc_row), (block + STRIP) * CLOSE
        s = w + together * each
        rows_k = s + (block + STRIP) * ROW + together * s_each
        tables = (rows_k, rows_k + ADDRESSES)
        task, left = 0, 0
        while True:
            task, left = next_task(a, task, left)
            if left == 0:
                break
            seg, split, unit, first, end = place_of(a, task)
            count = load_i64(seg, SEGMENT.rows) * (group if load_i64(a, P.packed) else 1)
            follows = (0, 0, 0, 0)
            if left > 1:
                later = place_of(a, task + 1)
                if later[3] < later[4]:
                    follows = (later[0], later[2], later[3], later[4])
            rows = (0, 0)
            for t in range(together):
                rows = begin(a, w + t * each, seg, unit + t, count, q_row, acc_row)
                store_i64(w + t * each + POSITION, 0, first)
            for t in range(together):
                clear(a, s + t * s_each, end - first, count, t > 0)
            attend(
                a, w, seg, unit, rows, (first, end), count, (each, q_row, acc_row, s, s_each), tables, follows
            )
            for t in range(together):
                at = w + t * each
                finish(a, at, seg, split, count, acc_row, at + LANES.tile + STRIP * q_row)
            if load_i64(seg, SEGMENT.splits) > 1:
                for t in range(together):
                    merge_last(a, w, seg, unit + t)

    return decode
