"""Gradients of leaves: who sums what, and the last step from sums to a leaf, in torch.

Every load site of a leaf is summed by the part of a pair that its indices depend on:

    row        b h g i q only      the row kernel, (batch * heads, rows) float32
    column     b h g j k only      the key kernel, (batch * heads, columns)
    pair       b h i j themselves, one leaf element per pair: the row kernel writes it
    pairs      i and j themselves, shared by heads or batch entries: `site_kernel`, which loops over those
    diagonal   k - q               `site_kernel`, (batch * heads, diagonals)
    scatter    anything else       `site_kernel`, float32 atomic additions

All but the last are sums in a fixed order. From sums to the leaf a sum over whole dimensions or an index_put_ (which
sorts) remains, of O(N) elements.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends.triton.source import derivative_roots
from tilewise.spec import expression as ex
from tilewise.spec.print_torch import Env, accumulate, compile_torch

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.problem import Inputs, Problem
    from tilewise.spec.expression import Node

_DIFFERENCES = (
    ex.apply("sub", ex.variable("k"), ex.variable("q")),
    ex.apply("sub", ex.variable("q"), ex.variable("k")),
)


class Sites(NamedTuple):
    """The sites (numbers as in `derive`) that want a gradient, by kind; `pair` is one of them or -1."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    pair: int
    pairs: tuple[int, ...]
    diagonals: tuple[int, ...]
    scatters: tuple[int, ...]


def sort_sites(problem: Problem, leaves: tuple[Tensor, ...], wanted: tuple[bool, ...]) -> Sites:
    """Sort the load sites of wanted leaves by kind."""
    kinds: dict[str, list[int]] = {
        "row": [],
        "column": [],
        "pair": [],
        "pairs": [],
        "diagonal": [],
        "scatter": [],
    }
    for n, site in enumerate(derivative_roots(problem.spec)[1]):
        slot = int(site.value)  # type: ignore[arg-type]
        if wanted[slot]:
            kind = kind_of(problem, site, tuple(leaves[slot].shape))
            # Two sites of one leaf cannot both write it.
            if kind == "pair" and (kinds["pair"] or _sites_of(problem, slot) > 1):
                kind = "pairs"
            kinds[kind].append(n)
    pair = kinds["pair"][0] if kinds["pair"] else -1
    return Sites(
        tuple(kinds["row"]), tuple(kinds["column"]), pair, tuple(kinds["pairs"]), tuple(kinds["diagonal"]),
        tuple(kinds["scatter"]),
    )  # fmt: skip


def _sites_of(problem: Problem, slot: int) -> int:
    return sum(int(site.value) == slot for site in derivative_roots(problem.spec)[1])  # type: ignore[arg-type]


def kind_of(problem: Problem, site: Node, shape: tuple[int, ...]) -> str:
    """How the contributions of a load are summed."""
    moving = [a for a, size in zip(site.args, shape, strict=True) if size > 1]
    found = frozenset[str]().union(*(ex.variables(a) for a in moving))
    if "s" in found:
        return "scatter"
    if not found & {"j", "k"}:
        return "row"
    if not found & {"i", "q"}:
        return "column"
    varlen = problem.options.layout == "varlen"
    if not varlen and all(_along_diagonal(a) for a in moving):
        return "diagonal"
    names = [str(a.value) for a in site.args if a.op == "var"]
    plain = (
        len(names) == len(site.args) and len(set(names)) == len(names) and set(names) <= {"b", "h", "i", "j"}
    )
    if varlen or not plain:
        return "scatter"
    s = problem.shape
    reach = {"b": s.batch, "h": s.num_heads_q, "i": s.seqlen_q, "j": s.seqlen_k}
    sizes = dict(zip(names, shape, strict=True))
    if any(1 < sizes[n] < reach[n] for n in names):  # the last element is read by several
        return "scatter"
    own = all(sizes.get(n, 1) > 1 or reach[n] <= 1 for n in ("b", "h"))
    return "pair" if own else "pairs"


def _along_diagonal(index: Node) -> bool:
    """Whether an index reads rows and columns through k - q alone."""
    stack = [index]
    while stack:
        node = stack.pop()
        if node in _DIFFERENCES:
            continue
        if node.op == "var" and node.value in ("i", "j", "q", "k"):
            return False
        stack.extend(node.args)
    return True


# ---- from sums to leaves -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _indices(site: Node):
    return compile_torch(site.args or (ex.const(0),), (site,))


class Places:
    """Where the entries of sums stand: the variables of rows, columns or diagonals of a call, as (B, H, n, 1)."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.problem, self.inputs, self.device = problem, inputs, inputs.q.device
        self.varlen = problem.options.layout == "varlen"

    def _range(self, n: int, shape: tuple[int, ...], first: int = 0) -> Tensor:
        return torch.arange(first, first + n, dtype=torch.int32, device=self.device).view(shape)

    def _heads(self) -> dict[str, Tensor]:
        h = self._range(self.problem.shape.num_heads_q, (1, -1, 1, 1))
        return {"h": h, "g": h // max(self.problem.group, 1)}

    def _offset(self, offset: int | Tensor | None, batch: Tensor) -> int | Tensor:
        if isinstance(offset, torch.Tensor):
            values = offset.reshape(-1).to(torch.int32)
            return values if values.numel() == 1 else values[batch.long()]
        return 0 if offset is None else offset

    def _default(self, batch: Tensor) -> int | Tensor:
        """k length - q length."""
        s, x = self.problem.shape, self.inputs
        if not self.varlen:
            return s.seqlen_k - s.seqlen_q
        lengths = []
        for cu, used, total in (
            (x.cu_seqlens_k, x.seqused_k, s.seqlen_k), (x.cu_seqlens_q, x.seqused_q, s.seqlen_q)
        ):  # fmt: skip
            edges = cu.clamp(0, total)  # type: ignore[union-attr]
            n = (edges[1:] - edges[:-1]).clamp(min=0)
            lengths.append(n if used is None else torch.minimum(n, used.clamp(min=0)))
        return (lengths[0] - lengths[1]).to(torch.int32)[batch.long()]

    def tokens(self, rows: bool) -> dict[str, Tensor]:
        """Variables along the rows, or the columns, of the call."""
        s, x = self.problem.shape, self.inputs
        total = s.seqlen_q if rows else s.seqlen_k
        if self.varlen:
            cu = (x.cu_seqlens_q if rows else x.cu_seqlens_k).clamp(0, total)  # type: ignore[union-attr]
            token = self._range(total, (1, 1, -1, 1))
            b = torch.searchsorted(cu[1:].contiguous(), token.reshape(-1), right=True, out_int32=True)
            b = b.clamp(max=max(s.batch - 1, 0)).view(token.shape)
            at = token - cu.to(torch.int32)[b.long()]
        else:
            b, at = self._range(s.batch, (-1, 1, 1, 1)), self._range(total, (1, 1, -1, 1))
        if rows:
            q_offset = self._default(b) if x.q_offset is None else self._offset(x.q_offset, b)
            return {"b": b, "i": at, "q": at + q_offset, **self._heads()}
        return {"b": b, "j": at, "k": at + self._offset(x.k_offset, b), **self._heads()}

    def diagonals(self, first: int, n: int) -> dict[str, Tensor]:
        """Variables along the diagonals: q = 0 and k = the difference, from column - row = `first` on."""
        x, b = self.inputs, self._range(self.problem.shape.batch, (-1, 1, 1, 1))
        q_offset = self._default(b) if x.q_offset is None else self._offset(x.q_offset, b)
        k = self._range(n, (1, 1, -1, 1), first) + (self._offset(x.k_offset, b) - q_offset)
        return {"b": b, "k": k, "q": torch.zeros_like(k), **self._heads()}

    def add(self, site: Node, sums: Tensor, gradient: Tensor, variables: dict[str, Tensor]) -> None:
        """Add sums (B, H, n, 1) to the gradient of the leaf that the site loads."""
        s, far = self.problem.shape, 1 << 40
        # Where a token's batch entry and place are numbers of its own, only whole dimensions may be summed.
        n = sums.shape[2]
        ranges = {
            "b": (0, far if self.varlen else s.batch), "h": (0, s.num_heads_q), "i": (0, far if self.varlen else n),
            "j": (0, far if self.varlen else n),
        }  # fmt: skip
        if "i" in variables and "j" not in variables:
            ranges["j"] = (0, 1)
        if "j" in variables and "i" not in variables:
            ranges["i"] = (0, 1)
            sums, variables = sums.transpose(2, 3), {k: v.transpose(2, 3) for k, v in variables.items()}
        missing = {k: torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=self.device) for k in "ijqk"}
        env = Env(
            {**missing, **variables},
            ranges,
            self.inputs.leaves,
            self.inputs.ints,
            self.inputs.floats,
            torch.float32,
        )
        _indices(site)(env)
        accumulate(env, site, gradient, sums)
