"""Models of transformers with `attn_implementation="tilewise"`, held against their own eager attention."""

from __future__ import annotations

import pytest
import torch
from hf_models import CAUSAL, MODELS, VOCAB, build, inputs, run, softmax_in_its_own_type, transformers

import tilewise as tw
import tilewise.compat.transformers as compat
from tilewise.testing.budgets import compare

CASES = [(name, padding) for name in MODELS for padding in ("none", "left", "right")]
CASES = [
    case for case in CASES if case[1] == "none" or case[0] not in ("vit", "whisper")
]  # which take no mask


@pytest.fixture(autouse=True, scope="module")
def registered():
    compat.register("tilewise", backend="blockwise")
    yield
    compat.unregister("tilewise")


def hold(ours, theirs) -> None:
    """float64 against float64: the budget of the suite, for the logits and every parameter's gradient."""
    assert set(ours) == set(theirs)
    lines = [compare(name, ours[name], [theirs[name]], theirs[name]) for name in theirs]
    assert max(line.ratio for line in lines) <= 1, "\n".join(str(line) for line in lines if line.ratio > 1)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_logits_and_gradients(name, padding):
    model = build(name)
    given, weight = inputs(name, padding)
    hold(run(model, "tilewise", given, weight), run(model, "eager", given, weight))


def test_t5_reads_its_bias_from_the_table():
    """The same logits and gradients, the table's included, and no (N, N) bias in self-attention; generation, too."""
    model = build("t5")
    given, weight = inputs("t5", "left")
    truth = run(model, "eager", given, weight)
    assert compat.use_position_tables(model) == 2  # encoder and decoder
    hold(run(model, "tilewise", given, weight), truth)
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(13, 13)
    assert not isinstance(bias, torch.Tensor)
    given.pop("decoder_input_ids")
    ours, theirs = (generate(model, which, given, None) for which in ("tilewise", "eager"))
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-11)
    with pytest.raises(tw.UnsupportedProblem, match="relative_attention_bias"):
        compat.use_position_tables(build("llama"))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert"])
def test_float32_within_twice_and_three_times_the_error_of_eager(name):
    given, weight = inputs(name, "left")
    truth = run(build(name), "eager", given, weight)
    model = build(name).float()
    ordinary = [run(model, "eager", given, weight)]
    if name in ("llama", "bert"):
        ordinary.append(run(model, "sdpa", given, weight))
    ours = run(model, "tilewise", given, weight)
    lines = [compare(key, ours[key], [o[key] for o in ordinary], truth[key]) for key in truth]
    # A tensor of a few numbers can be exact by luck in one order of operations; over all of them the rule holds.
    assert sum(line.ratio > 1 for line in lines) <= len(lines) // 20, "\n".join(map(str, lines))
    assert max(line.ratio for line in lines) <= 2


def generate(model, implementation, given, cache):
    model.set_attn_implementation(implementation)
    with softmax_in_its_own_type():
        return model.generate(
            **given, max_new_tokens=9, min_new_tokens=9, do_sample=False, cache_implementation=cache,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", [*CAUSAL, "t5", "whisper"])
def test_generate_gives_equal_tokens(name, cache):
    """Nine tokens after 13, past the window of five, the shorter prompt padded on the left."""
    model = build(name)
    given, _ = inputs(name, "left")
    given.pop("decoder_input_ids", None)
    given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    ours, theirs = (generate(model, which, given, cache) for which in ("tilewise", "eager"))
    assert torch.equal(ours.sequences, theirs.sequences) and len(ours.logits) == 9
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4"])
def test_sequences_packed_by_position_ids(name):
    """Each sequence alone gives the same logits."""
    if name == "llama4" and not hasattr(transformers.masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("this transformers counts chunks through the whole row")
    model = build(name)
    model.set_attn_implementation("tilewise")
    ids = torch.randint(3, VOCAB, (1, 18))
    lengths = (7, 1, 10)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-11)
    if name == "llama":  # as a collator for flash attention describes them
        bounds = torch.tensor([0, 7, 8, 18], dtype=torch.int32)
        again = model(
            input_ids=ids, position_ids=positions, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, use_cache=False
        )
        assert torch.equal(again.logits, packed)


def test_masks_of_the_users_own():
    """4-D bool and float masks mean what they mean to eager attention."""
    model = build("llama")
    ids = torch.randint(3, VOCAB, (2, 9))
    allowed = (torch.rand(2, 1, 9, 9) < 0.6) | torch.eye(9, dtype=torch.bool)
    added = torch.where(allowed, 0.3 * torch.randn(2, 4, 9, 9).double(), torch.finfo(torch.float64).min)
    for mask, theirs in ((allowed, "sdpa"), (added, "eager")):
        found = {}
        for implementation in ("tilewise", theirs):
            model.set_attn_implementation(implementation)
            with softmax_in_its_own_type():
                found[implementation] = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(found["tilewise"], found[theirs], rtol=0, atol=1e-11)


def test_a_prompt_in_pieces_with_a_static_cache():
    model = build("gemma3")
    ids = torch.randint(3, VOCAB, (2, 14))
    model.set_attn_implementation("eager")
    with softmax_in_its_own_type():
        whole = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation("tilewise")
    from transformers import DynamicCache, StaticCache

    for cache in (StaticCache(config=model.config, max_cache_len=20), DynamicCache(config=model.config)):
        parts = [
            model(input_ids=ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 6), (6, 10), (10, 14))
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-11)


def test_dropout_follows_train_and_eval():
    model = build("llama", attention_dropout=0.5)
    model.set_attn_implementation("tilewise")
    ids = torch.randint(3, VOCAB, (2, 9))
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    torch.manual_seed(3)
    once = model(ids).logits
    torch.manual_seed(3)
    assert torch.equal(model(ids).logits, once)


def test_gradient_checkpointing():
    model = build("mistral").train()
    given, weight = inputs("mistral", "right")
    plain = run(model, "tilewise", given, weight)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again = run(model, "tilewise", given, weight)
        assert all(torch.equal(plain[key], again[key]) for key in plain)


def test_refusals_give_the_reason():
    call = compat.attention_function("blockwise")
    module = torch.nn.Module()
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8)
    for options, reason in (
        ({"output_attentions": True}, "weights are never built"),
        ({"block_table": torch.zeros(1, 1)}, "pages"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"sliding_window": 3, "is_causal": False}, "no agreed size"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "one packed row"),
        ({"attention_mask": torch.ones(1, 7)}, "where the queries"),
        ({"attention_mask": "causal"}, "cannot read"),
    ):
        with pytest.raises(tw.UnsupportedProblem, match=reason):
            call(module, q, k, k, **options)
    plan = compat.make_mask_function(__import__("transformers").masking_utils)(
        batch_size=1, q_length=3, kv_length=6, q_offset=3
    )
    with pytest.raises(tw.ShapeError, match="made for 6 keys"):
        call(module, q, k, k, plan)


def test_without_a_mask_the_module_decides():
    """None means causal from position 0 (also into a longer static cache), full for one query or an encoder."""
    call = compat.attention_function("blockwise")
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8)
    causal = tw.attention(q, k, k, mask=tw.causal(), q_offset=0, backend="blockwise").transpose(1, 2)
    full = tw.attention(q, k, k, backend="blockwise").transpose(1, 2)
    one = tw.attention(q[:, :, :1], k, k, backend="blockwise").transpose(1, 2)
    module = torch.nn.Module()
    assert torch.equal(call(module, q, k, k)[0], causal)
    assert torch.equal(call(module, q, k, k, is_causal=False)[0], full)
    assert torch.equal(call(module, q[:, :, :1], k, k)[0], one)
    module.is_causal = False
    assert torch.equal(call(module, q, k, k)[0], full)
    windowed = tw.attention(q, k, k, mask=tw.causal() & tw.window(1, 0), q_offset=0, backend="blockwise")
    assert torch.equal(call(module, q, k, k, is_causal=True, sliding_window=2)[0], windowed.transpose(1, 2))
