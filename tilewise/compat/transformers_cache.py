"""A paged cache for transformers' generate: `past_key_values=paged_cache(model)`.

transformers writes a layer's new keys and values into its cache, gets all of them back, and hands those to the
attention function. Here the new ones come back, marked with where the others are, and the attention function appends
and reads the pages where they lie: nothing is gathered. Works with `attn_implementation="tilewise"` alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.compat.transformers_t5 import NAMES
from tilewise.errors import ShapeError, UnsupportedProblem, message
from tilewise.serving import PagedKVCache, PagedLayer

__all__ = ["Held", "held_by", "paged_cache"]

MARK = "_tilewise_cache"


class Held(NamedTuple):
    """Where a layer's keys are, beside the new ones of a call: the layer's pages, its sequences, keys with the new."""

    layer: PagedLayer
    sequences: tuple[int, ...]
    length: int


def held_by(key: Tensor) -> Held | None:
    """What a key tensor that came back from the cache is marked with; None for other tensors."""
    return getattr(key, MARK, None)


def paged_cache(
    model: Any, *, max_length: int, batch_size: int = 1, page_size: int = 16, num_pages: int | None = None,
    dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """A cache for `model.generate(past_key_values=...)` or a model's calls, in pages of `page_size` keys.

    Args:
        model: a transformers model, or its configuration.
        max_length: tokens that a sequence may come to. batch_size: sequences.
        num_pages: of the pool, shared by all layers; default as many as batch_size sequences of max_length need.
        dtype: of the pages; default that of the first keys.

    Beam search reorders sequences by sharing their pages. `cache.pages` is the `PagedKVCache` once it is in use.

    Raises: ImportError without transformers; UnsupportedProblem for a model whose layers are not all full attention,
        and, in its calls, for another attention implementation.
    """
    config = getattr(model, "config", model)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedProblem(
            f"a paged cache keeps every key of every layer, and this model has layers of {', '.join(sorted(kinds))}\n"
            "Let transformers make the model's cache."
        )
    if num_pages is None:
        num_pages = batch_size * -(-max_length // page_size)
    shape = (num_pages, page_size, max_length, batch_size)
    return _cache_class()(config, shape, dtype)


@functools.lru_cache(maxsize=1)
def _layer_class() -> Any:
    from transformers.cache_utils import CacheLayerMixin

    class PagedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
        """One layer: its length, and the way to the pages that all layers share."""

        is_sliding = False
        is_croppable = True

        def __init__(self, owner: Any, index: int) -> None:
            super().__init__()
            self.owner, self.index, self.length = owner, index, 0

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            self.owner.start(key_states, value_states)
            self.is_initialized = True

        def update(
            self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            """The new keys and values themselves, marked with where they are to go."""
            if self.owner.config._attn_implementation not in NAMES:
                raise UnsupportedProblem(
                    f"attn_implementation={self.owner.config._attn_implementation!r} does not read a paged cache\n"
                    "tilewise.compat.transformers.register(), then model.set_attn_implementation('tilewise')."
                )
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            if key_states.shape[0] != len(self.owner.sequences):
                rule = f"the cache was made for {len(self.owner.sequences)} sequences"
                raise ShapeError(message(rule, {"key_states": key_states}, "Give batch_size to paged_cache."))
            self.length += key_states.shape[2]
            key_states = key_states.view(key_states.shape)  # a tensor of its own, which carries the mark
            held = Held(self.owner.pages.layer(self.index), tuple(self.owner.sequences), self.length)
            setattr(key_states, MARK, held)
            return key_states, value_states

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.length + query_length, 0

        def get_seq_length(self) -> int:
            return self.length

        def get_max_length(self) -> int:
            return int(self.owner.shape[2])

        get_max_cache_shape = get_max_length  # its name in older releases

        def reset(self) -> None:
            self.length = 0
            self.owner.forget()

        def crop(self, tokens_to_remove: int) -> None:
            """Forget the last -tokens_to_remove tokens, or, given a positive number, those behind so many."""
            length = (
                self.length + tokens_to_remove
                if tokens_to_remove <= 0
                else min(tokens_to_remove, self.length)
            )
            self.length = max(length, 0)
            if self.index == 0 and self.owner.pages is not None:
                for number in self.owner.sequences:
                    self.owner.pages.crop(number, self.length)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            if self.index == 0:
                self.owner.share(beam_idx.tolist())

        def batch_select_indices(self, indices: Tensor) -> None:
            if self.index == 0:
                chosen = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
                self.owner.share(chosen.tolist())

        def batch_repeat_interleave(self, repeats: int) -> None:
            if self.index == 0:
                self.owner.share([b for b in range(len(self.owner.sequences)) for _ in range(repeats)])

    return PagedCacheLayer


@functools.lru_cache(maxsize=1)
def _cache_class() -> Any:
    from transformers.cache_utils import Cache

    layer_class = _layer_class()

    class PagedCache(Cache):  # type: ignore[misc]
        """transformers' face of a PagedKVCache."""

        def __init__(self, config: Any, shape: tuple[int, ...], dtype: Any) -> None:
            super().__init__(layers=[layer_class(self, n) for n in range(config.num_hidden_layers)])
            self.config, self.shape, self.dtype = config, shape, dtype
            self.pages: PagedKVCache | None = None
            self.sequences: list[int] = []

        def start(self, k: Tensor, v: Tensor) -> None:
            """Allocate the pages when the first keys say what they are like."""
            if self.pages is None:
                num_pages, page_size, max_length, _ = self.shape
                self.pages = PagedKVCache(
                    num_pages, page_size, k.shape[1], k.shape[3], head_dim_v=v.shape[3], num_layers=len(self.layers),
                    max_length=max_length, dtype=self.dtype or k.dtype, device=k.device,
                )  # fmt: skip
                self.sequences = [self.pages.new_sequence() for _ in range(k.shape[0])]

        def share(self, chosen: list[int]) -> None:
            """Let row b continue what row chosen[b] held."""
            if self.pages is None:
                return
            forked = [self.pages.fork(self.sequences[b]) for b in chosen]
            for number in self.sequences:
                self.pages.free(number)
            self.sequences = forked

        def forget(self) -> None:
            """Empty every sequence."""
            if self.pages is not None:
                for number in self.sequences:
                    self.pages.crop(number, 0)

    return PagedCache
