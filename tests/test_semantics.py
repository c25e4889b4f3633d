"""The questions that the design decides once, one group of tests for each, on every backend."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from oracle import Dense, causal_keep, philox_kept, positions
from reported import Checker, cumulative, qkv, randn

import tilewise as tw

INF = math.inf


# ---- order


def test_order_default_scale_is_head_dim_to_the_minus_half_before_padding(check: Checker) -> None:
    q, k, v = qkv(1, 1, 3, 5, 7)
    check(q, k, v, Dense(scale=1 / math.sqrt(7)))


def test_order_terms_apply_as_written(check: Checker) -> None:
    q, k, v = qkv(1, 1, 4, 6, 8)
    t = randn(1, 1, 4, 6).to(check.device)
    first, _ = check.out(q, k, v, scores=(tw.bias(t), tw.softcap(0.5)))
    second, _ = check.out(q, k, v, scores=(tw.softcap(0.5), tw.bias(t)))
    by_hand = t.cpu()
    check(
        q,
        k,
        v,
        Dense(score=lambda s: 0.5 * torch.tanh((s + by_hand) / 0.5)),
        scores=(tw.bias(t), tw.softcap(0.5)),
    )
    assert not torch.allclose(first, second, atol=1e-3)


def test_order_masks_come_after_terms(check: Checker) -> None:
    """A softcap would make a hidden score finite again; the mask still hides the pair."""
    q, k, v = qkv(1, 1, 6, 6, 8)
    dense = Dense(causal_keep(6, 6), lambda s: 2 * torch.tanh(s / 2))
    check(q, k, v, dense, mask=tw.causal(), scores=tw.softcap(2.0))


def test_order_minus_infinity_after_all_terms_hides(check: Checker) -> None:
    q, k, v = qkv(1, 1, 2, 3, 4)
    t = torch.tensor([[0.0, -INF, 0], [-INF, -INF, -INF]]).to(check.device)
    out, lse = check.out(q, k, v, scores=tw.bias(t))
    assert bool((out[0, 0, 1] == 0).all()) and float(lse[0, 0, 1]) == -INF
    revived, revived_lse = check.out(q, k, v, scores=(tw.bias(t), tw.softcap(2.0)))
    assert bool(revived_lse.isfinite().all()) and bool((revived[0, 0, 1] != 0).any())


def test_order_finfo_min_stays_finite(check: Checker) -> None:
    q, k, v = qkv(1, 1, 2, 3, 4)
    t = torch.full((2, 3), torch.finfo(torch.float32).min, device=check.device)
    out, lse = check.out(q, k, v, scores=tw.bias(t))
    assert torch.allclose(out, v.mean(2, keepdim=True).expand_as(out), atol=1e-6) and bool(
        lse.isfinite().all()
    )


# ---- position


@pytest.mark.parametrize("q_offset", [None, 0, 2, -3])
def test_position_of_causal(check: Checker, q_offset: int | None) -> None:
    q, k, v = qkv(2, 2, 5, 8, 8)
    check(q, k, v, Dense(causal_keep(5, 8, q_offset)), mask=tw.causal(), q_offset=q_offset)


def test_position_per_sequence_tensor(check: Checker) -> None:
    q, k, v = qkv(2, 2, 5, 8, 8)
    offsets = torch.tensor([4, -1])
    keep = torch.stack([causal_keep(5, 8, int(n)) for n in offsets])[:, None]
    check(q, k, v, Dense(keep), mask=tw.causal(), q_offset=offsets)


def test_position_of_a_key_shard(check: Checker) -> None:
    q, k, v = qkv(1, 2, 6, 6, 8)
    rows, columns = positions(6, 6, 10, 7)
    dense = Dense(columns <= rows, lambda s: s - 0.25 * (rows - columns).abs())
    slopes = torch.full((2,), 0.25, device=check.device)
    check(q, k, v, dense, mask=tw.causal(), scores=tw.alibi(slopes), q_offset=10, k_offset=7)


def test_position_of_packed_sequences_uses_used_lengths(check: Checker) -> None:
    q, k, v = randn(9, 2, 8), randn(12, 2, 8), randn(12, 2, 8)
    cu_q, cu_k = cumulative([4, 5]), cumulative([7, 5])
    used_q, used_k = torch.tensor([3, 5]), torch.tensor([6, 2])
    got = check.run(
        q,
        k,
        v,
        attend=tw.attention_varlen,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        seqused_q=used_q.int(),
        seqused_k=used_k.int(),
        mask=tw.causal(),
    )
    for b, (start_q, start_k) in enumerate(((0, 0), (4, 7))):
        rows = slice(start_q, start_q + int(used_q[b]))
        columns = slice(start_k, start_k + int(used_k[b]))
        one = [t.transpose(0, 1)[None] for t in (q[rows], k[columns], v[columns])]
        alone = check(*one, Dense(causal_keep(int(used_q[b]), int(used_k[b]))), mask=tw.causal())
        assert torch.allclose(got.out[rows], alone.out[0].transpose(0, 1), atol=2e-6)
    assert bool((got.out[3] == 0).all()) and bool((got.lse[:, 3] == -INF).all())
    assert bool((got.grads["q"][3] == 0).all()) and bool((got.grads["k"][6] == 0).all())


def test_position_padding_moves_nothing(check: Checker) -> None:
    q, k, v = qkv(1, 1, 4, 6, 8)
    present = torch.tensor([[False, False, True, True, True, True]])
    keep = causal_keep(4, 6) & present
    check(q, k, v, Dense(keep), mask=tw.causal() & tw.key_padding(present.to(check.device)))


def test_position_rows_and_columns_ignore_offsets(check: Checker) -> None:
    q, k, v = qkv(1, 1, 4, 6, 8)
    allowed = (torch.rand(4, 6) < 0.6).to(check.device)
    first = check.out(q, k, v, mask=allowed)
    second = check.out(q, k, v, mask=allowed, q_offset=100, k_offset=-50)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


# ---- empty rows and hidden values


def test_empty_row_is_zero_and_minus_infinity(check: Checker) -> None:
    q, k, v = qkv(1, 2, 3, 4, 8)
    got = check.run(q, k, v, dlse=torch.ones(1, 2, 3), mask=tw.prefix(0))
    assert bool((got.out == 0).all()) and bool((got.lse == -INF).all())
    assert all(bool((grad == 0).all()) for grad in got.grads.values())


def test_empty_row_with_a_sink_has_the_sinks_lse(check: Checker) -> None:
    q, k, v = qkv(1, 2, 3, 4, 8)
    sink = torch.tensor([0.5, -2.0])
    got = check.run(
        q,
        k,
        v,
        leaves=(sink,),
        dlse=torch.ones(1, 2, 3),
        features=lambda s: {"sink": s},
        mask=tw.prefix(0),
    )
    assert bool((got.out == 0).all()) and torch.equal(got.lse, sink.view(1, 2, 1).expand(1, 2, 3))
    assert torch.allclose(got.grads["leaf0"], torch.tensor([3.0, 3.0]))
    assert all(bool((got.grads[name] == 0).all()) for name in "qkv")


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_hidden_values_reach_nobody(check: Checker, bad: float) -> None:
    q, k, v = qkv(2, (4, 2), 5, 7, 8)
    lengths = torch.tensor([4, 0], dtype=torch.int32, device=check.device)
    clean = check.run(q, k, v, mask=tw.key_padding(lengths))
    for t in (k, v):
        t[0, :, 4:], t[1] = bad, bad
    q[1] = bad
    poisoned = check.run(q, k, v, mask=tw.key_padding(lengths))
    assert torch.equal(clean.out, poisoned.out) and torch.equal(clean.lse, poisoned.lse)
    for name, grad in clean.grads.items():
        assert torch.equal(grad, poisoned.grads[name]), name


def test_visible_nan_reaches_exactly_the_rows_that_see_it(check: Checker) -> None:
    q, k, v = qkv(1, 2, 40, 40, 8)
    v[0, 0, 25, 3] = math.nan
    out, _ = check.out(q, k, v, mask=tw.causal())
    assert bool(out[0, 1].isfinite().all()) and bool(out[0, 0, :25].isfinite().all())
    assert bool(out[0, 0, 25:, 3].isnan().all())


# ---- lse


def test_lse_is_natural_fp32_and_before_dropout(check: Checker) -> None:
    q, k, v = qkv(1, 2, 5, 7, 8, dtype=torch.bfloat16)
    _, plain = check.out(q, k, v)
    _, dropped = check.out(q, k, v, dropout=0.5, seed=torch.tensor(3))
    assert plain.dtype == torch.float32 and plain.shape == (1, 2, 5) and torch.equal(plain, dropped)


def test_lse_is_fp64_for_fp64_and_differentiable(check: Checker) -> None:
    tensors = [t.to(check.device).requires_grad_() for t in qkv(1, 2, 4, 5, 3, dtype=torch.float64)]

    def lse(*inputs: torch.Tensor) -> torch.Tensor:
        return tw.attention(*inputs, return_lse=True, backend=check.backend)[1]

    assert lse(*tensors).dtype == torch.float64
    assert torch.autograd.gradcheck(lse, tensors)


def test_lse_alone_gives_no_gradient_to_v(check: Checker) -> None:
    q, k, v = qkv(1, 1, 4, 5, 8)
    got = check.run(q, k, v, dout=torch.zeros(1, 1, 4, 8), dlse=randn(1, 1, 4))
    assert bool((got.grads["v"] == 0).all()) and bool((got.grads["k"] != 0).any())


# ---- bool masks


def test_masks_are_anded_with_everything(check: Checker) -> None:
    q, k, v = qkv(1, 1, 5, 6, 8)
    present = torch.tensor([[True, False, True, True, False, True]])
    mask = tw.key_padding(present.to(check.device)) & (tw.causal() | tw.prefix(3))
    i, j = positions(5, 6)
    check(q, k, v, Dense(((j <= i) | (j < 3)) & present), mask=mask)


def test_padding_is_never_revealed(check: Checker) -> None:
    q, k, v = qkv(1, 1, 5, 6, 8)
    present = torch.tensor([[True, False, True, True, False, True]])
    padding = tw.key_padding(present.to(check.device))
    i, j = positions(5, 6)
    check(q, k, v, Dense((j > i) & present), mask=~(padding & tw.causal()))
    check(q, k, v, Dense(present.expand(5, 6)), mask=padding | tw.prefix(6))
    check(q, k, v, Dense(present & (j < 2)), mask=(padding | tw.causal()) & tw.prefix(2))
    check(q, k, v, Dense(present & (j <= i)), mask=~~(padding & tw.causal()))


# ---- dropout


@pytest.mark.parametrize("h_offset", [0, 5])
def test_dropout_bits_are_a_function_of_seed_and_position(check: Checker, h_offset: int) -> None:
    q, k, v = qkv(2, 2, 5, 9, 8, dtype=torch.float64)
    rows, columns = positions(5, 9, 3, 2)
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(2).view(1, 2, 1, 1) + h_offset
    seed = -(2**50) - 3
    kept = philox_kept(seed, 0.4, b, h, rows, columns)
    options = {"q_offset": 3, "k_offset": 2, "h_offset": h_offset}
    check(q, k, v, Dense(kept=kept, p=0.4), dropout=0.4, seed=torch.tensor(seed), **options)


def test_dropout_of_one_gives_zeros(check: Checker) -> None:
    q, k, v = qkv(1, 1, 4, 5, 8)
    got = check.run(q, k, v, dropout=1.0, seed=torch.tensor(0))
    assert bool((got.out == 0).all()) and bool(got.lse.isfinite().all())
    assert all(bool((grad == 0).all()) for grad in got.grads.values())


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_dropout_outside_zero_and_one_raises(check: Checker, p: float) -> None:
    q, k, v = (t.to(check.device) for t in qkv(1, 1, 2, 2, 4))
    with pytest.raises(ValueError):
        tw.attention(q, k, v, dropout=p, backend=check.backend)


def test_dropout_without_a_seed_follows_torchs_generator(check: Checker) -> None:
    q, k, v = (t.to(check.device) for t in qkv(1, 1, 16, 16, 4))
    runs = []
    for state in (5, 5, 6):
        torch.manual_seed(state)
        runs.append(tw.attention(q, k, v, dropout=0.5, backend=check.backend))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


# ---- sink


def test_sink_is_one_more_key_with_value_zero(check: Checker) -> None:
    q, k, v = qkv(1, (4, 2), 5, 6, 8)
    sink = randn(4)
    dense = {"make": lambda s: Dense(causal_keep(5, 6), lambda x: 1.5 * torch.tanh(x / 1.5), sink=s)}
    got = check(
        q,
        k,
        v,
        leaves=(sink,),
        features=lambda s: {"sink": s},
        mask=tw.causal(),
        scores=tw.softcap(1.5),
        **dense,
    )
    nothing, _ = check.out(q, k, v, sink=torch.full((4,), -INF), mask=tw.causal(), scores=tw.softcap(1.5))
    plain, _ = check.out(q, k, v, mask=tw.causal(), scores=tw.softcap(1.5))
    assert torch.allclose(nothing, plain, atol=1e-6) and not torch.allclose(got.out, plain, atol=1e-3)


def test_sink_is_merged_once_over_splits(check: Checker) -> None:
    q, k, v = qkv(1, 2, 3, 12, 8)
    sink = randn(2)
    whole = check.run(q, k, v, sink=sink)
    parts = [
        tw.attention_partial(
            q.to(check.device),
            *(t[:, :, n : n + 4].to(check.device) for t in (k, v)),
            q_offset=9,
            k_offset=n,
            backend=check.backend,
        )
        for n in (0, 4, 8)
    ]
    out = tw.merge(*parts).finalize(sink.to(check.device))
    assert torch.allclose(out.cpu(), whole.out, atol=2e-6)


# ---- dtype and dimension order


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_out_has_the_dtype_of_q(check: Checker, dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 1, 3, 4, 8, dtype=dtype)
    out, lse = check.out(q, k, v)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_mixed_dtypes_are_refused(check: Checker) -> None:
    q, k, v = (t.to(check.device) for t in qkv(1, 1, 3, 4, 8))
    with pytest.raises((TypeError, ValueError), match="float64"):
        tw.attention(q, k.double(), v, backend=check.backend)


def test_out_has_the_dimension_order_of_a_dense_q(check: Checker) -> None:
    q, k, v = (t.to(check.device) for t in qkv(2, 3, 5, 7, 8))
    swapped = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = tw.attention(swapped, k, v, backend=check.backend)
    assert out.transpose(1, 2).is_contiguous() and not out.is_contiguous()
    wide = torch.cat([swapped, swapped], -1)[..., :8]
    assert tw.attention(wide, k, v, backend=check.backend).is_contiguous()


def test_out_argument_receives_the_result(check: Checker) -> None:
    q, k, v = (t.to(check.device) for t in qkv(2, 3, 5, 7, 8))
    wanted = tw.attention(q, k, v, backend=check.backend)
    given = torch.full_like(wanted, math.nan)
    returned = tw.attention(q, k, v, out=given, backend=check.backend)
    assert returned is given and torch.equal(given, wanted)


# ---- refusal


def test_naive_is_never_taken_silently() -> None:
    q, k, v = qkv(1, 1, 3, 4, 8)
    plan = tw.explain(q, k, v)
    assert plan.backend != "naive"
    assert dict(plan.candidates)["naive"]


def test_unknown_backend_is_an_error() -> None:
    q, k, v = qkv(1, 1, 3, 4, 8)
    with pytest.raises(ValueError, match="blockwise"):
        tw.attention(q, k, v, backend="no_such_backend")


def test_auto_warns_once_when_it_is_slow() -> None:
    q, k, v = qkv(1, 1, 3, 4, 8)
    if tw.explain(q, k, v).backend != "blockwise":
        pytest.skip("a faster backend takes this problem, so there is nothing to warn of")
    before = tw.config.slow
    try:
        tw.config.slow = "raise"
        with pytest.raises(tw.UnsupportedProblem):
            tw.attention(q, k, v)
        tw.config.slow = "quiet"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tw.attention(q, k, v)
    finally:
        tw.config.slow = before


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)),  # heads do not divide
        ((2, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)),  # batch
        ((1, 2, 4, 8), (1, 2, 4, 6), (1, 2, 4, 6)),  # head_dim
        ((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)),  # seqlen_k
    ],
)
def test_sizes_that_do_not_fit_are_named(check: Checker, shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (torch.zeros(shape, device=check.device) for shape in shapes)
    with pytest.raises(ValueError) as raised:
        tw.attention(q, k, v, backend=check.backend)
    text = str(raised.value)
    assert all(str(tuple(t.shape)) in text for t in (q, k, v))


# ---- determinism and second order


def test_third_order_raises(check: Checker) -> None:
    q, k, v = (t.to(check.device).requires_grad_() for t in qkv(1, 1, 3, 4, 2, dtype=torch.float64))
    (first,) = torch.autograd.grad(
        tw.attention(q, k, v, backend=check.backend).square().sum(), q, create_graph=True
    )
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    assert bool(second.isfinite().all())
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.autograd.grad(second.square().sum(), q)


def test_forward_mode_agrees_with_finite_differences(check: Checker) -> None:
    tensors = [t.to(check.device).requires_grad_() for t in qkv(1, 2, 4, 5, 3, dtype=torch.float64)]

    def attend(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tw.attention(*inputs, mask=tw.causal(), return_lse=True, backend=check.backend)

    assert torch.autograd.gradcheck(attend, tensors, check_forward_ad=True)
