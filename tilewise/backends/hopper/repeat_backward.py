"""A backward like one before it: the same kernels, numbers and sizes, other addresses.

What a backward launches follows from the call alone (`kind_of`). The first of a kind goes the ordinary way and is noted
on a `Tape`: each launch, and whose memory each of its tensors is: one of the call's, a gradient's, or memory between
the kernels. Later ones allocate, fill in addresses, and launch. On the host that takes a tenth of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.hopper.descriptors import readable
from tilewise.backends.protocol import Gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tilewise.backends.protocol import Needs
    from tilewise.problem import Inputs, Problem

MOST_KINDS = 1024
ALIGNED = 512
"""Bytes between tensors of the memory between kernels."""
tapes: dict[tuple[object, ...], Tape | None] = {}
"""By kind; None where a call of the kind reads other memory than its tensors and its own."""


def outside(
    inputs: Inputs, saved: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The call's tensors, in one order."""
    offsets = (t if isinstance(t, torch.Tensor) else None for t in (inputs.q_offset, inputs.k_offset))
    return (
        inputs.q, inputs.k, inputs.v, *saved, *grads, *offsets, inputs.cu_seqlens_q, inputs.cu_seqlens_k,
        inputs.seqused_q, inputs.seqused_k, *inputs.leaves,
    )  # fmt: skip


def kind_of(
    problem: Problem, inputs: Inputs, given: Sequence[Tensor | None], needs: Needs
) -> tuple[object, ...] | None:
    """What the launches of a call on tensors `given` (see `outside`) follow from; None where something else is done,
    too: leaves and sinks whose gradients are wanted, and tensors that are copied first."""
    q, k, v, out, _, do, *_ = given
    if needs.sink or any(needs.leaves) or problem.spec.dropout or do.dtype != problem.dtype:
        return None
    if not readable(problem, (q, k, v, out, do)):
        return None
    # Two that are one tensor are told apart from two.
    starts = [None if t is None else t.data_ptr() for t in given]
    tensors = tuple(
        None if t is None else (t.dtype, t.shape, t.stride(), start & 15)
        for t, start in zip(given, starts, strict=True)
    )
    same = tuple(starts.index(x) for x in starts)
    numbers = (inputs.scale, inputs.h_offset, inputs.b_offset, inputs.ints, inputs.floats)
    offsets = tuple(x if isinstance(x, int) else None for x in (inputs.q_offset, inputs.k_offset))
    return problem, tensors, same, numbers, offsets, inputs.q_offset is None, inputs.q.get_device()


class Launch(NamedTuple):
    """values: of all arguments. tensors, maps: those that are (number of the argument, number of the tensor, bytes from
    its first element on), as an address or within a descriptor."""

    run: Callable[..., Any]
    grid: int
    values: list[Any]
    tensors: tuple[tuple[int, int, int], ...]
    maps: tuple[tuple[int, int, int], ...]


class Moved:
    """A descriptor of the same shape at another address; its own base, too."""

    __slots__ = ("address", "base", "block_shape", "layout", "padding", "shape", "strides")

    def __init__(self, like: Any, address: int) -> None:
        self.shape, self.strides, self.padding = like.shape, like.strides, like.padding
        self.block_shape, self.layout = like.block_shape, getattr(like, "layout", None)
        self.address, self.base = address, self

    def data_ptr(self) -> int:
        return self.address


class Own(NamedTuple):
    """A tensor that a call makes. fill: what it holds before the first launch, None for anything."""

    tensor: Tensor
    fill: float | None


class Tape:
    """Launches of a call, while it is made; then a function that repeats them."""

    def __init__(self) -> None:
        self.noted: list[tuple[Any, int, tuple[object, ...]]] = []
        self.own: list[Own] = []
        self.launches: tuple[Launch, ...] = ()

    def note(self, run: Any, grid: int, values: Sequence[object]) -> None:
        self.noted.append((run, grid, tuple(values)))

    def keep(self, tensor: Tensor, fill: float | None = None) -> Tensor:
        """Note a tensor that the call makes."""
        self.own.append(Own(tensor, fill))
        return tensor

    def finish(self, given: Sequence[Tensor | None], found: Gradients) -> bool:
        """Lay the launches out; False if one reads memory that is neither given nor noted."""
        made = (found.dq, found.dk, found.dv)
        fills = {own.tensor.data_ptr(): own.fill for own in self.own}
        self.made = [(t.shape, t.stride(), t.dtype, fills[t.data_ptr()]) for t in made if t is not None]
        known = {t.data_ptr() for t in made if t is not None}
        room = [own for own in self.own if own.tensor.data_ptr() not in known]
        starts = [None if t is None else t.data_ptr() for t in (*given, *made)]
        first = len(starts)
        starts += [own.tensor.data_ptr() for own in room]

        def place(t: Tensor) -> tuple[int, int] | None:
            address = t.data_ptr()
            if address in starts:
                return starts.index(address), 0
            for n, own in enumerate(room):  # a part of it
                offset = address - own.tensor.data_ptr()
                if 0 < offset < own.tensor.numel() * own.tensor.element_size():
                    return first + n, offset
            return None

        launches = []
        for run, grid, values in self.noted:
            tensors, maps = [], []
            for n, value in enumerate(values):
                base = getattr(value, "base", None)
                t = value if isinstance(value, torch.Tensor) else base
                if t is None:
                    continue
                at = place(t)
                if at is None:
                    return False
                (tensors if t is value else maps).append((n, *at))
            # Nothing here may hold a tensor of the call.
            kept = [None if isinstance(v, torch.Tensor) else v for v in values]
            for n, _, _ in maps:
                kept[n] = Moved(values[n], 0)
            launches.append(Launch(run, grid, kept, tuple(tensors), tuple(maps)))
        self.offsets, self.filled, total = [], [], 0
        for own in room:
            self.offsets.append(total)
            if own.fill is not None:
                self.filled.append((total, own.tensor.dtype, own.tensor.numel(), own.fill))
            total += -(-own.tensor.numel() * own.tensor.element_size() // ALIGNED) * ALIGNED
        self.bytes, self.leaves = total, len(found.leaves)
        self.launches, self.noted, self.own = tuple(launches), [], []
        return True

    def __call__(self, given: Sequence[Tensor | None]) -> Gradients:
        """The gradients of a call of the kind."""
        device = given[0].device  # type: ignore[union-attr]
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, _ in self.made
        ]
        for t, (*_, fill) in zip(made, self.made, strict=True):
            if fill is not None:
                t.fill_(fill)
        room = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        for at, dtype, count, fill in self.filled:
            room[at : at + count * dtype.itemsize].view(dtype).fill_(fill)
        start = room.data_ptr()
        addresses = [0 if t is None else t.data_ptr() for t in given]
        addresses += [t.data_ptr() for t in made]
        addresses += [start + offset for offset in self.offsets]
        for run, grid, kept, tensors, maps in self.launches:
            values = kept.copy()
            for n, at, offset in tensors:
                values[n] = addresses[at] + offset
            for n, at, offset in maps:
                values[n] = Moved(values[n], addresses[at] + offset)
            run(grid, values)
        return Gradients(*made, leaves=(None,) * self.leaves)


def remember(kind: tuple[object, ...], tape: Tape, given: Sequence[Tensor | None], found: Gradients) -> None:
    """Keep the tape of a call for others of its kind."""
    if len(tapes) >= MOST_KINDS:
        tapes.clear()
    tapes[kind] = tape if tape.finish(given, found) else None
