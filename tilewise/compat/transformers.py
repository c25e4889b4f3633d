"""Tilewise inside Hugging Face transformers: `attn_implementation="tilewise"`.

    import tilewise.compat.transformers as compat
    compat.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tilewise")

Two functions are registered under the name. transformers calls the mask function (`transformers_masks`) once per
forward pass and hands its result to every layer; each layer calls the attention function here. No (N_q, N_k) mask
is built; key and value heads are not repeated. What the call cannot express is refused with the reason.

Source: transformers 5.24, `modeling_utils.AttentionInterface`, `masking_utils.AttentionMaskInterface`; the meaning
of every argument is that of its eager attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.compat.transformers_cache import Held, held_by, paged_cache
from tilewise.compat.transformers_masks import BUILDERS, MaskPlan, make_mask_function, named_builder
from tilewise.compat.transformers_t5 import NAMES, PositionTable, use_position_tables
from tilewise.errors import OptionError, ShapeError, UnsupportedProblem, message
from tilewise.serving import attention_with_cache
from tilewise.spec.masks import Mask, causal, dense, document, key_padding, window
from tilewise.spec.scores import ScoreTerm, bias
from tilewise.spec.scores import softcap as softcap_term

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["attention_function", "paged_cache", "register", "unregister", "use_position_tables"]

# Arguments whose effect would be lost: (name, remedy).
_REFUSED = (
    ("block_table", "continuous batching reads pages: use another attn_implementation for it"),
    ("k_cache", "continuous batching reads pages: use another attn_implementation for it"),
    ("head_mask", "prune the heads, or use attn_implementation='eager'"),
    ("output_attentions", "the weights are never built: use attn_implementation='eager' to look at them"),
)


def register(name: str = "tilewise", *, backend: str = "auto") -> None:
    """Make Tilewise known to transformers as `attn_implementation=name`, attention and masks.

    Args:
        name: the key; registering it again replaces it.
        backend: the Tilewise backend that runs the calls, "auto" or a name.

    The builders of mask functions in `transformers.masking_utils` (`and_masks`, `sliding_window_overlay`, ...) are
    wrapped so that their results say what they are; what they compute, for every other implementation, is
    unchanged. `unregister` takes all of it back.

    Raises:
        ImportError: transformers is missing, or older than its mask interface (4.53).
        OptionError: the name is one of transformers' own.
    """
    from transformers import AttentionInterface, masking_utils

    taken = ("eager", "sdpa", "flex_attention")
    if name in taken or name.startswith(("flash_attention", "paged|")) or "/" in name:
        raise OptionError(f"{name!r} is a name that transformers gives a meaning of its own; choose another")
    for builder in BUILDERS:
        original = getattr(masking_utils, builder, None)
        if original is not None and not hasattr(original, "tilewise_original"):
            setattr(masking_utils, builder, named_builder(builder, original))
    NAMES.add(name)
    AttentionInterface.register(name, attention_function(backend))
    masking_utils.AttentionMaskInterface.register(name, make_mask_function(masking_utils))


def unregister(name: str = "tilewise") -> None:
    """Forget a registered name, and give transformers its own mask builders back.

    Models that still carry the name fail at their next call, by name.
    """
    from transformers import AttentionInterface, masking_utils

    NAMES.discard(name)
    for interface in (AttentionInterface, masking_utils.AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
    for builder in BUILDERS:
        original = getattr(getattr(masking_utils, builder, None), "tilewise_original", None)
        if original is not None:
            setattr(masking_utils, builder, original)


def attention_function(backend: str = "auto") -> Callable[..., tuple[Tensor, None]]:
    """The attention function that `register` registers, for code that calls transformers' interface by itself.

    It takes (module, query, key, value, attention_mask, **options) as transformers passes them: query (B, H, N_q, D),
    key (B, H_kv, N_k, D), value (B, H_kv, N_k, D_v); it gives (out, None), out (B, N_q, H, D_v) contiguous.

    Raises UnsupportedProblem for what it cannot express.
    """

    def tilewise_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        for refused, remedy in _REFUSED:
            given = options.get(refused)
            if given is not None and given is not False:
                raise UnsupportedProblem(
                    f"transformers passed {refused}, which this attention has not\n{remedy}"
                )
        held = held_by(key)
        if held is not None:
            return _cached(module, (query, key, value), attention_mask, options, held, backend), None
        query, key, value = _one_batch(query, key, value)
        mask, terms, q_offset, k_offset = _visibility(module, attention_mask, options, (query, key))
        cap = options.get("softcap")
        terms = ([] if cap is None else [softcap_term(cap)]) + terms
        position_bias = options.get("position_bias")
        if isinstance(position_bias, PositionTable):
            terms.append(position_bias.term)
        elif position_bias is not None:
            terms.append(bias(position_bias[..., : key.shape[2]]))
        out = attention(
            query, key, value, mask=mask, scores=terms, sink=options.get("s_aux"),
            dropout=options.get("dropout") or 0.0, scale=options.get("scaling"), q_offset=q_offset,
            k_offset=k_offset, deterministic=options.get("deterministic"), backend=backend,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return tilewise_attention


def _cached(
    module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], given: Any, options: dict[str, Any], held: Held, backend: str
) -> Tensor:  # fmt: skip
    """A layer's call over a paged cache: out (B, N_q, H, D_v), contiguous."""
    query, key, value = qkv
    q_offset = None
    if isinstance(given, MaskPlan):
        if given.seqlen_k != held.length:
            rule = f"the mask was made for {given.seqlen_k} keys and the layer has {held.length}"
            raise ShapeError(message(rule, {"query": query, "key": key}))
        mask, k_offset = given.mask, given.k_offset
        # The last query at the last key is where a cache has it by itself.
        q_offset = None if isinstance(given.q_offset, int) else given.q_offset
        if isinstance(given.q_offset, int) and given.q_offset - k_offset != held.length - query.shape[2]:
            q_offset = given.q_offset
    elif given is None:
        causally = options.get("is_causal")
        causally = getattr(module, "is_causal", True) if causally is None else causally
        mask, k_offset = (causal() if causally else Mask()), 0
    else:
        raise UnsupportedProblem(
            f"a paged cache takes masks of Tilewise's own mask function, not a {type(given).__name__}\n"
            "Give the padding mask (B, N) as attention_mask, or none."
        )
    if options.get("position_bias") is not None:
        raise UnsupportedProblem(
            "a paged cache has no position_bias\nLet transformers make the model's cache."
        )
    cap = options.get("softcap")
    out: Tensor = attention_with_cache(
        query, held.layer, key, value, sequences=held.sequences, mask=mask,
        scores=() if cap is None else softcap_term(cap), sink=options.get("s_aux"),
        dropout=options.get("dropout") or 0.0, scale=options.get("scaling"), q_offset=q_offset, k_offset=k_offset,
        backend=backend,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def _one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Learned queries may come with a batch of one, as SDPA allows."""
    batch = max(t.shape[0] for t in tensors)
    return tuple(t.expand(batch, *t.shape[1:]) if t.shape[0] != batch else t for t in tensors)


def _visibility(
    module: nn.Module, given: Any, options: dict[str, Any], qk: tuple[Tensor, Tensor]
) -> tuple[Mask, list[ScoreTerm], Any, Any]:
    """(mask, score terms, q_offset, k_offset) of a layer's call.

    given : a MaskPlan, which decides; a user's own tensor, bool or float (B, 1 or H, N_q, N_k), which decides too;
        padding (B, N_k); or None, which means causal or full, as the module says.
    """
    seqlen_q, seqlen_k = qk[0].shape[2], qk[1].shape[2]
    if isinstance(given, MaskPlan):
        if given.seqlen_k != seqlen_k:
            rule = f"the mask was made for {given.seqlen_k} keys and the layer has {seqlen_k}"
            raise ShapeError(message(rule, {"query": qk[0], "key": qk[1]}))
        return given.mask & _packed(options, qk), [], given.q_offset, given.k_offset
    if isinstance(given, Tensor) and given.ndim == 4:
        if given.dtype == torch.bool:
            return dense(given) & _packed(options, qk), [], 0, 0
        return _packed(options, qk), [bias(given)], 0, 0
    mask = _packed(options, qk)
    causally = options.get("is_causal")
    if causally is None:
        causally = getattr(module, "is_causal", True)
    # One query alone sees every key; more than one without a mask is a prefill from position 0, also where the
    # keys are a static cache that is longer. Source: transformers' sdpa_attention_forward.
    causally = bool(causally) and seqlen_q > 1
    if isinstance(given, Tensor) and given.ndim == 2:
        if causally and seqlen_q != seqlen_k:
            raise UnsupportedProblem(
                "a padding mask (B, N_k) does not say where the queries of a longer cache stand\n"
                "Let transformers' mask function make the mask."
            )
        mask = mask & key_padding(given.to(torch.bool))
    elif given is not None:
        raise UnsupportedProblem(
            f"attention_mask is a {type(given).__name__}, which this attention cannot read\n"
            "It takes what its own mask function made, a tensor of 4 or 2 dimensions, or None."
        )
    size = options.get("sliding_window")
    if causally:
        mask = mask & causal()
        if size is not None:  # transformers counts the query itself
            mask = mask & window(size - 1, None)
    elif size is not None and size < seqlen_k:
        raise UnsupportedProblem(
            "a sliding window without a mask and without causality has no agreed size in transformers\n"
            "Let create_bidirectional_sliding_window_mask make the mask."
        )
    return mask, [], 0, 0


def _packed(options: dict[str, Any], qk: tuple[Tensor, Tensor]) -> Mask:
    """Sequences packed into one row, as flash attention's cu_seq_lens arguments describe them."""
    bounds_q, bounds_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if bounds_q is None:
        return Mask()
    seqlens = qk[0].shape[2], qk[1].shape[2]
    bounds = bounds_q, bounds_q if bounds_k is None else bounds_k
    if seqlens[0] != seqlens[1] or qk[0].shape[0] != 1:
        raise UnsupportedProblem(
            "cu_seq_lens_q describes one packed row with as many queries as keys, and this call is another\n"
            "Pass position_ids or attention_mask instead, or call tilewise.attention_varlen."
        )
    ids = [
        torch.searchsorted(b[1:].contiguous(), torch.arange(n, device=b.device, dtype=b.dtype), right=True)
        for b, n in zip(bounds, seqlens, strict=True)
    ]
    return document(ids[0], ids[1])
