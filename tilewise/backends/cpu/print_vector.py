"""The expression tree printed as vector code: lanes are rows of q, the loop runs over keys.

Each node is computed in the outermost place it can be: once per call, once per row vector (what depends on q,
i and, where a block holds several heads, h), once per key (k and j, as scalars), or per pair. A load reads one
element where its indices are scalars and gathers where they are not; indices are clamped to the leaf, size-1
dimensions have stride 0 in effect, offsets come from strides. Nothing is contracted.

Arithmetic is that of `tilewise.spec.expression`: int32 and float32, `//` and `%` round down, x // 0 = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llvmlite.ir as ir

from tilewise.backends.cpu.parameters import LANES, NUMBER
from tilewise.backends.cpu.words import F32, F64, HALF, I1, I8, I16, I32, I64, Words, single

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tilewise.backends.cpu.slots import Slots
    from tilewise.spec.expression import Node

LANE, KEY = 1, 2
"""What a value depends on: the row of q, the key. 3: the pair."""
_INFIX_INT = {"add": "add", "sub": "sub", "mul": "mul"}
_INFIX_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_RAW = {
    "f32": F32,
    "f64": F64,
    "f16": HALF,
    "bf16": I16,
    "i8": I8,
    "u8": I8,
    "i16": I16,
    "i32": I32,
    "i64": I64,
}
SIZES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i16": 2, "i32": 4, "i64": 8}


def ranks(order: Iterable[Node], packed: bool) -> dict[Node, int]:
    """What each node depends on."""
    own = {
        "i": LANE,
        "q": LANE,
        "j": KEY,
        "k": KEY,
        "s": LANE | KEY,
        "b": 0,
        "g": 0,
        "h": LANE if packed else 0,
    }
    found: dict[Node, int] = {}
    for node in order:
        rank = own[str(node.value)] if node.op == "var" else 0
        for a in node.args:
            rank |= found[a]
        found[node] = rank
    return found


class VectorPrinter:
    """Prints nodes one after another at the builder's place. `values` holds what is printed so far."""

    def __init__(
        self, words: Words, slots: Slots, rank: dict[Node, int], spec: ir.Value, scratch: ir.Value
    ) -> None:
        self.w, self.b, self.slots, self.rank = words, words.b, slots, rank
        self.spec, self.scratch = spec, scratch
        self.values: dict[Node, ir.Value] = {}
        self.variables: dict[str, ir.Value] = {}
        self.staged: dict[Node, ir.Value] = {}

    # ---- pieces ----------------------------------------------------------------------------------------------

    def is_vector(self, node: Node) -> bool:
        return bool(self.rank[node] & LANE)

    def vector(self, node: Node) -> ir.Value:
        """The node's value with one element per lane."""
        value = self.values[node]
        return value if self.is_vector(node) else self.w.splat(value)

    def slot(self, n: int, type_: ir.Type = I64) -> ir.Value:
        return self.w.load(self.spec, 8 * n, type_)

    def number(self, n: int) -> ir.Value:
        return self.w.load(self.scratch, LANES.numbers + 4 * n, I32)

    def emit(self, node: Node) -> None:
        """Print one node; its arguments are printed already."""
        self.values[node] = self._value(node)

    def _value(self, node: Node) -> ir.Value:
        match node.op:
            case "const":
                kind = {"bool": I1, "int": I32, "float": F32}[node.type]
                return ir.Constant(kind, single(node.value) if node.type == "float" else int(node.value))  # type: ignore[arg-type]
            case "var":
                name = str(node.value)
                if name in self.variables:
                    return self.variables[name]
                return self.number({"b": NUMBER.b, "g": NUMBER.g, "h": NUMBER.h_first}[name])
            case "int_scalar":
                return self.slot(self.slots.ints_at + int(node.value), I32)  # type: ignore[arg-type]
            case "float_scalar":
                return self.slot(self.slots.floats_at + int(node.value), F32)  # type: ignore[arg-type]
            case "load":
                return self._load(node)
        wide = self.is_vector(node)
        args = [self.vector(a) if wide else self.values[a] for a in node.args]
        return self._apply(node, args, wide)

    def _full(self, value: float | int, wide: bool, type_: str) -> ir.Constant:
        if type_ == "float":
            return self.w.k(float(value)) if wide else ir.Constant(F32, single(float(value)))
        return self.w.n(int(value)) if wide else ir.Constant(I32, int(value))

    def _apply(self, node: Node, args: list[ir.Value], wide: bool) -> ir.Value:
        b, kind, op = self.b, node.args[0].type, node.op
        if op == "where":
            return b.select(args[0], args[1], args[2])
        if op in _COMPARE:
            return self._compare(op, args, kind)
        if op in ("and", "or"):
            return b.and_(*args) if op == "and" else b.or_(*args)
        if op == "not":
            return b.not_(args[0])
        if op in ("to_int", "to_float"):
            return self._convert(args[0], kind, node.type, wide)
        if op == "neg":
            return b.fneg(args[0]) if kind == "float" else b.neg(args[0])
        if op == "abs":
            if kind == "float":
                return self._word("absolute", args[0], wide)
            return b.select(b.icmp_signed("<", args[0], self._full(0, wide, "int")), b.neg(args[0]), args[0])
        if op in ("tanh", "exp2", "log2"):
            return self._word(op, args[0], wide)
        if op in ("min", "max"):
            return self._extreme(op, args, kind)
        if op in ("floordiv", "mod"):
            if kind == "int" and wide and not self.rank[node.args[1]]:
                return self._divide_by_one(op, args[0], self.values[node.args[1]])
            return self._divide(op, args, kind, wide)
        return getattr(b, (_INFIX_FLOAT if kind == "float" else _INFIX_INT)[op])(*args)

    def _word(self, name: str, x: ir.Value, wide: bool) -> ir.Value:
        word = getattr(self.w, name)
        return word(x) if wide else self.b.extract_element(word(self.w.splat(x)), I32(0))

    def _compare(self, op: str, args: list[ir.Value], kind: str) -> ir.Value:
        if kind == "float":
            if op == "ne":
                return self.b.fcmp_unordered("!=", *args)
            return self.b.fcmp_ordered(_COMPARE[op], *args)
        return self.b.icmp_signed(_COMPARE[op], *args)

    def _convert(self, x: ir.Value, source: str, target: str, wide: bool) -> ir.Value:
        b = self.b
        if target == "float":
            type_ = self.w.f if wide else F32
            return b.uitofp(x, type_) if source == "bool" else b.sitofp(x, type_)
        type_ = self.w.i if wide else I32
        return b.zext(x, type_) if source == "bool" else b.fptosi(x, type_)

    def _extreme(self, op: str, args: list[ir.Value], kind: str) -> ir.Value:
        b, (x, y) = self.b, args
        if kind == "float":
            # NaN wins, as in torch.minimum: an unordered comparison that holds means x is taken or y is NaN.
            better = b.fcmp_ordered("<=" if op == "min" else ">=", x, y)
            return b.select(b.or_(better, b.fcmp_unordered("uno", x, x)), x, y)
        return b.select(b.icmp_signed("<=" if op == "min" else ">=", x, y), x, y)

    def _floor(self, x: ir.Value) -> ir.Value:
        count = x.type.count if isinstance(x.type, ir.VectorType) else 0
        element = x.type.element if count else x.type
        name = f"{f'v{count}' if count else ''}{'f32' if element == F32 else 'f64'}"
        return self.w.call(f"llvm.floor.{name}", x.type, x)

    def _divide(self, op: str, args: list[ir.Value], kind: str, wide: bool) -> ir.Value:
        b, (x, y) = self.b, args
        if kind == "float":
            quotient = self._floor(b.fdiv(x, y))
            return quotient if op == "floordiv" else b.fsub(x, b.fmul(quotient, y))
        # float64 holds every int32, and no quotient of two is so near an integer that its rounding crosses it.
        double = ir.VectorType(F64, self.w.lanes) if wide else F64
        zero, one = self._full(0, wide, "int"), self._full(1, wide, "int")
        none, minus = b.icmp_signed("==", y, zero), b.icmp_signed("==", y, self._full(-1, wide, "int"))
        safe = b.select(b.or_(none, minus), one, y)
        quotient = b.fptosi(self._floor(b.fdiv(b.sitofp(x, double), b.sitofp(safe, double))), x.type)
        quotient = b.select(none, zero, b.select(minus, b.neg(x), quotient))
        if op == "floordiv":
            return quotient
        return b.select(none, zero, b.sub(x, b.mul(quotient, y)))

    def _divide_by_one(self, op: str, x: ir.Value, y: ir.Value) -> ir.Value:
        """`_divide` of int32 vectors by one int32."""
        b, zero = self.b, self.w.n(0)
        if isinstance(y, ir.Constant):
            if y.constant == 0:
                return zero
            quotient = self.w.divide(x, int(y.constant))
            return quotient if op == "floordiv" else b.sub(x, b.mul(quotient, self.w.splat(y)))
        none = b.icmp_signed("==", y, I32(0))
        quotient = self.w.divide(x, b.select(none, I32(1), y))
        value = quotient if op == "floordiv" else b.sub(x, b.mul(quotient, self.w.splat(y)))
        return b.select(none, zero, value)

    # ---- leaves ----------------------------------------------------------------------------------------------

    def offset(self, node: Node, without: int = -1) -> tuple[ir.Value, ir.Value | None]:
        """(scalar byte address, vector of byte offsets or None) of a load's element; or of the first along the
        dimension `without`."""
        b, at = self.b, self.slots.leaf_at[int(node.value)]  # type: ignore[arg-type]
        base, lanes = self.slot(at), None
        for n, index in enumerate(node.args):
            if n == without:
                continue
            size, stride = self.slot(at + 1 + 2 * n), self.slot(at + 2 + 2 * n)
            last = b.sub(b.trunc(size, I32), I32(1))
            if not self.is_vector(index):
                inside = self._clamp(self.values[index], last, I32(0))
                base = b.add(base, b.mul(b.sext(inside, I64), stride))
                continue
            inside = self._clamp(self.values[index], self.w.splat(last), self.w.n(0))
            if self.slots.far:
                wide = ir.VectorType(I64, self.w.lanes)
                step = b.mul(b.sext(inside, wide), self.w.splat(stride))
            else:
                step = b.mul(inside, self.w.splat(b.trunc(stride, I32)))
            lanes = step if lanes is None else b.add(lanes, step)
        return base, lanes

    def _clamp(self, x: ir.Value, last: ir.Value, zero: ir.Constant) -> ir.Value:
        b = self.b
        low = b.select(b.icmp_signed("<", x, zero), zero, x)
        return b.select(b.icmp_signed(">", low, last), last, low)

    def _load(self, node: Node) -> ir.Value:
        if node in self.staged:
            return self._staged(node)
        element = self.slots.elements[int(node.value)]  # type: ignore[arg-type]
        base, lanes = self.offset(node)
        if lanes is None:
            value = self.element(base, element, node.type)
            return self.w.splat(value) if self.is_vector(node) else value
        kind = {"float": F32, "int": I32, "bool": I8}[node.type]
        vector = ir.Constant(ir.VectorType(kind, self.w.lanes), ir.Undefined)
        for lane in range(self.w.lanes):
            step = self.b.extract_element(lanes, I32(lane))
            address = self.b.add(base, step if self.slots.far else self.b.sext(step, I64))
            value = self.element(address, element, node.type, as_byte=True)
            vector = self.b.insert_element(vector, value, I32(lane))
        if node.type == "bool":
            return self.b.icmp_signed("!=", vector, ir.Constant(vector.type, [0] * self.w.lanes))
        return vector

    def _staged(self, node: Node) -> ir.Value:
        """The vector of a load that `stage` has turned: bytes or float32."""
        if node.type == "float":
            return self.w.load(self.staged[node], 0)
        raw = self.w.load(self.staged[node], 0, ir.VectorType(I8, self.w.lanes))
        return self.b.icmp_signed("!=", raw, ir.Constant(raw.type, [0] * self.w.lanes))

    def element(self, address: ir.Value, element: str, kind: str, as_byte: bool = False) -> ir.Value:
        """The number at an address as what the tree wants; a condition as a byte where asked."""
        b, raw = self.b, self.w.load(address, 0, _RAW[element])
        if element == "bf16":
            raw = b.bitcast(b.shl(b.zext(raw, I32), I32(16)), F32)
        elif element == "f16":
            raw = b.fpext(raw, F32)
        elif element == "f64":
            raw = b.fptrunc(raw, F32)
        floating = element in ("f32", "f64", "f16", "bf16")
        if kind == "float":
            if floating:
                return raw
            return b.uitofp(raw, F32) if element == "u8" else b.sitofp(raw, F32)
        if kind == "bool":
            zero = ir.Constant(raw.type, 0.0 if floating else 0)
            truth = b.fcmp_unordered("!=", raw, zero) if floating else b.icmp_signed("!=", raw, zero)
            return b.zext(truth, I8) if as_byte else truth
        if floating:
            return b.fptosi(raw, I32)
        if raw.type.width == 64:
            return b.trunc(raw, I32)
        if raw.type.width == 32:
            return raw
        return b.zext(raw, I32) if element == "u8" else b.sext(raw, I32)
