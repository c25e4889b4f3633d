# %% [markdown]
# # 5. Which loop is outside, and what it moves
#
# Tiles can be visited query by query or key by key. The answer is the same; the traffic between memory and chip is
# not, because a different thing stays on the chip.
#
#     queries outside   q, m, l, acc stay; k and v pass by          FlashAttention-2
#     keys outside      k, v stay; q, m, l, acc pass by, both ways  FlashAttention-1
#
# Source: Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135), algorithm 1 and theorem 2; Dao 2023,
# [FlashAttention-2](https://arxiv.org/abs/2307.08691), section 3.2 and algorithm 1.

# %%
import torch

from tilewise.analysis import bytes_ordinary, bytes_tiled, trace
from tilewise.analysis.schedules import SCHEDULES, count

torch.manual_seed(0)
q, k, v = (torch.randn(64, 16) for _ in range(3))
made = trace(q, k, v, block_q=16, block_k=16)
run = made.recording
forward = {loop: run.steps["forward", loop] for loop in ("queries outer", "keys outer")}
orders = {loop: [(s.row, s.column) for s in steps if s.kind == "tile"] for loop, steps in forward.items()}
print("queries outside:", orders["queries outer"][:6], "...")
print("keys outside:   ", orders["keys outer"][:6], "...")
assert sorted(orders["queries outer"]) == sorted(orders["keys outer"])

# %% [markdown]
# Counted tile by tile. With queries outside: q once, k and v once for each tile of queries, out once. With keys
# outside k and v come once, and for every tile the queries come with their state, and the state goes back.

# %%
for loop, steps in forward.items():
    moved: dict[str, int] = {}
    for step in steps:
        for name, size in step.moves:
            moved[name] = moved.get(name, 0) + abs(size)
    print(
        f"{loop:14} {steps[-1].tiled:7,} bytes: "
        + ", ".join(f"{name} {size:,}" for name, size in moved.items())
    )
assert forward["queries outer"][-1].tiled < forward["keys outer"][-1].tiled
sizes = {"batch": 1, "num_heads_q": 1, "head_dim": 16, "head_dim_v": 16, "itemsize": 4}
assert forward["queries outer"][-1].tiled == bytes_tiled(**sizes, seqlen_q=64, seqlen_k=64, block_q=16)

# %% [markdown]
# The law behind it. With M numbers on the chip, a tile of queries holds about M / d rows; k and v, 2 N d numbers,
# pass by once for each of N d / M tiles: Theta(N^2 d^2 / M) in all. Ordinary attention moves Theta(N d + N^2). So the
# traffic of tiles is quadratic in N as well, and smaller by the factor M / d^2: twice the chip, half the traffic.

# %%
big = {**sizes, "head_dim": 128, "head_dim_v": 128, "itemsize": 2, "seqlen_q": 8192, "seqlen_k": 8192}
ordinary = bytes_ordinary(**big, num_heads_kv=1)
tiled = {block: bytes_tiled(**big, block_q=block) for block in (1, 16, 64, 128, 256)}
for block, size in tiled.items():
    print(f"{block:4} queries in a tile: {size / 2**20:8.1f} MiB; ordinary {ordinary / 2**20:.1f} MiB")
assert 1.9 < tiled[64] / tiled[128] < 2.0

# %% [markdown]
# And where it stops paying. Per pair, ordinary attention moves 4 numbers, and a tile of B queries 2 d / B: below d /
# 2 queries in a tile, storing the matrix would be cheaper, if memory had room for it. Here d is 128, and 64 queries
# break even. Decoding, where there is one query only, is the extreme: tiles of queries save nothing, and other means
# are needed, see [split and merge](08_split_and_merge.py).

# %%
assert tiled[1] > ordinary > 1.9 * tiled[128]
assert abs(tiled[64] / ordinary - 1) < 0.01

# %% [markdown]
# **Counted, not only priced.** The schedules of the literature also run on a simulated memory of two levels, where
# every load and store is counted, with M numbers on the chip. One that does not look at M gains nothing from a larger
# chip: being tiled is not the same as being I/O-optimal.

# %%
x = tuple(torch.randn(256, 16) for _ in range(3))
truth = torch.softmax((x[0] @ x[1].T).double() / 4, -1) @ x[2].double()
moved = {}
for name in ("ordinary", "rabe-staats", "flash1", "flash2"):
    for capacity in (1024, 2048, 4096):
        counted = count(name, x, capacity)
        assert torch.allclose(counted.results["out"], truth, atol=1e-5)
        assert counted.peak <= capacity
        moved[name, capacity] = counted.traffic.total
    print(
        f"{SCHEDULES[name].title:22}"
        + "".join(f"{moved[name, m]:12,}" for m in (1024, 2048, 4096))
        + "  numbers moved"
    )
assert moved["rabe-staats", 2048] == moved["rabe-staats", 4096]
assert moved["flash2", 1024] > 1.8 * moved["flash2", 2048] and moved["flash2", 4096] < moved["ordinary", 4096]

# %% [markdown]
# Next: [masks](06_masks_and_empty_rows.py).
