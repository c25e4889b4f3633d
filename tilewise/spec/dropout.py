"""Which attention weights dropout keeps: a pure function of seed and position.

Every pair (batch b, head h, query position q, key position k) owns one 32-bit word of Philox4x32-10:

    key      = the 64-bit seed, low word first
    counter  = (k >> 2, q, h, b), each as uint32, so that negative positions wrap
    word     = output number k & 3
    kept iff   word >= floor(p * 2^32);   kept weights are scaled by 1 / (1 - p)

so the mask is the same for every tile size, loop order, device and backend, and a shard finds its part of it
by adding offsets. Four consecutive keys share one counter. torch has no uint32 arithmetic: words are int64
tensors holding 0 .. 2^32 - 1. Nothing here reads the seed on the host.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC11);
constants and known answers from Random123 (philox.h, kat_vectors).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import DTypeError, OptionError, ShapeError, message

__all__ = ["dropout_mask", "keep_mask", "keep_tile", "keep_threshold", "philox4x32"]

MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10: four uniform 32-bit words for each counter.

    Args:
        counter: four int64 tensors holding uint32, broadcastable to one shape.
        key: two int64 tensors holding uint32, broadcastable to it.

    Returns: four int64 tensors holding uint32.
    Source: Salmon et al. 2011; Random123, philox.h.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def keep_threshold(p: float) -> int:
    """The smallest word that keeps its weight: floor(p * 2^32), 0 .. 2^32 (p = 1 keeps nothing).

    Raises: OptionError if p is outside [0, 1] or NaN.
    """
    if not 0.0 <= p <= 1.0:
        raise OptionError(message(f"dropout is a probability in [0, 1], got {p}"))
    return math.floor(p * 2**32)


def keep_mask(
    seed: Tensor, p: float, q_pos: Tensor, k_pos: Tensor, heads: Tensor | int, batches: Tensor | int
) -> Tensor:
    """Which pairs dropout keeps, at any positions. For consecutive keys, `keep_tile` shares the counters.

    Args:
        seed: int64, one element.
        p: probability of dropping, in [0, 1].
        q_pos, k_pos, heads, batches: integer tensors broadcastable to (B, H, T_q, T_k). ``heads`` and
            ``batches`` include h_offset and b_offset.

    Returns: bool, the broadcast shape; True = kept.
    Raises: OptionError as `keep_threshold`; ShapeError or DTypeError if the seed is not one int64.
    """
    threshold = keep_threshold(p)
    k = k_pos.to(torch.int64)
    words = _words(seed, k >> 2, q_pos, heads, batches)
    lane = k & 3
    low = torch.where(lane == 0, words[0], words[1])
    high = torch.where(lane == 2, words[2], words[3])
    return torch.where(lane < 2, low, high) >= threshold


def keep_tile(
    seed: Tensor,
    p: float,
    q_pos: Tensor,
    k0: Tensor | int,
    k_len: int,
    heads: Tensor | int,
    batches: Tensor | int,
) -> Tensor:
    """Which pairs dropout keeps, for the keys k0 .. k0 + k_len - 1: one counter for four keys.

    Args:
        seed: int64, one element.
        p: probability of dropping, in [0, 1].
        q_pos: int, broadcastable to (B, H, T_q, 1).
        k0: position of the first key: an int, or an int tensor broadcastable to (B, H, T_q, 1).
        k_len: number of keys, T_k.
        heads, batches: an int, or an int tensor broadcastable to (B, H, T_q, 1), with their offsets included.

    Returns: bool, broadcast of (B, H, T_q, T_k); True = kept. Equal to `keep_mask` at ``k0 + arange(k_len)``.
    Raises: as `keep_mask`.
    """
    threshold = keep_threshold(p)
    lane = k0 & 3
    # A tensor k0 may start in any lane and is not read on the host: take the groups of the worst start.
    first = 3 if isinstance(lane, Tensor) else lane
    groups = torch.arange((first + k_len + 3) // 4, dtype=torch.int64, device=q_pos.device)
    # >> 2 rounds down, also for negative positions; `_words` wraps to 32 bits after it.
    counter_k = (k0 >> 2) + groups
    words = torch.broadcast_tensors(*_words(seed, counter_k, q_pos, heads, batches))
    kept = torch.stack([word >= threshold for word in words], dim=-1).flatten(-2)
    if not isinstance(lane, Tensor):
        return kept[..., lane : lane + k_len]
    column = lane + torch.arange(k_len, dtype=torch.int64, device=q_pos.device)
    column = column.expand(*torch.broadcast_shapes(kept.shape[:-1], column.shape[:-1]), k_len)
    return torch.gather(kept.expand(*column.shape[:-1], kept.shape[-1]), -1, column)


def dropout_mask(
    seed: Tensor,
    p: float,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    q_offset: Tensor | int | None = None,
    k_offset: Tensor | int = 0,
    h_offset: int = 0,
    b_offset: int = 0,
) -> Tensor:
    """The pairs that attention with this seed and p keeps; memory is quadratic, so for tests and inspection.

    Args:
        seed: int64, one element; the mask is made on its device.
        p: probability of dropping, in [0, 1].
        batch, num_heads, seqlen_q, seqlen_k: sizes; heads are query heads.
        q_offset: position of the first query row, int or (B,); None = seqlen_k - seqlen_q.
        k_offset: position of the first key, int or (B,).
        h_offset, b_offset: number of the first head and of the first batch element.

    Returns: bool (batch, num_heads, seqlen_q, seqlen_k); True = kept. Kept weights are scaled by 1 / (1 - p).
    Raises: as `keep_mask`.
    """
    device = seed.device

    def numbers(size: int, offset: Tensor | int) -> Tensor:
        return torch.arange(size, dtype=torch.int64, device=device) + offset

    def per_batch(offset: Tensor | int) -> Tensor | int:
        return offset.to(device, torch.int64).reshape(-1, 1, 1, 1) if isinstance(offset, Tensor) else offset

    q_offset = seqlen_k - seqlen_q if q_offset is None else q_offset
    q_pos = numbers(seqlen_q, 0).reshape(1, 1, -1, 1) + per_batch(q_offset)
    heads = numbers(num_heads, h_offset).reshape(1, -1, 1, 1)
    batches = numbers(batch, b_offset).reshape(-1, 1, 1, 1)
    kept = keep_tile(seed, p, q_pos, per_batch(k_offset), seqlen_k, heads, batches)
    return kept.expand(batch, num_heads, seqlen_q, seqlen_k)


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of uint32, for a constant of at least 2^31.

    The plain product may pass 2^63. Wrapping would give the right bits, but compiled code may take signed
    overflow as impossible and drop the masks (seen with Inductor and GCC, torch 2.13). With constant - 2^32
    it stays above -2^63, and differs from the product by word * 2^32.
    """
    product = word * (constant - 2**32)
    return (product >> 32) + word, product & MASK32


def _uint32(number: Tensor) -> Tensor:
    """The number modulo 2^32, as int64."""
    return number.to(torch.int64) & MASK32


def _words(seed: Tensor, *counter: Tensor | int) -> Words:
    """The four words of each counter (k >> 2, q, h, b), taken as uint32, under the key that is the seed."""
    if seed.dtype != torch.int64:
        raise DTypeError(message("a dropout seed is one int64", {"seed": seed}))
    if seed.numel() != 1:
        raise ShapeError(message("a dropout seed is one int64", {"seed": seed}))
    seed = seed.reshape(())
    # Inductor folds arange * constant into index arithmetic of 32 bits, silently (pytorch/pytorch#175966,
    # open at torch 2.13). It cannot fold what depends on a tensor's content.
    zero = seed & 0
    c0, c1, c2, c3 = (_uint32(zero + number) for number in counter)
    return philox4x32((c0, c1, c2, c3), (seed & MASK32, (seed >> 32) & MASK32))
