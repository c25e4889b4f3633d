"""Which of the calls that the Hopper kernels take `backend="auto"` brings to them: those whose kind was measured faster
than the Triton backend's on an H200, and whose results were compared with float64 there in the kernels' last form
(docs/hopper.md). A call that names the backend has it whatever stands here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.hopper.algebra import mask_of
from tilewise.backends.hopper.tiles import reads_pairs
from tilewise.backends.protocol import Reason

if TYPE_CHECKING:
    from tilewise.problem import Problem
    from tilewise.spec.attention import AttentionSpec

LEAST_HEAD_DIM = 33
"""64 columns are computed for fewer."""
LEAST_ROWS = 1024
"""Rows of a sequence: shorter ones were not measured, and the Triton backend has a kernel for few rows."""
LEAST_WORK = 2.0e10
"""Operations of the products, hidden pairs among them: about 50 microseconds of the card. Compiling takes seconds."""


def reasons_for_auto(problem: Problem) -> list[Reason]:
    """Why `auto` leaves a call to the backends after this one; none if it does not."""
    s, reasons = problem.shape, []
    batch = max(s.batch, 1) if problem.options.layout == "varlen" else 1
    rows, keys = s.seqlen_q // batch, s.seqlen_k // batch
    work = 2.0 * s.batch * s.num_heads_q * rows * keys * (s.head_dim + s.head_dim_v)

    def because(rule: str, got: str, allowed: str) -> None:
        reasons.append(Reason(f"what 'auto' brings here: {rule}", got, allowed, "Name the backend for it."))

    if max(s.head_dim, s.head_dim_v) < LEAST_HEAD_DIM:
        because("head dimensions", f"{max(s.head_dim, s.head_dim_v)}", f"at least {LEAST_HEAD_DIM}")
    if rows < LEAST_ROWS:
        because("rows of a sequence", f"{rows}", f"at least {LEAST_ROWS}")
    if work < LEAST_WORK:
        because("operations", f"{work:.1e}", f"at least {LEAST_WORK:.0e}")
    if problem.options.layout != "dense":
        because("sequences", "packed", "dense")
    if endless(problem.spec):
        because("masks", "rows whose columns have no upper bound", "columns bounded above, as by causal()")
    if reads_pairs(problem.spec):
        because(
            "what a mask or term reads",
            "a tensor's element for each pair or column",
            "one for a row, or none",
        )
    if problem.needs_grad and (problem.spec.score is not None or problem.spec.leaves):
        because("gradients", "score terms or masks that read tensors", "masks of positions")
    if problem.needs_grad and problem.spec.sink:
        because("gradients", "a sink", "none")
    return reasons


def endless(spec: AttentionSpec) -> bool:
    """Whether a mask leaves rows columns without an upper bound."""
    return spec.keep is not None and not any(n.sign > 0 or n.op == "eq" for n in mask_of(spec.keep).lines)
