"""The backward pass on bf16 pairs: the operands of `backward_kernel`'s schedule.

    s = k q, dp = v do (pairs along the head) -> p and ds in bf16: rows for dv += p do and dk += ds q (pairs of
    rows of q and do), pairs of keys for dq += k^T ds, k turned once per super-block

p and ds overwrite the first half of their float32 rows. Sums stay in float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numba import njit, types

from tilewise.backends.cpu.backward_micro import BackwardMicro
from tilewise.backends.cpu.backward_rows import Operands
from tilewise.backends.cpu.isa import BLOCK_ROWS, STRIP
from tilewise.backends.cpu.loops import FULL, JIT, Loops, f32, kernel
from tilewise.backends.cpu.micro import ROW, indirect, load_f32, load_i64
from tilewise.backends.cpu.pair_forward import STRIPS, build_settle
from tilewise.backends.cpu.pair_launch import GROUP
from tilewise.backends.cpu.pair_loops import build_pair_loops
from tilewise.backends.cpu.pairs import Pairs
from tilewise.backends.cpu.parameters import LANES, P

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

call_slopes = indirect(types.void, 9)


@kernel
def build_areas(pairs: Pairs, turn: Any) -> tuple[Any, Any, Any]:
    """areas, turn_keys and lane_dot of `Operands`. The first spare area holds ds in pairs, the second k turned;
    out's place also takes a group's copy, which is needed at other times."""
    dot, lanes = pairs.lane_dot, pairs.isa.lanes

    @njit(**JIT)
    def areas(a, w):
        dim, dim_v, block = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v), load_i64(a, P.key_block)
        end, end_v = (dim + GROUP - 1) // GROUP * GROUP, (dim_v + GROUP - 1) // GROUP * GROUP
        qp = w + LANES.tile
        gp = qp + end // 2 * ROW
        qn = gp + end_v // 2 * ROW
        gn = qn + end * BLOCK_ROWS * 2
        op = gn + end_v * BLOCK_ROWS * 2
        s = op + max(end_v // 2 * ROW, 2 * GROUP * max(end, end_v))
        dp = s + block * ROW
        slopes = dp + block * ROW
        turned = slopes + block // 2 * ROW
        sum_k = turned + load_i64(a, P.superblock) * end * 2
        sum_v = sum_k + load_i64(a, P.superblock) * end * 4
        return qp, gp, qn, gn, op, s, dp, slopes, turned, sum_k, sum_v, end, end_v, 0

    @njit(**JIT)
    def turn_keys(a, k, k_row, v, v_row, keys, areas):
        turn(k, k_row, keys, load_i64(a, P.head_dim), areas[8], areas[4])

    @njit(**JIT)
    def lane_dot(x, y, dim_v, to):
        for at in range(0, ROW, lanes * 4):
            dot(x + at, y + at, (dim_v + GROUP - 1) // GROUP * GROUP // 2, to + at)

    return areas, turn_keys, lane_dot


@kernel
def build_pair_operands(isa: Isa, micro: BackwardMicro, loops: Loops) -> Operands:
    """The products on pairs."""
    pairs = Pairs(isa)
    shared = build_pair_loops(isa, pairs)
    scores, weighted, outer = shared.scores, shared.weighted, shared.outer
    fill, drop, lift, lanes = loops.fill, loops.drop, pairs.lift, isa.lanes
    fold_tile, settle = build_settle(pairs, fill)
    areas, turn_keys, lane_dot = build_areas(pairs, shared.turn)
    wide_slopes, fused, rounded = micro.slopes(), pairs.slopes(True), pairs.slopes(False)

    @njit(**JIT)
    def products(a, w, seg, tiles, buffers, run, sources):
        """Raw s and dp of one block of keys. run = (class, first key, keys); the copy of a group stands at tiles[4]."""
        s, dp, n = buffers[0], buffers[1], run[2]
        scores(sources[2], sources[3], n, load_i64(a, P.head_dim_v), tiles[1], dp, STRIPS, tiles[4])
        scores(sources[0], sources[1], n, load_i64(a, P.head_dim), tiles[0], s, STRIPS, tiles[4])
        if load_i64(a, P.dropout):
            drop(a, w, seg, dp, run[1], n, STRIPS)

    @njit(**JIT)
    def lift_all(s, keys, factor):
        if factor != f32(1.0):
            for strip in range(STRIPS):
                lift(s + strip * STRIP * 4, keys, factor)

    @njit(**JIT)
    def fold(a, w, s, run):
        """Scale, terms and mask over the tile of scores, by its class; and the rows' maxima."""
        lift_all(s, run[2], settle(a, w, s, run, STRIPS))

    @njit(**JIT)
    def weights(a, w, seg, buffers, run, task):
        """p and ds from s and dp, as bf16 rows in their places, and ds in pairs."""
        s, dp, n = buffers[0], buffers[1], run[2]
        whole = (n + GROUP - 1) // GROUP * GROUP
        slope, dropout = (
            load_i64(a, P.slopes_full if run[0] == FULL else P.slopes_partial),
            load_i64(a, P.dropout),
        )
        factor = load_f32(a, 2 * P.scale)
        at = (w + LANES.m, w + LANES.low, w + LANES.delta)
        if slope:
            lift_all(s, n, factor)
            call_slopes(
                slope, load_i64(a, P.spec), w, s, dp, n, run[1], STRIPS, load_i64(a, P.leaf_parts), task
            )
        else:
            factor = fold_tile(a, w, s, run, STRIPS)
            if not dropout:
                fill(s + n * ROW, (whole - n) * BLOCK_ROWS, f32(-math.inf))
                fill(dp + n * ROW, (whole - n) * BLOCK_ROWS, f32(0.0))
                fused(s, dp, buffers[2], at[0], at[1], at[2], whole // 2, factor)
                return
            lift_all(s, n, factor)
            for x in range(0, ROW, 4 * lanes):
                wide_slopes(s + x, dp + x, at[0] + x, at[1] + x, at[2] + x, n)
        if dropout:
            drop(a, w, seg, s, run[1], n, STRIPS)
        fill(s + n * ROW, (whole - n) * BLOCK_ROWS, f32(0.0))
        fill(dp + n * ROW, (whole - n) * BLOCK_ROWS, f32(0.0))
        rounded(s, dp, buffers[2], at[0], at[1], at[2], whole // 2, f32(1.0))

    @njit(**JIT)
    def tile(a, w, seg, tiles, buffers, run, sources, task, kept):
        """One block of keys: p and ds from s and dp, then the three products. sources as in `backward_kernel`."""
        dim, dim_v, n = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v), run[2]
        products(a, w, seg, tiles, buffers, run, sources)
        weights(a, w, seg, buffers, run, task)
        outer(buffers[0], tiles[3], dim_v, sources[5], n)
        outer(buffers[1], tiles[2], dim, sources[4], n)
        turned = buffers[3] + sources[7] * ((dim + GROUP - 1) // GROUP * GROUP) * 2
        weighted(turned, dim, buffers[2], n, sources[6], STRIPS)

    return Operands(
        lanes, False, 0, areas, shared.pack, shared.natural, lane_dot, turn_keys, products, fold, tile
    )
