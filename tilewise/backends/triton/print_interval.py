"""The mask's interval form printed as Triton: is a tile EMPTY (0), PARTIAL (1) or FULL (2)?

    classify(i0, i1, j0, j1, q_offset, k_offset, b, h0, h1, g, data) -> int32

All bounds are inclusive; each may be a number or a vector, so one call classifies many tiles, or many single
columns, at once. Integers are pairs (least, greatest) in int64, conditions pairs (certain, possible). A leaf is
read exactly where its indices are single numbers, from its table of block extremes where it runs along the row
or the column, and at its corners where an index has at most two values; else, like a float, it may be anything.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tilewise.backends.triton.layout import BLOCK, Table, table_of
from tilewise.backends.triton.print_tile import TilePrinter, as_kind, unpack
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.backends.triton.layout import Slots
    from tilewise.spec.expression import Node

Pair = tuple[str, str]
ARGUMENTS = "i0, i1, j0, j1, q_offset, k_offset, b, h0, h1, g, data"
WHOLE: Pair = ("INT_MIN", "INT_MAX")
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
_MOST_CORNERS = 2
"""Dimensions of a leaf that may take two values each."""


class IntervalPrinter:
    """Prints bounds of nodes as statements."""

    def __init__(self, slots: Slots, tables: bool) -> None:
        self.slots, self.tables = slots, tables
        self.addresses = TilePrinter(slots)
        self.known: dict[Node, Pair | None] = {}
        self.lines: list[str] = []
        self.count = 0

    def _new(self, *texts: str) -> Pair:
        """One statement per bound; equal texts are one number."""
        names = []
        for text in dict.fromkeys(texts):
            names.append(f"v{self.count}")
            self.count += 1
            self.lines.append(f"{names[-1]} = {text}")
        return names[0], names[-1]

    def _call(self, text: str) -> Pair:
        """A word that gives both bounds."""
        lo, hi = f"v{self.count}", f"v{self.count + 1}"
        self.count += 2
        self.lines.append(f"{lo}, {hi} = {text}")
        return lo, hi

    def emit(self, root: Node) -> Pair:
        """Print a condition's bounds."""
        for node in ex.topological(root):
            if node not in self.known:
                self.known[node] = self._bounds(node)
        return self.condition(root)

    def condition(self, node: Node) -> Pair:
        found = self.known[node]
        return ("(b < b)", "(b == b)") if found is None else found

    def _bounds(self, node: Node) -> Pair | None:
        match node.op:
            case "const":
                if node.type == "float":
                    return None
                kind = "tl.int1" if node.type == "bool" else "tl.int64"
                return self._new(f"tl.full((), {node.value}, {kind})")
            case "var":
                return self._variable(str(node.value))
            case "int_scalar":
                name = self.addresses._slot(self.slots.ints_at + int(node.value))  # type: ignore[arg-type]
                return self._new(f"{name}.to(tl.int64)")
            case "float_scalar":
                return None
            case "load":
                return None if node.type == "float" else self._load(node)
            case "not":
                certain, possible = self.condition(node.args[0])
                return self._new(f"{possible} == 0", f"{certain} == 0")
            case "and" | "or":
                (a, c), (d, e) = (self.condition(x) for x in node.args)
                sign = "&" if node.op == "and" else "|"
                return self._new(f"{a} {sign} {d}", f"{c} {sign} {e}")
            case "to_int" if node.args[0].type == "bool":
                certain, possible = self.condition(node.args[0])
                return self._new(f"{certain}.to(tl.int64)", f"{possible}.to(tl.int64)")
            case "where":
                return self._where(node)
        args = [self.known[a] for a in node.args]
        if any(a is None for a in args) or node.type == "float" or node.args[0].type == "float":
            return None
        if node.op in _COMPARE:
            return self._compare(node.op, *args)  # type: ignore[arg-type]
        return self._arithmetic(node.op, *args)  # type: ignore[arg-type]

    def _variable(self, name: str) -> Pair:
        if name in "ij":
            return self._new(f"tl.cast({name}0, tl.int64)", f"tl.cast({name}1, tl.int64)")
        if name in "qk":
            lo, hi = ("i0", "i1") if name == "q" else ("j0", "j1")
            offset = f"tl.cast({name}_offset, tl.int64)"
            return self._new(f"tl.cast({lo}, tl.int64) + {offset}", f"tl.cast({hi}, tl.int64) + {offset}")
        if name == "h":
            return self._new("tl.cast(h0, tl.int64)", "tl.cast(h1, tl.int64)")
        return self._new(f"tl.cast({name}, tl.int64)")

    def _where(self, node: Node) -> Pair | None:
        a, b = self.known[node.args[1]], self.known[node.args[2]]
        if node.type == "float" or a is None or b is None:
            return None
        certain, possible = self.condition(node.args[0])
        if node.type == "bool":
            yes = f"(({certain} & {a[0]}) | (({possible} == 0) & {b[0]}) | ({a[0]} & {b[0]}))"
            maybe = f"(({possible} & {a[1]}) | (({certain} == 0) & {b[1]}))"
            return self._new(yes, maybe)
        return self._call(f"select_interval({certain}, {possible}, {a[0]}, {a[1]}, {b[0]}, {b[1]})")

    def _compare(self, op: str, x: Pair, y: Pair) -> Pair:
        if op in ("gt", "ge"):
            return self._compare({"gt": "lt", "ge": "le"}[op], y, x)
        if op in ("lt", "le"):
            sign = "<" if op == "lt" else "<="
            return self._new(f"{x[1]} {sign} {y[0]}", f"{x[0]} {sign} {y[1]}")
        same = f"(({x[0]} == {x[1]}) & ({y[0]} == {y[1]}) & ({x[0]} == {y[0]}))"
        meet = f"(({x[0]} <= {y[1]}) & ({y[0]} <= {x[1]}))"
        return self._new(same, meet) if op == "eq" else self._new(f"{meet} == 0", f"{same} == 0")

    def _arithmetic(self, op: str, x: Pair, y: Pair = ("", "")) -> Pair | None:
        match op:
            case "add":
                return self._call(f"whole_if_wild({x[0]} + {y[0]}, {x[1]} + {y[1]})")
            case "sub":
                return self._call(f"whole_if_wild({x[0]} - {y[1]}, {x[1]} - {y[0]})")
            case "neg":
                return self._call(f"whole_if_wild(0 - {x[1]}, 0 - {x[0]})")
            case "abs":
                return self._call(f"magnitude_interval({x[0]}, {x[1]})")
            case "min" | "max":
                word = "tl.minimum" if op == "min" else "tl.maximum"
                return self._new(f"{word}({x[0]}, {y[0]})", f"{word}({x[1]}, {y[1]})")
            case "mul" | "floordiv" | "mod":
                word = {"mul": "multiply", "floordiv": "divide", "mod": "mod"}[op]
                return self._call(f"{word}_interval({x[0]}, {x[1]}, {y[0]}, {y[1]})")
        return None

    # ---- leaves ----------------------------------------------------------------------------------------------

    def _load(self, node: Node) -> Pair | None:
        indices = [self.known[a] for a in node.args]
        if any(index is None for index in indices):
            return None
        slot = int(node.value)  # type: ignore[arg-type]
        ends: list[Pair | None] = []
        for d, pair in enumerate(indices):
            lo, hi = (self.addresses.index(node, d, name) for name in pair)  # type: ignore[union-attr]
            ends.append(None if lo is None or hi is None else self._new(lo, hi))
        wide = [d for d, end in enumerate(ends) if end is not None and end[0] != end[1]]
        table = table_of(node) if self.tables else None
        if table is None or table.dim in self.slots.leaves[slot].still:
            return self._corners(node, ends, wide)
        lo, hi = ends[table.dim]  # type: ignore[misc]
        single, _ = self._new(self._all_equal(ends, wide))
        least, most = self._element(node, [e and e[0] for e in ends], single)
        # Two blocks cover any tile of up to BLOCK + 1 rows; of a wider range nothing is known.
        others = [d for d in wide if d != table.dim]
        near, _ = self._new(f"({hi} // {BLOCK} <= {lo} // {BLOCK} + 1) & ({self._all_equal(ends, others)})")
        first = self._extremes(table, ends, f"{lo} // {BLOCK}", near)
        last = self._extremes(table, ends, f"{hi} // {BLOCK}", near)
        low = f"tl.where({near}, tl.minimum({first[0]}, {last[0]}), INT_MIN)"
        high = f"tl.where({near}, tl.maximum({first[1]}, {last[1]}), INT_MAX)"
        return self._as(
            node.type,
            *self._new(f"tl.where({single}, {least}, {low})", f"tl.where({single}, {most}, {high})"),
        )

    def _all_equal(self, ends: list[Pair | None], dims: list[int]) -> str:
        return " & ".join(f"({ends[d][0]} == {ends[d][1]})" for d in dims) or "(b == b)"  # type: ignore[index]

    def _corners(self, node: Node, ends: list[Pair | None], wide: list[int]) -> Pair | None:
        """Bounds from the elements at the ends of each index, where no index has a value between them.

        A head is one number except where a tile's rows hold a group of heads: then nothing is known."""
        heads = [d for d in wide if ex.variables(node.args[d]) == {"h"}]
        wide = [d for d in wide if d not in heads]
        if len(wide) > _MOST_CORNERS:
            return None
        terms = [f"({ends[d][1]} <= {ends[d][0]} + 1)" for d in wide]  # type: ignore[index]
        near, _ = self._new(" & ".join([*terms, self._all_equal(ends, heads)]))
        low, high = "", ""
        for choice in itertools.product((0, 1), repeat=len(wide)):
            picked = dict(zip(wide, choice, strict=True))
            at = [None if e is None else e[picked.get(d, 0)] for d, e in enumerate(ends)]
            lo, hi = self._element(node, at, near)
            low = f"tl.minimum({low}, {lo})" if low else lo
            high = f"tl.maximum({high}, {hi})" if high else hi
        if not wide and not heads:
            return self._as(node.type, *self._new(low, high))
        return self._as(
            node.type, *self._new(f"tl.where({near}, {low}, INT_MIN)", f"tl.where({near}, {high}, INT_MAX)")
        )

    def _element(self, node: Node, indices: list[str | None], where: str) -> Pair:
        """A leaf's element as int64 (twice), 0 where the condition does not hold."""
        address = self.addresses.address(node, indices)
        loaded = f"load_where({address}, {where})"
        return self._new(f"{as_kind(loaded, node.type)}.to(tl.int64)")

    def _extremes(self, table: Table, ends: list[Pair | None], block: str, where: str) -> Pair:
        """Least and greatest element of one block."""
        n = self.slots.tables.index(table)
        pointer = self.addresses._slot(self.slots.tables_at + n)
        at = self.slots.leaf_at[table.slot]
        offset, total = "0", "1"
        for d, end in enumerate(ends):
            size = self.addresses._slot(at + 1 + 2 * d)
            index = "0" if end is None else end[0]
            if d == table.dim:
                size, index = f"(({size} + {BLOCK - 1}) // {BLOCK})", f"({block})"
            offset = f"({offset}) * {size} + {index}" if offset != "0" else index
            total = f"{total} * {size}" if total != "1" else size
        place, _ = self._new(offset)
        plane, _ = self._new(f"tl.cast({total}, tl.int64)")
        low = f"load_where({pointer} + {place}, {where}).to(tl.int64)"
        high = f"load_where({pointer} + {plane} + {place}, {where}).to(tl.int64)"
        return self._new(low, high)

    def _as(self, kind: str, lo: str, hi: str) -> Pair:
        """Bounds of a bool from bounds of its number: anything but 0 is True."""
        if kind != "bool":
            return lo, hi
        return self._new(f"({lo} > 0) | ({hi} < 0)", f"({lo} != 0) | ({hi} != 0)")


def print_classify(name: str, keep: Node | None, slots: Slots, tables: bool, ends: Node | None = None) -> str:
    """Text of the jit function `name`; without `tables` it reads none, and knows less of wide ranges. ends: the part of
    the mask that FULL tiles go without, if that is not all of it."""
    doc = "0 EMPTY, 1 PARTIAL, 2 FULL" + ("" if tables else "; leaves along rows or columns unknown")
    if keep is None:
        body = [f'"""{doc}"""', "return tl.full((), 2, tl.int32)"]
    else:
        printer = IntervalPrinter(slots, tables)
        certain, possible = printer.emit(keep)
        if ends is not None:
            certain = printer.emit(ends)[0]
        body = [
            f'"""{doc}"""', *unpack(slots, printer.addresses.used), *printer.lines,
            f"return {certain}.to(tl.int32) + {possible}.to(tl.int32)",
        ]  # fmt: skip
    return f"@triton.jit\ndef {name}({ARGUMENTS}):\n" + "".join(f"    {line}\n" for line in body)
