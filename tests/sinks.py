"""A sink of +inf: what every backend has to make of it."""

import math

import torch

import tilewise as tw


def infinite_sink(backend: str, dtype: torch.dtype, keys: int, device: str = "cpu", size: int = 16) -> None:
    """lse = sink and out = 0 in a row without keys, as with a finite one, and gradients of 0; beside keys it is an
    infinite score."""
    shapes = ((1, 2, n, size) for n in (3, keys, keys))
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    sink = torch.tensor([math.inf, 1.0], dtype=kind, device=device, requires_grad=True)
    seen = torch.arange(3)[:, None] >= torch.full((keys,), 3 if keys == 0 else 2)
    options = {"mask": seen.to(device), "sink": sink, "backend": backend, "allow_quadratic": True}
    out, lse = tw.attention(q, k, v, return_lse=True, **options)
    rows = 3 if keys == 0 else 2
    assert bool((out[:, :, :rows] == 0).all()) and bool((out[:, 1].isfinite()).all())
    assert torch.equal(lse[0, :, :rows], sink.detach()[:, None].expand(2, rows).to(lse.dtype))
    if keys:
        assert bool(out[:, 0, rows:].isnan().all()) and bool(lse[:, 0, rows:].isnan().all())
    found = torch.autograd.grad(out[:, :, :rows].sum(), [q, k, v, sink])
    assert all(bool((g == 0).all()) for g in found)
    lse = tw.attention(q, k, v, return_lse=True, **options)[1]
    assert torch.autograd.grad(lse[:, :, :rows].sum(), sink)[0].tolist() == [rows, rows]
