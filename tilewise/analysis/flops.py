"""Floating-point operations of attention, counted on the pairs that are visible.

A multiply and an add are two operations. Only the matrix products are counted, as everybody does who reports
attention in FLOP/s; exponentials, which a GPU does on another unit, have their own count.
"""

from __future__ import annotations

from ..errors import OptionError, message

__all__ = ["attention_flops", "exponentials"]


def attention_flops(
    visible_pairs: int,
    head_dim: int,
    head_dim_v: int,
    num_heads: int = 1,
    batch: int = 1,
    *,
    backward: bool = False,
) -> int:
    """Operations in the matrix products of attention: ``2 * pairs * (D + D_v)`` a head, 2.5 times that
    backward.

    Forward is two products, Q K^T over D and P V over D_v. Backward is five: both operands' gradients of each
    (dV, dP, dQ, dK) and Q K^T once more, which makes 2.5 when D = D_v and is used for every D and D_v. A
    kernel that evaluates masked pairs of a tile, or recomputes more, does more than this: its own affair, not
    the problem's.

    Args:
        visible_pairs: (query, key) pairs one head of one batch element may see, e.g. N_q * N_k without a
        mask. head_dim, head_dim_v: D and D_v, before padding.
        num_heads: query heads.
        batch: batch size; for sequences that differ, pass the sum of their pairs and batch = 1.
        backward: count the backward pass alone instead of the forward.

    Returns: FLOPs.
    Raises: OptionError if a size is negative.
    Source: Dao et al. 2022, "FlashAttention" (https://arxiv.org/abs/2205.14135), algorithms 1 and 4; the
        factor 2.5 as in Dao 2023, "FlashAttention-2" (https://arxiv.org/abs/2307.08691), section 4.1.
    """
    require_sizes(
        visible_pairs=visible_pairs,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        num_heads=num_heads,
        batch=batch,
    )
    per_pair = 5 * (head_dim + head_dim_v) if backward else 2 * (head_dim + head_dim_v)
    return batch * num_heads * visible_pairs * per_pair


def exponentials(visible_pairs: int, num_heads: int = 1, batch: int = 1) -> int:
    """Exponentials of one pass: one for each visible pair, forward and, recomputed, backward.

    Args: as `attention_flops`. Raises: OptionError if a size is negative.
    """
    require_sizes(visible_pairs=visible_pairs, num_heads=num_heads, batch=batch)
    return batch * num_heads * visible_pairs


def require_sizes(**sizes: int) -> None:
    """Refuse a negative size, by name. Raises: OptionError."""
    for name, size in sizes.items():
        if size < 0:
            raise OptionError(message(f"{name} is a size, 0 or more, got {size}"))
