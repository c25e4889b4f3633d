"""One query a sequence over caches, on the processor: in one piece and in scattered pages, beside SDPA over tensors in
one piece, and a few queries at once.

    OMP_PROC_BIND=true python benchmarks/cpu_cache.py [bf16 fp32 fp16] [--rows 1,8] [--quick]
        [--output benchmarks/results/cpu.jsonl]

All through their calls with outputs allocated inside, in one process, interleaved, the order changing; medians and
quartiles. `read_gbytes` is the median of what torch.sum reads, between the calls: `share` is the part of it that
keys and values come at. Every line is of one machine as it was in those seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from cpu import DTYPES, draw, machine

import tilewise as tw
from tilewise import memory
from tilewise.serving.cache import CacheView
from tilewise.serving.read import OPTIONS, attend_view

DEFAULTS = dict.fromkeys(OPTIONS) | {"k_offset": 0, "h_offset": 0, "backend": "cpu"}
CHOSEN = tuple(
    bool(DEFAULTS[n]) if n in ("batch_invariant", "allow_quadratic") else DEFAULTS[n] for n in OPTIONS
)


def scattered(k: torch.Tensor, v: torch.Tensor, size: int, lengths: torch.Tensor) -> CacheView:
    """The same keys in random pages of that size."""
    b, h, n, d = k.shape
    order = torch.randperm(b * n // size)
    pools = []
    for t in (k, v):
        pool = memory.pool((b * n // size, h, size, d), t.dtype)  # as PagedKVCache makes it
        pool[order] = t.view(b, h, n // size, size, d).transpose(1, 2).flatten(0, 1)
        pools.append(pool)
    return CacheView(*pools, lengths, order.view(b, -1).to(torch.int32), trusted=True)


def measure(name: str, b: int, n: int, rows: int, budget: float) -> dict:
    """The line of one cell."""
    q, k, v = draw(b, 32, 8, rows, n, 128, DTYPES[name])
    lengths = torch.full((b,), n, dtype=torch.int32)
    # As KVCache.allocate makes them; those of "tensors" lie as torch makes them.
    pieces = [memory.pool(t.shape, t.dtype).copy_(t) for t in (k, v)]
    views = {"one piece": CacheView(*pieces, lengths, trusted=True)}
    views |= {f"pages of {size}": scattered(k, v, size, lengths) for size in (64, 16, 1)}
    mask = tw.causal() if rows > 1 else None
    seen = torch.ones(rows, n, dtype=torch.bool).tril(n - rows) if rows > 1 else None
    spec = (mask, (), None)
    calls = {"SDPA": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True),
             "tensors": lambda: tw.attention(q, k, v, mask=mask, backend="cpu")}  # fmt: skip
    for word, view in views.items():
        calls[word] = lambda view=view: attend_view(view, q, None, spec, CHOSEN, (0.0, None), False)[0]
    want = calls["tensors"]().float()
    for word, call in calls.items():
        call()
        assert (call().float() - want).abs().max() < 2e-2, word
    plain = torch.ones(1 << 26)
    times: dict[str, list[float]] = {word: [] for word in (*calls, "read")}
    calls["read"] = plain.sum
    start, turn = time.perf_counter(), 0
    while turn < 5 or time.perf_counter() - start < budget:
        order = list(calls)
        for word in order[turn % len(order) :] + order[: turn % len(order)]:
            if word == "SDPA" and turn % 4:  # ten times as slow as the others
                continue
            before = time.perf_counter()
            calls[word]()
            times[word].append(time.perf_counter() - before)
        turn += 1
    read = plain.numel() * 4 / statistics.median(times.pop("read")) / 1e9
    found: dict = {"section": "cache", "dtype": name, "B": b, "N": n, "H": 32, "H_kv": 8, "D": 128, "rows": rows,
                   "read_gbytes": round(read, 2), "calls": {}}  # fmt: skip
    size = 2 * k.numel() * k.element_size()
    for word, seconds in times.items():
        q1, median, q3 = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        rate = size / median / 1e9
        found["calls"][word] = {"q1": q1, "median": median, "q3": q3, "runs": len(seconds),
                                "gbytes": round(rate, 2), "share": round(rate / read, 3)}  # fmt: skip
    return found


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dtypes", nargs="*", default=list(DTYPES), help=", ".join(DTYPES))
    parser.add_argument("--rows", default="1,2,4,8", help="queries of a sequence, as 1,8")
    parser.add_argument("--quick", action="store_true", help="few sizes, short budgets")
    parser.add_argument("--output", type=Path, help="JSON lines are appended here")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    command = " ".join(["OMP_PROC_BIND=true python benchmarks/cpu_cache.py", *chosen.dtypes])
    command += "" if chosen.rows == "1,2,4,8" else f" --rows {chosen.rows}"

    def write(found: dict) -> None:
        found["command"] = command + (" --quick" if chosen.quick else "")
        print(json.dumps(found), flush=True)
        if chosen.output:
            with chosen.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")

    chosen_rows = [int(n) for n in chosen.rows.split(",")]
    cells = [(1, 4096), (8, 4096)] if chosen.quick else [(1, 4096), (1, 32768), (8, 4096), (8, 32768)]
    write(machine())
    for name in chosen.dtypes:
        for b, n in cells if 1 in chosen_rows else ():
            write(measure(name, b, n, 1, 1.0 if chosen.quick else 4.0))
        for rows in [n for n in chosen_rows if n > 1]:
            write(measure(name, 1, cells[-1][1], rows, 1.0 if chosen.quick else 3.0))
    write(machine())


if __name__ == "__main__":
    main()
