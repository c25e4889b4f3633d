"""Tensor descriptors: Triton's, or the same four facts where Triton is not needed to launch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


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
