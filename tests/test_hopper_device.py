"""The Hopper backend on its card: against float64, bit by bit again, in graphs, and by the way of repeated calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sinks import infinite_sink

import tilewise as tw

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an H100 or H200",
    ),
]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def _drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert torch.equal(got.isfinite(), wanted.isfinite())
    error = (got.double() - wanted).nan_to_num().norm() / wanted.nan_to_num().norm()
    assert error < TOLERANCE[dtype]


SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
"""Head dimensions of queries and values; float16 has kernels of the same text, and its gradients are held at each."""


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [*((sizes, torch.bfloat16) for sizes in SIZES), *((sizes, torch.float16) for sizes in SIZES[3:6:2])],
)
def test_every_head_dimension(sizes, dtype):
    d, dv = sizes
    q, k, v = (
        _drawn(2, 6, 700, d, dtype=dtype),
        _drawn(2, 3, 900, d, dtype=dtype),
        _drawn(2, 3, 900, dv, dtype=dtype),
    )
    for mask in (
        None,
        tw.causal(),
        tw.causal() & tw.window(200, 0),
        tw.causal() & tw.custom(lambda q, k: q % 3 != k),
    ):
        out, lse = tw.attention(q, k, v, mask=mask, return_lse=True, backend="hopper")
        wanted, lse64 = tw.attention(
            q.double(), k.double(), v.double(), mask=mask, return_lse=True, backend="blockwise"
        )
        _close(out, wanted, dtype)
        assert torch.equal(lse.isfinite(), lse64.isfinite())
        assert (lse.double() - lse64).nan_to_num(0.0, 0.0, 0.0).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("rows", "keys"), ((64, 64), (65, 200), (191, 191), (193, 193), (385, 385), (1000, 1024), (777, 300))
)
def test_tiles_that_are_not_full(rows, keys):
    """With three warpgroups, what a tile lacks lies before the first row, in whole warpgroups."""
    q, k, v = _drawn(3, 40, rows, 64), _drawn(3, 40, keys, 64), _drawn(3, 40, keys, 64)
    v[:, :, keys - 2] = float("nan")
    for mask in (tw.causal(), tw.window(70, 20), tw.causal() & tw.custom(lambda q, k: (q - k) % 4 < 2)):
        out, lse = tw.attention(q, k, v, mask=mask, return_lse=True, backend="hopper")
        double = (t.double() for t in (q, k, v))
        wanted, lse64 = tw.attention(*double, mask=mask, return_lse=True, backend="blockwise")
        _close(out, wanted, torch.bfloat16)
        assert torch.equal(lse.isfinite(), lse64.isfinite())
        assert (lse.double() - lse64).nan_to_num(0.0, 0.0, 0.0).abs().max() < 1e-3


@pytest.mark.parametrize("divisor", (1, 2, 3, 7, 12, 64, 100, 129, 1000, -1, -5))
def test_division_by_a_number_rounds_down(divisor):
    """Three formulas: of some numbers each as a mask, whose tiles are told apart, of the others as a head of one."""
    q, k, v = (_drawn(1, 3, 300, 64) for _ in range(3))
    formulas = (
        lambda q, k: (q - k) % divisor == 0,
        lambda q, k: (k - q) // divisor % 2 == 0,
        lambda q, k: (q // divisor == k // divisor) | (k % divisor == 1),
    )
    first, second, third = formulas
    by_head = tw.custom(
        lambda h, q, k: ((h == 0) & first(q, k)) | ((h == 1) & second(q, k)) | ((h == 2) & third(q, k))
    )
    for mask in map(tw.custom, formulas) if divisor in (7, 64, -5) else (by_head,):
        out = tw.attention(q, k, v, mask=mask, backend="hopper")
        wanted = tw.attention(q.double(), k.double(), v.double(), mask=mask, backend="blockwise")
        _close(out, wanted, torch.bfloat16)


@pytest.mark.parametrize("rows", (1, 30, 100, 129))
def test_few_rows_and_many_keys(rows):
    q, k, v = _drawn(2, 16, rows, 128), _drawn(2, 2, 5000, 128), _drawn(2, 2, 5000, 128)
    sink = torch.randn(16, device="cuda")
    out = tw.attention(q, k, v, mask=tw.causal(), sink=sink, backend="hopper")
    double = (t.double() for t in (q, k, v))
    _close(
        out, tw.attention(*double, mask=tw.causal(), sink=sink.double(), backend="blockwise"), torch.bfloat16
    )


@pytest.mark.parametrize("size", (64, 128, 256))
@pytest.mark.parametrize("keys", (4, 5000))
def test_an_infinite_sink(keys, size):
    infinite_sink("hopper", torch.bfloat16, keys, "cuda", size)


def test_packed_sequences():
    edges = torch.tensor([0, 130, 130, 131, 388, 452], device="cuda", dtype=torch.int32)
    keys = torch.tensor([0, 200, 205, 505, 762, 762], device="cuda", dtype=torch.int32)
    q, k, v = _drawn(455, 8, 128), _drawn(765, 2, 128), _drawn(765, 2, 128)
    v[762:] = float("nan")
    out = tw.attention_varlen(q, k, v, edges, keys, mask=tw.causal(), backend="hopper")
    double = (t.double() for t in (q, k, v))
    _close(
        out, tw.attention_varlen(*double, edges, keys, mask=tw.causal(), backend="blockwise"), torch.bfloat16
    )


def test_what_a_mask_hides_changes_nothing():
    q, k, v = (_drawn(1, 2, 700, 128) for _ in range(3))
    ids = (torch.arange(700, device="cuda") // 100 % 2)[None]
    ids[:, 650:] = -1
    clean = tw.attention(q, k, v, mask=tw.document(ids), backend="hopper")
    k[:, :, 650:] = v[:, :, 650:] = float("nan")
    assert torch.allclose(clean, tw.attention(q, k, v, mask=tw.document(ids), backend="hopper"), atol=0.02)
    v[:, :, 5] = float("nan")
    seen = tw.attention(q, k, v, mask=tw.document(ids), backend="hopper").isnan().all(-1)
    assert torch.equal(seen, (ids == 0)[:, None].expand(1, 2, 700))


@pytest.mark.parametrize("mask", (None, tw.causal()), ids=str)
def test_repeats_bit_by_bit_on_any_stream_and_in_graphs(mask):
    q, k, v = (_drawn(2, 4, 1000, 128) for _ in range(3))
    first = tw.attention(q, k, v, mask=mask, backend="hopper")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        others = [tw.attention(q, k, v, mask=mask, backend="hopper") for _ in range(200)]
    torch.cuda.synchronize()
    assert all(torch.equal(first, other) for other in others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(q, k, v, mask=mask, backend="hopper")
    q.copy_(_drawn(2, 4, 1000, 128))
    graph.replay()
    assert torch.equal(out, tw.attention(q, k, v, mask=mask, backend="hopper"))


@pytest.mark.parametrize("d", (64, 96, 128, 256))
@pytest.mark.parametrize("mask", (None, tw.causal()), ids=("full", "causal"))
def test_programs_that_do_many_tiles_a_thousand_times(d, mask):
    """More tiles than multiprocessors: what a program carries from one to the next, and races between them."""
    q, k, v = (_drawn(4, 16, 700, d) for _ in range(3))
    first = tw.attention(q, k, v, mask=mask, backend="hopper")
    double = (t.double() for t in (q, k, v))
    _close(first, tw.attention(*double, mask=mask, backend="blockwise"), torch.bfloat16)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differ += (tw.attention(q, k, v, mask=mask, backend="hopper") != first).sum()
    assert int(differ) == 0


def test_processes_take_turns_on_the_device():
    """What a kernel holds is put away when another process's turn comes: a draw was lost where a barrier's room was
    used for something else, and with it a tile of the result, in two of a hundred calls."""
    command = [sys.executable, str(Path(__file__).with_name("hopper_worker.py"))]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=300)[0] for process in running]
    assert not any(process.returncode for process in running), said


def test_many_tiles_that_meet_something_hidden():
    q, k, v = (_drawn(4, 16, 700, 128) for _ in range(3))
    clean = tw.attention(q, k, v, mask=tw.causal(), backend="hopper")
    v[:, :, -2:] = float("nan")
    out = tw.attention(q, k, v, mask=tw.causal(), backend="hopper")
    assert torch.allclose(out[:, :, :-2], clean[:, :, :-2], atol=0.02)
    assert out[:, :, -1].isnan().all()


def test_auto_takes_large_calls():
    q, k, v = (_drawn(4, 16, 2048, 128) for _ in range(3))
    assert tw.explain(q, k, v, mask=tw.causal()).backend == "hopper"
    named = tw.attention(q, k, v, mask=tw.causal(), backend="hopper")
    assert torch.equal(tw.attention(q, k, v, mask=tw.causal()), named)
    assert tw.explain(q[:, :, :64], k[:, :, :64], v[:, :, :64]).backend == "triton"


def test_the_quick_way_gives_the_same_bits():
    from tilewise import quick

    q, k, v = (_drawn(1, 4, 333, 128) for _ in range(3))
    slow = tw.attention(q, k, v, mask=tw.causal(), scale=0.11, backend="hopper")
    assert any(
        type(found.run).__module__.endswith("hopper.prepared") for found in quick.ready.values() if found
    )
    assert torch.equal(slow, tw.attention(q, k, v, mask=tw.causal(), scale=0.11, backend="hopper"))
    other = [t + 1 for t in (q, k, v)]
    double = (t.double() for t in other)
    wanted = tw.attention(*double, mask=tw.causal(), scale=0.11, backend="blockwise")
    _close(tw.attention(*other, mask=tw.causal(), scale=0.11, backend="hopper"), wanted, torch.bfloat16)


@pytest.mark.parametrize(
    "sizes",
    ((2, 6, 3, 700, 900, 128), (2, 16, 2, 9, 3000, 128), (1, 4, 2, 130, 6000, 64), (1, 2, 2, 300, 300, 256)),
)
@pytest.mark.parametrize("what", (float("nan"), float("inf")))
def test_a_value_that_is_not_finite_reaches_who_sees_it_only(sizes, what):
    """Tiles that met it are done again: whole ones, those of grouped heads, those of split keys."""
    b, h, g, rows, keys, d = sizes
    q, k, v = _drawn(b, h, rows, d), _drawn(b, g, keys, d), _drawn(b, g, keys, d)
    v[:, :, keys - 5] = what
    out, lse = tw.attention(q, k, v, mask=tw.causal(), return_lse=True, backend="hopper")
    double = (t.double() for t in (q, k, v))
    wanted, lse64 = tw.attention(*double, mask=tw.causal(), return_lse=True, backend="blockwise")
    _close(out, wanted, torch.bfloat16)
    assert (lse.double() - lse64).nan_to_num(0.0, 0.0, 0.0).abs().max() < 1e-3


@pytest.mark.parametrize(("cap", "size"), ((5.0, 1.0), (30.0, 1.0), (50.0, 2.0**60), (500.0, 1.0)))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_scores_that_a_tanh_bounds(cap, size, d):
    """Weights without a maximum; with values of 2^60 their sums leave float32, and the tile is done again.

    Some rows have small scores and some great ones: a warp takes the tanh by a polynomial or by the unit.
    """
    q, k, v = _drawn(2, 4, 500, d) * 4, _drawn(2, 4, 400, d) * 4, _drawn(2, 4, 400, d) * size
    q[:, :, 140:300] *= 0.01
    q[:, :, 200:210] *= 300.0
    out, lse = tw.attention(
        q, k, v, mask=tw.causal(), scores=tw.softcap(cap), return_lse=True, backend="hopper"
    )
    double = (t.double() for t in (q, k, v))
    wanted, lse64 = tw.attention(
        *double, mask=tw.causal(), scores=tw.softcap(cap), return_lse=True, backend="blockwise"
    )
    _close(out, wanted, torch.bfloat16)
    assert torch.equal(lse.isfinite(), lse64.isfinite())
