"""A kernel that applies a word of the Triton backend to numbers, and what it should give."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
