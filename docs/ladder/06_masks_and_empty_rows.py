# %% [markdown]
# # 6. Masks, tiles that are skipped, rows that see nothing
#
# A hidden pair has the score -inf: its weight is exp(-inf) = 0. That is exact, and it has two traps.
#
# Source: Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135), section 3.3 and algorithm 2, line 11
# (the mask) and algorithm 5 (skipped blocks); Dao 2023, [FlashAttention-2](https://arxiv.org/abs/2307.08691), section
# 3.1.

# %%
import math

import torch

import tilewise as tw
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.tiles import EMPTY, FULL, PARTIAL, TileGrid, census, classify_tiles

torch.manual_seed(0)

# %% [markdown]
# **Trap one: a row that has seen nothing yet.** Its maximum is -inf, and -inf - (-inf) is NaN. The cure is to
# subtract 0 there: exp(-inf - 0) is the 0 that it should be.

# %%
hidden = torch.full((1, 4), -math.inf)
assert torch.exp(hidden - hidden.amax(-1, keepdim=True)).isnan().all()
state = tw.OnlineSoftmaxState.empty((1,), 2).absorb(hidden, torch.randn(4, 2))
assert state.m == -math.inf and state.l == 0 and not state.acc.isnan().any()
state = state.absorb(torch.tensor([[0.5]]), torch.tensor([[3.0, 4.0]]))  # its first visible key
assert state.finalize().out.tolist() == [[3.0, 4.0]]

# %% [markdown]
# **Trap two: a large negative number instead of -inf.** It works until a row sees nothing at all; then every score is
# the same, and the row becomes the mean of values that it must not see. Here such a row is 0, its lse is -inf, and
# its gradients are 0.

# %%
q, k, v = (torch.randn(1, 1, n, 8) for n in (6, 4, 4))
nothing = tw.custom(lambda q, k: q > 1000)
out, lse = tw.attention(q, k, v, mask=nothing, return_lse=True, backend="blockwise")
assert (out == 0).all() and (lse == -math.inf).all()
sentinel = torch.softmax(torch.full((6, 4), -1e9), -1) @ v[0, 0]
assert torch.allclose(sentinel, v[0, 0].mean(0).expand(6, 8), atol=1e-6)

# %% [markdown]
# **Tiles.** A tile in which nothing is visible need not be touched, and one in which everything is visible needs no
# mask. Which is which is found without looking at the pairs: the mask is evaluated once per tile, in interval
# arithmetic, on the range of its rows and the range of its columns. It works for any mask, also for one of your own.

# %%
N, BLOCK = 64, 8
masks = {
    "causal": tw.causal(),
    "causal, window": tw.causal() & tw.window(20, 0),
    "prefix-LM": tw.causal() | tw.prefix(16),
    "your own": tw.custom(lambda q, k: abs(q - k) < 4 + q // 4),
}
drawn = {EMPTY: "·", PARTIAL: "/", FULL: "#"}
i, j = torch.arange(N)[:, None], torch.arange(N)[None, :]
dense = {
    "causal": j <= i,
    "causal, window": (j <= i) & (i - j <= 20),
    "prefix-LM": (j <= i) | (j < 16),
    "your own": (i - j).abs() < 4 + i // 4,
}
for name, mask in masks.items():
    keep = AttentionSpec.parse(spec_text(mask, (), False, False)).keep
    classes = classify_tiles(
        keep, TileGrid(BLOCK, BLOCK, N, N), mask.term.leaves, mask.term.ints, mask.term.floats
    )
    # Sound: EMPTY means that no pair is visible, FULL that every pair is.
    pairs = dense[name].unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK).sum((-1, -2))
    assert (pairs[classes == EMPTY] == 0).all() and (pairs[classes == FULL] == BLOCK**2).all()
    empty, partial, full = census(classes)
    print(f"{name}: {empty} of {classes.numel()} tiles are skipped, {partial} need the mask, {full} do not")
    print("\n".join("  " + "".join(drawn[kind] for kind in row) for row in classes.tolist()))

# %% [markdown]
# **What is hidden never matters**, not even NaN: a mask is a select, never a multiplication by 0.

# %%
broken = k.clone(), v.clone()
for x in broken:
    x[:, :, 3] = math.nan
whole = tw.attention(q, k, v, mask=tw.prefix(3), backend="blockwise")
assert torch.equal(tw.attention(q, *broken, mask=tw.prefix(3), backend="blockwise"), whole)

# %% [markdown]
# Next: [the backward pass](07_backward_identity.py).
