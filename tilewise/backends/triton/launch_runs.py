"""The launch of `runs_kernel`: where the visible tiles of each tile of keys, and of rows, begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends.triton.backward_entries import RUNS
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.backends.triton.launch_backward import Call
    from tilewise.backends.triton.tiles import Tiles

RUN = 8
"""int32 for each tile; that of `backward_words`."""


class Runs(NamedTuple):
    """The table from the first tile of keys on, and from the first tile of rows on, if there is one; tiles from a
    batch entry to the next, and from a head to the next."""

    keys: Tensor | None = None
    rows: Tensor | None = None
    strides: tuple[int, int] = (0, 0)


NO_RUNS = Runs()


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
