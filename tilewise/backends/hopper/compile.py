"""Compiling a Gluon kernel for given types, no number specialised; the launcher is the Triton backend's."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends.hopper.reading import quick_reading
from tilewise.backends.triton import compiler_digest
from tilewise.backends.triton.compile import POINTERS, Build, Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def descriptor_type(dtype: torch.dtype, block: Sequence[int]) -> str:
    """The type of a tensor descriptor whose tiles of shared memory have the swizzle that products want."""
    return f"tensordesc<{POINTERS[dtype][1:]}[{', '.join(map(str, block))}],{shared_layout(dtype, block)!r}>"


def shared_layout(dtype: torch.dtype, block: Sequence[int]) -> Any:
    """The layout of a descriptor's tiles in shared memory."""
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
    """The compiled kernel, from Triton's cache if it is there; target: a GPUTarget, by default the current device.

    build: as for `tilewise.backends.triton.compile.compile_kernel`; `registers` is the limit at the kernel's start,
    from which the partitions take theirs.
    """
    import triton
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
    source = GluonASTSource(kernel, signature, values, attributes)
    with uncollected(), quick_reading():
        return triton.compile(source, target=target, options=options)


class GluonLauncher(Launcher):
    """A compiled Gluon kernel on one device."""

    def __init__(self, kernel: Any, build: Build, device: int) -> None:
        with torch.cuda.device(device):
            self.compiled = compile_gluon(kernel, build)
            self.run = self.compiled.run
        self.function = self.compiled.function
        self.metadata = self.compiled.packed_metadata
        self.device, self.types = device, build.types
        self.rest = (None,) * (len(kernel.arg_names) - len(build.types))
