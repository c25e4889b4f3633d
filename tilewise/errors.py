"""Every error Tilewise raises, one class per kind, and the one way its text is built.

A message is the rule that was broken, then each tensor on its own line, then a remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class TilewiseError(Exception):
    """Base of every error raised on purpose."""


class ShapeError(TilewiseError, ValueError):
    """Sizes that do not fit together, or lengths that leave their tensor."""


class DTypeError(TilewiseError, TypeError, ValueError):
    """An element type that is not supported, or types that differ."""


class DeviceError(TilewiseError, ValueError):
    """Tensors on devices that differ."""


class SpecError(TilewiseError, ValueError):
    """A mask or score term that cannot be written as an expression."""


class OptionError(TilewiseError, ValueError):
    """An option outside its range."""


class UnsupportedProblem(TilewiseError, NotImplementedError):
    """A backend was asked for something it does not do; nothing was run in its place."""


class SlowPathWarning(UserWarning):
    """`backend="auto"` took a slower backend; the text says why."""


def message(rule: str, tensors: Mapping[str, Tensor | None] | None = None, remedy: str = "") -> str:
    """Build an error text: the rule, one aligned line per tensor, the remedy."""
    lines = [rule]
    given = {name: t for name, t in (tensors or {}).items() if t is not None}
    width = max((len(name) for name in given), default=0)
    for name, t in given.items():
        kind = str(t.dtype).removeprefix("torch.")
        lines.append(f"  {name:<{width}} : shape {tuple(t.shape)}, {kind}, {t.device}")
    if remedy:
        lines.append(remedy)
    return "\n".join(lines)
