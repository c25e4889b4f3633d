"""Tensor descriptors: Triton's, or the same four facts where Triton is not needed to launch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.backends.triton.tiles import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.backends.triton.layout import Slots
    from tilewise.backends.triton.tiles import Tiles
    from tilewise.problem import Inputs, Problem


class Descriptor(NamedTuple):
    """What a launch reads of a descriptor: `triton.tools.tensor_descriptor.TensorDescriptor` without its checks."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str = "zero"


def descriptor_type() -> Any:
    """Triton's own type in a process that has imported it."""
    if "triton" not in sys.modules:
        return Descriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


def of_keys(problem: Problem, inputs: Inputs, tiles: Tiles) -> tuple[Any, Any]:
    """Descriptors of k and v as (batch, head, token, d), blocks of BLOCK_N tokens."""
    make = descriptor_type()
    found = []
    for t in (inputs.k, inputs.v):
        view = t if problem.options.layout == "dense" else t.transpose(0, 1).unsqueeze(0)
        block = [1, 1, tiles.block_n, padded(view.shape[3])]
        found.append(make(view, list(view.shape), _strides(view), block))
    return found[0], found[1]


def of_leaves(slots: Slots, leaves: Sequence[Tensor], tiles: Tiles) -> list[Any]:
    """Descriptors of the described leaves, blocks of a tile of scores."""
    make, found = descriptor_type(), []
    for slot in slots.described:
        leaf, covered = leaves[slot], slots.leaves[slot].covered
        block = [1] * leaf.ndim
        block[covered[0]], block[covered[1]] = tiles.block_m, tiles.block_n
        found.append(make(leaf, list(leaf.shape), _strides(leaf), block))
    return found


def _strides(view: Tensor) -> list[int]:
    """Its strides; of a dimension of size 1, where any will do, one that the hardware takes."""
    places = enumerate(zip(view.stride(), view.shape, strict=True))
    return [x if n > 1 else (1 if d == view.ndim - 1 else 16) for d, (x, n) in places]
