"""Let `import flash_attn` find Tilewise's functions, when asked, and undo it.

Nothing is written to disk and no finder is hooked in: modules are put into `sys.modules`, and taken out again. A real
installation is never shadowed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from tilewise.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSIONS = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0", "flash_attn.cute": "4.0.0"}
"""What each generation calls itself: the release whose signatures the module has, as callers compare versions."""

_TWO, _THREE, _FOUR = (f"tilewise.compat.flash_attn{n}" for n in (2, 3, 4))
_MODULES = {
    # installed name: the modules whose public names it shows
    "flash_attn": (_TWO,),
    "flash_attn.flash_attn_interface": (_TWO, "tilewise.compat.flash_attn2_private"),
    "flash_attn.bert_padding": ("tilewise.compat.bert_padding",),
    "flash_attn.layers": (),
    "flash_attn.layers.rotary": ("tilewise.compat.rotary",),
    "flash_attn.cute": (_FOUR,),
    "flash_attn.cute.interface": (_FOUR,),
    "flash_attn_interface": (_THREE,),
}
_PACKAGES = {"flash_attn", "flash_attn.layers", "flash_attn.cute"}
_MARK = "__tilewise_shim__"


class Installation:
    """The modules that one `install` put in place. `undo()` takes them out; a `with` block does so at its end."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules

    def undo(self) -> None:
        """Take the modules out of `sys.modules`; code that has imported names from them keeps those."""
        _remove(self.modules)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def install(name: str = "flash_attn") -> Installation:
    """Make `import flash_attn`, its submodules, `flash_attn.cute` and `flash_attn_interface` find Tilewise.

    Args:
        name: "flash_attn", or "flash_attn_interface" for the third generation alone.

    Returns: an Installation, which undoes what this call did; a second call finds everything in place.
    Raises: OptionError for an unknown name, or where a real package of that name is importable.
    """
    wanted = _names(name)
    for top in sorted({module.split(".")[0] for module in wanted}):
        real = _real(top)
        if real is not None:
            raise OptionError(
                f"a real {top} is installed ({real}), and is not shadowed\n"
                f"Call {', '.join(sorted({source for key in wanted for source in _MODULES[key]}))} directly."
            )
    missing = tuple(module for module in wanted if module not in sys.modules)
    for module in missing:
        sys.modules[module] = _shim(module)
        parent, _, child = module.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[module])
    return Installation(missing)


def uninstall(name: str = "flash_attn") -> None:
    """Undo `install`; nothing happens where it was not called. A real package is left alone."""
    _remove(_names(name))


def _remove(modules: Iterable[str]) -> None:
    for module in modules:
        if hasattr(sys.modules.get(module), _MARK):
            del sys.modules[module]


def _names(name: str) -> list[str]:
    if name not in ("flash_attn", "flash_attn_interface"):
        raise OptionError(f"there is no shim for {name!r}\nThere are: flash_attn, flash_attn_interface.")
    return [module for module in _MODULES if name == "flash_attn" or module == name]


def _real(top: str) -> str | None:
    """Where a package of that name that is not ours comes from."""
    present = sys.modules.get(top)
    if present is not None:
        return None if hasattr(present, _MARK) else str(getattr(present, "__file__", "already imported"))
    spec = importlib.util.find_spec(top)
    return None if spec is None else str(spec.origin or list(spec.submodule_search_locations or ["?"])[0])


def _shim(name: str) -> ModuleType:
    module = ModuleType(name, f"Tilewise in place of {name}; see tilewise.compat.")
    spec = ModuleSpec(name, None, origin="tilewise.compat", is_package=name in _PACKAGES)
    module.__spec__ = spec
    module.__file__ = __file__
    if name in _PACKAGES:
        module.__path__ = []
    for source in _MODULES[name]:
        origin = importlib.import_module(source)
        for key in origin.__all__:
            setattr(module, key, getattr(origin, key))
    if name in VERSIONS:
        module.__version__ = VERSIONS[name]  # type: ignore[attr-defined]
    setattr(module, _MARK, True)
    return module
