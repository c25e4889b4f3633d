"""A spec's compiled code of the backward pass: through the score terms, to their leaves.

    slopes_full, slopes_partial(spec, scratch, s, dp, keys, j0, strips, grads, task)

turn a tile of raw scores and of dp into p and ds0 = p (dp - delta) d score / d s, and add ds d score / d leaf to
the gradients of the leaves: `grads` is int64, the address of what becomes 1 where a contribution is not finite, then
per leaf (address, bytes of one task's part, byte stride per dimension). What is one number for the rows or the keys
is summed in registers first; one number a pair, as a bias has it, is turned by squares, so that rows of the leaf are
added to, or stored, by vectors of keys; another gather is transposed to additions in the order of the tile. A task
owns what it adds to, so bits do not depend on threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llvmlite.ir as ir

from tilewise.backends.cpu import machine_code
from tilewise.backends.cpu.fold import Tile
from tilewise.backends.cpu.isa import LINE, STRIP
from tilewise.backends.cpu.parameters import LANE as ROW
from tilewise.backends.cpu.parameters import LANES, TABLE
from tilewise.backends.cpu.print_vector import KEY, LANE, SIZES
from tilewise.backends.cpu.stage import GROUP, ahead_here, along_keys, room, tell_ahead
from tilewise.backends.cpu.words import F32, I32, I64
from tilewise.spec.derivative import differentiate

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa
    from tilewise.backends.cpu.print_vector import VectorPrinter
    from tilewise.backends.cpu.slots import Slots
    from tilewise.backends.cpu.words import Words
    from tilewise.spec.attention import AttentionSpec
    from tilewise.spec.expression import Node


NONE, ADDED, STORED = range(3)
"""What becomes of a leaf's contributions: nothing; added to a buffer; stored, where each number is met once."""


def grad_slots(slots: Slots) -> tuple[int, ...]:
    """Where each leaf's entry begins in the table of gradients."""
    at, found = 1, []
    for rank in slots.ranks:
        found.append(at)
        at += 2 + rank
    return tuple(found)


class Site:
    """One load whose leaf wants a gradient: where its sums go."""

    def __init__(
        self, tile: Tile, node: Node, adjoint: Node, way: int, grads: ir.Value, task: ir.Value
    ) -> None:
        self.tile, self.node, self.adjoint = tile, node, adjoint
        self.b, self.w = tile.b, tile.w
        rank = 0
        for index in node.args:
            rank |= tile.rank[index]
        self.per_key, self.per_lane = bool(rank & KEY), bool(rank & LANE)
        self.at = grad_slots(tile.slots)[int(node.value)]  # type: ignore[arg-type]
        self.grads = grads
        # Address and strides are read once, before the loops.
        base = self.w.load(grads, 8 * self.at, I64)
        self.base = self.b.add(base, self.b.mul(task, self.w.load(grads, 8 * (self.at + 1), I64)))
        self.strides = [self.w.load(grads, 8 * (self.at + 2 + n), I64) for n in range(len(node.args))]
        self.sums = [self.b.alloca(self.w.f) for _ in range(tile.vectors)]
        self.dimension = along_keys(node, tile.rank, tile.slots)
        self.stored = way == STORED
        assert self.dimension is not None or not self.stored, "what is not turned is added, to zeros"
        if self.dimension is not None:
            self.buffer, self.addresses = room(self.b, F32, GROUP * STRIP), room(self.b, I64, STRIP)
            self.nowhere = room(self.b, F32, GROUP) if self.stored else None
            self.places = self.b.alloca(I64)

    def clear(self) -> None:
        for cell in self.sums:
            self.b.store(self.w.k(0.0), cell)

    def set_rows(self, rows: list[VectorPrinter], strip: ir.Value) -> None:
        """Where each row of the strip begins in a leaf of one number a pair; 0 for the lanes past the last row where
        numbers are stored."""
        if self.dimension is None:
            return
        self.b.store(I64(0), self.places)
        for v, printer in enumerate(rows):
            base, lanes = self._offset(printer, self.dimension)
            for lane in range(self.w.lanes):
                address = (
                    base if lanes is None else self.b.add(base, self.b.extract_element(lanes, I32(lane)))
                )
                if self.stored:
                    address = self.b.select(self._again(strip, v * self.w.lanes + lane), I64(0), address)
                self.w.store(address, self.addresses, 8 * (v * self.w.lanes + lane))
                self.b.store(self.b.or_(self.b.load(self.places), address), self.places)

    def _again(self, strip: ir.Value, lane: int) -> ir.Value:
        """Whether a lane is the row of the lane before: so are those past the last row."""
        b, w = self.b, self.w
        here = b.add(b.mul(strip, I64(STRIP)), I64(lane))
        last = b.select(b.icmp_signed(">", here, I64(0)), b.sub(here, I64(1)), here)
        same = b.icmp_signed(">", here, I64(0))
        for place in (LANES.i, LANES.h):
            one, two = (w.load(b.add(self.tile.scratch, b.mul(x, I64(4))), place, I32) for x in (here, last))
            same = b.and_(same, b.icmp_signed("==", one, two))
        return same

    def add(self, v: int, key: ir.Value, printer: VectorPrinter, value: ir.Value) -> None:
        """One vector of contributions."""
        if self.dimension is not None:
            row = self.b.mul(self.b.and_(key, I64(GROUP - 1)), I64(4 * STRIP))
            self.w.store(value, self.b.add(self.buffer, row), 4 * v * self.w.lanes)
        elif not self.per_key:
            self.b.store(self.b.fadd(self.b.load(self.sums[v]), value), self.sums[v])
        else:
            self._scatter(printer, value)

    def flush(self, rows: list[VectorPrinter]) -> None:
        """The strip is done: what was summed over its keys."""
        if not self.per_key:
            for v, printer in enumerate(rows):
                self._scatter(printer, self.b.load(self.sums[v]))

    def add_group(self, first: ir.Value, count: ir.Value, column: ir.Value) -> None:
        """What stands in the buffer to the rows of the leaf; first: the index of the group's first key, in column
        `column`."""
        b, w = self.b, self.w
        slot = self.tile.slots.leaf_at[int(self.node.value)] + 1 + 2 * self.dimension  # type: ignore[arg-type, operator]
        size, stride = w.load(self.tile.spec, 8 * slot, I64), self.strides[self.dimension]  # type: ignore[index]
        first = b.sext(first, I64)
        whole = b.and_(b.icmp_signed("==", count, I64(GROUP)), b.icmp_signed("==", stride, I64(4)))
        whole = b.and_(whole, b.icmp_signed("<=", b.add(first, I64(GROUP)), size))
        whole = b.and_(whole, b.icmp_signed(">=", first, I64(0)))
        with b.if_else(whole) as (vectors, elements):
            with vectors:
                offset = b.mul(first, stride)
                if not self.stored:
                    self._add_squares(offset, far=ahead_here(self.tile, column, self.addresses, 4))
                elif w.lanes != GROUP:
                    self._add_squares(offset)
                else:
                    # Whole lines go past the caches: nobody reads them here, and none is fetched to be overwritten.
                    line = b.and_(b.or_(b.load(self.places), offset), I64(LINE - 1))
                    with b.if_else(b.icmp_signed("==", line, I64(0))) as (lines, others):
                        with lines:
                            self._add_squares(offset, past=True)
                        with others:
                            self._add_squares(offset)
            with elements, self.tile.loop(count, "turned") as key:
                at, last = b.add(first, key), b.sub(size, I64(1))
                at = b.select(b.icmp_signed("<", at, I64(0)), I64(0), at)
                at = b.mul(b.select(b.icmp_signed(">", at, last), last, at), stride)
                with self.tile.loop(I64(STRIP), "lane") as lane:
                    place = b.add(b.mul(key, I64(4 * STRIP)), b.mul(lane, I64(4)))
                    start = w.load(self.addresses, b.mul(lane, I64(8)), I64)
                    value = w.load(self.buffer, place, F32)
                    if self.stored:
                        with b.if_then(b.icmp_signed("!=", start, I64(0))):
                            w.store(value, b.add(start, at))
                    else:
                        self._accumulate(b.add(start, at), value)

    def _add_squares(self, offset: ir.Value, past: bool = False, far: ir.Value | None = None) -> None:
        b, w = self.b, self.w
        places = []
        for lane in range(STRIP):
            start = w.load(self.addresses, 8 * lane, I64)
            to = b.add(start, offset)
            if self.stored:
                to = b.select(b.icmp_signed("!=", start, I64(0)), to, self.nowhere)
            else:
                w.prefetch(to, far, write=True)
            places.append(to)
        for lane in range(0, STRIP, w.lanes):
            for key in range(0, GROUP, w.lanes):
                columns = [w.load(self.buffer, 4 * ((key + n) * STRIP + lane)) for n in range(w.lanes)]
                for to, row in zip(places[lane : lane + w.lanes], w.transpose(columns), strict=True):
                    if past:
                        w.store_past(row, b.add(to, I64(4 * key)))
                    else:
                        w.store(row if self.stored else b.fadd(w.load(to, 4 * key), row), to, 4 * key)

    def _scatter(self, printer: VectorPrinter, value: ir.Value) -> None:
        base, lanes = self._offset(printer)
        if lanes is None:
            self._accumulate(base, self.w.sum(value))
            return
        for lane in range(self.w.lanes):
            step = self.b.extract_element(lanes, I32(lane))
            self._accumulate(self.b.add(base, step), self.b.extract_element(value, I32(lane)))

    def _offset(self, printer: VectorPrinter, without: int | None = None) -> tuple[ir.Value, ir.Value | None]:
        b, base, lanes = self.b, self.base, None
        slot = self.tile.slots.leaf_at[int(self.node.value)]  # type: ignore[arg-type]
        wide = ir.VectorType(I64, self.w.lanes)
        for n, index in enumerate(self.node.args):
            if n == without:
                continue
            last = b.sub(b.trunc(printer.slot(slot + 1 + 2 * n), I32), I32(1))
            if not printer.is_vector(index):
                inside = printer._clamp(printer.values[index], last, I32(0))
                base = b.add(base, b.mul(b.sext(inside, I64), self.strides[n]))
                continue
            inside = printer._clamp(printer.values[index], self.w.splat(last), self.w.n(0))
            step = b.mul(b.sext(inside, wide), self.w.splat(self.strides[n]))
            lanes = step if lanes is None else b.add(lanes, step)
        return base, lanes

    def _accumulate(self, address: ir.Value, value: ir.Value) -> None:
        pointer = self.b.inttoptr(address, F32.as_pointer())
        self.b.store(self.b.fadd(self.b.load(pointer, align=4), value), pointer, align=4)


def print_slopes(
    module: ir.Module, name: str, isa: Isa, slots: Slots, packed: bool, spec: AttentionSpec, masked: bool,
    ways: tuple[int, ...],
) -> None:  # fmt: skip
    """One of slopes_full and slopes_partial; `ways` says what becomes of each leaf's contributions."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 9), name)
    score: Node = spec.score  # type: ignore[assignment]  # there is code for specs with terms only
    derivative = differentiate(score)
    loads = [(node, adjoint) for node, adjoint in derivative.loads if ways[int(node.value)]]  # type: ignore[arg-type]
    keep = spec.keep if masked else None
    indices = [index for node, _ in loads for index in node.args]
    roots = (score, derivative.s, *((keep,) if keep is not None else ()), *(a for _, a in loads), *indices)
    tile = Tile(function, isa, slots, packed, roots)
    b, w = tile.b, tile.w
    _, scratch, s, dp, keys, first, strips, grads, task = function.args
    step = 4 * w.lanes
    sites = [Site(tile, node, adjoint, ways[int(node.value)], grads, task) for node, adjoint in loads]  # type: ignore[arg-type]
    wrong = b.alloca(w.f)
    b.store(w.k(0.0), wrong)
    outer = tile.prologue()

    def add_groups(start: ir.Value, count: ir.Value) -> None:
        shared = tile.key(outer, b.add(first, start))
        for site in sites:
            if site.dimension is not None:
                site.add_group(shared[site.node.args[site.dimension]], count, b.add(first, start))

    with tile.loop(strips, "strip") as strip:
        at = b.mul(strip, I64(4 * STRIP))
        rows = tile.lanes_of(outer, strip)
        here = b.add(scratch, at)
        m, low, delta = (
            [w.load(here, place + v * step) for v in range(tile.vectors)]
            for place in (LANES.m, LANES.low, LANES.delta)
        )
        for site in sites:
            site.clear()
            site.set_rows(rows, strip)
        with tile.keys(outer, rows, keys, first, add_groups) as (key, staged):
            shared = tile.key(outer, b.add(first, key))
            offset = b.add(b.mul(key, I64(ROW)), at)
            for v in range(tile.vectors):
                place = b.add(offset, I64(v * step))
                printer = tile.pair(rows[v], shared, w.load(s, place), staged, v)
                value = printer.vector(score)
                if keep is not None:
                    value = b.select(printer.vector(keep), value, w.k(float("-inf")))
                p = w.weight(b.fsub(b.fsub(value, m[v]), low[v]))
                # Where the weight is 0 the pair is hidden or might as well be: a slope without bound must not enter.
                dead = b.fcmp_ordered("==", p, w.k(0.0))
                ds = b.fmul(p, b.fsub(w.load(dp, place), delta[v]))
                for site in sites:
                    part = b.select(dead, w.k(0.0), b.fmul(ds, printer.vector(site.adjoint)))
                    b.store(w.fma(part, w.k(0.0), b.load(wrong)), wrong)
                    site.add(v, key, printer, part)
                w.store(p, s, place)
                w.store(b.select(dead, w.k(0.0), b.fmul(ds, printer.vector(derivative.s))), dp, place)
        for site in sites:
            site.flush(rows)
        _tell_ahead(tile, sites, outer, (strip, keys, first))
    _tell(w, b.load(wrong), grads)
    if w.lanes == GROUP and any(site.stored for site in sites):
        w.call("llvm.x86.sse.sfence", ir.VoidType())
    b.ret_void()


def _tell_ahead(
    tile: Tile, sites: list[Site], outer: VectorPrinter, place: tuple[ir.Value, ir.Value, ir.Value]
) -> None:
    """After the first strip, where the next tile's numbers lie, of one leaf and of one gradient that is added to.
    place = (strip, keys, first column)."""
    strip, keys, first = place
    shared = tile.key(outer, first)
    added = [site for site in sites if site.dimension is not None and not site.stored]
    with tile.b.if_then(tile.b.icmp_signed("==", strip, I64(0))):
        for stage in tile.stages[:1]:
            index = shared[stage.node.args[stage.dimension]]
            tell_ahead(tile, TABLE.leaf, index, first, keys, stage.addresses, SIZES[stage.element])
        for site in added[:1]:
            index = shared[site.node.args[site.dimension]]  # type: ignore[index]
            tell_ahead(tile, TABLE.slope, index, first, keys, site.addresses, 4)


def _tell(w: Words, products: ir.Value, grads: ir.Value) -> None:
    """Set the flag if a sum of products with 0 is not 0: something was not finite."""
    b = w.b
    found = b.bitcast(b.fcmp_unordered("uno", products, w.k(0.0)), ir.IntType(w.lanes))
    with b.if_then(b.icmp_unsigned("!=", found, ir.Constant(found.type, 0)), likely=False):
        w.store(I64(1), w.load(grads, 0, I64))


def backward_code(
    isa: Isa, spec: AttentionSpec, slots: Slots, packed: bool, ways: tuple[int, ...]
) -> dict[str, int]:
    """Addresses of slopes_full and slopes_partial; none for a spec without terms."""
    if spec.score is None:
        return {}
    symbols = ("slopes_full", *(("slopes_partial",) if spec.keep is not None else ()))

    def make() -> str:
        module = ir.Module("slopes")
        for symbol in symbols:
            print_slopes(module, symbol, isa, slots, packed, spec, symbol == "slopes_partial", ways)
        return machine_code.optimise(isa, module)

    return machine_code.load(isa, f"slopes {packed} {ways} {slots.text} {spec.text}", symbols, make)
