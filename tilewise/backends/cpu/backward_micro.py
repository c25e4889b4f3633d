"""Microkernels of the backward pass alone: rows' statistics from their tiles, and the slopes of weights."""

from __future__ import annotations

import functools
from typing import Any

from numba.core import cgutils

from tilewise.backends.cpu.micro import ROW, Micro, _emit, _void
from tilewise.backends.cpu.words import I64


class BackwardMicro(Micro):
    """The intrinsics of one target and one storage type."""

    @functools.cached_property
    def lane_dot(self) -> Any:
        """dot(x, y, row bytes, rows, to, more): one vector of lanes, the sum over rows of x y, as a product sums.

        With `more` it is added to what stands there."""

        def body(b, x, y, row, rows, to, more):
            w = self.words(b)
            total = cgutils.alloca_once(b, w.f)
            b.store(w.k(0.0), total)
            with cgutils.for_range(b, rows, intp=I64) as loop:
                at = b.mul(loop.index, row)
                b.store(w.fma(w.load(x, at), w.load(y, at), b.load(total)), total)
            part = b.load(total)
            whole = b.fadd(part, w.load(to))
            w.store(b.select(b.icmp_signed("!=", more, I64(0)), whole, part), to)

        return _emit(_void(6), body, "x, y, row, rows, to, more")

    def slopes(self, vectors: int = 1) -> Any:
        """slopes(s, dp, m, low, delta, count): neighbouring vectors of rows of a tile, s = p = e^(s - m - low),
        dp = ds = p (dp - delta)."""
        steps = [v * self.vector_bytes for v in range(vectors)]

        def body(b, s, dp, m, low, delta, count):
            w = self.words(b)
            base, less, sub = ([w.load(x, at) for at in steps] for x in (m, low, delta))
            with cgutils.for_range(b, count, intp=I64) as loop:
                offset = b.mul(loop.index, I64(ROW))
                row, row_dp = b.add(s, offset), b.add(dp, offset)
                scores = [w.load(row, at) for at in steps]
                shifted = [b.fsub(b.fsub(x, y), z) for x, y, z in zip(scores, base, less, strict=True)]
                for p, at, x in zip(w.weights(shifted), steps, sub, strict=True):
                    w.store(p, row, at)
                    w.store(b.fmul(p, b.fsub(w.load(row_dp, at), x)), row_dp, at)

        return _emit(_void(6), body, "s, dp, m, low, delta, count")

    @functools.cached_property
    def weigh(self) -> Any:
        """weigh(p, dp, alpha, delta, count): one vector of rows, delta = delta alpha + sum p dp, where p is not 0."""

        def body(b, p, dp, alpha, delta, count):
            w = self.words(b)
            total = cgutils.alloca_once(b, w.f)
            b.store(w.k(0.0), total)
            with cgutils.for_range(b, count, intp=I64) as loop:
                at = b.mul(loop.index, I64(ROW))
                weight = w.load(p, at)
                part = b.select(
                    b.fcmp_ordered("==", weight, w.k(0.0)), w.k(0.0), b.fmul(weight, w.load(dp, at))
                )
                b.store(b.fadd(b.load(total), part), total)
            w.store(w.fma(w.load(delta), w.load(alpha), b.load(total)), delta)

        return _emit(_void(5), body, "p, dp, alpha, delta, count")

    @functools.cached_property
    def settle(self) -> Any:
        """settle(m, l, sink, low, delta): one vector of rows with the sink merged: m the pivot, low = ln l, delta / l.

        A row that saw nothing gets m = inf, so that its weights are 0."""

        def body(b, m, total, sink, low, delta):
            w = self.words(b)
            none, zero = w.k(float("-inf")), w.k(0.0)
            top, logit = w.load(m), w.load(sink)
            best = b.select(b.fcmp_ordered(">", logit, top), logit, top)
            base = b.select(b.fcmp_ordered("==", best, none), zero, best)
            alpha = w.weight(b.fsub(top, base))
            sum_ = b.fadd(b.fmul(w.load(total), alpha), w.weight(b.fsub(logit, base)))
            empty = b.fcmp_ordered("==", sum_, zero)
            w.store(b.select(empty, w.k(float("inf")), base), m)
            w.store(b.select(empty, zero, w.log(sum_)), low)
            w.store(b.select(empty, zero, b.fdiv(b.fmul(w.load(delta), alpha), sum_)), delta)

        return _emit(_void(5), body, "m, total, sink, low, delta")

    @functools.cached_property
    def sink_slope(self) -> Any:
        """slope(sink, m, low, delta, to): one vector of rows, ds of the sink = -p delta; 0 where it has no weight."""

        def body(b, sink, m, low, delta, to):
            w = self.words(b)
            p = w.weight(b.fsub(b.fsub(w.load(sink), w.load(m)), w.load(low)))
            value = b.fneg(b.fmul(p, w.load(delta)))
            w.store(b.select(b.fcmp_ordered("==", p, w.k(0.0)), w.k(0.0), value), to)

        return _emit(_void(5), body, "sink, m, low, delta, to")
