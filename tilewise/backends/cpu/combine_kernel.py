"""The merge of the splits of the keys, in Numba: parts of out weighted by their lse, in the order of the splits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numba import njit

from tilewise.backends.cpu.loops import JIT, f32, kernel
from tilewise.backends.cpu.micro import load_f32, load_i64, store_f32, take
from tilewise.backends.cpu.parameters import LANES, SEGMENT, P
from tilewise.backends.cpu.row_micro import RowMicro

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa


@kernel
def build_merge(isa: Isa, micro: RowMicro) -> Any:
    """merge(a, w, seg, h): the rows of one head of a segment from its parts, in the order of the splits."""
    close, exp_ = micro.close, micro.scalar_exp
    mix_narrow, mix_wide = micro.mix, RowMicro(isa, "fp32").mix

    @njit(**JIT)
    def merge(a, w, seg, h):
        heads, total, dim_v = load_i64(a, P.heads), load_i64(a, P.total_rows), load_i64(a, P.head_dim_v)
        splits, tensor_b = load_i64(seg, SEGMENT.splits), load_i64(seg, SEGMENT.tensor_b)
        for i in range(load_i64(seg, SEGMENT.rows)):
            row = load_i64(seg, SEGMENT.row0) + i
            flat = load_i64(seg, SEGMENT.flat) + row
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
            to = load_i64(a, P.out) + tensor_b * load_i64(a, P.out_b)
            to += h * load_i64(a, P.out_h) + row * load_i64(a, P.out_n)
            parts, stride = out + (h * total + flat) * dim_v * 4, heads * total * dim_v * 4
            if load_i64(a, P.wide_out):
                mix_wide(parts, stride, weights, splits, dim_v, inverse, to)
            else:
                mix_narrow(parts, stride, weights, splits, dim_v, inverse, to)

    return merge


@kernel
def build_combine(isa: Isa, dtype: str) -> Any:
    """The worker that merges the splits of the keys, one head of a segment a task; `decode_kernel` merges its own."""
    merge = build_merge(isa, RowMicro(isa, dtype))

    def combine(a):
        w = load_i64(a, P.scratch) + take(a + P.thread * 8) * load_i64(a, P.scratch_bytes)
        heads = load_i64(a, P.heads)
        while True:
            task = take(a + P.task * 8)
            if task >= load_i64(a, P.num_segments) * heads:
                break
            seg = load_i64(a, P.segments) + task // heads * SEGMENT.size * 8
            if load_i64(seg, SEGMENT.splits) > 1:
                merge(a, w, seg, task % heads)

    return combine
