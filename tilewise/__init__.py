"""Tilewise: exact attention in Python, tile by tile, with one meaning on every machine.

    out = tilewise.attention(q, k, v, mask=tilewise.causal())

The score matrix never exists in memory; masks, biases and score terms of any kind have gradients; the result
is the masked softmax up to rounding. `explain` tells which backend runs a call and why.
"""

from typing import TYPE_CHECKING, Any

from tilewise.api import Gradients, attention, attention_partial, attention_partial_backward, attention_varlen
from tilewise.config import config
from tilewise.errors import (
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    SlowPathWarning,
    SpecError,
    TilewiseError,
    UnsupportedProblem,
)
from tilewise.plan import Plan, explain
from tilewise.serving import KVCache, PagedKVCache, attention_with_cache
from tilewise.spec.attention import AttentionSpec
from tilewise.spec.custom import custom, custom_score
from tilewise.spec.dropout import dropout_mask
from tilewise.spec.masks import (
    Mask,
    block_sparse,
    causal,
    chunk,
    dense,
    document,
    key_padding,
    prefix,
    sink_tokens,
    window,
)
from tilewise.spec.scores import ScoreTerm, alibi, alibi_slopes, bias, relative, softcap, t5_bucket
from tilewise.spec.words import exp, exp2, log, log2, maximum, minimum, tanh, where
from tilewise.state import OnlineSoftmaxState, Partial, merge, stream

if TYPE_CHECKING:
    from tilewise import compat as compat
    from tilewise import nn as nn

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec", "DTypeError", "DeviceError", "Gradients", "KVCache", "Mask", "OnlineSoftmaxState", "OptionError",
    "PagedKVCache", "Partial", "Plan", "ScoreTerm", "ShapeError", "SlowPathWarning", "SpecError", "TilewiseError",
    "UnsupportedProblem", "alibi", "alibi_slopes", "attention", "attention_partial", "attention_partial_backward",
    "attention_varlen", "attention_with_cache", "bias", "block_sparse", "causal", "chunk", "config", "custom",
    "custom_score", "dense", "document", "dropout_mask", "exp", "exp2", "explain", "key_padding", "log", "log2",
    "maximum", "merge", "minimum", "prefix", "relative", "sink_tokens", "softcap", "stream", "t5_bucket", "tanh",
    "where", "window",
]  # fmt: skip

if not TYPE_CHECKING:  # to a type checker, names that are not there stay errors

    def __getattr__(name: str) -> Any:
        """`tilewise.compat` and `tilewise.nn` are imported when they are first named."""
        if name not in ("compat", "nn"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
