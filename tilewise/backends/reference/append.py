"""New keys and values into pools, turned to their positions, in torch operations on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.rotary import locate, query_positions, turn

if TYPE_CHECKING:
    from tilewise.backends.protocol import Append

FLOAT8 = torch.float8_e4m3fn


def append(inputs: Append) -> Tensor | None:
    """Turn and write the new keys and values; gives the turned q, None where no query was to be turned."""
    k_new, v_new, lengths = inputs.k_new, inputs.v_new, inputs.lengths
    cu_new = inputs.cu_seqlens_new
    if cu_new is None:
        k_new, v_new = k_new.transpose(1, 2), v_new.transpose(1, 2)
        token = torch.arange(k_new.shape[1], device=lengths.device)
        place = lengths[:, None] + token
        sequence = torch.arange(len(lengths), device=lengths.device)[:, None]
        added: int | Tensor = k_new.shape[1]
    else:
        sequence, token = locate(cu_new, k_new.shape[0])
        place = lengths[sequence] + token
        added = cu_new[1:] - cu_new[:-1]
    q = None
    if inputs.cos is not None and inputs.sin is not None:
        first = lengths if inputs.first is None else inputs.first
        at = inputs.positions_k
        at = first[sequence] + token if at is None else at
        k_new = turn(k_new, inputs.cos, inputs.sin, at, inputs.interleaved)
        q = _turned_query(inputs, first, added)
    _write(inputs, (k_new, v_new), sequence, place, token, added)
    return q


def _turned_query(inputs: Append, first: Tensor, added: int | Tensor) -> Tensor | None:
    q, cos, sin = inputs.q, inputs.cos, inputs.sin
    if q is None or cos is None or sin is None:
        return None
    at, packed = inputs.positions_q, inputs.cu_seqlens_q is not None
    if at is None:
        at = query_positions(q, first + added, inputs.cu_seqlens_q)
    turned = turn(q if packed else q.transpose(1, 2), cos, sin, at, inputs.interleaved)
    return turned if packed else turned.transpose(1, 2)


def _write(
    inputs: Append,
    new: tuple[Tensor, Tensor],
    sequence: Tensor,
    place: Tensor,
    token: Tensor,
    added: int | Tensor,
) -> None:
    """Store the tokens in their places. On the processor the places were checked; elsewhere those outside are left
    out, which costs a synchronisation that the compiled kernels do without."""
    size, table = inputs.k.shape[2], inputs.block_table
    page = sequence.expand_as(place) if table is None else None
    if table is not None:
        entry = (place // size).clamp(0, max(table.shape[1] - 1, 0))
        page = table[sequence, entry].to(torch.int64)
    row = place % size
    assert page is not None
    kept = None
    if inputs.k.device.type != "cpu" or inputs.cu_seqlens_new is not None:
        capacity = size * (1 if table is None else table.shape[1])
        kept = (place >= 0) & (place < capacity) & (page >= 0) & (page < inputs.k.shape[0]) & (token >= 0)
        if isinstance(added, Tensor):
            kept = kept & (token < added[sequence])
        page, row = page[kept], row[kept]
    for t, pool, scale in zip(new, (inputs.k, inputs.v), (inputs.k_scale, inputs.v_scale), strict=True):
        t = t if kept is None else t[kept]
        if scale is not None:
            t = t.float() / (scale if scale.ndim == 1 else scale[page])[..., None]
        if pool.dtype == FLOAT8:
            most = torch.finfo(FLOAT8).max
            # The conversion does not saturate, and torch moves no float8 by index.
            t = t.float().clamp(-most, most).to(FLOAT8).view(torch.uint8)
            pool = pool.view(torch.uint8)
        pool[page, :, row] = t.to(pool.dtype)
