# %% [markdown]
# # 1. Softmax in three passes
#
# Softmax turns scores into weights: `y_j = exp(x_j) / sum_i exp(x_i)`. Written like that it overflows: in float32,
# exp(89) is already infinite, and infinity over infinity is NaN.
#
# Source: Milakov and Gimelshein 2018, [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867),
# section 2, algorithms 1 (naive) and 2 (safe).

# %%
import math

import torch

x = torch.tensor([3.0, 95.0, -4.0, 94.0, 12.0, 95.5])


def naive(x):
    """Algorithm 1: a pass for the sum, a pass for the quotients."""
    total = torch.exp(x).sum()
    return torch.exp(x) / total


assert naive(x).isnan().any()

# %% [markdown]
# The same constant may be taken from all scores: `exp(x_j - c) / sum_i exp(x_i - c)` does not depend on `c`. With `c
# = max(x)` no exponent is above 0, so nothing overflows, and one term of the sum is exp(0) = 1, so nothing is divided
# by 0. That is the price of safety: a pass more, because the maximum must be known before the first exponential.

# %%
truth = torch.softmax(x.double(), 0)
for c in (0.0, 40.0, 95.5):
    shifted = torch.exp(x.double() - c)
    assert torch.allclose(shifted / shifted.sum(), truth, rtol=1e-12)


def safe(x):
    """Algorithm 2, one number at a time. Returns the weights and how often a number was read."""
    reads = 0
    m = -math.inf
    for value in x:  # pass 1: the maximum
        m = max(m, value)
        reads += 1
    l = 0.0  # noqa: E741
    for value in x:  # pass 2: the sum
        l += math.exp(value - m)  # noqa: E741
        reads += 1
    y = []
    for value in x:  # pass 3: the weights
        y.append(math.exp(value - m) / l)
        reads += 1
    return y, reads


y, reads = safe(x.tolist())
assert torch.allclose(torch.tensor(y, dtype=torch.float64), truth, rtol=1e-12)
assert reads == 3 * len(x)
print(f"safe softmax of {len(x)} scores: {reads} reads, {len(x)} writes; naive: {naive(x).tolist()}")

# %% [markdown]
# Three reads and a write of each score. A softmax does next to no arithmetic, so on any machine it takes the time of
# those four moves. The [next lesson](02_online_softmax.py) saves one of them.
