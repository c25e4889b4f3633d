"""Swin's shifted windows: attention inside squares of an image, with a learned two-dimensional relative bias.

    python examples/swin.py

The bias table has (2 w - 1)^2 entries per head and is read inside the tiles by a custom score; the squares that a shift
glues together from opposite edges are told apart by `document`, so no (w^2, w^2) matrix is built for either.
Source: Liu et al., 2021, https://arxiv.org/abs/2103.14030, equation 4 and section 3.2.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tilewise as tw


def squares(x: Tensor, w: int) -> Tensor:
    """(B, Y, X, C) -> (B * Y / w * X / w, w * w, C)."""
    b, rows, columns, c = x.shape
    x = x.view(b, rows // w, w, columns // w, w, c)
    return x.transpose(2, 3).reshape(-1, w * w, c)


def image(x: Tensor, w: int, shape: tuple[int, int, int]) -> Tensor:
    """The inverse of `squares`; shape is (B, Y, X)."""
    b, rows, columns = shape
    return x.view(b, rows // w, columns // w, w, w, -1).transpose(2, 3).reshape(b, rows, columns, -1)


class SwinAttention(nn.Module):
    """(B, Y, X, C) -> the same, inside w x w squares, shifted by `shift` pixels."""

    def __init__(self, channels: int, heads: int, w: int, shift: int = 0, backend: str = "auto") -> None:
        super().__init__()
        self.heads, self.w, self.shift, self.backend = heads, w, shift, backend
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.table = nn.Parameter(0.5 * torch.randn((2 * w - 1) ** 2, heads))

    def regions(self, shape: tuple[int, int, int]) -> Tensor:
        """Which part of the unshifted image a pixel of the shifted one belongs to, as squares (B * n, w * w)."""
        b, rows, columns = shape
        sides = [
            (torch.arange(n) >= n - self.w).long() + (torch.arange(n) >= n - self.shift).long()
            for n in (rows, columns)
        ]
        ids = (3 * sides[0][:, None] + sides[1])[None, :, :, None].expand(b, -1, -1, 1)
        return squares(ids, self.w)[..., 0]

    def forward(self, x: Tensor, ordinary: bool = False) -> Tensor:
        shape, w = tuple(x.shape[:3]), self.w
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(squares(x, w)).chunk(3, -1)
        )
        ids = self.regions(shape) if self.shift else None
        if ordinary:
            y, z = torch.arange(w * w) // w, torch.arange(w * w) % w
            index = (y[:, None] - y + w - 1) * (2 * w - 1) + z[:, None] - z + w - 1
            s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.table[index].permute(2, 0, 1)
            s = (
                s
                if ids is None
                else s.masked_fill(ids[:, None, :, None] != ids[:, None, None], float("-inf"))
            )
            out = torch.softmax(s, -1) @ v
        else:
            bias = tw.custom_score(
                lambda s, h, i, j, t: (
                    s + t[(i // w - j // w + w - 1) * (2 * w - 1) + i % w - j % w + w - 1, h]
                ),
                self.table,
            )
            mask = None if ids is None else tw.document(ids)
            out = tw.attention(q, k, v, scores=bias, mask=mask, backend=self.backend)
        x = image(self.out(out.transpose(1, 2).flatten(2)), w, shape)
        return x.roll((self.shift, self.shift), (1, 2)) if self.shift else x


def main(given: list[str] | None = None) -> dict[str, float]:
    """Two layers, plain and shifted, against ordinary attention in float64: largest relative differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=56, help="pixels on a side, a multiple of 7")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args(given)
    torch.manual_seed(0)
    layers = nn.ModuleList([SwinAttention(24, 3, 7, shift, options.backend) for shift in (0, 3)]).double()
    x = torch.randn(2, options.size, options.size, 24, dtype=torch.float64)
    results = []
    for ordinary in (True, False):
        y = x
        for layer in layers:
            y = y + layer(y, ordinary)
        results.append((y, *torch.autograd.grad(y.square().mean(), [layer.table for layer in layers])))
    found = {}
    for name, theirs, ours in zip(("out", "table", "table, shifted"), *results, strict=True):
        found[name] = float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())
        print(f"{name:>15}: largest relative difference {found[name]:.1e}")
    return found


if __name__ == "__main__":
    main()
