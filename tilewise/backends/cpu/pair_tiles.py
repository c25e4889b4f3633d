"""Microkernels on tiles of scores whose weights become bf16 pairs: what lies between two products on pairs.

Weights are rounded to bf16 (nearest, ties away from zero) where they become an operand, two neighbouring keys a word.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir
from numba.core import cgutils

from tilewise.backends.cpu.isa import STRIP
from tilewise.backends.cpu.micro import ROW, _emit, _void, f32
from tilewise.backends.cpu.words import I16, I32, I64, Words

if TYPE_CHECKING:
    from tilewise.backends.cpu.isa import Isa

DEGREE = 4
"""Of the polynomial of weights that become bf16: 2.8e-6 beside their rounding of 2e-3, and l is summed of them."""
STALE = 5.0
"""A running maximum may be this much too low, in natural units."""
_HIGH = -65536


def _low(w: Words, x: ir.Value) -> ir.Value:
    return w.b.bitcast(w.b.shl(x, w.n(16)), w.f)


def _high(w: Words, x: ir.Value) -> ir.Value:
    return w.b.bitcast(w.b.and_(x, w.n(_HIGH)), w.f)


def _zip(w: Words, x: ir.Value, y: ir.Value) -> ir.Value:
    """Two float32 vectors as one vector of bf16 pairs, x in the low halves."""
    b, half = w.b, w.n(0x8000)
    low = b.lshr(b.add(b.bitcast(x, w.i), half), w.n(16))
    return b.or_(low, b.and_(b.add(b.bitcast(y, w.i), half), w.n(_HIGH)))


def _round(w: Words, x: ir.Value, y: ir.Value) -> ir.Value:
    """Two float32 vectors as one vector of bf16, x first, as int16."""
    b, half, shorts = w.b, w.n(0x8000), ir.VectorType(I16, 2 * w.lanes)
    halves = [b.bitcast(b.add(b.bitcast(v, w.i), half), shorts) for v in (x, y)]
    odd = ir.Constant(ir.VectorType(I32, 2 * w.lanes), [2 * n + 1 for n in range(2 * w.lanes)])
    return b.shuffle_vector(*halves, odd)


class PairTiles:
    """The intrinsics of one target between its products on pairs."""

    def __init__(self, isa: Isa) -> None:
        self.isa, self.lanes, self.step = isa, isa.lanes, 4 * isa.lanes
        self.strip_vectors = STRIP // isa.lanes

    def words(self, b: ir.IRBuilder) -> Words:
        return Words(b, self.lanes, self.isa.half)

    def _rows(self, b: ir.IRBuilder, base: ir.Value, count: ir.Value) -> Any:
        """A loop over rows of a tile: yields the address of each."""
        return _RowLoop(b, base, count)

    @functools.cached_property
    def lift(self) -> Any:
        """lift(s, count, factor): one strip of a tile, s *= factor."""

        def body(b, s, count, factor):
            w = self.words(b)
            with self._rows(b, s, count) as row:
                for v in range(self.strip_vectors):
                    w.store(b.fmul(w.load(row, v * self.step), w.splat(factor)), row, v * self.step)

        return _emit(_void(2, f32), body, "s, count, factor")

    def highest(self, strips: int) -> Any:
        """highest(s, top, count, factor): neighbouring strips of a tile, top = factor * the largest of each lane;
        factor > 0."""

        def body(b, s, top, count, factor):
            w = self.words(b)
            cells = [cgutils.alloca_once(b, w.f) for _ in range(strips * self.strip_vectors)]
            for cell in cells:
                b.store(w.k(float("-inf")), cell)
            with self._rows(b, s, count) as row:
                for v, cell in enumerate(cells):
                    b.store(w.maximum(w.load(row, v * self.step), b.load(cell)), cell)
            for v, cell in enumerate(cells):
                w.store(b.fmul(b.load(cell), w.splat(factor)), top, v * self.step)

        return _emit(_void(3, f32), body, "s, top, count, factor")

    @functools.cached_property
    def advance(self) -> Any:
        """advance(top, m, pivot, l, alpha): `Micro.advance`, but m stays where a block's maximum exceeds it by less
        than STALE: weights are then at most e^STALE, and acc need not be rescaled."""

        def body(b, top, m, pivot, total, alpha):
            w = self.words(b)
            old, highest = w.load(m), w.load(top)
            new = b.select(b.fcmp_ordered(">", highest, b.fadd(old, w.k(STALE))), highest, old)
            w.advance(old, new, m, pivot, total, alpha)

        return _emit(_void(5), body, "top, m, pivot, total, alpha")

    def exponentials(self, strips: int) -> Any:
        """exponentials(s, pivot, l, pairs, factor): neighbouring strips of a tile, p = e^(factor s - pivot), l += the
        sums of p before rounding; rows 2 n and 2 n + 1 become pairs in row n."""

        def body(b, s, pivot, total, pairs, factor):
            w = self.words(b)
            vectors = range(strips * self.strip_vectors)
            base = [b.fneg(w.load(pivot, v * self.step)) for v in vectors]
            sums = [cgutils.alloca_once(b, w.f) for _ in vectors]
            for cell in sums:
                b.store(w.k(0.0), cell)
            scale = w.splat(factor)
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                to = b.add(s, b.mul(loop.index, I64(ROW)))
                row = b.add(to, b.mul(loop.index, I64(ROW)))
                for two in (vectors[n : n + 2] for n in range(0, len(vectors), 2)):
                    places = [(v, n) for v in two for n in range(2)]
                    scores = [w.load(row, n * ROW + v * self.step) for v, n in places]
                    shifted = [w.fma(x, scale, base[v]) for x, (v, _) in zip(scores, places, strict=True)]
                    p = w.weights(shifted, DEGREE)
                    for v, x, y in zip(two, p[0::2], p[1::2], strict=True):
                        w.store(_zip(w, x, y), to, v * self.step)
                        b.store(b.fadd(b.load(sums[v]), b.fadd(x, y)), sums[v])
            for v in vectors:
                w.store(b.fadd(w.load(total, v * self.step), b.load(sums[v])), total, v * self.step)

        return _emit(_void(4, f32), body, "s, pivot, total, pairs, factor")

    @functools.cached_property
    def zip_tile(self) -> Any:
        """zip(s, pairs): one strip of a tile of weights, rows 2 n and 2 n + 1 become pairs in row n."""

        def body(b, s, pairs):
            w = self.words(b)
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                to = b.add(s, b.mul(loop.index, I64(ROW)))
                row = b.add(to, b.mul(loop.index, I64(ROW)))
                for v in range(self.strip_vectors):
                    x, y = (w.load(row, n * ROW + v * self.step) for n in range(2))
                    w.store(_zip(w, x, y), to, v * self.step)

        return _emit(_void(2), body, "s, pairs")

    @functools.cached_property
    def rescale(self) -> Any:
        """rescale(acc, alpha, rows): one vector of lanes, acc *= alpha; nothing is touched where alpha is 1."""

        def body(b, acc, alpha, rows):
            w = self.words(b)
            factor = w.load(alpha)
            changed = b.bitcast(b.fcmp_unordered("!=", factor, w.k(1.0)), ir.IntType(self.lanes))
            with (
                b.if_then(b.icmp_unsigned("!=", changed, ir.Constant(changed.type, 0))),
                self._rows(b, acc, rows) as row,
            ):
                w.store(b.fmul(w.load(row), factor), row)

        return _emit(_void(3), body, "acc, alpha, rows")

    def slopes(self, fused: bool) -> Any:
        """slopes(s, dp, ds pairs, m, low, delta, pairs, factor): two rows of a tile at a time, all lanes.

        fused: p = e^(factor s - m - low) and ds = p (dp - delta); else p and ds stand in s and dp. p and ds become
        bf16 rows where s and dp were, in the first half of each row, and ds becomes pairs, row n of 2 n, 2 n + 1.
        """

        def body(b, s, dp, to, m, low, delta, pairs, factor):
            w = self.words(b)
            scale = w.splat(factor)
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                at = b.mul(loop.index, I64(2 * ROW))
                # In order: the bf16 of some lanes lies over float32 of lanes before them. Two vectors make one of bf16.
                for x in range(0, ROW, 2 * self.step):
                    weights: list[list[ir.Value]] = [[], []]
                    slopes: list[list[ir.Value]] = [[], []]
                    for n, y in ((n, y) for n in range(2) for y in (x, x + self.step)):
                        place = b.add(at, I64(n * ROW + y))
                        p, ds = w.load(s, place), w.load(dp, place)
                        if fused:
                            shifted = w.fma(p, scale, b.fneg(w.load(m, y)))
                            p = w.weight(b.fsub(shifted, w.load(low, y)), DEGREE)
                            ds = b.fmul(p, b.fsub(ds, w.load(delta, y)))
                        weights[n].append(p)
                        slopes[n].append(ds)
                    for v, (one, two) in enumerate(zip(*slopes, strict=True)):
                        w.store(
                            _zip(w, one, two), to, b.add(b.mul(loop.index, I64(ROW)), I64(x + v * self.step))
                        )
                    for base, rows in ((s, weights), (dp, slopes)):
                        for n, row in enumerate(rows):
                            w.store(_round(w, *row), base, b.add(at, I64(n * ROW + x // 2)))

        return _emit(_void(7, f32), body, "s, dp, to, m, low, delta, pairs, factor")

    @functools.cached_property
    def lane_dot(self) -> Any:
        """dot(x, y, pairs, to): one vector of lanes, the sum over two tiles of pairs of their products."""

        def body(b, x, y, pairs, to):
            w = self.words(b)
            total = cgutils.alloca_once(b, w.f)
            b.store(w.k(0.0), total)
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                at = b.mul(loop.index, I64(ROW))
                left, right = w.load(x, at, w.i), w.load(y, at, w.i)
                low = w.fma(_low(w, left), _low(w, right), b.load(total))
                b.store(w.fma(_high(w, left), _high(w, right), low), total)
            w.store(b.load(total), to)

        return _emit(_void(4), body, "x, y, pairs, to")


class _RowLoop:
    """for row in rows of a tile, as a context that gives the row's address."""

    def __init__(self, b: ir.IRBuilder, base: ir.Value, count: ir.Value) -> None:
        self.b, self.base, self.loop = b, base, cgutils.for_range(b, count, intp=I64)

    def __enter__(self) -> ir.Value:
        index = self.loop.__enter__().index
        return self.b.add(self.base, self.b.mul(index, I64(ROW)))

    def __exit__(self, *error: Any) -> None:
        self.loop.__exit__(*error)
