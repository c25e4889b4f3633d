# %% [markdown]
# # 8. Split and merge
#
# A finished answer over some of the keys, with its lse, can be merged with one over other keys:
#
#     lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
#
# This is the softmax over two "keys" whose scores are lse_a and lse_b and whose values are out_a and out_b: attention
# over attentions. It is associative and commutative, and an empty part changes nothing.
#
# Source: Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135), section 3.1; used for splitting the
# keys of one query in Dao et al. 2023, [Flash-Decoding](https://crfm.stanford.edu/2023/10/12/flashdecoding.html), and
# across machines in Liu et al. 2023, [Ring Attention](https://arxiv.org/abs/2310.01889), section 3.

# %%
import itertools

import torch

import tilewise as tw
from tilewise.transforms import split_kv

torch.manual_seed(0)
B, H, N, D = 1, 2, 24, 8
q, k, v = (torch.randn(B, H, N, D, dtype=torch.float64) for _ in range(3))
whole, whole_lse = tw.attention(q, k, v, mask=tw.causal(), return_lse=True, backend="blockwise")

# %% [markdown]
# **Any order.** Four parts, merged in every order, in a chain and in a tree. Positions say which keys a part holds,
# so that a causal mask means the same for each of them.

# %%
split = split_kv(4)
ranges = split.ranges(N)
parts = [
    tw.attention_partial(
        q,
        k[:, :, keys],
        v[:, :, keys],
        mask=tw.causal(),
        q_offset=0,
        k_offset=keys.start,
        backend="blockwise",
    )
    for keys in ranges
]
for order in itertools.permutations(parts):
    chain = order[0].merge(order[1]).merge(order[2]).merge(order[3])
    tree = order[0].merge(order[1]).merge(order[2].merge(order[3]))
    for merged in (chain, tree, tw.merge(*order)):
        assert torch.allclose(merged.out, whole) and torch.allclose(merged.lse, whole_lse)
print(f"{len(ranges)} parts of {N // len(ranges)} keys: 24 orders, chains and trees, one answer")

# %% [markdown]
# **Empty parts.** The first queries see nothing of the last part: out = 0, lse = -inf there. exp(-inf) is 0, so such
# a part adds nothing, and if all are empty the answer is the empty row of the last lesson but one.

# %%
assert (parts[3].lse[:, :, : ranges[3].start] == -torch.inf).all()
nothing = tw.Partial(torch.zeros_like(whole), torch.full_like(whole_lse, -torch.inf))
assert torch.equal(tw.merge(nothing, nothing).lse, nothing.lse)
assert torch.allclose(tw.merge(parts[0], nothing).out, parts[0].out)

# %% [markdown]
# **The sink once.** A sink is one more key of value 0. Given to each part it is counted once per part; it belongs
# after all merges.

# %%
sink = torch.tensor([0.7, -0.2], dtype=torch.float64)
wanted = tw.attention(q, k, v, mask=tw.causal(), sink=sink, backend="blockwise")
assert torch.allclose(tw.merge(*parts).finalize(sink), wanted)
assert not torch.allclose(tw.merge(*(part.with_sink(sink) for part in parts)).out, wanted)

# %% [markdown]
# **Why one would.** A query that decodes one token has no rows to share a tile of keys with, so one processor would
# read the whole cache while the others wait. Split, all of them read. A prefix that many requests share is read once
# for all of them, and merged with each one's own part: a cascade. On a ring of machines each holds its keys, and the
# queries' partial answers travel.

# %%
prefix_k, prefix_v = k[:, :, :16], v[:, :, :16]
shared = tw.attention_partial(q, prefix_k, prefix_v, backend="blockwise")
for own in (slice(16, 20), slice(20, 24)):  # two requests with the same first 16 keys
    tail = tw.attention_partial(q, k[:, :, own], v[:, :, own], k_offset=16, backend="blockwise")
    keys = [torch.cat((x[:, :, :16], x[:, :, own]), 2) for x in (k, v)]
    assert torch.allclose(shared.merge(tail).out, tw.attention(q, *keys, backend="blockwise"))

# %% [markdown]
# **And back.** A merge is differentiable in every out and every lse, so gradients reach each part: a part's dlse is
# what the identity of [the last lesson](07_backward_identity.py) takes.

# %%
leaf = k.clone().requires_grad_()
halves = [
    tw.attention_partial(q, leaf[:, :, keys], v[:, :, keys], k_offset=keys.start, backend="blockwise")
    for keys in split_kv(2).ranges(N)
]
(split_dk,) = torch.autograd.grad(tw.merge(*halves).out.square().sum(), leaf)
(whole_dk,) = torch.autograd.grad(tw.attention(q, leaf, v, backend="blockwise").square().sum(), leaf)
assert torch.allclose(split_dk, whole_dk)

# %% [markdown]
# Next: [low precision](09_low_precision.py).
