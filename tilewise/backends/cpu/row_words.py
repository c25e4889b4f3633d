"""Numba intrinsics between rows in memory and tiles, whose lanes are rows of q: to turn, widen, round and copy them."""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from tilewise.backends.cpu.isa import BLOCK_ROWS, STRIP
from tilewise.backends.cpu.lane_words import LaneWords, _emit, _void
from tilewise.backends.cpu.words import I32, I64

ROW = 4 * BLOCK_ROWS
"""Bytes of one row of a tile."""
i64, f32 = types.int64, types.float32


class RowWords(LaneWords):
    """The intrinsics of one target and one storage type that bring rows into tiles and out of them."""

    @functools.cached_property
    def pack_square(self) -> Any:
        """pack(addresses, offset, to, row bytes, scale): `lanes` rows, given by address, times `lanes` numbers at
        `offset`, transposed to rows of `to`."""

        def body(b, addresses, offset, to, to_row, scale):
            w = self.words(b)
            factor = w.splat(scale)
            rows = [w.widen(w.load(addresses, 8 * r, I64), offset, self.dtype) for r in range(self.lanes)]
            for r, row in enumerate(w.transpose(rows)):
                w.store(b.fmul(row, factor), to, b.mul(to_row, I64(r)))

        return _emit(_void(4, f32), body, "addresses, offset, to, to_row, scale")

    def unpack_square(self, dtype: str) -> Any:
        """unpack(tile, factors, empty, addresses, offset, count) -> 0, or not 0 if a number is not finite.

        `lanes` rows of a tile times the lanes' factors, transposed, rounded, stored at `offset` of the first
        `count` addresses. A lane whose factor is 0 becomes 0.
        """

        def body(b, tile, factors, addresses, offset, count):
            w = self.words(b)
            factor = w.load(factors)
            dead = b.fcmp_ordered("==", factor, w.k(0.0))
            rows = [
                b.select(dead, w.k(0.0), b.fmul(w.load(tile, r * ROW), factor)) for r in range(self.lanes)
            ]
            total = rows[0]
            for row in rows[1:]:
                total = b.fadd(total, row)
            # Lanes past the last row hold anything.
            inside = b.icmp_signed(
                "<", ir.Constant(w.i, list(range(self.lanes))), w.splat(b.trunc(count, I32))
            )
            wrong = b.fcmp_unordered("uno", b.fsub(total, total), w.k(0.0))
            wrong = b.and_(wrong, inside)
            for r, row in enumerate(w.transpose(rows)):
                with b.if_then(b.icmp_signed(">", count, I64(r))):
                    w.store(w.narrow(row, dtype), w.load(addresses, 8 * r, I64), offset)
            return b.zext(b.bitcast(wrong, ir.IntType(self.lanes)), I64)

        return _emit(i64(*[i64] * 5), body, "tile, factors, addresses, offset, count")

    @functools.cached_property
    def widen_vector(self) -> Any:
        """widen(source, to): `lanes` stored numbers as float32."""

        def body(b, source, to):
            w = self.words(b)
            w.store(w.widen(source, 0, self.dtype), to)

        return _emit(_void(2), body, "source, to")

    @functools.cached_property
    def narrow_vector(self) -> Any:
        """narrow(source, to, factor) -> not 0 if a number is not finite: float32 times factor, rounded."""

        def body(b, source, to, factor):
            w = self.words(b)
            value = b.fmul(w.load(source), w.splat(factor))
            w.store(w.narrow(value, self.dtype), to)
            wrong = b.fcmp_unordered("uno", b.fsub(value, value), w.k(0.0))
            return b.zext(b.bitcast(wrong, ir.IntType(self.lanes)), I64)

        return _emit(i64(i64, i64, f32), body, "source, to, factor")

    @functools.cached_property
    def copy_strip(self) -> Any:
        """copy_strip(source, to, count): `count` rows of one strip of a tile, side by side."""

        def body(b, source, to, count):
            w = self.words(b)
            with cgutils.for_range(b, count, intp=I64) as loop:
                row, here = (b.add(x, b.mul(loop.index, I64(n))) for x, n in ((source, ROW), (to, 4 * STRIP)))
                for at in range(0, 4 * STRIP, self.vector_bytes):
                    w.store(w.load(row, at), here, at)

        return _emit(_void(3), body, "source, to, count")

    @functools.cached_property
    def add_vector(self) -> Any:
        """add(to, source): one vector of float32."""

        def body(b, to, source):
            w = self.words(b)
            w.store(b.fadd(w.load(to), w.load(source)), to)

        return _emit(_void(2), body, "to, source")
