"""Rows of keys asked for while others are met, some lines at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba.core import cgutils

from tilewise.backends.cpu.isa import LINE
from tilewise.backends.cpu.words import I64

if TYPE_CHECKING:
    import llvmlite.ir as ir

    from tilewise.backends.cpu.row_micro import RowMicro
    from tilewise.backends.cpu.words import Words

ASKED = 4
"""Lines that `scores` asks for at once where it asks between products: a group of four keys has as many lines of k in
every step."""


class Ahead:
    """Rows that are asked for while others are met: `each` lines whenever `ask` is emitted, in order."""

    def __init__(
        self, micro: RowMicro, w: Words, asked: tuple[ir.Value, ir.Value, ir.Value], rows: ir.Value, each: int
    ) -> None:
        """asked = (addresses of rows, what is added to them, lines of a row, 0 where nothing is asked for)."""
        self._micro, self._w, self._asked, self._rows, self._each = micro, w, asked, rows, each
        self._row, self._at = (cgutils.alloca_once(w.b, I64) for _ in range(2))
        for cell in (self._row, self._at):
            w.b.store(I64(0), cell)
        self._bytes = w.b.mul(asked[2], I64(LINE))
        self._last = w.b.sub(self._bytes, I64(LINE))

    def _base(self, row: ir.Value) -> ir.Value:
        b = self._w.b
        return b.add(self._w.load(self._asked[0], b.mul(row, I64(8)), I64), self._asked[1])

    def ask(self) -> None:
        """The next lines."""
        b, each = self._w.b, self._each
        with b.if_then(b.icmp_signed(">", self._bytes, I64(0)), likely=True):
            row, at = b.load(self._row), b.load(self._at)
            base = self._base(row)
            for n in range(each):
                place = b.add(at, I64(n * LINE))
                if n:
                    place = b.select(b.icmp_signed("<", place, self._last), place, self._last)
                self._micro.prefetch(b, b.add(base, place))
            after = b.add(at, I64(each * LINE))
            ended = b.icmp_signed(">=", after, self._bytes)
            b.store(b.select(ended, I64(0), after), self._at)
            b.store(b.add(row, b.zext(ended, I64)), self._row)

    def finish(self) -> None:
        """The rows that are left, where a head is no multiple of the columns."""
        b = self._w.b
        row = b.load(self._row)
        left = b.select(b.icmp_signed(">", self._bytes, I64(0)), b.sub(self._rows, row), I64(0))
        with cgutils.for_range(b, left, intp=I64) as loop:
            self._micro.ask(b, self._base(b.add(row, loop.index)), self._asked[2])
