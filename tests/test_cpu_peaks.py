"""What a machine can do, measured by the CPU backend's own emitter."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="the CPU backend needs Numba")

PEAK = """
import llvmlite.binding as llvm
from tilewise.backends.cpu import machine_code
from tilewise.backends.cpu.isa import detect
from tilewise.backends.cpu.peaks import CHAINS, _products
isa = detect()
text = machine_code._target(isa).emit_assembly(llvm.parse_assembly(_products(isa, True)))
count = text.count("vdpbf16ps")
print(count >= CHAINS and count % CHAINS == 0, "rsp" in text)
"""


def test_peak_of_dot_products() -> None:
    """The loop that measures their rate holds nothing else than them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("an x86 target on another machine")
    target = {
        "NUMBA_CPU_NAME": "znver4",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16",
    }
    found = subprocess.run(
        [sys.executable, "-c", PEAK], env={**os.environ, **target}, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert found.stdout.split() == ["True", "False"], found.stderr[-2000:]
