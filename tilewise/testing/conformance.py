"""Run a case on a backend through the public call and hold everything it returns to the budgets.

A backend conforms when every case either passes or is refused with `UnsupportedProblem`, the refusal agreeing
with `explain`. Any other exception, a NaN, a wrong shape, dtype or dimension order, or an error over its
budget fails the case.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.testing.budgets import Line, Report, compare
from tilewise.testing.cases import Case, Values
from tilewise.testing.ordinary import evaluate, orders, visible_pairs
from tilewise.testing.poison import NAN, place, surround

UNIVERSAL = ("blockwise", "naive")  # backends that may refuse nothing: every other one can fall back on them


@dataclass
class Outcome:
    """What the library returned: out, lse, and gradients by the names of `Values.differentiable`."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]
    inputs: Values

    def tensors(self) -> dict[str, Tensor]:
        """All results by name, gradients as "d" + name."""
        return {"out": self.out, "lse": self.lse, **{"d" + name: grad for name, grad in self.grads.items()}}


def suite_device() -> torch.device:
    """The device the suite runs on: TILEWISE_TEST_DEVICE, by default cpu."""
    return torch.device(os.environ.get("TILEWISE_TEST_DEVICE", "cpu"))


def suite_backends() -> tuple[str, ...]:
    """The backends the suite runs on: TILEWISE_TEST_BACKENDS, comma separated, by default blockwise and
    naive.
    """
    return tuple(os.environ.get("TILEWISE_TEST_BACKENDS", "blockwise,naive").split(","))


@lru_cache(maxsize=512)
def expected(case: Case) -> tuple[Values, dict[str, Tensor], dict[str, list[Tensor]]]:
    """(values, truth in float64, ordinary attention in its dtype in each order), once for all backends."""
    values = case.draw()
    truth = evaluate(case, values, torch.float64)
    runs = [evaluate(case, values, case.dtype, order) for order in orders(case.dtype)]
    return values, truth, {name: [run[name] for run in runs] for name in truth}


def hide(case: Case, values: Values) -> Values:
    """values with NaN in every place no pair may look: hidden keys, rows that see nothing, tokens outside,
    hidden bias cells.
    """
    rows, keys = (seen[..., None] for seen in seen_rows_and_keys(case, values))
    hidden = {"q": torch.where(rows, values.q, NAN)}
    hidden.update({name: torch.where(keys, getattr(values, name), NAN) for name in ("k", "v")})
    score_leaves = values.score_leaves
    if case.packing is not None:
        # A row inside a sequence keeps its dout even if it sees nothing: a sink's gradient reads it.
        inside = torch.zeros(values.q.shape[0], 1, 1, dtype=torch.bool)
        for segment in case.segments():
            inside[segment.rows] = True
        hidden["dout"] = torch.where(inside, values.dout, NAN)
    else:
        (segment,) = case.segments()
        pairs = visible_pairs(case, values, segment)
        score_leaves = tuple(
            (torch.where(pairs, leaves[0], NAN),) if term.pairwise else leaves
            for term, leaves in zip(case.scores, score_leaves, strict=True)
        )
    return replace(values, **hidden, score_leaves=score_leaves)


def prepare(case: Case, values: Values, device: torch.device | str = "cpu") -> Values:
    """The library's tensors: poisoned, moved to device, laid out as the case says; differentiable ones
    require grad.
    """
    if case.poison == "hidden":
        values = hide(case, values)
    laid_out = ("q", "k", "v", "dout")
    put = place if case.poison == "none" else surround

    def ready(name: str, t: Tensor) -> Tensor:
        t = t.to(device)
        t = put(t, case.strides if name in laid_out else "contiguous")
        trains = t.is_floating_point() and name not in ("dout", "dlse") and not name.startswith("mask")
        return t.requires_grad_() if trains else t

    return values.map(ready)


def call(case: Case, values: Values, backend: str, **more: Any) -> Any:
    """The public call of the case on tensors made by `prepare`; `more` overrides keyword arguments."""
    options = {**case.options(values, values.q.device), "backend": backend, "return_lse": True, **more}
    attend = tilewise.attention if case.packing is None else tilewise.attention_varlen
    return attend(values.q, values.k, values.v, **options)


def run(case: Case, backend: str, device: torch.device | str = "cpu", **more: Any) -> Outcome:
    """Forward and all gradients of the case. Raises whatever the library raises."""
    inputs = prepare(case, expected(case)[0], device)
    return differentiate(case, inputs, backend, **more)


def differentiate(case: Case, inputs: Values, backend: str, **more: Any) -> Outcome:
    """Forward and gradients of out and lse together, with the case's dout and dlse, on prepared inputs."""
    out, lse = call(case, inputs, backend, **more)
    named = inputs.differentiable()
    grads = torch.autograd.grad(
        (out, lse), list(named.values()), (inputs.dout, inputs.dlse.to(lse.dtype)), allow_unused=True
    )
    missing = [name for name, grad in zip(named, grads, strict=True) if grad is None]
    if missing:
        raise AssertionError(f"{case.name}: no gradient reached {missing}")
    return Outcome(out.detach(), lse.detach(), dict(zip(named, grads, strict=True)), inputs)


def run_case(case: Case, backend: str, device: torch.device | str = "cpu") -> Report:
    """Run one case on one backend and check all it returns.

    Returns: a Report with one Line per tensor (out, lse, dq, dk, dv, dsink and every float leaf), or one that
    says why it was refused.
    Raises: AssertionError naming the tensor if a result is wrong; whatever the library raises if it is not a
    legitimate refusal.
    """
    try:
        outcome = run(case, backend, device)
    except tilewise.UnsupportedProblem as refusal:
        check_refusal(case, backend, device, refusal)
        return Report(case.name, backend, refused=str(refusal).splitlines()[0])
    check_form(case, outcome)
    _, truth, ordinary = expected(case)
    lines = [_line(name, t, ordinary[name], truth[name]) for name, t in outcome.tensors().items()]
    check_exact_zeros(case, outcome)
    report = Report(case.name, backend, tuple(lines))
    if not report.worst <= 1.0:
        raise AssertionError(f"error over budget ({case.features}, {case.sizes})\n{report}")
    return report


def _line(name: str, result: Tensor, ordinary: list[Tensor], truth: Tensor) -> Line:
    if result.shape != truth.shape:
        raise AssertionError(f"{name}: shape {tuple(result.shape)}, expected {tuple(truth.shape)}")
    return compare(name, result, ordinary, truth)


def check_refusal(case: Case, backend: str, device: torch.device | str, refusal: Exception) -> None:
    """A refusal is legitimate if the backend may refuse, `explain` gives a reason, and its message is more
    than a name.
    """
    if backend in UNIVERSAL:
        raise AssertionError(f"{backend} may refuse nothing, but refused {case.name}: {refusal}") from refusal
    inputs = prepare(case, expected(case)[0], device)
    options = case.options(inputs, device)
    if case.packing is not None:
        return
    plan = tilewise.explain(inputs.q, inputs.k, inputs.v, **options)
    reasons = dict(plan.candidates).get(backend)
    if not reasons:
        raise AssertionError(
            f"{backend} refused {case.name}, but explain lists no reason: {refusal}"
        ) from refusal


def check_form(case: Case, outcome: Outcome) -> None:
    """dtypes, devices and dimension order of everything returned."""
    q = outcome.inputs.q
    accumulate = torch.float64 if case.dtype == torch.float64 else torch.float32
    _same("out dtype", outcome.out.dtype, q.dtype)
    _same("out device", outcome.out.device, q.device)
    _same("lse dtype", outcome.lse.dtype, accumulate)
    if outcome.out.numel():
        _same("out strides", *_strides(outcome.out, q))
    for name, t in outcome.inputs.differentiable().items():
        _same(f"d{name} shape", outcome.grads[name].shape, t.shape)
        _same(f"d{name} dtype", outcome.grads[name].dtype, t.dtype)


def _same(what: str, got: Any, wanted: Any) -> None:
    if got != wanted:
        raise AssertionError(f"{what}: {got}, expected {wanted}")


def _strides(out: Tensor, q: Tensor) -> tuple[list[int], list[int]]:
    """(strides of out, strides it should have), over dimensions larger than 1: q's order if q is dense in
    memory, else contiguous.
    """
    order = list(range(out.ndim))
    if torch.ops.aten.is_non_overlapping_and_dense(q):
        order.sort(key=lambda n: (-q.stride(n), n))
    wanted, step = [0] * out.ndim, 1
    for n in reversed(order):
        wanted[n] = step
        step *= out.shape[n]
    large = [n for n in range(out.ndim) if out.shape[n] > 1]
    return [out.stride(n) for n in large], [wanted[n] for n in large]


def check_exact_zeros(case: Case, outcome: Outcome) -> None:
    """Queries that see no key have out and dq exactly 0; keys that no query sees have dk and dv exactly 0.
    Sinks are not keys.
    """
    rows, keys = seen_rows_and_keys(case, expected(case)[0])
    for name, seen in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
        unseen = outcome.tensors()[name].cpu()[~seen]
        if not bool((unseen == 0).all()):
            raise AssertionError(
                f"{name}: {int((unseen != 0).sum())} entries that depend on nothing visible are not exactly 0"
            )


def seen_rows_and_keys(case: Case, values: Values) -> tuple[Tensor, Tensor]:
    """(queries that see a key, keys that some query sees), bool, shaped as q and k without their last
    dimension.
    """
    rows, keys = (torch.zeros(t.shape[:-1], dtype=torch.bool) for t in (values.q, values.k))
    for segment in case.segments():
        pairs = visible_pairs(case, values, segment)
        by_row, by_key = pairs.any(dim=3), pairs.any(dim=2)
        if case.sizes.Hkv:
            by_key = by_key.unflatten(1, (case.sizes.Hkv, case.sizes.H // case.sizes.Hkv)).any(dim=2)
        if segment.rows is None:
            return by_row, by_key
        rows[segment.rows], keys[segment.columns] = by_row[0].T, by_key[0].T
    return rows, keys
