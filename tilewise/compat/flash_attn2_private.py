"""flash_attn 2's private functions, which ring-attention libraries import from flash_attn.flash_attn_interface.

The forward gives (out, lse, S_dmask, rng_state) without recording anything; the backward takes the global out and
lse, is valid for any subset of the keys, and writes into the tensors it is given, as the originals do. rng_state is
the dropout seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention_partial_backward
from tilewise.compat.flash_spelling import (
    dense,
    draw_seed,
    from_pages,
    packed,
    packed_probabilities,
    probabilities,
    spell,
    terms,
    visible,
)
from tilewise.errors import UnsupportedProblem

__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward",
]  # fmt: skip

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _options(
    dropout_p: float, softmax_scale: float | None, causal: bool, window: tuple[int, int], softcap: float,
    alibi_slopes: Tensor | None, seed: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    options = spell(visible(causal, window), terms(softcap, alibi_slopes), softmax_scale, False)
    return {**options, "dropout": dropout_p, "seed": seed}


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> Forward:  # fmt: skip
    """(out (B, N, H, D), lse (B, H, N), S_dmask, rng_state) of dense tensors."""
    window = (window_size_left, window_size_right)
    seed = draw_seed(q, dropout_p)
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, seed)
    out, lse = dense(q, k, v, options)
    weights = probabilities(q, k, options) if return_softmax and dropout_p > 0 else q.new_empty(0)
    return out, lse, weights, q.new_empty(0, dtype=torch.int64) if seed is None else seed


@torch.no_grad()
def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False,
) -> Forward:  # fmt: skip
    """The same of packed tensors; lse is (H, T_q).  Raises UnsupportedProblem for leftpad_k."""
    if leftpad_k is not None:
        raise UnsupportedProblem(
            "leftpad_k is not read here\nUse flash_attn_with_kvcache(cache_leftpad=...)."
        )
    window = (window_size_left, window_size_right)
    seed = draw_seed(q, dropout_p)
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, seed)
    edges = (cu_seqlens_q, cu_seqlens_k)
    if block_table is not None:
        used = cu_seqlens_k[1:] - cu_seqlens_k[:-1] if seqused_k is None else seqused_k
        out, lse = from_pages(q, k, v, cu_seqlens_q, block_table, used, options)
    else:
        out, lse = packed(q, k, v, edges, {**options, "seqused_k": seqused_k})
    wanted = return_softmax and dropout_p > 0 and block_table is None
    weights = packed_probabilities(q, k, edges, options) if wanted else q.new_empty(0)
    return out, lse, weights, q.new_empty(0, dtype=torch.int64) if seed is None else seed


def _seed(rng_state: Tensor | None) -> Tensor | None:
    return None if rng_state is None or rng_state.numel() == 0 else rng_state


def _keep(gradients: tuple[Tensor, Tensor, Tensor], places: tuple[Tensor | None, ...]) -> None:
    """Write the gradients into the places given; None is a gradient nobody wants."""
    for gradient, place in zip(gradients, places, strict=True):
        if place is not None:
            place.copy_(gradient)


@torch.no_grad()
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write dq, dk, dv of dense tensors; returns softmax_d (B, H, N), the row sums of out * dout in float32."""
    window = (window_size_left, window_size_right)
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, _seed(rng_state))
    options["deterministic"] = deterministic or None
    q, k, v, first_out, do = (t.transpose(1, 2) for t in (q, k, v, out, dout))
    found = attention_partial_backward(q, k, v, first_out, softmax_lse, do, **options)
    grads = (found.dq.transpose(1, 2), found.dk.transpose(1, 2), found.dv.transpose(1, 2))
    _keep(grads, (dq, dk, dv))
    return (out.float() * dout.float()).sum(-1).transpose(1, 2)


@torch.no_grad()
def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """The same of packed tensors; softmax_d is (H, T_q)."""
    window = (window_size_left, window_size_right)
    options = _options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, _seed(rng_state))
    options["deterministic"] = deterministic or None
    found = attention_partial_backward(
        q, k, v, out, softmax_lse, dout, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options
    )
    _keep((found.dq, found.dk, found.dv), (dq, dk, dv))
    return (out.float() * dout.float()).sum(-1).transpose(0, 1)
