"""How much memory a call takes, counted in two ways.

`count_peak` counts every block that PyTorch's allocator hands out and takes back during one call, also those
that C++ kernels and opaque ops ask for. It depends on the call alone, so it repeats exactly, but it needs the
profiler and is therefore used around a single attention call. `ProcessPeak` watches what the whole process
(or the GPU) holds while a long piece of work runs; that is what the machine must have, and it varies a little
from run to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class CallMemory:
    """Bytes allocated by one call.

    peak : the most that was held at one moment, the result included
    result : what is still held when the call has returned
    """

    peak: int
    result: int

    @property
    def extra(self) -> int:
        """Peak bytes beyond the inputs and the result."""
        return self.peak - self.result


def running_peak(events: Iterable[tuple[int, int]]) -> CallMemory:
    """Add up allocations and releases in the order given.

    events : pairs (address, bytes); bytes below zero release the block at that address. A release of a block
        that was
        there before the first event is not this call's and is left out.
    """
    live: dict[int, int] = {}
    now = peak = 0
    for address, size in events:
        if size > 0:
            live[address] = size
            now += size
            peak = max(peak, now)
        else:
            now -= live.pop(address, 0)
    return CallMemory(peak=peak, result=now)


def count_peak(call: Callable[[], Any], device: torch.device | str = "cpu") -> CallMemory:
    """Count what `call()` allocates through PyTorch on `device`.

    On the CPU the profiler's memory events are added up, on CUDA and ROCm the caching allocator's own peak is
    read. The call runs once before it is counted, so that one-time work (code generation, library workspaces)
    is left out. Memory taken without PyTorch (a NumPy buffer, for instance) is not seen.
    """
    device = torch.device(device)
    call()
    if device.type == "cuda":
        return _count_cuda(call, device)
    # The profiler's own start and stop messages would land in the middle of a table.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        result = call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    del result
    return running_peak(_memory_events(trace))


def _memory_events(trace: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The allocator's events of a chrome trace, in time order, as (address, bytes)."""
    found = [
        event
        for event in trace
        if event.get("name") == "[memory]" and event["args"].get("Device Type", 0) == 0
    ]
    found.sort(key=lambda event: (event["ts"], event["args"].get("Ev Idx", 0)))
    return [(int(event["args"]["Addr"]), int(event["args"]["Bytes"])) for event in found]


def _count_cuda(call: Callable[[], Any], device: torch.device) -> CallMemory:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    memory = CallMemory(
        peak=torch.cuda.max_memory_allocated(device) - before,
        result=torch.cuda.memory_allocated(device) - before,
    )
    del result
    return memory


def return_free_memory() -> None:
    """Hand memory that the C library keeps for reuse back to the system, where it can (glibc).

    Without it the growth of the resident memory would depend on what ran before.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class ProcessPeak:
    """Peak memory during a `with` block, beyond what was held when it began.

    On CUDA and ROCm: the caching allocator's peak. Elsewhere: the resident memory of the process, read every
    few milliseconds by a thread (psutil); short peaks can be missed, and memory that the C library keeps for
    reuse hides some. `bytes` is set when the block ends.
    """

    def __init__(self, device: torch.device | str = "cpu", interval: float = 0.004) -> None:
        self.device = torch.device(device)
        self.interval = interval
        self.bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProcessPeak:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        import psutil

        return_free_memory()
        self._process = psutil.Process()
        self._before = self._peak = self._process.memory_info().rss
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def __exit__(self, *exc: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.bytes = max(self._peak, self._process.memory_info().rss) - self._before
