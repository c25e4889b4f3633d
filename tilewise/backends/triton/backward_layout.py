"""How the backward's kernels address q, k, v, do and out: strides in a common unit, and descriptors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.backends.triton.launch import four_strides
from tilewise.backends.triton.source import derivative_roots

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.backends.triton.launch_backward import Call
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


def row_descriptors(call: Call, rows: int) -> tuple[Any, ...]:
    """q, do, and, where each head's fill whole tiles, -m log2 e and delta, in tiles of some rows."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def line(t: Tensor) -> Any:
        heads = t.numel() // call.pitch
        return TensorDescriptor(t, [heads, call.pitch], [call.pitch, 1], [1, rows])

    pairs = ((call.inputs.q, call.d), (call.do, call.dv))
    found = tuple(descriptor(call.problem, t, rows, w) for t, w in pairs)
    return (*found, line(call.power), line(call.delta)) if call.power is not None else (*found, None, None)


def key_descriptors(call: Call, keys: int) -> tuple[Any, ...]:
    """k and v in tiles of some keys."""
    pairs = ((call.inputs.k, call.d), (call.inputs.v, call.dv))
    return tuple(descriptor(call.problem, t, keys, w) for t, w in pairs)


def pair_strides(problem: Problem, site: int, target: Tensor) -> tuple[tuple[int, ...], int]:
    """Strides of a pairwise leaf's gradient along batch, head, row and column (0 where it has one element), in units
    of a step that is more than 1 where columns are contiguous and rows aligned; and that step."""
    names = [str(a.value) for a in derivative_roots(problem.spec)[1][site].args]
    found = dict(zip(names, target.stride(), strict=True))
    sizes = dict(zip(names, target.shape, strict=True))
    strides = tuple(found[n] if sizes.get(n, 1) > 1 else 0 for n in ("b", "h", "i", "j"))
    step = 16 // target.element_size()
    divided = (*strides[:3], problem.shape.seqlen_k)
    if strides[3] != 1 or target.data_ptr() & 15 or any(x % step for x in divided):
        return strides, 1
    return (*(x // step for x in strides[:3]), 1), step


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
