"""The counters from which the programs of a launch draw their tiles.

A launch finds its counter at 0 and leaves it at 0. Launches of one stream follow one another and share a counter. A
captured launch may be replayed beside any other, so each takes one of its own for good.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from tilewise.backends.triton.counters import kept

# torch.cuda.is_current_stream_capturing without its own questions: launches ask it.
is_capturing = torch._C._cuda_isCurrentStreamCapturing
_lock = threading.Lock()
ROOM = 4096
"""Counters of a device, 32 bytes apart."""
_STEP = 8
_pools: dict[int, Tensor] = {}
_taken: dict[int, int] = {}
_by_stream: dict[tuple[int, int], Tensor] = {}


def counter(device: int, stream: int) -> Tensor:
    """A counter for a launch on a stream: int32, 0 when the launch begins."""
    if is_capturing():
        return _another(device)
    found = _by_stream.get((device, stream))
    if found is None:
        with _lock:
            found = _by_stream.get((device, stream))
        if found is None:
            found = _another(device)
            _by_stream[device, stream] = found
    return found


def _another(device: int) -> Tensor:
    """A counter nobody else has; one that the graph clears where there is no room left or nothing could be prepared."""
    with _lock:
        pool = _pools.get(device)
        if pool is None and not is_capturing():
            place = torch.device("cuda", device)
            pool = kept(lambda: torch.zeros(ROOM * _STEP, dtype=torch.int32, device=place))
            _pools[device] = pool
        taken = _taken.get(device, 0)
        if pool is None or taken >= ROOM:
            return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
        _taken[device] = taken + 1
        return pool[taken * _STEP : taken * _STEP + 1]
