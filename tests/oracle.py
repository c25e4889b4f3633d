"""Dense float64 attention by hand, for tests: no tilewise import, no expression tree, one KV head at a time.

Conventions as in the library: True = may attend; an empty row gives out 0, lse -inf and zero gradients; what
stands at a hidden pair never matters. `naive` is the same in a lower dtype, and `tolerance` is the rule of
the reported cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

INF = math.inf
FLOOR = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass
class Dense:
    """What hides and changes scores: keep (bool, broadcast to B,H,Nq,Nk), score(s) -> s, sink (H,), kept
    (dropout), p, scale.
    """

    keep: Tensor | None = None
    score: Callable[[Tensor], Tensor] | None = None
    sink: Tensor | None = None
    kept: Tensor | None = None
    p: float = 0.0
    scale: float | None = None


@dataclass
class Result:
    """out, lse and gradients by name; gradients of tensors given as `leaves` are named leaf0, leaf1, ..."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


def positions(nq: int, nk: int, q_offset: int | None = None, k_offset: int = 0) -> tuple[Tensor, Tensor]:
    """(q, k) positions, (Nq, 1) and (1, Nk); q_offset None is bottom-right."""
    q_offset = nk - nq if q_offset is None else q_offset
    return torch.arange(nq)[:, None] + q_offset, torch.arange(nk)[None, :] + k_offset


def causal_keep(nq: int, nk: int, q_offset: int | None = None) -> Tensor:
    """(Nq, Nk) bool of the causal mask."""
    q, k = positions(nq, nk, q_offset)
    return k <= q


def window_keep(nq: int, nk: int, left: int | None, right: int | None) -> Tensor:
    """(Nq, Nk) bool of a window of inclusive counts."""
    q, k = positions(nq, nk)
    low = torch.ones(nq, nk, dtype=torch.bool) if left is None else q - k <= left
    return low if right is None else low & (k - q <= right)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, dense: Dense) -> tuple[Tensor, Tensor]:
    """(out, lse) in the dtype of q, with the softmax in fp32 (fp64 for fp64). q (B,H,Nq,D), k (B,Hkv,Nk,D), v
    (B,Hkv,Nk,Dv).
    """
    batch, heads, nq, dim = q.shape
    nk = k.shape[2]
    group = heads // k.shape[1] if k.shape[1] else 1
    scale = dim**-0.5 if dense.scale is None else dense.scale
    keep = torch.ones(1, 1, 1, 1, dtype=torch.bool) if dense.keep is None else dense.keep
    keep = keep.expand(batch, heads, nq, nk)
    k, v = _without_hidden(keep, group, k), _without_hidden(keep, group, v)
    rows = []
    for h in range(heads):
        rows.append(torch.einsum("bid,bjd->bij", q[:, h], k[:, h // group]) * scale)
    s = torch.stack(rows, 1) if rows else q.new_zeros(batch, heads, nq, nk)
    s = s if dense.score is None else dense.score(s)
    s = s.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    s = s.masked_fill(~keep, -INF)
    top = s.amax(-1, keepdim=True) if nk else s.new_full((batch, heads, nq, 1), -INF)
    sink = None if dense.sink is None else dense.sink.to(s.dtype).view(1, heads, 1, 1)
    if sink is not None:
        top = torch.maximum(top, sink.expand_as(top))
    top = torch.where(top == -INF, 0.0, top).detach()
    weight = torch.exp(s - top).masked_fill(s == -INF, 0.0)
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    lse = torch.where(seen, top + torch.log(total), -INF)[..., 0]
    p = weight / total
    if dense.kept is not None:
        p = (p / (1 - dense.p) if dense.p < 1 else p).masked_fill(~dense.kept, 0.0)
    p = p.to(q.dtype)
    out = [torch.einsum("bij,bje->bie", p[:, h], v[:, h // group]) for h in range(heads)]
    return (torch.stack(out, 1) if out else q.new_zeros(batch, heads, nq, v.shape[-1])), lse


def _without_hidden(keep: Tensor, group: int, t: Tensor) -> Tensor:
    """t with 0 in every key that no query of its head group sees: 0 * NaN would be NaN."""
    if t.shape[1] == 0:
        return t
    seen = keep.any(2).unflatten(1, (t.shape[1], group)).any(2)
    return torch.where(seen[..., None], t, 0.0)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense: Dense | None = None,
    *,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    leaves: tuple[Tensor, ...] = (),
    dtype: torch.dtype = torch.float64,
    make: Callable[..., Dense] | None = None,
) -> Result:
    """Evaluate in `dtype` (float64: the truth) with gradients for dout and dlse (default: ones and zeros).

    Give `make(*leaves) -> Dense` instead of `dense` where leaves need gradients. The results are in `dtype`,
    on the CPU.
    """
    q, k, v = (t.detach().cpu().to(dtype).clone().requires_grad_() for t in (q, k, v))
    own = tuple(_leaf(t, dtype) for t in leaves)
    dense = make(*own) if make is not None else (dense or Dense())
    out, lse = dense_attention(q, k, v, dense)
    dout = torch.ones_like(out) if dout is None else dout.detach().cpu().to(dtype)
    inputs = {"q": q, "k": k, "v": v, **{f"leaf{n}": t for n, t in enumerate(own) if t.requires_grad}}
    outputs, cotangents = [out], [dout]
    if dlse is not None and lse.requires_grad:
        outputs.append(lse)
        cotangents.append(dlse.detach().cpu().to(lse.dtype))
    grads = torch.autograd.grad(outputs, list(inputs.values()), cotangents, allow_unused=True)
    named = {
        n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(inputs.items(), grads, strict=True)
    }
    return Result(out.detach(), lse.detach(), named)


def _leaf(t: Tensor, dtype: torch.dtype) -> Tensor:
    t = t.detach().cpu().clone()
    return t.to(dtype).requires_grad_() if t.is_floating_point() else t


def tolerance(name: str, got: Tensor, truth: Tensor, ordinary: Tensor) -> None:
    """max|got - truth| <= 2 * max|ordinary - truth| + a * max(1, max|truth|), a by dtype; all finite. 1e-11
    for float64.

    Source: the rule TOL of the reported cases. Raises AssertionError with the numbers.
    """
    got, ordinary = got.detach().cpu(), ordinary.detach().cpu()
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    if got.numel() == 0:
        return
    assert torch.equal(torch.isneginf(got), torch.isneginf(truth)), f"{name}: -inf in other places than ref64"
    finite = truth.isfinite()
    got, truth, ordinary = got[finite], truth[finite], ordinary[finite]
    assert bool(got.isfinite().all()), f"{name}: {int((~got.isfinite()).sum())} entries are NaN or infinite"
    if got.numel() == 0:
        return
    floor = max(1.0, float(truth.abs().max()))
    error = float((got.double() - truth).abs().max())
    if got.dtype == torch.float64:
        allowed = 1e-11 * floor
    else:
        own = float((ordinary.double() - truth).abs().max())
        allowed = 2 * (own if math.isfinite(own) else 0.0) + FLOOR[got.dtype] * floor
    assert error <= allowed, f"{name}: error {error:.3e} exceeds {allowed:.3e}"


def philox_kept(seed: int, p: float, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Dropout's keep mask from Salmon et al. 2011 (Philox4x32-10), in Python integers: slow, and independent
    of the library.

    b, h, q, k are int64 tensors that broadcast to (B, H, Nq, Nk): batch, query head and positions.
    """
    b, h, q, k = torch.broadcast_tensors(b, h, q, k)
    threshold = math.floor(p * 2**32)
    flat = zip(*(t.flatten().tolist() for t in (b, h, q, k)), strict=True)
    kept = [_philox_word(seed, (kk >> 2, qq, hh, bb), kk & 3) >= threshold for bb, hh, qq, kk in flat]
    return torch.tensor(kept, dtype=torch.bool).view(b.shape)


def _philox_word(seed: int, counter: tuple[int, int, int, int], which: int) -> int:
    low = 0xFFFFFFFF
    c = [n & low for n in counter]
    key = [seed & low, (seed >> 32) & low]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ key[0], second & low, (first >> 32) ^ c[3] ^ key[1], first & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return c[which]
