"""The Hopper backward beside the best it meets: the whole backward through the public call, and who won each cell.

    python benchmarks/hopper_backward.py [cells gqa deterministic] [--runs 2] [--rounds 12]
        [--cells SUBSTRING,...] [--seconds 200] [--contenders hopper,sdpa_cudnn,sdpa_flash,fa4]
        [--output benchmarks/results/hopper_backward.jsonl]

The protocol is `benchmarks/gpu.py`'s: CUDA graphs, cold and hot, interleaved, rotated. TFLOP/s count five
products of the visible pairs. `cells`: D 64, 128, 256 by length and causality at 16384 tokens and 2048 / D heads;
`gqa`: grouped heads, a window, D = 96, (192, 128), packed sequences; `deterministic`: of both, those up to D = 128,
deterministic=True beside the default.

Lines: as `gpu.py`'s, with the ratio of ours to the best of the others by cold medians; at the end, for each cell, its
ratio in every run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu import measure
from gpu_contenders import SECTIONS

from tilewise.cli.machine import describe

OURS = "hopper"
OTHERS = (*SECTIONS["grouped"], *(c for c in SECTIONS["features"] if c.name == "packed1024"))
CELLS = {
    "cells": (*SECTIONS["short"], *SECTIONS["long"]),
    "gqa": OTHERS,
    "deterministic": tuple(c for c in (*SECTIONS["short"], *SECTIONS["long"], *OTHERS) if c.d <= 128),
}


def ratio(line: dict[str, Any]) -> float | None:
    """Ours over the best of the others, by cold medians; None if either is missing."""
    rates = {n: f["cold_tflops"] for n, f in line["contenders"].items() if "cold_tflops" in f}
    others = [rate for name, rate in rates.items() if name != OURS]
    return round(rates[OURS] / max(others), 3) if OURS in rates and others else None


def lines(
    section: str, names: list[str], run: int, rounds: int, wanted: str = ""
) -> Iterator[dict[str, Any]]:
    """One line a cell whose name has one of the `wanted` parts, separated by commas."""
    for cell in CELLS[section]:
        if not any(part in cell.name for part in wanted.split(",")):
            continue
        line = measure(cell, "backward", names, 60, rounds)
        yield line | {"section": section, "run": run, "ratio": ratio(line)}
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=["cells"])
    parser.add_argument("--contenders", default="hopper,sdpa_cudnn,sdpa_flash,fa4")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--cells", default="")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    ratios: dict[str, list[float | None]] = {}
    start = time.perf_counter()

    def write(line: dict[str, Any]) -> None:
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")

    write({"machine": describe(), "cudnn": torch.backends.cudnn.version(), "command": " ".join(sys.argv[1:]),
           "rounds": options.rounds, "when": time.strftime("%Y-%m-%d %H:%M")})  # fmt: skip
    for run in range(options.runs):
        for section in options.sections:
            names = [OURS, f"{OURS}+exact"] if section == "deterministic" else options.contenders.split(",")
            for line in lines(section, names, run, options.rounds, options.cells):
                write(line)
                rates = {n: f.get("cold_tflops", "-") for n, f in line["contenders"].items()}
                print(f"{line['cell']:26s} {line['ratio']}  {rates}", flush=True)
                ratios.setdefault(line["cell"], []).append(line["ratio"])
                if time.perf_counter() - start > options.seconds:
                    print(f"{options.seconds:g} s are over")
                    return
    for cell, found in ratios.items():
        print(f"{cell:26s} {found}")


if __name__ == "__main__":
    main()
