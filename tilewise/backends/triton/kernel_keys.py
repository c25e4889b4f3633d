"""Names of kernels in Triton's cache that do not depend on what a process has compiled before.

Triton's key of a function lists the global constants that it and the functions it calls read. Those of a function
called are added before its own key is asked for (3.6, `runtime/jit.py`, `_update_hash`), so they are there only if
something else has asked for it before: a process that compiles kernels in another order has other names for them, does
not find what an earlier one has compiled, and compiles it again. Here each function called is asked first.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def settle(kernel: Any) -> None:
    """Ask for the keys of all functions that a kernel calls, those that they call first."""
    _settle(kernel, set())


def _settle(function: Any, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    if getattr(function, "hash", None) is None:
        for called in _called(function):
            _settle(called, seen)
    function.cache_key  # noqa: B018  (kept by the function)


def _called(function: Any) -> Iterator[Any]:
    """The functions of Triton that a function names, in its module or in a module that it names."""
    from triton.runtime import jit

    kind = getattr(jit, "JITCallable", jit.JITFunction)
    names = function.fn.__code__.co_names
    for name in names:
        value = function.fn.__globals__.get(name)
        if isinstance(value, kind):
            yield value
        elif isinstance(value, ModuleType):
            inner = (getattr(value, other, None) for other in names)
            yield from (x for x in inner if isinstance(x, kind))
