"""Peak memory of attention beyond inputs and results, N = 1024 to 16384, forward and backward.

    python benchmarks/memory.py [--backend blockwise] [--output benchmarks/results/memory.jsonl]

One JSON line per measurement, then a line with the growth: linear growth doubles the difference between
lengths when the length doubles, quadratic growth quadruples it.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

import tilewise as tw
from tilewise.cli.memory import CallMemory, count_peak

HEADS, HEAD_DIM = 2, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384)
FEATURES = ("plain", "causal", "dropout", "terms")


def problem(name: str, n: int, device: str, grad: bool = True) -> tuple[list[torch.Tensor], dict]:
    """Inputs that take part in the gradient, and the options of a feature combination."""
    make = torch.Generator(device).manual_seed(0)
    shape = (1, HEADS, n, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=make, device=device, requires_grad=grad) for _ in range(3))
    leaves = [q, k, v]
    options: dict = {}
    if name == "causal":
        options = {"mask": tw.causal() & tw.key_padding(torch.tensor([n - 3], device=device))}
    if name == "dropout":
        options = {"dropout": 0.1, "seed": 1}
    if name == "terms":
        shapes = ((HEADS,), (HEADS, 129), (HEADS,))
        slopes, table, sink = (
            torch.rand(shape, generator=make, device=device, requires_grad=grad) for shape in shapes
        )
        leaves += [slopes, table, sink]
        options = {
            "scores": (tw.softcap(20.0), tw.alibi(slopes), tw.relative(table)),
            "sink": sink,
            "mask": tw.causal(),
        }
    return leaves, options


def measure(name: str, n: int, backend: str, device: str = "cpu") -> dict[str, CallMemory]:
    """Memory of the forward call and of the backward call alone."""
    leaves, options = problem(name, n, device)

    def forward() -> torch.Tensor:
        return tw.attention(*leaves[:3], backend=backend, **options)

    with torch.no_grad():
        measured = {"forward": count_peak(forward, device)}
    out = forward()
    do = torch.ones_like(out)
    measured["backward"] = count_peak(lambda: torch.autograd.grad(out, leaves, do, retain_graph=True), device)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="blockwise")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about = {
        "command": f"python benchmarks/memory.py --backend {options.backend} --device {options.device}",
        "machine": platform.processor() or platform.machine(), "torch": torch.__version__, "tilewise": tw.__version__,
    }  # fmt: skip
    rows = []
    for name in FEATURES:
        extra: dict[str, list[int]] = {"forward": [], "backward": []}
        for n in options.lengths:
            for way, memory in measure(name, n, options.backend, options.device).items():
                extra[way].append(memory.extra)
                matrix = HEADS * n * n * 4
                rows.append(
                    {
                        **about,
                        "case": name,
                        "pass": way,
                        "n": n,
                        "extra_bytes": memory.extra,
                        "matrix_bytes": matrix,
                    }
                )
                print(json.dumps(rows[-1]))
        for way, values in extra.items():
            steps = [b - a for a, b in zip(values, values[1:], strict=False)]
            growth = [round(b / a, 2) if a else None for a, b in zip(steps, steps[1:], strict=False)]
            rows.append({**about, "case": name, "pass": way, "growth_of_differences": growth})
            print(json.dumps(rows[-1]))
    if options.output:
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
