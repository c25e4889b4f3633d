"""How a spec's run-time data lie in memory for its compiled code: leaves, scalars, and their types.

The block is int64: for each leaf its address, then (size, stride in bytes) per dimension, then the integers,
then the floats (float32 in the low half of a slot). The code is compiled for the leaves' element types.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.spec.attention import AttentionSpec

ELEMENTS = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.bool: "i8",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Slots:
    """Where each leaf's description begins, its rank and element type, and where the scalars begin.

    far: some leaf spans 2^31 bytes or more, so that offsets inside it need int64.
    """

    leaf_at: tuple[int, ...]
    ranks: tuple[int, ...]
    elements: tuple[str, ...]
    ints_at: int
    floats_at: int
    far: bool

    @property
    def text(self) -> str:
        return f"{','.join(self.elements)};{self.ranks};{self.far}"


def describe(spec: AttentionSpec, leaves: Sequence[Tensor]) -> Slots | None:
    """The slots of a call's leaves; None if one has an element type the compiled code does not read, or is empty."""
    at, where, elements, far = 0, [], [], False
    for leaf in leaves:
        if leaf.dtype not in ELEMENTS or leaf.numel() == 0:
            return None
        where.append(at)
        at += 1 + 2 * leaf.ndim
        elements.append(ELEMENTS[leaf.dtype])
        far |= (
            sum((n - 1) * abs(s) for n, s in zip(leaf.shape, leaf.stride(), strict=True))
            * leaf.element_size()
            >= 2**31
        )
    return Slots(tuple(where), tuple(t.ndim for t in leaves), tuple(elements), at, at + spec.num_ints, far)


def fill(slots: Slots, leaves: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]) -> list[int]:
    """The block's numbers. The tensors must outlive the call."""
    block: list[int] = []
    for leaf in leaves:
        block.append(leaf.data_ptr())
        for n, stride in zip(leaf.shape, leaf.stride(), strict=True):
            block += [n, stride * leaf.element_size()]
    block += [int(n) for n in ints]
    return block + [float_bits(x) for x in floats]


def float_bits(x: float) -> int:
    """The bits of x as float32; beyond its range infinity, as torch converts."""
    try:
        return struct.unpack("<I", struct.pack("<f", x))[0]
    except OverflowError:
        return 0x7F800000 if x > 0 else 0xFF800000
