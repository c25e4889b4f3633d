"""What both passes launch with: cached launchers, tables of block extremes, and small conversions."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.triton import shelf, stored
from tilewise.backends.triton.compile import Build, Launcher, interpreting, launcher, types_of
from tilewise.backends.triton.layout import BLOCK, Slots
from tilewise.backends.triton.machine import machine_of
from tilewise.backends.triton.source import Entry, module_of, text_of
from tilewise.spec.dropout import keep_threshold

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tilewise.backends.triton.machine import Machine
    from tilewise.problem import Problem

KEPT = frozenset({"forward", "again"})
"""Kernels kept between processes: those whose launches without Triton were compared with its own on an H200."""
_lock = threading.Lock()
_launchers: dict[tuple[object, ...], Future[Any]] = {}


def four_strides(problem: Problem, t: Tensor) -> tuple[int, int, int, int]:
    """(batch, head, token, d) strides in elements of a q-, k-, v- or out-like tensor."""
    if problem.options.layout == "dense":
        return t.stride()  # type: ignore[return-value]
    n, h, d = t.stride()
    return 0, h, n, d


class Wanted(NamedTuple):
    """A kernel of a spec's module, for a device; entries: the kernels of that module."""

    problem: Problem
    slots: Slots
    entry: Entry
    build: Build
    device: int
    entries: tuple[Entry, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return self.problem.spec.text, self.slots, self.entry.name, self.build, self.device

    def make(self) -> Any:
        """Its launcher: of the binary that an earlier process kept, else compiled, and then kept."""
        name = self._kept_as()
        found: Any = stored.load(name, self.build, self.device) if name else None
        if found is None:
            module = module_of(self.problem.spec, self.slots, self.entries)
            found = launcher(getattr(module, self.entry.name), self.build, self.device)
            if isinstance(found, Launcher) and name:
                shelf.keep(name, found.compiled)
        return found

    def _kept_as(self) -> str:
        """The name under which its binary is kept; empty where none is."""
        if (
            self.entry.name not in KEPT
            or interpreting()
            or torch.version.hip
            or not torch.cuda.is_available()
        ):
            return ""
        machine = machine_of(self.device)
        text = text_of(self.problem.spec, self.slots, self.entries)
        return shelf.name_of(text, self.entry.name, self.build, machine.arch)


def kernel_launcher(
    problem: Problem, slots: Slots, entry: Entry, build: Build, device: int, entries: tuple[Entry, ...]
) -> Any:
    """The launcher of a kernel of the spec's module, compiled once per device and build."""
    wanted = Wanted(problem, slots, entry, build, device, entries)
    return _made(wanted.key, wanted.make)


def kernel_launchers(wanted: Sequence[Wanted]) -> list[Any]:
    """The launchers of several kernels. Those that have to be compiled are compiled side by side: Triton spends most
    of that time outside of Python."""
    missing = [w for w in wanted if w.key not in _launchers]
    if len(missing) > 1 and not interpreting():
        with ThreadPoolExecutor(len(missing)) as pool:
            for done in [pool.submit(_made, w.key, w.make) for w in missing]:
                done.exception()  # what failed is tried again below, and raises there
    return [_made(w.key, w.make) for w in wanted]


def plain_launcher(kernel: Any, build: Build, device: int) -> Any:
    """The launcher of a kernel that depends on no spec."""
    key = (kernel.__module__, kernel.__name__, build, device)
    return _made(key, lambda: launcher(kernel, build, device))


def _made(key: tuple[object, ...], make: Callable[[], Any]) -> Any:
    """What was made for a key; the first who asks makes it, the others wait for that."""
    found = _launchers.get(key)
    if found is None:
        fresh: Future[Any] = Future()
        with _lock:
            found = _launchers.setdefault(key, fresh)
        if found is fresh:
            try:
                fresh.set_result(make())
            except BaseException as error:
                _launchers.pop(key, None)
                fresh.set_exception(error)
    return found.result()


# ---- tables --------------------------------------------------------------------------------------------------


def tables(slots: Slots, leaves: Sequence[Tensor], device: int) -> list[Tensor]:
    """The tables of block extremes that the spec's mask reads; one for a tensor that is read twice."""
    made: dict[tuple[object, ...], Tensor] = {}
    found = []
    for table in slots.tables:
        leaf = leaves[table.slot]
        key = (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), table.dim)
        if key not in made:
            made[key] = block_table(leaf, table.dim, device)
        found.append(made[key])
    return found


def block_table(leaf: Tensor, dim: int, device: int) -> Tensor:
    """(2, ...) int32: least and greatest of each BLOCK elements of one dimension."""
    from tilewise.backends.triton.extremes_kernel import block_extremes

    shape = list(leaf.shape)
    length, stride = shape[dim], leaf.stride(dim)
    blocks = -(-length // BLOCK)
    others = [(shape[d], leaf.stride(d)) for d in range(leaf.ndim) if d != dim]
    after = 1
    for d in range(dim + 1, leaf.ndim):
        after *= shape[d]
    lines = 1
    for size, _ in others:
        lines *= size
    while len(others) > 3:
        raise AssertionError("leaves have at most four dimensions")
    others = [(1, 0)] * (3 - len(others)) + others
    shape[dim] = blocks
    table = torch.empty((2, *shape), dtype=torch.int32, device=leaf.device)
    plane = lines * blocks
    names = (
        "leaf_ptr",
        "table_ptr",
        "length",
        "stride",
        "n1",
        "n2",
        "s0",
        "s1",
        "s2",
        "blocks",
        "after",
        "plane",
    )
    values = (
        leaf, table, length, stride, others[1][0], others[2][0], others[0][1], others[1][1], others[2][1],
        blocks, after, plane,
    )  # fmt: skip
    kinds = dict.fromkeys(("stride", "s0", "s1", "s2", "plane"), "i64")
    build = Build(types_of(names, values, kinds), (), (("BLOCK", BLOCK),), 1, 1)
    run = plain_launcher(block_extremes, build, device)
    # The first grid dimension is the one that may be large.
    run(blocks * lines, values)
    return table


# ---- conversions ---------------------------------------------------------------------------------------------


def reads_by_descriptors(problem: Problem, step: int, unit: bool, machine: Machine) -> bool:
    """Whether tiles of a call can come by descriptors; whether they do is a matter of its length, too. step, unit: as
    its strides are. Values of 32 columns came out wrong on an H200 (Triton 3.6): rows of 64 bytes as a product's right
    operand."""
    s = problem.shape
    if machine.kind != "cuda" or machine.arch < 90 or problem.dtype == torch.float32 or not unit:
        return False
    if step == 1 or problem.options.batch_invariant:
        return False
    return min(s.head_dim, s.head_dim_v) > 32 and max(s.head_dim, s.head_dim_v) <= 256


def precision_of(dtype: torch.dtype) -> str:
    """How products of float32 are formed: in full, unless torch allows TF32."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def per_batch(t: object, batch: int) -> Tensor | None:
    """An offset or length tensor as one contiguous entry per batch element; None if it is no tensor."""
    if not isinstance(t, torch.Tensor):
        return None
    t = t.reshape(-1)
    return (t.expand(batch) if t.shape[0] == 1 and batch > 1 else t).contiguous()


def dropout_numbers(problem: Problem, p: float) -> tuple[int, float]:
    """(threshold of the kept words, factor of the kept weights)."""
    if not problem.spec.dropout:
        return 0, 1.0
    return min(keep_threshold(p), 2**32 - 1), 1.0 / (1.0 - p) if p < 1.0 else 0.0
