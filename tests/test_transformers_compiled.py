"""Whole models of transformers under torch.compile: one graph, at most two more for new lengths, the same numbers.

Every model is compiled as it stands, both kinds of its layers among them, with fullgraph=True: a graph break raises.
"""

from __future__ import annotations

import pytest
import torch
from hf_models import CAUSAL, MODELS, VOCAB, build, inputs, transformers

import tilewise.compat.transformers as compat

LENGTHS = (13, 14, 17, 20, 9, 31, 32, 33, 8, 40)
PADDED = [(name, "none") for name in ("vit", "whisper")]  # which take no mask
PADDED += [
    (name, side) for name in MODELS if name not in ("vit", "whisper") for side in ("none", "left", "right")
]
QUICK = {("mistral", "right")}  # the others take ten seconds each


@pytest.fixture(autouse=True, scope="module")
def registered():
    compat.register("tilewise", backend="blockwise")
    yield
    compat.unregister("tilewise")


def prepare(name):
    """The model in float64, its experts as one product: in a loop they would depend on the data."""
    torch._dynamo.reset()
    model = build(name)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    model.set_attn_implementation("tilewise")
    if model.config._attn_implementation != "tilewise":
        pytest.skip(
            f"{type(model).__name__} has no attention interface in transformers {transformers.__version__}"
        )
    return model


def given_for(name, padding, length):
    """Inputs of a length; images and sounds have a fixed size, so there the batch and the written text are it."""
    given, weight = inputs(name, padding, length)
    if name == "vit":
        given, weight = {"pixel_values": torch.randn(length, 3, 16, 16)}, torch.ones(length, 1)
    if name == "whisper":
        ids = torch.randint(3, VOCAB, (2, length))
        given, weight = {**given, "decoder_input_ids": ids}, torch.ones(2, length, 1)
    given = {key: t.double() if t.is_floating_point() else t for key, t in given.items()}
    return given if name in ("vit", "bert", "modernbert") else {**given, "use_cache": False}, weight


def slow_but(quick, cases):
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "padding"), slow_but(QUICK, PADDED))
def test_no_graph_break_and_at_most_two_recompiles_over_ten_lengths(name, padding):
    from torch._dynamo.testing import CompileCounter

    model, counter = prepare(name), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for length in LENGTHS:
            given, weight = given_for(name, padding, length)
            difference = (compiled(**given).logits - model(**given).logits) * weight
            assert float(difference.abs().max()) < 1e-11
    assert counter.frame_count <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_forward_and_backward_give_the_same_gradients(name):
    """AOTAutograd's graphs of both directions, six lengths; the gradient of every parameter."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model, counter = prepare(name), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in LENGTHS[:6]:
        given, weight = given_for(name, "none" if name in ("vit", "whisper") else "left", length)
        found = []
        for which in (compiled, model):
            model.zero_grad()
            (which(**given).logits * weight).square().sum().backward()
            found.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        for key, want in found[1].items():
            torch.testing.assert_close(found[0][key], want, rtol=1e-9, atol=1e-11)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(("name",), slow_but({("llama",)}, [(name,) for name in CAUSAL]))
def test_compiled_decoding_with_a_static_cache(name):
    """One graph serves every step, a second may follow once a window is full: offsets are tensors."""
    from torch._dynamo.testing import CompileCounter
    from transformers import StaticCache

    model, counter = prepare(name), CompileCounter()
    ids = torch.randint(3, VOCAB, (2, 24))
    cache = StaticCache(config=model.config, max_cache_len=30)
    step = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        parts = [model(input_ids=ids[:, :6], past_key_values=cache).logits]
        parts += [step(input_ids=ids[:, n : n + 1], past_key_values=cache).logits for n in range(6, 24)]
    tolerance = 1e-5 if name == "llama4" else 1e-11  # parts of it are float32 whatever its dtype
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=tolerance)
    assert counter.frame_count <= 2
