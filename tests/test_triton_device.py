"""What only a device shows: large offsets and grids, CUDA graphs, other streams, repeats bit by bit."""

from __future__ import annotations

import pytest
import torch
from sinks import infinite_sink

import tilewise as tw

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _ordinary(q, k, v, causal: bool = False) -> torch.Tensor:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q.float(), k.float(), v.float(), is_causal=causal)


@pytest.mark.parametrize("keys", (0, 4, 5000))
def test_an_infinite_sink(keys):
    infinite_sink("triton", torch.bfloat16, keys, "cuda")


def test_more_batch_entries_than_a_grid_dimension_holds():
    q, k, v = (_drawn(70_000, 1, 4, 16) for _ in range(3))
    out = tw.attention(q, k, v, backend="triton")
    assert (out.float() - _ordinary(q, k, v)).abs().max() < 0.03


def test_tensors_beyond_2_31_elements():
    k, v = (_drawn(1, 9, 1 << 22, 64) for _ in range(2))
    q = _drawn(1, 9, 8, 64)
    out = tw.attention(q, k, v, backend="triton")[:, 8:]
    assert (out.float() - _ordinary(q[:, 8:], k[:, 8:], v[:, 8:])).abs().max() < 0.01


def test_results_repeat_bit_by_bit_on_any_stream():
    q, k, v = (_drawn(2, 4, 1000, 64) for _ in range(3))
    first = tw.attention(q, k, v, mask=tw.causal(), backend="triton")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        others = [tw.attention(q, k, v, mask=tw.causal(), backend="triton") for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(first, other) for other in others)


def test_a_call_is_captured_and_replayed():
    q, k, v = (_drawn(2, 4, 300, 64) for _ in range(3))
    for _ in range(3):
        tw.attention(q, k, v, mask=tw.window(100, 0), backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(q, k, v, mask=tw.window(100, 0), backend="triton")
    q.copy_(_drawn(2, 4, 300, 64))
    graph.replay()
    assert torch.equal(out, tw.attention(q, k, v, mask=tw.window(100, 0), backend="triton"))


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_what_a_mask_hides_changes_no_bit(head_dim):
    q, k, v = (_drawn(1, 2, 700, head_dim) for _ in range(3))
    ids = (torch.arange(700, device="cuda") // 100 % 2)[None]
    ids[:, 650:] = -1
    clean = tw.attention(q, k, v, mask=tw.document(ids), backend="triton")
    k[:, :, 650:] = v[:, :, 650:] = float("nan")
    assert torch.allclose(clean, tw.attention(q, k, v, mask=tw.document(ids), backend="triton"), atol=0.02)
    v[:, :, 5] = float("nan")
    seen = tw.attention(q, k, v, mask=tw.document(ids), backend="triton").isnan().all(-1)
    assert torch.equal(seen, (ids == 0)[:, None].expand(1, 2, 700))


@pytest.mark.parametrize("backend", ("auto", "triton"))
def test_packed_tokens_of_no_sequence_at_all(backend):
    edges = torch.zeros(1, dtype=torch.int32, device="cuda")
    nobody = torch.zeros(0, dtype=torch.int64, device="cuda")
    q, k, v = (_drawn(300, h, 64).requires_grad_() for h in (2, 1, 1))
    for options in ({}, {"mask": tw.causal(), "q_offset": nobody, "k_offset": nobody}):
        out, lse = tw.attention_varlen(q, k, v, edges, edges, backend=backend, return_lse=True, **options)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert torch.isneginf(lse).all()
        assert not any(t.any() for t in (out, *gradients))
