"""Gradients of leaves on the CPU backend: what is stored, what is added, whose sum it is, and what is no number."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw

pytest.importorskip("numba", reason="the CPU backend needs Numba")


def draw(b: int, h: int, hkv: int, nq: int, nk: int, d: int, dv: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(b, h, nq, d), torch.randn(b, hkv, nk, d), torch.randn(b, hkv, nk, dv)


@pytest.mark.parametrize("shape", [(130, 1100), (1, 1, 130, 1100), (2, 1, 130, 1100), (1100,)])
def test_gradient_of_a_bias_that_heads_share(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sum per task would be too large, heads add to one sum in turn, and the reference is not asked."""
    from tilewise.backends.cpu import leaf_sums
    from tilewise.backends.reference.blockwise import Blockwise

    monkeypatch.setattr(leaf_sums, "LARGEST_PARTS", 0)
    q, k, v = draw(2, 4, 2, 130, 1100, 16, 16)
    found = []
    for dtype, backend in ((torch.float64, "naive"), (torch.float32, "cpu")):
        if backend == "cpu":
            monkeypatch.setattr(Blockwise, "backward", lambda *a: pytest.fail("the reference was asked"))
        torch.manual_seed(1)
        bias = torch.randn(shape).to(dtype).requires_grad_()
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = tw.attention(*inputs, scores=tw.bias(bias), mask=tw.causal(), backend=backend)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
        found.append(torch.autograd.grad(out, [*inputs, bias], weights))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", [(130, 1100), (1, 1, 130, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_a_bias_that_all_heads_meet_whole(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    """The first head stores what the others add to: no number of new memory enters, over threads the bits are equal."""
    from tilewise.backends.cpu import leaf_sums

    monkeypatch.setattr(leaf_sums, "LARGEST_PARTS", 0)
    torch.manual_seed(1)
    tensors = [t.to(dtype) for t in (*draw(2, 3, 3, 130, 1100, 16, 16), torch.randn(shape))]
    found = []
    for wide, backend, threads in ((torch.float64, "naive", 2), (dtype, "cpu", 2), (dtype, "cpu", 1)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        q, k, v, bias = (t.to(wide).requires_grad_() for t in tensors)
        out = tw.attention(q, k, v, scores=tw.bias(bias), backend=backend)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(wide)
        found.append([t.double() for t in torch.autograd.grad(out, (q, k, v, bias), weights)])
        torch.set_num_threads(before)
    want, got, alone = found
    near = 2e-5 if dtype == torch.float32 else 2e-2
    for true, one, two in zip(want, got, alone, strict=True):
        torch.testing.assert_close(one, true, atol=near, rtol=near)
        assert torch.equal(one, two)


PAIR_LEAVES: dict[str, tuple] = {
    "by rows": (lambda s, i, j, t: s + t[i, j], (37, 83), {}),
    "by columns": (lambda s, i, j, t: s + t[j, i], (83, 37), {}),
    "by positions, clamped": (lambda s, i, k, t: s * t[i, k], (37, 50), {"k_offset": -20, "q_offset": 5}),
    "twice, masked": (
        lambda s, i, k, t: s * t[i, k] + tw.tanh(t[i, k]),
        (37, 150),
        {"k_offset": 20, "q_offset": 5, "mask": tw.window(30, 30)},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PAIR_LEAVES)
def test_gradient_of_a_leaf_of_one_number_a_pair(
    kind: str, dtype: torch.dtype, poisoned_memory: None
) -> None:
    """Leaves that are turned, whole groups of keys and the rest: the leaf's gradient and those of q, k and v."""
    term, shape, options = PAIR_LEAVES[kind]
    tensors = [t.to(dtype) for t in (*draw(1, 2, 1, 37, 83, 16, 24), torch.randn(shape))]
    found = []
    for wide, backend in ((torch.float64, "naive"), (dtype, "cpu")):
        *inputs, leaf = leaves = [t.to(wide).requires_grad_() for t in tensors]
        out = tw.attention(*inputs, scores=tw.custom_score(term, leaf), backend=backend, **options)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(wide)
        found.append(torch.autograd.grad(out, leaves, weights))
    for want, got in zip(*found, strict=True):
        bound = (1e-5 if dtype == torch.float32 else 2e-2) * float(want.abs().max())
        torch.testing.assert_close(got.double(), want, atol=bound, rtol=0)


@pytest.mark.parametrize(("heads", "rows", "keys"), [(4, 37, 83), (4, 70, 1100), (2, 3, 40), (1, 1, 16)])
def test_gradient_of_a_bias_met_once(
    heads: int, rows: int, keys: int, poisoned_memory: None, monkeypatch
) -> None:
    """One number a pair and head, no mask: stored and not added, dead rows and lanes past the last row included."""
    from tilewise.backends.cpu import leaf_sums

    said, met_once = [], leaf_sums.met_once
    monkeypatch.setattr(leaf_sums, "met_once", lambda *a: said.append(met_once(*a)) or said[-1])
    bias = torch.randn(2, heads, rows, keys)
    bias[0, 0, -1] = -torch.inf
    tensors = [*draw(2, heads, max(heads // 2, 1), rows, keys, 16, 24), bias]
    found = []
    for dtype, backend in ((torch.float64, "naive"), (torch.float32, "cpu")):
        *inputs, leaf = leaves = [t.to(dtype).requires_grad_() for t in tensors]
        out = tw.attention(*inputs, scores=tw.bias(leaf), backend=backend)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
        found.append(torch.autograd.grad(out, leaves, weights))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    assert said == [True]


SINGLE_LEAVES: dict[str, tuple] = {
    "float64": (lambda s, h, i, j, t: s + t[h, i, j], (4, 5, 33), (5, 33)),
    "one pair, by head": (lambda s, h, t: s + t[h], (4,), (1, 1)),
    "one key, by row": (lambda s, h, i, t: s + t[h, i], (4, 5), (5, 1)),
    "one row, by key": (lambda s, h, j, t: s + t[h, j], (4, 33), (1, 33)),
}


@pytest.mark.parametrize("kind", SINGLE_LEAVES)
def test_gradient_of_a_leaf_met_once_that_is_not_turned(kind: str, poisoned_memory: None) -> None:
    """Each number is one pair's, but the kernel adds it: what it adds to begins with 0."""
    term, shape, (rows, keys) = SINGLE_LEAVES[kind]
    tensors, leaf = draw(1, 4, 4, rows, keys, 16, 24), torch.randn(shape)
    found = []
    for wide, backend in ((torch.float64, "naive"), (torch.float32, "cpu")):
        inputs = [t.to(wide).requires_grad_() for t in tensors]
        own = leaf.to(torch.float64 if kind == "float64" else wide).requires_grad_()
        scores = tw.custom_score(term, own)
        out, lse = tw.attention(*inputs, scores=scores, return_lse=True, backend=backend)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(wide)
        found.append(torch.autograd.grad((out * weights).sum() + lse.sum(), [*inputs, own]))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def test_gradient_of_a_leaf_read_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two splits of the keys would add to one element at one time: each has a sum of its own."""
    from tilewise.backends.cpu import leaf_sums

    owned, said = leaf_sums.owned, []
    monkeypatch.setattr(leaf_sums, "owned", lambda *a: said.append(owned(*a)) or said[-1])
    tensors = (*(torch.randn(1, 1, 1100, 8) for _ in range(3)), torch.randn(1100, 1100))
    found = []
    for dtype, backend in ((torch.float64, "naive"), (torch.float32, "cpu")):
        q, k, v, leaf = (t.to(dtype).requires_grad_() for t in tensors)
        term = tw.custom_score(lambda s, i, j, t: s + t[i, j] + t[j, i], leaf)
        out = tw.attention(q, k, v, scores=term, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    torch.testing.assert_close(found[1].double(), found[0], atol=2e-5, rtol=2e-5)
    assert said == [False]


@pytest.mark.parametrize("mask", [None, tw.causal()])
def test_a_gradient_that_is_not_finite_is_left_to_the_reference(mask: tw.Mask | None, monkeypatch) -> None:
    """1 / t overflows in the gradient of log t alone; those of q, k and v are finite."""
    from tilewise.backends.reference.blockwise import Blockwise

    asked, backward = [], Blockwise.backward
    monkeypatch.setattr(Blockwise, "backward", lambda *a: asked.append(1) or backward(*a))
    q, k, v = draw(1, 2, 2, 33, 40, 16, 16)
    for least in (0.5, 1e-40):
        leaf = torch.rand(1, 2, 33, 40) + 0.5
        leaf[0, 1, 9, 5] = least
        leaf.requires_grad_()
        term = tw.custom_score(lambda s, h, i, j, t: s - 0.01 * tw.log2(t[0, h, i, j]), leaf)
        out = tw.attention(q, k, v, scores=term, mask=mask, backend="cpu")
        (found,) = torch.autograd.grad(out.square().sum(), leaf)
        assert len(asked) == (least < 0.5) == int((~found.isfinite()).sum())


@pytest.mark.parametrize("keys", [1040, 1036])
def test_gradient_of_a_bias_met_once_of_several_pages(keys: int, poisoned_memory: None) -> None:
    """Rows of whole lines go past the caches, others do not; pages are met before anything is stored in them."""
    torch.manual_seed(2)
    q, k, v = draw(1, 1, 1, 1024, keys, 16, 16)
    bias = torch.randn(1, 1, 1024, keys)
    found = []
    for dtype, backend in ((torch.float64, "naive"), (torch.float32, "cpu")):
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v, bias)]
        out = tw.attention(*inputs[:3], scores=tw.bias(inputs[3]), backend=backend)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
        found.append(torch.autograd.grad(out, inputs, weights))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dim", [16, 64, 96, 256])
def test_a_row_that_sees_one_key_has_no_gradient_of_q(dim: int) -> None:
    """Its weight is 1 and out is v, so that dp - delta is 0 where both are summed in the same parts."""
    torch.manual_seed(3)
    inputs = [t.requires_grad_() for t in draw(1, 2, 2, 600, 600, dim, dim)]
    out = tw.attention(*inputs, mask=tw.causal(), backend="cpu")
    (dq,) = torch.autograd.grad(out, inputs[:1], torch.randn_like(out))
    assert not dq[:, :, 0].any()
