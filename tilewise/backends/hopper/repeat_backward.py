"""A backward like one before it: the same kernels, numbers and sizes, other addresses.

What a backward launches follows from the call alone (`kind_of`). The first of a kind goes the ordinary way and is noted
on a `Tape`: each launch, and whose memory each of its tensors is: one of the call's, a gradient's, or memory between
the kernels. Later ones allocate, fill in addresses, and launch. On the host that takes a tenth of the time.

Where the driver takes a kernel's arguments as one block (`prepared.MapsDirect`), the block is laid out with the tape,
tensor maps and all, and a call writes addresses alone. What that gives is compared once, for each set of kernels, with
what Triton's launcher gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.hopper.counters import is_capturing
from tilewise.backends.hopper.descriptors import readable
from tilewise.backends.hopper.prepared import MapsDirect, current_device, current_stream
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
_right: dict[tuple[Any, ...], bool] = {}
"""By kernels: whether both ways of launching them were seen to give the same."""


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
    its first element on), as an address or within a descriptor. direct: the same launch with a block of arguments;
    words: those of the block that hold addresses (number of the word, number of the tensor, bytes)."""

    run: Callable[..., Any]
    grid: int
    values: list[Any]
    tensors: tuple[tuple[int, int, int], ...]
    maps: tuple[tuple[int, int, int], ...]
    direct: MapsDirect | None
    words: tuple[tuple[int, int, int], ...]

    def ordinary(self, addresses: Sequence[int]) -> None:
        """By Triton's launcher."""
        values = self.values.copy()
        for n, at, offset in self.tensors:
            values[n] = addresses[at] + offset
        for n, at, offset in self.maps:
            values[n] = Moved(values[n], addresses[at] + offset)
        self.run(self.grid, values)

    def quick(self, addresses: Sequence[int], stream: int) -> None:
        """By the driver; `direct` is there."""
        direct: Any = self.direct
        block = direct.block()
        words = block.words
        for word, at, offset in self.words:
            words[word] = addresses[at] + offset
        direct(block, stream)
        direct.free.append(block)


def laid_out(run: Any, grid: int, values: Sequence[Any]) -> MapsDirect | None:
    """A launch as a block of arguments; None where the driver, or the kernel, is not of that kind."""
    try:
        return MapsDirect(run, run.types, values, grid)
    except (AttributeError, KeyError, ValueError):
        return None


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
        room.sort(key=lambda own: own.fill is not None)
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
            direct, words = laid_out(run, grid, values), []
            if direct is not None:
                words = [(direct.slots[n], *rest) for n, *rest in tensors]
                words += [(direct.maps[n], *rest) for n, *rest in maps]
            launches.append(Launch(run, grid, kept, tuple(tensors), tuple(maps), direct, tuple(words)))
        self.offsets, self.filled, total = [], [], 0
        for own in room:
            if own.fill is not None:
                self.filled.append((own.tensor.dtype, own.tensor.numel(), own.fill))
                continue
            self.offsets.append(total)
            total += -(-own.tensor.numel() * own.tensor.element_size() // ALIGNED) * ALIGNED
        self.bytes, self.leaves = total, len(found.leaves)
        self.launches, self.noted, self.own = tuple(launches), [], []
        self.index = given[0].get_device()  # type: ignore[union-attr]
        self.kernels = tuple(launch.run for launch in launches)
        self.direct = all(launch.direct is not None for launch in launches)
        return True

    def __call__(self, given: Sequence[Tensor | None]) -> Gradients:
        """The gradients of a call of the kind."""
        if not self.direct or current_device() != self.index:
            return self.launch(given, False)
        if self.kernels not in _right:
            if is_capturing():
                return self.launch(given, False)
            found, others = self.launch(given, True), self.launch(given, False)
            _right[self.kernels] = alike(found, others)
            return others
        self.direct = _right[self.kernels]
        return self.launch(given, self.direct)

    def launch(self, given: Sequence[Tensor | None], direct: bool) -> Gradients:
        """Memory, addresses, launches; direct: from blocks of arguments."""
        device = given[0].device  # type: ignore[union-attr]
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, _ in self.made
        ]
        for t, (*_, fill) in zip(made, self.made, strict=True):
            if fill is not None:
                t.fill_(fill)
        room = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        filled = [
            torch.full((count,), fill, dtype=dtype, device=device)
            if fill
            else torch.zeros(count, dtype=dtype, device=device)
            for dtype, count, fill in self.filled
        ]
        start = room.data_ptr()
        addresses = [0 if t is None else t.data_ptr() for t in given]
        addresses += [t.data_ptr() for t in made]
        addresses += [start + offset for offset in self.offsets]
        addresses += [t.data_ptr() for t in filled]
        if direct:
            stream = current_stream(self.index)
            for launch in self.launches:
                launch.quick(addresses, stream)
        else:
            for launch in self.launches:
                launch.ordinary(addresses)
        return Gradients(*made, leaves=(None,) * self.leaves)


def alike(found: Gradients, others: Gradients) -> bool:
    """Whether two ways of launching the same kernels gave the same: dk, dv to the bit, dq up to the order of sums."""
    for a, b in ((found.dk, others.dk), (found.dv, others.dv)):
        if a is not None and b is not None and not torch.equal(a.nan_to_num(), b.nan_to_num()):
            return False
    if found.dq is None or others.dq is None:
        return True
    dq, other = (t.float().nan_to_num() for t in (found.dq, others.dq))
    return bool((dq - other).norm() <= other.norm() / 64)


def remember(kind: tuple[object, ...], tape: Tape, given: Sequence[Tensor | None], found: Gradients) -> None:
    """Keep the tape of a call for others of its kind."""
    if len(tapes) >= MOST_KINDS:
        tapes.clear()
    tapes[kind] = tape if tape.finish(given, found) else None
