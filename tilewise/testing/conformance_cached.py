"""Run a cached case on a backend and hold out, lse and every gradient, those of the pools too, to the budgets."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.serving.read import attend_pages
from tilewise.testing.budgets import Report, compare
from tilewise.testing.cases import Values
from tilewise.testing.cases_cached import Cache, CachedCase, lay_out
from tilewise.testing.conformance import UNIVERSAL
from tilewise.testing.ordinary import PLAIN, Order, _accumulation, _dense, orders

Results = dict[str, Tensor]


def _scaled(t: Tensor, cache: Cache, scale: Tensor | None, tokens: slice) -> Tensor:
    """Keys or values of some packed tokens, (1, H_kv, n, D), read from a pool; differentiable in the pool."""
    page, row = cache.places[tokens].unbind(1)
    found = t[page, :, row]
    if scale is not None:
        factor = scale[None] if scale.ndim == 1 else scale[page]
        found = found * factor.to(found.dtype)[..., None]
    return found.transpose(0, 1)[None]


def evaluate_cached(
    case: CachedCase, values: Values, cache: Cache, dtype: torch.dtype, order: Order = PLAIN
) -> Results:
    """out (T, H, D_v), lse (H, T) and every gradient by ordinary attention in a dtype, on the CPU."""
    everywhere = dtype == torch.float64

    def cast(name: str, t: Tensor) -> Tensor:
        wanted = t.is_floating_point() and (everywhere or name in ("q", "dout"))
        return (t.to(dtype) if wanted else t).detach().clone()

    pools = [(t.to(case.dtype) if case.float8 else t).to(dtype).detach().clone() for t in (cache.k, cache.v)]
    own = replace(values.map(cast), k=pools[0], v=pools[1])
    named = own.differentiable()
    for t in named.values():
        t.requires_grad_()
    accumulate = _accumulation(dtype)
    out = own.q.new_zeros(*own.q.shape[:2], own.v.shape[3])
    lse = torch.full((own.q.shape[1], own.q.shape[0]), -math.inf, dtype=accumulate)
    for rows, columns, grid in case.segments():
        assert rows is not None and columns is not None
        if rows.stop == rows.start:
            continue
        q = own.q[rows].transpose(0, 1)[None]
        k = _scaled(own.k, cache, cache.k_scale, columns)
        v = _scaled(own.v, cache, cache.v_scale, columns)
        part, part_lse = _dense(case, own, grid, (q, k, v), order)
        out[rows], lse[:, rows] = part[0].transpose(0, 1), part_lse[0]
    pairs = [(t, g) for t, g in ((out, own.dout), (lse, own.dlse.to(accumulate))) if t.requires_grad]
    grads = torch.autograd.grad(
        [t for t, _ in pairs], list(named.values()), [g for _, g in pairs], allow_unused=True
    )
    result = {"out": out.detach(), "lse": lse.detach()}
    for (name, t), grad in zip(named.items(), grads, strict=True):
        result["d" + name] = torch.zeros_like(t) if grad is None else grad
    return result


@lru_cache(maxsize=256)
def expected_cached(case: CachedCase) -> tuple[Values, Cache, Results, dict[str, list[Tensor]]]:
    """(values, cache, truth in float64, ordinary attention in its dtype), once for all backends."""
    values = case.draw()
    cache = lay_out(case, values)
    truth = evaluate_cached(case, values, cache, torch.float64)
    runs = [evaluate_cached(case, values, cache, case.dtype, order) for order in orders(case.dtype)]
    return values, cache, truth, {name: [run[name] for run in runs] for name in truth}


def _apart(case: CachedCase, t: Tensor) -> Tensor:
    """A packed (T, H, D) tensor as the case lays q out."""
    return t.unflatten(0, (case.batch, -1)).transpose(1, 2) if case.dense else t


def call_cached(
    case: CachedCase, values: Values, cache: Cache, backend: str, **more: Any
) -> tuple[Tensor, Tensor]:
    """The call of a case on tensors of any device, results as packed tensors: out (T, H, D_v), lse (H, T)."""
    device = values.q.device
    options = {**case.options(values, device), "backend": backend, **more}
    starts, _ = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
    if not case.dense:
        options["cu_seqlens_q"] = starts
    packing = case.packing
    assert packing is not None
    options["seqused_k"] = torch.tensor(packing.k, dtype=torch.int32, device=device)
    if case.leftpad:
        options["leftpad_k"] = torch.tensor(case.leftpad, dtype=torch.int32, device=device)
    out, lse = attend_pages(
        _apart(case, values.q), values.k, values.v, block_table=cache.table, k_scale=cache.k_scale,
        v_scale=cache.v_scale, **options,
    )  # fmt: skip
    if case.dense:
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    return out, lse


def run_cached_case(
    case: CachedCase, backend: str, device: torch.device | str = "cpu", *, gradients: bool = True, **more: Any
) -> Report:
    """Run one case on one backend and check all that it returns.

    gradients: False checks the forward alone. more: options that override the case's.
    Raises: AssertionError naming the tensor that is wrong; whatever the library raises but a legitimate refusal.
    """
    values, cache, truth, ordinary = expected_cached(case)
    moved = Cache(
        *(None if t is None else t.to(device) for t in
          (cache.k, cache.v, cache.table, cache.places, cache.k_scale, cache.v_scale))
    )  # fmt: skip
    if case.tokens_first:
        moved.k, moved.v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (moved.k, moved.v))
    inputs = replace(values.map(lambda _, t: t.to(device)), k=moved.k, v=moved.v)
    named = inputs.differentiable()
    if case.float8:
        named.pop("k"), named.pop("v")
    named = named if gradients else {}
    for t in named.values():
        t.requires_grad_()
    try:
        out, lse = call_cached(case, inputs, moved, backend, **more)
    except tilewise.UnsupportedProblem as refusal:
        if backend in UNIVERSAL:
            raise AssertionError(f"{backend} may refuse nothing, but refused {case.name}") from refusal
        return Report(case.name, backend, refused=str(refusal).splitlines()[0])
    results = {"out": out, "lse": lse}
    if named:
        cotangents = (inputs.dout, inputs.dlse.to(lse.dtype))
        grads = torch.autograd.grad((out, lse), list(named.values()), cotangents, allow_unused=True)
        for (name, t), grad in zip(named.items(), grads, strict=True):
            assert grad is not None and grad.shape == t.shape and grad.dtype == t.dtype, f"gradient of {name}"
            results["d" + name] = grad
    lines = []
    for name, t in results.items():
        assert t.shape == truth[name].shape, f"{name}: {tuple(t.shape)}, expected {tuple(truth[name].shape)}"
        lines.append(compare(name, t, ordinary[name], truth[name]))
    report = Report(case.name, backend, tuple(lines))
    assert report.worst <= 1.0, f"error over budget ({case.features}, {case.sizes})\n{report}"
    return report
