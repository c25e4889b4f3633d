"""T5's relative position bias, learned: a student finds a teacher's table from attention's outputs alone.

    python examples/t5_bias.py

A T5 layer adds table[bucket(k - q), h] to the scores, a few numbers for each head, whatever the length. Tilewise reads
the table inside the tiles (`relative` with `t5_bucket`) and reduces its gradient there; the (N, N) bias that the usual
code builds for every layer never exists.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tilewise as tw


class T5Attention(nn.Module):
    """(B, H, N, D) -> (B, H, N, D), a learned bias for each of `buckets` distances, scores not scaled, as in T5.

    Source: Raffel et al., 2020, https://arxiv.org/abs/1910.10683, section 2.1.
    """

    def __init__(self, heads: int, buckets: int = 32, distance: int = 128, backend: str = "auto") -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads, buckets))
        self.register_buffer("bucket", tw.t5_bucket(buckets, distance))
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = tw.relative(self.bias, self.bucket)
        return tw.attention(q, k, v, scores=scores, scale=1.0, q_offset=0, backend=self.backend)


def main(given: list[str] | None = None) -> dict[str, float]:
    """Returns the first and the last loss, and the largest error of the learned factors exp(bias)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args(given)
    torch.manual_seed(0)
    heads, buckets = 4, 16
    teacher, student = (T5Attention(heads, buckets, 64, options.backend) for _ in range(2))
    nn.init.normal_(teacher.bias)
    optimiser = torch.optim.Adam(student.parameters(), lr=0.05)
    losses = []
    for step in range(options.steps):
        q, k, v = (torch.randn(2, heads, options.length, 16) * s for s in (0.2, 0.2, 1.0))
        loss = (student(q, k, v) - teacher(q, k, v).detach()).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.2e}")
    # What the table does to a weight is a factor; softmax does not see one that all share. One bucket is never read.
    factors = []
    for layer in (student, teacher):
        used = layer.bias.detach()[:, layer.bucket.unique()]
        factors.append(torch.softmax(used, 1) / torch.softmax(used, 1).amax(1, keepdim=True))
    error = float((factors[0] - factors[1]).abs().max())
    print(f"largest error of the learned factors exp(bias), of which each head's largest is 1: {error:.4f}")
    return {"first": losses[0], "last": losses[-1], "error": error}


if __name__ == "__main__":
    main()
