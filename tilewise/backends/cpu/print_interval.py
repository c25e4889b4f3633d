"""The mask's interval form printed as scalar code: is a tile EMPTY, PARTIAL or FULL?

Integers are int64 pairs (least, greatest), conditions pairs (certain, possible). What depends on the tile in a
way this printer does not follow (floats, a leaf read by computed indices) may be anything; such masks are
classified by `tilewise.spec.tiles` on the host instead. Conditions and integers read by plain indices: `leaf_bounds`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llvmlite.ir as ir

from tilewise.backends.cpu.leaf_bounds import LeafBounds, Pair, is_read
from tilewise.backends.cpu.parameters import LANES, NUMBER
from tilewise.backends.cpu.words import I1, I8, I32, I64
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.backends.cpu.slots import Slots
    from tilewise.spec.expression import Node


def needs_table(keep: Node, slots: Slots) -> bool:
    """Whether the mask reads a leaf along rows, columns or positions in a way for which a host table says more."""
    along = (
        site for site in ex.loads(keep) if any(ex.variables(a) & {"i", "j", "q", "k"} for a in site.args)
    )
    return any(not is_read(site, slots) for site in along)


class IntervalPrinter:
    """Prints bounds of nodes at the builder's place."""

    def __init__(
        self, builder: ir.IRBuilder, slots: Slots, packed: bool, arguments: tuple[ir.Value, ...]
    ) -> None:
        self.b, self.slots, self.packed = builder, slots, packed
        self.spec, self.scratch, *self.tile = arguments
        self.known: dict[Node, Pair | None] = {}

    def classify(self, keep: Node) -> ir.Value:
        """0 EMPTY, 1 PARTIAL, 2 FULL, as int64."""
        for node in ex.topological(keep):
            self.known[node] = self._bounds(node)
        certain, possible = self._condition(keep)
        return self.b.add(self.b.zext(certain, I64), self.b.zext(possible, I64))

    def _condition(self, node: Node) -> Pair:
        found = self.known[node]
        return (I1(0), I1(1)) if found is None else found

    def _load(self, base: ir.Value, offset: int, type_: ir.Type, align: int = 4) -> ir.Value:
        return self.b.load(self.b.inttoptr(self.b.add(base, I64(offset)), type_.as_pointer()), align=align)

    def _number(self, n: int) -> ir.Value:
        return self.b.sext(self._load(self.scratch, LANES.numbers + 4 * n, I32), I64)

    def _int32(self, low: ir.Value, high: ir.Value) -> Pair:
        """Bounds as int32 keeps them: who leaves it may be anything."""
        b = self.b
        wraps = b.or_(b.icmp_signed("<", low, I64(ex.INT_MIN)), b.icmp_signed(">", high, I64(ex.INT_MAX)))
        return b.select(wraps, I64(ex.INT_MIN), low), b.select(wraps, I64(ex.INT_MAX), high)

    def _bounds(self, node: Node) -> Pair | None:
        b, args = self.b, [self.known[a] for a in node.args]
        match node.op:
            case "const":
                if node.type == "float":
                    return None
                value = (I1 if node.type == "bool" else I64)(int(node.value))  # type: ignore[arg-type]
                return value, value
            case "var":
                return self._variable(str(node.value))
            case "int_scalar":
                at = 8 * (self.slots.ints_at + int(node.value))  # type: ignore[arg-type]
                value = b.sext(self._load(self.spec, at, I32), I64)
                return value, value
            case "load":
                return self._leaf(node, args)
            case "not":
                certain, possible = self._condition(node.args[0])
                return b.not_(possible), b.not_(certain)
            case "and" | "or":
                (a, c), (d, e) = (self._condition(x) for x in node.args)
                join = b.and_ if node.op == "and" else b.or_
                return join(a, d), join(c, e)
            case "to_int" if node.args[0].type == "bool":
                certain, possible = self._condition(node.args[0])
                return b.zext(certain, I64), b.zext(possible, I64)
            case "where":
                return self._where(node, args)
        if any(a is None for a in args) or node.type == "float" or node.args[0].type == "float":
            return None
        if node.op in ("lt", "le", "gt", "ge", "eq", "ne"):
            return self._compare(node.op, *args)  # type: ignore[misc]
        return self._arithmetic(node.op, *args)  # type: ignore[misc]

    def _variable(self, name: str) -> Pair:
        b, (i0, i1, j0, j1) = self.b, self.tile
        if name in "ij":
            return (i0, i1) if name == "i" else (j0, j1)
        if name in "qk":
            offset = self._number(NUMBER.q_offset if name == "q" else NUMBER.k_offset)
            low, high = (i0, i1) if name == "q" else (j0, j1)
            return b.add(low, offset), b.add(high, offset)
        if name == "h":
            return self._number(NUMBER.h_first), self._number(NUMBER.h_last)
        value = self._number(NUMBER.b if name == "b" else NUMBER.g)
        return value, value

    def _leaf(self, node: Node, args: list[Pair | None]) -> Pair | None:
        """The element itself where every index is one number on every tile."""
        exact = {"b", "g"} if self.packed else {"b", "g", "h"}
        element = self.slots.elements[int(node.value)]  # type: ignore[arg-type]
        plain = node.type != "float" and element in ("i8", "u8", "i32", "i64")
        if any(a is None for a in args) or not plain:
            return None
        if any(not ex.variables(a) <= exact for a in node.args):
            if not is_read(node, self.slots):
                return None
            return LeafBounds(self.b, self.slots, self.spec).read(node, args)  # type: ignore[arg-type]
        b, at = self.b, self.slots.leaf_at[int(node.value)]  # type: ignore[arg-type]
        address = self._load(self.spec, 8 * at, I64)
        for n, (index, _) in enumerate(args):  # type: ignore[misc]
            last = b.sub(self._load(self.spec, 8 * (at + 1 + 2 * n), I64), I64(1))
            index = b.select(b.icmp_signed("<", index, I64(0)), I64(0), index)
            index = b.select(b.icmp_signed(">", index, last), last, index)
            address = b.add(address, b.mul(index, self._load(self.spec, 8 * (at + 2 + 2 * n), I64)))
        raw = self._load(address, 0, {"i8": I8, "u8": I8, "i32": I32, "i64": I64}[element])
        if node.type == "bool":
            truth = b.icmp_signed("!=", raw, ir.Constant(raw.type, 0))
            return truth, truth
        if element == "i64":
            raw = b.trunc(raw, I32)
        value = b.zext(raw, I64) if element == "u8" else b.sext(raw, I64)
        return value, value

    def _where(self, node: Node, args: list[Pair | None]) -> Pair | None:
        if node.type == "float" or args[1] is None or args[2] is None:
            return None
        b, (certain, possible), (a, c), (d, e) = self.b, self._condition(node.args[0]), args[1], args[2]
        if node.type == "bool":
            low, high = b.and_(a, d), b.or_(c, e)
        else:
            low = b.select(b.icmp_signed("<", a, d), a, d)
            high = b.select(b.icmp_signed(">", c, e), c, e)
        low = b.select(certain, a, b.select(possible, low, d))
        return low, b.select(certain, c, b.select(possible, high, e))

    def _compare(self, op: str, x: Pair, y: Pair) -> Pair:
        b = self.b
        if op in ("gt", "ge"):
            return self._compare({"gt": "lt", "ge": "le"}[op], y, x)
        if op in ("lt", "le"):
            sign = "<" if op == "lt" else "<="
            return b.icmp_signed(sign, x[1], y[0]), b.icmp_signed(sign, x[0], y[1])
        meet = b.and_(b.icmp_signed("<=", x[0], y[1]), b.icmp_signed("<=", y[0], x[1]))
        single = b.and_(b.icmp_signed("==", x[0], x[1]), b.icmp_signed("==", y[0], y[1]))
        same = b.and_(single, b.icmp_signed("==", x[0], y[0]))
        return (same, meet) if op == "eq" else (b.not_(meet), b.not_(same))

    def _arithmetic(self, op: str, x: Pair, y: Pair = (None, None)) -> Pair | None:  # type: ignore[assignment]
        b = self.b

        def least(p: ir.Value, q: ir.Value) -> ir.Value:
            return b.select(b.icmp_signed("<", p, q), p, q)

        def most(p: ir.Value, q: ir.Value) -> ir.Value:
            return b.select(b.icmp_signed(">", p, q), p, q)

        match op:
            case "add":
                return self._int32(b.add(x[0], y[0]), b.add(x[1], y[1]))
            case "sub":
                return self._int32(b.sub(x[0], y[1]), b.sub(x[1], y[0]))
            case "neg":
                return self._int32(b.neg(x[1]), b.neg(x[0]))
            case "abs":
                low, high = b.neg(x[1]), b.neg(x[0])
                return self._int32(most(most(x[0], low), I64(0)), most(x[1], high))
            case "mul":
                corners = [b.mul(p, q) for p in x for q in y]
                low, high = corners[0], corners[0]
                for corner in corners[1:]:
                    low, high = least(low, corner), most(high, corner)
                return self._int32(low, high)
            case "min":
                return least(x[0], y[0]), least(x[1], y[1])
            case "max":
                return most(x[0], y[0]), most(x[1], y[1])
            case "floordiv" | "mod":
                return self._divide(op, x, y)
        return None

    def _floor(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x // y rounded down, y > 0."""
        b = self.b
        quotient = b.sdiv(x, y)
        below = b.and_(b.icmp_signed("<", x, I64(0)), b.icmp_signed("!=", b.mul(quotient, y), x))
        return b.sub(quotient, b.zext(below, I64))

    def _divide(self, op: str, x: Pair, y: Pair) -> Pair:
        """Exact for one positive divisor; anything for others."""
        b = self.b
        known = b.and_(b.icmp_signed("==", y[0], y[1]), b.icmp_signed(">", y[0], I64(0)))
        divisor = b.select(known, y[0], I64(1))
        first, last = self._floor(x[0], divisor), self._floor(x[1], divisor)
        if op == "mod":
            # Inside one period the remainder is the dividend, shifted.
            one, start = b.icmp_signed("==", first, last), b.mul(first, divisor)
            first = b.select(one, b.sub(x[0], start), I64(0))
            last = b.select(one, b.sub(x[1], start), b.sub(divisor, I64(1)))
        return b.select(known, first, I64(ex.INT_MIN)), b.select(known, last, I64(ex.INT_MAX))
