"""Two attentions over disjoint keys of the same queries, merged by one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.backends.triton.compile import Build, types_of
from tilewise.backends.triton.launch import plain_launcher
from tilewise.backends.triton.launch_decode import waits_for_grids
from tilewise.backends.triton.machine import machine_of
from tilewise.backends.triton.tiles import padded

if TYPE_CHECKING:
    from torch import Tensor

NAMES = (
    "a_ptr", "a_lse_ptr", "b_ptr", "b_lse_ptr", "out_ptr", "lse_ptr", "sink_ptr", "a_b", "a_h", "a_n", "al_b", "al_h",
    "al_n", "b_b", "b_h", "b_n", "bl_b", "bl_h", "bl_n", "o_b", "o_h", "o_n", "lines", "heads", "seqlen_q", "size_dv",
)  # fmt: skip
STRIDES = NAMES[7:22]
ELEMENTS = 128
"""Numbers of a tile of rows, which one warp merges: few instructions are soonest at hand."""


def join(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], sink: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """(out in dtype, lse) of the merge of two (out, lse), float32, out (B, H, N, D_v) with lse (B, H, N), or packed
    (T, H, D_v) with (H, T); sink: one more logit of each head. None for what has gradients or lies otherwise."""
    tensors = [*a, *b] + ([] if sink is None else [sink])
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    if any(t.dtype != torch.float32 for t in tensors[:4]) or a[0].stride(-1) != 1 or b[0].stride(-1) != 1:
        return None
    out = torch.empty(a[0].shape, dtype=dtype, device=a[0].device)
    lse = torch.empty(a[1].shape, dtype=torch.float32, device=a[0].device)
    size_dv, heads, rows = out.shape[-1], lse.shape[-2], lse.shape[-1]
    lines = lse.numel()
    if not lines or not size_dv:
        return out, lse
    strides = [*_outer(a[0]), *_of_lse(a[1]), *_outer(b[0]), *_of_lse(b[1]), *_outer(out)]
    sink = None if sink is None else sink.contiguous()
    values = [a[0], a[1], b[0], b[1], out, lse, sink, *strides, lines, heads, rows, size_dv]
    dv_pad = padded(size_dv)
    block = max(1, ELEMENTS // dv_pad)
    from tilewise.backends.triton.join_kernel import join as kernel

    device = max(out.get_device(), 0)
    early = waits_for_grids(machine_of(device))
    types = types_of(NAMES, values, dict.fromkeys(STRIDES, "i64"))
    constants = (("BLOCK_M", block), ("DV_PAD", dv_pad), ("PDL", early), ("REHEARSED", early))
    build = Build(types, (), constants, 1, 1, early=early)
    plain_launcher(kernel, build, device)(-(-lines // block), values)
    return out, lse


def _outer(t: Tensor) -> tuple[int, int, int]:
    """(batch, head, row) strides of an out."""
    if t.ndim == 3:
        return 0, t.stride(1), t.stride(0)
    return t.stride(0), t.stride(1), t.stride(2)


def _of_lse(t: Tensor) -> tuple[int, int, int]:
    return (0, *t.stride()) if t.ndim == 2 else t.stride()  # type: ignore[return-value]
