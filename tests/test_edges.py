"""Corners of the public calls: hidden values in second order, terms without s, default devices, vmap, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from sinks import infinite_sink

import tilewise as tw

BACKENDS = ("blockwise", "naive")


def qkv(*shape: int, seed: int = 3) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=make) for _ in range(3)]


# ---- hidden values in jvp and second order


def everything(tensors: list[torch.Tensor], **options: object) -> list[torch.Tensor]:
    """out, lse, gradients, double-backward gradients and the tangents of a call with a bias and a sink."""
    x = [t.clone().requires_grad_() for t in tensors]

    def run(q, k, v, bias, sink):
        scores = (tw.bias(bias), tw.softcap(3.0))
        return tw.attention(q, k, v, scores=scores, sink=sink, return_lse=True, **options)

    out, lse = run(*x)
    first = torch.autograd.grad(out.square().sum() + lse.sin().sum(), x, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), x)
    _, tangents = torch.func.jvp(lambda q: run(q, *tensors[1:]), (tensors[0],), (tensors[0],))
    return [out, lse, *first, *second, *tangents]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_values_reach_no_second_derivative(backend: str, bad: float) -> None:
    q, k, v = qkv(2, 2, 6, 4)
    bias = torch.randn(2, 6, 6, dtype=torch.float64)
    sink = torch.randn(2, dtype=torch.float64)
    lengths = torch.tensor([4, 3])
    options = {"mask": tw.causal() & tw.key_padding(lengths), "dropout": 0.3, "seed": 1, "backend": backend}
    clean = everything([q, k, v, bias, sink], **options)
    for t in (k, v):
        t[0, :, 4:], t[1, :, 3:] = bad, bad
    bias.masked_fill_(torch.ones(6, 6, dtype=torch.bool).triu(1), bad)
    for a, b in zip(clean, everything([q, k, v, bias, sink], **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_cotangents_adds_nothing_to_second_derivatives(backend: str) -> None:
    def second(q, k, v, sink):
        x = [t.clone().requires_grad_() for t in (q, k, v, sink)]
        out = tw.attention(*x[:3], mask=tw.causal(), sink=x[3], backend=backend)
        first = torch.autograd.grad(out[:, :, 2:].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first[1].square().sum() + first[3].square().sum(), x)

    q, k, v = qkv(1, 2, 6, 4)
    sink = torch.zeros(2, dtype=torch.float64)
    clean = second(q, k, v, sink)
    q[:, :, :2] = math.nan
    for a, b in zip(clean, second(q, k, v, sink), strict=True):
        torch.testing.assert_close(a, b)


# ---- terms without s


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_score_that_does_not_read_s_gives_q_and_k_no_gradient(backend: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 4, 3))
    per_key = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for scores in (tw.custom_score(lambda s: 1.0), tw.custom_score(lambda j, w: w[j], per_key)):
        out = tw.attention(q, k, v, scores=scores, backend=backend)
        dq, dk = torch.autograd.grad(out.square().sum(), (q, k))
        assert bool((dq == 0).all()) and bool((dk == 0).all())


# ---- default devices, leaf types


def test_a_default_device_elsewhere_changes_nothing() -> None:
    q, k, v = qkv(1, 2, 300, 4)
    ids, table = torch.arange(300) // 70, torch.randn(2, 5, dtype=torch.float64)
    odd = tw.custom(lambda q, k, t: t[(q + k) % 5] > -9.0, table[0])
    mask = (tw.causal() & tw.window(9, 0) | tw.document(ids)) & tw.key_padding(torch.tensor([250])) & odd
    scores = (tw.relative(table), tw.softcap(3.0))

    def run() -> torch.Tensor:
        x = q.clone().requires_grad_()
        out = tw.attention(x, k, v, mask=mask, scores=scores, dropout=0.2, seed=3, backend="blockwise")
        first = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.sum(), x)[0]

    expected = run()
    with torch.device("meta"):
        assert torch.equal(run(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_integer_leaves_of_every_type(backend: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 2, 6, 4)
    ids, lengths = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([3, 5])
    for make in (lambda x, n: tw.document(x), lambda x, n: tw.prefix(n), lambda x, n: tw.key_padding(n)):
        expected = tw.attention(q, k, v, mask=make(ids, lengths), backend=backend)
        got = tw.attention(q, k, v, mask=make(ids.to(dtype), lengths.to(dtype)), backend=backend)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32, torch.uint64])
def test_integer_leaves_beyond_int32_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(tw.DTypeError, match="int32"):
        tw.prefix(torch.tensor([2**31 + 5], dtype=torch.int64).to(dtype))


# ---- vmap


def test_vmap_over_integer_leaves() -> None:
    q, k, v = qkv(2, 2, 6, 4)
    lengths, ids = torch.tensor([[3, 5], [1, 6], [0, 2]]), torch.arange(18).view(3, 6) % 4
    for make, leaves in ((tw.key_padding, lengths), (tw.prefix, lengths), (tw.document, ids)):
        got = torch.vmap(lambda x, make=make: tw.attention(q, k, v, mask=make(x)))(leaves)
        torch.testing.assert_close(got, torch.stack([tw.attention(q, k, v, mask=make(x)) for x in leaves]))


def test_vmap_randomness_differs_when_nested_and_when_packed() -> None:
    _, k, v = qkv(2, 2, 6, 4)
    ones = torch.ones(2, 3, 2, 2, 6, 4, dtype=torch.float64)

    def run(q):
        return tw.attention(q, k, v, dropout=0.5, seed=1)

    nested = torch.vmap(torch.vmap(run, randomness="different"), randomness="different")(ones)
    entries = nested.flatten(0, 1)
    assert len({tuple(x.flatten().tolist()) for x in entries}) == 6
    tokens, cu_seqlens = k[0].transpose(0, 1), torch.tensor([0, 2, 6])
    packed = torch.vmap(
        lambda x: tw.attention_varlen(x, x, x, cu_seqlens, dropout=0.5, seed=1), randomness="different"
    )(tokens.expand(3, 6, 2, 4))
    assert len({tuple(x.flatten().tolist()) for x in packed}) == 3


# ---- refusals by name


def test_forward_over_forward_is_refused_by_name() -> None:
    q, k, v = qkv(1, 1, 3, 2)
    with pytest.raises(tw.UnsupportedProblem, match="forward over forward"):
        torch.func.jacfwd(torch.func.jacfwd(lambda q: tw.attention(q, k, v).square().sum()))(q)


def test_the_older_vmap_is_refused_in_forward_mode_too() -> None:
    q, k, v = qkv(1, 1, 3, 2)
    with pytest.raises(tw.UnsupportedProblem, match=r"torch\.func"):
        torch.autograd.functional.jacobian(
            lambda q: tw.attention(q, k, v), q, vectorize=True, strategy="forward-mode"
        )


def test_sizes_beyond_int32_are_refused() -> None:
    for make in (lambda n: tw.window(n, 0), lambda n: tw.window(0, n), tw.prefix, tw.chunk):
        with pytest.raises(tw.OptionError, match="int32"):
            make(2**31)
    q, k, v = qkv(1, 1, 3, 2)
    assert torch.equal(tw.attention(q, k, v, mask=tw.window(2**31 - 1, 2**31 - 1)), tw.attention(q, k, v))


def test_a_backends_name_cannot_smuggle_options_in() -> None:
    q, k, v = (t.half() for t in qkv(1, 1, 3, 2))
    for name in ("blockwise;partial=1", "auto;layout=varlen", "naive#x"):
        with pytest.raises(tw.OptionError, match="no backend"):
            tw.attention(q, k, v, backend=name)


@pytest.mark.parametrize("value", [[1.0], 3.0, None])
def test_what_is_not_a_tensor_is_named(value: object) -> None:
    q, k, v = qkv(1, 1, 3, 2)
    for make in (tw.bias, tw.alibi, tw.relative, tw.dense, tw.document, tw.key_padding):
        with pytest.raises(tw.DTypeError, match="tensor"):
            make(value)
    if value is not None:
        with pytest.raises(tw.DTypeError, match="sink is a tensor"):
            tw.attention(q, k, v, sink=value)
        with pytest.raises(tw.DTypeError, match="out is a tensor"):
            tw.attention(q, k, v, out=value)


def test_a_formula_too_deep_to_read_is_named() -> None:
    q, k, v = qkv(1, 1, 3, 2)
    mask = tw.causal()
    for _ in range(3000):
        mask = mask & tw.window(3, 0)
    with pytest.raises(tw.SpecError, match="nested"):
        tw.attention(q, k, v, mask=mask)


# ---- what goes through the op


class Renamed(torch.Tensor):
    """A subclass without a dispatch of its own."""


def test_a_subclass_of_tensor_keeps_forward_mode_and_second_order() -> None:
    given = qkv(1, 2, 5, 4)

    def derivatives(q, k, v):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        first = torch.autograd.grad(tw.attention(*x).square().sum(), x, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), x)
        _, tangent = torch.func.jvp(lambda q: tw.attention(q, k, v), (q,), (q,))
        return [*second, tangent]

    renamed = derivatives(*(t.as_subclass(Renamed) for t in given))
    for a, b in zip(derivatives(*given), renamed, strict=True):
        torch.testing.assert_close(a, b.as_subclass(torch.Tensor))


def test_compiled_forward_mode_is_right() -> None:
    q, k, v = qkv(1, 2, 5, 4)

    def tangent(q):
        return torch.func.jvp(lambda q: tw.attention(q, k, v), (q,), (q,))[1]

    torch._dynamo.reset()
    # Without fullgraph the call breaks the graph and runs as written; the op itself would give zeros.
    got = torch.compile(tangent, backend="aot_eager")(q)
    torch.testing.assert_close(got, tangent(q))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_heads_read_no_table(backend: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(1, 0, 3, 4))
    table = torch.zeros(0, 5, dtype=torch.float64, requires_grad=True)
    out = tw.attention(q, k, v, scores=tw.relative(table), backend=backend)
    assert out.shape == (1, 0, 3, 4)
    assert torch.autograd.grad(out.sum(), table)[0].shape == (0, 5)


def test_partial_backward_names_a_missing_cotangent() -> None:
    q, k, v = qkv(1, 1, 3, 2)
    out, lse = tw.attention(q, k, v, return_lse=True)
    with pytest.raises(tw.DTypeError, match="do is a tensor"):
        tw.attention_partial_backward(q, k, v, out, lse, None)


def test_partial_backward_checks_leaves_and_lengths_as_a_forward_does() -> None:
    q, k, v = qkv(1, 2, 5, 4)
    out, lse = tw.attention(q, k, v, return_lse=True)
    with pytest.raises(tw.ShapeError, match="row"):
        tw.attention_partial_backward(q, k, v, out, lse, out, scores=tw.bias(torch.zeros(2, 3, 3)))
    x = q[0].transpose(0, 1)
    with pytest.raises(tw.ShapeError, match="cu_seqlens_q"):
        tw.attention_partial_backward(x, x, x, x, lse[0], x, cu_seqlens_q=torch.tensor([0, 9]))


def test_gathered_leaf_gradients_repeat_with_several_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 8, 400, 32, generator=make) for _ in range(3))
        table = torch.randn(7, generator=make, requires_grad=True)
        scores = tw.custom_score(lambda s, q, k, t: s + t[(q * k) % 7], table)

        def gradient():
            out = tw.attention(q, k, v, scores=scores, deterministic=True, backend="blockwise")
            return torch.autograd.grad(out.square().sum(), table)[0]

        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(5))
    finally:
        torch.set_num_threads(threads)


def test_double_backward_where_every_score_is_finfo_min():
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, 3, 4, generator=make).requires_grad_() for _ in range(3)]
    lowest = torch.full((3, 3), torch.finfo(torch.float32).min)

    def second(fn):
        first = torch.autograd.grad(fn(*inputs).pow(2).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)

    # finfo.min swallows the scores: each row is the mean of v, whatever q and k are.
    wanted = second(lambda q, k, v: torch.softmax(q @ k.mT * 0.5 + lowest, -1) @ v)
    got = second(lambda q, k, v: tw.attention(q, k, v, scores=tw.bias(lowest), backend="blockwise"))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_slow_path_warning_points_at_the_user(monkeypatch):
    from tilewise import dispatch

    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(tw.config, "slow", "warn")
    q = torch.randn(1, 1, 2, 4, dtype=torch.float64)
    with pytest.warns(tw.SlowPathWarning) as found:
        tw.attention(q, q, q)
    assert found[0].filename == __file__


# ---- an infinite sink


@pytest.mark.parametrize("keys", [0, 4])
@pytest.mark.parametrize("backend", [*BACKENDS, "cpu"])
def test_a_row_without_keys_has_an_infinite_sinks_lse(backend: str, keys: int) -> None:
    if backend == "cpu":
        pytest.importorskip("numba")
    infinite_sink(backend, torch.float32 if backend == "cpu" else torch.float64, keys)
