"""The strides that the forward kernel gets: in units of 16 bytes where every row of a call begins at a multiple."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tilewise.backends.triton.launch import four_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.problem import Problem


class Strides(NamedTuple):
    """(batch, head, token, d) strides of q, k and v, and (split, ...) of out, in units of `step` elements; unit: every
    last stride is 1."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    step: int
    unit: bool


def step_of(problem: Problem, tensors: Sequence[Tensor]) -> int:
    """Elements of 16 bytes if every row of q, k, v and out begins at a multiple of them, else 1."""
    step = 16 // problem.dtype.itemsize
    sizes = (problem.shape.head_dim, problem.shape.head_dim_v)
    found = [four_strides(problem, t) for t in tensors]
    if any(f[3] != 1 for f in found) or any(t.data_ptr() & 15 for t in tensors):
        return 1
    return 1 if any(x % step for x in sizes) or any(x % step for f in found for x in f[:3]) else step


def strides_of(problem: Problem, tensors: Sequence[Tensor], out_strides: Sequence[int], step: int) -> Strides:
    """The strides of a call in units of a step that divides all but the last."""
    found = [*(four_strides(problem, t) for t in tensors), tuple(out_strides)]
    sizes = (problem.shape.head_dim, problem.shape.head_dim, *[problem.shape.head_dim_v] * 2)
    unit = all(f[-1] == 1 or size <= 1 for f, size in zip(found, sizes, strict=True))
    return Strides(*(tuple(x // step for x in f) for f in found), step, unit)  # type: ignore[arg-type]
