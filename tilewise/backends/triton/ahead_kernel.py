"""Absorbing key tiles of which every pair counts, with the scores of the next tile under way.

The loop of the forward kernel where nothing is hidden, no score has terms, and keys come by descriptors: the tensor
cores form the scores of tile t + 1 while the exponentials of tile t are computed. The compiler moves instructions
inside a basic block only, so nothing in the loop branches, and keys that end inside a tile are absorbed after it.
State in registers: acc (BLOCK_M, DV), the scores of two tiles (BLOCK_M, BLOCK_N), q (BLOCK_M, D), m and l (BLOCK_M).

Source: Shah et al., FlashAttention-3, 2024, section 3.2, https://arxiv.org/abs/2407.08608.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.words import LOG2E


@triton.jit
def in_registers(q):
    """q, as something computed: a product reads its left operand from registers where it was computed, and from shared
    memory where it was loaded. Said twice, where q is loaded and in the block of the first product: the first moves the
    layout's change out of loops, the second keeps what it gave."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [q], dtype=q.dtype, is_pure=True, pack=2)


@triton.jit
def raised(m, s, scale, FUSED: tl.constexpr):
    """(new maxima, weights of the scores s, what older weights shrink by) of rows whose maximum was m. FUSED: scores
    are yet to be scaled."""
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen no key has m = -inf: subtract 0 instead, exp2(-inf) is the 0 it should be.
    pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
    if FUSED:
        step = scale * LOG2E
        p = tl.exp2(tl.fma(s, step, (-pivot * step)[:, None]))
        alpha = tl.exp2((m - pivot) * step)
    else:
        p = tl.exp2((s - pivot[:, None]) * LOG2E)
        alpha = tl.exp2((m - pivot) * LOG2E)
    return m_new, p, alpha


@triton.jit
def absorb_scores(
    acc, m, l, s, t, tensors, g, scale,  # noqa: E741
    FUSED: tl.constexpr, BLOCK_N: tl.constexpr, DV_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after tile t, whose scores are s."""
    _k, _v, _kn, _kd, _vn, _vd, _d, _dv, _n, _k_desc, v_desc, tensor_b, key0 = tensors
    if not FUSED:
        s = s * scale
    m_new, p, alpha = raised(m, s, scale, FUSED)
    l = l * alpha + tl.sum(p, 1)  # noqa: E741
    acc = acc * alpha[:, None]
    v = v_desc.load([tensor_b, g, key0 + t * BLOCK_N, 0]).reshape(BLOCK_N, DV_PAD)
    return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION), m_new, l


@triton.jit
def absorb_ahead(
    acc, m, l, q, first, last, tensors, g, scale,  # noqa: E741
    FUSED: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The state after the key tiles first .. last - 1, of which there is one at least."""
    _k, _v, _kn, _kd, _vn, _vd, _d, _dv, n_k, k_desc, _v_desc, tensor_b, key0 = tensors
    if AHEAD == 2:
        q = in_registers(q)
    whole = tl.minimum(last, n_k // BLOCK_N)
    k = k_desc.load([tensor_b, g, key0 + first * BLOCK_N, 0]).reshape(BLOCK_N, D_PAD)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    for t in tl.range(first, whole):
        # Past the last tile its own scores are formed once more, which nobody reads.
        after = tl.minimum(t + 1, last - 1)
        k = k_desc.load([tensor_b, g, key0 + after * BLOCK_N, 0]).reshape(BLOCK_N, D_PAD)
        ahead = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        acc, m, l = absorb_scores(acc, m, l, s, t, tensors, g, scale, FUSED, BLOCK_N, DV_PAD, PRECISION)  # noqa: E741
        s = ahead
    if whole < last:
        columns = whole * BLOCK_N + tl.arange(0, BLOCK_N)
        # The scores are yet to be scaled, maybe by a number below 0.
        hidden = -float("inf") if FUSED else tl.where(scale < 0, float("inf"), -float("inf"))
        s = tl.where((columns < n_k)[None, :], s, hidden)
        acc, m, l = absorb_scores(acc, m, l, s, whole, tensors, g, scale, FUSED, BLOCK_N, DV_PAD, PRECISION)  # noqa: E741
    return acc, m, l
