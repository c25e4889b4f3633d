"""The interfaces of other attention libraries, with their own meaning, on Tilewise.

Each module is imported when it is first named: `flash_attn2`, `flash_attn3`, `flash_attn4`, `bert_padding`, `rotary`,
`sdpa`, `flex`, `transformers`. `install("flash_attn")` lets `import flash_attn` find them; nothing is replaced unasked.
"""

from typing import TYPE_CHECKING, Any

from tilewise.compat.install import Installation, install, uninstall

if TYPE_CHECKING:
    from tilewise.compat import bert_padding as bert_padding
    from tilewise.compat import flash_attn2 as flash_attn2
    from tilewise.compat import flash_attn3 as flash_attn3
    from tilewise.compat import flash_attn4 as flash_attn4
    from tilewise.compat import flex as flex
    from tilewise.compat import rotary as rotary
    from tilewise.compat import sdpa as sdpa
    from tilewise.compat import transformers as transformers

__all__ = ["Installation", "install", "uninstall"]

_MODULES = (
    "bert_padding", "flash_attn2", "flash_attn3", "flash_attn4", "flex", "rotary", "sdpa", "transformers",
)  # fmt: skip

if not TYPE_CHECKING:  # to a type checker, names that are not there stay errors

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
