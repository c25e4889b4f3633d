"""Bytes that attention moves between main memory and the chip: with its matrix in memory, and in tiles.

Both counts take on-chip memory as large enough for the tiles in flight and caches as absent: every tensor
that an algorithm reads again is counted again. Masked pairs are counted by the ordinary algorithm, which
stores them; the tiled one is told which key rows its schedule reads.

Source: Dao et al. 2022, "FlashAttention" (https://arxiv.org/abs/2205.14135), algorithm 0, section 3.1 and
theorem 2: ordinary attention moves Theta(N d + N^2) elements, tiled attention Theta(N^2 d^2 / M) with M
elements on the chip, since its query tiles have about M / d rows.
"""

from __future__ import annotations

from ..errors import OptionError, message
from .flops import require_sizes

__all__ = ["bytes_ordinary", "bytes_tiled", "matrix_bytes_avoided"]


def matrix_bytes_avoided(batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, itemsize: int) -> int:
    """Bytes of one score matrix for every head: memory that tiles never allocate.

    At 8192 x 8192 in two bytes it is 128 MiB a head, 4 GiB for 32 heads.

    Args:
        batch, num_heads (query heads), seqlen_q, seqlen_k: sizes.
        itemsize: bytes per score.

    Returns: bytes. Raises: OptionError if a size is negative.
    """
    require_sizes(batch=batch, num_heads=num_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, itemsize=itemsize)
    return batch * num_heads * seqlen_q * seqlen_k * itemsize


def bytes_ordinary(
    *,
    batch: int,
    num_heads_q: int,
    num_heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    score_itemsize: int | None = None,
) -> int:
    """Bytes a forward pass moves that keeps the score matrix in memory.

    q, k, v are read once and out is written once; the matrix passes four times: S is written by Q K^T, S is
    read and P written by the softmax, P is read by P V. A mask, a bias or dropout applied as an operation of
    its own would add two passes each, and is not counted.

    Args:
        batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v: sizes.
        itemsize: bytes per element of q, k, v and out.
        score_itemsize: bytes per element of S and P; None = itemsize.

    Returns: bytes. Raises: OptionError if a size is negative.
    Source: Dao et al. 2022 (https://arxiv.org/abs/2205.14135), algorithm 0 and theorem 2.
    """
    require_sizes(num_heads_kv=num_heads_kv, head_dim=head_dim, head_dim_v=head_dim_v, itemsize=itemsize)
    score_itemsize = itemsize if score_itemsize is None else score_itemsize
    matrix = matrix_bytes_avoided(batch, num_heads_q, seqlen_q, seqlen_k, score_itemsize)
    rows = num_heads_q * seqlen_q + num_heads_kv * seqlen_k
    return batch * rows * (head_dim + head_dim_v) * itemsize + 4 * matrix


def bytes_tiled(
    *,
    batch: int,
    num_heads_q: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    block_q: int,
    key_rows_read: int | None = None,
    lse_itemsize: int = 4,
) -> int:
    """Bytes a forward pass moves that owns one query tile at a time and streams the keys past it.

    q is read once, out and lse are written once; k and v are read once by each query tile, only the rows in
    tiles that are not empty. Heads that share a KV head read it once each, unless the schedule folds them
    into rows: then pass the folded sizes, num_heads_q = H_kv and seqlen_q = G * N_q.

    Args:
        batch, num_heads_q, seqlen_q, seqlen_k, head_dim, head_dim_v: sizes.
        itemsize: bytes per element of q, k, v and out.
        block_q: rows of a query tile, at least 1.
        key_rows_read: rows of K that one head of one batch element reads, summed over its query tiles;
            None = all of them for every tile, ``ceil(N_q / block_q) * N_k``.
        lse_itemsize: bytes per lse; 0 where it is not stored.

    Returns: bytes. Raises: OptionError if a size is negative or block_q is 0.
    Source: Dao et al. 2022 (https://arxiv.org/abs/2205.14135), theorem 2, for the loop order of Dao 2023
        (https://arxiv.org/abs/2307.08691), section 3.1, which keeps out on the chip.
    """
    require_sizes(batch=batch, num_heads_q=num_heads_q, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    require_sizes(head_dim=head_dim, head_dim_v=head_dim_v, itemsize=itemsize, lse_itemsize=lse_itemsize)
    if block_q < 1:
        raise OptionError(message(f"block_q is at least 1, got {block_q}"))
    if key_rows_read is None:
        key_rows_read = -(-seqlen_q // block_q) * seqlen_k
    require_sizes(key_rows_read=key_rows_read)
    rows = (seqlen_q + key_rows_read) * (head_dim + head_dim_v) * itemsize
    return batch * num_heads_q * (rows + seqlen_q * lse_itemsize)
