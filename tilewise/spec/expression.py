"""The expression tree: what an atom computes, as data.

A mask or a score term is written once in plain Python and traced into `Node`s (see `trace`). Everything
else is a printer of that tree: torch, intervals, the derivative, Numba, Triton. The tree has one
arithmetic everywhere: indices are int32, floats are float32 (float64 in float64 problems), `//` and `%`
round down, int / int is float, an integer divided by zero is 0, a load outside its leaf reads the nearest
element inside. Nothing but arithmetic can be written in it.

Text form: statements in topological order separated by `;`, the last one is the result, for example
`sub q k;mod %0 n0;eq %1 0`. Operands are `%3` (an earlier statement), a variable, `n0` / `x0` (int / float
run-time scalar), or a literal. `load` names a leaf slot first: `load L0 b h i j`. Equal text means equal tree.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from tilewise.errors import SpecError

VARIABLES = {"q": "int", "k": "int", "i": "int", "j": "int", "b": "int", "h": "int", "g": "int", "s": "float"}
"""q k positions; i j row and column in this call's tensors; b batch; h query head; g KV head; s the score."""

UNARY = ("mov", "neg", "not", "abs", "tanh", "exp2", "log2", "to_int", "to_float")
ARITHMETIC = ("add", "sub", "mul", "div", "floordiv", "mod", "min", "max")
COMPARISON = ("lt", "le", "gt", "ge", "eq", "ne")
LOGIC = ("and", "or")
ARITY = {
    **dict.fromkeys(UNARY, 1),
    **dict.fromkeys((*ARITHMETIC, *COMPARISON, *LOGIC), 2),
    "where": 3,
}
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, eq=False)
class Node:
    """One operation. `type` is "int", "float" or "bool"; `value` is a literal, a variable's name or a slot."""

    op: str
    args: tuple[Node, ...]
    type: str
    value: int | float | bool | str | None = None

    # Nodes are interned: equal trees are one object, so identity is equality and hashing is free.

    def __repr__(self) -> str:
        return f"<{self.type} {to_text(self)}>"

    def __reduce__(self) -> tuple[object, ...]:
        return parse, (to_text(self), leaf_kinds(self))


_interned: dict[tuple[object, ...], Node] = {}


def _intern(
    op: str, args: tuple[Node, ...], type_: str, value: int | float | bool | str | None = None
) -> Node:
    """Equal nodes are one object, so common subexpressions are shared by identity."""
    key = (op, tuple(map(id, args)), type_, type(value).__name__, repr(value))
    node = _interned.get(key)
    if node is None:
        node = _interned.setdefault(key, Node(op, args, type_, value))
    return node


# ---- typed builders ------------------------------------------------------------------------------------------


def const(value: float | int | bool) -> Node:
    """A literal known when the spec is built."""
    if isinstance(value, bool):
        return _intern("const", (), "bool", value)
    if isinstance(value, int):
        if not INT_MIN <= value <= INT_MAX:
            raise SpecError(f"the integer {value} does not fit int32, in which indices are computed")
        return _intern("const", (), "int", value)
    return _intern("const", (), "float", float(value))


def variable(name: str) -> Node:
    """One of q k i j b h g s."""
    return _intern("var", (), VARIABLES[name], name)


def int_scalar(slot: int) -> Node:
    """The integer given at run time in `ints[slot]`."""
    return _intern("int_scalar", (), "int", slot)


def float_scalar(slot: int) -> Node:
    """The number given at run time in `floats[slot]`."""
    return _intern("float_scalar", (), "float", slot)


def load(slot: int, kind: str, indices: tuple[Node, ...]) -> Node:
    """Element of leaf `slot`; one int node per dimension, clamped to the leaf (size 1 broadcasts)."""
    for index in indices:
        if index.type != "int":
            raise SpecError(f"a leaf is indexed with integers, not with a {index.type}")
    return _intern("load", indices, kind, slot)


def cast(node: Node, type_: str) -> Node:
    """Convert to "int", "float" or "bool"; float to int truncates towards zero, number to bool is `!= 0`."""
    if node.type == type_:
        return node
    if type_ == "bool":
        return apply("ne", node, const(0) if node.type == "int" else const(0.0))
    if node.op == "const":
        value = node.value
        if type_ == "float" or (isinstance(value, (bool, int)) or math.isfinite(value)):  # type: ignore[arg-type]
            return const(float(value) if type_ == "float" else int(value))  # type: ignore[arg-type]
    return _intern("to_float" if type_ == "float" else "to_int", (node,), type_)


def _unify(*nodes: Node) -> tuple[Node, ...]:
    types = {n.type for n in nodes}
    target = "float" if "float" in types else "int" if "int" in types else "bool"
    return tuple(cast(n, target) for n in nodes)


def apply(op: str, *args: Node) -> Node:
    """Build a typed node, inserting the casts Python's own arithmetic would do."""
    if op in LOGIC or op == "not":
        args = tuple(cast(a, "bool") for a in args)
        return _fold_logic(op, args)
    if op in COMPARISON:
        args = _unify(*args)
        if args[0].type == "bool":
            args = tuple(cast(a, "int") for a in args)
        return _intern(op, args, "bool")
    if op == "where":
        condition = cast(args[0], "bool")
        a, b = _unify(*args[1:])
        if condition.op == "const":
            return a if condition.value else b
        return _intern("where", (condition, a, b), a.type)
    if op in ("tanh", "exp2", "log2", "div"):
        return _intern(op, tuple(cast(a, "float") for a in args), "float")
    if op == "mov":
        return args[0]
    args = _unify(*args)
    if args[0].type == "bool":
        args = tuple(cast(a, "int") for a in args)
    return _intern(op, args, args[0].type)


def _fold_logic(op: str, args: tuple[Node, ...]) -> Node:
    if op == "not":
        (a,) = args
        if a.op == "const":
            return const(not a.value)
        return a.args[0] if a.op == "not" else _intern("not", args, "bool")
    neutral = op == "and"
    rest = [a for a in args if not (a.op == "const" and a.value is neutral)]
    if any(a.op == "const" for a in rest):
        return const(not neutral)
    if not rest:
        return const(neutral)
    return rest[0] if len(rest) == 1 or rest[0] is rest[1] else _intern(op, tuple(rest), "bool")


# ---- walking -------------------------------------------------------------------------------------------------


def topological(*roots: Node) -> list[Node]:
    """Every node below the roots, arguments before uses, each once, in a reproducible order."""
    order: list[Node] = []
    done: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if node in done:
            continue
        if expanded:
            done.add(node)
            order.append(node)
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
    return order


def substitute(root: Node, replace: dict[Node, Node]) -> Node:
    """Rebuild the tree with some nodes replaced."""
    new: dict[Node, Node] = {}
    for node in topological(root):
        if node in replace:
            new[node] = replace[node]
        elif not node.args:
            new[node] = node
        else:
            new[node] = rebuild(node, tuple(new[a] for a in node.args))
    return new[root]


def rebuild(node: Node, args: tuple[Node, ...]) -> Node:
    """The same operation on other arguments."""
    if node.op == "load":
        return load(node.value, node.type, args)  # type: ignore[arg-type]
    if node.op in ("to_int", "to_float"):
        return cast(args[0], node.type)
    return apply(node.op, *args)


def variables(root: Node | None) -> frozenset[str]:
    """Names of the variables the tree reads."""
    if root is None:
        return frozenset()
    return frozenset(str(n.value) for n in topological(root) if n.op == "var")


def loads(*roots: Node) -> list[Node]:
    """Every load site below the roots."""
    return [n for n in topological(*roots) if n.op == "load"]


def leaf_kinds(root: Node) -> tuple[tuple[int, str], ...]:
    """(slot, kind) of each leaf the tree loads."""
    return tuple(sorted({(int(n.value), n.type) for n in loads(root)}))  # type: ignore[arg-type]


# ---- text ----------------------------------------------------------------------------------------------------


def _literal(value: float | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def to_text(root: Node) -> str:
    """Canonical text of the tree."""
    names: dict[Node, str] = {}
    statements: list[str] = []
    for node in topological(root):
        if node.op == "const":
            names[node] = _literal(node.value)  # type: ignore[arg-type]
        elif node.op == "var":
            names[node] = str(node.value)
        elif node.op == "int_scalar":
            names[node] = f"n{node.value}"
        elif node.op == "float_scalar":
            names[node] = f"x{node.value}"
        else:
            head = f"load L{node.value}" if node.op == "load" else node.op
            names[node] = f"%{len(statements)}"
            statements.append(" ".join([head, *(names[a] for a in node.args)]))
    if not names[root].startswith("%"):
        statements.append(f"mov {names[root]}")
    return ";".join(statements)


_OPERAND = re.compile(r"(?P<ref>%\d+)|(?P<int_scalar>n\d+)|(?P<float_scalar>x\d+)|(?P<other>.+)")


def _operand(text: str, results: list[Node]) -> Node:
    match = _OPERAND.fullmatch(text)
    if match is None:
        raise SpecError(f"not an operand: {text!r}")
    if match["ref"]:
        return results[int(text[1:])]
    if match["int_scalar"]:
        return int_scalar(int(text[1:]))
    if match["float_scalar"]:
        return float_scalar(int(text[1:]))
    if text in VARIABLES:
        return variable(text)
    if text in ("true", "false"):
        return const(text == "true")
    try:
        return const(int(text)) if re.fullmatch(r"-?\d+", text) else const(float(text))
    except ValueError:
        raise SpecError(f"not an operand: {text!r}") from None


def parse(text: str, kinds: tuple[tuple[int, str], ...] | dict[int, str] = ()) -> Node:
    """Rebuild a tree from its text; `kinds` gives each leaf slot's kind ("float", "int" or "bool").

    Raises SpecError if the text is not one this module writes.
    """
    try:
        return _parse(text, tuple(sorted(dict(kinds).items())))
    except SpecError:
        raise
    except (ValueError, IndexError):
        raise SpecError(f"not the text of an expression: {text!r}") from None


@functools.lru_cache(maxsize=4096)
def _parse(text: str, kinds: tuple[tuple[int, str], ...]) -> Node:
    kind_of = dict(kinds)
    results: list[Node] = []
    for statement in text.split(";"):
        op, *operands = statement.split()
        if op == "load":
            slot = int(operands[0][1:])
            if slot not in kind_of:
                raise SpecError(f"the text reads leaf {slot}, which is not declared: {statement!r}")
            results.append(load(slot, kind_of[slot], tuple(_operand(t, results) for t in operands[1:])))
        elif ARITY.get(op) == len(operands):
            args = tuple(_operand(t, results) for t in operands)
            casts = {"to_int": "int", "to_float": "float"}
            results.append(cast(args[0], casts[op]) if op in casts else apply(op, *args))
        else:
            raise SpecError(f"not a statement: {statement!r}")
    return results[-1]
