"""Device memory that attention really moves on a GPU, counted by its hardware, beside what the model predicts.

    python benchmarks/counters.py [--cells PART,PART] [--contenders triton,sdpa_flash,sdpa_cudnn,ordinary]
        [--which forward,backward] [--output benchmarks/results/counters.jsonl] [--ncu PATH]

Runs itself under Nsight Compute (`ncu`), which counts the bytes that DRAM delivers and takes. A call may be several
kernels; each case stands between two marker kernels. Caches are left as kernels find them, except that before a
call the shared cache is filled with clean data of no use, and after it whatever the call left there is driven out
and counted as written. Counters are the whole device's: nothing else may run on it. Clocks are left alone.

Lines: the machine; then per cell and contender the kernels with their bytes, their sum, and the plan that prices
them (`tilewise.analysis.roofline.device_bytes`; for `ordinary` the matrix that passes four times).
"""

from __future__ import annotations

import argparse
import csv
import glob
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_contenders import Cell, Refused, contender

import tilewise as tw
from tilewise.cli.machine import describe

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
MARKER = "spin_kernel"
FLUSH_BYTES = 1 << 29
CELLS = (
    Cell("D128-N8192-H32", 1, 32, 32, 8192, 128),
    Cell("D128-N8192-H32-causal", 1, 32, 32, 8192, 128, "causal"),
    Cell("D64-N16384-H32", 1, 32, 32, 16384, 64),
    Cell("D128-N16384-H16", 1, 16, 16, 16384, 128),
    Cell("D128-N65536-H4", 1, 4, 4, 65536, 128),
    Cell("gqa32/8-D128-N8192-B2-causal", 2, 32, 8, 8192, 128, "causal"),
    Cell("decode-B64-H32/8-N8192", 64, 32, 8, 8192, 128, q_rows=1),
)


def ordinary(cell: Cell) -> Any:
    """Attention as a product, a softmax and a product, with the matrix of scores in memory, in q's type."""
    if cell.mask != "full" or cell.heads != cell.heads_kv or cell.n > 16384:
        raise Refused("its matrix is masked by a pass of its own, or does not fit")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        scores = q.new_empty(len(q), q.shape[1], k.shape[1])
        scores.baddbmm_(q, k.mT, beta=0, alpha=1 / math.sqrt(cell.d))
        return torch.bmm(torch.softmax(scores, -1), v)

    return attend


def prepare(name: str, cell: Cell, which: str) -> Any:
    """One contender's call on fresh tensors, run twice: a second call of a kind may go another way than the first."""
    layout, attend = ("bhnd", ordinary(cell)) if name == "ordinary" else contender(name, cell)
    tensors = cell.draw(layout)
    if which == "forward":

        def call() -> Any:
            with torch.no_grad():
                return attend(*tensors)

    else:
        tensors = [t.requires_grad_() for t in tensors]
        out = attend(*tensors)
        do = torch.randn_like(out)

        def call() -> Any:
            return torch.autograd.grad(out, tensors, do, retain_graph=True)

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    return call


def priced(name: str, cell: Cell, which: str) -> dict[str, Any]:
    """The plan's numbers for a contender of ours; of everything, what must move at least."""
    size = torch.finfo(cell.dtype).bits // 8
    q_rows, k_rows = cell.batch * cell.heads * cell.rows, cell.batch * cell.heads_kv * cell.n
    d, dv = cell.d, cell.head_dim_v
    found: dict[str, Any] = {"compulsory_bytes": size * (q_rows + k_rows) * (d + dv)}
    shapes = [(cell.batch, h, n, e) for h, n, e in
              ((cell.heads, cell.rows, d), (cell.heads_kv, cell.n, d), (cell.heads_kv, cell.n, dv))]  # fmt: skip
    ours = name not in ("ordinary", "sdpa_flash", "sdpa_cudnn", "fa3", "fa4")
    plan = tw.explain(
        *shapes, dtype=cell.dtype, device="cuda", mask=None if cell.mask == "full" else tw.causal(),
        backend=name.partition("+")[0] if ours else "triton", machine="h200", backward=which == "backward",
    )  # fmt: skip
    if ours and plan.shape is not None and plan.schedule is not None:
        found |= {"shape": plan.shape._asdict(), "schedule": [plan.schedule.block_q, plan.schedule.block_k]}
    if name == "ordinary":
        found["bytes_ordinary"] = plan.bytes_ordinary
    return found


def counted(options: argparse.Namespace) -> None:
    """Runs under ncu: every case between two markers. Writes what each case was to `--counted`."""
    waste = torch.ones(FLUSH_BYTES // 4, device="cuda")
    cuda = torch.cuda.cudart()
    cases = []
    for cell in CELLS:
        if not any(part in cell.name for part in options.cells.split(",")):
            continue
        for which in options.which.split(","):
            for name in options.contenders.split(","):
                case: dict[str, Any] = {"cell": cell.name, "which": which, "contender": name}
                cases.append(case)
                try:
                    if cell.q_rows and which == "backward":
                        raise Refused("decoding has no backward")
                    call = prepare(name, cell, which)
                    case |= priced(name, cell, which)
                except Exception as error:  # any library may fail on any cell; that is a result
                    case["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
                    continue
                waste.sum()
                torch.cuda.synchronize()
                cuda.cudaProfilerStart()
                torch.cuda._sleep(1)
                kept = call()
                torch.cuda._sleep(1)
                waste.sum()
                torch.cuda.synchronize()
                cuda.cudaProfilerStop()
                del call, kept
                torch.cuda.empty_cache()
    Path(options.counted).write_text(json.dumps(cases), encoding="utf-8")


def read_kernels(path: Path) -> Iterator[tuple[str, list[float]]]:
    """(kernel, bytes read and written) of each row of ncu's raw table."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    start = next((n for n, line in enumerate(lines) if '"Kernel Name"' in line), len(lines))
    for n, row in enumerate(csv.DictReader(lines[start:])):
        if n:  # the first row holds units, which are bytes
            yield row["Kernel Name"], [float(row[metric].replace(",", "")) for metric in METRICS]


def split_cases(
    kernels: Iterator[tuple[str, list[float]]], cases: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Each case with the kernels between its markers; what the flush after it wrote belongs to it as well."""
    sections: list[list[tuple[str, list[float]]]] = []
    for name, numbers in kernels:
        if MARKER in name:
            sections.append([])
        elif sections:
            sections[-1].append((name, numbers))
    ran = [case for case in cases if "failed" not in case]
    if len(sections) != 2 * len(ran):
        raise RuntimeError(f"{len(ran)} cases ran, and ncu saw {len(sections)} markers")
    for case, call, flush in zip(ran, sections[::2], sections[1::2], strict=True):
        left = sum(numbers[1] for _, numbers in flush)
        case["kernels"] = [{"name": name[:80], "read": r, "written": w} for name, (r, w) in call]
        case["left_in_cache_bytes"] = left
        case["counted_bytes"] = left + sum(sum(numbers) for _, numbers in call)
    return cases


def find_ncu(given: str | None) -> str:
    """ncu, from the path given, PATH, or where NVIDIA's packages put it."""
    places = [
        given,
        shutil.which("ncu"),
        *sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"), reverse=True),
    ]
    found = next((place for place in places if place), None)
    if found is None:
        sys.exit("ncu (Nsight Compute) is not installed: there is nothing to count with")
    return found


def main() -> None:
    """Read the command line, count, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="")
    parser.add_argument("--contenders", default="triton,sdpa_flash,sdpa_cudnn,ordinary")
    parser.add_argument("--which", default="forward")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--ncu")
    parser.add_argument("--counted", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counted:
        counted(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        table, said = Path(folder) / "table.csv", Path(folder) / "cases.json"
        command = [
            find_ncu(options.ncu), "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off",
            "--metrics", ",".join(METRICS), "--print-units", "base", "--csv", "--page", "raw", "--log-file", str(table),
            sys.executable, __file__, "--counted", str(said), "--cells", options.cells, "--contenders",
            options.contenders, "--which", options.which,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not said.exists() or not table.exists():
            print(done.stdout[-2000:], done.stderr[-4000:], sep="\n")
            print(table.read_text(errors="replace")[-2000:] if table.exists() else "")
            sys.exit("nothing was counted: this machine's runtime may give no counters")
        cases = split_cases(read_kernels(table), json.loads(said.read_text(encoding="utf-8")))
    lines: list[dict[str, Any]] = [
        {"machine": describe(), "cache_bytes": torch.cuda.get_device_properties(0).L2_cache_size,
         "command": " ".join(sys.argv[1:]), "when": time.strftime("%Y-%m-%d %H:%M")},
        *cases,
    ]  # fmt: skip
    for case in cases:
        found, least = (case.get(f"{kind}_bytes", math.nan) / 1e6 for kind in ("counted", "compulsory"))
        title = f"{case['cell']:30s} {case['which']:9s} {case['contender']:12s}"
        print(f"{title} {found:10.1f} MB counted, {least:10.1f} MB compulsory  {case.get('failed', '')}")
    if options.output:
        with options.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
