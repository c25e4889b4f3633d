# %% [markdown]
# # 9. Low precision, against float64
#
# Tiles are not less accurate than ordinary attention; in 16 bits they are more so, if what survives a tile is kept in
# float32. Ordinary attention has to write its scores and weights to memory in 16 bits; tiles never write them at all.
#
# Source: Shah et al. 2024, [FlashAttention-3](https://arxiv.org/abs/2407.08608), section 4.3 (the same observation,
# for float16, with root mean square errors); the rule for what may be called exact is tilewise/testing/budgets.py's.

# %%
import math

import torch

import tilewise as tw

torch.manual_seed(0)
N, D = 256, 64


def ordinary(q, k, v):
    """As one writes it: every step in the type of its inputs."""
    return torch.softmax(q @ k.mT * D**-0.5, -1) @ v


def rms(x, truth):
    """Root mean square of the error."""
    return float((x.double() - truth).square().mean().sqrt())


print("type      spread   ordinary     tiles   error against float64, root mean square")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for spread in (1.0, 8.0):
        x = [torch.randn(1, 1, N, D) * factor for factor in (spread, 1.0, 1.0)]
        q, k, v = (t.to(dtype) for t in x)
        truth = ordinary(
            q.double(), k.double(), v.double()
        )  # of the rounded inputs: only the arithmetic is judged
        theirs = rms(ordinary(q, k, v), truth)
        ours = rms(tw.attention(q, k, v, backend="blockwise"), truth)
        print(f"{str(dtype)[6:]:9} {spread:6.0f}   {theirs:.2e}  {ours:.2e}")
        assert ours <= 2 * theirs + torch.finfo(dtype).eps * truth.abs().max()  # the library's own budget
        if dtype != torch.float32:
            assert ours < theirs

# %% [markdown]
# **The state is what must be wide.** l and acc are sums over all keys. In bfloat16, with 8 bits of precision, a sum
# stops growing when a term falls below 1/256 of it: with many keys most of them are lost. The tile size does not
# matter, the type of the state does.

# %%
scores = torch.zeros(1, 4096)  # equal scores: the answer is the mean
values = torch.rand(4096, 1) + 0.5
truth = values.double().mean()
errors = {}
for dtype in (torch.float32, torch.bfloat16):
    state = tw.OnlineSoftmaxState.empty((1,), 1, dtype=dtype)
    for j in range(0, 4096, 4):
        state = state.absorb(scores[:, j : j + 4], values[j : j + 4])
    errors[dtype] = abs(float(state.l) - 4096) / 4096
    out = float(state.finalize().out)
    print(
        f"a state in {str(dtype)[6:]}: l = {float(state.l):.0f} of 4096 keys, out = {out:.4f}, mean {truth:.4f}"
    )
assert errors[torch.float32] < 1e-6 and errors[torch.bfloat16] > 0.5

# %% [markdown]
# **Large scores.** Softmax depends on differences of scores, and a difference of large numbers has the rounding of
# the large ones: a score of 3000 in float32 is known to 2e-4, so weights are known to 2e-4, relatively. No order of
# sums can change that, for tiles or without them. lse = m + log l carries the same rounding, which is why the library
# passes on (m, l) where it can, and recomputes them in the backward pass.

# %%
exact = torch.tensor([3000.0, 2999.0], dtype=torch.float64)
step = torch.finfo(torch.float32).eps * 2048  # spacing of float32 numbers from 2048 to 4096
moved = exact + torch.tensor([step, 0.0])
change = float((torch.softmax(moved, 0) / torch.softmax(exact, 0) - 1).abs().max())
print(f"one rounding of a score of 3000 changes a weight by {change:.1e}")
assert math.isclose(change, step * float(torch.softmax(exact, 0)[0]), rel_tol=0.01)

# %% [markdown]
# Next: [why more arithmetic can take less time](10_more_arithmetic_less_time.py).
