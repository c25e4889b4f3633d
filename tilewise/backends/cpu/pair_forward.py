"""The forward pass on bf16 pairs. The schedule is `forward_kernel`'s; its operands are bf16:

    s = k q (pairs along the head) -> scale, fold -> absorb: weights become pairs of keys -> acc += v^T p

v is turned once per KV head before the pass where several blocks of rows read it, else block by block.

Memory of a thread: q in pairs, acc, a score tile whose weights overwrite it, one turned block of v.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numba import njit

from tilewise.backends.cpu.isa import BLOCK_ROWS, STRIP
from tilewise.backends.cpu.loops import EMPTY, FULL, JIT, Loops, call_fold, f32, kernel
from tilewise.backends.cpu.micro import ROW, Micro, load_f32, load_i64, take
from tilewise.backends.cpu.pair_launch import GROUP
from tilewise.backends.cpu.pair_loops import PairLoops, build_pair_loops
from tilewise.backends.cpu.pairs import Pairs
from tilewise.backends.cpu.parameters import LANES, SEGMENT, P

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

STRIPS = BLOCK_ROWS // STRIP


@kernel
def build_settle(pairs: Pairs, fill: Any) -> tuple[Any, Any]:
    """fold and settle: raw scores of a tile become scores with their terms and mask, and the lanes' maxima."""
    lift, highest, highest_of_all = pairs.lift, pairs.highest(1), pairs.highest(STRIPS)

    @njit(**JIT)
    def fold(a, w, s, run, strips):
        """run = (class, first key, keys). Returns the factor that still stands outside: the scale, or 1."""
        scale = load_f32(a, 2 * P.scale)
        code = load_i64(a, P.fold_full) if run[0] == FULL else load_i64(a, P.fold_partial)
        if code or not scale > f32(0.0):
            for strip in range(strips):
                lift(s + strip * STRIP * 4, run[2], scale)
            scale = f32(1.0)
        if code:
            call_fold(code, load_i64(a, P.spec), w, s, w + LANES.top, run[2], run[1], strips)
        return scale

    @njit(**JIT)
    def settle(a, w, s, run, strips):
        """fold; then the maxima to `top`, and -inf in the rows that fill the last group of keys."""
        scale, n = fold(a, w, s, run, strips), run[2]
        if not (load_i64(a, P.fold_full) if run[0] == FULL else load_i64(a, P.fold_partial)):
            if strips == STRIPS:
                highest_of_all(s, w + LANES.top, n, scale)
            else:
                for strip in range(strips):
                    at = strip * STRIP * 4
                    highest(s + at, w + LANES.top + at, n, scale)
        last = (n + GROUP - 1) // GROUP * GROUP
        fill(s + n * ROW, (last - n) * BLOCK_ROWS, f32(-math.inf))
        return scale

    return fold, settle


@kernel
def build_pair_attend(isa: Isa, micro: Micro, loops: Loops) -> Any:
    """attend of `forward_kernel`, on pairs."""
    pairs = Pairs(isa)
    shared: PairLoops = build_pair_loops(isa, pairs)
    scores, weighted, turn, pack = shared.scores, shared.weighted, shared.turn, shared.pack
    _, settle = build_settle(pairs, loops.fill)
    advance, wide_exponentials = pairs.advance, micro.exponentials()
    exponentials, exponentials_of_all = pairs.exponentials(1), pairs.exponentials(STRIPS)
    zip_tile, rescale, lanes = pairs.zip_tile, pairs.rescale, isa.lanes
    fill, drop, next_run, lift = loops.fill, loops.drop, loops.next_run, pairs.lift

    @njit(**JIT)
    def absorb(a, w, seg, tiles, run, turned, strips, factor):
        """One block into (m, l, acc): tiles = (score tile, acc), run = (class, first key, keys)."""
        s, acc = tiles
        whole, dim_v = (run[2] + GROUP - 1) // GROUP * GROUP, load_i64(a, P.head_dim_v)
        for x in range(0, strips * STRIP, lanes):
            at = w + x * 4
            advance(at + LANES.top, at + LANES.m, at + LANES.pivot, at + LANES.l, at + LANES.alpha)
            rescale(acc + x * 4, at + LANES.alpha, dim_v)
        if load_i64(a, P.dropout):
            for strip in range(strips):
                at = strip * STRIP * 4
                if factor != f32(1.0):
                    lift(s + at, whole, factor)
                wide_exponentials(s + at, s + at, ROW, w + LANES.pivot + at, w + LANES.l + at, whole)
            drop(a, w, seg, s, run[1], run[2], strips)
            for strip in range(strips):
                zip_tile(s + strip * STRIP * 4, whole // 2)
        elif strips == STRIPS:
            exponentials_of_all(s, w + LANES.pivot, w + LANES.l, whole // 2, factor)
        else:
            for strip in range(strips):
                at = strip * STRIP * 4
                exponentials(s + at, w + LANES.pivot + at, w + LANES.l + at, whole // 2, factor)
        weighted(turned, dim_v, s, run[2], acc, strips)

    @njit(**JIT)
    def attend(a, w, seg, rows, heads, keys, strips):
        """All blocks of the keys [keys[0], keys[1]) for the block of rows set up in the scratch."""
        dim, dim_v, block = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v), load_i64(a, P.key_block)
        end, end_v = (dim + GROUP - 1) // GROUP * GROUP, (dim_v + GROUP - 1) // GROUP * GROUP
        acc = w + LANES.tile
        qp = acc + end_v * ROW
        s = qp + end // 2 * ROW
        spare = s + block * ROW
        turned = spare + GROUP * max(end, end_v) * 2
        k_row, v_row, key0 = load_i64(a, P.k_n), load_i64(a, P.v_n), load_i64(seg, SEGMENT.key0)
        b = load_i64(seg, SEGMENT.tensor_kv)
        k = load_i64(a, P.k) + b * load_i64(a, P.k_b) + heads * load_i64(a, P.k_h) + key0 * k_row
        v = load_i64(a, P.v) + b * load_i64(a, P.v_b) + heads * load_i64(a, P.v_h) + key0 * v_row
        ready = load_i64(a, P.turned_v)
        if ready:
            groups = (load_i64(seg, SEGMENT.keys) + GROUP - 1) // GROUP
            ready += (
                (load_i64(seg, SEGMENT.first_group) * load_i64(a, P.heads_kv) + heads * groups) * end_v * 64
            )
        pack(w + LANES.row_address, dim, qp, f32(1.0), strips)
        fill(acc, dim_v * BLOCK_ROWS, f32(0.0))
        fill(w + LANES.m, BLOCK_ROWS, f32(-math.inf))
        fill(w + LANES.l, BLOCK_ROWS, f32(0.0))
        j = keys[0]
        while j < keys[1]:
            kind, n = next_run(a, w, rows, j, keys[1], block)
            if kind != EMPTY:
                scores(k + j * k_row, k_row, n, dim, qp, s, strips, spare)
                run = (kind, j, n)
                factor = settle(a, w, s, run, strips)
                if ready:
                    absorb(a, w, seg, (s, acc), run, ready + j // GROUP * end_v * 64, strips, factor)
                else:
                    turn(v + j * v_row, v_row, n, dim_v, turned, spare)
                    absorb(a, w, seg, (s, acc), run, turned, strips, factor)
            j += n

    return attend


@kernel
def build_turn(isa: Isa, dtype: str) -> Any:
    """The worker that turns v before the pass, 32 keys of all KV heads of a segment a task."""
    shared = build_pair_loops(isa, Pairs(isa))
    turn = shared.turn

    def turn_values(a):
        w = load_i64(a, P.scratch) + take(a + P.thread * 8) * load_i64(a, P.scratch_bytes)
        dim, row, heads = load_i64(a, P.head_dim_v), load_i64(a, P.v_n), load_i64(a, P.heads_kv)
        size = (dim + GROUP - 1) // GROUP * GROUP * 64
        while True:
            task = take(a + P.task * 8)
            if task >= load_i64(a, P.num_tasks):
                break
            low, high, base = 0, load_i64(a, P.num_segments), load_i64(a, P.segments)
            while high - low > 1:
                middle = (low + high) // 2
                if load_i64(base + middle * SEGMENT.size * 8, SEGMENT.first_group) <= task:
                    low = middle
                else:
                    high = middle
            seg = base + low * SEGMENT.size * 8
            first, keys = load_i64(seg, SEGMENT.first_group), load_i64(seg, SEGMENT.keys)
            j, groups = (task - first) * GROUP, (keys + GROUP - 1) // GROUP
            v = load_i64(a, P.v) + load_i64(seg, SEGMENT.tensor_kv) * load_i64(a, P.v_b)
            v += (load_i64(seg, SEGMENT.key0) + j) * row
            for head in range(heads):
                to = load_i64(a, P.turned_v) + (first * heads + head * groups + task - first) * size
                turn(v + head * load_i64(a, P.v_h), row, min(GROUP, keys - j), dim, to, w)

    return turn_values
