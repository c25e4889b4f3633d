"""Microkernels on bf16 pairs: two neighbours along the summed dimension in one 32-bit word.

One primitive does every product,

    C[32 rows][32 lanes] (+)= sum over steps of A[32 rows][32 numbers] B[16 pairs][32 lanes],

A in bf16 rows as they lie in memory, B in rows of pairs, C in float32: by the tile registers of AMX, by the dot
products of avx512_bf16, or by plain arithmetic on the halves. All three take the same layouts, so that one set
of loops serves them. Loads of tiles need no alignment. What stays in vectors is the softmax; its weights are
rounded to bf16 (nearest, ties away from zero) where they become an operand.

Source: Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3 (tile configuration and
TDPBF16PS; pairs of B are rows of 64 bytes). Eight tile registers: four of C, two of A, two of B.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir
from numba import njit
from numba.core import cgutils

from tilewise.backends.cpu.isa import STRIP
from tilewise.backends.cpu.micro import ROW, _emit, _void, f32
from tilewise.backends.cpu.pair_launch import GROUP
from tilewise.backends.cpu.words import I8, I16, I32, I64, Words

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

DEGREE = 4
"""Of the polynomial of weights that become bf16: 2.8e-6 beside their rounding of 2e-3, and l is summed of them."""
STALE = 5.0
"""A running maximum may be this much too low, in natural units."""
_HIGH = -65536


class _Bfloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not name: only ever an element of a vector that is cast."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def _low(w: Words, x: ir.Value) -> ir.Value:
    return w.b.bitcast(w.b.shl(x, w.n(16)), w.f)


def _high(w: Words, x: ir.Value) -> ir.Value:
    return w.b.bitcast(w.b.and_(x, w.n(_HIGH)), w.f)


def _zip(w: Words, x: ir.Value, y: ir.Value) -> ir.Value:
    """Two float32 vectors as one vector of bf16 pairs, x in the low halves."""
    b, half = w.b, w.n(0x8000)
    low = b.lshr(b.add(b.bitcast(x, w.i), half), w.n(16))
    return b.or_(low, b.and_(b.add(b.bitcast(y, w.i), half), w.n(_HIGH)))


def _round(w: Words, x: ir.Value, y: ir.Value) -> ir.Value:
    """Two float32 vectors as one vector of bf16, x first, as int16."""
    b, half, shorts = w.b, w.n(0x8000), ir.VectorType(I16, 2 * w.lanes)
    halves = [b.bitcast(b.add(b.bitcast(v, w.i), half), shorts) for v in (x, y)]
    odd = ir.Constant(ir.VectorType(I32, 2 * w.lanes), [2 * n + 1 for n in range(2 * w.lanes)])
    return b.shuffle_vector(*halves, odd)


class Pairs:
    """The intrinsics of one target that has a way to multiply pairs."""

    def __init__(self, isa: Isa) -> None:
        self.isa, self.lanes, self.step = isa, isa.lanes, 4 * isa.lanes
        self.strip_vectors = STRIP // isa.lanes

    def words(self, b: ir.IRBuilder) -> Words:
        return Words(b, self.lanes, self.isa.half)

    # ---- products --------------------------------------------------------------------------------------------

    def _tile(self, b: ir.IRBuilder, name: str, *args: ir.Value) -> None:
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
        name = f"llvm.x86.{name}"
        b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), args)

    @functools.cached_property
    def configure(self) -> Any:
        """configure(0): this thread's tile registers become eight tiles of 16 rows of 64 bytes."""

        def body(b, _):
            if self.isa.pairs == "amx":
                memory = cgutils.alloca_once(b, ir.ArrayType(I64, 8))
                base = b.ptrtoint(memory, I64)
                # Palette 1; bytes of a row of each tile as int16 at 16; rows of each as int8 at 48.
                for n, word in enumerate((1, 0, *[0x0040004000400040] * 2, 0, 0, 0x1010101010101010, 0)):
                    b.store(I64(word), b.inttoptr(b.add(base, I64(8 * n)), I64.as_pointer()))
                self._tile(b, "ldtilecfg", b.inttoptr(base, I8.as_pointer()))

        return _emit(_void(1), body, "unused")

    @functools.cached_property
    def release(self) -> Any:
        """release(0): the tile registers are given back."""

        def body(b, _):
            if self.isa.pairs == "amx":
                self._tile(b, "tilerelease")

        return _emit(_void(1), body, "unused")

    def block(self, added: bool, foresee: bool = True) -> Any:
        """block(A, row bytes, step bytes, B, row bytes, steps, C, row bytes, ahead): C = or C += the product.

        `ahead`: where 16 rows of an A that comes later lie, asked for if `foresee`: tiles are loaded too fast for the
        machine to foresee."""
        if self.isa.pairs == "amx":
            return self._tiles(added, foresee)
        tall = 12 if self.lanes == 16 else 4
        main, rest = self._dots(tall, added, foresee), self._dots(GROUP % tall or tall, added, foresee)
        wide, left = 2 * self.step, GROUP - GROUP % tall

        @njit(nogil=True, error_model="numpy", inline="never")
        def block(a, a_row, a_step, bb, b_row, steps, c, c_row, ahead):
            for at in range(0, GROUP * 4, wide):
                r = 0
                while r < left:
                    later = ahead + r // 2 * a_row
                    main(
                        a + r * a_row, a_row, a_step, bb + at, b_row, steps, c + r * c_row + at, c_row, later
                    )
                    r += tall
                if r < GROUP:
                    later = ahead + r // 2 * a_row
                    rest(
                        a + r * a_row, a_row, a_step, bb + at, b_row, steps, c + r * c_row + at, c_row, later
                    )

        return block

    def _tiles(self, added: bool, foresee: bool) -> Any:
        def body(b, a, a_row, a_step, bb, b_row, steps, c, c_row, ahead):
            def place(base: ir.Value, offset: ir.Value | int = 0) -> ir.Value:
                offset = I64(offset) if isinstance(offset, int) else offset
                return b.inttoptr(b.add(base, offset), I8.as_pointer())

            below_a, below_c = b.mul(a_row, I64(16)), b.mul(c_row, I64(16))
            corners = [place(c), place(c, 64), place(c, below_c), place(b.add(c, below_c), 64)]
            for n, corner in enumerate(corners):
                if added:
                    self._tile(b, "tileloadd64", I8(n), corner, c_row)
                else:
                    self._tile(b, "tilezero", I8(n))
            with cgutils.for_range(b, steps, intp=I64) as loop:
                from_a = b.add(a, b.mul(loop.index, a_step))
                from_b = b.add(bb, b.mul(b.mul(loop.index, I64(16)), b_row))
                self._tile(b, "tileloadd64", I8(6), place(from_b), b_row)
                self._tile(b, "tileloadd64", I8(4), place(from_a), a_row)
                self._tile(b, "tdpbf16ps", I8(0), I8(4), I8(6))
                later = b.add(ahead, b.mul(loop.index, a_step))
                for r in range(16 if foresee else 0):
                    self._fetch(b, place(later, b.mul(a_row, I64(r))))
                self._tile(b, "tileloadd64", I8(7), place(from_b, 64), b_row)
                self._tile(b, "tdpbf16ps", I8(1), I8(4), I8(7))
                self._tile(b, "tileloadd64", I8(5), place(from_a, below_a), a_row)
                self._tile(b, "tdpbf16ps", I8(2), I8(5), I8(6))
                self._tile(b, "tdpbf16ps", I8(3), I8(5), I8(7))
            for n, corner in enumerate(corners):
                self._tile(b, "tilestored64", I8(n), corner, c_row)

        return _emit(_void(9), body, "a, a_row, a_step, bb, b_row, steps, c, c_row, ahead")

    def _fetch(self, b: ir.IRBuilder, pointer: ir.Value) -> None:
        """Ask for a line of memory, to be read soon."""
        flags = [I32(0), I32(3), I32(1)]
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        name = "llvm.prefetch.p0"
        b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), [pointer, *flags])

    def dot(self, w: Words, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """total + the products of the low halves and of the high halves."""
        if self.isa.pairs == "plain":
            return w.fma(_high(w, x), _high(w, y), w.fma(_low(w, x), _low(w, y), total))
        pairs = ir.VectorType(_Bfloat(), 2 * self.lanes)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
        return w.call(name, w.f, total, w.b.bitcast(x, pairs), w.b.bitcast(y, pairs))

    def _dots(self, rows: int, added: bool, foresee: bool) -> Any:
        """`rows` rows and two vectors of lanes of a product; half as many rows of an A that comes later asked for."""

        def body(b, a, a_row, a_step, bb, b_row, steps, c, c_row, ahead):
            w = self.words(b)
            cells = [[cgutils.alloca_once(b, w.f) for _ in range(2)] for _ in range(rows)]
            for r, row in enumerate(cells):
                for v, cell in enumerate(row):
                    at = b.add(b.mul(c_row, I64(r)), I64(v * self.step))
                    b.store(w.load(c, at) if added else w.k(0.0), cell)
            with cgutils.for_range(b, steps, intp=I64) as step:
                first_a = b.add(a, b.mul(step.index, a_step))
                first_b = b.add(bb, b.mul(b.mul(step.index, I64(16)), b_row))
                later = b.add(ahead, b.mul(step.index, a_step))
                for r in range(rows // 2 if foresee else 0):
                    w.prefetch(later, b.mul(a_row, I64(r)))
                with cgutils.for_range(b, I64(16), intp=I64) as loop:
                    from_b = b.add(first_b, b.mul(loop.index, b_row))
                    from_a = b.add(first_a, b.shl(loop.index, I64(2)))
                    columns = [w.load(from_b, v * self.step, w.i) for v in range(2)]
                    for r, row in enumerate(cells):
                        pair = w.splat(w.load(from_a, b.mul(a_row, I64(r)), I32))
                        for cell, column in zip(row, columns, strict=True):
                            b.store(self.dot(w, b.load(cell), pair, column), cell)
            for r, row in enumerate(cells):
                for v, cell in enumerate(row):
                    w.store(b.load(cell), c, b.add(b.mul(c_row, I64(r)), I64(v * self.step)))

        return _emit(_void(9), body, "a, a_row, a_step, bb, b_row, steps, c, c_row, ahead")

    # ---- layouts ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def pack_square(self) -> Any:
        """pack(addresses, offset, to): `lanes` rows given by address, `lanes` pairs of each at `offset`, transposed
        to rows of a tile."""

        def body(b, addresses, offset, to):
            w = self.words(b)
            rows = [w.load(w.load(addresses, 8 * r, I64), offset, w.i) for r in range(self.lanes)]
            for r, row in enumerate(w.transpose(rows)):
                w.store(row, to, r * ROW)

        return _emit(_void(3), body, "addresses, offset, to")

    @functools.cached_property
    def turn_square(self) -> Any:
        """turn(source, row bytes, to): 2 `lanes` rows of `lanes` numbers, transposed to rows of 64 bytes."""

        def body(b, source, row, to):
            w = self.words(b)
            short = ir.VectorType(I16, self.lanes)
            pairs = []
            for r in range(self.lanes):
                x, y = (w.load(source, b.mul(row, I64(2 * r + n)), short) for n in range(2))
                pairs.append(b.or_(b.zext(x, w.i), b.shl(b.zext(y, w.i), w.n(16))))
            for r, turned in enumerate(w.transpose(pairs)):
                w.store(turned, to, 64 * r)

        return _emit(_void(3), body, "source, row, to")

    @functools.cached_property
    def zip_rows(self) -> Any:
        """zip(x, y, to): `lanes` numbers of two rows as pairs."""

        def body(b, x, y, to):
            w = self.words(b)
            short = ir.VectorType(I16, self.lanes)
            low, high = (b.zext(w.load(at, 0, short), w.i) for at in (x, y))
            w.store(b.or_(low, b.shl(high, w.n(16))), to)

        return _emit(_void(3), body, "x, y, to")

    @functools.cached_property
    def copy_vector(self) -> Any:
        """copy(source, to): `lanes` numbers of bf16."""

        def body(b, source, to):
            w = self.words(b)
            w.store(w.load(source, 0, ir.VectorType(I16, self.lanes)), to)

        return _emit(_void(2), body, "source, to")

    @functools.cached_property
    def clear_vector(self) -> Any:
        """clear(to): `lanes` zeros of bf16."""

        def body(b, to):
            w = self.words(b)
            w.store(ir.Constant(ir.VectorType(I16, self.lanes), [0] * self.lanes), to)

        return _emit(_void(1), body, "to")

    # ---- score tiles -----------------------------------------------------------------------------------------

    def _rows(self, b: ir.IRBuilder, base: ir.Value, count: ir.Value) -> Any:
        """A loop over rows of a tile: yields the address of each."""
        return _RowLoop(b, base, count)

    @functools.cached_property
    def lift(self) -> Any:
        """lift(s, count, factor): one strip of a tile, s *= factor."""

        def body(b, s, count, factor):
            w = self.words(b)
            with self._rows(b, s, count) as row:
                for v in range(self.strip_vectors):
                    w.store(b.fmul(w.load(row, v * self.step), w.splat(factor)), row, v * self.step)

        return _emit(_void(2, f32), body, "s, count, factor")

    def highest(self, strips: int) -> Any:
        """highest(s, top, count, factor): neighbouring strips of a tile, top = factor * the largest of each lane;
        factor > 0."""

        def body(b, s, top, count, factor):
            w = self.words(b)
            cells = [cgutils.alloca_once(b, w.f) for _ in range(strips * self.strip_vectors)]
            for cell in cells:
                b.store(w.k(float("-inf")), cell)
            with self._rows(b, s, count) as row:
                for v, cell in enumerate(cells):
                    b.store(w.maximum(w.load(row, v * self.step), b.load(cell)), cell)
            for v, cell in enumerate(cells):
                w.store(b.fmul(b.load(cell), w.splat(factor)), top, v * self.step)

        return _emit(_void(3, f32), body, "s, top, count, factor")

    @functools.cached_property
    def advance(self) -> Any:
        """advance(top, m, pivot, l, alpha): `Micro.advance`, but m stays where a block's maximum exceeds it by less
        than STALE: weights are then at most e^STALE, and acc need not be rescaled."""

        def body(b, top, m, pivot, total, alpha):
            w = self.words(b)
            old, highest = w.load(m), w.load(top)
            new = b.select(b.fcmp_ordered(">", highest, b.fadd(old, w.k(STALE))), highest, old)
            base = b.select(b.fcmp_ordered("==", new, w.k(float("-inf"))), w.k(0.0), new)
            factor = w.weight(b.fsub(old, base))
            w.store(new, m)
            w.store(base, pivot)
            w.store(factor, alpha)
            w.store(b.fmul(w.load(total), factor), total)

        return _emit(_void(5), body, "top, m, pivot, total, alpha")

    def exponentials(self, strips: int) -> Any:
        """exponentials(s, pivot, l, pairs, factor): neighbouring strips of a tile, p = e^(factor s - pivot), l += the
        sums of p before rounding; rows 2 n and 2 n + 1 become pairs in row n."""

        def body(b, s, pivot, total, pairs, factor):
            w = self.words(b)
            vectors = range(strips * self.strip_vectors)
            base = [b.fneg(w.load(pivot, v * self.step)) for v in vectors]
            sums = [cgutils.alloca_once(b, w.f) for _ in vectors]
            for cell in sums:
                b.store(w.k(0.0), cell)
            scale = w.splat(factor)
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                to = b.add(s, b.mul(loop.index, I64(ROW)))
                row = b.add(to, b.mul(loop.index, I64(ROW)))
                for two in (vectors[n : n + 2] for n in range(0, len(vectors), 2)):
                    places = [(v, n) for v in two for n in range(2)]
                    scores = [w.load(row, n * ROW + v * self.step) for v, n in places]
                    shifted = [w.fma(x, scale, base[v]) for x, (v, _) in zip(scores, places, strict=True)]
                    p = w.weights(shifted, DEGREE)
                    for v, x, y in zip(two, p[0::2], p[1::2], strict=True):
                        w.store(_zip(w, x, y), to, v * self.step)
                        b.store(b.fadd(b.load(sums[v]), b.fadd(x, y)), sums[v])
            for v in vectors:
                w.store(b.fadd(w.load(total, v * self.step), b.load(sums[v])), total, v * self.step)

        return _emit(_void(4, f32), body, "s, pivot, total, pairs, factor")

    @functools.cached_property
    def zip_tile(self) -> Any:
        """zip(s, pairs): one strip of a tile of weights, rows 2 n and 2 n + 1 become pairs in row n."""

        def body(b, s, pairs):
            w = self.words(b)
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                to = b.add(s, b.mul(loop.index, I64(ROW)))
                row = b.add(to, b.mul(loop.index, I64(ROW)))
                for v in range(self.strip_vectors):
                    x, y = (w.load(row, n * ROW + v * self.step) for n in range(2))
                    w.store(_zip(w, x, y), to, v * self.step)

        return _emit(_void(2), body, "s, pairs")

    @functools.cached_property
    def rescale(self) -> Any:
        """rescale(acc, alpha, rows): one vector of lanes, acc *= alpha; nothing is touched where alpha is 1."""

        def body(b, acc, alpha, rows):
            w = self.words(b)
            factor = w.load(alpha)
            changed = b.bitcast(b.fcmp_unordered("!=", factor, w.k(1.0)), ir.IntType(self.lanes))
            with (
                b.if_then(b.icmp_unsigned("!=", changed, ir.Constant(changed.type, 0))),
                self._rows(b, acc, rows) as row,
            ):
                w.store(b.fmul(w.load(row), factor), row)

        return _emit(_void(3), body, "acc, alpha, rows")

    def slopes(self, fused: bool) -> Any:
        """slopes(s, dp, ds pairs, m, low, delta, pairs, factor): two rows of a tile at a time, all lanes.

        fused: p = e^(factor s - m - low) and ds = p (dp - delta); else p and ds stand in s and dp. p and ds become
        bf16 rows where s and dp were, in the first half of each row, and ds becomes pairs, row n of 2 n, 2 n + 1.
        """

        def body(b, s, dp, to, m, low, delta, pairs, factor):
            w = self.words(b)
            scale = w.splat(factor)
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                at = b.mul(loop.index, I64(2 * ROW))
                # In order: the bf16 of some lanes lies over float32 of lanes before them. Two vectors make one of bf16.
                for x in range(0, ROW, 2 * self.step):
                    weights: list[list[ir.Value]] = [[], []]
                    slopes: list[list[ir.Value]] = [[], []]
                    for n, y in ((n, y) for n in range(2) for y in (x, x + self.step)):
                        place = b.add(at, I64(n * ROW + y))
                        p, ds = w.load(s, place), w.load(dp, place)
                        if fused:
                            shifted = w.fma(p, scale, b.fneg(w.load(m, y)))
                            p = w.weight(b.fsub(shifted, w.load(low, y)), DEGREE)
                            ds = b.fmul(p, b.fsub(ds, w.load(delta, y)))
                        weights[n].append(p)
                        slopes[n].append(ds)
                    for v, (one, two) in enumerate(zip(*slopes, strict=True)):
                        w.store(
                            _zip(w, one, two), to, b.add(b.mul(loop.index, I64(ROW)), I64(x + v * self.step))
                        )
                    for base, rows in ((s, weights), (dp, slopes)):
                        for n, row in enumerate(rows):
                            w.store(_round(w, *row), base, b.add(at, I64(n * ROW + x // 2)))

        return _emit(_void(7, f32), body, "s, dp, to, m, low, delta, pairs, factor")

    @functools.cached_property
    def lane_dot(self) -> Any:
        """dot(x, y, pairs, to): one vector of lanes, the sum over two tiles of pairs of their products."""

        def body(b, x, y, pairs, to):
            w = self.words(b)
            total = cgutils.alloca_once(b, w.f)
            b.store(w.k(0.0), total)
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                at = b.mul(loop.index, I64(ROW))
                left, right = w.load(x, at, w.i), w.load(y, at, w.i)
                low = w.fma(_low(w, left), _low(w, right), b.load(total))
                b.store(w.fma(_high(w, left), _high(w, right), low), total)
            w.store(b.load(total), to)

        return _emit(_void(4), body, "x, y, pairs, to")


class _RowLoop:
    """for row in rows of a tile, as a context that gives the row's address."""

    def __init__(self, b: ir.IRBuilder, base: ir.Value, count: ir.Value) -> None:
        self.b, self.base, self.loop = b, base, cgutils.for_range(b, count, intp=I64)

    def __enter__(self) -> ir.Value:
        index = self.loop.__enter__().index
        return self.b.add(self.base, self.b.mul(index, I64(ROW)))

    def __exit__(self, *error: Any) -> None:
        self.loop.__exit__(*error)
