"""Keys split over programs: room for the splits' results, and their merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.backends.triton import tiles as choice
from tilewise.backends.triton.compile import Build, types_of
from tilewise.backends.triton.launch import four_strides, plain_launcher

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.problem import Inputs, Problem


def parts_of(problem: Problem, inputs: Inputs, splits: int) -> tuple[Tensor, Tensor]:
    """Room for the splits' results: (splits, batch, heads, rows, DV) and (splits, batch, heads, rows), float32."""
    s = problem.shape
    batch = 1 if problem.options.layout == "varlen" else s.batch
    lines = (splits, batch, s.num_heads_q, s.seqlen_q)
    parts = torch.empty((*lines, s.head_dim_v), dtype=torch.float32, device=inputs.q.device)
    return parts, torch.empty(lines, dtype=torch.float32, device=inputs.q.device)


def combine_parts(
    problem: Problem, inputs: Inputs, parts: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor]
) -> None:
    """out and lse from those of the splits, in their order."""
    from tilewise.backends.triton.combine_kernel import combine

    s, (out, lse) = problem.shape, results
    splits, lines = parts[0].shape[0], parts[1][0].numel()
    width = choice.padded(s.head_dim_v)
    rows = max(1, min(16, 4096 // width))
    names = (
        "part_ptr", "part_lse_ptr", "out_ptr", "lse_ptr", "sink_ptr", "o_b", "o_h", "o_n", "o_d", "lines", "heads",
        "seqlen_q", "splits", "size_dv",
    )  # fmt: skip
    values = (
        *parts, out, lse, None if inputs.sink is None else inputs.sink.contiguous(), *four_strides(problem, out),
        lines, s.num_heads_q, s.seqlen_q, splits, s.head_dim_v,
    )  # fmt: skip
    kinds = dict.fromkeys(("o_b", "o_h", "o_n", "o_d", "lines"), "i64")
    build = Build(types_of(names, values, kinds), (), (("BLOCK_M", rows), ("DV_PAD", width)), 4, 1)
    plain_launcher(combine, build, max(inputs.q.get_device(), 0))(-(-lines // rows), values)
