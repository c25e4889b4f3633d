"""Leaves read along the keys, for lanes that are rows: a few keys at a time are turned into a small buffer.

A bool mask or a bias of one number a pair lies in memory row by row, and a vector of rows would be gathered element
by element. Here each row of a strip is read by vectors of keys, a square of rows and keys is transposed by
exchanges, and the fold reads its vectors from the square. Where the leaf is not contiguous along the keys, or the
square passes its end, it is filled element by element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llvmlite.ir as ir

from tilewise.backends.cpu.isa import BLOCK_ROWS, STRIP
from tilewise.backends.cpu.parameters import LANES, TABLE
from tilewise.backends.cpu.print_vector import KEY, LANE, SIZES
from tilewise.backends.cpu.words import F32, I8, I32, I64

if TYPE_CHECKING:
    from tilewise.backends.cpu.fold import Tile
    from tilewise.backends.cpu.print_vector import VectorPrinter
    from tilewise.backends.cpu.slots import Slots
    from tilewise.spec.expression import Node

GROUP = 16
"""Keys turned at once."""
AHEAD = 96
"""Keys ahead whose memory is asked for: the block of keys that comes next, so that it is in the second-level cache."""
WIDENED = {"f32": "fp32", "bf16": "bf16", "f16": "fp16"}


def along_keys(node: Node, rank: dict[Node, int], slots: Slots) -> int | None:
    """The dimension of a load's leaf that runs along the keys, if the buffer can hold it: one index is the column or
    the position of the key itself, the others depend on the row at most."""
    if node.op != "load" or rank[node] != LANE | KEY:
        return None
    element = slots.elements[int(node.value)]  # type: ignore[arg-type]
    fits = (node.type == "bool" and element in ("i8", "u8")) or (node.type == "float" and element in WIDENED)
    moving = [n for n, index in enumerate(node.args) if rank[index] & KEY]
    if not fits or len(moving) != 1 or node.args[moving[0]].op != "var":
        return None
    return moving[0]


def room(b: ir.IRBuilder, type_: ir.Type, count: int) -> ir.Value:
    """The address of so many elements on the stack."""
    cell = b.alloca(ir.ArrayType(type_, count))
    cell.align = 64
    return b.ptrtoint(cell, I64)


def ahead(tile: Tile, column: ir.Value, keys: ir.Value, addresses: ir.Value, size: int) -> ir.Value:
    """How far behind the numbers of a column those lie that are met so many keys later: where the rows' keys end
    before, in the rows below, at their first key."""
    b, w = tile.b, tile.w
    first, end = (w.load(tile.scratch, LANES.numbers + 8 * n, I64) for n in (TABLE.first, TABLE.end))
    one, two = (w.load(addresses, 8 * lane, I64) for lane in (0, 1))
    below = b.mul(b.sub(two, one), I64(BLOCK_ROWS))
    below = b.sub(below, b.mul(b.sub(end, first), I64(size)))
    over = b.icmp_signed(">=", b.add(column, keys), end)
    return b.add(b.select(over, below, I64(0)), b.mul(keys, I64(size)))


def ahead_here(tile: Tile, column: ir.Value, addresses: ir.Value, size: int) -> ir.Value:
    """`ahead` by AHEAD keys, for a request right here; 0 where products ask."""
    asks = tile.w.load(tile.scratch, LANES.numbers + 8 * TABLE.asks, I64)
    far = ahead(tile, column, I64(AHEAD), addresses, size)
    return tile.b.select(tile.b.icmp_signed("!=", asks, I64(0)), I64(0), far)


def tell_ahead(tile: Tile, place: int, index: ir.Value, column: ir.Value, keys: ir.Value, addresses: ir.Value,
               size: int) -> None:  # fmt: skip
    """Say where the numbers of the next tile lie, whose first column is so many keys after `column`, and those after
    the last the rows' first; index: where `column` lies in the leaf."""
    b, w = tile.b, tile.w
    one, two = (w.load(addresses, 8 * lane, I64) for lane in (0, 1))
    here = b.add(one, b.mul(b.sext(index, I64), I64(size)))
    w.store(b.add(here, ahead(tile, column, keys, addresses, size)), tile.scratch, LANES.numbers + 8 * place)
    w.store(b.sub(two, one), tile.scratch, LANES.numbers + 8 * (place + 1))


class Stage:
    """The buffer of one load: GROUP rows, one a key, of STRIP elements."""

    def __init__(self, tile: Tile, node: Node, dimension: int) -> None:
        self.tile, self.node, self.dimension = tile, node, dimension
        self.b, self.w = tile.b, tile.w
        self.element = tile.slots.elements[int(node.value)]  # type: ignore[arg-type]
        self.type = I8 if node.type == "bool" else F32
        self.size = 1 if node.type == "bool" else 4
        self.row = STRIP * self.size
        self.buffer = room(self.b, self.type, GROUP * STRIP)
        self.addresses = room(self.b, I64, STRIP)

    def set_rows(self, rows: list[VectorPrinter]) -> None:
        """Where each row of the strip begins in the leaf."""
        for v, printer in enumerate(rows):
            base, lanes = printer.offset(self.node, self.dimension)
            for lane in range(self.w.lanes):
                address = base
                if lanes is not None:
                    step = self.b.extract_element(lanes, I32(lane))
                    address = self.b.add(base, step if self.tile.slots.far else self.b.sext(step, I64))
                self.w.store(address, self.addresses, 8 * (v * self.w.lanes + lane))

    def fill(self, shared: dict[Node, ir.Value], column: ir.Value) -> None:
        """The buffer for the keys of which the first is in `shared`, in column `column`."""
        b, at = self.b, self.tile.slots.leaf_at[int(self.node.value)]  # type: ignore[arg-type]
        first = b.sext(shared[self.node.args[self.dimension]], I64)
        size = self.w.load(self.tile.spec, 8 * (at + 1 + 2 * self.dimension), I64)
        stride = self.w.load(self.tile.spec, 8 * (at + 2 + 2 * self.dimension), I64)
        inside = b.icmp_signed("<=", b.add(first, I64(GROUP)), size)
        inside = b.and_(inside, b.icmp_signed(">=", first, I64(0)))
        plain = b.and_(inside, b.icmp_signed("==", stride, I64(SIZES[self.element])))
        with b.if_else(plain) as (vectors, elements):
            with vectors:
                self._turn(
                    b.mul(first, stride), ahead_here(self.tile, column, self.addresses, SIZES[self.element])
                )
            with elements:
                self._gather(first, size, stride)

    def _turn(self, offset: ir.Value, far: ir.Value) -> None:
        b, w = self.b, self.w
        starts = [b.add(w.load(self.addresses, 8 * lane, I64), offset) for lane in range(STRIP)]
        for start in starts:
            w.prefetch(start, far)
        if self.type == I8:
            bytes_ = ir.VectorType(I8, GROUP)
            for key, row in enumerate(self._interleave([w.load(start, 0, bytes_) for start in starts])):
                w.store(row, self.buffer, key * self.row)
            return
        step = SIZES[self.element]
        for lane in range(0, STRIP, w.lanes):
            for key in range(0, GROUP, w.lanes):
                rows = [
                    w.widen(start, key * step, WIDENED[self.element])
                    for start in starts[lane : lane + w.lanes]
                ]
                for n, row in enumerate(w.transpose(rows)):
                    w.store(row, self.buffer, (key + n) * self.row + 4 * lane)

    def _interleave(self, rows: list[ir.Value]) -> list[ir.Value]:
        """16 vectors of 16 bytes, transposed: rows n and n + 8 are interleaved, four times."""
        half = GROUP // 2
        low = [n // 2 + (n % 2) * GROUP for n in range(GROUP)]
        for _ in range(4):
            pairs = zip(rows[:half], rows[half:], strict=True)
            rows = [
                self.b.shuffle_vector(a, c, ir.Constant(ir.VectorType(I32, GROUP), [k + part for k in low]))
                for a, c in pairs
                for part in (0, half)
            ]
        return rows

    def _gather(self, first: ir.Value, size: ir.Value, stride: ir.Value) -> None:
        b, w, last = self.b, self.w, self.b.sub(size, I64(1))
        printer = self.tile.any_printer()
        with self.tile.loop(I64(GROUP), "turned") as key:
            at = b.add(first, key)
            at = b.select(b.icmp_signed("<", at, I64(0)), I64(0), at)
            at = b.mul(b.select(b.icmp_signed(">", at, last), last, at), stride)
            with self.tile.loop(I64(STRIP), "lane") as lane:
                start = w.load(self.addresses, b.mul(lane, I64(8)), I64)
                value = printer.element(b.add(start, at), self.element, self.node.type, as_byte=True)
                place = b.add(b.mul(key, I64(self.row)), b.mul(lane, I64(self.size)))
                w.store(value, self.buffer, place)
