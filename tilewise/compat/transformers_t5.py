"""T5's relative position bias by its table, in place of the (1, H, N_q, N_k) matrix that transformers builds of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewise.errors import UnsupportedProblem
from tilewise.spec.scores import ScoreTerm, relative, t5_bucket

if TYPE_CHECKING:
    from torch import nn

NAMES: set[str] = set()
"""Names under which `register` has made Tilewise known."""


class PositionTable:
    """What a patched layer hands on as position_bias: a score term that reads the layer's own weights."""

    def __init__(self, term: ScoreTerm) -> None:
        self.term = term


def use_position_tables(model: nn.Module) -> int:
    """Let T5's self-attentions read their bias from its table (H, buckets) inside the tiles; returns how many do.

    model: a T5, or a model whose layers are written like T5's (`compute_bias`, `relative_attention_bias`). Values and
    gradients are those of the matrix, the memory is that of the table. With another attention implementation the
    layers build their matrix as before. Cross-attention has a matrix of zeros from transformers, which stays.

    Raises UnsupportedProblem for a model without such layers.
    """
    found = [
        module
        for module in model.modules()
        if getattr(module, "has_relative_attention_bias", False) and hasattr(module, "compute_bias")
    ]
    if not found:
        raise UnsupportedProblem(f"{type(model).__name__} has no layer with T5's relative_attention_bias")
    for module in found:
        module.compute_bias = _by_table(module, module.compute_bias)
    return len(found)


def _by_table(module: Any, matrix: Any) -> Any:
    def compute_bias(*args: Any, **kwargs: Any) -> Any:
        if module.config._attn_implementation not in NAMES:
            return matrix(*args, **kwargs)
        weight = module.relative_attention_bias.weight
        bucket = t5_bucket(
            module.relative_attention_num_buckets,
            module.relative_attention_max_distance,
            not module.is_decoder,
        )
        return PositionTable(relative(weight.T, bucket.to(weight.device)))

    return compute_bias
