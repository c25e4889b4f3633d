"""The float64 side of the compat tests: flash_attn's arguments by hand, in its layout, and the suites' own error rule.

Layout (B, N, H, D) as flash_attn has it. Ordinary attention is the same in the low precision, in two orders of its
operations; results are held to 2x its error forward and 3x for gradients, plus one rounding (tilewise.testing.budgets).
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from oracle import Dense, dense_attention, positions
from torch import Tensor

from tilewise.testing.budgets import compare


@dataclass(frozen=True)
class Flags:
    """What one flash_attn call asks for. window: inclusive (left, right), None = unbounded, signed."""

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    chunk: int = 0
    softcap: float = 0.0
    scale: float | None = None

    def keep(self, nq: int, nk: int) -> Tensor:
        """(nq, nk) bool, aligned at the bottom right."""
        q, k = positions(nq, nk)
        visible = torch.ones(nq, nk, dtype=torch.bool)
        left, right = self.window
        right = min(right, 0) if self.causal and right is not None else 0 if self.causal else right
        visible = visible if left is None else visible & (k >= q - left)
        visible = visible if right is None else visible & (k <= q + right)
        return visible & (q // self.chunk == k // self.chunk) if self.chunk else visible

    def dense(self, nq: int, nk: int, slopes: Tensor | None = None, **other: Any) -> Dense:
        """The same as the oracle takes it; slopes (H,) or (B, H)."""
        q, k = positions(nq, nk)

        def score(s: Tensor) -> Tensor:
            s = self.softcap * torch.tanh(s / self.softcap) if self.softcap else s
            if slopes is None:
                return s
            bias = (slopes if slopes.ndim == 2 else slopes[None])[..., None, None] * (q - k).abs()
            return s - bias.to(s.dtype)

        return Dense(keep=self.keep(nq, nk), score=score, scale=self.scale, **other)


Build = Callable[[dict[str, Tensor]], Dense]


def _evaluate(
    inputs: dict[str, Tensor],
    build: Build,
    cotangents: tuple[Tensor, Tensor | None],
    dtype: torch.dtype,
    first: bool,
) -> dict[str, Tensor]:
    """out, lse and gradients in `dtype`; with `first` q is scaled before the product, as the suites' second order."""
    mine = {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.items()}
    dense = build(mine)
    q, k, v = (mine[name].transpose(1, 2) for name in "qkv")
    if "qv" in mine:  # score q.k + qv.v
        q, k = torch.cat((q, mine["qv"].transpose(1, 2)), -1), torch.cat((k, v), -1)
    if first:
        q, dense = (
            q * (q.shape[-1] ** -0.5 if dense.scale is None else dense.scale),
            replace(dense, scale=1.0),
        )
    out, lse = dense_attention(q, k, v, dense)
    do, dlse = cotangents
    outputs, given = [out], [do.transpose(1, 2).to(dtype)]
    if dlse is not None:
        outputs, given = [out, lse], [*given, dlse.to(lse.dtype)]
    grads = torch.autograd.grad(outputs, list(mine.values()), given, allow_unused=True)
    named = {
        f"d{n}": torch.zeros_like(t) if g is None else g
        for (n, t), g in zip(mine.items(), grads, strict=True)
    }
    return {"out": out.transpose(1, 2).detach(), "lse": lse.detach(), **named}


def hold(
    got: dict[str, Tensor], inputs: dict[str, Tensor], build: Build, do: Tensor, dlse: Tensor | None = None
) -> dict[str, Tensor]:
    """Hold out, lse and d<name> of `got` to their budgets; returns the float64 results."""
    wide = {name: t.detach().double() for name, t in inputs.items()}
    truth = _evaluate(wide, build, (do, dlse), torch.float64, False)
    ordinary = [_evaluate(inputs, build, (do, dlse), do.dtype, first) for first in (False, True)]
    for name, t in got.items():
        line = compare(name, t, [o[name] for o in ordinary], truth[name])
        assert line.ratio <= 1.0, str(line)
    return truth


def run(
    fn: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]], inputs: dict[str, Tensor], do: Tensor
) -> Any:
    """fn on leaves made of `inputs`: {"out", "lse", "d<name>"...} of the shim under test."""
    mine = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    out, lse = fn(mine)
    grads = torch.autograd.grad(out, list(mine.values()), do, allow_unused=True)
    named = {
        f"d{n}": torch.zeros_like(t) if g is None else g
        for (n, t), g in zip(mine.items(), grads, strict=True)
    }
    return {"out": out.detach(), "lse": lse.detach(), **named}


def make_qkv(
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    dim_v: int | None = None,
) -> dict[str, Tensor]:
    """Random q (B, nq, H, D), k, v (B, nk, Hkv, D or Dv)."""
    shapes = {
        "q": (lengths[0], heads[0], dim),
        "k": (lengths[1], heads[1], dim),
        "v": (lengths[1], heads[1], dim_v or dim),
    }
    return {name: torch.randn(batch, *shape).to(dtype) for name, shape in shapes.items()}


GRIDS = os.environ.get("TILEWISE_GRIDS", "1")
"""How much of each grid runs: a factor of its sample (`1`, `10`); `pairs` or `triples`, as many points as it takes to
have every pair or triple of values of different axes together; or `all`, a million points and days."""


def thin(count: int, seed: int = 0, **axes: Iterable[Any]) -> list[dict[str, Any]]:
    """`count` points of the grid, seeded, every value of every axis among them; TILEWISE_GRIDS asks for more."""
    names = list(axes)
    values = [list(axis) for axis in axes.values()]
    draw = random.Random(seed)
    if GRIDS == "all":
        return [dict(zip(names, row, strict=True)) for row in itertools.product(*values)]
    if GRIDS in ("pairs", "triples"):
        rows = covering([len(axis) for axis in values], 2 if GRIDS == "pairs" else 3, draw)
        return [
            dict(zip(names, (axis[n] for axis, n in zip(values, row, strict=True)), strict=True))
            for row in rows
        ]
    count *= int(GRIDS)
    chosen = []
    columns = []
    for axis in values:
        column = list(itertools.islice(itertools.cycle(axis), max(count, len(axis))))
        draw.shuffle(column)
        columns.append(column[:count])
    for row in zip(*columns, strict=True):
        chosen.append(dict(zip(names, row, strict=True)))
    return chosen


def covering(sizes: list[int], strength: int, draw: random.Random) -> list[tuple[int, ...]]:
    """Rows of indices below `sizes` in which any `strength` columns together take all of their combinations.

    Greedy: a row starts from a combination that is missing and takes, column by column, the value that meets most
    missing ones. Source: Cohen et al. 1997, The AETG system, IEEE Transactions on Software Engineering 23 (7).
    """
    missing = {
        (columns, point)
        for columns in itertools.combinations(range(len(sizes)), min(strength, len(sizes)))
        for point in itertools.product(*(range(sizes[c]) for c in columns))
    }
    waiting = sorted(missing)
    draw.shuffle(waiting)
    rows = []
    while missing:
        while waiting[-1] not in missing:
            waiting.pop()
        row = dict(zip(*waiting[-1], strict=True))
        for column in draw.sample(range(len(sizes)), len(sizes)):
            if column not in row:
                row[column] = _best(column, sizes[column], row, (missing, strength), draw)
        rows.append(tuple(row[c] for c in range(len(sizes))))
        missing -= _met(row, strength)
    return rows


def _met(row: dict[int, int], strength: int) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The combinations in a row."""
    chosen = itertools.combinations(sorted(row), min(strength, len(row)))
    return {(columns, tuple(row[c] for c in columns)) for columns in chosen}


def _best(
    column: int, size: int, row: dict[int, int], wanted: tuple[set[Any], int], draw: random.Random
) -> int:
    """The value of a column that adds most missing combinations to what the row has."""
    missing, strength = wanted
    others = [
        tuple(sorted((*part, column))) for part in itertools.combinations(row, min(strength - 1, len(row)))
    ]

    def gain(value: int) -> int:
        full = {**row, column: value}
        return sum((columns, tuple(full[c] for c in columns)) in missing for columns in others)

    return max(draw.sample(range(size), size), key=gain)


def short(case: dict[str, Any]) -> str:
    """A test id."""
    return "-".join(str(v).replace("torch.", "").replace(" ", "") for v in case.values())
