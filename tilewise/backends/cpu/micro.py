"""The microkernels as Numba intrinsics: everything the tile loops do to vectors.

Addresses are int64 in bytes. Tiles are transposed, lanes = rows of q: row r of a tile is BLOCK_ROWS float32.
One primitive does every product,

    C[rows][lanes] = finish(sum_k A[r * a_row + k * a_k] * B[k * b_k][lanes]),

with A read by scalar broadcast, so that K and V keep their layout and nothing but q is packed. A block is
summed from zero and then added to what stands: chaining through all of N doubles the float32 error (measured).

Source of the shapes: 6 rows x 2 vectors fill the 16 registers of AVX2, 6 x 4 the 32 of AVX-512 and NEON.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from tilewise.backends.cpu.lane_words import _emit, _void
from tilewise.backends.cpu.row_words import ROW, RowWords
from tilewise.backends.cpu.words import F32, HALF, I16, I32, I64, LOG2E, Words

if TYPE_CHECKING:
    from collections.abc import Callable

DEPTH = 64
"""Products summed one after another in a score: sums of sums lose no digits, and so much of a strip of q stays in the
first-level cache while all keys of a block meet it."""
UNROLLED = 4
"""Products of one turn of the inner loop, whose addresses are a register and a short offset: by longer ones they ran
at 0.78 of the multiply-adds, not 0.88, where a neighbour has half of the core's decoding (measured on Zen 3)."""
FORESEEN = (16,)
"""Lanes with which products ask for the keys of the next block while they meet those of this one: products leave room
for it, and 1.01 to 1.04 times the speed (measured on Zen 5, D 64 and 128, N 512 to 4096); all asked for at once, before
a block, brought less or nothing. With AVX2 nothing was won on Zen 3."""
SHORT = 16
"""A head of at most this size is summed in two halves: where it costs nothing, accuracy is free."""
i64, f32 = types.int64, types.float32


# ---- scalars -------------------------------------------------------------------------------------------------


def scalar_load(type_: ir.Type, size: int, numba_type: Any) -> Any:
    """load(address, index)."""

    def body(b, base, index):
        return b.load(b.inttoptr(b.add(base, b.mul(index, I64(size))), type_.as_pointer()), align=size)

    return _emit(numba_type(i64, i64), body, "base, index")


def scalar_store(type_: ir.Type, size: int, numba_type: Any) -> Any:
    """store(address, index, value)."""

    def body(b, base, index, value):
        b.store(value, b.inttoptr(b.add(base, b.mul(index, I64(size))), type_.as_pointer()), align=size)

    return _emit(types.void(i64, i64, numba_type), body, "base, index, value")


load_i64, store_i64 = scalar_load(I64, 8, i64), scalar_store(I64, 8, i64)
load_i32, store_i32 = scalar_load(I32, 4, types.int32), scalar_store(I32, 4, types.int32)
load_f32, store_f32 = scalar_load(F32, 4, f32), scalar_store(F32, 4, f32)


def _take(b: ir.IRBuilder, base: ir.Value) -> ir.Value:
    return b.atomic_rmw("add", b.inttoptr(base, I64.as_pointer()), I64(1), "monotonic")


take = _emit(i64(i64), _take, "base")
"""The counter's value, which then is one more: how threads share out tasks."""


def _take_some(b: ir.IRBuilder, base: ir.Value, count: ir.Value) -> ir.Value:
    return b.atomic_rmw("add", b.inttoptr(base, I64.as_pointer()), count, "monotonic")


def _arrive(b: ir.IRBuilder, base: ir.Value) -> ir.Value:
    return b.atomic_rmw("add", b.inttoptr(base, I64.as_pointer()), I64(1), "acq_rel")


take_some = _emit(i64(i64, i64), _take_some, "base, count")
"""`take` of `count` tasks at once, which follow the value."""
arrive = _emit(i64(i64), _arrive, "base")
"""`take` for a count of who is done: what they wrote is seen by who comes last."""


def _touch(b: ir.IRBuilder, base: ir.Value) -> ir.Value:
    zero = I64(0)
    b.cmpxchg(b.inttoptr(base, I64.as_pointer()), zero, zero, "monotonic", "monotonic")
    return zero


touch = _emit(i64(i64), _touch, "base")
"""Meets the page of eight bytes as a write does, and changes nothing, whoever else writes there at that moment."""


def indirect(result: Any, count: int) -> Any:
    """call(function, *arguments): a compiled function of the spec, int64 arguments, int64 or no result."""
    returned = ir.VoidType() if result == types.void else I64

    def body(b, function, *values):
        kind = ir.FunctionType(returned, [I64] * count)
        return b.call(b.inttoptr(function, kind.as_pointer()), values)

    return _emit(
        result(*[i64] * (count + 1)), body, ", ".join(["function", *(f"a{n}" for n in range(count))])
    )


LARGE = 64.0
"""A pivot whose product with log2(e) loses more by rounding than `weights` should."""


# ---- microkernels --------------------------------------------------------------------------------------------


class Micro(RowWords):
    """The intrinsics of one target and one storage type."""

    @functools.cached_property
    def element_load(self) -> Any:
        """load(address, index) -> float32 of one stored number."""

        def body(b, base, index):
            address = b.add(base, b.mul(index, I64(self.size)))
            if self.dtype == "bf16":
                raw = b.load(b.inttoptr(address, I16.as_pointer()), align=2)
                return b.bitcast(b.shl(b.zext(raw, I32), I32(16)), F32)
            kind = HALF if self.dtype == "fp16" else F32
            value = b.load(b.inttoptr(address, kind.as_pointer()), align=self.size)
            return b.fpext(value, F32) if self.dtype == "fp16" else value

        return _emit(f32(i64, i64), body, "base, index")

    @functools.cached_property
    def element_store(self) -> Any:
        """store(address, index, float32), rounded to the storage type."""

        def body(b, base, index, value):
            address = b.add(base, b.mul(index, I64(self.size)))
            w = self.words(b)
            narrow = b.extract_element(w.narrow(w.splat(value), self.dtype), I32(0))
            b.store(narrow, b.inttoptr(address, narrow.type.as_pointer()), align=self.size)

        return _emit(types.void(i64, i64, f32), body, "base, index, value")

    def _sum(
        self,
        w: Words,
        sums: list,
        places: tuple,
        count: ir.Value,
        ahead: tuple[ir.Value, bool] | None,
        asked: tuple[ir.Value, ir.Value] | None = None,
    ) -> None:
        """The inner loop: sums[r][v] += A[r] B[v] over `count` steps, UNROLLED at a time where most time is spent.

        ahead: so many bytes behind A lies what is met next, one row of memory for each row of A or for each step.
        asked: (address, row bytes), of which half of the rows are asked for, two of each UNROLLED steps."""
        b, (a, bb, a_row, a_k, b_k) = w.b, places
        at_a, at_b, at_asked = (
            cgutils.alloca_once_value(b, x) for x in (a, bb, asked[0] if asked else I64(0))
        )
        turns = [(count, 1)]
        if len(sums) >= self.isa.tall:
            turns = [(b.udiv(count, I64(UNROLLED)), UNROLLED), (b.urem(count, I64(UNROLLED)), 1)]
        for times, steps in turns:
            with cgutils.for_range(b, times, intp=I64):
                from_a, from_b = w.unknown(b.load(at_a)), w.unknown(b.load(at_b))
                if ahead is not None and steps > 1:
                    lines, far = (len(sums), a_row) if ahead[1] else (steps, a_k)
                    for n in range(lines):
                        w.prefetch(b.add(from_a, ahead[0]), b.mul(far, I64(n)))
                if asked is not None and steps > 1:
                    line = b.load(at_asked)
                    for n in range(2):
                        w.prefetch(line, b.mul(asked[1], I64(n)))
                    b.store(b.add(line, b.mul(asked[1], I64(steps))), at_asked)
                for k in range(steps):
                    here = b.add(from_b, b.mul(b_k, I64(k)))
                    columns = [w.load(here, v * self.vector_bytes) for v in range(len(sums[0]))]
                    for r, row in enumerate(sums):
                        place = b.add(b.mul(a_row, I64(r)), b.mul(a_k, I64(k)))
                        scalar = w.splat(w.load(from_a, place, F32))
                        for cell, column in zip(row, columns, strict=True):
                            b.store(w.fma(scalar, column, b.load(cell)), cell)
                b.store(b.add(from_a, b.mul(a_k, I64(steps))), at_a)
                b.store(b.add(from_b, b.mul(b_k, I64(steps))), at_b)

    def product(self, rows: int, vectors: int, finish: str) -> Any:
        """The primitive. finish: "scores" is C = sum or C += sum, and raises the running maximum at `extra`; "scaled"
        is C = C * extra[lanes] + sum; "added" is C += sum.

        A score of a long head comes in parts of DEPTH products: `part` is 1 where parts were before, plus 2 where more
        follow, before which no maximum is raised. `ahead`: see `_sum`; asked for where FORESEEN says.
        """
        step, scores = self.vector_bytes, finish == "scores"

        def finished(w: Words, sums: list, places: tuple) -> None:
            b, (c, c_row, extra, last) = w.b, places
            for v in range(vectors):
                top = None if finish == "added" else w.load(extra, v * step)
                for r in range(rows):
                    at = b.add(b.mul(c_row, I64(r)), I64(v * step))
                    value = b.load(sums[r][v])
                    if finish == "scores":
                        top = w.maximum(value, top)
                    elif finish == "scaled":
                        value = w.fma(w.load(c, at), top, value)
                    else:
                        value = b.fadd(w.load(c, at), value)
                    w.store(value, c, at)
                if finish == "scores":
                    with b.if_then(last):
                        w.store(top, extra, v * step)

        def body(b, a, a_row, a_k, bb, b_k, count, c, c_row, extra, *more):
            w, last = self.words(b), None
            sums = [[cgutils.alloca_once(b, w.f) for _ in range(vectors)] for _ in range(rows)]
            for row in sums:
                for cell in row:
                    b.store(w.k(0.0), cell)
            ahead, part, asked = None, (), None
            if self.lanes in FORESEEN and finish == "added":
                asked = more
            elif self.lanes in FORESEEN:
                ahead = (more[0], scores)
            if finish == "scores":
                part = more[1:]
            self._sum(w, sums, (a, bb, a_row, a_k, b_k), count, ahead, asked)
            if part:
                last = b.icmp_signed("<", part[0], I64(2))
                with b.if_then(b.icmp_signed("!=", b.and_(part[0], I64(1)), I64(0))):
                    for r in range(rows):
                        for v in range(vectors):
                            at = b.add(b.mul(c_row, I64(r)), I64(v * step))
                            b.store(b.fadd(b.load(sums[r][v]), w.load(c, at)), sums[r][v])
            finished(w, sums, (c, c_row, extra, last))

        arguments = "a, a_row, a_k, bb, b_k, count, c, c_row, extra"
        arguments += {"scores": ", ahead, part", "scaled": ", ahead", "added": ", asked, asked_row"}[finish]
        return _emit(_void(arguments.count(",") + 1), body, arguments)

    @functools.cached_property
    def scalar_exp(self) -> Any:
        """exp(float32): e^x by the vector word, so that every place rounds alike."""

        def body(b, x):
            w = self.words(b)
            return b.extract_element(w.exp2(b.fmul(w.splat(x), w.k(LOG2E))), I32(0))

        return _emit(f32(f32), body, "x")

    # ---- softmax ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def advance(self) -> Any:
        """advance(top, m, pivot, l, alpha): one vector of rows takes a block's maximum into account.

        m = max(m, top); alpha = e^(old m - pivot); l *= alpha. pivot is m, or 0 where no key was seen:
        then exp2(-inf) is the 0 it should be.
        """

        def body(b, top, m, pivot, total, alpha):
            w = self.words(b)
            old = w.load(m)
            w.advance(old, w.maximum(w.load(top), old), m, pivot, total, alpha)

        return _emit(_void(5), body, "top, m, pivot, total, alpha")

    def _weigh(self, w: Words, places: tuple, vectors: int, weights: Callable[[list], list]) -> None:
        """The loop of `exponentials`: p = weights(s), of `vectors` neighbouring vectors."""
        b, (s, to, to_row, total, count) = w.b, places
        step = self.vector_bytes
        sums = [cgutils.alloca_once(b, w.f) for _ in range(vectors)]
        for cell in sums:
            b.store(w.k(0.0), cell)
        with cgutils.for_range(b, count, intp=I64) as loop:
            row, to_ = b.add(s, b.mul(loop.index, I64(ROW))), b.add(to, b.mul(loop.index, to_row))
            for v, p in enumerate(weights([w.load(row, v * step) for v in range(vectors)])):
                w.store(p, to_, v * step)
                b.store(b.fadd(b.load(sums[v]), p), sums[v])
        for v, cell in enumerate(sums):
            w.store(b.fadd(w.load(total, v * step), b.load(cell)), total, v * step)

    def weights(self, strips: int = 1, plain: bool = False) -> Any:
        """weights(s, p, p_row, pivot, l, count): `exponentials` in fewer operations: the exponent of 2 is rounded, as
        s - pivot is, and the polynomial shorter: errors of 6e-8 where s has such itself. plain: one operation less,
        p = 2^(s log2(e) - pivot log2(e)), where the last product is rounded, as lse will be, and a score like the pivot
        has not quite the weight 1; not where the pivot is LARGE."""
        vectors = strips * self.strip_vectors

        def body(b, s, to, to_row, pivot, total, count):
            w = self.words(b)
            base = [w.load(pivot, v * self.vector_bytes) for v in range(vectors)]
            less, places = [b.fmul(x, w.k(-LOG2E)) for x in base], (s, to, to_row, total, count)

            def exact(scores):
                return w.powers([b.fmul(b.fsub(x, y), w.k(LOG2E)) for x, y in zip(scores, base, strict=True)])

            def short(scores):
                return w.powers([w.fma(x, w.k(LOG2E), y) for x, y in zip(scores, less, strict=True)])

            if not plain:
                self._weigh(w, places, vectors, exact)
                return
            large = [b.fcmp_ordered(">", w.absolute(x), w.k(LARGE)) for x in base]
            bits = b.bitcast(functools.reduce(b.or_, large), ir.IntType(self.lanes))
            with b.if_else(b.icmp_unsigned("!=", bits, bits.type(0))) as (some, none):
                with some:
                    self._weigh(w, places, vectors, exact)
                with none:
                    self._weigh(w, places, vectors, short)

        return _emit(_void(6), body, "s, p, p_row, pivot, l, count")

    def exponentials(self, strips: int = 1) -> Any:
        """exponentials(s, p, p_row, pivot, l, count): neighbouring strips of a tile, p = e^(s - pivot), l += sums. p
        may be s."""
        vectors = strips * self.strip_vectors

        def body(b, s, to, to_row, pivot, total, count):
            w = self.words(b)
            base = [w.load(pivot, v * self.vector_bytes) for v in range(vectors)]

            def weights(scores):
                return w.weights([b.fsub(x, y) for x, y in zip(scores, base, strict=True)])

            self._weigh(w, (s, to, to_row, total, count), vectors, weights)

        return _emit(_void(6), body, "s, p, p_row, pivot, l, count")

    @functools.cached_property
    def close(self) -> Any:
        """close(m, l, sink, inverse, lse): one vector of finished rows.

        The sink is one more key with value 0. inverse is 0 for a row
        that saw nothing, lse is -inf.
        """

        def body(b, m, total, sink, inverse, lse):
            w = self.words(b)
            none, zero, log2e = w.k(float("-inf")), w.k(0.0), w.k(LOG2E)
            top, logit = w.load(m), w.load(sink)
            best = b.select(b.fcmp_ordered(">", logit, top), logit, top)
            base = b.select(b.fcmp_ordered("==", best, none), zero, best)
            alpha = w.exp2(b.fmul(b.fsub(top, base), log2e))
            sum_ = b.fadd(b.fmul(w.load(total), alpha), w.exp2(b.fmul(b.fsub(logit, base), log2e)))
            empty = b.fcmp_ordered("==", sum_, zero)
            w.store(b.select(empty, zero, b.fdiv(alpha, sum_)), inverse)
            value = b.fadd(base, w.log(sum_))
            w.store(b.select(empty, none, value), lse)

        return _emit(_void(5), body, "m, total, sink, inverse, lse")
