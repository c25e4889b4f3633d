"""Attention with the full score matrix: the definition, and the oracle in float64.

The only place where N_q x N_k exists. Score terms are differentiated by torch's autograd here and by the
expression tree everywhere else, so that the two check each other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.protocol import Gradients, Needs, Reason, Schedule
from tilewise.backends.reference.pages import Pages
from tilewise.backends.reference.segments import Segment, segments, uniform
from tilewise.backends.reference.tile import TileFold, weighted_sum
from tilewise.problem import Inputs, Problem, empty_in_order
from tilewise.spec.print_torch import accumulate


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
            weights = part.weights()
            p, visible, factor = weights.p, weights.visible, part.fold.dropout()
            seen = visible if factor is None else visible & (factor != 0)
            part_out = weighted_sum(p if factor is None else p * factor, part.v, seen)
            part.rows(uniform(problem, out)).copy_(part_out)
            part.rows(uniform(problem, lse)).copy_(weights.lse)
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


class _Weights(NamedTuple):
    """The softmax of one segment: scores before the terms, weights, the sink's weight, lse, visible pairs."""

    s0: Tensor
    p: Tensor
    p_sink: Tensor | None
    lse: Tensor
    visible: Tensor


class _Matrix:
    """The full score matrix of one segment, K and V expanded to the query heads."""

    def __init__(self, problem: Problem, inputs: Inputs, segment: Segment) -> None:
        self.problem, self.inputs, self.segment = problem, inputs, segment
        self.wide = problem.compute_dtype
        self.q = self.rows(uniform(problem, inputs.q)).to(self.wide).contiguous() * inputs.scale
        self.columns = (segment.first_key, segment.seqlen_k)
        self.pages = Pages(problem, inputs) if problem.options.pages else None
        found = (self.keys(x, scale) for x, scale in ((inputs.k, inputs.k_scale), (inputs.v, inputs.v_scale)))
        self.k, self.v = (x.repeat_interleave(problem.group, 1) for x in found)
        self.fold = TileFold(problem, inputs).at(segment, (0, segment.seqlen_q), self.columns)

    def rows(self, x: Tensor) -> Tensor:
        return x[self.segment.batch, :, self.segment.rows]

    def keys(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """The segment's part of k or v in the compute type, contiguous."""
        if self.pages is not None:
            return self.pages.read(x, self.segment, self.columns, scale)
        x = uniform(self.problem, x)
        return x[self.segment.batch, :, self.segment.keys].to(self.wide).contiguous()

    def scores(self, s0: Tensor, visible: Tensor) -> Tensor:
        """Scores after the terms; what the leaves hold at hidden pairs takes no part."""
        self.fold.env().visible = visible
        return self.fold.trees.score(self.fold.env(s=s0))[0].expand_as(s0)

    def weights(self) -> _Weights:
        """The softmax over the keys and the sink."""
        s0 = self.q @ self.k.transpose(-1, -2)
        hidden = self.fold.hidden()
        visible = torch.ones_like(s0, dtype=torch.bool) if hidden is None else ~hidden.expand_as(s0)
        # What stands at a hidden pair must not enter the terms, whose derivatives are taken below.
        s0 = torch.where(visible, s0, 0.0)
        s = torch.where(visible, self.scores(s0, visible), -math.inf)
        visible = visible & (s != -math.inf)
        logits = s
        if self.inputs.sink is not None:
            column = self.inputs.sink.to(self.wide).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
            logits = torch.cat([s, column], -1)
        if not logits.shape[-1]:
            return _Weights(s0, torch.zeros_like(s), None, s.new_full(s.shape[:3], -math.inf), visible)
        # The maximum is subtracted before anything is rounded to the size of lse.
        top = logits.amax(-1, keepdim=True)
        pivot = torch.where(top == -math.inf, 0.0, top)
        total = torch.exp(logits - pivot).sum(-1, keepdim=True)
        if self.inputs.sink is not None:
            # A sink that is all a row has weighs 1, infinite as it may be.
            alone = (top == math.inf) & ~visible.any(-1, keepdim=True)
            total = torch.where(alone, 1.0, total)
        weights = torch.exp(logits - pivot) / torch.where(total == 0, 1.0, total)
        if self.inputs.sink is not None:
            weights[..., -1:] = torch.where(alone, 1.0, weights[..., -1:])
        p = torch.where(visible, weights[..., : s.shape[-1]], 0.0)
        p_sink = None if self.inputs.sink is None else weights[..., -1]
        return _Weights(s0, p, p_sink, (pivot + torch.log(total)).squeeze(-1), visible)

    def backward(
        self,
        rows: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        leaves: list[Tensor | None],
        sink: Tensor | None,
    ) -> None:
        """Add this segment's gradients; rows are out, lse, do and, if there is one, dlse."""
        out, lse, do, *dlse = (x.to(self.wide).contiguous() for x in rows)
        s0, p, p_sink, _, visible = self.weights()
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
            s = self.scores(s0, visible)
        visible = visible & live[..., None]
        if self.problem.options.subset:
            # These keys may be a part of the whole, whose lse was given.
            p = torch.exp(s.detach() - lse[..., None])
        p = torch.where(visible, p, 0.0)
        factor = self.fold.dropout()
        seen = visible if factor is None else visible & (factor != 0)
        dropped = p if factor is None else p * factor
        dp = do @ self.v.transpose(-1, -2)
        dp = dp if factor is None else torch.where(factor != 0, dp * factor, 0.0)
        if not self.problem.options.subset:
            delta = torch.where(visible, p * dp, 0.0).sum(-1) - (dlse[0] if dlse else 0.0)
        ds = torch.where(visible, p * (dp - delta[..., None]), 0.0)
        if sink is not None and p_sink is not None:
            sink += torch.where(live & (p_sink != 0), p_sink * -delta, 0.0).sum((0, 2))
        ds0 = torch.where(visible, self._through_terms(s, s0, tracked, ds, leaves), 0.0)
        dq, dk, dv = grads
        over = visible.transpose(-1, -2)
        self.rows(uniform(self.problem, dq)).add_(weighted_sum(ds0, self.k, visible) * self.inputs.scale)
        self._add_keys(dk, weighted_sum(ds0.transpose(-1, -2), self.q, over), self.inputs.k_scale)
        dv_part = weighted_sum(dropped.transpose(-1, -2), do, seen.transpose(-1, -2))
        self._add_keys(dv, dv_part, self.inputs.v_scale)

    def _through_terms(
        self, s: Tensor, s0: Tensor, tracked: list[Tensor], ds: Tensor, leaves: list[Tensor | None]
    ) -> Tensor:
        """d loss / d s0, adding the leaves' gradients: by torch's autograd, or by the tree's own derivative inside a
        registered op, where torch records nothing, and in deterministic calls, whose gathers are summed in order."""
        with torch.enable_grad():
            recording = torch.neg(s0).requires_grad
        if not recording or self.problem.options.deterministic:
            return self._through_trees(s0, ds, leaves)
        if not s.requires_grad:
            return torch.zeros_like(ds)
        wanted = [n for n, g in enumerate(leaves) if g is not None and tracked[n].requires_grad]
        found = torch.autograd.grad(s, [s0, *(tracked[n] for n in wanted)], ds, allow_unused=True)
        for n, gradient in zip(wanted, found[1:], strict=True):
            if gradient is not None:
                leaves[n] += gradient  # type: ignore[operator]  # n is one of those that are not None
        return torch.zeros_like(ds) if found[0] is None else found[0]

    def _through_trees(self, s0: Tensor, ds: Tensor, leaves: list[Tensor | None]) -> Tensor:
        env = self.fold.env(s=s0)
        _, slope, *adjoints = self.fold.trees.score_and_slopes(env)
        for site, adjoint in zip(self.fold.trees.sites, adjoints, strict=True):
            gradient = leaves[int(site.value)]  # type: ignore[arg-type]
            if gradient is not None:
                accumulate(env, site, gradient, torch.where(ds != 0, ds * adjoint, 0.0))
        return torch.where(ds != 0, ds * slope, 0.0)

    def _add_keys(self, total: Tensor, part: Tensor, scale: Tensor | None) -> None:
        """Sum over the query heads of each KV head."""
        b, _, n, d = part.shape
        heads_kv = self.problem.shape.num_heads_kv
        part = part.view(b, heads_kv, self.problem.group, n, d).sum(2)
        if self.pages is not None:
            self.pages.add(total, self.segment, self.columns, part, scale)
        else:
            uniform(self.problem, total)[self.segment.batch, :, self.segment.keys].add_(part)
