"""What a score_mod or mask_mod closes over, made symbolic before it is called.

`Captured` stands for a tensor, read with one index per dimension; `Capture` walks the function's closure, globals,
defaults and the objects it reaches, and puts such stand-ins there.
"""

from __future__ import annotations

import enum
import functools
import numbers
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from tilewise.compat.flex_symbols import Value, kind_of, operand
from tilewise.errors import SpecError
from tilewise.spec import expression as ex
from tilewise.spec.trace import Symbol, _refuse, symbol


class Captured(Value):
    """A tensor from outside, with the indices given so far."""

    __slots__ = ("capture", "indices", "tensor")

    def __init__(self, capture: Capture, tensor: Tensor, indices: tuple[ex.Node, ...] = ()) -> None:
        self.capture, self.tensor, self.indices = capture, tensor, indices

    @property
    def node(self) -> ex.Node:  # type: ignore[override]
        if len(self.indices) != self.tensor.ndim:
            raise _refuse(
                f"a captured tensor of {self.tensor.ndim} dimension(s) is used with {len(self.indices)} index(es)",
                "Give one index per dimension, for example bias[b, h, q_idx, kv_idx].",
            )
        kind = kind_of(self.tensor.dtype)
        along = tuple(str(index.value) if index.op == "var" else "" for index in self.indices)
        return ex.load(self.capture.slot(self.tensor, along), kind, self.indices)

    def __getitem__(self, index: object) -> Value:
        given = index if isinstance(index, tuple) else (index,)
        if len(self.indices) + len(given) > self.tensor.ndim:
            raise _refuse(f"a captured tensor of {self.tensor.ndim} dimension(s) has too many indices", "")
        found = self.indices
        for x in given:
            x = operand(x)
            if not isinstance(x, (Symbol, numbers.Integral)) or isinstance(x, bool):
                raise _refuse(
                    f"a captured tensor is indexed with single numbers, not with {x!r}",
                    "Slices, ellipses and masks cannot be written: index the elements, t[b][h] or t[b, h].",
                )
            found = (*found, self._wrapped(symbol(x).node, self.tensor.shape[len(found)]))
        return Captured(self.capture, self.tensor, found)

    def _wrapped(self, index: ex.Node, size: int) -> ex.Node:
        """torch counts negative indices from the end; indices of batch, head, row and column never are."""
        if index.op == "const" and isinstance(index.value, int):
            return ex.const(index.value + size if index.value < 0 else index.value)
        if index.op == "var":
            return index
        length = symbol(self.capture.number(size)).node
        return ex.apply("where", ex.apply("lt", index, ex.const(0)), ex.apply("add", index, length), index)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.tensor.device

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.tensor.shape[len(self.indices) :]

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:  # type: ignore[override]
        return self.shape[0]

    def _as(self, kind: str) -> Value:
        whole = len(self.indices) < self.tensor.ndim and kind == kind_of(self.tensor.dtype)
        return self if whole else Value(ex.cast(self.node, kind))


_PLAIN = (
    str,
    bytes,
    bool,
    type(None),
    type,
    ModuleType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
    enum.Enum,
    Value,
)


class Holder:
    """An object the function closes over: its attributes are captured as they are read."""

    def __init__(self, capture: Capture, held: object) -> None:
        self.__dict__["capture"], self.__dict__["held"] = capture, held

    def __getattr__(self, name: str) -> Any:
        return self.capture.seen(getattr(self.held, name))

    def __setattr__(self, name: str, value: object) -> None:
        raise _refuse(
            f"a traced function cannot set the attribute {name!r}", "Compute a value, and return it."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.capture.seen(type(self.held).__call__.__get__(self.held))(*args, **kwargs)


class Capture:
    """Everything one function reaches, made symbolic: tensors as leaves, numbers as run-time scalars.

    fixed: numbers stay literals, for functions whose Python they steer (`if`, `range`).
    """

    def __init__(self, fixed: bool) -> None:
        self.fixed = fixed
        self.leaves: list[tuple[Tensor, tuple[str, ...]]] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self._functions: dict[int, tuple[object, Any]] = {}

    def slot(self, tensor: Tensor, along: tuple[str, ...]) -> int:
        """The leaf of a tensor, one for each pattern of variables that its dimensions are read along.

        So a tensor longer than the call can be cut to the rows, or to the columns, without a copy.
        """
        for n, (leaf, pattern) in enumerate(self.leaves):
            if leaf is tensor and pattern == along:
                return n
        if tensor.is_complex():
            raise SpecError("a captured tensor holds floats, integers or bools, not complex numbers")
        self.leaves.append((tensor, along))
        return len(self.leaves) - 1

    def number(self, value: Any) -> Any:
        """A captured number as a run-time scalar."""
        if self.fixed:
            return value
        if isinstance(value, numbers.Integral):
            if not ex.INT_MIN <= int(value) <= ex.INT_MAX:
                return value
            self.ints.append(int(value))
            return Value(ex.int_scalar(len(self.ints) - 1))
        self.floats.append(float(value))
        return Value(ex.float_scalar(len(self.floats) - 1))

    def seen(self, thing: Any) -> Any:
        """What the traced function sees in place of `thing`."""
        if isinstance(thing, Tensor):
            return Captured(self, thing)
        if isinstance(thing, _PLAIN):
            return thing
        if isinstance(thing, numbers.Real):
            return self.number(thing)
        if isinstance(thing, (tuple, list)) and not hasattr(thing, "_fields"):
            return type(thing)(map(self.seen, thing))
        if isinstance(thing, dict):
            return {key: self.seen(value) for key, value in thing.items()}
        if isinstance(thing, functools.partial):
            keywords = {key: self.seen(value) for key, value in thing.keywords.items()}
            return functools.partial(self.seen(thing.func), *map(self.seen, thing.args), **keywords)
        if isinstance(thing, MethodType):
            return functools.partial(self.seen(thing.__func__), Holder(self, thing.__self__))
        if isinstance(thing, FunctionType):
            return self.function(getattr(thing, "_torchdynamo_orig_callable", thing))
        return Holder(self, thing)

    def function(self, fn: FunctionType) -> Any:
        """The same code over captured values; a function of torch without a closure is left alone."""
        own = not fn.__module__ or fn.__module__.split(".")[0] not in ("torch", "tilewise", "math")
        if not own and not fn.__closure__:
            return fn
        if id(fn) not in self._functions:
            scope = dict(fn.__globals__)
            cells = tuple(CellType() for _ in fn.__closure__ or ())
            rebuilt = FunctionType(fn.__code__, scope, fn.__name__, None, cells or None)
            self._functions[id(fn)] = (fn, rebuilt)  # before the walk, so that recursion ends
            for name in _names(fn.__code__):
                if name in scope:
                    scope[name] = self.seen(scope[name])
            for cell, old in zip(cells, fn.__closure__ or (), strict=True):
                try:
                    cell.cell_contents = self.seen(old.cell_contents)
                except ValueError:  # an empty cell: the name is bound later, or never
                    continue
            rebuilt.__defaults__ = None if fn.__defaults__ is None else tuple(map(self.seen, fn.__defaults__))
            keywords = fn.__kwdefaults__
            rebuilt.__kwdefaults__ = (
                None if keywords is None else {k: self.seen(v) for k, v in keywords.items()}
            )
        return self._functions[id(fn)][1]


def _names(code: CodeType) -> set[str]:
    """Global names that a function and the functions inside it may read."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
