"""Zeroed counters for kernels whose last program finishes the work; each kernel leaves them zero again.

Launches of one stream follow each other and share a buffer. A captured launch keeps counters of its own, because
its graph may be replayed beside anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

SLAB = 1 << 20
"""Counters set aside for captured launches of a device, 4 MB; beyond them a graph clears its own."""
FEWEST = 4096

_lock = threading.Lock()
_streams: dict[tuple[int, int], Tensor] = {}
_slabs: dict[int, tuple[Tensor, int]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros for one launch on the current stream."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index or 0
    if torch.cuda.is_current_stream_capturing():
        return _captured(index, count)
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    found = _streams.get(key)
    if found is None or found.numel() < count:
        with _lock:
            if index not in _slabs:
                _slabs[index] = (kept(lambda: torch.zeros(SLAB, dtype=torch.int32, device=device)), 0)
            found = kept(lambda: torch.zeros(max(count, FEWEST), dtype=torch.int32, device=device))
            _streams[key] = found
    return found


def kept(make: Callable[[], Tensor]) -> Tensor:
    """A CUDA tensor that outlives the call, made and written on a thread of its own.

    While torch.compile warms up a CUDA graph, all that the calling thread allocates belongs to the graph's memory pool,
    and a tensor that stays there is an error. Source: torch 2.11, `torch._inductor.cudagraph_trees.check_memory_pool`.
    """

    def run() -> Tensor:
        tensor = make()
        torch.cuda.current_stream(tensor.device).synchronize()
        return tensor

    with ThreadPoolExecutor(max_workers=1) as apart:
        return apart.submit(run).result()


def _captured(index: int, count: int) -> Tensor:
    """Counters that one captured launch keeps for ever; cleared in the graph if none were set aside before."""
    with _lock:
        slab, used = _slabs.get(index, (None, 0))
        if slab is None or used + count > SLAB:
            return torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")
        _slabs[index] = (slab, used + count)
        return slab[used : used + count]
