"""Compiling a kernel for given types and launching it, beside Triton's own JIT launch.

What decides on a binary is said in full by the caller: types of the arguments, which pointers are 16-byte aligned,
constants, warps and stages. No integer is ever specialised, so a new length or stride compiles nothing. The same
call compiles for a target without a device.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.triton import compiler_digest
from tilewise.backends.triton.kernel_keys import settle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32",
    torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


class Build(NamedTuple):
    """Everything a binary depends on beside the kernel's source.

    types: one per argument, in order: "*bf16", "i32", "constexpr" for an absent tensor, a descriptor's type.
    aligned: numbers of the pointer arguments that are multiples of 16 bytes. constants: values by name. early: the
    launch begins while the one before it ends; the kernel waits for that one itself (programmatic dependent launch).
    """

    types: tuple[str, ...]
    aligned: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    registers: int = 0
    early: bool = False


def types_of(names: Sequence[str], values: Sequence[object], kinds: Mapping[str, str]) -> tuple[str, ...]:
    """The types of a kernel's arguments; kinds: those of the numbers."""
    found = []
    for name, value in zip(names, values, strict=True):
        if value is None:
            found.append("constexpr")
        elif isinstance(value, torch.Tensor):
            found.append(POINTERS[value.dtype])
        elif hasattr(value, "block_shape"):
            block = ",".join(map(str, value.block_shape))
            found.append(f"tensordesc<{POINTERS[value.base.dtype][1:]}[{block}]>")
        else:
            found.append(kinds.get(name, "i32"))
    return tuple(found)


def compile_kernel(kernel: Any, build: Build, target: Any = None) -> Any:
    """The compiled kernel, from Triton's cache if it is there; target: a GPUTarget, by default the current device."""
    import triton
    from triton.compiler import ASTSource

    names = kernel.arg_names
    count = len(build.types)
    constants = dict(build.constants)
    signature = dict(zip(names, build.types, strict=False)) | dict.fromkeys(names[count:], "constexpr")
    values = {(n,): None for n, kind in enumerate(build.types) if kind == "constexpr"}
    values |= {(n,): constants[name] for n, name in enumerate(names) if n >= count}
    attributes = {(n,): [["tt.divisibility", 16]] for n in build.aligned}
    options = {"num_warps": build.warps, "num_stages": build.stages, "enable_fp_fusion": False}
    if build.registers:
        options["maxnreg"] = build.registers
    if build.early:
        options["launch_pdl"] = True
    compiler_digest.recall()
    settle(kernel)
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=target, options=options)


class Launcher:
    """A compiled kernel on one device."""

    def __init__(self, kernel: Any, build: Build, device: int) -> None:
        with torch.cuda.device(device):
            self.compiled = compile_kernel(kernel, build)
            self.run = self.compiled.run
        self.function = self.compiled.function
        self.metadata = self.compiled.packed_metadata
        self.device, self.types = device, build.types
        # The launcher takes one value for each constant and ignores it.
        self.rest = (None,) * (len(kernel.arg_names) - len(build.types))

    def __call__(self, grid: int, values: Sequence[object], grid_y: int = 1) -> None:
        """Launch on the device's current stream; tensors may be given as addresses."""
        if grid <= 0 or grid_y <= 0:
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if torch._C._cuda_getDevice() == self.device:
            self.run(
                grid, grid_y, 1, stream, self.function, self.metadata, None, None, None, *values, *self.rest
            )
            return
        with torch.cuda.device(self.device):
            self.run(
                grid, grid_y, 1, stream, self.function, self.metadata, None, None, None, *values, *self.rest
            )


class Interpreted:
    """The same kernel run by Triton's interpreter, on tensors of the processor."""

    def __init__(self, kernel: Any, build: Build) -> None:
        self.kernel, self.constants = kernel, dict(build.constants)

    def __call__(self, grid: int, values: Sequence[object], grid_y: int = 1) -> None:
        if grid > 0 and grid_y > 0:
            self.kernel[(grid, grid_y)](*values, **self.constants)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1); Triton is not imported for the answer."""
    loaded = sys.modules.get("triton.knobs")
    if loaded is not None:
        return bool(loaded.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def launcher(kernel: Any, build: Build, device: int) -> Launcher | Interpreted:
    """Something that launches the kernel; compiles at first use."""
    return Interpreted(kernel, build) if interpreting() else Launcher(kernel, build, device)
