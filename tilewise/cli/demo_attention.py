"""The three attentions that the demo puts into one model, in the form transformers calls them.

    ordinary   softmax(q kᵀ) v with the whole score matrix in memory, in the inputs' precision
    sdpa       PyTorch's scaled_dot_product_attention, as transformers itself calls it
    tilewise   tilewise.attention

All three are causal, in one pass over the text or one token at a time with a cache, with grouped key and
value heads. Sliding windows, soft caps, sinks and padding are refused: the demo compares one function, and
says so.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tilewise.cli.demo_error import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

LEGS = ("ordinary", "sdpa", "tilewise")
_REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")


def _refuse(mask: Any, options: dict[str, Any]) -> None:
    for name in _REFUSED:
        if options.get(name) is not None:
            raise DemoError(
                f"this model's attention uses {name}, and the demo compares plain causal attention only"
            )
    if mask is not None:
        raise DemoError(
            "the model handed over a mask of its own, and the demo compares plain causal attention only"
        )


def ordinary_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as the formula reads: the (N_q, N_k) scores of every head are in memory, and so are their
    weights.

    query : (B, H, N_q, D);  key, value : (B, H_kv, N_k, D), H a multiple of H_kv;  query row i has position
        N_k - N_q + i.
    Returns (out, None) with out (B, N_q, H, D). Nothing is stored beyond two matrices at once, which is the
    least that a softmax out of place can do; transformers' own eager attention keeps up to three.
    """
    _refuse(attention_mask, options)
    batch, heads, rows, dim = query.shape
    groups, columns = heads // key.shape[1], key.shape[2]
    scale = options.get("scaling") or dim**-0.5
    grouped = (query * scale).reshape(batch, key.shape[1], groups * rows, dim)
    scores = torch.matmul(grouped, key.transpose(2, 3)).view(batch, heads, rows, columns)
    if rows > 1:
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu_(columns - rows + 1)
        scores.masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    del scores
    out = torch.matmul(weights.view(batch, key.shape[1], groups * rows, columns), value)
    return out.view(batch, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None


def tilewise_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """The same by tiles. Shapes as in `ordinary_attention`; key and value heads are not repeated."""
    import tilewise as tw

    _refuse(attention_mask, options)
    # Positions count from the end of the keys by default, so one token with a cache needs nothing special.
    out = tw.attention(query, key, value, mask=tw.causal(), scale=options.get("scaling"))
    return out.transpose(1, 2).contiguous(), None


def backend_name(query: Tensor, key: Tensor, value: Tensor) -> str:
    """The backend that Tilewise takes for a layer's inputs."""
    import tilewise as tw

    return tw.explain(query, key, value, mask=tw.causal()).backend or "none"


def causal_only_mask(
    *, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **_: Any
) -> None:
    """What transformers asks before the layers run. No tensor is built: the attentions above are causal."""
    from transformers.masking_utils import causal_mask_function

    if (
        mask_function is not causal_mask_function
        or attention_mask is not None
        and not bool(attention_mask.all())
    ):
        raise DemoError("this model or input needs more than a causal mask, which the demo does not compare")


def register() -> None:
    """Make `ordinary` and `tilewise` known to transformers under the names `tilewise_demo_...`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for leg, function in (("ordinary", ordinary_attention), ("tilewise", tilewise_attention)):
        AttentionInterface.register(implementation(leg), function)
        AttentionMaskInterface.register(implementation(leg), causal_only_mask)


def implementation(leg: str) -> str:
    """The name under which transformers knows a leg."""
    return "sdpa" if leg == "sdpa" else f"tilewise_demo_{leg}"


def attention_function(leg: str) -> Callable[..., tuple[Tensor, Any]]:
    """The function that a leg's layers call."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[implementation(leg)]


@contextmanager
def using(model: nn.Module, leg: str) -> Iterator[nn.Module]:
    """The model with one leg's attention in every layer; what was there before comes back at the end."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation(leg))
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


class Captured(Exception):
    """Carries one layer's attention inputs out of a forward pass."""

    def __init__(self, call: tuple[nn.Module, Tensor, Tensor, Tensor, float | None]) -> None:
        super().__init__("captured")
        self.call = call


@torch.inference_mode()
def capture_layer(
    model: nn.Module, tokens: Tensor, layer: int
) -> tuple[nn.Module, Tensor, Tensor, Tensor, float | None]:
    """The attention inputs (module, q, k, v, scaling) of one layer while the model reads `tokens` (1, N).

    The layers below run with SDPA; the pass stops at the layer asked for.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    below = attention_function("sdpa")

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any
    ) -> Any:
        if getattr(module, "layer_idx", 0) >= layer:
            raise Captured((module, query, key, value, options.get("scaling")))
        return below(module, query, key, value, mask, **options)

    name = "tilewise_demo_capture"
    AttentionInterface.register(name, record)
    AttentionMaskInterface.register(name, causal_only_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        model.base_model(input_ids=tokens, use_cache=False)
    except Captured as stop:
        return stop.call
    finally:
        model.set_attn_implementation(before)
    raise DemoError(
        f"the model has no attention layer {layer} that goes through transformers' attention interface"
    )
