"""A forward call, laid out once and run any number of times.

What depends on shapes, strides, numbers and the spec alone is computed in `Forward(...)`; a run fills in addresses.
Blocks and scratch come from free lists and go back, so that threads running one `Forward` share neither.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise import memory
from tilewise.backends.cpu import launch, pool
from tilewise.backends.cpu.isa import detect, uses_pairs
from tilewise.backends.cpu.parameter_block import Block, readable, strides_of
from tilewise.backends.cpu.parameters import SEGMENT, P
from tilewise.backends.cpu.slots import fill

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tilewise.backends.cpu.pieces import Piece
    from tilewise.backends.cpu.slots import Slots
    from tilewise.problem import Inputs, Problem

KEPT = 100_000_000
"""Multiply-adds up to which a call's scratch is kept for the next: longer calls do not feel its allocation."""
SMALL = 4096
"""Rows up to which a block keeps memory for an lse that nobody asked for."""
PARTS = 1 << 18
"""float32 of the parts of a split call up to which a block keeps memory for them."""
_Q, _K, _V, _OUT, _LSE, _SPEC = P.q, P.k, P.v, P.out, P.lse, P.spec
_TASK, _THREAD, _FLAG, _SCRATCH = P.task, P.thread, P.flag, P.scratch
_NUM_TASKS = P.num_tasks
BEGIN, BEGIN_OVER = struct.Struct("=11q"), struct.Struct("=13q")
"""The beginning of a parameter block, up to the scratch and to the number of segments."""
_free_scratch: dict[int, list[tuple[Tensor, int]]] = {}
"""(memory, its first whole line) by size in bytes. What a run takes is its own until it puts it back."""
KEPT_KEYS = 1 << 24
_free_keys: list[Tensor] = []
"""At most one piece of memory, of at most KEPT_KEYS bytes, for keys that are brought into shape before a pass. New
memory is met page by page, which can take longer than what was to be saved."""


def _new_scratch(size: int) -> tuple[Tensor, int]:
    # No reader of what is here before it is written: the kernels fill what they add to.
    memory = torch.empty(size + 64, dtype=torch.uint8, device="cpu")
    return memory, (memory.data_ptr() + 63) & -64


def _room(size: int) -> Tensor:
    """Memory for keys: what is kept if it is large enough, else new."""
    try:
        kept = _free_keys.pop()
    except IndexError:
        kept = None
    return kept if kept is not None and kept.numel() >= size else memory.empty((size,), torch.uint8)


class _Block(Block):
    """A parameter block with its own table of the spec's data, and an lse for when nobody asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.address = ctypes.addressof(self.values)
        self.view = memoryview(self.values).cast("B").cast("q")
        self.lse: Tensor | None = None
        self.lse_address = 0
        self.parts: Tensor | None = None
        self.arrived: Tensor | None = None
        self.splits = 0
        """Splits for which its memory for parts is set up."""
        self.spec: ctypes.Array | None = None


class Segments(NamedTuple):
    """Sequences in place of those that a call was laid out for. held: what their addresses point to."""

    numbers: array
    tasks: int
    splits: int
    held: object = None


def _merge(block: _Block, merging: tuple[Any, ...], alone: bool, threads: int) -> None:
    """The splits of a call whose kernel does not merge them."""
    function, tasks, launcher, worker = merging
    values = block.values
    values[_TASK] = values[_THREAD] = 0
    values[_NUM_TASKS] = tasks
    if alone:
        worker(block.address)
    else:
        launcher(function, block.address, threads, 0)


def launches_of(
    problem: Problem, inputs: Inputs, results: tuple[Tensor, Tensor], slots: Slots, found: list[Piece]
) -> list[Forward]:
    """The launches of a call: sequences of few rows by `decode_kernel`, the others by `forward_kernel`."""
    parts = zip(apart(problem, found), (True, False), strict=True)
    return [Forward(problem, inputs, results, slots, part, decode) for part, decode in parts if part]


def apart(problem: Problem, found: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The sequences for `decode_kernel` and those for `forward_kernel`; those of a cache by their rows alone, since
    their keys grow."""
    few: list[Piece] = []
    many: list[Piece] = []
    most, least = launch.decode_rows(problem), launch.decode_keys(problem)
    for piece in found:
        (few if piece.rows <= most and piece.keys >= least else many).append(piece)
    return few, many


class Forward:
    """One kind of forward call: one launch of a kernel for the sequences that it serves best.

    Source of the number of splits, and so of the bits: `launch.splits_of`, from the shape alone.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, results: tuple[Tensor, Tensor], slots: Slots,
        found: list[Piece], decode: bool,
    ) -> None:  # fmt: skip
        isa, dtype, s = detect(), launch.NAMES[problem.dtype], problem.shape
        out, lse = results
        self._copied = any(readable(t) is not t for t in (inputs.q, inputs.k, inputs.v))
        block = _Block()
        launch.common(block, problem, inputs)
        of_the_call = len(block.alive)
        self._tasks, self._splits = launch.lay_out(block, problem, inputs, found, decode)
        self._turn_tasks, self._turned_bytes = block.turn_tasks, block.turned_bytes
        self._turn = launch.kernel(isa, launch.turner(isa, dtype), dtype) if block.turn_tasks else 0
        # Copies of the block hold addresses of these; the call's tensors stay with the caller.
        self._tables = block.alive[of_the_call:]
        dense = problem.options.layout == "dense"
        block.tensor(P.out, out, strides_of(problem, out))
        block.tensor(P.lse, lse, lse.stride()[:2] if dense else (0, lse.stride(0)))
        block.set(P.wide_out, int(problem.out_dtype == torch.float32))
        block.set(P.key_block, launch.key_block(problem, decode))
        rows = s.seqlen_q * (s.batch if dense else 1)
        block.set(P.total_rows, rows)
        self._part_rows = s.num_heads_q * rows
        self._dim_v = s.head_dim_v
        launch.link_code(block, problem, slots)
        self._table = fill(slots, inputs.leaves, inputs.ints, inputs.floats)
        self._leaf_at = slots.leaf_at
        self._with_sink = problem.spec.sink
        if decode:
            self._forward = launch.kernel(isa, "decode", dtype)
        else:
            self._forward = launch.kernel(isa, "forward", dtype, launch.in_pages(found))
        # `decode_kernel` merges its splits itself.
        self._combine = None if decode else functools.partial(launch.kernel, isa, "combine", dtype)
        self._heads = s.num_heads_q
        work = launch.work_of(problem)
        if uses_pairs(isa, dtype) and not decode:
            work = max(work, self._tasks * launch.LEAST_OF_PAIRS)
        self._most_threads = 1 if work < launch.ALONE else self._tasks
        # That of few rows is small whatever the keys.
        self._keeps_scratch = decode or work <= KEPT
        self._merged = block.values[P.num_segments] * s.num_heads_q
        least = launch.decode_scratch(problem, block.values[P.together]) if decode else 0
        self._each = -(-max(least, launch.scratch_bytes(problem)) // 64) * 64
        self.together = block.values[P.together]
        block.set(P.scratch_bytes, self._each)
        self._lse_shape = lse.shape
        self._values = bytes(block.values)
        self._free: list[_Block] = []

    def _make(self) -> _Block:
        """A block of this call's numbers."""
        block = _Block()
        ctypes.memmove(block.address, self._values, len(self._values))
        if self._lse_shape.numel() <= SMALL:
            block.lse = torch.empty(self._lse_shape, dtype=torch.float32, device="cpu")
            block.lse_address = block.lse.data_ptr()
        if self._table:
            block.spec = (ctypes.c_int64 * len(self._table))(*self._table)
            block.values[_SPEC] = ctypes.addressof(block.spec)
        return block

    def run(
        self, qkv: tuple[Tensor, Tensor, Tensor], extra: Sequence[Tensor], out: Tensor, lse: Tensor | None,
        segments: Segments | None = None,
    ) -> bool:  # fmt: skip
        """Fill out and lse; extra are the leaves, then the sink, if any. segments: in place of those laid out.

        Returns: False if a number of the result is not finite: then what stood at hidden keys may have entered.
        """
        tasks, splits = (self._tasks, self._splits) if segments is None else segments[1:3]
        if tasks == 0:
            return True
        q, k, v = map(readable, qkv) if self._copied else qkv
        try:
            block = self._free.pop()
        except IndexError:
            block = self._make()
        values = block.values
        values[_Q], values[_K], values[_V] = q.data_ptr(), k.data_ptr(), v.data_ptr()
        values[_OUT] = out.data_ptr()
        if lse is None:
            lse = block.lse
        if lse is None:
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device="cpu")
        values[_LSE] = lse.data_ptr()
        for at, leaf in zip(self._leaf_at, extra, strict=False):
            block.spec[at] = leaf.data_ptr()  # type: ignore[index]
        if segments is not None:
            values[P.segments] = segments.numbers.buffer_info()[0]
            values[P.num_segments] = len(segments.numbers) // SEGMENT.size
        held = None
        if self._with_sink:
            held = extra[len(self._leaf_at)].detach().to(torch.float32).contiguous()
            values[P.sink] = held.data_ptr()
        threads = min(pool.num_threads(), self._most_threads) if self._most_threads > 1 else 1
        size = self._each * threads
        free = _free_scratch.setdefault(size, [])
        try:
            scratch = free.pop()
        except IndexError:
            scratch = _new_scratch(size)
        values[_SCRATCH] = scratch[1]
        values[_FLAG] = 0
        if self._turn_tasks:
            # 64 bytes are one line of the cache and one row of a tile.
            turned = _room(self._turned_bytes + 64)
            values[P.turned_v] = (turned.data_ptr() + 63) & -64
            block.run(self._turn, self._turn_tasks, threads)
        if splits > 1:
            self._run_split(block, threads, tasks, splits)
        else:
            block.run(self._forward, tasks, threads)
        finite = values[_FLAG] == 0
        if self._turn_tasks and turned.numel() <= KEPT_KEYS and not _free_keys:
            _free_keys.append(turned)
        if self._keeps_scratch:
            free.append(scratch)
        self._free.append(block)
        return finite

    def short(self) -> Callable[..., bool] | None:
        """`run` for a call of one launch, without leaves and copies, as short as Python makes it; else None.

        run(q, k, v, out, lse). After work that fills the caches each line of memory that Python meets takes as long as
        a dozen of its steps: so names come from one tuple, and what differs from call to call is written at once."""
        large = self._splits * self._part_rows * (self._dim_v + 1) > PARTS
        if large or self._leaf_at or self._with_sink or not self._tasks or not self._is_plain():
            return None
        launcher, threads, scratches = self._means()
        if threads > 1 and launcher is None:
            return None
        splits = self._splits
        merge = self._combine() if splits > 1 and self._combine else 0
        held = (
            self._free, self._make, scratches, self._each * threads, self._tasks, splits, self._set_parts,
            launcher, pool.is_forked, threads, torch.get_num_threads, pool.worker(self._forward), self._forward,
            BEGIN.pack_into,
        )  # fmt: skip
        merging = (merge, self._merged, launcher, pool.worker(merge) if merge else None)

        def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> bool:
            (
                blocks, make, scratches, size, tasks, splits, set_parts, launcher, is_forked, threads, get_num_threads,
                worker, function, pack_into,
            ) = held  # fmt: skip
            block = blocks.pop() if blocks else make()
            scratch = scratches.pop() if scratches else _new_scratch(size)
            if splits > 1 and block.splits != splits:
                set_parts(block, splits)
            alone = launcher is None or is_forked()
            used = 1 if alone else min(threads, get_num_threads())
            addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
            to_lse = block.lse_address if lse is None else lse.data_ptr()
            pack_into(block.view, 0, 0, 0, 0, tasks, used, *addresses, to_lse, scratch[1])
            if alone:
                worker(block.address)
            else:
                launcher(function, block.address, used, 0)
            if merging[0]:
                _merge(block, merging, alone, used)
            finite = block.view[_FLAG] == 0
            scratches.append(scratch)
            blocks.append(block)
            return finite

        return run

    def short_over(self) -> Callable[..., bool] | None:
        """`short` for sequences that come with each run: run(qkv, out, lse, segments)."""
        if self._leaf_at or self._with_sink or not self._is_plain():
            return None
        launcher, threads, scratches = self._means()
        if threads > 1 and launcher is None:
            return None
        held = (
            self._free, self._make, scratches, self._each * threads, self._set_parts, launcher, pool.is_forked,
            threads, torch.get_num_threads, pool.worker(self._forward), self._forward, BEGIN_OVER.pack_into,
        )  # fmt: skip

        def run(
            qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor | None, segments: Segments
        ) -> bool:
            numbers, tasks, splits, _ = segments
            if not tasks:
                return True
            (
                blocks, make, scratches, size, set_parts, launcher, is_forked, threads, get_num_threads, worker,
                function, pack_into,
            ) = held  # fmt: skip
            block = blocks.pop() if blocks else make()
            scratch = scratches.pop() if scratches else _new_scratch(size)
            used = 1 if launcher is None or is_forked() else min(threads, get_num_threads(), tasks)
            q, k, v = qkv
            addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
            to_lse = block.lse_address if lse is None else lse.data_ptr()
            address, count = numbers.buffer_info()
            pack_into(
                block.view, 0, 0, 0, 0, tasks, used, *addresses, to_lse, scratch[1], address, count // SEGMENT.size
            )  # fmt: skip
            parts = set_parts(block, splits) if splits > 1 and block.splits != splits else None
            if used > 1:
                launcher(function, block.address, used, 0)
            else:
                worker(block.address)
            del parts  # read until here
            finite = block.view[_FLAG] == 0
            scratches.append(scratch)
            blocks.append(block)
            return finite

        return run

    def _is_plain(self) -> bool:
        """Whether a block can hold all that a run needs beside the call's tensors as they are."""
        large = self._lse_shape.numel() > SMALL or not self._keeps_scratch
        return not (large or self._turn_tasks or self._copied)

    def _means(self) -> tuple[Any, int, list[tuple[Tensor, int]]]:
        """(launcher or None, most threads, scratch for as many): room for as many as may be asked for later."""
        threads = min(max(pool.num_threads(), os.cpu_count() or 1), self._most_threads)
        scratches = _free_scratch.setdefault(self._each * threads, [])
        return pool.launcher() if threads > 1 else None, threads, scratches

    def _set_parts(self, block: _Block, splits: int) -> Tensor:
        """Memory for the parts of the splits; a block keeps it where it is small."""
        rows, parts = splits * self._part_rows, block.parts
        size = rows * (self._dim_v + 1)
        if parts is None or parts.numel() < size:
            parts = torch.empty(size, dtype=torch.float32, device="cpu")
            block.parts = parts if size <= PARTS else None
        block.splits = splits if block.parts is not None else 0
        counts = block.values[P.num_segments] * self._heads
        if block.arrived is None or block.arrived.numel() < counts:
            # What counts up in a call is 0 again at its end.
            block.arrived = torch.zeros(counts, dtype=torch.int64, device="cpu")
        block.values[P.arrived] = block.arrived.data_ptr()
        block.values[P.part_out] = parts.data_ptr()
        block.values[P.part_lse] = parts.data_ptr() + 4 * rows * self._dim_v
        return parts

    def _run_split(self, block: _Block, threads: int, tasks: int, splits: int) -> None:
        """Parts by key split, then their merge."""
        parts = self._set_parts(block, splits)
        block.run(self._forward, tasks, threads)
        if self._combine is not None:
            block.run(self._combine(), block.values[P.num_segments] * self._heads, threads)
        del parts  # read until here
