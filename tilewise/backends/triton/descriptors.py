"""Tensor descriptors: Triton's, or the same four facts where Triton is not needed to launch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.backends.triton.tiles import padded

if TYPE_CHECKING:
    from torch import Tensor

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
        shape = list(view.shape)
        strides = [
            x if n > 1 else _still(view, d) for d, (x, n) in enumerate(zip(view.stride(), shape, strict=True))
        ]
        found.append(make(view, shape, strides, [1, 1, tiles.block_n, padded(shape[3])]))
    return found[0], found[1]


def _still(view: Tensor, d: int) -> int:
    """A stride for a dimension of size 1, where any will do that the hardware takes."""
    return 1 if d == view.ndim - 1 else 16
