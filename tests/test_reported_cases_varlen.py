"""Reported faults of packed sequences: empty ones, stated maxima, leaks between documents."""

from __future__ import annotations

import pytest
import torch
from oracle import Dense, causal_keep
from reported import Checker, cumulative, randn, same

import tilewise as tw


def causal(nq: int, nk: int) -> Dense:
    return Dense(causal_keep(nq, nk))


def test_B38_a_sequence_without_queries(check: Checker) -> None:
    q, k, v = randn(2, 9, 64), randn(8, 3, 64), randn(8, 3, 64)
    lengths = ([1, 0, 1], [3, 0, 5])
    got = check.packed(q, k, v, lengths, causal, mask=tw.causal(), max_seqlen_q=1, scale=1.0)
    assert got.out.shape == (2, 9, 64) and got.lse.shape == (9, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_B40_keys_without_queries_get_zero_gradient(check: Checker, is_causal: bool) -> None:
    q, k, v = randn(300, 4, 64), randn(300, 2, 64), randn(300, 2, 64)
    lengths = ([150, 0, 150], [100, 100, 100])
    each = causal if is_causal else (lambda nq, nk: Dense())
    got = check.packed(q, k, v, lengths, each, mask=tw.causal() if is_causal else None)
    for name in ("k", "v"):
        assert bool((got.grads[name][100:200] == 0).all())


def test_B43_the_stated_maximum_changes_nothing(check: Checker) -> None:
    q, k, v = randn(23, 2, 32), randn(23, 2, 32), randn(23, 2, 32)
    lengths = ([5, 17, 1], [5, 17, 1])
    dout = randn(23, 2, 32)
    first = check.packed(q, k, v, lengths, causal, dout, mask=tw.causal())
    for stated in (17, 64, 4096, torch.tensor(17), torch.tensor(64)):
        maxima = {"max_seqlen_q": stated, "max_seqlen_k": stated}
        same(first, check.packed(q, k, v, lengths, causal, dout, mask=tw.causal(), **maxima))


def test_B45_documents_do_not_see_each_other(check: Checker) -> None:
    lengths = [3, 6, 7]
    q, k, v, dout = (randn(16, 2, 16) for _ in range(4))
    packed = check.packed(q, k, v, (lengths, lengths), causal, dout, mask=tw.causal())
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        start += n
        own = [t[part].transpose(0, 1)[None] for t in (q, k, v, dout)]
        alone = check(*own[:3], causal(n, n), dout=own[3], mask=tw.causal())
        assert torch.allclose(packed.out[part], alone.out[0].transpose(0, 1), atol=2e-6)
        for name, grad in packed.grads.items():
            assert torch.allclose(grad[part], alone.grads[name][0].transpose(0, 1), atol=2e-5), name
    changed = [t.clone() for t in (q, k, v)]
    for t in changed:
        t[:3] = 5
    cu = cumulative(lengths)
    other = check.run(
        *changed, dout=dout, attend=tw.attention_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=tw.causal()
    )
    assert torch.equal(other.out[3:], packed.out[3:]) and torch.equal(other.lse[:, 3:], packed.lse[:, 3:])
    for name, grad in packed.grads.items():
        assert torch.equal(other.grads[name][3:], grad[3:]), name
