"""flash_attn_with_kvcache of flash_attn 2 and 3 on `tilewise.serving`: append to a cache in place, rotate, attend.

The cache is read where it lies, whatever its layout: pages of any size, rows named by `cache_batch_idx`, padding on
the left. Only with qv keys and values are put side by side, which copies them once per call.

Positions, as in the original: the cache of sequence b holds keys from its left padding up to its length, new
keys follow, and the last query lines up with the last key. Everything runs without gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.protocol import Append
from tilewise.checks import can_look, check_pages
from tilewise.compat.flash_spelling import Pair, dense_view, locate
from tilewise.errors import OptionError, ShapeError, message
from tilewise.serving.append import append
from tilewise.serving.cache import CacheView
from tilewise.serving.read import attend_view
from tilewise.serving.rotary import check_reach, check_table


class Cache(NamedTuple):
    """A KV cache as the originals describe it.

    k, v: (B_cache, capacity, H_kv, D), or with `table` pages (pages, page_size, H_kv, D).
    lengths: keys present, int, (B,) or None (all). rows: (B,) which batch entry each sequence uses.
    leftpad: (B,) first real key. table: (B, pages per sequence). q_factor, k_factor, v_factor: (B, H_kv) of float8
    queries, keys and values, None: 1.
    """

    k: Tensor
    v: Tensor
    lengths: int | Tensor | None = None
    rows: Tensor | None = None
    leftpad: Tensor | None = None
    table: Tensor | None = None
    q_factor: Tensor | None = None
    k_factor: Tensor | None = None
    v_factor: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Keys that one sequence can hold."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    def present(self, batch: int) -> Tensor:
        """(batch,) int32 keys present."""
        device = self.k.device
        if isinstance(self.lengths, Tensor):
            return self.lengths.to(device, torch.int32).expand(batch)
        count = self.capacity if self.lengths is None else self.lengths
        return torch.full((batch,), count, dtype=torch.int32, device=device)

    def page_factors(self, factor: Tensor | None, lengths: Tensor) -> Tensor | None:
        """(pages, H_kv) factors from those of the sequences, for sequences of `lengths` keys; a page that several
        sequences share has the factors of one of them."""
        if factor is None:
            return None
        pages, size, heads = self.k.shape[:3]
        table = self.table if self.rows is None else self.rows[:, None]
        if table is None:
            return factor.float().contiguous()
        table = table.to(factor.device, torch.int64)
        first = torch.arange(table.shape[1], device=table.device) * size
        held = (first < lengths[:, None]) & (table >= 0) & (table < pages)
        found = torch.ones(pages + 1, heads, device=factor.device)
        found[torch.where(held, table, pages)] = factor.float()[:, None].expand(-1, table.shape[1], -1)
        return found[:pages]

    def view(self, lengths: Tensor, *, reading: bool) -> CacheView:
        """The cache as calls read it, where keys have the queries' factors, too, or write it; lengths, pages and
        padding have been looked at."""
        of_k = self.k_factor
        if reading and self.q_factor is not None:
            of_k = self.q_factor if of_k is None else self.q_factor.float() * of_k.float()
        table = self.table if self.rows is None else self.rows[:, None]
        leftpad = None if self.leftpad is None else self.leftpad.to(self.k.device, torch.int32)
        return CacheView(
            self.k.transpose(1, 2), self.v.transpose(1, 2), lengths,
            None if table is None else table.to(self.k.device, torch.int32), leftpad,
            self.page_factors(of_k, lengths), self.page_factors(self.v_factor, lengths), trusted=True,
        )  # fmt: skip


class Rotary(NamedTuple):
    """Tables (positions, rotary_dim / 2), their style, and each sequence's first new position, None = its length."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    start: Tensor | None = None


def rotary_of(
    cos: Tensor | None, sin: Tensor | None, interleaved: bool, start: Tensor | None = None
) -> Rotary | None:
    """The tables of a call, or None.  Raises OptionError for one without the other, as the originals do."""
    if (cos is None) != (sin is None):
        raise OptionError("rotary_cos and rotary_sin are given together")
    return None if cos is None or sin is None else Rotary(cos, sin, interleaved, start)


class Step(NamedTuple):
    """The new tokens of one call: q (B, N, H, D) or packed (T, H, D), k and v likewise, and q's part for v."""

    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    qv: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


def cache_of(
    k: Tensor,
    v: Tensor,
    *,
    lengths: int | Tensor | None,
    rows: Tensor | None,
    leftpad: Tensor | None,
    table: Tensor | None,
) -> Cache:
    """A Cache.  Raises OptionError for pages together with rows or left padding, as the originals do."""
    for name, other in (("cache_batch_idx", rows), ("cache_leftpad", leftpad)):
        if table is not None and other is not None:
            raise OptionError(
                f"{name} and a page table exclude each other: the table says where each sequence lies"
            )
    if not isinstance(lengths, (Tensor, int, torch.SymInt, type(None))) or isinstance(lengths, bool):
        raise OptionError(f"cache_seqlens is an int, or a tensor of integers (B,), not {lengths!r}")
    return Cache(k, v, lengths, rows, leftpad, table)


def _check_step(step: Step, cache: Cache, rotary: Rotary | None) -> None:
    if (step.k is None) != (step.v is None):
        raise OptionError("new keys and new values are given together")
    if step.k is None and rotary is not None:
        raise OptionError("rotary_cos and rotary_sin rotate new keys: give k and v")
    if step.qv is not None and step.qv.shape[:-1] != step.q.shape[:-1]:
        raise ShapeError(message("qv is in q's layout, with v's head size", {"q": step.q, "qv": step.qv}))
    if step.k is not None and cache.lengths is None:
        raise OptionError("k and v are written after the keys present: give cache_seqlens")
    if cache.table is None and cache.rows is None and cache.k.shape[0] != step.batch:
        given = {"q": step.q, "k_cache": cache.k}
        raise ShapeError(
            message("the cache has q's batch size, unless cache_batch_idx says where to look", given)
        )
    _check_tables(step.batch, cache)
    if step.k is not None and step.v is not None:
        _check_new(step, cache, {"k": step.k, "v": step.v})
    if can_look(cache.k):
        _check_present(step, cache)


def _check_tables(batch: int, cache: Cache) -> None:
    """One whole number, or one row of pages, for each sequence: kernels read as many."""
    lengths = cache.lengths if isinstance(cache.lengths, Tensor) and cache.lengths.numel() != 1 else None
    numbers = (
        ("cache_seqlens", lengths, 1),
        ("cache_batch_idx", cache.rows, 1),
        ("cache_leftpad", cache.leftpad, 1),
    )
    for name, t, rank in (*numbers, ("the page table", cache.table, 2)):
        if t is None:
            continue
        whole = isinstance(t, Tensor) and not t.is_floating_point() and t.dtype != torch.bool
        if not whole or t.ndim != rank or t.shape[0] != batch:
            shape = f"({batch},)" if rank == 1 else f"({batch}, pages)"
            shown = {name: t} if isinstance(t, Tensor) else None
            raise ShapeError(message(f"{name} is a tensor of integers of shape {shape}", shown))
    if isinstance(cache.lengths, Tensor) and (
        cache.lengths.ndim > 1 or cache.lengths.is_floating_point() or cache.lengths.dtype == torch.bool
    ):
        given = {"cache_seqlens": cache.lengths}
        raise ShapeError(message("cache_seqlens is an int, or integers of shape (B,)", given))


def _check_new(step: Step, cache: Cache, new: dict[str, Tensor]) -> None:
    """New keys and values fit the cache they are written to, one batch entry for each sequence."""
    packed = step.cu_seqlens_k_new is not None
    rank = 3 if packed else 4
    for name, kept in (("k", cache.k), ("v", cache.v)):
        t = new[name]
        fits = t.ndim == rank and t.shape[-2:] == kept.shape[-2:] and t.shape[:-2] == new["k"].shape[:-2]
        if not fits or not (packed or t.shape[0] == step.batch):
            lead = "total tokens" if packed else f"{step.batch}, new tokens"
            heads, size = kept.shape[-2:]
            raise ShapeError(
                message(
                    f"{name} is ({lead}, {heads}, {size}), as its cache and q have it",
                    {**new, f"{name}_cache": kept},
                )
            )


def _check_present(step: Step, cache: Cache) -> None:
    """Lengths, rows, padding and the pages in use, on the CPU."""
    present = cache.present(step.batch)
    if present.numel() and not 0 <= int(present.min()) <= int(present.max()) <= cache.capacity:
        raise ShapeError(
            f"cache_seqlens runs from {int(present.min())} to {int(present.max())}; a sequence holds {cache.capacity}"
        )
    if cache.table is not None:
        check_pages(cache.table, cache.k.shape[1], cache.k.shape[0], (None, present))
    for name, t, most in (
        ("cache_batch_idx", cache.rows, cache.k.shape[0] - 1), ("cache_leftpad", cache.leftpad, cache.capacity),
    ):  # fmt: skip
        if t is not None and t.numel() and not 0 <= int(t.min()) <= int(t.max()) <= most:
            raise ShapeError(f"{name} runs from {int(t.min())} to {int(t.max())}, and is from 0 to {most}")


def _append(step: Step, cache: Cache, present: Tensor, rotary: Rotary | None, moving: bool) -> Pair:
    """Write the new keys and values in place; gives the turned q, (B, H, N, D) or packed, and the new lengths."""
    q = step.q if step.cu_seqlens_q is not None else step.q.transpose(1, 2)
    k, v, edges = step.k, step.v, step.cu_seqlens_k_new
    if k is None or v is None:
        return q, present
    if edges is None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        added: int | Tensor = k.shape[2]
    else:
        edges = edges.to(torch.int32)
        added = edges[1:] - edges[:-1]
    view = cache.view(present + added, reading=False)
    stored = k.element_size() == 1  # as the cache holds them
    k, v = (k.to(torch.bfloat16), v.to(torch.bfloat16)) if stored else (k, v)
    turning: dict[str, Any] = {}
    if rotary is not None:
        check_table(q, rotary.cos, rotary.sin)
        start = present if rotary.start is None else rotary.start.to(torch.int32)
        check_reach(start, added, rotary.cos)
        turning = {
            "q": q, "cu_seqlens_q": step.cu_seqlens_q, "cos": rotary.cos, "sin": rotary.sin, "first": start,
            "interleaved": rotary.interleaved, "positions_q": _query_positions(step, start, moving),
        }  # fmt: skip
    if not stored:
        turning |= {"k_scale": view.k_scale, "v_scale": view.v_scale}
    turned = append(
        Append(k, v, view.k, view.v, present, view.block_table, edges, **turning),
        trusted=not view.k.is_cpu,
    )
    return q if turned is None else turned, present + added


def _query_positions(step: Step, start: Tensor, moving: bool) -> Tensor:
    """Each query at its own position, or, where nothing depends on its row, all of them at the first new one."""
    if step.cu_seqlens_q is None:
        place = torch.arange(step.q.shape[1], dtype=torch.int32, device=step.q.device)
        return start[:, None] + (place if moving else place * 0)
    sequence, place = locate(step.cu_seqlens_q, step.q.shape[0])
    return (start[sequence] + (place if moving else place * 0)).to(torch.int32)


@torch.no_grad()
def attend(step: Step, cache: Cache, rotary: Rotary | None, options: dict[str, Any], *, moving: bool) -> Pair:
    """Append step.k and step.v, then attention of step.q over the cache.

    `moving`: whether the mask depends on q's row (causal, window, chunk), which decides q's rotary positions.

    Returns: out in q's layout, lse (B, H, N) or (H, T).
    """
    _check_step(step, cache, rotary)
    q, lengths = _append(step, cache, cache.present(step.batch), rotary, moving)
    if step.qv is not None:
        qv = step.qv if step.cu_seqlens_q is not None else step.qv.transpose(1, 2)
        q, cache = torch.cat((q, qv), -1), cache._replace(k=torch.cat((cache.k, cache.v), -1))
    edges = None if step.cu_seqlens_q is None else step.cu_seqlens_q.to(torch.int32)
    out, lse = attend_view(cache.view(lengths, reading=True), q, edges, *dense_view(options), True)
    assert lse is not None
    return (out if edges is not None else out.transpose(1, 2)), lse
