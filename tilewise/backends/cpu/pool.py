"""Runs one C function on all threads: torch's own OpenMP pool, else a pool of plain threads, else this thread.

The function gets the address of the call's parameters and takes tasks from a counter there, so any number of
threads gives the same bits. TILEWISE_CPU_POOL forces a path: "openmp", "threads", "serial".

A child forked after the pool was used has no pool threads; libgomp would wait for them for ever. There the
work runs on the forking thread alone.

Numba's own pool is not used: its portable layer ends the process when two threads call it at once, and its others
need a library that may be missing too. ctypes lets go of the GIL during a call, so plain threads run side by side.
"""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


@functools.lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    """Threads that stay, started as they are needed."""
    return ThreadPoolExecutor(max_workers=max(os.cpu_count() or 1, 64), thread_name_prefix="tilewise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.lru_cache(maxsize=1)
def _gomp_parallel() -> Any:
    """GOMP_parallel of the libgomp that torch itself runs on; None if there is none."""
    folder = Path(torch.__file__).parent / "lib"
    beside = Path(torch.__file__).parent.parent / "torch.libs"
    names = [*sorted(folder.glob("libgomp*.so*")), *sorted(beside.glob("libgomp*.so*"))]
    for name in [*map(str, names), "libgomp.so.1"]:
        try:
            # Only a library that is loaded already: a second OpenMP runtime would be a second pool.
            found = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        found.restype = None
        return found
    return None


def pool_name() -> str:
    """The path a parallel call takes: "openmp", "threads" or "serial"."""
    forced = os.environ.get("TILEWISE_CPU_POOL", "")
    if _forked or forced == "serial":
        return "serial"
    if forced == "threads" or _gomp_parallel() is None:
        return "threads"
    return "openmp"


def launcher() -> Any:
    """GOMP_parallel(function, parameters, threads, flags) where that is the path calls take; else None."""
    return _gomp_parallel() if pool_name() == "openmp" else None


def is_forked() -> bool:
    """Whether this process is a fork of one that may have used the pool."""
    return _forked


def num_threads() -> int:
    """Threads a call may use: torch's setting, one in a forked child."""
    return 1 if pool_name() == "serial" else torch.get_num_threads()


@functools.lru_cache(maxsize=256)
def worker(function: int) -> Any:
    """The C function at that address; called with the address of its parameters it runs on this thread."""
    return _WORKER(function)


def run_parallel(function: int, parameters: int, threads: int) -> None:
    """Call the C function at address `function` with `parameters` on that many threads, and wait."""
    if threads <= 1:
        worker(function)(parameters)
        return
    if pool_name() == "openmp":
        _gomp_parallel()(function, parameters, threads, 0)
        return
    work = worker(function)
    others = [_threads().submit(work, parameters) for _ in range(threads - 1)]
    work(parameters)
    for other in others:
        # Who has not begun finds no task left: it need not begin. So calls that share the pool never wait in a ring.
        if not other.cancel():
            other.result()
