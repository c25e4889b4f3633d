"""Measured tile choices: one JSON table per device, provenance inside.

    {"device": "NVIDIA H200", "measured": {...}, "choices": {"triton.rows": {"16-d128-128-masked": [128, 64, 8, 3]}}}

`measured` says when, with which versions and by which command. A device without a table, or a key without an entry,
is left to the backend's heuristic; nothing is ever tuned inside a call. `benchmarks/tune.py` measures and rewrites.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent


def table_path(device: str) -> Path:
    """Where the table of a device's name lies, or would lie."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json")


@functools.lru_cache(maxsize=32)
def choices(device: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Kernel to key to numbers, of a device's name; empty without a table."""
    path = table_path(device)
    if not device or not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))["choices"]
    return {
        kernel: {key: tuple(numbers) for key, numbers in entries.items()} for kernel, entries in found.items()
    }


def lookup(device: str, kernel: str, key: str) -> tuple[int, ...] | None:
    """The measured numbers of a kernel for a kind of problem; None if nobody measured them."""
    return choices(device).get(kernel, {}).get(key)
