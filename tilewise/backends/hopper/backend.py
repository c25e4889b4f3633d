"""The backend `hopper`: bf16 and fp16 on compute capability 9.0, by Gluon."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import torch

from tilewise.backends.protocol import Gradients, Needs, Reason, Schedule
from tilewise.problem import Inputs, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.backends.hopper.prepared import Prepared


DTYPES = (torch.bfloat16, torch.float16)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 6)
LONGEST = 2**29
"""Keys of a sequence: block numbers travel with seven bits beside them."""


@functools.lru_cache(maxsize=1)
def _triton() -> tuple[int, ...] | None:
    """Version of Triton, or None where there is none, or one without Gluon for Hopper."""
    try:
        if importlib.util.find_spec("triton") is None:
            return None
        import triton
        from triton.experimental.gluon.language.nvidia import hopper  # noqa: F401
    except Exception:  # a finder or an import that raises means missing
        return None
    return tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])


class Hopper:
    """Kernels printed from the spec in Gluon; what they cannot do is the Triton backend's."""

    name = "hopper"

    def __init__(self) -> None:
        from tilewise.backends.triton.backend import Triton

        self._triton = Triton()

    def supports(self, problem: Problem) -> list[Reason]:
        rule = "the backend 'hopper' runs on GPUs of compute capability 9.0"
        if problem.device_type != "cuda":
            return [Reason(rule, f"{problem.device_type} tensors", "cuda tensors"), *_shape_reasons(problem)]
        if torch.version.hip or not torch.cuda.is_available():
            return [Reason(rule, "no CUDA device", "an H100 or H200"), *_shape_reasons(problem)]
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) != (9, 0):
            return [Reason(rule, f"{major}.{minor}", "9.0", "The backend 'triton' runs on it.")]
        reasons = [*_triton_reasons(), *_shape_reasons(problem)]
        if not reasons and problem.options.backend == "auto":
            from tilewise.backends.hopper.worth import reasons_for_auto

            return reasons_for_auto(problem)
        return reasons

    def plan(self, problem: Problem) -> Schedule:
        from tilewise.backends.hopper import launch_forward, roomier, wants
        from tilewise.backends.hopper.tiles import form_of
        from tilewise.backends.triton.machine import INTERPRETED, machine_of

        machine = machine_of(torch.cuda.current_device()) if torch.cuda.is_available() else INTERPRETED
        settled = roomier.settled(problem)
        plan = launch_forward.schedule(problem, machine, 0, settled)
        s = problem.shape
        lines = s.num_heads_q * s.seqlen_q * (1 if problem.options.layout == "varlen" else s.batch)
        workspace = 4 * plan.splits * lines * (s.head_dim_v + 1) if plan.splits > 1 else 0
        notes = (
            f"{plan.tiles.warpgroups} warpgroups of 64 rows and a producer; tiles are drawn, the last rows first",
        )
        form = form_of(problem, plan.pack > 1, plan.splits > 1)
        if settled is not None or wants.known(problem.spec, plan.pair, form):
            notes += ("with the tiles of its head dimensions its kernel would spill; it has roomier ones",)
        if plan.pack > 1:
            notes += (f"rows of a tile are those of {plan.pack} heads",)
        if problem.needs_grad:
            from tilewise.backends.hopper.backward_tiles import describe_backward, workspace_bytes

            workspace = max(workspace, workspace_bytes(problem, machine.sms))
            notes += (describe_backward(problem),)
        return Schedule(
            plan.tiles.rows, plan.tiles.block_n, "row tiles in parallel, keys inner, last keys first", plan.splits,
            workspace, notes=notes,
        )  # fmt: skip

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(out, lse). Tensors that the copy engine does not read send the call to the Triton backend."""
        from tilewise.backends.hopper import launch_forward

        found = launch_forward.forward(problem, inputs)
        return self._triton.forward(problem, inputs) if found is None else found

    def prepare(self, problem: Problem, inputs: Inputs) -> Prepared | None:
        """A function for calls like this one (`tilewise.quick`); None where the long way is as good."""
        from tilewise.backends.hopper import prepared

        return prepared.prepare(problem, inputs)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs: Needs,
    ) -> Gradients:
        """All gradients. Tensors that the copy engine does not read, and leaves whose gradients must repeat bit by bit
        but are sums without an order, send the call to the Triton backend."""
        from tilewise.backends.hopper import launch_backward

        with torch.no_grad():
            found = launch_backward.backward(problem, inputs, saved, grads, needs)
        return self._triton.backward(problem, inputs, saved, grads, needs) if found is None else found


def _triton_reasons() -> list[Reason]:
    found = _triton()
    if found is None:
        return [Reason("kernels need Triton with Gluon", "none", "triton 3.6", "pip install triton.")]
    if not OLDEST_TRITON <= found <= NEWEST_TRITON:
        version = ".".join(map(str, found))
        return [
            Reason("Triton's version, on which kernels were measured", version, "3.6", "'triton' runs on it.")
        ]
    return []


def _shape_reasons(problem: Problem) -> list[Reason]:
    from tilewise.backends.hopper.tiles import PAIRS, pair_of

    reasons, s = [], problem.shape
    if problem.dtype not in DTYPES:
        reasons.append(Reason("element type", str(problem.dtype).removeprefix("torch."), "bfloat16, float16"))
    sizes = (s.head_dim, s.head_dim_v)
    if pair_of(*sizes) is None or any(x % 8 for x in sizes):
        pairs = ", ".join(f"({d}, {dv})" for d, dv in PAIRS)
        reasons.append(
            Reason("head dimensions (q and k, v)", f"{sizes}", f"multiples of 8 within one of {pairs}")
        )
    if problem.options.pages:
        reasons.append(Reason("pools of pages", "pages", "none", "'triton' reads them."))
    if problem.options.layout == "dense" and (problem.options.seqused_q or problem.options.seqused_k):
        reasons.append(
            Reason("used lengths of dense tensors", "a length per batch entry", "packed sequences")
        )
    if problem.spec.dropout:
        reasons.append(Reason("dropout", "a call with dropout", "none", "'triton' has it."))
    if min(s.batch, s.num_heads_q, s.num_heads_kv, s.seqlen_q, s.seqlen_k) == 0:
        reasons.append(Reason("sizes", "an empty tensor", "at least one row, key and head"))
    if s.seqlen_k > LONGEST:
        reasons.append(Reason("keys", f"{s.seqlen_k}", f"at most {LONGEST}"))
    if s.batch * s.num_heads_q * (s.seqlen_q // 16 + 1) > 2**31 - 1:
        reasons.append(Reason("tiles of rows of a call", "more than 2^31", "fewer"))
    return reasons
