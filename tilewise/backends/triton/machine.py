"""The device's facts that tile choices depend on."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Machine(NamedTuple):
    """kind: "cuda" or "hip". arch: compute capability as a number, 90 for 9.0 (for hip 0). shared: bytes of shared
    memory one program may have. sms: multiprocessors. name: as the driver gives it. cache: bytes of the cache that all
    multiprocessors share, 0 where the driver does not say."""

    kind: str
    arch: int
    shared: int
    sms: int
    name: str = ""
    cache: int = 0


INTERPRETED = Machine("cuda", 90, 232448, 4, "interpreter")


@functools.lru_cache(maxsize=32)
def machine_of(device: int) -> Machine:
    """The machine behind a device's number; the interpreter's where kernels are interpreted."""
    from tilewise.backends.triton.compile import interpreting

    if interpreting():
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", 0) or getattr(
        found, "shared_memory_per_block", 65536
    )
    if torch.version.hip:
        return Machine("hip", 0, 65536, found.multi_processor_count, found.name)
    arch, cache = found.major * 10 + found.minor, getattr(found, "L2_cache_size", 0)
    return Machine("cuda", arch, shared, found.multi_processor_count, found.name, cache)
