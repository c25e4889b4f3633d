"""From a Problem to a parameter block, its segments and its scratch; and the run.

The number of key splits, the packing of heads into rows and the block sizes are functions of the shape alone
(with batch_invariant, of the sequence's own lengths alone), never of threads, so results repeat bit by bit.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from tilewise.backends.cpu import fold, machine_code, pair_launch, pool
from tilewise.backends.cpu.isa import BLOCK_ROWS, LINE, STRIP, Isa, detect, uses_pairs
from tilewise.backends.cpu.kept_keys import kept_keys
from tilewise.backends.cpu.parameter_block import Block, readable, strides_kv, strides_of
from tilewise.backends.cpu.parameters import DECODE_BLOCK, DECODE_BLOCKS, DECODE_LEAST, LANES, SEGMENT, P
from tilewise.backends.cpu.pieces import Piece
from tilewise.backends.cpu.print_interval import needs_table
from tilewise.backends.cpu.slots import Slots, describe, fill
from tilewise.backends.protocol import Schedule
from tilewise.spec import expression as ex
from tilewise.spec.dropout import keep_threshold
from tilewise.spec.tiles import TileGrid, classify_tiles

if TYPE_CHECKING:
    from tilewise.problem import Inputs, Problem

KEY_BLOCK = 96
"""Keys of a forward block; 64 to 192 are within 5 % (measured). Few, so that neither v nor the weights of one strip
overflow a set of the first-level cache."""
FEWEST_TASKS = 16
SHORTEST_SPLIT = 512
"""A call with fewer than FEWEST_TASKS blocks of rows splits the keys, no finer than SHORTEST_SPLIT."""
ALONE = 200_000
"""Multiply-adds of a call below which waking other threads takes longer than it saves (measured: at 130 000 one thread
and two take equally long)."""
DECODE_ROWS = 16
"""Rows of a KV head, over its group, up to which `decode_kernel` takes a sequence: beyond, lanes over rows are full."""
DECODE_TASKS = 32
"""Wanted tasks of decode: reading is shared by more cores than this needs. Every task begins with keys that nobody
asked for in time: with twice as many, 4096 keys of eight heads took 1 to 4 % longer (measured on Zen 3)."""
CACHE_SPLIT = 2048
"""Most keys of a split of a cache: at a sixteenth of its capacity there are tasks for all threads still, and merging
a part costs less than a hundredth of reading so many keys."""
SHORT_RUN, MOST_TOGETHER = {16: 1 << 15}, 8
"""Bytes of a head in one piece up to which heads go together, by lanes, 1 KiB for others, and the most heads of a task.
Pages of one key of 256 bytes take 0.69 to 0.75 of the time so; with pages of 16 and 64 keys nothing is won, and a tenth
lost to changing heads (measured on Zen 3, at 4096 keys). On Zen 5 pages of 16 take 0.83 of the time, of 64 in bf16 0.83
to 0.89, in fp32 0.96, and pages of 64 KiB a head 1.08."""
FEWEST_EACH = {16: 2}
"""Tasks of a thread that heads in one task must leave, by lanes, 4 for others: 4096 keys in fp32 take 0.92 of the time
with 2 (Zen 5)."""
LEAST_OF_PAIRS = 50_000
"""Multiply-adds that take as long as the smallest task on pairs: q, a group of keys and v are brought into whole tiles
(2 us, measured on Emerald Rapids: eight heads of one row took 35 us on one thread)."""
WAYS = {
    "amx": "the tile registers of AMX",
    "dot": "dot products of pairs",
    "plain": "arithmetic on the halves",
}
FAR = {16: 4096}
"""Bytes between rows from which copying them pays, by lanes; 512 elsewhere: there 7 % at a head size of 128 of eight
heads, 1 to 2 % at one of a head in one piece (measured with AVX2). A first-level cache of 12 ways and not 8 holds what
one product reads of rows half as far apart: with AVX-512 copies of rows 512 to 2048 bytes apart took 5 to 7 % of the
speed, and won 2 to 5 % at 4096 and 8192 (measured on Zen 5)."""
LEAST_READERS = {16: 16}
"""Blocks of rows from which k and v are widened once, before the pass, and not by each, by lanes; 64 elsewhere. With
AVX-512 float16 at N 4096 1.04 to 1.06 times the speed, at 1024 1.02 to 1.03, under a causal mask there 0.97 to 1.01, at
512 0.95 to 0.99; bf16 with AVX2 1.02 at 4096, 0.95 to 0.99 at 1024 (measured on Zen 5)."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def packs(problem: Problem) -> bool:
    """Whether a block's rows are those of a whole group of heads: where one head's would leave lanes idle."""
    rows = problem.shape.seqlen_q
    return problem.group > 1 and problem.options.layout == "dense" and 0 < rows < BLOCK_ROWS


def decode_rows(problem: Problem) -> int:
    """Rows of a sequence up to which lanes over the head serve them better than lanes over the rows; -1: never."""
    s = problem.shape
    return DECODE_ROWS // max(problem.group, 1) if min(s.head_dim, s.head_dim_v) >= detect().lanes else -1


def decode_keys(problem: Problem) -> int:
    """Keys of a sequence from which `decode_kernel` takes few rows: any number where the alternative is products of
    pairs, for which a row and a key become a whole tile; and of a cache, whose keys grow."""
    pairs = uses_pairs(detect(), NAMES.get(problem.dtype, ""))
    return 0 if problem.options.pages else 1 if pairs else DECODE_LEAST


def decodes(problem: Problem, piece: Piece) -> bool:
    """Whether a sequence is one for `decode_kernel`."""
    return piece.rows <= decode_rows(problem) and piece.keys >= decode_keys(problem)


def splits_of(problem: Problem, piece: Piece, decode: bool = False) -> tuple[int, int]:
    """(number of key splits, keys per split) of one segment. Those of a cache have the size that its capacity asks
    for, so that a sequence keeps its splits while it grows."""
    s, pages = problem.shape, problem.options.pages
    packed = decode or packs(problem)
    units = s.num_heads_kv if packed else s.num_heads_q
    rows = piece.rows * (problem.group if packed else 1)
    tasks = units * -(-rows // BLOCK_ROWS) * (1 if problem.options.batch_invariant else max(s.batch, 1))
    wanted = -(-(DECODE_TASKS if decode else FEWEST_TASKS) // max(tasks, 1))
    keys = s.seqlen_k if pages else piece.keys
    splits = max(1, min(wanted, keys // SHORTEST_SPLIT))
    chunk = -(-keys // splits)
    if pages and decode:
        chunk = CACHE_SPLIT if problem.options.batch_invariant else min(chunk, CACHE_SPLIT)
    chunk = max(-(-chunk // fold.TABLE_TILE) * fold.TABLE_TILE, fold.TABLE_TILE)
    return max(1, -(-piece.keys // chunk)), chunk


def together(problem: Problem, inputs: Inputs) -> int:
    """KV heads of a task of decode: several where what one head reads at a stretch is short, a page of its keys or one
    row, and lies beside that of the next head. The bits do not depend on it."""
    s, size = problem.shape, problem.dtype.itemsize
    _, head, row = (n * size for n in strides_kv(problem, inputs.k))
    table = inputs.block_table
    if head < row:
        run = s.head_dim * size
    elif table is not None and table.shape[1] > 1:
        run = problem.page_size * row
    else:
        return 1
    splits, lanes = splits_of(problem, Piece.whole(problem), True)[0], detect().lanes
    tasks, found = max(s.batch, 1) * s.num_heads_kv * splits, 1
    while (
        run <= SHORT_RUN.get(lanes, 1 << 10)
        and s.num_heads_kv % (2 * found) == 0
        and found < MOST_TOGETHER
        and tasks >= FEWEST_EACH.get(lanes, 4) * found * pool.num_threads()
    ):
        found *= 2
    return found


def key_block(problem: Problem, decode: bool) -> int:
    """Keys of a forward block."""
    if decode:
        return DECODE_BLOCKS.get(detect().lanes, DECODE_BLOCK)
    return pair_launch.KEY_BLOCK if uses_pairs(detect(), NAMES.get(problem.dtype, "")) else KEY_BLOCK


def decode_scratch(problem: Problem, heads: int) -> int:
    """Bytes of one thread's scratch of `decode_kernel` for tasks of so many KV heads."""
    lanes, s = detect().lanes, problem.shape
    rows = sum(-(-d // lanes) * lanes for d in (s.head_dim, s.head_dim_v))
    block = key_block(problem, True)
    each = LANES.tile + STRIP * rows * 4 + (block + STRIP) * 4 * STRIP
    return (
        heads * each + (block + STRIP) * 4 * BLOCK_ROWS + 16 * (max(DECODE_BLOCKS.values()) + 64 + 64) + 1024
    )


def scratch_bytes(problem: Problem) -> int:
    """Bytes of one thread's forward scratch."""
    s, block = problem.shape, max(key_block(problem, False), DECODE_BLOCK)
    pairs = uses_pairs(detect(), NAMES.get(problem.dtype, ""))
    least = pair_launch.forward_scratch(problem, block) if pairs else 0
    tiles = (s.head_dim + s.head_dim_v + 2 * block) * BLOCK_ROWS
    wide = block * (max(s.head_dim, s.head_dim_v) + LINE // 4)
    own = kept_keys(problem) * (4 * (s.head_dim + s.head_dim_v) + LINE)
    return max(least, LANES.tile + 4 * (tiles + wide) + 8 * block + 512 + own)


@functools.lru_cache(maxsize=64)
def kernel(isa: Isa, name: str, dtype: str, paged: bool = False) -> int:
    """Address of a worker, compiled at first use. paged: the forward over keys in pages."""

    def make() -> str:
        from tilewise.backends.cpu import backward_kernel as back
        from tilewise.backends.cpu.append_kernel import build_append
        from tilewise.backends.cpu.combine_kernel import build_combine
        from tilewise.backends.cpu.decode_kernel import build_decode
        from tilewise.backends.cpu.forward_kernel import build_forward
        from tilewise.backends.cpu.pair_forward import build_turn
        from tilewise.backends.cpu.widen_kernel import build_widen

        build = {
            "forward": build_forward, "decode": build_decode, "combine": build_combine, "turn": build_turn,
            "widen": build_widen, "backward": back.build_backward, "finish": back.build_finish, "append": build_append,
        }  # fmt: skip
        worker = build_forward(isa, dtype, True) if paged else build[name](isa, dtype)
        return machine_code.numba_text(isa, worker)

    full = f"{name} {dtype} paged" if paged else f"{name} {dtype}"
    return machine_code.load(isa, full, (machine_code.ENTRY,), make)[machine_code.ENTRY]


def turner(isa: Isa, dtype: str) -> str:
    """The worker that brings keys into shape before the pass: see `turned_bytes`."""
    return "turn" if uses_pairs(isa, dtype) else "widen"


def copies(problem: Problem, inputs: Inputs) -> bool:
    """Whether a block's rows are copied before products that read one number of each row in turn: to be widened, or
    because rows that far apart lie in a few sets of the cache."""
    rows = [strides_kv(problem, t)[2] * t.element_size() for t in (inputs.k, inputs.v)]
    far = FAR.get(detect().lanes, 512)
    return problem.dtype != torch.float32 or any(row >= far and row % (4 * LINE) == 0 for row in rows)


def common(block: Block, problem: Problem, inputs: Inputs) -> None:
    """What both passes read: inputs, sizes, scale, sink, dropout."""
    s = problem.shape
    q, k, v = readable(inputs.q), readable(inputs.k), readable(inputs.v)
    block.tensor(P.q, q, strides_of(problem, q))
    block.tensor(P.k, k, strides_kv(problem, k))
    block.tensor(P.v, v, strides_kv(problem, v))
    block.set(P.page_size, max(problem.page_size, 1))
    block.set(P.num_pages, k.shape[0])
    block.set(P.copied, int(copies(problem, inputs)))
    block.set(P.heads, s.num_heads_q)
    block.set(P.heads_kv, s.num_heads_kv)
    block.set(P.group, max(problem.group, 1))
    block.set(P.head_dim, s.head_dim)
    block.set(P.head_dim_v, s.head_dim_v)
    block.set_float(P.scale, inputs.scale)
    if inputs.sink is not None:
        block.tensor(P.sink, inputs.sink.detach().to(torch.float32).contiguous())
    if problem.spec.dropout:
        seed = int(inputs.seed)  # type: ignore[arg-type]
        p = inputs.dropout
        block.set(P.dropout, 1)
        block.set(P.threshold, min(keep_threshold(p), 2**32 - 1))
        block.set_float(P.factor, 1.0 / (1.0 - p) if p < 1.0 else 0.0)
        block.set(P.seed_low, seed & 0xFFFFFFFF)
        block.set(P.seed_high, (seed >> 32) & 0xFFFFFFFF)
        block.set(P.h_offset, inputs.h_offset)
        block.set(P.b_offset, inputs.b_offset)


def class_tables(block: Block, problem: Problem, inputs: Inputs, found: list[Piece]) -> list[tuple[int, int]]:
    """(address, columns) of each segment's table of tile classes; zeros where the compiled code needs none."""
    keep, slots = problem.spec.keep, describe(problem.spec, inputs.leaves)
    if keep is None or slots is None or not needs_table(keep, slots):
        return [(0, 0)] * len(found)
    made: dict[tuple, tuple[int, int]] = {}
    by_batch = "b" in ex.variables(keep)
    for piece in found:
        key = (piece.rows, piece.keys, piece.q_offset, piece.k_offset, piece.b if by_batch else 0)
        if key not in made:
            grid = TileGrid(
                fold.TABLE_TILE, fold.TABLE_TILE, piece.rows, piece.keys, piece.q_offset, piece.q_offset,
                piece.k_offset, piece.k_offset, piece.b, piece.b, problem.shape.num_heads_q, problem.shape.num_heads_kv,
            )  # fmt: skip
            table = classify_tiles(keep, grid, inputs.leaves, inputs.ints, inputs.floats)
            block.alive.append(table)
            made[key] = (table.data_ptr(), grid.num_k_tiles)
    return [made[p.rows, p.keys, p.q_offset, p.k_offset, p.b if by_batch else 0] for p in found]


def lay_out(
    block: Block, problem: Problem, inputs: Inputs, found: list[Piece], decode: bool
) -> tuple[int, int]:
    """Write the segments; returns (tasks, largest number of splits)."""
    packed = packs_rows(problem, decode)
    heads = together(problem, inputs) if decode else 1
    tables = class_tables(block, problem, inputs, found)
    numbers, tasks, most, groups = segments_of(problem, found, tables, decode, heads=heads)
    block.set(P.together, heads)
    rows = BLOCK_ROWS if decode else rows_of_task(problem, found, tasks)
    if rows < BLOCK_ROWS:
        numbers, tasks, most, groups = segments_of(problem, found, tables, decode, rows)
    block.set(P.block_rows, rows)
    block.table(P.segments, numbers)
    block.set(P.num_segments, len(numbers) // SEGMENT.size)
    block.set(P.packed, int(packed))
    # What is turned begins at the sequence's first key.
    padded = any(piece.first for piece in found)
    if not decode and problem.dtype != torch.float32 and not in_pages(found) and not padded:
        rows = max((piece.rows for piece in found), default=0) * (problem.group if packed else 1)
        block.turned_bytes = turned_bytes(problem, bool(packed), groups, -(-rows // BLOCK_ROWS))
        block.turn_tasks = groups if block.turned_bytes else 0
        block.set(P.own, 0 if block.turned_bytes else kept_keys(problem))
    return tasks, most


def turned_bytes(problem: Problem, packed: bool, groups: int, blocks: int) -> int:
    """Bytes of keys brought once into the shape that products want, where enough of `blocks` blocks of rows read each:
    v turned for products of pairs, k and v in float32 for others of 2-byte types; else 0."""
    if uses_pairs(detect(), NAMES[problem.dtype]):
        return pair_launch.turned_bytes(problem, packed, groups, blocks)
    users = blocks if packed else blocks * max(problem.group, 1)
    # Up to twice as many a thread's own copy serves as well, and nobody waits for a pass before.
    least = LEAST_READERS.get(detect().lanes, 64) * (2 if kept_keys(problem) else 1)
    if users < least:
        return 0
    s = problem.shape
    return groups * pair_launch.GROUP * s.num_heads_kv * (4 * (s.head_dim + s.head_dim_v) + LINE)


def packs_rows(problem: Problem, decode: bool) -> bool:
    """Whether all heads of a group are rows of one block."""
    return problem.group > 1 if decode else packs(problem)


def in_pages(found: list[Piece]) -> bool:
    """Whether keys are found through a table of pages."""
    return any(piece.pages for piece in found)


def work_of(problem: Problem) -> int:
    """Multiply-adds of a call, hidden pairs included."""
    s = problem.shape
    return s.batch * s.num_heads_q * s.seqlen_q * s.seqlen_k * (s.head_dim + s.head_dim_v)


def rows_of_task(problem: Problem, found: list[Piece], tasks: int) -> int:
    """Rows of a task: a block, or whole strips of it where threads would be idle. Rows do not meet, so that bits do
    not depend on it. Products of pairs take whole blocks."""
    rows, longest = BLOCK_ROWS, max((piece.rows for piece in found), default=0)
    if packs(problem):
        longest *= problem.group
    if uses_pairs(detect(), NAMES[problem.dtype]) or work_of(problem) < ALONE:
        return rows
    while tasks < pool.num_threads() and rows > STRIP and longest > rows // 2:
        rows, tasks = rows // 2, tasks * 2
    return rows


def segments_of(
    problem: Problem,
    found: list[Piece],
    tables: list[tuple[int, int]],
    decode: bool,
    block_rows: int = BLOCK_ROWS,
    heads: int = 1,
) -> tuple[list[int], int, int, int]:
    """(numbers of the segments, tasks, largest number of splits, groups of keys that are turned)."""
    packed = packs_rows(problem, decode)
    units = (problem.shape.num_heads_kv if packed else problem.shape.num_heads_q) // heads
    numbers: list[int] = []
    tasks, most, groups = 0, 1, 0
    known: dict[tuple[int, int], tuple[int, int]] = {}
    group = problem.group if packed else 1
    for piece, table in zip(found, tables, strict=True):
        # Many sequences have few lengths.
        size = (piece.rows, piece.keys)
        if size not in known:
            known[size] = splits_of(problem, piece, decode)
        splits, chunk = known[size]
        rows = piece.rows * group
        count = units * -(-rows // block_rows) * splits
        if count == 0:
            continue
        numbers += [*piece[:8], tasks, splits, chunk, *table, 0, groups, *piece[8:]]
        tasks += count
        groups += -(-piece.keys // pair_launch.GROUP)
        most = max(most, splits)
    return numbers, tasks, most, groups


def link_code(block: Block, problem: Problem, slots: Slots) -> None:
    """Point the block at the spec's code. A masked tile needs the fold even where there is no term."""
    code = fold.forward_code(detect(), problem.spec, slots, bool(block.values[P.packed]))
    for name in ("classify", "fold_full", "fold_partial"):
        block.set(getattr(P, name), code.get(name, 0))


def link_spec(block: Block, problem: Problem, inputs: Inputs, slots: Slots) -> None:
    """Point the block at the spec's code and data."""
    link_code(block, problem, slots)
    leaves = [t.detach() for t in inputs.leaves]
    block.alive += leaves
    block.table(P.spec, fill(slots, leaves, inputs.ints, inputs.floats))


def plan(problem: Problem) -> Schedule:
    """The schedule of the forward pass (and, if the problem needs gradients, its backward's workspace)."""
    s = problem.shape
    piece = Piece.whole(problem)
    isa, decode = detect(), decodes(problem, piece)
    splits = splits_of(problem, piece, decode)[0] if problem.options.layout == "dense" else 1
    workspace = pool.num_threads() * scratch_bytes(problem)
    if splits > 1:
        workspace += 4 * splits * s.batch * s.num_heads_q * s.seqlen_q * (s.head_dim_v + 1)
    processor = f"{isa.cpu}: {isa.lanes} float32 per vector"
    if uses_pairs(isa, NAMES.get(problem.dtype, "")) and not decode and not problem.options.block_table:
        processor += f", bf16 by {WAYS[isa.pairs]}"
    if problem.dtype != torch.float32 and not decode and not problem.options.block_table:
        groups = -(-s.seqlen_k // pair_launch.GROUP) * max(s.batch, 1)
        blocks = -(-s.seqlen_q * (problem.group if packs(problem) else 1) // BLOCK_ROWS)
        workspace += turned_bytes(problem, packs(problem), groups, blocks)
    notes = (
        processor,
        f"threads: {pool.pool_name()}",
        "a call whose result is not finite is done again by blockwise, and so is the backward of a large leaf of which "
        "several keys read one number",
    )
    loop = "keys, all rows of a KV head together" if decode else "rows outer, keys inner"
    return Schedule(BLOCK_ROWS, key_block(problem, decode), loop, splits, workspace, notes=notes)
