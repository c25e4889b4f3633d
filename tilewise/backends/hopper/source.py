"""The printed module of a spec for Hopper: the folds of `tilewise.backends.triton`, in Gluon, and kernel templates.

A function cannot be handed to a partition of `gl.warp_specialize`, so a template names the folds as globals:

    from tilewise.backends.hopper.plain import classify, derive, keep

is a line of the template, and the template is a working module of plain attention. A printed module is the template's
own text with a spec's folds in the place of that line, and below it the kernels with the spec's data in their
signatures. Functions that templates share are a template of their own, `..._shared`. Files lie beside the Triton
backend's and are named by their own text.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from typing import TYPE_CHECKING, Any

from tilewise.backends.hopper.print_fold import print_forward_folds
from tilewise.backends.triton.source import Entry, is_pointer, load_text, print_folds

if TYPE_CHECKING:
    from types import ModuleType

    from tilewise.backends.triton.layout import Slots
    from tilewise.spec.attention import AttentionSpec

FOLDS = re.compile(r"^from tilewise\.backends\.hopper\.plain import (?:[\w, ]+|\([\w,\s]+\))$", re.MULTILINE)
SHARED = re.compile(
    r"^from (tilewise\.backends\.hopper\.\w+_shared) import ([\w, ]+|\([\w,\s]+\))$", re.MULTILINE
)
"""A template's line that imports from another template: the printed module imports from its printed form."""
OWN_WORDS = (
    "capped", "divide", "floordiv_along", "floordiv_int", "fused", "inside_int32", "like", "load_where", "mod_along",
    "mod_int", "powers_if", "rate_if", "spread", "tanh", "times_unless",
)  # fmt: skip
"""What `words.py` here says in another way, or says at all."""


def dialect(text: str) -> str:
    """Triton's language as Gluon's: the printers write nothing that has no word there."""
    text = re.sub(r"tl\.full\(\(\), (.*?), tl\.(\w+)\)", r"gl.to_tensor(\1).to(gl.\2)", text)
    text = re.sub(r"tl\.broadcast_to\((\w+), s\.shape\)", r"like(\1, s)", text)
    text = re.sub(r"^(    t\d+ = )(\w+) / (\w+)$", r"\1divide(\2, \3)", text, flags=re.MULTILINE)
    text = text.replace("tl.PropagateNan", "tl_words.PropagateNan")
    text = re.sub(r"(?<![\w.])tl\.", "gl.", text)
    return text.replace("@triton.jit", "@gluon.jit")


@functools.lru_cache(maxsize=1)
def words_text() -> str:
    """The words of `tilewise.backends.triton.words` in Gluon, and the import of those that differ."""
    from tilewise.backends.triton import words

    text = inspect.getsource(words)
    body = dialect(text[text.index("INT_MIN") :])
    for name in OWN_WORDS:
        body = re.sub(rf"@gluon\.jit\ndef {name}\(.*?(?=\n@gluon|\n# |\Z)", "", body, flags=re.DOTALL)
    return f"from tilewise.backends.hopper.words import {', '.join(sorted(OWN_WORDS))}\n\n{body}"


def print_entry(entry: Entry, slots: Slots) -> str:
    """Text of one kernel: `program` of a template behind a signature with the spec's data."""
    arguments = tuple(a.partition(":")[0] for a in entry.arguments)
    names = (*arguments, *slots.names)
    numbers = [n for n in names if not is_pointer(n)]
    constants = "".join(f", {c}: gl.constexpr" for c in entry.constants)
    data = ", ".join(slots.names) or numbers[0]
    call = ", ".join([*arguments, "data", *entry.constants])
    return (
        f"@gluon.jit(do_not_specialize={numbers!r})\n"
        f"def {entry.name}({', '.join(names)}{constants}):\n"
        f"    data = ({data},)\n"
        f"    {entry.program}({call})\n"
    )


def text_of(module: str) -> str:
    """A module's text, without running it: each of its functions would be found in that text, and nobody calls them."""
    spec = importlib.util.find_spec(module)
    loader: Any = None if spec is None else spec.loader
    return str(loader.get_source(module))


def print_module(spec: AttentionSpec, slots: Slots, template: str, entries: tuple[Entry, ...]) -> str:
    """Text of the module of a spec, a layout of its leaves, and a template (a module's name) with its kernels."""
    text = text_of(template)
    doc, _, rest = text.removeprefix('"""').partition('"""')
    names = ", ".join(slots.names) or "none"
    head = f'"""Printed by Tilewise from the spec\n\n{spec.text}\n\nData: {names}.\n\n{doc}"""'
    kernels = "\n\n".join(print_entry(e, slots) for e in entries)
    body, shared = SHARED.subn(
        lambda m: f"from {module_of(spec, slots, m[1], ()).__name__} import {m[2]}", rest
    )
    if shared:
        return f"{head}\n{body}\n\n{kernels}"
    ours = print_forward_folds if "kinds" in (FOLDS.search(rest) or [""])[0] else print_folds
    folds = "\n\n\n".join((words_text(), dialect(ours(spec, slots))))
    body, places = FOLDS.subn(lambda _: f"import triton.language as tl_words\n\n{folds}", rest)
    if places != 1:
        raise AssertionError(f"{template} does not import its folds on one line")
    return f"{head}\n{body}\n\n{kernels}"


@functools.lru_cache(maxsize=512)
def module_of(spec: AttentionSpec, slots: Slots, template: str, entries: tuple[Entry, ...]) -> ModuleType:
    """The imported module of a spec, a layout of its leaves and a template's kernels."""
    return load_text(print_module(spec, slots, template, entries))
