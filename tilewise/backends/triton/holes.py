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
from typing import TYPE_CHECKING

from tilewise.backends.triton.print_tile import TilePrinter, shift_of, unpack
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.backends.triton.layout import Slots
    from tilewise.spec.expression import Node

LONGEST_PERIOD = 64
"""Of a remainder that no tile is inside of: tiles have 32 rows or keys and more of both."""
_POSITIONS = frozenset("qkij")


def _conjuncts(node: Node) -> list[Node]:
    return [n for a in node.args for n in _conjuncts(a)] if node.op == "and" else [node]


def _is_hole(node: Node) -> bool:
    """Whether a condition on positions alone takes a remainder by a short literal."""
    order = ex.topological(node)
    if (
        any(n.op in ("load", "int_scalar", "float_scalar") for n in order)
        or not ex.variables(node) <= _POSITIONS
    ):
        return False
    return any(n.op == "mod" and _divisor(n) for n in order)


def _divisor(node: Node) -> int:
    """The literal by which an integer is divided, if it is short; else 0."""
    by = node.args[1]
    if by.op != "const" or node.args[0].type != "int" or not 1 < int(by.value) <= LONGEST_PERIOD:  # type: ignore[arg-type]
        return 0
    return int(by.value)  # type: ignore[arg-type]


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


def mask_kind(keep: Node | None) -> int:
    """0 without a mask, 1 with one, 2 with one of which some conjunct leaves holes."""
    if keep is None:
        return 0
    return 1 if split_holes(keep)[1].op == "const" else 2


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
        if node.op == "var" and node.value in ("q", "k"):
            # What is the same for all rows is taken apart, so that the compiler sees which rows have the same bits.
            own = "i" if node.value == "q" else "j"
            return f"(({own} & {bits}) + (({node.value} - {own}) & {bits}))"
        return f"({self.names[node]} & {bits})"


def print_holes(name: str, keep: Node | None, slots: Slots) -> str:
    """Text of the jit function `name` of the arguments of `keep`: a mask's holes."""
    holes = ex.const(True) if keep is None else split_holes(keep)[1]
    printer = HolePrinter(slots, True)
    result = printer.emit(holes)
    body = [
        '"""The part of the mask that every tile applies."""',
        *unpack(slots, printer.used),
        *printer.lines,
    ]
    text = "".join(f"    {line}\n" for line in [*body, f"return {result}"])
    return f"@triton.jit\ndef {name}(s, i, j, q, k, b, h, g, data):\n{text}"
