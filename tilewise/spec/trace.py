"""Call an atom once with symbolic values and keep the tree it computes.

An atom is plain Python: arithmetic, comparisons, `& | ~`, indexing of leaves, and the words of
`tilewise.spec.words`. Numbers it captures (closure, defaults, module globals) become run-time scalars, so
another window size is the same kernel. Tensors must be handed over as leaves.
"""

from __future__ import annotations

import inspect
import linecache
import numbers
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.errors import SpecError
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from collections.abc import Callable


class Traced(NamedTuple):
    """A traced atom: its tree and the captured numbers its scalar slots stand for."""

    root: ex.Node
    ints: tuple[int, ...]
    floats: tuple[float, ...]


class _NotSymbolic(SpecError):
    """Python wanted a real value where the atom has a symbolic one."""


def _user_line() -> str:
    """Where the user's own code is: the innermost frame outside this package's tracing."""
    frame = sys._getframe(1)
    ours = ("tilewise.spec.", "tilewise.compat.flex_")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    name, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(name, line).strip()
    return f"\n  {name}:{line}" + (f": {source}" if source else "")


def _refuse(what: str, remedy: str) -> _NotSymbolic:
    return _NotSymbolic(f"{what}{_user_line()}\n{remedy}")


class Symbol:
    """A value of the tree under construction; behaves like a number where a number makes sense."""

    __slots__ = ("node",)
    __hash__ = object.__hash__

    def __init__(self, node: ex.Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"<{self.node.type} {ex.to_text(self.node)}>"

    def __bool__(self) -> bool:
        raise _refuse(
            "`if`, `and`, `or`, `not` or a chained comparison needs a value that is only known per pair",
            "Write tw.where(condition, a, b), `&`, `|`, `~`, and (a <= x) & (x < b).",
        )

    def _no_number(self, *_: object) -> Any:
        raise _refuse(
            "a value that is only known per pair cannot become a Python number",
            "Use the words of tilewise (where, minimum, maximum, tanh, exp2, log2, exp, log, abs) and operators.",
        )

    __int__ = __float__ = __index__ = __len__ = __iter__ = __complex__ = _no_number

    def __getitem__(self, index: object) -> Symbol:
        raise _refuse("only a leaf can be indexed", "Hand the tensor over as a leaf: tw.custom(fn, tensor).")

    def __pow__(self, power: object) -> Symbol:
        if not isinstance(power, int) or isinstance(power, bool) or not 0 <= power <= 16:
            raise _refuse(
                "only a literal integer power from 0 to 16 can be written", "Use tw.exp2 and tw.log2."
            )
        result: Symbol = Symbol(ex.const(1))
        for _ in range(power):
            result = self if result.node is ex.const(1) else _binary("mul")(result, self)
        return result

    def __invert__(self) -> Symbol:
        return Symbol(ex.apply("not", _boolean(self, "~")))

    def __pos__(self) -> Symbol:
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Symbol:
        """Accept torch's own spelling of the words, so that score functions written for torch trace."""
        from tilewise.spec import words

        word = getattr(words, _TORCH_WORDS.get(func.__name__, ""), None)
        if word is None or kwargs:
            raise _refuse(
                f"torch.{func.__name__} cannot be written in an expression", "Use tilewise's words."
            )
        result: Symbol = word(*args)
        return result


_TORCH_WORDS = {
    **{w: w for w in ("where", "minimum", "maximum", "tanh", "exp2", "log2", "exp", "log")},
    **{"abs": "absolute", "absolute": "absolute", "logical_and": "logical_and", "logical_or": "logical_or"},
    "logical_not": "logical_not",
}


def symbol(value: object) -> Symbol:
    """Wrap a number; pass a Symbol through.  Raises SpecError for anything else."""
    if isinstance(value, Leaf):
        return value.scalar()
    if isinstance(value, Symbol):
        return value
    if isinstance(value, bool):
        return Symbol(ex.const(value))
    if isinstance(value, numbers.Integral):
        return Symbol(ex.const(int(value)))
    if isinstance(value, numbers.Real):
        return Symbol(ex.const(float(value)))
    kind = type(value).__name__
    raise SpecError(
        f"an expression holds numbers and leaves, not a {kind}{_user_line()}\n"
        "Hand a tensor over as a leaf: tw.custom(fn, tensor), fn(q, k, tensor)."
    )


def _boolean(value: object, sign: str) -> ex.Node:
    node = symbol(value).node
    if node.type != "bool":
        raise _refuse(
            f"`{sign}` joins conditions, and one side is a number", "Compare it first, for example x != 0."
        )
    return node


def _binary(op: str) -> Callable[[object, object], Symbol]:
    def method(self: object, other: object) -> Symbol:
        return Symbol(ex.apply(op, symbol(self).node, symbol(other).node))

    return method


def _logical(op: str, sign: str) -> Callable[[object, object], Symbol]:
    def method(self: object, other: object) -> Symbol:
        return Symbol(ex.apply(op, _boolean(self, sign), _boolean(other, sign)))

    return method


def _differ(self: object, other: object) -> Symbol:
    return Symbol(ex.apply("ne", _boolean(self, "^"), _boolean(other, "^")))


def _install() -> None:
    names = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod"}
    for python, op in names.items():
        method = _binary(op)
        setattr(Symbol, f"__{python}__", method)
        setattr(Symbol, f"__r{python}__", lambda self, other, method=method: method(other, self))
    for op in ex.COMPARISON:
        setattr(Symbol, f"__{op}__", _binary(op))
    for op, sign in (("and", "&"), ("or", "|")):
        setattr(Symbol, f"__{op}__", _logical(op, sign))
        setattr(Symbol, f"__r{op}__", _logical(op, sign))
    for name in ("__xor__", "__rxor__"):
        setattr(Symbol, name, _differ)
    for op in ("abs", "neg"):
        setattr(Symbol, f"__{op}__", lambda self, op=op: Symbol(ex.apply(op, self.node)))


_install()


class Leaf(Symbol):
    """A tensor inside an atom: indexed with one integer per dimension; a 0-d leaf is a number already."""

    __slots__ = ("kind", "ndim", "slot")

    def __init__(self, slot: int, kind: str, ndim: int) -> None:
        self.slot, self.kind, self.ndim = slot, kind, ndim

    @property
    def node(self) -> ex.Node:  # type: ignore[override]
        return ex.load(self.slot, self.kind, self._indices(()))

    def scalar(self) -> Symbol:
        """The leaf used as a number: only a 0-d leaf is one."""
        return self[()]

    def _indices(self, index: tuple[object, ...]) -> tuple[ex.Node, ...]:
        if len(index) != self.ndim:
            raise _refuse(
                f"a leaf of {self.ndim} dimension(s) is read with {len(index)} index(es)",
                "Give one integer per dimension, for example bias[b, h, i, j] or slopes[h].",
            )
        return tuple(symbol(x).node for x in index)

    def __getitem__(self, index: object) -> Symbol:
        index = index if isinstance(index, tuple) else (index,)
        return Symbol(ex.load(self.slot, self.kind, self._indices(index)))


def _captured(fn: types.FunctionType) -> dict[tuple[str, str], Any]:
    """Numbers and other objects the function sees from outside, by (where, name)."""
    found: dict[tuple[str, str], Any] = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            found["closure", name] = cell.cell_contents
        except ValueError:
            continue
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            found["global", name] = fn.__globals__[name]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class _Scalars:
    """Hands out scalar slots for captured numbers."""

    def __init__(self, fixed: bool) -> None:
        self.fixed = fixed
        self.ints: list[int] = []
        self.floats: list[float] = []

    def bind(self, value: Any) -> Any:
        if self.fixed:
            return value
        if isinstance(value, numbers.Integral):
            number = int(value)
            if not ex.INT_MIN <= number <= ex.INT_MAX:
                raise SpecError(
                    f"the captured integer {number} does not fit int32, in which indices are computed"
                )
            self.ints.append(number)
            return Symbol(ex.int_scalar(len(self.ints) - 1))
        self.floats.append(float(value))
        return Symbol(ex.float_scalar(len(self.floats) - 1))


def _rebind(fn: types.FunctionType, scalars: _Scalars) -> types.FunctionType:
    """The same code, its captured numbers replaced by symbolic scalars."""
    captured = _captured(fn)
    for (_, name), value in captured.items():
        if (
            type(value).__module__.startswith("torch")
            and hasattr(value, "dtype")
            and hasattr(value, "stride")
        ):
            raise SpecError(
                f"the atom captures the tensor {name!r}\n"
                f"Hand it over as a leaf: tw.custom(fn, {name}), and read it as {name}[...] inside."
            )
    replaced = {key: scalars.bind(value) for key, value in captured.items() if _is_number(value)}
    scope = {**fn.__globals__, **{name: v for (where, name), v in replaced.items() if where == "global"}}
    cells = tuple(
        types.CellType(replaced["closure", name]) if ("closure", name) in replaced else cell
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    )
    rebound = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, cells or None)
    rebound.__kwdefaults__ = fn.__kwdefaults__
    return rebound


def _call(
    fn: types.FunctionType, leaves: tuple[tuple[str, int], ...], forbidden: tuple[str, ...], fixed: bool
) -> Traced:
    scalars = _Scalars(fixed)
    rebound = _rebind(fn, scalars)
    waiting = [Leaf(slot, kind, ndim) for slot, (kind, ndim) in enumerate(leaves)]
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise SpecError(f"an atom names its parameters; {fn.__name__} has {parameter}")
        if name in forbidden:
            raise SpecError(
                f"{fn.__name__} asks for {name!r}, which a mask does not see\nUse tw.custom_score."
            )
        if name in ex.VARIABLES:
            arguments[name] = Symbol(ex.variable(name))
        elif waiting:
            arguments[name] = waiting.pop(0)
        elif _is_number(parameter.default):
            arguments[name] = scalars.bind(parameter.default)
        elif parameter.default is parameter.empty:
            raise SpecError(
                f"{fn.__name__} has the parameter {name!r}, and {len(leaves)} leaf(s) were given\n"
                f"Known by name are {', '.join(ex.VARIABLES)}; every other parameter is a leaf, in order."
            )
    if waiting:
        raise SpecError(f"{fn.__name__} takes fewer leaves than the {len(leaves)} it was given")
    result = symbol(rebound(**arguments))
    return Traced(result.node, tuple(scalars.ints), tuple(scalars.floats))


def trace(fn: Callable[..., Any], leaves: tuple[tuple[str, int], ...] = (), *, mask: bool) -> Traced:
    """Trace an atom.

    Args:
        fn: plain Python function or lambda. Parameters named q k i j b h g (and s in a score) are
            the variables, the others are leaves in order.
        leaves: (kind, number of dimensions) of each leaf, kind "float", "int" or "bool".
        mask: True for a keep function (must yield a condition, does not see s).

    Raises:
        SpecError: control flow on a symbolic value (with the user's line), a captured tensor, a wrong
            number of leaves or indices, a result of the wrong type.
    """
    if not isinstance(fn, types.FunctionType):
        raise SpecError(f"an atom is a plain Python function or lambda, not {type(fn).__name__}")
    forbidden = ("s",) if mask else ()
    try:
        traced = _call(fn, leaves, forbidden, fixed=False)
    except _NotSymbolic:
        # A captured number may steer the Python code itself (range(n), if n): then it is a literal.
        traced = _call(fn, leaves, forbidden, fixed=True)
    if mask and traced.root.type != "bool":
        raise SpecError(
            f"{fn.__name__} yields a {traced.root.type}; a mask yields a condition, True = may attend"
        )
    return traced if mask else traced._replace(root=ex.cast(traced.root, "float"))
