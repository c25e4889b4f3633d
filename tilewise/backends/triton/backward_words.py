"""The backward, and what its kernels share: weights, slopes, and the sums of leaves.

`prepare_kernel` writes m, low and delta of every row, `key_kernel` dk and dv of tiles of keys, `row_kernel` dq of
tiles of rows: seven products for five, and no addition to memory that another program adds to, so bits repeat. All
walk the tiles as the forward does: FULL runs without mask work, PARTIAL runs with it, EMPTY tiles jumped over.

Weights are exp(s - m); a row that takes no part has m = +inf.

The second look. Two things are too dear for every tile, and rare: m alone carries the rounding of a large lse, and a
product with a weight of 0 lets a NaN through. Heads that `prepare_kernel` marked, and heads of a program whose sums
came out NaN, are left to a second launch of both kernels (CAREFUL): weights from m and low apart, what is not finite
taken as 0 in the products (a pair that sees it has a NaN in its weight or slope already), rows that take no part cut
off by a select. Its programs find no mark in the usual call, and end at once; the host reads nothing.

Source: Dao, FlashAttention-2, 2023, algorithm 2, https://arxiv.org/abs/2307.08691.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.words import LOG2E

CHUNK = tl.constexpr(128)
"""Tiles classified at once."""
INF = tl.constexpr(float("inf"))


@triton.jit
def finite(x):
    """x with 0 in the place of what is not finite."""
    wide = x.to(tl.float32)
    return tl.where((wide - wide) == 0, wide, 0.0).to(x.dtype)


@triton.jit
def weights(
    s,
    m,
    low,
    scale,
    i,
    j,
    q_pos,
    k_pos,
    b,
    h,
    g,
    data,
    derive,
    HAS_TERMS: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """(p, what `derive` found): weights of the raw scores s, before masks; m and low broadcast against s."""
    found = (s,)
    if HAS_TERMS:
        found = derive(s * scale, i, j, q_pos, k_pos, b, h, g, data)
        if CAREFUL:
            p = tl.exp2((found[0] - m) * LOG2E - low)
        else:
            p = tl.exp2(tl.fma(found[0], LOG2E, -m * LOG2E))
    elif CAREFUL:
        p = tl.exp2((s * scale - m) * LOG2E - low)
    else:
        p = tl.exp2(tl.fma(s, scale * LOG2E, -m * LOG2E))
    return p, found


@triton.jit
def contribution(p, ds, slope):
    """ds times a slope; 0 where the weight is 0: the pair is hidden or might as well be, whatever its slope is."""
    return tl.where(p == 0, 0.0, ds * slope)


@triton.jit
def start_sums(SIZE: tl.constexpr, SITES: tl.constexpr):
    """A vector of zeros for each site."""
    sums = ()
    for _ in tl.static_range(len(SITES)):
        sums = sums + (tl.zeros([SIZE], tl.float32),)
    return sums


@triton.jit
def add_sums(sums, p, ds, found, SITES: tl.constexpr):
    """The vectors after one tile: its contributions to each site's leaf, summed along the second axis."""
    added = ()
    for n in tl.static_range(len(SITES)):
        added = added + (sums[n] + tl.sum(contribution(p, ds, found[2 + SITES[n]]), 1),)
    return added


@triton.jit
def store_sums(ptr, sums, plane, at, mask, SITES: tl.constexpr):
    """Write each vector to its plane of (sites, batch * heads, tokens)."""
    for n in tl.static_range(len(SITES)):
        tl.store(ptr + tl.cast(plane, tl.int64) * n + at, sums[n], mask=mask)
