"""A spec's expressions in the shape that costs least for each element of a tile.

A tile of scores is raw = q k^T, not yet scaled. Its score in powers of two, log2(e) * score(scale * raw), is written as

    core * rate + shift + rest

core: what depends on raw (raw itself, or such as tanh of it). rate, shift: one number for a tile or a row; shift, a
sum over rows, never meets an element, since it moves a row's maximum and its weights' exponent alike. rest: summands
that differ along the keys. An integer that is a sum of a row's and a column's part is split at the block's first
column: the value there belongs to the row, the difference to it (0, 1, 2 ..) to the column. So a bias of
slope * (q - k) costs one multiplication and addition an element, and its loads and products are done once a row.

Where the mask hides a pair its score does not matter: under q >= k, |q - k| is q - k.

A mask is a conjunction of two parts that are told FULL or not on their own: comparisons of a column with what belongs
to the row, which leave each row a run of columns, and everything else.
Arithmetic here is that of real numbers; what is not finite is met by the kernel that repeats noted tiles.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tilewise.spec import expression as ex
from tilewise.spec.expression import Node

LOG2E = 1.4426950408889634
RAW = ex._intern("var", (), "float", "raw")
SCALE = ex._intern("var", (), "float", "scale")
FIRST = {name: ex._intern("var", (), "int", f"{name}0") for name in "jk"}
"""The block's first column, and its position."""
ROWS = frozenset("iqbhg") | {"scale"}
COLUMNS = frozenset("jk")
WIDEST = 128
"""Columns of a block, at most."""
Summand = tuple[tuple[Node, ...], Node]
"""Factors that do not depend on raw or the column, and what they multiply."""


class Score(NamedTuple):
    """core * rate + shift + rest, the summands of the last two."""

    core: Node
    rate: Node
    shift: Node | None
    rest: Node | None

    @property
    def rising(self) -> bool:
        """Whether rate is a product of positive literals and of numbers of the call, whose signs the host knows."""
        return self.rest is None and of_call(self.rate)

    @property
    def slope(self) -> Node | None:
        """k where the core is tanh(k * raw), and k and rate are numbers of the call; None for other scores."""
        inner = self.core.args[0] if self.core.op == "tanh" and of_call(self.rate) else RAW
        if inner.op != "mul" or RAW not in inner.args:
            return None
        k = inner.args[1] if inner.args[0] is RAW else inner.args[0]
        return k if of_call(k) else None

    @property
    def bounded(self) -> bool:
        """Whether scores differ from their shift by at most the rate, a number of the call."""
        return self.rising and self.core.op == "tanh"


def along_row(node: Node) -> bool:
    """Whether a node is one number for a row."""
    return ex.variables(node) <= ROWS


def of_call(root: Node) -> bool:
    """Whether a node is a product of positive literals and of numbers of the call."""
    return all(
        n.op in ("mul", "div", "float_scalar") or n is SCALE or (n.op == "const" and n.value > 0)  # type: ignore[operator]
        for n in ex.topological(root)
    )


def reads_raw(node: Node) -> bool:
    """Whether a node depends on the scores."""
    return "raw" in ex.variables(node)


# ---- what the mask says about a score -------------------------------------------------------------------------


def conjuncts(keep: Node | None) -> list[Node]:
    """The conditions that must all hold."""
    if keep is None:
        return []
    if keep.op == "and":
        return [c for a in keep.args for c in conjuncts(a)]
    return [keep]


def ordered(keep: Node | None) -> frozenset[tuple[Node, Node]]:
    """Pairs (a, b) of which the mask says a >= b."""
    found = set()
    for c in conjuncts(keep):
        if c.op in ("le", "lt"):
            found.add((c.args[1], c.args[0]))
        elif c.op in ("ge", "gt"):
            found.add((c.args[0], c.args[1]))
    return frozenset(found)


def resolve(root: Node, order: frozenset[tuple[Node, Node]]) -> Node:
    """The tree without the absolute values whose sign the mask knows; the others are taken of floats, which costs
    nothing."""
    new: dict[Node, Node] = {}
    for node in ex.topological(root):
        made = ex.rebuild(node, tuple(new[a] for a in node.args)) if node.args else node
        if made.op == "abs" and made.args[0].op == "sub":
            a, b = made.args[0].args
            if (a, b) in order:
                made = made.args[0]
            elif (b, a) in order:
                made = ex.apply("sub", b, a)
        if made.op == "to_float" and made.args[0].op == "abs":
            made = ex.apply("abs", ex.cast(made.args[0].args[0], "float"))
        new[node] = made
    return new[root]


# ---- sums of products -----------------------------------------------------------------------------------------


def expand(node: Node, factors: tuple[Node, ...] = ()) -> list[Summand]:
    """A float as a sum of products; factors of a row are multiplied out."""
    match node.op:
        case "add":
            return expand(node.args[0], factors) + expand(node.args[1], factors)
        case "sub":
            return expand(node.args[0], factors) + expand(node.args[1], (*factors, ex.const(-1.0)))
        case "neg":
            return expand(node.args[0], (*factors, ex.const(-1.0)))
        case "mul" if along_row(node.args[0]):
            return expand(node.args[1], (*factors, node.args[0]))
        case "mul" if along_row(node.args[1]):
            return expand(node.args[0], (*factors, node.args[1]))
        case "div" if along_row(node.args[1]):
            return expand(node.args[0], (*factors, ex.apply("div", ex.const(1.0), node.args[1])))
    return [(factors, node)]


def product(factors: tuple[Node, ...]) -> Node | None:
    """The product of factors, literals folded; None for 1."""
    number, rest = 1.0, []
    for f in factors:
        if f.op == "const":
            number *= float(f.value)  # type: ignore[arg-type]
        else:
            rest.append(f)
    # Numbers first, then rows: what is one number for a tile is multiplied as one.
    rest.sort(key=lambda f: "h" in ex.variables(f) or bool(ex.variables(f) & {"i", "q"}))
    nodes = ([ex.const(number)] if number != 1.0 else []) + rest
    return functools.reduce(lambda a, b: ex.apply("mul", a, b), nodes) if nodes else None


def times(factors: tuple[Node, ...], node: Node) -> Node:
    """factors * node."""
    factor = product(factors)
    if factor is None:
        return node
    return factor if node.op == "const" and node.value == 1.0 else ex.apply("mul", factor, node)


def total(nodes: list[Node]) -> Node | None:
    """The sum of nodes."""
    return functools.reduce(lambda a, b: ex.apply("add", a, b), nodes) if nodes else None


def fused(x: Node, a: Node, c: Node) -> Node:
    """x * a + c, rounded once."""
    return ex._intern("fma", (x, a, c), "float")


def tidy(node: Node) -> Node:
    """A float that depends on raw, with its inner sums written as few multiplications and additions."""
    if not reads_raw(node):
        return node
    summands = expand(node)
    if summands == [((), node)]:
        if node is RAW or node.op == "load":
            return node
        return ex.rebuild(node, tuple(tidy(a) if a.type == "float" else a for a in node.args))
    found: Node | None = None
    for factors, inner in sorted(summands, key=lambda s: reads_raw(s[1])):
        factor, inner = product(factors), tidy(inner)
        if found is None:
            found = inner if factor is None else ex.apply("mul", inner, factor)
        else:
            found = ex.apply("add", inner, found) if factor is None else fused(inner, factor, found)
    assert found is not None
    return found


# ---- integers that are a row's part and a column's part -------------------------------------------------------


def separable(node: Node) -> bool:
    """Whether an integer is a sum of a part of the row and a part of the column."""
    names = ex.variables(node)
    if not names & COLUMNS or not names - COLUMNS:
        return True
    return node.op in ("add", "sub") and all(separable(a) for a in node.args)


def linear_in_column(node: Node) -> bool:
    """Whether an integer, apart from what belongs to the row, adds and subtracts columns."""
    if not ex.variables(node) & COLUMNS:
        return True
    return node.op == "var" or (node.op in ("add", "sub", "neg") and all(map(linear_in_column, node.args)))


def at_first(node: Node) -> Node:
    """The value at the block's first column."""
    return ex.substitute(node, {ex.variable(n): first for n, first in FIRST.items()})


def from_first(node: Node) -> Node | None:
    """How much more a linear integer is than at the block's first column; None for 0."""
    if not ex.variables(node) & COLUMNS:
        return None
    if node.op == "var":
        return ex.apply("sub", node, FIRST[str(node.value)])
    parts = [from_first(a) for a in node.args]
    if node.op == "neg":
        return None if parts[0] is None else ex.apply("neg", parts[0])
    a, b = parts
    if b is None:
        return a
    if a is None:
        return b if node.op == "add" else ex.apply("neg", b)
    return ex.apply(node.op, a, b)


def slope_in_column(node: Node) -> int:
    """1 or -1 where an integer of row and column grows or falls by that from column to column, else 0."""
    if (
        node.type != "int"
        or node.op not in ("add", "sub")
        or not ex.variables(node) - COLUMNS
        or not linear_in_column(node)
    ):
        return 0
    found: list[tuple[int, Node]] = []
    _linear(node, 1, found)
    signs = [sign for sign, n in found if ex.variables(n) & COLUMNS]
    return signs[0] if len(signs) == 1 else 0


def merge_integers(summands: list[Summand]) -> list[Summand]:
    """Integers with the same factors added as integers, which is exact."""
    found: list[Summand] = []
    kept: dict[tuple[Node, ...], Node] = {}
    for factors, node in summands:
        whole = node.op == "to_float" and node.args[0].type == "int" and linear_in_column(node.args[0])
        if not whole:
            found.append((factors, node))
            continue
        signs = sum(f.op == "const" and f.value == -1.0 for f in factors)
        key = tuple(f for f in factors if not (f.op == "const" and f.value == -1.0))
        inner = node.args[0]
        if key in kept:
            kept[key] = ex.apply("sub" if signs % 2 else "add", kept[key], inner)
        else:
            kept[key] = ex.apply("neg", inner) if signs % 2 else inner
    return found + [(key, ex.cast(inner, "float")) for key, inner in kept.items()]


# ---- the score ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def score_of(score: Node | None, keep: Node | None) -> Score:
    """The parts of a spec's score."""
    if score is None:
        return Score(RAW, ex.apply("mul", SCALE, ex.const(LOG2E)), None, None)
    root = ex.substitute(resolve(score, ordered(keep)), {ex.variable("s"): ex.apply("mul", RAW, SCALE)})
    summands = expand(root, (ex.const(LOG2E),))
    cores = [s for s in summands if reads_raw(s[1])]
    others = merge_integers([s for s in summands if not reads_raw(s[1])])
    core, rate = _core(cores)
    shift: list[Node] = []
    rest: list[Node] = []
    for factors, node in others:
        if along_row(node):
            shift.append(times(factors, node))
        elif node.op == "to_float" and node.args[0].type == "int" and linear_in_column(node.args[0]):
            inner = node.args[0]
            shift.append(times(factors, ex.cast(at_first(inner), "float")))
            more = from_first(inner)
            assert more is not None
            rest.append(times(factors, ex.cast(more, "float")))
        else:
            rest.append(times(factors, node))
    return Score(core, rate, total(shift), total(rest))


def _core(cores: list[Summand]) -> tuple[Node, Node]:
    """What depends on raw as one node and its factor."""
    kinds = {tidy(node) for _, node in cores}
    if len(kinds) == 1:
        factor = total([product(factors) or ex.const(1.0) for factors, _ in cores])
        assert factor is not None
        return kinds.pop(), factor
    if not cores:
        return ex.const(0.0), ex.const(1.0)
    made: Node | None = None
    for factors, node in cores:
        factor, inner = product(factors) or ex.const(1.0), tidy(node)
        made = ex.apply("mul", inner, factor) if made is None else fused(inner, factor, made)
    assert made is not None
    return made, ex.const(1.0)


# ---- the mask -------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A comparison of a column with what does not depend on it: the signed summands + sign * column op 0.

    op: "le", "lt" or "eq"; sign: 1 or -1; column: "j" or "k".
    """

    op: str
    sign: int
    column: str
    summands: tuple[tuple[int, Node], ...]

    @property
    def rest(self) -> Node:
        """The sum of the summands."""
        total: Node = ex.const(0)
        for sign, n in self.summands:
            total = ex.apply("add" if sign > 0 else "sub", total, n)
        return total


def line_of(condition: Node) -> Line | None:
    """A comparison as a Line; None if it is no such."""
    if condition.op not in ("le", "lt", "ge", "gt", "eq") or condition.args[0].type != "int":
        return None
    a, b = condition.args
    if condition.op in ("ge", "gt"):
        a, b = b, a
    found: list[tuple[int, Node]] = []
    if not (_linear(a, 1, found) and _linear(b, -1, found)):
        return None
    columns = [s for s in found if ex.variables(s[1]) & COLUMNS]
    if len(columns) != 1 or columns[0][1].op != "var":
        return None
    found.remove(columns[0])
    op = {"ge": "le", "gt": "lt"}.get(condition.op, condition.op)
    return Line(op, columns[0][0], str(columns[0][1].value), tuple(found))


def _linear(node: Node, sign: int, found: list[tuple[int, Node]]) -> bool:
    """Collect the signed summands of an integer."""
    if not ex.variables(node) & COLUMNS or node.op == "var":
        found.append((sign, node))
        return True
    if node.op in ("add", "sub"):
        other = sign if node.op == "add" else -sign
        return _linear(node.args[0], sign, found) and _linear(node.args[1], other, found)
    return node.op == "neg" and _linear(node.args[0], -sign, found)


class Mask(NamedTuple):
    """A mask as a conjunction: lines and conditions of the row, which leave each row a run of columns, and everything
    else (None: nothing). runs: lines and rows as they stand in the mask."""

    lines: tuple[Line, ...]
    rows: tuple[Node, ...]
    other: Node | None
    runs: tuple[Node, ...]

    @property
    def below(self) -> bool:
        """Whether a line cuts columns from below."""
        return any(line.sign < 0 or line.op == "eq" for line in self.lines)


@functools.lru_cache(maxsize=1024)
def mask_of(keep: Node | None) -> Mask:
    """The parts of a spec's mask."""
    lines = {c: line for c in conjuncts(keep) if (line := line_of(c)) is not None}
    rows = tuple(c for c in conjuncts(keep) if along_row(c))
    others = [c for c in conjuncts(keep) if c not in lines and c not in rows]
    other = functools.reduce(lambda a, b: ex.apply("and", a, b), others) if others else None
    return Mask(tuple(lines.values()), rows, other, (*lines, *rows))
