"""Element types: what is stored, what is computed in, how much one rounding is."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.errors import DTypeError


class DType(NamedTuple):
    """One row of the table.

    storage: type of q, k, v, out and of their gradients. compute: type of scores, m, l, acc, delta, lse,
    partial outputs. roundoff: half the distance from 1 to the next number, relative.
    """

    name: str
    storage: torch.dtype
    compute: torch.dtype
    roundoff: float


TABLE = {
    row.storage: row
    for row in (
        DType("fp64", torch.float64, torch.float64, 2.0**-53),
        DType("fp32", torch.float32, torch.float32, 2.0**-24),
        DType("fp16", torch.float16, torch.float32, 2.0**-11),
        DType("bf16", torch.bfloat16, torch.float32, 2.0**-8),
    )
}


def lookup(dtype: torch.dtype) -> DType:
    """The table's row.  Raises DTypeError for a type without one."""
    row = TABLE.get(dtype)
    if row is None:
        names = ", ".join(str(t).removeprefix("torch.") for t in TABLE)
        raise DTypeError(f"{str(dtype).removeprefix('torch.')} is not supported; q, k and v may be {names}")
    return row
