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

    builds_matrix: whether the N_q x N_k scores exist in memory. heads_abreast: heads whose tiles run side by side, at
    least, whose keys a shared cache must hold together."""

    block_q: int
    block_k: int
    loop: str
    splits: int = 1
    workspace_bytes: int = 0
    builds_matrix: bool = False
    notes: tuple[str, ...] = ()
    heads_abreast: int = 1


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


class Append(NamedTuple):
    """New keys and values for pools, and queries to be turned with them: what `append` of a backend family does.

    Token t of sequence b goes to place lengths[b] + t of the sequence, that is row place % S of page
    block_table[b, place // S], or of page b without a table; its key is turned by the angles of its position first.

    k_new, v_new: (B, H_kv, N, D) and (B, H_kv, N, D_v), or packed (T, H_kv, D), (T, H_kv, D_v) with cu_seqlens_new
        (B + 1,) int32.
    k, v: pools (P, H_kv, S, D), (P, H_kv, S, D_v), the last stride 1, of q's dtype or float8_e4m3fn; written in place.
    lengths: (B,) int32 keys present. block_table: (B, M) int32.
    q: (B, H, N_q, D), or packed (T_q, H, D) with cu_seqlens_q (B + 1,) int32; None where no query is turned.
    cos, sin: (positions, R / 2) of any floating type, R <= D entries of a head are turned, computed in float32
        (float64 for float64) and rounded once; None turns nothing. interleaved: pairs are neighbours, not halves.
    positions_q, positions_k: int32 of q's and k_new's token dimensions, (B, N) or (T,), rows of cos and sin; None:
        first[b] + t for keys, and for queries first[b] + new[b] - rows[b] + i (the last query is the last new key).
    first: (B,) int32 position of the first new key, None: lengths[b].
    k_scale, v_scale: (H_kv,) or (P, H_kv) float32; what is stored is the value divided by it, kept within the range
        of float8.

    The turned q lies in memory as `empty_q` does. A place outside the capacity, a page outside the pool and a position
    outside the tables are errors before this on the processor. On a GPU a key without a place is not written, and
    positions are clamped to the tables.
    """

    k_new: Tensor
    v_new: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    cu_seqlens_new: Tensor | None = None
    q: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None
    first: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def held(self) -> list[Tensor]:
        """The cache's own tensors: whoever holds them may have given them other memory, sizes and strides."""
        own = (self.k, self.v, self.lengths, self.block_table, self.first)
        return [t for t in own if t is not None]

    def empty_q(self) -> Tensor:
        """Memory for the turned q: q's shape and type, contiguous with tokens before heads."""
        assert self.q is not None
        if self.q.ndim == 3:
            return self.q.new_empty(self.q.shape)
        b, h, n, d = self.q.shape
        return self.q.new_empty(b, n, h, d).transpose(1, 2)


class Prepared(Protocol):
    """A forward for calls that differ from one that was made in their tensors' contents and addresses only.

    It may also have `backward(tensors, saved, grads, needs)`: the gradients of such a call, None for those not needed,
    or None instead of all of them, where the backward goes the long way. tensors: q, k, v and extra; saved: out, lse;
    grads: do, and dlse or None. And `without_gradients`, called in its place where no tensor requires a gradient.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], want_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse); lse may be None if it is not wanted. extra: the spec's leaves, then the call's optional tensors
        in the order of `Problem.tensor_names`: the sink, if any, and on caches lengths, table and the like."""


class Backend(Protocol):
    """One way to run problems.

    A backend may also have `prepare(problem, inputs) -> Prepared | None`, asked after a first call of a kind: then
    calls of that kind skip validation, text and dispatch (`tilewise.quick`). A cache's calls are of one kind whatever
    its lengths and its table hold; the caller has checked both where they can be seen.

    A family of backends has one function `append(inputs: Append) -> Tensor | None` that gives the turned q: the
    reference's in `backends.reference.append`, Triton's in `backends.triton.launch_append`.
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
