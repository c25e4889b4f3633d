"""Triton's digest of itself, kept from one process to the next.

Triton names cached kernels by a digest of its own files, which it computes once a process: on one H200 machine 0.35 of
the 0.60 seconds of a process's first call whose kernel was cached (`benchmarks/results/gpu_triton_forward.jsonl`).
Here the digest lies in a file beside the printed modules, whose name is made of those files' names, sizes and times.
Where one of them differs, Triton computes it as ever.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from tilewise.backends.triton.source import folder

_PARTS = ("_C", "backends", "compiler", "language", "runtime")
"""The folders of Triton of whose files its digest is made, and its cache's own."""


def stamp(root: Path) -> str:
    """A name for the state of Triton's files: their paths, sizes and times."""
    found = [str(root)]
    for part in _PARTS:
        for path in sorted((root / part).rglob("*")):
            if path.suffix in (".py", ".so", ".pyd"):
                facts = path.stat()
                found.append(f"{path.relative_to(root)} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:24]


def recalled(compute: Any, version: str, root: Path) -> str:
    """The digest that compute() gives, from the file of this state of Triton if there is one."""
    path = folder() / f"triton_{stamp(root)}.digest"
    if path.exists():
        text = path.read_text()
        if text.startswith(version):
            return text
    text = str(compute())
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
    return text


@functools.lru_cache(maxsize=1)
def recall() -> None:
    """Give Triton its digest, unless it has computed it in this process, or keeps it elsewhere than it did in 3.6."""
    import triton
    from triton.runtime import cache

    compute = getattr(cache, "triton_key", None)
    if not hasattr(compute, "cache_info") or compute.cache_info().currsize:
        return
    with contextlib.suppress(OSError):
        digest = recalled(compute, triton.__version__, Path(triton.__file__).parent)
        cache.triton_key = functools.lru_cache(maxsize=1)(lambda: digest)
