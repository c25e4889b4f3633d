"""Keys and values of one layer, kept while a sequence grows."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.errors import OptionError, ShapeError, message
from tilewise.serving import KVCache


class Cache:
    """Keys and values seen so far, all sequences of the batch at the same length; for generation, without gradients.

    A `KVCache` (`kv`) that is made by the first keys and replaced by one of twice the room when it is full, so N
    tokens cost O(N) copies. One cache serves one layer. Sequences of unequal lengths, and pages, take a
    `tilewise.KVCache` or `PagedKVCache` in its place.

    Raises OptionError where gradients would be lost, ShapeError for keys of another batch, head count or size.
    """

    def __init__(self) -> None:
        self.length = 0
        self.kv: KVCache | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k (B, H_kv, N, D) and v (B, H_kv, N, D_v) of new tokens -> all keys and values, (B, H_kv, length, ...)."""
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise OptionError("a cache keeps no gradients\nCall under torch.no_grad(), or without the cache.")
        if k.shape[:3] != v.shape[:3]:
            raise ShapeError(message("k and v have the same batch, heads and length", {"k": k, "v": v}))
        kv = self._room(k, v)
        stop = self.length + k.shape[2]
        kv.k[:, :, self.length : stop] = k
        kv.v[:, :, self.length : stop] = v
        self.length = stop
        kv.lengths.fill_(stop)
        return kv.k[:, :, :stop], kv.v[:, :, :stop]

    def _room(self, k: Tensor, v: Tensor) -> KVCache:
        """The cache with room for the new keys."""
        kept, needed = self.kv, self.length + k.shape[2]
        for held, new in () if kept is None else ((kept.k, k), (kept.v, v)):
            if (held.shape[:2], held.shape[3]) != (new.shape[:2], new.shape[3]):
                rule = "new keys and values fit those of the cache"
                raise ShapeError(message(rule, {"kept": held, "new": new}))
        if kept is not None and kept.capacity >= needed:
            return kept
        room = max(64, 2 * needed)
        self.kv = KVCache(*(t.new_empty(*t.shape[:2], room, t.shape[3]) for t in (k, v)))
        if kept is not None:
            self.kv.k[:, :, : self.length] = kept.k[:, :, : self.length]
            self.kv.v[:, :, : self.length] = kept.v[:, :, : self.length]
        return self.kv

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on.  Raises OptionError for more than there are."""
        if not 0 <= length <= self.length:
            raise OptionError(f"the cache holds {self.length} tokens and cannot keep {length}")
        self.length = length
        if self.kv is not None:
            self.kv.lengths.fill_(length)

    def reorder(self, index: Tensor) -> None:
        """Let row b continue what row index[b] held, as beam search needs; index (B,) integers."""
        if self.kv is not None:
            self.kv = KVCache(self.kv.k[index], self.kv.v[index], self.kv.lengths[index])
