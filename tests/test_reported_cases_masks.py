"""Reported faults of masks: empty rows, sentinels, NaN behind a mask, alignment, windows, polarity."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import Dense, causal_keep, reference, tolerance, window_keep
from reported import Checker, qkv, randn

import tilewise as tw

LOW = (torch.float16, torch.bfloat16)


def test_B01_rows_without_a_key_are_zero(check: Checker) -> None:
    q, k, v = qkv(1, 1, 8, 8, 8)
    keep = torch.zeros(8, 8, dtype=torch.bool)
    keep[:4, :4] = True
    got = check(q, k, v, Dense(keep), mask=keep)
    assert bool((got.out[:, :, 4:] == 0).all()) and bool((got.lse[:, :, 4:] == -math.inf).all())
    assert bool((got.grads["q"][:, :, 4:] == 0).all()) and bool((got.grads["k"][:, :, 4:] == 0).all())


@pytest.mark.parametrize(("nq", "nk"), [(20, 8), (300, 40)])
def test_B04_causal_with_more_queries_than_keys(check: Checker, nq: int, nk: int) -> None:
    q, k, v = qkv(1, 2, nq, nk, 16)
    got = check(q, k, v, Dense(causal_keep(nq, nk)), mask=tw.causal())
    early = slice(0, nq - nk)
    assert bool((got.out[:, :, early] == 0).all()) and bool((got.lse[:, :, early] == -math.inf).all())
    assert bool((got.grads["q"][:, :, early] == 0).all())
    assert bool(got.lse[:, :, nq - nk :].isfinite().all())


def test_B05_gradients_beside_an_empty_row_that_the_loss_skips(check: Checker) -> None:
    q, k, v = qkv(2, 1, 4, 4, 1)
    i, j = torch.arange(4)[:, None], torch.arange(4)[None]
    bias = torch.where((j == i) | (j == i - 1), 0.0, -math.inf).view(1, 1, 4, 4)
    present = torch.ones(2, 4, dtype=torch.bool)
    present[1, 2:] = False
    dout = torch.zeros(2, 1, 4, 1)
    dout[:, :, :2] = 1
    got = check(
        q,
        k,
        v,
        make=lambda b: Dense(present[:, None, None], lambda s: s + b),
        leaves=(bias,),
        dout=dout,
        features=lambda b: {"scores": tw.bias(b)},
        mask=tw.key_padding(present.to(check.device)),
    )
    assert bool((got.grads["q"][1, :, 3] == 0).all())
    for name in ("k", "v"):
        assert bool((got.grads[name][1, :, 2:] == 0).all())
    assert bool(got.grads["leaf0"].isfinite().all())


def test_B07_one_key_per_sequence_has_no_gradient_through_the_softmax(check: Checker) -> None:
    lengths = ([76, 34, 146], [1, 1, 1])
    q, k, v = randn(256, 1, 32, scale=3), randn(3, 1, 32, scale=3), randn(3, 1, 32, scale=3)
    dout = torch.ones(256, 1, 32)
    got = check.packed(q, k, v, lengths, lambda nq, nk: Dense(causal_keep(nq, nk)), dout, mask=tw.causal())
    assert bool((got.grads["q"] == 0).all()) and bool((got.grads["k"] == 0).all())
    assert bool((got.grads["v"] == 1).all())
    empty = got.lse[0] == -math.inf
    assert int(empty.sum()) == 75 + 33 + 145 and bool((got.out[empty] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B08_very_negative_scores_are_not_a_sentinel(check: Checker, dtype: torch.dtype) -> None:
    q, k = torch.zeros(1, 1, 4, 64, dtype=dtype), torch.zeros(1, 1, 64, 64, dtype=dtype)
    q[..., 0], k[..., 0] = 240, -250
    v = randn(1, 1, 64, 64, dtype=dtype)
    out, lse = check.out(q, k, v)
    truth, ordinary = (reference(q, k, v, dtype=t).out for t in (torch.float64, dtype))
    tolerance("out", out, truth, ordinary)
    tolerance("mean of v", out, v.double().mean(2, keepdim=True).expand(1, 1, 4, 64), ordinary)
    assert torch.allclose(lse, torch.full_like(lse, -7495.841117), rtol=1e-5, atol=0)


def test_B15_finfo_min_in_a_bias_stays_finite(check: Checker) -> None:
    q, k, v = qkv(1, 1, 3, 3, 4)
    bias = torch.ones(1, 1, 3, 3)
    bias[:, :, 0] = torch.finfo(torch.float32).min
    got = check(
        q,
        k,
        v,
        make=lambda b: Dense(score=lambda s: s + b),
        leaves=(bias,),
        features=lambda b: {"scores": tw.bias(b)},
    )
    assert torch.allclose(got.out[0, 0, 0], v[0, 0].mean(0), atol=2e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("hiding", ["dense", "padding", "causal"])
def test_B19_what_a_mask_hides_never_matters(check: Checker, bad: float, hiding: str) -> None:
    q, k, v = qkv(1, 1, 2, 2, 4)
    hidden = torch.tensor([[True, False]])
    mask = {
        "dense": lambda: tw.dense(hidden.expand(2, 2).to(check.device)),
        "padding": lambda: tw.key_padding(hidden.to(check.device)),
        "causal": tw.causal,
    }[hiding]()
    rows = slice(0, 1) if hiding == "causal" else slice(0, 2)
    dout = torch.zeros(1, 1, 2, 4)
    dout[:, :, rows] = randn(1, 1, rows.stop, 4)
    results = []
    for value in (0.0, bad):
        k[0, 0, 1, 0] = v[0, 0, 1, 0] = value
        results.append(check.run(q, k, v, dout=dout, mask=mask))
    clean, poisoned = results
    assert torch.equal(clean.out[:, :, rows], poisoned.out[:, :, rows])
    assert torch.equal(clean.lse[:, :, rows], poisoned.lse[:, :, rows])
    for name, grad in clean.grads.items():
        assert torch.equal(grad, poisoned.grads[name]), f"d{name}"


def test_B21_one_query_sees_all_keys_under_causal(check: Checker) -> None:
    q, k, v = qkv(2, 3, 1, 8, 16)
    got = check(q, k, v, Dense(), mask=tw.causal())
    plain = check(q, k, v, Dense())
    assert torch.allclose(got.out, plain.out, atol=1e-6)


@pytest.mark.parametrize("dtype", LOW)
def test_B23_no_row_sees_a_later_key(check: Checker, dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 4, 64, 64, 64, dtype=dtype)
    first, _ = check.out(q, k, v, mask=tw.causal())
    for i in range(64):
        later_k, later_v = k.clone(), v.clone()
        later_k[:, :, i + 1 :] = 7
        later_v[:, :, i + 1 :] = -50
        other, _ = check.out(q, later_k, later_v, mask=tw.causal())
        assert torch.equal(other[:, :, : i + 1], first[:, :, : i + 1]), f"row up to {i} changed"


@pytest.mark.parametrize("n", [127, 128, 129, 255, 257, 384])
def test_B25_causal_reaches_the_last_key_tile(check: Checker, n: int) -> None:
    q, k, v = qkv(1, 8, n, n, 64)
    check(q, k, v, Dense(causal_keep(n, n)), mask=tw.causal())


def test_B26_backward_without_a_mask_is_not_causal(check: Checker) -> None:
    q, k, v = qkv(1, 2, 128, 128, 64)
    check(q, k, v, Dense())


def test_B28_window_counts_are_inclusive(check: Checker) -> None:
    q = k = torch.zeros(1, 1, 10, 4)
    v = torch.arange(10.0).view(1, 1, 10, 1).expand(1, 1, 10, 4)
    got = check(q, k, v, Dense(window_keep(10, 10, 3, 0)), mask=tw.window(3, 0))
    wanted = torch.tensor([0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5])
    assert torch.allclose(got.out[0, 0, :, 0], wanted, atol=1e-6)
    assert torch.allclose(got.lse[0, 0].exp(), torch.tensor([1.0, 2, 3, 4, 4, 4, 4, 4, 4, 4]), atol=1e-5)


def test_B31_two_sided_window_with_more_queries_than_keys(check: Checker) -> None:
    q, k = torch.zeros(1, 1, 129, 4), torch.zeros(1, 1, 64, 4)
    got = check(q, k, randn(1, 1, 64, 4), Dense(window_keep(129, 64, 32, 64)), mask=tw.window(32, 64))
    assert torch.equal((got.lse[0, 0] == -math.inf).nonzero().flatten(), torch.tensor([0]))
    counts = got.lse[0, 0].exp()[[1, 2, 64, 65, 128]]
    assert torch.allclose(counts, torch.tensor([1.0, 2, 64, 64, 33]), rtol=1e-5)


def test_B47_left_padding_equals_the_unpadded_run(check: Checker) -> None:
    n, pads = 33, (0, 18)
    q, k, v = qkv(2, 4, n, n, 32)
    dout = randn(2, 4, n, 32)
    present = torch.arange(n)[None] >= torch.tensor(pads)[:, None]
    mask = tw.key_padding(present.to(check.device)) & tw.causal()
    keep = present[:, None, None] & causal_keep(n, n)
    got = check(q, k, v, Dense(keep), dout=dout, mask=mask)
    for b, pad in enumerate(pads):
        own = [t[b : b + 1, :, pad:] for t in (q, k, v, dout)]
        alone = check(*own[:3], Dense(causal_keep(n - pad, n - pad)), dout=own[3], mask=tw.causal())
        assert torch.allclose(got.out[b : b + 1, :, pad:], alone.out, atol=2e-6)
        assert bool((got.out[b, :, :pad] == 0).all())
        for name, grad in got.grads.items():
            assert torch.allclose(grad[b : b + 1, :, pad:], alone.grads[name], atol=2e-5), name
            assert bool((grad[b, :, :pad] == 0).all()), name


def test_B72_bias_broadcast_over_heads_has_the_right_offsets(check: Checker) -> None:
    q, k, v = qkv(2, 4, 8, 8, 64)
    bias = torch.zeros(2, 1, 8, 8)
    bias[0, :, 4:, :4] = -math.inf
    dout = randn(2, 4, 8, 64)
    got = check(
        q,
        k,
        v,
        make=lambda b: Dense(score=lambda s: s + b),
        leaves=(bias,),
        dout=dout,
        features=lambda b: {"scores": tw.bias(b)},
    )
    wide = check.run(q, k, v, dout=dout, scores=tw.bias(bias.expand(2, 4, 8, 8).to(check.device)))
    assert torch.equal(got.out, wide.out)
    for name in ("q", "k", "v"):
        assert torch.equal(got.grads[name], wide.grads[name])


def test_B74_true_means_may_attend(check: Checker) -> None:
    q = k = torch.zeros(1, 1, 3, 2)
    v = torch.tensor([1.0, 2, 4]).view(1, 1, 3, 1).expand(1, 1, 3, 2)
    out, _ = check.out(q, k, v, mask=torch.ones(3, 3).tril().bool().to(check.device))
    assert torch.allclose(out[0, 0, :, 0], torch.tensor([1, 1.5, 7 / 3]), atol=1e-6)


@pytest.mark.parametrize(("batch", "nq", "nk"), [(2, 77, 77), (2, 77, 43), (1, 5, 701), (1, 3, 9)])
def test_B75_bias_of_any_row_length_and_stride(check: Checker, batch: int, nq: int, nk: int) -> None:
    q, k, v = qkv(batch, 8, nq, nk, 16, dtype=torch.float16)
    stored = torch.full((batch, 8, nq, nk + 3), math.nan, dtype=torch.float16)
    bias = stored[..., 1 : nk + 1]
    bias.copy_(randn(batch, 8, nq, nk, dtype=torch.float16))
    got = check(
        q,
        k,
        v,
        make=lambda b: Dense(score=lambda s: s + b),
        leaves=(bias,),
        features=lambda b: {"scores": tw.bias(b)},
    )
    strided = check.run(q, k, v, scores=tw.bias(bias.to(check.device)))
    assert torch.equal(got.out, strided.out) and torch.equal(got.lse, strided.lse)


def test_B76_only_the_bias_requires_grad(check: Checker) -> None:
    q, k, v = (t.to(check.device) for t in qkv(1, 1, 64, 64, 16))
    bias = randn(1, 1, 64, 64).to(check.device).requires_grad_()
    tw.attention(q, k, v, scores=tw.bias(bias), backend=check.backend).sum().backward()
    assert q.grad is None and k.grad is None and v.grad is None
    wanted = check(
        q.cpu(),
        k.cpu(),
        v.cpu(),
        make=lambda b: Dense(score=lambda s: s + b),
        leaves=(bias,),
        dout=torch.ones(1, 1, 64, 16),
        features=lambda b: {"scores": tw.bias(b)},
    )
    assert torch.equal(bias.grad.cpu(), wanted.grads["leaf0"])


def test_B86_always_visible_tokens_do_not_break_causality(check: Checker) -> None:
    n, first = 24, 6
    q, k, v = qkv(1, 2, n, n, 16)
    mask = tw.causal() & (tw.window(5, 0) | tw.sink_tokens(first))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    keep = (j <= i) & ((i - j <= 5) | (j < first))
    base = check(q, k, v, Dense(keep), mask=mask)
    for row in range(first):
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[:, :, row + 1 :] = 9
        changed_v[:, :, row + 1 :] = -9
        out, _ = check.out(q, changed_k, changed_v, mask=mask)
        assert torch.equal(out[:, :, : row + 1], base.out[:, :, : row + 1])


def test_B71_expanded_inputs_equal_materialised_ones(check: Checker) -> None:
    q, k, v = randn(1, 4, 9, 8), randn(3, 2, 11, 8), randn(3, 2, 11, 8)
    bias, present = randn(1, 1, 9, 11), torch.rand(1, 11) < 0.7
    dout = randn(3, 4, 9, 8)

    def run(wide: bool) -> list[torch.Tensor]:
        sources = [
            t.to(check.device).requires_grad_() for t in (q.clone(), k.clone(), v.clone(), bias.clone())
        ]
        views = [sources[0].expand(3, 4, 9, 8), *sources[1:3], sources[3].expand(3, 4, 9, 11)]
        keys = present.expand(3, 11).to(check.device)
        if wide:
            views, keys = [t.contiguous() for t in views], keys.contiguous()
        mask, term = tw.key_padding(keys), tw.bias(views[3])
        out = tw.attention(*views[:3], mask=mask, scores=term, backend=check.backend)
        grads = torch.autograd.grad(out, sources, dout.to(check.device))
        assert [g.shape for g in grads] == [t.shape for t in sources]
        return [out.detach(), *grads]

    for first, second in zip(run(False), run(True), strict=True):
        assert torch.equal(first, second)
    keys = present.expand(3, 11).to(check.device)
    check(q.expand(3, 4, 9, 8), k, v, Dense(present.expand(3, 1, 1, 11)), mask=tw.key_padding(keys))
