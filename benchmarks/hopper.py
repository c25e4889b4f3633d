"""The Hopper forward beside the fastest libraries of the card, cell by cell, and which cells it wins.

    python benchmarks/hopper.py [plain features] [--contenders hopper,sdpa_cudnn,fa3,fa4] [--cells SUBSTRING]
        [--rounds 12] [--seconds 600] [--output benchmarks/results/hopper.jsonl]

The protocol and the contenders are those of benchmarks/gpu.py: public calls with outputs allocated inside, captured in
CUDA graphs, cold and hot, interleaved. Lines: the machine; each cell with its contenders; last, for each cell the ratio
of our cold rate to the best other library's of the same run. A contender that is not installed says so and is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from gpu import measure, short
from gpu_contenders import SECTIONS, Cell

from tilewise.cli.machine import describe

OURS = ("hopper", "triton")
BEST_BEFORE = ("fa3", "fa4")
"""The libraries that were best in some cell before; cuDNN was 5 to 20 % behind everywhere."""


def _cells() -> dict[str, list[Cell]]:
    """Cells by section, the most telling first."""
    plain = [c for name in ("long", "short") for c in SECTIONS[name]]
    order = {(128, 16384): 0, (128, 4096): 1, (64, 16384): 2, (256, 16384): 3, (128, 1024): 4, (64, 4096): 5}
    plain.sort(key=lambda c: order.get((c.d, c.n), 6))
    names = ("alibi-causal", "softcap-causal", "user-causal", "documents1024")
    features = [c for c in SECTIONS["grouped"]] + [c for c in SECTIONS["features"] if c.name in names]
    return {"plain": plain, "features": features}


def ratio_of(line: dict[str, Any]) -> float | None:
    """Our cold rate over the best of the others; None where there is nothing to compare."""
    rates = {n: found.get("cold_tflops") for n, found in line["contenders"].items()}
    others = [rate for n, rate in rates.items() if rate and n.partition("+")[0] not in OURS]
    return rates["hopper"] / max(others) if others and rates.get("hopper") else None


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=["plain", "features"])
    parser.add_argument("--contenders", default="hopper,sdpa_cudnn,fa3,fa4")
    parser.add_argument("--cells", default="")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--patience", type=int, default=60)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    end, ratios = time.perf_counter() + options.seconds, {}

    def write(line: dict[str, Any]) -> None:
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")

    write({"machine": describe(), "command": " ".join(sys.argv), "rounds": options.rounds})
    for section in options.sections:
        for cell in _cells()[section]:
            if options.cells not in cell.name or time.perf_counter() > end:
                continue
            names = options.contenders.split(",")
            line = measure(cell, "forward", names, options.patience, options.rounds)
            ratio = ratio_of(line)
            line["ratio"] = None if ratio is None else round(ratio, 4)
            write(line)
            print(short(line), "" if ratio is None else f"ratio {ratio:.3f}", flush=True)
            if ratio is not None:
                ratios[cell.name] = ratio
    won = sum(r >= 1.0 for r in ratios.values())
    least = min(ratios, key=lambda n: ratios[n], default=None)
    write({"ratios": {n: round(r, 4) for n, r in ratios.items()}, "won": won})
    print(
        f"{won} of {len(ratios)} cells won; least: {least} {ratios[least]:.3f}"
        if least
        else "nothing to compare"
    )


if __name__ == "__main__":
    main()
