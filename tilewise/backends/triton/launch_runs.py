"""The launch of `runs_kernel`: where the visible tiles of each tile of keys, and of rows, begin and end.

The backward looks for both (`find_runs`), the forward for those of rows, where a mask reads leaves (`RowRuns`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.triton.backward_entries import RUNS
from tilewise.backends.triton.compile import Build, types_of
from tilewise.backends.triton.launch import Wanted
from tilewise.backends.triton.source import argument_types
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tilewise.backends.triton.launch_backward import Call
    from tilewise.backends.triton.layout import Slots
    from tilewise.backends.triton.tiles import Tiles
    from tilewise.problem import Problem

RUN = 8
"""int32 for each tile; that of `backward_words`."""


class Runs(NamedTuple):
    """The table from the first tile of keys on, and from the first tile of rows on, if there is one; tiles from a
    batch entry to the next, and from a head to the next."""

    keys: Tensor | None = None
    rows: Tensor | None = None
    strides: tuple[int, int] = (0, 0)


NO_RUNS = Runs()
ROW_RUNS = RUNS._replace(name="row_runs", functions=("classify",))
"""For a forward whose FULL tiles go without any part of a mask."""


def find_runs(call: Call, keys: Tiles, rows: Tiles | None) -> Runs:
    """The table of a call whose kernels load ahead, for such tiles of the key kernel and of the row kernel (None: not
    for it); none without a mask, and where kernels look for themselves."""
    keep, s = call.problem.spec.keep, call.problem.shape
    if keep is None or not call.tma:
        return NO_RUNS
    key_tiles = call.blocks(keys.block_n, False)
    row_tiles = 0 if rows is None else call.blocks(rows.block_m, True)
    rows = rows or keys
    apart = bool(ex.variables(keep) & {"h", "g"})
    heads, tiles = s.num_heads_q if apart else 1, key_tiles + row_tiles
    units = heads * (1 if call.varlen else s.batch)
    table = torch.empty(units * tiles * RUN, dtype=torch.int32, device=call.inputs.q.device)
    values = (
        table, *call.places[1:], s.batch, heads, *call.sizes[2:], key_tiles, row_tiles, *call.offsets[:2],
    )  # fmt: skip
    call.launch(
        RUNS, keys._replace(warps=4, stages=1), units * tiles, values, KEYS_M=keys.block_m, KEYS_N=keys.block_n,
        ROWS_M=rows.block_m, ROWS_N=rows.block_n,
    )  # fmt: skip
    return Runs(table, table[RUN * key_tiles :], (heads * tiles, tiles if apart else 0))


# ---- the forward ---------------------------------------------------------------------------------------------


def _heads_apart(problem: Problem) -> int:
    """Heads that the mask tells apart; 1 if it is the same for all."""
    assert problem.spec.keep is not None
    return problem.shape.num_heads_q if ex.variables(problem.spec.keep) & {"h", "g"} else 1


def table_strides(problem: Problem, row_tiles: int) -> tuple[int, int]:
    """Tiles from a batch entry to the next, and from a head to the next, in the forward's table."""
    heads = _heads_apart(problem)
    return heads * row_tiles, row_tiles if heads > 1 else 0


def _values(
    values: Sequence[Any], at: Mapping[str, int], heads: int, table: Tensor, described: int
) -> tuple[object, ...]:
    """The arguments of `runs_kernel` for tiles of rows alone, from the forward kernel's, whose places are `at` and of
    which the last are descriptors of leaves, which no mask reads."""
    return (
        table, *values[at["q_offset_ptr"] : at["used_k_ptr"] + 1], values[at["batch"]], heads,
        *values[at["group"] : at["seqlen_k"] + 1], 0, values[at["row_tiles"]], values[at["q_offset"]],
        values[at["k_offset"]], *values[len(at) : len(values) - described],
    )  # fmt: skip


def aligned_leaves(slots: Slots, first: int) -> tuple[int, ...]:
    """Numbers of the arguments, of which `first` come before the slots', that are leaves at multiples of 16 bytes."""
    pairs = zip(slots.leaf_at, slots.leaves, strict=True)
    return tuple(first + at for at, leaf in pairs if leaf.step > 1)


def wanted_runs(
    problem: Problem, slots: Slots, tiles: Tiles, values: Sequence[Any], at: Mapping[str, int], device: int,
    holed: bool,
) -> Wanted:  # fmt: skip
    """The kernel that looks for the visible tiles of the forward's tiles of rows; holed: FULL ones apply the holes."""
    entry = RUNS if holed else ROW_RUNS
    own = _values(values, at, _heads_apart(problem), values[at["runs_ptr"]], len(slots.described))
    slots = slots._replace(described=())
    names = [a.partition(":")[0] for a in ROW_RUNS.arguments] + list(slots.names)
    aligned = aligned_leaves(slots, len(ROW_RUNS.arguments))
    known: dict[str, object] = {
        "VARLEN": problem.options.layout == "varlen", "LAST": problem.options.q_offset == "last",
        "KEYS_M": tiles.block_m, "KEYS_N": tiles.block_n, "ROWS_M": tiles.block_m, "ROWS_N": tiles.block_n,
    }  # fmt: skip
    build = Build(
        types_of(names, own, argument_types(ROW_RUNS, slots)), aligned,
        tuple((name, known[name]) for name in ROW_RUNS.constants), 4, 1,
    )  # fmt: skip
    return Wanted(problem, slots, entry, build, device, (entry,))


class RowRuns(NamedTuple):
    """The launch before a forward kernel that reads its table. run: the kernel; row_tiles: of a head; described: leaves
    that come by descriptors."""

    run: Any
    problem: Problem
    row_tiles: int
    described: int

    def find(self, values: Sequence[Any], at: Mapping[str, int], device: torch.device) -> Tensor:
        """The table of a call with those arguments of the forward kernel."""
        heads = _heads_apart(self.problem)
        units = heads * (1 if self.problem.options.layout == "varlen" else self.problem.shape.batch)
        table = torch.empty(units * self.row_tiles * RUN, dtype=torch.int32, device=device)
        self.run(units * self.row_tiles, _values(values, at, heads, table, self.described))
        return table
