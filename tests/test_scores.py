"""Score terms against formulas written by hand; T5's buckets and ALiBi's slopes re-stated."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.errors import DTypeError, OptionError, ShapeError
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.custom import custom_score
from tilewise.spec.masks import Mask
from tilewise.spec.print_torch import Env, compile_torch
from tilewise.spec.scores import alibi, alibi_slopes, as_terms, bias, relative, softcap, t5_bucket

B, H, NQ, NK = 2, 4, 7, 9
Q_OFFSET, K_OFFSET = [2, -3], [0, -5]
SCORES = torch.randn(B, H, NQ, NK, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4


def randn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scored(*terms) -> torch.Tensor:
    """What the terms, in order, make of SCORES."""
    spec = AttentionSpec.parse(spec_text(Mask(), as_terms(terms), False, False))
    b = torch.arange(B).reshape(B, 1, 1, 1)
    h, i, j = torch.arange(H)[:, None, None], torch.arange(NQ)[:, None], torch.arange(NK)
    q, k = i + torch.tensor(Q_OFFSET)[b], j + torch.tensor(K_OFFSET)[b]
    named = dict(b=b, h=h, g=h // 2, i=i, j=j, q=q, k=k)
    variables = {**{name: t.to(torch.int32) for name, t in named.items()}, "s": SCORES}
    ranges = dict(b=(0, B), h=(0, H), i=(0, NQ), j=(0, NK))
    data = [sum((getattr(t.term, part) for t in terms), ()) for part in ("leaves", "ints", "floats")]
    (value,) = compile_torch((spec.score,))(Env(variables, ranges, *data, torch.float64))
    return value.expand(SCORES.shape)


def loop(rule) -> torch.Tensor:
    """The scores by Python loops: rule(s, b, h, i, j, q, k) of Python numbers."""
    result = torch.empty_like(SCORES)
    for b in range(B):
        for h in range(H):
            for i in range(NQ):
                for j in range(NK):
                    s = SCORES[b, h, i, j].item()
                    result[b, h, i, j] = rule(s, b, h, i, j, i + Q_OFFSET[b], j + K_OFFSET[b])
    return result


def check(term, rule):
    torch.testing.assert_close(scored(term), loop(rule), rtol=1e-12, atol=1e-12)


FULL, SLOPES, TABLE = randn(B, H, NQ, NK), randn(B, H, seed=2), randn(H, 7, seed=3)


@pytest.mark.parametrize(
    "shape", [(B, H, NQ, NK), (H, NQ, NK), (NQ, NK), (NK,), (), (B, 1, 1, NK), (1, H, 1, 1)]
)
def test_bias_broadcasts_from_the_right(shape):
    tensor = randn(*shape)
    full = tensor.expand(B, H, NQ, NK)
    check(bias(tensor), lambda s, b, h, i, j, q, k: s + full[b, h, i, j].item())


def test_alibi():
    check(alibi(SLOPES), lambda s, b, h, i, j, q, k: s - SLOPES[b, h].item() * abs(q - k))
    check(alibi(SLOPES[1]), lambda s, b, h, i, j, q, k: s - SLOPES[1, h].item() * abs(q - k))


@pytest.mark.parametrize("cap", [0.5, 3, 50.0])
def test_softcap(cap):
    check(softcap(cap), lambda s, b, h, i, j, q, k: cap * math.tanh(s / cap))


def test_relative():
    check(relative(TABLE), lambda s, b, h, i, j, q, k: s + TABLE[h, min(max(k - q, -3), 3) + 3].item())
    check(relative(TABLE[:1]), lambda s, b, h, i, j, q, k: s + TABLE[0, min(max(k - q, -3), 3) + 3].item())


def test_relative_with_buckets():
    bucket = torch.tensor([4, 0, 1, 6, 6])
    check(
        relative(TABLE, bucket),
        lambda s, b, h, i, j, q, k: s + TABLE[h, int(bucket[min(max(k - q, -2), 2) + 2])].item(),
    )


def test_custom():
    sharp = 0.5
    term = custom_score(lambda s, h, q, k, slope: s - sharp * slope[h] * abs(q - k), SLOPES[0])
    check(term, lambda s, b, h, i, j, q, k: s - 0.5 * SLOPES[0, h].item() * abs(q - k))
    check(custom_score(lambda s, g, i, j: s * g + i - j), lambda s, b, h, i, j, q, k: s * (h // 2) + i - j)


def test_terms_apply_in_the_order_written():
    cap, add = softcap(2.0), bias(FULL)
    capped = loop(lambda s, b, h, i, j, q, k: 2 * math.tanh(s / 2) + FULL[b, h, i, j].item())
    torch.testing.assert_close(scored(cap, add), capped, rtol=1e-12, atol=1e-12)
    added = loop(lambda s, b, h, i, j, q, k: 2 * math.tanh((s + FULL[b, h, i, j].item()) / 2))
    torch.testing.assert_close(scored(add, cap), added, rtol=1e-12, atol=1e-12)
    twice = loop(lambda s, b, h, i, j, q, k: s - 2 * SLOPES[b, h].item() * abs(q - k))
    torch.testing.assert_close(scored(alibi(SLOPES), alibi(SLOPES)), twice, rtol=1e-12, atol=1e-12)


# ---- ALiBi's slopes ----------------------------------------------------------------------------------------


def slopes_of_the_paper(n: int) -> list[float]:
    """The recursion of the ALiBi authors' code."""
    if n & (n - 1) == 0:
        start = 2.0 ** (-(2.0 ** -(math.log2(n) - 3)))
        return [start * start**m for m in range(n)]
    closest = 1 << (n.bit_length() - 1)
    return slopes_of_the_paper(closest) + slopes_of_the_paper(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16])
def test_alibi_slopes(num_heads):
    slopes = alibi_slopes(num_heads)
    assert slopes.shape == (num_heads,) and slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, torch.tensor(slopes_of_the_paper(num_heads)), rtol=1e-6, atol=0)


def test_alibi_slopes_by_heart():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert alibi_slopes(0).shape == (0,)
    many = alibi_slopes(12)
    assert torch.equal(many[:8], alibi_slopes(8)) and torch.equal(many[8:], alibi_slopes(16)[0::2][:4])


# ---- T5's buckets ------------------------------------------------------------------------------------------


def t5_bucket_of(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """T5's rule in words: near distances one bucket each, far ones by equal ratios, then the last bucket."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    near = num_buckets // 2
    if distance < near:
        return first + distance
    # Bucket near + n begins at near * (max_distance / near)^(n / (num_buckets - near)); exact in integers.
    n = 0
    far = num_buckets - near
    while n + 1 < far and distance**far * near ** (n + 1) >= near**far * max_distance ** (n + 1):
        n += 1
    return first + near + n


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (16, 64), (8, 20), (32, 100), (64, 256), (4, 8)]
)
def test_t5_bucket(num_buckets, max_distance, bidirectional):
    got = t5_bucket(num_buckets, max_distance, bidirectional)
    assert got.shape == (2 * max_distance + 1,) and got.dtype == torch.int32
    distances = range(-max_distance, max_distance + 1)
    want = [t5_bucket_of(d, num_buckets, max_distance, bidirectional) for d in distances]
    # Where a boundary is a whole number, T5's own fp32 logarithm decides; there the neighbour is right too.
    for d, a, b in zip(distances, got.tolist(), want, strict=True):
        assert (
            a == b
            or abs(a - b) == 1
            and t5_bucket_of(d - (d > 0) + (d < 0), num_buckets, max_distance, bidirectional) == a
        ), d


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 64), (8, 20), (32, 100)])
def test_t5_bucket_is_that_of_transformers(num_buckets, max_distance, bidirectional):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-max_distance - 50, max_distance + 51)
    want = modeling.T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    bucket = t5_bucket(num_buckets, max_distance, bidirectional)
    got = bucket[distance.clamp(-max_distance, max_distance) + max_distance]
    assert torch.equal(got, want.int())


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "kind", "word"),
    [
        (lambda: softcap(0), OptionError, "positive"),
        (lambda: softcap(-1.0), OptionError, "positive"),
        (lambda: softcap(math.nan), OptionError, "positive"),
        (lambda: softcap(math.inf), OptionError, "finite"),
        (lambda: bias(torch.ones(3, 3, dtype=torch.bool)), DTypeError, "mask=tensor"),
        (lambda: bias(torch.ones(3, 3, dtype=torch.int64)), DTypeError, "floating"),
        (lambda: bias(torch.ones(1, 1, 1, 3, 3)), ShapeError, "four"),
        (lambda: alibi(torch.ones(1, 1, 4)), ShapeError, "slopes"),
        (lambda: alibi(torch.tensor(1.0)), ShapeError, "slopes"),
        (lambda: alibi(torch.ones(4, dtype=torch.int64)), DTypeError, "floating"),
        (lambda: relative(torch.ones(4, 6)), ShapeError, "odd"),
        (lambda: relative(torch.ones(5)), ShapeError, "table"),
        (lambda: relative(torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)), ShapeError, "odd"),
        (lambda: relative(torch.ones(4, 6), torch.zeros(1, 5, dtype=torch.int64)), ShapeError, "bucket"),
        (lambda: relative(torch.ones(4, 6), torch.zeros(5)), DTypeError, "integers"),
        (lambda: relative(torch.ones(4, 5, dtype=torch.int64)), DTypeError, "floating"),
        (lambda: t5_bucket(2, 128), OptionError, "buckets"),
        (lambda: t5_bucket(32, 8), OptionError, "distances"),
        (lambda: as_terms(torch.ones(3)), DTypeError, "bias"),
        (lambda: as_terms([softcap(1.0), 3]), DTypeError, "int"),
    ],
)
def test_refusals(build, kind, word):
    with pytest.raises(kind, match=word):
        build()


def test_none_and_one_and_many_terms():
    term = softcap(2.0)
    assert as_terms(None) == () and as_terms(term) == (term,) and as_terms([term, term]) == (term, term)
