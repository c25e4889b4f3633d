"""Whether gradients repeat bit by bit, and small calls of every kind for a checker of memory.

    python benchmarks/repeats.py [exact default] [--runs 1000] [--cells NAME,...] [--part 1/2] [--seconds 120]
        [--backend hopper] [--output benchmarks/results/tests.jsonl]
    compute-sanitizer --tool memcheck --error-exitcode 1 python benchmarks/repeats.py small [--part 1/8]

exact: deterministic=True; of the first run and every later one dq, dk and dv are compared bit by bit. default: the
default's additions to dq come in any order and so round differently; the largest difference from the first run is
printed in units of the largest gradient. small: forward and backward of short problems, each with fresh inputs in
poisoned surroundings, compared with float64; it runs without a GPU, too (--backend cpu). Lines: one a cell, flushed
as it ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_contenders import SECTIONS, Cell, contender
from hopper_backward import CELLS
from torch import Tensor

import tilewise as tw
from tilewise.cli.machine import describe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = tuple(c for c in (*SECTIONS["short"], *SECTIONS["long"]) if c.d > 128)
ODD = (
    Cell("D64-N1003-causal", 16, 32, 32, 1003, 64, "causal"),
    Cell("D128-N1003-causal", 16, 16, 16, 1003, 128, "causal"),
    Cell("D128-N3001-full", 5, 16, 16, 3001, 128, "full"),
    Cell("D96-N777-window", 20, 12, 12, 777, 96, "window:200"),
    Cell("D128-N2050-grouped", 8, 24, 8, 2050, 128, "causal"),
    Cell("D192-128-N1100-causal", 14, 8, 8, 1100, 192, "causal", d_v=128),
    Cell("D128-N2048-user", 8, 16, 16, 2048, 128, "user"),
)
REPEATED = (*CELLS["deterministic"], *WIDE, *ODD)
SIZES = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (80, 80))


def gradients_of(cell: Cell, backend: str) -> Callable[[], tuple[Tensor, ...]]:
    """The backward of one call, to be called again and again."""
    layout, attend = contender(backend, cell)
    tensors = [t.requires_grad_() for t in cell.draw(layout)]
    out = attend(*tensors)
    do = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, tensors, do, retain_graph=True)


def exact(cell: Cell, backend: str, runs: int) -> dict[str, Any]:
    """How many values of dq, dk, dv differ from the first run's in any later one."""
    call = gradients_of(cell, f"{backend}+exact")
    first = call()
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(runs):
        for one, other in zip(first, call(), strict=True):
            differ += (one.view(torch.int16) != other.view(torch.int16)).sum()
    return {"differ": int(differ)}


def default(cell: Cell, backend: str, runs: int) -> dict[str, Any]:
    """The largest difference of dq, dk, dv from the first run's, of the largest value."""
    call = gradients_of(cell, f"{backend}+atomics")
    first = call()
    largest = torch.zeros(len(first), device=DEVICE)
    for _ in range(runs):
        far = [(a.float() - b.float()).abs().max() for a, b in zip(first, call(), strict=True)]
        largest = torch.maximum(largest, torch.stack(far))
    most = torch.stack([t.float().abs().max() for t in first])
    return {"largest": [float(f"{x:.2g}") for x in (largest / most).tolist()]}


def kinds(h: int) -> dict[str, dict[str, Any]]:
    """Masks, terms and sinks of the small calls, for h heads."""
    slopes = tw.alibi_slopes(h).to(DEVICE)
    return {
        "full": {},
        "causal": {"mask": tw.causal()},
        "window": {"mask": tw.window(70, 30)},
        "user": {"mask": tw.causal() & tw.custom(lambda q, k: (q - k) % 7 < 3)},
        "alibi": {"mask": tw.causal(), "scores": (tw.alibi(slopes),)},
        "softcap": {"mask": tw.causal(), "scores": (tw.softcap(30.0),)},
        "sink": {"mask": tw.causal(), "sink": torch.randn(h, device=DEVICE).requires_grad_()},
        "packed": {"mask": tw.causal()},
    }


def inside(*shape: int) -> Tensor:
    """Fresh bf16 values whose surroundings in memory are NaN."""
    room = torch.full((shape[0], shape[1], shape[2] + 3, shape[3] + 8), float("nan"), device=DEVICE)
    room = room.bfloat16()
    view = room[:, :, 1:-2, : shape[3]]
    view.copy_(torch.randn(shape, device=DEVICE))
    return view.requires_grad_()


def small_call(backend: str, d: int, d_v: int, kind: str, deterministic: bool) -> float:
    """Forward and backward against float64; the largest difference of the largest value."""
    b, h, h_kv, n = 2, 4, 2, 203
    q, k, v = inside(b, h, n, d), inside(b, h_kv, n, d), inside(b, h_kv, n, d_v)
    options = kinds(h)[kind]

    def found(*tensors: Tensor, **chosen: Any) -> list[Tensor]:
        if kind == "packed":
            starts = torch.tensor([0, 1, 90, 90, n], dtype=torch.int32, device=DEVICE)
            flat = [t[0].transpose(0, 1) for t in tensors]
            out = tw.attention_varlen(*flat, starts, starts, **options, **chosen)
        else:
            out = tw.attention(*tensors, **options, **chosen)
        torch.manual_seed(0)
        do = torch.randn(out.shape, device=DEVICE).to(out.dtype)
        leaves = [*tensors, *(t for t in (options.get("sink"),) if t is not None)]
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]

    got = found(q, k, v, backend=backend, deterministic=deterministic)
    wanted = found(*(t.detach().double().requires_grad_() for t in (q, k, v)), backend="blockwise")
    pairs = zip(got, wanted, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)


def small(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line a small call."""
    every = [(d, dv, kind, det) for d, dv in SIZES for kind in kinds(4) for det in (False, True)]
    for d, d_v, kind, det in mine(every, options.part):
        name = f"D{d}-{d_v}-{kind}{'-exact' if det else ''}"
        try:
            yield {"cell": name, "error": round(small_call(options.backend, d, d_v, kind, det), 4)}
        except tw.UnsupportedProblem as why:
            yield {"cell": name, "refused": str(why)[:120]}


def repeated(options: argparse.Namespace, section: str) -> Iterator[dict[str, Any]]:
    """One line a cell."""
    names = options.cells.split(",") if options.cells else [c.name for c in REPEATED]
    for cell in mine([c for c in REPEATED if c.name in names], options.part):
        check = exact if section == "exact" else default
        yield {"cell": cell.name, "runs": options.runs} | check(cell, options.backend, options.runs)
        gc.collect()
        torch.cuda.empty_cache()


def mine(every: list[Any], part: str) -> list[Any]:
    """Part i of n, as "i/n" says."""
    i, n = (int(x) for x in part.split("/"))
    return every[i - 1 :: n]


def main() -> None:
    """Read the command line, call, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=["exact"], choices=("exact", "default", "small"))
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--cells", default="")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()

    def write(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")

    write({"machine": describe(), "command": "benchmarks/repeats.py " + " ".join(sys.argv[1:]),
           "when": time.strftime("%Y-%m-%d %H:%M")})  # fmt: skip
    for section in options.sections:
        for line in small(options) if section == "small" else repeated(options, section):
            write({"section": section} | line)
            if time.perf_counter() - start > options.seconds:
                print(f"{options.seconds:g} s are over")
                return


if __name__ == "__main__":
    main()
