"""Triton's reading of a kernel's text, with that done once which it does over and over.

A first call is compilation, and a quarter of it was Python: for each of some 17000 nodes of the syntax tree the reader
saves and restores Python's filters of warnings, writes out the name of each tuple's type, which nobody reads, and looks
signatures up again. While a kernel of this backend is compiled, those few functions are replaced by ones that give the
same: the same operations. They are put back afterwards; a kernel that another thread compiles meanwhile is read by
them, too. Where the text of Triton is not the one they were written for, nothing is replaced.

A kernel is compiled without the lines of its text, which a profiler shows beside its code: they are made for each of
those nodes, carried through every pass and written out, a tenth of a compilation. TRITON_DISABLE_LINE_INFO=0 in the
environment keeps them.

Source: Triton 3.6, compiler/code_generator.py, language/core.py and runtime/jit.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import threading
import warnings
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KNOWN = ("58d3403dd8a2e135d7693014",)
"""Digests of the modules whose functions are replaced."""
PLACES = ("visit", "_maybe_set_loc_to_name")
"""Those of them that leave places out."""
_missing = object()
_lock = threading.Lock()
_depth = 0
_before: list[tuple[Any, str, Any]] = []
_LINES = "disable_line_info"


@contextlib.contextmanager
def quick_reading() -> Iterator[None]:
    """While it lasts, kernels are read quickly and without their lines, in every thread."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _depth
    replaced = replacements()
    with _lock:
        _depth += 1
        if _depth > 1:
            return
        lines = keeps_lines()
        for owner, name, value in replaced:
            if not (lines and name in PLACES):
                _before.append((owner, name, vars(owner)[name]))
                setattr(owner, name, value)
        if not lines:
            _switches()[_LINES] = True


def _leave() -> None:
    global _depth
    with _lock:
        _depth = max(_depth - 1, 0)
        if _depth == 0:
            _put_back()


def _put_back() -> None:
    while _before:
        setattr(*_before.pop())
    if not keeps_lines():
        _switches().pop(_LINES, None)


def keeps_lines() -> bool:
    """Whether someone said whether kernels have lines."""
    from triton import knobs

    return os.environ.get("TRITON_DISABLE_LINE_INFO") is not None or bool(
        knobs.compilation.dump_ir_extract_di_local_variables
    )


def _switches() -> dict[str, Any]:
    """Triton's switches of compilation. Set by their own way they would be this process's environment, too, which is
    part of the names of kernels that are kept."""
    from triton import knobs

    return vars(knobs.compilation)


def _fresh() -> None:
    """In a child of fork: no other thread is left that could give the lock back, or put back what it replaced."""
    global _lock, _depth
    _lock, _depth = threading.Lock(), 0
    _put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh)


# ---- what is replaced ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def replacements() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, name, what to put there); nothing where Triton's text is another."""
    from triton.compiler import code_generator as generator
    from triton.language import core
    from triton.runtime import jit

    try:
        if digest(generator, core, jit) not in KNOWN:
            return ()
    except (OSError, TypeError):
        return ()
    # A type whose name was not asked for may outlive the time of the replacement, in another thread.
    core.tuple_type.name = _Name()
    return (
        (generator, "warnings", _Unfiltered),
        (generator, "inspect", _Signatures()),
        (generator.CodeGenerator, "_define_name_lookup", _lookup_of(generator, jit)),
        (generator.CodeGenerator, "visit", _visit_of(generator)),
        (generator.CodeGenerator, "_maybe_set_loc_to_name", lambda self, value, name: None),
        (core.tuple_type, "__init__", _start_tuple_type),
        (core.tensor, "__init__", _start_of_tensors(core)),
    )


def digest(*modules: Any) -> str:
    """A name for the text of modules."""
    found = hashlib.sha256()
    for module in modules:
        found.update(Path(module.__file__).read_bytes())
    return found.hexdigest()[:24]


class _Unfiltered:
    """`warnings` as the reader uses it: filters are left alone, since no node makes a warning that one would stop."""

    catch_warnings = contextlib.nullcontext
    warn = staticmethod(warnings.warn)
    warn_explicit = staticmethod(warnings.warn_explicit)

    @staticmethod
    def simplefilter(*_: object) -> None:
        return


class _Signatures:
    """`inspect` as the reader uses it, with functions' signatures looked up once."""

    def __init__(self) -> None:
        self.known: dict[Any, inspect.Signature] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def signature(self, function: Any) -> inspect.Signature:
        plain = getattr(function, "__func__", function)
        if type(plain) is not FunctionType:
            return inspect.signature(function)
        key = (plain, plain is function)  # a method's lacks the first parameter of its function's
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = inspect.signature(function)
        return found

    @staticmethod
    def getcallargs(function: Any, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        code = function.__code__
        plain = not (
            kwargs or code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        )
        if plain and len(args) == code.co_argcount:
            return dict(zip(code.co_varnames, args, strict=False))
        return inspect.getcallargs(function, *args, **kwargs)


class _Name:
    """The name of a tuple's type, written when it is asked for; one that has a name of its own is not asked here."""

    def __get__(self, kind: Any, owner: Any) -> str:
        if kind is None:
            raise AttributeError("name")
        pairs = zip(kind.fields, kind.types, strict=False)
        name = kind.name = "[" + ",".join([f"{field}:{each}" for field, each in pairs]) + "]"
        return name


def _start_tuple_type(self: Any, types: Any, fields: Any = None) -> None:
    self.types = types
    self.fields = fields or [""] * len(types)


def _start_of_tensors(core: Any) -> Callable[..., None]:
    """`tensor.__init__`: tensors of one shape share its numbers and their types."""
    shapes: dict[tuple[int, ...], tuple[Any, list[Any], Any]] = {}

    def known(shape: tuple[int, ...]) -> tuple[Any, list[Any], Any]:
        numbers = [core.constexpr(n) for n in shape]
        count = 1
        for n in shape:
            count *= n
        made = core.constexpr(count), numbers, core._type_for_tuple_values(numbers)
        return shapes.setdefault(shape, made)

    def start(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        numel, numbers, kind = shapes.get(shape) or known(shape)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = numel, core.tuple(numbers, kind)

    return start


def _visit_of(generator: Any) -> Callable[..., Any]:
    """`CodeGenerator.visit`, without places."""
    failed, knobs = generator.CompilationError, generator.knobs

    def visit(self: Any, node: Any) -> Any:
        if node is None:
            return None
        last, self.cur_node = self.cur_node, node
        try:
            found = getattr(self, "visit_" + node.__class__.__name__, self.generic_visit)(node)
        except failed:
            raise
        except Exception as error:
            if knobs.compilation.front_end_debugging:
                raise
            raise failed(self.jit_fn.src, self.cur_node, repr(error)) from None
        self.cur_node = last
        return found

    return visit


def _lookup_of(generator: Any, jit: Any) -> Callable[..., Any]:
    """`CodeGenerator._define_name_lookup`: names that are found at once, and Triton's own way for the others."""
    whole = generator.CodeGenerator._define_name_lookup

    def _define_name_lookup(self: Any) -> Callable[[str], Any]:
        slow, everywhere, builtin = whole(self), self.gscope, self.builtin_namespace

        def name_lookup(name: str) -> Any:
            found = self.lscope.get(name, _missing)
            if found is not _missing:
                return found
            found = everywhere.get(name, _missing)
            if found is not _missing and (
                name in builtin
                or type(found) is ModuleType
                or isinstance(found, jit.JITCallable)
                or generator._is_constexpr(found)
                or getattr(found, "__triton_builtin__", False)
            ):
                return found
            return slow(name)

        return name_lookup

    return _define_name_lookup
