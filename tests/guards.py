"""Memory with guards around it: what a backward pass makes lies between elements that nobody may write.

`Guards` is a mode in which every tensor that torch makes is the middle of a longer one; `backward_written_outside` runs
gradients of every kind that the Triton backend sums under it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw

GUARD = 4096
"""Elements before and behind each tensor: more than a head's row of sums in the cases below."""
MAKERS = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided, torch.ops.aten.zeros, torch.ops.aten.zeros_like, torch.ops.aten.new_zeros,
    torch.ops.aten.full, torch.ops.aten.new_full,
}  # fmt: skip


class Guards(TorchDispatchMode):
    """Inside, every tensor that is made, of whatever type, has GUARD elements of 77 on both sides; one without contents
    holds NaN (integers: 77)."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) not in MAKERS or made.numel() == 0:
            return made
        whole = torch.full((made.numel() + 2 * GUARD,), 77, dtype=made.dtype, device=made.device)
        middle = whole.as_strided(made.shape, made.stride(), GUARD)
        if "empty" not in str(func.overloadpacket):
            middle.copy_(made)
        elif made.dtype.is_floating_point:
            middle.fill_(math.nan)
        self.made.append((whole, made.numel()))
        return middle

    def broken(self) -> int:
        """How many guards were written to."""
        sides = (side for whole, n in self.made for side in (whole[:GUARD], whole[GUARD + n :]))
        return sum(bool((side != 77).any()) for side in sides)


def _gather(s, q, k, table):
    return s + table[(q * 3 + k * 5) % 7]


def _inputs(device: str, packed: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    n, m = (50, 50) if packed else (37, 41)
    sizes = [(n, 4, 40), (m, 2, 40), (m, 2, 48)] if packed else [(2, 4, n, 40), (2, 2, m, 40), (2, 2, m, 48)]
    return [torch.randn(size, device=device, dtype=dtype) for size in sizes]


Terms = Callable[..., tuple[tw.ScoreTerm, ...]]


def _cases(device: str) -> Iterator[tuple[str, bool, list[torch.Tensor], Terms]]:
    """(name, packed, leaves, their terms): sums along rows, columns, pairs, diagonals, and in no order."""
    n, m, long = 37, 41, 27

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device)

    def biases(*leaves: torch.Tensor) -> tuple[tw.ScoreTerm, ...]:
        return tuple(tw.bias(t) for t in leaves)

    yield (
        "columns and rows",
        False,
        [leaf(2, 1, 1, m), leaf(1, 4, 1, m), leaf(2, 4, n, 1), leaf(1, 1, n, 1)],
        biases,
    )
    yield "a pair's own", False, [leaf(2, 4, n, m)], biases
    yield "pairs of all heads", False, [leaf(1, 1, n, m), leaf(1, 1, 1, m)], biases
    yield "diagonals", False, [leaf(4, 9)], lambda t: (tw.relative(t),)
    yield "in no order", False, [leaf(7)], lambda t: (tw.custom_score(_gather, t),)
    yield "packed columns", True, [leaf(1, 1, 1, long), leaf(3, 1, 1, long), leaf(1, 4, 1, long)], biases
    yield "packed rows", True, [leaf(4), leaf(3, 4, long, 1), leaf(1, 1, long, 1)], lambda slopes, *rest: (
        tw.alibi(slopes), *biases(*rest)
    )  # fmt: skip
    yield (
        "packed in no order",
        True,
        [leaf(4, 9), leaf(1, 1, 1, long)],
        lambda t, x: (tw.relative(t), tw.bias(x)),
    )


def backward_written_outside(
    device: str, dtype: torch.dtype, names: tuple[str, ...] = (), backend: str = "triton"
) -> dict[str, int]:
    """By case, how many guards the backward of a call with a sink wrote to, or -1 where its gradients are not those of
    `blockwise`. names: of those cases alone. Packed sequences have holes between and behind them."""
    torch.manual_seed(0)
    found = {}
    starts = torch.tensor([0, 20, 20, 47], dtype=torch.int32, device=device)
    for name, packed, leaves, terms in _cases(device):
        if names and name not in names:
            continue
        sink = torch.randn(4, device=device)
        given = [*_inputs(device, packed, dtype), sink, *leaves]
        results, guards, do = [], Guards(), None
        for chosen in (backend, "blockwise"):
            ask = [t.clone().requires_grad_() for t in given]
            options = {"mask": tw.causal(), "scores": terms(*ask[4:]), "sink": ask[3], "backend": chosen}
            if packed:
                used = torch.tensor([18, 0, 25], dtype=torch.int32, device=device)
                out = tw.attention_varlen(*ask[:3], starts, seqused_q=used, seqused_k=used, **options)
            else:
                out = tw.attention(*ask[:3], **options)
            do = torch.randn_like(out) if do is None else do
            if chosen == backend:
                with guards:
                    results.append(torch.autograd.grad(out, ask, do))
            else:
                results.append(torch.autograd.grad(out, ask, do))
        close = (
            torch.allclose(a.double(), b.double(), rtol=0, atol=3e-3 * (1 + float(b.abs().max())))
            for a, b in zip(*results, strict=True)
        )
        found[name] = guards.broken() or (0 if all(close) else -1)
    return found
