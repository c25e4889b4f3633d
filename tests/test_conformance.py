"""Every case on every backend, within its budgets, with NaN-filled allocations; and the suite's own oracle
held to a second one.
"""

from __future__ import annotations

import math

import pytest
import torch
from oracle import Dense, dense_attention, philox_kept

import tilewise
from tilewise.testing import poison
from tilewise.testing.budgets import compare
from tilewise.testing.cases import Case, all_cases, find_case
from tilewise.testing.cases_crossed import FACTORS, pairwise
from tilewise.testing.conformance import check_refusal, expected, run_case
from tilewise.testing.ordinary import _kept, evaluate

CASES = {case.name: case for case in all_cases()}
DENSE = [name for name, case in CASES.items() if case.packing is None and case.sizes.H]


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, backend: str, device: torch.device, poisoned_memory: None) -> None:
    run_case(CASES[name], backend, device)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 150
    dtypes = {case.dtype for case in CASES.values()}
    assert dtypes == {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def test_pairwise_covers_every_pair() -> None:
    counts = [len(levels) for levels in FACTORS]
    rows = pairwise(counts)
    for f in range(len(counts)):
        for g in range(f + 1, len(counts)):
            assert len({(row[f], row[g]) for row in rows}) == counts[f] * counts[g]


@pytest.mark.parametrize("name", DENSE)
def test_truth_agrees_with_a_second_oracle(name: str) -> None:
    """Two dense evaluations, written apart, agree to float64: out, lse, gradients of q, k, v and sink."""
    case = CASES[name]
    values, truth, _ = expected(case)
    q, k, v = (t.double().requires_grad_() for t in (values.q, values.k, values.v))
    sink = None if values.sink is None else values.sink.double().requires_grad_()
    (segment,) = case.segments()

    def score(s: torch.Tensor) -> torch.Tensor:
        for term, leaves in zip(case.scores, values.score_leaves, strict=True):
            leaves = tuple(t.double() if t.is_floating_point() else t for t in leaves)
            s = term.score(s, segment.grid, *leaves)
        return s

    keep = None if case.mask is None else case.mask.dense(segment.grid, values.mask_leaves)
    kept = None
    if case.dropout:
        grid = segment.grid
        seed = int(case.dropout_seed())
        kept = philox_kept(seed, case.dropout, grid.b, grid.h + case.h_offset, grid.q, grid.k)
    out, lse = dense_attention(q, k, v, Dense(keep, score, sink, kept, case.dropout, case.scale))
    inputs = {"q": q, "k": k, "v": v} | ({} if sink is None else {"sink": sink})
    grads = torch.autograd.grad(
        (out, lse), list(inputs.values()), (values.dout.double(), values.dlse.double()), allow_unused=True
    )
    got = {"out": out, "lse": lse}
    for (name, t), grad in zip(inputs.items(), grads, strict=True):
        got["d" + name] = torch.zeros_like(t) if grad is None else grad
    for name, t in got.items():
        line = compare(name, t, [truth[name]], truth[name])
        assert line.ratio <= 1, line


def test_dropout_bits_of_the_suite_are_philox() -> None:
    case = find_case("dropout-h_offset")
    (segment,) = case.segments()
    grid = segment.grid
    heads = grid.h + case.h_offset
    by_hand = philox_kept(int(case.dropout_seed()), case.dropout, grid.b, heads, grid.q, grid.k)
    assert torch.equal(_kept(case, grid), by_hand)


@pytest.mark.parametrize("layout", poison.LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (7, 3, 4), (0, 2, 3, 1)])
def test_layouts_keep_values(layout: str, shape: tuple[int, ...]) -> None:
    t = torch.randn(shape)
    t = t[:1].expand_as(t) if layout == "expanded" else t
    for placed in (poison.place(t, layout), poison.surround(t, layout)):
        assert torch.equal(placed, t)


def test_layouts_are_what_they_say() -> None:
    t = torch.randn(2, 3, 5, 4)
    strides = {name: poison.place(t, name).stride() for name in poison.LAYOUTS}
    assert strides["contiguous"] == strides["offset"] == (60, 20, 4, 1)
    assert strides["bnhd"] == (60, 4, 12, 1)
    assert strides["stepped"][-1] == 2 and strides["rows"][2] == 7 and strides["expanded"][0] == 0
    assert strides["reversed"] == (1, 2, 6, 30)
    assert poison.place(t, "offset").storage_offset() == 1


def test_surroundings_are_nan() -> None:
    t = torch.randn(2, 3, 5, 4)
    for layout in poison.LAYOUTS:
        storage = torch.empty(0, dtype=t.dtype).set_(poison.surround(t, layout).untyped_storage())
        values = t[:1].numel() if layout == "expanded" else t.numel()
        assert int(storage.isfinite().sum()) == values < storage.numel()
        assert bool(storage[:128].isnan().all()) and bool(storage[-128:].isnan().all())


def test_poisoned_memory_reaches_the_library_only() -> None:
    inside: dict = {"__name__": "tilewise.somewhere", "torch": torch}
    exec(
        "def make(): return torch.empty(3), torch.zeros(2).new_empty(4), torch.empty_like(torch.ones(2))",
        inside,
    )
    with poison.poisoned_memory():
        assert all(bool(t.isnan().all()) for t in inside["make"]())
        assert torch.empty(3).shape == (3,)
    assert torch.empty is not None and inside["make"]()[0].shape == (3,)
    assert "_poisoning" not in repr(torch.empty)


def _line(error: float) -> float:
    truth = torch.linspace(1, 2, 64, dtype=torch.float64)
    ordinary = (truth + 1e-4).float()
    result = truth.clone()
    result[0] += error
    return compare("dq", result.float(), [ordinary], truth).ratio


def test_budget_is_a_multiple_of_ordinary_error() -> None:
    assert _line(2.9e-4) < 1 < _line(3.1e-4)


def test_budget_notices_nan_and_infinity() -> None:
    truth = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    good = truth.float()
    assert compare("lse", good, [good], truth).ratio == 0
    for bad in (
        [math.nan, -math.inf],
        [1.0, math.nan],
        [1.0, 0.0],
        [math.inf, -math.inf],
        [-math.inf, -math.inf],
    ):
        with pytest.raises(AssertionError):
            compare("lse", torch.tensor(bad), [good], truth)


def test_ordinary_is_within_its_own_budget() -> None:
    case: Case = find_case("everything-bf16")
    _, truth, ordinary = expected(case)
    for name, t in ordinary.items():
        assert compare(name, t[0], t, truth[name]).ratio <= 1
    assert set(truth) == set(evaluate(case, case.draw(), torch.float32))


FAULTS = {
    "scaled": lambda out, lse: (out * 1.001, lse),
    "shifted lse": lambda out, lse: (out, lse + 1e-3),
    "one entry": lambda out, lse: (out + torch.eye(out[0].numel())[7].view(out[:1].shape) * 1e-4, lse),
    "NaN": lambda out, lse: (torch.where(out == out.max(), math.nan, out), lse),
    "dtype": lambda out, lse: (out.double(), lse),
    "order": lambda out, lse: (out.transpose(1, 2).contiguous().transpose(1, 2), lse),
    "no gradient of lse": lambda out, lse: (out, lse.detach() + 0 * out.sum()),
    "gradient": lambda out, lse: (out + (out - out.detach()) * 0.01, lse),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_run_case_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is slightly wrong in one respect fails the case."""
    case = find_case("term-alibi")
    honest = tilewise.attention

    def attention(*args, **options):
        return FAULTS[fault](*honest(*args, **options))

    run_case(case, "blockwise")
    monkeypatch.setattr(tilewise, "attention", attention)
    with pytest.raises((AssertionError, RuntimeError)):
        run_case(case, "blockwise")


@pytest.mark.parametrize("backend", ["blockwise", "naive", "no_such_backend"])
def test_an_unfounded_refusal_fails(backend: str) -> None:
    """blockwise and naive may refuse nothing; another backend's refusal must be one that explain knows of."""
    with pytest.raises(AssertionError):
        check_refusal(find_case("plain-fp32"), backend, "cpu", tilewise.UnsupportedProblem("not today"))


def test_unread_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that is allocated and never written is NaN, so a case cannot pass on old memory."""
    lazy: dict = {"__name__": "tilewise.lazy", "torch": torch}
    exec(
        "def attention(q, k, v, **options):\n"
        "    zero = 0 * (q + k.sum() + v.sum())\n"
        "    return torch.empty_like(q) + zero, zero.sum(-1)",
        lazy,
    )
    monkeypatch.setattr(tilewise, "attention", lazy["attention"])
    with poison.poisoned_memory(), pytest.raises(AssertionError, match="NaN"):
        run_case(find_case("plain-fp32"), "blockwise")
