"""The backward pass: its segments, its memory, the sums that follow the kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilewise import memory
from tilewise.backends.cpu import fold, fold_slopes, pair_launch, pool
from tilewise.backends.cpu.isa import BLOCK_ROWS, LINE, STRIP, detect, uses_pairs
from tilewise.backends.cpu.launch import (
    FEWEST_TASKS,
    NAMES,
    SHORTEST_SPLIT,
    class_tables,
    common,
    kernel,
    link_spec,
    packs,
)  # fmt: skip
from tilewise.backends.cpu.leaf_sums import LeafSums
from tilewise.backends.cpu.parameter_block import Block, readable, strides_of
from tilewise.backends.cpu.parameters import LANES, P
from tilewise.backends.cpu.pieces import Piece, covered, pieces
from tilewise.backends.protocol import Gradients, Needs
from tilewise.problem import Inputs, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tilewise.backends.cpu.slots import Slots

KEY_BLOCK = 128
SUPERBLOCK = 512
"""Keys whose dk and dv are summed at once: 256 KiB at D = 64, so that they stay in the second-level cache."""


def splits_of(problem: Problem, piece: Piece) -> tuple[int, int]:
    """(number of key splits, keys per split) of one segment."""
    s = problem.shape
    tasks = s.num_heads_kv * (1 if problem.options.batch_invariant else max(s.batch, 1))
    splits = max(1, min(-(-FEWEST_TASKS // max(tasks, 1)), piece.keys // SHORTEST_SPLIT))
    chunk = -(-piece.keys // splits)
    chunk = max(-(-chunk // fold.TABLE_TILE) * fold.TABLE_TILE, fold.TABLE_TILE)
    return max(1, -(-piece.keys // chunk)), chunk


def scratch_bytes(problem: Problem) -> int:
    """Bytes of one thread's scratch."""
    s = problem.shape
    padded, padded_v = (-(-d // STRIP) * STRIP for d in (s.head_dim, s.head_dim_v))
    apart = LINE // 4
    rows = BLOCK_ROWS * (s.head_dim + 2 * s.head_dim_v + padded + padded_v + 2 * apart + 2 * KEY_BLOCK)
    # k and v and their gradients; and s and dp, where they are kept between passes.
    keys = s.head_dim + s.head_dim_v + padded + padded_v + 4 * apart + 2 * BLOCK_ROWS
    plain = LANES.tile + 4 * (rows + KEY_BLOCK * STRIP + SUPERBLOCK * keys) + 256
    if not uses_pairs(detect(), NAMES.get(problem.dtype, "")):
        return plain
    return pair_launch.backward_scratch(problem, KEY_BLOCK, SUPERBLOCK)


def dq_rows(problem: Problem) -> int:
    """Rows of a transposed block of dq: the head size, in whole groups where pairs are multiplied."""
    pairs = uses_pairs(detect(), NAMES.get(problem.dtype, ""))
    return pair_launch.padded(problem.shape.head_dim) if pairs else problem.shape.head_dim


def workspace_bytes(problem: Problem) -> int:
    """Bytes beyond inputs and outputs: scratch of the threads, dq of each split in float32 (a dense call's rows).

    Gradients of leaves come on top: see `leaf_sums`.
    """
    s, packed = problem.shape, packs(problem)
    dense = problem.options.layout == "dense"
    if problem.options.partial and problem.dtype != torch.float32:
        numbers = s.seqlen_q * s.num_heads_q * s.head_dim + s.seqlen_k * s.num_heads_kv * (
            s.head_dim + s.head_dim_v
        )
        # q, k, v and their gradients in float32: see `backward_wide`.
        copies = 8 * numbers * (s.batch if dense else 1)
        return copies + workspace_bytes(replace(problem, dtype=torch.float32))
    splits = splits_of(problem, Piece.whole(problem))[0]
    rows = s.seqlen_q * (problem.group if packed else 1)
    units = (s.num_heads_kv if packed else s.num_heads_q) * (s.batch if dense else 1)
    # A packed call pads each sequence to whole blocks.
    blocks = -(-rows // BLOCK_ROWS) + (0 if dense else s.batch)
    sums = 4 * splits * units * blocks * BLOCK_ROWS * dq_rows(problem)
    return pool.num_threads() * (scratch_bytes(problem) + 64) + sums + 64


def lay_out(block: Block, problem: Problem, inputs: Inputs, found: list[Piece]) -> tuple[int, int, int]:
    """Write the segments; returns (tasks, most splits, blocks of rows)."""
    s, packed = problem.shape, packs(problem)
    numbers: list[int] = []
    tasks, most, tiles = 0, 1, 0
    known: dict[tuple[int, int], tuple[int, int]] = {}
    for piece, table in zip(found, class_tables(block, problem, inputs, found), strict=True):
        # Many sequences have few lengths.
        size = (piece.rows, piece.keys)
        if size not in known:
            known[size] = splits_of(problem, piece)
        splits, chunk = known[size]
        rows = piece.rows * (problem.group if packed else 1)
        numbers += [*piece[:8], tasks, splits, chunk, *table, tiles, 0, *piece[8:]]
        tasks += s.num_heads_kv * splits
        tiles += (s.num_heads_kv if packed else s.num_heads_q) * -(-rows // BLOCK_ROWS)
        most = max(most, splits)
    block.table(P.segments, numbers)
    block.set(P.num_segments, len(found))
    block.set(P.packed, int(packed))
    block.set(P.total_rows, tiles)
    return tasks, most, tiles


def turns(problem: Problem, found: list[Piece]) -> Iterator[tuple[int, int]]:
    """(first task, tasks) of each segment and KV head."""
    first = 0
    for piece in found:
        splits = splits_of(problem, piece)[0]
        for _ in range(problem.shape.num_heads_kv):
            yield first, splits
            first += splits


def backward(
    problem: Problem,
    inputs: Inputs,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    needs: Needs,
    slots: Slots,
) -> Gradients | None:
    """All gradients; None if the reference must do the call: a result is not finite, or a leaf is too large."""
    isa, dtype = detect(), NAMES[problem.dtype]
    found = [p for p in pieces(problem, inputs) if p.rows and p.keys]
    block, s = Block(), problem.shape
    common(block, problem, inputs)
    wanted = tuple(needs.leaves)
    tasks, splits, tiles = lay_out(block, problem, inputs, found)
    sums = LeafSums(problem, inputs, wanted, tasks, block.address_of(P.flag))
    if not sums.fits:
        return None
    sink_rows = _link_rows(block, problem, inputs, saved, grads)
    made = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in (inputs.q, inputs.k, inputs.v)]
    if not found or not covered(problem, found):
        made = [t.zero_() for t in made]
    for slot, t in zip((P.dq, P.dk, P.dv), made, strict=True):
        block.tensor(slot, t, strides_of(problem, t))
    if found:
        block.set(P.key_block, KEY_BLOCK)
        block.set(P.superblock, SUPERBLOCK)
        block.set(P.dq_rows, dq_rows(problem))
        # A part of the keys has not the statistics of the whole.
        block.set(P.exact, int(not problem.options.subset))
        block.tensor(P.part_dq, memory.empty((splits * tiles * dq_rows(problem) * BLOCK_ROWS,)))
        link_spec(block, problem, inputs, slots)
        block.table(P.leaf_parts, sums.entries)
        if sums.fresh is not None:
            block.set(P.fresh, sums.fresh.data_ptr())
            block.set(P.fresh_pages, 4 * sums.fresh.numel() // memory.HUGE)
        threads = pool.num_threads()
        block.scratch(scratch_bytes(problem), threads)
        for turn, (first, count) in enumerate(turns(problem, found) if sums.in_turn else [(0, tasks)]):
            if turn < 2:
                ways = sums.ways_of(turn)
                code = fold_slopes.backward_code(isa, problem.spec, slots, packs(problem), ways)
                block.set(P.slopes_full, code.get("slopes_full", 0))
                block.set(P.slopes_partial, code.get("slopes_partial", 0))
            block.run(kernel(isa, "backward", dtype), count, threads, first)
        units = s.num_heads_kv if packs(problem) else s.num_heads_q
        block.run(kernel(isa, "finish", dtype), len(found) * units, threads)
    leaves = sums.gradients(inputs)
    sink = None
    if needs.sink:
        over = (1,) if sink_rows.ndim == 2 else (0, 2)
        sink = sink_rows.sum(over, dtype=torch.float64).to(inputs.sink.dtype)  # type: ignore[union-attr]
    if block.values[P.flag] or not (sink is None or bool(torch.isfinite(sink).all())):
        return None
    return Gradients(made[0], made[1], made[2], leaves, sink)


def backward_wide(
    problem: Problem,
    inputs: Inputs,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    needs: Needs,
    slots: Slots,
) -> Gradients | None:
    """`backward` in float32 on copies of q, k and v, its gradients in their types."""
    q, k, v = (t.float() for t in (inputs.q, inputs.k, inputs.v))
    found = backward(
        replace(problem, dtype=torch.float32), replace(inputs, q=q, k=k, v=v),
        (saved[0].float(), saved[1]), (grads[0].float(), grads[1]), needs, slots,
    )  # fmt: skip
    if found is None:
        return None
    dq, dk, dv = (t.to(problem.dtype) for t in (found.dq, found.dk, found.dv))  # type: ignore[union-attr]
    if not all(bool(torch.isfinite(t).all()) for t in (dq, dk, dv)):
        return None
    return replace(found, dq=dq, dk=dk, dv=dv)


def _link_rows(
    block: Block,
    problem: Problem,
    inputs: Inputs,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
) -> Tensor:
    """Point the block at what there is per row of q; returns the sink's ds per row, empty without one."""
    (out, lse), (do, dlse) = saved, grads

    def per_row(t: Tensor) -> tuple[int, int]:
        return (0, t.stride(0)) if t.ndim == 2 else (t.stride(0), t.stride(1))

    if dlse is not None:
        dlse = dlse.to(torch.float32)
        dlse = dlse if dlse.stride(-1) == 1 else dlse.contiguous()
        block.tensor(P.dlse, dlse, per_row(dlse))
    lse = lse if lse.stride(-1) == 1 else lse.contiguous()
    block.tensor(P.lse, lse, per_row(lse))
    for slot, t in ((P.do, readable(do)), (P.out, readable(out))):
        block.tensor(slot, t, strides_of(problem, t))
    if inputs.sink is None:
        return torch.empty(0, device="cpu")
    sink_rows = _sink_rows(inputs, lse, dlse)
    block.tensor(P.sink_rows, sink_rows, per_row(sink_rows))
    return sink_rows


def _sink_rows(inputs: Inputs, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """ds of the sink for a row that meets no tile: out is 0, the sink has weight e^(sink - lse) and ds = p dlse."""
    if dlse is None:
        return torch.zeros(lse.shape, dtype=torch.float32, device="cpu")
    logit = inputs.sink.detach().to(torch.float32).view((-1, 1) if lse.ndim == 2 else (1, -1, 1))  # type: ignore[union-attr]
    weight = torch.exp2((logit - lse) * math.log2(math.e))
    return torch.where(
        (weight == 0) | (lse == -math.inf) | (logit == -math.inf), 0.0, weight * dlse
    ).contiguous()
