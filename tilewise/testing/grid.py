"""Index tensors of one dense problem: what the hand-written mask and score formulas are written in.

A `Grid` names the same quantities as an atom does (positions q and k, rows i, columns j, batch b, query head
h, KV head g), each as an int64 tensor that broadcasts to (B, H, seqlen_q, seqlen_k). Nothing here knows the
expression tree, so a formula written on a grid checks the tree and its printers independently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Broadcastable int64 indices: b (B,1,1,1), h and g (1,H,1,1), i (1,1,Nq,1), j (1,1,1,Nk), q (B,1,Nq,1),
    k (B,1,1,Nk).
    """

    b: Tensor
    h: Tensor
    g: Tensor
    i: Tensor
    j: Tensor
    q: Tensor
    k: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, num_heads_q, seqlen_q, seqlen_k)."""
        return (self.b.shape[0], self.h.shape[1], self.i.shape[2], self.j.shape[3])


def make_grid(
    batch: Tensor, heads: tuple[int, int], lengths: tuple[int, int], offsets: tuple[Tensor, Tensor]
) -> Grid:
    """Build the grid of sequences `batch` (B,) int64 with (H, Hkv) heads, (Nq, Nk) rows and columns, and (B,)
    position offsets.
    """
    num_heads_q, num_heads_kv = heads
    group = num_heads_q // num_heads_kv if num_heads_kv else 1
    h = torch.arange(num_heads_q).view(1, -1, 1, 1)
    i = torch.arange(lengths[0]).view(1, 1, -1, 1)
    j = torch.arange(lengths[1]).view(1, 1, 1, -1)
    q_offset, k_offset = (t.to(torch.int64).view(-1, 1, 1, 1) for t in offsets)
    return Grid(b=batch.view(-1, 1, 1, 1), h=h, g=h // group, i=i, j=j, q=i + q_offset, k=j + k_offset)


def gather(leaf: Tensor, *index: Tensor) -> Tensor:
    """leaf[index...] with one broadcastable index tensor per dimension; a dimension of size 1 is broadcast.
    Differentiable in leaf.
    """
    return leaf[
        tuple(torch.zeros_like(x) if size == 1 else x for x, size in zip(index, leaf.shape, strict=True))
    ]
