"""Absorbing key tiles of which every pair counts, with two products under way beside the softmax.

The loops of the forward kernel where nothing is hidden, no score has terms, and keys come by descriptors. `ahead`: the
tensor cores form the scores of tile t + 1 while the exponentials of tile t are computed. `behind`: they multiply the
weights of tile t - 1 with its values meanwhile, which takes less room, so that three programs share a multiprocessor up
to D = 64. The compiler moves instructions inside a basic block only, so nothing in the loops branches but the jump over
the products of a pivot that stays, and keys that end inside a tile are absorbed after them.
State in registers: acc (BLOCK_M, DV), the scores of two tiles (BLOCK_M, BLOCK_N) or those of one and the weights of
another, q (BLOCK_M, D) if ahead, m (BLOCK_M) and l (BLOCK_M, COLUMNS).

Source: Shah et al., FlashAttention-3, 2024, section 3.2, https://arxiv.org/abs/2407.08608.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.softmax_words import in_registers, raised, rescaled, summed


@triton.jit
def key_tile(tensors, g, t, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr):
    """Keys of tile t, (BLOCK_N, D_PAD)."""
    return tensors[9].load([tensors[11], g, tensors[12] + t * BLOCK_N, 0]).reshape(BLOCK_N, D_PAD)


@triton.jit
def value_tile(tensors, g, t, BLOCK_N: tl.constexpr, DV_PAD: tl.constexpr):
    """Values of tile t, (BLOCK_N, DV_PAD)."""
    return tensors[10].load([tensors[11], g, tensors[12] + t * BLOCK_N, 0]).reshape(BLOCK_N, DV_PAD)


@triton.jit
def absorb_scores(
    acc, m, l, s, t, tensors, g, scale,  # noqa: E741
    FUSED: tl.constexpr, LAZY: tl.constexpr, BLOCK_N: tl.constexpr, DV_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after tile t, whose scores are s."""
    if not FUSED:
        s = s * scale
    m_new, p, alpha = raised(m, s, scale, FUSED, LAZY, True)
    weights = p.to(tensors[10].dtype)
    acc = rescaled(acc, alpha, LAZY)
    v = value_tile(tensors, g, t, BLOCK_N, DV_PAD)
    acc = tl.dot(weights, v, acc, input_precision=PRECISION)
    return acc, m_new, summed(l, alpha, p, True)


@triton.jit
def ended(s, t, n_k, scale, FUSED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The scores of tile t, in which the keys end. They are yet to be scaled, maybe by a number below 0."""
    columns = t * BLOCK_N + tl.arange(0, BLOCK_N)
    hidden = -float("inf") if FUSED else tl.where(scale < 0, float("inf"), -float("inf"))
    return tl.where((columns < n_k)[None, :], s, hidden)


@triton.jit
def absorb_ahead(
    acc, m, l, q, first, last, tensors, g, scale,  # noqa: E741
    FUSED: tl.constexpr, LAZY: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the key tiles first .. last - 1, of which there is one at least."""
    n_k = tensors[8]
    q = in_registers(q)
    whole = tl.minimum(last, n_k // BLOCK_N)
    k = key_tile(tensors, g, first, BLOCK_N, D_PAD)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    for t in tl.range(first, whole):
        # Past the last tile its own scores are formed once more, which nobody reads.
        k = key_tile(tensors, g, tl.minimum(t + 1, last - 1), BLOCK_N, D_PAD)
        after = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        acc, m, l = absorb_scores(  # noqa: E741
            acc, m, l, s, t, tensors, g, scale, FUSED, LAZY, BLOCK_N, DV_PAD, PRECISION
        )
        s = after
    if whole < last:
        s = ended(s, whole, n_k, scale, FUSED, BLOCK_N)
        acc, m, l = absorb_scores(  # noqa: E741
            acc, m, l, s, whole, tensors, g, scale, FUSED, LAZY, BLOCK_N, DV_PAD, PRECISION
        )
    return acc, m, l


@triton.jit
def absorb_behind(
    acc, m, l, q, first, last, tensors, g, scale,  # noqa: E741
    FUSED: tl.constexpr, LAZY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the key tiles first .. last - 1, of which there is one at least."""
    n_k = tensors[8]
    whole = tl.minimum(last, n_k // BLOCK_N)
    # What the first turn multiplies.
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32).to(tensors[10].dtype)
    for t in tl.range(first, whole):
        k = key_tile(tensors, g, t, BLOCK_N, D_PAD)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        v = value_tile(tensors, g, tl.maximum(t - 1, first), BLOCK_N, DV_PAD)
        acc = tl.dot(in_registers(weights), v, acc, input_precision=PRECISION)
        if not FUSED:
            s = s * scale
        m, p, alpha = raised(m, s, scale, FUSED, LAZY, True)
        l = summed(l, alpha, p, True)  # noqa: E741
        weights = p.to(tensors[10].dtype)
        acc = rescaled(acc, alpha, LAZY)
    if first < whole:
        v = value_tile(tensors, g, whole - 1, BLOCK_N, DV_PAD)
        acc = tl.dot(weights, v, acc, input_precision=PRECISION)
    if whole < last:
        k = key_tile(tensors, g, whole, BLOCK_N, D_PAD)
        s = ended(tl.dot(q, tl.trans(k), input_precision=PRECISION), whole, n_k, scale, FUSED, BLOCK_N)
        acc, m, l = absorb_scores(  # noqa: E741
            acc, m, l, s, whole, tensors, g, scale, FUSED, LAZY, BLOCK_N, DV_PAD, PRECISION
        )
    return acc, m, l
