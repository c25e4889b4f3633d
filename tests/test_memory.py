"""Memory grows linearly with N on the tiled path: forward, backward, forward mode and second order."""

import importlib.util
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise.cli.memory import count_peak

_spec = importlib.util.spec_from_file_location(
    "bench_memory", Path(__file__).parents[1] / "benchmarks" / "memory.py"
)
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)

LENGTHS = (1024, 1536, 2048)
TENSOR = 4 * bench.HEADS * bench.HEAD_DIM
"""Bytes of one token of q."""


def assert_linear(extra: list[int], per_token: int) -> None:
    """No more than `per_token` bytes per token, where the score matrix would add 4 * HEADS * N per token."""
    points = list(zip(LENGTHS, extra, strict=True))
    for (n1, e1), (n2, e2) in zip(points, points[1:], strict=False):
        assert e2 - e1 <= per_token * (n2 - n1), (extra, per_token)
    assert per_token < 4 * bench.HEADS * LENGTHS[-1]


@pytest.mark.parametrize("name", bench.FEATURES)
def test_forward_and_backward(name):
    measured = [bench.measure(name, n, "blockwise") for n in LENGTHS]
    assert_linear([m["forward"].extra for m in measured], TENSOR)
    assert_linear([m["backward"].extra for m in measured], 4 * TENSOR)


@pytest.mark.parametrize("name", bench.FEATURES)
def test_forward_and_backward_compiled_for_the_processor(name):
    pytest.importorskip("numba")
    measured = [bench.measure(name, n, "cpu") for n in (*LENGTHS, 4096)]
    assert_linear([m["forward"].extra for m in measured[:3]], TENSOR)
    # The keys of few heads are split into at most 16 tasks, each with a dq of its own in float32.
    copies = 16 // bench.HEADS
    for n, m in zip((*LENGTHS, 4096), measured, strict=True):
        assert m["backward"].extra <= copies * TENSOR * n + 2**20 + 64 * n


def test_the_oracle_is_quadratic_and_the_measurement_sees_it():
    extra = [bench.measure("plain", n, "naive")["forward"].extra for n in LENGTHS[:2]]
    assert extra[1] > 2.2 * extra[0]


@pytest.mark.parametrize("backend", ["blockwise", "cpu"])
def test_the_plan_states_what_is_used(backend):
    if backend == "cpu":
        pytest.importorskip("numba")
    for name in bench.FEATURES:
        if name == "terms" and backend == "cpu":
            continue  # gradients of leaves add a sum per task, and a plan does not know their sizes
        leaves, options = bench.problem(name, 1024, "cpu")
        measured = bench.measure(name, 1024, backend)
        plan = tw.explain(*(x.detach() for x in leaves[:3]), backward=True, backend=backend, **options)
        assert max(m.extra for m in measured.values()) <= plan.workspace_bytes


def test_second_order():
    forward_mode, double = [], []
    for n in LENGTHS:
        (q, k, v), options = bench.problem("causal", n, "cpu", grad=False)
        dot = torch.ones_like(q)

        def run(q, k=k, v=v, options=options):
            return tw.attention(q, k, v, backend="blockwise", **options)

        forward_mode.append(count_peak(lambda q=q, run=run, dot=dot: torch.func.jvp(run, (q,), (dot,))).extra)
        q.requires_grad_()
        out = run(q)
        do = torch.ones_like(out).requires_grad_()
        first = torch.autograd.grad(out, q, do, create_graph=True)[0]

        def twice(first=first, q=q, do=do, dot=dot):
            return torch.autograd.grad(first, (q, do), dot, retain_graph=True)

        double.append(count_peak(twice).extra)
    assert_linear(forward_mode, 6 * TENSOR)
    assert_linear(double, 10 * TENSOR)
