"""What a bug report or a measurement tells about the machine, and how private words are kept out of it.

Versions, processor, memory, GPUs. No path, no user or host name, no environment variable.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

from tilewise.analysis.machines import processor_name

PACKAGES = ("numpy", "numba", "llvmlite", "triton", "pytorch-triton-rocm", "triton-windows", "transformers")
SHORTEST_SECRET = 6
"""Values of environment variables shorter than this are ordinary words ("1", "C.UTF-8" is 7) and stay."""


def describe() -> dict[str, Any]:
    """Versions and hardware as plain numbers and text."""
    import torch

    import tilewise

    return {
        "tilewise": tilewise.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_versions(),
        "system": " ".join(part for part in (platform.system(), *platform.libc_ver()) if part),
        "architecture": platform.machine(),
        "processor": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _memory_gib() -> float | None:
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    with contextlib.suppress(ImportError):
        import psutil

        return round(psutil.virtual_memory().total / 2**30, 1)
    return None


def _gpus() -> list[str]:
    import torch

    names = []
    if torch.cuda.is_available():
        for n in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(n)
            names.append(f"{about.name} ({about.major}.{about.minor}, {about.total_memory / 2**30:.0f} GiB)")
    return names


def available_devices() -> list[str]:
    """cpu, and the accelerator that PyTorch finds."""
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


_URL = re.compile(r"\b\w+://\S+")
_PATH = re.compile(r"(?<![\w.)\]])(?:[A-Za-z]:[\\/]|\\\\|~?/)[^\s'\"<>|:,;()]+(?:[\\/][^\s'\"<>|:,;()]*)*")


def scrub(text: str) -> str:
    """Text of an error without paths, addresses, user, host, and values of environment variables."""
    for word, private in sorted(_private_words().items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", private, text)
    text = _PATH.sub("<path>", _URL.sub("<url>", text))
    return re.sub(r"<\w+>[\\/]\S*", "<path>", text).replace("<home><path>", "<path>")


def _private_words() -> dict[str, str]:
    words = {value: "<environment>" for value in os.environ.values() if len(value) >= SHORTEST_SECRET}
    words[str(Path.cwd())] = "<path>"
    with contextlib.suppress(RuntimeError):
        words[str(Path.home())] = "<home>"
    with contextlib.suppress(Exception):  # no user database: nothing to hide either
        words[getpass.getuser()] = "<user>"
    words[socket.gethostname()] = "<host>"
    words[platform.node()] = "<host>"
    return {word: private for word, private in words.items() if len(word) > 1}
