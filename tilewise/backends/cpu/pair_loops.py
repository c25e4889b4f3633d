"""The loops over bf16 pairs that both passes share: layouts of operands, products of tiles.

Keys come in groups of 32. A group whose rows are whole (32 keys, a head size that 32 divides) is read where it
lies; any other is copied once, zeros after its numbers, so that nothing outside a tensor is read. Where the
summed dimension is the keys, a group is turned: row d holds its 32 keys, 64 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from numba import njit, types

from tilewise.backends.cpu.isa import BLOCK_ROWS, STRIP
from tilewise.backends.cpu.loops import JIT, kernel
from tilewise.backends.cpu.micro import ROW, load_i64, scalar_load, scalar_store
from tilewise.backends.cpu.pair_launch import GROUP
from tilewise.backends.cpu.pairs import Pairs
from tilewise.backends.cpu.words import I16

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

load_u16 = scalar_load(I16, 2, types.uint16)
store_u16 = scalar_store(I16, 2, types.uint16)
HALF_ROW = ROW // 2
"""Bytes of one row of bf16 in a tile's lanes."""


class PairLoops(NamedTuple):
    """pack, group, turn, scores, weighted, natural, outer: see the functions of those names."""

    pack: Any
    group: Any
    turn: Any
    scores: Any
    weighted: Any
    natural: Any
    outer: Any


@kernel
def build_layouts(isa: Isa, pairs: Pairs) -> tuple[Any, Any, Any, Any]:
    """pack, group, turn, natural."""
    lanes, pack_square, turn_square = isa.lanes, pairs.pack_square, pairs.turn_square
    zip_rows, copy_vector, clear_vector = pairs.zip_rows, pairs.copy_vector, pairs.clear_vector
    zero = types.uint16(0)

    @njit(**JIT)
    def pack(addresses, dim, to, scale, strips):
        """Rows given by address as pairs along the head, transposed: to[d / 2][lane], zeros up to whole groups."""
        end = (dim + GROUP - 1) // GROUP * GROUP
        for x in range(0, strips * STRIP, lanes):
            d = 0
            while d + 2 * lanes <= dim:
                pack_square(addresses + x * 8, d * 2, to + d * HALF_ROW + x * 4)
                d += 2 * lanes
            while d < end:
                at = to + d // 2 * ROW
                for y in range(x, x + lanes):
                    source = load_i64(addresses, y)
                    store_u16(at, 2 * y, load_u16(source, d) if d < dim else zero)
                    store_u16(at, 2 * y + 1, load_u16(source, d + 1) if d + 1 < dim else zero)
                d += 2

    @njit(**JIT)
    def group(source, row, keys, dim, spare):
        """(address, row bytes) of a group of 32 rows, of which `keys` are there: itself or a copy with zeros."""
        if keys >= GROUP and dim % GROUP == 0:
            return source, row
        end = (dim + GROUP - 1) // GROUP * GROUP
        for r in range(GROUP):
            at, d = spare + r * end * 2, 0
            there = dim if r < keys else 0
            while d + lanes <= there:
                copy_vector(source + r * row + d * 2, at + d * 2)
                d += lanes
            for x in range(d, end, lanes):
                clear_vector(at + x * 2)
            for x in range(d, there):
                store_u16(at, x, load_u16(source + r * row, x))
        return spare, end * 2

    @njit(**JIT)
    def turn(source, row, keys, dim, to, spare):
        """Groups of 32 keys turned, one after another: row d of a group holds its keys, zeros after the last."""
        end = (dim + GROUP - 1) // GROUP * GROUP
        j = 0
        while j < keys:
            at, at_row = group(source + j * row, row, keys - j, dim, spare)
            for r in range(0, GROUP, 2 * lanes):
                for d in range(0, end, lanes):
                    turn_square(at + r * at_row + d * 2, at_row, to + d * 64 + r * 2)
            to += end * 64
            j += GROUP

    @njit(**JIT)
    def natural(addresses, dim, to):
        """64 rows given by address as pairs of rows: to[row / 2][d], zeros up to whole groups of columns."""
        end = (dim + GROUP - 1) // GROUP * GROUP
        for x in range(0, BLOCK_ROWS, 2):
            one, two, row, d = load_i64(addresses, x), load_i64(addresses, x + 1), to + x * end * 2, 0
            while d + lanes <= dim:
                zip_rows(one + d * 2, two + d * 2, row + d * 4)
                d += lanes
            while d < end:
                store_u16(row, 2 * d, load_u16(one, d) if d < dim else zero)
                store_u16(row, 2 * d + 1, load_u16(two, d) if d < dim else zero)
                d += 1

    return pack, group, turn, natural


@kernel
def build_pair_loops(isa: Isa, pairs: Pairs) -> PairLoops:
    """The shared loops for one target."""
    pack, group, turn, natural = build_layouts(isa, pairs)
    fresh, added, added_near = pairs.block(False), pairs.block(True), pairs.block(True, foresee=False)

    @njit(**JIT)
    def scores(k, row, keys, dim, qp, s, strips, spare):
        """s[key][lane] of whole groups of keys against q in pairs; lanes past the strips get anything."""
        depth = (dim + GROUP - 1) // GROUP
        j = 0
        while j < keys:
            at, at_row = group(k + j * row, row, keys - j, dim, spare)
            later = at + GROUP * at_row
            for strip in range(0, strips, 2):
                x = strip * STRIP * 4
                fresh(at, at_row, 2 * GROUP, qp + x, ROW, depth, s + j * ROW + x, ROW, later)
                later += GROUP // 2 * at_row
            j += GROUP

    @njit(**JIT)
    def weighted(turned, dim, p, keys, acc, strips):
        """acc[d][lane] += sum over keys of turned groups and weights in pairs."""
        end, steps = (dim + GROUP - 1) // GROUP * GROUP, (keys + GROUP - 1) // GROUP
        for d in range(0, end, GROUP):
            # After the last numbers come the next groups of keys.
            later = turned + (d + GROUP if d + GROUP < end else steps * end) * 64
            for strip in range(0, strips, 2):
                x = strip * STRIP * 4
                added(turned + d * 64, 64, end * 64, p + x, ROW, steps, acc + d * ROW + x, ROW, later)
                later += GROUP // 2 * 64

    @njit(**JIT)
    def outer(rows, columns, dim, c, keys):
        """c[key][d] += sum over 64 lanes of bf16 rows of a tile and the block's rows in pairs."""
        end = (dim + GROUP - 1) // GROUP * GROUP
        for j in range(0, keys, GROUP):
            for d in range(0, end, GROUP):
                at = c + (j * end + d) * 4
                added_near(rows + j * ROW, ROW, 64, columns + d * 4, end * 4, 2, at, end * 4, rows + j * ROW)

    return PairLoops(pack, group, turn, scores, weighted, natural, outer)
