"""Reported faults that need a GPU: sizes beyond 2^31, streams, graph capture. Skipped elsewhere."""

from __future__ import annotations

import pytest
import torch
from oracle import reference, tolerance

import tilewise as tw

pytestmark = pytest.mark.gpu


def test_B116_bias_of_two_to_the_31_elements(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 32, 8192, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    bias = torch.randn(1, 32, 8192, 8192, dtype=torch.bfloat16, device=device)
    out = tw.attention(q, k, v, scores=tw.bias(bias))
    rows = slice(8064, 8192)
    last = [t[:, 31:].double() for t in (q[:, :, rows], k, v)]
    s = last[0] @ last[1].mT / 8 + bias[:, 31:, rows].double()
    truth = (torch.softmax(s, -1) @ last[2]).cpu()
    ordinary = (torch.softmax(s.bfloat16().float(), -1).bfloat16() @ v[:, 31:]).cpu()
    tolerance("out", out[:, 31:, rows], truth, ordinary)


def test_B118_tensors_of_more_than_two_to_the_31_elements(device: torch.device) -> None:
    q, k, v = (torch.randn(20, 32, 26300, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
    assert q.numel() > 2**31
    mask = tw.window(64, 0)
    out = tw.attention(q, k, v, mask=mask)
    alone = tw.attention(q[19:], k[19:], v[19:], mask=mask)
    assert torch.equal(out[19:], alone)


def test_B120_work_goes_to_the_current_stream(device: torch.device) -> None:
    q, k, v = (torch.randn(2, 8, 512, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    wanted = tw.attention(q * 2, k, v) + 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            doubled = q * 2
            got = tw.attention(doubled, k, v) + 1
        stream.synchronize()
        assert torch.equal(got, wanted)


def test_B129_capture_in_a_graph(device: torch.device) -> None:
    q, k, v = (
        torch.randn(2, 4, 256, 64, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(3)
    )
    dout = torch.randn(2, 4, 256, 64, dtype=torch.bfloat16, device=device)

    def step() -> tuple[torch.Tensor, ...]:
        out = tw.attention(q, k, v, mask=tw.causal(), deterministic=True)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in (q, k, v):
            t.copy_(torch.randn_like(t))
    graph.replay()
    for got, wanted in zip(captured, step(), strict=True):
        assert torch.equal(got, wanted)


def test_B129_dropout_differs_from_replay_to_replay(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    tw.attention(q, k, v, dropout=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(q, k, v, dropout=0.1)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_B118_oracle_is_callable_on_a_gpu(device: torch.device) -> None:
    """The reference moves to the CPU by itself, so every other reported case can run on a GPU too."""
    q = torch.randn(1, 1, 4, 8, device=device)
    tolerance(
        "out", tw.attention(q, q, q), reference(q, q, q).out, reference(q, q, q, dtype=torch.float32).out
    )
