"""Forward mode and second order, tile by tile: `jvp` and `hvp`. They live once, here, and serve every backend.

With L = <do, out> + <dlse, lse> and a direction u of the inputs x (q, k, v, leaves, sink):

    jvp(x, u)          the tangents of out and lse along u
    hvp(x, u, do)      the tangent along u of grad_x L, do and dlse held fixed

The gradient of <u, grad_x L> is hvp in x and jvp in (do, dlse), so these two are all that double backward
and forward-over-reverse need. Memory is O(N): weights are recomputed, as in the backward.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.protocol import Gradients
from tilewise.backends.reference import tile as t
from tilewise.backends.reference.segments import uniform
from tilewise.backends.reference.tile import LOG2E
from tilewise.backends.reference.walk import Walk, absorb_sink, drop, hide, sink_weight, tile_scores
from tilewise.spec.print_torch import accumulate

if TYPE_CHECKING:
    from tilewise.backends.reference.segments import Segment
    from tilewise.problem import Inputs, Problem


class Direction(NamedTuple):
    """Tangents of the inputs, each of its input's shape; None is zero."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    leaves: tuple[Tensor | None, ...]
    sink: Tensor | None = None


class _Rows(NamedTuple):
    """What a tile of rows brings along: q and its tangent carry the scale."""

    q: Tensor
    q_dot: Tensor
    m: Tensor
    low: Tensor


class _Tile(NamedTuple):
    """A tile's weights and everything about its score: the printed roots, then their tangents.

    visible and kept (visible and not dropped) are None where everything is finite.
    """

    k: Tensor
    k_dot: Tensor
    v: Tensor
    v_dot: Tensor
    p: Tensor
    s_dot: Tensor
    factor: Tensor | None
    hidden: Tensor
    visible: Tensor | None
    kept: Tensor | None
    roots: tuple[Tensor, ...]
    dots: tuple[Tensor, ...]


def row_statistics(
    walk: Walk, segment: Segment, rows: tuple[int, int], columns: list[tuple[tuple[int, int], int]], q: Tensor
) -> tuple[Tensor, Tensor]:
    """(m, log2 l) of a tile of rows over its keys and the sink; q carries the scale."""
    m = q.new_full(q.shape[:3], -math.inf)
    l = torch.zeros_like(m)  # noqa: E741
    for cols, kind in columns:
        walk.fold.at(segment, rows, cols)
        s = tile_scores(walk, q, walk.keys(walk.k, segment, cols), kind)
        top = torch.maximum(m, s.amax(-1))
        pivot = top.masked_fill(top == -math.inf, 0.0)
        l = l * torch.exp2((m - pivot) * LOG2E) + ((s - pivot[..., None]) * LOG2E).exp2_().sum(-1)  # noqa: E741
        m = top
    if walk.inputs.sink is not None:
        m, l, _ = absorb_sink(m, l, walk.inputs.sink)  # noqa: E741
    return m, torch.log2(l.masked_fill(l == 0, 1.0))


class _Tangent:
    """The walk over a call with its direction."""

    def __init__(self, problem: Problem, inputs: Inputs, direction: Direction, lse: Tensor) -> None:
        self.problem, self.inputs = problem, inputs
        self.walk = Walk(problem, inputs, direction.leaves)
        given = zip((inputs.q, inputs.k, inputs.v), direction[:3], strict=True)
        dots = (torch.zeros_like(x) if dot is None else dot for x, dot in given)
        self.q_dot, self.k_dot, self.v_dot = (uniform(problem, x) for x in dots)
        self.guarded = problem.options.pages or not (
            t.all_finite(inputs.q, inputs.k, inputs.v, *direction[:3])
            and (lse.numel() == 0 or bool(lse.amax() < math.inf))
        )
        self.sink_dot = (
            None if inputs.sink is None or direction.sink is None else direction.sink.to(lse.dtype)
        )

    def rows(
        self, segment: Segment, rows: tuple[int, int], columns: list[tuple[tuple[int, int], int]]
    ) -> _Rows:
        """A tile of rows; m and log2 l are computed afresh, for the reason that the backward has."""
        walk, scale = self.walk, self.inputs.scale
        q = walk.wide(walk.cut_rows(walk.q, segment, rows)) * scale
        q_dot = walk.wide(walk.cut_rows(self.q_dot, segment, rows)) * scale
        m, low = row_statistics(walk, segment, rows, columns, q)
        return _Rows(q, q_dot, m.masked_fill(m == -math.inf, math.inf), low)

    def tile(
        self, place: tuple[Segment, tuple[int, int], tuple[int, int]], kind: int, data: _Rows,
        alive: Tensor | None = None,
    ) -> _Tile:  # fmt: skip
        """One tile; rows that are not alive count as hidden."""
        walk, (segment, rows, cols) = self.walk, place
        k, k_dot = (walk.keys(x, segment, cols) for x in (walk.k, self.k_dot))
        v, v_dot = (walk.values(x, segment, cols) for x in (walk.v, self.v_dot))
        walk.fold.at(segment, rows, cols)
        s0 = t.scores(data.q, k)
        s0_dot = t.scores(data.q_dot, k) + t.scores(data.q, k_dot)
        values = walk.fold.trees.all_and_dots(walk.fold.env(s=s0, s_dot=s0_dot))
        half = len(values) // 2
        s = hide(walk, values[0].expand_as(s0), kind)
        hidden = s == -math.inf
        if alive is not None:
            hidden = hidden | ~alive[..., None]
        p = torch.exp2((s - data.m[..., None]) * LOG2E - data.low[..., None]).masked_fill(hidden, 0.0)
        s_dot = values[half].expand_as(s0).masked_fill(hidden, 0.0)
        factor = walk.fold.dropout()
        visible = ~hidden if self.guarded else None
        kept = visible if visible is None or factor is None else visible & (factor != 0)
        return _Tile(
            k, k_dot, v, v_dot, p, s_dot, factor, hidden, visible, kept, values[:half], values[half:]
        )

    def sink_weight(self, data: _Rows) -> Tensor:
        """Weight of the sink in each row."""
        return sink_weight(self.inputs.sink, data.m, data.low)  # type: ignore[arg-type]


def jvp(
    problem: Problem, inputs: Inputs, direction: Direction, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Tangents of out and lse.

    lse_dot = sum p s_dot; out_dot = sum w p (s_dot v + v_dot) - lse_dot out, w the dropout factor.
    """
    out_dot = torch.zeros(out.shape, dtype=problem.compute_dtype, device=out.device)
    lse_dot = torch.zeros_like(lse)
    run = _Tangent(problem, inputs, direction, lse)
    walk, out_view = run.walk, uniform(problem, out)
    for segment in walk.segments():
        for rows, columns in walk.row_tiles(segment):
            data = run.rows(segment, rows, columns)
            acc = data.q.new_zeros((*data.q.shape[:3], problem.shape.head_dim_v))
            total = data.q.new_zeros(data.q.shape[:3])
            for cols, kind in columns:
                x = run.tile((segment, rows, cols), kind, data)
                total += (x.p * x.s_dot).sum(-1)
                w = x.p if x.factor is None else x.p * x.factor
                acc += t.over_keys(w * x.s_dot, x.v, x.kept) + t.over_keys(w, x.v_dot, x.kept)
            if run.sink_dot is not None:
                total += run.sink_weight(data) * run.sink_dot.view(1, -1, 1)
            acc -= total[..., None] * walk.wide(walk.cut_rows(out_view, segment, rows))
            walk.cut_rows(uniform(problem, out_dot), segment, rows).copy_(acc)
            walk.cut_rows(uniform(problem, lse_dot), segment, rows).copy_(total)
    return out_dot.to(out.dtype), lse_dot


def hvp(
    problem: Problem,
    inputs: Inputs,
    direction: Direction,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
) -> Gradients:
    """Tangent of the gradients along the direction; outputs are out, lse and their tangents from `jvp`.

    p_dot = p (s_dot - lse_dot); delta_dot = do . out_dot; ds_dot = p_dot (dp - delta) + p (dp_dot - delta_dot).
    """
    return _Hessian(problem, inputs, direction, outputs, grads).run()


class _Hessian:
    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        direction: Direction,
        outputs: tuple[Tensor, ...],
        grads: tuple[Tensor, Tensor | None],
    ) -> None:
        out, lse, out_dot, lse_dot = outputs
        do, dlse = grads
        wide = problem.compute_dtype
        self.problem, self.inputs = problem, inputs
        self.run_over = _Tangent(problem, inputs, direction, lse)
        self.run_over.guarded |= not t.all_finite(do, dlse)
        self.do, self.lse_dot = uniform(problem, do), uniform(problem, lse_dot)
        self.dlse = None if dlse is None else uniform(problem, dlse)

        def by_row(x: Tensor) -> Tensor:
            rows = (do.to(wide) * x.to(wide)).sum(-1)
            return rows.transpose(0, 1) if problem.options.layout == "varlen" else rows

        self.delta = uniform(problem, by_row(out) if dlse is None else by_row(out) - dlse)
        self.delta_dot = uniform(problem, by_row(out_dot))
        like = (inputs.q, inputs.k, inputs.v)
        self.total = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in like)
        self.leaves = tuple(
            torch.zeros(x.shape, dtype=wide, device=x.device) if x.is_floating_point() else None
            for x in inputs.leaves
        )
        self.sink = (
            None if inputs.sink is None else torch.zeros(inputs.sink.shape, dtype=wide, device=do.device)
        )

    def run(self) -> Gradients:
        walk = self.run_over.walk
        for segment in walk.segments():
            for rows, columns in walk.row_tiles(segment):
                data = self.run_over.rows(segment, rows, columns)
                do = walk.wide(walk.cut_rows(self.do, segment, rows))
                per_row = tuple(
                    walk.cut_rows(x, segment, rows) for x in (self.lse_dot, self.delta, self.delta_dot)
                )
                alive = self._alive(segment, rows, do)
                self._sink(data, per_row, alive)
                for cols, kind in columns:
                    x = self.run_over.tile((segment, rows, cols), kind, data, alive)
                    self._tile((segment, rows, cols), data, x, do, per_row)
        inputs = self.inputs
        dq, dk, dv = (g.to(x.dtype) for g, x in zip(self.total, (inputs.q, inputs.k, inputs.v), strict=True))
        leaves = tuple(
            None if g is None else g.to(x.dtype) for g, x in zip(self.leaves, inputs.leaves, strict=True)
        )
        return Gradients(dq, dk, dv, leaves, None if self.sink is None else self.sink.to(inputs.sink.dtype))  # type: ignore[union-attr]

    def _alive(self, segment: Segment, rows: tuple[int, int], do: Tensor) -> Tensor | None:
        """Rows with a cotangent that is not 0; the others contribute 0, whatever they hold."""
        if not self.run_over.guarded:
            return None
        alive = (do != 0).any(-1)
        if self.dlse is not None:
            alive = alive | (self.run_over.walk.cut_rows(self.dlse, segment, rows) != 0)
        return alive

    def _sink(self, data: _Rows, per_row: tuple[Tensor, ...], alive: Tensor | None) -> None:
        if self.sink is None:
            return
        lse_dot, delta, delta_dot = per_row
        p = self.run_over.sink_weight(data)
        s_dot = 0.0 if self.run_over.sink_dot is None else self.run_over.sink_dot.view(1, -1, 1)
        p_dot = p * (s_dot - lse_dot)
        part = p_dot * delta + p * delta_dot
        self.sink -= (part if alive is None else part.masked_fill(~alive, 0.0)).sum((0, 2))

    def _tile(
        self, place: tuple[Any, ...], data: _Rows, x: _Tile, do: Tensor, per_row: tuple[Tensor, ...]
    ) -> None:
        segment, rows, cols = place
        walk, heads_kv = self.run_over.walk, self.run_over.walk.heads_kv
        lse_dot, delta, delta_dot = (y[..., None] for y in per_row)
        p_dot = (x.p * (x.s_dot - lse_dot)).masked_fill(x.hidden, 0.0)
        dp, dp_dot = (drop(t.scores(do, y), x.factor) for y in (x.v, x.v_dot))
        w_dot = p_dot if x.factor is None else p_dot * x.factor
        ds = x.p * (dp - delta)
        ds_dot = p_dot * (dp - delta) + x.p * (dp_dot - delta_dot)
        env = walk.fold.env()
        for n, site in enumerate(walk.fold.trees.sites):
            gradient = self.leaves[int(site.value)]  # type: ignore[arg-type]
            if gradient is not None:
                part = ds_dot * x.roots[2 + n] + ds * x.dots[2 + n]
                accumulate(env, site, gradient, part.masked_fill(x.hidden, 0.0))
        slope, slope_dot = x.roots[1], x.dots[1]
        ds0 = (ds * slope).masked_fill(x.hidden, 0.0)
        ds0_dot = (ds_dot * slope + ds * slope_dot).masked_fill(x.hidden, 0.0)
        dq, dk, dv = self.total
        dq_tile = t.over_keys(ds0_dot, x.k, x.visible) + t.over_keys(ds0, x.k_dot, x.visible)
        walk.cut_rows(uniform(self.problem, dq), segment, rows).add_(dq_tile, alpha=self.inputs.scale)
        dk_tile = t.over_rows(ds0_dot, data.q, heads_kv, x.visible)
        dk_tile += t.over_rows(ds0, data.q_dot, heads_kv, x.visible)
        walk.add_keys(dk, segment, cols, dk_tile)
        walk.add_values(dv, segment, cols, t.over_rows(w_dot, do, heads_kv, x.kept))
