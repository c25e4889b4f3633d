"""How the Hopper backward runs a problem: its kernels, their chunks, stages and registers, and its memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tilewise.problem import Problem

WIDEST_HALVES = 128
"""The head dimension up to which a warpgroup holds dk and dv of its 64 keys in registers."""
ROLES = 256
"""The head dimensions beside those, of q and of v, for which kernels were run on the hardware."""


class BackwardPlan(NamedTuple):
    """d, dv: head dimensions of the kernels, filled up with zeros. width: columns of a chunk where tiles are cut.
    swizzle: KV heads whose tiles run abreast."""

    d: int
    dv: int
    width: int
    swizzle: int

    @property
    def narrow(self) -> bool:
        return max(self.d, self.dv) <= WIDEST_HALVES

    @property
    def sums(self) -> tuple[int, int]:
        """Parts of a tile of dq, and the columns of each."""
        return (2, self.d // 2) if self.narrow else (self.d // self.width, self.width)

    def key_constants(self) -> dict[str, Any]:
        """Constants of `halves` or `roles`."""
        if self.narrow:
            return {"ST": 2, "WORKER": 240, "LOADER": 24, "D": self.d, "HELD": self.d == 64}
        return {
            "ST": 2, "WORKER": 216, "ADDER": 64, "LOADER": 24, "NC": self.d // self.width,
            "NV": self.dv // self.width, "W": self.width,
        }  # fmt: skip


@functools.lru_cache(maxsize=4096)
def plan_backward(problem: Problem) -> BackwardPlan:
    """The plan of a problem that the forward has let through."""
    s = problem.shape
    d, dv = (-(-x // 64) * 64 for x in (s.head_dim, s.head_dim_v))
    if max(d, dv) <= WIDEST_HALVES:
        d = dv = max(d, dv)
    return BackwardPlan(d, dv, 64, 1 if problem.spec.keep is None else 4)


def reason(problem: Problem) -> str:
    """Why the Triton backend makes the gradients, "" if it does not."""
    plan, o = plan_backward(problem), problem.options
    if o.deterministic or o.batch_invariant:
        return "sums of dq are added in whatever order they come, and bits must repeat"
    if not plan.narrow and (plan.d, plan.dv) != (ROLES, ROLES):
        return f"head dimensions ({plan.d}, {plan.dv}) were not run on the hardware yet"
    return ""


def describe_backward(problem: Problem) -> str:
    """What the backward does, in a line of the plan."""
    why = reason(problem)
    if why:
        return f"backward: by 'triton': {why}"
    keys = "128 keys" if plan_backward(problem).narrow else "64 keys, a warpgroup for each role"
    return f"backward: tiles of {keys}, which add to dq in float32 in whatever order they come"


def workspace_bytes(problem: Problem) -> int:
    """Memory of a backward beside inputs, outputs and gradients."""
    s, plan = problem.shape, plan_backward(problem)
    varlen = problem.options.layout == "varlen"
    tiles = s.seqlen_q // 64 + s.batch if varlen else -(-s.seqlen_q // 64)
    units = s.num_heads_q * (1 if varlen else s.batch)
    return units * (s.seqlen_q * 3 * 4 + tiles * 64 * 4 * (2 + plan.d))
