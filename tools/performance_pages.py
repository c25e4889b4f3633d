#!/usr/bin/env python3
"""Writes the measured tables of the documentation from benchmarks/results and the table of machines.

    python tools/performance_pages.py          rewrite what stands between the markers of the pages
    python tools/performance_pages.py --check  exit code 1, with the names, if a page differs from its results
    python tools/performance_pages.py --plots  draw docs/images/performance.png and docs/images/io-model.png too

A page holds `<!-- table: NAME -->` and `<!-- end: NAME -->`; what is between them is this script's, what is outside is
written by hand. Run it after a change of benchmarks/results; tests/test_performance_pages.py tells when it was not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import cpu_tables  # noqa: E402
import device_tables  # noqa: E402  # beside this file, wherever it is run from

RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
PAGES = ("performance.md", "numerics-report.md", "roofline.md", "io-model.md")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def read(name: str) -> list[dict[str, Any]]:
    """The lines of a results file; none if it is not there."""
    path = RESULTS / f"{name}.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    marks = ["---" if n == 0 else "---:" for n in range(len(heads))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, marks, *rows))


def problem(line: dict[str, Any]) -> str:
    """dtype, sizes and mask of a line in words."""
    mask = "causal" if line.get("causal") else "full"
    heads = f"{line['H']}/{line['H_kv']}" if line.get("H_kv", line["H"]) != line["H"] else f"{line['H']}"
    batch = f"B {line['B']}, " if line["section"] == "decode" else ""
    by = f", by {line['bf16_by']}" if "bf16_by" in line else ""
    return f"{line['dtype']}, {batch}D {line['D']}, N {line['N']}, H {heads}, {mask}{by}"


def latest(lines: list[dict[str, Any]], section: str) -> list[dict[str, Any]]:
    """Lines of a section, each with its machine; of one problem on one machine the last that was measured."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    machine = ""
    for line in lines:
        if line["section"] == "machine":
            machine = f"{line['processor']}, {line['cpu_capability']}, {line['threads']} threads"
        elif line["section"] == section:
            names = ("dtype", "D", "N", "H", "B", "causal", "bf16_by")
            found[(machine, *(line.get(name) for name in names))] = {**line, "machine": machine}
    return list(found.values())


def cpu(section: str) -> str:
    """SDPA beside the backend cpu, one table a machine."""
    lines = latest(read("cpu"), section)
    text = ""
    for machine in dict.fromkeys(line["machine"] for line in lines):
        rows = []
        for line in (one for one in lines if one["machine"] == machine):
            times = [1e3 * line[name]["median"] for name in ("sdpa", "tilewise")]
            rates = [f"{line[key]:.0f}" if key in line else "" for key in ("sdpa_gflops", "tilewise_gflops")]
            rows.append(
                [problem(line), *(f"{t:.3g}" for t in times), *rates, f"{line['ratio']:.2f}", bound(line)]
            )
        heads = [
            "problem",
            "SDPA ms",
            "Tilewise ms",
            "SDPA GFLOP/s",
            "Tilewise GFLOP/s",
            "speed-up",
            "of the bound",
        ]
        text += f"{machine}\n\n{table(heads, rows)}\n"
    return text or "Not measured yet.\n"


def bound(line: dict[str, Any]) -> str:
    """The part that is reached of what was measured between a line's calls, if anything was."""
    if "share" not in line:
        return ""
    rate = f"{line['read_gbytes']} GB/s" if "read_gbytes" in line else f"{line['fma_gflops']:.0f} GFLOP/s"
    return f"{line['share']:.2f} of {rate}"


def peers(section: str) -> str:
    """What the libraries of the field reach on an H200, with the floor of the roofline."""
    lines = [line for line in read("gpu_peers") if line["section"] == section]
    names = list(dict.fromkeys(line["library"] for line in lines))
    rows = []
    for key in dict.fromkeys(problem(line) for line in lines):
        same = [line for line in lines if problem(line) == key]
        rates = {line["library"]: line["cold_tflops"] for line in same}
        best = max(rates.values())
        words = [
            f"**{rates[name]}**" if rates.get(name) == best else str(rates.get(name, "")) for name in names
        ]
        floor, bound = floor_of(same[0])
        rows.append([key, *words, f"{floor:.0f}, {bound}", f"{best / floor:.0%}"])
    return table(["problem", *names, "roofline", "best of it"], rows)


def floor_of(line: dict[str, Any]) -> tuple[float, str]:
    """(TFLOP/s, what bounds) of the roofline on an H200, with tiles of 128 x 128 and no masked pair evaluated."""
    from tilewise.analysis.machines import find_machine
    from tilewise.analysis.roofline import Shape, predict_time, work_of

    n, d, heads = line["N"], line["D"], line["B"] * line["H_kv"]
    group = line["H"] // line["H_kv"]
    pairs = line["B"] * line["H"] * n * n // (2 if line["causal"] else 1)
    shape = Shape(
        heads, n * group, n, d, d, 128, 128, pairs, pairs // 128, 2, "bfloat16", line["section"] == "backward"
    )
    machine = find_machine("h200")
    work = work_of(shape, machine)
    found = predict_time(work, "bfloat16", machine)
    return work.matrix / found.seconds / 1e12, found.bound


def gpu() -> str:
    """Cells of benchmarks/gpu.py: each contender's TFLOP/s or TB/s, cold."""
    lines = [line for line in read("gpu") if "cell" in line and "contenders" in line]
    if not lines:
        return "Not measured yet.\n"
    names = list(dict.fromkeys(name for line in lines for name in line["contenders"]))
    last = {(line["cell"], line["which"]): line for line in lines}
    rows = []
    for (cell, which), line in last.items():
        words = [rate_of(line["contenders"].get(name, {})) for name in names]
        rows.append([f"{cell}, {which}", *words])
    return table(["cell", *names], rows)


def device(make: Callable[..., tuple[list[str], list[list[str]]]], name: str) -> str:
    """A table of `device_tables` from a results file."""
    heads, rows = make(read(name))
    return table(heads, rows) if rows else "Not measured yet.\n"


def rate_of(found: dict[str, Any]) -> str:
    """A contender's rate: TFLOP/s, or TB/s of a decode."""
    for key, unit in (("cold_tflops", ""), ("cold_tb_s", " TB/s")):
        if key in found:
            return f"{found[key]:g}{unit}"
    return ""


def memory() -> str:
    """Peak bytes beyond inputs and outputs, in MiB, by length."""
    lines = [line for line in read("memory") if "n" in line]
    lengths = sorted({line["n"] for line in lines})
    rows = []
    for case, way in dict.fromkeys((line["case"], line["pass"]) for line in lines):
        found = {
            line["n"]: line["extra_bytes"] for line in lines if (line["case"], line["pass"]) == (case, way)
        }
        rows.append([f"{case}, {way}", *(f"{found[n] / 2**20:.1f}" if n in found else "" for n in lengths)])
    matrix = {line["n"]: line["matrix_bytes"] for line in lines}
    rows.append(["the matrix, not built", *(f"{matrix[n] / 2**20:.0f}" for n in lengths)])
    return table(["MiB", *(f"N {n}" for n in lengths)], rows)


def numerics(section: str) -> str:
    """Root mean square errors of a sweep: out, and the worst of dq, dk and dv, for each contender."""
    lines = [line for line in read("numerics") if line["section"] == section]
    names = list(dict.fromkeys(line["contender"] for line in lines))
    rows = []
    for key in dict.fromkeys((line["dtype"], line.get(section, "")) for line in lines):
        words = []
        for name in names:
            (line,) = (
                one
                for one in lines
                if (one["dtype"], one.get(section, "")) == key and one["contender"] == name
            )
            worst = max(line[tensor]["rms"] for tensor in ("dq", "dk", "dv"))
            words.append(f"{line['out']['rms']:.1e}, {worst:.1e}")
        rows.append([" ".join(str(part) for part in key).strip(), *words])
    return table([f"type, {section}" if section != "storage" else "stored as", *names], rows)


def numerics_worst() -> str:
    """Over all settings, the largest ratio to ordinary attention's error in the same type."""
    lines = [line for line in read("numerics") if line["section"] not in ("machine", "storage")]
    settings = ("dtype", "N", "D", "spread", "mask", "section")
    ordinary = {
        tuple(line[key] for key in settings): line for line in lines if line["contender"] == "ordinary"
    }
    rows = []
    for dtype in dict.fromkeys(line["dtype"] for line in lines):
        for name in dict.fromkeys(line["contender"] for line in lines):
            if name == "ordinary":
                continue
            ratios: dict[str, list[float]] = {"out": [], "gradients": []}
            for line in (one for one in lines if one["dtype"] == dtype and one["contender"] == name):
                beside = ordinary[tuple(line[key] for key in settings)]
                for tensor in ("out", "dq", "dk", "dv"):
                    which = "out" if tensor == "out" else "gradients"
                    ratios[which].append(line[tensor]["rms"] / beside[tensor]["rms"])
            rows.append([f"{dtype}, {name}", *(f"{min(r):.2f} to {max(r):.2f}" for r in ratios.values())])
    return table(["error over ordinary attention's", "out", "dq, dk, dv"], rows)


def machines() -> str:
    """The machines with their rates."""
    from tilewise.analysis.machines import MACHINES

    def text(number: Any, scale: float) -> str:
        return "unknown" if number is None else f"{number.value / scale:.4g}"

    rows = []
    for name, one in MACHINES.items():
        half = one.rate("bfloat16") or one.rate("float32")
        rows.append([f"`{name}` {one.title}", text(half, 1e12), text(one.exponentials, 1e12), text(one.on_chip, 1e12),
                     text(one.memory, 1e12), text(one.tile_bytes, 1024), text(one.cache_bytes, 1e6)])  # fmt: skip
    heads = ["machine", "products TFLOP/s, bf16", "exponentials T/s", "on-chip TB/s", "memory TB/s", "tile memory KiB",
             "shared cache MB"]  # fmt: skip
    return table(heads, rows)


def sources() -> str:
    """Where each number comes from."""
    from tilewise.analysis.machines import MACHINES

    text = ""
    for name, one in MACHINES.items():
        named = {f"products, {dtype}": number for dtype, number in one.matrix.items()}
        named |= {
            "exponentials": one.exponentials,
            "on-chip": one.on_chip,
            "memory": one.memory,
            "tile memory": one.tile_bytes,
            "shared cache": one.cache_bytes,
        }
        by_source: dict[str, list[str]] = {}
        for what, number in named.items():
            key = (
                "unknown: no document found that states it"
                if number is None
                else f"{number.source} ({number.kind})"
            )
            by_source.setdefault(key, []).append(what)
        text += (
            f"- `{name}`: " + "; ".join(f"{', '.join(what)}: {key}" for key, what in by_source.items()) + "\n"
        )
    return text


TABLES: dict[str, Callable[[], str]] = {
    **{f"cpu-{section}": (lambda section=section: cpu(section))
       for section in ("forward", "backward", "decode", "short")},
    **{f"peers-{section}": (lambda section=section: peers(section)) for section in ("forward", "backward")},
    **{f"numerics-{section}": (lambda section=section: numerics(section))
       for section in ("N", "D", "spread", "mask", "storage")},
    "gpu": gpu, "memory": memory, "numerics-worst": numerics_worst, "machines": machines, "sources": sources,
    "cpu-features": lambda: cpu_tables.features(read("cpu"), table),
    "cpu-math": lambda: cpu_tables.slow_path(read("cpu"), table),
    "cpu-accuracy": lambda: cpu_tables.accuracy(read("cpu"), table),
    "counters": lambda: device(device_tables.counters, "counters"),
    "floors": lambda: device(device_tables.floors, "gpu"),
}  # fmt: skip


def render(text: str) -> str:
    """A page with its tables as the results have them. Raises KeyError for a name that no table has."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]().rstrip()}\n\n{found[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, tell what differs")
    parser.add_argument("--plots", action="store_true", help="draw the pictures, too (needs matplotlib)")
    chosen = parser.parse_args()
    stale = []
    for name in PAGES:
        path = DOCS / name
        before = path.read_text(encoding="utf-8")
        after = render(before)
        if before != after:
            stale.append(name)
            if not chosen.check:
                path.write_text(after, encoding="utf-8")
    if chosen.plots:
        import performance_plots

        performance_plots.draw(DOCS / "images", read("gpu_peers"))
    print(
        "\n".join(f"{'differs' if chosen.check else 'written'}: docs/{name}" for name in stale)
        or "pages are up to date"
    )
    return 1 if chosen.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
