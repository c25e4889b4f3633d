"""The functions of flash_attn 3 (`import flash_attn_interface`): the fourth argument is softmax_scale, not dropout.

Beyond the original: any floating dtype, head size and device, a backward of attention_chunk and of qv, a
differentiable lse. FP8 tensors are widened, multiplied by their descale factors and attended in float32, which is
more exact than the original and has no backward, as there; FP8 caches are read where they lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.compat import flash_cache as fc
from tilewise.compat.flash_spelling import check_rank, dense, locate, packed, parts, spell, terms, visible
from tilewise.errors import DTypeError, OptionError, ShapeError, UnsupportedProblem, message
from tilewise.state import Partial, merge

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_with_kvcache", "get_scheduler_metadata",
]  # fmt: skip

Result = Any  # out, or (out, softmax_lse)
Window = tuple[int, int]
Descale = tuple[Tensor | None, Tensor | None, Tensor | None]
FP8 = tuple(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)
)  # by name: which of them exist depends on torch


def _widen(name: str, t: Tensor, descale: Tensor | None, heads_kv: int, sequence: Tensor | None) -> Tensor:
    """t in float32 times its factor (B, H_kv); `sequence` is each packed token's."""
    t = t.float()
    if descale is None:
        return t
    if descale.ndim != 2 or descale.shape[1] != heads_kv:
        raise ShapeError(
            message(f"{name}_descale has shape (B, H_kv)", {f"{name}_descale": descale, name: t})
        )
    factor = descale.float().repeat_interleave(t.shape[-2] // heads_kv, 1)
    return t * (factor[:, None, :, None] if sequence is None else factor[sequence][..., None])


def _widened(
    q: Tensor, k: Tensor, v: Tensor, descale: Descale, edges: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, torch.dtype | None]:
    """q, k, v as the attention takes them, and the dtype of out where it is not theirs."""
    if q.dtype not in FP8:
        if any(factor is not None for factor in descale):
            raise OptionError(
                f"descale factors belong to FP8 tensors, and q is {q.dtype}\nScale the tensors themselves."
            )
        return q, k, v, None
    places: list[Tensor | None] = [None] * 3
    if edges is not None:
        places = [locate(edges[min(n, 1)], t.shape[0])[0] for n, t in enumerate((q, k, v))]
    wide = [
        _widen(name, t, factor, k.shape[-2], place)
        for name, t, factor, place in zip("qkv", (q, k, v), descale, places, strict=True)
    ]
    return wide[0], wide[1], wide[2], torch.bfloat16


def _fp8_cache(q: Tensor, cache: fc.Cache, descale: Descale, more: bool) -> tuple[Tensor, fc.Cache]:
    """q as the attention takes it, and the cache with its factors, that of q among them; more: whether the call wants
    what FP8 does not do."""
    stored = (cache.k.dtype, cache.v.dtype)
    if stored[0] not in FP8:
        named = f"q is {q.dtype} and the cache {stored[0]}"
        raise OptionError(f"FP8 queries and descale factors belong to an FP8 cache: {named}")
    if more or stored != (torch.float8_e4m3fn,) * 2:
        raise UnsupportedProblem(
            f"an FP8 cache is float8_e4m3fn, without qv and rotary tables of FP8 keys: it is {stored[0]}, {stored[1]}"
        )
    heads = cache.k.shape[2]
    for name, factor in zip("qkv", descale, strict=True):
        if factor is not None and (factor.ndim != 2 or factor.shape[1] != heads):
            given = {f"{name}_descale": factor, "k_cache": cache.k}
            raise ShapeError(message(f"{name}_descale has shape (B, H_kv)", given))
    if descale[0] is not None and q.dtype not in FP8:
        raise OptionError(f"q_descale belongs to an FP8 q, and q is {q.dtype}\nScale q itself.")
    cache = cache._replace(q_factor=descale[0], k_factor=descale[1], v_factor=descale[2])
    return q.to(torch.bfloat16) if q.dtype in FP8 else q, cache


def with_qv(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k whose product is q.k + qv.v: the same attention with head size D + D_v, k copied."""
    if qv is None:
        return q, k
    if qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != v.shape[-1]:
        raise ShapeError(message("qv is in q's layout, with v's head size", {"q": q, "v": v, "qv": qv}))
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def _answer(pair: tuple[Tensor, Tensor], dtype: torch.dtype | None, with_lse: bool) -> Result:
    out, lse = pair
    out = out if dtype is None else out.detach().to(dtype)
    return (out, lse) if with_lse else out


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention of q (B, N_q, H, D) over k (B, N_k, H_kv, D) and v (B, N_k, H_kv, D_v).

    Args:
        softmax_scale: default D^-1/2, with qv (D + D_v)^-1/2.
        causal, window_size: bottom-right, (left, right) inclusive, -1 = unbounded.
        qv: (B, N_q, H, D_v), adds qv.v to the score.
        q_descale, k_descale, v_descale: (B, H_kv) factors of FP8 tensors.
        attention_chunk: query and key lie in the same chunk of so many positions, 0 = off.
        num_splits, pack_gqa, sm_margin: accepted; they decide speed alone.
        return_attn_probs: also return lse.

    Returns: out (B, N_q, H, D_v), bfloat16 for FP8, or (out, softmax_lse (B, H, N_q)).
    """
    check_rank(4, q=q, k=k, v=v)
    q, k, v, dtype = _widened(q, k, v, (q_descale, k_descale, v_descale))
    mask = visible(causal, window_size, attention_chunk)
    pair = dense(*with_qv(q, k, v, qv), v, spell(mask, terms(softcap), softmax_scale, deterministic))
    return _answer(pair, dtype, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, window_size: Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of qkv (B, N, 3, H, D), or (B, N, H + 2 H_kv, D) with num_heads_q = H."""
    if qkv.ndim == 5:
        q, k, v = parts("qkv", qkv, 5)
    else:
        heads_kv = 0 if num_heads_q is None else (qkv.shape[2] - num_heads_q) // 2
        if num_heads_q is None or heads_kv < 1 or num_heads_q + 2 * heads_kv != qkv.shape[2]:
            raise ShapeError(
                message("qkv is (B, N, 3, H, D), or (B, N, H + 2 H_kv, D) with num_heads_q", {"qkv": qkv})
            )
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any,
    max_seqlen_k: Any, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of packed sequences: q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv, D_v).

    seqused_q, seqused_k: (B,) used lengths. max_seqlen_q, max_seqlen_k never change a result.

    Returns: out (T_q, H, D_v), or (out, softmax_lse (H, T_q)).
    """
    check_rank(3, q=q, k=k, v=v)
    edges = (cu_seqlens_q, cu_seqlens_k)
    q, k, v, dtype = _widened(q, k, v, (q_descale, k_descale, v_descale), edges)
    options = spell(
        visible(causal, window_size, attention_chunk), terms(softcap), softmax_scale, deterministic
    )
    options |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    return _answer(packed(*with_qv(q, k, v, qv), v, edges, options), dtype, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: Any = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Result:  # fmt: skip
    """Write k, v into the cache in place, rotate q and k, and attend; no gradients.

    As `flash_attn2.flash_attn_with_kvcache`, with page_table for block_table, and:

    Args:
        q: (B, N, H, D), or (T, H, D) with cu_seqlens_q. k, v: (B, N_new, H_kv, D), or packed with cu_seqlens_k_new.
        qv: in q's layout, adds qv.v to the score. rotary_seqlens: (B,) first rotary position instead of cache_seqlens.
        scheduler_metadata, num_splits, pack_gqa, sm_margin, max_seqlen_q: accepted; they decide speed alone.

        q_descale, k_descale, v_descale: (B, H_kv) factors of FP8 tensors. The cache may be float8_e4m3fn; q is then
            FP8, too (out is bfloat16), or float16 or bfloat16. New keys and values in FP8 are written as they are,
            others divided by their factors. Sequences that share a page have the same factors.

    Returns: out in q's layout, or (out, lse (B, H, N) or (H, T)).
    Raises: as there; UnsupportedProblem for other FP8 caches, and FP8 with qv or rotary tables of FP8 keys.
    """
    cache = fc.cache_of(
        k_cache, v_cache, lengths=cache_seqlens, rows=cache_batch_idx, leftpad=cache_leftpad, table=page_table
    )
    descale = (q_descale, k_descale, v_descale)
    if FP8 and (q.dtype in FP8 or k_cache.dtype in FP8 or any(f is not None for f in descale)):
        turned_fp8 = k is not None and k.dtype in FP8 and rotary_cos is not None
        q, cache = _fp8_cache(q, cache, descale, qv is not None or turned_fp8)
    rotary = fc.rotary_of(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    options = spell(visible(causal, window_size, attention_chunk), terms(softcap), softmax_scale, False)
    step = fc.Step(q, k, v, qv, cu_seqlens_q, cu_seqlens_k_new)
    moving = causal or max(window_size) >= 0 or attention_chunk > 0
    out, lse = fc.attend(step, cache, rotary, options, moving=moving)
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint keys: softmax weights exp(lse), -inf adds nothing. Differentiable.

    Args:
        out_partial: (S, B, N, H, D). lse_partial: (S, B, N, H), natural log.
        out: where to write. out_dtype: of the result, default out_partial's.

    Returns: out (B, N, H, D), lse (B, N, H) float32.
    """
    if lse_partial.shape != out_partial.shape[:-1] or out_partial.ndim < 2 or not len(out_partial):
        given = {"out_partial": out_partial, "lse_partial": lse_partial}
        raise ShapeError(message("out_partial is (S, B, N, H, D) and lse_partial (S, B, N, H), S > 0", given))
    kind = out_partial.dtype if out_dtype is None else out_dtype
    if out is not None and (out.shape != out_partial.shape[1:] or not out.is_floating_point()):
        raise ShapeError(
            message("out is a floating tensor (B, N, H, D)", {"out": out, "out_partial": out_partial})
        )
    if not kind.is_floating_point:
        raise DTypeError(f"out_dtype is a floating dtype, not {kind}")
    wide = torch.promote_types(out_partial.dtype, torch.float32)
    # The extra dimension in front keeps a packed (T, H, D) from being read as out (T, H, D) with lse (H, T).
    merged = merge(
        *(Partial(o.to(wide)[None], s.to(wide)[None]) for o, s in zip(out_partial, lse_partial, strict=True))
    )
    result = merged.out[0].to(kind)
    return (result if out is None else out.copy_(result)), merged.lse[0]


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
    page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False, window_size: Window = (-1, -1),
    attention_chunk: int = 0, has_softcap: bool = False, num_splits: int = 0, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:  # fmt: skip
    """None: there is no schedule to prepare, and every function takes scheduler_metadata=None."""
    return None
