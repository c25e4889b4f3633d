"""Targets and pools of the CPU backend: bf16 as pairs, narrower and other processors, plain threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import pytest
import torch

import tilewise as tw

pytest.importorskip("numba", reason="the CPU backend needs Numba")

WIDE = "+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx512bf16"


def run(script: str, **environment: str) -> str:
    """What a fresh process prints."""
    found = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


# ---- bf16 as pairs -----------------------------------------------------------------------------------------------


@pytest.fixture
def plain_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops and layouts of the tile registers, with products that any processor has."""
    from tilewise import quick
    from tilewise.backends.cpu.isa import detect

    monkeypatch.setenv("TILEWISE_CPU_BF16", "plain")
    if detect().pairs != "plain":
        pytest.skip("this processor takes no compiled code")
    quick.ready.clear()
    yield
    quick.ready.clear()


SIZES = [
    (1, 2, 2, 64, 64, 32, 32),
    (2, 4, 2, 70, 133, 40, 24),  # ragged groups of keys, head sizes that fill no group
    (1, 1, 1, 130, 1500, 33, 67),  # split keys, several super-blocks
    (1, 4, 1, 3, 40, 5, 7),  # packed heads; smaller than every unit
    (2, 4, 2, 2, 9, 16, 24),  # few rows and keys: lanes over the head instead
    (1, 2, 2, 100, 70, 32, 40),  # two blocks of rows: v is turned by each
]
OPTIONS: dict[str, dict] = {
    "plain": {},
    "causal": {"mask": tw.causal()},
    "negative scale": {"scale": -0.3, "mask": tw.window(20, 3)},
    "terms": {"scores": tw.softcap(3.0), "mask": tw.causal()},
    "dropout": {"dropout": 0.2, "seed": 3},
    "hidden rows": {"mask": tw.causal(), "q_offset": -9},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_pairs(sizes: tuple[int, ...], options: str, plain_pairs: None) -> None:
    """out, lse and gradients from bf16 pairs, within bf16's rounding of the same inputs in float64."""
    b, h, hkv, nq, nk, d, dv = sizes
    shapes = ((b, h, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv))
    inputs = [torch.randn(s).bfloat16().requires_grad_() for s in shapes]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    do = torch.randn(b, h, nq, dv).bfloat16()
    found = []
    for tensors, backend in ((inputs, "cpu"), (wide, "naive")):
        out, lse = tw.attention(*tensors, backend=backend, return_lse=True, **OPTIONS[options])
        loss = (out.double() * do).sum() + torch.where(lse.isfinite(), lse, 0.0).double().sum()
        found.append((out, torch.where(lse.isfinite(), lse, 0.0), *torch.autograd.grad(loss, tensors)))
    for n, (got, want) in enumerate(zip(*found, strict=True)):
        bound = 1e-5 if n == 1 else 1e-2
        largest = want.abs().max().clamp_min(1e-3)
        assert ((got.double() - want).abs().max() / largest) < bound


def test_pairs_of_packed_sequences(plain_pairs: None) -> None:
    """Sequences of many lengths, an empty one and rows beyond the used ones, in one call."""
    lengths = [5, 0, 70, 131, 32]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    used = torch.tensor([5, 0, 64, 100, 1], dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths), 2, 48).bfloat16().requires_grad_() for _ in range(3))
    do = torch.randn(sum(lengths), 2, 48).bfloat16()
    found = []
    for backend in ("cpu", "naive"):
        out = tw.attention_varlen(q, k, v, cu, seqused_k=used, mask=tw.causal(), backend=backend)
        found.append((out, *torch.autograd.grad(out, (q, k, v), do)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)


def test_explain_counts_what_pairs_need(plain_pairs: None) -> None:
    """The plan has the block of keys of pairs, and a workspace with v turned once for all."""
    q = torch.empty(1, 8, 4096, 64, dtype=torch.bfloat16)
    plan = tw.explain(q, q, q, backend="cpu")
    assert "64 x 128" in str(plan) and plan.workspace_bytes >= q.numel() * 2


def test_pairs_hide_what_is_not_finite(plain_pairs: None) -> None:
    q, k, v = (torch.randn(1, 2, 100, 40).bfloat16() for _ in range(3))
    mask = tw.key_padding(torch.tensor([90]))
    want = tw.attention(q, k, v, mask=mask, backend="cpu")
    k[:, :, 90:], v[:, :, 90:] = float("nan"), float("inf")
    torch.testing.assert_close(tw.attention(q, k, v, mask=mask, backend="cpu"), want, atol=2e-2, rtol=2e-2)


PRODUCT = """
import re
import llvmlite.binding as llvm
from numba import njit
from tilewise.backends.cpu import machine_code
from tilewise.backends.cpu.isa import detect
from tilewise.backends.cpu.pairs import Pairs
isa = detect()
pairs = Pairs(isa)
block, begin, end = pairs.block(True), pairs.configure, pairs.release
def entry(a):
    begin(0)
    block(a, 64, 64, a, 256, a, a, 256, a)
    end(0)
text = machine_code.numba_text(isa, entry)
lines = machine_code._target(isa).emit_assembly(llvm.parse_assembly(text)).splitlines()
labels, inner = {line.split(":")[0]: n for n, line in enumerate(lines) if line.startswith(".L")}, []
for n, line in enumerate(lines):
    jump = re.match(r"\\s+j\\w+\\s+(\\.L\\w+)", line)
    start = labels.get(jump.group(1), n) if jump else n
    body = lines[start : n + 1]
    if start < n and not any(x.startswith(".L") for x in body[1:]):
        inner.append(body)
print(isa.pairs)
for body in inner:
    for word in ("tdpbf16ps", "vdpbf16ps", "rsp"):
        print(word, sum(word in x for x in body), end=" ")
    print()
"""


@pytest.mark.parametrize(
    ("cpu", "more", "way", "word", "least"),
    [
        ("sapphirerapids", ",+amx-tile,+amx-bf16", "amx", "tdpbf16ps", 4),
        ("znver4", "", "dot", "vdpbf16ps", 24),
    ],
)
def test_products_of_pairs_compile(cpu: str, more: str, way: str, word: str, least: int) -> None:
    """The inner loop of each kind of product holds its instruction and keeps nothing on the stack."""
    import platform

    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("an x86 target on another machine")
    told, *loops = run(PRODUCT, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=WIDE + more).splitlines()
    counts = [dict(zip(line.split()[::2], map(int, line.split()[1::2]), strict=True)) for line in loops]
    assert told == way
    assert max(c[word] for c in counts) >= least
    assert all(c["rsp"] == 0 for c in counts if c[word])


# ---- partial results and packed sequences ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partial_of_two_byte_types(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of the keys, merged, and their backward, without the reference: out and gradients of the whole."""
    from tilewise.backends.reference.blockwise import Blockwise

    q, k, v = (torch.randn(1, 2, 70, 24).to(dtype).requires_grad_() for _ in range(3))
    do = torch.randn(1, 2, 70, 24)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = tw.attention(*wide, mask=tw.window(50, 50), q_offset=0, backend="naive")
    want_grads = torch.autograd.grad(want, wide, do.double())
    for name in ("forward", "backward"):
        monkeypatch.setattr(Blockwise, name, lambda *a: pytest.fail("the reference was asked"))
    options = {"mask": tw.window(50, 50), "q_offset": 0, "backend": "cpu"}
    parts = [
        tw.attention_partial(q, k[:, :, s], v[:, :, s], k_offset=s.start, **options)
        for s in (slice(0, 40), slice(40, 70))
    ]
    out = tw.merge(*parts).out
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
    for got, expected in zip(torch.autograd.grad(out, (q, k, v), do), want_grads, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("hole", ["none", "used", "tokens outside", "no keys"])
def test_packed_sequences_fill_everything(hole: str, poisoned_memory: None) -> None:
    """Rows and keys that no sequence takes are 0 (lse -inf), on memory that was never cleared."""
    cu_q, cu_k, used = [0, 20, 50, 130], [0, 20, 50, 130], None
    if hole == "used":
        used = torch.tensor([20, 7, 80], dtype=torch.int32)
    elif hole == "tokens outside":
        cu_q, cu_k = [0, 20, 50, 100], [3, 20, 50, 100]
    elif hole == "no keys":
        cu_q, cu_k = [0, 20, 50, 130], [0, 20, 20, 130]
    q, k, v = (torch.randn(130, 2, 16).requires_grad_() for _ in range(3))
    found = []
    for backend in ("cpu", "naive"):
        out, lse = tw.attention_varlen(
            q, k, v, torch.tensor(cu_q).int(), torch.tensor(cu_k).int(), seqused_q=used, seqused_k=used,
            mask=tw.causal(), backend=backend, return_lse=True,
        )  # fmt: skip
        found.append((out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


# ---- other processors --------------------------------------------------------------------------------------------

AVX2 = "+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"
SAMPLE = """
import sys, torch
from tilewise.backends.cpu.isa import detect
from tilewise.testing.cases import all_cases
from tilewise.testing.conformance import run_case
from tilewise.testing.poison import poisoned_memory
torch.set_num_threads(1)
isa, step = detect(), int(sys.argv[1])
print(isa.cpu, isa.lanes)
for dtype in (torch.float32, torch.bfloat16)[: 1 if step > 50 else 2]:
    for case in [case for case in all_cases() if case.dtype == dtype][::step]:
        with poisoned_memory():
            run_case(case, "cpu", "cpu")
print("done")
"""
FORCED = [("haswell", AVX2, 8, 12), ("generic", AVX2, 8, 80), ("x86-64-v4", WIDE.rsplit(",", 1)[0], 16, 12)]
"""CPU name, features, lanes of the code, and every how many cases of the suite are run."""


@pytest.mark.parametrize(("cpu", "features", "lanes", "step"), FORCED, ids=[target[0] for target in FORCED])
def test_a_sample_of_the_suite_on_forced_targets(cpu: str, features: str, lanes: int, step: int) -> None:
    """Targets that this processor can run, by their names: every feature's cases, forward and gradients."""
    import llvmlite.binding as llvm

    have = {name for name, there in llvm.get_host_cpu_features().items() if there}
    if not {name.lstrip("+") for name in features.split(",")} <= have:
        pytest.skip("this processor lacks an instruction of the target")
    script = f"import sys; sys.argv = ['', '{step}']\n{SAMPLE}"
    told, done = run(script, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features).split("\n", 1)
    assert told == f"{cpu} {lanes}" and "done" in done


UNKNOWN = """
import warnings, torch, tilewise as tw
q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    got = tw.attention(q, k, v, mask=tw.causal())
want = tw.attention(*(t.double() for t in (q, k, v)), mask=tw.causal(), backend="naive")
print(float((got - want).abs().max()) < 1e-5)
try:
    tw.attention(q, k, v, backend="cpu")
except tw.UnsupportedProblem as error:
    print(error)
"""


@pytest.mark.parametrize("cpu", ["x86-64", "no-such-processor"])
def test_an_unknown_processor_gets_right_answers(cpu: str) -> None:
    """Without AVX2, and by a name that nobody knows: the reference's answer, and the reason named."""
    features = {"NUMBA_CPU_FEATURES": "+sse2"} if cpu == "x86-64" else {}
    right, refusal = run(UNKNOWN, NUMBA_CPU_NAME=cpu, **features).split("\n", 1)
    assert right == "True"
    assert "AVX2" in refusal and cpu in refusal


def test_neon_code() -> None:
    """The microkernels and a fold for 64-bit ARM: fused multiply-adds, nothing on the stack in the inner loop."""
    import llvmlite.binding as llvm
    import llvmlite.ir as ir
    from numba.core import types

    from tilewise.backends.cpu.isa import _isa
    from tilewise.backends.cpu.micro import Micro

    features = (("fullfp16", True), ("neon", True))
    isa = _isa("cortex-a76", features, "aarch64", "", False)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    try:
        target = llvm.Target.from_triple(triple).create_target_machine(
            cpu=isa.cpu, features=isa.features, opt=3
        )
    except RuntimeError:
        pytest.skip("this LLVM has no ARM target")
    micro = Micro(isa, "fp32")
    module = ir.Module("neon")
    module.triple = triple
    for name, count, word in (
        ("product", 10, micro.product(6, 4, "scaled")),
        ("exponentials", 6, micro.exponentials()),
    ):
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count), name)
        builder = ir.IRBuilder(function.append_basic_block())
        _, emit = word._defn(None, *[types.int64] * count)

        class Context:
            get_dummy_value = staticmethod(lambda: None)

        emit(Context, builder, None, function.args)
        builder.ret_void()
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    text = target.emit_assembly(parsed)
    assert len(re.findall(r"\bfmla\b", text)) >= 24
    loops = re.findall(r"^(\.LBB\w+):[^\n]*\n((?:(?!^\.LBB).*\n)*?)\s+b\.\w+\s+\1\s*$", text, re.M)
    inner = [body for _, body in loops if "fmla" in body]
    assert inner and not any("[sp" in body for body in inner)


# ---- threads -----------------------------------------------------------------------------------------------------


@pytest.fixture
def plain_threads(monkeypatch: pytest.MonkeyPatch):
    """As where torch's OpenMP is not found."""
    from tilewise import quick

    monkeypatch.setenv("TILEWISE_CPU_POOL", "threads")
    before = torch.get_num_threads()
    quick.ready.clear()
    yield
    torch.set_num_threads(before)
    quick.ready.clear()


def _draw() -> list[torch.Tensor]:
    return [torch.randn(1, 4, 130, 16) for _ in range(3)]


def test_plain_threads_respect_the_setting(plain_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many calls of the worker as torch has threads, the same bits for each, also in inference mode."""
    from tilewise.backends.cpu import pool

    tensors, used = _draw(), []
    real = pool.run_parallel
    monkeypatch.setattr(
        pool, "run_parallel", lambda f, p, threads: (used.append(threads), real(f, p, threads))[1]
    )
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(tw.attention(*tensors, backend="cpu"))
        with torch.inference_mode():
            found.append(tw.attention(*tensors, backend="cpu"))
    assert all(torch.equal(found[0], t) for t in found)
    assert {2, 3} <= set(used)


def test_plain_threads_serve_many_callers(plain_threads: None) -> None:
    """Calls from more threads than the pool's own finish, each with the right answer."""
    torch.set_num_threads(3)
    tensors, found = _draw(), []
    want = tw.attention(*tensors, backend="cpu")
    callers = [
        threading.Thread(target=lambda: found.extend(tw.attention(*tensors, backend="cpu") for _ in range(5)))
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert len(found) == 40 and all(torch.equal(t, want) for t in found)


WORKERS = """
import torch, tilewise as tw
torch.manual_seed(0)
torch.set_num_threads(2)
tensors = [torch.randn(1, 4, 130, 16) for _ in range(3)]
want = tw.attention(*tensors, backend="cpu")
class Answers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, n):
        return tw.attention(*tensors, backend="cpu")
found = list(torch.utils.data.DataLoader(Answers(), batch_size=None, num_workers=2, timeout=60))
print(len(found), all(torch.equal(t, want) for t in found))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("pool", ["openmp", "threads"])
def test_data_loader_workers(pool: str) -> None:
    """Workers forked after the pool was used answer, and never wait for threads that are not there."""
    assert run(WORKERS, TILEWISE_CPU_POOL=pool).split() == ["4", "True"]
