"""The Hopper forward beside the fastest libraries of the card, cell by cell, and which cells it wins.

    python benchmarks/hopper.py [plain features] [--contenders hopper,sdpa_cudnn,fa3,fa4] [--cells SUBSTRING,...]
        [--rounds 12] [--seconds 600] [--output benchmarks/results/hopper.jsonl]

The protocol and the contenders are those of benchmarks/gpu.py: public calls with outputs allocated inside, captured in
CUDA graphs, cold and hot, interleaved. Lines: the machine; each cell with its contenders; last, for each cell the ratio
of our cold rate to the best other library's of the same run, and to our own long causal cell's by visible tiles of 128
rows and keys. A contender that is not installed says so and is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu import measure, short
from gpu_contenders import SECTIONS, Cell

from tilewise.cli.machine import describe

TILE = 128
PLAIN = "D128-N16384-causal"
"""The cell that features are compared with."""
OURS = ("hopper", "triton")
BEST_BEFORE = ("fa3", "fa4")
"""The libraries that were best in some cell before; cuDNN was 5 to 20 % behind everywhere."""


def _cells() -> dict[str, list[Cell]]:
    """Cells by section, the most telling first."""
    plain = [c for name in ("long", "short") for c in SECTIONS[name]]
    order = {(128, 16384): 0, (128, 4096): 1, (64, 16384): 2, (256, 16384): 3, (128, 1024): 4, (64, 4096): 5}
    plain.sort(key=lambda c: order.get((c.d, c.n), 6))
    users = ("user12-causal", "user7-causal", "user1000-causal", "user-causal")
    names = ("alibi-causal", "softcap-causal", *users, "documents1024", "packed1024")
    features = [c for c in SECTIONS["features"] if c.name in names]
    # What they are compared with, in the same run.
    beside = [c for c in plain if c.name in (PLAIN, "D128-N1024-causal")]
    return {"plain": plain, "features": [*beside, *SECTIONS["grouped"], *features]}


def tiles_of(cell: Cell) -> int:
    """Pairs of one head in the tiles of TILE rows and keys that have a visible pair."""
    if cell.mask.startswith("packed"):  # tiles begin where sequences do
        lengths = torch.bincount(cell.documents).tolist()
        return sum(tiles_of(Cell("", 1, 1, 1, n, cell.d, "causal")) for n in lengths)
    columns = torch.arange(cell.n, device="cuda")[None, :]
    parts = torch.arange(cell.rows, device="cuda")[:, None].split(TILE)
    seen = torch.stack([cell.keep(rows, columns).any(0) for rows in parts])
    seen = torch.nn.functional.pad(seen, (0, -cell.n % TILE))
    return int(seen.view(len(parts), -1, TILE).any(2).sum()) * TILE * TILE


def tile_rate(cell: Cell, line: dict[str, Any]) -> float | None:
    """Our cold TFLOP/s, all pairs of visible tiles counted."""
    found = line["contenders"].get("hopper", {})
    if "latency" not in found:
        return None
    return cell.flops("forward", tiles_of(cell)) / found["latency"]["median_s"] / 1e12


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
    end, ratios, rates = time.perf_counter() + options.seconds, {}, {}

    def write(line: dict[str, Any]) -> None:
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")

    write({"machine": describe(), "command": " ".join(sys.argv), "rounds": options.rounds})
    for section in options.sections:
        for cell in _cells()[section]:
            wanted = any(word in cell.name for word in options.cells.split(","))
            if not wanted or cell.name in rates or time.perf_counter() > end:
                continue
            names = options.contenders.split(",")
            line = measure(cell, "forward", names, options.patience, options.rounds)
            ratio = ratio_of(line)
            line["ratio"] = None if ratio is None else round(ratio, 4)
            line["tile_tflops"] = rates[cell.name] = tile_rate(cell, line)
            write(line)
            beside = rates[cell.name] and rates.get(PLAIN) and rates[cell.name] / rates[PLAIN]
            words = "" if ratio is None else f"ratio {ratio:.3f}"
            print(short(line), words, f"of plain {beside:.3f}" if beside else "", flush=True)
            if ratio is not None:
                ratios[cell.name] = ratio
    won = sum(r >= 1.0 for r in ratios.values())
    least = min(ratios, key=lambda n: ratios[n], default=None)
    plain = rates.get(PLAIN)
    shares = {n: round(r / plain, 4) for n, r in rates.items() if r and plain}
    write({"ratios": {n: round(r, 4) for n, r in ratios.items()}, "won": won, "of_plain_by_tile": shares})
    print(
        f"{won} of {len(ratios)} cells won; least: {least} {ratios[least]:.3f}"
        if least
        else "nothing to compare"
    )


if __name__ == "__main__":
    main()
