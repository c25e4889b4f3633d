"""Where the kernels of the backward pass put the gradients of leaves, and what follows them.

Three ways, by what tasks and tiles share: numbers that are met once are stored; a buffer that no two tasks share an
element of is added to; else each task adds to a buffer of its own, and these are summed in order. So bits do not
depend on threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise import memory
from tilewise.backends.cpu.fold_slopes import ADDED, NONE, STORED
from tilewise.backends.cpu.slots import ELEMENTS
from tilewise.backends.cpu.stage import WIDENED
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.problem import Inputs, Problem

LARGEST_PARTS = 1 << 24
"""Float32 numbers in the tasks' parts of one leaf's gradient, 64 MiB."""


def owned(problem: Problem, slot: int, in_turn: bool) -> bool:
    """Whether no two tasks add to one element of a leaf's gradient at one time: it is read by column, and by batch
    entry and head where they do not go in turn, each in one dimension for all sites: t[i, j] + t[j, i] shares."""
    s = problem.shape
    needed = {"j"} | ({"b"} if s.batch > 1 and not in_turn else set())
    sites = [
        {(n, str(a.value)) for n, a in enumerate(site.args) if a.op == "var"}
        for site in ex.loads(problem.spec.score)  # type: ignore[arg-type]
        if int(site.value) == slot  # type: ignore[arg-type]
    ]
    names = {name for _, name in set.intersection(*sites)}
    return needed <= names and (s.num_heads_q == 1 or in_turn or bool(names & {"h", "g"}))


def met_once(problem: Problem, slot: int, leaf: Tensor, in_turn: bool = False) -> bool:
    """Whether each number of a leaf is read by one pair, and every pair is met: a bias of one number a pair, batch
    entry and head, without a mask by which tiles would be left out. Only what the kernels turn by squares is stored: a
    leaf read by row and column whose type is widened (`stage.along_keys`), not one that a single row or key makes a
    number a pair. in_turn: whether that holds of each batch entry and head, which all read the same numbers."""
    s = problem.shape
    sites = [site for site in ex.loads(problem.spec.score) if int(site.value) == slot]  # type: ignore[arg-type]
    if len(sites) != 1 or problem.spec.keep is not None or problem.options.layout != "dense":
        return False
    names = [str(index.value) if index.op == "var" else "" for index in sites[0].args]
    sizes = {"b": s.batch, "h": s.num_heads_q, "i": s.seqlen_q, "j": s.seqlen_k}
    if in_turn:
        # A task meets all heads of a group.
        sizes = {name: 1 if name in "bh" else n for name, n in sizes.items()}
        if problem.group > 1:
            return False
    whole = all(sizes.get(name) == n for name, n in zip(names, leaf.shape, strict=True))
    whole = whole and ELEMENTS[leaf.dtype] in WIDENED
    return (
        whole
        and set(names) >= {"i", "j"} | {name for name, n in sizes.items() if n > 1}
        and len(set(names)) == len(names)
    )


class LeafSums:
    """The buffers, one to a leaf or to a task and leaf, and the table of them that the kernels read.

    flag: the address of what is set where a contribution is not finite. ways: how each leaf's numbers get there.
    fresh: the largest of what is stored, memory that nobody has met. in_turn: heads share a leaf too large for that, a
    bias of all heads: they go one after another, each with all threads, and the splits of its keys share no element.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, wanted: tuple[bool, ...], tasks: int, flag: int
    ) -> None:
        self.totals: list[Tensor | None] = []
        self.entries: list[int] = [flag]
        self.ways = [ADDED if want else NONE for want in wanted]
        self.first_ways: dict[int, int] = {}
        self.fits, self.in_turn = True, False
        self.fresh: Tensor | None = None
        loaded = (
            {int(n.value) for n in ex.loads(problem.spec.score)} if problem.spec.score is not None else set()
        )  # type: ignore[arg-type]
        for slot, (leaf, want) in enumerate(zip(inputs.leaves, wanted, strict=True)):
            if not want or slot not in loaded:
                self.totals.append(
                    torch.zeros(leaf.shape, dtype=torch.float32, device="cpu") if want else None
                )
                self.entries += [0] * (2 + leaf.ndim)
                continue
            if tasks and met_once(problem, slot, leaf):
                self.ways[slot] = STORED
                self._store(leaf)
                continue
            shared = self._spread(problem, slot, leaf)
            if not shared and tasks * leaf.numel() > LARGEST_PARTS:
                shared = self.in_turn = self._spread(problem, slot, leaf, in_turn=True)
                self.fits = shared
                if not shared:
                    return
                if met_once(problem, slot, leaf, in_turn=True):
                    self.first_ways[slot] = STORED
                    self._store(leaf)
                    continue
            total = memory.zeros((1 if shared else max(tasks, 1), *leaf.shape))
            self._add(total, 0 if shared else 4 * leaf.numel())

    def _store(self, leaf: Tensor) -> None:
        """The buffer of a leaf whose numbers are stored before any is added to."""
        total = memory.empty((1, *leaf.shape))
        self.fresh = total if self.fresh is None else max(self.fresh, total, key=torch.numel)
        self._add(total, 0)

    def ways_of(self, turn: int) -> tuple[int, ...]:
        """What becomes of each leaf's contributions in a turn."""
        first = self.first_ways if turn == 0 else {}
        return tuple(first.get(slot, way) for slot, way in enumerate(self.ways))

    def _add(self, total: Tensor, part_bytes: int) -> None:
        """A leaf's buffer, whose first dimension is tasks, and its entry."""
        self.totals.append(total)
        self.entries += [total.data_ptr(), part_bytes, *(4 * n for n in total.stride()[1:])]

    @staticmethod
    def _spread(problem: Problem, slot: int, leaf: Tensor, in_turn: bool = False) -> bool:
        """One buffer for all tasks, if each index by which tasks differ does run along a whole dimension."""
        if not owned(problem, slot, in_turn):
            return False
        s = problem.shape
        sizes = (
            {"j": s.seqlen_k}
            if in_turn
            else {"b": s.batch, "h": s.num_heads_q, "g": s.num_heads_kv, "j": s.seqlen_k}
        )
        for site in ex.loads(problem.spec.score):  # type: ignore[arg-type]
            if int(site.value) == slot:  # type: ignore[arg-type]
                for n, index in enumerate(site.args):
                    if index.op == "var" and index.value in sizes and leaf.shape[n] < sizes[str(index.value)]:
                        return False
        return in_turn or problem.options.layout == "dense" or s.batch <= 1

    def gradients(self, inputs: Inputs) -> tuple[Tensor | None, ...]:
        """The sums over the tasks, in their order, in the leaves' types."""
        found = []
        for total, leaf in zip(self.totals, inputs.leaves, strict=True):
            if total is None:
                found.append(None)
                continue
            if total.ndim > leaf.ndim:
                # One addition after another: a reduction of torch's may depend on the number of threads.
                summed = total[0]
                for part in total[1:]:
                    summed += part
                total = summed
            found.append(total.to(leaf.dtype))
        return tuple(found)
