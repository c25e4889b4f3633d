"""The block of numbers that a kernel is given, and how tensors' addresses and strides get into it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from tilewise.backends.cpu import pool
from tilewise.backends.cpu.parameters import STRIDES, P
from tilewise.backends.cpu.slots import float_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.problem import Problem


class Block:
    """A parameter block, with the tensors it points to kept alive."""

    def __init__(self) -> None:
        self.values = (ctypes.c_int64 * P.count)()
        self.alive: list[object] = []
        self.turn_tasks = 0
        self.turned_bytes = 0

    def set(self, slot: int, value: int) -> None:
        self.values[slot] = value

    def address_of(self, slot: int) -> int:
        return ctypes.addressof(self.values) + 8 * slot

    def set_float(self, slot: int, value: float) -> None:
        self.values[slot] = float_bits(value)

    def table(self, slot: int, numbers: Sequence[int]) -> None:
        held = (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
        self.alive.append(held)
        self.values[slot] = ctypes.addressof(held)

    def tensor(self, slot: int, t: Tensor, strides: Sequence[int] = ()) -> None:
        """Address of t, and its strides in bytes in their slots."""
        self.alive.append(t)
        self.values[slot] = t.data_ptr()
        for n, stride in enumerate(strides, STRIDES.get(slot, slot + 1)):
            self.values[n] = stride * t.element_size()

    def scratch(self, size: int, threads: int) -> None:
        """Scratch of each thread, on lines of 64 bytes."""
        size = -(-size // 64) * 64
        # No reader of what is here before it is written: the kernels fill what they add to.
        memory = torch.empty(size * threads + 64, dtype=torch.uint8, device="cpu")
        self.alive.append(memory)
        self.values[P.scratch] = -(-memory.data_ptr() // 64) * 64
        self.values[P.scratch_bytes] = size

    def run(self, function: int, tasks: int, threads: int, first: int = 0) -> None:
        """The function on as many threads as there are tasks for, at most `threads`; the tasks from `first` on."""
        self.values[P.task] = first
        self.values[P.thread] = 0
        self.values[P.num_tasks] = first + tasks
        threads = self.values[P.threads] = min(threads, tasks)
        pool.run_parallel(function, ctypes.addressof(self.values), threads)


def strides_kv(problem: Problem, t: Tensor) -> tuple[int, int, int]:
    """(batch or page, head, token) strides in elements of k or v."""
    return (t.stride(0), t.stride(1), t.stride(2)) if problem.options.pages else strides_of(problem, t)


def strides_of(problem: Problem, t: Tensor) -> tuple[int, int, int]:
    """(batch, head, token) strides in elements of a q- or out-like tensor."""
    if problem.options.layout == "dense":
        return t.stride(0), t.stride(1), t.stride(2)
    return 0, t.stride(1), t.stride(0)


def readable(t: Tensor) -> Tensor:
    """t, or a copy if its last dimension is not contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()
