"""Numba intrinsics from LLVM text, and those that count, place, fill and copy what lanes have."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.backends.cpu.isa import STRIP
from tilewise.backends.cpu.words import F32, I32, I64, Words

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewise.backends.cpu.isa import Isa

i64, f32 = types.int64, types.float32


def _emit(signature: Any, body: Callable[..., Any], arguments: str) -> Any:
    """An intrinsic of this signature whose code `body(builder, *values)` emits; a void one returns nothing."""
    names = arguments.replace(" ", "").split(",")

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, values: tuple) -> Any:
        result = body(builder, *values)
        return context.get_dummy_value() if signature.return_type == types.void else result

    scope: dict[str, Any] = {"pair": (signature, codegen)}
    # Numba reads the argument names of the typing function, so it is written out.
    exec(f"def word(typingctx, {', '.join(names)}):\n    return pair", scope)
    return intrinsic(scope["word"])


def _void(count: int, *more: Any) -> Any:
    return types.void(*[i64] * count, *more)


class LaneWords:
    """The intrinsics of one target and one storage type that know of lanes alone."""

    def __init__(self, isa: Isa, dtype: str) -> None:
        self.isa, self.dtype = isa, dtype
        self.lanes, self.size = isa.lanes, 4 if dtype == "fp32" else 2
        self.vector_bytes = 4 * isa.lanes
        self.strip_vectors = STRIP // isa.lanes

    def words(self, b: ir.IRBuilder) -> Words:
        return Words(b, self.lanes, self.isa.half)

    @functools.cached_property
    def fill(self) -> Any:
        """fill(to, count, value): `count` float32, a multiple of lanes. A loop in Numba stores them one by one, 4096
        for a block of rows at a head size of 64, which short calls feel."""

        def body(b, to, count, value):
            w = self.words(b)
            vector = w.splat(value)
            with cgutils.for_range(b, b.udiv(count, I64(self.lanes)), intp=I64) as loop:
                w.store(vector, to, b.mul(loop.index, I64(self.vector_bytes)))

        return _emit(_void(2, f32), body, "to, count, value")

    @functools.cached_property
    def ramp(self) -> Any:
        """ramp(to, count, first, step): int64 first, first + step and so on, `count` of them and up to lanes / 2 - 1
        more."""

        def body(b, to, count, first, step):
            w = self.words(b)
            n = w.l.count
            order = ir.Constant(w.l, list(range(n)))
            numbers = b.add(w.splat_wide(first), b.mul(order, w.splat_wide(step)))
            with cgutils.for_range(b, b.udiv(b.add(count, I64(n - 1)), I64(n)), intp=I64) as loop:
                at = b.mul(loop.index, I64(n))
                w.store(b.add(numbers, w.splat_wide(b.mul(at, step))), to, b.mul(at, I64(8)))

        return _emit(_void(4), body, "to, count, first, step")

    @functools.cached_property
    def count_rows(self) -> Any:
        """count_rows(to, count, first, last, step): int32 first, first + step and so on, none beyond last, `count` of
        them, a multiple of lanes."""

        def body(b, to, count, first, last, step):
            w = self.words(b)
            order, most = ir.Constant(w.i, list(range(self.lanes))), w.splat(b.trunc(last, I32))
            steps, begin = b.mul(order, w.splat(b.trunc(step, I32))), b.trunc(first, I32)
            with cgutils.for_range(b, b.udiv(count, I64(self.lanes)), intp=I64) as loop:
                at = b.mul(loop.index, I64(self.lanes))
                start = b.add(begin, b.mul(b.trunc(at, I32), b.trunc(step, I32)))
                numbers = b.add(steps, w.splat(start))
                numbers = b.select(b.icmp_signed("<", numbers, most), numbers, most)
                w.store(numbers, to, b.mul(at, I64(4)))

        return _emit(_void(5), body, "to, count, first, last, step")

    @functools.cached_property
    def place_rows(self) -> Any:
        """place_rows(to, numbers, count, base, step): int64 base + number step of `count` int32 numbers."""

        def body(b, to, numbers, count, base, step):
            w = self.words(b)
            half = w.l.count
            with cgutils.for_range(b, b.udiv(count, I64(half)), intp=I64) as loop:
                at = b.mul(loop.index, I64(half))
                number = b.sext(w.load(numbers, b.mul(at, I64(4)), ir.VectorType(I32, half)), w.l)
                place = b.add(w.splat_wide(base), b.mul(number, w.splat_wide(step)))
                w.store(place, to, b.mul(at, I64(8)))

        return _emit(_void(5), body, "to, numbers, count, base, step")

    @functools.cached_property
    def copy(self) -> Any:
        """copy(source, to, count): float32, or what is as large."""

        def body(b, source, to, count):
            w = self.words(b)
            whole = b.udiv(count, I64(self.lanes))
            with cgutils.for_range(b, whole, intp=I64) as loop:
                at = b.mul(loop.index, I64(self.vector_bytes))
                w.store(w.load(source, at), to, at)
            with cgutils.for_range_slice(b, b.mul(whole, I64(self.lanes)), count, I64(1), intp=I64) as (
                index,
                _,
            ):
                w.store(w.load(source, b.mul(index, I64(4)), F32), to, b.mul(index, I64(4)))

        return _emit(_void(3), body, "source, to, count")
