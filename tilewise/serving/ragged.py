"""Sequences of different lengths side by side: pack and unpack, edges from positions, torch's jagged tensors.

Nothing here reads a tensor on the host unless it says so, so all of it can be captured and runs without a
synchronisation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention_varlen
from tilewise.errors import DTypeError, OptionError, ShapeError, message
from tilewise.rotary import locate

__all__ = ["attention_nested", "cu_seqlens_from_lengths", "cu_seqlens_from_position_ids", "pack", "unpack"]


def cu_seqlens_from_lengths(lengths: Tensor) -> Tensor:
    """(B + 1,) int32 running sum of lengths (B,), from 0."""
    edges = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    edges[1:] = lengths.cumsum(0)
    return edges


def cu_seqlens_from_position_ids(position_ids: Tensor, max_sequences: int | None = None) -> Tensor:
    """Edges of the sequences packed in a row whose positions start anew at 0: int32.

    Args:
        position_ids: (T,) or (1, T) integers; a sequence begins where the position is 0, and at the first token.
        max_sequences: length of the result less one, if given: entries behind the last sequence are T, that is empty
            sequences, and nothing is read on the host. None: the result has the right length, which costs one read.

    Raises: ShapeError for another shape; OptionError for a max_sequences below 1.
    """
    if position_ids.ndim == 2 and position_ids.shape[0] == 1:
        position_ids = position_ids[0]
    if position_ids.ndim != 1 or position_ids.is_floating_point():
        raise ShapeError(message("position_ids are integers of shape (T,)", {"position_ids": position_ids}))
    total = position_ids.shape[0]
    token = torch.arange(total, device=position_ids.device, dtype=torch.int32)
    starts = (position_ids == 0) | (token == 0)
    if max_sequences is None:
        end = torch.full((1,), total, dtype=torch.int32, device=position_ids.device)
        return torch.cat((token[starts], end))
    if max_sequences < 1:
        raise OptionError(f"max_sequences is 1 or more, not {max_sequences}")
    edges = torch.full((max_sequences + 1,), total, dtype=torch.int32, device=position_ids.device)
    # Tokens that start nothing, and sequences beyond the most, go to a place of their own.
    place = torch.where(starts, starts.cumsum(0) - 1, max_sequences).clamp(max=max_sequences)
    edges.scatter_reduce_(0, place, token.where(starts & (place < max_sequences), total), "amin")
    return edges


def pack(x: Tensor, lengths: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """(B, H, N, D) with `lengths` (B,) used rows -> tokens (T, H, D) one sequence after another, cu_seqlens (B + 1,).

    total: T, at least the sum of lengths; rows behind the last token are 0. None: B * N, and nothing is read on the
        host. Differentiable.
    Raises: ShapeError for other shapes.
    """
    if x.ndim != 4 or lengths.shape != x.shape[:1]:
        raise ShapeError(message("x is (B, H, N, D) and lengths (B,)", {"x": x, "lengths": lengths}))
    b, _, n, _ = x.shape
    edges = cu_seqlens_from_lengths(lengths)
    sequence, row = locate(edges, b * n if total is None else total)
    inside = torch.arange(len(row), device=x.device) < edges[-1]
    tokens = x.transpose(1, 2)[sequence, row.clamp(0, max(n - 1, 0))]
    return tokens.where(inside[:, None, None], 0), edges


def unpack(tokens: Tensor, cu_seqlens: Tensor, length: int) -> Tensor:
    """(T, H, D) tokens of sequences at cu_seqlens (B + 1,) -> (B, H, length, D), 0 behind each one's end.

    length: rows of the result; longer sequences are cut. Differentiable, and the inverse of `pack`.
    Raises: ShapeError for other shapes.
    """
    if tokens.ndim != 3 or cu_seqlens.ndim != 1:
        given = {"tokens": tokens, "cu_seqlens": cu_seqlens}
        raise ShapeError(message("tokens are (T, H, D) and cu_seqlens (B + 1,)", given))
    row = torch.arange(length, device=tokens.device)
    edges = cu_seqlens.to(torch.int64)
    place = edges[:-1, None] + row
    inside = place < edges[1:, None]
    if not tokens.shape[0]:
        return tokens.new_zeros(len(edges) - 1, tokens.shape[1], length, tokens.shape[2])
    found = tokens[place.clamp(0, tokens.shape[0] - 1)].where(inside[..., None, None], 0)
    return found.transpose(1, 2)


def attention_nested(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """`attention` of torch nested tensors in the jagged layout, without padding and without reading on the host.

    Args:
        q: (B, N*, H, D) nested, layout=torch.jagged: what torch's own functions take before their transpose.
        k, v: (B, N*, H_kv, D) and (B, N*, H_kv, D_v), alike.
        options: those of `attention_varlen` that say what is computed.

    Returns: nested (B, N*, H, D_v) with q's lengths. Differentiable.
    Raises: DTypeError for tensors that are not jagged.
    """
    parts: list[Any] = [q, k, v]
    for name, t in zip("qkv", parts, strict=True):
        if not isinstance(t, Tensor) or not t.is_nested or t.layout != torch.jagged:
            raise DTypeError(f"{name} is a nested tensor with layout=torch.jagged, (B, N*, H, D)")
        if t.dim() != 4 or t.lengths() is not None:  # type: ignore[attr-defined]
            raise ShapeError(f"{name} is (B, N*, H, D), contiguous: of dimension {t.dim()}, or with holes")
    edges = [t.offsets().to(torch.int32) for t in parts[:2]]
    out = attention_varlen(*(t.values() for t in parts), *edges, **options)
    return torch.nested.nested_tensor_from_jagged(out, parts[0].offsets())
