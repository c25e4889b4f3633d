"""The steps of the online softmax on a warpgroup's registers: S = q k^T, the maxima, the weights, O += P v."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

GROWTH = gl.constexpr(8.0)
"""Powers of two by which a row's maximum may grow before the state is rescaled."""


@gluon.jit
def held_rows(q, q2, HELD: gl.constexpr, D0: gl.constexpr, SL: gl.constexpr):
    """The rows' q for products: its first HELD columns in registers, the others where they lie."""
    QL: gl.constexpr = gl.DotOperandLayout(0, SL, 2)
    if HELD > D0:
        return q.load(QL), q2.load(QL)
    elif HELD > 0:
        return q.load(QL), q2
    else:
        return q, q2


@gluon.jit
def scores_of(q, q2, k_s, k_s2, st, BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, SL: gl.constexpr):
    """Issue S = q k^T."""
    zeros = gl.full([64, BN], 0.0, gl.float32, SL)
    s = warpgroup_mma(q, k_s.index(st).reshape([BN, D0]).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if D1 > 0:
        s = warpgroup_mma(q2, k_s2.index(st).reshape([BN, D1]).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def add_values(acc, acc2, weights, v_s, v_s2, sv, BN: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr,
               PL: gl.constexpr, PL2: gl.constexpr):  # fmt: skip
    """Issue O += P v."""
    acc = warpgroup_mma(gl.convert_layout(weights, PL), v_s.index(sv).reshape([BN, E0]), acc, is_async=True)
    if E1 > 0:
        acc2 = warpgroup_mma(
            gl.convert_layout(weights, PL2), v_s2.index(sv).reshape([BN, E1]), acc2, is_async=True
        )
    return acc, acc2


@gluon.jit
def weigh(u, m, rate, shift):
    """2^(u * rate + shift - m): u a tile, rate a number, shift and m of rows."""
    return gl.exp2(gl.fma(u, gl.zeros_like(u) + rate, (shift - m)[:, None] + gl.zeros_like(u)))


@gluon.jit
def sums_of(p, APART: gl.constexpr, BN: gl.constexpr):
    """Sums of a tile's rows, (64,). APART: over the columns that each of a row's four threads holds, (64, 4)."""
    if APART:
        return gl.sum(gl.sum(p.reshape([64, BN // 8, 4, 2]), 3), 1)
    else:
        return gl.sum(p, 1)


@gluon.jit
def grow(l, alpha, sums, APART: gl.constexpr):  # noqa: E741
    """l * alpha of each row + sums, as `sums_of` has them."""
    if APART:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + gl.zeros_like(l)
    return gl.fma(l, alpha, sums)


@gluon.jit
def whole_sums(l, APART: gl.constexpr, RL: gl.constexpr):  # noqa: E741
    """The sums of rows, (64,)."""
    if APART:
        return gl.convert_layout(gl.sum(l, 1), RL)
    else:
        return l


@gluon.jit
def top_of(u, rate, shift):
    """The maximum of u * rate + shift in each row."""
    return gl.fma(gl.max(u, 1), gl.zeros_like(shift) + rate, shift)


@gluon.jit
def raise_top(m, top, LIMIT: gl.constexpr, LAZY: gl.constexpr):
    """(m, by what the state is multiplied) after a block's maxima. LAZY: m moves only by more than LIMIT."""
    if LAZY:
        step = m - top
        grows = step < -LIMIT
        alpha = gl.where(grows, gl.exp2(step), 1.0)
        m = gl.where(grows, top, m)
    else:
        top = gl.maximum(m, top)
        alpha = gl.exp2(m - top)
        m = top
    return m, alpha


@gluon.jit
def settle(acc, acc2, E1: gl.constexpr):
    """Wait for O += P v."""
    if E1 > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=(acc, acc2))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, acc2


@gluon.jit
def settle_all(s, acc, acc2, E1: gl.constexpr):
    """Wait for S and O += P v."""
    if E1 > 0:
        s, acc, acc2 = warpgroup_mma_wait(0, deps=(s, acc, acc2))
    else:
        s, acc = warpgroup_mma_wait(0, deps=(s, acc))
    return s, acc, acc2
