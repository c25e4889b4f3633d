"""Compiles the Hopper kernels without a GPU and reads what the assembler says about them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tilewise as tw
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.masks import as_mask
from tilewise.spec.scores import as_terms


class Facts(NamedTuple):
    """spilled: bytes stored to memory for want of registers. serialised: the assembler's warnings that products wait
    for one another. shared: bytes of shared memory."""

    spilled: int
    serialised: list[str]
    shared: int
    ptx: str


def facts_of(compiled: Any) -> Facts:
    """What ptxas reports of a compiled kernel."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        command = [ptxas, "-v", "--fmad=false", "--gpu-name=sm_90a", source, "-o", Path(folder) / "kernel.o"]
        said = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    lines = (said.stdout + said.stderr).splitlines()
    spilled = sum(
        int(line.split(" bytes spill stores")[0].split()[-1]) for line in lines if "spill stores" in line
    )
    serialised = [line for line in lines if "serialized" in line]
    return Facts(spilled, serialised, compiled.metadata.shared, compiled.asm["ptx"])


_INTO = re.compile(r"add\.s32\s+(%r\d+), %r\d+, (\d+);")
_AT = re.compile(r"\[\s*(global_smem\+\d+|%r\d+)[\s+0]*\]")


def reused_barriers(ptx: str) -> set[int]:
    """Places in shared memory at which a kernel makes a barrier, and another one, or which it reads or writes as
    ordinary memory: when processes take turns on a device, what a barrier was is written there."""
    offsets: dict[str, int] = {}
    barriers: list[int] = []
    others: set[int] = set()
    for line in ptx.splitlines():
        if found := _INTO.search(line):
            offsets[found[1]] = int(found[2])
        place = _AT.search(line)
        if place is None:
            continue
        name = place[1]
        at = int(name.partition("+")[2]) if name.startswith("global_smem") else offsets.get(name)
        if at is None:
            continue
        if "mbarrier.init" in line:
            barriers.append(at)
        elif "st.shared" in line or "ld.shared" in line:
            others.add(at)
    reused = {at for at in barriers if any(at - 4 <= other < at + 8 for other in others)}
    return reused | {at for at in barriers if barriers.count(at) > 1}


def spec_of(mask: Any = None, scores: Any = ()) -> tuple[AttentionSpec, list[torch.Tensor]]:
    """The spec of a mask and score terms, and its leaves."""
    formula, terms = as_mask(mask), as_terms(scores)
    leaves = [
        *(formula.term.leaves if formula.term else ()),
        *(t for term in terms for t in term.term.leaves),
    ]
    return AttentionSpec.parse(spec_text(formula, terms, False, False)), leaves


def compile_forward(
    pair: tuple[int, int],
    mask: Any = None,
    scores: Any = (),
    dtype: torch.dtype = torch.bfloat16,
    again: bool = False,
    **flags: Any,
) -> Facts:
    """The forward kernel of a kind of call, or the launch that does again what it left; flags: constants of the kernel
    that differ from a plain dense call's."""
    from triton.backends.compiler import GPUTarget

    from tilewise.backends.hopper import launch_forward as launch
    from tilewise.backends.hopper.compile import compile_gluon
    from tilewise.backends.hopper.source import module_of
    from tilewise.backends.hopper.tiles import LATER, default
    from tilewise.backends.triton.compile import Build
    from tilewise.backends.triton.layout import describe

    spec, leaves = spec_of(mask, scores)
    slots = describe(spec, leaves)
    assert slots is not None
    constants: dict[str, object] = {
        "HAS_MASK": spec.keep is not None, "HAS_TERMS": spec.score is not None, "FUSED": spec.score is None,
        "PACK": 1, "VARLEN": False, "USED_Q": False, "USED_K": False, "Q_OFFSET": "last", "K_OFFSET": "int",
        "SINK": False, "CARE": mask is not None or bool(scores), "STORE": "tiles",
    } | flags  # fmt: skip
    present: set[str] = set()
    if constants["VARLEN"]:
        present |= {"cu_q_ptr", "cu_k_ptr"}
    if constants["SINK"]:
        present |= {"sink_ptr"}
    if constants.get("RANGES"):
        present |= {"range_ptr"}
    if constants["CARE"] and pair in LATER:
        present |= {"again_ptr"}
    tiles = default(pair, spec, bool(constants["VARLEN"]))
    types = launch.kernel_types(
        dtype, tiles, pair, str(constants["STORE"]), int(str(constants["PACK"])), slots, leaves, frozenset(present),
        torch.float32 if constants["STORE"] == "rows" else dtype,
    )  # fmt: skip
    entry = launch.AGAIN if again else launch.FORWARD
    values = launch.constants_of(constants, tiles, pair, entry)
    build = Build(types, (), values, 4, 1, 0 if again else tiles.limit)
    kernel = getattr(module_of(spec, slots, entry.module, (entry,)), entry.name)
    return facts_of(compile_gluon(kernel, build, GPUTarget("cuda", 90, 32)))


def alibi_of(heads: int) -> Any:
    """ALiBi of a number of heads."""
    return tw.alibi(tw.alibi_slopes(heads))
