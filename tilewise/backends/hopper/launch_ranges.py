"""The launch of `range_kernel`: where the keys of each tile of rows lie, for masks that read tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends.hopper import tiles as choice
from tilewise.backends.hopper.compile import GluonLauncher
from tilewise.backends.hopper.source import module_of
from tilewise.backends.triton import launch_forward as low
from tilewise.backends.triton.compile import POINTERS, Build
from tilewise.backends.triton.source import Entry, argument_types
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.backends.hopper.tiles import Tiles
    from tilewise.backends.triton.layout import Slots
    from tilewise.problem import Inputs, Problem

TEMPLATE = "tilewise.backends.hopper.range_kernel"
RANGES = Entry(
    "ranges", TEMPLATE, "ranges_program",
    (
        "range_ptr", "q_offset_ptr", "k_offset_ptr", "heads", "group", "seqlen_q", "seqlen_k", "row_tiles", "q_offset",
        "k_offset",
    ),
    (), ("NWG", "BN", "PACK", "Q_OFFSET", "K_OFFSET"),
)  # fmt: skip
RECORD = 40
"""`forward_place.RECORD`, which cannot be imported without Triton."""
_launchers: dict[tuple[object, ...], GluonLauncher] = {}


class Ranges(NamedTuple):
    """A launch: its launcher, the numbers that calls of a kind share, programs, and elements between two heads."""

    run: GluonLauncher
    numbers: tuple[int, ...]
    programs: int
    batch_step: int
    head_step: int

    def __call__(self, inputs: Inputs, data: list[object]) -> Tensor:
        """What was found for a call, (units, row tiles, RECORD) int32."""
        found = torch.empty(RECORD * self.programs, dtype=torch.int32, device=inputs.q.device)
        offsets = [t if torch.is_tensor(t) else None for t in (inputs.q_offset, inputs.k_offset)]
        given = [low._number(t) for t in (inputs.q_offset, inputs.k_offset)]
        self.run(self.programs, [found, *offsets, *self.numbers, *given, *data])
        return found


def wanted(problem: Problem, slots: Slots, tiles: Tiles) -> bool:
    """Whether calls are worth a look before: the mask reads tensors along rows or columns, of long dense batches."""
    long = problem.shape.seqlen_k > choice.MANY * tiles.block_n
    return long and bool(slots.tables) and problem.options.layout == "dense"


def make_ranges(
    problem: Problem,
    inputs: Inputs,
    slots: Slots,
    tiles: Tiles,
    pack: int,
    row_tiles: int,
    kinds: tuple[str, str],
) -> Ranges:
    """The launch for calls of a kind; kinds: those of the offsets of q and k."""
    s = problem.shape
    apart = bool(ex.variables(problem.spec.keep) & {"h", "g"})
    units = s.num_heads_kv if pack > 1 else s.num_heads_q
    heads = units if apart else 1
    constants = (
        ("NWG", tiles.warpgroups), ("BN", tiles.block_n), ("PACK", pack), ("Q_OFFSET", kinds[0]),
        ("K_OFFSET", kinds[1]),
    )  # fmt: skip
    build = Build(ranges_types(problem, inputs, slots), (), constants, 4, 1)
    device = inputs.q.get_device()
    key = (problem.spec.text, slots, build, device)
    if key not in _launchers:
        module = module_of(problem.spec, slots, TEMPLATE, (RANGES,))
        _launchers[key] = GluonLauncher(module.ranges, build, device)
    numbers = (heads, max(problem.group, 1), s.seqlen_q, s.seqlen_k, row_tiles)
    step = RECORD * row_tiles
    return Ranges(_launchers[key], numbers, s.batch * heads * row_tiles, heads * step, step if apart else 0)


def ranges_types(problem: Problem, inputs: Inputs, slots: Slots) -> tuple[str, ...]:
    """Types of the kernel's arguments."""
    kinds = argument_types(RANGES, slots)
    found = ["*i32"]
    for t in (inputs.q_offset, inputs.k_offset):
        found.append(POINTERS[t.dtype] if isinstance(t, torch.Tensor) else "constexpr")
    found += ["i32"] * (len(RANGES.arguments) - 3)
    leaves = iter(inputs.leaves)
    for name in slots.names:
        if name[0] == "L" and name[1:].isdigit():
            found.append(POINTERS[next(leaves).dtype])
        else:
            found.append("*i32" if name[0] == "T" else kinds[name])
    return tuple(found)
