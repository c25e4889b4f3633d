"""Corners of the public calls: hidden values in second order, terms without s, default devices, vmap, refusals."""

from __future__ import annotations

import math

import pytest
import torch

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
