"""Scores of few rows of q by dot products of bf16 pairs: q and k as they are stored, two products an instruction.

A row of q lies as it came, zeros after its end; the last numbers of a row of k are loaded by a mask, so that heads of
any size are read to their end and no further. Scores are multiplied by the scale when they are summed up.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir
from numba.core import cgutils

from tilewise.backends.cpu.ahead import ASKED, Ahead
from tilewise.backends.cpu.micro import _emit, _void, f32
from tilewise.backends.cpu.pairs import Pairs
from tilewise.backends.cpu.row_micro import RowMicro, keys_at_once
from tilewise.backends.cpu.words import I1, I16, I32, I64

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tilewise.backends.cpu.isa import Isa
    from tilewise.backends.cpu.words import Words


class DotRows(RowMicro):
    """The intrinsics of `RowMicro`, scores by dot products."""

    def __init__(self, isa: Isa) -> None:
        super().__init__(isa, "bf16")
        self._dot = Pairs(isa).dot

    def _lines(self, w: Words, dim: ir.Value) -> Iterator[tuple[ir.Value, ir.Value | None]]:
        """(first byte, mask or None) of every 2 x lanes numbers of a row, of which a vector holds as many pairs."""
        b, width = w.b, 2 * self.lanes
        whole = b.sdiv(dim, I64(width))
        with cgutils.for_range(b, whole, intp=I64) as loop:
            yield b.mul(loop.index, I64(self.vector_bytes)), None
        left = b.sub(dim, b.mul(whole, I64(width)))
        with b.if_then(b.icmp_signed(">", left, I64(0))):
            # `left` ones at the low end.
            bits = b.sub(b.shl(I64(1), left), I64(1))
            mask = b.bitcast(b.trunc(bits, ir.IntType(width)), ir.VectorType(I1, width))
            yield b.mul(whole, I64(self.vector_bytes)), mask

    def _pairs(self, w: Words, address: ir.Value, mask: ir.Value | None) -> ir.Value:
        """2 x lanes numbers; 0 where the mask is."""
        if mask is None:
            return w.load(address, 0, w.i)
        kind = ir.VectorType(I16, 2 * self.lanes)
        pointer = w.address(address, 0, kind)
        name = f"llvm.masked.load.v{2 * self.lanes}i16.p0"
        shape = ir.FunctionType(kind, [pointer.type, I32, mask.type, kind])
        module = w.b.module
        load = module.globals.get(name) or ir.Function(module, shape, name)
        zeros = ir.Constant(kind, [0] * (2 * self.lanes))
        return w.b.bitcast(w.b.call(load, [pointer, I32(2), mask, zeros]), w.i)

    @functools.cached_property
    def pack_row(self) -> Any:
        """pack(row, dim, to, scale): a row of q as it is, zeros up to a whole line."""

        def body(b, row, dim, to, scale):
            w = self.words(b)
            for at, mask in self._lines(w, dim):
                w.store(self._pairs(w, b.add(row, at), mask), to, at)

        return _emit(_void(3, f32), body, "row, dim, to, scale")

    def scores(self, rows: int) -> Any:
        """As `RowMicro.scores`."""
        together = keys_at_once(self.lanes, rows)

        def body(w, k, k_off, keys, q, q_row, dim, s, s_row, asked, asked_off, lines, scale):
            b = w.b
            groups = b.sdiv(b.add(keys, I64(together - 1)), I64(together))
            from_q = [b.add(q, b.mul(q_row, I64(r))) for r in range(rows)]
            factor = w.splat(scale)
            with cgutils.for_range(b, groups, intp=I64) as loop:
                first = b.mul(loop.index, I64(together))
                table = b.add(k, b.mul(first, I64(8)))
                later = (b.add(asked, b.mul(first, I64(8))), asked_off, lines)
                ahead = Ahead(self, w, later, I64(together), ASKED)
                source = [b.add(w.load(table, 8 * n, I64), k_off) for n in range(together)]
                sums = self._sums(w, together * rows)
                for at, mask in self._lines(w, dim):
                    if mask is None and self.spread:
                        for _ in range(together // ASKED):
                            ahead.ask()
                    row_q = [w.load(b.add(base, at), 0, w.i) for base in from_q]
                    for key, address in enumerate(source):
                        pairs = self._pairs(w, b.add(address, at), mask)
                        for r, numbers in enumerate(row_q):
                            cell = sums[key * rows + r]
                            b.store(self._dot(w, b.load(cell), pairs, numbers), cell)
                ahead.finish()
                totals = [b.load(cell) for cell in sums]
                self._store_scores(w, totals, b.add(s, b.mul(first, s_row)), s_row, rows, factor)

        return self._by_key_or(body, rows, self._dot)


def build_rows(isa: Isa, dtype: str) -> RowMicro:
    """The intrinsics for few rows of q."""
    return DotRows(isa) if dtype == "bf16" and isa.pairs in ("dot", "plain") else RowMicro(isa, dtype)
