"""What this machine can do, by the backend's own emitter: float32 multiply-adds, dot products of bf16 pairs, and
reading memory.

Measured in the same run as a benchmark, so that both see the same neighbours and the same clock.
"""

from __future__ import annotations

import ctypes
import time

import llvmlite.ir as ir
import torch

from tilewise.backends.cpu import machine_code, pool
from tilewise.backends.cpu.isa import Isa, detect
from tilewise.backends.cpu.pairs import Pairs
from tilewise.backends.cpu.words import I64, Words

CHAINS = 12
"""Independent sums: more than latency times issue width, fewer than registers."""
STEPS = 20_000_000


def _products(isa: Isa, pairs: bool) -> str:
    """peak(steps address): CHAINS multiply-adds a step, or dot products of bf16 pairs, in registers."""
    module = ir.Module("peak")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), "peak")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    w = Words(b, isa.lanes)
    block = function.args[0]
    steps, x = w.load(block, 0, I64), w.load(block, 64)
    dot = Pairs(isa._replace(pairs="dot")).dot
    entry, body, done = b.block, b.append_basic_block("body"), b.append_basic_block("done")
    b.branch(body)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(I64(0), entry)
    sums = [b.phi(w.f) for _ in range(CHAINS)]
    after = b.add(index, I64(1))
    for n, cell in enumerate(sums):
        cell.add_incoming(w.k(float(n)), entry)
        cell.add_incoming(dot(w, cell, x, x) if pairs else w.fma(x, x, cell), body)
    index.add_incoming(after, body)
    b.cbranch(b.icmp_signed("<", after, steps), body, done)
    b.position_at_end(done)
    total = sums[0]
    for cell in sums[1:]:
        total = b.fadd(total, cell)
    w.store(total, block, 128)
    b.ret_void()
    return machine_code.optimise(isa, module)


def _rate(threads: int, pairs: bool, repeats: int) -> float:
    """Operations a second of `threads` threads, a multiply-add counted as two; the best of `repeats`."""
    isa, name = detect(), "peak dot" if pairs else "peak"
    code = machine_code.load(isa, name, ("peak",), lambda: _products(isa, pairs))["peak"]
    block = (ctypes.c_int64 * 64)(STEPS)
    each = (4.0 if pairs else 2.0) * CHAINS * isa.lanes * STEPS
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        pool.run_parallel(code, ctypes.addressof(block), threads)
        best = max(best, each * threads / (time.perf_counter() - start))
    return best


def multiply_add_rate(threads: int, repeats: int = 3) -> float:
    """float32 operations a second of `threads` threads, a multiply-add counted as two; the best of `repeats`."""
    return _rate(threads, False, repeats)


def dot_rate(threads: int, repeats: int = 3) -> float | None:
    """bf16 operations a second by the dot products of avx512_bf16, as `multiply_add_rate`; None without them.

    On Zen 4 twice the float32 rate, on Zen 5 1.85 times it, on Emerald Rapids half of it (measured)."""
    return _rate(threads, True, repeats) if "+avx512bf16" in detect().features.split(",") else None


def read_rate(num_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes a second that torch.sum reads from memory that no cache holds; the best of `repeats`."""
    t = torch.ones(num_bytes // 4, device="cpu")
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        t.sum()
        best = max(best, num_bytes / (time.perf_counter() - start))
    return best
