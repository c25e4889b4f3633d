"""Microkernels whose lanes are the numbers of a head: few rows of q meet long keys, which are read once, in order.

A tile of scores that the spec's code folds has the layout of `micro`, one key a row of BLOCK_ROWS float32. Any other is
close, one key a row of STRIP, or of ROWS where there are no more: rows of 256 bytes, of which 16 to 64 are used, lie in
a quarter of the sets of the first-level cache, from which what is read of k and v drove them (a C loop like this one,
Zen 3: 19.2 GB/s at 256 bytes, 22.8 at 64 and 16). Rows of q and sums of v are row-major here. A head whose size is no
multiple of the vector ends in a vector that overlaps the one before it; there q is 0 where it overlaps.

Keys are given by the addresses of their rows, so that rows in pages are read as rows in one piece are.

Each intrinsic asks for the memory that is needed next: reading, not arithmetic, is what these loops wait for. Lines are
asked for in order: a line here and a line there, as the products go, memory gave two thirds of what it gives a plain
loop that reads on (measured on Zen 3, 9.8 and 15 GB/s a core), and the time of the products was added to that of
reading.

bf16 numbers come in pairs: one load, the even ones by a shift, the odd ones by a mask. So rows of q and sums of v hold
the even numbers of two vectors, then the odd ones; `pack_row` and `finish_row` turn them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir
from numba.core import cgutils

from tilewise.backends.cpu.ahead import ASKED, Ahead
from tilewise.backends.cpu.isa import LINE
from tilewise.backends.cpu.micro import Micro, _emit, _void, f32, i64
from tilewise.backends.cpu.rows_in_order import HEADS, scores_by_key
from tilewise.backends.cpu.words import F32, I1, I8, I32, I64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tilewise.backends.cpu.words import Words

ROWS = 4
"""Rows of q that share a vector of k or v: 4 x 2 sums hide the latency of a multiply-add on AVX2."""
TURNS, TURN = {16: 1}, 4
"""Keys of one turn of `weighted`, by lanes, and those of others: what a turn costs beside its products counts where a
neighbour shares the core (Zen 3). On Zen 5 lines asked for one by one count more: two keys a turn, and as many lines at
once, take 1.02 of the time, four 1.04, eight 1.2."""
WEIGHED = 2
"""Lines of v asked for beside each vector of weights."""
TOUCHED = 4
"""Lines at the beginning of a page that are asked for early: with one, what fetches ahead by itself begins later."""


def keys_at_once(lanes: int, rows: int) -> int:
    """Keys of one step of `scores`. On AVX2 twelve sums: eight are no more than two multiply-adds a cycle need that
    take four, and gave half the rate of twelve (measured on Zen 3)."""
    return {(16, 4): 4, (8, 4): 3, (4, 4): 2, (16, 1): 16, (8, 1): 8, (4, 1): 8}[lanes, rows]


class RowMicro(Micro):
    """The intrinsics of one target and one storage type, lanes along the head."""

    @property
    def paired(self) -> int:
        """Vectors that are loaded together."""
        return 2 if self.dtype == "bf16" else 1

    @property
    def spread(self) -> bool:
        """Whether `scores` asks for rows between its products, and not for a group's at once.

        On Zen 5 1.02 to 1.09 times the speed, asked for 8 KiB ahead; AVX2 is as it was tuned on Zen 3."""
        return self.lanes == 16

    @property
    def turn(self) -> int:
        """Keys of one turn of `weighted`."""
        return TURNS.get(self.lanes, TURN)

    def _numbers(self, w: Words, base: ir.Value, count: int) -> list[ir.Value]:
        """`count` vectors of consecutive stored numbers, in pairs where they come in pairs."""
        return [self._number(w, base, n, count) for n in range(count)]

    def _number(self, w: Words, base: ir.Value, n: int, count: int) -> ir.Value:
        """Vector `n` of them."""
        step = self.lanes * self.size
        if self.paired == 1 or count == 1:
            return w.widen(base, n * step, self.dtype)
        both = w.load(base, n // 2 * 2 * step, w.i)
        number = w.b.and_(both, w.n(-(2**16))) if n % 2 else w.b.shl(both, w.n(16))
        return w.b.bitcast(number, w.f)

    def ask(self, b: ir.IRBuilder, row: ir.Value, lines: ir.Value) -> None:
        """Ask for the lines of a row, all at once."""
        with cgutils.for_range(b, b.sdiv(lines, I64(4)), intp=I64) as four:
            for n in range(4):
                self.prefetch(b, b.add(row, b.add(b.mul(four.index, I64(4 * LINE)), I64(n * LINE))))
        with cgutils.for_range(b, b.srem(lines, I64(4)), intp=I64) as line:
            self.prefetch(b, b.add(row, b.mul(b.sub(lines, b.add(line.index, I64(1))), I64(LINE))))

    def prefetch(self, b: ir.IRBuilder, address: ir.Value) -> None:
        pointer = b.inttoptr(address, I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        name = "llvm.prefetch.p0"
        called = b.module.globals.get(name) or ir.Function(b.module, kind, name)
        b.call(called, [pointer, I32(0), I32(3), I32(1)])

    @functools.cached_property
    def touch(self) -> Any:
        """touch(address): ask for the first lines there."""

        def body(b, address):
            for n in range(TOUCHED):
                self.prefetch(b, b.add(address, I64(n * LINE)))

        return _emit(_void(1), body, "address")

    def _sums(self, w: Words, count: int) -> list[ir.Value]:
        cells = [cgutils.alloca_once(w.b, w.f) for _ in range(count)]
        for cell in cells:
            w.b.store(w.k(0.0), cell)
        return cells

    def _exchanged(
        self, w: Words, vectors: list[ir.Value], low: list[int], high: list[int]
    ) -> list[ir.Value]:
        """The sums of two exchanges of each two vectors."""
        pairs = zip(vectors[0::2], vectors[1::2], strict=True)
        found = [
            [w.b.shuffle_vector(a, c, ir.Constant(w.i, order)) for order in (low, high)] for a, c in pairs
        ]
        return [w.b.fadd(*parts) for parts in found]

    def _fours(self, w: Words, vectors: list[ir.Value]) -> list[ir.Value]:
        """For each four vectors one, every four lanes of which add up four lanes of each: a0 c0 a1 c1 + a2 c2 a3 c3,
        then pairs of those. One cheap instruction exchanges lanes inside four."""
        fours = range(0, self.lanes, 4)
        orders = [[k + n // 2 + n % 2 * self.lanes for k in fours for n in range(m, m + 4)] for m in (0, 4)]
        vectors = self._exchanged(w, vectors, *orders)
        orders = [[k + m + n % 2 + n // 2 * self.lanes for k in fours for n in range(4)] for m in (0, 2)]
        return self._exchanged(w, vectors, *orders)

    def _fold_lanes(self, w: Words, vectors: list[ir.Value]) -> ir.Value:
        """One vector whose lane n is the sum of the lanes of vectors[n]."""
        vectors, step = self._fours(w, vectors), 4
        while step < self.lanes:
            low = [k - step + self.lanes if k & step else k for k in range(self.lanes)]
            vectors = self._exchanged(w, vectors, low, [k + step for k in low])
            step *= 2
        return vectors[0]

    def _chunks(
        self, b: ir.IRBuilder, dim: ir.Value, counts: tuple[int, ...] = (1,)
    ) -> Iterator[tuple[ir.Value, ir.Value, int, ir.Value]]:
        """(first number, its place in packed rows, vectors, number of the step) of pieces of a row: as many of
        `counts[0]` vectors as there are, then of `counts[1]` and so on, and the overlapping end last."""
        done = I64(0)
        for count in counts:
            width = I64(count * self.lanes)
            steps = b.sdiv(b.sub(dim, done), width)
            with cgutils.for_range(b, steps, intp=I64) as loop:
                at = b.add(done, b.mul(loop.index, width))
                yield at, at, count, loop.index
            done = b.add(done, b.mul(steps, width))
        with b.if_then(b.icmp_signed("<", done, dim)):
            yield b.sub(dim, I64(self.lanes)), done, 1, I64(-1)

    def _pieces(self, most: int) -> tuple[int, ...]:
        """Vectors of the pieces of a row: `most`, then a pair where numbers come in pairs, then one."""
        return tuple(sorted({most, self.paired, 1}, reverse=True))

    @functools.cached_property
    def pack_row(self) -> Any:
        """pack(row, dim, to, scale): a row of q times scale as float32, 0 where its last vector overlaps."""

        def body(b, row, dim, to, scale):
            w = self.words(b)
            factor = w.splat(scale)
            for at, place, count, _ in self._chunks(b, dim, self._pieces(self.paired)):
                source = b.add(row, b.mul(at, I64(self.size)))
                for n, number in enumerate(self._numbers(w, source, count)):
                    value = b.fmul(number, factor)
                    if count == 1:
                        # Lane n holds number at + n, which the vector before has if it is less than `place`.
                        lane = b.add(w.splat(b.trunc(at, I32)), ir.Constant(w.i, list(range(self.lanes))))
                        seen = b.icmp_signed("<", lane, w.splat(b.trunc(place, I32)))
                        value = b.select(seen, w.k(0.0), value)
                    w.store(value, to, b.add(b.mul(place, I64(4)), I64(n * self.vector_bytes)))

        return _emit(_void(3, f32), body, "row, dim, to, scale")

    def scores(self, rows: int) -> Any:
        """scores(k, k_off, keys, q, q_row, dim, s, s_row, asked, asked_off, lines, scale): s[key][row] =
        q[row] . k[key], times scale where `pack_row` left it out.

        k: addresses of rows, which lie k_off bytes behind, `keys_at_once` more than there are keys; asked, asked_off:
        as many, of which `lines` are asked for. s needs room for `keys_at_once` rows more.
        """
        together = keys_at_once(self.lanes, rows)
        unrolled = max(LINE // (self.lanes * self.size), 1)

        def body(w, k, k_off, keys, q, q_row, dim, s, s_row, asked, asked_off, lines, scale):
            b = w.b
            groups = b.sdiv(b.add(keys, I64(together - 1)), I64(together))
            from_q = [b.add(q, b.mul(q_row, I64(r))) for r in range(rows)]
            with cgutils.for_range(b, groups, intp=I64) as loop:
                first = b.mul(loop.index, I64(together))
                table = b.add(k, b.mul(first, I64(8)))
                later = b.add(asked, b.mul(first, I64(8)))
                ahead = Ahead(self, w, (later, asked_off, lines), I64(together), ASKED)
                if not self.spread:
                    for n in range(together):
                        self.ask(b, b.add(w.load(later, 8 * n, I64), asked_off), lines)
                source = [b.add(w.load(table, 8 * n, I64), k_off) for n in range(together)]
                sums = self._sums(w, together * rows)
                for at, place, count, _ in self._chunks(b, dim, self._pieces(unrolled)):
                    from_k = [b.add(address, b.mul(at, I64(self.size))) for address in source]
                    if self.spread and count == unrolled:
                        for _ in range(together // ASKED):
                            ahead.ask()
                    for n in range(count):
                        if n % 2 and self.paired > 1:
                            # What was loaded is loaded again: there is no register to keep it in.
                            from_k = [w.unknown(address) for address in from_k]
                        numbers = [self._number(w, address, n, count) for address in from_k]
                        for r, base in enumerate(from_q):
                            row = w.load(b.add(base, b.mul(place, I64(4))), n * self.vector_bytes)
                            for key, number in enumerate(numbers):
                                cell = sums[key * rows + r]
                                b.store(w.fma(number, row, b.load(cell)), cell)
                if self.spread:
                    ahead.finish()
                self._store_scores(
                    w, [b.load(cell) for cell in sums], b.add(s, b.mul(first, s_row)), s_row, rows
                )

        return self._by_key_or(body, rows, None)

    def _by_key_or(self, several: Callable[..., None], rows: int, dot: Callable | None) -> Any:
        """`scores` by one key after another where the head's size has such a loop and lines are asked for, else by
        several(w, ...)."""
        sizes = HEADS if rows == ROWS and self.spread and (dot or self.paired == 1) else ()

        def body(b, *args):
            w, dim, lines = self.words(b), args[5], args[10]
            asks, done = b.icmp_signed(">", lines, I64(0)), b.append_basic_block("scored")
            for size in sizes:
                with b.if_then(b.and_(asks, b.icmp_signed("==", dim, I64(size)))):
                    scores_by_key(self, w, args, rows, size, dot)
                    b.branch(done)
            several(w, *args)
            b.branch(done)
            b.position_at_end(done)

        arguments = "k, k_off, keys, q, q_row, dim, s, s_row, asked, asked_off, lines, scale"
        return _emit(_void(11, f32), body, arguments)

    def _store_scores(
        self,
        w: Words,
        sums: list[ir.Value],
        to: ir.Value,
        s_row: ir.Value,
        rows: int,
        factor: ir.Value | None = None,
    ) -> None:
        b = w.b
        if rows > 1:
            for key in range(len(sums) // rows):
                total = self._halved(w, *self._fours(w, sums[key * rows : key * rows + rows]), b.fadd)
                if factor is not None:
                    some = ir.Constant(ir.VectorType(I32, ROWS), [0] * ROWS)
                    total = b.fmul(total, b.shuffle_vector(factor, factor, some))
                w.store(total, to, b.mul(s_row, I64(key)))
            return
        for begin in range(0, len(sums), self.lanes):
            total = self._fold_lanes(w, sums[begin : begin + self.lanes])
            total = total if factor is None else b.fmul(total, factor)
            for n in range(self.lanes):
                place = b.mul(s_row, I64(begin + n))
                b.store(b.extract_element(total, I32(n)), w.address(to, place, F32), align=4)

    def weighted(self, rows: int) -> Any:
        """weighted(v, v_off, keys, span, p, p_row, alpha, acc, acc_row, dim_v, asked, asked_off, lines): acc[row] =
        acc[row] alpha[row] + sum_key p[key][row] v[key], the sums of `span` keys from zero; alpha is 1 after that. v,
        v_off, asked, asked_off: as in `scores`.
        """
        wide = 8 // rows
        each = max(self.turn * wide * self.lanes * self.size // LINE, 1)

        def body(b, v, v_off, keys, span, p, p_row, alpha, acc, acc_row, dim_v, asked, asked_off, lines):
            w = self.words(b)
            spans = b.sdiv(b.add(keys, b.sub(span, I64(1))), span)
            spans = b.select(b.icmp_signed(">", spans, I64(0)), spans, I64(1))
            with cgutils.for_range(b, spans, intp=I64) as loop:
                first = b.mul(loop.index, span)
                n = b.sub(keys, first)
                n = b.select(b.icmp_signed("<", n, span), n, span)
                later = (b.add(asked, b.mul(first, I64(8))), asked_off, lines)
                ahead = Ahead(self, w, later, n, each)
                source = (b.add(v, b.mul(first, I64(8))), v_off, n)
                weights = (b.add(p, b.mul(first, p_row)), p_row)
                for at, place, count, _ in self._chunks(b, dim_v, self._pieces(wide)):
                    sums = self._sums(w, count * rows)
                    self._meet(w, sums, source, weights, at, count, ahead.ask if count == wide else None)
                    for r in range(rows):
                        factor = w.splat(w.load(alpha, 4 * r, F32))
                        row = b.add(b.add(acc, b.mul(acc_row, I64(r))), b.mul(place, I64(4)))
                        for x in range(count):
                            old, offset = w.load(row, x * self.vector_bytes), x * self.vector_bytes
                            w.store(w.fma(old, factor, b.load(sums[r * count + x])), row, offset)
                ahead.finish()
                for r in range(rows):
                    w.store(F32(1.0), alpha, 4 * r)

        arguments = "v, v_off, keys, span, p, p_row, alpha, acc, acc_row, dim_v, asked, asked_off, lines"
        return _emit(_void(13), body, arguments)

    def _meet(
        self,
        w: Words,
        sums: list[ir.Value],
        source: tuple[ir.Value, ir.Value, ir.Value],
        weights: tuple[ir.Value, ir.Value],
        at: ir.Value,
        count: int,
        ask: Callable[[], None] | None,
    ) -> None:
        """Add to the sums of some columns, from number `at` on, the weighted rows of all keys, some keys a turn where
        something is asked for beside."""
        b, (v, v_off, keys), (p, p_row), rows = w.b, source, weights, len(sums) // count
        offset, done = b.add(b.mul(at, I64(self.size)), v_off), I64(0)
        for turn in (self.turn, 1) if ask and self.turn > 1 else (1,):
            turns = b.sdiv(b.sub(keys, done), I64(turn))
            with cgutils.for_range(b, turns, intp=I64) as loop:
                first = b.add(done, b.mul(loop.index, I64(turn)))
                table, weight = b.add(v, b.mul(first, I64(8))), b.add(p, b.mul(first, p_row))
                if ask and turn == self.turn:
                    ask()
                for n in range(turn):
                    base, of_key = (
                        b.add(w.load(table, 8 * n, I64), offset),
                        b.add(weight, b.mul(p_row, I64(n))),
                    )
                    numbers = self._numbers(w, base, count)
                    for r in range(rows):
                        factor = w.splat(w.load(of_key, 4 * r, F32))
                        for cell, number in zip(sums[r * count :], numbers, strict=False):
                            b.store(w.fma(factor, number, b.load(cell)), cell)
            done = b.add(done, b.mul(turns, I64(turn)))

    @functools.cached_property
    def peak(self) -> Any:
        """peak(s, s_row, top, keys): one vector of rows, top = the largest of its scores; NaN is passed over."""

        def body(b, s, s_row, top, keys):
            w = self.words(b)
            (cell,) = self._sums(w, 1)
            b.store(w.k(float("-inf")), cell)
            with cgutils.for_range(b, keys, intp=I64) as key:
                b.store(w.maximum(w.load(s, b.mul(key.index, s_row)), b.load(cell)), cell)
            w.store(b.load(cell), top)

        return _emit(_void(4), body, "s, s_row, top, keys")

    @functools.cached_property
    def weigh_vector(self) -> Any:
        """weigh(s, s_row, p, p_row, pivot, l, keys): one vector of rows, p = e^(s - pivot), l += its sums. p may lie
        where s does, its rows no longer than those of s."""

        def body(b, s, s_row, to, to_row, pivot, total, keys):
            w = self.words(b)
            base, (cell,) = w.load(pivot), self._sums(w, 1)
            with cgutils.for_range(b, keys, intp=I64) as key:
                p = w.weight(b.fsub(w.load(s, b.mul(key.index, s_row)), base))
                w.store(p, to, b.mul(key.index, to_row))
                b.store(b.fadd(b.load(cell), p), cell)
            w.store(b.fadd(w.load(total), b.load(cell)), total)

        return _emit(_void(7), body, "s, s_row, p, p_row, pivot, l, keys")

    def _few(self, b: ir.IRBuilder, keys: ir.Value) -> Any:
        """A loop over vectors of rows of ROWS scores."""
        most = I64(self.lanes // ROWS)
        return cgutils.for_range(b, b.udiv(b.add(keys, b.sub(most, I64(1))), most), intp=I64)

    def _halved(self, w: Words, vector: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """ROWS numbers, each of all that stand ROWS lanes apart."""
        lanes = self.lanes
        while lanes > ROWS:
            lanes //= 2
            orders = [ir.Constant(ir.VectorType(I32, lanes), list(range(k, k + lanes))) for k in (0, lanes)]
            vector = join(*[w.b.shuffle_vector(vector, vector, order) for order in orders])
        return vector

    def _repeated(self, w: Words, address: ir.Value) -> ir.Value:
        """ROWS numbers, again and again up to a vector."""
        four = w.load(address, 0, ir.VectorType(F32, ROWS))
        return w.b.shuffle_vector(four, four, ir.Constant(w.i, [n % ROWS for n in range(self.lanes)]))

    @functools.cached_property
    def peak_few(self) -> Any:
        """peak(s, top, keys): `peak` of close rows of ROWS. What fills up the last vector becomes -inf first."""

        def body(b, s, top, keys):
            w, none = self.words(b), self.words(b).k(float("-inf"))
            w.store(none, s, b.mul(keys, I64(4 * ROWS)))
            (cell,) = self._sums(w, 1)
            b.store(none, cell)
            with self._few(b, keys) as loop:
                b.store(w.maximum(w.load(s, b.mul(loop.index, I64(self.vector_bytes))), b.load(cell)), cell)
            larger = lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y)  # noqa: E731
            w.store(self._halved(w, b.load(cell), larger), top)

        return _emit(_void(3), body, "s, top, keys")

    @functools.cached_property
    def weigh_few(self) -> Any:
        """weigh(s, pivot, l, keys, asked, lines): `weigh_vector` of close rows of ROWS, where they lie. Beside each
        vector WEIGHED lines are asked for of the rows whose addresses stand at `asked`, of `lines` lines; none where
        that is 0."""

        def body(b, s, pivot, total, keys, asked, lines):
            w = self.words(b)
            base, (cell,) = self._repeated(w, pivot), self._sums(w, 1)
            ahead = Ahead(self, w, (asked, I64(0), lines), I64(0), WEIGHED)
            with self._few(b, keys) as loop:
                ahead.ask()
                at = b.mul(loop.index, I64(self.vector_bytes))
                p = w.weight(b.fsub(w.load(s, at), base))
                w.store(p, s, at)
                b.store(b.fadd(b.load(cell), p), cell)
            sums = self._halved(w, b.load(cell), b.fadd)
            w.store(b.fadd(w.load(total, 0, sums.type), sums), total)

        return _emit(_void(6), body, "s, pivot, l, keys, asked, lines")

    def finish_row(self, dtype: str) -> Any:
        """finish(acc, dim_v, factor, to) -> not 0 if a number is not finite: one row of sums, rounded to `dtype`, to
        its place."""
        size = 4 if dtype == "fp32" else 2

        def body(b, acc, dim_v, factor, to):
            w = self.words(b)
            found = cgutils.alloca_once(b, ir.VectorType(I1, self.lanes))
            b.store(ir.Constant(ir.VectorType(I1, self.lanes), [0] * self.lanes), found)
            scale = w.splat(factor)
            for at, place, count, _ in self._chunks(b, dim_v, self._pieces(self.paired)):
                source = b.add(acc, b.mul(place, I64(4)))
                values = [b.fmul(w.load(source, n * self.vector_bytes), scale) for n in range(count)]
                for value in values:
                    wrong = b.fcmp_unordered("uno", b.fsub(value, value), w.k(0.0))
                    b.store(b.or_(b.load(found), wrong), found)
                if count == 2:
                    order = [k // 2 + (k % 2) * self.lanes for k in range(2 * self.lanes)]
                    halves = (order[: self.lanes], order[self.lanes :])
                    values = [b.shuffle_vector(*values, ir.Constant(w.i, half)) for half in halves]
                for n, value in enumerate(values):
                    place_in_row = b.add(b.mul(at, I64(size)), I64(n * self.lanes * size))
                    w.store(w.narrow(value, dtype), to, place_in_row)
            return b.zext(b.bitcast(b.load(found), ir.IntType(self.lanes)), I64)

        return _emit(i64(i64, i64, f32, i64), body, "acc, dim_v, factor, to")

    @functools.cached_property
    def mix(self) -> Any:
        """mix(parts, stride, weights, count, dim_v, factor, to): one row, factor * sum_n weights[n] parts[n], rounded.

        The sum is in the order of the parts; a head smaller than a vector is summed number by number."""

        def body(b, parts, stride, weights, count, dim_v, factor, to):
            w = self.words(b)

            def total(at: ir.Value, type_: ir.Type, zero: ir.Value) -> ir.Value:
                cell = cgutils.alloca_once(b, type_)
                b.store(zero, cell)
                with cgutils.for_range(b, count, intp=I64) as part:
                    number = w.load(b.add(parts, b.mul(part.index, stride)), b.mul(at, I64(4)), type_)
                    weight = w.load(weights, b.mul(part.index, I64(4)), F32)
                    weight = weight if type_ == F32 else w.splat(weight)
                    b.store(b.fadd(b.load(cell), b.fmul(weight, number)), cell)
                return b.load(cell)

            with b.if_else(b.icmp_signed(">=", dim_v, I64(self.lanes))) as (vectors, numbers):
                with vectors:
                    for at, _, _, _ in self._chunks(b, dim_v):
                        value = b.fmul(total(at, w.f, w.k(0.0)), w.splat(factor))
                        w.store(w.narrow(value, self.dtype), to, b.mul(at, I64(self.size)))
                with numbers, cgutils.for_range(b, dim_v, intp=I64) as loop:
                    value = b.fmul(total(loop.index, F32, F32(0.0)), factor)
                    narrow = b.extract_element(w.narrow(w.splat(value), self.dtype), I32(0))
                    w.store(narrow, to, b.mul(loop.index, I64(self.size)))

        return _emit(_void(5, f32, i64), body, "parts, stride, weights, count, dim_v, factor, to")
