"""The orders in which tiles of keys add to dq where bits must repeat: which call has which, and that each is right."""

from __future__ import annotations

import pytest
import torch
from test_hopper_backward import _assembled, _call, builds, on_gpu  # noqa: F401

import tilewise as tw

pytest.importorskip("triton", reason="needs Triton")

CALLS = {
    "full-64": (64, {"heads": (2, 2)}, 1),
    "causal-64": (64, {"heads": (2, 2), "mask": tw.causal()}, 3),
    "causal-grouped-64": (64, {"mask": tw.causal()}, 2),
    "window-64": (64, {"heads": (2, 2), "mask": tw.causal() & tw.window(70, 0)}, 1),
    "window-grouped-64": (64, {"mask": tw.causal() & tw.window(70, 0)}, 1),
    "causal-packed-64": (64, {"heads": (2, 2), "mask": tw.causal(), "packed": True}, 1),
    "causal-128": (128, {"heads": (2, 2), "mask": tw.causal()}, 1),
    "causal-grouped-128": (128, {"mask": tw.causal()}, 2),
    "causal-softcap-64": (64, {"heads": (2, 2), "mask": tw.causal(), "scores": tw.softcap(20.0)}, 1),
}
"""Head dimension, call, and order; heads are grouped unless said."""


def test_kernels_and_plans_mean_the_same_orders() -> None:
    from tilewise.backends.hopper import backward_rings, backward_tiles

    for name in ("BY_HEADS", "SIDE_BY_SIDE", "FLIPPED"):
        assert getattr(backward_rings, name).value == getattr(backward_tiles, name)


@pytest.mark.parametrize("name", CALLS)
def test_each_order_compiles_without_waits(name: str, builds: list) -> None:  # noqa: F811
    from tilewise.backends.hopper.launch_backward import backward

    d, options, order = CALLS[name]
    assert backward(*_call(d, d, deterministic=True, **options)) is not None
    ((kernel, build),) = builds
    assert dict(build.constants)["ORDER"] == order
    said, _, text = _assembled(kernel, build)
    assert "C75" not in said
    assert "ld.acquire.gpu" in text and "st.release.gpu" in text


@pytest.mark.parametrize("rows", [0, 1, 1000, 4096, 16384, 1 << 20])
def test_some_heads_run_abreast_whatever_the_length(rows: int) -> None:
    from tilewise.backends.hopper.backward_tiles import abreast

    for masked, order in ((False, 1), (True, 1), (True, 2), (True, 3)):
        assert 1 <= abreast(rows, 64, masked, order) <= 64


# ---- on a GPU ------------------------------------------------------------------------------------------------


def _far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("n", "m"), [(1000, 1000), (1100, 700), (700, 1100), (130, 3000), (2100, 2100)])
@pytest.mark.parametrize("name", [n for n in CALLS if "packed" not in n])
def test_each_order_against_float64(name: str, n: int, m: int) -> None:
    """Heads enough for several sections, of which the last one is not flipped; lengths of queries and keys differ."""
    d, options, _ = CALLS[name]
    group = 1 if "heads" in options else 2
    torch.manual_seed(n + m)
    batch, heads = 10, 4
    shapes = ((heads, n), (heads // group, m), (heads // group, m), (heads, n))
    q, k, v, do = (torch.randn(batch, h, x, d, device="cuda", dtype=torch.bfloat16) for h, x in shapes)
    found = {}
    for backend, extra in (("hopper", {"deterministic": True}), ("blockwise", {})):
        kind = torch.bfloat16 if backend == "hopper" else torch.float64
        inputs = [t.to(kind).requires_grad_() for t in (q, k, v)]
        terms = {x: options[x] for x in ("mask", "scores") if x in options}
        out = tw.attention(*inputs, **terms, backend=backend, **extra)
        found[backend] = torch.autograd.grad(out, inputs, do.to(kind), retain_graph=backend == "hopper")
        if backend == "hopper":
            for _ in range(10):
                again = torch.autograd.grad(out, inputs, do, retain_graph=True)
                assert all(torch.equal(a, b) for a, b in zip(found[backend], again, strict=True))
    for one, wanted in zip(found["hopper"], found["blockwise"], strict=True):
        assert _far(one, wanted) < 6e-3
