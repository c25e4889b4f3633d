"""The words an atom may use beside Python's operators. They also work on plain numbers."""

from __future__ import annotations

import math

from tilewise.spec import expression as ex
from tilewise.spec.trace import Symbol, symbol


def _apply(op: str, *values: object) -> Symbol:
    return Symbol(ex.apply(op, *(symbol(v).node for v in values)))


def where(condition: object, a: object, b: object) -> Symbol:
    """`a` where the condition holds, else `b`; both are evaluated."""
    return _apply("where", condition, a, b)


def minimum(a: object, b: object) -> Symbol:
    """The smaller value; at a tie the derivative goes to the first argument."""
    return _apply("min", a, b)


def maximum(a: object, b: object) -> Symbol:
    """The larger value; at a tie the derivative goes to the first argument."""
    return _apply("max", a, b)


def absolute(x: object) -> Symbol:
    """|x|, also written abs(x); its derivative at 0 is 0."""
    return _apply("abs", x)


def tanh(x: object) -> Symbol:
    """Hyperbolic tangent."""
    return _apply("tanh", x)


def exp2(x: object) -> Symbol:
    """2 to the power x."""
    return _apply("exp2", x)


def log2(x: object) -> Symbol:
    """Logarithm to base 2."""
    return _apply("log2", x)


def exp(x: object) -> Symbol:
    """e to the power x, as exp2(x * log2(e))."""
    return _apply("exp2", _apply("mul", x, math.log2(math.e)))


def log(x: object) -> Symbol:
    """Natural logarithm, as log2(x) * ln(2)."""
    return _apply("mul", _apply("log2", x), math.log(2.0))


def logical_and(a: object, b: object) -> Symbol:
    """Both conditions, also written a & b."""
    return _apply("and", a, b)


def logical_or(a: object, b: object) -> Symbol:
    """Either condition, also written a | b."""
    return _apply("or", a, b)


def logical_not(a: object) -> Symbol:
    """The opposite condition, also written ~a."""
    return _apply("not", a)
