"""How a call on a cache, or a decode call, runs: rows and keys of a tile, warps, stages, splits of the keys.

A plan follows from types, head dimensions, the capacity of the cache, the batch and the machine; never from lengths
or from a run. So a captured call goes on being right, and quick, while its sequences grow.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.backends.protocol import Reason, Schedule
from tilewise.backends.triton.tiles import padded

if TYPE_CHECKING:
    from tilewise.backends.triton.machine import Machine
    from tilewise.problem import Problem

MOST_ROWS = 64
"""Query rows times heads of a group that share one reading of the keys."""
FEWEST_KEYS = 256
"""Keys of a split, at least."""
MOST_WAVES = 8
"""Splits, at most, of calls that fill the machine by themselves."""
MOST_SPLITS = 128
"""Beyond them the merge, which one program does, takes as long as the keys."""
GOOD_SHARE = 0.98
"""Of the best share of busy programs, what fewer splits have to reach."""
LONG_KEYS = 1024
"""Keys from which a program hides its beginning and its end."""
INVARIANT_KEYS = 1024
"""Keys of a split under batch_invariant, counted in each sequence from its own first key."""
OVERLAP = 90
"""Compute capability from which a launch begins while the one before it ends: there a launch of its own merges."""
MERGED_LATER = 4096
"""Numbers of the splits' results that a program of that launch, one warp, loads at once, at most."""
MERGED_ELEMENTS = 1024
"""Numbers of the splits' results that a warp loads at once."""
MOST_MERGED = 8
MOST_MERGED_ROWS = 64
MOST_GROUP = 128
"""Query heads for each KV head of a packed call: a tile of rows holds at least one query row of all of them."""
CARE_M = 32
"""`launch_forward.CARE_M`: the tallest tile that is done again inside its own kernel."""
GROUPED = (16, 32, 64)
"""Page sizes for which kernels are compiled, which find rows page by page and not key by key. Others are numbers of a
call."""
MOST_PAGES = 8
"""Pages of a tile, at most, whose entries are read one by one."""
FEW_TILES = 4
"""Tiles of a program up to which its beginning counts for more than a turn of its loop."""
MANY = 3.5
"""Units for each multiprocessor from which it is busier with four small programs than with two."""
SHORT_KEYS = 128
"""Keys of a sequence up to which a program waits for its own instructions: it has two warps."""
FEW_PAGES_KEYS = 2048
"""Keys of a sequence up to which four programs of two warps read small pages faster."""


class DecodePlan(NamedTuple):
    """block_m x block_n tiles; splits of the keys, of split_tiles tiles each (0: evenly); rows: query rows times
    heads in a tile, as a power of two; row_tiles: tiles of a KV head; merged: splits loaded at once when they are
    merged; each: states of a tile, one for each warp, or 1; care, merge and evict: constants of the kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int
    split_tiles: int
    rows: int
    row_tiles: int
    merged: int
    each: int = 1
    care: str = "none"
    merge: str = "here"
    evict: str = "evict_first"

    def parts(self, units: int) -> int:
        """Results that are merged, at most, of `rows` lines each; 0 where every program has a whole one."""
        return units * self.splits if self.splits > 1 else 0


def is_decoding(problem: Problem) -> bool:
    """Whether a call on plain tensors has so few rows for each sequence that reading the keys is the work."""
    s, options = problem.shape, problem.options
    if options.layout != "dense" or problem.spec.dropout or not problem.group or s.seqlen_q <= 0:
        return False
    if s.seqlen_q > 1 and s.seqlen_k <= FEWEST_KEYS:
        return False  # neither kernel has anything to split, and the other one's calls are prepared for
    rows = s.seqlen_q * problem.group
    return (rows <= MOST_ROWS or s.seqlen_q == 1) and s.seqlen_k >= 1 and s.head_dim > 0 < s.head_dim_v


def last_row_sees_all(problem: Problem) -> bool:
    """Whether the mask hides nothing of the one row of a sequence, where that row lines up with the last key."""
    return problem.shape.seqlen_q == 1 and problem.spec.hides_later_keys_alone


def reasons_against(problem: Problem) -> list[Reason]:
    """Why a call on pools of pages is not for the decode kernel."""
    reasons = []
    if problem.spec.dropout:
        remedy = "Dropout over caches runs on 'blockwise'."
        reasons.append(Reason("no dropout over caches", "dropout", "none", remedy))
    most = MOST_GROUP if problem.kv_dtype == problem.dtype != torch.float32 else CARE_M
    if problem.options.layout == "varlen" and problem.group > most:
        rule = "query heads for each KV head of packed calls over caches"
        reasons.append(Reason(rule, f"{problem.group}", f"at most {most}", "Give q as (B, H, N, D)."))
    if problem.kv_dtype != problem.dtype:
        allowed = "q's, or float8_e4m3fn with q in float16 or bfloat16"
        name = str(problem.kv_dtype).removeprefix("torch.")
        if problem.kv_dtype != torch.float8_e4m3fn or problem.dtype == torch.float32:
            reasons.append(Reason("element type of the cache", name, allowed))
        elif _lacks_float8(problem):
            reasons.append(Reason("float8_e4m3fn needs compute capability 8.9", name, "q's element type"))
    return reasons


def _lacks_float8(problem: Problem) -> bool:
    if problem.device_type != "cuda" or not torch.cuda.is_available():
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability() < (8, 9)


def schedule(problem: Problem, machine: Machine) -> Schedule:
    """The plan as `explain` prints it."""
    plan = plan_of(problem, machine)
    lines = plan.parts(units_of(problem, plan)) * plan.rows
    workspace = 4 * lines * (padded(problem.shape.head_dim_v) + 2)
    notes = ["rows of a tile are those of a group of heads"] if problem.group > 1 else []
    if problem.options.pages:
        notes.append("gradients come from blockwise")
    return Schedule(
        plan.block_m, plan.block_n, "splits of the keys in parallel, keys inner", plan.splits, workspace,
        notes=tuple(notes),
    )  # fmt: skip


def units_of(problem: Problem, plan: DecodePlan) -> int:
    """Row tiles of all KV heads of all sequences."""
    s = problem.shape
    batch = 1 if problem.options.layout == "varlen" else s.batch
    return batch * s.num_heads_kv * plan.row_tiles


@functools.lru_cache(maxsize=4096)
def plan_of(
    problem: Problem,
    machine: Machine,
    vectors: bool = True,
    masked: bool | None = None,
) -> DecodePlan:
    """The plan of a call on a cache, or a decode call; vectors: whether rows of k and v can be read by 16 bytes;
    masked: whether the mask may hide something (None: by its spec, without offsets)."""
    if masked is None:
        masked = problem.spec.keep is not None and not last_row_sees_all(problem)
    s, varlen = problem.shape, problem.options.layout == "varlen"
    group = max(problem.group, 1)
    block_m = _block_m(problem, machine, vectors)
    every = s.seqlen_q * group
    row_tiles = s.seqlen_q // max(block_m // group, 1) + s.batch if varlen else -(-every // block_m)
    rows = block_m if row_tiles > 1 or varlen else 1 << max(every - 1, 0).bit_length()
    batch = 1 if varlen else s.batch
    units = max(batch * s.num_heads_kv * row_tiles, 1)
    block_n, warps, stages, each, resident = _tiles(problem, masked, block_m, units, machine)
    splits, split_tiles = splits_of(problem, block_n, units, resident * machine.sms)
    hides = masked or problem.spec.score is not None
    care = "none" if not hides else "inline" if block_m <= CARE_M else "flag"
    overlap = machine.kind == "cuda" and machine.arch >= OVERLAP
    merge = "later" if care == "flag" or rows > MOST_MERGED_ROWS or overlap else "here"
    # The sum of results depends on how many are added at once: invariant calls add as many for any rows.
    tallest = MOST_MERGED_ROWS if problem.options.batch_invariant and not overlap else rows
    merged = max(1, min(MOST_MERGED, MERGED_ELEMENTS * warps // (tallest * padded(s.head_dim_v))))
    if overlap or (merge == "later" and not problem.options.batch_invariant):
        merged = max(MERGED_LATER // padded(s.head_dim_v), 1)
        if not problem.options.batch_invariant:
            merged = min(merged, 1 << (splits - 1).bit_length())
    # Beyond a split's own tiles there is nothing to have under way, and less room lets more programs stay at once.
    stages = max(2, min(stages, -(-s.seqlen_k // (splits * block_n)) + 1))
    plan = DecodePlan(
        block_m, block_n, warps, stages, splits, split_tiles, rows, row_tiles, merged, each, care,
        merge if splits > 1 else "none",
    )  # fmt: skip
    return plan


def _block_m(problem: Problem, machine: Machine, vectors: bool) -> int:
    """Rows of a tile: 32 at most where few rows share one reading of the keys, where products are slow, and where keys
    do not come straight from memory into the products (see `launch_forward.CARE_M`)."""
    s, group = problem.shape, max(problem.group, 1)
    invariant = problem.options.batch_invariant and problem.options.layout == "varlen"
    rows = s.seqlen_q if problem.options.layout == "dense" else -(-s.seqlen_q // max(s.batch, 1))
    every = rows * group
    least = 16 if group <= 16 else 32 if group <= 32 else 64 if group <= 64 else 128
    slow = problem.dtype == torch.float32 or (machine.kind == "cuda" and machine.arch < 80)
    slow = slow or not vectors or problem.kv_dtype != problem.dtype
    if every <= MOST_ROWS and not invariant:
        found = 16 if every <= 16 else 32
    else:
        found = 32 if max(s.head_dim, s.head_dim_v) > 256 else 64 if every <= 256 and not invariant else 128
    found = min(found, 32) if slow else found
    return max(found, least) if problem.options.layout == "varlen" else found


def _tiles(
    problem: Problem, masked: bool, block_m: int, units: int, machine: Machine
) -> tuple[int, int, int, int, int]:
    """(keys of a tile, warps, stages, states, programs that a multiprocessor is to hold).

    Source: sweeps on an H200 over seven shapes of caches, the best of each in benchmarks/results/serving.jsonl.
    """
    d, dv = padded(problem.shape.head_dim), padded(problem.shape.head_dim_v)
    each, resident = 1, 2
    if problem.dtype == torch.float32 or (machine.kind == "cuda" and machine.arch < 80):
        block_n, warps, stages = 16 if max(d, dv) > 128 else 32, 4, 2
    elif max(d, dv) > 128:
        block_n, warps, stages = 32, 8 if block_m > 64 else 4, 3
    elif block_m > CARE_M:
        block_n, warps, stages = 64, 8 if block_m > 64 else 4, 3
    elif _alone(problem, masked, block_m, units, machine) and (own := _of_one(problem)) is not None:
        block_n, warps, stages, each = own
        resident = 1
    elif problem.kv_dtype.itemsize == 1:
        block_n, warps, stages, resident = 64, 4, 4, 4
    elif _plain(problem, masked, block_m) and (many := _many(problem, units, machine)) is not None:
        block_n, warps, stages, resident = many
    else:
        # Programs that share a multiprocessor read pages faster with less under way, one by itself with more.
        shared = units * (problem.shape.seqlen_k // FEWEST_KEYS) > machine.sms
        few = units <= machine.sms and (block_m > 16 or (_in_pages(problem) and shared))
        block_n, warps, stages = 64, 4, 3 if few or problem.options.batch_invariant else 4
    size = problem.kv_dtype.itemsize
    while problem.dtype.itemsize * block_m * d + stages * block_n * (d + dv) * size > machine.shared:
        if stages > 2:
            stages -= 1
        elif block_n > 16:
            block_n //= 2
        else:
            break
    return block_n, warps, stages, each if block_n >= 16 * warps else 1, resident


def _plain(problem: Problem, masked: bool, block_m: int) -> bool:
    """Whether 16 rows at most read keys of 128 numbers of two bytes, and nothing is hidden or added."""
    s = problem.shape
    if block_m > 16 or masked or problem.spec.score is not None or problem.options.batch_invariant:
        return False
    return padded(s.head_dim) == padded(s.head_dim_v) == 128 and problem.kv_dtype == problem.dtype


def _many(problem: Problem, units: int, machine: Machine) -> tuple[int, int, int, int] | None:
    """(keys of a tile, warps, stages, programs of a multiprocessor) of plain calls that have many programs without
    splits; None for others."""
    keys = problem.shape.seqlen_k
    if units < MANY * machine.sms:
        return None
    if keys <= SHORT_KEYS:
        return 32, 2, 2, 4
    if not _in_pages(problem) or problem.page_size % 64 == 0:
        return 64, 4, 2, 4
    return (32, 2, 4, 4) if keys <= FEW_PAGES_KEYS else None


def _in_pages(problem: Problem) -> bool:
    """Whether a sequence is several pages."""
    return problem.options.pages and problem.shape.seqlen_k != problem.page_size


def _alone(problem: Problem, masked: bool, block_m: int, units: int, machine: Machine) -> bool:
    """Whether one program for each multiprocessor may be best: 16 rows at most without masks, long runs of keys."""
    if block_m > 16 or problem.options.batch_invariant or problem.kv_dtype != problem.dtype:
        return False
    if masked or problem.spec.score is not None or units > machine.sms:
        return False
    return problem.shape.seqlen_k // (machine.sms // units) >= LONG_KEYS


def _of_one(problem: Problem) -> tuple[int, int, int, int] | None:
    """(keys of a tile, warps, stages, states) of a program that reads all that its multiprocessor can; None where two
    programs read faster."""
    s = problem.shape
    rows = s.seqlen_q * problem.group
    wide = padded(s.head_dim) == padded(s.head_dim_v) == 128
    if rows > 8:
        # What every warp would keep of so many rows, and merge at the end, costs more than waiting for each other.
        return (128, 4, 3, 1) if wide else None
    if _in_pages(problem):
        small = problem.page_size % 64 != 0
        if (rows > 4 and (small or not wide)) or (small and not (wide and problem.page_size in GROUPED)):
            return None
    # Of narrow heads, its warps must not wait for each other.
    return (128, 8, 3, 1) if wide else (64, 4, 4, 4)


def paging(problem: Problem, plan: DecodePlan) -> str | int:
    """How columns become rows of the pools; see `pages`."""
    size = problem.page_size
    if not _in_pages(problem):
        return "whole"
    whole = plan.block_n % size == 0 and plan.block_n // size <= MOST_PAGES
    if size in GROUPED and whole and plan.each == 1 and problem.kv_dtype == problem.dtype:
        return -size if size == 16 and _begins(problem, plan) else size
    if size % plan.block_n == 0:
        return "tile"
    return "shift" if size & (size - 1) == 0 else "divide"


def _begins(problem: Problem, plan: DecodePlan) -> bool:
    """Whether a program has so few tiles that its beginning counts for more than a turn of its loop, and the table of
    pages is made of whole tiles.

    Source: an H200 over (1, 32, 8, 8192) and (8, 32, 8, 2048), benchmarks/results/serving.jsonl, 2026-11-30 14:42.
    """
    keys, size = problem.shape.seqlen_k, plan.block_n
    return plan.block_m <= 16 and size == 64 and keys <= FEW_TILES * plan.splits * size and keys % size == 0


def reciprocal(n: int) -> int:
    """Of a number n > 1: the upper 32 bits of its product with x are x // n, where x * n < 2**32.

    Source: Warren, Hacker's Delight, 2nd ed., 10-9: the product is too large by less than x * n / 2**32.
    """
    return -(-(2**32) // max(n, 2))


def divides_quickly(problem: Problem, plan: DecodePlan) -> bool:
    """Whether a head has one tile of rows, and all numbers that a program divides are small enough for `reciprocal`."""
    s = problem.shape
    units = units_of(problem, plan) * s.num_heads_kv
    tiles = (s.seqlen_k // plan.block_n + 1 + plan.splits) * plan.splits
    return plan.row_tiles == 1 and max(units, tiles, plan.block_m * max(problem.group, 1)) < 2**32


def splits_of(problem: Problem, block_n: int, units: int, slots: int) -> tuple[int, int]:
    """(splits of the keys, tiles of a split or 0 where a sequence divides its keys evenly); slots: programs that the
    machine holds at once, of which the fewest splits are to leave few without work."""
    keys = problem.shape.seqlen_k
    if problem.options.batch_invariant:
        return max(1, -(-keys // INVARIANT_KEYS)), INVARIANT_KEYS // block_n
    most = max(1, min(keys // FEWEST_KEYS, max(slots // units, MOST_WAVES), MOST_SPLITS))
    busy = [units * n / (-(-units * n // slots) * slots) for n in range(1, most + 1)]
    return next(n for n, share in enumerate(busy, 1) if share >= GOOD_SHARE * max(busy)), 0
