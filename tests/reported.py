"""What the tests of reported faults share: run the library, run the float64 reference, hold out, lse and
gradients to TOL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracle import Dense, Result, reference, tolerance
from torch import Tensor

import tilewise as tw


def randn(*size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Seeded by the test's fixture; drawn in fp32 and rounded to dtype."""
    return (torch.randn(*size) * scale).to(dtype)


def qkv(
    batch: int,
    heads: int | tuple[int, int],
    nq: int,
    nk: int,
    dim: int,
    dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B,H,Nq,D), k (B,Hkv,Nk,D), v (B,Hkv,Nk,Dv); heads is H or (H, Hkv)."""
    h, hkv = heads if isinstance(heads, tuple) else (heads, heads)
    dim_v = dim if dim_v is None else dim_v
    return (
        randn(batch, h, nq, dim, dtype=dtype),
        randn(batch, hkv, nk, dim, dtype=dtype),
        randn(batch, hkv, nk, dim_v, dtype=dtype),
    )


class Checker:
    """Calls of one backend on one device."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend = backend
        self.device = device

    def out(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) on the CPU, no gradients."""
        with torch.no_grad():
            q, k, v = (t.to(self.device) for t in (q, k, v))
            out, lse = tw.attention(q, k, v, **self._moved(options), return_lse=True, backend=self.backend)
        return out.cpu(), lse.cpu()

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dout: Tensor | None = None,
        dlse: Tensor | None = None,
        leaves: tuple[Tensor, ...] = (),
        features: Callable[..., dict[str, Any]] | None = None,
        attend: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Result:
        """out, lse and gradients of q, k, v and float leaves. features(*leaves) gives the options built from
        leaves.
        """
        q, k, v = (t.detach().to(self.device).requires_grad_() for t in (q, k, v))
        own = tuple(t.detach().clone().to(self.device) for t in leaves)
        for t in own:
            if t.is_floating_point():
                t.requires_grad_()
        made = self._moved({**options, **(features(*own) if features else {})})
        attend = tw.attention if attend is None else attend
        out, lse = attend(q, k, v, **made, return_lse=True, backend=self.backend)
        dout = torch.ones_like(out) if dout is None else dout.to(self.device)
        dlse = torch.zeros_like(lse) if dlse is None else dlse.to(self.device, lse.dtype)
        inputs = {"q": q, "k": k, "v": v, **{f"leaf{n}": t for n, t in enumerate(own) if t.requires_grad}}
        grads = torch.autograd.grad((out, lse), list(inputs.values()), (dout, dlse))
        named = {name: grad.cpu() for name, grad in zip(inputs, grads, strict=True)}
        return Result(out.detach().cpu(), lse.detach().cpu(), named)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dense: Dense | None = None,
        *,
        make: Callable[..., Dense] | None = None,
        leaves: tuple[Tensor, ...] = (),
        dout: Tensor | None = None,
        ordinary_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Result:
        """Run and hold everything to TOL against float64; returns the library's result for further checks.

        dense, or make(*leaves), is the same problem by hand. ordinary_dtype is the dtype of the ordinary
        attention that measures rounding; the default is q's.
        """
        dout = randn(*q.shape[:3], v.shape[-1], dtype=q.dtype) if dout is None else dout
        got = self.run(q, k, v, dout=dout, leaves=leaves, **options)
        by_hand = {"dout": dout, "leaves": leaves, "make": make}
        truth = reference(q, k, v, dense, **by_hand)
        ordinary = reference(q, k, v, dense, **by_hand, dtype=ordinary_dtype or q.dtype)
        hold(got, truth, ordinary)
        return got

    def packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: tuple[list[int], list[int]],
        each: Callable[[int, int], Dense],
        dout: Tensor | None = None,
        **options: Any,
    ) -> Result:
        """attention_varlen held to TOL against a loop over sequences; each(nq, nk) is the dense problem of
        one of them.
        """
        dout = randn(*q.shape[:2], v.shape[-1], dtype=q.dtype) if dout is None else dout
        cu = [cumulative(n) for n in lengths]
        got = self.run(
            q, k, v, dout=dout, attend=tw.attention_varlen, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options
        )
        by_sequence = [
            packed_reference(q, k, v, lengths, each, dout, scale=options.get("scale"), dtype=dtype)
            for dtype in (torch.float64, q.dtype)
        ]
        hold(got, *by_sequence)
        return got

    def _moved(self, options: dict[str, Any]) -> dict[str, Any]:
        return {n: t.to(self.device) if isinstance(t, Tensor) else t for n, t in options.items()}


def hold(got: Result, truth: Result, ordinary: Result) -> None:
    """TOL on out and every gradient, and on lse."""
    tolerance("out", got.out, truth.out, ordinary.out)
    tolerance("lse", got.lse, truth.lse, ordinary.lse)
    for name, grad in got.grads.items():
        tolerance("d" + name, grad, truth.grads[name], ordinary.grads[name])


def cumulative(lengths: list[int]) -> Tensor:
    """cu_seqlens, (B+1,) int32."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def packed_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[list[int], list[int]],
    each: Callable[[int, int], Dense],
    dout: Tensor,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """The loop over packed sequences: out (T,H,Dv), lse (H,T), gradients of q, k and v."""
    lse_type = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=dtype)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=lse_type)
    grads = {name: torch.zeros(t.shape, dtype=dtype) for name, t in (("q", q), ("k", k), ("v", v))}
    start_q = start_k = 0
    for nq, nk in zip(*lengths, strict=True):
        rows, columns = slice(start_q, start_q + nq), slice(start_k, start_k + nk)
        start_q, start_k = rows.stop, columns.stop
        parts = [t.transpose(0, 1)[None] for t in (q[rows], k[columns], v[columns], dout[rows])]
        dense = each(nq, nk)
        dense.scale = scale if dense.scale is None else dense.scale
        one = reference(*parts[:3], dense, dout=parts[3], dtype=dtype)
        out[rows], lse[:, rows] = one.out[0].transpose(0, 1), one.lse[0]
        for name, part in (("q", rows), ("k", columns), ("v", columns)):
            grads[name][part] = one.grads[name][0].transpose(0, 1)
    return Result(out, lse, grads)


def same(first: Result, second: Result) -> None:
    """Bitwise equal out, lse and gradients."""
    assert torch.equal(first.out, second.out), "out differs"
    assert torch.equal(first.lse, second.lse), "lse differs"
    for name, grad in first.grads.items():
        assert torch.equal(grad, second.grads[name]), f"d{name} differs"
