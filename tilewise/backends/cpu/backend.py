"""The backend `cpu`: fp32, bf16 and fp16 on the processor, every feature of the spec."""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilewise.backends.protocol import Gradients, Needs, Reason, Schedule
from tilewise.backends.reference.blockwise import Blockwise
from tilewise.problem import Inputs, Problem, empty_in_order

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=1)
def _missing() -> tuple[str, ...]:
    return tuple(name for name in ("numba", "llvmlite") if not _is_there(name))


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # a finder may raise instead of passing on
        return False


class Cpu:
    """Compiled tile loops. Where a result is not finite, the reference decides what may enter it: see `forward`."""

    name = "cpu"

    def __init__(self) -> None:
        self._exact = Blockwise()

    def supports(self, problem: Problem) -> list[Reason]:
        reasons = []
        if problem.device_type != "cpu":
            reasons.append(
                Reason(
                    "the backend 'cpu' runs on the processor", f"{problem.device_type} tensors", "cpu tensors"
                )
            )
        if problem.dtype not in DTYPES:
            name = str(problem.dtype).removeprefix("torch.")
            reasons.append(
                Reason("element type", name, "float32, bfloat16, float16", "float64 runs on 'blockwise'.")
            )
        if _missing():
            reasons.append(
                Reason(
                    "compiled kernels need Numba",
                    f"no {_missing()[0]}",
                    "numba",
                    "pip install tilewise[cpu].",
                )
            )
        elif problem.device_type == "cpu":
            from tilewise.backends.cpu.isa import detect

            isa = detect()
            if isa.tall < 6 or (problem.dtype == torch.float16 and not isa.half):
                reasons.append(Reason("processor", isa.cpu, "x86 with AVX2, FMA and F16C, or 64-bit ARM"))
        return reasons

    def plan(self, problem: Problem) -> Schedule:
        from tilewise.backends.cpu import launch, launch_backward

        schedule = launch.plan(problem)
        if problem.needs_grad:
            workspace = max(schedule.workspace_bytes, launch_backward.workspace_bytes(problem))
            schedule = replace(schedule, workspace_bytes=workspace)
        return schedule

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(out, lse). A value that is not finite must reach exactly the rows that see it. The kernels multiply
        hidden values by weights of 0, so where a result is not finite the call is done again by the reference,
        which keeps count of who sees what; results that are all finite hold nothing hidden."""
        from tilewise.backends.cpu import launch
        from tilewise.backends.cpu.slots import describe

        slots = describe(problem.spec, inputs.leaves)
        if slots is None:
            return self._exact.forward(problem, inputs)
        out = empty_in_order(inputs.q, problem.out_shape, problem.out_dtype)
        lse = inputs.q.new_empty(problem.lse_shape, dtype=problem.compute_dtype)
        if problem.options.layout == "varlen":
            out.zero_()
            lse.fill_(-math.inf)
        with torch.no_grad():
            target = (
                out
                if out.stride(-1) == 1 or out.shape[-1] <= 1
                else torch.zeros(out.shape, dtype=out.dtype, device="cpu")
            )
            finite = launch.forward(problem, inputs, target, lse, slots)
            if not finite:
                return self._exact.forward(problem, inputs)
            if target is not out:
                out.copy_(target)
        return out, lse

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs: Needs,
    ) -> Gradients:
        """All gradients; by the reference where one is not finite or a leaf's is too large to be summed per task."""
        from tilewise.backends.cpu import launch_backward
        from tilewise.backends.cpu.slots import describe

        slots = describe(problem.spec, inputs.leaves)
        same = all(t.dtype == problem.dtype for t in (saved[0], grads[0]))
        if slots is None or not same:
            return self._exact.backward(problem, inputs, saved, grads, needs)
        with torch.no_grad():
            found = launch_backward.backward(problem, inputs, saved, grads, needs, slots)
        return self._exact.backward(problem, inputs, saved, grads, needs) if found is None else found
