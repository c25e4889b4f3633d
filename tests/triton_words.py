"""Kernels that apply a word of the Triton backend to numbers, and what they should give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tilewise.backends.triton.hole_words import in_pattern
from tilewise.backends.triton.words import tanh, tanh_fine


@triton.jit
def apply_tanh(x_ptr, y_ptr, FINE: tl.constexpr, BLOCK: tl.constexpr):
    """y = tanh(x), BLOCK elements a program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tanh_fine(x) if FINE else tanh(x))


def tanh_errors(device: str, fine: bool) -> tuple[float, bool]:
    """(the largest relative error from 1e-30 to 100, both signs, of float32 calls in units of the last bit; whether 0,
    infinities and NaN come out exactly)."""
    x = torch.logspace(-30, 2, 4096, dtype=torch.float64).to(torch.float32)
    x = torch.cat((x, -x)).to(device)
    y = torch.empty_like(x)
    apply_tanh[(x.numel() // 256,)](x, y, FINE=fine, BLOCK=256)
    wanted = x.double().tanh()
    worst = float((y.double() / wanted - 1).abs().max())
    if fine:
        _, exponents = wanted.frexp()
        worst = float(((y.double() - wanted) / torch.exp2(exponents.double() - 24)).abs().max())
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 0.0, 0.0, 0.0], device=device
    ).repeat(32)
    found = torch.empty_like(special)
    apply_tanh[(1,)](special, found, FINE=fine, BLOCK=256)
    wanted = torch.tensor([0.0, -0.0, 1.0, -1.0], device=device)
    exact = torch.equal(found[:4], wanted) and torch.equal(found[:4].signbit(), wanted.signbit())
    return worst, exact and bool(found[4].isnan())


@triton.jit
def apply_pattern(
    starts_ptr, y_ptr, PERIOD: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """y[row, column] = whether the pair is in the pattern, of a tile that begins anywhere."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    row_start, column_start = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    if ROWS_FIRST:
        row, column = row[:, None], column[None, :]
    else:
        row, column = row[None, :], column[:, None]
    found = in_pattern(row, column, row_start, column_start, PERIOD, BITS)
    tl.store(y_ptr + row * COLUMNS + column, found.to(tl.int8))


def patterns_differ(device: str, periods: Sequence[int]) -> list[int]:
    """The periods of which some pattern is not what it should be, in tiles that lie either way round."""
    wrong, generator = [], torch.Generator().manual_seed(0)
    for period in periods:
        bits = int(torch.randint(1, 2**period - 1, (), generator=generator))
        starts = torch.randint(0, period, (2,), generator=generator, dtype=torch.int32)
        for rows, columns, rows_first in ((64, 128, True), (16, 32, True), (64, 32, False)):
            found = torch.empty(rows, columns, dtype=torch.int8, device=device)
            apply_pattern[(1,)](
                starts.to(device), found, PERIOD=period, BITS=bits, ROWS=rows, COLUMNS=columns,
                ROWS_FIRST=rows_first,
            )  # fmt: skip
            distance = torch.arange(columns) + starts[1] - torch.arange(rows)[:, None] - starts[0]
            wanted = (bits >> (distance % period)) & 1
            if not torch.equal(found.cpu().long(), wanted):
                wrong.append(period)
    return wrong
