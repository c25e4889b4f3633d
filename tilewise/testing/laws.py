"""Properties that hold for every backend and need no oracle. Each function raises AssertionError with the
tensor that breaks the law.

Laws about bits (layout, poison, leak, determinism, batch) compare with `torch.equal`; laws about values
(split = whole) use the budgets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.testing.budgets import Report, compare
from tilewise.testing.cases import Case, Packing, Values
from tilewise.testing.conformance import call, differentiate, expected, prepare, run
from tilewise.testing.poison import LAYOUTS

# One name for what torch accepts as a device.
Device = torch.device | str


def same_bits(law: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Raise AssertionError unless both hold the same bits (NaN equals NaN, +0 equals -0)."""
    for name, t in first.items():
        other = second[name]
        if t.shape != other.shape:
            raise AssertionError(f"{law}: {name} has shapes {tuple(t.shape)} and {tuple(other.shape)}")
        differs = ~((t == other) | (t.isnan() & other.isnan()))
        if bool(differs.any()):
            where = [int(n) for n in differs.nonzero()[0]]
            largest = float((t[differs].double() - other[differs].double()).abs().max())
            raise AssertionError(
                f"{law}: {name} differs {int(differs.sum())} times, first {where}, by up to {largest:.1e}"
            )


def layout_invariance(
    case: Case, backend: str, device: Device = "cpu", layouts: Sequence[str] = tuple(LAYOUTS)
) -> None:
    """Where tensors lie in memory changes no bit of out, lse or any gradient. The expanded layout is compared
    with equal values.
    """
    for layout in layouts:
        if layout == "expanded":
            equal = replace(case, strides="expanded", poison="none")
            values = prepare(equal, equal.draw(), device)
            contiguous = values.map(_contiguous_leaf)
            first, second = (differentiate(equal, inputs, backend) for inputs in (contiguous, values))
        else:
            first = run(replace(case, strides="contiguous"), backend, device)
            second = run(replace(case, strides=layout, poison="surround"), backend, device)
        same_bits(f"layout {layout}", first.tensors(), second.tensors())


def _contiguous_leaf(name: str, t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format).requires_grad_(t.requires_grad)


def poison_invariance(case: Case, backend: str, device: Device = "cpu") -> None:
    """NaN around the tensors and in every hidden place changes no bit."""
    clean = run(replace(case, poison="none"), backend, device)
    poisoned = run(replace(case, poison="hidden"), backend, device)
    same_bits("poison", clean.tensors(), poisoned.tensors())


def determinism(case: Case, backend: str, device: Device = "cpu", repeats: int = 3) -> None:
    """Runs on the same input give the same bits: forward always, gradients under deterministic=True."""
    first = run(case, backend, device, deterministic=True)
    for _ in range(repeats - 1):
        same_bits("determinism", first.tensors(), run(case, backend, device, deterministic=True).tensors())
    with torch.no_grad():
        out, lse = call(case, prepare(case, expected(case)[0], device), backend)
    same_bits("forward without deterministic", {"out": first.out, "lse": first.lse}, {"out": out, "lse": lse})


def no_future_leak(
    case: Case, backend: str, device: Device = "cpu", positions: Sequence[int] | None = None
) -> None:
    """Under a causal mask, replacing every key and value later than a position changes no bit of the rows up
    to it.

    Needs a dense case whose mask is causal. Also checks that the earlier rows get no gradient into the later
    keys.
    """
    if case.packing is not None or case.mask is None or not case.mask.causal:
        raise ValueError(f"{case.name} is not a dense case with a causal mask")
    (segment,) = case.segments()
    values = expected(case)[0]
    with torch.no_grad():
        out, lse = call(case, prepare(case, values, device), backend)
    q_at, k_at = segment.grid.q[0, 0, :, 0], segment.grid.k[0, 0, 0, :]
    for position in positions if positions is not None else [int(n) for n in q_at]:
        later = (k_at > position).view(1, 1, -1, 1)
        changed = replace(
            values, k=torch.where(later, 9.0 - values.k, values.k), v=torch.where(later, -100.0, values.v)
        )
        with torch.no_grad():
            other, other_lse = call(case, prepare(case, changed, device), backend)
        early = (q_at <= position).to(out.device)
        first = {"out": out[:, :, early], "lse": lse[:, :, early]}
        same_bits(
            f"future leak past {position}", first, {"out": other[:, :, early], "lse": other_lse[:, :, early]}
        )
    _no_gradient_from_the_past(case, values, backend, device, int(q_at[len(q_at) // 2]) if len(q_at) else 0)


def _no_gradient_from_the_past(
    case: Case, values: Values, backend: str, device: Device, position: int
) -> None:
    (segment,) = case.segments()
    early = segment.grid.q[0, 0, :, 0] <= position
    quiet = replace(
        values,
        dout=torch.where(early.view(1, 1, -1, 1), values.dout, 0.0).to(values.dout.dtype),
        dlse=torch.where(early.view(1, 1, -1), values.dlse, 0.0),
    )
    grads = differentiate(case, prepare(case, quiet, device), backend).grads
    later = (segment.grid.k[0, 0, 0, :] > position).to(grads["k"].device)
    for name in ("k", "v"):
        if bool((grads[name][:, :, later] != 0).any()):
            raise AssertionError(
                f"future leak: d{name} of keys later than {position} receives gradient from earlier rows"
            )


def _parts(case: Case, values: Values, backend: str, cuts: Sequence[int]) -> list[Any]:
    """attention_partial over the key ranges between the cuts; rows keep their positions."""
    options = case.options(values, values.q.device)
    options.pop("sink", None)
    (segment,) = case.segments()
    if options["q_offset"] is None:
        options["q_offset"] = case.sizes.Nk - case.sizes.Nq
    first = options["k_offset"]
    bounds = [0, *cuts, case.sizes.Nk]
    made = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        options["k_offset"] = first + low
        made.append(
            tilewise.attention_partial(
                values.q, values.k[:, :, low:high], values.v[:, :, low:high], **options, backend=backend
            )
        )
    return made


def _needs_shards(case: Case) -> None:
    features = (*((case.mask,) if case.mask else ()), *case.scores)
    if case.packing is not None or not all(feature.positional for feature in features):
        raise ValueError(
            f"{case.name} is not a dense case of positional features, so a key shard is not a slice of it"
        )


def split_is_whole(case: Case, backend: str, cuts: Sequence[int], device: Device = "cpu") -> Report:
    """Partials over any split of the keys, empty parts included, merge to the whole: out, lse and all
    gradients within budget.
    """
    _needs_shards(case)
    values, truth, ordinary = expected(case)
    inputs = prepare(case, values, device)
    merged = tilewise.merge(*_parts(case, inputs, backend, cuts))
    out = merged.finalize(inputs.sink, dtype=case.dtype)
    lse = merged.lse if inputs.sink is None else merged.with_sink(inputs.sink).lse
    named = inputs.differentiable()
    grads = torch.autograd.grad(
        (out, lse), list(named.values()), (inputs.dout, inputs.dlse), allow_unused=True
    )
    got = {"out": out, "lse": lse}
    for (name, t), grad in zip(named.items(), grads, strict=True):
        got["d" + name] = torch.zeros_like(t) if grad is None else grad
    return _within_budget(case, backend, f"split at {list(cuts)}", got, truth, ordinary)


def backward_by_parts(case: Case, backend: str, cuts: Sequence[int], device: Device = "cpu") -> Report:
    """attention_partial_backward over key ranges, each given the global out and lse, sums to the whole
    gradients.
    """
    _needs_shards(case)
    if case.sink:
        raise ValueError("attention_partial_backward has no sink")
    values, truth, ordinary = expected(case)
    inputs = prepare(case, values, device)
    with torch.no_grad():
        out, lse = call(case, inputs, backend)
        options = case.options(inputs, device)
        options["q_offset"] = (
            case.sizes.Nk - case.sizes.Nq if options["q_offset"] is None else options["q_offset"]
        )
        first = options["k_offset"]
        bounds = [0, *cuts, case.sizes.Nk]
        parts = []
        for low, high in zip(bounds, bounds[1:], strict=False):
            options["k_offset"] = first + low
            k, v = inputs.k[:, :, low:high], inputs.v[:, :, low:high]
            parts.append(
                tilewise.attention_partial_backward(
                    inputs.q, k, v, out, lse, inputs.dout, inputs.dlse, **options, backend=backend
                )
            )
    got = {"dq": sum(part.dq.double() for part in parts).to(case.dtype)}
    got["dk"], got["dv"] = (
        torch.cat([getattr(part, name) for part in parts], dim=2) for name in ("dk", "dv")
    )
    return _within_budget(case, backend, f"backward in parts at {list(cuts)}", got, truth, ordinary)


def _within_budget(case: Case, backend: str, law: str, got: dict, truth: dict, ordinary: dict) -> Report:
    lines = tuple(compare(name, t, ordinary[name], truth[name]) for name, t in got.items())
    report = Report(f"{case.name}, {law}", backend, lines)
    if not report.worst <= 1.0:
        raise AssertionError(f"error over budget\n{report}")
    return report


def batch_invariance(case: Case, backend: str, device: Device = "cpu") -> None:
    """Under batch_invariant=True a sequence computed alone has the bits it has among its neighbours.

    The case's features must not depend on the batch index: no per-batch leaves, no dropout (which is numbered
    by b).
    """
    if case.dropout or case.poison == "hidden":
        raise ValueError(f"{case.name}: dropout and hidden poison depend on the whole batch")
    values = expected(case)[0]
    whole = differentiate(case, prepare(case, values, device), backend, batch_invariant=True).tensors()
    for b in range(case.batch):
        alone, own = _alone(case, values, b)
        single = differentiate(alone, prepare(alone, own, device), backend, batch_invariant=True).tensors()
        part = {
            name: _part(case, name, t, b)
            for name, t in whole.items()
            if name in ("out", "lse", "dq", "dk", "dv")
        }
        same_bits(f"batch invariance of sequence {b}", part, {name: single[name] for name in part})


def _part(case: Case, name: str, t: Tensor, b: int) -> Tensor:
    if case.packing is None:
        return t[b : b + 1]
    which = "k" if name in ("k", "v", "dk", "dv") else "q"
    starts = case.packing.starts(which)
    tokens = slice(starts[b], starts[b + 1])
    return t[:, tokens] if name in ("lse", "dlse") else t[tokens]


def _alone(case: Case, values: Values, b: int) -> tuple[Case, Values]:
    own = replace(
        values,
        **{name: _part(case, name, getattr(values, name), b) for name in ("q", "k", "v", "dout", "dlse")},
    )
    if case.packing is None:
        return replace(case, sizes=case.sizes._replace(B=1)), own
    used_q, used_k = ((case.packing.used(which)[b],) for which in ("q", "k"))
    alone = Packing((case.packing.q[b],), (case.packing.k[b],), used_q, used_k)
    return replace(case, packing=alone), own


def dropout_fraction(
    backend: str, p: float, device: Device = "cpu", seqlen: int = 512, seed: int = 7
) -> None:
    """The fraction of weights that dropout keeps lies within 4 standard deviations of 1 - p, over 4 *
    seqlen^2 draws.

    With q = 0 and v = 1 a row of out is (number kept) / (seqlen * (1 - p)), so out tells the fraction exactly
    enough.
    """
    q, k = (torch.zeros(1, 4, seqlen, 8, device=device) for _ in range(2))
    v = torch.ones(1, 4, seqlen, 1, device=device)
    drawn = torch.tensor(seed, dtype=torch.int64, device=device)
    out = tilewise.attention(q, k, v, dropout=p, seed=drawn, backend=backend)
    kept = float(out.double().mean()) * (1 - p)
    deviation = math.sqrt(p * (1 - p) / (4 * seqlen * seqlen))
    if abs(kept - (1 - p)) > 4 * deviation:
        raise AssertionError(
            f"dropout {p} keeps {kept:.6f} of the weights, expected {1 - p:.6f} +- {4 * deviation:.6f}"
        )


def thread_invariance(case: Case, backend: str, counts: Sequence[int] = (1, 2)) -> None:
    """On the CPU the number of threads changes no bit of the forward, and none of the gradients under
    deterministic=True.
    """
    before = torch.get_num_threads()
    try:
        results = []
        for count in counts:
            torch.set_num_threads(count)
            results.append(run(case, backend, "cpu", deterministic=True).tensors())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        same_bits("threads", results[0], other)
