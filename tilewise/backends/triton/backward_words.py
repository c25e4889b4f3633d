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

from tilewise.backends.triton.forward_kernel import find_sequence, sequence_length
from tilewise.backends.triton.runs_words import RUN, load_runs, piece_of  # noqa: F401 for the kernels
from tilewise.backends.triton.words import LOG2E

CHUNK = tl.constexpr(512)
"""Tiles classified at once."""
INF = tl.constexpr(float("inf"))


@triton.jit
def locate(
    unit, tile, batch, heads, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, seqlen_q, seqlen_k,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """(b, head, tile, tensor_b, row0, n_q, key0, n_k) of tile `tile` of a unit, a head of a batch entry, or of the
    packed tokens: the sequence and its tile (KEYS: of BLOCK keys, else of BLOCK rows), the tensors' batch entry, where
    the sequence's rows and keys begin there, and how many there are."""
    if VARLEN:
        if KEYS:
            b, tile = find_sequence(cu_k_ptr, tile, batch, seqlen_k, BLOCK)
        else:
            b, tile = find_sequence(cu_q_ptr, tile, batch, seqlen_q, BLOCK)
        row0, n_q = sequence_length(cu_q_ptr, used_q_ptr, b, seqlen_q)
        key0, n_k = sequence_length(cu_k_ptr, used_k_ptr, b, seqlen_k)
        head, tensor_b = unit, 0
    else:
        b, head = unit // heads, unit % heads
        tensor_b, row0, n_q, key0, n_k = b, 0, seqlen_q, 0, seqlen_k
    return b, head, tile, tensor_b, row0, n_q, key0, n_k


@triton.jit
def row_kinds(t, count, tile, place, data, classify, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Kinds (0 EMPTY, 1 PARTIAL, 2 FULL) of row tiles t, of which there are `count`, as a tile of keys meets them."""
    n_q, n_k, q_offset, k_offset, b, h, g = place
    j0 = tile * BLOCK_N
    j1 = tl.minimum(j0 + BLOCK_N, n_k) - 1
    low, high = t * BLOCK_M, tl.minimum(t * BLOCK_M + BLOCK_M, n_q) - 1
    kind = classify(low, high, j0, j1, q_offset, k_offset, b, h, h, g, data) + tl.zeros_like(t)
    kind = tl.where(low + BLOCK_M > n_q, tl.minimum(kind, 1), kind)
    return tl.where(t < count, kind, 0)


@triton.jit
def column_kinds(t, count, tile, place, data, classify, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Kinds of key tiles t as a tile of rows meets them."""
    n_q, n_k, q_offset, k_offset, b, h, g = place
    i0 = tile * BLOCK_M
    i1 = tl.minimum(i0 + BLOCK_M, n_q) - 1
    low, high = t * BLOCK_N, tl.minimum(t * BLOCK_N + BLOCK_N, n_k) - 1
    kind = classify(i0, i1, low, high, q_offset, k_offset, b, h, h, g, data) + tl.zeros_like(t)
    kind = tl.where(low + BLOCK_N > n_k, tl.minimum(kind, 1), kind)
    return tl.where(t < count, kind, 0)


@triton.jit
def pitch_of(seqlen_q, ALIGNED: tl.constexpr):
    """Elements from one head's statistics of rows to the next one's: a multiple of ALIGNED, which is 1, 4 (16 bytes)
    or, where the key kernel reads whole tiles of them ahead, more."""
    return tl.cdiv(seqlen_q, ALIGNED) * ALIGNED


@triton.jit
def load_marks(ptr, count):
    """The first 32 of some marks."""
    n = tl.arange(0, 32)
    return tl.load(ptr + n, mask=n < count, other=0)


@triton.jit
def any_marked(found, ptr, count):
    """Whether one of some marks is set; found: what `load_marks` gave, some time before."""
    for start in range(32, count, 32):
        n = start + tl.arange(0, 32)
        found = tl.maximum(found, tl.load(ptr + n, mask=n < count, other=0))
    return tl.max(found, 0) > 0


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
    POWER: tl.constexpr = False,
):
    """(p, what `derive` found): weights of the raw scores s, before masks; m and low broadcast against s. POWER: what
    comes as m is -m log2 e."""
    found = (s,)
    if HAS_TERMS:
        found = derive(s * scale, i, j, q_pos, k_pos, b, h, g, data)
        if CAREFUL:
            p = tl.exp2((found[0] - m) * LOG2E - low)
        else:
            p = tl.exp2(tl.fma(found[0], LOG2E, m if POWER else m * -LOG2E))
    elif CAREFUL:
        p = tl.exp2((s * scale - m) * LOG2E - low)
    else:
        p = tl.exp2(tl.fma(s, scale * LOG2E, m if POWER else m * -LOG2E))
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
