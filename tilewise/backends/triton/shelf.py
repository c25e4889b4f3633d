"""Compiled kernels kept from one process to the next, and found again without Triton.

Triton names a cached kernel by its own digest of the kernel's source, for which it has to be imported and the source
parsed: a fifth to half a second of a process's first call. Here a binary lies beside the printed modules, under a name
made of all it depends on: the printed text, the templates' text, the Build, the device's architecture, Triton's files
and the variables of the environment that Triton reads. What is found is checked against its own digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.backends.triton.direct import ENTRY
from tilewise.backends.triton.source import folder

if TYPE_CHECKING:
    from tilewise.backends.triton.compile import Build

_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']+)""", re.MULTILINE)
_VARIABLES = ("TRITON_", "MLIR_", "LLVM_", "DISABLE_", "NVPTX_", "USE_IR_", "PTXAS_")
"""Beginnings of the names of variables that change what Triton compiles."""
_PLACES = frozenset({"TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR"})
"""Those that only say where it keeps things."""
_FILES = ("__init__.py", "_C/libtriton.so", "backends/nvidia/compiler.py", "backends/nvidia/bin/ptxas")
"""Files of Triton whose sizes and times stand for all of them."""
_LENGTH = 8
"""Bytes of the number before the head of a file."""


class Kept(NamedTuple):
    """A compiled kernel. entry: its parameter list in PTX; maps: of each tensor descriptor the swizzle, bytes of an
    element, the driver's number of its type, and the block."""

    name: str
    shared: int
    warps: int
    early: bool
    entry: str
    maps: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    binary: bytes


@functools.lru_cache(maxsize=1)
def triton_folder() -> Path | None:
    """Triton's folder, without importing it."""
    try:
        found = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    return None if found is None or found.origin is None else Path(found.origin).parent


@functools.lru_cache(maxsize=1)
def identity() -> str:
    """A name for Triton's files and the templates' text."""
    root = triton_folder()
    facts = [str(root)]
    for name in _FILES if root else ():
        with contextlib.suppress(OSError):
            found = (root / name).stat()  # type: ignore[operator]
            facts.append(f"{name} {found.st_size} {found.st_mtime_ns}")
    digest = hashlib.sha256("\n".join(facts).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def name_of(text: str, entry: str, build: Build, arch: int) -> str:
    """The file of a kernel of a printed module."""
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and name not in _PLACES
    )
    facts = repr((entry, tuple(build), arch, variables, text))
    return f"{identity()}_{hashlib.sha256(facts.encode()).hexdigest()[:32]}.kernel"


def proven() -> bool:
    """Whether a kernel was compiled by this Triton, so that it can be imported."""
    return next(folder().glob(f"{identity()}_*.kernel"), None) is not None


def version() -> str | None:
    """Triton's version, as its own file says it."""
    root = triton_folder()
    try:
        found = _VERSION.search((root / "__init__.py").read_text()) if root else None
    except OSError:
        return None
    return None if found is None else found[1]


def find(name: str) -> Kept | None:
    """What was kept under a name; None where there is nothing, or nothing whole."""
    try:
        data = (folder() / name).read_bytes()
        size = int.from_bytes(data[:_LENGTH], "little")
        head = json.loads(data[_LENGTH : _LENGTH + size])
        binary = data[_LENGTH + size :]
        if hashlib.sha256(binary).hexdigest() != head.pop("digest"):
            return None
        maps = tuple((a, b, c, tuple(block)) for a, b, c, block in head.pop("maps"))
        return Kept(**head, maps=maps, binary=binary)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(name: str, compiled: Any) -> None:
    """Keep what Triton compiled, unless it wants memory of its own or several blocks that work together."""
    kept = kept_of(compiled)
    if kept is None:
        return
    head = kept._asdict()
    binary = head.pop("binary")
    head["digest"] = hashlib.sha256(binary).hexdigest()
    text = json.dumps(head).encode()
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=folder(), suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(_LENGTH, "little") + text + binary)
        os.replace(temporary, folder() / name)


def kept_of(compiled: Any) -> Kept | None:
    """What a launch needs of what Triton compiled; None for a kernel that `keep` does not keep."""
    about = compiled.metadata
    plain = not any(
        getattr(about, name, 0)
        for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "tmem_size")
    )
    try:
        entry = ENTRY.search(compiled.asm["ptx"])
        binary = compiled.asm["cubin"]
    except KeyError:  # a cache that keeps other stages
        return None
    if not plain or entry is None or getattr(about, "num_ctas", 1) != 1:
        return None
    maps = maps_of(getattr(about, "tensordesc_meta", None) or ())
    if maps is None:
        return None
    early = bool(getattr(about, "launch_pdl", False))
    return Kept(about.name, about.shared, about.num_warps, early, entry[0], maps, binary)


def maps_of(metas: Any) -> tuple[tuple[int, int, int, tuple[int, ...]], ...] | None:
    """The descriptors' facts; None where Triton takes them apart itself."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as NUMBERS

    found = []
    for meta in metas:
        if meta is None or meta["fp4_padded"]:
            return None
        found.append(
            (meta["swizzle"], meta["elem_size"], NUMBERS[meta["elem_type"]], tuple(meta["block_size"]))
        )
    return tuple(found)
