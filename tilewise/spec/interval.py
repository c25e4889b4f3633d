"""Interval arithmetic on expression trees: bounds of a tree's value over sets of pairs, many sets at once.

A printer of the tree like any other. Each value becomes an `Interval` of tensors that broadcast against one
another, one element per set. Bounds hold for fp32 and fp64 evaluation on any backend:

- integers are exact; a bound outside int32 becomes the whole of int32 (wrap-around);
- float arithmetic is widened outward by 2^-20 relative and the smallest normal fp32 absolute, so that
  roundings, a flushed denormal and an approximate division are inside; tanh, exp2 and log2 by 1e-4;
- a number that fp32 cannot hold stands for both itself and its fp32 rounding; overflow in fp32 is infinity;
- NaN is a flag beside the bounds, which describe the other values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ARITHMETIC_SLACK = 2.0**-20
FUNCTION_SLACK = 1e-4
TINY = 2.0**-126
LARGEST = 3.4e38
INF = float("inf")


class Interval(NamedTuple):
    """Bounds of a value, both inclusive.

    Fields: lo, hi: int64, float64, or bool (lo = certainly true, hi = possibly true). nan: bool, whether
    the value may be NaN; None unless the value is a float.
    """

    lo: Tensor
    hi: Tensor
    nan: Tensor | None = None


def exactly(value: float | int | bool) -> Interval:
    """The interval of one known number."""
    dtype = (
        torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    )
    point = torch.tensor(value, dtype=dtype, device="cpu")
    return Interval(point, point) if dtype != torch.float64 else float_interval(point, point)


def everything(type_: str) -> Interval:
    """Every value of a type."""
    if type_ == "bool":
        return Interval(exactly(False).lo, exactly(True).lo)
    if type_ == "int":
        return Interval(exactly(ex.INT_MIN).lo, exactly(ex.INT_MAX).lo)
    bound = torch.tensor(INF, dtype=torch.float64, device="cpu")
    return Interval(-bound, bound, exactly(True).lo)


def int_interval(lo: Tensor, hi: Tensor) -> Interval:
    """Integers as int32 keeps them: whoever leaves int32 may be anything."""
    wraps = (lo < ex.INT_MIN) | (hi > ex.INT_MAX)
    return Interval(torch.where(wraps, ex.INT_MIN, lo), torch.where(wraps, ex.INT_MAX, hi))


def float_interval(lo: Tensor, hi: Tensor) -> Interval:
    """Given numbers, float64, and their fp32 roundings; a NaN bound stands for any value."""
    nan = lo.isnan() | hi.isnan()
    lo, hi = torch.where(nan, -INF, lo), torch.where(nan, INF, hi)
    return Interval(torch.minimum(lo, lo.float().double()), torch.maximum(hi, hi.float().double()), nan)


def evaluate(
    root: ex.Node,
    variables: Mapping[str, Interval],
    ints: Sequence[int],
    floats: Sequence[float],
    load: Callable[[ex.Node, tuple[Interval, ...]], Interval],
) -> Interval:
    """Bounds of the tree.

    Args:
        variables: the range of each variable the tree reads.
        ints, floats: the run-time scalars by slot.
        load: bounds of a load node, given its indices' bounds.
    """
    known: dict[ex.Node, Interval] = {}
    for node in ex.topological(root):
        args = tuple(known[a] for a in node.args)
        if node.op == "const":
            known[node] = exactly(node.value)  # type: ignore[arg-type]
        elif node.op == "var":
            known[node] = variables[str(node.value)]
        elif node.op == "int_scalar":
            known[node] = exactly(int(ints[int(node.value)]))  # type: ignore[arg-type]
        elif node.op == "float_scalar":
            known[node] = exactly(float(floats[int(node.value)]))  # type: ignore[arg-type]
        elif node.op == "load":
            known[node] = load(node, args)
        elif node.args[-1].type == "float" and node.op in _FLOAT:
            known[node] = _FLOAT[node.op](*args)
        else:
            known[node] = _ANY[node.op](*args)
    return known[root]


def _corners(op: Callable[[Tensor, Tensor], Tensor], a: Interval, b: Interval) -> Tensor:
    corners = (op(a.lo, b.lo), op(a.lo, b.hi), op(a.hi, b.lo), op(a.hi, b.hi))
    return torch.stack(torch.broadcast_tensors(*corners))


# ---- integers ----------------------------------------------------------------------------------------------


def _int_mul(a: Interval, b: Interval) -> Interval:
    corners = _corners(torch.mul, a, b)
    return int_interval(corners.amin(0), corners.amax(0))


def _floor(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _int_floordiv(a: Interval, b: Interval) -> Interval:
    # Monotone in each argument while the divisor keeps its sign, so the corners of both halves bound it.
    above = Interval(b.lo.clamp(min=1), b.hi.clamp(min=1))
    below = Interval(b.lo.clamp(max=-1), b.hi.clamp(max=-1))
    up, down = _corners(_floor, a, above), _corners(_floor, a, below)
    positive, negative, zero = b.hi >= 1, b.lo <= -1, (b.lo <= 0) & (b.hi >= 0)
    least, most = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
    lo = torch.minimum(torch.where(positive, up.amin(0), least), torch.where(negative, down.amin(0), least))
    hi = torch.maximum(torch.where(positive, up.amax(0), most), torch.where(negative, down.amax(0), most))
    return int_interval(torch.where(zero, lo.clamp(max=0), lo), torch.where(zero, hi.clamp(min=0), hi))


def _int_mod(a: Interval, b: Interval) -> Interval:
    lo, hi = (b.lo + 1).clamp(max=0), (b.hi - 1).clamp(min=0)
    # A non-negative dividend under a positive divisor never grows.
    shrinks = (a.lo >= 0) & (b.lo >= 1)
    hi = torch.where(shrinks, torch.minimum(hi, a.hi), hi)
    kept = shrinks & (a.hi < b.lo)
    lo, hi = torch.where(kept, a.lo, lo), torch.where(kept, a.hi, hi)
    # Inside one period of a known divisor the remainder is the dividend, shifted.
    divisor = torch.where(b.lo == 0, 1, b.lo)
    period = _floor(a.lo, divisor)
    one = (b.lo == b.hi) & (b.lo != 0) & (period == _floor(a.hi, divisor))
    return Interval(
        torch.where(one, a.lo - period * divisor, lo), torch.where(one, a.hi - period * divisor, hi)
    )


def _int_abs(a: Interval) -> Interval:
    return int_interval(*_magnitude(a))


def _magnitude(a: Interval) -> tuple[Tensor, Tensor]:
    crosses = (a.lo <= 0) & (a.hi >= 0)
    return torch.where(crosses, 0, torch.minimum(a.lo.abs(), a.hi.abs())), torch.maximum(
        a.lo.abs(), a.hi.abs()
    )


# ---- floats ------------------------------------------------------------------------------------------------


def _widen(
    lo: Tensor, hi: Tensor, nan: Tensor, slack: float = ARITHMETIC_SLACK, tiny: Tensor | float = TINY
) -> Interval:
    lo = torch.where(lo.isinf(), lo, lo - lo.abs() * slack - tiny)
    hi = torch.where(hi.isinf(), hi, hi + hi.abs() * slack + tiny)
    return Interval(torch.where(lo < -LARGEST, -INF, lo), torch.where(hi > LARGEST, INF, hi), nan)


def _near_zero(a: Interval) -> Tensor:
    """Where fp32 may see a zero, flushed denormals included."""
    return (a.lo <= TINY) & (a.hi >= -TINY)


def _infinite(a: Interval) -> Tensor:
    return a.lo.isinf() | a.hi.isinf()


def _float_add(a: Interval, b: Interval) -> Interval:
    lo, hi = a.lo + b.lo, a.hi + b.hi
    opposed = ((a.hi == INF) & (b.lo == -INF)) | ((a.lo == -INF) & (b.hi == INF))
    return _widen(
        torch.where(lo.isnan(), -INF, lo), torch.where(hi.isnan(), INF, hi), a.nan | b.nan | opposed
    )


def _float_sub(a: Interval, b: Interval) -> Interval:
    return _float_add(a, _neg(b))


def _float_mul(a: Interval, b: Interval) -> Interval:
    # The corner 0 * inf is the limit of products that are 0; that the product itself is NaN goes to the flag.
    corners = torch.nan_to_num(_corners(torch.mul, a, b), 0.0, INF, -INF)
    nan = a.nan | b.nan | (_near_zero(a) & _infinite(b)) | (_infinite(a) & _near_zero(b))
    return _widen(corners.amin(0), corners.amax(0), nan)


def _float_div(a: Interval, b: Interval) -> Interval:
    corners = torch.nan_to_num(_corners(torch.div, a, b), 0.0, INF, -INF)
    pole = _near_zero(b)
    nan = a.nan | b.nan | (pole & _near_zero(a)) | (_infinite(a) & _infinite(b))
    wild = pole | (_infinite(a) & _infinite(b))
    return _widen(torch.where(wild, -INF, corners.amin(0)), torch.where(wild, INF, corners.amax(0)), nan)


def _float_floordiv(a: Interval, b: Interval) -> Interval:
    quotient = _float_div(a, b)
    # An infinite dividend or divisor is rounded in different ways by different libraries.
    loose = _infinite(a) | _infinite(b) | _infinite(quotient)
    lo, hi = torch.where(loose, -INF, quotient.lo.floor()), torch.where(loose, INF, quotient.hi.floor())
    return _widen(lo, hi, quotient.nan | loose)


def _float_mod(a: Interval, b: Interval) -> Interval:
    loose = _infinite(a) | _infinite(b) | _infinite(_float_div(a, b))
    # As a - floor(a / b) * b the result may miss [0, b] by a rounding of a.
    slack = TINY + ARITHMETIC_SLACK * (
        torch.maximum(a.lo.abs(), a.hi.abs()) + torch.maximum(b.lo.abs(), b.hi.abs())
    )
    slack = torch.where(loose, 0.0, slack)
    lo, hi = torch.where(loose, -INF, b.lo.clamp(max=0.0)), torch.where(loose, INF, b.hi.clamp(min=0.0))
    return _widen(lo, hi, a.nan | b.nan | loose, tiny=slack)


def _float_min(a: Interval, b: Interval) -> Interval:
    # Where NaN meets a number, backends differ in which one they return.
    hi = torch.minimum(a.hi, b.hi)
    hi = torch.where(a.nan, b.hi, torch.where(b.nan, a.hi, hi))
    hi = torch.where(a.nan & b.nan, torch.maximum(a.hi, b.hi), hi)
    return Interval(torch.minimum(a.lo, b.lo), hi, a.nan | b.nan)


def _float_max(a: Interval, b: Interval) -> Interval:
    return _neg(_float_min(_neg(a), _neg(b)))


def _float_abs(a: Interval) -> Interval:
    return Interval(*_magnitude(a), a.nan)


def _tanh(a: Interval) -> Interval:
    return _widen(a.lo.tanh(), a.hi.tanh(), a.nan, FUNCTION_SLACK, FUNCTION_SLACK)


def _exp2(a: Interval) -> Interval:
    wide = _widen(a.lo.exp2(), a.hi.exp2(), a.nan, FUNCTION_SLACK, FUNCTION_SLACK)
    return wide._replace(lo=wide.lo.clamp(min=0.0))


def _log2(a: Interval) -> Interval:
    lo = torch.where(a.lo <= TINY, -INF, a.lo.clamp(min=TINY).log2())
    hi = torch.where(a.hi <= 0, -INF, a.hi.clamp(min=TINY).log2())
    return _widen(lo, hi, a.nan | (a.lo < 0), FUNCTION_SLACK, FUNCTION_SLACK)


# ---- any type ----------------------------------------------------------------------------------------------


def _neg(a: Interval) -> Interval:
    return Interval(-a.hi, -a.lo, a.nan)


def _to_int(a: Interval) -> Interval:
    if a.nan is None:
        return Interval(a.lo.long(), a.hi.long())
    # NaN and numbers beyond int32 become whatever the backend makes of them.
    fits = (a.lo > ex.INT_MIN) & (a.hi < ex.INT_MAX) & ~a.nan
    lo, hi = torch.where(fits, a.lo, 0.0).trunc().long(), torch.where(fits, a.hi, 0.0).trunc().long()
    return Interval(torch.where(fits, lo, ex.INT_MIN), torch.where(fits, hi, ex.INT_MAX))


def _to_float(a: Interval) -> Interval:
    return float_interval(a.lo.double(), a.hi.double())


def _where(condition: Interval, a: Interval, b: Interval) -> Interval:
    def choose(x: Tensor, y: Tensor, either: Tensor) -> Tensor:
        return torch.where(condition.lo, x, torch.where(condition.hi, either, y))

    lo = choose(a.lo, b.lo, torch.minimum(a.lo, b.lo))
    hi = choose(a.hi, b.hi, torch.maximum(a.hi, b.hi))
    return Interval(lo, hi, None if a.nan is None else choose(a.nan, b.nan, a.nan | b.nan))


def _no_nan(a: Interval, b: Interval) -> Tensor | bool:
    return True if a.nan is None else ~(a.nan | b.nan)


def _lt(a: Interval, b: Interval) -> Interval:
    return Interval((a.hi < b.lo) & _no_nan(a, b), a.lo < b.hi)


def _le(a: Interval, b: Interval) -> Interval:
    return Interval((a.hi <= b.lo) & _no_nan(a, b), a.lo <= b.hi)


def _eq(a: Interval, b: Interval) -> Interval:
    same = (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)
    return Interval(same & _no_nan(a, b), (a.lo <= b.hi) & (b.lo <= a.hi))


def _not(a: Interval) -> Interval:
    return Interval(~a.hi, ~a.lo)


_ANY: dict[str, Callable[..., Interval]] = {
    "neg": lambda a: int_interval(-a.hi, -a.lo),
    "abs": _int_abs,
    "add": lambda a, b: int_interval(a.lo + b.lo, a.hi + b.hi),
    "sub": lambda a, b: int_interval(a.lo - b.hi, a.hi - b.lo),
    "mul": _int_mul,
    "floordiv": _int_floordiv,
    "mod": _int_mod,
    "min": lambda a, b: Interval(torch.minimum(a.lo, b.lo), torch.minimum(a.hi, b.hi)),
    "max": lambda a, b: Interval(torch.maximum(a.lo, b.lo), torch.maximum(a.hi, b.hi)),
    "to_int": _to_int,
    "to_float": _to_float,
    "where": _where,
    "not": _not,
    "and": lambda a, b: Interval(a.lo & b.lo, a.hi & b.hi),
    "or": lambda a, b: Interval(a.lo | b.lo, a.hi | b.hi),
    "lt": _lt,
    "le": _le,
    "gt": lambda a, b: _lt(b, a),
    "ge": lambda a, b: _le(b, a),
    "eq": _eq,
    "ne": lambda a, b: _not(_eq(a, b)),
}

_FLOAT: dict[str, Callable[..., Interval]] = {
    "neg": _neg,
    "abs": _float_abs,
    "add": _float_add,
    "sub": _float_sub,
    "mul": _float_mul,
    "div": _float_div,
    "floordiv": _float_floordiv,
    "mod": _float_mod,
    "min": _float_min,
    "max": _float_max,
    "tanh": _tanh,
    "exp2": _exp2,
    "log2": _log2,
}
