"""AlphaFold's row attention with pair bias: every row of an alignment attends under one learned (N, N) bias.

    python examples/pair_bias.py

The bias comes from the pair representation, is shared by all S rows, and gets a gradient. Ordinary code builds scores
of S * H * N * N; here they never exist, and the bias is stored once: its gradient is reduced over the rows inside.
Source: Jumper et al., 2021, https://doi.org/10.1038/s41586-021-03819-2, supplementary algorithm 7.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tilewise as tw


class RowAttentionWithPairBias(nn.Module):
    """alignment (S, N, C), pair (N, N, C_pair), present (N,) bool -> (S, N, C), gated."""

    def __init__(
        self, channels: int, channels_pair: int, heads: int, size: int, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.heads, self.backend = heads, backend
        self.norm, self.norm_pair = nn.LayerNorm(channels), nn.LayerNorm(channels_pair)
        self.qkv = nn.Linear(channels, 3 * heads * size, bias=False)
        self.bias = nn.Linear(channels_pair, heads, bias=False)
        self.gate, self.out = nn.Linear(channels, heads * size), nn.Linear(heads * size, channels)

    def forward(self, alignment: Tensor, pair: Tensor, present: Tensor, ordinary: bool = False) -> Tensor:
        x = self.norm(alignment)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        bias = self.bias(self.norm_pair(pair)).permute(2, 0, 1)[None]  # (1, H, N, N), for all S rows
        if ordinary:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
            out = torch.softmax(scores.masked_fill(~present, float("-inf")), -1) @ v
        else:
            mask = tw.key_padding(present.expand(len(x), -1))
            out = tw.attention(q, k, v, mask=mask, scores=tw.bias(bias), backend=self.backend)
        return self.out(torch.sigmoid(self.gate(x)) * out.transpose(1, 2).flatten(2))


def main(given: list[str] | None = None) -> dict[str, float]:
    """Compares output and gradients with ordinary attention in float64; returns the largest relative differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args(given)
    torch.manual_seed(0)
    layer = RowAttentionWithPairBias(32, 16, 4, 8, options.backend).double()
    alignment = torch.randn(options.rows, options.length, 32, dtype=torch.float64, requires_grad=True)
    pair = torch.randn(options.length, options.length, 16, dtype=torch.float64, requires_grad=True)
    present = torch.arange(options.length) < options.length - 5
    results = {}
    for name, ordinary in (("ordinary", True), ("tilewise", False)):
        out = layer(alignment, pair, present, ordinary)
        results[name] = (out, *torch.autograd.grad(out.square().sum(), (alignment, pair, layer.bias.weight)))
    found = {}
    for name, ours, theirs in zip(("out", "alignment", "pair", "bias"), *results.values(), strict=True):
        found[name] = float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())
        print(f"{name:>10}: largest relative difference {found[name]:.1e}")
    avoided = 8 * options.rows * 4 * options.length**2
    print(f"score matrix that was not built: {avoided / 2**20:.1f} MB in float64")
    return found


if __name__ == "__main__":
    main()
