"""Which of the calls that the Hopper kernels take `backend="auto"` brings to them: those whose kind was measured faster
than the Triton backend's on an H200, and whose results were compared with float64 there in the kernels' last form
(docs/hopper.md). A call that names the backend has it whatever stands here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.hopper.tiles import reads_pairs
from tilewise.backends.protocol import Reason

if TYPE_CHECKING:
    from tilewise.problem import Problem

LEAST_HEAD_DIM = 33
"""64 columns are computed for fewer."""
LEAST_ROWS = 1024
"""Rows of a sequence: shorter ones were not measured, and the Triton backend has a kernel for few rows."""
LEAST_PACKED = 768
"""The same of packed sequences, on the average: measured at 964."""
LEAST_WORK = 2.0e10
"""Operations of the products, hidden pairs among them: about 50 microseconds of the card. Compiling takes seconds."""


def reasons_for_auto(problem: Problem) -> list[Reason]:
    """Why `auto` leaves a call to the backends after this one; none if it does not."""
    s, reasons = problem.shape, []
    packed = problem.options.layout == "varlen"
    batch, least_rows = (max(s.batch, 1), LEAST_PACKED) if packed else (1, LEAST_ROWS)
    rows, keys = s.seqlen_q // batch, s.seqlen_k // batch
    work = 2.0 * s.batch * s.num_heads_q * rows * keys * (s.head_dim + s.head_dim_v)

    def because(rule: str, got: str, allowed: str) -> None:
        reasons.append(Reason(f"what 'auto' brings here: {rule}", got, allowed, "Name the backend for it."))

    if max(s.head_dim, s.head_dim_v) < LEAST_HEAD_DIM:
        because("head dimensions", f"{max(s.head_dim, s.head_dim_v)}", f"at least {LEAST_HEAD_DIM}")
    if rows < least_rows:
        because("rows of a sequence", f"{rows}", f"at least {least_rows}")
    if work < LEAST_WORK:
        because("operations", f"{work:.1e}", f"at least {LEAST_WORK:.0e}")
    if reads_pairs(problem.spec):
        because(
            "what a mask or term reads",
            "a tensor's element for each pair or column",
            "one for a row, or none",
        )
    return reasons
