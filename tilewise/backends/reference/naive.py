"""Attention with the full score matrix: the definition, and the oracle in float64.

The only place where N_q x N_k exists. Score terms are differentiated by torch's autograd here and by the
expression tree everywhere else, so that the two check each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.backends.protocol import Gradients, Needs, Reason, Schedule
from tilewise.backends.reference.segments import Segment, segments, uniform
from tilewise.backends.reference.tile import TileFold, weighted_sum
from tilewise.problem import Inputs, Problem, empty_in_order


class Naive:
    """Full scores in torch operations; O(N_q N_k) memory."""

    name = "naive"

    def supports(self, problem: Problem) -> list[Reason]:
        if problem.options.backend != self.name and not problem.options.allow_quadratic:
            return [
                Reason(
                    "memory grows with N_q x N_k", "backend='auto'", "allow_quadratic=True or backend='naive'"
                ),
            ]
        return []

    def plan(self, problem: Problem) -> Schedule:
        s = problem.shape
        size = 8 if problem.compute_dtype == torch.float64 else 4
        matrix = size * max(s.batch, 1) * s.num_heads_q * s.seqlen_q * s.seqlen_k
        return Schedule(
            s.seqlen_q, s.seqlen_k, "one tile", 1, (6 if problem.needs_grad else 4) * matrix, True
        )

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        out = empty_in_order(inputs.q, problem.out_shape, problem.out_dtype).zero_()
        lse = inputs.q.new_full(problem.lse_shape, -math.inf, dtype=problem.compute_dtype)
        for segment in segments(problem, inputs, max(problem.shape.batch, 1)):
            part = _Matrix(problem, inputs, segment)
            _, p, part_lse, visible = part.weights()
            factor = part.fold.dropout()
            seen = visible if factor is None else visible & (factor != 0)
            part_out = weighted_sum(p if factor is None else p * factor, part.v, seen)
            part.rows(uniform(problem, out)).copy_(part_out)
            part.rows(uniform(problem, lse)).copy_(part_lse)
        return out, lse

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs: Needs,
    ) -> Gradients:
        wide = problem.compute_dtype
        dq, dk, dv = (
            torch.zeros(x.shape, dtype=wide, device=x.device) for x in (inputs.q, inputs.k, inputs.v)
        )
        leaves = [
            torch.zeros(x.shape, dtype=wide, device=x.device) if need else None
            for x, need in zip(inputs.leaves, needs.leaves, strict=True)
        ]
        sink = (
            None
            if inputs.sink is None
            else torch.zeros(inputs.sink.shape, dtype=wide, device=inputs.q.device)
        )
        views = tuple(uniform(problem, x) for x in (*saved, *grads) if x is not None)
        for segment in segments(problem, inputs, max(problem.shape.batch, 1)):
            part = _Matrix(problem, inputs, segment)
            part.backward(tuple(part.rows(x) for x in views), (dq, dk, dv), leaves, sink)
        return Gradients(
            dq.to(inputs.q.dtype) if needs.q else None,
            dk.to(inputs.k.dtype) if needs.k else None,
            dv.to(inputs.v.dtype) if needs.v else None,
            tuple(None if g is None else g.to(x.dtype) for g, x in zip(leaves, inputs.leaves, strict=True)),
            sink.to(inputs.sink.dtype) if needs.sink and sink is not None else None,  # type: ignore[union-attr]
        )  # fmt: skip


class _Matrix:
    """The full score matrix of one segment, K and V expanded to the query heads."""

    def __init__(self, problem: Problem, inputs: Inputs, segment: Segment) -> None:
        self.problem, self.inputs, self.segment = problem, inputs, segment
        self.wide = problem.compute_dtype
        self.q = self.rows(uniform(problem, inputs.q)).to(self.wide) * inputs.scale
        self.k, self.v = (
            self.keys(uniform(problem, x)).to(self.wide).repeat_interleave(problem.group, 1)
            for x in (inputs.k, inputs.v)
        )
        self.fold = TileFold(problem, inputs).at(segment, (0, segment.seqlen_q), (0, segment.seqlen_k))

    def rows(self, x: Tensor) -> Tensor:
        return x[self.segment.batch, :, self.segment.rows]

    def keys(self, x: Tensor) -> Tensor:
        return x[self.segment.batch, :, self.segment.keys]

    def scores(self, s0: Tensor) -> Tensor:
        """Scores after the terms."""
        return self.fold.trees.score(self.fold.env(s=s0))[0].expand_as(s0)

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(scores before the terms, p, lse, visible); the softmax runs over the keys and the sink."""
        s0 = self.q @ self.k.transpose(-1, -2)
        hidden = self.fold.hidden()
        visible = torch.ones_like(s0, dtype=torch.bool) if hidden is None else ~hidden.expand_as(s0)
        # What stands at a hidden pair must not enter the terms, whose derivatives are taken below.
        s0 = torch.where(visible, s0, 0.0)
        s = torch.where(visible, self.scores(s0), -math.inf)
        visible = visible & (s != -math.inf)
        logits = s
        if self.inputs.sink is not None:
            column = self.inputs.sink.to(self.wide).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
            logits = torch.cat([s, column], -1)
        lse = torch.logsumexp(logits, -1) if logits.shape[-1] else s.new_full(s.shape[:3], -math.inf)
        p = torch.where(visible, torch.exp(s - lse[..., None]), 0.0)
        return s0, p, lse, visible

    def backward(
        self, rows: tuple[Tensor, ...], grads: tuple[Tensor, ...], leaves: list, sink: Tensor | None
    ) -> None:
        """Add this segment's gradients; rows are out, lse, do and, if there is one, dlse."""
        out, lse, do, *dlse = (x.to(self.wide) for x in rows)
        s0, _, _, visible = self.weights()
        live = (do != 0).any(-1)
        delta = (do * out).sum(-1)
        if dlse:
            live, delta = live | (dlse[0] != 0), delta - dlse[0]
        with torch.enable_grad():
            s0 = s0.detach().requires_grad_()
            # A leaf is read from the fold's own list, so the list holds copies that track gradients.
            tracked = [x.detach().to(self.wide).requires_grad_(x.is_floating_point()) if x.is_floating_point() else x
                       for x in self.inputs.leaves]  # fmt: skip
            self.fold.leaves = tuple(tracked)
            self.fold.at(self.segment, self.fold.rows, self.fold.columns)
            s = self.scores(s0)
        visible = visible & live[..., None]
        p = torch.where(visible, torch.exp(s.detach() - lse[..., None]), 0.0)
        factor = self.fold.dropout()
        seen = visible if factor is None else visible & (factor != 0)
        dropped = p if factor is None else p * factor
        dp = do @ self.v.transpose(-1, -2)
        dp = dp if factor is None else torch.where(factor != 0, dp * factor, 0.0)
        ds = torch.where(visible, p * (dp - delta[..., None]), 0.0)
        if sink is not None:
            logit = self.inputs.sink.to(self.wide).view(1, -1, 1)  # type: ignore[union-attr]
            weight = torch.where(live & (logit != -math.inf), torch.exp(logit - lse) * -delta, 0.0)
            sink += weight.sum((0, 2))
        ds0 = torch.where(visible, self._through_terms(s, s0, tracked, ds, leaves), 0.0)
        dq, dk, dv = grads
        over = visible.transpose(-1, -2)
        self.rows(uniform(self.problem, dq)).add_(weighted_sum(ds0, self.k, visible) * self.inputs.scale)
        self._add_keys(dk, weighted_sum(ds0.transpose(-1, -2), self.q, over))
        self._add_keys(dv, weighted_sum(dropped.transpose(-1, -2), do, seen.transpose(-1, -2)))

    def _through_terms(self, s: Tensor, s0: Tensor, tracked: list, ds: Tensor, leaves: list) -> Tensor:
        if s is s0 or not s.requires_grad:
            return ds
        wanted = [n for n, g in enumerate(leaves) if g is not None and tracked[n].requires_grad]
        found = torch.autograd.grad(s, [s0, *(tracked[n] for n in wanted)], ds, allow_unused=True)
        for n, gradient in zip(wanted, found[1:], strict=True):
            if gradient is not None:
                leaves[n] += gradient
        return ds if found[0] is None else found[0]

    def _add_keys(self, total: Tensor, part: Tensor) -> None:
        """Sum over the query heads of each KV head."""
        b, _, n, d = part.shape
        heads_kv = self.problem.shape.num_heads_kv
        self.keys(uniform(self.problem, total)).add_(part.view(b, heads_kv, self.problem.group, n, d).sum(2))
