# %% [markdown]
# # 11. Ordinary against tiled: memory and time
#
# Two functions that compute the same thing, on the same tensors, in the same type, under the same mask. What is
# compared is the peak of memory beyond inputs and outputs, and the time of a call.
#
# Source: Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135), theorem 1 (memory O(N)) and section
# 4.3.

# %%
import sys

import torch

import tilewise as tw
from tilewise.cli.memory import count_peak
from tilewise.cli.timing import Limits, time_calls

torch.manual_seed(0)
H, D = 2, 64
lengths = [int(text) for text in sys.argv[1:] if text.isdecimal()] or [512, 1024, 2048]
backend = next((text for text in sys.argv[1:] if not text.isdecimal()), "blockwise")


def ordinary(q, k, v, hidden):
    """Scores, mask, softmax, product: four operations, each on the whole matrix."""
    s = (q @ k.mT * D**-0.5).masked_fill(hidden, -torch.inf)
    return torch.softmax(s, -1) @ v


def tiled(q, k, v):
    """The same, tile by tile."""
    return tw.attention(q, k, v, mask=tw.causal(), backend=backend)


# %% [markdown]
# The mask is made before the clock starts, for ordinary attention's benefit: a causal mask as a tensor is N^2 more.

# %%
print(f"{H} heads of {D} dimensions, float32, causal, {torch.get_num_threads()} threads, backend {backend}")
print("tokens   ordinary: memory     time   tiled: memory     time")
peaks: dict[int, tuple[int, int]] = {}
with torch.no_grad():
    for n in lengths:
        q, k, v = (torch.randn(1, H, n, D) for _ in range(3))
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        calls = {
            "ordinary": lambda q=q, k=k, v=v, hidden=hidden: ordinary(q, k, v, hidden),
            "tiled": lambda q=q, k=k, v=v: tiled(q, k, v),
        }
        truth = ordinary(q.double(), k.double(), v.double(), hidden)
        errors = {name: float((call().double() - truth).abs().max()) for name, call in calls.items()}
        assert errors["tiled"] <= 2 * errors["ordinary"] + torch.finfo(torch.float32).eps * float(
            truth.abs().max()
        )
        memory = {name: count_peak(call).extra for name, call in calls.items()}
        found = time_calls(
            calls, torch.device("cpu"), Limits(least=3, most=9, seconds=2.0 if sys.argv[1:] else 0.2)
        )
        times = {name: 1e3 * timing.latency.median for name, timing in found.items()}
        peaks[n] = memory["ordinary"], memory["tiled"]
        print(f"{n:6}   {memory['ordinary'] / 2**20:12.1f} MiB {times['ordinary']:7.1f} ms"
              f" {memory['tiled'] / 2**20:9.1f} MiB {times['tiled']:7.1f} ms")  # fmt: skip

# %% [markdown]
# Twice the length, four times the memory, for the one that builds the matrix. The other's is that of a tile, which
# does not grow, and of lse, which grows like N.

# %%
for short, long in zip(lengths, lengths[1:], strict=False):
    if long == 2 * short and short >= 1024:
        assert 3.5 < peaks[long][0] / peaks[short][0] < 4.5
        assert peaks[long][1] < 2.1 * peaks[short][1]
assert peaks[lengths[-1]][1] < peaks[lengths[-1]][0]

# %% [markdown]
# Measured on two cores of an AMD EPYC, by `python docs/ladder/11_ordinary_against_tiled.py 1024 2048 4096`, and the
# same with `cpu` as the last word, the compiled backend. Memory is what PyTorch allocated beyond inputs and outputs.
#
# | tokens | ordinary | tiled, blockwise | tiled, cpu |
# |---|---|---|---|
# | 1024 | 16 MiB, 10.6 ms | 5 MiB, 13.4 ms | below 0.1 MiB, 2.7 ms |
# | 2048 | 64 MiB, 117.5 ms | 5 MiB, 35.5 ms | below 0.1 MiB, 8.7 ms |
# | 4096 | 256 MiB, 427.1 ms | 5 MiB, 90.6 ms | below 0.1 MiB, 34.7 ms |
#
# A causal mask hides half of the pairs: tiles skip them, ordinary attention computes them and hides them afterwards.
# That is a part of the difference, and a fair one, since both compute the same function.
#
# `tilewise bench` does the same with your shapes and adds SDPA and FlexAttention; `tilewise explain` says what a call
# will do before it does it. From here, [read the code](../reading.md).
