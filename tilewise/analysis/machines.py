"""Machines: what each of four roofs carries, every number with its source.

    matrix          FLOP/s of dense products, by element type (a multiply-add is two)
    exponentials    exponentials per second
    on_chip         bytes per second between the tile memory (shared memory, second-level cache) and the units
    memory          bytes per second from device memory
    tile_bytes      the fast memory of one worker (an SM, a CU, a core), in bytes: the M of the I/O model
    cache_bytes     a cache that all workers share

A number that no source states is None: its roof is then left out, and whoever prints it says so. "derived" numbers
are products of numbers in the same document; "measured" ones stand in benchmarks/results.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tilewise.errors import OptionError, message

__all__ = ["MACHINES", "Machine", "Number", "find_machine", "machine_here", "match_machine", "processor_name"]

CUDA_GUIDE = (
    "CUDA C++ Programming Guide, throughput of native arithmetic instructions (16 exp2 a clock and SM)"
)
BANKS = "CUDA C++ Programming Guide, shared memory (32 banks of 4 bytes a clock and SM)"
HOPPER = (
    "NVIDIA H100 Tensor Core GPU Architecture (white paper), H100 SXM5: 132 SMs, 1830 MHz boost; agrees with 989 "
    "TFLOP/s and 3.9 T exponentials/s in https://arxiv.org/abs/2407.08608"
)
MEASURED = "benchmarks/results/machines.jsonl"


@dataclass(frozen=True)
class Number:
    """A number with its source. kind: "vendor", "derived" from a vendor's numbers, or "measured"."""

    value: float
    source: str
    kind: str = "vendor"


@dataclass(frozen=True)
class Machine:
    """One machine. Rates per second, sizes in bytes; workers: SMs, CUs or cores; score_passes: how often a tile of
    float32 scores crosses `on_chip` (0 where it lives in registers, 4 where it lies in a cache: written, read and
    written by the exponentials, read by the second product)."""

    title: str
    device: str
    matches: str
    workers: int
    matrix: Mapping[str, Number]
    exponentials: Number | None
    on_chip: Number | None
    memory: Number
    tile_bytes: Number
    cache_bytes: Number | None
    score_passes: int = 0

    def rate(self, dtype: str) -> Number | None:
        """FLOP/s in an element type ("float32", "bfloat16", "float16", "float8"), None where it has no unit."""
        return self.matrix.get(dtype)

    def with_changes(self, **changes: object) -> Machine:
        """The machine that has other numbers: for what-if."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _derived(value: float, source: str) -> Number:
    return Number(value, source, "derived")


def _measured(value: float, line: str) -> Number:
    return Number(value, f"{MEASURED}, {line}", "measured")


def _cuda(workers: int, clock: float, what: str) -> tuple[Number, Number]:
    """Exponentials and shared-memory bandwidth of a CUDA device, from SMs and clock (Hz)."""
    return (
        _derived(16 * workers * clock, f"{CUDA_GUIDE}; {what}"),
        _derived(128 * workers * clock, f"{BANKS}; {what}"),
    )


def _halves(value: float, source: str) -> dict[str, Number]:
    return {"bfloat16": Number(value, source), "float16": Number(value, source)}


_A100 = "NVIDIA A100 80GB SXM data sheet"
_A100_CHIP = "NVIDIA A100 Tensor Core GPU Architecture (white paper): 108 SMs, 1410 MHz boost"
_H100 = "NVIDIA H100 SXM data sheet (half of the figure with sparsity)"
_H200 = "NVIDIA H200 SXM data sheet (half of the figure with sparsity)"
_B200 = (
    "Zadouri et al. 2026, https://arxiv.org/abs/2603.05451: 2.25 PFLOP/s, 16 exp and 128 bytes a clock and SM"
)
_B200_QUERY = (
    "device query of a B200, https://github.com/pytorch/ao/pull/4002: 148 SMs, L2 126.5 MB, 7.67 TB/s"
)
_B200_CLOCK = 2.25e15 / (8192 * 148)
_B200_DERIVED = f"{_B200}; {_B200_QUERY}; clock from 8192 FLOP a clock and SM"
_MI300X = "AMD Instinct MI300X data sheet"
_MI300X_LDS = "ROCm documentation, LDS of 32 banks of 4 bytes a clock and CU; 304 CUs, 2100 MHz"
_ROCM = "ROCm documentation, AMD GPU specifications (MI300X: LDS 64 KiB, L3 256 MiB)"
_WIDENED = "zen3: fma_gflops_2; AVX2 multiplies halves as float32"
_LAPTOP = "AMD Ryzen 7 7840U product page: 8 cores, 3.3 GHz base, LPDDR5x-7500 on 128 bits"
_PER_CLOCK = f"; operations a clock and core as measured on Zen 4, {MEASURED}"


def _per_clock(count: float) -> Number:
    """The laptop's rate: operations or bytes a clock and core, on 8 cores at 3.3 GHz."""
    return _derived(8 * 3.3e9 * count, _LAPTOP + _PER_CLOCK)


MACHINES: dict[str, Machine] = {
    "a100": Machine(
        "NVIDIA A100 SXM 80 GB", "cuda", r"A100", 108,
        {**_halves(312e12, _A100), "float32": Number(19.5e12, f"{_A100} (without TF32)")},
        *_cuda(108, 1.41e9, _A100_CHIP), Number(2.039e12, _A100), Number(164 * 1024, _A100_CHIP),
        Number(40e6, _A100_CHIP),
    ),
    "h100": Machine(
        "NVIDIA H100 SXM", "cuda", r"H100|GH200", 132,
        {**_halves(989.5e12, _H100), "float8": Number(1979e12, _H100), "float32": Number(66.9e12, HOPPER)},
        *_cuda(132, 1.83e9, HOPPER), Number(3.35e12, _H100), Number(228 * 1024, HOPPER), Number(50e6, HOPPER),
    ),
    "h200": Machine(
        "NVIDIA H200 SXM", "cuda", r"H200", 132,
        {**_halves(989.5e12, _H200), "float8": Number(1979e12, _H200), "float32": Number(66.9e12, HOPPER)},
        *_cuda(132, 1.83e9, HOPPER), Number(4.8e12, _H200), Number(228 * 1024, HOPPER),
        Number(60 * 2**20, "benchmarks/results/counters.jsonl: the device's own L2 size", "measured"),
    ),
    "b200": Machine(
        "NVIDIA B200", "cuda", r"B200", 148,
        _halves(2.25e15, _B200),
        _derived(16 * 148 * _B200_CLOCK, _B200_DERIVED), _derived(128 * 148 * _B200_CLOCK, _B200_DERIVED),
        Number(7.67e12, _B200_QUERY, "measured"), Number(228 * 1024, _B200_QUERY, "measured"),
        Number(126.5e6, _B200_QUERY, "measured"),
    ),
    "mi300x": Machine(
        "AMD Instinct MI300X", "cuda", r"MI300X", 304,
        {**_halves(1307.4e12, _MI300X), "float8": Number(2614.9e12, _MI300X), "float32": Number(163.4e12, _MI300X)},
        None, _derived(128 * 304 * 2.1e9, _MI300X_LDS), Number(5.3e12, _MI300X), Number(64 * 1024, _ROCM),
        Number(256 * 2**20, _ROCM),
    ),
    "zen3": Machine(
        "AMD EPYC (Zen 3, AVX2), 2 cores", "cpu", r"AMD EPYC.*AVX2", 2,
        {"float32": _measured(166.6e9, "zen3: fma_gflops_2"), "bfloat16": _measured(166.6e9, _WIDENED),
         "float16": _measured(166.6e9, _WIDENED)},
        _measured(5.53e9, "zen3: exp_gelem_2"), _measured(169.6e9, "zen3: cache_gbytes_2"),
        _measured(29.6e9, "zen3: read_gbytes of the run of benchmarks/cpu.py"),
        Number(512 * 1024, "lscpu of the same machine: L2 of a core", "measured"),
        Number(32 * 2**20, "lscpu of the same machine: L3", "measured"), 4,
    ),
    "xeon": Machine(
        "Intel Xeon (AVX-512), 2 threads", "cpu", r"Intel.*Xeon.*AVX512", 2,
        {"float32": Number(297.2e9, "benchmarks/results/cpu.jsonl: fma_gflops_2 at the start", "measured")},
        None, None, Number(22.4e9, "benchmarks/results/cpu.jsonl: read_gbytes at the start", "measured"),
        Number(2 * 2**20, "Intel Xeon of the fourth generation and later: 2 MB of L2 a core"), None, 4,
    ),
    "zen4": Machine(
        "AMD EPYC (Zen 4, AVX-512), 2 virtual cores", "cpu", r"AMD EPYC.*AVX512", 2,
        {"float32": _measured(234e9, "zen4"), "bfloat16": _measured(468e9, "zen4"),
         "float16": _measured(234e9, "zen4: as float32")},
        _measured(16.4e9, "zen4: exp pass of degree 5"), _measured(203e9, "zen4: second-level cache"),
        _measured(37e9, "zen4: lower end of 37 to 50"), Number(2**20, "Zen 4: L2 of a core, lscpu", "measured"),
        Number(32 * 2**20, "lscpu of the same machine: L3", "measured"), 4,
    ),
    "laptop": Machine(
        "laptop: AMD Ryzen 7 7840U (Zen 4), CPU", "cpu", r"Ryzen 7 (PRO )?7840", 8,
        {"float32": _per_clock(32), "float16": _per_clock(32), "bfloat16": _per_clock(64)},
        _per_clock(2.27), _per_clock(29.3),
        _derived(7500e6 * 16, _LAPTOP), Number(2**20, "AMD Ryzen 7 7840U product page: 8 MB of L2, 8 cores"),
        Number(16 * 2**20, "AMD Ryzen 7 7840U product page: L3"), 4,
    ),
}  # fmt: skip
"""By the names that `tilewise explain --machine` takes."""


def find_machine(name: str) -> Machine:
    """The machine of that name. Raises: OptionError for an unknown one."""
    if name not in MACHINES:
        raise OptionError(message(f"there is no machine {name!r}", {}, f"Known: {', '.join(MACHINES)}."))
    return MACHINES[name]


def match_machine(description: str) -> str | None:
    """The name of the machine that a device's own name, or "processor capability", speaks of; None if none does."""
    return next((name for name, one in MACHINES.items() if re.search(one.matches, description)), None)


def machine_here(device_type: str) -> str | None:
    """The name of the machine that this process runs on, by its device's own name; None if the table lacks it.

    A processor must have as many cores as the one that was measured: memory and cache do not scale with cores.
    """
    import torch

    if device_type == "cuda" and torch.cuda.is_available():
        return match_machine(torch.cuda.get_device_name())
    if device_type == "cpu":
        name = match_machine(f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}")
        if name is not None and MACHINES[name].workers == os.cpu_count():
            return name
    return None


def processor_name() -> str:
    """The processor's own name, as the system gives it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    if platform.system() == "Darwin":
        import subprocess

        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                command, capture_output=True, text=True, timeout=5, check=True
            ).stdout.strip()
    return platform.processor() or platform.machine()
