# %% [markdown]
# # 2. The maximum and the sum in one pass
#
# The sum needs the maximum, so it seems to need a pass of its own. It does not, if it may be corrected later: a sum
# that was built with an older maximum is off by one factor, and that factor is known.
#
#     m_j = max(m_(j-1), x_j)
#     l_j = l_(j-1) * exp(m_(j-1) - m_j) + exp(x_j - m_j)
#
# Source: Milakov and Gimelshein 2018, [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867),
# section 3, algorithm 3, lines 4 and 5, and theorem 1.

# %%
import math

import torch

import tilewise as tw

torch.manual_seed(0)
x = (10 * torch.randn(50, dtype=torch.float64)).tolist()


def online(x):
    """Algorithm 3: maximum and sum in one pass, the weights in another."""
    m, l = -math.inf, 0.0  # noqa: E741
    rescaled = 0
    for j, value in enumerate(x):
        m_new = max(m, value)
        alpha = math.exp(m - m_new)  # exp(-inf) = 0 at the first score: there is nothing to keep
        l = l * alpha + math.exp(value - m_new)  # noqa: E741
        rescaled += alpha != 1.0
        m = m_new
        # Theorem 1: at any time, l is the sum over what was seen, relative to the maximum of what was seen.
        seen = torch.tensor(x[: j + 1], dtype=torch.float64)
        assert m == seen.max() and math.isclose(l, torch.exp(seen - m).sum(), rel_tol=1e-12)
    return [math.exp(value - m) / l for value in x], rescaled


y, rescaled = online(x)
assert torch.allclose(torch.tensor(y), torch.softmax(torch.tensor(x), 0).to(torch.float32))
print(f"{len(x)} scores, the maximum moved {rescaled} times: two reads of each score instead of three")

# %% [markdown]
# A new maximum comes ever more rarely: the j-th of n scores in random order is the largest so far with probability
# 1/j, so about ln(n) + 0.6 times in all. The rescaling costs almost nothing.
#
# The library keeps the same two numbers, and a third that the next lesson needs. Given values that are all 1, the
# third equals the second.

# %%
state = tw.OnlineSoftmaxState.empty((), 1, dtype=torch.float64)
for value in x:
    state = state.absorb_key(torch.tensor(value, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
m = max(x)
assert state.m == m and torch.allclose(state.l, state.acc[0])
assert math.isclose(state.l, sum(math.exp(value - m) for value in x), rel_tol=1e-12)
assert math.isclose(state.finalize().lse, math.log(sum(math.exp(value) for value in x)), rel_tol=1e-12)

# %% [markdown]
# Its code is `OnlineSoftmaxState.absorb` in tilewise/state.py: these two lines, for tiles of rows and keys. Next:
# [attention in one pass](03_one_pass_attention.py).
