"""What the I/O model prices: the sizes of one head, its tiles, and which tiles a mask leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tilewise.analysis.two_level import Range

__all__ = ["Sizes", "Tiles", "Visit"]

Visit = Callable[[Range, Range], bool]
"""Whether a tile, its range of queries and its range of keys, holds a visible pair."""


class Sizes(NamedTuple):
    """Sizes of one head: N_q, N_k, D and D_v."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int

    @property
    def widths(self) -> int:
        """D + D_v: elements of a key and its value, or of a query and its output."""
        return self.head_dim + self.head_dim_v

    @property
    def tensors(self) -> int:
        """Elements of q, k, v and out."""
        return (self.seqlen_q + self.seqlen_k) * self.widths

    @property
    def matrix(self) -> int:
        """Elements of the score matrix."""
        return self.seqlen_q * self.seqlen_k


class Tiles(NamedTuple):
    """Rows of queries, rows of keys, and, where a schedule cuts them too, columns of D and D_v."""

    block_q: int
    block_k: int
    chunk: int = 0
