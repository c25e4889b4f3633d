"""Memory of the passes on bf16 pairs, and the turning of v before the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.cpu.isa import BLOCK_ROWS
from tilewise.backends.cpu.parameters import LANES

if TYPE_CHECKING:
    from tilewise.problem import Problem

GROUP = 32
"""Keys of a group, and what head sizes are padded to: the side of one product of pairs."""

KEY_BLOCK = 128
"""Keys of a forward block: its scores, 32 KiB, stay in the first-level cache."""


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


def turned_bytes(problem: Problem, packed: bool, groups: int, blocks: int) -> int:
    """Bytes of v turned once for all, where more than two of `blocks` blocks of rows read each key; else 0: a pass of
    its own takes longer than turning twice."""
    users = blocks if packed else blocks * max(problem.group, 1)
    if users <= 2:
        return 0
    return groups * problem.shape.num_heads_kv * padded(problem.shape.head_dim_v) * 2 * GROUP
