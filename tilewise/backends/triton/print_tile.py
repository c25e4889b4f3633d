"""The expression tree printed as Triton: values on a tile, by broadcasting.

A printed function takes whatever shapes broadcast: rows i, q as (M, 1), columns j, k as (1, N), heads as a number
or as (M, 1), s as (M, N); transposed tiles (rows (1, M), columns (N, 1)) work as well. A node is computed at the
shape of what it depends on. Arithmetic is that of `tilewise.spec.expression`: int32 and float32, `//` and `%`
round down, x // 0 = 0, a load outside its leaf reads the nearest element inside.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.backends.triton.layout import Slots
    from tilewise.spec.expression import Node

VARIABLES = "s, i, j, q, k, b, h, g"
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip
_CALLS = {"tanh": "tanh", "exp2": "tl.exp2", "log2": "tl.log2", "abs": "tl.abs", "where": "tl.where"}
_BY_TYPE = {
    "min": {"int": "tl.minimum", "float": "minimum_float"},
    "max": {"int": "tl.maximum", "float": "maximum_float"},
    "floordiv": {"int": "floordiv_int", "float": "floordiv_float"},
    "mod": {"int": "mod_int", "float": "mod_float"},
}
_TYPES = {"int": "tl.int32", "float": "tl.float32", "bool": "tl.int1"}


def literal(node: Node) -> str:
    """A typed scalar, so that no arithmetic is done by Python's rules."""
    value = node.value
    if node.type == "float":
        text = repr(float(value))  # type: ignore[arg-type]
        value = f'float("{text}")' if text in ("inf", "-inf", "nan") else text
    return f"tl.full((), {value}, {_TYPES[node.type]})"


def _has_reciprocal(divisor: ex.Node) -> bool:
    """Whether a division by it is a product with its reciprocal: of constants, where float32 holds that well."""
    if divisor.op == "const":
        return 2.0**-126 <= abs(float(divisor.value)) <= 2.0**126  # type: ignore[arg-type]
    return divisor.op == "float_scalar"


class TilePrinter:
    """Prints nodes as statements; `names` holds what is printed so far."""

    def __init__(self, slots: Slots, exact: bool = False) -> None:
        self.slots, self.exact = slots, exact
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []
        self.used: set[int] = set()
        self.fused: set[Node] = set()

    def _slot(self, at: int) -> str:
        self.used.add(at)
        return self.slots.names[at]

    def emit(self, node: Node) -> str:
        """Print a node and what it needs; returns its name."""
        order = ex.topological(node)
        uses = Counter(arg for n in order for arg in n.args)
        inner = (part for n in order if (part := self._fused_part(n)) is not None)
        self.fused = {part for part in inner if uses[part] == 1 and part not in self.names}
        for n in order:
            if n not in self.names and n not in self.fused:
                text = self._text(n)
                if n.op in ("var", "int_scalar", "float_scalar"):
                    self.names[n] = text
                    continue
                self.names[n] = f"t{len(self.names)}"
                self.lines.append(f"{self.names[n]} = {text}")
        return self.names[node]

    def _fused_part(self, node: Node) -> Node | None:
        """What is printed as a part of a node, unless others want it: a product that a float is added to or that is
        taken from it (one rounding), and the magnitude of a distance that becomes a float (whose sign is free)."""
        if self.exact:
            return None
        if node.op in ("add", "sub") and node.type == "float":
            return node.args[1] if node.args[1].op == "mul" else None
        return node.args[0] if node.op == "to_float" and _is_distance(node.args[0]) else None

    def _text(self, node: Node) -> str:
        if node.op in ("add", "sub") and node.args[1] in self.fused:
            x, y, z = (self.names[arg] for arg in (node.args[0], *node.args[1].args))
            return f"tl.fma({'-' * (node.op == 'sub')}{y}, {z}, {x})"
        a = [self.names.get(arg, "") for arg in node.args]
        match node.op:
            case "const":
                return literal(node)
            case "var":
                return str(node.value)
            case "int_scalar":
                return self._slot(self.slots.ints_at + int(node.value))  # type: ignore[arg-type]
            case "float_scalar":
                return self._slot(self.slots.floats_at + int(node.value))  # type: ignore[arg-type]
            case "load":
                return self.load(node, a)
            case "neg":
                return f"-{a[0]}" if node.type == "float" else f"0 - {a[0]}"
            case "not":
                return f"{a[0]} == 0"
            case "to_float" if node.args[0] in self.fused:
                return f"tl.abs({self.names[node.args[0].args[0]]}.to(tl.float32))"
            case "to_int" | "to_float":
                return f"{a[0]}.to({_TYPES[node.type]})"
        if node.op == "div" and (self.exact or self.slots.fine):
            return f"tl.div_rn({a[0]}, {a[1]})"
        if node.op == "div" and _has_reciprocal(node.args[1]):
            return f"{a[0]} * reciprocal({a[1]})"
        if node.op in _INFIX:
            return f"{a[0]} {_INFIX[node.op]} {a[1]}"
        if shift_of(node) is not None:
            # Exact for negative numbers, too: a shift rounds down.
            return (
                f"{a[0]} >> {shift_of(node)}"
                if node.op == "floordiv"
                else f"{a[0]} & {2 ** shift_of(node) - 1}"
            )
        if divides_by_scalar(node) and self.slots.powers is not None:
            if node.args[1].value not in self.slots.powers:
                return f"{node.op}_by({a[0]}, {a[1]})"
            return f"{a[0]} >> exponent({a[1]})" if node.op == "floordiv" else f"{a[0]} & ({a[1]} - 1)"
        if node.op in _BY_TYPE:
            return f"{_BY_TYPE[node.op][node.args[0].type]}({a[0]}, {a[1]})"
        word = "tanh_fine" if node.op == "tanh" and self.slots.fine else _CALLS[node.op]
        return f"{word}({', '.join(a)})"

    # ---- leaves ----------------------------------------------------------------------------------------------

    def index(self, node: Node, d: int, name: str) -> str | None:
        """A load's index along dimension d, clamped to the leaf; None where it takes no part."""
        slot = int(node.value)  # type: ignore[arg-type]
        if d in self.slots.leaves[slot].still:
            return None
        size = self._slot(self.slots.leaf_at[slot] + 1 + 2 * d)
        return f"inside({name}, {size})"

    def address(self, node: Node, indices: list[str | None]) -> str:
        """Pointer to a load's element from its clamped indices: what moves least is added first."""
        slot = int(node.value)  # type: ignore[arg-type]
        layout, at = self.slots.leaves[slot], self.slots.leaf_at[slot]
        parts, unit = [], ""
        for d, index in enumerate(indices):
            if index is None:
                continue
            if d == layout.unit:
                unit = f" + {index}"
                continue
            parts.append(f"{index}.to(tl.int64) * {self._slot(at + 2 + 2 * d)}")
        base = self._slot(at)
        if parts:
            times = f" * {layout.step}" if layout.step > 1 else ""
            base = f"{base} + ({' + '.join(parts)}){times}"
        return base + unit

    def load(self, node: Node, a: list[str]) -> str:
        """A leaf's element; rows and columns past the end of a leaf that is as long as the call read 0."""
        slot = int(node.value)  # type: ignore[arg-type]
        layout = self.slots.leaves[slot]
        indices = [name if d in layout.covered else self.index(node, d, name) for d, name in enumerate(a)]
        address = self.address(node, indices)
        terms = [self._within(slot, d, a[d]) for d in layout.covered]
        text = f"load_where({address}, {' & '.join(terms)})" if terms else f"tl.load({address})"
        return as_kind(text, node.type)

    def _within(self, slot: int, d: int, name: str) -> str:
        """Whether an index is inside, one bit for each vector of `step` elements."""
        layout, size = self.slots.leaves[slot], self._slot(self.slots.leaf_at[slot] + 1 + 2 * d)
        if d == layout.unit and layout.step > 1:
            return f"({name} // {layout.step} < {size} // {layout.step})"
        return f"({name} < {size})"


class AheadPrinter(TilePrinter):
    """Reads tiles of described leaves by their descriptors; `i0`, `j0` follow the tuple's own entries."""

    def load(self, node: Node, a: list[str]) -> str:
        slot = int(node.value)  # type: ignore[arg-type]
        if slot not in self.slots.described:
            return super().load(node, a)
        names = self.slots.names
        at = len(names) - len(self.slots.described) + self.slots.described.index(slot)
        layout, starts = self.slots.leaves[slot], {"i": "i0", "j": "j0"}
        indices = []
        for d, argument in enumerate(node.args):
            if d in layout.covered:
                indices.append(starts[str(argument.value)])
            else:
                indices.append(self.index(node, d, a[d]) or "0")
        tile = f"{self._slot(at)}.load([{', '.join(indices)}]).reshape(s.shape[0], s.shape[1])"
        return as_kind(tile, node.type)


def _is_distance(node: Node) -> bool:
    """Whether a node is |q - k|, which int32 holds, so that it may become a float before its sign is dropped."""
    if node.op != "abs" or node.type != "int" or node.args[0].op != "sub":
        return False
    return {str(arg.value) for arg in node.args[0].args if arg.op == "var"} == {"q", "k"}


def shift_of(node: Node) -> int | None:
    """n where a node divides an integer by the literal 2 ** n, or takes the rest."""
    if node.op not in ("floordiv", "mod") or node.args[0].type != "int" or node.args[1].op != "const":
        return None
    by = int(node.args[1].value)  # type: ignore[arg-type]
    return by.bit_length() - 1 if by > 0 and by & (by - 1) == 0 else None


def divides_by_scalar(node: Node) -> bool:
    """Whether a node divides an integer by a number of the call, or takes the rest."""
    return node.op in ("floordiv", "mod") and node.args[0].type == "int" and node.args[1].op == "int_scalar"


def as_kind(text: str, kind: str) -> str:
    """A loaded element as the tree's type."""
    return f"({text} != 0)" if kind == "bool" else f"{text}.to({_TYPES[kind]})"


def unpack(slots: Slots, used: set[int]) -> list[str]:
    """Statements that name the entries of `data` that a function uses."""
    return [f"{slots.names[at]} = data[{at}]" for at in sorted(used)]


def print_function(
    name: str, roots: tuple[Node, ...], slots: Slots, *, doc: str, like_s: bool, exact: bool = False,
    ahead: bool = False,
) -> str:  # fmt: skip
    """Text of a jit function of (s, i, j, q, k, b, h, g, data) that returns the roots (one bare, several as a tuple).

    like_s: float results are broadcast to the shape of s. exact: `/` is rounded correctly, as masks want it. ahead:
    described leaves come by descriptors, and `data` ends with where the tile begins.
    """
    printer = AheadPrinter(slots) if ahead else TilePrinter(slots, exact)
    results = []
    for root in roots:
        text = printer.emit(root)
        wide = like_s and root.type == "float" and not (root.op == "var" and root.value == "s")
        results.append(f"tl.broadcast_to({text}, s.shape)" if wide else text)
    places = [f"i0, j0 = data[{len(slots.names)}], data[{len(slots.names) + 1}]"] if ahead else []
    lines = [*unpack(slots, printer.used), *places, *printer.lines]
    body = [f'"""{doc}"""', *lines, f"return {', '.join(results)}"]
    return f"@triton.jit\ndef {name}({VARIABLES}, data):\n" + "".join(f"    {line}\n" for line in body)


def print_indices(name: str, site: Node, slots: Slots) -> str:
    """Text of a jit function that returns the clamped indices of a load, one per dimension (0 where it is still)."""
    printer = TilePrinter(slots)
    results = []
    for d, argument in enumerate(site.args):
        found = printer.index(site, d, printer.emit(argument))
        results.append(found or "tl.full((), 0, tl.int32)")
    tail = "," if len(results) == 1 else ""
    body = [
        f'"""Indices into leaf {site.value}."""', *unpack(slots, printer.used), *printer.lines,
        f"return ({', '.join(results)}{tail})",
    ]  # fmt: skip
    return f"@triton.jit\ndef {name}({VARIABLES}, data):\n" + "".join(f"    {line}\n" for line in body)
