"""A tile's visible tiles as both passes walk them: PARTIAL ones, FULL ones, PARTIAL ones.

Where a kernel before them (`runs_kernel`) has asked the mask about all tiles, five numbers say it for each; else a
program asks about CHUNK tiles at once and takes the next piece of what it found.
"""

import triton
import triton.language as tl

RUN = tl.constexpr(8)
"""int32 for each tile in the table of `runs_kernel`, of which five are used."""


@triton.jit
def load_runs(ptr, at):
    """(first, full, after, past, simple) of tile `at`, which `runs_kernel` found."""
    ptr += at * RUN
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3), tl.load(ptr + 4)


@triton.jit
def piece_of(kind, t, at, stop):
    """(first, full, after, past): the next PARTIAL, FULL and again PARTIAL tiles from tile `at` on, none between."""
    first = tl.min(tl.where((t >= at) & (kind != 0), t, stop), 0)
    full = tl.min(tl.where((t >= first) & (kind != 1), t, stop), 0)
    after = tl.min(tl.where((t >= full) & (kind != 2), t, stop), 0)
    past = tl.min(tl.where((t >= after) & (kind != 1), t, stop), 0)
    return first, full, after, past
