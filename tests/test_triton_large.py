"""The Triton backend on a GPU: long calls, sizes where 32 bits end, streams, graphs, threads, memory."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import tilewise as tw

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _gradients(q, k, v, do, backend: str = "triton", **options) -> tuple[torch.Tensor, ...]:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = tw.attention(*inputs, backend=backend, **options)
    return (out.detach(), *torch.autograd.grad(out, inputs, do))


def _naive_error(got, wanted, q, k, v, do, **options) -> list[float]:
    """Largest error over the budget of the reported cases: twice the plain evaluation's, and 8e-3 of the size."""
    plain = _gradients(q, k, v, do, "naive", allow_quadratic=True, **options)
    ratios = []
    for a, p, w in zip(got, plain, wanted, strict=True):
        size = max(1.0, float(w.abs().max()))
        limit = 2 * float((p.double() - w).abs().max()) + 8e-3 * size
        ratios.append(float((a.double() - w).abs().max()) / limit)
    return ratios


def _ids(n: int) -> torch.Tensor:
    return (torch.arange(n, device="cuda") // 300)[None]


MASKS = {
    "full": lambda n: None,
    "causal": lambda n: tw.causal(),
    "window": lambda n: tw.window(200, 0),
    "both sides": lambda n: tw.window(100, 300),
    "streaming": lambda n: tw.causal() & (tw.window(300, 0) | tw.prefix(16)),
    "documents": lambda n: tw.causal() & tw.document(_ids(n)),
    "strided": lambda n: tw.custom(lambda q, k: (q - k) % 500 < 120),
    "holes": lambda n: tw.causal() & tw.custom(lambda q, k: (q - k) % 4 < 2),
    "more holes": lambda n: tw.window(300, 99) & tw.custom(lambda q, k: (k - q) % 12 >= 6),
    "captured holes": lambda n: tw.causal() & tw.custom(lambda q, k, period=7: (q - k) % period < 3),
}


# ---- long calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, head_dim",
    [
        *((name, 128) for name in MASKS),
        ("causal", 64),
        ("streaming", 64),
        ("holes", 64),
        ("full", 96),
        ("causal", 256),
    ],
)
def test_gradients_of_long_calls_agree_with_float64(name, head_dim, monkeypatch):
    from tilewise.backends.triton import launch_backward

    monkeypatch.setattr(launch_backward, "TMA_WORK", 0.0)
    n, options = 1500, {"mask": MASKS[name](1500)}
    q, do = _drawn(2, 4, n, head_dim), _drawn(2, 4, n, head_dim)
    k, v = _drawn(2, 2, n, head_dim), _drawn(2, 2, n, head_dim)
    wide = [t.double() for t in (q, k, v, do)]
    wanted = _gradients(*wide, "naive", allow_quadratic=True, **options)
    got = _gradients(q, k, v, do, **options)
    assert max(_naive_error(got, wanted, q, k, v, do, **options)) <= 1


@pytest.mark.parametrize("name", ["full", "causal", "window", "streaming"])
def test_gradients_of_long_calls_repeat_bit_by_bit(name):
    q, k, v, do = (_drawn(2, 8, 4096, 128) for _ in range(4))
    first = _gradients(q, k, v, do, mask=MASKS[name](4096))
    for _ in range(30):
        again = _gradients(q, k, v, do, mask=MASKS[name](4096))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_packed_sequences_of_any_length_load_ahead(monkeypatch):
    from tilewise.backends.triton import launch_backward

    monkeypatch.setattr(launch_backward, "TMA_WORK", 0.0)
    lengths = [1, 700, 0, 33, 64, 512, 129, 5]
    edges = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    q, do = _drawn(sum(lengths), 4, 64), _drawn(sum(lengths), 4, 64)
    k, v = _drawn(sum(lengths), 2, 64), _drawn(sum(lengths), 2, 64)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = tw.attention_varlen(*inputs, edges, mask=tw.causal(), backend="triton")
    got = torch.autograd.grad(out, inputs, do)
    out = tw.attention_varlen(*inputs, edges, mask=tw.causal(), backend="blockwise")
    for a, b in zip(got, torch.autograd.grad(out, inputs, do), strict=True):
        assert (a.float() - b.float()).abs().max() < 0.03 * max(1.0, float(b.abs().max()))


def test_a_head_with_a_nan_is_done_again_and_no_other():
    q, k, v, do = (_drawn(1, 8, 4096, 128) for _ in range(4))
    clean = _gradients(q, k, v, do, mask=tw.causal())
    k[0, 3, 4000, 5] = float("nan")
    dirty = _gradients(q, k, v, do, mask=tw.causal())
    others = [h for h in range(8) if h != 3]
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[:, others], b[:, others])
    assert bool(dirty[1][0, 3, 4000:].isnan().all()) and bool(dirty[1][0, 3, :4000].isfinite().all())


# ---- where 32 bits end ---------------------------------------------------------------------------------------


def test_a_hundred_thousand_batch_entries_equal_their_parts():
    q, k, v, do = (_drawn(100_000, 1, 10, 16, dtype=torch.float32) for _ in range(4))
    whole = _gradients(q, k, v, do)
    for start in (0, 65_000, 99_000):
        part = _gradients(*(t[start : start + 1000] for t in (q, k, v, do)))
        assert all(torch.equal(a[start : start + 1000], b) for a, b in zip(whole, part, strict=True))


def test_a_bias_of_2_31_elements():
    q, k, v = (_drawn(1, 32, 8192, 64) for _ in range(3))
    bias = _drawn(1, 32, 8192, 8192)
    out = tw.attention(q, k, v, scores=(tw.bias(bias),), backend="triton")[:, 31]
    scores = q[:, 31].double() @ k[:, 31].double().transpose(1, 2) / 8 + bias[:, 31].double()
    wanted = scores.softmax(-1) @ v[:, 31].double()
    assert (out.double() - wanted).abs().max() < 8e-3


def test_tensors_beyond_2_31_elements_equal_their_last_entry_alone():
    q, k, v, do = (_drawn(20, 32, 26_300, 128) for _ in range(4))
    assert q.numel() > 2**31
    whole = _gradients(q, k, v, do, mask=tw.window(64, 0))
    alone = _gradients(*(t[19:] for t in (q, k, v, do)), mask=tw.window(64, 0))
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[19:], b)


def test_key_padding_and_wide_heads_need_no_matrix():
    q, (k, v) = _drawn(1, 8, 8192, 512), (_drawn(1, 4, 8192, 512) for _ in range(2))
    kept = (torch.arange(8192, device="cuda") < 8000)[None]
    tw.attention(q, k, v, mask=tw.key_padding(kept), backend="triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = tw.attention(q, k, v, mask=tw.key_padding(kept), backend="triton")
    assert torch.cuda.max_memory_allocated() - before <= 3 * 2 * (2 * out.numel() + 2 * k.numel())


# ---- streams, graphs, threads, growth ------------------------------------------------------------------------


def test_a_side_stream_waits_for_its_own_producer():
    source = _drawn(4096, 4096)
    q, k, v = (_drawn(1, 8, 1024, 64) for _ in range(3))
    stream = torch.cuda.Stream()
    wanted = None
    for _ in range(50):
        fresh = q.clone()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                source @ source
            fresh.mul_(2)
            got = tw.attention(fresh, k, v, mask=tw.causal(), backend="triton") * 1
        torch.cuda.current_stream().wait_stream(stream)
        if wanted is None:
            wanted = tw.attention(q * 2, k, v, mask=tw.causal(), backend="triton")
        assert torch.equal(got, wanted)
        fresh.record_stream(stream)


@pytest.mark.parametrize("n", [300, 4096])
def test_forward_and_backward_are_captured_and_replayed(n):
    q, k, v, do = (_drawn(2, 8, n, 64) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def step() -> tuple[torch.Tensor, ...]:
        out = tw.attention(*inputs, mask=tw.causal(), backend="triton")
        return (out, *torch.autograd.grad(out, inputs, do))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for t in (*inputs, do):
                t.copy_(_drawn(*t.shape))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_threads_with_their_own_streams_get_their_own_results():
    drawn = [[_drawn(1, 4, 500 + 100 * n, 64) for _ in range(4)] for n in range(4)]
    wanted = [_gradients(*tensors, mask=tw.causal()) for tensors in drawn]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got = _gradients(*drawn[n], mask=tw.causal())
                torch.cuda.current_stream().synchronize()
                if not all(torch.equal(a, b) for a, b in zip(got, wanted[n], strict=True)):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("n", [333, 4096])
def test_memory_does_not_grow(n):
    q, k, v, do = (_drawn(1, 8, n, 64) for _ in range(4))
    held = []
    for call in range(40):
        _gradients(q, k, v, do, mask=tw.causal(), scores=(tw.softcap(20.0),))
        if call in (5, 39):
            torch.cuda.synchronize()
            held.append(_held())
    assert held[1] == held[0]


def _held() -> int:
    """Bytes allocated once autograd's thread has dropped the graph it has just run, and with it the gradients: it does
    so after it has told the caller, who may be quicker."""
    found = []
    for _ in range(20):
        time.sleep(0.01)
        found.append(torch.cuda.memory_allocated())
    return min(found)


def _learned(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


LENGTHS = (16_384, 65_536)
FEATURES = {
    "plain": lambda n: {},
    "causal": lambda n: {"mask": tw.causal()},
    "window": lambda n: {"mask": tw.causal() & tw.window(512, 0)},
    "documents": lambda n: {"mask": tw.causal() & tw.document(_ids(n))},
    "key padding": lambda n: {"mask": tw.key_padding((torch.arange(n, device="cuda") < n - 100)[None])},
    "user's mask": lambda n: {"mask": tw.causal() & tw.custom(lambda q, k: (q - k) % 4 < 2)},
    "dropout": lambda n: {"dropout": 0.1},
    "softcap": lambda n: {"scores": (tw.softcap(20.0),)},
    "slopes": lambda n: {"scores": (tw.alibi(_learned(8)),)},
    "column bias": lambda n: {"scores": (tw.bias(_learned(1, 1, 1, n)),)},
    "relative": lambda n: {
        "mask": tw.causal() & tw.window(2000, 0),
        "scores": (tw.relative(_learned(8, 257)),),
    },
    "sink": lambda n: {"sink": _learned(8)},
}


@pytest.mark.parametrize("name", FEATURES)
def test_memory_of_a_feature_is_linear_in_length(name):
    peaks = []
    for n in LENGTHS:
        inputs, options = [_drawn(1, 8, n, 64).requires_grad_() for _ in range(3)], FEATURES[name](n)

        def step(inputs=inputs, options=options) -> None:
            out = tw.attention(*inputs, backend="triton", **options)
            out.backward(torch.ones_like(out))

        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    print(f"{name}: {peaks[0] / 2**20:.1f} and {peaks[1] / 2**20:.1f} MiB at {LENGTHS[0]} and {LENGTHS[1]}")
    # A byte a pair of a single head would be 4 GiB.
    assert peaks[1] < 1.1 * LENGTHS[1] / LENGTHS[0] * peaks[0] and peaks[1] < LENGTHS[1] ** 2 / 8
