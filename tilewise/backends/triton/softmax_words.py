"""The softmax of a tile as the forward's loops share it: maxima, weights, what older sums shrink by, sums.

Two ways. The plain one multiplies everything absorbed so far by what the maximum's growth says, tile by tile. LAZY ones
leave a row's pivot where it is until the maximum has grown beyond it by GROWTH powers of two: weights are at most
2 ** GROWTH then, as exact as others, and after a row's first tiles its pivot hardly ever moves: a warp none of whose
pivots moved jumps over the products. Maxima and sums in PARTS are formed for COLUMNS of a row first, each by one
thread: chains of dependent instructions are short, sums need no exchange between threads until the end, and are added
while the next product is under way.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, https://arxiv.org/abs/1805.02867.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.words import LOG2E

COLUMNS = tl.constexpr(8)
"""Parts of a row's maximum and sum: columns that a thread of a warpgroup holds two of."""
GROWTH = tl.constexpr(8.0)
"""Powers of two by which a maximum outgrows its pivot before that moves; every type of weights holds 2 ** 8."""
LOWEST = tl.constexpr(-1e38)
"""Of a pivot that is subtracted after its scaling, which must not overflow."""
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter knows no instructions of a device."""


@triton.jit
def in_registers(x):
    """x, as something computed: a product reads its left operand from registers where it was computed, and from shared
    memory where it was loaded or carried through a loop. Said of q twice, where it is loaded and in the block of the
    first product: the first moves the layout's change out of loops, the second keeps what it gave."""
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def kept_in_registers(q, l):  # noqa: E741
    """(q, l) with q where products of loops read it from registers, which a product before them in the same block says.
    l as it was, for what nobody needs is not computed."""
    if not INTERPRETED:
        q = in_registers(q)
        none = tl.dot(q, tl.zeros([q.shape[1], 16], q.dtype))
        none = tl.inline_asm_elementwise(
            "mov.f32 $0, 0f00000000;", "=f,f", [none], dtype=tl.float32, is_pure=True, pack=1
        )
        l += tl.sum(none, 1)[:, None]  # noqa: E741
    return q, l


@triton.jit
def maximum_of(s, PARTS: tl.constexpr):
    """The maximum of each row of a tile of scores."""
    if PARTS:
        wide = tl.max(s.reshape(s.shape[0], 2, s.shape[1] // (2 * COLUMNS), COLUMNS), 2)
        found = tl.max(wide.reshape(s.shape[0], 2 * COLUMNS), 1)
    else:
        found = tl.max(s, 1)
    return found


@triton.jit
def raised(
    m, s, scale, FUSED: tl.constexpr, LAZY: tl.constexpr, PARTS: tl.constexpr, ADDED: tl.constexpr = False
):
    """(new pivots, weights of the scores s, what older weights shrink by) of rows whose pivot was m. FUSED: scores
    are yet to be scaled. ADDED: a pivot is subtracted after its scaling, and scores below LOWEST get no weight."""
    m_new = tl.maximum(m, maximum_of(s, PARTS))
    if LAZY:
        grown = (m_new - m) * (scale * LOG2E if FUSED else LOG2E)
        m_new = tl.where(grown > GROWTH, m_new, m)
    # A row that has seen no key has m = -inf: subtract another number instead, exp2(-inf) is the 0 it should be.
    pivot = tl.maximum(m_new, LOWEST) if ADDED else tl.where(m_new == -float("inf"), 0.0, m_new)
    if FUSED:
        step = scale * LOG2E
        p = tl.exp2(tl.fma(s, step, (-pivot * step)[:, None]))
        alpha = tl.exp2((m - pivot) * step)
    else:
        p = tl.exp2(tl.fma(s, LOG2E, (-pivot * LOG2E)[:, None]) if ADDED else (s - pivot[:, None]) * LOG2E)
        alpha = tl.exp2((m - pivot) * LOG2E)
    return m_new, p, alpha


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, PARTS: tl.constexpr):
    """Sums of rows before their first tile."""
    return tl.zeros([BLOCK_M, COLUMNS] if PARTS else [BLOCK_M], tl.float32)


@triton.jit
def summed(l, alpha, p, PARTS: tl.constexpr):  # noqa: E741
    """The sums of rows after a tile of weights p."""
    if PARTS:
        l = l * alpha[:, None] + tl.sum(p.reshape(p.shape[0], p.shape[1] // COLUMNS, COLUMNS), 1)  # noqa: E741
    else:
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
    return l


@triton.constexpr_function
def _rescale_text(n):
    """acc * alpha of n elements a thread: those of two rows, which take turns by two elements, or of two such pairs of
    rows one after the other. A thread looks at the alpha of each."""
    text = ["{ .reg .pred p; .reg .f32 t;", f"mov.f32 t, ${2 * n};"]
    text += [f"min.f32 t, t, ${2 * n + at};" for at in (2, n // 2, n // 2 + 2)]
    text += [
        "setp.lt.f32 p, t, 0f3F800000;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra.uni SKIPRESCALE;",
    ]
    text += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return " ".join([*text, "SKIPRESCALE: }"])


@triton.constexpr_function
def rescale_operands(n):
    """Constraints of an assembly that gets n numbers and n factors, and gives the n numbers."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@triton.jit
def rescaled(acc, alpha, LAZY: tl.constexpr):
    """acc * alpha[:, None]. LAZY: acc is the accumulator of warpgroups, 16 rows a warp, 16 columns or more."""
    if LAZY and not INTERPRETED:
        count: tl.constexpr = acc.shape[1] // 2
        wide = tl.zeros_like(acc) + alpha[:, None]
        found = tl.inline_asm_elementwise(
            _rescale_text(count),
            rescale_operands(count),
            [acc, wide],
            dtype=tl.float32,
            is_pure=True,
            pack=count,
        )
    else:
        found = acc * alpha[:, None]
    return found
