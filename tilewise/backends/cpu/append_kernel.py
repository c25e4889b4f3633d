"""New keys and values into the pools of a cache, turned to their positions, and queries turned beside them, in Numba.

Where a key has no place nothing is written: every thread looks at all sequences before it writes, and leaves a flag.
The angles' products are rounded one by one, as `tilewise.rotary.turn` does, so that bits are those of the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir
from numba import njit, types

from tilewise.backends.cpu.loops import JIT, kernel
from tilewise.backends.cpu.micro import Micro, _emit, _void, load_f32, load_i32, load_i64, store_i64, take
from tilewise.backends.cpu.parameters import _slots
from tilewise.backends.cpu.words import I16, I32

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa
    from tilewise.backends.cpu.words import Words

A = _slots(
    "A",
    "task thread flag num_tasks k_new kn_b kn_h kn_n v_new vn_b vn_h vn_n k k_p k_h k_n v v_p v_h v_n "
    "q q_b q_h q_n out o_b o_h o_n lengths first table table_b edges edges_q cos cos_n sin sin_n "
    "batch total tokens rows total_q heads_kv heads page_size pages capacity positions half pairs dim dim_v chunk "
    "chunks chunks_q count",
)
"""An append. edges, edges_q: addresses of cu_seqlens, 0 where every sequence has `tokens` new keys and `rows`
queries; total, total_q: tokens of the tensors. pairs: whether the numbers that turn are neighbours. A task is `chunk`
tokens of a sequence, `chunks` of keys and then `chunks_q` of queries. count: of the slots."""


class AppendMicro(Micro):
    """The intrinsics of copying and turning rows."""

    @property
    def move_vector(self) -> Any:
        """move(row, to): as many bytes as a vector has."""

        def body(b: ir.IRBuilder, row: ir.Value, to: ir.Value) -> None:
            w = self.words(b)
            w.store(w.load(row, 0, w.i), to)

        return _emit(_void(2), body, "row, to")

    @property
    def move_number(self) -> Any:
        """move(row, to): one stored number."""
        kind = I16 if self.size == 2 else I32

        def body(b: ir.IRBuilder, row: ir.Value, to: ir.Value) -> None:
            w = self.words(b)
            w.store(w.load(row, 0, kind), to)

        return _emit(_void(2), body, "row, to")

    def _turned(
        self, w: Words, a: ir.Value, c: ir.Value, cos: ir.Value, sin: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        b = w.b
        x, y = w.load(cos), w.load(sin)
        return b.fsub(b.fmul(a, x), b.fmul(c, y)), b.fadd(b.fmul(a, y), b.fmul(c, x))

    @property
    def turn_halves(self) -> Any:
        """turn(a, b, cos, sin, to a, to b): a vector of pairs (a, b) that lie apart, cos and sin float32."""

        def body(b: ir.IRBuilder, *at: ir.Value) -> None:
            w = self.words(b)
            found = self._turned(w, *[w.widen(x, 0, self.dtype) for x in at[:2]], *at[2:4])
            for value, to in zip(found, at[4:], strict=True):
                w.store(w.narrow(value, self.dtype), to)

        return _emit(_void(6), body, "x, y, cos, sin, to_x, to_y")

    @property
    def turn_pairs(self) -> Any:
        """turn(row, cos, sin, to): a vector of pairs of neighbours."""

        def body(b: ir.IRBuilder, row: ir.Value, cos: ir.Value, sin: ir.Value, to: ir.Value) -> None:
            w = self.words(b)
            step = self.lanes * self.size
            low, high = (w.widen(row, n * step, self.dtype) for n in (0, 1))
            apart = [ir.Constant(w.i, list(range(n, 2 * self.lanes, 2))) for n in (0, 1)]
            found = self._turned(w, *[b.shuffle_vector(low, high, order) for order in apart], cos, sin)
            for n in (0, 1):
                first = n * self.lanes // 2
                order = [first + k // 2 + k % 2 * self.lanes for k in range(self.lanes)]
                joined = b.shuffle_vector(*found, ir.Constant(w.i, order))
                w.store(w.narrow(joined, self.dtype), to, n * step)

        return _emit(_void(4), body, "row, cos, sin, to")


@kernel
def build_rows(isa: Isa, micro: AppendMicro) -> tuple[Any, Any]:
    """copy(row, to, numbers) and turn(a, row, to, position)."""
    lanes, size = isa.lanes, micro.size
    vector = 4 * lanes
    move_vector, move_number = micro.move_vector, micro.move_number
    turn_halves, turn_pairs = micro.turn_halves, micro.turn_pairs
    element_load, element_store = micro.element_load, micro.element_store

    @njit(**JIT)
    def copy(row, to, numbers):
        n, end = 0, numbers * size
        while n + vector <= end:
            move_vector(row + n, to + n)
            n += vector
        while n < end:
            move_number(row + n, to + n)
            n += size

    @njit(**JIT)
    def turn(a, row, to, position):
        half, pairs, dim = load_i64(a, A.half), load_i64(a, A.pairs), load_i64(a, A.dim)
        at = max(0, min(position, load_i64(a, A.positions) - 1))
        cos, sin = (
            load_i64(a, A.cos) + at * load_i64(a, A.cos_n),
            load_i64(a, A.sin) + at * load_i64(a, A.sin_n),
        )
        d = 0
        while d + lanes <= half:
            if pairs:
                turn_pairs(row + 2 * d * size, cos + 4 * d, sin + 4 * d, to + 2 * d * size)
            else:
                x, y = d * size, (d + half) * size
                turn_halves(row + x, row + y, cos + 4 * d, sin + 4 * d, to + x, to + y)
            d += lanes
        while d < half:
            x, y = (2 * d, 2 * d + 1) if pairs else (d, d + half)
            first, second = element_load(row, x), element_load(row, y)
            c, s = load_f32(cos, d), load_f32(sin, d)
            element_store(to, x, first * c - second * s)
            element_store(to, y, first * s + second * c)
            d += 1
        copy(row + 2 * half * size, to + 2 * half * size, dim - 2 * half)

    return copy, turn


@kernel
def build_append(isa: Isa, dtype: str) -> Any:
    """The worker: append(parameters)."""
    copy, turn = build_rows(isa, AppendMicro(isa, dtype))

    @njit(**JIT)
    def span(a, edges, b, each):
        """(first token of a sequence in a packed tensor, or 0; its tokens)."""
        address = load_i64(a, edges)
        if address == 0:
            return types.int64(0), load_i64(a, each)
        start = types.int64(load_i32(address, b))
        return start, types.int64(load_i32(address, b + 1)) - start

    @njit(**JIT)
    def page_of(a, b, place):
        table = load_i64(a, A.table)
        if table == 0:
            return b
        return types.int64(load_i32(table + b * load_i64(a, A.table_b), place // load_i64(a, A.page_size)))

    @njit(**JIT)
    def fits(a):
        """Whether every new key has a place, and packed tokens lie in their tensors."""
        size, pages = load_i64(a, A.page_size), load_i64(a, A.pages)
        for b in range(load_i64(a, A.batch)):
            start, added = span(a, A.edges, b, A.tokens)
            start_q, rows = span(a, A.edges_q, b, A.rows)
            before = types.int64(load_i32(load_i64(a, A.lengths), b))
            if start < 0 or added < 0 or start + added > load_i64(a, A.total):
                return False
            if start_q < 0 or rows < 0 or start_q + rows > load_i64(a, A.total_q):
                return False
            if before < 0 or before + added > load_i64(a, A.capacity):
                return False
            place = before // size * size
            while place < before + added and added > 0:
                if not 0 <= page_of(a, b, place) < pages:
                    return False
                place += size
        return True

    @njit(**JIT)
    def position_of(a, b):
        """Position of the first new key of a sequence."""
        first = load_i64(a, A.first)
        return types.int64(load_i32(first if first else load_i64(a, A.lengths), b))

    @njit(**JIT)
    def keys(a, b, chunk):
        start, added = span(a, A.edges, b, A.tokens)
        size, before, at = load_i64(a, A.page_size), load_i32(load_i64(a, A.lengths), b), position_of(a, b)
        for t in range(chunk * load_i64(a, A.chunk), min(added, (chunk + 1) * load_i64(a, A.chunk))):
            place = types.int64(before) + t
            page, row = page_of(a, b, place), place % size
            k = load_i64(a, A.k_new) + b * load_i64(a, A.kn_b) + (start + t) * load_i64(a, A.kn_n)
            v = load_i64(a, A.v_new) + b * load_i64(a, A.vn_b) + (start + t) * load_i64(a, A.vn_n)
            to_k = load_i64(a, A.k) + page * load_i64(a, A.k_p) + row * load_i64(a, A.k_n)
            to_v = load_i64(a, A.v) + page * load_i64(a, A.v_p) + row * load_i64(a, A.v_n)
            for _ in range(load_i64(a, A.heads_kv)):
                if load_i64(a, A.cos):
                    turn(a, k, to_k, at + t)
                else:
                    copy(k, to_k, load_i64(a, A.dim))
                copy(v, to_v, load_i64(a, A.dim_v))
                k, to_k = k + load_i64(a, A.kn_h), to_k + load_i64(a, A.k_h)
                v, to_v = v + load_i64(a, A.vn_h), to_v + load_i64(a, A.v_h)

    @njit(**JIT)
    def queries(a, b, chunk):
        start, rows = span(a, A.edges_q, b, A.rows)
        _, added = span(a, A.edges, b, A.tokens)
        at = position_of(a, b) + added - rows
        for i in range(chunk * load_i64(a, A.chunk), min(rows, (chunk + 1) * load_i64(a, A.chunk))):
            q = load_i64(a, A.q) + b * load_i64(a, A.q_b) + (start + i) * load_i64(a, A.q_n)
            to = load_i64(a, A.out) + b * load_i64(a, A.o_b) + (start + i) * load_i64(a, A.o_n)
            for h in range(load_i64(a, A.heads)):
                turn(a, q + h * load_i64(a, A.q_h), to + h * load_i64(a, A.o_h), at + i)

    def append(a):
        if not fits(a):
            store_i64(a, A.flag, 1)
            return
        chunks, chunks_q = load_i64(a, A.chunks), load_i64(a, A.chunks_q)
        while True:
            task = take(a + A.task * 8)
            if task >= load_i64(a, A.num_tasks):
                break
            b, part = task // (chunks + chunks_q), task % (chunks + chunks_q)
            if part < chunks:
                keys(a, b, part)
            else:
                queries(a, b, part - chunks)

    return append
