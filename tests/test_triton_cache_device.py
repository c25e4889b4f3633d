"""Caches on a GPU: graphs whose sequences grow, bits, streams, wrong tables, float8, appending, a shared prefix."""

from __future__ import annotations

import pytest
import torch
from test_serving_paged import random_run

import tilewise as tw
from tilewise.serving import CacheView, attention_with_cache, rotate

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def _paged(lengths: torch.Tensor, pages: int = 64, size: int = 16, heads: int = 2, d: int = 64) -> CacheView:
    """A view of scattered pages; what no sequence uses is NaN."""
    batch, total = len(lengths), len(lengths) * pages + 5
    table = torch.randperm(total, device="cuda")[: batch * pages].reshape(batch, pages).to(torch.int32)
    k, v = (
        torch.full((total, heads, size, d), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    for b, length in enumerate(lengths.tolist()):
        for n in range(-(-length // size)):
            rows = min(size, length - n * size)
            k[table[b, n], :, :rows], v[table[b, n], :, :rows] = (_drawn(heads, rows, d) for _ in range(2))
    return CacheView(k, v, lengths, table)


def _truth(view: CacheView, q: torch.Tensor) -> torch.Tensor:
    wide = CacheView(view.k.double(), view.v.double(), view.lengths, view.block_table, view.leftpad)
    return attention_with_cache(q.double(), wide, mask=tw.causal(), backend="blockwise")


def test_a_step_is_captured_once_and_replayed_while_its_sequences_grow():
    lengths = _ints(3, 500, 40)
    view = _paged(lengths)
    q, new = torch.zeros(3, 8, 1, 64, device="cuda", dtype=torch.bfloat16), _drawn(3, 2, 1, 64)
    angles = torch.rand(1024, 32, device="cuda")

    def step() -> torch.Tensor:
        return attention_with_cache(
            q, view, new, new, rotary=(angles, angles), mask=tw.causal(), backend="triton"
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    for _ in range(20):
        before = lengths.clone()
        q.copy_(_drawn(3, 8, 1, 64))
        new.copy_(_drawn(3, 2, 1, 64))
        graph.replay()
        assert torch.equal(lengths, before + 1)
        turned = rotate(q.transpose(1, 2), angles, angles, before[:, None], False).transpose(1, 2)
        assert (out.double() - _truth(view, turned)).abs().max() < 0.03


def test_results_repeat_bit_by_bit_on_several_streams_at_once():
    view = _paged(_ints(1000, 17))
    q = _drawn(2, 8, 1, 64)
    first = attention_with_cache(q, view, backend="triton")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    others = []
    for n in range(60):
        with torch.cuda.stream(streams[n % 3]):
            others.append(attention_with_cache(q, view, backend="triton"))
    torch.cuda.synchronize()
    assert all(torch.equal(first, other) for other in others)


def test_a_sequence_has_its_bits_in_any_company():
    view = _paged(_ints(900, 33, 512, 1))
    q = _drawn(4, 8, 1, 64)
    together = attention_with_cache(q, view, backend="triton", batch_invariant=True)
    for b in range(4):
        alone = CacheView(
            view.k, view.v, view.lengths[b : b + 1].clone(), view.block_table[b : b + 1].clone()
        )
        assert torch.equal(
            attention_with_cache(q[b : b + 1], alone, backend="triton", batch_invariant=True)[0], together[b]
        )


@pytest.mark.parametrize("size", (16, 24, 64, 128))
def test_entries_outside_the_pool_are_hidden_and_lengths_clamped(size):
    view = _paged(_ints(10 * size, 10 * size), size=size)
    q = _drawn(2, 8, 1, 64)
    clean = attention_with_cache(q, view, backend="triton")
    view.block_table[1, 3], view.block_table[1, 5] = -1, 10**6
    found = attention_with_cache(q, view, backend="triton")
    assert torch.equal(found[0], clean[0]) and bool(found[1].isfinite().all())
    keep = torch.ones(64 * size, dtype=torch.bool, device="cuda")
    keep[3 * size : 4 * size] = keep[5 * size : 6 * size] = False
    wanted = attention_with_cache(q, _repaired(view), mask=tw.dense(keep[None, None, None]))
    assert (wanted[1].float() - found[1].float()).abs().max() < 0.02
    wild = CacheView(view.k, view.v, _ints(-5, 10**9), view.block_table)
    assert not attention_with_cache(q, wild, backend="triton")[0].any()


def _repaired(view: CacheView) -> CacheView:
    return CacheView(view.k, view.v, view.lengths, view.block_table.clamp(0, view.k.shape[0] - 1))


@pytest.mark.parametrize("far", (2**32, 2**34))
def test_pages_may_lie_farther_apart_than_32_bits_say(far):
    """far: elements between the pages, 8 and 32 GiB."""
    if torch.cuda.mem_get_info()[0] < 2 * far + 2**30:
        pytest.skip("needs more memory")
    room = torch.empty(far + 4 * 64 * 64, device="cuda", dtype=torch.bfloat16)
    k, v = (room.as_strided((2, 2, 64, 64), (far, 4096, 64, 1), at) for at in (0, 2 * 4096))
    near = [_drawn(2, 2, 64, 64) for _ in range(2)]
    for pool, drawn in zip((k, v), near, strict=True):
        pool.copy_(drawn)
    table, lengths, q = _ints(1, 0)[None], _ints(100), _drawn(1, 8, 1, 64)
    out = attention_with_cache(q, CacheView(k, v, lengths, table), backend="triton")
    assert torch.equal(out, attention_with_cache(q, CacheView(*near, lengths, table), backend="triton"))


def test_a_chunk_and_single_tokens_in_one_packed_call():
    lengths = _ints(700, 64, 1000)
    view = _paged(lengths)
    edges = _ints(0, 300, 301, 310)
    q = _drawn(310, 8, 64)
    out = attention_with_cache(q, view, cu_seqlens_q=edges, mask=tw.causal(), backend="triton")
    for b, (first, last) in enumerate(((0, 300), (300, 301), (301, 310))):
        own = CacheView(view.k, view.v, lengths[b : b + 1], view.block_table[b : b + 1])
        wanted = _truth(own, q[first:last].transpose(0, 1)[None])[0].transpose(0, 1)
        assert (out[first:last].double() - wanted).abs().max() < 0.03


def test_float8_stores_half_and_errs_by_its_own_rounding():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs float8")
    k, v = (torch.randn(2, 2, 640, 64, device="cuda") for _ in range(2))
    scale = torch.tensor([0.5, 2.0], device="cuda")
    stored = [(t / scale[:, None, None]).to(torch.float8_e4m3fn) for t in (k, v)]
    view = CacheView(*stored, _ints(640, 100), k_scale=scale, v_scale=scale)
    q = _drawn(2, 8, 1, 64)
    out = attention_with_cache(q, view, backend="triton")
    exact = CacheView(
        *(t.to(torch.bfloat16) * scale[:, None, None].to(torch.bfloat16) for t in stored), view.lengths
    )
    assert (out.double() - _truth(exact, q)).abs().max() < 0.03


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("interleaved", (False, True))
def test_appending_agrees_with_the_reference(dtype, interleaved):
    from tilewise.backends.protocol import Append
    from tilewise.backends.reference import append as reference
    from tilewise.backends.triton import launch_append

    lengths, table = _ints(0, 7, 60), torch.randperm(60, device="cuda")[:24].reshape(3, 8).to(torch.int32)
    table[1, 1] = 10**6
    k, v = (torch.randn(60, 2, 8, 32, device="cuda", dtype=dtype) for _ in range(2))
    new, q = _drawn(3, 2, 6, 32, dtype=dtype), _drawn(3, 8, 6, 32, dtype=dtype)
    cos, sin = (torch.randn(80, 8, device="cuda") for _ in range(2))
    found = []
    for function in (reference.append, launch_append.append):
        pools = k.clone(), v.clone()
        turned = function(Append(new, new, *pools, lengths, table, None, q, None, cos, sin, interleaved))
        found.append((*pools, turned))
    # The device's own operations contract products, so that the last bit may differ.
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype != torch.float32 else {"rtol": 1e-6, "atol": 1e-6}
    assert all(torch.allclose(a, b, **close) for a, b in zip(*found, strict=True))


def test_a_shared_prefix_gives_what_its_pages_give():
    lengths = _ints(256 + 7, 256 + 40, 256 + 1)
    view = _paged(lengths)
    for b in (1, 2):
        view.block_table[b, :16] = view.block_table[0, :16]
    q = _drawn(3, 8, 1, 64)
    sink = torch.randn(8, device="cuda")
    out = attention_with_cache(q, view, shared_prefix=256, sink=sink, backend="triton")
    wanted = attention_with_cache(q, view, sink=sink, backend="triton")
    assert (out.float() - wanted.float()).abs().max() < 0.02


@pytest.mark.parametrize("page_size", (3, 16))
def test_a_long_random_run_agrees_with_dictionaries(page_size):
    random_run(page_size, 300, "cuda")


def test_the_short_way_of_a_repeated_call_reads_what_changed():
    view = _paged(_ints(100, 900))
    q = _drawn(2, 8, 1, 64)
    for length in (100, 300, 900, 1):
        view.lengths[1] = length
        out = attention_with_cache(q, view, mask=tw.causal(), backend="triton")
        assert (out.double() - _truth(view, q)).abs().max() < 0.03


@pytest.mark.parametrize("turned", (False, True))
def test_autograd_is_told_of_every_append(turned):
    """The first append of a kind, those that are looked up, and those that follow their like."""
    view = _paged(_ints(3, 40), size=8)
    angles = torch.rand(1024, 32, device="cuda")
    options = {"rotary": (angles, angles)} if turned else {}
    for _ in range(5):
        q, new = _drawn(2, 8, 1, 64), _drawn(2, 2, 1, 64)
        leaf = _drawn(2, 8, 1, 64).requires_grad_()
        before = view.k._version, view.v._version
        read = attention_with_cache(leaf, view, backend="triton")
        attention_with_cache(q, view, new, new, mask=tw.causal(), backend="triton", **options)
        assert view.k._version > before[0] and view.v._version > before[1]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            read.sum().backward()


@pytest.mark.parametrize("exchange", ("data", "set_"))
def test_steps_follow_pools_and_tables_that_got_other_memory(exchange):
    """Memory in which rows lie otherwise, exchanged between steps that follow their like."""
    view = _paged(_ints(3, 500))
    for n in range(9):
        if n in (3, 6):
            for t in (view.k, view.v) if n == 3 else (view.k, view.block_table):
                other = t.transpose(0, 1).contiguous().transpose(0, 1)
                if t is view.block_table:
                    other = torch.nn.functional.pad(t, (0, 3))[:, :-3]
                if exchange == "data":
                    t.data = other
                else:
                    t.set_(other)
        q, new = _drawn(2, 8, 1, 64), _drawn(2, 2, 1, 64)
        at = view.lengths.tolist()
        out = attention_with_cache(q, view, new, new, mask=tw.causal(), backend="triton")
        assert view.lengths.tolist() == [at[0] + 1, at[1] + 1]
        for b, length in enumerate(at):
            page = view.block_table[b, length // 16]
            assert torch.equal(view.k[page, :, length % 16], new[b, :, 0])
        assert (out.double() - _truth(view, q)).abs().max() < 0.03
