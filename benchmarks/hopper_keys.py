"""128 and 64 keys a block of the Hopper forward, in turn: `python benchmarks/hopper_keys.py [kind ...] [--turns 3]
[--output benchmarks/results/hopper_kinds.jsonl]`, kinds of `hopper_kinds.py` as 128x128/sequences/relative (head
dimensions, form, kind), by default those at whose keys `tiles.finer` looks.

Two processes, one of which takes half the keys wherever the other takes 128, compile their kernels in turn and time
each kind in turn: a CUDA graph of four calls of random numbers, replayed back to back, the median of eight. A line has
the seconds of both first calls and what 64 keys are of the speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PAIRS = ("64x64", "96x96", "128x128")
KINDS = (
    "relative",
    "relative, stripes",
    "alibi, stripes",
    "bias, stripes",
    "softcap",
    "exp2",
    "bent",
    "bias",
)
CALLS, REPLAYS, REST = 4, 8, 0.05
FIRST = "first"


def call_of(kind: str) -> Any:
    """A call of a kind, of random numbers on the GPU."""
    from benchmarks import hopper_kinds

    sizes, form, name = kind.split("/")
    pair, lies = tuple(map(int, sizes.split("x"))), hopper_kinds.FORMS[form]
    with torch.device("cuda"):
        call = hopper_kinds.ready(pair, lies, *hopper_kinds.kinds(lies)[name])
        for tensor in call.args[:3]:
            tensor.normal_()
    return call


def captured(call: Any) -> tuple[Any, float]:
    """(a graph of calls, seconds of the first)."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        before = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    return graph, seconds


def replayed(graph: Any) -> float:
    """Milliseconds of a call."""
    graph.replay()
    torch.cuda.synchronize()
    time.sleep(REST)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)) / CALLS


def worker(halves: bool) -> None:
    """Answers each kind on its standard input: first with the seconds of its first call, then with milliseconds."""
    from tilewise.backends.hopper import tiles

    graph, held, now = None, None, ""
    with mock.patch.object(tiles, "finer", lambda problem, pair: halves), torch.no_grad():
        print(FIRST, flush=True)
        for line in sys.stdin:
            kind = line.strip()
            if kind != now:
                graph = held = None
                torch.cuda.empty_cache()
                held, now = call_of(kind), kind
                graph, seconds = captured(held)
                print(json.dumps({"seconds": round(seconds, 2)}), flush=True)
            else:
                print(json.dumps({"ms": replayed(graph)}), flush=True)


def started(halves: bool, folder: str) -> subprocess.Popen[str]:
    """Such a process, with caches of its own."""
    own = {
        "TRITON_CACHE_DIR": f"{folder}/triton{halves:d}",
        "TILEWISE_CACHE_DIR": f"{folder}/tilewise{halves:d}",
    }
    command = [sys.executable, "-m", "benchmarks.hopper_keys", "--worker", str(int(halves))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    found = subprocess.Popen(command, env={**os.environ, **own}, text=True, **pipes)
    assert found.stdout is not None and found.stdout.readline().strip() == FIRST
    return found


def ask(process: subprocess.Popen[str], kind: str) -> dict[str, float]:
    """The answer of a process."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{kind}\n")
    process.stdin.flush()
    answer: dict[str, float] = json.loads(process.stdout.readline())
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        worker(bool(asked.worker))
        return
    every = [f"{p}/{form}/{kind}" for p in PAIRS for form in ("sequences", "dense") for kind in KINDS]
    with tempfile.TemporaryDirectory() as folder:
        processes = [started(halves, folder) for halves in (False, True)]
        for kind in asked.kinds or every:
            first = [ask(process, kind)["seconds"] for process in processes]
            ratios, whole = [], []
            for turn in range(asked.turns):
                order = processes if turn % 2 == 0 else processes[::-1]
                ms = {process.pid: ask(process, kind)["ms"] for process in order}
                whole.append(ms[processes[0].pid])
                ratios.append(ms[processes[0].pid] / ms[processes[1].pid])
            line = {"kind": kind, "64_over_128_keys": round(statistics.median(ratios), 3),
                    "ms_128_keys": round(statistics.median(whole), 4), "first_call_s": first}  # fmt: skip
            print(json.dumps(line), flush=True)
            if asked.output:
                with asked.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()


if __name__ == "__main__":
    main()
