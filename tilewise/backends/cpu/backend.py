"""The backend `cpu`: fp32, bf16 and fp16 on the processor, every feature of the spec."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilewise.backends.protocol import Gradients, Needs, Reason, Schedule
from tilewise.backends.reference.blockwise import Blockwise
from tilewise.problem import Inputs, Problem, empty_in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.backends.cpu.slots import Slots
    from tilewise.backends.protocol import Prepared

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=1)
def _missing() -> tuple[str, ...]:
    return tuple(name for name in ("numba", "llvmlite") if not _is_there(name))


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # a finder may raise instead of passing on
        return False


class _Prepared:
    """A laid-out forward with its results' shapes."""

    def __init__(self, problem: Problem, inputs: Inputs, slots: Slots, exact: Blockwise) -> None:
        from tilewise.backends.cpu.pieces import pieces
        from tilewise.backends.cpu.prepared import launches_of

        q = inputs.q
        out = empty_in_order(q, problem.out_shape, problem.out_dtype)
        lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
        (self._call,) = launches_of(problem, inputs, (out, lse), slots, pieces(problem, inputs))
        self._short = self._call.short()
        self._like_q = out.dtype == q.dtype and out.shape == q.shape and out.stride() == q.stride()
        self._out = (out.shape, out.stride(), out.dtype)
        self._lse_shape = lse.shape
        self._problem, self._exact = problem, exact
        nothing = q.new_empty(0)  # the numbers are kept, the tensors are not
        self._inputs = replace(inputs, q=nothing, k=nothing, v=nothing, leaves=(), sink=None)
        self.without_gradients: Prepared = (
            self._without_gradients() if self._like_q and self._short is not None else self
        )

    def _without_gradients(self) -> Prepared:
        """`__call__` of a result that lies as q does, past what it looks up."""
        held = self._short, torch.empty_like, self

        def run(
            q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], want_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            short, empty_like, whole = held
            out = empty_like(q, requires_grad=False)
            lse = torch.empty(whole._lse_shape, dtype=torch.float32, device="cpu") if want_lse else None
            return (out, lse) if short(q, k, v, out, lse) else whole._again(q, k, v, extra)  # type: ignore[misc]

        return run

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], want_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self._like_q:
            out = torch.empty_like(q, requires_grad=False)
        else:
            shape, stride, dtype = self._out
            out = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device="cpu") if want_lse else None
        short = self._short
        if short(q, k, v, out, lse) if short is not None else self._call.run((q, k, v), extra, out, lse):
            return out, lse
        return self._again(q, k, v, extra)

    def _again(self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """By the reference, where a number of the result is not finite."""
        leaves, sink = (extra[:-1], extra[-1]) if self._problem.spec.sink else (extra, None)
        inputs = replace(self._inputs, q=q, k=k, v=v, leaves=tuple(leaves), sink=sink)
        return self._exact.forward(self._problem, inputs)


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
        if problem.options.k_scale or problem.options.v_scale or problem.kv_dtype != problem.dtype:
            name = str(problem.kv_dtype).removeprefix("torch.")
            got = name if problem.kv_dtype != problem.dtype else "factors of what is stored"
            reasons.append(
                Reason("storage of a cache", got, "q's type, unscaled", "Such caches run on 'blockwise'.")
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
        if problem.options.pages:
            schedule = replace(
                schedule, notes=(*schedule.notes, "the backward of a cache is done by blockwise")
            )
        return schedule

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(out, lse). A value that is not finite must reach exactly the rows that see it. The kernels multiply
        hidden values by weights of 0, so where a result is not finite the call is done again by the reference,
        which keeps count of who sees what; results that are all finite hold nothing hidden."""
        from tilewise.backends.cpu import cached
        from tilewise.backends.cpu.slots import describe

        slots = describe(problem.spec, inputs.leaves)
        if slots is None:
            return self._exact.forward(problem, inputs)
        with torch.no_grad():
            return cached.forward(problem, inputs, slots, self._exact)

    def prepare(self, problem: Problem, inputs: Inputs) -> Prepared | None:
        """A forward for dense calls and calls over caches of this kind; none where something else is read from the
        tensors' contents."""
        from tilewise.backends.cpu.print_interval import needs_table
        from tilewise.backends.cpu.slots import describe

        slots, keep = describe(problem.spec, inputs.leaves), problem.spec.keep
        if (
            slots is None
            or problem.spec.dropout
            or (problem.options.layout != "dense" and not problem.options.pages)
            or (keep is not None and needs_table(keep, slots))
            or problem.shape.batch == 0
            or any(t.stride(-1) != 1 for t in (inputs.q, inputs.k, inputs.v))
        ):
            return None
        if problem.options.pages:
            from tilewise.backends.cpu.cached import CachedForward

            return CachedForward(problem, inputs, slots, self._exact)
        return _Prepared(problem, inputs, slots, self._exact)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs: Needs,
    ) -> Gradients:
        """All gradients; by the reference where one is not finite, a leaf's is too large to be summed per task, or k
        and v are pools: there what several sequences share is summed in order."""
        from tilewise.backends.cpu import launch_backward
        from tilewise.backends.cpu.slots import describe

        slots = describe(problem.spec, inputs.leaves)
        if slots is None or problem.options.pages:
            return self._exact.backward(problem, inputs, saved, grads, needs)
        # A partial result is float32 beside 2-byte inputs: all of it is done in float32, on copies.
        wide = problem.dtype != torch.float32 and any(t.dtype != problem.dtype for t in (saved[0], grads[0]))
        with torch.no_grad():
            if wide:
                found = launch_backward.backward_wide(problem, inputs, saved, grads, needs, slots)
            else:
                found = launch_backward.backward(problem, inputs, saved, grads, needs, slots)
        return self._exact.backward(problem, inputs, saved, grads, needs) if found is None else found
