"""Serving: caches in one piece or in pages, rotary positions, decoding, trees, shared prefixes, ragged batches.

attention_with_cache     append, rotate, attend: one call for prefill, chunk, token and tree
KVCache, PagedKVCache    where keys and values lie; CacheView, Batch: their tensors
RotaryTable, rotate      angles by position
tree, tree_depths        speculative drafts
pack, unpack, cu_seqlens_from_position_ids, attention_nested      sequences of different lengths side by side
"""

from tilewise.serving.attend import attention_with_cache
from tilewise.serving.books import OutOfPages
from tilewise.serving.cache import CacheView, KVCache
from tilewise.serving.paged import Batch, PagedKVCache, PagedLayer
from tilewise.serving.ragged import (
    attention_nested,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    pack,
    unpack,
)
from tilewise.serving.read import attend_pages
from tilewise.serving.rotary import RotaryTable, rotate
from tilewise.serving.trees import ancestors, tree, tree_depths

__all__ = [
    "Batch", "CacheView", "KVCache", "OutOfPages", "PagedKVCache", "PagedLayer", "RotaryTable", "ancestors",
    "attend_pages", "attention_nested", "attention_with_cache", "cu_seqlens_from_lengths",
    "cu_seqlens_from_position_ids", "pack", "rotate", "tree", "tree_depths", "unpack",
]  # fmt: skip
