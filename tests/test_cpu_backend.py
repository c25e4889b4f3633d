"""The CPU backend against the reference: every schedule it has, its threads, its processes, its disk cache."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

import tilewise as tw

pytest.importorskip("numba", reason="the CPU backend needs Numba")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def draw(
    b: int, h: int, hkv: int, nq: int, nk: int, d: int, dv: int, *, dtype: torch.dtype = torch.float32
) -> tuple:
    return (
        torch.randn(b, h, nq, d).to(dtype), torch.randn(b, hkv, nk, d).to(dtype), torch.randn(b, hkv, nk, dv).to(dtype)
    )  # fmt: skip


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backward: bool = True, **options) -> None:
    """Forward and gradients agree with the reference in float64."""
    inputs = [t.clone().requires_grad_(backward) for t in (q, k, v)]
    wide = [t.double().detach().requires_grad_(backward) for t in (q, k, v)]
    out, lse = tw.attention(*inputs, backend="cpu", return_lse=True, **options)
    want, want_lse = tw.attention(*wide, backend="naive", return_lse=True, **options)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    if backward:
        do = torch.randn_like(out)
        got = torch.autograd.grad(out, inputs, do)
        for g, w in zip(got, torch.autograd.grad(want, wide, do.double()), strict=True):
            torch.testing.assert_close(g.double(), w, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 2, 64, 64, 32, 32),
        (2, 4, 2, 70, 133, 40, 24),  # ragged rows, a head size that fills no vector
        (1, 8, 2, 1, 2100, 64, 64),  # one query over a long cache: packed heads, split keys
        (1, 1, 1, 130, 1500, 33, 67),  # one head: split keys in both passes
        (1, 2, 1, 40, 70, 128, 130),  # scores in two parts, and in three
        (2, 6, 2, 5, 700, 16, 16),
    ],
)
def test_sizes(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    check(*draw(*sizes, dtype=dtype))


@pytest.mark.parametrize(
    "mask",
    [
        tw.causal(),
        tw.window(40, 0),
        tw.causal() & (tw.window(64, 0) | tw.prefix(4)),
        tw.chunk(48),
        ~tw.window(10, 10),
        tw.custom(lambda q, k: (q - k) % 3 == 0),
        tw.custom(lambda q, k: (q * 7 + k) // 5 % 2 == 0),
    ],
    ids=["causal", "window", "streaming", "chunk", "negated", "strided", "arithmetic"],
)
def test_masks(mask: tw.Mask) -> None:
    check(*draw(1, 2, 1, 150, 300, 16, 16), mask=mask)


def test_masks_from_tensors() -> None:
    q, k, v = draw(2, 4, 2, 100, 200, 16, 16)
    ids = torch.arange(200).div(70, rounding_mode="floor").expand(2, 200)
    check(q, k, v, mask=tw.document(ids[:, :100].contiguous(), ids.contiguous()))
    check(q, k, v, mask=tw.key_padding(torch.tensor([150, 33])))
    check(q, k, v, mask=torch.rand(2, 1, 100, 200) < 0.5)


@pytest.mark.parametrize("group", [1, 4])
def test_terms_and_their_gradients(group: int) -> None:
    """softcap, ALiBi, a bias over pairs, a table, a user's term: out, dq, dk, dv and the leaves' gradients."""
    q, k, v = draw(1, 4, 4 // group, 20, 90, 16, 16)
    slopes, table, bias = torch.rand(4), torch.randn(4, 17), torch.randn(1, 4, 20, 90)
    gate = torch.randn(90)

    def terms(leaves: list[torch.Tensor]) -> tuple:
        return (
            tw.softcap(5.0), tw.alibi(leaves[0]), tw.relative(leaves[1]), tw.bias(leaves[2]),
            tw.custom_score(lambda s, j, t: s + tw.tanh(s) * tw.exp2(-abs(t[j])), leaves[3]),
        )  # fmt: skip

    found = []
    for dtype, backend in ((torch.float32, "cpu"), (torch.float64, "naive")):
        leaves = [t.to(dtype).requires_grad_() for t in (slopes, table, bias, gate)]
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = tw.attention(*inputs, scores=terms(leaves), mask=tw.causal(), backend=backend)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
        found.append((out, *torch.autograd.grad(out, [*inputs, *leaves], weights)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def test_words_are_accurate_and_exact_at_the_ends() -> None:
    """tanh, exp2 and log2 of scores from tiny to huge, and -inf exactly where it belongs."""
    q = torch.ones(1, 1, 1, 1)
    k = torch.cat([torch.linspace(-140, 140, 2001), torch.tensor([0.0, 1e-30, 1e-40, 3e38])]).view(
        1, 1, -1, 1
    )
    for word in (tw.tanh, tw.exp2, tw.log2):
        term = tw.custom_score(lambda s, word=word: tw.maximum(tw.minimum(word(abs(s) * 0.5), 60.0), -60.0))
        _, got = tw.attention(q, k, k, scores=term, scale=1.0, backend="cpu", return_lse=True)
        _, want = tw.attention(
            q.double(), k.double(), k.double(), scores=term, scale=1.0, backend="naive", return_lse=True
        )
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-6)
    out, lse = tw.attention(
        q, k, k, scores=tw.custom_score(lambda s: s * 0 - math.inf), backend="cpu", return_lse=True
    )
    assert out.item() == 0.0 and lse.item() == -math.inf


@pytest.mark.parametrize("divisor", [1, -1, 2, -3, 7, 1000003, -1000003, 2**31 - 1, -(2**31), 0])
@pytest.mark.parametrize("op", ["//", "%"])
def test_division_by_one_number_rounds_down(op: str, divisor: int) -> None:
    """Positions of every size by a literal and by a number given at run time, against Python's own integers.

    With one key the lse is the score itself."""
    q, k = torch.zeros(1, 1, 200, 8), torch.zeros(1, 1, 1, 8)
    literal = eval(f"lambda s, q: s + ((q * 2) {op} ({divisor})) * 1.0")
    given = eval(f"lambda s, q: s + ((q * 2) {op} divisor) * 1.0", {"divisor": divisor})
    for offset in (-100, 2**30 - 200, -(2**30)):
        xs = [2 * (offset + i) for i in range(200)]
        whole = [0 if divisor == 0 else eval(f"x {op} divisor", {"x": x, "divisor": divisor}) for x in xs]
        want = torch.tensor([(n + 2**31) % 2**32 - 2**31 for n in whole], dtype=torch.int32).float()
        for term in (literal, given):
            _, lse = tw.attention(
                q, k, k, scores=tw.custom_score(term), q_offset=offset, backend="cpu", return_lse=True
            )
            assert torch.equal(lse[0, 0], want)


def test_dropout_has_the_bits_of_the_reference() -> None:
    q, k, v = draw(2, 3, 1, 70, 150, 16, 16)
    options = {"dropout": 0.3, "seed": 2**40 + 7, "q_offset": -3, "k_offset": -30, "h_offset": 5}
    got = tw.attention(q, k, v, backend="cpu", **options)
    want = tw.attention(q, k, v, backend="blockwise", **options)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_bits_do_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            q, k, v = (t.requires_grad_() for t in draw(1, 2, 1, 100, 3000, 24, 24))
            table = torch.randn(2, 9).requires_grad_()
            out, lse = tw.attention(
                q, k, v, scores=tw.relative(table), mask=tw.causal(), backend="cpu", return_lse=True
            )
            found.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, table))))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("heads", [(1, 1, 64), (1, 1, 101), (2, 1, 30)])
@pytest.mark.parametrize("kind", ["plain", "causal", "table"])
def test_a_block_of_rows_shared_by_threads_has_the_same_bits(heads: tuple[int, int, int], kind: str) -> None:
    """One block, cut where it would leave threads idle; with tables of classes that the host makes, too."""
    h, hkv, n = heads
    q, k, v = draw(1, h, hkv, n, 300, 40, 24)
    gate = torch.arange(400) % 7
    mask = {
        "plain": None,
        "causal": tw.causal(),
        "table": tw.custom(lambda q, k, t: t[(q * 3 + k) % 400] != 2, gate),
    }
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            found.append(tw.attention(q, k, v, mask=mask[kind], backend="cpu", return_lse=True))
    finally:
        torch.set_num_threads(before)
    want = tw.attention(*(t.double() for t in (q, k, v)), mask=mask[kind], backend="naive", return_lse=True)
    for tensors in zip(*found, want, strict=True):
        assert all(torch.equal(tensors[0], t) for t in tensors[1:-1])
        torch.testing.assert_close(tensors[0].double(), tensors[-1], atol=3e-6, rtol=3e-6)


def test_batch_invariant_bits() -> None:
    q, k, v = draw(3, 2, 2, 1, 1500, 32, 32)
    together = tw.attention(q, k, v, backend="cpu", batch_invariant=True)
    alone = tw.attention(q[1:2], k[1:2], v[1:2], backend="cpu", batch_invariant=True)
    assert torch.equal(together[1:2], alone)


def test_hidden_values_that_are_not_finite_never_matter() -> None:
    q, k, v = draw(1, 2, 2, 80, 120, 16, 16)
    mask = tw.key_padding(torch.tensor([100]))
    want = tw.attention(q, k, v, mask=mask, backend="cpu")
    k[:, :, 100:], v[:, :, 100:] = math.nan, math.inf
    assert torch.allclose(tw.attention(q, k, v, mask=mask, backend="cpu"), want, atol=1e-6)
    v[:, :, 7] = math.nan
    seen = tw.attention(q, k, v, mask=tw.window(4, 4) & mask, q_offset=0, backend="cpu").isnan().any(-1)[0, 0]
    assert seen.nonzero().flatten().tolist() == list(range(3, 12))


@pytest.mark.parametrize("rows", [3, 40, 130])  # by lanes over the head, less than a block, several blocks
@pytest.mark.parametrize("what", ["k", "bias", "exp", "sink"])
def test_every_nan_is_seen(what: str, rows: int) -> None:
    """Whatever its bits: low ones of a NaN, added to an exponent, made a number of it."""
    odd = torch.tensor([0x7FC00001, -0x3FFFFD, 0x7F800001], dtype=torch.int32).view(torch.float32)
    q, k, v = draw(1, 2, 2, rows, rows, 24, 24)
    bias, sink, options = torch.zeros(rows, rows), torch.zeros(2), {}
    for value in odd:
        if what == "k":
            k[:, :, 1, 5] = value
        elif what == "sink":
            sink[1], options = value, {"sink": sink}
        else:
            bias[rows - 1, 1] = value
            added = tw.bias(bias[None, None]) if what == "bias" else tw.custom_score(_grown, bias)
            options = {"scores": added}
        found = []
        for backend in ("cpu", "blockwise"):
            inputs = [t.clone().requires_grad_() for t in (q, k, v)]
            out, lse = tw.attention(*inputs, mask=tw.causal(), backend=backend, return_lse=True, **options)
            found.append([t.isnan() for t in (out, lse, *torch.autograd.grad(out.sum(), inputs))])
        assert found[1][0].any() and all(map(torch.equal, *found))


def _grown(s, q, k, x):
    return s + tw.exp(x[q, k])


@pytest.mark.parametrize("pool", ["openmp", "threads", "serial"])
def test_every_pool(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.cpu import pool as module

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        q, k, v = draw(1, 4, 4, 130, 130, 16, 16)
        want = tw.attention(q, k, v, backend="cpu")
        monkeypatch.setenv("TILEWISE_CPU_POOL", pool)
        if pool == "openmp" and module._gomp_parallel() is None:
            pytest.skip("torch does not run on libgomp here")
        assert module.pool_name() == pool
        assert torch.equal(tw.attention(q, k, v, backend="cpu"), want)
    finally:
        torch.set_num_threads(before)


def test_calls_from_many_threads() -> None:
    q, k, v = draw(1, 4, 2, 70, 200, 16, 16)
    want = tw.attention(q, k, v, backend="cpu")
    found: list[torch.Tensor] = []

    def work() -> None:
        with torch.inference_mode():
            found.extend(tw.attention(q, k, v, backend="cpu") for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and all(torch.equal(t, want) for t in found)


def _in_child(queue: multiprocessing.Queue, tensors: tuple) -> None:
    queue.put(tw.attention(*tensors, backend="cpu").numpy().tobytes())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_answers() -> None:
    tensors = draw(1, 4, 4, 130, 130, 16, 16)
    torch.set_num_threads(2)
    want = tw.attention(*tensors, backend="cpu")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue, tensors))
    child.start()
    found = queue.get(timeout=60)
    child.join(timeout=60)
    torch.set_num_threads(1)
    assert found == want.numpy().tobytes()


SCRIPT = """
import sys, torch, tilewise as tw
torch.manual_seed(0)
q = torch.randn(1, 2, 70, 16)
print(float(tw.attention(q, q, q, mask=tw.causal(), backend="cpu").double().sum()))
print("numba" in sys.modules)
"""


def _run(folder: str, said: bool | None = None, **environment: str) -> list[str]:
    """What SCRIPT prints; `said`: whether it speaks of compiling, in one line on stderr."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "TILEWISE_CACHE_DIR": folder, **environment},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    if said is not None:
        lines = [line for line in found.stderr.splitlines() if "compiling CPU kernels" in line]
        assert len(lines) == said, found.stderr
    return found.stdout.split()


def test_disk_cache(tmp_path) -> None:
    """A second process loads what the first compiled, without Numba; a damaged file is compiled again."""
    value, compiled = _run(str(tmp_path), said=True)
    assert compiled == "True"
    assert _run(str(tmp_path), said=False) == [value, "False"]
    for path in (tmp_path / "cpu").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    assert _run(str(tmp_path)) == [value, "True"]


def test_refusals() -> None:
    with pytest.raises(tw.UnsupportedProblem, match="float64"):
        tw.attention(*(t.double() for t in draw(1, 1, 1, 4, 4, 8, 8)), backend="cpu")
    plan = tw.explain((1, 8, 4096, 64), (1, 8, 4096, 64), (1, 8, 4096, 64), mask=tw.causal(), backend="cpu")
    assert plan.backend == "cpu" and plan.workspace_bytes < 2**23


def test_import_needs_no_numba() -> None:
    code = "import sys, tilewise; assert 'numba' not in sys.modules and 'llvmlite' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("cpu", ["haswell", "skylake-avx512", "sapphirerapids"])
def test_other_targets_compile(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec's code is emitted for vector widths this machine may not have."""
    import llvmlite.ir as ir

    from tilewise.backends.cpu import fold, machine_code
    from tilewise.backends.cpu.isa import detect
    from tilewise.backends.cpu.slots import Slots
    from tilewise.spec.attention import AttentionSpec

    monkeypatch.setenv("NUMBA_CPU_NAME", cpu)
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    isa = detect()
    if isa.arch != "x86":
        pytest.skip("an x86 target on another machine")
    spec = AttentionSpec.parse("tilewise/1|mask=causal[;0;0]{le k q}|scores=cap[;0;0]{tanh s}")
    module = ir.Module("fold")
    fold.print_fold(module, "fold_partial", isa, Slots((), (), (), 0, 0, False), False, spec, True)
    assert machine_code.assemble(isa, machine_code.optimise(isa, module))
