"""Compiling a Gluon kernel for given types, no number specialised, and launching it through the driver."""

from __future__ import annotations

import functools
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends.hopper.reading import quick_reading
from tilewise.backends.hopper.spills import spilled
from tilewise.backends.triton import compiler_digest, stored
from tilewise.backends.triton.compile import POINTERS, Build, Launcher
from tilewise.backends.triton.kernel_keys import settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def descriptor_type(dtype: torch.dtype, block: Sequence[int]) -> str:
    """The type of a tensor descriptor whose tiles of shared memory have the swizzle that products want."""
    return f"tensordesc<{POINTERS[dtype][1:]}[{', '.join(map(str, block))}],{shared_layout(dtype, block)!r}>"


def shared_layout(dtype: torch.dtype, block: Sequence[int]) -> Any:
    """The layout of a descriptor's tiles in shared memory."""
    return _shared_layout(dtype, tuple(block))


@functools.lru_cache(maxsize=256)
def _shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    from triton.experimental.gluon import language as gl

    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(block), kinds[dtype])


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's collector, which would look through all that a process holds several times while a kernel is
    read, and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compile_gluon(kernel: Any, build: Build, target: Any = None) -> Any:
    """The compiled kernel, from Triton's cache if it is there; target: a GPUTarget, by default compute capability 9.0,
    the only one that these kernels are for: to ask Triton for the device has it compile its own driver in C.

    build: as for `tilewise.backends.triton.compile.compile_kernel`; `registers` is the limit at the kernel's start,
    from which the partitions take theirs.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    count = len(build.types)
    constants = dict(build.constants)
    signature = dict(zip(names, build.types, strict=False)) | dict.fromkeys(names[count:], "constexpr")
    values = {(n,): None for n, kind in enumerate(build.types) if kind == "constexpr"}
    values |= {(n,): constants[name] for n, name in enumerate(names) if n >= count}
    attributes = {(n,): [["tt.divisibility", 16]] for n in build.aligned}
    # Without this, sums of integers are formed once more in 64 bits, for assertions that no build of ours has.
    options = {
        "num_warps": build.warps, "maxnreg": build.registers or None, "enable_fp_fusion": False,
        "sanitize_overflow": False,
    }  # fmt: skip
    compiler_digest.recall()
    settle(kernel)
    source = GluonASTSource(kernel, signature, values, attributes)
    with uncollected(), quick_reading():
        return triton.compile(source, target=target or GPUTarget("cuda", 90, 32), options=options)


class GluonLauncher(Launcher):
    """A compiled Gluon kernel on one device.

    It is launched as kernels are that an earlier process kept, and by Triton's launcher where that cannot be: to make
    that one compiles a file in C. spilled: bytes a thread for which registers do not suffice.
    """

    def __init__(self, kernel: Any, build: Build, device: int) -> None:
        self.compiled = compile_gluon(kernel, build)
        self.spilled = spilled(self.compiled.asm["cubin"])
        self.device, self.types = device, build.types
        self.stored = stored.of(self.compiled, build, device)
        if self.stored is not None:
            self.function = self.stored.function
            return
        with torch.cuda.device(device):
            self.run = self.compiled.run
        self.function = self.compiled.function
        self.metadata = self.compiled.packed_metadata
        self.rest = (None,) * (len(kernel.arg_names) - len(build.types))

    def __call__(self, grid: int, values: Sequence[object], grid_y: int = 1) -> None:
        """Launch on the device's current stream; tensors may be given as addresses."""
        if self.stored is not None:
            self.stored(grid, values, grid_y)
        else:
            super().__call__(grid, values, grid_y)
