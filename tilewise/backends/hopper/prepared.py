"""A forward call whose arguments are laid out once, for calls of a kind that was made before.

The argument block holds the tensor maps themselves. A call of the same kind differs from the first in addresses alone,
so it writes those into the maps: where they stand is found by encoding a map for two addresses, and if anything but
eight bytes differs, calls go on through the ordinary launcher.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.hopper.counters import UNREAD, counter, is_capturing, places
from tilewise.backends.hopper.descriptors import DESCRIPTORS, descriptors
from tilewise.backends.hopper.launch_forward import AT, FORWARD, Recipe, forward, lists_of, make_recipe
from tilewise.backends.triton import direct, shelf, stored
from tilewise.backends.triton import launch_forward as low
from tilewise.config import config
from tilewise.problem import empty_in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.problem import Inputs, Problem

_MAP = 128
"""Bytes of a tensor map."""

# Looked up once: a call of this kind takes microseconds. Builds of torch without CUDA lack them.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_NOTHING = (None,) * 6
"""Offsets and lengths among the tensors of a backward (`repeat_backward.outside`)."""
_right: dict[Any, bool] = {}
"""Whether a kernel was seen to give the same bits in both ways of launching it."""


def prepare(problem: Problem, inputs: Inputs) -> Prepared | None:
    """A function for calls that differ from this one in the tensors' contents and addresses only (see `quick`).

    None where such a call has more to do than a launch and its repetition, and host time matters less.
    """
    if problem.options.layout != "dense" or set(problem.tensor_names) - {"sink"}:
        return None
    if torch._C._cuda_getDevice() != inputs.q.get_device():
        return None
    recipe = make_recipe(problem, inputs)
    if recipe is None or recipe.splits > 1 or recipe.slots.tables or not recipe.by_tiles:
        return None
    if recipe.run in _right and not _right[recipe.run]:
        return None
    try:
        found = Prepared(recipe, inputs)
    except ValueError:
        return None
    if recipe.run not in _right:
        if torch.cuda.is_current_stream_capturing():
            return None
        _right[recipe.run] = _agrees(found, problem, inputs)
    return found if _right[recipe.run] else None


def _agrees(found: Prepared, problem: Problem, inputs: Inputs) -> bool:
    """Whether the laid-out launch gives the ordinary launch's bits: looked at once for each compiled kernel, whose
    compilation took seconds, since the layout of arguments is the driver's and not promised."""
    extra = inputs.leaves if inputs.sink is None else (*inputs.leaves, inputs.sink)
    mine = found(inputs.q, inputs.k, inputs.v, extra, True)
    others = forward(problem, inputs)
    pairs = zip(mine, others or (), strict=False)
    return others is not None and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if a is not None
    )


def encoded(descriptor: Any, facts: Any, shift: int = 0) -> bytes:
    """The tensor map of a descriptor, or of one whose tensor lies `shift` bytes further; facts: see `shelf.Kept`."""
    address = descriptor.base.data_ptr() + shift
    base = SimpleNamespace(data_ptr=lambda: address)
    alike = SimpleNamespace(
        base=base, shape=descriptor.shape, strides=descriptor.strides, padding=descriptor.padding
    )
    return stored.encoded(alike, facts)


def address_at(descriptor: Any, facts: Any) -> int:
    """Where in a tensor map the tensor's address stands.  Raises ValueError if that is not 8 bytes by themselves."""
    first, second = encoded(descriptor, facts), encoded(descriptor, facts, 1 << 20)
    address = descriptor.base.data_ptr()
    at = first.find(address.to_bytes(8, "little"))
    if (
        at < 0
        or at % 8
        or first[:at] + (address + (1 << 20)).to_bytes(8, "little") + first[at + 8 :] != second
    ):
        raise ValueError("a tensor map holds its address in another way")
    return at


class Block(NamedTuple):
    """An argument block: its words, the launch that reads them, and the addresses of that and of the list of the
    parameters' addresses, as ctypes passes them. kept: what addresses lead to."""

    words: Any
    config: Any
    config_at: Any
    parameters_at: Any
    kept: Any


class MapsDirect:
    """Launches one kernel with one set of numbers and tensor maps; addresses are given anew each time.

    slots: for each pointer the word of the block that holds it. maps: for each descriptor the word with its address.
    Parameters are given one by one: tensor maps are aligned where the kernel reads them, which no buffer of ours knows.
    Source: CUDA driver API, cuLaunchKernelEx, kernelParams.
    """

    def __init__(self, launcher: Any, types: Sequence[str], values: Sequence[Any], grid: int) -> None:
        """Raises ValueError if the kernel cannot be launched this way."""
        compiled = launcher.compiled
        maps = shelf.maps_of(compiled.metadata.tensordesc_meta)
        if maps is None:
            raise ValueError("a descriptor that Triton takes apart")
        facts = iter(maps)
        fields: list[tuple[int, int, bytes]] = []
        offset = 0
        self.slots: dict[int, int] = {}
        self.maps: dict[int, int] = {}

        def add(size: int, align: int, content: bytes) -> int:
            nonlocal offset
            at = -(-offset // align) * align
            fields.append((at, size, content))
            offset = at + size
            return at

        for n, (kind, value) in enumerate(zip(types, values, strict=True)):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                of = next(facts)
                self.maps[n] = (add(_MAP, 64, encoded(value, of)) + address_at(value, of)) // 8
                for x in value.shape:
                    add(4, 4, bytes(ctypes.c_int32(x)))
                for x in value.strides:
                    add(8, 8, bytes(ctypes.c_int64(x)))
            elif kind[0] == "*":
                self.slots[n] = add(8, 8, bytes(8)) // 8
            else:
                number = direct.C_TYPES[kind](value)
                add(ctypes.sizeof(number), ctypes.sizeof(number), bytes(number))
        wanted = direct.parameters(compiled)
        got = [size for _, size, _ in fields]
        scratch = [getattr(compiled.metadata, f"{name}_scratch_size", 0) for name in ("global", "profile")]
        if wanted[: len(got)] != got or any(size != 8 for size in wanted[len(got) :]):
            raise ValueError("the kernel's parameters are not the arguments")
        if direct._driver() is None or any(scratch):
            raise ValueError("no driver, or a kernel that wants scratch")
        for _ in wanted[len(got) :]:  # scratch that this kernel does not want
            add(8, 8, bytes(8))
        self.size = -(-offset // 8) * 8
        self.offsets = [at for at, _, _ in fields]
        template = bytearray(self.size)
        for at, size, content in fields:
            template[at : at + size] = content
        self.template = bytes(template)
        self.free: list[Block] = []
        self.function = ctypes.c_void_p(launcher.function)
        self.shape = (32 * compiled.metadata.num_warps, compiled.metadata.shared, False)
        self.grid, self.launch = grid, direct._driver()

    def block(self) -> Block:
        """An argument block; a call takes one and appends it to `free` when done."""
        try:
            return self.free.pop()
        except IndexError:
            words = (ctypes.c_uint64 * (self.size // 8)).from_buffer_copy(self.template)
            start = ctypes.addressof(words)
            parameters = (ctypes.c_void_p * len(self.offsets))(*[start + at for at in self.offsets])
            config = direct._config(*self.shape)
            config.grid = self.grid
            return Block(words, config, direct._address(config), direct._address(parameters), parameters)

    def __call__(self, block: Block, stream: int) -> None:
        """Launch on a stream.  Raises RuntimeError."""
        block.config.stream = stream
        error = self.launch(block.config_at, self.function, block.parameters_at, None)
        if error:
            raise RuntimeError(f"the driver refused a launch, CUDA error {error}")


class Prepared:
    """A launch with its arguments laid out."""

    def __init__(self, recipe: Recipe, inputs: Inputs) -> None:
        problem = recipe.problem
        out = empty_in_order(inputs.q, problem.out_shape, problem.out_dtype)
        values = recipe.values.copy()
        values[: len(DESCRIPTORS)] = descriptors(recipe, inputs, out)
        values[AT["q_offset"]], values[AT["k_offset"]] = (
            low._number(inputs.q_offset),
            low._number(inputs.k_offset),
        )
        values[AT["scale"]] = inputs.scale
        self.direct = MapsDirect(recipe.run, recipe.types, values, recipe.grid)
        self.again = None
        if recipe.again is not None:
            self.again = MapsDirect(recipe.again, recipe.types, values, recipe.grid)
            if self.again.offsets != self.direct.offsets:
                raise ValueError("two kernels lay the same arguments out in different ways")
        slots, leaf_at = self.direct.slots, recipe.slots.leaf_at
        # Nothing here may hold a tensor of the call.
        none: Any = None
        self.recipe, self.sunk = recipe, inputs.sink is not None
        self.others = replace(inputs, q=none, k=none, v=none, leaves=(), sink=None)
        maps = [[at for n, at in self.direct.maps.items() if DESCRIPTORS[n][0] == name] for name in "qkvo"]
        self.q_at, self.k_at, self.v_at = map(tuple, maps[:3])
        self.out_at = (*maps[3], slots[AT["out_ptr"]])
        self.lse_at, self.counter_at = slots[AT["lse_ptr"]], slots[AT["counter_ptr"]]
        self.again_at = slots.get(AT["again_ptr"], 0)
        self.extra = [slots[len(FORWARD.arguments) + at] for at in leaf_at]
        if inputs.sink is not None:
            self.extra.append(slots[AT["sink_ptr"]])
        self.leaves, self.margin = len(leaf_at), config.sm_margin
        self.out_shape, self.out_strides = problem.out_shape, recipe.out_strides
        self.lse_shape, self.out_dtype = problem.lse_shape, problem.out_dtype
        size = math.prod(problem.lse_shape)
        self.short, self.lse_like = size <= UNREAD, None
        like = torch.empty_like(inputs.q)
        self.like_q = (like.shape, like.stride(), like.dtype) == (
            self.out_shape, self.out_strides, self.out_dtype,
        )  # fmt: skip
        self.device, self.index = inputs.q.device, inputs.q.get_device()
        if self.short and not is_capturing():
            unread = places(self.index, current_stream(self.index)).kept[1]
            self.lse_like = unread[:size].view(problem.lse_shape)
        self.steps = [layout.step > 1 for layout in recipe.slots.leaves]
        self.tapes: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], want_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse); see `protocol.Prepared`."""
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (
            (at_q | at_k | at_v) & 15
            or current_device() != self.index
            or config.sm_margin != self.margin
            or (extra and not self._reads(extra))
        ):
            return self._elsewhere(q, k, v, extra)
        if self.like_q:
            out = torch.empty_like(q)
        else:
            out = torch.empty_strided(
                self.out_shape, self.out_strides, dtype=self.out_dtype, device=self.device
            )
        at_out, stream, lse = out.data_ptr(), current_stream(self.index), None
        if is_capturing():
            at_counter, unread = counter(self.index, stream).data_ptr(), None
        else:
            at_counter, unread, _ = places(self.index, stream)
        if want_lse or unread is None or not self.short:
            if self.lse_like is None:
                lse = q.new_empty(self.lse_shape, dtype=torch.float32)
            else:  # a quarter of the time
                lse = torch.empty_like(self.lse_like)
            unread = lse.data_ptr()
        block = self.direct.block()
        words = block.words
        for at in self.q_at:
            words[at] = at_q
        for at in self.k_at:
            words[at] = at_k
        for at in self.v_at:
            words[at] = at_v
        for at in self.out_at:
            words[at] = at_out
        words[self.lse_at], words[self.counter_at] = unread, at_counter
        if extra:
            for at, t in zip(self.extra, extra, strict=False):
                words[at] = t.data_ptr()
        if self.again is None:
            self.direct(block, stream)
        else:
            lists = lists_of(self.recipe, self.device)
            words[self.again_at] = lists.data_ptr()
            self.direct(block, stream)
            then = self.again.block()
            ctypes.memmove(then.words, words, self.again.size)
            self.again(then, stream)
            self.again.free.append(then)
        self.direct.free.append(block)
        return out, lse

    def backward(
        self, tensors: Sequence[Tensor], saved: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...] | None:  # fmt: skip
        """Gradients of q, k, v, and None for each leaf, by the tape of a backward like this one; None if there is none
        yet, or what is given is not what the tape was made for."""
        q, k, v, *leaves = tensors
        (out, lse), (do, dlse) = saved, grads
        given = (q, k, v, out, lse, do, dlse, *_NOTHING, *leaves)
        starts = [0 if t is None else t.data_ptr() for t in given]
        at_q, at_k, at_v, at_out, at_lse, at_do, *others = starts
        there = {at_q, at_k, at_v, at_out, at_lse, at_do}
        if (at_q | at_k | at_v | at_out | at_lse | at_do) & 15 or len(there) != 6 or self.sunk:
            return None
        kind: tuple[object, ...] = (
            needs, do.dtype, q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(), do.stride(),
        )  # fmt: skip
        if dlse is not None or leaves:
            found = [x for x in others if x]
            if any(x & 15 for x in found) or len({*there, *found}) != 6 + len(found) or any(needs[3:]):
                return None
            kind = (*kind, dlse is None, *[t.stride() for t in given[6:] if t is not None])
        tape = self.tapes.get(kind)
        if tape is None:
            tape = self._tape(given, needs)
            if tape is None:
                return None
            self.tapes[kind] = tape
        dq, dk, dv = tape.repeat(given, starts)
        if needs[0] and needs[1] and needs[2]:
            return (dq, dk, dv, *[None] * len(leaves))
        made = (dq, dk, dv, *[None] * len(leaves))
        return tuple(g if need else None for g, need in zip(made, needs, strict=True))

    def _tape(self, given: Sequence[Tensor | None], needs: Sequence[bool]) -> Any:
        """The tape of a backward on these tensors, if one was made."""
        from tilewise.backends.hopper.repeat_backward import kind_of, tapes
        from tilewise.backends.protocol import Needs

        q, k, v = given[:3]
        leaves = given[len(given) - self.leaves :]
        problem = self.recipe.problem.with_gradient()
        inputs = replace(self.others, q=q, k=k, v=v, leaves=leaves)
        kind = kind_of(problem, inputs, given, Needs(*needs[:3], tuple(needs[3:]), False))
        return None if kind is None else tapes.get(kind)

    def _reads(self, extra: Sequence[Tensor]) -> bool:
        """Whether the kernel can read these leaves and this sink."""
        pairs = zip(extra, self.steps, strict=False)
        if any(aligned and t.data_ptr() & 15 for t, aligned in pairs):
            return False
        return all(t.is_contiguous() for t in extra[self.leaves :])

    def _elsewhere(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The same call when it is aligned otherwise, or another device is current."""
        sink = extra[self.leaves] if len(extra) > self.leaves else None
        inputs = replace(self.others, q=q, k=k, v=v, leaves=tuple(extra[: self.leaves]), sink=sink)
        found = forward(self.recipe.problem, inputs)
        if found is None:
            from tilewise.backends.triton.launch_forward import forward as other

            found = other(self.recipe.problem, inputs)
        return found  # type: ignore[return-value]
