# %% [markdown]
# # 10. More arithmetic, less time
#
# The tiled backward pass computes the scores a second time. Counted in products of N x N x D it does five where
# ordinary attention, which kept its weights, does four. It is quicker all the same, wherever moving a number costs
# more than computing it: a matrix that is made in the cache and used there is never waited for.
#
# Source: Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135), section 3.2 and figure 2 (left): 75.2
# GFLOPs against 66.6, 4.4 GB moved against 40.3, 7.3 ms against 41.7 on an A100.
#
# The counts first, for one head of 4096 tokens and 64 dimensions in float32.

# %%
import sys

import torch
from torch.utils.checkpoint import checkpoint

from tilewise.analysis import attention_flops, bytes_ordinary, bytes_tiled
from tilewise.cli.timing import Limits, time_calls

N, D = 4096, 64
forward = attention_flops(N * N, D, D)
backward = attention_flops(N * N, D, D, backward=True)
kept = backward * 4 // 5  # the weights were kept: their product is not repeated
sizes = {
    "batch": 1,
    "num_heads_q": 1,
    "seqlen_q": N,
    "seqlen_k": N,
    "head_dim": D,
    "head_dim_v": D,
    "itemsize": 4,
}
ordinary_bytes, tiled_bytes = bytes_ordinary(**sizes, num_heads_kv=1), bytes_tiled(**sizes, block_q=256)
print(
    f"arithmetic: ordinary {(forward + kept) / 1e9:.1f} GFLOP, recomputed {(forward + backward) / 1e9:.1f} GFLOP"
)
print(
    f"traffic, forward: ordinary {ordinary_bytes / 2**20:.0f} MiB, tiles of 256 queries {tiled_bytes / 2**20:.0f} MiB"
)
assert forward + backward > forward + kept and tiled_bytes * 5 < ordinary_bytes

# %% [markdown]
# Now the clock, with nothing but PyTorch on both sides, so that only the schedule differs. The second function cuts
# the queries into blocks whose scores fit into a cache, and `checkpoint` throws each block's weights away and
# computes the block again in the backward pass: a third more arithmetic than the first function does.


# %%
def attend(q, k, v):
    """Attention as one writes it."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def whole(q, k, v):
    """The matrix is written, kept, and read in the backward pass."""
    return attend(q, k, v)


def recomputed(q, k, v, block=128):
    """A strip of the matrix at a time, forgotten and made again."""
    return torch.cat([checkpoint(attend, rows, k, v, use_reentrant=False) for rows in q.split(block, -2)], -2)


def step(function, x):
    """Forward and backward."""
    return lambda: torch.autograd.grad(function(*x).sum(), x)


def measure(lengths, seconds):
    """Both functions at each length: the same gradients, and the time of each."""
    torch.manual_seed(0)
    for n in lengths:
        x = [torch.randn(2, n, D, requires_grad=True) for _ in range(3)]
        calls = {"whole": step(whole, x), "recomputed": step(recomputed, x)}
        for mine, theirs in zip(calls["recomputed"](), calls["whole"](), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)
        found = time_calls(calls, torch.device("cpu"), Limits(least=3, most=9, seconds=seconds))
        times = {name: 1e3 * timing.latency.median for name, timing in found.items()}
        print(f"{n:6} tokens: kept {times['whole']:8.1f} ms, recomputed {times['recomputed']:8.1f} ms, "
              f"ratio {times['whole'] / times['recomputed']:.2f}")  # fmt: skip


lengths = [int(text) for text in sys.argv[1:]] or [256, 512]
measure(lengths, seconds=2.0 if sys.argv[1:] else 0.2)

# %% [markdown]
# Measured on two cores of an AMD EPYC, two heads of 64 dimensions in float32, by
# `python docs/ladder/10_more_arithmetic_less_time.py 1024 2048 4096`:
#
# | tokens | kept | recomputed | ratio |
# |---|---|---|---|
# | 1024 | 25.3 ms | 35.1 ms | 0.72 |
# | 2048 | 176.7 ms | 150.0 ms | 1.18 |
# | 4096 | 730.7 ms | 510.6 ms | 1.43 |
#
# At 1024 tokens the two matrices, 8 MiB, still lie in a cache, and the additional arithmetic is a loss. Beyond it the
# first function waits for memory, and the second, which does a third more, does not.
#
# What the strips still do is write scores and weights into the cache, and pass over them once for each operation. The
# kernels go on from here: all steps of a tile in registers, [ordinary against tiled](11_ordinary_against_tiled.py).
