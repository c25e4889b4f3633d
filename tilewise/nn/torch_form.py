"""torch.nn.MultiheadAttention's calling form: its names of weights, its masks, its weights.

Source: torch 2.13, `torch.nn.MultiheadAttention`, `torch.nn.functional.multi_head_attention_forward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.errors import DTypeError, OptionError, ShapeError, UnsupportedProblem, message
from tilewise.spec.masks import Mask, causal, dense, key_padding, prefix
from tilewise.spec.scores import ScoreTerm, bias

if TYPE_CHECKING:
    from tilewise.nn.multihead import MultiheadAttention


COLUMNS = 128
"""Columns of the weights that are made at a time: any size will do, and every backend has this head size."""


class TorchCall(NamedTuple):
    """What torch's call says beside query, key and value."""

    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    need_weights: bool
    average: bool
    is_causal: bool


def to_tilewise_names(state: dict[str, Tensor], prefix: str) -> None:
    """Rename torch's entries of a state dict that is being loaded: one packed projection becomes three."""
    for kind in ("weight", "bias"):
        packed = state.pop(f"{prefix}in_proj_{kind}", None)
        if packed is not None:
            for name, part in zip("qkv", packed.chunk(3), strict=True):
                state[f"{prefix}{name}_proj.{kind}"] = part
    for name in "qkv":
        if f"{prefix}{name}_proj_weight" in state:
            state[f"{prefix}{name}_proj.weight"] = state.pop(f"{prefix}{name}_proj_weight")


def to_torch_names(module: MultiheadAttention) -> dict[str, Tensor]:
    """The weights under torch's names.  Raises OptionError for parameters that torch's module has not."""
    state = dict(module.state_dict())
    own = [name for name in state if name.startswith("attention.")]
    if (
        own
        or module.num_heads != module.num_heads_kv
        or module.num_heads * module.head_dim != module.embed_dim
    ):
        raise OptionError(
            "torch.nn.MultiheadAttention has as many KV heads as query heads, heads of embed_dim / num_heads, and no "
            + (", ".join(own) or "others")
        )
    weights = [state.pop(f"{name}_proj.weight") for name in "qkv"]
    if module.kdim == module.vdim == module.embed_dim:
        state["in_proj_weight"] = torch.cat(weights)
    else:
        state.update({f"{name}_proj_weight": weight for name, weight in zip("qkv", weights, strict=True)})
    biases = [state.pop(f"{name}_proj.bias", None) for name in "qkv"]
    if all(b is not None for b in biases):
        state["in_proj_bias"] = torch.cat([b for b in biases if b is not None])
    return state


def attend_as_torch(
    module: MultiheadAttention, inputs: tuple[Tensor, Tensor, Tensor], call: TorchCall
) -> tuple[Tensor, Tensor | None]:
    """(output, weights or None) as torch's module gives them, in the inputs' layout."""
    if any(t.is_nested for t in inputs):
        raise UnsupportedProblem(
            "nested tensors, which torch.nn.TransformerEncoder makes of a padded batch in eval, are not read\n"
            "Set encoder.use_nested_tensor = False; padding then costs what it costs with torch's own masks."
        )
    dims = {t.ndim for t in inputs}
    if dims not in ({2}, {3}):
        given = dict(zip(("query", "key", "value"), inputs, strict=True))
        raise ShapeError(message("query, key and value have three dimensions, or two without a batch", given))
    batched = dims == {3}
    if not batched:
        inputs = tuple(t[None] for t in inputs)  # type: ignore[assignment]
    elif not module.batch_first:
        inputs = tuple(t.transpose(0, 1) for t in inputs)  # type: ignore[assignment]
    q, k, v = module.project(*inputs)
    real = k.shape[2]
    k, v = _more_keys(module, k, v)
    mask, terms = _visibility(call, q, k, real)
    held = module.attention
    mask = mask if held.mask is None else mask & held.mask
    dropout = held.dropout if held.training else 0.0
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device) if dropout else None
    options: dict[str, Any] = {
        "mask": mask, "scores": terms, "sink": held.sink, "scale": held.scale, "dropout": dropout, "seed": seed,
        "q_offset": 0, "backend": held.backend,
    }  # fmt: skip
    out = attention(q, k, v, **options)
    result: Tensor = module.out_proj(out.transpose(1, 2).flatten(2))
    weights = _weights(q, k, call.average, options) if call.need_weights else None
    if not batched:
        return result[0], None if weights is None else weights[0]
    return (result if module.batch_first else result.transpose(0, 1)), weights


def _more_keys(module: MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The learned key and value and the zeros that every query sees, behind the others."""
    pair = [k, v]
    if module.bias_k is not None and module.bias_v is not None:
        for n, learned in enumerate((module.bias_k, module.bias_v)):
            column = learned.view(1, -1, 1, module.head_dim).expand(k.shape[0], -1, -1, -1)
            pair[n] = torch.cat((pair[n], column), 2)
    if module.add_zero_attn:
        pair = [torch.cat((t, t.new_zeros(*t.shape[:2], 1, t.shape[3])), 2) for t in pair]
    return pair[0], pair[1]


def _visibility(call: TorchCall, q: Tensor, k: Tensor, real: int) -> tuple[Mask, list[ScoreTerm]]:
    """Masks and terms of attn_mask and key_padding_mask; columns from `real` on are seen by every query."""
    (batch, heads, rows, _), columns = q.shape, k.shape[2]
    mask, terms = Mask(), []
    given, padding = call.attn_mask, call.key_padding_mask
    if call.is_causal and given is None:
        raise OptionError("is_causal says that attn_mask is the causal mask: give attn_mask, too")
    shapes = {2: (rows, real), 3: (batch * heads, rows, real)}
    if given is not None and tuple(given.shape) != shapes.get(given.ndim):
        raise ShapeError(message(f"attn_mask has shape {shapes[2]} or {shapes[3]}", {"attn_mask": given}))
    if call.is_causal:
        mask = causal() if columns == real else causal() | ~prefix(real)
    elif given is not None:
        given = given[None, None] if given.ndim == 2 else given.view(batch, heads, rows, real)
        allowed, added = _canonical("attn_mask", given, columns - real)
        mask = mask if allowed is None else dense(allowed)
        terms += [] if added is None else [bias(added)]
    if padding is not None:
        padding = padding[None] if padding.ndim == 1 else padding
        if tuple(padding.shape) != (batch, real):
            raise ShapeError(
                message(f"key_padding_mask has shape {(batch, real)}", {"key_padding_mask": padding})
            )
        allowed, added = _canonical("key_padding_mask", padding, columns - real)
        mask = mask if allowed is None else mask & key_padding(allowed)
        terms += [] if added is None else [bias(added[:, None, None])]
    return mask, terms


def _canonical(name: str, given: Tensor, extra: int) -> tuple[Tensor | None, Tensor | None]:
    """(bool, True = may attend; float to add) of a mask in torch's polarity, with `extra` visible columns more."""
    if given.dtype == torch.bool:
        return torch.nn.functional.pad(~given, (0, extra), value=True), None
    if not given.is_floating_point():
        raise DTypeError(message(f"{name} is bool, True = hidden, or float, to be added", {name: given}))
    return None, torch.nn.functional.pad(given, (0, extra))


def _weights(q: Tensor, k: Tensor, average: bool, options: dict[str, Any]) -> Tensor:
    """The weights, after dropout as torch gives them: attention whose values are the unit vectors.

    (B, N_q, N_k) averaged over the heads, else (B, H, N_q, N_k); made in pieces of columns, with gradients.
    """
    columns = k.shape[2]
    unit = torch.eye(columns, dtype=k.dtype, device=k.device)
    pieces = []
    for part in unit.split(COLUMNS, dim=1):
        values = part.expand(*k.shape[:2], *part.shape)
        piece = attention(q, k, values, **options)
        pieces.append(piece.mean(1) if average else piece)
    return torch.cat(pieces, -1)
