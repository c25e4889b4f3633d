"""Where the rows of keys begin: rows in one piece, or in pages that a table names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import njit, types

from tilewise.backends.cpu.loops import JIT, kernel
from tilewise.backends.cpu.micro import Micro, load_i32, load_i64, store_f32
from tilewise.backends.cpu.parameters import SEGMENT, P

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa


@kernel
def build_sources(micro: Micro) -> tuple[Any, Any]:
    """sources(...): how the keys of a task's head lie; rows_of(...): where the rows of some of them begin."""
    ramp = micro.ramp

    @njit(**JIT)
    def sources(a, seg, head):
        """(k, v), each (first row of the sequence or of page 0, bytes of a row, of a page, table of pages or 0, page
        size, pages)."""
        key0, b, table = (
            load_i64(seg, SEGMENT.key0),
            load_i64(seg, SEGMENT.tensor_kv),
            load_i64(seg, SEGMENT.pages),
        )
        size, pages = load_i64(a, P.page_size), load_i64(a, P.num_pages)
        row, page_bytes = load_i64(a, P.k_n), load_i64(a, P.k_b)
        base = load_i64(a, P.k) + b * page_bytes + head * load_i64(a, P.k_h) + key0 * row
        row_v, page_bytes_v = load_i64(a, P.v_n), load_i64(a, P.v_b)
        base_v = load_i64(a, P.v) + b * page_bytes_v + head * load_i64(a, P.v_h) + key0 * row_v
        return (base, row, page_bytes, table, size, pages), (base_v, row_v, page_bytes_v, table, size, pages)

    @njit(**JIT)
    def rows_of(source, keys, count, to):
        """The addresses of keys[0] and `count` - 1 after it; from keys[1] on, that of the key before keys[1]. Room: for
        lanes / 2 more."""
        base, row, page_bytes, table, size, pages = source
        there = min(count, keys[1] - keys[0])
        if table == 0:
            ramp(to, there, base + keys[0] * row, row)
        else:
            x, page = 0, keys[0] // size
            skipped = keys[0] - page * size
            while x < there:
                # What a table holds is never trusted.
                number = max(0, min(types.int64(load_i32(table, page)), pages - 1))
                at = base + number * page_bytes + skipped * row
                n = min(size - skipped, there - x)
                ramp(to + x * 8, n, at, row)
                x += n
                skipped, page = 0, page + 1
        ramp(to + there * 8, count - there, load_i64(to, there - 1), 0)

    return sources, rows_of


@kernel
def build_gather(isa: Isa, micro: Micro) -> Any:
    """gather(source, keys, n, dim, to, row bytes, listed): n rows from key keys[0] on as float32, in one piece.

    `listed` has room for n addresses, and some more."""
    lanes, size = isa.lanes, micro.size
    widen_vector, element_load = micro.widen_vector, micro.element_load
    _, rows_of = build_sources(micro)

    @njit(**JIT)
    def gather(source, keys, n, dim, to, to_bytes, listed):
        rows_of(source, keys, n, listed)
        for r in range(n):
            at, row = load_i64(listed, r), to + r * to_bytes
            d = 0
            while d + lanes <= dim:
                widen_vector(at + d * size, row + d * 4)
                d += lanes
            while d < dim:
                store_f32(row, d, element_load(at, d))
                d += 1

    return gather
