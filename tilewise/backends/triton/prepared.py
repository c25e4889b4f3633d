"""A forward call whose arguments are laid out once, for calls of a kind that was made before."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.backends.triton.compile import Launcher
from tilewise.backends.triton.direct import Direct
from tilewise.backends.triton.launch import precision_of
from tilewise.backends.triton.launch_forward import (
    AT,
    FLAG,
    FORWARD,
    NOTES,
    Recipe,
    forward,
    make_recipe,
    slots_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.problem import Inputs, Problem


UNREAD = 1 << 16
"""Entries of the memory, one a device and never freed, into which short calls write an lse that nobody asked for."""


@functools.lru_cache(maxsize=32)
def _unread(device: int) -> Tensor:
    """That memory."""
    return torch.empty(UNREAD, dtype=torch.float32, device=torch.device("cuda", device))


def prepare(problem: Problem, inputs: Inputs) -> Prepared | None:
    """A function for calls that differ from this one in the tensors' contents and addresses only (see `quick`).

    None where such a call has more to do than one launch, and host time matters less.
    """
    slots = slots_of(problem, inputs)
    if slots is None or slots.tables or problem.spec.dropout or problem.options.layout != "dense":
        return None
    recipe = make_recipe(problem, inputs, slots)
    if recipe.splits > 1 or recipe.tma or recipe.grid <= 0 or not isinstance(recipe.run, Launcher):
        return None
    try:
        return Prepared(recipe, inputs)
    except ValueError:
        return None


class Prepared:
    """One launch whose arguments are laid out."""

    def __init__(self, recipe: Recipe, inputs: Inputs) -> None:
        problem = recipe.problem
        self.direct = Direct(recipe.run, recipe.types, recipe.values)
        self.again = None
        if recipe.again is not None:
            self.again = Direct(recipe.again, recipe.types, recipe.values, self.direct)
        self.flag = self.direct.slots.get(FLAG, 0)
        self.recipe, self.grid, self.aligned = recipe, recipe.grid, recipe.aligned
        self.out_shape, self.out_strides = problem.out_shape, recipe.out_strides
        self.lse_shape, self.out_dtype = problem.lse_shape, problem.out_dtype
        self.device, self.index = inputs.q.device, inputs.q.get_device()
        self.precision = precision_of(problem.dtype) if problem.dtype == torch.float32 else None
        leaf_at = [len(FORWARD.arguments) + at for at in recipe.slots.leaf_at]
        self.extra = [self.direct.slots[at] for at in leaf_at]
        if inputs.sink is not None:
            self.extra.append(self.direct.slots[AT["sink_ptr"]])
        like = torch.empty_like(inputs.q)
        self.like_q = (like.shape, like.stride(), like.dtype) == (
            self.out_shape, self.out_strides, self.out_dtype
        )  # fmt: skip
        lse_size = math.prod(self.lse_shape)
        self.unread = self.lse_like = None
        if lse_size <= UNREAD:
            unread = _unread(self.index)
            self.unread, self.lse_like = unread.data_ptr(), unread[:lse_size].view(self.lse_shape)
        self.aligned_leaves = [layout.step > 1 for layout in recipe.slots.leaves]
        # No tensor of the call is kept alive: `_elsewhere` puts its own in.
        nothing = inputs.q.new_empty(0)
        self.others = replace(inputs, q=nothing, k=nothing, v=nothing, leaves=(), sink=None)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], want_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse); see `protocol.Prepared`."""
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        fits = not (self.aligned and (addresses[0] | addresses[1] | addresses[2]) & 15)
        if fits and extra:
            fits = all(t.is_contiguous() for t in extra[len(self.aligned_leaves) :])
            pairs = zip(extra, self.aligned_leaves, strict=False)
            fits = fits and not any(aligned and t.data_ptr() & 15 for t, aligned in pairs)
        if self.precision is not None:
            fits = fits and self.precision == precision_of(torch.float32)
        if not fits or torch._C._cuda_getDevice() != self.index:
            return self._elsewhere(q, k, v, extra)
        if self.like_q:
            out = torch.empty_like(q)
        else:
            out = torch.empty_strided(
                self.out_shape, self.out_strides, dtype=self.out_dtype, device=self.device
            )
        lse = None
        if self.lse_like is None:
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        elif want_lse:  # quicker than by its shape
            lse = torch.empty_like(self.lse_like)
        block = self.direct.block()
        words = block.words
        words[0], words[1], words[2] = addresses
        words[3], words[4] = out.data_ptr(), self.unread if lse is None else lse.data_ptr()
        for at, t in zip(self.extra, extra, strict=False):
            words[at] = t.data_ptr()
        if self.again is None:
            self.direct(self.grid, block)
        else:
            flags = q.new_empty((self.grid,), dtype=torch.int32)
            words[self.flag] = flags.data_ptr()
            self.direct(self.grid, block)
            self.again(-(-self.grid // NOTES), block)
        self.direct.free.append(block)
        return out, lse

    def _elsewhere(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The same call when it is aligned otherwise, or another device is current."""
        count = len(self.recipe.problem.spec.leaves)
        sink = extra[count] if len(extra) > count else None
        inputs = replace(self.others, q=q, k=k, v=v, leaves=tuple(extra[:count]), sink=sink)
        return forward(self.recipe.problem, inputs)  # type: ignore[return-value]
