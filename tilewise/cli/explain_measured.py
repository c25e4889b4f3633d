"""What was measured of a problem like this one: lines of benchmarks/results, beside the prediction.

A line is like the problem if element type, length, head size, mask (none or causal), direction and machine agree. Heads
and batch may differ: the time is then scaled by the pairs, which holds where both fill the machine, and the line says
what was measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tilewise
from tilewise.analysis.flops import attention_flops
from tilewise.analysis.machines import match_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tilewise.cli.problem_flags import Sizes
    from tilewise.plan import Plan

TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LIBRARIES = {"tilewise": "Tilewise (backend cpu)", "sdpa": "SDPA"}
MOST = 6


class Measured(NamedTuple):
    """seconds: of this problem, scaled where sizes differ. what: batch and heads of the line. source: its file."""

    library: str
    seconds: float
    what: str
    source: str


class Entry(NamedTuple):
    """One contender of one line."""

    machine: str | None
    library: str
    key: tuple[str, int, int, bool, str]
    heads: int
    seconds: float
    what: str
    source: str


def folder_of(given: str | None) -> Path:
    """The folder of results: as given, else the source tree's, which an installed package has not."""
    return Path(given) if given else Path(tilewise.__file__).parents[1] / "benchmarks" / "results"


def find(plan: Plan, sizes: Sizes, problem: dict[str, Any], folder: str | None) -> list[Measured]:
    """Measurements of this problem on the plan's machine, fastest first."""
    causal = {"none": False, "causal": True}.get(sizes.mask)
    plain = causal is not None and sizes.seqlen_q == sizes.seqlen_k and sizes.head_dim == sizes.head_dim_v
    extras = ("softcap", "alibi", "sink", "dropout", "q_offset")
    if plan.machine is None or not plain or any(problem[name] for name in extras):
        return []
    way = "backward" if problem["backward"] else "forward"
    key = (sizes.dtype, sizes.seqlen_q, sizes.head_dim, bool(causal), way)
    found = [
        Measured(
            entry.library, entry.seconds * sizes.batch * sizes.heads / entry.heads, entry.what, entry.source
        )
        for entry in entries(folder_of(folder))
        if entry.machine == plan.machine and entry.key == key
    ]
    return sorted(found, key=lambda one: one.seconds)[:MOST]


def entries(folder: Path) -> Iterator[Entry]:
    """Everything in the folder that times attention itself."""
    for name, read in (("cpu.jsonl", _cpu), ("gpu_peers.jsonl", _peers), ("gpu.jsonl", _gpu)):
        path = folder / name
        if path.exists():
            yield from read(
                [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()], name
            )


def _cpu(lines: list[dict[str, Any]], source: str) -> Iterator[Entry]:
    machine = None
    for line in lines:
        if line["section"] == "machine":
            machine = match_machine(f"{line['processor']} {line['cpu_capability']}")
        if line["section"] not in ("forward", "backward"):
            continue
        key = (TYPES[line["dtype"]], line["N"], line["D"], line["causal"], line["section"])
        by = f", bf16 by {line['bf16_by']}" if "bf16_by" in line else ""
        what = f"batch 1, {line['H']} heads{by}"
        for name, library in LIBRARIES.items():
            yield Entry(machine, library, key, line["H"], line[name]["median"], what, source)


def _peers(lines: list[dict[str, Any]], source: str) -> Iterator[Entry]:
    machine = None
    for line in lines:
        if line["section"] == "machine":
            machine = match_machine(" ".join(line["gpus"]))
            continue
        pairs = line["N"] ** 2 // (2 if line["causal"] else 1)
        backward = line["section"] == "backward"
        flops = attention_flops(pairs, line["D"], line["D"], line["H"], line["B"], backward=backward)
        key = (TYPES[line["dtype"]], line["N"], line["D"], line["causal"], line["section"])
        grouped = f" on {line['H_kv']}" if line["H"] != line["H_kv"] else ""
        what = f"batch {line['B']}, {line['H']} heads{grouped}"
        seconds = flops / line["cold_tflops"] / 1e12
        yield Entry(machine, line["library"], key, line["B"] * line["H"], seconds, what, source)


def _gpu(lines: list[dict[str, Any]], source: str) -> Iterator[Entry]:
    """Cells of benchmarks/gpu.py whose name says everything: head size, length, full or causal."""
    machine = None
    for line in lines:
        if "machine" in line:
            machine = match_machine(" ".join(line["machine"]["gpus"]))
        cell = re.fullmatch(r"D(\d+)-N(\d+)-(full|causal)", line.get("cell", ""))
        if cell is None:
            continue
        d, n, causal = int(cell[1]), int(cell[2]), cell[3] == "causal"
        flops = attention_flops(n * n // (2 if causal else 1), d, d, backward=line["which"] == "backward")
        for name, found in line["contenders"].items():
            if "cold_tflops" in found:
                seconds = flops / found["cold_tflops"] / 1e12
                key = ("bfloat16", n, d, causal, line["which"])
                yield Entry(
                    machine, f"{name}, cell {cell[0]}", key, 1, seconds, "as many heads as fill it", source
                )
