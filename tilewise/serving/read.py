"""Attention of queries over keys and values that lie in pages: the call that every cache ends in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tilewise import quick
from tilewise.ops import call
from tilewise.written import Cached, write

if TYPE_CHECKING:
    from tilewise.serving.cache import CacheView

OPTIONS = (
    "scale", "q_offset", "k_offset", "h_offset", "deterministic", "batch_invariant", "backend", "allow_quadratic",
)  # fmt: skip
"""The options of a call that are no tensors, in the order in which `attend_view` takes them."""


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
        options: those of `attention` but return_lse and out, and partial=True for out in float32, to be merged;
            q_offset None is seqused_k - leftpad_k - rows of the sequence. Rows and columns, for bias and the like,
            are those of the sequence, padding included.

    Returns: out in q's layout, lse (B, H, N_q) or (H, T).
    Raises: as `attention`; ShapeError for lengths and pages outside their tensors (looked at on the CPU; on a GPU
        they are clamped, and what they name is never read beyond the tensors).
    """
    cached = Cached(cu_seqlens_q, seqused_q, seqused_k, block_table, leftpad_k, k_scale, v_scale)
    written = write((q, k, v), cached, **{"mask": None, "scores": (), **options})
    return call(written.tensors, written.seed, written.numbers)


def attend_view(
    view: CacheView, q: Tensor, cu_seqlens_q: Tensor | None, spec: tuple[Any, Any, Any], options: tuple[Any, ...],
    random: tuple[float, Any], want_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse) of q over what a view holds; calls of a kind that was made before take the short way.

    spec: mask, scores, sink. options: those of OPTIONS. random: dropout, seed.
    """
    key = None
    mask, scores, sink = spec
    dropout = random[0]
    short = type(dropout) in (float, int) and not dropout and (view.trusted or not view.k.is_cpu)
    if short:
        key, extra = quick.key_of(q, view.k, view.v, mask, scores, sink, options)
        if key is not None:
            key = (*key, view.kind, None if cu_seqlens_q is None else cu_seqlens_q.shape)
            found = quick.ready.get(key)
            if found is not None:
                tensors = (
                    cu_seqlens_q,
                    view.lengths,
                    view.block_table,
                    view.leftpad,
                    view.k_scale,
                    view.v_scale,
                )
                more = [*extra, *[t for t in tensors if t is not None]]
                result = quick.run(found, (q, view.k, view.v), more, want_lse)
                return result if want_lse else (result, None)  # type: ignore[return-value]
    cached = Cached(
        cu_seqlens_q, None, view.lengths, view.block_table, view.leftpad, view.k_scale, view.v_scale
    )
    written = write(
        (q, view.k, view.v), cached, mask=mask, scores=scores, sink=sink, dropout=dropout, seed=random[1],
        **dict(zip(OPTIONS, options, strict=True)),
    )  # fmt: skip
    result = call(written.tensors, written.seed, written.numbers)
    if key is not None:
        quick.remember(key, written)
    return result
