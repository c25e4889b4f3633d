"""The functions of flash_attn 4 (`import flash_attn.cute`), which always return a pair (out, lse or None).

Windows are (left, right) with None = unbounded; negative sizes move the window off the diagonal. Functions written
in the CuTe language cannot be read here: `tilewise.compat.flex` takes the same ideas as plain Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.compat import flash_attn3
from tilewise.compat.flash_attn3 import FP8, with_qv
from tilewise.compat.flash_spelling import (
    Pair,
    check_rank,
    dense,
    even_edges,
    from_pages,
    packed,
    spell,
    terms,
    visible_signed,
)
from tilewise.errors import OptionError, ShapeError, UnsupportedProblem, message

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

Window = tuple[int | None, int | None]
Answer = tuple[Tensor, Tensor | None]

_FLEX = "Write it in plain Python and call tilewise.compat.flex.flex_attention, or tilewise.custom and custom_score."
_REFUSED = {
    "score_mod": f"score_mod is a function of the CuTe language\n{_FLEX}",
    "score_mod_bwd": f"score_mod_bwd is a function of the CuTe language; here derivatives are derived\n{_FLEX}",
    "mask_mod": f"mask_mod is a function of the CuTe language (and switches causal and window off there)\n{_FLEX}",
    "aux_tensors": f"aux_tensors are read by score_mod and mask_mod\n{_FLEX}",
    "aux_scalars": f"aux_scalars are read by score_mod and mask_mod\n{_FLEX}",
    "block_sparse_tensors": "block_sparse_tensors are not read\nUse tilewise.block_sparse(layout, block) as a mask.",
    "block_sparse_tensors_bwd": "block_sparse_tensors_bwd are not read\nUse tilewise.block_sparse(layout, block).",
    "gather_kv_indices": "gather_kv_indices are not read\nGather the keys, or hide the others with a dense mask.",
    "gather_bwd_recompute_p": "gather_bwd_recompute_p belongs to gather_kv_indices, which are not read\nLeave it out.",
    "gather_bwd_token_chunk": "gather_bwd_token_chunk belongs to gather_kv_indices, which are not read\nLeave it out.",
}


def _refuse(q: Tensor, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise UnsupportedProblem(_REFUSED[name])
    if q.dtype in FP8:
        raise UnsupportedProblem(
            "FP8 tensors are taken by tilewise.compat.flash_attn3, with their factors\nOr widen them: q.float()."
        )


def _answer(
    pair: Pair, q: Tensor, inputs: tuple[Tensor | None, ...], return_lse: bool, qv: Tensor | None
) -> Answer:
    """lse where it was asked for or a backward may come; tokens before heads with qv, as in the original."""
    out, lse = pair
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if not (return_lse or grads):
        return out, None
    return out, lse if qv is None else lse.transpose(-2, -1)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None, return_lse: bool = False, gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Answer:  # fmt: skip
    """Attention of q (B, N_q, H, D) over k (B, N_k, H_kv, D) and v (B, N_k, H_kv, D_v).

    Args:
        qv: (B, N_q, H, D_v), adds qv.v to the score.
        softmax_scale: default D^-1/2, with qv (D + D_v)^-1/2.
        causal: bottom-right; it sets the window's right size to 0.
        window_size: (left, right), inclusive, None = unbounded; (-1, 3) is the next three keys.
        learnable_sink: (H,) logit of one more key per head with value 0; gets a gradient.
        num_splits, pack_gqa: accepted; they decide speed alone.

    Returns: (out (B, N_q, H, D_v), lse (B, H, N_q) if return_lse or a gradient is needed, else None); with qv lse is
        (B, N_q, H). lse includes the sink and is differentiable.
    Raises: UnsupportedProblem for functions of the CuTe language, block-sparse tensors and gathered keys;
        OptionError for a window without keys.
    """
    _refuse(
        q, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_bwd_recompute_p=gather_bwd_recompute_p or None,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    options = spell(visible_signed(causal, window_size), terms(softcap), softmax_scale, deterministic)
    options["sink"] = learnable_sink
    pair = dense(*with_qv(q, k, v, qv), v, options)
    return _answer(pair, q, (q, k, v, qv, learnable_sink), return_lse, qv)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: Any = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (None, None), learnable_sink: Tensor | None = None, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, score_mod: Any = None,
    score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: Any = None,
    aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: int | None = None,
) -> Answer:  # fmt: skip
    """`flash_attn_func` of sequences of unequal length, packed or padded on either side.

    Args:
        q: (T_q, H, D) with cu_seqlens_q, else (B, N_q, H, D). k, v likewise with cu_seqlens_k, or pages
            (pages, page_size, H_kv, D) with page_table (B, pages) and seqused_k.
        seqused_q, seqused_k: (B,) used lengths.
        max_seqlen_q, max_seqlen_k, min_seqlen_k, num_splits, pack_gqa, scheduler_metadata,
        disable_scheduler_metadata: accepted, never change a result. seqlen_k_per_split: asks for bits that do not
            depend on the neighbours (`batch_invariant`).

    Returns: (out in q's layout, lse (H, T_q) or (B, H, N_q), or None).
    """
    _refuse(
        q, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        gather_bwd_recompute_p=gather_bwd_recompute_p or None, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    rows = None if cu_seqlens_q is not None else q.shape[:2]
    flat_q, flat_qv, edges_q = q, qv, cu_seqlens_q
    if edges_q is None:
        check_rank(4, q=q)
        flat_q, flat_qv = q.flatten(0, 1), None if qv is None else qv.flatten(0, 1)
        edges_q = even_edges(q.shape[0], q.shape[1], q.device)
    options = spell(visible_signed(causal, window_size), terms(softcap), softmax_scale, deterministic)
    options |= {
        "sink": learnable_sink,
        "seqused_q": seqused_q,
        "batch_invariant": seqlen_k_per_split is not None,
    }
    if page_table is not None:
        if cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        both = with_qv(flat_q, k, v, flat_qv)
        out, lse = from_pages(*both, v, edges_q, page_table, seqused_k, options)
    else:
        flat_k, flat_v, edges = _keys(k, v, edges_q, cu_seqlens_k)
        options["seqused_k"] = seqused_k
        out, lse = packed(*with_qv(flat_q, flat_k, flat_v, flat_qv), flat_v, edges, options)
    if rows is not None:
        out, lse = out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1)
    return _answer((out, lse), q, (q, k, v, qv, learnable_sink), return_lse, qv)


def _keys(k: Tensor, v: Tensor, edges_q: Tensor, cu_seqlens_k: Tensor | None) -> tuple[Tensor, Tensor, Pair]:
    """k, v packed, and both cu_seqlens."""
    if cu_seqlens_k is not None:
        return k, v, (edges_q, cu_seqlens_k)
    check_rank(4, k=k, v=v)
    if k.shape[0] != edges_q.shape[0] - 1:
        raise ShapeError(
            message("without cu_seqlens_k, k is (B, N_k, H_kv, D), one entry per sequence of q", {"k": k})
        )
    even = even_edges(k.shape[0], k.shape[1], k.device).to(edges_q.dtype)
    return k.flatten(0, 1), v.flatten(0, 1), (edges_q, even)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None, seqused: Tensor | None = None, virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> Answer:  # fmt: skip
    """Merge attention over disjoint keys; see `flash_attn3.flash_attn_combine`.

    Args:
        out_partial: (S, B, N, H, D), or (S, T, H, D) with cu_seqlens. lse_partial: without the last dimension.
        cu_seqlens, seqused, virtual_batch_idx: accepted; every token is merged by itself, so they change nothing.

    Returns: (out, lse or None).
    """
    merged, lse = flash_attn3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return merged, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int, max_seqlen_k: int, nheads: int, nheads_kv: int, headdim: int, num_splits: int,
    headdim_v: int | None = None, pack_gqa: bool | None = None, causal: bool = False,
    window_size_left: int | None = None, window_size_right: int | None = None, seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None, _arch: int | None = None,
) -> None:  # fmt: skip
    """None: there is no schedule to prepare, and `flash_attn_varlen_func` takes scheduler_metadata=None.

    Raises OptionError, as the original does, where no argument says how many sequences there are.
    """
    if all(t is None for t in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        raise OptionError(
            "one of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k says how many sequences there are\n"
            "Give one, or leave the metadata out: nothing here needs it."
        )
