"""Which backend runs a problem, and why the others do not."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from tilewise.config import config
from tilewise.errors import OptionError, SlowPathWarning, UnsupportedProblem

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewise.backends.protocol import Backend, Reason
    from tilewise.problem import Problem


class Entry(NamedTuple):
    """A registered backend: where its class is, and whether `auto` taking it deserves a word."""

    module: str
    attribute: str
    slow: bool


class Registry:
    """Backends by name, in the order in which `auto` asks them. A backend is imported when first asked."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._loaded: dict[str, Backend] = {}
        self.version = 0
        self.changed: list[Callable[[], None]] = []
        """Called when backends change."""

    def register(
        self, name: str, module: str, attribute: str, *, slow: bool = False, first: bool = False
    ) -> None:
        """Add a backend; `first` puts it before those already there."""
        entry = {name: Entry(module, attribute, slow)}
        self._entries = entry | self._entries if first else self._entries | entry
        self.version += 1
        for tell in self.changed:
            tell()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def is_slow(self, name: str) -> bool:
        return self._entries[name].slow

    def reasons(self, name: str, problem: Problem) -> list[Reason]:
        """Why that backend would not run the problem."""
        return self.get(name).supports(problem)

    def get(self, name: str) -> Backend:
        """The backend of that name.  Raises OptionError for an unknown one."""
        if name not in self._loaded:
            if name not in self._entries:
                raise OptionError(f"there is no backend {name!r}\nKnown: auto, {', '.join(self._entries)}.")
            entry = self._entries[name]
            self._loaded[name] = getattr(import_module(entry.module), entry.attribute)()
        return self._loaded[name]


registry = Registry()
registry.register("hopper", "tilewise.backends.hopper.backend", "Hopper")
registry.register("triton", "tilewise.backends.triton.backend", "Triton")
registry.register("cpu", "tilewise.backends.cpu.backend", "Cpu")
registry.register("blockwise", "tilewise.backends.reference.blockwise", "Blockwise", slow=True)
registry.register("naive", "tilewise.backends.reference.naive", "Naive", slow=True)

_warned: set[str] = set()


def candidates(problem: Problem) -> list[tuple[str, list[Reason]]]:
    """Every backend with its reasons against the problem; no reasons means it would run it."""
    return [(name, registry.reasons(name, problem)) for name in registry.names]


def choose(problem: Problem) -> Backend:
    """The backend that runs the problem.

    A named backend runs it or raises UnsupportedProblem; it is never replaced. "auto" takes the first that
    has no reason against it, and says so once if that is a slow one (`tilewise.config.slow`).
    """
    name = problem.options.backend
    if name != "auto":
        backend = registry.get(name)
        reasons = backend.supports(problem)
        if reasons:
            raise UnsupportedProblem(
                _refusal(f"the backend {name!r} does not take this problem", [(name, reasons)])
            )
        return backend
    asked: list[tuple[str, list[Reason]]] = []
    for name in registry.names:
        reasons = registry.reasons(name, problem)
        if not reasons:
            if registry.is_slow(name):
                _say_slow(name, problem, asked)
            return registry.get(name)
        asked.append((name, reasons))
    raise UnsupportedProblem(_refusal("no backend takes this problem", asked))


def _refusal(head: str, asked: list[tuple[str, list[Reason]]]) -> str:
    return "\n".join([head, *(f"  {name}: {reason}" for name, reasons in asked for reason in reasons)])


def _say_slow(name: str, problem: Problem, asked: list[tuple[str, list[Reason]]]) -> None:
    if config.slow == "quiet":
        return
    why = "" if asked else f"\n  this version has no other backend for {problem.device_type} tensors"
    text = (
        _refusal(f"backend='auto' takes the slower backend {name!r} for {problem.device_type} tensors", asked)
        + why
    )
    if config.slow == "raise":
        raise UnsupportedProblem(f"{text}\nName the backend, or set tilewise.config.slow = 'warn'.")
    if text not in _warned:
        _warned.add(text)
        warnings.warn(
            f"{text}\nSilence with backend={name!r} or tilewise.config.slow = 'quiet'.",
            SlowPathWarning,
            stacklevel=_depth_to_user(),
        )


def _depth_to_user() -> int:
    """Frames from the caller of this function up to the first outside Tilewise and torch, for warnings."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "tilewise",
        "torch",
    ):
        frame, depth = frame.f_back, depth + 1
    return depth
