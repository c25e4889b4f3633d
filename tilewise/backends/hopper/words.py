"""Words of printed kernels that Hopper says in another way than `tilewise.backends.triton.words`: fewer instructions
for each element of a tile, since the exponentials of a tile leave little time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.stripes import START, cut_text

NEAR = gl.constexpr(("0f3F7FF1EC", "0fBEA7105E", "0f3DC7624F"))
"""tanh(y) / y for |y| <= 3/4 as a polynomial of y^2, the least greatest relative error: 0.9997852 - 0.3262967 y^2 +
0.0973555 y^4. Float32 as PTX writes it."""
NEARER = gl.constexpr(("0f3F7FF17D", "0fBEA2EE25"))
"""The same for |y| <= 11/32: 0.9997786 - 0.3182231 y^2."""


@gluon.jit
def like(x, s):
    """x at the shape of s."""
    # Adding -0.0 changes no number, and the compiler drops it.
    return x + gl.full_like(s, -0.0)


@gluon.jit
def fused(x, a, c):
    """x * a + c at the shape of x, rounded once."""
    return gl.fma(x, like(a, x), like(c, x))


@gluon.jit
def times_unless(FUSED: gl.constexpr, x, rate):
    """x, or x * rate unless FUSED."""
    if FUSED:
        return x
    else:
        return x * rate


@gluon.jit
def rate_if(FUSED: gl.constexpr, rate):
    """The rate if FUSED, else 1."""
    if FUSED:
        return rate
    else:
        return gl.to_tensor(1.0)


@gluon.jit
def inside_int32(x):
    """A number as the nearest int32."""
    return gl.minimum(gl.maximum(x, -(2**31)), 2**31 - 1).to(gl.int32)


@gluon.jit
def spread(x, column, SIGN: gl.constexpr):
    """x, (64, 1), plus or minus the number of the column in a block, (1, N); of the type of x.

    Bits 1 and 2 of a column are the thread's: what remains are literals, which cost no registers, and of which the
    compiler drops what a mask does not look at.
    """
    if SIGN > 0:
        return (x + (column & 6)) + (column & -7)
    else:
        return (x - (column & 6)) - (column & -7)


@gluon.jit
def load_where(address, where):
    """The elements where the condition holds, else 0."""
    pointers, mask = gl.broadcast(address, where)
    return gl.load(pointers, mask=mask, other=0)


@gluon.jit
def divide(a, b):
    """a / b; by a number, one product with its inverse (two roundings)."""
    if b.type.is_block():
        return a / b
    else:
        return a * (1.0 / b)


@gluon.jit
def tanh(x):
    """Hyperbolic tangent by the unit's own instruction, relative error at most 2^-11 (PTX ISA, tanh.approx)."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def powers_if(BOUNDED: gl.constexpr, x, rate):
    """2^(x * rate) if BOUNDED, else x."""
    if BOUNDED:
        return gl.exp2(x * rate)
    else:
        return x


@gluon.constexpr_function
def _nearest(x, y):
    return f"mul.f32 t, {x}, {x}; fma.rn.f32 u, c1, t, c0; mul.f32 {y}, {x}, u;"


@gluon.constexpr_function
def _near(x, y):
    return f"mul.f32 t, {x}, {x}; fma.rn.f32 u, c2, t, c1; fma.rn.f32 u, u, t, c0; mul.f32 {y}, {x}, u;"


@gluon.constexpr_function
def _far(x, y, k, rate):
    return f"mul.f32 {y}, {x}, {k}; tanh.approx.f32 {y}, {y}; mul.f32 {y}, {y}, {rate};"


@gluon.constexpr_function
def _power(y, powers=True):
    return f"ex2.approx.ftz.f32 {y}, {y};" if powers else ""


@gluon.constexpr_function
def _ranges_text(x, k, rate, cuts):
    """Jumps to MORE unless all elements of a warp are in the nearest range, and cuts, if there is such, is 0; far:
    whether one is in the last.

    Told by sums of squares of a quarter of a thread's elements, none of which is greater than its sum: products and
    sums go at twice the rate of maxima.
    """
    n = len(x)
    text = ["{ .reg .pred p, far; .reg .f32 t, u, c, c0, c1, c2, m0, m1, m2, m3;"]
    text += [f"mul.f32 m{i}, {x[i]}, {x[i]};" for i in range(4)]
    text += [f"fma.rn.f32 m{i % 4}, {x[i]}, {x[i]}, m{i % 4};" for i in range(4, n)]
    text += [
        "max.NaN.f32 m0, m0, m1; max.NaN.f32 m2, m2, m3; max.NaN.f32 m0, m0, m2;",
        f"abs.f32 c, {k}; mul.f32 u, {k}, {k}; mul.f32 t, m0, u; setp.gtu.f32 far, t, 0f3F100000;",
        # Beyond 2^-20 and 2^20 the coefficients might leave the range of normal numbers.
        "setp.lt.or.f32 far, c, 0f35800000, far; setp.gt.or.f32 far, c, 0f49800000, far;",
        "setp.gtu.or.f32 p, t, 0f3DF20000, far;" + (f"setp.ne.or.s32 p, {cuts}, 0, p;" if cuts else ""),
        "vote.sync.any.pred p, p, 0xffffffff;",
        f"mul.f32 c0, {k}, {rate}; mul.f32 c1, c0, u; mul.f32 c2, c1, u; @p bra.uni MORE;",
        f"mul.f32 c0, c0, {NEARER[0]}; mul.f32 c1, c1, {NEARER[1]};",
    ]
    return text


@gluon.constexpr_function
def _farther_text(x, y, k, rate, powers):
    """The two other ranges; they end at DONE."""
    text = ["MORE: vote.sync.any.pred far, far, 0xffffffff; @far bra.uni FAR;"]
    text.append(f"mul.f32 c0, c0, {NEAR[0]}; mul.f32 c1, c1, {NEAR[1]}; mul.f32 c2, c2, {NEAR[2]};")
    text += [_near(a, b) + _power(b, powers) for a, b in zip(x, y, strict=True)]
    text.append("bra.uni DONE; FAR:")
    text += [_far(a, b, k, rate) + _power(b, powers) for a, b in zip(x, y, strict=True)]
    return [*text, "DONE:"]


@gluon.constexpr_function
def _capped_text(n, powers):
    x, k, rate = [f"${i}" for i in range(n)], f"${2 * n}", f"${3 * n}"
    text = _ranges_text(x, k, rate, "")
    text += [_nearest(a, a) + _power(a, powers) for a in x]
    text.append("bra.uni DONE;")
    return " ".join([*text, *_farther_text(x, x, k, rate, powers), "}"])


@gluon.constexpr_function
def _weights_text(n, below, start):
    """Weights, $0 .., and behind them the sums of both rows, of which the first and the third number are written."""
    x = [f"${i}" for i in range(n)]
    k, rate, cuts = (f"${m * n}" for m in (3, 4, 5))
    ends = [[f"${m * n + 2 * r}" for r in range(2)] for m in (6, 7)]

    def added(i):
        """A pair of weights to the sum of their row."""
        total = f"${n + i // 2 % 2 * 2}"
        if i < 4:
            return f"add.f32 {total}, {x[i]}, {x[i + 1]};"
        return f"add.f32 t, {x[i]}, {x[i + 1]}; add.f32 {total}, {total}, t;"

    text = [*_ranges_text(x, k, rate, cuts)]
    for i in range(0, n, 2):
        text += [*(_nearest(a, a) + _power(a) for a in x[i : i + 2]), added(i)]
    text += [
        "bra.uni END;",
        *_farther_text(x, x, k, rate, True),
        f"setp.eq.s32 p, {cuts}, 0; @p bra.uni WHOLE;",
    ]
    text.append(cut_text(x, ends[0], ends[1] if below else [], True, start))
    return " ".join([*text, "WHOLE:", *(added(i) for i in range(0, n, 2)), "END: }"])


@gluon.constexpr_function
def _capped_operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * (2 * n))


@gluon.constexpr_function
def _weights_operands(n):
    return ",".join(["=f"] * (2 * n) + [str(i) for i in range(n)] + ["f"] * (2 * n) + ["r"] * (3 * n))


@gluon.jit
def capped(x, k, rate, POWERS: gl.constexpr):
    """rate * tanh(k * x) of a tile of products, or 2 to the power of it if POWERS; k and rate are numbers.

    POWERS 2: what `capped_weights` is to be told.

    Where |k * x| is at most 3/4 for all elements of a warp, which scores seldom leave, by an odd polynomial of degree 5
    with a relative error of 2^-12.1: the unit is left to the exponentials. Else by the unit's own tanh (`tanh`).
    """
    N: gl.constexpr = x.shape[0] * x.shape[1] // 128
    if POWERS == 2:
        return x, k, rate
    else:
        zeros = gl.full(x.shape, 0.0, gl.float32, x.type.layout)
        text: gl.constexpr = _capped_text(N, POWERS)
        operands: gl.constexpr = _capped_operands(N)
        return gl.inline_asm_elementwise(
            text, operands, [x, zeros + k, zeros + rate], dtype=gl.float32, is_pure=True, pack=N
        )


@gluon.jit
def first_of(a, b):
    """The first of two."""
    return a


@gluon.jit
def capped_weights(x, k, rate, cuts, first, last, BELOW: gl.constexpr):
    """(2^(rate * tanh(k * x)), its sums over the columns that each of a row's four threads holds), 0 before the column
    `first` (if BELOW) and after `last`, (64, 1) each, if `cuts`, a number.

    As `capped`, but the sums stand beside the exponentials, under which they cost nothing.
    """
    N: gl.constexpr = x.shape[0] * x.shape[1] // 128
    zeros = gl.full(x.shape, 0.0, gl.float32, x.type.layout)
    wide = gl.full(x.shape, 0, gl.int32, x.type.layout)
    text: gl.constexpr = _weights_text(N, BELOW, START)
    operands: gl.constexpr = _weights_operands(N)
    weights, sums = gl.inline_asm_elementwise(
        text,
        operands,
        [x, zeros + k, zeros + rate, wide + cuts, wide + last, wide + first],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=N,
    )
    sums = gl.reduce(sums.reshape([64, x.shape[1] // 8, 4, 2]), 3, first_of)
    return weights, gl.reduce(sums, 1, first_of)


@gluon.jit
def digits(n):
    """The least L with 2^L >= n, for 0 < n < 2^31; a number, not a tile."""
    x = (n - 1).to(gl.uint32)
    found = gl.where(x >= 65536, 16, 0)
    x = x >> found.to(gl.uint32)
    step = gl.where(x >= 256, 8, 0)
    found += step
    x = x >> step.to(gl.uint32)
    step = gl.where(x >= 16, 4, 0)
    found += step
    x = x >> step.to(gl.uint32)
    step = gl.where(x >= 4, 2, 0)
    found += step
    x = x >> step.to(gl.uint32)
    return found + gl.where(x >= 2, 2, gl.where(x == 1, 1, 0))


@gluon.jit
def quotient_by_number(a, b):
    """a // b rounded down for a tile a and a number b, int32; 0 where b is 0.

    Multiplies by a rounded inverse that is made once for the tile, exact for 31 bits. Source: Granlund and
    Montgomery, Division by invariant integers using multiplication, 1994. ~floor(x / n) is floor(~x / n), and for a
    negative divisor floor(a / -n) is ~floor((a - 1) / n).
    """
    n = gl.maximum(gl.where(b < 0, 0 - b, b), 1)
    shift = digits(n)
    one = gl.to_tensor(1).to(gl.int64)
    inverse = (((one << (shift + 31).to(gl.int64)) + (n - 1)) // n.to(gl.int64)).to(gl.uint32)
    turn = gl.where(b < 0, -1, 0)
    x = a + turn
    sign = x >> 31
    high = gl.umulhi(((x ^ sign) << 1).to(gl.uint32), inverse + (x ^ x).to(gl.uint32))
    quotient = (high >> shift.to(gl.uint32)).to(gl.int32) ^ sign ^ turn
    return quotient & gl.where(b == 0, 0, -1)


@gluon.jit
def quotient_by_tile(a, b):
    """a // b rounded down, int32; 0 where b is 0."""
    special = (b == 0) | (b == -1)
    divisor = gl.where(special, 1, b)
    quotient = a // divisor
    below = (a - quotient * divisor != 0) & ((a < 0) != (divisor < 0))
    quotient = quotient - below.to(gl.int32)
    return gl.where(b == 0, 0, gl.where(b == -1, 0 - a, quotient))


@gluon.jit
def floordiv_int(a, b):
    """a // b rounded down, int32; 0 where b is 0."""
    if b.type.is_block():
        return quotient_by_tile(a, b)
    else:
        return quotient_by_number(a, b)


@gluon.jit
def mod_int(a, b):
    """a - (a // b) * b, int32; 0 where b is 0."""
    return gl.where(b == 0, 0, a - floordiv_int(a, b) * b)


@gluon.jit
def divided(x, column, SIGN: gl.constexpr, n, LITERAL: gl.constexpr):
    """(quotient, remainder) of x + SIGN * column by n, rounded down: one division for a thread's columns of a row.

    n: a literal above 0 if LITERAL, else a number above any column. Bits 1 and 2 of a column are the thread's and are
    divided with x. The rest are literals below n, or their remainders by it, and what is added to a remainder wraps
    once; columns that are equal modulo a literal share all of it.
    """
    first = column & 6
    rest = column & -7
    if SIGN > 0:
        start = x + first
    else:
        start = x - first
    whole = quotient_by_number(start, n)
    left = start - whole * n
    more = rest & 0
    if LITERAL:
        more, rest = rest // n, rest % n
    if SIGN > 0:
        left = (left - n) + rest
        whole = whole + more + (left >= 0).to(gl.int32)
    else:
        left = left - rest
        whole = whole - more - (left < 0).to(gl.int32)
    # From -n to n - 1: the smaller one of it and n more, as numbers without a sign.
    low = gl.minimum(left.to(gl.uint32, bitcast=True), (left + n).to(gl.uint32, bitcast=True))
    return whole, low.to(gl.int32, bitcast=True)


@gluon.jit
def mod_along(x, column, SIGN: gl.constexpr, n, LITERAL: gl.constexpr):
    """(x + SIGN * column) % n; see `divided`."""
    return divided(x, column, SIGN, n, LITERAL)[1]


@gluon.jit
def floordiv_along(x, column, SIGN: gl.constexpr, n, LITERAL: gl.constexpr):
    """(x + SIGN * column) // n; see `divided`."""
    return divided(x, column, SIGN, n, LITERAL)[0]
