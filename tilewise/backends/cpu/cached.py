"""A forward call over a cache, laid out once: lengths, table and rows of a batch are read when it runs."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilewise.backends.cpu import launch
from tilewise.backends.cpu.pieces import covered, pieces
from tilewise.backends.cpu.prepared import Forward, Segments, apart, launches_of
from tilewise.problem import empty_in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.backends.cpu.pieces import Piece
    from tilewise.backends.cpu.slots import Slots
    from tilewise.backends.reference.blockwise import Blockwise
    from tilewise.problem import Inputs, Problem


def with_table(inputs: Inputs) -> Inputs:
    """The inputs with a table of pages that the kernels read: int32, rows without gaps."""
    table = inputs.block_table
    if table is None or (table.dtype == torch.int32 and (table.shape[1] <= 1 or table.stride(1) == 1)):
        return inputs
    return replace(inputs, block_table=table.to(torch.int32).contiguous())


class CachedForward:
    """Calls of one kind over caches. Sequences of few rows share one launch, laid out once; where others are in the
    batch, their launch is laid out when it is met, which their work hides."""

    def __init__(self, problem: Problem, inputs: Inputs, slots: Slots, exact: Blockwise) -> None:
        self._problem, self._slots, self._exact = problem, slots, exact
        self._names = problem.tensor_names
        self._num_leaves = len(problem.spec.leaves)
        nothing = inputs.q.new_empty(0)  # the numbers are kept, the tensors are not
        self._inputs = replace(
            inputs, q=nothing, k=nothing, v=nothing, leaves=(), **dict.fromkeys(self._names)
        )
        self._few: Forward | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], want_lse: bool
    ) -> tuple[Tensor, Tensor]:
        problem, count = self._problem, self._num_leaves
        named = dict(zip(self._names, extra[count:], strict=True))
        inputs = with_table(replace(self._inputs, q=q, k=k, v=v, leaves=tuple(extra[:count]), **named))
        found = pieces(problem, inputs)
        out = empty_in_order(q, problem.out_shape, problem.out_dtype)
        lse = torch.empty(problem.lse_shape, dtype=torch.float32, device="cpu")
        if not covered(problem, found):
            out.zero_()
            lse.fill_(-math.inf)
        few, many = apart(problem, found)
        given = inputs.leaves if inputs.sink is None else (*inputs.leaves, inputs.sink)
        finite = not few or self._run_few(inputs, given, (out, lse), few)
        for call in launches_of(problem, inputs, (out, lse), self._slots, many):
            finite = call.run((q, k, v), given, out, lse) and finite
        return (out, lse) if finite else self._exact.forward(problem, inputs)

    def _run_few(
        self, inputs: Inputs, given: Sequence[Tensor], results: tuple[Tensor, Tensor], few: list[Piece]
    ) -> bool:
        if self._few is None:
            self._few = Forward(self._problem, inputs, results, self._slots, few, True)
        numbers, tasks, splits, _ = launch.segments_of(self._problem, few, [(0, 0)] * len(few), True)
        segments = Segments((ctypes.c_int64 * len(numbers))(*numbers), tasks, splits)
        return self._few.run((inputs.q, inputs.k, inputs.v), given, *results, segments)
