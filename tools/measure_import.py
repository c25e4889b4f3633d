#!/usr/bin/env python3
"""How long `import tilewise` takes beyond torch, and which modules take it.

Each round is two fresh processes, in turns: `import torch` alone, and `import torch, tilewise`, under -X importtime.
What counts is tilewise's own cumulative time, torch being there already. One JSON line goes to
benchmarks/results/import.jsonl.

    python tools/measure_import.py              11 rounds
    python tools/measure_import.py --rounds 3 --output -
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "import.jsonl"
LIMIT = 0.2  # seconds; what this project promises
LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|(\s+)(\S+)")


def import_times(code: str) -> tuple[float, dict[str, tuple[float, float]]]:
    """(wall seconds of the process, {module: (own, cumulative) seconds}) of one fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    wall = time.perf_counter() - start
    found = [LINE.match(line) for line in done.stderr.splitlines()]
    return wall, {m[4]: (int(m[1]) / 1e6, int(m[2]) / 1e6) for m in found if m is not None}


def main() -> int:
    """Measure, print and record; exit code 1 if even the quickest round is over the limit: load only adds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", default=str(RESULTS), help="file to add to, or - for none")
    arguments = parser.parse_args()
    beyond, walls, without, slowest = [], [], [], {}
    for _ in range(arguments.rounds):
        without.append(import_times("import torch")[0])
        wall, times = import_times("import torch; import tilewise")
        walls.append(wall)
        beyond.append(times["tilewise"][1])
        slowest = {name: own for name, (own, _) in times.items() if name.startswith("tilewise")}
    version = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    worst = sorted(slowest.items(), key=lambda item: -item[1])[:5]
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": version.stdout.strip(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "rounds": arguments.rounds,
        "beyond_torch_s": {
            "median": round(statistics.median(beyond), 4), "min": round(min(beyond), 4), "max": round(max(beyond), 4)
        },
        "torch_process_s": round(statistics.median(without), 3),
        "both_process_s": round(statistics.median(walls), 3),
        "slowest_modules_s": {name: round(own, 4) for name, own in worst},
        "limit_s": LIMIT,
    }  # fmt: skip
    text = json.dumps(record)
    print(text)
    if arguments.output != "-":
        path = Path(arguments.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    return 0 if min(beyond) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
