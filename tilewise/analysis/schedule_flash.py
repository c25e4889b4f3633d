"""FlashAttention on a memory of two levels: the orders of the literature, forward and backward.

FlashAttention-1 takes a tile of keys and passes all queries by it; out, m and l travel with the queries, divided at
each step. FlashAttention-2 takes a tile of queries and passes all keys by it; m, l and the undivided out stay, and
the division comes once. Backward, both take a tile of keys, whose gradients stay, and pass the queries by with dq;
-1 reads out to recompute rowsum(do * out) at each step, -2 computes that once and reads one number a row.

Sources: Dao et al. 2022 (https://arxiv.org/abs/2205.14135), algorithms 1 and 4; Dao 2023
(https://arxiv.org/abs/2307.08691), algorithms 1 and 2. Block sizes from M as in the first, line 1: M / 4d keys and
at most d queries (transposed for -2); where scores and statistics would not fit beside them, the smaller side
shrinks. Backward, where twice as many tiles of that size stay, M / 8d.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.analysis.kernels import hide
from tilewise.analysis.sizes import Sizes, Tiles, Visit
from tilewise.analysis.two_level import Range, Traffic, TwoLevelMemory, ranges
from tilewise.errors import OptionError, message

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["predict", "predict_backward", "run_keys_outer", "run_queries_outer", "tiles_for", "working_set"]


def tiles_for(sizes: Sizes, capacity: int, backward: bool = False, *, keys_outer: bool) -> Tiles:
    """Tiles for a fast memory of `capacity` elements: the outer side as large as the papers say.

    Raises: OptionError if not even one query and one key fit.
    """
    widths, dim = sizes.widths, max(sizes.head_dim, sizes.head_dim_v)
    if backward:
        outer = min(capacity // (4 * widths), sizes.seqlen_k)
        row, fixed = 2 * widths + 2, 2 * widths * outer
        inner = min(outer, dim, sizes.seqlen_q, (capacity - fixed) // (row + 2 * outer))
        tiles = Tiles(inner, outer)
    else:
        longest = sizes.seqlen_k if keys_outer else sizes.seqlen_q
        outer = min(capacity // (2 * widths), longest)
        per_inner = (widths + 2 if keys_outer else widths) + outer
        fixed = outer * (widths if keys_outer else widths + 2)
        inner = min(
            outer, dim, sizes.seqlen_q if keys_outer else sizes.seqlen_k, (capacity - fixed) // per_inner
        )
        tiles = Tiles(inner, outer) if keys_outer else Tiles(outer, inner)
    if min(tiles[:2]) < 1:
        raise OptionError(message(
            f"a fast memory of {capacity} elements holds no tile: head dims {sizes.head_dim} and {sizes.head_dim_v} "
            f"need about {8 if backward else 4} times their size"))  # fmt: skip
    return tiles


def working_set(sizes: Sizes, tiles: Tiles, backward: bool = False, *, keys_outer: bool) -> int:
    """Elements that one step needs in the fast memory at once."""
    widths = sizes.widths
    bq, bk = min(tiles.block_q, sizes.seqlen_q), min(tiles.block_k, sizes.seqlen_k)
    if backward:
        row = 2 * sizes.head_dim + (2 if keys_outer else 1) * sizes.head_dim_v + 2
        return bq * row + 2 * bk * widths + 2 * bq * bk
    return bq * (widths + 2) + bk * widths + bq * bk


class Part(NamedTuple):
    """One tensor of an outer or inner tile: elements of a row, and whether it is made on the chip and written."""

    width: int
    made: bool = False


class Order(NamedTuple):
    """What a loop order keeps and what passes by it, and how many tiles of scores lie beside them."""

    keys_outer: bool
    stays: tuple[Part, ...]
    passes: tuple[Part, ...]
    scores: int


def predict(
    sizes: Sizes, tiles: Tiles, capacity: int, visit: Visit | None = None, *, keys_outer: bool
) -> Traffic:
    """Elements moved forward, from sizes, tiles and loop order. Nothing is assumed of a kernel.

    What stays is read once for each outer tile, what passes by for each step, unless so little passes that it is
    still there when the next outer tile comes.
    """
    query, key, value = Part(sizes.head_dim), Part(sizes.head_dim), Part(sizes.head_dim_v)
    out, number = Part(sizes.head_dim_v, True), Part(1, True)
    if keys_outer:
        order = Order(True, (key, value), (query, out, number, number), 1)
    else:
        order = Order(False, (query, out, number), (key, value), 1)
    return _price(sizes, tiles, visit, order, capacity)


def predict_backward(
    sizes: Sizes, tiles: Tiles, capacity: int, visit: Visit | None = None, *, delta_once: bool
) -> Traffic:
    """Elements moved backward, keys outer. delta_once: rowsum(do * out) is a pass of its own."""
    d, dv = Part(sizes.head_dim), Part(sizes.head_dim_v)
    out = () if delta_once else (dv,)
    gradients = d._replace(made=True), dv._replace(made=True)
    order = Order(True, (d, dv, *gradients), (d, dv, *out, Part(1), Part(1), gradients[0]), 2)
    price = _price(sizes, tiles, visit, order, capacity)
    row_sums = Traffic(2 * sizes.seqlen_q * sizes.head_dim_v, sizes.seqlen_q)
    return price.plus(row_sums) if delta_once else price


def _price(sizes: Sizes, tiles: Tiles, visit: Visit | None, order: Order, capacity: int) -> Traffic:
    """What an order moves: what is made is written as often as it passes, and read as often but once."""
    outer = ranges(
        *((sizes.seqlen_k, tiles.block_k) if order.keys_outer else (sizes.seqlen_q, tiles.block_q))
    )
    inner = ranges(
        *((sizes.seqlen_q, tiles.block_q) if order.keys_outer else (sizes.seqlen_k, tiles.block_k))
    )
    if visit is not None:
        steps = [(a, b) for a in outer for b in inner if visit(*((b, a) if order.keys_outer else (a, b)))]
        loaded = _loaded(steps, order, capacity)
        outer, inner = list({a for a, _ in steps}), list({b for _, b in steps})
    else:
        loaded = _repeated(outer, inner, order, capacity)
    stays, first = (sum(stop - start for start, stop in parts) for parts in (outer, inner))
    loads = sum(part.width * stays for part in order.stays if not part.made)
    stores = sum(part.width * stays for part in order.stays if part.made)
    for part, rows in zip(order.passes, loaded, strict=True):
        loads += part.width * (rows - first * part.made)
        stores += part.width * rows * part.made
    return Traffic(loads, stores)


def _repeated(outer: list[Range], inner: list[Range], order: Order, capacity: int) -> list[int]:
    """`_loaded` where every tile is visited: from the third on outer tiles meet the same, but for a shorter last."""

    def loaded(chosen: list[Range]) -> list[int]:
        return _loaded([(a, b) for a in chosen for b in inner], order, capacity)

    if len(outer) <= 4:
        return loaded(outer)
    two, three, ending = loaded(outer[:2]), loaded(outer[:3]), loaded([*outer[:3], outer[-1]])
    more = len(outer) - 4
    return [end + more * (c - b) for end, c, b in zip(ending, three, two, strict=True)]


def _loaded(steps: list[tuple[Range, Range]], order: Order, capacity: int) -> list[int]:
    """Rows of each part that passes by and is not there, in these steps; what was used last is, as far as it fits."""
    recent: OrderedDict[tuple[int, Range], int] = OrderedDict()
    loaded = [0] * len(order.passes)
    # In the order of their last use in a step: what is made for the outer tile is written after what passed.
    parts = [(0, part, -1) for part in order.stays if not part.made]
    parts += [(1, part, number) for number, part in enumerate(order.passes)]
    parts += [(0, part, -1) for part in order.stays if part.made]
    used = 0
    for step in steps:
        for place, (side, part, number) in enumerate(parts):
            start, stop = step[side]
            key = place, (start, stop)
            if key in recent:
                recent.move_to_end(key)
                continue
            if number >= 0:
                loaded[number] += stop - start
            while used + part.width * (stop - start) > capacity and recent:
                used -= recent.popitem(last=False)[1]
            recent[key] = part.width * (stop - start)
            used += recent[key]
        scores = order.scores * (step[0][1] - step[0][0]) * (step[1][1] - step[1][0])
        while used + scores > capacity and recent:
            used -= recent.popitem(last=False)[1]
    return loaded


def weights(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l, p) of one tile of scores: maximum, sum, and weights exp(s - m), 0 in rows that see nothing."""
    m = s.amax(-1)
    p = torch.exp(s - finite(m)[:, None])
    return m, p.sum(-1), p


def finite(m: Tensor) -> Tensor:
    """m, but 0 where no key has been seen: exp(-inf - 0) is the 0 it should be."""
    return m.masked_fill(m == -torch.inf, 0.0)


def run_keys_outer(
    memory: TwoLevelMemory, sizes: Sizes, tiles: Tiles, scale: float, keep: Tensor | None = None
) -> None:
    """FlashAttention-1, algorithm 1: reads q, k, v, fills out, m and l. out is divided at each step."""
    d, dv = (0, sizes.head_dim), (0, sizes.head_dim_v)
    seen: set[Range] = set()
    for columns in ranges(sizes.seqlen_k, tiles.block_k):
        for rows in ranges(sizes.seqlen_q, tiles.block_q):
            if keep is not None and not keep[slice(*rows), slice(*columns)].any():
                continue
            k, v = memory.read("k", columns, d), memory.read("v", columns, dv)
            q = memory.read("q", rows, d)
            state = None
            if rows in seen:
                state = memory.read("out", rows, dv), memory.read("m", rows), memory.read("l", rows)
            s = memory.hold("scores", hide(scale * (q @ k.mT), (rows, columns), keep))
            top, total, p = weights(s)
            out = p @ v
            if state is not None:
                m = torch.maximum(top, state[1])
                old, new = state[2] * torch.exp(state[1] - finite(m)), torch.exp(top - finite(m))
                total = old + new * total
                out = old[:, None] * state[0] + new[:, None] * out
                top = m
            memory.write("out", (rows, dv), out / total.masked_fill(total == 0, 1.0)[:, None])
            memory.write("m", (rows,), top)
            memory.write("l", (rows,), total)
            memory.release("scores")
            seen.add(rows)
    memory.flush()


def run_queries_outer(
    memory: TwoLevelMemory, sizes: Sizes, tiles: Tiles, scale: float, keep: Tensor | None = None
) -> None:
    """FlashAttention-2, algorithm 1: reads q, k, v, fills out and lse. out is divided once, at the end."""
    d, dv = (0, sizes.head_dim), (0, sizes.head_dim_v)
    for rows in ranges(sizes.seqlen_q, tiles.block_q):
        started = False
        for columns in ranges(sizes.seqlen_k, tiles.block_k):
            if keep is not None and not keep[slice(*rows), slice(*columns)].any():
                continue
            q = memory.read("q", rows, d)
            state = memory.held("state") if started else None
            k, v = memory.read("k", columns, d), memory.read("v", columns, dv)
            s = memory.hold("scores", hide(scale * (q @ k.mT), (rows, columns), keep))
            m = s.amax(-1) if state is None else torch.maximum(state[:, -2], s.amax(-1))
            p = torch.exp(s - finite(m)[:, None])
            fresh = torch.cat([p @ v, torch.zeros_like(m)[:, None], p.sum(-1, keepdim=True)], 1)
            memory.release("scores")
            if state is not None:
                fresh += torch.exp(state[:, -2] - finite(m))[:, None] * state.index_fill(
                    1, torch.tensor([dv[1]]), 0.0
                )
            fresh[:, -2] = m
            memory.hold("state", fresh)  # out, m and l of these rows in one piece
            started = True
        if started:
            state = memory.release("state")
            total = state[:, -1].masked_fill(state[:, -1] == 0, 1.0)
            memory.write("out", (rows, dv), state[:, :-2] / total[:, None])
            memory.write("lse", (rows,), state[:, -2] + torch.log(state[:, -1]))
    memory.flush()
