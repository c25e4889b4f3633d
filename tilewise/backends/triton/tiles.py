"""Tile sizes, warps and stages of the forward kernel, and how many ways the keys are split.

A choice depends on types, head dimensions, the spec, the shape and the machine, never on a run. A table of measured
choices is asked first (`tilewise.tuning`); the heuristic takes what fits the device's shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise import tuning
from tilewise.backends.triton.holes import split_holes
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.backends.triton.machine import Machine
    from tilewise.problem import Problem

FEWEST_KEYS = 256
"""Keys of a split, at least."""
MOST_ABREAST = 4
"""Heads whose row tiles run side by side, at most. Source: H200, N = 16384, bfloat16, TFLOP/s with 1, 2, 4 and 8:
D = 128 full 537, 542, 538 and 507, causal 515, 517, 519 and 516; D = 64 full 488, 481, 488 and 481; D = 256 full 546,
548, 553 and 554, causal 518, 534, 538 and 538; benchmarks/results/gpu_triton_forward.jsonl."""
CACHE_SHARE = 4
"""Where the keys of the most heads abreast are more than twice the shared cache, only as many run abreast as keep
theirs in this part of it. On an H200 (60 MiB) 128 MiB of keys were read 268 times from memory; source:
benchmarks/results/counters.jsonl. Below that the tiles' order stays as it was timed."""
LASTING_KEYS = 1024
"""Keys from which the loops with two products under way are taken: they form one more than others."""
MOST_OF_THREE = 168
"""Registers of a thread that let three programs of 128 threads share a multiprocessor of Hopper's."""
INVARIANT_KEYS = 1024
"""Keys of a split under batch_invariant, where the number of splits follows from a sequence's own length."""


class Tiles(NamedTuple):
    """A choice. packed: the rows of a tile are those of a whole group of query heads. registers: the most of a thread,
    0 where the compiler decides. For calls that read keys by descriptors: loop, "plain", "held" (plain, with q in
    registers), "ahead" or "behind", what runs beside the softmax (`ahead_kernel`); parts, lazy: how maxima and sums are
    formed, and when pivots move (`softmax_words`)."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    packed: bool = False
    registers: int = 0
    loop: str = "plain"
    parts: bool = False
    lazy: bool = False


def padded(size: int) -> int:
    """The constant that holds a head dimension: the next power of two, at least 16."""
    return max(16, 1 << max(size - 1, 0).bit_length())


def rows_per_sequence(problem: Problem) -> int:
    """Query rows of a sequence: stated when dense, the mean when packed."""
    s = problem.shape
    if problem.options.layout == "dense":
        return s.seqlen_q
    return -(-s.seqlen_q // max(s.batch, 1))


def keys_per_sequence(problem: Problem) -> int:
    """Keys of a sequence: stated when dense, the mean when packed."""
    s = problem.shape
    return s.seqlen_k if problem.options.layout == "dense" else -(-s.seqlen_k // max(s.batch, 1))


def choose(problem: Problem, machine: Machine, vectors: bool = True, pairs: int | None = None) -> Tiles:
    """The tiles of the forward kernel; vectors: whether rows of q, k and v can be read by 16 bytes; pairs: bytes of
    leaves for each pair, None where only the spec is known."""
    d, dv = padded(problem.shape.head_dim), padded(problem.shape.head_dim_v)
    invariant = problem.options.batch_invariant and problem.options.layout == "varlen"
    rows = 1 << 30 if invariant else rows_per_sequence(problem)
    group = problem.group
    packed = group > 1 and rows <= 32 and group <= 64
    rows = rows * group if packed else rows
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    if not vectors or (not problem.options.batch_invariant and _idle(problem, rows, machine)):
        # Without 16-byte loads there is no pipelining, and Triton 3.6 gets tall products wrong there (see CARE_M).
        block_m = min(block_m, 32)
    measured = tuning.lookup(machine.name, "triton.forward", table_key(problem)) if block_m == 128 else None
    if measured:
        found = Tiles(*measured)
    elif problem.dtype == torch.float32 or (machine.kind == "cuda" and machine.arch < 80):
        found = _ordinary(d, dv, block_m)
    else:
        pairs = 2 * (_reads(problem) > 1) if pairs is None else pairs
        found = _narrow(problem, d, dv, block_m, machine, pairs)
    found = fit(found._replace(packed=packed), d, dv, problem.dtype.itemsize, machine)
    # The jump over products is written for 16 rows a warp.
    return found._replace(lazy=found.lazy and found.block_m == 16 * found.warps)


def table_key(problem: Problem) -> str:
    """What a measured choice depends on, as the key of a tuning table."""
    s = problem.shape
    bits = 8 * problem.dtype.itemsize
    masked = "masked" if problem.spec.keep is not None else "full"
    terms = "-terms" if problem.spec.score is not None else ""
    dropout = "-dropout" if problem.spec.dropout else ""
    return f"{bits}-d{padded(s.head_dim)}-{padded(s.head_dim_v)}-{masked}{terms}{dropout}"


def _ordinary(d: int, dv: int, block_m: int) -> Tiles:
    """float32, and any type before compute capability 8.0: Triton forms the products on the ordinary units, so tiles
    are small enough for their registers."""
    size = 16 if max(d, dv) > 128 else 32
    return Tiles(min(block_m, size), size, 4, 2)


def _narrow(problem: Problem, d: int, dv: int, block_m: int, machine: Machine, pairs: int) -> Tiles:
    """float16 and bfloat16; pairs: bytes of leaves for each pair. Source: sweeps on an H200 (block_m x block_n, warps,
    stages at N = 16384)."""
    widest = max(d, dv)
    plain = problem.spec.keep is None and problem.spec.score is None and not problem.spec.dropout
    # Their last tile is not loaded ahead, which Triton 3.6 gets wrong at some sizes (D = 64 with values of 32): these
    # loops are for those that were compared on the card.
    hopper, lasting = machine.arch == 90, plain and d == dv and keys_per_sequence(problem) >= LASTING_KEYS
    # Dropout's words leave no room for the weights until their sum. Rows that see few tiles move their pivots in most:
    # 203 instead of 193 TFLOP/s under documents of about 1024, where causal gives 541 instead of 507. Holes, which
    # every tile applies, count as none.
    parts = hopper and not problem.spec.dropout
    roots = [split_holes(problem.spec.keep)[0]] if problem.spec.keep is not None else []
    kinds = {node.op for node in ex.topological(*roots)}
    lazy = parts and not kinds & {"load", "mod"}
    if block_m <= 32:
        # Decoding reads keys once: long tiles and many warps keep the most bytes in flight.
        return (
            Tiles(block_m, 128, 8 if block_m == 16 else 4, 3) if widest <= 128 else Tiles(block_m, 32, 4, 3)
        )
    if widest > 256:
        return Tiles(min(block_m, 64), 32, 8, 2)
    if widest > 128:
        return Tiles(
            block_m, 64 if machine.arch >= 90 else 32, 8 if block_m == 128 else 4, 2, parts=parts, lazy=lazy
        )
    if machine.arch < 90:
        return Tiles(block_m, 64, 8 if block_m == 128 and widest > 64 else 4, 3)
    if widest > 64:
        # Two programs of 64 rows share a multiprocessor, and one computes while the other waits; with three stages
        # they fit exactly, so there are two where dropout's words pass through shared memory. Where a leaf's element
        # of two bytes for each pair does, q in registers leaves its own to it (400 instead of 350); elsewhere products
        # read half of what they did from shared memory: causal 570 instead of 542, windows 357 and 337, ALiBi 494 and
        # 453, documents, which find their pivots moving, the same as before. Where nothing is hidden, scores are formed
        # ahead: 600; under masks and with terms a branch inside that loop costs more than it gives.
        held = parts if pairs == 2 else lazy and not pairs
        loop = "ahead" if hopper and lasting else "held" if held else "plain"
        stages = 2 if problem.spec.dropout or (pairs and loop != "held") else 3
        return Tiles(min(block_m, 64), 64, 4, stages, loop=loop, parts=parts, lazy=lazy)
    if _reads(problem):
        # A line with an element for each thread gets a layout of its own, and then Triton 3.6 moves the scores to it.
        return Tiles(min(block_m, 64), 64, 4, 3)
    if hopper and problem.spec.score is None and not problem.spec.dropout:
        # Three programs to a multiprocessor: under a mask they need the limit of registers (460 instead of 430), and
        # have no room for pivots that stay. Where nothing is hidden, weights are multiplied behind (515, and 485).
        loop = "behind" if lasting else "plain"
        return Tiles(
            min(block_m, 64), 128, 4, 2, registers=0 if plain else MOST_OF_THREE, loop=loop, parts=lasting
        )
    return Tiles(min(block_m, 64), 128, 4, 2 if plain else 3)


def _reads(problem: Problem) -> int:
    """Indices that move within a tile, of the leaf that has most of them: 2 for an element per pair, 1 for a line."""
    roots = [root for root in (problem.spec.keep, problem.spec.score) if root is not None]
    moving = (sum(bool(ex.variables(a) & set("ijqk")) for a in site.args) for site in ex.loads(*roots))
    return max(moving, default=0)


def adds_to_scores(problem: Problem) -> bool:
    """Whether scores are the scaled products and something that does not depend on them, in a half type."""
    root = problem.spec.score
    if root is None or root.op not in ("add", "sub") or problem.dtype.itemsize != 2:
        return False
    sides = root.args if root.op == "add" else root.args[:1]
    at = [n for n, side in enumerate(sides) if side.op == "var" and side.value == "s"]
    return len(at) == 1 and "s" not in ex.variables(root.args[1 - at[0]])


def _idle(problem: Problem, rows: int, machine: Machine) -> bool:
    """Whether tiles of 64 rows would leave half of the machine without one."""
    s = problem.shape
    return 2 * max(s.batch, 1) * s.num_heads_q * -(-rows // 64) <= machine.sms


def shared_bytes(tiles: Tiles, d: int, dv: int, itemsize: int) -> int:
    """Shared memory of a program: q, and `stages` of k and v."""
    return itemsize * (tiles.block_m * d + tiles.stages * tiles.block_n * (d + dv))


def fit(tiles: Tiles, d: int, dv: int, itemsize: int, machine: Machine) -> Tiles:
    """The tiles, made smaller until they fit the machine's shared memory."""
    while shared_bytes(tiles, d, dv, itemsize) > machine.shared:
        if tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        elif tiles.block_n > 32:
            tiles = tiles._replace(block_n=tiles.block_n // 2)
        elif tiles.block_m > 16:
            tiles = tiles._replace(block_m=tiles.block_m // 2)
        elif tiles.stages > 1:
            tiles = tiles._replace(stages=1)
        elif tiles.block_n > 16:
            tiles = tiles._replace(block_n=tiles.block_n // 2)
        else:
            break
    return tiles


def row_tiles(problem: Problem, tiles: Tiles) -> int:
    """Tiles of rows of one head (of one batch entry when dense, of all packed sequences otherwise)."""
    s = problem.shape
    if problem.options.layout == "varlen":
        tokens = tiles.block_m // problem.group if tiles.packed else tiles.block_m
        return s.seqlen_q // tokens + s.batch
    rows = s.seqlen_q * (problem.group if tiles.packed else 1)
    return -(-rows // tiles.block_m)


def splits_of(problem: Problem, tiles: Tiles, machine: Machine) -> tuple[int, int]:
    """(number of splits of the keys, tiles of a split or 0 where each sequence divides its own keys evenly)."""
    s, keys = problem.shape, keys_per_sequence(problem)
    heads = s.num_heads_kv if tiles.packed else s.num_heads_q
    if problem.options.batch_invariant:
        if problem.options.layout == "varlen" or s.seqlen_q > 64 or keys <= INVARIANT_KEYS:
            return 1, 0
        each = INVARIANT_KEYS // tiles.block_n
        return -(-keys // (each * tiles.block_n)), each
    rows = rows_per_sequence(problem) * (problem.group if tiles.packed else 1)
    programs = max(s.batch * heads * -(-rows // tiles.block_m), 1)
    if programs >= machine.sms:
        return 1, 0
    wanted = machine.sms // programs
    return max(1, min(wanted, keys // max(FEWEST_KEYS, tiles.block_n))), 0


def heads_abreast(problem: Problem, tiles: Tiles, machine: Machine) -> int:
    """Query heads (KV heads where tiles are packed) whose row tiles run side by side: fewer where rows are so long that
    the shared cache could not hold their keys."""
    s = problem.shape
    if tiles.loop == "held" and _reads(problem) > 1:
        return 1  # 409 instead of 398: what is read once for each pair takes the shared cache from other heads' keys
    keys = keys_per_sequence(problem) * (s.head_dim + s.head_dim_v) * problem.dtype.itemsize
    sharing = 1 if tiles.packed else max(problem.group, 1)
    if not machine.cache or MOST_ABREAST * keys <= 2 * machine.cache * sharing:
        return MOST_ABREAST
    return max(1, min(MOST_ABREAST, machine.cache // CACHE_SHARE * sharing // max(keys, 1)))
