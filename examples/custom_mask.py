"""A mask and a score of your own: local attention with dilation, global tokens, and a learned decay by distance.

    python examples/custom_mask.py

Both are plain Python functions over positions, rows, columns and heads. They are read once and become part of every
tile's arithmetic; the mask's interval form tells which tiles need no work. Tensors are leaves, and float leaves learn.
"""

from __future__ import annotations

import argparse

import torch

import tilewise as tw


def longformer(reach: int, dilation: torch.Tensor, is_global: torch.Tensor) -> tw.Mask:
    """Keys at most `reach` steps of dilation[h] away, and whatever stands in is_global (B, N), both ways.

    Source: Beltagy et al., 2020, https://arxiv.org/abs/2004.05150, section 3.1.
    """
    local = tw.custom(
        lambda h, q, k, step: ((q - k) % step[h] == 0) & (abs(q - k) <= reach * step[h]), dilation
    )
    seen = tw.custom(lambda b, i, j, some: some[b, i] | some[b, j], is_global)
    return local | seen


def main(given: list[str] | None = None) -> dict[str, float]:
    """Compares with the dense mask and torch's operations in float64; returns differences and the work left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args(given)
    torch.manual_seed(0)
    n, heads, reach = options.length, 4, 16
    q, k, v = (torch.randn(2, heads, n, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rate = torch.rand(heads, dtype=torch.float64, requires_grad=True)
    dilation = torch.tensor([1, 1, 2, 3])
    is_global = torch.zeros(2, n, dtype=torch.bool)
    is_global[:, :2] = True

    mask = longformer(reach, dilation, is_global)
    decay = tw.custom_score(lambda s, h, q, k, r: s - r[h] * tw.log2(1.0 + abs(q - k)), rate)
    out = tw.attention(q, k, v, mask=mask, scores=decay, backend=options.backend)

    i = torch.arange(n)
    far = (i[:, None] - i).abs()
    step = dilation.view(heads, 1, 1)
    keep = (
        ((far % step == 0) & (far <= reach * step)) | is_global[:, None, :, None] | is_global[:, None, None]
    )
    s = q @ k.transpose(-1, -2) * 16**-0.5 - rate.view(heads, 1, 1) * torch.log2(1.0 + far.double())
    truth = torch.softmax(s.masked_fill(~keep, float("-inf")), -1) @ v

    found = {"out": float((out - truth).detach().abs().max())}
    wanted = (q, k, v, rate)
    pairs = zip(
        "qkvr", torch.autograd.grad(out.square().sum(), wanted), torch.autograd.grad(truth.square().sum(), wanted),
        strict=True,
    )  # fmt: skip
    found |= {f"d{name}": float((a - b).abs().max()) for name, a, b in pairs}
    print("  ".join(f"{name} {value:.1e}" for name, value in found.items()))
    census = tw.explain(q, k, v, mask=mask).census
    found["skipped"] = census[0] / max(sum(census), 1)
    print(f"tiles without work: {found['skipped']:.0%}")
    return found


if __name__ == "__main__":
    main()
