"""The folds of the Hopper forward printed in Triton's language: score and mask as `algebra` writes them.

row_parts(i, q, b, h, g, scale, data)       what belongs to a row or a tile, made once for it
scores(raw, parts, i, j, ...)               (u, rate, shift): the score in powers of two is u * rate + shift
limits(i, q, n_k, k_offset, ...)            the first and the last column that the mask's lines leave a row
stripes(marks, parts, i, j, ...)            marks without the bits of columns that stripes of the mask's other part hide
sees(parts, i, j, ...)                      which pairs the rest of the other part lets through
kinds(i0, i1, j0, j1, ...)                  bit 0 unless a tile is EMPTY, bit 1 unless lines are FULL, bit 2 the rest
reach(i0, i1, ...)                          the first and the last column that lines leave any of the rows
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tilewise.backends.hopper import algebra
from tilewise.backends.triton.print_interval import ARGUMENTS, IntervalPrinter
from tilewise.backends.triton.print_tile import TilePrinter, unpack
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tilewise.backends.triton.layout import Slots
    from tilewise.spec.attention import AttentionSpec
    from tilewise.spec.expression import Node

TILE = "raw, parts, i, j, q, k, j0, k0, b, h, g, scale"
PLAIN = ("var", "const", "int_scalar", "float_scalar")


def divided_column(node: Node) -> tuple[Node, int, Node] | None:
    """(dividend at the block's first column, its slope, divisor) of a remainder or quotient of an integer that grows or
    falls by one from column to column; None for others.

    The divisor is a positive literal that is no power of two, or a number of the call: those below 1 or the
    double of `algebra.WIDEST` are literals when a kernel is printed (`launch_forward.divisors`).
    """
    if node.op not in ("mod", "floordiv") or node.type != "int":
        return None
    dividend, number = node.args
    sign = (
        1
        if dividend.op == "var" and ex.variables(dividend) & algebra.COLUMNS
        else algebra.slope_in_column(dividend)
    )
    value = int(number.value) if number.op == "const" else 0  # type: ignore[arg-type]
    if not sign or not (number.op == "int_scalar" or (value > 0 and value & (value - 1))):
        return None
    return algebra.at_first(dividend), sign, number


class Stripe(NamedTuple):
    """A condition (first + sign * column) % divisor < limit, or its contrary unless `wanted`.

    first: the dividend at the block's first column. divisor: at least the double of `algebra.WIDEST`.
    more: what is added to the limit.
    """

    first: Node
    sign: int
    divisor: Node
    limit: Node
    more: int
    wanted: bool


def stripe_of(condition: Node) -> Stripe | None:
    """A comparison of a remainder with a number as a Stripe; None for others."""
    if condition.op not in ("lt", "le", "gt", "ge"):
        return None
    (a, b), op = condition.args, condition.op
    if a.op != "mod":
        a, b, op = b, a, {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}[op]
    divided = divided_column(a) if a.op == "mod" else None
    if divided is None or b.type != "int":
        return None
    if divided[2].op == "const" and int(divided[2].value) < 2 * algebra.WIDEST:  # type: ignore[arg-type]
        return None
    if any(n.op in ("var", "load") for n in ex.topological(b)):
        return None
    return Stripe(*divided, b, int(op in ("le", "gt")), op in ("lt", "le"))


def stripes_of(mask: algebra.Mask) -> tuple[tuple[Stripe, ...], Node | None]:
    """(stripes, what is left) of the mask's other part."""
    found = {c: stripe_of(c) for c in algebra.conjuncts(mask.other)}
    rest = [c for c, stripe in found.items() if stripe is None]
    stripes = tuple(s for s in found.values() if s is not None)
    return stripes, functools.reduce(lambda a, b: ex.apply("and", a, b), rest) if rest else None


def unpack_here(slots: Slots, used: set[int]) -> list[str]:
    """`unpack` where no register is to keep what is made of the call's integers."""
    names = {slots.names[at] for at in used}
    whole = (n for n in sorted(names) if re.fullmatch(r"[nx]\d+|L\d+_[ns]\d+", n))
    return [*unpack(slots, used), *(f"{n} = here({n})" for n in whole)]


def unpack_fresh(slots: Slots, used: set[int]) -> list[str]:
    """`unpack_here` in kernels that are FRESH."""
    return [re.sub(r"= here\((\w+)\)", r"= fresh(\1, FRESH)", line) for line in unpack_here(slots, used)]


class FoldPrinter(TilePrinter):
    """Prints below what has a name already; rows: the nodes that `row_parts` has made."""

    def __init__(self, slots: Slots, rows: tuple[Node, ...] = (), exact: bool = False) -> None:
        super().__init__(slots, exact)
        self.rows = rows
        self.taken: set[int] = set()

    def emit(self, node: Node) -> str:
        """Print a node and what it needs; returns its name."""
        if node in self.rows:
            self.taken.add(self.rows.index(node))
            return f"parts{self.rows.index(node)}"
        # A converted integer grows from column to column as a float, exactly below 2^24.
        sign = algebra.slope_in_column(node.args[0] if node.op == "to_float" else node)
        if node not in self.names and sign:
            text = f"spread({self.emit(algebra.at_first(node))}, j - j0, {sign})"
            self.names[node] = f"t{len(self.lines)}"
            self.lines.append(f"{self.names[node]} = {text}")
        divided = None if node in self.names else divided_column(node)
        if divided:
            first, sign, number = divided
            text = f"{self.emit(first)}, j - j0, {sign}, {self.emit(number)}, {number.op == 'const'}"
            self.names[node] = f"t{len(self.lines)}"
            self.lines.append(f"{self.names[node]} = {node.op}_along({text})")
        if node not in self.names:
            for a in node.args:
                self.names[a] = self.emit(a)
            text = self._text(node)
            if node.op in PLAIN[:1] + PLAIN[2:]:
                self.names[node] = text
            else:
                self.names[node] = f"t{len(self.lines)}"
                self.lines.append(f"{self.names[node]} = {text}")
        return self.names[node]

    def _text(self, node: Node) -> str:
        if node.op == "fma":
            x, a, c = (self.names[arg] for arg in node.args)
            return f"fused({x}, {a}, {c})"
        return super()._text(node)

    def body(self, result: str, unpack: Callable[[Slots, set[int]], list[str]] = unpack) -> list[str]:
        """The statements of a function that returns the result."""
        parts = [f"parts{n} = parts[{n}]" for n in sorted(self.taken)]
        return [*unpack(self.slots, self.used), *parts, *self.lines, f"return {result}"]


def _function(name: str, arguments: str, doc: str, body: list[str]) -> str:
    return f"@triton.jit\ndef {name}({arguments}):\n" + "".join(
        f"    {line}\n" for line in (f'"""{doc}"""', *body)
    )


def row_nodes(*roots: Node) -> tuple[Node, ...]:
    """The largest nodes below the roots that are one number for a row, and need work."""
    found: dict[Node, None] = {}

    def look(node: Node) -> None:
        if algebra.along_row(node):
            if node.op not in PLAIN:
                found[node] = None
            return
        for a in node.args:
            look(a)

    for root in roots:
        look(root)
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def plan(spec: AttentionSpec) -> tuple[algebra.Score, algebra.Mask, tuple[Node, ...]]:
    """The score's parts, the mask's parts, and the nodes of rows that are used in every block."""
    score, mask = algebra.score_of(spec.score, spec.keep), algebra.mask_of(spec.keep)
    roots = (score.core, score.rate, score.shift, score.rest, mask.other, *mask.rows)
    return score, mask, row_nodes(*(n for n in roots if n is not None))


@functools.lru_cache(maxsize=1024)
def with_literals(spec: AttentionSpec, divisors: tuple[tuple[int, int], ...]) -> AttentionSpec:
    """The spec with numbers of the call, (slot, value), as literals where integers are divided by them: of a power of
    two there is a shift, and what a mask does not look at is not computed; of another number the columns that are equal
    modulo it share their work. There are few of them, so few kernels."""
    literals = dict(divisors)

    def written(root: Node | None) -> Node | None:
        if root is None:
            return None
        new: dict[Node, Node] = {}
        for node in ex.topological(root):
            args = tuple(new[a] for a in node.args)
            if node.op in ("floordiv", "mod") and args[1].op == "int_scalar" and args[1].value in literals:
                args = (args[0], ex.const(literals[int(args[1].value)]))  # type: ignore[arg-type]
            new[node] = ex.rebuild(node, args) if args else node
        return new[root]

    if not literals:
        return spec
    note = ",".join(f"n{slot}={value}" for slot, value in divisors)
    return replace(spec, text=f"{spec.text}|{note}", keep=written(spec.keep), score=written(spec.score))


def rising(spec: AttentionSpec) -> bool:
    """Whether a greater core is a greater score if all numbers of the call are positive."""
    return plan(spec)[0].rising


def number(root: Node, scale: float, floats: Sequence[float]) -> float:
    """The value of a product of literals and of numbers of the call (`Score.rising`)."""
    known: dict[Node, float] = {}
    for node in ex.topological(root):
        if node.op == "const":
            known[node] = float(node.value)  # type: ignore[arg-type]
        elif node.op == "float_scalar":
            known[node] = floats[int(node.value)]  # type: ignore[arg-type]
        elif node.op == "var":
            known[node] = scale
        else:
            a, b = (known[n] for n in node.args)
            known[node] = a * b if node.op == "mul" else a / b
    return known[root]


def most_powers(spec: AttentionSpec, scale: float, floats: Sequence[float]) -> float | None:
    """By how many powers of two a score may differ from its shift, with a call's numbers; None if nothing bounds it."""
    score = plan(spec)[0]
    return number(score.rate, scale, floats) if score.bounded else None


def print_rows(spec: AttentionSpec, slots: Slots) -> str:
    """Text of `row_parts`."""
    printer = FoldPrinter(slots)
    names = [printer.emit(node) for node in plan(spec)[2]]
    body = printer.body(f"({', '.join(names or ['g'])},)", unpack_here)
    return _function("row_parts", "i, q, b, h, g, scale, data", "What belongs to rows.", body)


def print_scores(spec: AttentionSpec, slots: Slots) -> str:
    """Text of `scores`."""
    score, _, rows = plan(spec)
    printer = FoldPrinter(slots, rows)
    slope = None if score.slope is None else printer.emit(score.slope)
    core = printer.emit(score.core) if slope is None else ""
    if not algebra.reads_raw(score.core):
        core = f"like({core}, raw)"
    rate = printer.emit(score.rate)
    shift = "tl.full((), 0.0, tl.float32)" if score.shift is None else printer.emit(score.shift)
    if slope is not None:
        more = "" if score.rest is None else f" + {printer.emit(score.rest)}"
        result = f"capped(raw, {slope}, {rate}, BOUNDED){more}, tl.full((), 1.0, tl.float32), {shift}"
    elif score.rest is not None:
        result = f"fused({core}, {rate}, {printer.emit(score.rest)}), tl.full((), 1.0, tl.float32), {shift}"
    elif score.rising:
        u = f"powers_if(BOUNDED, times_unless(FUSED, {core}, {rate}), {rate})"
        result = f"{u}, rate_if(FUSED, {rate}), {shift}"
    else:
        result = f"{core} * {rate}, tl.full((), 1.0, tl.float32), {shift}"
    doc = "(u, rate, shift): u * rate + shift is the score in powers of two; if BOUNDED, u is 2^(score - shift)."
    arguments = f"{TILE}, FUSED: tl.constexpr, BOUNDED: tl.constexpr, FRESH: tl.constexpr, data"
    return _function("scores", arguments, doc, printer.body(result, unpack_fresh))


def print_stripes(spec: AttentionSpec, slots: Slots) -> str:
    """Text of `stripes`."""
    _, mask, rows = plan(spec)
    printer = FoldPrinter(slots, rows, exact=True)
    for s in stripes_of(mask)[0]:
        first, divisor, limit = (printer.emit(n) for n in (s.first, s.divisor, s.limit))
        limit = f"tl.minimum({limit}, 2147483646) + 1" if s.more else limit
        printer.lines.append(f"marks = stripe(marks, {first}, {divisor}, {limit}, {s.sign}, {s.wanted})")
    doc = "marks without the bits of a thread's columns that a stripe of the mask hides."
    arguments = f"marks, {TILE.removeprefix('raw, ')}, data"
    return _function("stripes", arguments, doc, printer.body("marks", unpack_here))


def print_sees(spec: AttentionSpec, slots: Slots) -> str:
    """Text of `sees`."""
    _, mask, rows = plan(spec)
    rest = stripes_of(mask)[1]
    printer = FoldPrinter(slots, rows, exact=True)
    result = "tl.full((), True, tl.int1)" if rest is None else printer.emit(rest)
    return _function(
        "sees",
        f"{TILE}, FRESH: tl.constexpr, data",
        "Which pairs the rest of the mask's other part lets through.",
        printer.body(result, unpack_fresh),
    )


def _ends(line: algebra.Line, low: str, high: str) -> tuple[str | None, str | None]:
    """(first, last) column that a line leaves, from bounds of its rest as int64."""
    back = " - k_offset" if line.column == "k" else ""
    less, more = (" - 1", " + 1") if line.op == "lt" else ("", "")
    # rest + column <= 0 is column <= -rest; rest - column <= 0 is column >= rest.
    last = f"(0 - ({low}){less}{back})" if line.sign > 0 else f"({high}{back})"
    first = f"(0 - ({high}){back})" if line.sign > 0 else f"({low}{more}{back})"
    equal = line.op == "eq"
    return first if equal or line.sign < 0 else None, last if equal or line.sign > 0 else None


def _run(ends: list[tuple[str | None, str | None]], last: str) -> tuple[str, str]:
    """The columns that all lines leave, as int32."""
    firsts, lasts = [a for a, _ in ends if a], [b for _, b in ends if b]
    first = functools.reduce(lambda a, b: f"tl.maximum({a}, {b})", firsts, "tl.full((), 0, tl.int64)")
    final = functools.reduce(lambda a, b: f"tl.minimum({a}, {b})", lasts, f"tl.cast({last}, tl.int64)")
    return f"inside_int32({first})", f"inside_int32(tl.maximum({final}, -1))"


def print_limits(spec: AttentionSpec, slots: Slots) -> str:
    """Text of `limits`."""
    _, mask, rows = plan(spec)
    printer = FoldPrinter(slots, rows, exact=True)
    ends = []
    for line in mask.lines:
        total = "tl.full((), 0, tl.int64)"
        for sign, node in line.summands:
            total += f" {'+' if sign > 0 else '-'} tl.cast({printer.emit(node)}, tl.int64)"
        ends.append(_ends(line, total, total))
    first, last = _run(ends, "n_k - 1")
    for condition in mask.rows:
        last = f"tl.where({printer.emit(condition)}, {last}, -1)"
    names = "parts, i, q, n_k, k_offset, b, h, g, scale, data"
    doc = "The first and the last column that are left to a row."
    return _function("limits", names, doc, printer.body(f"{first}, {last}"))


def print_kinds(spec: AttentionSpec, slots: Slots) -> str:
    """Text of `kinds`."""
    printer = IntervalPrinter(slots, True)
    _, mask, _ = plan(spec)
    conditions = list(mask.runs) + ([mask.other] if mask.other is not None else [])
    found = [printer.emit(c) for c in conditions]
    possible = " & ".join(f"({p})" for _, p in found) or "(j0 == j0)"
    bits = []
    if mask.runs:
        certain = " & ".join(f"({c})" for c, _ in found[: len(mask.runs)])
        bits.append(f"((({certain}) == 0).to(tl.int32) << 1)")
    if mask.other is not None:
        bits.append(f"(({found[-1][0]} == 0).to(tl.int32) << 2)")
    result = " | ".join([f"({possible}).to(tl.int32)", *bits])
    body = [*unpack_here(slots, printer.addresses.used), *printer.lines, f"return {result}"]
    return _function(
        "kinds", ARGUMENTS, "Bit 0 unless EMPTY; bit 1 unless lines are FULL, bit 2 the others.", body
    )


def print_reach(spec: AttentionSpec, slots: Slots) -> str:
    """Text of `reach`."""
    printer = IntervalPrinter(slots, True)
    ends = []
    for line in plan(spec)[1].lines:
        for node in ex.topological(line.rest):
            if node not in printer.known:
                printer.known[node] = printer._bounds(node)
        bounds = printer.known[line.rest]
        if bounds is not None:
            ends.append(_ends(line, *bounds))
    low, high = _run(ends, "INT_MAX")
    # Positions near the ends of int32, whose differences wrap, are not reckoned with.
    near = "((q_offset + 2**30) | (2**30 - q_offset) | (k_offset + 2**30) | (2**30 - k_offset)) >= 0"
    result = f"tl.where({near}, {low}, 0), tl.where({near}, {high}, INT_MAX)"
    body = [*unpack_here(slots, printer.addresses.used), *printer.lines, f"return {result}"]
    doc = "The first and the last column that lines leave any of the rows."
    return _function("reach", "i0, i1, q_offset, k_offset, b, h0, h1, g, data", doc, body)


def print_forward_folds(spec: AttentionSpec, slots: Slots) -> str:
    """Text of the printed functions of the forward."""
    score, mask, _ = plan(spec)
    facts = f"LINES = tl.constexpr({bool(mask.runs)})\nBELOW = tl.constexpr({mask.below})\n"
    stripes, rest = stripes_of(mask)
    facts += f"OTHER = tl.constexpr({mask.other is not None})\n"
    simple = spec.score is None and mask.other is None and not mask.below
    facts += f"SIMPLE = tl.constexpr({simple})\n"
    facts += f"SCORED = tl.constexpr({spec.score is not None})\n"
    paired = score.slope is not None and score.bounded and mask.other is None
    facts += f"PAIRED = tl.constexpr({paired})\n"
    facts += f"STRIPES, REST = tl.constexpr({bool(stripes)}), tl.constexpr({rest is not None})\n"
    parts = (print_rows, print_scores, print_limits, print_stripes, print_sees, print_kinds, print_reach)
    return "\n\n".join([facts, *(p(spec, slots) for p in parts)])
