"""A decode call whose arguments are laid out once, for calls of a kind that was made before."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends.triton.compile import Launcher
from tilewise.backends.triton.counters import counters
from tilewise.backends.triton.direct import Direct
from tilewise.backends.triton.launch import precision_of
from tilewise.backends.triton.launch_decode import (
    AT,
    DECODE,
    Recipe,
    forward,
    make_recipe,
    room_size,
    split_at,
)
from tilewise.backends.triton.layout import describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.problem import Inputs, Problem

POINTERS = {
    "sink": "sink_ptr", "seqused_q": "used_q_ptr", "seqused_k": "used_k_ptr", "block_table": "table_ptr",
    "leftpad_k": "leftpad_ptr", "k_scale": "k_scale_ptr", "v_scale": "v_scale_ptr",
}  # fmt: skip


def prepare(
    problem: Problem, inputs: Inputs, prior: tuple[Tensor, Tensor] | None = None
) -> PreparedDecode | None:
    """A function for decode calls that differ from this one in the tensors' contents and addresses only.

    prior: as `launch_decode.forward` has it, of calls that give one of the same strides.

    None where such a call has more to do than to launch the decode kernel and to merge its results.
    """
    if not problem.shape.seqlen_k or not all(t.numel() for t in (inputs.q, inputs.k, inputs.v)):
        return None
    slots = describe(problem.spec, inputs.leaves, fine=problem.dtype == torch.float32)
    if slots is None or slots.tables or not set(problem.tensor_names) <= set(POINTERS):
        return None
    if problem.options.k_scale != problem.options.v_scale or problem.options.layout != "dense":
        return None
    recipe = make_recipe(problem, inputs, slots, prior)
    if recipe.again is not None or not isinstance(recipe.run, Launcher):
        return None
    try:
        return PreparedDecode(recipe, inputs)
    except ValueError:
        return None


class PreparedDecode:
    """A launch of the decode kernel whose arguments are laid out, and perhaps one that merges its results."""

    def __init__(self, recipe: Recipe, inputs: Inputs) -> None:
        problem = recipe.problem
        self.direct = Direct(recipe.run, recipe.types, recipe.values)
        self.merge = (
            None if recipe.merge is None else Direct(recipe.merge, recipe.types, recipe.values, self.direct)
        )
        self.recipe, self.splits = recipe, recipe.plan.splits
        self.out_shape, self.out_strides = problem.out_shape, recipe.out_strides
        self.lse_shape, self.out_dtype = problem.lse_shape, problem.out_dtype
        self.device, self.index = inputs.q.device, inputs.q.get_device()
        self.precision = precision_of(problem.dtype) if problem.dtype == torch.float32 else None
        self.room, self.split_at = room_size(recipe), 4 * split_at(recipe)
        self.roomier = self.room + math.prod(
            self.lse_shape
        )  # an lse that nobody asked for stands behind the splits'
        slots = self.direct.slots
        self.part, self.part_lse, self.count = (
            slots[AT[name]] for name in ("part_ptr", "part_lse_ptr", "count_ptr")
        )
        self.prior = [slots[AT[name]] for name in ("prior_ptr", "prior_lse_ptr") if AT[name] in slots]
        self.extra = [slots[len(DECODE.arguments) + at] for at in recipe.slots.leaf_at]
        self.extra += [slots[AT[POINTERS[name]]] for name in problem.tensor_names]
        count = len(problem.spec.leaves)
        table = inputs.block_table
        self.table_at = count + problem.tensor_names.index("block_table") if table is not None else -1
        self.table_strides = None if table is None or table.stride(1) != 1 else table.stride()
        self.aligned_leaves = [layout.step > 1 for layout in recipe.slots.leaves]
        nothing = inputs.q.new_empty(0)
        none: dict[str, Any] = dict.fromkeys(problem.tensor_names)
        self.others = replace(inputs, q=nothing, k=nothing, v=nothing, leaves=(), **none)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], want_lse: bool,
        prior: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """(out, lse); see `protocol.Prepared`. extra: the leaves, then the problem's tensors in their order."""
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        fits = not (self.recipe.aligned and (addresses[0] | addresses[1] | addresses[2]) & 15)
        if extra:
            for at, t in enumerate(extra[len(self.aligned_leaves) :], len(self.aligned_leaves)):
                as_laid = t.stride() == self.table_strides if at == self.table_at else t.is_contiguous()
                fits = fits and as_laid
            for aligned, t in zip(self.aligned_leaves, extra, strict=False):
                fits = fits and not (aligned and t.data_ptr() & 15)
        if self.precision is not None:
            fits = fits and self.precision == precision_of(torch.float32)
        if not fits or torch._C._cuda_getDevice() != self.index:
            return self._elsewhere(q, k, v, extra, prior)
        out = torch.empty_strided(self.out_shape, self.out_strides, dtype=self.out_dtype, device=self.device)
        block = self.direct.block()
        words = block.words
        words[0], words[1], words[2] = addresses
        words[3], lse = out.data_ptr(), None
        if self.room:
            part = torch.empty(
                self.room if want_lse else self.roomier, dtype=torch.float32, device=self.device
            )
            at = part.data_ptr()
            words[self.part], words[self.part_lse], words[4] = at, at + self.split_at, at + 4 * self.room
            if self.merge is None:
                words[self.count] = counters(self.device, self.recipe.units).data_ptr()
        if want_lse or not self.room:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
            words[4] = lse.data_ptr()
        for at, t in zip(self.extra, extra, strict=True):
            words[at] = t.data_ptr()
        if prior is not None:
            for at, t in zip(self.prior, prior, strict=True):
                words[at] = t.data_ptr()
        self.direct(self.recipe.units, block, self.splits)
        if self.merge is not None:
            self.merge(self.recipe.units * self.recipe.plan.rows, block)
        self.direct.free.append(block)
        return out, lse

    def _elsewhere(
        self, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], prior: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """The same call when it is aligned otherwise, or another device is current."""
        problem = self.recipe.problem
        count = len(problem.spec.leaves)
        named: dict[str, Any] = dict(zip(problem.tensor_names, extra[count:], strict=True))
        inputs = replace(self.others, q=q, k=k, v=v, leaves=tuple(extra[:count]), **named)
        return forward(problem, inputs, prior)  # type: ignore[return-value]
