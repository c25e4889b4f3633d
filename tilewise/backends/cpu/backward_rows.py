"""What a block of rows brings to the backward pass: its operands, and what it knows of all its keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numba import njit

from tilewise.backends.cpu.backward_micro import BackwardMicro
from tilewise.backends.cpu.isa import BLOCK_ROWS, STRIP
from tilewise.backends.cpu.loops import JIT, f32, kernel
from tilewise.backends.cpu.micro import ROW, load_f32, load_i32, load_i64, store_f32, store_i64
from tilewise.backends.cpu.parameters import LANES, SEGMENT, P


class Operands(NamedTuple):
    """How a storage type is multiplied: in float32 (`backward_kernel`) or as bf16 pairs (`pair_backward`).

    areas(a, w) -> addresses of (q and do transposed, q and do natural, out transposed, s, dp, two spare areas,
    dk and dv of the super-block), then the sizes of a row of dk and of dv, then room for s and dp of a super-block
    where it `keeps` them between passes. asks: 1 if products ask for what slopes read of leaves. lane_dot(do, out,
    D_v, to): delta of all rows. turn_keys(a, k, row bytes, v, row bytes, keys, areas) once per super-block. products,
    fold, tile: as their texts say.
    """

    lanes: int
    keeps: bool
    asks: int
    areas: Any
    pack: Any
    natural: Any
    lane_dot: Any
    turn_keys: Any
    products: Any
    fold: Any
    tile: Any


@kernel
def build_prepare(operands: Operands) -> Any:
    """prepare(...): what a block of rows brings to each of its tiles."""
    natural, pack, lane_dot = operands.natural, operands.pack, operands.lane_dot

    @njit(**JIT)
    def prepare(a, w, seg, tiles, first):
        """The block of rows: q and do both ways, lse and delta = sum_d do out - dlse per lane.

        delta is summed in the order in which dp is. Where `exact`, `statistics` follows."""
        qt, gt, qn, gn, ot = tiles
        dim, dim_v = load_i64(a, P.head_dim), load_i64(a, P.head_dim_v)
        group, packed = load_i64(a, P.group), load_i64(a, P.packed)
        count = load_i64(seg, SEGMENT.rows) * (group if packed else 1) - first
        tensor_b, row0 = load_i64(seg, SEGMENT.tensor_b), load_i64(seg, SEGMENT.row0)
        for x in range(BLOCK_ROWS):
            h, i = load_i32(w + LANES.h, x), row0 + load_i32(w + LANES.i, x)
            at = tensor_b * load_i64(a, P.out_b) + h * load_i64(a, P.out_h) + i * load_i64(a, P.out_n)
            store_i64(w + LANES.out_address, x, load_i64(a, P.out) + at)
            lse = load_f32(load_i64(a, P.lse) + tensor_b * load_i64(a, P.lse_b) + h * load_i64(a, P.lse_h), i)
            # A row that saw nothing has lse = -inf: +inf instead makes every weight 0. So do lanes past the end.
            dead = x >= count or lse == f32(-math.inf)
            store_f32(w + LANES.m, x, f32(math.inf) if dead else lse)
        strips = BLOCK_ROWS // STRIP
        pack(w + LANES.out_address, dim_v, ot, f32(1.0), strips)
        for x in range(BLOCK_ROWS):
            h, i = load_i32(w + LANES.h, x), row0 + load_i32(w + LANES.i, x)
            at = tensor_b * load_i64(a, P.do_b) + h * load_i64(a, P.do_h) + i * load_i64(a, P.do_n)
            store_i64(w + LANES.out_address, x, load_i64(a, P.do) + at)
        # Rows are read one after another first: packing reads several at once, which no prefetcher follows.
        natural(w + LANES.row_address, dim, qn)
        natural(w + LANES.out_address, dim_v, gn)
        pack(w + LANES.row_address, dim, qt, load_f32(a, 2 * P.scale), strips)
        pack(w + LANES.out_address, dim_v, gt, f32(1.0), strips)
        lane_dot(gt, ot, dim_v, w + LANES.delta)
        dlse = load_i64(a, P.dlse)
        for x in range(BLOCK_ROWS):
            h, i = load_i32(w + LANES.h, x), row0 + load_i32(w + LANES.i, x)
            delta = load_f32(w + LANES.delta, x)
            if dlse:
                delta -= load_f32(dlse + tensor_b * load_i64(a, P.dlse_b) + h * load_i64(a, P.dlse_h), i)
            store_f32(w + LANES.delta, x, f32(0.0) if load_f32(w + LANES.m, x) == f32(math.inf) else delta)
            store_f32(w + LANES.low, x, f32(0.0))
            store_f32(
                w + LANES.sink, x, load_f32(load_i64(a, P.sink), h) if load_i64(a, P.sink) else f32(-math.inf)
            )

    return prepare


@kernel
def build_statistics(micro: BackwardMicro, operands: Operands) -> tuple[Any, Any, Any]:
    """statistics, settle_rows, write_sink: what a row knows of all its keys."""
    products, fold, lanes = operands.products, operands.fold, micro.lanes
    advance, exponentials = micro.advance, micro.exponentials()
    weigh, settle, sink_slope = micro.weigh, micro.settle, micro.sink_slope

    @njit(**JIT)
    def statistics(a, w, seg, tiles, buffers, run, sources, p):
        """One block of keys into m, l and delta of the rows, afresh from q, k, v and do. p: room for the weights."""
        s, dp = buffers[0], buffers[1]
        products(a, w, seg, tiles, buffers, run, sources)
        fold(a, w, s, run)
        for x in range(0, BLOCK_ROWS, lanes):
            at = w + x * 4
            advance(at + LANES.top, at + LANES.m, at + LANES.pivot, at + LANES.l, at + LANES.alpha)
        for x in range(0, BLOCK_ROWS, STRIP):
            exponentials(s + x * 4, p + x * 4, ROW, w + LANES.pivot + x * 4, w + LANES.l + x * 4, run[2])
        for x in range(0, BLOCK_ROWS, lanes):
            weigh(p + x * 4, dp + x * 4, w + LANES.alpha + x * 4, w + LANES.delta + x * 4, run[2])

    @njit(**JIT)
    def settle_rows(a, w, seg, first):
        """After the statistics: m and ln l apart, delta with dlse; and lanes past the last row die."""
        group, packed = load_i64(a, P.group), load_i64(a, P.packed)
        count = load_i64(seg, SEGMENT.rows) * (group if packed else 1) - first
        for x in range(0, BLOCK_ROWS, lanes):
            at = w + x * 4
            settle(at + LANES.m, at + LANES.l, at + LANES.sink, at + LANES.low, at + LANES.delta)
        dlse = load_i64(a, P.dlse)
        for x in range(BLOCK_ROWS):
            if x >= count:
                store_f32(w + LANES.m, x, f32(math.inf))
            elif dlse:
                h, i = load_i32(w + LANES.h, x), load_i64(seg, SEGMENT.row0) + load_i32(w + LANES.i, x)
                at = (
                    dlse + load_i64(seg, SEGMENT.tensor_b) * load_i64(a, P.dlse_b) + h * load_i64(a, P.dlse_h)
                )
                store_f32(w + LANES.delta, x, load_f32(w + LANES.delta, x) - load_f32(at, i))

    @njit(**JIT)
    def write_sink(a, w, seg, first):
        """ds of the sink, row by row; every task that meets a row writes the same bits."""
        group, packed = load_i64(a, P.group), load_i64(a, P.packed)
        count = load_i64(seg, SEGMENT.rows) * (group if packed else 1) - first
        for x in range(0, BLOCK_ROWS, lanes):
            at = w + x * 4
            sink_slope(at + LANES.sink, at + LANES.m, at + LANES.low, at + LANES.delta, at + LANES.pivot)
        for x in range(min(count, BLOCK_ROWS)):
            h, i = load_i32(w + LANES.h, x), load_i64(seg, SEGMENT.row0) + load_i32(w + LANES.i, x)
            at = load_i64(seg, SEGMENT.tensor_b) * load_i64(a, P.sink_rows_b) + h * load_i64(a, P.sink_rows_h)
            store_f32(load_i64(a, P.sink_rows) + at, i, load_f32(w + LANES.pivot, x))

    return statistics, settle_rows, write_sink
