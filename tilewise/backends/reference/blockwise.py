"""Attention tile by tile in torch operations: exact, O(N) memory, on any torch device.

Loop order: segments, then tiles of rows, then tiles of columns; the state of a row tile is (m, l, acc).
Tiles whose pairs are all hidden are skipped, tiles whose pairs are all visible carry no mask work, all heads
of a tile go through one batched product. The backward recomputes the weights
and, beside them, the row statistics (see `_Backward._statistics`).

Source: Dao et al., FlashAttention, 2022, algorithms 1, 2 and 4, https://arxiv.org/abs/2205.14135.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.protocol import Gradients, Needs, Reason, Schedule
from tilewise.backends.reference import tile as t
from tilewise.backends.reference.segments import Segment, uniform
from tilewise.backends.reference.tile import LN2, LOG2E
from tilewise.backends.reference.walk import (
    Walk,
    absorb_sink,
    choose_blocks,
    drop,
    hide,
    sink_weight,
    tile_scores,
)
from tilewise.problem import Inputs, Problem, empty_in_order
from tilewise.spec.print_torch import accumulate


class Blockwise:
    """Tiles in torch operations; does everything the spec can say."""

    name = "blockwise"

    def supports(self, problem: Problem) -> list[Reason]:
        return []

    def plan(self, problem: Problem) -> Schedule:
        blocks = choose_blocks(problem)
        s = problem.shape
        rows, columns = min(blocks.block_q, s.seqlen_q), min(blocks.block_k, s.seqlen_k)
        size = 8 if problem.compute_dtype == torch.float64 else 4
        tile = size * min(blocks.entries, s.batch) * s.num_heads_q * rows * columns
        # Forward: scores and three temporaries of that size; backward: dp, ds and one more; dropout: Philox words
        # (int64, a quarter of the pairs each); terms: every float node of the printed trees may be alive.
        trees = t.trees_of(problem.spec)
        count = (7 if problem.needs_grad else 4) + 8 * problem.spec.dropout
        count += trees.num_nodes * (2 if problem.needs_grad else 1)
        tiles = count * tile
        linear = 0
        if problem.needs_grad:
            tokens = 1 if problem.options.layout == "varlen" else s.batch
            q_side = s.num_heads_q * s.seqlen_q * s.head_dim
            k_side = s.num_heads_kv * s.seqlen_k * (s.head_dim + s.head_dim_v)
            linear = size * tokens * (q_side + k_side)
        return Schedule(
            blocks.block_q, blocks.block_k, "rows outer, columns inner", 1, tiles + linear,
            notes=("torch operations on one tile at a time",),
        )  # fmt: skip

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        out = empty_in_order(inputs.q, problem.out_shape, problem.out_dtype)
        lse = inputs.q.new_empty(problem.lse_shape, dtype=problem.compute_dtype)
        if problem.options.layout == "varlen" or problem.options.seqused_q:
            out.zero_()
            lse.fill_(-math.inf)
        walk = Walk(problem, inputs)
        # A pool is larger than what a call reads of it: there each tile is looked at by itself.
        guarded = None if problem.options.pages else not t.all_finite(inputs.v)
        out_view, lse_view = uniform(problem, out), uniform(problem, lse)
        for segment in walk.segments():
            for rows, columns in walk.row_tiles(segment):
                row_out, row_lse = _forward_rows(walk, segment, rows, columns, guarded)
                walk.cut_rows(out_view, segment, rows).copy_(row_out)
                walk.cut_rows(lse_view, segment, rows).copy_(row_lse)
        return out, lse

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs: Needs,
    ) -> Gradients:
        return _Backward(problem, inputs, saved, grads, needs).run()


def _forward_rows(
    walk: Walk,
    segment: Segment,
    rows: tuple[int, int],
    columns: list[tuple[tuple[int, int], int]],
    guarded: bool | None,
) -> tuple[Tensor, Tensor]:
    """out and lse of one tile of rows: absorb its tiles of columns one after another.

    guarded: whether v may hold something not finite; None looks at each tile.
    """
    problem, inputs = walk.problem, walk.inputs
    q = walk.wide(walk.cut_rows(walk.q, segment, rows)) * inputs.scale
    shape = q.shape[:3]
    m = q.new_full(shape, -math.inf)
    l = q.new_zeros(shape)  # noqa: E741  # the letter of the literature
    acc = q.new_zeros((*shape, problem.shape.head_dim_v))
    for cols, kind in columns:
        k, v = walk.keys(walk.k, segment, cols), walk.values(walk.v, segment, cols)
        walk.fold.at(segment, rows, cols)
        s = tile_scores(walk, q, k, kind)
        m_new = torch.maximum(m, s.amax(-1))
        # A row that has seen no key yet has m = -inf: subtract 0 instead, exp2(-inf) is the 0 it should be.
        pivot = m_new.masked_fill(m_new == -math.inf, 0.0)
        careful = not t.all_finite(v) if guarded is None else guarded
        visible = (s != -math.inf) if careful else None
        p = (s - pivot[..., None]).mul_(LOG2E).exp2_()
        alpha = torch.exp2((m - pivot) * LOG2E)
        l = l * alpha + p.sum(-1)  # noqa: E741
        factor = walk.fold.dropout()
        if factor is not None:
            p = p * factor
            visible = None if visible is None else visible & (factor != 0)
        acc = acc.mul_(alpha[..., None]).add_(t.over_keys(p, v, visible))
        m = m_new
    return finish(m, l, acc, inputs.sink)


def finish(m: Tensor, l: Tensor, acc: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: E741
    """out and lse of finished rows; the sink is one more key with value 0, merged here and only here."""
    if sink is not None:
        m, l, alpha = absorb_sink(m, l, sink)  # noqa: E741
        acc = acc * alpha[..., None]
    empty = l == 0
    out = acc / l.masked_fill(empty, 1.0)[..., None]
    lse = (m + torch.log2(l) * LN2).masked_fill(empty, -math.inf)
    return out, lse


class _RowData(NamedTuple):
    """What a tile of rows brings to each of its tiles of columns: weights are exp2((s - m) log2 e - low)."""

    q: Tensor
    do: Tensor
    m: Tensor
    low: Tensor
    delta: Tensor
    alive: Tensor | None


class _Backward:
    """The backward pass of one call: dq, dk, dv and the leaves' gradients, accumulated in float32 tile by tile."""

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs: Needs,
    ) -> None:
        self.walk = Walk(problem, inputs)
        self.problem, self.inputs, self.needs = problem, inputs, needs
        (out, lse), (do, dlse) = saved, grads
        wide = problem.compute_dtype
        self.lse, self.do = uniform(problem, lse), uniform(problem, do)
        self.out = uniform(problem, out)
        self.dlse = None if dlse is None else uniform(problem, dlse)
        # What no sequence uses of a pool may hold anything: its tiles go the careful way.
        self.guarded = problem.options.pages or not (
            t.all_finite(inputs.q, inputs.k, inputs.v, do, dlse)
            and (lse.numel() == 0 or bool(lse.amax() < math.inf))
        )
        zeros = functools.partial(torch.zeros, dtype=wide, device=inputs.q.device)
        self.dq = zeros(inputs.q.shape) if needs.q else None
        self.dk = zeros(inputs.k.shape) if needs.k else None
        self.dv = zeros(inputs.v.shape) if needs.v else None
        self.leaves = tuple(
            zeros(leaf.shape) if need else None
            for leaf, need in zip(inputs.leaves, needs.leaves, strict=True)
        )
        self.sink = zeros(inputs.sink.shape) if needs.sink and inputs.sink is not None else None

    def run(self) -> Gradients:
        for segment in self.walk.segments():
            for rows, columns in self.walk.row_tiles(segment):
                self._rows(segment, rows, columns)
        inputs = self.inputs

        def narrow(gradient: Tensor | None, like: Tensor) -> Tensor | None:
            return None if gradient is None else gradient.to(like.dtype)

        return Gradients(
            narrow(self.dq, inputs.q), narrow(self.dk, inputs.k), narrow(self.dv, inputs.v),
            tuple(narrow(g, leaf) for g, leaf in zip(self.leaves, inputs.leaves, strict=True)),
            None if self.sink is None else narrow(self.sink, inputs.sink),  # type: ignore[arg-type]
        )  # fmt: skip

    def _rows(
        self, segment: Segment, rows: tuple[int, int], columns: list[tuple[tuple[int, int], int]]
    ) -> None:
        walk = self.walk
        q = walk.wide(walk.cut_rows(walk.q, segment, rows)) * self.inputs.scale
        do = walk.wide(walk.cut_rows(self.do, segment, rows))
        lse = walk.cut_rows(self.lse, segment, rows)
        alive = None
        if self.guarded:
            # A row whose cotangents are all exactly 0 contributes 0, whatever it holds.
            alive = (do != 0).any(-1)
            if self.dlse is not None:
                alive = alive | (walk.cut_rows(self.dlse, segment, rows) != 0)
        if self.problem.options.subset:
            # These keys may be a part of the whole, whose lse and out were given.
            m, low = lse, torch.zeros_like(lse)
            delta = (do * walk.wide(walk.cut_rows(self.out, segment, rows))).sum(-1)
        else:
            m, low, delta = self._statistics(segment, rows, columns, (q, do))
        if self.dlse is not None:
            # lse enters as one more output: ds = p (dp - (delta - dlse)).
            delta = delta - walk.cut_rows(self.dlse, segment, rows)
        # A row that saw nothing has m = -inf: +inf instead makes every weight exp2(-inf) = 0.
        m = m.masked_fill(m == -math.inf, math.inf)
        data = _RowData(q, do, m, low, delta, alive)
        if self.sink is not None:
            self._sink(data)
        for cols, kind in columns:
            walk.fold.at(segment, rows, cols)
            self._tile(segment, rows, cols, kind, data)

    def _statistics(
        self,
        segment: Segment,
        rows: tuple[int, int],
        columns: list[tuple[tuple[int, int], int]],
        tensors: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(m, log2 l, delta) of a tile of rows, computed afresh from q, k, v and do.

        lse = m + log l is rounded to the size of m, and out to its own type: weights from a large lse and
        delta from out would carry those roundings into every gradient. One more pass over the tiles (two
        products beside the five) takes them out; a row with one visible key has ds = 0 exactly.
        """
        walk, (q, do) = self.walk, tensors
        m = q.new_full(q.shape[:3], -math.inf)
        l, delta = torch.zeros_like(m), torch.zeros_like(m)  # noqa: E741
        for cols, kind in columns:
            k, v = walk.keys(walk.k, segment, cols), walk.values(walk.v, segment, cols)
            walk.fold.at(segment, rows, cols)
            s = tile_scores(walk, q, k, kind)
            m_new = torch.maximum(m, s.amax(-1))
            pivot = m_new.masked_fill(m_new == -math.inf, 0.0)
            hidden = s == -math.inf
            p = (s - pivot[..., None]).mul_(LOG2E).exp2_()
            alpha = torch.exp2((m - pivot) * LOG2E)
            l = l * alpha + p.sum(-1)  # noqa: E741
            dp = drop(t.scores(do, v), walk.fold.dropout())
            delta = delta * alpha + p.mul_(dp).masked_fill_(hidden, 0.0).sum(-1)
            m = m_new
        if self.inputs.sink is not None:
            m, l, alpha = absorb_sink(m, l, self.inputs.sink)  # noqa: E741
            delta = delta * alpha
        l = l.masked_fill(l == 0, 1.0)  # noqa: E741
        return m, torch.log2(l), delta / l

    def _sink(self, data: _RowData) -> None:
        """The sink is a key with value 0: dp = 0, ds = -p delta."""
        p = sink_weight(self.inputs.sink, data.m, data.low)  # type: ignore[arg-type]
        ds = (p * -data.delta).masked_fill(p == 0, 0.0)
        ds = ds if data.alive is None else ds.masked_fill(~data.alive, 0.0)
        self.sink = self.sink + ds.sum((0, 2))  # type: ignore[operator]

    def _tile(
        self, segment: Segment, rows: tuple[int, int], cols: tuple[int, int], kind: int, data: _RowData
    ) -> None:
        walk, trees = self.walk, self.walk.fold.trees
        k, v = walk.keys(walk.k, segment, cols), walk.values(walk.v, segment, cols)
        s = t.scores(data.q, k)
        slopes: list[Tensor] = []
        if trees.has_terms:
            s, *slopes = trees.score_and_slopes(walk.fold.env(s=s))
            s = s.expand(*data.q.shape[:3], k.shape[2])
        s = hide(walk, s, kind)
        p = (s - data.m[..., None]).mul_(LOG2E).sub_(data.low[..., None]).exp2_()
        hidden = (s == -math.inf) if (self.guarded or trees.has_terms) else None
        visible = None
        if self.guarded:
            visible = ~hidden if data.alive is None else ~hidden & data.alive[..., None]  # type: ignore[operator]
            hidden = ~visible
            p = p.masked_fill(hidden, 0.0)
        factor = walk.fold.dropout()
        if self.dv is not None:
            kept = visible if visible is None or factor is None else visible & (factor != 0)
            dv = t.over_rows(p if factor is None else p * factor, data.do, walk.heads_kv, kept)
            walk.add_values(self.dv, segment, cols, dv)
        if self.dq is None and self.dk is None and not any(g is not None for g in self.leaves):
            return
        ds = drop(t.scores(data.do, v), factor).sub_(data.delta[..., None]).mul_(p)
        if hidden is not None:
            ds = ds.masked_fill(hidden, 0.0)
        if trees.has_terms:
            ds = self._terms(ds, slopes, hidden)
        if self.dq is not None:
            dq = t.over_keys(ds, k, visible)
            walk.cut_rows(uniform(self.problem, self.dq), segment, rows).add_(dq, alpha=self.inputs.scale)
        if self.dk is not None:
            dk = t.over_rows(ds, data.q, walk.heads_kv, visible)
            walk.add_keys(self.dk, segment, cols, dk)

    def _terms(self, ds: Tensor, slopes: list[Tensor], hidden: Tensor | None) -> Tensor:
        """Back through the score terms: gradients of their leaves, then d score / d s."""
        env = self.walk.fold.env()
        slope, *adjoints = slopes
        for site, adjoint in zip(self.walk.fold.trees.sites, adjoints, strict=True):
            gradient = self.leaves[int(site.value)]  # type: ignore[arg-type]
            if gradient is not None:
                contribution = ds * adjoint
                accumulate(env, site, gradient, contribution.masked_fill(hidden, 0.0))  # type: ignore[arg-type]
        return (ds * slope).masked_fill(hidden, 0.0)  # type: ignore[arg-type]
