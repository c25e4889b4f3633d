"""Reported faults of arithmetic: large logits, lse, ALiBi, softcap, scale, merging, split keys, precision."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import Dense, causal_keep, reference, tolerance
from reported import Checker, qkv, randn

import tilewise as tw


def test_B12_maximum_far_below_zero(check: Checker) -> None:
    q, k, v = qkv(1, 2, 130, 300, 64, dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = 48, -50  # raw 2400, scaled 300
    keep = causal_keep(130, 300)
    got = check(q, k, v, Dense(keep), mask=tw.causal())
    truth = reference(q, k, v, Dense(keep))
    assert float(truth.lse.max()) < -280
    assert float((got.lse - truth.lse).abs().max()) <= 1e-2


def test_B13_scores_beyond_fp16(check: Checker) -> None:
    q, k, v = qkv(1, 1, 32, 32, 64, dtype=torch.float16)
    q[..., :4], k[..., :4] = 576, 382
    assert float((q.float() @ k.float().mT).min()) > 65504
    check(q, k, v, ordinary_dtype=torch.float32)


@pytest.mark.parametrize("n", [257, 1025])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["bias", "alibi"])
def test_B18_bias_that_grows_with_distance(check: Checker, n: int, dtype: torch.dtype, form: str) -> None:
    q, k, v = qkv(1, 1, n, n, 64, dtype=dtype)
    distance = (torch.arange(n)[:, None] - torch.arange(n)[None]).float()
    keep = causal_keep(n, n)
    if form == "bias":
        leaf = distance.to(dtype)[None, None]
        features = {
            "features": lambda b: {"scores": tw.bias(b)},
            "make": lambda b: Dense(keep, lambda s: s + b),
        }
    else:
        leaf = torch.tensor([-1.0])
        features = {
            "features": lambda m: {"scores": tw.alibi(m)},
            "make": lambda m: Dense(keep, lambda s: s - m * distance.abs()),
        }
    dout = randn(1, 1, n, 64, dtype=dtype)
    if dtype == torch.float32:
        check(q, k, v, leaves=(leaf,), dout=dout, mask=tw.causal(), **features)
        return
    got = check.run(q, k, v, leaves=(leaf,), dout=dout, mask=tw.causal(), features=features["features"])
    assert all(bool(t.isfinite().all()) for t in (got.out, got.lse, *got.grads.values()))


def test_B80_alibi_of_one_decoded_query(check: Checker) -> None:
    q, k, v = qkv(1, 2, 20, 20, 8)
    slopes = torch.tensor([0.5, 0.25])

    def make(nq: int):
        rows = torch.arange(nq)[:, None] + 20 - nq
        distance = (rows - torch.arange(20)[None]).abs()
        return lambda m: Dense(causal_keep(nq, 20), lambda s: s - m.view(1, 2, 1, 1) * distance)

    options = {"leaves": (slopes,), "features": lambda m: {"scores": tw.alibi(m)}, "mask": tw.causal()}
    full = check(q, k, v, make=make(20), **options)
    last = check(q[:, :, -1:], k, v, make=make(1), **options)
    assert torch.allclose(last.out, full.out[:, :, -1:], atol=1e-6)


def test_B83_softcap_is_c_tanh_s_over_c(check: Checker) -> None:
    q = torch.full((1, 1, 1, 1), 10.0)
    k, v = torch.tensor([10.0, 0]).view(1, 1, 2, 1), torch.tensor([1.0, 0]).view(1, 1, 2, 1)
    dense = Dense(score=lambda s: 5 * torch.tanh(s / 5), scale=1.0)
    got = check(q, k, v, dense, scores=tw.softcap(5.0), scale=1.0)
    assert abs(float(got.out) - 0.9933071) < 1e-6 and abs(float(got.lse) - 5.0067154) < 1e-5


def test_B87_lse_with_grouped_heads(check: Checker) -> None:
    q, k, v = qkv(1, (64, 8), 256, 256, 128, dtype=torch.float16)
    _, lse = check.out(q, k, v)
    group = k.double().repeat_interleave(8, 1)
    wanted = torch.logsumexp(q.double() @ group.mT / math.sqrt(128), -1)
    assert lse.dtype == torch.float32 and lse.shape == (1, 64, 256)
    assert float((lse - wanted).abs().max()) <= 1e-3


def test_B88_lse_is_a_natural_logarithm(check: Checker) -> None:
    _, lse = check.out(torch.zeros(1, 1, 3, 4), *qkv(1, 1, 8, 8, 4)[1:])
    assert torch.allclose(lse, torch.full((1, 1, 3), 2.0794415), atol=1e-6)


def test_B90_lse_without_grad(check: Checker) -> None:
    q, k, v = qkv(2, (32, 4), 128, 128, 64)
    _, without = check.out(q, k, v)
    with_grad = check.run(q, k, v).lse
    q, k, v = (t.to(check.device) for t in (q, k, v))
    _, unneeded = tw.attention(q, k, v, return_lse=True, backend=check.backend)
    assert torch.equal(without, with_grad) and torch.equal(unneeded.cpu(), with_grad)
    assert float(without.min()) > 3


def test_B93_merging_partials_far_apart() -> None:
    small = tw.Partial(torch.full((1, 1, 1, 1), 1.0), torch.full((1, 1, 1), -100.0))
    large = tw.Partial(torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1), 100.0))
    for parts in ((small, large), (large, small)):
        merged = tw.merge(*parts)
        assert float(merged.out) == 3 and float(merged.lse) == 100


@pytest.mark.parametrize("causal", [False, True])
def test_B95_backward_of_chunks_sums_to_the_whole(check: Checker, causal: bool) -> None:
    q, k, v = qkv(1, 4, 96, 96, 32)
    dense = Dense(causal_keep(96, 96)) if causal else Dense()
    mask = tw.causal() if causal else None
    dout = randn(1, 4, 96, 32)
    whole = check(q, k, v, dense, dout=dout, mask=mask)
    moved = [t.to(check.device) for t in (q, whole.out, whole.lse, dout)]
    total = torch.zeros_like(q)
    parts = []
    for start in range(0, 96, 32):
        own = [t[:, :, start : start + 32].to(check.device) for t in (k, v)]
        part = tw.attention_partial_backward(
            moved[0], *own, *moved[1:], mask=mask, q_offset=0, k_offset=start, backend=check.backend
        )
        total += part.dq.cpu()
        parts.append(part)
    got = {"q": total}
    got["k"], got["v"] = (torch.cat([getattr(p, n).cpu() for p in parts], 2) for n in ("dk", "dv"))
    truth = reference(q, k, v, dense, dout=dout)
    ordinary = reference(q, k, v, dense, dout=dout, dtype=torch.float32)
    for name, grad in got.items():
        tolerance("d" + name, grad.float(), truth.grads[name], ordinary.grads[name])


def test_B97_splits_and_threads_agree(check: Checker) -> None:
    q, k, v = qkv(1, (16, 8), 1, 4096, 128, dtype=torch.bfloat16)
    truth = reference(q, k, v)
    ordinary = reference(q, k, v, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            found.append(check.out(q, k, v)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    for splits in (1, 16, 32):
        size = 4096 // splits
        parts = [
            tw.attention_partial(
                q.to(check.device),
                *(t[:, :, n : n + size].to(check.device) for t in (k, v)),
                q_offset=4095,
                k_offset=n,
                backend=check.backend,
            )
            for n in range(0, 4096, size)
        ]
        found.append(tw.merge(*parts).finalize(dtype=torch.bfloat16).cpu())
    for out in found:
        tolerance("out", out, truth.out, ordinary.out)


@pytest.mark.parametrize("shape", [(2, 2, 100, 100)])
def test_B110_fp32_is_full_fp32(check: Checker, shape: tuple[int, int, int, int]) -> None:
    q, k, v = qkv(*shape, 64)
    dout = randn(2, 2, 100, 64)
    got = check(q, k, v, dout=dout)
    truth = reference(q, k, v, dout=dout)
    for name, t, wanted in (
        ("out", got.out, truth.out),
        *((n, g, truth.grads[n]) for n, g in got.grads.items()),
    ):
        assert float((t - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max()), name


def test_B134_bf16_is_no_worse_than_ordinary_attention_and_unbiased(check: Checker) -> None:
    q, k, v = qkv(1, 4, 1024, 1024, 64, dtype=torch.bfloat16)
    dense = Dense(causal_keep(1024, 1024))
    dout = randn(1, 4, 1024, 64, dtype=torch.bfloat16)
    got = check.run(q, k, v, dout=dout, mask=tw.causal())
    truth = reference(q, k, v, dense, dout=dout)
    ordinary = reference(q, k, v, dense, dout=dout, dtype=torch.bfloat16)
    pairs = [("out", got.out, truth.out, ordinary.out)]
    pairs += [(n, g, truth.grads[n], ordinary.grads[n]) for n, g in got.grads.items()]
    for name, t, wanted, own in pairs:
        error = (t.double() - wanted).abs().max()
        assert float(error) <= 2 * float((own.double() - wanted).abs().max()), name
    signed = got.out.double() - truth.out
    assert abs(float(signed.mean())) <= 0.05 * float(signed.abs().mean())


def test_B137_negative_scale(check: Checker) -> None:
    q = torch.tensor([[1.0, 0]]).view(1, 1, 1, 2)
    k = torch.tensor([[1.0, 0], [3, 0]]).view(1, 1, 2, 2)
    v = torch.tensor([[0.0], [1]]).view(1, 1, 2, 1)
    got = check(q, k, v, Dense(scale=-0.5), scale=-0.5)
    assert abs(float(got.out) - 0.26894142) < 1e-6
