"""Masks that leave holes in every tile, as strides do: told apart from what ends somewhere, and printed cheaply.

`(q - k) % 4 < 2` under a causal mask is never certain for a whole tile, so that no tile would be FULL and each would
pay for all of the mask. Its conjuncts are sorted: *holes*, which every tile applies, in straight-line code; and
*ends*, for which a tile is FULL or not.

Remainders of a difference are formed of remainders of rows and of columns, of which a tile has few. By powers of two
they are low bits of the positions: `(q - k) % 4 < 2` is a test of one bit, and rows that lie a multiple of 4 apart
share it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from tilewise.backends.triton.print_tile import TilePrinter, shift_of, unpack
from tilewise.spec import expression as ex
from tilewise.spec.interval import evaluate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.backends.triton.layout import Slots
    from tilewise.problem import Problem
    from tilewise.spec.attention import AttentionSpec
    from tilewise.spec.expression import Node

LONGEST_PERIOD = 64
"""Of a remainder that no tile is inside of: tiles have 32 rows or keys and more of both."""
_PLACES = {
    "q": ("row", "i0", "q_offset"),
    "k": ("column", "j0", "k_offset"),
    "i": ("row", "i0"),
    "j": ("column", "j0"),
}
"""What a position is the sum of: its number inside the tile, where the tile begins, and the call's offset."""
_POSITIONS = frozenset(_PLACES)


def _conjuncts(node: Node) -> list[Node]:
    return [n for a in node.args for n in _conjuncts(a)] if node.op == "and" else [node]


def _is_hole(node: Node) -> bool:
    """Whether a condition on positions alone takes a remainder that repeats within a tile."""
    order = ex.topological(node)
    if (
        any(n.op in ("load", "int_scalar", "float_scalar") for n in order)
        or not ex.variables(node) <= _POSITIONS
    ):
        return False
    return any(n.op == "mod" and _divisor(n) and _repeats(n) <= LONGEST_PERIOD for n in order)


def _divisor(node: Node) -> int:
    """The literal by which an integer is divided, if it is short; else 0."""
    by = node.args[1]
    if by.op != "const" or node.args[0].type != "int" or not 1 < int(by.value) <= LONGEST_PERIOD:  # type: ignore[arg-type]
        return 0
    return int(by.value)  # type: ignore[arg-type]


def _repeats(remainder: Node) -> int:
    """After how many positions a remainder by a literal repeats: `(k // 64) % 2` hides whole tiles."""
    found = _divisor(remainder)
    for n in ex.topological(remainder.args[0]):
        if n.op == "floordiv":
            found *= abs(int(n.args[1].value)) if n.args[1].op == "const" else LONGEST_PERIOD + 1  # type: ignore[arg-type]
    return found


class Stripes(NamedTuple):
    """A condition on (u - v) % period of a row's and a column's position alone: the row's, the column's, whether the
    column is u, the remainder, and the period, a literal or a number of the call."""

    row: Node
    column: Node
    ahead: bool
    remainder: Node
    period: Node


def stripes_of(node: Node) -> Stripes | None:
    """A condition as stripes, if it is one."""
    order = ex.topological(node)
    mods = [n for n in order if n.op == "mod"]
    if len(mods) != 1 or any(n.op in ("load", "int_scalar", "float_scalar") for n in order):
        return None
    difference, period = mods[0].args
    if difference.op != "sub" or difference.type != "int" or period.op != "const":
        return None
    rows = [a.op == "var" and a.value in ("q", "i") for a in difference.args]
    columns = [a.op == "var" and a.value in ("k", "j") for a in difference.args]
    if rows == columns or rows != columns[::-1] or ex.variables(ex.substitute(node, {mods[0]: ex.const(0)})):
        return None
    row, column = difference.args if rows[0] else difference.args[::-1]
    return Stripes(row, column, columns[0], mods[0], period)


@functools.lru_cache(maxsize=1024)
def split_holes(keep: Node) -> tuple[Node, Node]:
    """(ends, holes): a mask is both together; the constant True where there is nothing of a kind."""
    parts: tuple[list[Node], list[Node]] = ([], [])
    for n in _conjuncts(keep):
        parts[_is_hole(n)].append(n)
    if not parts[1]:
        return keep, ex.const(True)
    ends, holes = (
        functools.reduce(lambda a, b: ex.apply("and", a, b), p) if p else ex.const(True) for p in parts
    )
    return ends, holes


@functools.lru_cache(maxsize=1024)
def _captured(keep: Node) -> tuple[Node, ...]:
    """The numbers of the call that a conjunct on positions takes remainders by."""
    found = []
    for conjunct in _conjuncts(keep):
        order = ex.topological(conjunct)
        if ex.variables(conjunct) <= _POSITIONS and not any(n.op in ("load", "float_scalar") for n in order):
            found += [n.args[1] for n in order if n.op == "mod" and n.args[1].op == "int_scalar"]
    return tuple(dict.fromkeys(found))


@functools.lru_cache(maxsize=1024)
def _with_literals(spec: AttentionSpec, values: tuple[tuple[Node, int], ...]) -> AttentionSpec:
    assert spec.keep is not None
    keep = ex.substitute(spec.keep, {n: ex.const(value) for n, value in values})
    text = ", ".join(f"n{n.value} = {value}" for n, value in values)
    return replace(spec, keep=keep, text=f"{spec.text}\nin the mask {text}")


def short_periods(spec: AttentionSpec, ints: Sequence[int]) -> tuple[tuple[Node, int], ...]:
    """The short periods of a mask that are numbers of the call, and their values."""
    if spec.keep is None or not ints:
        return ()
    values = ((n, ints[int(n.value)]) for n in _captured(spec.keep))  # type: ignore[arg-type]
    return tuple((n, value) for n, value in values if 1 < value <= LONGEST_PERIOD)


def settle(problem: Problem, ints: Sequence[int]) -> Problem:
    """The problem with such periods as literals of its mask: they have kernels of their own, at most LONGEST_PERIOD of
    them."""
    values = short_periods(problem.spec, ints)
    return replace(problem, spec=_with_literals(problem.spec, values)) if values else problem


def has_holes(keep: Node | None) -> bool:
    """Whether a mask leaves holes in every tile."""
    return keep is not None and split_holes(keep)[1].op != "const"


def mask_kind(keep: Node | None) -> int:
    """0 without a mask, 1 with one, 2 with one of which some conjunct leaves holes, 3 with one that has no holes and
    reads leaves."""
    if keep is None:
        return 0
    if has_holes(keep):
        return 2
    return 3 if ex.loads(keep) else 1


class HolePrinter(TilePrinter):
    """Prints remainders as the header says; the rest as ever."""

    def _text(self, node: Node) -> str:
        if node.op == "mod" and node.args[0].type == "int":
            shift = shift_of(node)
            if shift is not None:
                bits = 2**shift - 1
                return f"{self._low(node.args[0], bits)} & {bits}"
            difference = node.args[0]
            if _divisor(node) and difference.op == "sub" and all(a.op == "var" for a in difference.args):
                by = f"tl.full((), {node.args[1].value}, tl.int32)"
                left, right = (f"mod_int({self.names[a]}, {by})" for a in difference.args)
                return f"remainder({left} - {right}, {by})"
        return super()._text(node)

    def _low(self, node: Node, bits: int) -> str:
        """An integer that has the low bits of a node's."""
        if node.op == "const":
            return f"tl.full((), {int(node.value) & bits}, tl.int32)"  # type: ignore[arg-type]
        if node.op in ("add", "sub", "mul"):
            sign = {"add": "+", "sub": "-", "mul": "*"}[node.op]
            return f"({self._low(node.args[0], bits)} {sign} {self._low(node.args[1], bits)})"
        if node.op == "var" and node.value in _PLACES:
            # A number of the tile itself, and what is the same for all of it: multiples of the period as a rule.
            own, *starts = _PLACES[node.value]
            return " + ".join(f"({x} & {bits})" for x in starts).join((f"(low_bits({own}, {bits}) + ", ")"))
        return f"({self.names[node]} & {bits})"


def print_holes(name: str, keep: Node | None, slots: Slots) -> str:
    """Text of the jit function `name`: a tile's pivots, minus infinity in a mask's holes."""
    holes = ex.const(True) if keep is None else split_holes(keep)[1]
    printer = HolePrinter(slots, True)
    result = " & ".join(
        f"({_literal_stripes(n, printer.lines) or printer.emit(n)})" for n in _conjuncts(holes)
    )
    body = [
        '"""Pivots s with holes. place: numbers of rows and columns inside the tile, its first ones, offsets."""',
        "row, column, i0, j0, q_offset, k_offset = place",
        *unpack(slots, printer.used),
        *printer.lines,
    ]
    text = "".join(f"    {line}\n" for line in [*body, f"return tl.where({result}, s, -float('inf'))"])
    return f"@triton.jit\ndef {name}(s, i, j, q, k, b, h, g, place, data):\n{text}"


def _starts(stripes: Stripes) -> tuple[list[str], list[str]]:
    """Statements that name where a tile begins, modulo the period, and what `in_pattern` is told of rows and columns.
    Names are of the position and the period: a mask may have several."""
    lines, owns, names = [], [], []
    for position in (stripes.row, stripes.column):
        own, *starts = _PLACES[str(position.value)]
        name = f"{position.value}_start_{stripes.period.value}"
        period = f"tl.full((), {stripes.period.value}, tl.int32)"
        lines.append(f"{name} = mod_int({' + '.join(starts)}, {period})")
        owns.append(own)
        names.append(name)
    return lines, [*owns, *names]


def _no_load(node: Node, indices: object) -> NoReturn:
    raise AssertionError(node.op)


def bits_of(stripes: Stripes, node: Node) -> int | None:
    """Bit n says whether a condition holds where the column is n ahead, modulo the period, a literal; None where bounds
    do not say it for sure, as of floats that all but meet and of integers that wrap."""
    bits, period = 0, int(stripes.period.value)  # type: ignore[arg-type]
    for n in range(period):
        turn = ex.const((n if stripes.ahead else -n) % period)
        alone = ex.substitute(node, {stripes.remainder: turn})
        found = evaluate(alone, {}, (), (), _no_load)
        if bool(found.lo) != bool(found.hi):
            return None
        bits |= bool(found.hi) << n
    return bits


def _literal_stripes(node: Node, lines: list[str]) -> str:
    """Text of the condition of stripes whose period is a literal below 32 and no power of two, and the statements
    before it; else nothing."""
    stripes = stripes_of(node)
    if stripes is None or not 2 < _divisor(stripes.remainder) < 32 or shift_of(stripes.remainder) is not None:
        return ""
    pattern = bits_of(stripes, node)
    if pattern is None:
        return ""
    before, told = _starts(stripes)
    lines += before
    return f"in_pattern({', '.join(told)}, {stripes.period.value}, {pattern})"
