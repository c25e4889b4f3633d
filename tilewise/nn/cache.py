"""Keys and values of one layer, kept while a sequence grows."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.errors import OptionError, ShapeError, message


class Cache:
    """Keys and values seen so far, all sequences of the batch at the same length; for generation, without gradients.

    `append` writes behind what is there and returns views of everything; memory doubles when it runs out, so N
    tokens cost O(N) copies. One cache serves one layer.

    Raises OptionError where gradients would be lost, ShapeError for keys of another batch, head count or size.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k (B, H_kv, N, D) and v (B, H_kv, N, D_v) of new tokens -> all keys and values, (B, H_kv, length, ...)."""
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise OptionError("a cache keeps no gradients\nCall under torch.no_grad(), or without the cache.")
        if k.shape[:3] != v.shape[:3]:
            raise ShapeError(message("k and v have the same batch, heads and length", {"k": k, "v": v}))
        start, self.length = self.length, self.length + k.shape[2]
        self._keys = self._write(self._keys, k, start)
        self._values = self._write(self._values, v, start)
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def _write(self, kept: Tensor | None, new: Tensor, start: int) -> Tensor:
        batch, heads, _, size = new.shape
        if kept is not None and (kept.shape[:2], kept.shape[3]) != ((batch, heads), size):
            self.length = start
            raise ShapeError(
                message("new keys and values fit those of the cache", {"kept": kept, "new": new})
            )
        if kept is None or kept.shape[2] < self.length:
            room = new.new_empty(batch, heads, max(64, 2 * self.length), size)
            if kept is not None:
                room[:, :, :start] = kept[:, :, :start]
            kept = room
        kept[:, :, start : self.length] = new
        return kept

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on.  Raises OptionError for more than there are."""
        if not 0 <= length <= self.length:
            raise OptionError(f"the cache holds {self.length} tokens and cannot keep {length}")
        self.length = length

    def reorder(self, index: Tensor) -> None:
        """Let row b continue what row index[b] held, as beam search needs; index (B,) integers."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[index], self._values[index]
