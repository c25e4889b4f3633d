"""Seconds of first calls: `python -m benchmarks.first_call [kind ...]`, one JSON line each.

Each is the first of its kind in this process, with empty caches: from the call to the end of its kernel. The first line
of a process holds the import of Triton and its digest of itself, too; the others are "a first call of a new kind".
kind: c, f, s (causal, full, causal with a softcap) and a head dimension, as c128, or one of `hopper_kinds.py` as
"128x128/heads/softcap, alibi" (head dimensions, form, kind). Where there is no GPU, Hopper's kernels are compiled
alone, in a process that has compiled one (tests/hopper_compile.py), `--again N` times each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import tilewise as tw

KINDS = ("c128", "c64", "c256", "f128", "f64", "f256", "s128")
TOKENS, HEADS = 1024, 4


def formula(kind: str) -> tuple[Any, tuple[Any, ...]]:
    """(mask, score terms) of a kind."""
    return (None if kind[0] == "f" else tw.causal()), ((tw.softcap(50.0),) if kind[0] == "s" else ())


def called(kind: str) -> dict[str, Any]:
    """The first call of a kind on the GPU; error: beside float64."""
    size = int(kind[1:])
    shape = (1, HEADS, TOKENS, size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask, scores = formula(kind)
    torch.cuda.synchronize()
    before = time.perf_counter()
    out = tw.attention(q, k, v, mask=mask, scores=scores, backend="hopper")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - before
    expected = tw.attention(
        *(t.double() for t in (q, k, v)), mask=mask, scores=scores, backend="naive", allow_quadratic=True
    )
    return {"seconds": round(seconds, 3), "error": float((out.double() - expected).abs().max())}


def of_the_table(kind: str) -> dict[str, Any]:
    """The first call of a kind of `hopper_kinds.py`, of zeros; kernels: how many were compiled, and the seconds of each
    step of Triton's that a compilation took."""
    from triton import knobs

    from benchmarks import hopper_kinds

    sizes, form, name = kind.split("/")
    pair, lies = tuple(map(int, sizes.split("x"))), hopper_kinds.FORMS[form]
    steps: list[dict[str, float]] = []

    def listen(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        stages = [("text", times.ir_initialization), *times.lowering_stages]
        steps.append({step: round(taken / 1e6, 2) for step, taken in stages})

    with torch.device("cuda"), mock.patch.object(knobs.compilation, "listener", listen), torch.no_grad():
        call = hopper_kinds.ready(pair, lies, *hopper_kinds.kinds(lies)[name])
        torch.cuda.synchronize()
        before = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return {"seconds": round(time.perf_counter() - before, 3), "kernels": len(steps), "steps": steps}


def compiled(kind: str) -> dict[str, Any]:
    """The kernels of a kind compiled for compute capability 9.0, side by side where they are two."""
    import hopper_compile

    shutil.rmtree(os.environ["TRITON_CACHE_DIR"], ignore_errors=True)
    size = int(kind[1:])
    mask, scores = formula(kind)
    both = (False, True) if size == 256 and mask is not None else (False,)
    before = time.perf_counter()
    with ThreadPoolExecutor(len(both)) as pool:
        list(
            pool.map(
                lambda again: hopper_compile.compile_forward((size, size), mask, scores, again=again), both
            )
        )
    return {"seconds": round(time.perf_counter() - before, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--again", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TILEWISE_CACHE_DIR": f"{folder}/tilewise"}
        gpu = torch.cuda.is_available()
        if gpu:
            torch.zeros(1, device="cuda")
            measure, name = called, torch.cuda.get_device_name()
        else:
            sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
            import hopper_compile

            hopper_compile.facts_of = lambda made: made  # the assembler would be run a second time
            hopper_compile.compile_forward((96, 96))
            measure, name = compiled, platform.processor() or platform.machine()
        for number in range(1 if gpu else chosen.again):
            for place, kind in enumerate(chosen.kinds):
                cold = gpu and not (number or place)
                about = {"kind": kind, "on": name, "process": "its first call" if cold else "has Triton"}
                found = of_the_table(kind) if "/" in kind else measure(kind)
                print(json.dumps(about | found), flush=True)


if __name__ == "__main__":
    main()
