"""Attention of queries over keys and values that lie in pages: the call that every cache ends in."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.ops import call
from tilewise.written import Cached, write


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, *, block_table: Tensor | None = None, seqused_k: Tensor | None = None,
    seqused_q: Tensor | None = None, leftpad_k: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of q over pools of pages, differentiable in q, the pools, sink and the terms' leaves.

    Args:
        q: (B, H, N_q, D), or (T, H, D) with cu_seqlens_q (B + 1,).
        k, v: pools (P, H_kv, page_size, D) and (P, H_kv, page_size, D_v), the last stride 1; q's dtype, or
            float8_e4m3fn with q in float16 or bfloat16.
        block_table: (B, M) page of the keys j // page_size of each sequence; None: sequence b is page b.
        seqused_k: (B,) keys of each sequence; None: all M * page_size. seqused_q: (B,) rows used.
        leftpad_k: (B,) keys before it are hidden, and positions count from there.
        k_scale, v_scale: (H_kv,) or (P, H_kv) factors of what is stored.
        options: those of `attention` but return_lse and out; q_offset None is
            seqused_k - leftpad_k - rows of the sequence. Rows and columns, for bias and the like, are those of the
            sequence, padding included.

    Returns: out in q's layout, lse (B, H, N_q) or (H, T).
    Raises: as `attention`; ShapeError for lengths and pages outside their tensors (looked at on the CPU; on a GPU
        they are clamped, and what they name is never read beyond the tensors).
    """
    cached = Cached(cu_seqlens_q, seqused_q, seqused_k, block_table, leftpad_k, k_scale, v_scale)
    written = write((q, k, v), cached, **{"mask": None, "scores": (), **options})
    return call(written.tensors, written.seed, written.numbers)
