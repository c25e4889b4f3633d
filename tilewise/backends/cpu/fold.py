"""A spec's compiled code: classify a tile, fold the terms and the mask over a score tile.

    classify(spec, scratch, i0, i1, j0, j1) -> 0 EMPTY, 1 PARTIAL, 2 FULL          rows and columns inclusive
    fold_full, fold_partial(spec, scratch, s, top, keys, j0, strips)               terms; terms and mask
    slopes_*: see `fold_slopes`

No function knows a feature by name: they are the trees of the spec, printed. One object serves every length,
number of heads, window or slope; another tree, another element type of a leaf or another target is another.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import llvmlite.ir as ir

from tilewise.backends.cpu import machine_code
from tilewise.backends.cpu.counted import loop
from tilewise.backends.cpu.isa import STRIP
from tilewise.backends.cpu.parameters import LANE as ROW
from tilewise.backends.cpu.parameters import LANES, NUMBER, TABLE
from tilewise.backends.cpu.print_interval import IntervalPrinter, needs_table
from tilewise.backends.cpu.print_vector import KEY, LANE, VectorPrinter, ranks
from tilewise.backends.cpu.stage import GROUP, Stage, along_keys
from tilewise.backends.cpu.words import I32, I64, Words
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tilewise.backends.cpu.isa import Isa
    from tilewise.backends.cpu.slots import Slots
    from tilewise.spec.attention import AttentionSpec
    from tilewise.spec.expression import Node

TABLE_TILE = 64
S = ex.variable("s")


class Tile:
    """The loop nest of a fold: strips of rows, then keys, with the printer's nodes placed as far out as they go."""

    def __init__(
        self, function: ir.Function, isa: Isa, slots: Slots, packed: bool, roots: tuple[Node, ...]
    ) -> None:
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self.w = Words(self.b, isa.lanes, isa.half)
        self.order = ex.topological(*roots)
        self.rank = ranks(self.order, packed)
        self.vectors = STRIP // isa.lanes
        self.spec, self.scratch = function.args[0], function.args[1]
        self.slots, self.packed = slots, packed
        places = ((node, along_keys(node, self.rank, slots)) for node in self.order)
        self.stages = [Stage(self, node, place) for node, place in places if place is not None]

    def any_printer(self) -> VectorPrinter:
        """A printer that knows of no row and no key."""
        return self._printer()

    def _printer(self, base: VectorPrinter | None = None) -> VectorPrinter:
        printer = VectorPrinter(self.w, self.slots, self.rank, self.spec, self.scratch)
        if base is not None:
            printer.values, printer.variables = dict(base.values), dict(base.variables)
        return printer

    def _emit(self, printer: VectorPrinter, rank: int) -> None:
        for node in self.order:
            if self.rank[node] == rank and node is not S:
                printer.emit(node)

    def loop(self, count: ir.Value, name: str) -> AbstractContextManager[ir.Value]:
        """for index in range(count), int64."""
        return loop(self.b, count, name)

    def lanes_of(self, outer: VectorPrinter, strip: ir.Value) -> list[VectorPrinter]:
        """A printer for each vector of the strip, with what depends on the rows alone."""
        found = []
        for v in range(self.vectors):
            at = self.b.add(self.b.mul(strip, I64(4 * STRIP)), I64(v * 4 * self.w.lanes))
            at = self.b.add(self.scratch, at)
            printer = self._printer(outer)
            for name, place in (("i", LANES.i), ("q", LANES.q), ("h", LANES.h)):
                if name != "h" or self.packed:
                    printer.variables[name] = self.w.load(at, place, self.w.i)
            self._emit(printer, LANE)
            found.append(printer)
        return found

    def prologue(self) -> VectorPrinter:
        """What depends on no row and no key."""
        outer = self._printer()
        self._emit(outer, 0)
        return outer

    def key(self, outer: VectorPrinter, column: ir.Value) -> dict[Node, ir.Value]:
        """What depends on the key alone, as scalars."""
        printer = self._printer(outer)
        j = self.b.trunc(column, I32)
        printer.variables["j"] = j
        printer.variables["k"] = self.b.add(j, printer.number(NUMBER.k_offset))
        self._emit(printer, KEY)
        return printer.values

    @contextlib.contextmanager
    def keys(
        self,
        outer: VectorPrinter,
        rows: list[VectorPrinter],
        count: ir.Value,
        first: ir.Value,
        done: Callable[[ir.Value, ir.Value], None] | None = None,
    ) -> Iterator[tuple[ir.Value, dict[Node, ir.Value]]]:
        """for key in range(count): (key, where the turned leaves have its row). Column `first` is key 0.

        Where leaves are turned, done(first key, keys) follows each group."""
        if not self.stages:
            with self.loop(count, "key") as key:
                yield key, {}
            return
        b = self.b
        for stage in self.stages:
            stage.set_rows(rows)
        with self.loop(b.udiv(b.add(count, I64(GROUP - 1)), I64(GROUP)), "group") as group:
            start = b.mul(group, I64(GROUP))
            shared = self.key(outer, b.add(first, start))
            for stage in self.stages:
                stage.fill(shared, b.add(first, start))
            rest = b.sub(count, start)
            rest = b.select(b.icmp_signed("<", rest, I64(GROUP)), rest, I64(GROUP))
            with self.loop(rest, "key") as n:
                yield (
                    b.add(start, n),
                    {stage.node: b.add(stage.buffer, b.mul(n, I64(stage.row))) for stage in self.stages},
                )
            if done is not None:
                done(start, rest)

    def pair(
        self,
        rows: VectorPrinter,
        keys: dict[Node, ir.Value],
        s: ir.Value,
        staged: dict[Node, ir.Value],
        v: int,
    ) -> VectorPrinter:
        """What depends on both, for vector v of a strip of pairs, whose score is s."""
        printer = self._printer(rows)
        size = {stage.node: stage.size for stage in self.stages}
        printer.staged = {
            node: self.b.add(row, I64(v * self.w.lanes * size[node])) for node, row in staged.items()
        }
        printer.values.update(keys)
        printer.values.update(rows.values)
        printer.values[S] = s
        self._emit(printer, LANE | KEY)
        return printer


def _function(module: ir.Module, name: str, count: int, result: ir.Type) -> ir.Function:
    return ir.Function(module, ir.FunctionType(result, [I64] * count), name)


def print_fold(
    module: ir.Module, name: str, isa: Isa, slots: Slots, packed: bool, spec: AttentionSpec, masked: bool
) -> None:
    """s = the terms' score, -inf where the mask hides; top = the larger of itself and each row's maximum."""
    function = _function(module, name, 7, ir.VoidType())
    score = S if spec.score is None else spec.score
    roots = (score, spec.keep) if masked and spec.keep is not None else (score,)
    tile = Tile(function, isa, slots, packed, roots)
    b, w = tile.b, tile.w
    _, _, s, top, keys, first, strips = function.args
    highest = [b.alloca(w.f) for _ in range(tile.vectors)]
    outer = tile.prologue()
    step = 4 * w.lanes
    with tile.loop(strips, "strip") as strip:
        at = b.mul(strip, I64(4 * STRIP))
        rows = tile.lanes_of(outer, strip)
        for cell in highest:
            b.store(w.k(float("-inf")), cell)
        with tile.keys(outer, rows, keys, first) as (key, staged):
            shared = tile.key(outer, b.add(first, key))
            row = b.add(s, b.add(b.mul(key, I64(ROW)), at))
            for v in range(tile.vectors):
                printer = tile.pair(rows[v], shared, w.opaque(w.load(row, v * step)), staged, v)
                value = printer.vector(score)
                if len(roots) > 1:
                    value = b.select(printer.vector(roots[1]), value, w.k(float("-inf")))
                w.store(value, row, v * step)
                b.store(w.maximum(value, b.load(highest[v])), highest[v])
        for v in range(tile.vectors):
            w.store(b.load(highest[v]), b.add(top, at), v * step)
    b.ret_void()


def print_classify(module: ir.Module, slots: Slots, packed: bool, keep: Node) -> None:
    """The class of one tile, by intervals or from the host's table."""
    function = _function(module, "classify", 6, I64)
    b = ir.IRBuilder(function.append_basic_block("entry"))
    if not needs_table(keep, slots):
        b.ret(IntervalPrinter(b, slots, packed, tuple(function.args)).classify(keep))
        return
    w = Words(b, 4)
    _, scratch, i0, _, j0, _ = function.args
    table = w.load(scratch, LANES.numbers + 8 * TABLE.address, I64)
    columns = w.load(scratch, LANES.numbers + 8 * TABLE.columns, I64)
    at = b.add(b.mul(b.udiv(i0, I64(TABLE_TILE)), columns), b.udiv(j0, I64(TABLE_TILE)))
    b.ret(b.zext(w.load(table, at, ir.IntType(8)), I64))


def forward_code(isa: Isa, spec: AttentionSpec, slots: Slots, packed: bool) -> dict[str, int]:
    """Addresses of classify, fold_full and fold_partial; those the spec does not need are missing."""
    wanted = []
    if spec.keep is not None:
        wanted += ["classify", "fold_partial"]
    if spec.score is not None:
        wanted.append("fold_full")
    if not wanted:
        return {}

    def make() -> str:
        module = ir.Module("fold")
        if spec.keep is not None:
            print_classify(module, slots, packed, spec.keep)
            print_fold(module, "fold_partial", isa, slots, packed, spec, True)
        if spec.score is not None:
            print_fold(module, "fold_full", isa, slots, packed, spec, False)
        return machine_code.optimise(isa, module)

    name = f"fold {packed} {slots.text} {spec.text}"
    return machine_code.load(isa, name, tuple(wanted), make)
