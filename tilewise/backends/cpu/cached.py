"""Forward calls: laid out afresh, and calls over caches, laid out once: lengths and table are read when they run."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends.cpu import launch
from tilewise.backends.cpu.pieces import Piece, covered, pieces
from tilewise.backends.cpu.prepared import Forward, Segments, launches_of
from tilewise.problem import empty_in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.backends.cpu.slots import Slots
    from tilewise.backends.reference.blockwise import Blockwise
    from tilewise.problem import Inputs, Problem


NAMES, ADDRESS = 1, 2
"""What is read of a table of pages: the one page of each sequence, or where it lies."""


def with_table(inputs: Inputs) -> Inputs:
    """The inputs with a table of pages that the kernels read."""
    table = inputs.block_table
    return inputs if table is None else replace(inputs, block_table=integers(table))


def integers(table: Tensor) -> Tensor:
    """A table of pages as the kernels read it: int32, rows without gaps."""
    if table.dtype == torch.int32 and (table.shape[1] <= 1 or table.stride(1) == 1):
        return table
    return table.to(torch.int32).contiguous()


class CachedForward:
    """Calls of one kind over caches. Where all sequences have a few rows, one launch, laid out once, serves them, and
    a run writes down the sequences alone; where not, launches are laid out when rows are known: their work hides it."""

    def __init__(self, problem: Problem, inputs: Inputs, slots: Slots, exact: Blockwise) -> None:
        self._problem, self._slots, self._exact = problem, slots, exact
        self._num_leaves, self._names = len(problem.spec.leaves), problem.tensor_names
        # Where the tensors stand that a run looks at; -1: there is none.
        places = {name: self._num_leaves + n for n, name in enumerate(self._names)}
        self._at = [places.get(name, -1) for name in ("seqused_k", "leftpad_k", "block_table")]
        nothing = inputs.q.new_empty(0)  # the numbers are kept, the tensors are not
        self._inputs = replace(
            inputs, q=nothing, k=nothing, v=nothing, leaves=(), **dict.fromkeys(self._names)
        )
        o, s = problem.options, problem.shape
        self._few: Forward | None = None
        self._last: tuple[Any, Segments] | None = None
        table = inputs.block_table
        # Shapes and types are those of every call of the kind.
        self._of_table = 0 if table is None else NAMES if table.shape[1] == 1 else ADDRESS
        self._is_read = table is not None and integers(table) is table
        if o.layout == "dense" and not o.seqused_q and 0 < s.seqlen_q <= launch.decode_rows(problem):
            inputs = with_table(inputs)
            out = empty_in_order(inputs.q, problem.out_shape, problem.out_dtype)
            lse = torch.empty(problem.lse_shape, dtype=torch.float32, device="cpu")
            self._few = Forward(problem, inputs, (out, lse), slots, pieces(problem, inputs), True)
            q = inputs.q
            self._like_q = out.dtype == q.dtype and out.shape == q.shape and out.stride() == q.stride()
            self._out = (out.shape, out.stride(), out.dtype)
            self._chunk = launch.splits_of(problem, Piece.whole(problem), True)[1]
            units = s.num_heads_kv if launch.packs_rows(problem, True) else s.num_heads_q
            self._units = units // self._few.together
            self._short = self._few.short_over()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], want_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self._few is not None:
            if self._like_q:
                out = torch.empty_like(q, requires_grad=False)
            else:
                shape, stride, dtype = self._out
                out = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            lse = (
                torch.empty(self._problem.lse_shape, dtype=torch.float32, device="cpu") if want_lse else None
            )
            segments = self._segments(extra, k)
            short = self._short
            if short is not None:
                finite = short((q, k, v), out, lse, segments)
            else:
                leaves = extra[: self._num_leaves + ("sink" in self._names)]
                finite = self._few.run((q, k, v), leaves, out, lse, segments)
            if finite:
                return out, lse
        named = dict(zip(self._names, extra[self._num_leaves :], strict=True))
        inputs = replace(self._inputs, q=q, k=k, v=v, leaves=tuple(extra[: self._num_leaves]), **named)
        if self._few is not None:
            return self._exact.forward(self._problem, inputs)
        return forward(self._problem, inputs, self._slots, self._exact)

    def _segments(self, extra: Sequence[Tensor], k: Tensor) -> Segments:
        """The slots of SEGMENT of every sequence, as `pieces` and `launch.segments_of` find them; those of the last
        call where it met the same, as the layers of a model do."""
        s = self._problem.shape
        at_used, at_padding, at_table = self._at
        lengths = [s.seqlen_k] * s.batch if at_used < 0 else extra[at_used].tolist()
        paddings = None if at_padding < 0 else extra[at_padding].tolist()
        entries, address, held = None, 0, None
        if self._of_table == NAMES:
            entries = extra[at_table][:, 0].tolist()
        elif self._of_table:
            held = extra[at_table] if self._is_read else integers(extra[at_table])
            address = held.data_ptr()
        met = (lengths, paddings, entries, address)
        last = self._last
        if last is not None and last[0] == met:
            # The caller holds its own table.
            return last[1] if held is None or self._is_read else last[1]._replace(held=held)
        num_pages, step = k.shape[0], 0 if held is None else held.stride(0) * 4
        inputs, rows, capacity, chunk, units = self._inputs, s.seqlen_q, s.seqlen_k, self._chunk, self._units
        numbers = array("q")
        tasks, most = 0, 1
        for b, keys in enumerate(lengths):
            keys = min(max(keys, 0), capacity)
            first = 0 if paddings is None else min(max(paddings[b], 0), keys)
            splits = -(-keys // chunk) or 1
            entry = b if entries is None else min(max(entries[b], 0), num_pages - 1)
            numbers.extend((
                0, rows, 0, keys, keys - first - rows if inputs.q_offset is None else inputs.q_offset,
                inputs.k_offset - first, b, b, tasks, splits, chunk, 0, 0, 0, 0, 0 if address else entry,
                address + b * step if address else 0, first, b * rows,
            ))  # fmt: skip
            tasks += units * splits
            most = max(most, splits)
        self._last = met, Segments(numbers, tasks, most)
        return Segments(numbers, tasks, most, held)


def forward(problem: Problem, inputs: Inputs, slots: Slots, exact: Blockwise) -> tuple[Tensor, Tensor]:
    """(out, lse) of any call, over caches or not; see `Cpu.forward`."""
    inputs = with_table(inputs)
    found = pieces(problem, inputs)
    out = empty_in_order(inputs.q, problem.out_shape, problem.out_dtype)
    lse = inputs.q.new_empty(problem.lse_shape, dtype=torch.float32)
    if not covered(problem, found):
        out.zero_()
        lse.fill_(-math.inf)
    target = out
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        target = torch.zeros(out.shape, dtype=out.dtype, device="cpu")
    launches = launches_of(problem, inputs, (target, lse), slots, found)
    extra = inputs.leaves if inputs.sink is None else (*inputs.leaves, inputs.sink)
    if not all([x.run((inputs.q, inputs.k, inputs.v), extra, target, lse) for x in launches]):
        return exact.forward(problem, inputs)
    if target is not out:
        out.copy_(target)
    return out, lse
