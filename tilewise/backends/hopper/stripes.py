"""What a mask hides of a tile of scores where each row is left one run of columns, or all but one: words of bits.

A thread of a warpgroup holds N elements, in columns 8 n + 2 (lane % 4) and the next one of two rows: elements 0, 1
belong to one row and 2, 3 to the other. What is left of a row is a word with a bit for each of the thread's columns,
of which the assembler makes several predicates at once, so that an element costs little more than its selection.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.algebra import WIDEST

WIDE = gl.constexpr(WIDEST)


@gluon.constexpr_function
def _up_to(word, bound):
    """`word`: bits of the columns up to `bound`, of which c is the thread's part; two of each eight are its own."""
    return (
        f"sub.s32 x, {bound}, c; shr.s32 t, x, 3; shl.b32 t, t, 1; and.b32 x, x, 7; min.u32 x, x, 1;"
        f"add.s32 t, t, x; add.s32 t, t, 1; max.s32 t, t, 0; shl.b32 t, one, t; sub.s32 {word}, t, 1;"
    )


@gluon.constexpr_function
def _hide(u, zero):
    """Elements whose bits are 0 in w0 and w1."""
    hide, text = "0f00000000" if zero else "0fFF800000", ""
    # Row by row: the assembler makes several predicates at once of neighbouring bits of a word.
    for i, x in sorted(enumerate(u), key=lambda e: e[0] // 2 % 2):
        row, bit = i // 2 % 2, i // 4 * 2 + i % 2
        text += f"and.b32 t, w{row}, {1 << bit:#x}; setp.ne.s32 p, t, 0; selp.f32 {x}, {x}, {hide}, p;"
    return text


START = gl.constexpr(
    "{ .reg .pred p; .reg .b32 c, t, x, one, w0, w1, n, top, last, first; .reg .f32 inverse, f; "
    "mov.u32 c, %laneid; and.b32 c, c, 3; shl.b32 c, c, 1; mov.b32 one, 1;"
)


@gluon.constexpr_function
def cut_text(u, lasts, firsts, zero, start):
    """Hides elements, by name, after each row's last column and, if there are firsts, before its first."""
    text = start
    for r in range(2):
        if not firsts:
            text += f"sub.s32 w{r}, {lasts[r]}, c;"
            continue
        text += _up_to(f"w{r}", lasts[r]) + f"sub.s32 first, {firsts[r]}, 1;" + _up_to("x", "first")
        text += f"not.b32 x, x; and.b32 w{r}, w{r}, x;"
    if firsts:
        return text + _hide(u, zero) + "}"
    # One comparison costs no more than its bit.
    hide = "0f00000000" if zero else "0fFF800000"
    for i, x in enumerate(u):
        text += f"setp.gt.s32 p, {i // 4 * 8 + i % 2}, w{i // 2 % 2}; selp.f32 {x}, {hide}, {x}, p;"
    return text + "}"


@gluon.constexpr_function
def _cut_text(n, below, zero, start):
    ends = [[f"${m * n + 2 * r}" for r in range(2)] for m in (2, 3)]
    return cut_text([f"${i}" for i in range(n)], ends[0], ends[1] if below else [], zero, start)


@gluon.constexpr_function
def _stripe_text(start):
    text = f"{start} mov.b32 n, $3; cvt.rn.f32.s32 inverse, n; rcp.approx.ftz.f32 inverse, inverse;"
    less = "cvt.rn.f32.s32 f, last; mul.f32 f, f, inverse; cvt.rmi.s32.f32 t, f;"
    less += "mul.lo.s32 t, t, n; sub.s32 last, last, t;"
    # Twice: of 31 bits the first quotient may be off by some. Then by one: the least of three without signs.
    text += f"mov.b32 last, $2; {less} {less} add.s32 t, last, n; min.u32 last, last, t;"
    text += "sub.s32 t, last, n; min.u32 last, last, t; sub.s32 first, last, $4;"
    text += _up_to("w0", "last") + _up_to("x", "first")
    return text + "xor.b32 w0, w0, x; xor.b32 w0, w0, $5; and.b32 $0, w0, $1; }"


@gluon.constexpr_function
def _hide_text(n, zero):
    text = "{ .reg .pred p; .reg .b32 t, w0, w1;" + f"mov.b32 w0, ${2 * n}; mov.b32 w1, ${2 * n + 2};"
    return text + _hide([f"${i}" for i in range(n)], zero) + "}"


@gluon.constexpr_function
def _operands(n, more):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * (more * n))


@gluon.jit
def cut(u, first, last, BELOW: gl.constexpr, N: gl.constexpr, ZERO: gl.constexpr):
    """-inf (0 if ZERO) in the columns of a tile before `first` (if BELOW) and after `last`, (64, 1) each."""
    wide = gl.full(u.shape, 0, gl.int32, u.type.layout)
    text: gl.constexpr = _cut_text(N, BELOW, ZERO, START)
    operands: gl.constexpr = _operands(N, 2)
    return gl.inline_asm_elementwise(
        text, operands, [u, wide + last, wide + first], dtype=gl.float32, is_pure=True, pack=N
    )


@gluon.jit
def stripe(marks, x, n, t, SIGN: gl.constexpr, WANTED: gl.constexpr):
    """marks, (64, 1), without the bits of a thread's columns where (x + SIGN * column) % n < t is not WANTED: x (64, 1)
    or a number, n and t numbers.

    n is at least 2 * WIDEST, so that the remainders of a block's columns that are below t are one run, or all but one.
    """
    least = gl.minimum(gl.maximum(t, 0), n)
    if SIGN > 0:
        # (x + c) % n is n - 1 - (-1 - x - c) % n.
        x = x ^ -1
        least = n - least
    # Where the run would not fit, what is beyond it does: `least` and more, which begins at 0 if x is as much less.
    turned = least > n - WIDE
    top = gl.where(turned, n - least, least)
    x = x + gl.where(turned, top, 0)
    flip = gl.where(turned, -1, 0)
    if (SIGN > 0) == WANTED:
        flip = flip ^ -1
    wide = gl.full(marks.shape, 0, gl.int32, marks.type.layout)
    text: gl.constexpr = _stripe_text(START)
    return gl.inline_asm_elementwise(
        text,
        "=r,r,r,r,r,r",
        [marks, wide + x, wide + n, wide + top, wide + flip],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def hide(u, marks, N: gl.constexpr, ZERO: gl.constexpr):
    """-inf (0 if ZERO) where a row's mark has no bit for the column."""
    wide = gl.full(u.shape, 0, gl.int32, u.type.layout)
    text: gl.constexpr = _hide_text(N, ZERO)
    operands: gl.constexpr = _operands(N, 1)
    return gl.inline_asm_elementwise(
        text, operands, [u, wide + marks[:, None]], dtype=gl.float32, is_pure=True, pack=N
    )
