"""What the processor can do, and the tile shapes that follow from it. One emitter serves every row.

The name and the features come from the machine, or from NUMBA_CPU_NAME and NUMBA_CPU_FEATURES (Numba's own
variables), by which narrower targets are run for tests. TILEWISE_CPU_BF16 chooses among the ways to multiply
bf16 that the target has: "amx", "dot", "wide" (as float32), and "plain", which needs no instruction of its own.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from typing import NamedTuple

STRIP = 16
"""Rows of q in one strip: 64 bytes of float32, whatever the vector width. Row blocks are whole strips."""
BLOCK_ROWS = 64
"""Rows of q in one block: the lane stride of every score tile."""

LINE = 64
"""Bytes of a line of the cache: copies of rows end with one that is not used, since rows whose sizes are powers of
two would all fall into a few of the cache's sets."""


class Isa(NamedTuple):
    """A target. lanes: float32 per vector. tall: rows of the widest microkernel, over `wide` lanes at once.

    pairs: how bf16 is multiplied as pairs: "amx" (tiles), "dot" (avx512_bf16), "plain" (arithmetic on the halves,
    slow, for tests), "" (not at all: widened to float32). half: float16 conversion in hardware.
    """

    cpu: str
    features: str
    arch: str
    lanes: int
    tall: int
    wide: int
    pairs: str
    half: bool


def _host(forced: str | None, text: str | None) -> tuple[str, dict[str, bool]]:
    import llvmlite.binding as llvm

    name = forced or llvm.get_host_cpu_name()
    if text is not None:
        return name, {f.lstrip("+-"): f.startswith("+") for f in filter(None, text.split(","))}
    if name != llvm.get_host_cpu_name():
        return name, _KNOWN.get(name, {})
    return name, dict(llvm.get_host_cpu_features())


_V3 = dict.fromkeys(("sse4.1", "sse4.2", "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "popcnt"), True)
_V4 = _V3 | dict.fromkeys(("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"), True)
_KNOWN = {
    "haswell": _V3, "x86-64-v3": _V3, "znver3": _V3,
    "skylake-avx512": _V4, "x86-64-v4": _V4,
    "sapphirerapids": _V4 | dict.fromkeys(("avx512bf16", "amx-tile", "amx-bf16"), True),
    "znver4": _V4 | {"avx512bf16": True}, "znver5": _V4 | {"avx512bf16": True},
    "cortex-a76": {"neon": True, "fullfp16": True},
}  # fmt: skip


def _permitted() -> bool:
    """Ask Linux for the tile registers of AMX, for this process and its children (arch_prctl, 0x1023: request the
    permission of an extended state; 18: the tiles' data)."""
    import ctypes

    if not sys.platform.startswith("linux"):
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18) == 0
    except (OSError, AttributeError):
        return False


def _pairs(name: str, have: set[str], wanted: str, running: bool) -> str:
    """The way to multiply bf16; `running`: on this machine, and not compiled for another.

    Dot products are for Zen: Emerald Rapids issues half as many a clock as multiply-adds of float32, which makes their
    rate half of those; the kernels reach 0.9 of it, 0.6x the speed of the widened ones (measured)."""
    amx = {"amx-tile", "amx-bf16"} <= have and wanted in ("", "amx") and (not running or _permitted())
    if amx or wanted in ("wide", "plain"):
        return "amx" if amx else {"wide": "", "plain": "plain"}[wanted]
    return "dot" if "avx512bf16" in have and (wanted == "dot" or name.startswith("znver")) else ""


def _isa(name: str, features: tuple[tuple[str, bool], ...], machine: str, wanted: str, running: bool) -> Isa:
    have = {f for f, on in features if on}
    text = ",".join(f"{'+' if on else '-'}{f}" for f, on in features)
    plain = "plain" if wanted == "plain" else ""
    if machine in ("aarch64", "arm64"):
        # 32 registers of 4 lanes: 6 x 16 takes 24 accumulators without a spill.
        return Isa(name, text, "aarch64", 4, 6, 16, plain, True)
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= have:
        return Isa(name, text, "x86", 16, 6, 64, _pairs(name, have, wanted, running), True)
    if {"avx2", "fma"} <= have:
        return Isa(name, text, "x86", 8, 6, 16, plain, "f16c" in have)
    return Isa(name, text, "x86" if machine in ("x86_64", "AMD64") else machine, 4, 2, 16, "", False)


@functools.lru_cache(maxsize=8)
def _detect(forced: str | None, text: str | None, wanted: str) -> Isa:
    import llvmlite.binding as llvm

    name, features = _host(forced, text)
    running = name == llvm.get_host_cpu_name()
    return _isa(name, tuple(sorted(features.items())), platform.machine(), wanted, running)


def detect() -> Isa:
    """The target of this process. Reads the environment each time, so that a test can force another."""
    environment = os.environ
    return _detect(
        environment.get("NUMBA_CPU_NAME"),
        environment.get("NUMBA_CPU_FEATURES"),
        environment.get("TILEWISE_CPU_BF16", ""),
    )


def uses_pairs(isa: Isa, dtype: str) -> bool:
    """Whether this storage type is multiplied as pairs on this target."""
    return bool(isa.pairs) and dtype == "bf16"
