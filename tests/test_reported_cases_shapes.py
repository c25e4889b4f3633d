"""Reported faults of sizes: empty tensors, tail tiles, head dims, grouped heads, huge batches, strides."""

from __future__ import annotations

import pytest
import torch
from oracle import Dense, causal_keep
from reported import Checker, qkv, randn, same

import tilewise as tw

HEAD_DIMS = (1, 8, 24, 40, 72, 80, 96, 112, 160, 192, 224, 256)


def test_B34_no_batch(check: Checker) -> None:
    q, k, v = qkv(0, 10, 37, 16, 64)
    got = check.run(q, k, v)
    assert got.out.shape == (0, 10, 37, 64) and got.out.dtype == q.dtype and got.lse.shape == (0, 10, 37)
    assert [grad.shape for grad in got.grads.values()] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("shape_q", "shape_k"),
    [
        ((2, 3, 0, 8), (2, 3, 7, 8)),
        ((2, 0, 5, 8), (2, 0, 7, 8)),
        ((0, 0, 2, 0), (0, 0, 13, 0)),
        ((2, 3, 2, 0), (2, 3, 5, 0)),
    ],
)
def test_B36_empty_dimensions(check: Checker, shape_q: tuple[int, ...], shape_k: tuple[int, ...]) -> None:
    q, k, v = randn(*shape_q), randn(*shape_k), randn(*shape_k)
    got = check.run(q, k, v)
    assert got.out.shape == shape_q and got.lse.shape == shape_q[:3]
    assert got.grads["q"].shape == shape_q
    for name in ("k", "v"):
        assert got.grads[name].shape == shape_k and bool((got.grads[name] == 0).all())


@pytest.mark.parametrize("shape", [(0, 0, 0), (0,) * 9, (0,), ()])
def test_B36_other_ranks_are_an_error(check: Checker, shape: tuple[int, ...]) -> None:
    t = torch.zeros(shape, device=check.device)
    with pytest.raises(ValueError):
        tw.attention(t, t, t, backend=check.backend)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B49_every_length(check: Checker, dtype: torch.dtype, causal: bool) -> None:
    for n in (*range(1, 71), 127, 129, 191, 192, 193, 255, 257):
        q, k, v = qkv(1, 2, n, n, 16, dtype=dtype)
        dense, mask = (Dense(causal_keep(n, n)), tw.causal()) if causal else (Dense(), None)
        try:
            check(q, k, v, dense, mask=mask)
        except AssertionError as wrong:
            raise AssertionError(f"N={n}: {wrong}") from wrong


def test_B51_all_channels_of_a_wide_head_count(check: Checker) -> None:
    q, k, v = qkv(1, 2, 128, 128, 128)
    first = check(q, k, v)
    q[..., 64:] += randn(1, 2, 128, 64)
    second = check(q, k, v)
    assert float((first.out - second.out).abs().max()) > 0.1


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_B53_head_dims(check: Checker, dim: int) -> None:
    check(*qkv(1, 2, 65, 65, dim))


@pytest.mark.parametrize(("sizes", "dim", "dim_v"), [((4, 4, 4, 4), 8, 16), ((1, 2, 65, 65), 192, 128)])
def test_B55_value_dim_differs(
    check: Checker, sizes: tuple[int, int, int, int], dim: int, dim_v: int
) -> None:
    got = check(*qkv(*sizes, dim, dim_v))
    assert got.out.shape[-1] == dim_v


@pytest.mark.parametrize(("heads", "nq", "nk", "dim"), [((9, 3), 5, 5, 64), ((12, 2), 1, 4096, 16)])
def test_B57_groups_that_are_not_a_power_of_two(
    check: Checker, heads: tuple[int, int], nq: int, nk: int, dim: int
) -> None:
    check(*qkv(1, heads, nq, nk, dim))


def test_B59_sixteen_queries_per_kv_head_in_decode(check: Checker) -> None:
    check(*qkv(1, (32, 2), 1, 1024, 128, dtype=torch.bfloat16))


def test_B62_transposed_storage(check: Checker) -> None:
    stored = [randn(1, 300, 4, 256, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    dout = randn(1, 4, 300, 256, dtype=torch.bfloat16)
    same(check.run(*stored, dout=dout), check.run(*(t.contiguous() for t in stored), dout=dout))


def test_B65_permuted_storage(check: Checker) -> None:
    views = [randn(84, 3, 3, 64).permute(0, 2, 1, 3) for _ in range(3)]
    dout = randn(84, 3, 3, 64)
    got = check.run(*views, dout=dout)
    same(got, check.run(*(t.contiguous() for t in views), dout=dout))
    check(*(t.contiguous() for t in views), dout=dout)


def test_B66_gradients_of_sliced_leaves(check: Checker) -> None:
    q, k, v = (t.to(check.device).requires_grad_() for t in qkv(1, 4, 512, 512, 64))
    tw.attention(q, k, v, backend=check.backend).sum().backward()
    q.grad = k.grad = v.grad = None
    out = tw.attention(q, k[:, :, :-128], v[:, :, :-128], backend=check.backend)
    dout = randn(1, 4, 512, 64).to(check.device)
    out.backward(dout)
    wanted = check(
        q.detach().cpu(), k.detach().cpu()[:, :, :-128], v.detach().cpu()[:, :, :-128], dout=dout.cpu()
    )
    assert torch.equal(q.grad.cpu(), wanted.grads["q"])
    for name, t in (("k", k), ("v", v)):
        assert torch.equal(t.grad[:, :, :-128].cpu(), wanted.grads[name])
        assert bool((t.grad[:, :, -128:] == 0).all())


def test_B68_dout_with_other_strides(check: Checker) -> None:
    q, k, v = qkv(2, 2, 49, 49, 32)
    dout = randn(2, 2, 49, 32)
    odd = dout.transpose(1, 2).contiguous().transpose(1, 2)
    assert odd.stride() != dout.stride()
    same(check.run(q, k, v, dout=dout), check.run(q, k, v, dout=odd))


def test_B112_a_hundred_thousand_sequences(check: Checker) -> None:
    q, k, v = qkv(100_000, 1, 10, 10, 16)
    out, lse = check.out(q, k, v)
    for start in range(0, 100_000, 1000):
        part = slice(start, start + 1000)
        own, own_lse = check.out(q[part], k[part], v[part])
        # Bitwise here; a matrix library may choose other code for another batch, and then rounding is allowed.
        torch.testing.assert_close(own, out[part], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(own_lse, lse[part], rtol=2e-6, atol=2e-6)


def test_B132_memory_stays_linear_with_wide_heads_and_padding(device: torch.device) -> None:
    """On the CPU by the resident peak of a fresh process; the route taken is named by explain."""
    import os
    import subprocess
    import sys

    made = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, env=dict(os.environ), timeout=500
    )
    assert made.returncode == 0, made.stderr
    extra, bytes_of_tensors, backend = made.stdout.split()
    assert backend != "naive"
    assert int(extra) <= 3 * int(bytes_of_tensors), f"{int(extra) >> 20} MiB beyond inputs and output"


MEASURE = """
import torch, tilewise as tw
tw.config.slow = "quiet"

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

def run(n):
    q = torch.randn(1, 8, n, 512).bfloat16()
    k, v = torch.randn(2, 1, 4, n, 512).bfloat16()
    mask = tw.key_padding(torch.rand(1, n) < 0.8)
    with torch.no_grad():
        before = kib("VmRSS")
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        out = tw.attention(q, k, v, mask=mask)
        extra = (kib("VmHWM") - before) * 1024
    size = sum(t.numel() * t.element_size() for t in (q, k, v, out))
    return extra, size, tw.explain(q, k, v, mask=mask).backend

run(64)
print(*run(4096))
"""
