# %% [markdown]
# # 4. When to divide
#
# FlashAttention-1 keeps a finished answer at all times: it divides by l at every tile, and multiplies by the old l
# when the next tile comes. FlashAttention-2 keeps acc undivided and divides once, at the end.
#
#     FlashAttention-1   out_j = (l_(j-1) * alpha * out_(j-1) + P_j V_j) / l_j        at every tile
#     FlashAttention-2   acc_j = alpha * acc_(j-1) + P_j V_j                          out = acc_n / l_n at the end
#
# Source: Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135), algorithm 1, line 12; Dao 2023,
# [FlashAttention-2](https://arxiv.org/abs/2307.08691), section 3.1 and algorithm 1, lines 10 and 12.

# %%
import math

import torch

import tilewise as tw

torch.manual_seed(0)
N, D, BLOCK = 64, 16, 8
q, k, v = (torch.randn(N, D, dtype=torch.float64) for _ in range(3))
scores = q @ k.T / math.sqrt(D)
truth = torch.softmax(scores, -1) @ v
tiles = [(scores[:, j : j + BLOCK], v[j : j + BLOCK]) for j in range(0, N, BLOCK)]


def divide_each_step(tiles):
    """out, and the number of multiplications and divisions beside the matrix products."""
    m, l, out = torch.full((N,), -math.inf), torch.zeros(N), torch.zeros(N, D)  # noqa: E741
    m, l, out = m.double(), l.double(), out.double()  # noqa: E741
    extra = 0
    for s, values in tiles:
        m_new = torch.maximum(m, s.amax(-1))
        p, alpha = torch.exp(s - m_new[:, None]), torch.exp(m - m_new)
        l_new = alpha * l + p.sum(-1)
        out = ((l * alpha)[:, None] * out + p @ values) / l_new[:, None]
        extra += 2 * out.numel()  # a multiplication and a division of each entry
        m, l = m_new, l_new  # noqa: E741
    return out, extra


def divide_once(tiles):
    """The same, undivided until the end: this is `absorb`, then `finalize`."""
    state = tw.OnlineSoftmaxState.empty((N,), D, dtype=torch.float64)
    extra = 0
    for s, values in tiles:
        state = state.absorb(s, values)
        extra += state.acc.numel()  # the multiplication by alpha
    return state.finalize().out, extra + state.acc.numel()


first, work_first = divide_each_step(tiles)
second, work_second = divide_once(tiles)
assert torch.allclose(first, truth) and torch.allclose(second, truth)
assert work_second * 2 == work_first + 2 * N * D  # half of it, and one division at the end
print(f"operations beside the products: {work_first:,} dividing at each tile, {work_second:,} dividing once")

# %% [markdown]
# Half the operations outside the products, and no division in the loop. On a GPU that matters more than it looks: the
# matrix units of an A100 do 312 TFLOP/s in 16 bits, everything else shares 19.5 (FlashAttention-2, section 3.1), so
# one operation outside the products costs as much time as sixteen inside.
#
# Both forms are in the library, because both are needed. The divided one is `Partial(out, lse)`: it can be stored,
# sent and merged without its history, so it is what crosses between splits and machines. The undivided one lives
# inside a kernel's loop. They are the same monoid in two coordinates.

# %%
parts = [tw.OnlineSoftmaxState.empty((N,), D, dtype=torch.float64).absorb(*tile) for tile in tiles]
merged_states = parts[0]
for part in parts[1:]:
    merged_states = merged_states.merge(part)
as_calls = [tw.Partial(p.finalize().out[None, None], p.finalize().lse[None, None]) for p in parts]
assert torch.allclose(merged_states.finalize().out, tw.merge(*as_calls).out[0, 0])

# %% [markdown]
# Next: [which loop is the outer one](05_loop_orders.py).
