# %% [markdown]
# # 7. The backward pass and one number for each query
#
# With `p = softmax(s)` and `dp_j = do . v_j`, the gradient of the scores is
#
#     ds_j = p_j * (dp_j - sum_k p_k dp_k)
#
# The sum runs over the whole row, which tiles do not hold. But it is known already: `sum_k p_k (do . v_k)` is `do .
# (sum_k p_k v_k)`, and that is do . out. One number for each query, `delta`, takes the place of a row.
#
# Source: Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135), appendix B.2, equations 3 to 6, and
# algorithm 4; Dao 2023, [FlashAttention-2](https://arxiv.org/abs/2307.08691), algorithm 2, line 4.

# %%
import math

import torch

import tilewise as tw

torch.manual_seed(0)
N, D, BLOCK = 32, 8, 8
scale = D**-0.5
q, k, v, do = (torch.randn(N, D, dtype=torch.float64) for _ in range(4))
s = scale * q @ k.T
p = torch.softmax(s, -1)
out, lse = p @ v, torch.logsumexp(s, -1)
dp = do @ v.T
delta = (do * out).sum(-1)
assert torch.allclose(delta, (p * dp).sum(-1))

# %% [markdown]
# So the backward pass is tiles again. A tile needs q, k, v and do of its rows and keys, and two numbers for each
# query: lse, from which the weights come back without a softmax, `p = exp(s - lse)`, and delta. The matrix is
# computed a second time instead of being kept. Here keys are outside, as in both papers: dk and dv stay, dq is added
# to.

# %%
dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
for j in range(0, N, BLOCK):
    keys = slice(j, j + BLOCK)
    for i in range(0, N, BLOCK):
        rows = slice(i, i + BLOCK)
        p_tile = torch.exp(scale * q[rows] @ k[keys].T - lse[rows, None])
        ds_tile = p_tile * (do[rows] @ v[keys].T - delta[rows, None])
        dv[keys] += p_tile.T @ do[rows]  # equation 3
        dq[rows] += scale * ds_tile @ k[keys]  # equation 5
        dk[keys] += scale * ds_tile.T @ q[rows]  # equation 6
x = [t.clone().requires_grad_() for t in (q, k, v)]
wanted = torch.autograd.grad(torch.softmax(scale * x[0] @ x[1].T, -1) @ x[2], x, do)
for mine, theirs in zip((dq, dk, dv), wanted, strict=True):
    assert torch.allclose(mine, theirs)
print(f"dq, dk, dv from tiles of {BLOCK} x {BLOCK}: equal to autograd's, and no matrix was kept")

# %% [markdown]
# Nothing in it asks for all keys, once lse and delta are those of the whole row. So any subset of the keys can make
# its own contribution, on another machine if need be. The library's call for that is `attention_partial_backward`.

# %%
four = [t[None, None] for t in (q, k, v)]
whole, whole_lse = tw.attention(*four, return_lse=True, backend="blockwise")
total_dq = torch.zeros_like(four[0])
for keys in (slice(0, 10), slice(10, 32)):
    part = tw.attention_partial_backward(
        four[0],
        four[1][:, :, keys],
        four[2][:, :, keys],
        whole,
        whole_lse,
        do[None, None],
        k_offset=keys.start,
    )
    total_dq += part.dq
    assert torch.allclose(part.dk[0, 0], dk[keys]) and torch.allclose(part.dv[0, 0], dv[keys])
assert torch.allclose(total_dq[0, 0], dq)

# %% [markdown]
# **If the loss uses lse as well**, its gradient dlse joins delta: `d lse / d s_j = p_j`, so `ds = p (dp - (delta -
# dlse))`. That one line makes merges differentiable (next lesson), and losses on the log-partition.

# %%
dlse = torch.randn(N, dtype=torch.float64)
x = [t.clone().requires_grad_() for t in (q, k, v)]
s_ = scale * x[0] @ x[1].T
(wanted_dq,) = torch.autograd.grad((torch.softmax(s_, -1) @ x[2], torch.logsumexp(s_, -1)), x[:1], (do, dlse))
assert torch.allclose(scale * (p * (dp - (delta - dlse)[:, None])) @ k, wanted_dq)

# %% [markdown]
# **Rounding.** `lse = m + log l` is rounded to the size of m, and out to its own type; in `exp(s - lse)` and in do .
# out these roundings enter every gradient. With scores in the thousands a weight comes back from lse with hundreds of
# roundings, as below. The reference therefore computes m, l and delta afresh, at the price of one more pass over the
# tiles.

# %%
big = torch.tensor(1e4 / 3)
lse32 = big + torch.log(torch.exp(big - big) + 1e-3)  # one more key, far below
error = abs(math.exp(float(big - lse32)) - 1 / 1.001)
print(f"a weight of {1 / 1.001:.4f} comes back from lse = {float(lse32):.1f} with an error of {error:.1e}")
assert error > 1e-5

# %% [markdown]
# The code is `_Backward` in tilewise/backends/reference/blockwise.py. Next: [split and merge](08_split_and_merge.py).
