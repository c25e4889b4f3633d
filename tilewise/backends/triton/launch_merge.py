"""Merging two partial results in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.backends.triton.compile import Build, types_of
from tilewise.backends.triton.launch import plain_launcher
from tilewise.backends.triton.tiles import padded
from tilewise.problem import empty_in_order

if TYPE_CHECKING:
    from torch import Tensor

NAMES = (
    "a_ptr", "a_lse_ptr", "b_ptr", "b_lse_ptr", "sink_ptr", "out_ptr", "lse_ptr",
    "a_b", "a_h", "a_n", "a_d", "al_b", "al_h", "al_n", "b_b", "b_h", "b_n", "b_d", "bl_b", "bl_h", "bl_n",
    "o_b", "o_h", "o_n", "o_d", "ol_b", "ol_h", "ol_n", "lines", "heads", "rows", "size_dv",
)  # fmt: skip
_KINDS = dict.fromkeys(NAMES[7:29], "i64")
BLOCK_M = 4


def merge_two(
    first: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor], sink: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of two partial results (out, lse), which are disjoint, without gradients.

    Args:
        first, rest: out (B, H, N, D_v) and lse (B, H, N), or packed (T, H, D_v) and (H, T), float32, any strides.
        sink: (H,), merged once, or None. like: out gets its type and, as far as shapes allow, its order in memory.
    """
    out = empty_in_order(like, tuple(first[0].shape), like.dtype)
    lse = torch.empty(first[1].shape, dtype=torch.float32, device=like.device)
    strides: list[int] = []
    for o, s in (first, rest, (out, lse)):
        strides += o.stride() if o.ndim == 4 else (0, o.stride(1), o.stride(0), o.stride(2))
        strides += s.stride() if s.ndim == 3 else (0, s.stride(0), s.stride(1))
    heads, rows = lse.shape[-2:]
    values = (
        *first, *rest, None if sink is None else sink.contiguous(), out, lse, *strides, lse.numel(), heads, rows,
        out.shape[-1],
    )  # fmt: skip
    constants = (("BLOCK_M", BLOCK_M), ("DV_PAD", padded(out.shape[-1])))
    from tilewise.backends.triton.merge_kernel import merge_two as kernel

    run = plain_launcher(kernel, Build(types_of(NAMES, values, _KINDS), (), constants, 4, 1), max(out.get_device(), 0))
    run(-(-lse.numel() // BLOCK_M), values)
    return out, lse
