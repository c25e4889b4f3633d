"""Rotary positions for serving: tables of angles, read at the positions of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.checks import can_look
from tilewise.errors import DTypeError, OptionError, ShapeError, message
from tilewise.rotary import locate, query_positions, turn

__all__ = [
    "RotaryTable",
    "as_table",
    "check_positions",
    "check_reach",
    "check_table",
    "locate",
    "query_positions",
    "rotate",
    "table_of",
    "turn",
]


class RotaryTable(NamedTuple):
    """Cosines and sines of the angles at positions 0 to length - 1.

    cos, sin: (positions, dim / 2) floating; the first `dim` entries of each head are turned, the others stay.
    interleaved: the pairs that turn are neighbours (GPT-J); otherwise entry n and entry n + dim / 2 (Llama).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @staticmethod
    def make(
        dim: int, length: int, *, base: float = 10000.0, interleaved: bool = False, device: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> RotaryTable:  # fmt: skip
        """Pair n turns by base^(-2 n / dim) radians per position; angles are computed in float64.

        Raises: OptionError for a dim that is odd or below 2.
        Source: Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864, equation 34.
        """
        if dim < 2 or dim % 2:
            raise OptionError(f"rotary turns pairs: dim is even and at least 2, not {dim}")
        frequency = base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device=device), frequency)
        return RotaryTable(angle.cos().to(dtype), angle.sin().to(dtype), interleaved)


def as_table(rotary: Any) -> RotaryTable | None:
    """A RotaryTable, or a pair (cos, sin) of the half style; None stays None."""
    if rotary is None or isinstance(rotary, RotaryTable):
        return rotary
    if isinstance(rotary, (tuple, list)) and len(rotary) == 2 and all(isinstance(t, Tensor) for t in rotary):
        return RotaryTable(*rotary)
    raise DTypeError(f"rotary is a RotaryTable or a pair (cos, sin) of tensors, not {type(rotary).__name__}")


def table_of(rotary: Any, positions: Tensor | None) -> RotaryTable | None:
    """`as_table` of a call's tables. Raises OptionError for positions without them."""
    if rotary is None and positions is not None:
        raise OptionError(
            "positions are rows of the rotary tables, and there are none\n"
            "Give rotary=, or q_offset= for where the queries stand in the mask."
        )
    return as_table(rotary)


def check_table(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ShapeError unless x's heads are long enough for the tables."""
    if 2 * cos.shape[-1] > x.shape[-1] or sin.shape != cos.shape or cos.ndim != 2:
        rule = "cos and sin have shape (positions, rotary_dim / 2), rotary_dim at most the head size"
        raise ShapeError(message(rule, {"x": x, "cos": cos, "sin": sin}))


def check_positions(positions: Tensor, cos: Tensor) -> None:
    """Raise ShapeError for a position outside the tables; looked at on the CPU, clamped on a GPU."""
    if not positions.numel() or not can_look(positions):
        return
    low, high = (int(n) for n in torch.aminmax(positions))
    if low < 0 or high >= cos.shape[0]:
        rule = f"positions run from {low} to {high}, and the tables have {cos.shape[0]} rows"
        raise ShapeError(message(rule, {"cos": cos}))


def check_reach(first: Tensor, added: Tensor | int, cos: Tensor) -> None:
    """Raise ShapeError where a sequence's new positions, (B,) first and their number, leave the tables; looked at on
    the CPU, clamped on a GPU."""
    if not can_look(first):
        return
    starts = first.tolist()
    ends = [n + added for n in starts] if isinstance(added, int) else (first + added).tolist()
    low, end = min(starts, default=0), max(ends, default=0)
    if low < 0 or end > cos.shape[0]:
        rule = f"positions run from {low} to {end - 1}, and the tables have {cos.shape[0]} rows"
        raise ShapeError(message(rule, {"cos": cos}))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (..., H, D) turned by the angles in rows `positions` of cos and sin; positions broadcast to (...).

    Raises: ShapeError for a position outside the tables (looked at on the CPU; clamped on a GPU).
    """
    check_table(x, cos, sin)
    check_positions(positions, cos)
    return turn(x, cos, sin, positions, interleaved)
