"""flash_attn.layers.rotary: rotary position embeddings, out of place and in place, differentiable in x.

The first `rotary_dim` entries of each head are rotated in float32 (float64 for float64) and rounded once.
Source: Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864; XPos: Sun et al. 2022, https://arxiv.org/abs/2212.10554.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise.compat.flash_spelling import check_rank
from tilewise.errors import OptionError, ShapeError, message
from tilewise.serving.rotary import locate, rotate

__all__ = [
    "RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]  # fmt: skip


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotate x by the angle of each token's position.

    Args:
        x: (B, N, H, D), or (T, H, D) with cu_seqlens.
        cos, sin: (positions, rotary_dim / 2).
        interleaved: pairs are neighbours (GPT-J) instead of the two halves (GPT-NeoX, Llama).
        inplace: also write the result into x.
        seqlen_offsets: first position, int or (B,).
        cu_seqlens: (B + 1,) of packed sequences; max_seqlen is accepted and not needed.

    Returns: the rotated tensor (x itself with inplace).
    Raises: ShapeError for positions beyond the tables, and for other shapes.
    """
    check_rank(4 if cu_seqlens is None else 3, x=x)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, Tensor) and seqlen_offsets.shape not in ((batch,), (1,)):
        given = {"x": x, "seqlen_offsets": seqlen_offsets}
        raise ShapeError(message(f"seqlen_offsets is an int, or has shape ({batch},)", given))
    offsets = seqlen_offsets.to(torch.int64).expand(batch) if isinstance(seqlen_offsets, Tensor) else None
    if cu_seqlens is not None:
        sequence, place = locate(cu_seqlens, x.shape[0])
        positions = place + (seqlen_offsets if offsets is None else offsets[sequence])
    else:
        positions = torch.arange(x.shape[1], device=x.device)
        positions = positions + (seqlen_offsets if offsets is None else offsets[:, None])
    # Where x is overwritten the rotation must not read it again in the backward.
    rotated = rotate(x.clone() if inplace else x, cos, sin, positions, interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`apply_rotary_emb` with positions from 0; cos and sin (N, rotary_dim / 2)."""
    return apply_rotary_emb(x, cos, sin, interleaved)


def _query_and_key(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    """Views of q and k in (B, N, 3, H, D) or (B, N, H + 2 H_kv, D)."""
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1]
    if qkv.ndim != 4 or num_heads_q is None or (qkv.shape[2] - num_heads_q) % 2:
        raise ShapeError(
            message(
                "qkv is (B, N, 3, H, D), or (B, N, H + 2 H_kv, D) with num_heads_q",
                {"qkv": qkv},
                "Give num_heads_q for grouped heads.",
            )
        )
    heads_kv = (qkv.shape[2] - num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_kv]


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotate q and k inside qkv, in place; cos_k and sin_k are k's own tables. Returns qkv."""
    q, k = _query_and_key(qkv, num_heads_q)
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k inside kv (B, N, 2, H_kv, D), in place. Returns kv."""
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise ShapeError(message("kv is (B, N, 2, H_kv, D)", {"kv": kv}))
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(nn.Module):
    """Tables of angles for `dim` rotated entries, made when a longer sequence comes; rotates in place.

    Args:
        dim: rotary_dim. base: of the frequencies base^(-2i/dim).
        interleaved: as in `apply_rotary_emb`.
        scale_base: XPos's decay, or None.
    """

    inv_freq: Tensor

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
        device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._tables: tuple[Tensor, ...] = ()

    def _frequencies(self, device: Any) -> Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _angles(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(cos, sin, cos_k, sin_k) for positions below `length`; float32 until the last step."""
        kept = self._tables
        if kept and kept[0].shape[0] >= length and kept[0].device == device and kept[0].dtype == dtype:
            if not (self.training and kept[0].is_inference()):
                return kept
        position = torch.arange(length, device=device, dtype=torch.float32)
        angle = torch.outer(position, self._frequencies(device))
        cos, sin = torch.cos(angle), torch.sin(angle)
        tables = (cos, sin, cos, sin)
        if self.scale_base is not None:
            even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
            decay = (even + 0.4 * self.dim) / (1.4 * self.dim)
            scale = decay ** ((position - length // 2) / self.scale_base)[:, None]
            tables = (cos * scale, sin * scale, cos / scale, sin / scale)
        self._tables = tuple(t.to(dtype) for t in tables)
        return self._tables

    def forward(
        self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None, num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """qkv as in `apply_rotary_emb_qkv_`, or q (B, N, H, D) with kv (B, N, 2, H_kv, D); both are changed in place.

        Raises OptionError for a tensor seqlen_offset without max_seqlen while no table is long enough.
        """
        if max_seqlen is None and isinstance(seqlen_offset, Tensor):
            if not self._tables:
                raise OptionError("a tensor seqlen_offset needs max_seqlen, the longest position plus one")
            max_seqlen = self._tables[0].shape[0]
        length = qkv.shape[1] + int(seqlen_offset) if max_seqlen is None else max_seqlen
        cos, sin, cos_k, sin_k = self._angles(length, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
