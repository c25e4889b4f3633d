"""Keys and values of 2-byte types as float32, once for all blocks of rows that meet them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import njit

from tilewise.backends.cpu.isa import LINE
from tilewise.backends.cpu.loops import JIT, build_loops, kernel
from tilewise.backends.cpu.micro import Micro, load_i64, take
from tilewise.backends.cpu.pair_launch import GROUP
from tilewise.backends.cpu.parameters import SEGMENT, P

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa


@njit(**JIT)
def widened_rows(a, seg, head):
    """(k, row bytes, v, row bytes) of a head of a segment: all its keys, in whole groups, then all its values, each
    row a line longer than it is, since rows a power of two apart fall into a few of the cache's sets."""
    groups = (load_i64(seg, SEGMENT.keys) + GROUP - 1) // GROUP
    row, row_v = load_i64(a, P.head_dim) * 4, load_i64(a, P.head_dim_v) * 4 + LINE
    before = load_i64(seg, SEGMENT.first_group) * load_i64(a, P.heads_kv) + head * groups
    k = load_i64(a, P.turned_v) + before * GROUP * (row + row_v)
    return k, row, k + groups * GROUP * row, row_v


@kernel
def build_widen(isa: Isa, dtype: str) -> Any:
    """The worker that widens before the pass, 32 keys of all KV heads of a segment a task."""
    loops = build_loops(isa, Micro(isa, dtype))
    widen = loops.widen

    def widen_keys(a):
        dim, dim_v, row, row_v = (
            load_i64(a, P.head_dim),
            load_i64(a, P.head_dim_v),
            load_i64(a, P.k_n),
            load_i64(a, P.v_n),
        )
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
            j = (task - load_i64(seg, SEGMENT.first_group)) * GROUP
            b, key0 = load_i64(seg, SEGMENT.tensor_kv), load_i64(seg, SEGMENT.key0) + j
            n = min(GROUP, load_i64(seg, SEGMENT.keys) - j)
            for head in range(load_i64(a, P.heads_kv)):
                k, to_row, v, to_row_v = widened_rows(a, seg, head)
                at = load_i64(a, P.k) + b * load_i64(a, P.k_b) + head * load_i64(a, P.k_h) + key0 * row
                widen(at, row, n, dim, k + j * to_row, to_row)
                at = load_i64(a, P.v) + b * load_i64(a, P.v_b) + head * load_i64(a, P.v_h) + key0 * row_v
                widen(at, row_v, n, dim_v, v + j * to_row_v, to_row_v)

    return widen_keys
