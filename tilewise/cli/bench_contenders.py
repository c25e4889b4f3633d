"""The attentions that `tilewise bench` compares, each through the call a user would make.

    tilewise          tilewise.attention, the backend that auto takes
    tilewise:NAME     the same with a named backend
    sdpa              torch.nn.functional.scaled_dot_product_attention
    flex              torch.nn.attention.flex_attention, compiled, with a block mask
    ordinary          softmax(q kᵀ) v with the score matrix in memory, in the inputs' precision

What a user builds once (a bool mask, a block mask, compiled code) is made beforehand and is in no time.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tilewise.cli.problem_flags import MaskText, Sizes

    Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

OTHERS = ("sdpa", "flex", "ordinary")
ROWS_AT_ONCE = 1024


class Skipped(Exception):
    """Why a contender does not run a problem."""


def keep_rows(mask: MaskText, sizes: Sizes, rows: Tensor) -> Tensor:
    """Visible pairs of some rows, bool (rows, N_k), on the rows' device; the last query has the last key's position."""
    columns = torch.arange(sizes.seqlen_k, device=rows.device)[None, :]
    i = rows[:, None]
    if not mask.terms:
        return torch.ones(len(rows), sizes.seqlen_k, dtype=torch.bool, device=rows.device)
    return mask.keep(i + sizes.seqlen_k - sizes.seqlen_q, columns, i, columns).expand(
        len(rows), sizes.seqlen_k
    )


def keep_all(mask: MaskText, sizes: Sizes, device: torch.device) -> Tensor:
    """Visible pairs, bool (N_q, N_k)."""
    return keep_rows(mask, sizes, torch.arange(sizes.seqlen_q, device=device))


def visible_pairs(mask: MaskText, sizes: Sizes, device: torch.device) -> int:
    """Number of visible pairs of one head, counted without the whole matrix."""
    parts = torch.arange(sizes.seqlen_q, device=device).split(ROWS_AT_ONCE)
    return sum(int(keep_rows(mask, sizes, rows).sum()) for rows in parts)


def contender(name: str, mask: MaskText, sizes: Sizes, device: torch.device) -> Attention:
    """The attention of that name for one problem. Raises Skipped if it cannot run here."""
    if name.startswith("tilewise"):
        return _tilewise(name.partition(":")[2] or "auto", mask, sizes, device)
    return {"sdpa": _sdpa, "flex": _flex, "ordinary": _ordinary}[name](mask, sizes, device)


def _tilewise(backend: str, mask: MaskText, sizes: Sizes, device: torch.device) -> Attention:
    import tilewise as tw

    built = mask.build(sizes.seqlen_q, sizes.seqlen_k, device)
    return lambda q, k, v: tw.attention(q, k, v, mask=built, backend=backend)


def _sdpa(mask: MaskText, sizes: Sizes, device: torch.device) -> Attention:
    attend = torch.nn.functional.scaled_dot_product_attention
    options: dict = {"enable_gqa": True} if sizes.heads != sizes.heads_kv else {}
    if mask.is_causal and sizes.seqlen_q == sizes.seqlen_k:
        options["is_causal"] = True
    elif mask.terms:
        options["attn_mask"] = keep_all(mask, sizes, device)
    return lambda q, k, v: attend(q, k, v, **options)


def _flex(mask: MaskText, sizes: Sizes, device: torch.device) -> Attention:
    try:
        import torch._functorch.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        raise Skipped(f"torch {torch.__version__} has no flex_attention") from None
    block_mask = None
    if mask.terms:
        offset = sizes.seqlen_k - sizes.seqlen_q
        block_mask = create_block_mask(
            lambda b, h, i, j: mask.keep(i + offset, j, i, j),
            None,
            None,
            sizes.seqlen_q,
            sizes.seqlen_k,
            device=str(device),
        )
    # The backward pass is timed alone, again and again on one graph, whose buffers it must not take for itself.
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    gqa = sizes.heads != sizes.heads_kv

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type == "cpu" and q.requires_grad:
            raise Skipped("FlexAttention has no backward pass on the CPU")
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa)

    return attend


def _ordinary(mask: MaskText, sizes: Sizes, device: torch.device) -> Attention:
    hidden = ~keep_all(mask, sizes, device) if mask.terms else None
    scale, group = sizes.head_dim**-0.5, sizes.heads // sizes.heads_kv
    _check_memory(sizes, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Query heads that share a KV head are rows of one product: K and V are not repeated.
        rows = (q * scale).reshape(sizes.batch, sizes.heads_kv, group * sizes.seqlen_q, sizes.head_dim)
        scores = torch.matmul(rows, k.transpose(2, 3)).view(
            sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k
        )
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1).view(sizes.batch, sizes.heads_kv, -1, sizes.seqlen_k)
        return torch.matmul(weights, v).view(sizes.batch, sizes.heads, sizes.seqlen_q, sizes.head_dim_v)

    return attend


def _check_memory(sizes: Sizes, device: torch.device) -> None:
    """Refuse on the CPU what would make the system kill the process; a GPU raises by itself."""
    matrix = (
        sizes.batch * sizes.heads * sizes.seqlen_q * sizes.seqlen_k * torch.finfo(sizes.torch_dtype).bits // 8
    )
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return
    if 4 * matrix > available:
        raise Skipped(f"its matrices need {4 * matrix / 2**30:.1f} GB, {available / 2**30:.1f} GB are free")


def reference_rows(
    qkv: tuple[Tensor, Tensor, Tensor], mask: MaskText, sizes: Sizes, count: int = 64
) -> tuple[Tensor, Tensor]:
    """(rows, out) of the first batch entry and head in float64: a sample that every contender must reproduce.

    Rows without a visible key are left out: what stands there differs from library to library.
    """
    q, k, v = (t[0, 0].detach().double() for t in qkv)
    rows = torch.linspace(0, sizes.seqlen_q - 1, min(count, sizes.seqlen_q), device=q.device).long().unique()
    keep = keep_rows(mask, sizes, rows)
    seen = keep.any(dim=1)
    rows, keep = rows[seen], keep[seen]
    scores = (q[rows] @ k.T * sizes.head_dim**-0.5).masked_fill(~keep, float("-inf"))
    return rows, torch.softmax(scores, dim=-1) @ v
