"""Small, randomly initialised models of transformers, and the runs that the tests compare."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

VOCAB = 64
DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
WHISPER = {
    "vocab_size": VOCAB, "num_mel_bins": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "max_source_positions": 12, "max_target_positions": 40, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0,
    "decoder_start_token_id": 1,
}  # fmt: skip

# name: (model class, config class, config); W is a window that the tests' lengths exceed.
W = 5
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": W}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "qwen2": (
        "Qwen2ForCausalLM", "Qwen2Config",
        {**DECODER, "use_sliding_window": True, "sliding_window": W,
         "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        {**DECODER, "head_dim": 8, "sliding_window": W, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {**DECODER, "head_dim": 8, "sliding_window": W, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {**DECODER, "head_dim": 8, "sliding_window": W, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {**DECODER, "head_dim": 8, "attention_chunk_size": W, "num_local_experts": 1, "num_experts_per_tok": 1,
         "intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "modernbert": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        {**ENCODER, "local_attention": 2 * W, "global_attn_every_n_layers": 2, "bos_token_id": 1, "eos_token_id": 2,
         "cls_token_id": 1, "sep_token_id": 2},
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
         "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "image_size": 16, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.0},
    ),
}  # fmt: skip
CAUSAL = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "llama4")


def build(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model in eval mode; the same weights for the same name."""
    model_class, config_class, values = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, config_class)(**{**values, **changes})
    config._attn_implementation = "eager"
    if hasattr(config, "num_experts_per_tok"):
        config._experts_implementation = "eager"  # the grouped matrix product has no float64
    model = getattr(transformers, model_class)(config).to(dtype).eval()
    with torch.no_grad():  # what starts at zero or at one would hide mistakes
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs(
    name: str, padding: str = "none", length: int = 13
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch of two for the model, and the weights of its logits in a loss: 0 where the row is padding."""
    make = torch.Generator().manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=make)}, torch.ones(2, 1)
    ids = torch.randint(3, VOCAB, (2, length), generator=make)
    if name == "whisper":
        features = torch.randn(2, 8, 24, generator=make)
        return {"input_features": features, "decoder_input_ids": ids[:, :9]}, torch.ones(2, 9, 1)
    given = {"input_ids": ids}
    keep = torch.ones(2, length, dtype=torch.long)
    if padding != "none":
        hidden = slice(0, 4) if padding == "left" else slice(length - 4, length)
        keep[1, hidden] = 0
        given |= {"input_ids": ids * keep, "attention_mask": keep}
    if name == "t5":
        given["decoder_input_ids"] = torch.randint(3, VOCAB, (2, 7), generator=make)
        return given, torch.ones(2, 7, 1)
    return given, keep[..., None]


@contextmanager
def softmax_in_its_own_type():
    """Eager attention casts to float32 for its softmax; in float64 that would be its largest error."""
    original = torch.nn.functional.softmax

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        return original(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = original


def run(
    model: Any, implementation: str, given: dict[str, torch.Tensor], weight: torch.Tensor
) -> dict[str, Any]:
    """Logits (of rows that count) and the gradient of every parameter, with one attention implementation."""
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        pytest.skip(
            f"{type(model).__name__} has no attention interface in transformers {transformers.__version__}"
        )
    dtype = next(model.parameters()).dtype
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
    extra = {} if "pixel_values" in given else {"use_cache": False}
    if hasattr(model.config, "position_embedding_type") or "pixel_values" in given:
        extra = {}
    with softmax_in_its_own_type():
        logits = model(**given, **extra).logits
    make = torch.Generator().manual_seed(4)
    target = torch.randn(logits.shape, generator=make, dtype=torch.float64).to(logits)
    weight = weight.to(logits)
    model.zero_grad()
    (logits * target * weight).sum().backward()
    found = {"out": (logits * weight).detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"d {name}"] = parameter.grad.clone()
    return found
