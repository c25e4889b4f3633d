"""What the arguments of flash_attn's functions say in Tilewise's words, and their layouts.

flash_attn keeps tokens before heads, (B, N, H, D); the attention here takes views with heads first and gives
back a view with tokens first, which is contiguous. Nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.errors import OptionError, ShapeError, message
from tilewise.rotary import locate
from tilewise.serving.read import OPTIONS, attend_pages
from tilewise.spec.dropout import dropout_mask
from tilewise.spec.masks import Mask, WindowLeft, WindowRight, causal, chunk, window
from tilewise.spec.scores import ScoreTerm, alibi, softcap

__all__ = [
    "Pair", "check_rank", "dense", "dense_view", "draw_seed", "even_edges", "from_pages", "locate", "packed",
    "packed_probabilities", "parts", "probabilities", "spell", "terms", "visible", "visible_signed",
]  # fmt: skip

Pair = tuple[Tensor, Tensor]


def visible(is_causal: bool, window_size: tuple[int, int], attention_chunk: int = 0) -> Mask:
    """The mask of flash_attn 2 and 3: bottom-right causal, window (left, right) with -1 unbounded, chunk.

    Raises OptionError for a size below -1.
    """
    left, right = _sizes(window_size)
    for size in (left, right):
        if size is not None and size < -1:
            raise OptionError(
                f"window_size is {tuple(window_size)}: -1 is unbounded, and other sizes count keys\n"
                "A window that leaves the diagonal is tilewise.compat.flash_attn4's, or a tilewise.custom mask."
            )
    mask = window(None if left in (-1, None) else left, None if right in (-1, None) else right)
    mask = mask & causal() if is_causal else mask
    return mask & chunk(attention_chunk) if attention_chunk else mask


def visible_signed(is_causal: bool, window_size: tuple[int | None, int | None]) -> Mask:
    """The mask of flash_attn 4: None is unbounded, and negative sizes move the window off the diagonal.

    Raises OptionError for a window without keys, which the original takes for no window at all.
    """
    left, right = _sizes(window_size)
    right = 0 if is_causal else right
    if left is not None and right is not None and left + right < 0:
        raise OptionError(
            f"window_size {tuple(window_size)}{' with causal=True' if is_causal else ''} leaves no key: it runs "
            f"from {left} keys before the query to {right} after it\n"
            "Here None is unbounded: flash_attn 2's (-1, -1) is written (None, None)."
        )
    mask = Mask() if left is None else Mask(WindowLeft.bind(ints=(left,)))
    return mask if right is None else mask & Mask(WindowRight.bind(ints=(right,)))


def _sizes(window_size: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise OptionError(f"window_size is a pair (left, right), not {window_size!r}")
    for size in window_size:
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)) or abs(size) >= 2**30
        ):
            raise OptionError(
                f"window_size counts keys: its sizes are whole numbers below 2**30, not {size!r}"
            )
    return window_size[0], window_size[1]


def terms(cap: float, alibi_slopes: Tensor | None = None) -> list[ScoreTerm]:
    """flash_attn's order: softcap (0 is off), then ALiBi, which is not capped."""
    found = [softcap(cap)] if cap else []
    return found if alibi_slopes is None else [*found, alibi(alibi_slopes)]


def spell(mask: Mask, scores: list[ScoreTerm], scale: float | None, deterministic: bool) -> dict[str, Any]:
    """Options of `attention`. False means PyTorch's switch decides, since the original's False promises nothing."""
    return {"mask": mask, "scores": scores, "scale": scale, "deterministic": deterministic or None}


def draw_seed(q: Tensor, p: float) -> Tensor | None:
    """The seed of one call, from torch's generator, where there is dropout."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device) if p else None


def dense(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Pair:
    """(B, N_q, H, D), (B, N_k, H_kv, D), (B, N_k, H_kv, D_v) -> out (B, N_q, H, D_v), lse (B, H, N_q)."""
    check_rank(4, q=q, k=k, v=v)
    first = [t.transpose(1, 2) for t in (q, k, v)]
    out, lse = attention(*first, return_lse=True, **options)
    return out.transpose(1, 2), lse


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Pair, options: dict[str, Any]) -> Pair:
    """(T_q, H, D), (T_k, H_kv, D), (T_k, H_kv, D_v) -> out (T_q, H, D_v), lse (H, T_q)."""
    check_rank(3, q=q, k=k, v=v)
    out, lse = attention_varlen(q, k, v, *cu_seqlens, return_lse=True, **options)
    return out, lse


def from_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges_q: Tensor,
    table: Tensor,
    lengths: Tensor | None,
    options: dict[str, Any],
) -> Pair:
    """q (T_q, H, D) over pages k (pages, page_size, H_kv, D) and v, read where they lie -> out (T_q, H, D_v), lse."""
    check_rank(3, q=q)
    check_rank(4, k=k, v=v)
    return attend_pages(
        q,
        k.transpose(1, 2),
        v.transpose(1, 2),
        cu_seqlens_q=edges_q,
        block_table=table,
        seqused_k=lengths,
        **options,
    )


def dense_view(options: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[float, Any]]:
    """Options of `attention` as `serving.read.attend_view` takes them: spec, the others in order, dropout and seed."""
    named: dict[str, Any] = {
        "k_offset": 0,
        "h_offset": 0,
        "batch_invariant": False,
        "backend": "auto",
        "allow_quadratic": False,
    }
    named |= options
    spec = (named["mask"], named["scores"], named.get("sink"))
    return spec, tuple(named.get(name) for name in OPTIONS), (named.get("dropout", 0.0), named.get("seed"))


def check_rank(rank: int, **tensors: Tensor) -> None:
    """Raise ShapeError unless every tensor has that many dimensions."""
    for name, t in tensors.items():
        if t.ndim != rank:
            shape = {3: "(total tokens, heads, head size)", 4: "(batch, tokens, heads, head size)"}[rank]
            raise ShapeError(message(f"{name} has {rank} dimensions, {shape}", {name: t}))


def parts(name: str, packed: Tensor, rank: int) -> tuple[Tensor, ...]:
    """Views of the parts of qkv or kv, which lie side by side in the dimension before heads and head size.

    Raises ShapeError for another number of dimensions or parts.
    """
    if packed.ndim != rank or packed.shape[-3] != len(name):
        lead = "batch, tokens" if rank == 5 else "total tokens"
        raise ShapeError(message(f"{name} is ({lead}, {len(name)}, heads, head size)", {name: packed}))
    return packed.unbind(-3)


def even_edges(batch: int, length: int, device: torch.device) -> Tensor:
    """cu_seqlens of `batch` sequences of one length, int32 (batch + 1,)."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def probabilities(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """flash_attn 2's S_dmask: the weights before dropout, (B, H, N_q, N_k) in q's dtype, negative where dropped.

    Quadratic memory, for inspection. The weights are attention with the identity as values.
    """
    p, seed = options["dropout"], options["seed"]
    with torch.no_grad():
        size = k.shape[1]
        eye = torch.eye(size, dtype=q.dtype, device=q.device)[None, :, None, :].expand(*k.shape[:3], size)
        weights = dense(q, k, eye, {**options, "dropout": 0.0, "seed": None})[0].transpose(1, 2)
        kept = dropout_mask(seed, p, q.shape[0], q.shape[2], q.shape[1], size)
        return torch.where(kept, weights, -weights)


def packed_probabilities(q: Tensor, k: Tensor, cu_seqlens: Pair, options: dict[str, Any]) -> Tensor:
    """The same for packed tensors: (B, H, longest q, longest k), 0 beyond each sequence."""
    p, seed = options["dropout"], options["seed"]
    lengths = [(cu[1:] - cu[:-1]).to(torch.int64) for cu in cu_seqlens]
    batch, longest_q, longest_k = len(lengths[0]), *(int(n.max()) if len(n) else 0 for n in lengths)
    with torch.no_grad():
        _, column = locate(cu_seqlens[1], k.shape[0])
        columns = torch.arange(longest_k, device=q.device)
        one_hot = (column[:, None] == columns).to(q.dtype)[:, None].expand(*k.shape[:2], longest_k)
        weights = packed(q, k, one_hot, cu_seqlens, {**options, "dropout": 0.0, "seed": None})[0]
        sequence, row = locate(cu_seqlens[0], q.shape[0])
        result = q.new_zeros(batch, longest_q, q.shape[1], longest_k)
        result[sequence, row] = weights
        kept = dropout_mask(
            seed, p, batch, q.shape[1], longest_q, longest_k, q_offset=lengths[1] - lengths[0]
        )
        weights = result.transpose(1, 2)
        return torch.where(kept, weights, -weights)
