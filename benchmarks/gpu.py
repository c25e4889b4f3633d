"""Attention on a GPU beside what its user would pick instead: forward, backward, features, decode, host time.

    python benchmarks/gpu.py [long short features grouped decode host] [--which forward,backward]
        [--contenders triton,flex,sdpa_flash,sdpa_cudnn] [--cells SUBSTRING,...] [--seconds 120] [--patience 60]
        [--rounds 12] [--output benchmarks/results/gpu.jsonl]

Every contender is called through its public function with outputs allocated inside. Each call is captured in a
CUDA graph and replayed after 80 ms of idleness (cold) and back to back (hot); the contenders of a cell are
interleaved, the order rotates, 12 rounds or as many as asked for; medians and quartiles (`tilewise.cli.timing`).
Backward is autograd's whole call. A section stops when its seconds are over; a contender that needs longer than the
patience to compile is left out and says so. Each cell is a line, written when it is done, so that what a run had time
for survives it.

Lines: the machine; then per cell and direction each contender's seconds, TFLOP/s from visible pairs (decode: TB/s
of keys and values), peak bytes of a call beyond its inputs.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_contenders import SECTIONS, Cell, Refused, contender

from tilewise.cli.machine import describe
from tilewise.cli.timing import Limits, side_stream, time_calls

DEVICE = torch.device("cuda")
ROUNDS = 12
HOST_CALLS, HOST_ROUNDS = 100, 25
Calls = dict[str, Callable[[], Any]]
Found = dict[str, dict[str, Any]]


class TooSlow(Exception):
    """A contender did not get ready in time."""


@contextmanager
def patience(seconds: int) -> Iterator[None]:
    """Raises TooSlow inside the block when the time is over."""

    def over(*_: object) -> None:
        raise TooSlow(f"not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def prepare(name: str, cell: Cell, which: str) -> tuple[Callable[[], Any], int]:
    """(call, peak bytes beyond inputs) of one contender, run once."""
    layout, attend = contender(name, cell)
    tensors = cell.draw(layout)
    if which == "backward":
        tensors = [t.requires_grad_() for t in tensors]
        out = attend(*tensors)
        do = torch.randn_like(out)

        def call() -> Any:
            return torch.autograd.grad(out, tensors, do, retain_graph=True)

    else:

        def call() -> Any:
            with torch.no_grad():
                return attend(*tensors)

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return call, torch.cuda.max_memory_allocated() - before


def ready(cell: Cell, which: str, names: list[str], seconds: int) -> tuple[Calls, Found]:
    """The calls of a cell's contenders, and what is known of each so far."""
    calls: Calls = {}
    found: Found = {}
    for name in names:
        start = time.perf_counter()
        try:
            with patience(seconds):
                calls[name], peak = prepare(name, cell, which)
            found[name] = {"ready_s": round(time.perf_counter() - start, 2), "peak_bytes": peak}
        except Refused as why:
            found[name] = {"refused": str(why)}
        except Exception as error:  # any library may fail on any cell; that is a result
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            torch.cuda.synchronize()
    return calls, found


def timed(cell: Cell, which: str, calls: Calls, found: Found, rounds: int) -> dict[str, Any]:
    """One line: all contenders on one cell and direction."""
    timings = time_calls(calls, DEVICE, Limits(least=rounds, most=rounds, seconds=0.0))
    flops = cell.flops(which, cell.pairs())
    size = torch.finfo(cell.dtype).bits // 8
    read = cell.batch * cell.heads_kv * cell.n * (cell.d + cell.head_dim_v) * size
    for name, timing in timings.items():
        found[name] |= timing.to_dict()
        for kind, series in (("cold", timing.latency), ("hot", timing.hot)):
            if series is not None and cell.q_rows:
                found[name][f"{kind}_tb_s"] = round(read / series.median / 1e12, 3)
            elif series is not None:
                found[name][f"{kind}_tflops"] = round(flops / series.median / 1e12, 1)
    return {"cell": cell.name, "which": which, "contenders": found}


def measure(cell: Cell, which: str, names: list[str], seconds: int, rounds: int) -> dict[str, Any]:
    """That line, of contenders that are made ready here."""
    with side_stream(DEVICE):
        return timed(cell, which, *ready(cell, which, names, seconds), rounds)


def host_time(call: Callable[[], Any]) -> float:
    """Microseconds of the host for a call, over HOST_CALLS of them."""
    for _ in range(HOST_CALLS // 5):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return (time.perf_counter() - start) / HOST_CALLS * 1e6


def host(names: list[str], seconds: int) -> Iterator[dict[str, Any]]:
    """Microseconds of the host for a tiny eager call, without and with autograd: contenders in turns on one core."""
    cell = Cell("tiny-B1-H4-N64-D64", 1, 4, 4, 64, 64)
    for which in ("forward", "autograd"):
        found: dict[str, Any] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for name in names:
            try:
                with patience(seconds):
                    layout, attend = contender(name, cell)
                    tensors = [t.requires_grad_(which == "autograd") for t in cell.draw(layout)]
                    calls[name] = functools.partial(attend, *tensors)
                    calls[name]()
            except Exception as error:
                found[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
        for _ in range(HOST_ROUNDS):
            for name, call in calls.items():
                samples[name].append(host_time(call))
        os.sched_setaffinity(0, cores)
        for name, times in samples.items():
            found[name] = {"host_us": round(statistics.median(times), 2), "least_us": round(min(times), 2)}
        yield {"cell": cell.name, "which": which, "contenders": found}


def short(line: dict[str, Any]) -> str:
    """A line of the table for the terminal."""
    words = []
    for name, found in line["contenders"].items():
        rate = "tb_s" if "cold_tb_s" in found else "tflops"
        if f"cold_{rate}" in found:
            words.append(f"{name} {found[f'cold_{rate}']}/{found.get(f'hot_{rate}', '-')}")
        elif "host_us" in found:
            words.append(f"{name} {found['host_us']} us (least {found['least_us']})")
        else:
            words.append(f"{name} - ({(found.get('refused') or found.get('failed') or '')[:70]})")
    return f"{line['cell']:28s} {line['which']:9s} " + "  ".join(words)


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=["long", "features", "host"])
    parser.add_argument("--which", default="forward,backward")
    parser.add_argument("--contenders", default="triton,flex,sdpa_flash,sdpa_cudnn")
    parser.add_argument("--cells", default="")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--patience", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    names = options.contenders.split(",")

    def write(line: dict[str, Any]) -> None:
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")

    write({"machine": describe(), "cudnn": torch.backends.cudnn.version(), "command": " ".join(sys.argv[1:]),
           "when": time.strftime("%Y-%m-%d %H:%M")})  # fmt: skip
    for section in options.sections:
        start = time.perf_counter()
        if section == "host":
            lines: Iterator[dict[str, Any]] = host(names, options.patience)
        else:
            directions = ["forward"] if section == "decode" else options.which.split(",")
            lines = (
                measure(cell, which, names, options.patience, options.rounds)
                for which in directions
                for cell in SECTIONS[section]
                if any(word in cell.name for word in options.cells.split(","))
            )
        for line in lines:
            line["section"] = section
            write(line)
            print(short(line), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            if time.perf_counter() - start > options.seconds:
                print(f"{section}: its {options.seconds:g} s are over", flush=True)
                break


if __name__ == "__main__":
    main()
