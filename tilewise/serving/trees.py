"""Speculative decoding: a few queries that form a tree behind the keys present.

Draft token n has a parent among the draft tokens before it, or none: then it follows the keys present. It sees those
keys, its ancestors and itself, and stands one position behind its parent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.errors import ShapeError, message
from tilewise.spec.masks import Mask
from tilewise.spec.term import Atom

__all__ = ["ancestors", "tree", "tree_depths"]


class Tree(Atom):
    """Keys in front of the first row's, and of the others those that the row's entry in `seen` names."""

    name = "tree"
    leaves = {"seen": ("bool", 3)}

    @staticmethod
    def keep(b: Any, i: Any, q: Any, k: Any, seen: Any) -> Any:
        return (k < q - i) | seen[b, i, k - (q - i)]


def ancestors(parents: Tensor) -> Tensor:
    """Which draft tokens each one sees, itself included: (N, N) or (B, N, N) bool, nothing is read on the host.

    parents: (N,) or (B, N) integers, the parent's number or -1. A parent stands before its child.
    """
    if parents.is_floating_point() or parents.ndim not in (1, 2):
        raise ShapeError(message("parents are integers of shape (N,) or (B, N)", {"parents": parents}))
    count = parents.shape[-1]
    number = torch.arange(count, device=parents.device)
    seen = (parents[..., None] == number) | (number[:, None] == number)
    for _ in range(max(count - 1, 0).bit_length()):  # paths double in length
        seen = torch.matmul(seen.float(), seen.float()) > 0
    return seen


def tree(parents: Tensor) -> Mask:
    """The mask of a draft tree: as `parents` of `ancestors`, or their result, bool (N, N) or (B, N, N).

    The rows of q are the draft tokens, and the draft tokens are the last keys of the cache.
    """
    seen = parents if parents.dtype == torch.bool else ancestors(parents)
    if seen.ndim not in (2, 3) or seen.shape[-1] != seen.shape[-2]:
        raise ShapeError(message("what draft tokens see is (N, N) or (B, N, N)", {"seen": seen}))
    return Mask(Tree.bind(seen if seen.ndim == 3 else seen[None]))


def tree_depths(parents: Tensor) -> Tensor:
    """Position of each draft token behind the last key present, 0 for those without a parent; parents' shape, int64.

    Rotary positions of a draft: `lengths[:, None] + tree_depths(parents)`, for `attention_with_cache(positions=...)`.
    """
    seen = parents if parents.dtype == torch.bool else ancestors(parents)
    return torch.sum(seen, -1) - 1
