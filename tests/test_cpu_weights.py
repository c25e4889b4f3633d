"""Weights of the CPU backend's forward pass beside float64, where scores are what float32 says exactly."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw

pytest.importorskip("numba", reason="the CPU backend needs Numba")

BASES = (0.0, -37.3, 1e3, -1e5, 2.0**20 - 20.0, 2.0**20 + 20.0, -3e6, 1e9, 1e30)
"""About what the scores of a head lie."""


def exact(bases: tuple[float, ...], keys: int, d: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of heads whose scores are numbers of k: their base less halves, the largest last."""
    q, k = torch.zeros(1, len(bases), 70, d), torch.zeros(1, len(bases), keys, d)
    q[..., 0] = d**0.5
    for head, base in enumerate(bases):
        k[0, head, :, 0] = (
            torch.tensor(base) - torch.randint(0, 40, (keys,)) / 2 - torch.linspace(30, 0, keys).floor()
        )
    return q, k


@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("keys", [1, 5, 300])
def test_any_size_of_scores(keys: int, sink: bool) -> None:
    """Maxima that rise from block to block, pivots of any size, and sinks of about that size."""
    q, k = exact(BASES, keys)
    v = torch.randn(1, len(BASES), keys, 16)
    logit = torch.tensor(BASES) if sink else None
    out, lse = tw.attention(q, k, v, sink=logit, backend="cpu", return_lse=True)
    scores = (q.double() @ k.double().transpose(-1, -2)) / 4
    extra = torch.tensor(BASES).double().view(1, -1, 1, 1).expand(1, len(BASES), 70, 1)
    whole = torch.cat([scores, extra], -1) if sink else scores
    weights = whole.softmax(-1)[..., :keys]
    torch.testing.assert_close(out.double(), weights @ v.double(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), whole.logsumexp(-1), atol=1e-6, rtol=2e-7)


@pytest.mark.parametrize("base", [50.0, 1e3, -1e5])
def test_whole_tiles_and_cut_ones_of_a_row_have_weights_of_one_size(base: float) -> None:
    """Under a causal mask a row meets both kinds, whose exponents are found in different ways."""
    n = 300
    q, k = torch.zeros(1, 1, n, 16), torch.zeros(1, 1, n, 16)
    q[..., 0], k[0, 0, :, 0] = 4.0, base - torch.randint(0, 8, (n,)) / 2
    v = torch.randn(1, 1, n, 16)
    out = tw.attention(q, k, v, mask=tw.causal(), backend="cpu")
    scores = (q.double() @ k.double().transpose(-1, -2)) / 4
    weights = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(out.double(), weights @ v.double(), atol=2e-6, rtol=2e-6)


def test_each_weight() -> None:
    """2^x of every size of a weight: values of one key each are the weights themselves."""
    keys = 4096
    q, k, v = torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, keys, 16), torch.zeros(1, 1, keys, 64)
    q[..., 0], k[0, 0, :, 0] = 4.0, torch.linspace(0, -80, keys)
    for first in range(0, keys, 64):
        v.zero_()
        v[0, 0, first : first + 64] = torch.eye(64)
        out = tw.attention(q, k, v, backend="cpu").double()[0, 0, 0]
        want = k[0, 0, :, 0].double().softmax(-1)[first : first + 64]
        # An exponent is rounded to float32.
        assert (
            (out - want).abs() <= want * (8e-7 - 1.2e-7 * k[0, 0, first : first + 64, 0].double()) + 1e-37
        ).all()
