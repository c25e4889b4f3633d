"""Dropout in kernels: Philox4x32-10 at (k >> 2, q, head, batch), the bits of `tilewise.spec.dropout`.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

import triton
import triton.language as tl

M0 = tl.constexpr(0xD2511F53)
M1 = tl.constexpr(0xCD9E8D57)
W0 = tl.constexpr(0x9E3779B9)
W1 = tl.constexpr(0xBB67AE85)
FEWEST_SHARED = tl.constexpr(16)
"""Keys of a tile from which four of them share a counter."""


@triton.jit
def philox(c0, c1, c2, c3, seed_low, seed_high):
    """Four words per counter; all uint32, of one shape."""
    k0, k1 = seed_low, seed_high
    for _ in tl.static_range(10):
        a = tl.full((), M0, tl.uint32) + tl.zeros_like(c0)
        b = tl.full((), M1, tl.uint32) + tl.zeros_like(c2)
        high0, low0 = tl.umulhi(a, c0), a * c0
        high1, low1 = tl.umulhi(b, c2), b * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + tl.full((), W0, tl.uint32)
        k1 = k1 + tl.full((), W1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words_at(q, k4, h, b, seed):
    """The words of counters (k4, q, h, b), broadcast against one another; seed is int64."""
    shape = q + k4 + h
    zero = (shape - shape).to(tl.uint32)
    c0 = zero + k4.to(tl.uint32)
    c1 = zero + q.to(tl.uint32)
    c2 = zero + h.to(tl.uint32)
    c3 = zero + b.to(tl.uint32)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return philox(c0, c1, c2, c3, low, high)


@triton.jit
def kept_pairs(q, k, h, b, seed, threshold):
    """Which pairs dropout keeps, one counter per pair; q, k, h int32, broadcast against one another."""
    w0, w1, w2, w3 = words_at(q, k >> 2, h, b, seed)
    lane = (k & 3) + (w0 - w0).to(tl.int32)
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return word >= threshold


@triton.jit
def kept_tile(q, k0, h, b, seed, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which pairs of a tile dropout keeps, (BLOCK_M, BLOCK_N) int1.

    q: (BLOCK_M, 1) int32 positions; k0: the first key's position; h: a number or (BLOCK_M, 1). Where k0 is a
    multiple of four, four keys share a counter.
    """
    columns = tl.arange(0, BLOCK_N)[None, :]
    if BLOCK_N < FEWEST_SHARED:
        kept = kept_pairs(q, k0 + columns, h, b, seed, threshold)
    else:
        if k0 % 4 == 0:
            groups = tl.arange(0, BLOCK_N // 4)[None, :]
            w0, w1, w2, w3 = words_at(q, (k0 >> 2) + groups, h, b, seed)
            pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
            kept = tl.reshape(pairs, (BLOCK_M, BLOCK_N)) >= threshold
        else:
            kept = kept_pairs(q, k0 + columns, h, b, seed, threshold)
    return kept
