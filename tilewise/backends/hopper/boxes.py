"""Descriptors of the Hopper backward, with their types: what the copy engine reads and writes, tile by tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.backends.hopper.compile import descriptor_type, shared_layout

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.problem import Problem


class Box(NamedTuple):
    """A descriptor and its type."""

    kind: str
    descriptor: Any


def bare(value: object) -> object:
    """What a launch takes."""
    return value.descriptor if isinstance(value, Box) else value


def boxed(t: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Box:
    """A descriptor with the swizzle that products want."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = shared_layout(t.dtype, block)
    return Box(descriptor_type(t.dtype, block), TensorDescriptor(t, shape, strides, block, layout))


def line_box(t: Tensor, rows: int) -> Box:
    """A descriptor of the rows' numbers in tiles."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(0, 32, 2)
    found = TensorDescriptor(t, [1, t.numel()], [t.numel(), 1], [1, rows], layout)
    return Box(f"tensordesc<fp32[1, {rows}],{layout!r}>", found)


def sums_box(t: Tensor) -> Box:
    """A descriptor of dq's sums as lines of 256, of which the copy engine adds to 8 at a time."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(0, 32, 2)
    found = TensorDescriptor(t, [t.numel() // 256, 256], [256, 1], [8, 256], layout)
    return Box(f"tensordesc<fp32[8, 256],{layout!r}>", found)


def keyed_strides(problem: Problem, t: Tensor) -> tuple[int, int, int]:
    """(batch, head, token) strides of a q- or k-like tensor."""
    from tilewise.backends.triton.launch import four_strides

    return four_strides(problem, t)[:3]
