"""Memory of the passes on bf16 pairs, and the turning of v before the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.backends.cpu.isa import BLOCK_ROWS
from tilewise.backends.cpu.parameters import LANES, P

if TYPE_CHECKING:
    from tilewise.backends.cpu.launch import Block
    from tilewise.problem import Problem

GROUP = 32
"""Keys of a group, and what head sizes are padded to: the side of one product of pairs."""


def padded(size: int) -> int:
    """The size in whole groups."""
    return -(-size // GROUP) * GROUP


def forward_scratch(problem: Problem, key_block: int) -> int:
    """Bytes of one thread's forward scratch: acc, q in pairs, the score tile, a group's copy, one turned block."""
    dim, dim_v = padded(problem.shape.head_dim), padded(problem.shape.head_dim_v)
    tiles = 4 * BLOCK_ROWS * (dim_v + dim // 2 + key_block)
    return LANES.tile + tiles + 2 * GROUP * max(dim, dim_v) + 2 * key_block * dim_v + 256


def backward_scratch(problem: Problem, key_block: int, superblock: int) -> int:
    """Bytes of one thread's backward scratch: see `pair_backward`."""
    dim, dim_v = padded(problem.shape.head_dim), padded(problem.shape.head_dim_v)
    rows = 4 * BLOCK_ROWS * (dim + dim_v + 2 * key_block + key_block // 2)
    copies = max(4 * BLOCK_ROWS * dim_v // 2, 2 * GROUP * max(dim, dim_v))
    return LANES.tile + rows + copies + 2 * superblock * dim + 4 * superblock * (dim + dim_v) + 256


def turned_bytes(problem: Problem, groups: int) -> int:
    """Bytes of v turned as a whole."""
    return groups * problem.shape.num_heads_kv * padded(problem.shape.head_dim_v) * 2 * GROUP


def allot_turned(block: Block, problem: Problem, groups: int, blocks: int) -> bool:
    """Memory for v turned once, where more than one of `blocks` blocks of rows reads each key; returns whether."""
    users = blocks if block.values[P.packed] else blocks * max(problem.group, 1)
    if users <= 1 or groups == 0:
        return False
    # 64 bytes are one line of the cache and one row of a tile.
    memory = torch.empty(turned_bytes(problem, groups) + 64, dtype=torch.uint8, device="cpu")
    block.alive.append(memory)
    block.set(P.turned_v, -(-memory.data_ptr() // 64) * 64)
    return True
