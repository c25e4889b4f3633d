"""Vector words on an LLVM builder: arithmetic, loads, exp2, tanh, log2, transposition.

Every function emits straight-line code for one vector of `lanes` float32. A libm call per element would be
thirty times too slow. NaN passes through every word; exp2(-inf) is exactly 0.

Sources: coefficients of exp2 by a weighted fit of 2^x with p(0) = 1 on [-1/2, 1/2] (relative error 2.0e-9 at
degree 6, 9.1e-8 at degree 5, 2.8e-6 at degree 4, which is for weights that become bf16), and on [0, 1/32] (6.5e-8 at
degree 2); log2 after the Cephes library (logf.c).
"""

from __future__ import annotations

import struct

import llvmlite.ir as ir
from llvmlite.ir import instructions

F32, F64, HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
LOG2E = 1.4426950408889634

EXP2 = {
    4: (0.009582852944731712, 0.055906426161527634, 0.24024099111557007, 0.6931241750717163, 1.0),
    5: (0.0013264727241345392, 0.009671512681032779, 0.055507337435230675, 0.24022242084744, 0.6931469775987849, 1.0),
    6: (0.00015353361959569156, 0.0013398875016719103, 0.00961843691766262, 0.055503323674201965, 0.24022647738456726,
        0.6931471824645996, 1.0),
}  # fmt: skip
EXP2_ABOVE = (0.24265271657786344, 0.6931237311391791)
"""(2^x - 1) / x on [0, 1/32]."""
PARTS = 32
POWERS = tuple(2.0 ** (n / PARTS) for n in range(PARTS))
ROUND_PARTS = 12582912.0 / PARTS
"""Adding it leaves 32nds, in the low bits of the sum."""
FLOOR = 9
"""Rounding down, without a word about what is lost, as AVX-512 wants it said."""
LN2 = 0.6931471805599453
GROWTH = tuple(c / LN2**k for k, c in zip(range(6, 1, -1), EXP2[6], strict=False))
"""(e^x - 1 - x) / x^2 for |x| <= ln 2 / 2, from the coefficients of exp2."""
LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
       2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
ROUND = 12582912.0
"""1.5 * 2^23: adding it rounds a float32 to an integer, which stands in the low bits of the sum."""
ROUND_POWER = ROUND + 127
"""The same, and the low bits are the exponent of 2 to that integer."""


def single(x: float) -> float:
    """x rounded to float32, as LLVM wants its constants; beyond its range, infinity."""
    if x != x or abs(x) <= 3.4028235677973366e38:
        return struct.unpack("f", struct.pack("f", x))[0]
    return float("inf") if x > 0 else float("-inf")


class Words:
    """The words of one builder at one vector width."""

    def __init__(self, builder: ir.IRBuilder, lanes: int, half: bool = True) -> None:
        self.b, self.lanes, self.half = builder, lanes, half
        self.f, self.i = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        self.l = ir.VectorType(I64, lanes // 2)

    # ---- constants and memory --------------------------------------------------------------------------------

    def k(self, x: float) -> ir.Constant:
        return ir.Constant(self.f, [single(x)] * self.lanes)

    def n(self, x: int) -> ir.Constant:
        x = (x + 2**31) % 2**32 - 2**31
        return ir.Constant(self.i, [x] * self.lanes)

    def splat(self, x: ir.Value) -> ir.Value:
        vector = ir.VectorType(x.type, self.lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.b.insert_element(undefined, x, I32(0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(self.i, [0] * self.lanes))

    def address(self, base: ir.Value, offset: int | ir.Value, type_: ir.Type) -> ir.Value:
        offset = I64(offset) if isinstance(offset, int) else offset
        return self.b.inttoptr(self.b.add(base, offset), type_.as_pointer())

    def load(self, base: ir.Value, offset: int | ir.Value = 0, type_: ir.Type | None = None) -> ir.Value:
        type_ = self.f if type_ is None else type_
        element = type_.element if isinstance(type_, ir.VectorType) else type_
        return self.b.load(self.address(base, offset, type_), align=_size(element))

    def store(self, value: ir.Value, base: ir.Value, offset: int | ir.Value = 0) -> None:
        element = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        self.b.store(value, self.address(base, offset, value.type), align=_size(element))

    def store_past(self, value: ir.Value, address: ir.Value) -> None:
        """A whole line, past the caches. Others see it in order after a fence only."""
        found = self.b.store(value, self.address(address, 0, value.type), align=64)
        found.set_metadata("nontemporal", self.b.module.add_metadata([I32(1)]))

    def opaque(self, x: ir.Value) -> ir.Value:
        """x, of whose origin LLVM sees nothing.

        Where a number is loaded, replaced in some lanes and stored again, it would store with a mask, which is slow on
        Zen 3: dense masks ran at 0.80 of the plain speed instead of 0.93 (measured).
        """
        found = instructions.Instruction(self.b.block, x.type, "freeze", [x])
        self.b._insert(found)
        return found

    def unknown(self, address: ir.Value) -> ir.Value:
        """address, of which LLVM does not know that it is: what was loaded from there is loaded again."""
        return self.b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], True)

    def prefetch(self, base: ir.Value, offset: int | ir.Value, write: bool = False) -> None:
        """Ask for a line of memory in the second-level cache, to be read or written; the address need not exist."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        found = self.b.module.globals.get("llvm.prefetch.p0") or ir.Function(
            self.b.module, kind, "llvm.prefetch.p0"
        )
        self.b.call(found, [self.address(base, offset, I8), I32(int(write)), I32(2), I32(1)])

    def call(self, name: str, type_: ir.Type, *args: ir.Value) -> ir.Value:
        kind = ir.FunctionType(type_, [a.type for a in args])
        found = self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name)
        return self.b.call(found, args)

    # ---- arithmetic ------------------------------------------------------------------------------------------

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.call(f"llvm.fma.v{self.lanes}f32", self.f, x, y, z)

    def poly(self, x: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
        value = self.k(coefficients[0])
        for c in coefficients[1:]:
            value = self.fma(value, x, self.k(c))
        return value

    def maximum(self, x: ir.Value, running: ir.Value) -> ir.Value:
        """The larger; NaN in x is passed over, which is one instruction on x86."""
        return self.b.select(self.b.fcmp_ordered(">", x, running), x, running)

    def _power(self, x: ir.Value, degree: int) -> ir.Value:
        """2^x for -126 <= x < 128, garbage outside and for NaN."""
        b = self.b
        rounded = b.fadd(x, self.k(ROUND))
        fraction = b.fsub(x, b.fsub(rounded, self.k(ROUND)))
        shift = b.shl(b.bitcast(rounded, self.i), self.n(23))
        return b.bitcast(b.add(b.bitcast(self.poly(fraction, EXP2[degree]), self.i), shift), self.f)

    def weight(self, x: ir.Value, degree: int = 6) -> ir.Value:
        """e^x for a weight, x <= 0 but for rounding: below e^-87 it is 0. The product with log2(e) is not rounded.

        A product makes it, since one with NaN is NaN: added to exponents, low bits that some NaN have hide it."""
        return self.weights([x], degree)[0]

    def advance(
        self, old: ir.Value, new: ir.Value, m: ir.Value, pivot: ir.Value, total: ir.Value, alpha: ir.Value
    ) -> None:
        """A running maximum goes from old to new: m = new, pivot = new, or 0 for -inf, alpha = e^(old - pivot),
        total *= alpha. m, pivot, total and alpha are addresses."""
        b = self.b
        base = b.select(b.fcmp_ordered("==", new, self.k(float("-inf"))), self.k(0.0), new)
        factor = self.weight(b.fsub(old, base))
        self.store(new, m)
        self.store(base, pivot)
        self.store(factor, alpha)
        self.store(b.fmul(self.load(total), factor), total)

    def weights(self, xs: list[ir.Value], degree: int = 6) -> list[ir.Value]:
        """`weight` of each, step by step of all: a processor looks no further ahead than about eight of them, which
        one after another are too few for what it could do at once."""
        b, log2e, round_ = self.b, self.k(LOG2E), self.k(ROUND_POWER)
        rounded = [self.fma(x, log2e, round_) for x in xs]
        rest = [b.fsub(round_, r) for r in rounded]
        fractions = [self.fma(x, log2e, r) for x, r in zip(xs, rest, strict=True)]
        values = [self.k(EXP2[degree][0])] * len(xs)
        for c in EXP2[degree][1:]:
            values = [self.fma(v, f, self.k(c)) for v, f in zip(values, fractions, strict=True)]
        powers = [b.bitcast(b.shl(b.bitcast(r, self.i), self.n(23)), self.f) for r in rounded]
        found = [b.fmul(v, power) for v, power in zip(values, powers, strict=True)]
        tiny = [b.fcmp_ordered("<", x, self.k(-87.0)) for x in xs]
        return [b.select(t, self.k(0.0), value) for t, value in zip(tiny, found, strict=True)]

    def powers(self, xs: list[ir.Value]) -> list[ir.Value]:
        """2^x of each, for a weight: x <= 0 but for rounding. Step by step of all, as `weights`.

        AVX-512 has what lies above the 32nd below x, 0 for -inf, the power of 2 to that 32nd of 32 in two registers,
        and the product with 2 to the integer below x, each by one instruction; others make 0 below 2^-126."""
        b = self.b
        if self.lanes == 16:
            above, below = [self._above(x) for x in xs], [self._below(x) for x in xs]
            parts = [self._part(x) for x in below]
            values = [self.fma(f, self.k(EXP2_ABOVE[0]), self.k(EXP2_ABOVE[1])) for f in above]
            values = [b.fmul(v, f) for v, f in zip(values, above, strict=True)]
            values = [self.fma(v, t, t) for v, t in zip(values, parts, strict=True)]
            return [self._scaled(v, x) for v, x in zip(values, xs, strict=True)]
        rounded = [b.fadd(x, self.k(ROUND_POWER)) for x in xs]
        fractions = [b.fsub(x, b.fsub(r, self.k(ROUND_POWER))) for x, r in zip(xs, rounded, strict=True)]
        values = [self.k(EXP2[5][0])] * len(xs)
        for c in EXP2[5][1:]:
            values = [self.fma(v, f, self.k(c)) for v, f in zip(values, fractions, strict=True)]
        powers = [b.bitcast(b.shl(b.bitcast(r, self.i), self.n(23)), self.f) for r in rounded]
        found = [b.fmul(v, power) for v, power in zip(values, powers, strict=True)]
        tiny = [b.fcmp_ordered("<", x, self.k(-126.0)) for x in xs]
        return [b.select(t, self.k(0.0), value) for t, value in zip(tiny, found, strict=True)]

    def _above(self, x: ir.Value) -> ir.Value:
        every, places = ir.Constant(ir.IntType(16), -1), PARTS.bit_length() - 1
        return self.call(
            "llvm.x86.avx512.mask.reduce.ps.512",
            self.f,
            x,
            I32(places << 4 | FLOOR),
            self.k(0.0),
            every,
            I32(4),
        )

    def _below(self, x: ir.Value) -> ir.Value:
        """The 32nd below x, in the low bits."""
        return self.call("llvm.x86.avx512.add.ps.512", self.f, x, self.k(ROUND_PARTS), I32(FLOOR))

    def _part(self, x: ir.Value) -> ir.Value:
        """2 to the 32nds in the low five bits of x."""
        low, high = (
            ir.Constant(self.f, [single(p) for p in half])
            for half in (POWERS[: PARTS // 2], POWERS[PARTS // 2 :])
        )
        return self.call("llvm.x86.avx512.vpermi2var.ps.512", self.f, low, self.b.bitcast(x, self.i), high)

    def _scaled(self, x: ir.Value, power: ir.Value) -> ir.Value:
        every = ir.Constant(ir.IntType(16), -1)
        return self.call("llvm.x86.avx512.mask.scalef.ps.512", self.f, x, power, self.k(0.0), every, I32(4))

    def exp2(self, x: ir.Value) -> ir.Value:
        """2^x for any x; below 2^-126 it is 0."""
        # Of a NaN the sum is NaN, of another number infinity.
        above = self.b.fadd(x, self.k(float("inf")))
        big = self.b.select(self.b.fcmp_unordered(">=", x, self.k(128.0)), above, self._power(x, 6))
        return self.b.select(self.b.fcmp_ordered("<", x, self.k(-126.0)), self.k(0.0), big)

    def absolute(self, x: ir.Value) -> ir.Value:
        return self.call(f"llvm.fabs.v{self.lanes}f32", self.f, x)

    def tanh(self, x: ir.Value) -> ir.Value:
        """e / (e + 2) with e = e^(2 |x|) - 1 = 2^n (e^r - 1) + (2^n - 1): near 0, where n = 0, no digit is lost, and
        one division does. Below 3 units in the last place (measured); from |x| = 10 on it is 1."""
        b = self.b
        size = self.absolute(x)
        size = b.select(b.fcmp_ordered(">", size, self.k(10.0)), self.k(10.0), size)
        rounded = self.fma(size, self.k(2 * LOG2E), self.k(ROUND))
        rest = self.fma(b.fsub(self.k(ROUND), rounded), self.k(LN2), b.fadd(size, size))
        part = self.fma(b.fmul(rest, rest), self.poly(rest, GROWTH), rest)
        bits = b.add(b.shl(b.bitcast(rounded, self.i), self.n(23)), self.n(0x3F800000))
        power = b.bitcast(bits, self.f)
        grown = self.fma(power, part, b.fsub(power, self.k(1.0)))
        value = b.fdiv(grown, b.fadd(grown, self.k(2.0)))
        sign = b.and_(b.bitcast(x, self.i), self.n(-(2**31)))
        return b.bitcast(b.or_(b.bitcast(value, self.i), sign), self.f)

    def _logarithm(self, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """(t, rest, whole): ln x = t + rest + whole ln 2, for positive finite x."""
        b = self.b
        tiny = b.fcmp_ordered("<", x, self.k(2.0**-126))
        scaled = b.select(tiny, b.fmul(x, self.k(2.0**23)), x)
        bits = b.bitcast(scaled, self.i)
        exponent = b.ashr(b.sub(bits, self.n(0x3F3504F3)), self.n(23))
        mantissa = b.bitcast(b.sub(bits, b.shl(exponent, self.n(23))), self.f)
        t = b.fsub(mantissa, self.k(1.0))
        square = b.fmul(t, t)
        rest = b.fsub(b.fmul(b.fmul(t, square), self.poly(t, LOG)), b.fmul(square, self.k(0.5)))
        return t, rest, b.fadd(b.sitofp(exponent, self.f), b.select(tiny, self.k(-23.0), self.k(0.0)))

    def _outside(self, x: ir.Value, value: ir.Value) -> ir.Value:
        """A logarithm where x is 0, negative, infinite or NaN."""
        b = self.b
        value = b.select(b.fcmp_unordered("<", x, self.k(0.0)), self.k(float("nan")), value)
        value = b.select(b.fcmp_ordered("==", x, self.k(0.0)), self.k(float("-inf")), value)
        return b.select(b.fcmp_ordered("==", x, self.k(float("inf"))), x, value)

    def log2(self, x: ir.Value) -> ir.Value:
        t, rest, whole = self._logarithm(x)
        value = self.b.fadd(self.fma(t, self.k(LOG2E), self.b.fmul(rest, self.k(LOG2E))), whole)
        return self._outside(x, value)

    def log(self, x: ir.Value) -> ir.Value:
        """Natural logarithm; ln 2 in two parts, after Cephes."""
        t, rest, whole = self._logarithm(x)
        low = self.fma(whole, self.k(-2.12194440e-4), rest)
        return self._outside(x, self.fma(whole, self.k(0.693359375), self.b.fadd(t, low)))

    def sum(self, x: ir.Value) -> ir.Value:
        """The sum of the lanes, pairwise, as a scalar."""
        step = self.lanes // 2
        while step:
            order = [(k + step) % self.lanes for k in range(self.lanes)]
            x = self.b.fadd(x, self.b.shuffle_vector(x, x, ir.Constant(self.i, order)))
            step //= 2
        return self.b.extract_element(x, I32(0))

    # ---- uint32 as the low halves of 64-bit lanes ------------------------------------------------------------

    def halves(self, x: ir.Value) -> list[ir.Value]:
        """The even and the odd lanes of int32, each in the low half of a 64-bit lane; the high halves hold anything."""
        pairs = self.b.bitcast(x, self.l)
        return [pairs, self.b.lshr(pairs, self.wide(32))]

    def join(self, even: ir.Value, odd: ir.Value) -> ir.Value:
        """The int32 of which these are the halves."""
        odd = self.b.shl(odd, self.wide(32))
        order = [n if n % 2 == 0 else n + self.lanes for n in range(self.lanes)]
        return self.b.shuffle_vector(
            self.b.bitcast(even, self.i), self.b.bitcast(odd, self.i), ir.Constant(self.i, order)
        )

    def wide(self, x: int) -> ir.Constant:
        return ir.Constant(self.l, [x] * self.l.count)

    def low_product(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The 64-bit products of the low halves, unsigned; y has nothing in its high halves."""
        return self.b.mul(self.b.and_(x, self.wide(0xFFFFFFFF)), y)

    def divide(self, x: ir.Value, d: int | ir.Value) -> ir.Value:
        """floor(x / d) of int32 for one d in all lanes, never 0, without a division per vector.

        floor(x / d) is n / |d| or ~(n / |d|) with 0 <= n <= 2^31, and n / |d| = n m >> (31 + l) with
        l = ceil(log2 |d|) and m = ceil(2^(31 + l) / |d|).
        Source: Granlund and Montgomery, Division by invariant integers using multiplication, 1994, theorem 4.2.
        """
        b, zero = self.b, self.n(0)
        if isinstance(d, int):
            size, negative = abs(d), d < 0
            shift = 31 + (size - 1).bit_length()
            factor, places = self.wide(-(-(1 << shift) // size)), self.wide(shift)
            turned = b.icmp_signed(">", x, zero) if negative else b.icmp_signed("<", x, zero)
            less, flip = self.n(int(negative)), self.n(-int(negative))
        else:
            below = b.icmp_signed("<", d, I32(0))
            size = b.select(below, b.neg(d), d)
            bits = b.sub(I32(32), self.call("llvm.ctlz.i32", I32, b.sub(size, I32(1)), I1(0)))
            shift, size = b.add(b.zext(bits, I64), I64(31)), b.zext(size, I64)
            factor = b.udiv(b.add(b.shl(I64(1), shift), b.sub(size, I64(1))), size)
            factor, places = self.splat_wide(factor), self.splat_wide(shift)
            turned = b.select(below, b.icmp_signed(">", x, zero), b.icmp_signed("<", x, zero))
            less, flip = self.splat(b.zext(below, I32)), self.splat(b.sext(below, I32))
        mask = b.sext(turned, self.i)
        size = b.xor(b.xor(b.sub(x, less), mask), flip)
        even, odd = (b.lshr(self.low_product(half, factor), places) for half in self.halves(size))
        return b.xor(self.join(even, odd), mask)

    def splat_wide(self, x: ir.Value) -> ir.Value:
        """An int64 in all 64-bit lanes."""
        undefined = ir.Constant(self.l, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(I32, self.l.count), [0] * self.l.count)
        return self.b.shuffle_vector(self.b.insert_element(undefined, x, I32(0)), undefined, zeros)

    # ---- element types ---------------------------------------------------------------------------------------

    def widen(self, base: ir.Value, offset: int | ir.Value, dtype: str) -> ir.Value:
        """`lanes` consecutive numbers of a storage type, as float32."""
        if dtype == "fp32":
            return self.load(base, offset)
        if dtype == "bf16":
            raw = self.load(base, offset, ir.VectorType(I16, self.lanes))
            return self.b.bitcast(self.b.shl(self.b.zext(raw, self.i), self.n(16)), self.f)
        return self.b.fpext(self.load(base, offset, ir.VectorType(HALF, self.lanes)), self.f)

    def narrow(self, x: ir.Value, dtype: str) -> ir.Value:
        """float32 rounded to nearest even in a storage type (bf16 as int16)."""
        if dtype == "fp32":
            return x
        if dtype == "fp16":
            return self.b.fptrunc(x, ir.VectorType(HALF, self.lanes))
        # By integers: without avx512_bf16, LLVM's fptrunc to bfloat is a library call that does not exist.
        b, bits = self.b, self.b.bitcast(x, self.i)
        odd = b.and_(b.lshr(bits, self.n(16)), self.n(1))
        rounded = b.lshr(b.add(bits, b.add(odd, self.n(0x7FFF))), self.n(16))
        quiet = b.or_(b.lshr(bits, self.n(16)), self.n(0x40))
        word = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
        return b.trunc(word, ir.VectorType(I16, self.lanes))

    def transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """`lanes` vectors as the columns of the square they form: log2(lanes) rounds of exchanges."""
        rows, step = list(rows), 1
        while step < self.lanes:
            low = [k if not k & step else k - step + self.lanes for k in range(self.lanes)]
            high = [k + step if not k & step else k + self.lanes for k in range(self.lanes)]
            for r in range(self.lanes):
                if not r & step:
                    a, c = rows[r], rows[r + step]
                    rows[r] = self.b.shuffle_vector(a, c, ir.Constant(self.i, low))
                    rows[r + step] = self.b.shuffle_vector(a, c, ir.Constant(self.i, high))
            step *= 2
        return rows


def cast(builder: ir.IRBuilder, op: str, value: ir.Value, type_: ir.Type) -> ir.Value:
    """A cast llvmlite's builder refuses between vectors of types it does not know."""
    instruction = instructions.CastInstr(builder.block, op, value, type_, name="")
    builder._insert(instruction)
    return instruction


def _size(type_: ir.Type) -> int:
    if isinstance(type_, ir.IntType):
        return max(type_.width // 8, 1)
    return {ir.HalfType: 2, ir.FloatType: 4, ir.DoubleType: 8}[type(type_)]
