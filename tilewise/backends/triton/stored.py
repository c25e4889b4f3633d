"""Launching a kernel that `shelf` has kept, or that was compiled just now: through the CUDA driver, without Triton.

Triton's own launcher is a file in C for each kind of arguments, whose compilation takes half a second of a first call.

Each argument is given by its address: where the kernel wants them is the driver's business, since tensor maps are
aligned in a way of their own. Their number and sizes are held against the kernel's parameter list when it is loaded. A
tensor descriptor is a tensor map of 128 bytes, its shape (int32) and its strides (int64).

Source: CUDA driver API, cuLaunchKernelEx and cuTensorMapEncodeTiled; Triton 3.6, backends/nvidia/driver.c, for the
numbers with which tensor maps are encoded.
"""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends.triton import shelf
from tilewise.backends.triton.compile import Build, Launcher
from tilewise.backends.triton.direct import _config, parameter_sizes
from tilewise.backends.triton.direct import library as _driver

if TYPE_CHECKING:
    from collections.abc import Sequence

_CODES = {"i32": "i", "u32": "I", "i64": "q", "fp32": "f"}
_MAP = 128
_SHARED_LIMIT, _OPTIN, _PREFER_SHARED, _STATIC = 8, 97, 1, 1
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
CU_FUNC_CACHE_PREFER_SHARED, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"""
_ORDINARY_SHARED = 49152
_MOST_MAPS = 256
_PROMOTION = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B"""


def _check(error: int, what: str) -> None:
    if error:
        raise RuntimeError(f"{what}: CUDA error {error}")


def load(name: str, build: Build, device: int) -> Stored | None:
    """A launcher of the kernel kept under a name; None where there is none, or the driver does not take it."""
    return _stored(shelf.find(name), build, device)


def of(compiled: Any, build: Build, device: int) -> Stored | None:
    """A launcher of what Triton compiled; None where only Triton's own can launch it."""
    return _stored(shelf.kept_of(compiled), build, device)


def _stored(kept: shelf.Kept | None, build: Build, device: int) -> Stored | None:
    if kept is None or _driver() is None:
        return None
    try:
        return Stored(kept, build, device)
    except (RuntimeError, ValueError, AttributeError):
        return None


class Stored(Launcher):
    """A kept kernel on one device."""

    def __init__(self, kept: shelf.Kept, build: Build, device: int) -> None:
        """Raises ValueError if its arguments are laid out in another way, RuntimeError if it cannot be loaded."""
        self.kinds = tuple(kind for kind in build.types if kind != "constexpr")
        self.present = tuple(n for n, kind in enumerate(build.types) if kind != "constexpr")
        self.layout, self.places = _layout(self.kinds, kept)
        self.free: list[tuple[Any, Any, Any]] = []
        self.known: dict[tuple[object, ...], bytes] = {}
        self.maps, self.device = kept.maps, device
        with torch.cuda.device(device):
            self.function = _function(kept, device)
        self.handle = ctypes.c_void_p(self.function)
        self.shape = (32 * kept.warps, kept.shared, kept.early)
        about = SimpleNamespace(num_warps=kept.warps, shared=kept.shared, launch_pdl=kept.early)
        self.compiled = SimpleNamespace(asm={"ptx": kept.entry}, metadata=about, function=self.function)
        self.launch = _driver().cuLaunchKernelEx

    def __call__(self, grid: int, values: Sequence[object], grid_y: int = 1) -> None:
        """Launch on the device's current stream; tensors may be given as addresses.  Raises RuntimeError."""
        if grid <= 0 or grid_y <= 0:
            return
        flat: list[Any] = []
        maps = iter(self.maps)
        for n, kind in zip(self.present, self.kinds, strict=True):
            value: Any = values[n]
            if kind[0] == "*":
                flat.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
            elif kind[0] == "t":
                flat += (self._map(value, next(maps)), *value.shape, *value.strides)
            else:
                flat.append(value)
        block, places, config = self._block()
        self.layout.pack_into(block, 0, *flat)
        config.grid, config.grid_y = grid, grid_y
        config.stream = torch._C._cuda_getCurrentRawStream(self.device)
        if torch._C._cuda_getDevice() == self.device:
            error = self.launch(ctypes.byref(config), self.handle, places, None)
        else:
            with torch.cuda.device(self.device):
                error = self.launch(ctypes.byref(config), self.handle, places, None)
        self.free.append((block, places, config))
        _check(error, "the driver refused a launch")

    def _map(self, descriptor: Any, facts: tuple[int, int, int, tuple[int, ...]]) -> bytes:
        """The tensor map of a descriptor, which depends on numbers alone."""
        key = (
            descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides, descriptor.padding, facts,
        )  # fmt: skip
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= _MOST_MAPS:
                self.known.clear()
            found = self.known[key] = encoded(descriptor, facts)
        return found

    def _block(self) -> tuple[Any, Any, Any]:
        """Room for the arguments, the addresses in it, and a launch; the driver has read them when a launch returns."""
        try:
            return self.free.pop()
        except IndexError:
            block = ctypes.create_string_buffer(self.layout.size)
            start = ctypes.addressof(block)
            places = (ctypes.c_void_p * len(self.places))(*[start + at for at in self.places])
            return block, places, _config(*self.shape)


def _layout(kinds: Sequence[str], kept: shelf.Kept) -> tuple[struct.Struct, list[int]]:
    """The arguments and the kernel's trailing pointers, and where each begins.  Raises ValueError unless they are the
    kernel's parameters."""
    codes: list[str] = []
    maps = iter(kept.maps)
    for kind in kinds:
        if kind[0] == "*":
            codes.append("Q")
        elif kind.startswith("tensordesc"):
            rank = len(next(maps)[3])
            codes += [f"{_MAP}s", *"i" * rank, *"q" * rank]
        elif kind in _CODES:
            codes.append(_CODES[kind])
        else:
            raise ValueError(f"an argument of type {kind}")
    sizes = [struct.calcsize("<" + code) for code in codes]
    wanted = parameter_sizes(kept.entry)
    rest = wanted[len(sizes) :]
    if wanted[: len(sizes)] != sizes or any(size != 8 for size in rest):
        raise ValueError("the kernel's parameters are not the arguments")
    text, offset, places = "<", 0, []
    for code, size in [*zip(codes, sizes, strict=True), *[("8x", 8)] * len(rest)]:
        gap = -offset % min(size, 8)
        text += "x" * gap + code
        places.append(offset + gap)
        offset += gap + size
    return struct.Struct(text), places


def _function(kept: shelf.Kept, device: int) -> int:
    """The kernel in the device's context.  Raises RuntimeError."""
    cuda = _driver()
    context = ctypes.c_void_p()
    _check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "no context")
    if not context.value:  # a thread that has not computed yet
        _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "no context")
        _check(cuda.cuCtxSetCurrent(context), "no context")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), kept.binary), "a kept kernel could not be loaded")
    _check(
        cuda.cuModuleGetFunction(ctypes.byref(function), module, kept.name.encode()),
        "a kept kernel has no entry",
    )
    if kept.shared > _ORDINARY_SHARED:
        most, static = ctypes.c_int(), ctypes.c_int()
        _check(cuda.cuDeviceGetAttribute(ctypes.byref(most), _OPTIN, device), "shared memory")
        _check(cuda.cuFuncSetCacheConfig(function, _PREFER_SHARED), "shared memory")
        _check(cuda.cuFuncGetAttribute(ctypes.byref(static), _STATIC, function), "shared memory")
        _check(cuda.cuFuncSetAttribute(function, _SHARED_LIMIT, most.value - static.value), "shared memory")
    return int(function.value or 0)


def encoded(descriptor: Any, facts: tuple[int, int, int, tuple[int, ...]]) -> bytes:
    """The tensor map of a descriptor: 128 bytes.  Raises RuntimeError."""
    swizzle, size, kind, block = facts
    rank = len(block)
    room = ctypes.create_string_buffer(_MAP + 64)
    at = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    shape = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
    steps = (ctypes.c_uint64 * rank)(*(size * x for x in reversed(descriptor.strides[:-1])))
    box, ones = (ctypes.c_uint32 * rank)(*reversed(block)), (ctypes.c_uint32 * rank)(*[1] * rank)
    fill = 1 if descriptor.padding == "nan" else 0
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), kind, rank, ctypes.c_void_p(descriptor.base.data_ptr()), shape, steps, box, ones, 0,
        swizzle, _PROMOTION, fill,
    )  # fmt: skip
    _check(error, "a tensor map was refused")
    return ctypes.string_at(at, _MAP)
