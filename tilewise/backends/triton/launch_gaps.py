"""The launch of `gap_kernel`: what a packed call's out and lse hold where there is no sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.triton.compile import Build, types_of
from tilewise.backends.triton.launch import plain_launcher

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.problem import Inputs, Problem

FEW = 2048
"""Sequences up to which several programs share a gap."""


def clear_gaps(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    """Write 0 and -inf for the tokens of no sequence; out (tokens, heads, d_v), lse (heads, tokens)."""
    from tilewise.backends.triton.gap_kernel import fill_gaps

    s, used = problem.shape, inputs.seqused_q
    n, h, d = out.stride()
    if s.batch == 0 or out.numel() == 0:
        return
    values = (
        out, lse, inputs.cu_seqlens_q, used, n, h, d, lse.stride(0), s.seqlen_q, s.batch, s.num_heads_q, s.head_dim_v,
    )  # fmt: skip
    names = fill_gaps.arg_names[: len(values)]
    kinds = dict.fromkeys(("o_n", "o_h", "o_d", "l_h"), "i64")
    block = max(16, 1 << (s.head_dim_v - 1).bit_length())
    constants = (("USED", used is not None), ("BLOCK_D", block))
    build = Build(types_of(names, values, kinds), (), constants, 4, 1)
    run = plain_launcher(fill_gaps, build, inputs.q.get_device())
    run(s.batch + 1, values, 8 if s.batch <= FEW else 1)
