"""Attention between projected tensors, as a module that holds its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tilewise import checks
from tilewise.api import attention
from tilewise.errors import OptionError
from tilewise.serving import CacheView, PagedKVCache, PagedLayer, attention_with_cache
from tilewise.spec.masks import Mask, window
from tilewise.spec.scores import ScoreTerm, as_terms, softcap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.nn.cache import Cache
    from tilewise.nn.rotary import Rotary
    from tilewise.serving import RotaryTable


class Attention(nn.Module):
    """`tilewise.attention` as a module: fixed options, dropout only while training, learned parts as parameters.

    q and k are normalised, then turned by `rotary`; k and v join the cache, if one is given; then attention.

    Args:
        mask, scale, backend: as in `attention`; a mask given to `forward` is ANDed with the module's.
        dropout: probability, used in training mode only.
        sink_heads: number of query heads of a learned sink (a parameter `sink`, starting at 0), or None.
        window: (left, right) sizes, ANDed with the masks; None on a side is unbounded.
        softcap: cap of the scores, before the score terms given to `forward`.
        rotary: a `Rotary`, applied at the positions of rows and columns.
        qk_norm: head size of learned root-mean-square norms of q and k (`q_norm`, `k_norm`), or None.

    Raises: OptionError for values outside their range.
    """

    def __init__(
        self, *, mask: Mask | None = None, dropout: float = 0.0, scale: float | None = None,
        sink_heads: int | None = None, backend: str = "auto", window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None, rotary: Rotary | None = None, qk_norm: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale, self.backend, self.softcap = scale, backend, softcap
        self.mask = _with_window(mask, window)
        self.dropout = checks.check_dropout(dropout)
        self.sink = None if sink_heads is None else nn.Parameter(torch.zeros(sink_heads))
        self.rotary = rotary
        self.q_norm = None if qk_norm is None else nn.RMSNorm(qk_norm, eps=1e-6)
        self.k_norm = None if qk_norm is None else nn.RMSNorm(qk_norm, eps=1e-6)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | Tensor | None = None,
        scores: ScoreTerm | Sequence[ScoreTerm] = (),
        cache: Cache | CacheView | PagedKVCache | PagedLayer | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """(B, H, N_q, D), (B, H_kv, N_k, D), (B, H_kv, N_k, D_v) -> (B, H, N_q, D_v); options as `attention`.

        With a cache, k and v are those of the new tokens, and positions go on where the cache ends. A cache of
        `tilewise.serving` (KVCache, PagedKVCache, ...) takes the options of `attention_with_cache`, `sequences` and
        `cu_seqlens_q` among them.
        Raises as `attention`; OptionError for rotary with offsets that are tensors.
        """
        if self.mask is not None:
            mask = self.mask if mask is None else self.mask & mask
        terms = as_terms(scores)
        if self.softcap is not None:
            terms = (softcap(self.softcap), *terms)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(cache, (CacheView, PagedKVCache, PagedLayer)):
            return attention_with_cache(
                q, cache, k, v, rotary=self._table(cache), mask=mask, scores=terms, sink=self.sink, scale=self.scale,
                backend=self.backend, dropout=self.dropout if self.training else 0.0, **options,
            )  # fmt: skip
        if self.rotary is not None:
            q, k = self._turned(q, k, 0 if cache is None else cache.length, options)
        if cache is not None:
            k, v = cache.append(k, v)
        return attention(
            q, k, v, mask=mask, scores=terms, sink=self.sink, scale=self.scale, backend=self.backend,
            dropout=self.dropout if self.training else 0.0, **options,
        )  # fmt: skip

    def _table(self, cache: CacheView | PagedKVCache | PagedLayer) -> RotaryTable | None:
        if self.rotary is None:
            return None
        cache = cache.cache if isinstance(cache, PagedLayer) else cache
        return self.rotary.table(
            cache.capacity if isinstance(cache, CacheView) else cache.max_length, cache.k.device
        )

    def _turned(self, q: Tensor, k: Tensor, before: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """q and k turned at the positions that `attention` will give them."""
        first_k = options.get("k_offset", 0)
        first_q = options.get("q_offset")
        if isinstance(first_q, Tensor) or isinstance(first_k, Tensor):
            raise OptionError(
                "rotary knows offsets that are ints\nTurn q and k before the call: Rotary(dim)(q, positions)."
            )
        if first_q is None:
            first_q = before + k.shape[2] - q.shape[2]
        assert self.rotary is not None
        first_k += before
        at_q = torch.arange(first_q, first_q + q.shape[2], device=q.device)
        if first_k == first_q and k.shape[2] == q.shape[2] and k.device == q.device:
            return self.rotary.both(q, k, at_q)
        return self.rotary(q, at_q), self.rotary(
            k, torch.arange(first_k, first_k + k.shape[2], device=k.device)
        )

    def extra_repr(self) -> str:
        parts = f"mask={self.mask}, dropout={self.dropout}, scale={self.scale}, backend={self.backend!r}"
        return parts if self.softcap is None else f"{parts}, softcap={self.softcap}"


def _with_window(mask: Mask | None, sizes: tuple[int | None, int | None] | None) -> Mask | None:
    if sizes is None:
        return mask
    if not isinstance(sizes, tuple) or len(sizes) != 2:
        raise OptionError(f"window is a pair (left, right), not {sizes!r}")
    return window(*sizes) if mask is None else mask & window(*sizes)
