"""The backward passes of FlashAttention-1 and -2 on a memory of two levels. Priced in `schedule_flash`.

For one tile, with p = exp(s - lse) recomputed: dv += p^T do, dp = do v^T, ds = p (dp - delta), dq += ds k,
dk += ds^T q, where delta = rowsum(do * out).

Sources: Dao et al. 2022 (https://arxiv.org/abs/2205.14135), algorithm 4; Dao 2023
(https://arxiv.org/abs/2307.08691), algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.analysis.kernels import hide
from tilewise.analysis.schedule_flash import finite
from tilewise.analysis.two_level import Range, TwoLevelMemory, ranges

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.analysis.sizes import Sizes, Tiles

__all__ = ["run_backward"]


def run_backward(
    memory: TwoLevelMemory,
    sizes: Sizes,
    tiles: Tiles,
    scale: float,
    keep: Tensor | None = None,
    *,
    delta_once: bool,
) -> None:
    """Reads q, k, v, out, do, and lse (-2) or m and l (-1); fills dq, dk, dv. delta_once is -2's first pass."""
    if delta_once:
        _row_sums(memory, sizes, tiles)
    d, dv = (0, sizes.head_dim), (0, sizes.head_dim_v)
    seen: set[Range] = set()
    for columns in ranges(sizes.seqlen_k, tiles.block_k):
        started = False
        for rows in ranges(sizes.seqlen_q, tiles.block_q):
            if keep is not None and not keep[slice(*rows), slice(*columns)].any():
                continue
            # What stays first: keys, values and their gradients; then what passes by.
            k, v = memory.read("k", columns, d), memory.read("v", columns, dv)
            sofar = (memory.held("dk"), memory.held("dv")) if started else None
            q, do = memory.read("q", rows, d), memory.read("do", rows, dv)
            low, factor, delta = _row_numbers(memory, rows, dv, do, delta_once)
            dq = memory.read("dq", rows, d) if rows in seen else None
            s = hide(scale * (q @ k.mT), (rows, columns), keep)
            p = memory.hold("p", torch.exp(s - low[:, None]) * factor[:, None])
            ds = memory.hold("ds", scale * p * (do @ v.mT - delta[:, None]))
            dk, dvalue = ds.mT @ q, p.mT @ do
            memory.hold("dk", dk if sofar is None else dk + sofar[0])
            memory.hold("dv", dvalue if sofar is None else dvalue + sofar[1])
            memory.write("dq", (rows, d), ds @ k if dq is None else dq + ds @ k)
            memory.release("p")
            memory.release("ds")
            seen.add(rows)
            started = True
        if started:
            memory.write("dk", (columns, d), memory.release("dk"))
            memory.write("dv", (columns, dv), memory.release("dv"))
    memory.flush()


def _row_numbers(
    memory: TwoLevelMemory, rows: Range, dv: Range, do: Tensor, delta_once: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(pivot, factor, delta) of these rows: p = exp(s - pivot) * factor."""
    if delta_once:
        lse = memory.read("lse", rows)
        return finite(lse), torch.ones_like(lse), memory.read("delta", rows)
    delta = (do * memory.read("out", rows, dv)).sum(-1)
    total = memory.read("l", rows)
    return finite(memory.read("m", rows)), 1 / total.masked_fill(total == 0, 1.0), delta


def _row_sums(memory: TwoLevelMemory, sizes: Sizes, tiles: Tiles) -> None:
    """delta = rowsum(do * out), a kernel of its own."""
    dv = (0, sizes.head_dim_v)
    for rows in ranges(sizes.seqlen_q, tiles.block_q):
        delta = (memory.read("do", rows, dv) * memory.read("out", rows, dv)).sum(-1)
        memory.write("delta", (rows,), delta)
    memory.flush()
