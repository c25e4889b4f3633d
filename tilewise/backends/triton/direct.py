"""Launching a compiled kernel through the driver, with its arguments laid out once.

Triton's own launcher reads some seventy Python objects a call. Here the argument block is kept as bytes, and a call
writes the addresses that changed: about a third of the host time. CUDA only; the layout is checked against the
kernel's own parameter list, and where it differs the caller goes on with Triton's launcher.

Source: CUDA driver API, cuLaunchKernelEx, CU_LAUNCH_PARAM_BUFFER_POINTER.
"""

from __future__ import annotations

import ctypes
import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0
_EARLY = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"""
C_TYPES = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
ENTRY = re.compile(r"\.entry\s+\w+\s*\(.*?\)", re.DOTALL)
"""A kernel's name and parameters in PTX."""
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)[^\[,\n]*(?:\[(\d+)\])?")


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint), ("threads", ctypes.c_uint),
        ("threads_y", ctypes.c_uint), ("threads_z", ctypes.c_uint), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, padded to 8 bytes, and 64 bytes of its value."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


_EARLY_ONE = _Attribute(_EARLY, 0, (ctypes.c_uint * 16)(1))


class _Block(NamedTuple):
    """One argument block: its words, the list that the driver reads of them, and of each launch that reads them the
    configuration. What ends in `_at` is an address as ctypes passes it; `kept` keeps alive what addresses lead to."""

    words: Any
    extra_at: Any
    configs: tuple[_Config, ...]
    configs_at: tuple[Any, ...]
    kept: Any


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The CUDA driver, or None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _driver() -> Any:
    """cuLaunchKernelEx, or None where there is no such function. Arguments are objects of ctypes, which it takes
    quickest."""
    return getattr(library(), "cuLaunchKernelEx", None)


@functools.lru_cache(maxsize=1)
def _memset() -> Any:
    found = library().cuMemsetD32Async
    found.argtypes = (ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)
    return found


def set_words(address: int, pattern: int, count: int, stream: int) -> None:
    """Fill count words of 32 bits of the current device's memory, in the order of a stream.  Raises RuntimeError."""
    error = _memset()(address, pattern, count, stream)
    if error:
        raise RuntimeError(f"the driver refused to fill memory, CUDA error {error}")


class Direct:
    """Launches one kernel with one set of numbers; addresses are given anew each time.

    after: the launch whose argument block this one reads, too.
    """

    def __init__(
        self, launcher: Any, types: Sequence[str], values: Sequence[object], after: Direct | None = None
    ) -> None:
        """Raises ValueError if the kernel cannot be launched this way."""
        fields, offset, ends = [], 0, []
        self.slots: dict[int, int] = {}
        for n, (kind, value) in enumerate(zip(types, values, strict=True)):
            if kind == "constexpr":
                continue
            c_type = ctypes.c_uint64 if kind[0] == "*" else C_TYPES.get(kind)
            if c_type is None:
                raise ValueError(f"an argument of type {kind}")
            size = ctypes.sizeof(c_type)
            offset = -(-offset // size) * size
            fields.append((offset, c_type, 0 if kind[0] == "*" else value))
            if kind[0] == "*":
                self.slots[n] = offset // 8
            offset += size
            ends.append(size)
        wanted = parameters(launcher.compiled)
        rest = wanted[len(ends) :]
        if wanted[: len(ends)] != ends or any(size != 8 for size in rest):
            raise ValueError("the kernel's parameters are not the arguments")
        scratch = [
            getattr(launcher.compiled.metadata, name, 0)
            for name in ("global_scratch_size", "profile_scratch_size")
        ]
        if _driver() is None or any(scratch):
            raise ValueError("no driver, or a kernel that wants scratch")
        self.size = -(-offset // 8) * 8 + 8 * len(rest)
        template = ctypes.create_string_buffer(self.size)
        for at, c_type, value in fields:
            c_type.from_buffer(template, at).value = value
        self.template = template.raw
        self.free: list[_Block] = []
        compiled = launcher.compiled
        self.device, self.function = launcher.device, ctypes.c_void_p(launcher.function)
        metadata = compiled.metadata
        early = bool(getattr(metadata, "launch_pdl", False))
        self.shape = (32 * metadata.num_warps, metadata.shared, early)
        self.launch = _driver()
        first = self if after is None else after
        self.launches = [] if after is None else after.launches
        self.place = len(first.launches)
        first.launches.append(self)

    def block(self) -> _Block:
        """An argument block of this kernel's numbers; a call takes one and appends it to `free` when done."""
        try:
            return self.free.pop()
        except IndexError:
            words = (ctypes.c_uint64 * (self.size // 8)).from_buffer_copy(self.template)
            size = ctypes.c_size_t(self.size)
            extra = (ctypes.c_void_p * 5)(
                _BUFFER_POINTER, ctypes.addressof(words), _BUFFER_SIZE, ctypes.addressof(size), _END
            )
            configs = tuple(_config(*launch.shape) for launch in self.launches)
            return _Block(words, _address(extra), configs, tuple(map(_address, configs)), (extra, size))

    def __call__(self, grid: int, block: _Block, grid_y: int = 1) -> None:
        """Launch on the device's current stream.  Raises RuntimeError."""
        at = self.place
        config = block.configs[at]
        config.grid, config.grid_y = grid, grid_y
        config.stream = torch._C._cuda_getCurrentRawStream(self.device)
        error = self.launch(block.configs_at[at], self.function, None, block.extra_at)
        if error:
            raise RuntimeError(f"the driver refused a launch, CUDA error {error}")


def _address(of: Any) -> Any:
    return ctypes.c_void_p(ctypes.addressof(of))


def _config(threads: int, shared: int, early: bool) -> _Config:
    """early: the launch may begin while the one before it ends."""
    attributes = ctypes.addressof(_EARLY_ONE) if early else None
    return _Config(1, 1, 1, threads, 1, 1, shared, None, attributes, int(early))


def parameters(compiled: Any) -> list[int]:
    """Sizes in bytes of a kernel's parameters, from its PTX."""
    try:
        return parameter_sizes(compiled.asm["ptx"])
    except KeyError:  # a cache that keeps binaries alone
        raise ValueError("no PTX") from None


def parameter_sizes(ptx: str) -> list[int]:
    """Sizes in bytes of a kernel's parameters.  Raises ValueError."""
    found = ENTRY.search(ptx)
    if found is None:
        raise ValueError("no entry in the kernel's PTX")
    return [int(bits) // 8 * int(count or 1) for bits, count in _PARAMETER.findall(found[0])]
