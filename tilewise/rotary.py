"""Rotary positions: the arithmetic that every floor above shares.

Source: Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (..., H, D) turned by the angles in rows `positions` of cos and sin; positions broadcast to (...).

    The first 2 * cos.shape[1] entries of each head are turned in float32 (float64 for float64) and rounded once.
    Positions are clamped to the tables. Differentiable in x.
    """
    half, rows = cos.shape[-1], cos.shape[0]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    row = positions.clamp(0, max(rows - 1, 0))
    c, s = (t[row].to(wide)[..., None, :] for t in (cos, sin))
    whole = 2 * half == x.shape[-1]
    part = (x if whole else x[..., : 2 * half]).to(wide)
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    turned = turned.to(x.dtype)
    return turned if whole else torch.cat((turned, x[..., 2 * half :]), -1)


def locate(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(sequence, place inside it) of each of `total` packed tokens, int64 (total,); nothing is read on the host.

    Tokens before the first sequence have a negative place, tokens behind the last one a place from its length on.
    """
    token = torch.arange(total, device=cu_seqlens.device)
    edges = cu_seqlens.to(torch.int64)
    sequence = torch.searchsorted(edges[1:].contiguous(), token, right=True).clamp(max=max(len(edges) - 2, 0))
    return sequence, token - edges[sequence]


def query_positions(q: Tensor, end: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """Positions of the rows of q whose last one stands before `end` (B,): (B, N) or packed (T,)."""
    if cu_seqlens_q is None:
        return end[:, None] + torch.arange(-q.shape[2], 0, device=q.device)
    sequence, row = locate(cu_seqlens_q, q.shape[0])
    rows = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    return (end - rows)[sequence] + row
