"""The CPU backend beside F.scaled_dot_product_attention: forward, float16 beside float32, backward, decode, short
problems, features, SDPA's slow path, accuracy, start.

    OMP_PROC_BIND=true python benchmarks/cpu.py
        [forward types backward decode short features window math accuracy start]
        [--quick] [--dtypes fp32,bf16,fp16] [--dims 64,128] [--output benchmarks/results/cpu.jsonl]

Both through their public calls with outputs allocated inside, in one process, interleaved, the order
alternating; medians and quartiles. The first line holds the machine, the multiply-add peak and the reading
bandwidth measured in the same run; they are measured again at the end. Timings with other work on the machine
are not to be trusted: the load average stands in both lines. Between the calls of forward and backward the rate of
multiply-adds is measured, between those of decode that of torch.sum: "share" is the part of it that is reached, of
medians over the same seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import tilewise as tw
from tilewise.backends.cpu.peaks import dot_rate, multiply_add_rate, read_rate
from tilewise.cli.machine import describe
from tilewise.cli.memory import count_peak

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DIMS: list[int] = []
"""Head sizes of forward and backward in place of all."""
DRAWS = 1 << 15
"""Rows whose errors a line of accuracy is the mean of."""
HEADS = {128: 16, 512: 16, 1024: 8, 4096: 2, 8192: 1}


def interleave(
    calls: list[Callable[[], object]],
    budget: float,
    most: int = 41,
    beside: Callable[[], object] | None = None,
) -> list[dict[str, float]]:
    """Median and quartiles of each call in seconds, for about `budget` seconds altogether. beside: called in every
    round."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    for n in range(most):
        order = range(len(calls)) if n % 2 == 0 else reversed(range(len(calls)))
        for c in order:
            before = time.perf_counter()
            calls[c]()
            times[c].append(time.perf_counter() - before)
        if beside is not None:
            beside()
        if n >= 4 and time.perf_counter() - start > budget:
            break
    quarters = [statistics.quantiles(t, n=4) for t in times]
    return [{"q1": q[0], "median": q[1], "q3": q[2], "runs": len(times[0])} for q in quarters]


def draw(
    b: int, h: int, hkv: int, nq: int, nk: int, d: int, dtype: torch.dtype, *, grad: bool = False
) -> list[torch.Tensor]:
    """q, k and v."""
    shapes = ((b, h, nq, d), (b, hkv, nk, d), (b, hkv, nk, d))
    return [torch.randn(s).to(dtype).requires_grad_(grad) for s in shapes]


class Bound:
    """What bounds a call, measured between its runs: multiply-adds, or bytes read."""

    def __init__(self, reads: bool = False) -> None:
        self.rates: list[float] = []
        self.memory = torch.ones(1 << 25) if reads else None

    def __call__(self) -> None:
        if self.memory is None:
            self.rates.append(multiply_add_rate(torch.get_num_threads(), 1))
        else:
            before = time.perf_counter()
            self.memory.sum()
            self.rates.append(4 * self.memory.numel() / (time.perf_counter() - before))

    def add(self, found: dict, rate: float) -> dict:
        """The median, and the part of it that `rate` is."""
        median = statistics.median(self.rates)
        name = "fma_gflops" if self.memory is None else "read_gbytes"
        return found | {name: round(median / 1e9, 1), "share": round(rate / median, 3)}


def line(section: str, what: dict, times: list[dict[str, float]], flops: float = 0.0) -> dict:
    """One JSON line: SDPA, ours and their ratio."""
    sdpa, ours = times
    found = {
        "section": section,
        **what,
        "sdpa": sdpa,
        "tilewise": ours,
        "ratio": round(sdpa["median"] / ours["median"], 3),
    }
    if flops:
        found["sdpa_gflops"], found["tilewise_gflops"] = (round(flops / t["median"] / 1e9, 1) for t in times)
    return found


def forward(budget: float, quick: bool):
    """Forward over types, head sizes and lengths."""
    for name, dtype in DTYPES.items():
        for d in DIMS or ((64, 128) if quick else (32, 64, 80, 96, 128, 256)):
            for n in (512, 1024, 4096) if quick else (512, 1024, 4096, 8192):
                q, k, v = draw(1, HEADS[n], HEADS[n], n, n, d, dtype)
                for causal in (False, True):
                    mask, bound = tw.causal() if causal else None, Bound()
                    times = interleave(
                        [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),  # noqa: B023
                         lambda: tw.attention(q, k, v, mask=mask, backend="cpu")], budget, beside=bound)  # noqa: B023  # fmt: skip
                    what = {"dtype": name, "D": d, "N": n, "H": HEADS[n], "causal": causal}
                    flops = 4 * HEADS[n] * n * n * d / (2 if causal else 1)
                    yield bound.add(line("forward", what, times, flops), flops / times[1]["median"])


def types(budget: float, quick: bool):
    """The forward in float16 beside float32's in the same rounds, and no SDPA: sections by type are minutes apart."""
    for d in DIMS or ((64,) if quick else (32, 64, 80, 96, 128, 256)):
        for n in (512,) if quick else (512, 1024, 4096, 8192):
            wide = draw(1, HEADS[n], HEADS[n], n, n, d, torch.float32)
            half = [t.half() for t in wide]
            for mask in (None, tw.causal()):
                calls = [lambda x=x: tw.attention(*x, mask=mask, backend="cpu") for x in (wide, half)]  # noqa: B023
                fp32, fp16 = interleave(calls, budget, 201)
                what = {"D": d, "N": n, "H": HEADS[n], "causal": mask is not None}
                ratio = round(fp32["median"] / fp16["median"], 3)
                yield {"section": "types", **what, "fp32": fp32, "fp16": fp16, "ratio": ratio}


def backward(budget: float, quick: bool):
    """Backward alone, from a kept graph."""
    for name, dtype in DTYPES.items():
        for d in DIMS or ((64,) if quick else (64, 128)):
            for n in (1024,) if quick else (1024, 4096):
                inputs = draw(1, HEADS[n], HEADS[n], n, n, d, dtype, grad=True)
                for causal in (False, True):
                    outs = [F.scaled_dot_product_attention(*inputs, is_causal=causal),
                            tw.attention(*inputs, mask=tw.causal() if causal else None, backend="cpu")]  # fmt: skip
                    do, bound = torch.randn_like(outs[0]), Bound()
                    times = interleave(
                        [lambda o=o: torch.autograd.grad(o, inputs, do, retain_graph=True) for o in outs],  # noqa: B023
                        budget, beside=bound)  # fmt: skip
                    what = {"dtype": name, "D": d, "N": n, "H": HEADS[n], "causal": causal}
                    flops = 10 * HEADS[n] * n * n * d / (2 if causal else 1)
                    yield bound.add(line("backward", what, times, flops), flops / times[1]["median"])


def decode(budget: float, quick: bool):
    """One query of 32 heads over a cache of 8."""
    for name, dtype in DTYPES.items():
        for b in (1,) if quick else (1, 8):
            for n in (4096,) if quick else (4096, 32768):
                (q, k, v), bound = draw(b, 32, 8, 1, n, 128, dtype), Bound(reads=True)
                times = interleave(
                    [lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),  # noqa: B023
                     lambda: tw.attention(q, k, v, backend="cpu")], budget, beside=bound)  # noqa: B023  # fmt: skip
                found = line("decode", {"dtype": name, "B": b, "N": n, "H": 32, "H_kv": 8, "D": 128}, times)
                rate = 2 * k.numel() * k.element_size() / times[1]["median"]
                yield bound.add(found | {"tilewise_gbytes": round(rate / 1e9, 2)}, rate)


def short(budget: float, quick: bool):
    """Short problems, where the call itself counts."""
    for name in [name for name in ("fp32", "bf16") if name in DTYPES]:
        for n in (1, 16, 32, 64, 128):
            for h in (1, 8):
                q, k, v = draw(1, h, h, n, n, 64, DTYPES[name])
                times = interleave(
                    [lambda: F.scaled_dot_product_attention(q, k, v), lambda: tw.attention(q, k, v, backend="cpu")],  # noqa: B023
                    budget, 1001)  # fmt: skip
                yield line("short", {"dtype": name, "N": n, "H": h, "D": 64}, times)


def features(budget: float, quick: bool):
    """Speed per visible pair beside the plain kernel: "sdpa" stands for the plain call here."""
    n, h = (2048, 2) if quick else (4096, 2)
    q, k, v = draw(1, h, h, n, n, 64, torch.float32)
    half = torch.rand(n, n) < 0.5
    ids = torch.arange(n).div(512, rounding_mode="floor").view(1, n)
    cases = {
        "causal": ({"mask": tw.causal()}, 0.5),
        "window256": ({"mask": tw.window(255, 0)}, 256 / n),
        "document512": ({"mask": tw.document(ids)}, 512 / n),
        "dense": ({"mask": half}, 1.0),
        "alibi": ({"scores": tw.alibi(tw.alibi_slopes(h))}, 1.0),
        "integer": ({"mask": tw.custom(lambda q, k: (q - k) % 3 != 1)}, 1.0),
        "softcap": ({"scores": tw.softcap(20.0)}, 1.0),
        "exp2": ({"scores": tw.custom_score(lambda s: s - tw.exp2(-abs(s)))}, 1.0),
        "relative": ({"scores": tw.relative(torch.randn(h, 129))}, 1.0),
        "bias": ({"scores": tw.bias(torch.randn(1, h, n, n))}, 1.0),
        "padding": ({"mask": tw.key_padding(torch.ones(1, n, dtype=torch.bool))}, 1.0),
        "dropout": ({"dropout": 0.1, "seed": 1}, 1.0),
    }
    for name, (options, share) in cases.items():
        times = interleave(
            [lambda: tw.attention(q, k, v, backend="cpu"), lambda: tw.attention(q, k, v, backend="cpu", **options)],  # noqa: B023
            budget)  # fmt: skip
        found = line(
            "features", {"feature": name, "N": n, "H": h, "D": 64, "visible": round(share, 4)}, times
        )
        found["per_visible_pair"] = round(found["ratio"] * share, 3)
        yield found


def window(budget: float, quick: bool):
    """A window of 256 keys beside full attention of the same length, which stands in for "sdpa" here."""
    n = 2048 if quick else 8192
    q, k, v = draw(1, 1, 1, n, n, 64, torch.float32)
    times = interleave(
        [lambda: tw.attention(q, k, v, backend="cpu"),
         lambda: tw.attention(q, k, v, mask=tw.window(255, 0), backend="cpu")], budget)  # fmt: skip
    yield line("window", {"dtype": "fp32", "N": n, "H": 1, "D": 64, "window": 256}, times)


def math_cases(dtype: torch.dtype, n: int, h: int) -> dict[str, tuple]:
    """Calls for which SDPA builds the matrix: (what gets a gradient, SDPA's forward, ours)."""
    sdpa, ours = F.scaled_dot_product_attention, tw.attention
    q, k, v = draw(1, h, h, n, n, 64, dtype, grad=True)
    narrow = v[..., :32].detach().clone().requires_grad_()
    shared, each = (torch.randn(s).to(dtype).requires_grad_() for s in ((n, n), (1, h, n, n)))
    return {
        "dropout": ((q, k, v), lambda: sdpa(q, k, v, dropout_p=0.1), lambda: ours(q, k, v, dropout=0.1, seed=1)),
        "D_v 32": ((q, k, narrow), lambda: sdpa(q, k, narrow), lambda: ours(q, k, narrow)),
        "mask of all heads": ((q, k, v, shared), lambda: sdpa(q, k, v, attn_mask=shared),
                              lambda: ours(q, k, v, scores=tw.bias(shared))),
        "mask of each head": ((q, k, v, each), lambda: sdpa(q, k, v, attn_mask=each),
                              lambda: ours(q, k, v, scores=tw.bias(each))),
    }  # fmt: skip


def math(budget: float, quick: bool):
    """Where SDPA builds the matrix. Time and the most that is allocated, the result left out, of the forward call (what
    it keeps for the backward counts) and of forward with backward."""
    n, h = (1024, 2) if quick else (4096, 2)
    for name in [name for name in ("fp32", "bf16") if name in DTYPES]:
        for case, (leaves, *forwards) in math_cases(DTYPES[name], n, h).items():
            do = torch.randn_like(forwards[0]())
            both = [lambda c=c: torch.autograd.grad(c(), leaves, do) for c in forwards]  # noqa: B023
            for way, calls, results in (("forward", forwards, [do]), ("forward and backward", both, leaves)):
                what = {"dtype": name, "case": case, "pass": way, "N": n, "H": h, "D": 64}
                found = line("math", what, interleave(calls, budget, 7))
                size = sum(t.numel() * t.element_size() for t in results)
                peaks = [round((count_peak(call).peak - size) / 2**20, 2) for call in calls]
                found["sdpa_mib"], found["tilewise_mib"] = peaks
                yield found


def errors(dtype: torch.dtype, n: int, d: int, causal: bool) -> list[dict[str, list[float]]]:
    """rms and largest error of out, dq, dk and dv against float64 from the same rounded inputs: SDPA's, then ours."""
    inputs = draw(1, 1, 1, n, n, d, dtype, grad=True)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    do, found = torch.randn(1, 1, n, d).to(dtype), []
    mask = tw.causal() if causal else None
    for out, leaves in (
        (F.scaled_dot_product_attention(*wide, is_causal=causal), wide),
        (F.scaled_dot_product_attention(*inputs, is_causal=causal), inputs),
        (tw.attention(*inputs, mask=mask, backend="cpu"), inputs),
    ):
        found.append([t.double() for t in (out, *torch.autograd.grad(out, leaves, do.to(out.dtype)))])
    want, *results = found
    gaps = [[(got - true).abs() for got, true in zip(one, want, strict=True)] for one in results]
    return [
        {"rms": [float(g.square().mean().sqrt()) for g in one], "max": [float(g.max()) for g in one]}
        for one in gaps
    ]


def accuracy(budget: float, quick: bool):
    """Errors beside those of SDPA, each the mean over some draws, and the largest ratio over out and gradients.

    A largest error is one number of a draw: a mean of eight came out at 0.93 to 1.52 of SDPA's in one cell."""
    sizes = ((512, 64), (1024, 32), (1024, 128), (1024, 256), (2048, 64), (4096, 64))
    for name, dtype in DTYPES.items():
        for n, d in sizes[:1] if quick else sizes:
            for causal in (False, True):
                draws = [errors(dtype, n, d, causal) for _ in range(1 if quick else DRAWS // n)]
                found: dict = {"section": "accuracy", "dtype": name, "N": n, "D": d, "H": 1, "causal": causal}
                found["draws"] = len(draws)
                for kind in ("rms", "max"):
                    sdpa, ours = (
                        [
                            statistics.fmean(one)
                            for one in zip(*(pair[who][kind] for pair in draws), strict=True)
                        ]
                        for who in (0, 1)
                    )
                    found[f"sdpa_{kind}"], found[f"tilewise_{kind}"] = (
                        dict(zip(("out", "dq", "dk", "dv"), (float(f"{e:.3g}") for e in side), strict=True))
                        for side in (sdpa, ours)
                    )
                    found[f"{kind}_ratio"] = round(max(o / s for o, s in zip(ours, sdpa, strict=True)), 3)
                yield found


FIRST_CALLS = """
import json, sys, time
start = time.perf_counter()
import torch, tilewise as tw
found = {"import_s": time.perf_counter() - start}
dtype = getattr(torch, sys.argv[1])
q = torch.randn(1, 4, 256, 64, dtype=dtype, requires_grad=True)
k = torch.randn(1, 2, 256, 64, dtype=dtype, requires_grad=True)
def measure(name, call):
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    found[name + "_s"], found[name + "_cpu_s"] = time.perf_counter() - wall, time.process_time() - cpu
    return result
out = measure("forward", lambda: tw.attention(q, k, k, mask=tw.causal(), backend="cpu"))
measure("backward", lambda: out.sum().backward())
with torch.no_grad():
    measure("decode", lambda: tw.attention(q[:, :, :1], k, k, backend="cpu"))
print(json.dumps({name: round(value, 3) for name, value in found.items()}))
"""


def start(budget: float, quick: bool):
    """The first calls of a process: with nothing compiled, then with everything on disk."""
    for dtype in ("float32",) if quick else ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                done = subprocess.run(
                    [sys.executable, "-c", FIRST_CALLS, dtype], env={**os.environ, "TILEWISE_CACHE_DIR": folder},
                    capture_output=True, text=True, check=True)  # fmt: skip
                yield {"section": "start", "dtype": dtype, "process": kind, **json.loads(done.stdout)}


def machine() -> dict:
    """The machine and its peaks now."""
    threads = torch.get_num_threads()
    dots = dot_rate(threads)
    return {
        "section": "machine", **describe(), "load": os.getloadavg(),
        "fma_gflops_1": round(multiply_add_rate(1) / 1e9, 1),
        f"fma_gflops_{threads}": round(multiply_add_rate(threads) / 1e9, 1), "read_gbytes": round(read_rate() / 1e9, 2),
        **({f"dot_gflops_{threads}": round(dots / 1e9, 1)} if dots else {}),
    }  # fmt: skip


def main() -> None:
    """Parse, measure, write."""
    sections = {
        "forward": forward,
        "types": types,
        "backward": backward,
        "decode": decode,
        "short": short,
        "features": features,
        "window": window,
        "math": math,
        "accuracy": accuracy,
        "start": start,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=list(sections), help=", ".join(sections))
    parser.add_argument("--quick", action="store_true", help="few sizes, short budgets")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="element types, fp32,bf16,fp16")
    parser.add_argument("--dims", help="head sizes of forward and backward, as 64,128")
    parser.add_argument("--output", type=Path, help="JSON lines are appended here")
    chosen = parser.parse_args()
    DIMS.extend(map(int, filter(None, (chosen.dims or "").split(","))))
    for name in DTYPES.keys() - set(chosen.dtypes.split(",")):
        del DTYPES[name]
    torch.manual_seed(0)

    def write(found: dict) -> None:
        print(json.dumps(found), flush=True)
        if chosen.output:
            with chosen.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")

    write(machine())
    for name in chosen.sections:
        for found in sections[name](0.3 if chosen.quick else 1.5, chosen.quick):
            write(found)
    write(machine())


if __name__ == "__main__":
    main()
