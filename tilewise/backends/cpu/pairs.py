"""Microkernels on bf16 pairs: two neighbours along the summed dimension in one 32-bit word.

One primitive does every product,

    C[32 rows][32 lanes] (+)= sum over steps of A[32 rows][32 numbers] B[16 pairs][32 lanes],

A in bf16 rows as they lie in memory, B in rows of pairs, C in float32: by the tile registers of AMX, by the dot
products of avx512_bf16, or by plain arithmetic on the halves. All three take the same layouts, so that one set
of loops serves them. Loads of tiles need no alignment. What stays in vectors is the softmax, in `pair_tiles`.

Source: Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3 (tile configuration and
TDPBF16PS; pairs of B are rows of 64 bytes). Eight tile registers: four of C, two of A, two of B.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
from numba import njit
from numba.core import cgutils

from tilewise.backends.cpu.micro import ROW, _emit, _void
from tilewise.backends.cpu.pair_launch import GROUP
from tilewise.backends.cpu.pair_tiles import PairTiles, _high, _low
from tilewise.backends.cpu.words import I8, I16, I32, I64, Words


class _Bfloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not name: only ever an element of a vector that is cast."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash("bfloat")


class Pairs(PairTiles):
    """The intrinsics of one target that has a way to multiply pairs."""

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
