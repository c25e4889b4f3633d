"""How the backward's kernels address q, k, v, do and out: strides in a common unit, and descriptors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.backends.triton.launch import four_strides

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.problem import Problem


def descriptor(problem: Problem, t: Tensor, rows: int, width: int) -> Any:
    """Descriptor of a q- or k-like tensor as (batch, head, token, d), in blocks of some tokens."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    view = t if problem.options.layout == "dense" else t.transpose(0, 1).unsqueeze(0)
    # A dimension of one element may have any stride that the hardware takes.
    strides = [
        x if n > 1 or d == 3 else 16 for d, (x, n) in enumerate(zip(view.stride(), view.shape, strict=True))
    ]
    return TensorDescriptor(view, list(view.shape), strides, [1, 1, rows, width])


class Layout(NamedTuple):
    """(batch, head, token, d) strides of q, k, v, do and out, in units of step elements."""

    strides: tuple[tuple[int, ...], ...]
    step: int
    unit: bool


def layout_of(problem: Problem, tensors: tuple[Tensor, ...]) -> Layout:
    """Strides, and the step that divides them all where addresses allow 16-byte rows."""
    found = [four_strides(problem, t) for t in tensors]
    unit = all(f[3] == 1 or t.shape[-1] <= 1 for f, t in zip(found, tensors, strict=True))
    step = 16 // problem.dtype.itemsize
    aligned = unit and not any(t.data_ptr() & 15 for t in tensors)
    sizes = (problem.shape.head_dim, problem.shape.head_dim_v, 0)
    if not aligned or any(x % step for f in (*found, sizes) for x in f[:3]):
        step = 1
    return Layout(tuple(tuple(x // step for x in f) for f in found), step, unit)
