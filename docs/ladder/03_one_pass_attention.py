# %% [markdown]
# # 3. Attention in one pass: scalars, vectors, tiles
#
# Attention does not want the weights, only the sum of values that they weigh. A sum can be rescaled like the
# softmax's own, so the second pass goes as well:
#
#     m_j   = max(m_(j-1), x_j)                     alpha = exp(m_(j-1) - m_j)
#     l_j   = alpha * l_(j-1)   + exp(x_j - m_j)
#     acc_j = alpha * acc_(j-1) + exp(x_j - m_j) * v_j          out = acc_n / l_n
#
# Source: Rabe and Staats 2021, [Self-attention does not need O(n^2) memory](https://arxiv.org/abs/2112.05682),
# section 2; Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135), section 3.1.

# %%
import math

import torch

import tilewise as tw

torch.manual_seed(0)
N, D = 24, 8
q, k, v = (torch.randn(N, D, dtype=torch.float64) for _ in range(3))
scores = q @ k.T / math.sqrt(D)
truth = torch.softmax(scores, -1) @ v

# %% [markdown]
# **Scalars.** One query, one column of the values, three numbers that survive from key to key.


# %%
def scalars(x, values):
    """One query, one value column, one key at a time."""
    m, l, acc = -math.inf, 0.0, 0.0  # noqa: E741
    for score, value in zip(x, values, strict=True):
        m_new = max(m, score)
        alpha, p = math.exp(m - m_new), math.exp(score - m_new)
        m, l, acc = m_new, alpha * l + p, alpha * acc + p * value  # noqa: E741
    return acc / l


assert math.isclose(scalars(scores[5].tolist(), v[:, 2].tolist()), truth[5, 2], rel_tol=1e-10)

# %% [markdown]
# **Vectors.** All queries at once, one key at a time: m and l hold a number for each query, acc a row.

# %%
state = tw.OnlineSoftmaxState.empty((N,), D, dtype=torch.float64)
for j in range(N):
    state = state.absorb_key(scores[:, j], v[j].expand(N, D))
assert torch.allclose(state.finalize().out, truth)

# %% [markdown]
# **Tiles.** A tile of keys at a time, a tile of queries at a time. The matrix of scores is nowhere: a tile of it is
# made when it is needed, and forgotten. The two products are matrix products, which is what the hardware is good at.

# %%
BLOCK_Q, BLOCK_K = 8, 6
out = torch.empty_like(truth)
for i in range(0, N, BLOCK_Q):
    state = tw.OnlineSoftmaxState.empty((BLOCK_Q,), D, dtype=torch.float64)
    for j in range(0, N, BLOCK_K):
        tile = q[i : i + BLOCK_Q] @ k[j : j + BLOCK_K].T / math.sqrt(D)
        state = state.absorb(tile, v[j : j + BLOCK_K])
    out[i : i + BLOCK_Q] = state.finalize().out
assert torch.allclose(out, truth)

# %% [markdown]
# **Prefixes.** The state never knows that more keys will come. So after any tile, acc / l is exact attention over the
# keys seen so far: `stream` yields it. This is why caches can grow and why work can be split.

# %%
blocks = [scores[:, j : j + BLOCK_K] for j in range(0, N, BLOCK_K)]
values = [v[j : j + BLOCK_K] for j in range(0, N, BLOCK_K)]
for n, partial in enumerate(tw.stream(blocks, values), 1):
    seen = n * BLOCK_K
    assert torch.allclose(partial.out, torch.softmax(scores[:, :seen], -1) @ v[:seen])
    print(f"{seen:3} keys: largest distance to the final answer {(partial.out - truth).abs().max():.3f}")

# %% [markdown]
# `tilewise trace` shows these steps with your own numbers. The same loop for whole calls, with masks and score terms,
# is `_forward_rows` in tilewise/backends/reference/blockwise.py. Next: [when to divide](04_deferred_division.py).
