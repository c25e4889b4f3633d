"""flash_attn.bert_padding: from padded to packed tokens and back, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.errors import ShapeError, message

__all__ = [
    "index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences",
]  # fmt: skip

Unpadded = tuple[Tensor, Tensor, Tensor, int, Tensor]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` of a tensor with at least one dimension; the gradient adds up where an index repeats."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of `first_axis_dim` rows, 0 but for rows `indices`, which are `values`."""
    empty = values.new_zeros(first_axis_dim, *values.shape[1:])
    return empty.index_copy(0, indices, values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Unpadded:
    """The tokens of a padded batch, one after the other.

    Args:
        hidden_states: (B, N, ...).
        attention_mask: (B, N), bool or int, nonzero = a real token, anywhere in the row.
        unused_mask: (B, N), nonzero = allocated and not used: packed too, and not counted in `seqused`.

    Returns: (tokens (T, ...), indices (T,) int64 into (B * N,), cu_seqlens (B + 1,) int32, the longest length as a
        Python int (a synchronisation on a GPU), seqused (B,) int32). Before flash_attn 2.7 the last was absent.
    """
    if attention_mask.ndim != 2 or hidden_states.shape[:2] != attention_mask.shape:
        given = {"hidden_states": hidden_states, "attention_mask": attention_mask}
        raise ShapeError(message("attention_mask is (B, N), the first dimensions of hidden_states", given))
    real = attention_mask != 0
    chosen = real if unused_mask is None else real | (unused_mask != 0)
    lengths = chosen.sum(-1, dtype=torch.int32)
    indices = chosen.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    longest = int(lengths.max()) if lengths.numel() else 0
    return tokens, indices, _edges(lengths), longest, real.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same for rows that hold several sequences.

    attention_mask_in_length: (B, N) int; the nonzero entries of a row are the lengths of its sequences, in order,
    which lie one after the other from the row's start.

    Returns: (tokens, indices, cu_seqlens, longest length).
    """
    used = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[-1], device=used.device)
    indices = (places < used).flatten().nonzero().flatten()
    flat = attention_mask_in_length.flatten()
    lengths = flat[flat != 0].to(torch.int32)
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _edges(lengths), longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens (T, ...) back in their places of a (batch, seqlen, ...) tensor that is 0 elsewhere."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.reshape(batch, seqlen, *padded.shape[1:])


def _edges(lengths: Tensor) -> Tensor:
    """cu_seqlens of the lengths, int32."""
    return torch.nn.functional.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
