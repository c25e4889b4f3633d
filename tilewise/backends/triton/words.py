"""The words that printed kernels use: integer division, extremes, tanh, and arithmetic on intervals.

Kernels are compiled without floating-point contraction; where a fused multiply-add is wanted it is written.
Interval words take and give int64, so that a bound that leaves int32 is seen and becomes the whole of int32.
"""

import triton
import triton.language as tl

INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)
LARGEST = tl.constexpr(2.0**127 * (2 - 2.0**-23))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def inside(index, size):
    """The index clamped to 0 .. size - 1."""
    return tl.maximum(tl.minimum(index, size - 1), 0)


@triton.jit
def exponent(power):
    """n of the int32 number 2 ** n."""
    return (power.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def floordiv_int(a, b):
    """a // b rounded down, int32; 0 where b is 0."""
    # INT_MIN / -1 overflows in the division itself, so -1 is taken out as 0 is.
    special = (b == 0) | (b == -1)
    divisor = tl.where(special, 1, b)
    quotient = a // divisor
    below = (a - quotient * divisor != 0) & ((a < 0) != (divisor < 0))
    quotient = quotient - below.to(tl.int32)
    return tl.where(b == 0, 0, tl.where(b == -1, 0 - a, quotient))


@triton.jit
def mod_int(a, b):
    """a - (a // b) * b, int32; 0 where b is 0."""
    return tl.where(b == 0, 0, a - floordiv_int(a, b) * b)


@triton.jit
def floordiv_by(a, b):
    """floordiv_int by one number b for all of a: where b > 0 a product and shifts, exact for int32.

    2^n >= b > 2^(n-1), m = floor(2^(31+n) / b) + 1 < 2^32: then x // b = x * m >> 31 + n for 0 <= x < 2^31. A negative
    a is divided as -1 - (-1 - a) // b. Source: Granlund and Montgomery, "Division by invariant integers using
    multiplication", PLDI 1994, theorem 4.2.
    """
    if b > 0:
        wide = b.to(tl.int64)
        bits = (2 * wide - 1).to(tl.float64).to(tl.int64, bitcast=True)
        n = ((bits >> 52) - 1023).to(tl.int32)
        m = ((tl.full((), 1, tl.int64) << (31 + n)) // wide + 1).to(tl.uint32)
        sign = a >> 31
        x = (a ^ sign).to(tl.uint32)
        quotient = (tl.umulhi(x << 1, m + tl.zeros_like(x)) >> n.to(tl.uint32)).to(tl.int32) ^ sign
    else:
        quotient = floordiv_int(a, b)
    return quotient


@triton.jit
def remainder(d, b):
    """d % b of a difference d of two remainders by b."""
    return tl.where(d < 0, d + b, d)


@triton.jit
def mod_by(a, b):
    """mod_int by one number b for all of a."""
    return tl.where(b == 0, 0, a - floordiv_by(a, b) * b)


@triton.jit
def floordiv_float(a, b):
    """floor(a / b), float32."""
    return tl.floor(tl.div_rn(a, b))


@triton.jit
def mod_float(a, b):
    """a - floor(a / b) * b, float32."""
    return a - tl.floor(tl.div_rn(a, b)) * b


@triton.jit
def minimum_float(a, b):
    """The smaller value; NaN wins."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum_float(a, b):
    """The larger value; NaN wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tanh(x):
    """Hyperbolic tangent, float32, to about 2e-7 relative.

    Near 0 the odd polynomial of Cephes (tanhf, |x| < 0.625); beyond it 1 - 2 / (e^2|x| + 1), whose reciprocal is the
    square of an inverse square root: one instruction of the hardware, where a division scales its operands.
    """
    a = tl.abs(x)
    z = a * a
    poly = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    poly = tl.fma(poly, z, -5.37397155531e-2)
    poly = tl.fma(poly, z, 1.33314422036e-1)
    poly = tl.fma(poly, z, -3.33332819422e-1)
    near = tl.fma(a * z, poly, a)
    root = tl.rsqrt(tl.exp2(a * 2.8853900817779268) + 1.0)
    size = tl.where(a < 0.625, near, tl.fma(root * root, -2.0, 1.0))
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def tanh_fine(x):
    """Hyperbolic tangent, float32, to 0.7 of the last bit, for calls of float32.

    From 0.45 on 1 - 2 / (e^2|x| + 1) with what each step rounds away carried along: e^2|x| = 2^n (1 + f + w), f and the
    denominator y as sums of two numbers, and 2 / y corrected by what y times it lacks of 2. A score that is squared, or
    multiplied by a leaf, afterwards makes a last bit here as large as all that float32 attention rounds.
    """
    a = tl.abs(x)
    z = a * a
    poly = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    poly = tl.fma(poly, z, -5.37397155531e-2)
    poly = tl.fma(poly, z, 1.33314422036e-1)
    poly = tl.fma(poly, z, -3.33332819422e-1)
    near = tl.fma(a * z, poly, a)
    c = tl.where(a < 9.125, a, 9.125)
    n = tl.floor(c * 2.8853900817779268 + 0.5)
    rest = tl.fma(n, -0.693359375, c + c)
    f = tl.fma(n, 2.12194440e-4, rest)
    f_low = tl.fma(n, 2.12194440e-4, rest - f)
    w = tl.fma(f, 1.0 / 40320, 1.0 / 5040)
    w = tl.fma(w, f, 1.0 / 720)
    w = tl.fma(w, f, 1.0 / 120)
    w = tl.fma(w, f, 1.0 / 24)
    w = tl.fma(w, f, 1.0 / 6)
    w = tl.fma(w, f, 0.5)
    w = tl.fma(f * f, w, tl.fma(f_low, f, f_low))
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    large = power + 1.0
    high = large + power * f
    low = tl.fma(power, w, (large - high) + power * f)
    y = high + low
    y_low = (high - y) + low
    part = 1.0 / y
    lack = tl.fma(-y_low, part, tl.fma(-y, part, 1.0))
    part = part + part
    far = 1.0 - part
    far = far + tl.fma(-part, lack, (1.0 - far) - part)
    size = tl.where(a < 0.45, near, far)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    found = (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(x == x, found, x)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded; of a number of the call it is made once. Finite but for 0 (0 by it stays 0): numbers
    below 2^-128 count as 2^-128."""
    found = tl.div_rn(1.0, x)
    return tl.where((tl.abs(found) > LARGEST) & (x != 0.0), tl.where(x > 0.0, LARGEST, -LARGEST), found)


# ---- intervals: int64 bounds ---------------------------------------------------------------------------------


@triton.jit
def leaves_int32(lo, hi):
    """Whether a bound is beyond int32, in which indices are computed."""
    return (lo < INT_MIN) | (hi > INT_MAX)


@triton.jit
def floor_positive(a, b):
    """a // b rounded down, int64, b > 0."""
    quotient = a // b
    return quotient - (a - quotient * b < 0).to(tl.int64)


@triton.jit
def divide_interval(a_lo, a_hi, b_lo, b_hi):
    """Bounds of a // b: exact for one positive divisor, else the whole of int32."""
    known = (b_lo == b_hi) & (b_lo > 0)
    divisor = tl.where(known, b_lo, 1)
    lo = tl.where(known, floor_positive(a_lo, divisor), INT_MIN)
    hi = tl.where(known, floor_positive(a_hi, divisor), INT_MAX)
    return lo, hi


@triton.jit
def mod_interval(a_lo, a_hi, b_lo, b_hi):
    """Bounds of a % b for one positive divisor: inside one period the dividend, shifted; else 0 .. b - 1."""
    known = (b_lo == b_hi) & (b_lo > 0)
    divisor = tl.where(known, b_lo, 1)
    first, last = floor_positive(a_lo, divisor), floor_positive(a_hi, divisor)
    same = first == last
    lo = tl.where(same, a_lo - first * divisor, 0)
    hi = tl.where(same, a_hi - first * divisor, divisor - 1)
    return tl.where(known, lo, INT_MIN), tl.where(known, hi, INT_MAX)


@triton.jit
def multiply_interval(a_lo, a_hi, b_lo, b_hi):
    """Bounds of a * b."""
    w, x, y, z = a_lo * b_lo, a_lo * b_hi, a_hi * b_lo, a_hi * b_hi
    lo = tl.minimum(tl.minimum(w, x), tl.minimum(y, z))
    hi = tl.maximum(tl.maximum(w, x), tl.maximum(y, z))
    wild = leaves_int32(lo, hi)
    return tl.where(wild, INT_MIN, lo), tl.where(wild, INT_MAX, hi)


@triton.jit
def whole_if_wild(lo, hi):
    """The bounds, or all of int32 where one is beyond it."""
    wild = leaves_int32(lo, hi)
    return tl.where(wild, INT_MIN, lo), tl.where(wild, INT_MAX, hi)


@triton.jit
def magnitude_interval(lo, hi):
    """Bounds of abs(x)."""
    least = tl.maximum(tl.maximum(lo, 0 - hi), 0)
    return whole_if_wild(least, tl.maximum(hi, 0 - lo))


@triton.jit
def load_where(address, where):
    """The elements where the condition holds, else 0."""
    pointers, mask = tl.broadcast(address, where)
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def select_interval(certain, possible, a_lo, a_hi, b_lo, b_hi):
    """Bounds of where(condition, a, b) for a condition known as (certain, possible)."""
    lo = tl.where(certain, a_lo, tl.where(possible, tl.minimum(a_lo, b_lo), b_lo))
    hi = tl.where(certain, a_hi, tl.where(possible, tl.maximum(a_hi, b_hi), b_hi))
    return lo, hi
