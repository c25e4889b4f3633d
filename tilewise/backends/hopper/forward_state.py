"""The steps of the online softmax on a warpgroup's registers: S = q k^T, the maxima, the weights, O += P v."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def scores_of(q, q2, k_s, k_s2, st, BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, SL: gl.constexpr):
    """Issue S = q k^T."""
    zeros = gl.zeros([64, BN], gl.float32, SL)
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


@gluon.constexpr_function
def _powers_text(soft):
    """2^x of four elements, the first `soft` of them by a cubic polynomial on the way from the nearest integer."""
    text = ["{ .reg .f32 t, r, f, p; .reg .b32 e, i;"]
    for n in range(4):
        if n >= soft:
            text.append(f"ex2.approx.ftz.f32 ${n}, ${4 + n};")
            continue
        # 12582912 = 1.5 * 2^23 rounds to an integer, which stays in the last bits. -127 becomes 0 exactly.
        text += [
            f"max.NaN.f32 t, ${4 + n}, 0fC2FE0000;", "add.rn.f32 r, t, 0f4B400000;", "sub.rn.f32 f, r, 0f4B400000;",
            "sub.rn.f32 f, t, f;", "fma.rn.f32 p, f, 0f3D61510B, 0f3E780627;", "fma.rn.f32 p, p, f, 0f3F317AFD;",
            "fma.rn.f32 p, p, f, 0f3F800000;", "mov.b32 e, r;", "shl.b32 e, e, 23;", "mov.b32 i, p;",
            "add.s32 i, i, e;", f"mov.b32 ${n}, i;",
        ]  # fmt: skip
    return " ".join([*text, "}"])


@gluon.jit
def powers(x, SOFT: gl.constexpr):
    """2^x. SOFT: how many of four elements are computed by multiplications (relative error at most 1.1e-4, a twentieth
    of what rounding weights to bfloat16 costs), where the special-function unit has more to do than these."""
    if SOFT > 0:
        text: gl.constexpr = _powers_text(SOFT)
        return gl.inline_asm_elementwise(
            text, "=&f,=&f,=&f,=&f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4
        )
    else:
        return gl.exp2(x)


@gluon.jit
def weigh(u, m, rate, shift, SOFT: gl.constexpr):
    """2^(u * rate + shift - m): u a tile, rate a number, shift and m of rows."""
    return powers(gl.fma(u, gl.zeros_like(u) + rate, (shift - m)[:, None] + gl.zeros_like(u)), SOFT)


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
