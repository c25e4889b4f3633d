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
INVARIANT_KEYS = 1024
"""Keys of a split under batch_invariant, counted in each sequence from its own first key."""
MERGED_ELEMENTS = 2048
"""Numbers of the splits' results that a warp loads at once, 64 registers of a thread."""
MOST_MERGED = 16
MOST_MERGED_ROWS = 64
MOST_GROUP = 128
"""Query heads for each KV head of a packed call: a tile of rows holds at least one query row of all of them."""
CARE_M = 32
"""`launch_forward.CARE_M`: the tallest tile that is done again inside its own kernel."""


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


def is_decoding(problem: Problem) -> bool:
    """Whether a call on plain tensors has so few rows for each sequence that reading the keys is the work."""
    s, options = problem.shape, problem.options
    if options.layout != "dense" or problem.spec.dropout or not problem.group or s.seqlen_q <= 0:
        return False
    rows = s.seqlen_q * problem.group
    return (rows <= MOST_ROWS or s.seqlen_q == 1) and s.seqlen_k >= 1 and s.head_dim > 0 < s.head_dim_v


def reasons_against(problem: Problem) -> list[Reason]:
    """Why a call on pools of pages is not for the decode kernel."""
    reasons = []
    if problem.spec.dropout:
        remedy = "Dropout over caches runs on 'blockwise'."
        reasons.append(Reason("no dropout over caches", "dropout", "none", remedy))
    if problem.options.layout == "varlen" and problem.group > MOST_GROUP:
        rule = "query heads for each KV head of packed calls over caches"
        reasons.append(Reason(rule, f"{problem.group}", f"at most {MOST_GROUP}", "Give q as (B, H, N, D)."))
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
    lines = units_of(problem, plan) * plan.rows * plan.splits
    workspace = 4 * lines * (padded(problem.shape.head_dim_v) + 2) if plan.splits > 1 else 0
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
def plan_of(problem: Problem, machine: Machine) -> DecodePlan:
    """The plan of a call on a cache, or a decode call."""
    s, varlen = problem.shape, problem.options.layout == "varlen"
    d, dv = padded(s.head_dim), padded(s.head_dim_v)
    group = max(problem.group, 1)
    block_m = _block_m(problem, machine)
    every = s.seqlen_q * group
    block_n, warps, stages = _tiles(problem, d, dv, block_m, machine)
    row_tiles = s.seqlen_q // max(block_m // group, 1) + s.batch if varlen else -(-every // block_m)
    rows = block_m if row_tiles > 1 or varlen else 1 << max(every - 1, 0).bit_length()
    splits, split_tiles = splits_of(problem, block_n, row_tiles, machine)
    hides = problem.spec.keep is not None or problem.spec.score is not None
    care = "none" if not hides else "inline" if block_m <= CARE_M else "flag"
    merge = "later" if care == "flag" or rows > MOST_MERGED_ROWS else "here"
    merged = max(1, min(MOST_MERGED, MERGED_ELEMENTS * warps // (rows * dv)))
    each = 1
    return DecodePlan(
        block_m, block_n, warps, stages, splits, split_tiles, rows, row_tiles, merged, each, care, merge
    )


def _block_m(problem: Problem, machine: Machine) -> int:
    """Rows of a tile: 32 at most where few rows share one reading of the keys, and where products are slow."""
    s, group = problem.shape, max(problem.group, 1)
    invariant = problem.options.batch_invariant and problem.options.layout == "varlen"
    rows = s.seqlen_q if problem.options.layout == "dense" else -(-s.seqlen_q // max(s.batch, 1))
    every = rows * group
    least = 16 if group <= 16 else 32 if group <= 32 else 64 if group <= 64 else 128
    slow = problem.dtype == torch.float32 or (machine.kind == "cuda" and machine.arch < 80)
    if every <= MOST_ROWS and not invariant:
        found = 16 if every <= 16 else 32
    else:
        found = 32 if max(s.head_dim, s.head_dim_v) > 256 else 64 if every <= 256 and not invariant else 128
    found = min(found, 32) if slow else found
    return max(found, least) if problem.options.layout == "varlen" else found


def _tiles(problem: Problem, d: int, dv: int, block_m: int, machine: Machine) -> tuple[int, int, int]:
    """(keys of a tile, warps, stages) that fit the machine."""
    size = problem.kv_dtype.itemsize
    if problem.dtype == torch.float32 or (machine.kind == "cuda" and machine.arch < 80):
        block_n, warps, stages = 16 if max(d, dv) > 128 else 32, 4, 2
    elif max(d, dv) <= 128:
        block_n, warps, stages = 64, 8 if block_m > 64 else 4, 3
    else:
        block_n, warps, stages = 32, 8 if block_m > 64 else 4, 3
    while problem.dtype.itemsize * block_m * d + stages * block_n * (d + dv) * size > machine.shared:
        if stages > 2:
            stages -= 1
        elif block_n > 16:
            block_n //= 2
        else:
            break
    return block_n, warps, stages


def splits_of(problem: Problem, block_n: int, row_tiles: int, machine: Machine) -> tuple[int, int]:
    """(splits of the keys, tiles of a split or 0 where a sequence divides its keys evenly)."""
    s = problem.shape
    if problem.options.batch_invariant:
        return max(1, -(-s.seqlen_k // INVARIANT_KEYS)), INVARIANT_KEYS // block_n
    batch = 1 if problem.options.layout == "varlen" else s.batch
    units = max(batch * s.num_heads_kv * row_tiles, 1)
    most = max(1, s.seqlen_k // FEWEST_KEYS)
    return max(1, min(most, 2 * machine.sms // units)), 0
