"""flash_attn_with_kvcache of flash_attn 2 and 3: append to a cache in place, rotate, attend.

Built from a gather and one attention call: right for every layout, and no faster than that. A paged cache or
one read through `cache_batch_idx` is copied once per call; a plain cache is read where it lies.

Positions, as in the original: the cache of sequence b holds keys from its left padding up to its length, new
keys follow, and the last query lines up with the last key. Everything runs without gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.compat.flash_spelling import Pair, dense, even_edges, locate, packed
from tilewise.compat.rotary import rotate
from tilewise.errors import OptionError, ShapeError, message
from tilewise.spec.masks import Mask, key_padding
from tilewise.spec.term import Atom


class AfterPadding(Atom):
    """Keys at positions from 0 on."""

    name = "after_padding"

    @staticmethod
    def keep(k: Any) -> Any:
        return k >= 0


class Cache(NamedTuple):
    """A KV cache as the originals describe it.

    k, v: (B_cache, capacity, H_kv, D), or with `table` pages (pages, page_size, H_kv, D).
    lengths: keys present, int, (B,) or None (all). rows: (B,) which batch entry each sequence uses.
    leftpad: (B,) first real key. table: (B, pages per sequence).
    """

    k: Tensor
    v: Tensor
    lengths: int | Tensor | None = None
    rows: Tensor | None = None
    leftpad: Tensor | None = None
    table: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Keys that one sequence can hold."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    def present(self, batch: int) -> Tensor:
        """(batch,) int64 keys present."""
        device = self.k.device
        if isinstance(self.lengths, Tensor):
            return self.lengths.to(device, torch.int64).expand(batch)
        return torch.full((batch,), self.capacity if self.lengths is None else self.lengths, device=device)

    def places(self, sequence: Tensor, position: Tensor) -> Pair:
        """Where key `position` of `sequence` lies: indices into the first two dimensions of k and v."""
        if self.table is not None:
            size = self.k.shape[1]
            return self.table[sequence, position // size].to(torch.int64), position % size
        return (sequence if self.rows is None else self.rows.to(torch.int64)[sequence]), position

    def whole(self, t: Tensor, batch: int) -> Tensor:
        """(batch, capacity, H_kv, D): a view of a plain cache, a copy of a paged or indexed one."""
        if self.table is not None:
            pages = self.table.to(torch.int64).clamp(
                0, max(t.shape[0] - 1, 0)
            )  # entries beyond a length hold anything
            return t[pages].flatten(1, 2)
        return t[:batch] if self.rows is None else t[self.rows.to(torch.int64)]


class Rotary(NamedTuple):
    """Tables (positions, rotary_dim / 2), their style, and each sequence's first new position, None = its length."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    start: Tensor | None = None


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
    if isinstance(lengths, Tensor) and (lengths.is_floating_point() or lengths.ndim > 1):
        raise ShapeError(
            message("cache_seqlens is an int, or integers of shape (B,)", {"cache_seqlens": lengths})
        )
    return Cache(k, v, lengths, rows, leftpad, table)


def _check_step(step: Step, cache: Cache, rotary: Rotary | None) -> None:
    if (step.k is None) != (step.v is None):
        raise OptionError("new keys and new values are given together")
    if step.k is None and rotary is not None:
        raise OptionError("rotary_cos and rotary_sin rotate new keys: give k and v")
    if step.k is not None and cache.lengths is None:
        raise OptionError("k and v are written after the keys present: give cache_seqlens")
    if cache.table is None and cache.rows is None and cache.k.shape[0] != step.batch:
        given = {"q": step.q, "k_cache": cache.k}
        raise ShapeError(
            message("the cache has q's batch size, unless cache_batch_idx says where to look", given)
        )
    if cache.k.device.type != "cpu" or torch.compiler.is_compiling():
        return
    present = cache.present(step.batch)
    if present.numel() and not 0 <= int(present.min()) <= int(present.max()) <= cache.capacity:
        raise ShapeError(
            f"cache_seqlens runs from {int(present.min())} to {int(present.max())}; a sequence holds {cache.capacity}"
        )


def check_pages(cache: Cache, lengths: Tensor) -> None:
    """Every page that holds keys exists; looked at on the CPU, clamped elsewhere."""
    if cache.table is None or cache.table.device.type != "cpu" or torch.compiler.is_compiling():
        return
    used = torch.arange(cache.table.shape[1]) * cache.k.shape[1] < lengths[:, None]
    wrong = used & ((cache.table < 0) | (cache.table >= cache.k.shape[0]))
    if bool(wrong.any()):
        b, page = wrong.nonzero()[0].tolist()
        raise ShapeError(
            f"page {page} of sequence {b} is {int(cache.table[b, page])}, and there are {cache.k.shape[0]} pages"
        )


def _append(step: Step, cache: Cache, present: Tensor, rotary: Rotary | None) -> Tensor:
    """Write the new keys and values in place; returns how many each sequence got, (B,) int64."""
    k, v = step.k, step.v
    if k is None or v is None:
        return torch.zeros_like(present)
    if step.cu_seqlens_k_new is None:
        sequence = torch.arange(k.shape[0], device=k.device)[:, None]
        place = torch.arange(k.shape[1], device=k.device)
        added = torch.full_like(present, k.shape[1])
    else:
        sequence, place = locate(step.cu_seqlens_k_new, k.shape[0])
        added = (step.cu_seqlens_k_new[1:] - step.cu_seqlens_k_new[:-1]).to(torch.int64)
    lengths = present + added
    looked_at = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
    if looked_at and bool((lengths > cache.capacity).any()):
        b = int(lengths.argmax())
        raise ShapeError(
            f"sequence {b} would hold {int(lengths[b])} keys, and has room for {cache.capacity}\n"
            "Give a longer cache, or more pages in the table."
        )
    check_pages(cache, lengths)
    if rotary is not None:
        start = present if rotary.start is None else rotary.start.to(torch.int64)
        k = rotate(k, rotary.cos, rotary.sin, start[sequence] + place, rotary.interleaved)
    where = cache.places(sequence, present[sequence] + place)
    cache.k[where] = k.to(cache.k.dtype)
    cache.v[where] = v.to(cache.v.dtype)
    return added


def _rotated_query(step: Step, present: Tensor, rotary: Rotary | None, moving: bool) -> Tensor:
    """q at its position, or, where nothing depends on its row, all of it at the first new position."""
    if rotary is None:
        return step.q
    start = present if rotary.start is None else rotary.start.to(torch.int64)
    if step.cu_seqlens_q is None:
        place = torch.arange(step.q.shape[1] if moving else 1, device=step.q.device)
        positions = start[:, None] + place
    else:
        sequence, place = locate(step.cu_seqlens_q, step.q.shape[0])
        positions = start[sequence] + (place if moving else 0)
    return rotate(step.q, rotary.cos, rotary.sin, positions, rotary.interleaved)


@torch.no_grad()
def attend(step: Step, cache: Cache, rotary: Rotary | None, options: dict[str, Any], *, moving: bool) -> Pair:
    """Append step.k and step.v, then attention of step.q over the cache.

    `moving`: whether the mask depends on q's row (causal, window, chunk), which decides q's rotary positions.

    Returns: out in q's layout, lse (B, H, N) or (H, T).
    """
    _check_step(step, cache, rotary)
    batch = step.batch
    present = cache.present(batch)
    lengths = present + _append(step, cache, present, rotary)
    check_pages(cache, lengths)
    q = _rotated_query(step, present, rotary, moving)
    k, v = cache.whole(cache.k, batch), cache.whole(cache.v, batch)
    if step.qv is not None:
        q, k = torch.cat((q, step.qv), -1), torch.cat((k, v), -1)
    pad = torch.zeros_like(lengths) if cache.leftpad is None else cache.leftpad.to(torch.int64)
    mask = options["mask"]
    if cache.leftpad is not None:
        mask = mask & Mask(AfterPadding.bind())
        options = {**options, "k_offset": -pad}
    if step.cu_seqlens_q is None:
        mask = mask & key_padding(lengths)
        return dense(q, k, v, {**options, "mask": mask, "q_offset": lengths - pad - q.shape[1]})
    cu_q = step.cu_seqlens_q
    rows = (cu_q[1:] - cu_q[:-1]).to(torch.int64)
    edges = even_edges(batch, k.shape[1], k.device)
    options = {**options, "mask": mask, "q_offset": lengths - pad - rows, "seqused_k": lengths}
    return packed(q, k.flatten(0, 1), v.flatten(0, 1), (cu_q, edges.to(cu_q.dtype)), options)
