"""Tensor descriptors of the Hopper forward: how the copy engine sees q, k, v and out, and whether it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.hopper import tiles as choice
from tilewise.backends.hopper.compile import shared_layout
from tilewise.backends.triton.launch import four_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.backends.hopper.launch_forward import Recipe
    from tilewise.backends.hopper.tiles import Tiles
    from tilewise.problem import Inputs, Problem

DESCRIPTORS = ("q_desc", "q_desc2", "k_desc", "k_desc2", "v_desc", "v_desc2", "o_desc", "o_desc2")
ROWS = 64
"""Rows of one warpgroup."""


def blocks_of(tiles: Tiles, pair: tuple[int, int], pack: int) -> dict[str, tuple[int, ...] | None]:
    """The block of each descriptor; None for the second tile of a head dimension that has one."""
    (d0, d1), (e0, e1) = choice.PARTS[pair[0]], choice.PARTS[pair[1]]
    found: dict[str, tuple[int, ...] | None] = {}
    for name, first, second in (("q", d0, d1), ("k", d0, d1), ("v", e0, e1), ("o", e0, e1)):
        rows = (1, 1, ROWS // pack, pack) if name in "qo" else (1, 1, tiles.block_n)
        found[f"{name}_desc"] = (*rows, first)
        found[f"{name}_desc2"] = (*rows, second) if second else None
    return found


def grouped(problem: Problem, t: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of q or out as (batch, KV head, token, head of its group, d)."""
    b, h, n, _ = four_strides(problem, t)
    s, group = problem.shape, max(problem.group, 1)
    batch = 1 if problem.options.layout == "varlen" else s.batch
    shape = [batch, s.num_heads_kv, s.seqlen_q, group, t.shape[-1]]
    return shape, _steps(shape, [b, group * h, n, h, 1])


def keyed(problem: Problem, t: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of k or v as (batch, KV head, token, d)."""
    b, h, n, _ = four_strides(problem, t)
    s = problem.shape
    shape = [1 if problem.options.layout == "varlen" else s.batch, s.num_heads_kv, s.seqlen_k, t.shape[-1]]
    return shape, _steps(shape, [b, h, n, 1])


def _steps(shape: list[int], strides: list[int]) -> list[int]:
    """Strides of which those of dimensions of size 1 are what the hardware takes."""
    return [x if size > 1 else 8 for size, x in zip(shape[:-1], strides[:-1], strict=True)] + [1]


def readable(problem: Problem, tensors: Sequence[Tensor]) -> bool:
    """Whether the copy engine reads these tensors: rows without gaps that begin at multiples of 16 bytes."""
    for t in tensors:
        strides = four_strides(problem, t)
        if t.data_ptr() & 15 or (t.shape[-1] > 1 and strides[3] != 1):
            return False
        shape = t.shape if problem.options.layout == "dense" else (1, t.shape[1], t.shape[0], t.shape[2])
        if any(size > 1 and (x % 8 or x <= 0) for size, x in zip(shape[:-1], strides[:3], strict=True)):
            return False
    return True


def descriptors(recipe: Recipe, inputs: Inputs, out: Tensor) -> list[object]:
    """The call's eight descriptors, in the kernel's order."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    problem, found = recipe.problem, []
    blocks = blocks_of(recipe.tiles, recipe.pair, recipe.pack)
    for name, t in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("o", out)):
        if name == "o" and not recipe.by_tiles:
            return [*found, None, None]
        shape, strides = grouped(problem, t) if name in "qo" else keyed(problem, t)
        for full in (f"{name}_desc", f"{name}_desc2"):
            block = blocks[full]
            layout = None if block is None else shared_layout(t.dtype, block)
            found.append(None if block is None else TensorDescriptor(t, shape, strides, list(block), layout))
    return found
