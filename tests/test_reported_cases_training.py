"""Reported faults around training: determinism, dropout, checkpointing, autocast, compile, fake tensors,
second order, imports.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oracle import Dense, causal_keep, philox_kept, positions, reference
from reported import Checker, cumulative, hold, qkv, randn, same
from torch.utils.checkpoint import checkpoint

import tilewise as tw


def test_B100_deterministic_gradients(check: Checker) -> None:
    q, k, v = qkv(2, 4, 512, 512, 64, dtype=torch.bfloat16)
    dout = randn(2, 4, 512, 64, dtype=torch.bfloat16)
    first = check.run(q, k, v, dout=dout, deterministic=True)
    for _ in range(9):
        same(first, check.run(q, k, v, dout=dout, deterministic=True))


@pytest.mark.parametrize(("dtype", "step"), [(torch.float64, 1e-6), (torch.float32, 1e-2)])
def test_B103_dropout_of_forward_and_backward_agree(check: Checker, dtype: torch.dtype, step: float) -> None:
    inputs = [t.to(check.device) for t in qkv(1, 2, 33, 47, 16, dtype=dtype)]
    weight = randn(1, 2, 33, 16, dtype=dtype).to(check.device)
    seed = torch.tensor(2**40 + 11, device=check.device)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        out = tw.attention(*tensors, dropout=0.3, seed=seed, backend=check.backend)
        return (out.double() * weight).sum()

    for t in inputs:
        t.requires_grad_()
    grads = torch.autograd.grad(loss(*inputs), inputs)
    with torch.no_grad():
        for n, grad in enumerate(grads):
            direction = grad / grad.norm()
            moved = [[*inputs[:n], inputs[n] + sign * step * direction, *inputs[n + 1 :]] for sign in (1, -1)]
            numeric = float(loss(*moved[0]) - loss(*moved[1])) / (2 * step)
            analytic = float((grad.double() * direction.double()).sum())
            assert abs(numeric - analytic) <= 1e-3 * abs(analytic)


def test_B103_dropout_drops_what_philox_says(check: Checker) -> None:
    q, k, v = qkv(1, 2, 33, 47, 16, dtype=torch.float64)
    rows, columns = positions(33, 47)
    seed = 2**40 + 11
    kept = philox_kept(
        seed, 0.3, torch.zeros(1, 1, 1, 1).long(), torch.arange(2).view(1, 2, 1, 1), rows, columns
    )
    check(q, k, v, Dense(kept=kept, p=0.3), dropout=0.3, seed=torch.tensor(seed))


def test_B105_no_dropout_outside_training(check: Checker) -> None:
    q, k, v = (t.to(check.device) for t in qkv(1, 2, 16, 16, 8))

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return tw.attention(q, k, v, dropout=0.5 if self.training else 0.0, backend=check.backend)

    layer = Layer()
    plain = tw.attention(q, k, v, backend=check.backend)
    assert torch.equal(layer.eval()(q, k, v), plain)
    assert not torch.equal(layer.train()(q, k, v), plain)


@pytest.mark.parametrize("packed", [False, True])
def test_B107_activation_checkpointing(check: Checker, packed: bool) -> None:
    cu = cumulative([5, 8]).to(check.device)
    shape = (13, 2, 8) if packed else (1, 2, 13, 8)
    tensors = [randn(*shape).to(check.device).requires_grad_() for _ in range(3)]
    dout = randn(*shape).to(check.device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if packed:
            return tw.attention_varlen(q, k, v, cu, mask=tw.causal(), backend=check.backend)
        return tw.attention(q, k, v, mask=tw.causal(), backend=check.backend)

    plain = torch.autograd.grad(attend(*tensors), tensors, dout)
    again = torch.autograd.grad(checkpoint(attend, *tensors, use_reentrant=False), tensors, dout)
    for first, second in zip(plain, again, strict=True):
        assert torch.equal(first, second)


def test_B108_autocast_with_mixed_inputs(check: Checker) -> None:
    q, k, v = qkv(2, 2, 33, 33, 32)
    v = v.bfloat16()
    dout = randn(2, 2, 33, 32, dtype=torch.bfloat16)
    own = [t.to(check.device).requires_grad_() for t in (q, k, v)]
    with torch.autocast(check.device.type, dtype=torch.bfloat16):
        out, lse = tw.attention(*own, return_lse=True, backend=check.backend)
    grads = torch.autograd.grad(out, own, dout.to(check.device))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, torch.bfloat16]
    rounded = [t.bfloat16() for t in (q, k, v)]
    truth = reference(*rounded, dout=dout)
    ordinary = reference(*rounded, dout=dout, dtype=torch.bfloat16)
    got = check.run(*rounded, dout=dout)
    hold(got, truth, ordinary)
    assert torch.equal(out.detach().cpu(), got.out)
    for name, grad in zip("qkv", grads, strict=True):
        assert torch.equal(grad.cpu().bfloat16(), got.grads[name])


def test_B123_backward_twice_under_autocast(check: Checker) -> None:
    tensors = [t.to(check.device).requires_grad_() for t in qkv(2, 2, 49, 49, 32)]
    with torch.autocast(check.device.type, dtype=torch.bfloat16):
        out = tw.attention(*tensors, mask=tw.causal(), backend=check.backend)
    dout = randn(2, 2, 49, 32, dtype=torch.bfloat16).to(check.device)
    first = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    second = torch.autograd.grad(out, tensors, dout)
    for one, other in zip(first, second, strict=True):
        assert bool(one.isfinite().all()) and torch.equal(one, other)


def test_B124_compile_without_a_graph_break(check: Checker) -> None:
    tensors = [t.to(check.device).requires_grad_() for t in qkv(1, (4, 2), 20, 24, 16)]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1], device=check.device)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = tw.attention(
            q, k, v, mask=tw.causal(), scores=tw.alibi(slopes), return_lse=True, backend=check.backend
        )
        return out.square().sum() + lse.sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager, traced = loss(*tensors), compiled(*tensors)
    assert torch.allclose(eager, traced, rtol=2e-5)
    wanted = torch.autograd.grad(eager, tensors)
    for one, other in zip(wanted, torch.autograd.grad(traced, tensors), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_B126_fake_tensors_have_the_shape_and_strides_of_real_ones(check: Checker, packed: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if packed:
        q, k, v = randn(4, 13, 16).transpose(0, 1), randn(13, 2, 16), randn(13, 2, 24)
    else:
        q = randn(2, 11, 4, 16).transpose(1, 2)
        k, v = randn(2, 13, 2, 16).transpose(1, 2), randn(2, 2, 13, 24)
    cu = cumulative([6, 7])

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        q, k, v, cu = tensors
        for t in (q, k, v):
            t.requires_grad_()
        if packed:
            results = tw.attention_varlen(
                q, k, v, cu, mask=tw.causal(), return_lse=True, backend=check.backend
            )
        else:
            results = tw.attention(q, k, v, mask=tw.causal(), return_lse=True, backend=check.backend)
        grads = torch.autograd.grad(results, (q, k, v), [torch.ones_like(t) for t in results])
        return [*results, *grads]

    real = run(*(t.to(check.device) for t in (q, k, v, cu)))
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t.detach().to(check.device)) for t in (q, k, v, cu)]
    with mode:
        fake = run(*fakes)
    for one, other in zip(real, fake, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
        assert one.device == other.device


def test_B126_opcheck(check: Checker) -> None:
    """torch's own checks of the op, on the arguments that a compiled call gives it: transposed, grouped, a
    leaf, lse.
    """
    calls = []

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if "tilewise" in str(target):
                calls.append((target, args))
            return super().call_function(target, args, kwargs)

    def record(module, example_inputs):
        return Recorder(module).run

    q = randn(2, 11, 4, 16).transpose(1, 2).to(check.device)
    k, v = (randn(2, 13, 2, 16).transpose(1, 2).to(check.device) for _ in range(2))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1], device=check.device)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v, slopes = tensors
        return tw.attention(q, k, v, mask=tw.causal(), scores=tw.alibi(slopes), backend=check.backend)

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(attend, fullgraph=True, backend=record)(q, k, v, slopes)
    assert calls, "the compiled call reached no tilewise op"
    func, args = calls[0]

    def training(arg):
        if isinstance(arg, (list, tuple)):
            return [training(one) for one in arg]
        return (
            arg.detach().requires_grad_()
            if isinstance(arg, torch.Tensor) and arg.is_floating_point()
            else arg
        )

    torch.library.opcheck(func, tuple(training(arg) for arg in args))


def test_B130_second_order(check: Checker) -> None:
    tensors = [t.to(check.device).requires_grad_() for t in qkv(1, 2, 9, 9, 4, dtype=torch.float64)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, mask=tw.causal(), backend=check.backend)

    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors, fast_mode=True)


def test_B130_gradient_norm_penalty_in_fp32(check: Checker) -> None:
    q, k, v = qkv(1, 2, 9, 9, 4)

    def penalty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend) -> list[torch.Tensor]:
        (grad,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        return list(torch.autograd.grad(grad.norm(), (q, k, v)))

    def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s = (q @ k.mT / 2).masked_fill(~causal_keep(9, 9), -torch.inf)
        return torch.softmax(s, -1) @ v

    own = [t.to(check.device).requires_grad_() for t in (q, k, v)]
    got = penalty(*own, lambda q, k, v: tw.attention(q, k, v, mask=tw.causal(), backend=check.backend))
    truth = penalty(*(t.double().requires_grad_() for t in (q, k, v)), by_hand)
    for one, wanted in zip(got, truth, strict=True):
        assert float((one.cpu() - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))


def test_B140_return_type_is_fixed(check: Checker) -> None:
    q, k, v = (t.to(check.device) for t in qkv(1, 2, 5, 7, 8))
    out = tw.attention(q, k, v, backend=check.backend)
    assert isinstance(out, torch.Tensor)
    pair = tw.attention(q, k, v, return_lse=True, backend=check.backend)
    assert isinstance(pair, tuple) and len(pair) == 2
    assert torch.equal(pair[0], out) and pair[1].shape == (1, 2, 5)


def test_B140_import_is_light() -> None:
    """No CUDA is touched, no backend's library is loaded, and importing costs little beyond torch."""
    program = """
import sys, time, torch
start = time.perf_counter()
import tilewise
spent = time.perf_counter() - start
names = ("triton", "numba", "transformers", "llvmlite")
print(spent, torch.cuda.is_initialized(), [name for name in names if name in sys.modules])
"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    spent, cuda, heavy = made.stdout.strip().split(" ", 2)
    assert cuda == "False" and heavy == "[]"
    assert float(spent) < 2.0


def test_caches_work_without_numba() -> None:
    """What is compiled for processors is asked for, not taken for there."""
    program = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
import torch, tilewise as tw
tw.config.slow = "quiet"
q, k, v = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
wanted = tw.attention(q, k, v, mask=tw.causal())
pages = tw.PagedKVCache(8, 4, 2, 16)
sequences = [pages.new_sequence()]
for cache, options in ((tw.KVCache.allocate(1, 2, 16, 16), {}), (pages, {"sequences": sequences})):
    parts = [
        tw.attention_with_cache(
            q[:, :, n : n + 1], cache, k[:, :, n : n + 1], v[:, :, n : n + 1], mask=tw.causal(), **options
        )
        for n in range(9)
    ]
    print(bool(torch.allclose(torch.cat(parts, 2), wanted, atol=1e-5)))
"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert made.stdout.split() == ["True", "True"], made.stderr
