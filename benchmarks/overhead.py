"""Host time of a tiny call: what the Python door, the op layer and autograd cost beside the arithmetic.

    python benchmarks/overhead.py [--output benchmarks/results/overhead.jsonl]

Medians over rounds, variants interleaved in rotating order. The arithmetic (a 1 x 1 problem) is in every figure;
`bare backend` is that arithmetic alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import tilewise as tw
from tilewise import api
from tilewise.dispatch import choose
from tilewise.problem import decode_inputs, decode_problem


def variants() -> dict[str, Callable[[], object]]:
    """Named calls on one query and one key of one head."""
    q, k, v = (torch.randn(1, 1, 1, 16) for _ in range(3))
    trained = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = tw.causal()
    written = api._write((q, k, v), None, mask=None, scores=(), backend="blockwise")
    numbers = written.numbers
    problem = decode_problem(q, k, v, [], numbers.text)
    inputs = decode_inputs(problem, (q, k, v, []), numbers.ints, numbers.floats, None)
    backend = choose(problem)
    return {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
        "sdpa, autograd": lambda: F.scaled_dot_product_attention(*trained),
        "bare backend": lambda: backend.forward(problem, inputs),
        "attention": lambda: tw.attention(q, k, v, backend="blockwise"),
        "attention, autograd": lambda: tw.attention(*trained, backend="blockwise"),
        "attention, causal": lambda: tw.attention(q, k, v, mask=mask, backend="blockwise"),
        "through the registered op": lambda: torch.ops.tilewise.attention(
            q, k, v, [], list(numbers.ints), list(numbers.floats), None, numbers.text
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    calls = variants()
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for call in calls.values():
        call()
    for n in range(options.rounds):
        shift = n % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            for _ in range(50):
                calls[name]()
            times[name].append((time.perf_counter() - start) / 50 * 1e6)
    row = {
        "command": "python benchmarks/overhead.py", "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__, "tilewise": tw.__version__, "unit": "microseconds",
        "median": {name: round(statistics.median(values), 1) for name, values in times.items()},
        "least": {name: round(min(values), 1) for name, values in times.items()},
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    if options.output:
        with options.output.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
