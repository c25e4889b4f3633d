"""Modules: attention whose dropout follows `training`, with rotary positions and a cache, and multi-head attention.

Attention            attention between tensors that are already projected, its options held by a module
MultiheadAttention   the same with projections; also stands in for torch.nn.MultiheadAttention
Rotary, Cache        positions turned into q and k; keys and values kept while a sequence grows
"""

from tilewise.nn.attention import Attention
from tilewise.nn.cache import Cache
from tilewise.nn.multihead import MultiheadAttention
from tilewise.nn.rotary import Rotary

__all__ = ["Attention", "Cache", "MultiheadAttention", "Rotary"]
