"""Ordinary attention: the whole score matrix, in any dtype, written by hand from a case's dense formulas.

In float64 it is the truth of the suite. In a problem's own dtype it is what a user would otherwise run, and
its error is the measure of what rounding costs: scores rounded to the dtype, softmax in fp32, weights and
output rounded to the dtype, gradients by autograd. It reads no expression tree, so it checks masks, score
terms and their printers independently.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.spec.dropout import dropout_mask
from tilewise.testing.cases import Case, Segment, Values
from tilewise.testing.grid import Grid


class Order(NamedTuple):
    """An order of ordinary attention's operations: what the scale multiplies (s, q or k), and rows and
    columns read backwards.

    All are equally ordinary. Their results differ by rounding alone, so together they tell how large rounding
    is, where a single one can be exact by luck.
    """

    scaled: str
    backwards: bool


PLAIN = Order("s", False)


def orders(dtype: torch.dtype) -> tuple[Order, ...]:
    """The orders that measure rounding in a dtype. In half precision, scaling q or k would round inputs once
    more.
    """
    same_scale = (PLAIN, Order("s", True))
    return (
        same_scale
        if dtype in (torch.float16, torch.bfloat16)
        else (*same_scale, Order("q", True), Order("k", False))
    )


def ordinary_attention(case: Case, values: Values, order: Order = PLAIN) -> tuple[Tensor, Tensor]:
    """out and lse of a case in the dtype of `values` (accumulation type for lse), differentiable, NaN-safe in
    empty rows.

    Shapes as the public call's: out (B, H, Nq, Dv), lse (B, H, Nq); packed: out (T, H, Dv), lse (H, T), 0 and
    -inf outside.
    """
    if case.packing is None:
        (segment,) = case.segments()
        return _dense(case, values, segment.grid, (values.q, values.k, values.v), order)
    accumulate = _accumulation(values.q.dtype)
    out = values.q.new_zeros(*values.q.shape[:2], values.v.shape[2])
    lse = torch.full((values.q.shape[1], values.q.shape[0]), -math.inf, dtype=accumulate)
    for rows, columns, grid in case.segments():
        if rows.stop == rows.start:
            continue
        q = values.q[rows].transpose(0, 1)[None]
        k, v = (t[columns].transpose(0, 1)[None] for t in (values.k, values.v))
        part, part_lse = _dense(case, values, grid, (q, k, v), order)
        out[rows] = part[0].transpose(0, 1)
        lse[:, rows] = part_lse[0]
    return out, lse


def visible_pairs(case: Case, values: Values, segment: Segment) -> Tensor:
    """Pairs that no mask hides, bool (B, H, Nq, Nk) of the segment. Scores of -inf are not masks and do not
    count.
    """
    if case.mask is None:
        return torch.ones(segment.grid.shape, dtype=torch.bool)
    return case.mask.dense(segment.grid, values.mask_leaves)


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dense(
    case: Case, values: Values, grid: Grid, qkv: tuple[Tensor, Tensor, Tensor], order: Order
) -> tuple[Tensor, Tensor]:
    """One dense problem, its rows and columns taken in the given order; the results are in the problem's
    order.
    """
    q, k, v = qkv
    kept = _kept(case, grid) if case.dropout else None
    if order.backwards:
        q, k, v = (t.flip(2) for t in (q, k, v))
        grid = replace(grid, i=grid.i.flip(2), q=grid.q.flip(2), j=grid.j.flip(3), k=grid.k.flip(3))
        kept = None if kept is None else kept.flip(2, 3)
    group = case.sizes.H // case.sizes.Hkv if case.sizes.Hkv else 1
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scale = case.scale if case.scale is not None else case.sizes.D**-0.5
    if order.scaled == "q":
        q = q * scale
    elif order.scaled == "k":
        k = k * scale
    s = q @ k.transpose(-1, -2)
    s = s * scale if order.scaled == "s" else s
    for term, leaves in zip(case.scores, values.score_leaves, strict=True):
        s = term.score(s, grid, *leaves).to(q.dtype)
    s = s.to(_accumulation(q.dtype))
    keep = (
        torch.ones(grid.shape, dtype=torch.bool)
        if case.mask is None
        else case.mask.dense(grid, values.mask_leaves)
    )
    s = torch.where(keep & (s > -math.inf), s, -math.inf)
    if values.sink is not None:
        sink = values.sink.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], dim=-1)
    p, lse = _softmax(s)
    p = p[..., : grid.shape[3]]
    if kept is not None:
        p = torch.where(kept, p / (1 - case.dropout) if case.dropout < 1 else 0.0, 0.0)
    out = p.to(q.dtype) @ v
    return (out.flip(2), lse.flip(2)) if order.backwards else (out, lse)


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and log-sum-exp over the last dimension; rows that are -inf throughout give 0 and -inf, without
    gradients.
    """
    some = (s > -math.inf).any(dim=-1, keepdim=True)
    safe = torch.where(some, s, 0.0)
    p = torch.where(some & (s > -math.inf), torch.softmax(safe, dim=-1), 0.0)
    lse = torch.where(some[..., 0], torch.logsumexp(safe, dim=-1), -math.inf)
    return p, lse


def _kept(case: Case, grid: Grid) -> Tensor:
    batch, heads, seqlen_q, seqlen_k = grid.shape
    first_q = grid.q[:, 0, 0, 0] if seqlen_q else torch.zeros(batch, dtype=torch.int64)
    first_k = grid.k[:, 0, 0, 0] if seqlen_k else torch.zeros(batch, dtype=torch.int64)
    first_b = int(grid.b.flatten()[0]) if batch else 0
    return dropout_mask(
        case.dropout_seed(),
        case.dropout,
        batch,
        heads,
        seqlen_q,
        seqlen_k,
        q_offset=first_q,
        k_offset=first_k,
        h_offset=case.h_offset,
        b_offset=first_b,
    )


def evaluate(case: Case, values: Values, dtype: torch.dtype, order: Order = PLAIN) -> dict[str, Tensor]:
    """out, lse and every gradient ("d" + name) of a case computed in `dtype`, on the CPU.

    q, k, v and dout are cast to dtype; in float64 every float leaf is too, otherwise leaves keep theirs.
    """
    everywhere = dtype == torch.float64

    def cast(name: str, t: Tensor) -> Tensor:
        if t.is_floating_point() and (everywhere or name in ("q", "k", "v", "dout")):
            t = t.to(dtype)
        return t.detach().clone()

    own = values.map(cast)
    inputs = own.differentiable()
    for t in inputs.values():
        t.requires_grad_()
    out, lse = ordinary_attention(case, own, order)
    result = {"out": out.detach(), "lse": lse.detach()}
    cotangents = (own.dout, own.dlse.to(lse.dtype))
    tensors = [(t, g) for t, g in zip((out, lse), cotangents, strict=True) if t.requires_grad]
    grads = torch.autograd.grad(
        [t for t, _ in tensors], list(inputs.values()), [g for _, g in tensors], allow_unused=True
    )
    for (name, t), grad in zip(inputs.items(), grads, strict=True):
        result["d" + name] = torch.zeros_like(t) if grad is None else grad
    return result
