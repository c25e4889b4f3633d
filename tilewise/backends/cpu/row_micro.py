"""Microkernels whose lanes are the numbers of a head: few rows of q meet long keys, which are read once, in order.

The tiles of scores keep the layout of `micro`, one key a row of BLOCK_ROWS float32, so that the spec's code folds
them as it folds any other. Rows of q and sums of v are row-major here. A head whose size is no multiple of the
vector ends in a vector that overlaps the one before it; there q is 0 where it overlaps.

Each intrinsic asks for the memory that is needed next: reading, not arithmetic, is what these loops wait for.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir
from numba.core import cgutils

from tilewise.backends.cpu.micro import ROW, Micro, _emit, _void, f32, i64
from tilewise.backends.cpu.words import F32, I1, I8, I32, I64

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tilewise.backends.cpu.words import Words

ROWS = 4
"""Rows of q that share a vector of k or v: 4 x 2 sums hide the latency of a multiply-add on AVX2."""
LINE = 64


def keys_at_once(lanes: int, rows: int) -> int:
    """Keys of one step of `scores`: a multiple of lanes sums, which one exchange adds up."""
    return {(16, 4): 4, (8, 4): 2, (4, 4): 2, (16, 1): 16, (8, 1): 8, (4, 1): 8}[lanes, rows]


class RowMicro(Micro):
    """The intrinsics of one target and one storage type, lanes along the head."""

    def _least(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        return b.select(b.icmp_signed("<", x, y), x, y)

    def _prefetch(self, b: ir.IRBuilder, address: ir.Value) -> None:
        pointer = b.inttoptr(address, I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        name = "llvm.prefetch.p0"
        called = b.module.globals.get(name) or ir.Function(b.module, kind, name)
        b.call(called, [pointer, I32(0), I32(3), I32(1)])

    def _sums(self, w: Words, count: int) -> list[ir.Value]:
        cells = [cgutils.alloca_once(w.b, w.f) for _ in range(count)]
        for cell in cells:
            w.b.store(w.k(0.0), cell)
        return cells

    def _fold_lanes(self, w: Words, vectors: list[ir.Value]) -> ir.Value:
        """One vector whose lane n is the sum of the lanes of vectors[n]: pairwise, halves first."""
        step = self.lanes // 2
        while step:
            half = len(vectors) // 2
            low = [k if not k & step else k - step + self.lanes for k in range(self.lanes)]
            high = [k + step if not k & step else k + self.lanes for k in range(self.lanes)]
            vectors = [
                w.b.fadd(
                    w.b.shuffle_vector(a, c, ir.Constant(w.i, low)),
                    w.b.shuffle_vector(a, c, ir.Constant(w.i, high)),
                )
                for a, c in zip(vectors[:half], vectors[half:], strict=True)
            ]
            step //= 2
        return vectors[0]

    def _chunks(self, b: ir.IRBuilder, dim: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
        """(first number of the vector, number of its place in packed rows), the overlapping end last."""
        lanes = I64(self.lanes)
        whole = b.sdiv(dim, lanes)
        with cgutils.for_range(b, whole, intp=I64) as loop:
            at = b.mul(loop.index, lanes)
            yield at, at
        with b.if_then(b.icmp_signed("<", b.mul(whole, lanes), dim)):
            yield b.sub(dim, lanes), b.mul(whole, lanes)

    @functools.cached_property
    def pack_row(self) -> Any:
        """pack(row, dim, to, scale): a row of q times scale as float32, 0 where its last vector overlaps."""

        def body(b, row, dim, to, scale):
            w = self.words(b)
            factor = w.splat(scale)
            for at, place in self._chunks(b, dim):
                value = b.fmul(w.widen(row, b.mul(at, I64(self.size)), self.dtype), factor)
                # Lane n holds number at + n, which the vector before has if it is less than `place`.
                number = b.add(w.splat(b.trunc(at, I32)), ir.Constant(w.i, list(range(self.lanes))))
                seen = b.icmp_signed("<", number, w.splat(b.trunc(place, I32)))
                w.store(b.select(seen, w.k(0.0), value), to, b.mul(place, I64(4)))

        return _emit(_void(3, f32), body, "row, dim, to, scale")

    def scores(self, rows: int) -> Any:
        """scores(k, k_row, keys, q, q_row, dim, s, ahead): s[key][row] = q[row] . k[key].

        s needs room for `keys_at_once` rows more. What lies `ahead` bytes after what is read is asked for.
        """
        together = keys_at_once(self.lanes, rows)
        unrolled = max(LINE // (self.lanes * self.size), 1)

        def body(b, k, k_row, keys, q, q_row, dim, s, ahead):
            w, last, lanes = self.words(b), b.sub(keys, I64(1)), I64(self.lanes)
            groups = b.sdiv(b.add(keys, I64(together - 1)), I64(together))
            steps = b.sdiv(dim, I64(self.lanes * unrolled))
            rest = b.mul(steps, I64(self.lanes * unrolled))
            whole = b.mul(b.sdiv(dim, lanes), lanes)
            from_q = [b.add(q, b.mul(q_row, I64(r))) for r in range(rows)]
            with cgutils.for_range(b, groups, intp=I64) as loop:
                first = b.mul(loop.index, I64(together))
                # Keys past the end are the last one again.
                source = [
                    b.add(k, b.mul(self._least(b, b.add(first, I64(n)), last), k_row))
                    for n in range(together)
                ]
                sums = self._sums(w, together * rows)

                def vector(at: ir.Value, place: ir.Value, step: int) -> None:
                    from_k = b.add(b.mul(at, I64(self.size)), I64(step * self.lanes * self.size))
                    numbers = [w.widen(b.add(address, from_k), 0, self.dtype) for address in source]
                    for r, base in enumerate(from_q):
                        row = w.load(b.add(base, b.mul(place, I64(4))), step * self.vector_bytes)
                        for n, number in enumerate(numbers):
                            cell = sums[n * rows + r]
                            b.store(w.fma(number, row, b.load(cell)), cell)

                with cgutils.for_range(b, steps, intp=I64) as step:
                    at = b.mul(step.index, I64(self.lanes * unrolled))
                    for address in source:
                        self._prefetch(b, b.add(b.add(address, ahead), b.mul(at, I64(self.size))))
                    for n in range(unrolled):
                        vector(at, at, n)
                with cgutils.for_range(b, b.sdiv(b.sub(whole, rest), lanes), intp=I64) as step:
                    at = b.add(rest, b.mul(step.index, lanes))
                    vector(at, at, 0)
                with b.if_then(b.icmp_signed("<", whole, dim)):
                    vector(b.sub(dim, lanes), whole, 0)
                self._store_scores(w, [b.load(cell) for cell in sums], b.add(s, b.mul(first, I64(ROW))), rows)

        return _emit(_void(8), body, "k, k_row, keys, q, q_row, dim, s, ahead")

    def _store_scores(self, w: Words, sums: list[ir.Value], to: ir.Value, rows: int) -> None:
        b = w.b
        for begin in range(0, len(sums), self.lanes):
            total = self._fold_lanes(w, sums[begin : begin + self.lanes])
            for n in range(0, self.lanes, rows):
                place = (begin + n) // rows * ROW
                if rows == 1:
                    b.store(b.extract_element(total, I32(n)), w.address(to, place, F32), align=4)
                else:
                    order = ir.Constant(ir.VectorType(I32, rows), list(range(n, n + rows)))
                    w.store(b.shuffle_vector(total, total, order), to, place)

    def weighted(self, rows: int) -> Any:
        """weighted(v, v_row, keys, p, alpha, acc, acc_row, dim_v, ahead): acc[row] = acc[row] alpha[row] +
        sum_key p[key][row] v[key], the sum from zero. What lies `ahead` bytes after what is read is asked for.
        """
        wide = 8 // rows

        def body(b, v, v_row, keys, p, alpha, acc, acc_row, dim_v, ahead):
            w, lanes = self.words(b), I64(self.lanes)
            whole = b.mul(b.sdiv(dim_v, lanes), lanes)
            groups = b.sdiv(dim_v, I64(self.lanes * wide))
            rest = b.mul(groups, I64(self.lanes * wide))

            def columns(at: ir.Value, place: ir.Value, count: int) -> None:
                sums = self._sums(w, count * rows)
                source = b.add(v, b.mul(at, I64(self.size)))
                with cgutils.for_range(b, keys, intp=I64) as key:
                    base = b.add(source, b.mul(key.index, v_row))
                    weights = b.add(p, b.mul(key.index, I64(ROW)))
                    for line in range(0, count * self.lanes * self.size, LINE):
                        self._prefetch(b, b.add(b.add(base, ahead), I64(line)))
                    numbers = [w.widen(base, n * self.lanes * self.size, self.dtype) for n in range(count)]
                    for r in range(rows):
                        weight = w.splat(w.load(weights, 4 * r, F32))
                        for n, number in enumerate(numbers):
                            cell = sums[r * count + n]
                            b.store(w.fma(weight, number, b.load(cell)), cell)
                for r in range(rows):
                    factor = w.splat(w.load(alpha, 4 * r, F32))
                    row = b.add(b.add(acc, b.mul(acc_row, I64(r))), b.mul(place, I64(4)))
                    for n in range(count):
                        old = w.load(row, n * self.vector_bytes)
                        w.store(w.fma(old, factor, b.load(sums[r * count + n])), row, n * self.vector_bytes)

            with cgutils.for_range(b, groups, intp=I64) as loop:
                at = b.mul(loop.index, I64(self.lanes * wide))
                columns(at, at, wide)
            with cgutils.for_range(b, b.sdiv(b.sub(whole, rest), lanes), intp=I64) as loop:
                at = b.add(rest, b.mul(loop.index, lanes))
                columns(at, at, 1)
            with b.if_then(b.icmp_signed("<", whole, dim_v)):
                columns(b.sub(dim_v, lanes), whole, 1)

        return _emit(_void(9), body, "v, v_row, keys, p, alpha, acc, acc_row, dim_v, ahead")

    @functools.cached_property
    def peak(self) -> Any:
        """peak(s, top, keys): one vector of rows, top = the largest of its scores; NaN is passed over."""

        def body(b, s, top, keys):
            w = self.words(b)
            (cell,) = self._sums(w, 1)
            b.store(w.k(float("-inf")), cell)
            with cgutils.for_range(b, keys, intp=I64) as key:
                b.store(w.maximum(w.load(s, b.mul(key.index, I64(ROW))), b.load(cell)), cell)
            w.store(b.load(cell), top)

        return _emit(_void(3), body, "s, top, keys")

    @functools.cached_property
    def weigh_vector(self) -> Any:
        """weigh(s, pivot, l, keys): one vector of rows, s = e^(s - pivot), l += its sums."""

        def body(b, s, pivot, total, keys):
            w = self.words(b)
            base, (cell,) = w.load(pivot), self._sums(w, 1)
            with cgutils.for_range(b, keys, intp=I64) as key:
                at = b.mul(key.index, I64(ROW))
                p = w.weight(b.fsub(w.load(s, at), base))
                w.store(p, s, at)
                b.store(b.fadd(b.load(cell), p), cell)
            w.store(b.fadd(w.load(total), b.load(cell)), total)

        return _emit(_void(4), body, "s, pivot, total, keys")

    @functools.cached_property
    def finish_row(self) -> Any:
        """finish(acc, dim_v, factor, to) -> not 0 if a number is not finite: one row, rounded, to its place."""

        def body(b, acc, dim_v, factor, to):
            w = self.words(b)
            found = cgutils.alloca_once(b, ir.VectorType(I1, self.lanes))
            b.store(ir.Constant(ir.VectorType(I1, self.lanes), [0] * self.lanes), found)
            scale = w.splat(factor)
            for at, place in self._chunks(b, dim_v):
                value = b.fmul(w.load(acc, b.mul(place, I64(4))), scale)
                w.store(w.narrow(value, self.dtype), to, b.mul(at, I64(self.size)))
                wrong = b.fcmp_unordered("uno", b.fsub(value, value), w.k(0.0))
                b.store(b.or_(b.load(found), wrong), found)
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
                    for at, _ in self._chunks(b, dim_v):
                        value = b.fmul(total(at, w.f, w.k(0.0)), w.splat(factor))
                        w.store(w.narrow(value, self.dtype), to, b.mul(at, I64(self.size)))
                with numbers, cgutils.for_range(b, dim_v, intp=I64) as loop:
                    value = b.fmul(total(loop.index, F32, F32(0.0)), factor)
                    narrow = b.extract_element(w.narrow(w.splat(value), self.dtype), I32(0))
                    w.store(narrow, to, b.mul(loop.index, I64(self.size)))

        return _emit(_void(5, f32, i64), body, "parts, stride, weights, count, dim_v, factor, to")
