"""generate() over Tilewise's paged cache: the tokens of transformers' own cache with ordinary attention."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

import transformers

import tilewise as tw
import tilewise.compat.transformers as compat

SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")
    compat.register("tilewise", backend="blockwise")
    yield
    compat.unregister("tilewise")


@pytest.fixture
def model():
    torch.manual_seed(3)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).double().eval()
    network.generation_config.pad_token_id = 0
    network.generation_config.eos_token_id = None
    return network


def generate(model, implementation, tokens, mask, cache=None, **more):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model.generate(
            tokens, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=24, **more
        )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_gives_the_same_tokens(model, padded, beams):
    tokens = torch.randint(1, 97, (2, 37))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :9] = 0
    cache = compat.paged_cache(model, max_length=64, batch_size=2 * beams, page_size=5, num_pages=100)
    options = {"num_beams": beams}
    want = generate(model, "sdpa", tokens, mask, **options)
    got = generate(model, "tilewise", tokens, mask, cache, **options)
    assert torch.equal(got, want)
    assert cache.get_seq_length() == 60 and cache.pages.length(cache.sequences[0]) == 60
    if beams > 1:  # beams share the pages of their prompt
        assert cache.pages.shared_prefix(cache.sequences[:beams]) >= 35
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.pages.num_free_pages == 100


def test_chunks_and_crop(model):
    """A prompt in chunks, then the last tokens taken back and given again, as assisted decoding does."""
    tokens = torch.randint(1, 97, (1, 30))
    model.set_attn_implementation("sdpa")
    want = model(tokens).logits
    model.set_attn_implementation("tilewise")
    cache = compat.paged_cache(model, max_length=40, page_size=4)
    with torch.no_grad():
        first = model(tokens[:, :20], past_key_values=cache).logits
        model(tokens[:, :6], past_key_values=cache)
        cache.crop(-6)
        second = model(tokens[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat((first, second), 1), want, atol=1e-8, rtol=1e-8)


def test_what_a_paged_cache_refuses(model):
    tokens = torch.randint(1, 97, (1, 8))
    model.set_attn_implementation("tilewise")
    cache = compat.paged_cache(model, max_length=12, page_size=4)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        with pytest.raises(tw.UnsupportedProblem, match="does not read a paged cache"):
            model(tokens, past_key_values=cache)
        model.set_attn_implementation("tilewise")
        with pytest.raises(tw.UnsupportedProblem, match="mask function"):
            model(
                tokens,
                attention_mask=torch.zeros(1, 1, 8, 8),
                past_key_values=compat.paged_cache(model, max_length=12),
            )
        model(tokens, past_key_values=cache)
        with pytest.raises(tw.ShapeError, match="1 sequences"):
            model(tokens.expand(2, 8), past_key_values=cache)
        with pytest.raises(tw.ShapeError, match="max_length is 12"):
            model(tokens, past_key_values=cache)
    gemma = transformers.Gemma3TextConfig(num_hidden_layers=6)
    with pytest.raises(tw.UnsupportedProblem, match="sliding_attention"):
        compat.paged_cache(gemma, max_length=16)
