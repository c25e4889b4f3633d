"""Masks and score terms of the Hopper forward on its card, against float64: folded, cut, and looked at before."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an H100 or H200",
    ),
]
N = 700
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def _ids(low: int = 0) -> torch.Tensor:
    """Documents of 90 rows whose numbers come again, and some of no document if low is negative."""
    return ((torch.arange(N, device="cuda") // 90) % 4 + low).int()[None]


def _alibi(heads: int) -> tw.ScoreTerm:
    return tw.alibi(tw.alibi_slopes(heads).cuda())


WIDE = 290
MASKS = {
    "none": lambda: None,
    "causal": tw.causal,
    "window": lambda: tw.causal() & tw.window(150, 0),
    "two sides": lambda: tw.window(40, 90),
    "from below": lambda: tw.window(150, None),
    "rows alone": lambda: tw.custom(lambda q: q % 5 != 2),
    "prefix of each": lambda: tw.causal() & tw.prefix(torch.tensor([200, 450], device="cuda")),
    "stripes": lambda: tw.causal() & tw.custom(lambda q, k: (q - k) % 4 < 2),
    "of twelve": lambda: tw.custom(lambda q, k: (k - q) % 12 < 5),
    "wide": lambda: tw.custom(lambda q, k: ((q - k) % WIDE < 40) & ((q + k) % WIDE >= 200) & (q % 9 != 4)),
    "wide gaps": lambda: tw.causal() & tw.custom(lambda q, k: ((k - q) % WIDE <= 270) & (k % WIDE > 13)),
    "rows": lambda: tw.causal() & tw.custom(lambda q: q % 5 != 2),
    "documents": lambda: tw.causal() & tw.document(_ids()),
    "no document": lambda: tw.document(_ids(-1)),
    "padding": lambda: tw.key_padding(torch.rand(2, N, device="cuda") < 0.7),
}
SCORES = {
    "none": lambda: (),
    "softcap": lambda: tw.softcap(5.0),
    "alibi": lambda: _alibi(4),
    "both": lambda: (tw.softcap(5.0), _alibi(4)),
    "bias of columns": lambda: (tw.bias(torch.randn(2, 1, 1, N, device="cuda")), _alibi(4)),
    "a user's": lambda: tw.custom_score(lambda s, q, k: 0.5 * s - 0.01 * abs(q - k) + 0.002 * (q + k)),
    "falling": lambda: tw.custom_score(lambda s, q: -1.5 * s + 0.1 * q),
}
PAIRS = [(m, "none") for m in MASKS] + [("causal", s) for s in SCORES if s != "none"]
PAIRS += [("none", "alibi"), ("none", "both"), ("two sides", "a user's"), ("documents", "softcap")]


def _check(mask, scores, d: int, dtype: torch.dtype) -> None:
    """out and lse within the tolerance of float64."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, N, d, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, 2, N, d, device="cuda", dtype=dtype) for _ in range(2))
    out, lse = tw.attention(q, k, v, mask=mask, scores=scores, return_lse=True, backend="hopper")
    double = (t.double() for t in (q, k, v))
    wanted, lse64 = tw.attention(*double, mask=mask, scores=scores, return_lse=True, backend="blockwise")
    assert torch.equal(out.isfinite(), wanted.isfinite())
    assert (out.double() - wanted).norm() / wanted.norm() < TOLERANCE[dtype]
    assert torch.equal(lse.isfinite(), lse64.isfinite())
    assert (lse.double() - lse64).nan_to_num(0.0, 0.0, 0.0).abs().max() < 5e-3


@pytest.mark.parametrize(("mask", "scores"), PAIRS, ids=lambda name: name)
def test_masks_and_terms(mask, scores):
    _check(MASKS[mask](), SCORES[scores](), 128, torch.bfloat16)


def test_a_number_that_divides_may_change():
    for size in (4, 8, 12, 300, 257, 200, 4):
        _check(tw.causal() & tw.custom(lambda q, k: (q - k) % size < size // 2), (), 128, torch.bfloat16)  # noqa: B023


@pytest.mark.parametrize("d", (64, 256))
@pytest.mark.parametrize(
    ("mask", "scores"), [("documents", "none"), ("two sides", "alibi"), ("causal", "softcap")]
)
def test_other_head_dimensions(mask, scores, d):
    _check(MASKS[mask](), SCORES[scores](), d, torch.float16)


def test_a_bias_far_down_a_long_sequence_is_exact():
    torch.manual_seed(0)
    q = torch.randn(1, 1, 64, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 200_000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scores = tw.alibi(torch.tensor([0.7], device="cuda"))
    out = tw.attention(q, k, v, mask=tw.causal(), scores=scores, backend="hopper")
    double = (t.double() for t in (q, k, v))
    wanted = tw.attention(*double, mask=tw.causal(), scores=scores, backend="blockwise")
    assert (out.double() - wanted).norm() / wanted.norm() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("used", (False, True))
def test_tokens_of_no_sequence_are_zero(used):
    edges = torch.tensor([5, 130, 130, 131, 388], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([100, 0, 1, 200], device="cuda", dtype=torch.int32) if used else None
    torch.empty(64 << 20, device="cuda").fill_(float("nan"))
    q, k, v = (torch.randn(400, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    given = {"seqused_q": lengths, "seqused_k": lengths} if used else {}
    out, lse = tw.attention_varlen(
        q, k, v, edges, edges, mask=tw.causal(), return_lse=True, backend="hopper", **given
    )
    double = (t.double() for t in (q, k, v))
    wanted, lse64 = tw.attention_varlen(
        *double, edges, edges, mask=tw.causal(), return_lse=True, backend="blockwise", **given
    )
    assert torch.equal(lse == -torch.inf, lse64 == -torch.inf)
    assert (out.double() - wanted).norm() / wanted.norm() < TOLERANCE[torch.bfloat16]
    assert (out[lse.isneginf().T] == 0).all()


def test_a_margin_leaves_multiprocessors_alone(monkeypatch):
    """The same bits from fewer programs, by the short way's kind of call, too."""
    q, k, v = (torch.randn(2, 16, N, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    whole = tw.attention(q, k, v, mask=tw.causal(), backend="hopper")
    monkeypatch.setattr(tw.config, "sm_margin", 100)
    for _ in range(3):
        assert torch.equal(whole, tw.attention(q, k, v, mask=tw.causal(), backend="hopper"))


@pytest.mark.parametrize("rows", (1, 2))
def test_sequences_of_few_rows_read_their_own_queries(rows):
    """Tiles of one block follow each other so fast that the next tile's queries are waited for by the copy engine."""
    edges = torch.arange(0, 300 * rows + 1, rows, device="cuda", dtype=torch.int32)
    torch.manual_seed(1)
    q, k, v = (torch.randn(300 * rows, h, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 4, 4))
    given = {"mask": tw.causal(), "return_lse": True}
    double = (t.double() for t in (q, k, v))
    _, wanted = tw.attention_varlen(*double, edges, edges, backend="blockwise", **given)
    for _ in range(30):
        _, lse = tw.attention_varlen(q, k, v, edges, edges, backend="hopper", **given)
        assert (lse.double() - wanted).abs().max() < 1e-4
