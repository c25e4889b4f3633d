"""The printed module of a spec: its folds, and the kernels that use them, as a readable source file.

A module holds, under names that never change:

    score, keep                  the score terms and the mask on a tile
    classify, classify_coarse    the mask's interval form, with and without tables
    derive, site0_indices ...    score, d score / d s and the adjoint of each load site; where those loads read
    one kernel per entry         arguments flattened, the printed functions handed to an ordinary template

Files are named by their own text, so an edited template, printer or spec is another file and no kernel is ever
stale: Triton's cache hashes the functions a kernel calls.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tilewise.backends.triton.holes import print_holes, split_holes
from tilewise.backends.triton.print_interval import print_classify
from tilewise.backends.triton.print_tile import print_function, print_indices
from tilewise.spec import expression as ex
from tilewise.spec.derivative import differentiate

if TYPE_CHECKING:
    from types import ModuleType

    from tilewise.backends.triton.layout import Slots
    from tilewise.spec.attention import AttentionSpec
    from tilewise.spec.expression import Node

_lock = threading.Lock()


class Entry(NamedTuple):
    """A kernel: the template `program` of `module` behind a flat signature.

    The template is called as program(*arguments, data, *functions, *constants). Arguments are tensors (`x_ptr`,
    `x_desc`) and numbers (int32; `x:i64` and `x:fp32` say another type), functions the names of printed functions,
    constants compile-time values.
    """

    name: str
    module: str
    program: str
    arguments: tuple[str, ...]
    functions: tuple[str, ...]
    constants: tuple[str, ...]


class Site(NamedTuple):
    """A load of a float leaf that the score depends on. along: the variables each index reads; names: those indices
    as plain variables of b, h, i, j, or None if one is anything else."""

    slot: int
    along: tuple[frozenset[str], ...]
    names: tuple[str, ...] | None


@functools.lru_cache(maxsize=1024)
def derivative_roots(spec: AttentionSpec) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """(score, slope, adjoint of each site ...) and the sites' load nodes."""
    score = ex.variable("s") if spec.score is None else spec.score
    found = differentiate(score)
    sites = tuple(site for site, _ in found.loads)
    return (score, found.s, *(adjoint for _, adjoint in found.loads)), sites


@functools.lru_cache(maxsize=1024)
def sites_of(spec: AttentionSpec) -> tuple[Site, ...]:
    """The load sites in the order in which `derive` returns their adjoints."""
    found = []
    for site in derivative_roots(spec)[1]:
        along = tuple(ex.variables(a) for a in site.args)
        names = tuple(str(a.value) if a.op == "var" else "" for a in site.args)
        plain = all(n in ("b", "h", "i", "j") for n in names) and len(set(names)) == len(names)
        found.append(Site(int(site.value), along, names if plain else None))  # type: ignore[arg-type]
    return tuple(found)


def is_sloped(spec: AttentionSpec) -> bool:
    """Whether the score terms do more than add to the product: d score / d s is not the number 1."""
    slope = derivative_roots(spec)[0][1]
    return spec.score is not None and not (slope.op == "const" and slope.value == 1)


def print_folds(spec: AttentionSpec, slots: Slots) -> str:
    """Text of the printed functions of a spec."""
    score = ex.variable("s") if spec.score is None else spec.score
    keep = ex.const(True) if spec.keep is None else spec.keep
    ends = split_holes(keep)[0]
    roots, sites = derivative_roots(spec)
    parts = [
        print_function("score", (score,), slots, doc="The score after all terms.", like_s=True),
        print_function("keep", (keep,), slots, doc="Which pairs are visible.", like_s=False, exact=True),
        print_function("ends", (ends,), slots, doc="What FULL tiles go without.", like_s=False, exact=True),
        print_holes("holes", spec.keep, slots),
        print_classify("classify", spec.keep, slots, True),
        print_classify("classify_ends", spec.keep, slots, True, ends),
        print_classify("classify_coarse", spec.keep, slots, False),
        print_function(
            "derive", roots, slots, doc="Score, d score / d s, adjoints of its loads.", like_s=True
        ),
        *(print_indices(f"site{n}_indices", site, slots) for n, site in enumerate(sites)),
    ]
    if slots.described:
        doc = "The score after all terms, with leaves by descriptors."
        parts.append(print_function("score_ahead", (score,), slots, doc=doc, like_s=True, ahead=True))
    return "\n\n".join(parts)


def print_entry(entry: Entry, slots: Slots) -> str:
    """Text of one kernel."""
    arguments = tuple(a.partition(":")[0] for a in entry.arguments)
    names = (*arguments, *slots.names)
    numbers = [n for n in names if not is_pointer(n)]
    constants = "".join(f", {c}: tl.constexpr" for c in entry.constants)
    data = ", ".join(slots.names) or arguments[0]
    call = ", ".join([*arguments, "data", *entry.functions, *entry.constants])
    return (
        f"@triton.jit(do_not_specialize={numbers!r})\n"
        f"def {entry.name}({', '.join(names)}{constants}):\n"
        f"    data = ({data},)\n"
        f"    {entry.program}({call})\n"
    )


def is_pointer(name: str) -> bool:
    """Whether an argument of that name is a tensor or a descriptor: `x_ptr`, `x_desc`, a leaf or a table."""
    return name.endswith(("_ptr", "_desc")) or (name[0] in "LT" and name[1:].isdigit())


def argument_types(entry: Entry, slots: Slots) -> dict[str, str]:
    """Type of each number a kernel takes: strides are int64, so that no length or stride makes another kernel."""
    types = {}
    for argument in entry.arguments:
        name, _, kind = argument.partition(":")
        types[name] = kind or "i32"
    for name in slots.names:
        types[name] = "fp32" if name[0] == "x" else "i64" if "_s" in name else "i32"
    return types


def print_module(spec: AttentionSpec, slots: Slots, entries: tuple[Entry, ...]) -> str:
    """Text of the module of a spec, a layout of its leaves and a set of kernels."""
    words = (
        "INT_MAX, INT_MIN, divide_interval, exponent, floordiv_by, floordiv_float, floordiv_int, inside,\n"
        "    load_where, magnitude_interval, maximum_float, minimum_float, mod_by, mod_float, mod_int, mod_interval,\n"
        "    multiply_interval, reciprocal, remainder, select_interval, tanh, tanh_fine, whole_if_wild,"
    )
    imports = "".join(f"from {e.module} import {e.program}\n" for e in entries)
    head = (
        f'"""Printed by Tilewise from the spec\n\n{spec.text}\n\nData: {", ".join(slots.names) or "none"}.\n"""\n\n'
        "import triton\nimport triton.language as tl\n\n"
        "from tilewise.backends.triton.hole_words import in_pattern, low_bits\n"
        f"from tilewise.backends.triton.words import (\n    {words}\n)\n{imports}"
    )
    folds = print_folds(spec, slots)
    kernels = "\n\n".join(print_entry(e, slots) for e in entries)
    return f"{head}\n\n{folds}\n\n{kernels}"


# ---- files ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def folder() -> Path:
    """Where printed modules lie: TILEWISE_CACHE_DIR, else the user's cache folder, else a temporary one."""
    named = os.environ.get("TILEWISE_CACHE_DIR")
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewise"
        found = (Path(named) if named else cache) / "triton"
        found.mkdir(parents=True, exist_ok=True)
        if os.access(found, os.W_OK | os.X_OK):
            return found
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="tilewise-triton-"))


def load_text(text: str) -> ModuleType:
    """Import a module's text from a file of its own, written once."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    name = f"tilewise_printed_{digest}"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        path = folder() / f"{name}.py"
        if not path.exists() or path.read_text() != text:
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, path)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        sys.modules[name] = module
        return module


@functools.lru_cache(maxsize=512)
def text_of(spec: AttentionSpec, slots: Slots, entries: tuple[Entry, ...]) -> str:
    """The text of the module of a spec, a layout of its leaves and a set of kernels."""
    return print_module(spec, slots, entries)


@functools.lru_cache(maxsize=512)
def module_of(spec: AttentionSpec, slots: Slots, entries: tuple[Entry, ...]) -> ModuleType:
    """That module, imported."""
    return load_text(text_of(spec, slots, entries))
