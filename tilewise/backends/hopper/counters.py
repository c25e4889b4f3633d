"""The counters from which the programs of a launch draw their tiles, and memory for what nobody reads.

A launch finds its counter at 0 and leaves it at 0. Launches of one stream follow one another and share a counter. A
captured launch may be replayed beside any other, so each takes one of its own for good.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

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
UNREAD = 1 << 14
"""Entries of the memory, one a stream, into which short calls write an lse that nobody asked for."""


class Places(NamedTuple):
    """Addresses that the launches of one stream share: its counter's, and that of UNREAD float32. kept: what they lead
    to."""

    counter: int
    unread: int
    kept: tuple[Tensor, Tensor]


_places: dict[tuple[int, int], Places] = {}


def places(device: int, stream: int) -> Places:
    """The places of a stream that captures nothing."""
    found = _places.get((device, stream))
    if found is None:
        unread = kept(lambda: torch.empty(UNREAD, dtype=torch.float32, device=torch.device("cuda", device)))
        mine = counter(device, stream)
        found = _places.setdefault(
            (device, stream), Places(mine.data_ptr(), unread.data_ptr(), (mine, unread))
        )
    return found


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
