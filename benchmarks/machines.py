"""The four roofs of the processor this runs on: multiply-adds, exponentials, second-level cache, memory.

    python benchmarks/machines.py --name zen3 [--output benchmarks/results/machines.jsonl]

Loops in registers or in one cache, emitted by the backend's own emitter and run on its thread pool; the best of a few
repeats. One JSON line is appended. The table in tilewise/analysis/machines.py takes its measured numbers from there.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import llvmlite.ir as ir
import torch

from tilewise.backends.cpu import machine_code, pool
from tilewise.backends.cpu.isa import Isa, detect
from tilewise.backends.cpu.peaks import multiply_add_rate, read_rate
from tilewise.backends.cpu.words import I64, Words
from tilewise.cli.machine import describe

CHAINS = 8
BUFFER = 1 << 18
"""Bytes read over and over: beyond a first-level cache, within a second-level one."""
Step = Callable[[Words, list[ir.Value], ir.Value, ir.Value], list[ir.Value]]


def loop(isa: Isa, name: str, step: Step) -> str:
    """name(block): `step` on CHAINS vectors, block[0] times; block[1] is the address of a buffer."""
    module = ir.Module(name)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), name)
    b = ir.IRBuilder(function.append_basic_block("entry"))
    w = Words(b, isa.lanes)
    block = function.args[0]
    steps, buffer = w.load(block, 0, I64), w.load(block, 8, I64)
    entry, body, done = b.block, b.append_basic_block("body"), b.append_basic_block("done")
    b.branch(body)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(I64(0), entry)
    cells = [b.phi(w.f) for _ in range(CHAINS)]
    fresh = step(w, list(cells), index, buffer)
    for number, cell in enumerate(cells):
        cell.add_incoming(w.k(-0.1 * (number + 1)), entry)
        cell.add_incoming(fresh[number], body)
    after = b.add(index, I64(1))
    index.add_incoming(after, body)
    b.cbranch(b.icmp_signed("<", after, steps), body, done)
    b.position_at_end(done)
    total = fresh[0]
    for value in fresh[1:]:
        total = b.fadd(total, value)
    w.store(total, block, 128)
    b.ret_void()
    return machine_code.optimise(isa, module)


def exponentials(w: Words, cells: list[ir.Value], index: ir.Value, buffer: ir.Value) -> list[ir.Value]:
    """x <- e^x - 1.5: chains of weights that never leave the registers."""
    return [w.b.fadd(w.weight(x), w.k(-1.5)) for x in cells]


def reads(w: Words, cells: list[ir.Value], index: ir.Value, buffer: ir.Value) -> list[ir.Value]:
    """x <- x + what lies next in the buffer, round and round."""
    step = CHAINS * w.lanes * 4
    at = w.b.and_(w.b.mul(index, I64(step)), I64(BUFFER - 1))
    start = w.b.add(buffer, at)
    return [w.b.fadd(x, w.load(start, n * w.lanes * 4)) for n, x in enumerate(cells)]


def rate(name: str, step: Step, threads: int, per_step: float, steps: int, repeats: int = 5) -> float:
    """`per_step` units a step of each thread, per second; the best of `repeats`."""
    isa = detect()
    text = loop(isa, name, step)  # part of the key: the cache knows the backend's modules, not this one
    key = f"peak {hashlib.sha256(text.encode()).hexdigest()}"
    code = machine_code.load(isa, key, (name,), lambda: text)[name]
    buffer = torch.zeros(BUFFER // 4 + 1024, dtype=torch.float32)
    block = (ctypes.c_int64 * 64)(steps, buffer.data_ptr())
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        pool.run_parallel(code, ctypes.addressof(block), threads)
        best = max(best, per_step * steps * threads / (time.perf_counter() - start))
    return best


def measure(name: str) -> dict:
    """One line: the machine and its roofs."""
    threads, lanes = torch.get_num_threads(), detect().lanes
    found = {"name": name, **describe(), "load": os.getloadavg(),
             "command": f"python benchmarks/machines.py --name {name}"}  # fmt: skip
    for count in sorted({1, threads}):
        found[f"fma_gflops_{count}"] = round(multiply_add_rate(count) / 1e9, 1)
        found[f"exp_gelem_{count}"] = round(
            rate("exponentials", exponentials, count, CHAINS * lanes, 4_000_000) / 1e9, 2
        )
        found[f"cache_gbytes_{count}"] = round(
            rate("reads", reads, count, CHAINS * lanes * 4, 4_000_000) / 1e9, 1
        )
    found["read_gbytes"] = round(read_rate() / 1e9, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--name", required=True, help="what the table of machines calls it, e.g. zen3 or laptop"
    )
    parser.add_argument("--output", type=Path, help="the line is appended here")
    chosen = parser.parse_args()
    line = json.dumps(measure(chosen.name))
    print(line)
    if chosen.output:
        with chosen.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
