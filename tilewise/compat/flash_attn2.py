"""The functions of flash_attn 2 (`import flash_attn`), with their signatures, defaults and return values.

Any floating dtype, head size and device, gradients of alibi_slopes, and a true, differentiable lse that is -inf
where nothing is visible (the original's is +inf there, and shifted under causal ALiBi). docs/compat.md has the table.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.compat import flash_cache as fc
from tilewise.compat.flash_spelling import (
    dense,
    draw_seed,
    from_pages,
    packed,
    packed_probabilities,
    parts,
    probabilities,
    spell,
    terms,
    visible,
)

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip

Result = Any  # out, or (out, softmax_lse, S_dmask)
Window = tuple[int, int]


def _options(
    q: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Window, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool,
) -> dict[str, Any]:  # fmt: skip
    options = spell(visible(causal, window_size), terms(softcap, alibi_slopes), softmax_scale, deterministic)
    return {**options, "dropout": dropout_p, "seed": draw_seed(q, dropout_p)}


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention of q (B, N_q, H, D) over k, v (B, N_k, H_kv, D); H is a multiple of H_kv.

    Args:
        dropout_p: applied as given, drawn from torch's generator; 0 in evaluation is the caller's business.
        softmax_scale: default D^-1/2.
        causal: aligned at the bottom right.
        window_size: (left, right) keys around the query's position, inclusive, -1 = unbounded.
        softcap: cap * tanh(score / cap), 0 = off. alibi_slopes: (H,) or (B, H), after the cap.
        return_attn_probs: also return lse (B, H, N_q) and S_dmask: without dropout an empty tensor, with dropout the
            weights (B, H, N_q, N_k), negative where dropped (quadratic memory, for tests).

    Returns: out (B, N_q, H, D), or (out, softmax_lse, S_dmask).
    Raises: ShapeError, DTypeError, OptionError for arguments that do not fit.
    """
    options = _options(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    out, lse = dense(q, k, v, options)
    if not return_attn_probs:
        return out
    return out, lse, probabilities(q, k, options) if dropout_p > 0 else q.new_empty(0)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of qkv (B, N, 3, H, D)."""
    q, k, v = parts("qkv", qkv, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of q (B, N_q, H, D) and kv (B, N_k, 2, H_kv, D)."""
    k, v = parts("kv", kv, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """`flash_attn_func` of packed sequences: q (T_q, H, D), k, v (T_k, H_kv, D).

    Args:
        cu_seqlens_q, cu_seqlens_k: (B + 1,) where each sequence starts.
        max_seqlen_q, max_seqlen_k: accepted, and never change a result.
        block_table: (B, pages) int; then k and v are pages (pages, page_size, H_kv, D) of any size, and cu_seqlens_k
            holds the running sum of the lengths.

    Returns: out (T_q, H, D), or (out, softmax_lse (H, T_q), S_dmask (B, H, longest q, longest k)).
    """
    options = _options(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    edges = (cu_seqlens_q, cu_seqlens_k)
    if block_table is not None:
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        out, lse = from_pages(q, k, v, cu_seqlens_q, block_table, lengths, options)
    else:
        out, lse = packed(q, k, v, edges, options)
    if not return_attn_probs:
        return out
    wanted = dropout_p > 0 and block_table is None
    return out, lse, packed_probabilities(q, k, edges, options) if wanted else q.new_empty(0)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Any, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of qkv (T, 3, H, D)."""
    q, k, v = parts("qkv", qkv, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of q (T_q, H, D) and kv (T_k, 2, H_kv, D)."""
    k, v = parts("kv", kv, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Write k, v into the cache in place, rotate q and k, and attend; no gradients.

    Args:
        q: (B, N, H, D). k, v: (B, N_new, H_kv, D) or None.
        k_cache, v_cache: (B_cache, capacity, H_kv, D); with block_table pages (pages, page_size, H_kv, D), any size.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2). k turns by its index in the cache; q too if causal or
            window, else all of q by cache_seqlens, as in the original.
        cache_seqlens: keys present before this call, int or (B,); it is not advanced.
        cache_batch_idx: (B,) row of the cache of each sequence. cache_leftpad: (B,) first real key.
        block_table: (B, pages) int; excludes the two before.
        num_splits: accepted; it decides speed alone.

    Returns: out (B, N, H, D), or (out, lse (B, H, N)).
    Raises: ShapeError for lengths and pages outside the cache (looked at on the CPU), OptionError for k without
        cache_seqlens, rotary without k, or a table with batch indices or left padding.
    """
    cache = fc.cache_of(
        k_cache,
        v_cache,
        lengths=cache_seqlens,
        rows=cache_batch_idx,
        leftpad=cache_leftpad,
        table=block_table,
    )
    rotary = fc.rotary_of(rotary_cos, rotary_sin, rotary_interleaved)
    options = spell(visible(causal, window_size), terms(softcap, alibi_slopes), softmax_scale, False)
    moving = causal or max(window_size) >= 0
    out, lse = fc.attend(fc.Step(q, k, v), cache, rotary, options, moving=moving)
    return (out, lse) if return_softmax_lse else out
