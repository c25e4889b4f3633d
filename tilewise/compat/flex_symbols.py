"""What score_mod and mask_mod functions compute with while they are traced: symbols that behave like torch's scalars.

`Value` is a tilewise symbol with torch's functions and methods.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.spec import expression as ex
from tilewise.spec import words
from tilewise.spec.trace import Symbol, _refuse, symbol


def operand(x: object) -> object:
    """A tensor made inside the function, with one number known now, as that number."""
    if isinstance(x, Tensor) and x.ndim == 0 and x.device.type == "cpu" and not x.requires_grad:
        return x.item()
    return x


def _value(x: object) -> Any:
    return Value(symbol(operand(x)).node)


class Value(Symbol):
    """A number or condition of one pair."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        meaning = _FUNCTIONS.get(getattr(func, "__name__", ""))
        if meaning is None:
            raise _refuse(
                f"torch.{getattr(func, '__name__', func)} cannot be written in an expression",
                f"There are operators, indexing, and torch's {', '.join(sorted(_FUNCTIONS))}.",
            )
        return meaning(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in _CASTS:
            return functools.partial(self._as, _CASTS[name])
        if name in _FUNCTIONS:
            return functools.partial(_FUNCTIONS[name], self)
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refuse(
            f".{name} of an index, a score or a condition cannot be written in an expression",
            f"There are operators, indexing, and {', '.join(sorted(_FUNCTIONS))}.",
        )

    @property
    def dtype(self) -> torch.dtype:
        return {"int": torch.int32, "float": torch.float32, "bool": torch.bool}[self.node.type]

    device, shape, ndim = torch.device("cpu"), torch.Size([]), 0

    def __rpow__(self, base: Any) -> Value:
        """A positive number to the power of this one."""
        base = operand(base)
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < math.inf:
            raise _refuse(f"{base!r} to a symbolic power cannot be written", "The base is a positive number.")
        return _value(words.exp2(_value(self)._as("float") * math.log2(base)))  # type: ignore[no-any-return]

    def _as(self, kind: str) -> Value:
        return Value(ex.cast(self.node, kind))

    def to(self, *args: Any, **kwargs: Any) -> Value:
        """A cast; a device changes nothing."""
        for wanted in (*args, *kwargs.values()):
            if isinstance(wanted, torch.dtype):
                return self._as(kind_of(wanted))
            if isinstance(wanted, Value):
                return self._as(wanted.node.type)
        return self

    type_as = to

    def new_ones(self, size: Any = (), dtype: torch.dtype | None = None, **_: Any) -> Value:
        return self.new_full(size, 1, dtype)

    def new_zeros(self, size: Any = (), dtype: torch.dtype | None = None, **_: Any) -> Value:
        return self.new_full(size, 0, dtype)

    def new_full(self, size: Any, fill: Any, dtype: torch.dtype | None = None, **_: Any) -> Value:
        """One number; only a scalar, size (), can be made."""
        if tuple(size):
            raise _refuse(
                f"a tensor of size {tuple(size)} cannot be made inside", "Make it outside, and index it."
            )
        return _value(fill)._as(self.node.type if dtype is None else kind_of(dtype))  # type: ignore[no-any-return]


_CASTS = {
    **dict.fromkeys(("float", "double", "half", "bfloat16"), "float"),
    **dict.fromkeys(("int", "long", "short"), "int"),
    "bool": "bool",
}


def kind_of(dtype: torch.dtype) -> str:
    """The expression's type of a torch dtype."""
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"


def _install_operators() -> None:
    """Symbol's operators, giving Values; `==` and `<` of tensors known now included."""

    def wrapped(plain: Callable[..., Symbol]) -> Callable[..., Value]:
        return lambda self, *others: Value(plain(self, *map(operand, others)).node)

    names = ["neg", "abs", "invert", "pos", "pow", *ex.COMPARISON]
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"):
        names += [name, f"r{name}"]
    for name in names:
        setattr(Value, f"__{name}__", wrapped(getattr(Symbol, f"__{name}__")))


_install_operators()


# ---- torch's functions ---------------------------------------------------------------------------------------


def _word(word: Callable[..., Symbol]) -> Callable[..., Value]:
    return lambda *args: Value(word(*map(operand, args)).node)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Value:
    result = _value(x)
    result = result if min is None else _word(words.maximum)(result, min)
    return result if max is None else _word(words.minimum)(result, max)


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return _value(a) // b  # type: ignore[no-any-return]
    if rounding_mode is not None:
        raise _refuse(f"rounding_mode={rounding_mode!r} cannot be written", "Use // (rounds down) or /.")
    return _value(a) / b  # type: ignore[no-any-return]


def _like(x: Any, fill: Any, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return _value(x).new_full((), fill, dtype)  # type: ignore[no-any-return]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: _word(getattr(words, name))
        for name in ("where", "minimum", "maximum", "tanh", "exp2", "log2", "exp")
    },
    **{name: _word(getattr(words, name)) for name in ("log", "logical_and", "logical_or", "logical_not")},
    "abs": _word(words.absolute),
    "absolute": _word(words.absolute),
    "clamp": _clamp,
    "clip": _clamp,
    "div": _divide,
    "true_divide": _divide,
    "sigmoid": lambda x: 1.0 / (_value(_word(words.exp)(-_value(x))) + 1.0),
    "relu": lambda x: _clamp(x, min=0),
    "square": lambda x: _value(x) * x,
    "neg": lambda x: -_value(x),
    "add": lambda a, b: _value(a) + b,
    "sub": lambda a, b: _value(a) - b,
    "mul": lambda a, b: _value(a) * b,
    "floor_divide": lambda a, b: _value(a) // b,
    "remainder": lambda a, b: _value(a) % b,
    "bitwise_and": lambda a, b: _value(a) & b,
    "bitwise_or": lambda a, b: _value(a) | b,
    "bitwise_not": lambda a: ~_value(a),
    "logical_xor": lambda a, b: _value(a) ^ b,
    **{
        name: (lambda a, b, op=name: Value(ex.apply(op, _value(a).node, _value(b).node)))
        for name in ex.COMPARISON
    },
    "ones_like": lambda x, **options: _like(x, 1, **options),
    "zeros_like": lambda x, **options: _like(x, 0, **options),
    "full_like": _like,
}
