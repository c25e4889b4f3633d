"""Measures tile choices of the Triton backward on this GPU and writes its tuning table.

    python benchmarks/tune.py [--only SUBSTRING] [--shard I/N] [--output FILE.json] [--log FILE.jsonl]

Every candidate of every kind of problem is timed alone (events around one kernel, after an idle pause and a kernel
that does nothing while the host prepares the launch; median of five). With --shard I/N the process only compiles
every Nth candidate, so that N processes fill Triton's cache before one that measures; what does not compile or launch
is left out. The table is `tilewise/tuning/<device>.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tilewise as tw
from tilewise import api, tuning
from tilewise.backends.triton import launch_backward
from tilewise.backends.triton.backward_tiles import choose_backward, table_keys
from tilewise.backends.triton.launch_forward import slots_of
from tilewise.backends.triton.machine import machine_of
from tilewise.backends.triton.tiles import Tiles
from tilewise.problem import decode_inputs, decode_problem

TOKENS = 16384
KEYS = {
    64: "64,64,4,3 64,64,4,3,168 64,64,4,2 64,128,8,3 128,64,4,2 32,64,4,3",
    128: "32,64,4,3 32,64,4,4 32,64,4,2 64,64,4,2 64,128,8,3 32,128,8,3",
    256: "32,64,8,2 64,64,8,2 64,64,8,1 32,128,8,1",
}
"""Candidates of the key kernel by head dimension: rows walked, keys owned, warps, stages, and the most registers of a
thread."""
APART = {256: "32,128,8,2:64,128,8,2 32,128,8,2:32,128,8,2 64,64,4,2:32,128,8,2"}
"""Candidates of the key kernel where dk and dv are launches of their own, by head dimension: dk:dv."""
ROWS = {
    64: "64,128,4,3 64,64,4,3 64,64,4,4 128,64,8,3 128,128,8,2",
    128: "128,64,8,3 128,64,8,2 64,64,4,2 64,64,4,3 64,32,4,3 64,32,4,4",
    256: "128,32,8,2 64,32,4,2 64,64,8,2 128,64,8,1",
}
"""Candidates of the row kernel: rows owned, keys walked, warps, stages."""
SWIZZLES = (1, 2, 4, 8, 16)
NOTHING = 400_000
"""Cycles that the GPU waits while the host prepares a launch."""


class Kind(NamedTuple):
    """A kind of problem to tune for: name, head dimension, options of the call."""

    name: str
    d: int
    options: dict[str, Any]


def kinds() -> list[Kind]:
    """Plain problems at each head dimension, and the features whose kernels differ most."""
    found = []
    for d in (128, 64, 256):
        found += [Kind(f"D{d}-full", d, {}), Kind(f"D{d}-causal", d, {"mask": tw.causal()})]
        found.append(Kind(f"D{d}-window1024", d, {"mask": tw.causal() & tw.window(1024, 0)}))
    strided = tw.causal() & tw.custom(lambda q, k: (q - k) % 4 < 2)
    found.append(Kind("D128-causal-strided", 128, {"mask": strided}))
    found.append(Kind("D128-causal-softcap", 128, {"mask": tw.causal(), "scores": (tw.softcap(30.0),)}))
    found.append(Kind("D128-causal-dropout", 128, {"mask": tw.causal(), "dropout": 0.1}))
    return found


def choices(text: str) -> list[tuple[Tiles, int]]:
    """Tiles and most registers of a thread (0: no bound) of each word."""
    found = []
    for word in text.split():
        numbers = [*map(int, word.split(",")), 0]
        found.append((Tiles(*numbers[:4]), numbers[4]))
    return found


def call_of(kind: Kind) -> launch_backward.Call:
    """A backward pass of the kind, its rows prepared."""
    heads = 2048 // kind.d
    q, k, v, do = (
        torch.randn(1, heads, TOKENS, kind.d, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    kept: list[Any] = []

    def keep(*written: Any) -> Any:
        kept.extend(written)
        return original(*written)

    original, api.call = api.call, keep
    try:
        with torch.no_grad():
            out, lse = tw.attention(q, k, v, backend="triton", return_lse=True, **kind.options)
    finally:
        api.call = original
    tensors, seed, numbers = kept
    problem = decode_problem(*tensors[:3], tensors[3:], numbers.text)
    inputs = decode_inputs(problem, (*tensors[:3], tensors[3:]), numbers.ints, numbers.floats, seed)
    slots = slots_of(problem, inputs)
    assert slots is not None
    call = launch_backward.Call(problem, inputs, (out, lse), (do, None), slots)
    call.prepare()
    return call


def seconds(run: Callable[[], object]) -> float:
    """Median of five launches, each after an idle pause."""
    run()
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        time.sleep(0.03)
        torch.cuda._sleep(NOTHING)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def candidates(kind: Kind) -> Iterator[tuple[str, tuple[Tiles, int]]]:
    """Every (kernel, (tiles, registers)) of a kind."""
    yield from (("triton.keys", t) for t in choices(KEYS[kind.d]))
    yield from (("triton.rows", t) for t in choices(ROWS[kind.d]))


def apart(kind: Kind) -> list[tuple[Tiles, Tiles]]:
    """Candidates of dk and dv by launches of their own."""
    pairs = (word.split(":") for word in APART.get(kind.d, "").split())
    return [(choices(dk)[0][0], choices(dv)[0][0]) for dk, dv in pairs]


def launch(
    call: launch_backward.Call, kernel: str, choice: tuple[Tiles, int], swizzle: int | None = None
) -> Callable[[], object]:
    """A call of one kernel with its second look."""
    base = choose_backward(call.problem, machine_of(call.device))
    field = "keys" if kernel == "triton.keys" else "rows"
    tiles, registers = choice
    call.tiles = base._replace(
        **{field: tiles}, swizzle=swizzle or base.swizzle, registers=registers, apart=None
    )
    call.tile_runs = None  # of other tiles
    return lambda: call.key_gradients(()) if field == "keys" else call.row_gradients((), -1, None)


def best_apart(
    call: launch_backward.Call, kind: Kind, log: Path | None
) -> tuple[float, dict[str, list[int]]]:
    """The least seconds of dk and dv made apart, and the table's entries for that."""
    found: tuple[float, dict[str, list[int]]] = (1e9, {})
    for pair in apart(kind):
        call.tiles = choose_backward(call.problem, machine_of(call.device))._replace(apart=pair)
        call.tile_runs = None
        try:
            taken = seconds(lambda: call.key_gradients(()))
        except Exception as error:  # a choice that does not fit is no candidate
            print(kind.name, "apart", pair, type(error).__name__, str(error)[:80], flush=True)
            continue
        numbers = {"triton.dk": list(pair[0][:4]), "triton.dv": list(pair[1][:4])}
        print(f"{kind.name:22s} {numbers} {taken * 1e3:.3f} ms", flush=True)
        write(log, {"kind": kind.name, "kernel": "apart", "tiles": numbers, "seconds": taken})
        found = min(found, (taken, numbers), key=lambda x: x[0])
    return found


def main() -> None:
    """Read the command line; compile, or measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--shard", default="")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    index, count = map(int, options.shard.split("/")) if options.shard else (0, 0)
    device = torch.cuda.get_device_name()
    table: dict[str, dict[str, list[int]]] = {
        "triton.keys": {},
        "triton.rows": {},
        "triton.swizzle": {},
        "triton.registers": {},
        "triton.dk": {},
        "triton.dv": {},
    }
    for number, kind in enumerate(k for k in kinds() if options.only in k.name):
        call = call_of(kind)
        key, best = table_keys(call.problem)[0], {}
        for place, (kernel, choice) in enumerate(candidates(kind)):
            if count and (place + number) % count != index:
                continue
            numbers = [*choice[0][:4], *choice[1:][: choice[1] > 0]]
            try:
                run = launch(call, kernel, choice)
                taken = seconds(run) if not count else float(run() is None)
            except Exception as error:  # a choice that does not fit is no candidate
                print(kind.name, kernel, numbers, type(error).__name__, str(error)[:80], flush=True)
                continue
            if not count:
                print(f"{kind.name:22s} {kernel} {numbers} {taken * 1e3:.3f} ms", flush=True)
                write(options.log, {"kind": kind.name, "kernel": kernel, "tiles": numbers, "seconds": taken})
                if taken < best.get(kernel, (1e9,))[0]:
                    best[kernel] = (taken, choice)
        if not count and len(best) == 2:
            table["triton.swizzle"][key] = [best_swizzle(call, best, kind, options.log)]
            for kernel, (_, (tiles, registers)) in best.items():
                table[kernel][key] = list(tiles[:4])
                if registers:
                    table["triton.registers"][key] = [registers]
            taken, entries = best_apart(call, kind, options.log)
            if taken < best["triton.keys"][0]:
                for kernel, numbers in entries.items():
                    table[kernel][key] = numbers
            save(options.output or tuning.table_path(device), device, table)


def best_swizzle(call: launch_backward.Call, best: dict[str, Any], kind: Kind, log: Path | None) -> int:
    """How many heads run side by side, measured on both kernels together."""
    found = []
    for swizzle in SWIZZLES:
        taken = sum(seconds(launch(call, kernel, choice, swizzle)) for kernel, (_, choice) in best.items())
        print(f"{kind.name:22s} swizzle {swizzle} {taken * 1e3:.3f} ms", flush=True)
        write(log, {"kind": kind.name, "swizzle": swizzle, "seconds": taken})
        found.append((taken, swizzle))
    return min(found)[1]


def write(path: Path | None, line: dict[str, Any]) -> None:
    if path:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def save(path: Path, device: str, table: dict[str, dict[str, list[int]]]) -> None:
    """The table so far, over what the file holds for other kinds and kernels."""
    import triton

    old = json.loads(path.read_text())["choices"] if path.is_file() else {}
    merged = {kernel: old.get(kernel, {}) | entries for kernel, entries in {**old, **table}.items()}
    measured = {
        "when": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "triton": triton.__version__,
        "command": "python benchmarks/tune.py", "tokens": TOKENS, "heads": "2048 / head dimension",
    }  # fmt: skip
    path.write_text(json.dumps({"device": device, "measured": measured, "choices": merged}, indent=1) + "\n")


if __name__ == "__main__":
    main()
