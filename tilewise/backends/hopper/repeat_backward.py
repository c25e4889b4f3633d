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
from tilewise.backends.triton.direct import set_words

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
        """As any call is launched."""
        values = self.values.copy()
        for n, at, offset in self.tensors:
            values[n] = addresses[at] + offset
        for n, at, offset in self.maps:
            values[n] = Moved(values[n], addresses[at] + offset)
        self.run(self.grid, values)


class Blocks:
    """One block of arguments for each launch of a tape. words: (block, number of the word, number of the tensor,
    bytes); calls: (configuration, its address, function, address of the parameters), as the driver takes them."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        made: list[Any] = [(launch, launch.direct.block()) for launch in launches]  # type: ignore[union-attr]
        self.words = tuple((block.words, *rest) for launch, block in made for rest in launch.words)
        self.calls = tuple(
            (block.config, block.config_at, launch.direct.function, block.parameters_at)
            for launch, block in made
        )
        self.kept = made


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
            self.offsets.append(total)
            if own.fill is not None:
                self.filled.append((total, own.tensor.dtype, own.tensor.numel(), own.fill))
            total += -(-own.tensor.numel() * own.tensor.element_size() // ALIGNED) * ALIGNED
        self.bytes, self.leaves = total, len(found.leaves)
        self.launches, self.noted, self.own = tuple(launches), [], []
        self._lay_out(given, [t for t in made if t is not None])
        return True

    def _lay_out(self, given: Sequence[Tensor | None], made: Sequence[Tensor]) -> None:
        """What launches by the driver want beside the blocks."""
        q: Any = given[0]
        self.index, self.kernels = q.get_device(), tuple(launch.run for launch in self.launches)
        self.direct = all(launch.direct is not None for launch in self.launches)
        self.free: list[Blocks] = []
        self.launch: Any = self.launches[0].direct.launch if self.direct else None  # type: ignore[union-attr]
        # A tensor like another one is made in a quarter of the time.
        self.room_like = torch.empty(1, dtype=torch.uint8, device=q.device).expand(self.bytes)

        def like(t: Tensor) -> int:
            key = (t.shape, t.stride(), t.dtype)
            same = [n for n, x in enumerate(given) if x is not None and (x.shape, x.stride(), x.dtype) == key]
            return same[0] if same and torch.empty_like(given[same[0]]).stride() == t.stride() else -1

        self.like = [like(t) for t in made]
        self.patterns = [
            (at, int(torch.tensor(number).to(dtype).view(torch.int32)) & 0xFFFFFFFF, count)
            for at, dtype, count, number in self.filled
        ]

    def __call__(self, given: Sequence[Tensor | None]) -> Gradients:
        """The gradients of a call of the kind."""
        dq, dk, dv = self.repeat(given, [0 if t is None else t.data_ptr() for t in given])
        return Gradients(dq, dk, dv, leaves=(None,) * self.leaves)

    def repeat(self, given: Sequence[Tensor | None], starts: list[int]) -> list[Tensor]:
        """dq, dk, dv of a call of the kind. starts: addresses of what is given, 0 where there is nothing."""
        if not self.direct or current_device() != self.index:
            return self.ordinary(given, starts)
        right = _right.get(self.kernels)
        if right:
            return self.quick(given, starts)
        if right is None and not is_capturing():
            found, others = self.quick(given, starts), self.ordinary(given, starts)
            _right[self.kernels] = alike(found, others)
            return others
        return self.ordinary(given, starts)

    def gradients(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Memory for dq, dk and dv."""
        found = []
        for n, (shape, stride, dtype, number) in zip(self.like, self.made, strict=True):
            like: Any = given[max(n, 0)]
            if n < 0:
                t = torch.empty_strided(shape, stride, dtype=dtype, device=like.device)
            else:
                t = torch.empty_like(like)
            found.append(t if number is None else t.fill_(number))
        return found

    def ordinary(self, given: Sequence[Tensor | None], starts: list[int]) -> list[Tensor]:
        """As any call is launched."""
        made, room = self.gradients(given), torch.empty_like(self.room_like)
        for at, dtype, count, number in self.filled:
            room[at : at + count * dtype.itemsize].view(dtype).fill_(number)
        start = room.data_ptr()
        addresses = [*starts, *[t.data_ptr() for t in made], *[start + offset for offset in self.offsets]]
        for launch in self.launches:
            launch.ordinary(addresses)
        return made

    def quick(self, given: Sequence[Tensor | None], starts: list[int]) -> list[Tensor]:
        """By the driver."""
        made, room = self.gradients(given), torch.empty_like(self.room_like)
        start, stream = room.data_ptr(), current_stream(self.index)
        for at, pattern, count in self.patterns:
            set_words(start + at, pattern, count, stream)
        addresses = [*starts, *[t.data_ptr() for t in made], *[start + offset for offset in self.offsets]]
        try:
            blocks = self.free.pop()
        except IndexError:
            blocks = Blocks(self.launches)
        for words, word, at, offset in blocks.words:
            words[word] = addresses[at] + offset
        launch = self.launch
        for config, config_at, function, parameters_at in blocks.calls:
            config.stream = stream
            error = launch(config_at, function, parameters_at, None)
            if error:
                raise RuntimeError(f"the driver refused a launch, CUDA error {error}")
        self.free.append(blocks)
        return made


def alike(found: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two ways of launching the same kernels gave the same: dk, dv to the bit, dq up to the order of sums."""
    dq, other = (t[0].float().nan_to_num() for t in (found, others))
    same = all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found[1:], others[1:], strict=True)
    )
    return same and bool((dq - other).norm() <= other.norm() / 64)


def remember(kind: tuple[object, ...], tape: Tape, given: Sequence[Tensor | None], found: Gradients) -> None:
    """Keep the tape of a call for others of its kind."""
    if len(tapes) >= MOST_KINDS:
        tapes.clear()
    tapes[kind] = tape if tape.finish(given, found) else None
