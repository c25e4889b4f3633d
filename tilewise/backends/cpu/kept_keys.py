"""Keys of 2-byte types of which a thread keeps a copy in float32, over the blocks of rows of one head that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.backends.cpu.isa import BLOCK_ROWS, LINE, detect

if TYPE_CHECKING:
    from tilewise.problem import Problem

OWN = 5 << 17
"""Most bytes of such a copy: 512 keys of a head size of 128 in a second-level cache of 1 MiB."""


def kept_keys(problem: Problem) -> int:
    """The keys of a head, where a copy has room and several blocks of rows read it; else 0. Where one copy is made for
    all threads before the pass, none is kept."""
    s, dtype = problem.shape, problem.dtype
    widened = dtype == torch.float16 or (dtype == torch.bfloat16 and not detect().pairs)
    if not widened or problem.options.layout != "dense" or problem.options.pages:
        return 0
    small = s.seqlen_k * (4 * (s.head_dim + s.head_dim_v) + LINE) <= OWN
    several = s.seqlen_q * max(problem.group, 1) > BLOCK_ROWS
    return s.seqlen_k if small and several else 0
