"""What training on a GPU adds: CUDA graphs of whole steps, inductor, torch's registry of flash attentions, models."""

from __future__ import annotations

import pytest
import torch
from small_gpt import SmallGPT, batch, gradients, loss_of

import tilewise as tw
from tilewise.compat import sdpa, sdpa_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(**options):
    return SmallGPT(backend="auto", **options).cuda()


def captured(step):
    """A CUDA graph of step(), after three calls on a stream of its own, and what the captured call returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "autocast"])
def test_a_captured_training_step_trains_as_the_eager_one(dtype):
    """Forward, backward and optimiser in one graph; twelve replays over new tokens against twelve eager steps."""
    losses = {}
    for graphed in (False, True):
        model, static = on_gpu(), batch(4, 24).cuda()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}

        def step(model=model, static=static, optimiser=optimiser):
            optimiser.zero_grad(set_to_none=False)
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False):
                loss = loss_of(model, static)
            loss.backward()
            optimiser.step()
            return loss.detach()

        graph, result = captured(step) if graphed else (None, None)
        with torch.no_grad():  # the calls before the capture trained, too
            for name, p in model.named_parameters():
                p.copy_(start[name])
        found = []
        for n in range(12):
            static.copy_(torch.randint(23, (4, 24), generator=torch.Generator().manual_seed(n)))
            if graph is None:
                found.append(float(step()))
            else:
                graph.replay()
                found.append(float(result))
        losses[graphed] = torch.tensor(found)
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-4, atol=1e-5)


def test_dropout_of_a_captured_step_is_new_at_each_replay():
    model, tokens = on_gpu(layers=1, dropout=0.5), batch().cuda()
    graph, result = captured(lambda: model(tokens).detach())
    graph.replay()
    first = result.clone()
    graph.replay()
    assert not torch.equal(result, first)


def test_gradients_are_those_of_sdpa_on_the_gpu():
    tokens = batch(3, 40).cuda()
    ours, theirs = gradients(on_gpu(), tokens), gradients(on_gpu(sdpa=True), tokens)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["inductor", "cuda graphs"])
def test_compiled_by_inductor(mode):
    """Forward and backward of the whole model in one graph each; with `reduce-overhead` they are CUDA graphs."""
    torch._dynamo.reset()
    model, tokens = on_gpu(layers=1), batch(4, 32).cuda()
    compiled = torch.compile(model, fullgraph=True, mode=mode, dynamic=False)
    truth = gradients(model, tokens)
    for _ in range(3):
        found = gradients(compiled, tokens)
        for name in truth:
            torch.testing.assert_close(found[f"_orig_mod.{name}"], truth[name], rtol=1e-3, atol=1e-5)


REGISTRY = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch has no registry"
)


@pytest.fixture
def activated(monkeypatch):
    """Tilewise in the place of torch's flash attention; the number of calls that reached it."""
    calls = []
    plain = sdpa_kernel.attention
    monkeypatch.setattr(sdpa_kernel, "attention", lambda *a, **k: calls.append(1) or plain(*a, **k))
    sdpa.register("tilewise")
    torch.nn.attention.activate_flash_attention_impl("tilewise")
    yield calls
    torch.nn.attention.restore_flash_attention_impl()


def attend(x, do, **options):
    """out and the gradients of q, k and v by torch's SDPA, flash path."""
    x = [t.detach().clone().requires_grad_() for t in x]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*x, **options)
    return [out.detach(), *torch.autograd.grad(out, x, do)]


@REGISTRY
@pytest.mark.parametrize("causal", [False, True])
def test_torch_takes_the_registered_kernels(activated, causal):
    """Forward and backward reach Tilewise, and are as exact as torch's own kernels, which come back afterwards."""
    x = [torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    do = torch.randn_like(x[0])
    ours = attend(x, do, is_causal=causal)
    assert len(activated) == 1
    torch.nn.attention.restore_flash_attention_impl()
    theirs = attend(x, do, is_causal=causal)
    assert len(activated) == 1
    wide = [t.double().requires_grad_() for t in x]
    score = wide[0] @ wide[1].mT / 8
    if causal:
        score = score.masked_fill(torch.ones(200, 200, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(score, -1) @ wide[2]
    truth = [out.detach(), *torch.autograd.grad(out, wide, do.double())]
    for got, other, want in zip(ours, theirs, truth, strict=True):
        floor = torch.finfo(torch.bfloat16).eps * want.abs().max()
        assert (got - want).abs().max() <= 2 * (other - want).abs().max() + floor


@REGISTRY
def test_registered_dropout_is_replayed_by_the_backward(activated):
    x = [torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    do = torch.randn_like(x[0])
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(attend(x, do, dropout_p=0.4))
    assert len(activated) == 2 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # dv = (dropped P)^T do: with do = 1 its sum over keys is that of the kept weights, so out and dv agree on them.
    ones = torch.ones_like(do)
    torch.manual_seed(7)
    x[2] = torch.ones_like(x[2])
    out, _, _, dv = attend(x, ones, dropout_p=0.4)
    torch.testing.assert_close(dv.sum((-2, -1)), out.sum((-2, -1)), rtol=2e-2, atol=2.0)


@REGISTRY
def test_registered_kernels_in_a_cuda_graph(activated):
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    sdpa_of_torch = torch.nn.functional.scaled_dot_product_attention

    def step():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return sdpa_of_torch(q, k, v, is_causal=True)

    graph, result = captured(step)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(result, step())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert"])
def test_models_of_transformers_on_the_gpu(name):
    """float32 logits and gradients beside eager attention's; decoders write the same tokens with both caches."""
    pytest.importorskip("transformers", minversion="5.0")
    import hf_models

    import tilewise.compat.transformers as compat

    compat.register("tilewise")
    try:
        model = hf_models.build(name, dtype=torch.float32).cuda()
        given, weight = hf_models.inputs(name, "left")
        given = {key: t.cuda() for key, t in given.items()}
        ours, theirs = (hf_models.run(model, which, given, weight.cuda()) for which in ("tilewise", "eager"))
        for key, want in theirs.items():
            torch.testing.assert_close(
                ours[key], want, rtol=1e-3, atol=1e-4 * max(float(want.abs().max()), 1.0)
            )
        if name in hf_models.CAUSAL:
            for cache in (None, "static"):
                found = []
                for which in ("tilewise", "eager"):
                    model.set_attn_implementation(which)
                    options = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
                    found.append(model.generate(**given, **options))
                assert torch.equal(*found)
    finally:
        compat.unregister("tilewise")


def test_auto_takes_a_compiled_backend_here():
    plan = tw.explain(*[torch.empty(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16)] * 3)
    assert plan.backend not in ("blockwise", "naive", "cpu")
