"""The backend `triton`: fp32, bf16 and fp16 on GPUs, every feature of the spec."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import torch

from tilewise.backends.protocol import Gradients, Needs, Reason, Schedule
from tilewise.backends.reference.blockwise import Blockwise
from tilewise.problem import Inputs, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.backends.triton.prepared import Prepared

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST_TRITON = (3, 6)
OLDEST_ARCH = 75
LARGEST_HEAD_DIM = 512
LARGEST_GRID = 2**31 - 1


@functools.lru_cache(maxsize=1)
def _triton() -> tuple[int, ...] | None:
    """Version of Triton, or None where there is none. It is not imported where it has compiled before."""
    from tilewise.backends.triton import shelf

    version = shelf.version() if "triton" not in sys.modules and shelf.proven() else None
    if version is None:
        try:
            if importlib.util.find_spec("triton") is None:
                return None
            import triton
        except Exception:  # a finder or an import that raises means missing
            return None
        version = triton.__version__
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _interpreting() -> bool:
    """Whether kernels would run in the interpreter. Asked of every call on the processor, so Triton is not imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Triton:
    """Kernels printed from the spec, compiled at first use for each kind of call."""

    name = "triton"

    def __init__(self) -> None:
        self._exact = Blockwise()

    def supports(self, problem: Problem) -> list[Reason]:
        if problem.device_type != "cuda" and not (problem.device_type == "cpu" and _interpreting()):
            rule = "the backend 'triton' runs on GPUs"
            return [Reason(rule, f"{problem.device_type} tensors", "cuda tensors"), *_shape_reasons(problem)]
        found = _triton()
        if found is None:
            return [Reason("kernels need Triton", "no triton", "triton", "pip install triton.")]
        if found < OLDEST_TRITON:
            version, oldest = (".".join(map(str, v)) for v in (found, OLDEST_TRITON))
            return [
                Reason("Triton's version", version, f"{oldest} or newer", "pip install --upgrade triton.")
            ]
        return [*_device_reasons(problem), *_shape_reasons(problem)]

    def plan(self, problem: Problem) -> Schedule:
        from tilewise.backends.triton import backward_tiles, decode_plan, launch_forward
        from tilewise.backends.triton.machine import INTERPRETED, machine_of
        from tilewise.backends.triton.tiles import heads_abreast

        here = torch.cuda.is_available() and not _interpreting()
        machine = machine_of(torch.cuda.current_device()) if here else INTERPRETED
        if problem.options.pages or decode_plan.is_decoding(problem):
            return decode_plan.schedule(problem, machine)
        tiles, (splits, _) = launch_forward.schedule(problem, machine)
        s = problem.shape
        lines = s.num_heads_q * s.seqlen_q * (1 if problem.options.layout == "varlen" else s.batch)
        workspace = 4 * splits * lines * (s.head_dim_v + 1) if splits > 1 else 0
        if problem.needs_grad:
            workspace = max(workspace, backward_tiles.workspace_bytes(problem))
        notes = ("rows of a tile are those of a group of heads",) if tiles.packed else ()
        abreast = heads_abreast(problem, tiles, machine)
        return Schedule(
            tiles.block_m, tiles.block_n, "row tiles in parallel, keys inner", splits, workspace, notes=notes,
            heads_abreast=-(-abreast // (1 if tiles.packed else max(problem.group, 1))),
        )  # fmt: skip

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(out, lse). A leaf of a type that kernels do not read sends the call to the reference, and so does a batch
        of nothing, whose tables have no entry to read."""
        from tilewise.backends.triton import launch_decode, launch_forward

        if problem.shape.batch == 0:
            return self._exact.forward(problem, inputs)
        launch = launch_decode if launch_decode.takes(problem, inputs) else launch_forward
        found = launch.forward(problem, inputs)
        return self._exact.forward(problem, inputs) if found is None else found

    def prepare(self, problem: Problem, inputs: Inputs) -> Prepared | None:
        """A function for calls like this one (`tilewise.quick`); None where the long way is as good."""
        from tilewise.backends.triton import launch_decode, prepared, prepared_decode

        if problem.shape.batch == 0:
            return None
        if launch_decode.takes(problem, inputs):
            return prepared_decode.prepare(problem, inputs)
        return prepared.prepare(problem, inputs)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs: Needs,
    ) -> Gradients:
        """All gradients. A batch of nothing, pools of pages, a leaf of a type that kernels do not read, and under
        `deterministic` one whose sums would have no order, send the call to the reference."""
        from tilewise.backends.triton import launch_backward, launch_forward

        slots = launch_forward.slots_of(problem, inputs)
        if (
            slots is None
            or problem.shape.batch == 0
            or problem.options.pages
            or (problem.options.deterministic and launch_backward.needs_atomics(problem, inputs, needs))
        ):
            return self._exact.backward(problem, inputs, saved, grads, needs)
        with torch.no_grad():
            return launch_backward.backward(problem, inputs, saved, grads, needs, slots)


def _device_reasons(problem: Problem) -> list[Reason]:
    if problem.device_type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return []
    arch = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    if arch < OLDEST_ARCH:
        return [Reason("compute capability", f"{arch / 10}", f"{OLDEST_ARCH / 10} or newer")]
    if problem.dtype == torch.bfloat16 and arch < 80:
        return [Reason("bfloat16 needs compute capability 8.0", f"{arch / 10}", "float16 or float32")]
    return []


def _shape_reasons(problem: Problem) -> list[Reason]:
    reasons, s = [], problem.shape
    if problem.options.pages:
        from tilewise.backends.triton import decode_plan

        reasons += decode_plan.reasons_against(problem)
    if problem.dtype not in DTYPES:
        name = str(problem.dtype).removeprefix("torch.")
        reasons.append(
            Reason("element type", name, "float32, bfloat16, float16", "float64 runs on 'blockwise'.")
        )
    if max(s.head_dim, s.head_dim_v) > LARGEST_HEAD_DIM:
        reasons.append(
            Reason("head dimension", f"{max(s.head_dim, s.head_dim_v)}", f"at most {LARGEST_HEAD_DIM}")
        )
    programs = s.batch * s.num_heads_q * (s.seqlen_q // 16 + 1)
    if programs > LARGEST_GRID:
        reasons.append(Reason("tiles of rows of a call", f"{programs}", f"at most {LARGEST_GRID}"))
    return reasons
