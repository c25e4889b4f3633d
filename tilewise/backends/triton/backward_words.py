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

CHUNK = tl.constexpr(512)
"""Tiles classified at once."""
INF = tl.constexpr(float("inf"))


@triton.jit
def _survey(
    first_a, past_a, full_a, after_a, live_a, fulls_a, first_b, past_b, full_b, after_b, live_b, fulls_b
):  # fmt: skip
    return (
        tl.minimum(first_a, first_b), tl.maximum(past_a, past_b), tl.minimum(full_a, full_b),
        tl.maximum(after_a, after_b), live_a + live_b, fulls_a + fulls_b
    )  # fmt: skip


@triton.jit
def survey(kind, t, stop):
    """(first, full, after, past, simple) of a chunk of tiles t of a kind each: live tiles are first .. past - 1, FULL
    ones full .. after - 1; `simple` says that no others are between them. Without a live tile first = past."""
    live, fulls = (kind != 0).to(tl.int32), (kind == 2).to(tl.int32)
    low, high = tl.where(kind != 0, t, stop), tl.where(kind != 0, t + 1, 0)
    full_low, full_high = tl.where(kind == 2, t, stop), tl.where(kind == 2, t + 1, 0)
    first, past, full, after, live, fulls = tl.reduce(
        (low, high, full_low, full_high, live, fulls), 0, _survey
    )
    simple = (live == past - first) & ((fulls == 0) | (fulls == after - full))
    past = tl.maximum(past, first)
    return first, tl.where(fulls > 0, full, past), tl.where(fulls > 0, after, past), past, simple


@triton.jit
def piece_of(kind, t, at, stop):
    """(first, full, after, past): the next PARTIAL, FULL and again PARTIAL tiles from tile `at` on, none between."""
    first = tl.min(tl.where((t >= at) & (kind != 0), t, stop), 0)
    full = tl.min(tl.where((t >= first) & (kind != 1), t, stop), 0)
    after = tl.min(tl.where((t >= full) & (kind != 2), t, stop), 0)
    past = tl.min(tl.where((t >= after) & (kind != 1), t, stop), 0)
    return first, full, after, past


@triton.jit
def pitch_of(seqlen_q, ALIGNED: tl.constexpr):
    """Elements from one head's statistics of rows to the next one's; ALIGNED: they begin at multiples of 16 bytes, as
    the copy engine wants it."""
    pitch = seqlen_q
    if ALIGNED:
        pitch = tl.cdiv(seqlen_q, 4) * 4
    return pitch


@triton.jit
def any_marked(ptr, count):
    """Whether one of some marks is set."""
    found = 0
    for start in range(0, count, 32):
        n = start + tl.arange(0, 32)
        found = tl.maximum(found, tl.max(tl.load(ptr + n, mask=n < count, other=0), 0))
    return found > 0


@triton.jit
def store_tile(ptr, tile, rows, stride_n, size_d, row_mask, D_PAD: tl.constexpr, STEP: tl.constexpr):
    """Write rows of a (tokens, D) view whose last dimension is contiguous; stride_n is in units of STEP elements, which
    divides D, so that rows are written by vectors."""
    d = tl.arange(0, D_PAD)
    pointers = ptr + (rows.to(tl.int64) * stride_n)[:, None] * STEP + d[None, :]
    inside = row_mask[:, None] & (d // STEP < size_d // STEP)[None, :]
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=inside)


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
            p = tl.exp2(tl.fma(found[0], LOG2E, m * -LOG2E))
    elif CAREFUL:
        p = tl.exp2((s * scale - m) * LOG2E - low)
    else:
        p = tl.exp2(tl.fma(s, scale * LOG2E, m * -LOG2E))
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
    """The vectors after one tile: its contributions to each site's leaf, summed along the second axis; of site -1 the
    slopes themselves."""
    added = ()
    for n in tl.static_range(len(SITES)):
        if SITES[n] < 0:
            part = ds
        else:
            part = contribution(p, ds, found[2 + SITES[n]])
        added = added + (sums[n] + tl.sum(part, 1),)
    return added


@triton.jit
def store_sums(ptr, sums, plane, at, mask, SITES: tl.constexpr):
    """Write each vector to its plane of (sites, batch * heads, tokens); packed, of (sites, heads, tokens)."""
    for n in tl.static_range(len(SITES)):
        tl.store(ptr + plane * n + at, sums[n], mask=mask)
