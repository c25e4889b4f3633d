"""Bounds of what a tile reads of a leaf, by reading it: conditions and integers whose every index is a variable.

The numbers of a tile's edge or area are few beside its products, and nothing of the size of the mask is made before
the first tile. Rows of the leaf are read by vectors where they are contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llvmlite.ir as ir

from tilewise.backends.cpu.counted import loop
from tilewise.backends.cpu.words import I8, I32, I64
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.backends.cpu.slots import Slots
    from tilewise.spec.expression import Node

Pair = tuple[ir.Value, ir.Value]
_RAW = {"i8": I8, "u8": I8, "i32": I32, "i64": I64}
RUN = {"i8": 32, "u8": 32, "i32": 8, "i64": 8}
"""Elements read at once."""


def is_read(site: Node, slots: Slots) -> bool:
    """Whether a load's bounds come from reading its leaf."""
    element = slots.elements[int(site.value)]  # type: ignore[arg-type]
    kinds = {"bool": ("i8", "u8"), "int": ("i32", "i64")}
    return element in kinds.get(site.type, ()) and all(a.op == "var" for a in site.args)


class LeafBounds:
    """(all, any) of a leaf's conditions, or the least and the greatest of its integers, over ranges of its indices."""

    def __init__(self, builder: ir.IRBuilder, slots: Slots, spec: ir.Value) -> None:
        self.b, self.slots, self.spec = builder, slots, spec

    def _number(self, slot: int) -> ir.Value:
        return self._load(self.b.add(self.spec, I64(8 * slot)), I64, 8)

    def _load(self, address: ir.Value, type_: ir.Type, align: int) -> ir.Value:
        return self.b.load(self.b.inttoptr(address, type_.as_pointer()), align=align)

    def _clamped(self, x: ir.Value, last: ir.Value) -> ir.Value:
        b = self.b
        x = b.select(b.icmp_signed("<", x, I64(0)), I64(0), x)
        return b.select(b.icmp_signed(">", x, last), last, x)

    def read(self, node: Node, ranges: list[Pair]) -> Pair:
        """The bounds as int64, or as conditions; `ranges` are the least and the greatest value of each index."""
        b, at = self.b, self.slots.leaf_at[int(node.value)]  # type: ignore[arg-type]
        element = self.slots.elements[int(node.value)]  # type: ignore[arg-type]
        starts, counts, strides = [], [], []
        for n, (low, high) in enumerate(ranges):
            last = b.sub(self._number(at + 1 + 2 * n), I64(1))
            low, high = self._clamped(low, last), self._clamped(high, last)
            strides.append(self._number(at + 2 + 2 * n))
            starts.append(b.mul(low, strides[-1]))
            counts.append(b.add(b.sub(high, low), I64(1)))
        run = (_Conditions if node.type == "bool" else _Integers)(b, element, self._load)

        def nest(n: int, address: ir.Value) -> None:
            address = b.add(address, starts[n])
            if n == len(ranges) - 1:
                run.add(address, counts[n], strides[n])
                return
            with loop(b, counts[n], "read", run.settled) as index:
                nest(n + 1, b.add(address, b.mul(index, strides[n])))

        nest(0, self._number(at))
        return run.bounds()


class _Run:
    """What is found so far, in two cells; `size` is the bytes of an element."""

    def __init__(self, b: ir.IRBuilder, element: str, load: object) -> None:
        self.b, self.element, self.load = b, element, load
        self.raw, self.lanes = _RAW[element], RUN[element]
        self.size = self.raw.width // 8
        self.many = ir.VectorType(self.raw, self.lanes)

    def add(self, address: ir.Value, count: ir.Value, stride: ir.Value) -> None:
        """`count` elements from an address on."""
        b, lanes = self.b, I64(self.lanes)
        adjacent = b.icmp_signed("==", stride, I64(self.size))
        vectors = b.select(adjacent, b.udiv(count, lanes), I64(0))
        with loop(b, vectors, "vector") as index:
            place = b.add(address, b.mul(index, I64(self.lanes * self.size)))
            self.vector(self.load(place, self.many, self.size))  # type: ignore[operator]
        rest = b.mul(vectors, lanes)
        with loop(b, b.sub(count, rest), "element") as index:
            place = b.add(address, b.mul(b.add(rest, index), stride))
            self.one(self.load(place, self.raw, self.size))  # type: ignore[operator]

    def vector(self, raw: ir.Value) -> None:
        raise NotImplementedError

    def one(self, raw: ir.Value) -> None:
        raise NotImplementedError


class _Conditions(_Run):
    """Cells: one is False, one is True."""

    def __init__(self, b: ir.IRBuilder, element: str, load: object) -> None:
        super().__init__(b, element, load)
        self.cells = [b.alloca(I8, name=name) for name in ("hidden", "seen")]
        for cell in self.cells:
            b.store(I8(0), cell)

    def _note(self, *found: ir.Value) -> None:
        for cell, here in zip(self.cells, found, strict=True):
            self.b.store(self.b.or_(self.b.load(cell), self.b.zext(here, I8)), cell)

    def _flags(self) -> list[ir.Value]:
        return [self.b.icmp_signed("!=", self.b.load(cell), I8(0)) for cell in self.cells]

    def settled(self) -> ir.Value:
        """Both are found: more reading changes nothing."""
        return self.b.and_(*self._flags())

    def vector(self, raw: ir.Value) -> None:
        whole = ir.IntType(self.lanes)
        true = self.b.bitcast(self.b.icmp_signed("!=", raw, ir.Constant(raw.type, [0] * self.lanes)), whole)
        self._note(*(self.b.icmp_signed("!=", true, ir.Constant(whole, none)) for none in (-1, 0)))

    def one(self, raw: ir.Value) -> None:
        self._note(*(self.b.icmp_signed(sign, raw, I8(0)) for sign in ("==", "!=")))

    def bounds(self) -> Pair:
        hidden, seen = self._flags()
        return self.b.not_(hidden), seen


class _Integers(_Run):
    """Cells: vectors of the least and the greatest. An int64 beyond int32 wraps, as it does in a fold."""

    settled = None

    def __init__(self, b: ir.IRBuilder, element: str, load: object) -> None:
        super().__init__(b, element, load)
        self.wide = ir.VectorType(I32, self.lanes)
        self.cells = [b.alloca(self.wide, name=name) for name in ("least", "greatest")]
        for cell, value in zip(self.cells, (ex.INT_MAX, ex.INT_MIN), strict=True):
            b.store(ir.Constant(self.wide, [value] * self.lanes), cell)

    def vector(self, raw: ir.Value) -> None:
        b = self.b
        values = b.trunc(raw, self.wide) if self.raw == I64 else raw
        for cell, sign in zip(self.cells, ("<", ">"), strict=True):
            old = b.load(cell)
            b.store(b.select(b.icmp_signed(sign, values, old), values, old), cell)

    def one(self, raw: ir.Value) -> None:
        value = self.b.trunc(raw, I32) if self.raw == I64 else raw
        undefined = ir.Constant(self.wide, ir.Undefined)
        first = self.b.insert_element(undefined, value, I32(0))
        same = self.b.shuffle_vector(first, undefined, ir.Constant(self.wide, [0] * self.lanes))
        for cell, sign in zip(self.cells, ("<", ">"), strict=True):
            old = self.b.load(cell)
            self.b.store(self.b.select(self.b.icmp_signed(sign, same, old), same, old), cell)

    def bounds(self) -> Pair:
        b, found = self.b, []
        for cell, sign in zip(self.cells, ("<", ">"), strict=True):
            vector = b.load(cell)
            value = b.extract_element(vector, I32(0))
            for lane in range(1, self.lanes):
                other = b.extract_element(vector, I32(lane))
                value = b.select(b.icmp_signed(sign, other, value), other, value)
            found.append(b.sext(value, I64))
        return found[0], found[1]
