"""What a backend is: four questions, answered from the Problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.problem import Inputs, Problem


class Reason(NamedTuple):
    """Why a backend does not take a problem: the rule, the value got, the value allowed, what to do."""

    rule: str
    got: str
    allowed: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.rule}: got {self.got}, allowed {self.allowed}"
        return f"{text}. {self.remedy}" if self.remedy else text


@dataclass(frozen=True)
class Schedule:
    """How a backend would run a problem: tile sizes, loop order, splits of the keys, workspace in bytes.

    builds_matrix: whether the N_q x N_k scores exist in memory."""

    block_q: int
    block_k: int
    loop: str
    splits: int = 1
    workspace_bytes: int = 0
    builds_matrix: bool = False
    notes: tuple[str, ...] = ()


@dataclass
class Gradients:
    """Gradients of a call; None where none was asked for. `leaves` follows the spec's leaves."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    leaves: tuple[Tensor | None, ...] = ()
    sink: Tensor | None = None


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for."""

    q: bool = True
    k: bool = True
    v: bool = True
    leaves: tuple[bool, ...] = field(default=())
    sink: bool = False


class Prepared(Protocol):
    """A forward for calls that differ from one that was made in their tensors' contents and addresses only."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], want_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse); lse may be None if it is not wanted. extra: the spec's leaves, then the sink, if any."""


class Backend(Protocol):
    """One way to run problems.

    A backend may also have `prepare(problem, inputs) -> Prepared | None`, asked after a first call of a kind: then
    calls of that kind skip validation, text and dispatch (`tilewise.quick`).
    """

    name: str

    def supports(self, problem: Problem) -> list[Reason]:
        """Reasons why not; empty means yes. Looks at no tensor."""

    def plan(self, problem: Problem) -> Schedule:
        """The schedule it would follow. Allocates nothing."""

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(out, lse), of the problem's out_shape / lse_shape and types."""

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        needs: Needs,
    ) -> Gradients:
        """Gradients from (out, lse), do and dlse; right for any subset of the keys, given the global out and lse."""
