"""The CPU backend's decode and the leaves it reads along the keys, against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise as tw
from tilewise.backends.reference.blockwise import Blockwise
from tilewise.problem import Inputs, Problem

pytest.importorskip("numba", reason="the CPU backend needs Numba")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def draw(
    b: int, h: int, hkv: int, nq: int, nk: int, d: int, dv: int, *, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    shapes = ((b, h, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def check(tensors: list[torch.Tensor], **options) -> None:
    """out and lse agree with the reference in float64."""
    out, lse = tw.attention(*tensors, backend="cpu", return_lse=True, **options)
    want, want_lse = tw.attention(*(t.double() for t in tensors), backend="naive", return_lse=True, **options)
    tolerance = TOLERANCE[tensors[0].dtype]
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.fixture
def no_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that falls back to the reference fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("the call was done again by the reference")

    monkeypatch.setattr(Blockwise, "forward", refuse)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 8, 2, 1, 2100, 64, 64),  # a group of four shares each vector of k
        (2, 4, 4, 1, 300, 40, 24),  # one row a head, sizes of no whole vector
        (1, 6, 2, 1, 777, 33, 67),  # three rows, an odd number of numbers
        (1, 5, 1, 1, 100, 16, 16),  # five rows: four and one
        (2, 8, 2, 4, 1000, 128, 96),  # sixteen rows
        (1, 3, 3, 5, 129, 20, 9),
    ],
)
def test_sizes(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = draw(*sizes, dtype=dtype)
    check(tensors)
    check(tensors, mask=tw.causal())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("group, d", [(4, 128), (1, 72), (5, 20), (4, 256)])
def test_keys_of_no_whole_turn(group: int, d: int, dtype: torch.dtype) -> None:
    """Keys are met four at a time, in spans, in blocks: every length around their ends."""
    for keys in (64, 65, 66, 67, 71, 72, 73, 79, 95, 97, 127, 129, 255, 258):
        check(draw(1, 2 * group, 2, 1, keys, d, d, dtype=dtype))


@pytest.mark.usefixtures("no_second_run")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("group", [1, 3, 4, 6, 16])
def test_heads_that_are_met_key_by_key(group: int, dtype: torch.dtype) -> None:
    """Heads of 128 have a loop of their own: alone, in groups of four and what is left of them, at ends of blocks."""
    for keys in (64, 131, 255, 256, 257, 515):
        check(draw(2, 2 * group, 2, 1, keys, 128, 128, dtype=dtype))
    check(draw(1, 2 * group, 2, 1, 1100, 128, 80, dtype=dtype), mask=tw.window(700, 0))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 2])
def test_largest_score_rises_with_every_block(rows: int, dtype: torch.dtype) -> None:
    """What was summed before is made smaller once a block, however many spans of keys the block has."""
    q, k, v = draw(1, 8, 2, rows, 1000, 128, 128, dtype=dtype)
    q = q.abs()
    k = (torch.linspace(0.0, 0.4, 1000).view(1, 1, -1, 1) + 0.01 * k.float()).to(dtype).expand(1, 2, -1, -1)
    check([q, k, v + 3])


def test_features() -> None:
    tensors = draw(2, 8, 2, 2, 900, 32, 32)
    check(tensors, mask=tw.window(100, 0))
    check(tensors, mask=tw.key_padding(torch.tensor([700, 3])))
    check(tensors, mask=torch.rand(2, 1, 2, 900) < 0.3)
    check(tensors, mask=tw.causal(), q_offset=torch.tensor([5, 880]))
    check(
        tensors, scores=(tw.alibi(tw.alibi_slopes(8)), tw.softcap(5.0)), mask=tw.causal(), sink=torch.randn(8)
    )


def test_dropout_has_the_bits_of_the_reference() -> None:
    tensors = draw(2, 8, 2, 2, 500, 32, 32)
    options = {"dropout": 0.3, "seed": 2**40 + 7, "q_offset": -3, "k_offset": -30, "h_offset": 5}
    got = tw.attention(*tensors, backend="cpu", **options)
    torch.testing.assert_close(
        got, tw.attention(*tensors, backend="blockwise", **options), atol=2e-5, rtol=2e-5
    )


def test_strides_of_a_cache() -> None:
    """(B, N, H, D) caches, and a slice of a longer one, are read where they lie."""
    q = torch.randn(2, 1, 8, 64).transpose(1, 2)
    cache = torch.randn(2, 2, 700, 2, 64)
    k, v = cache[0, :, :601].transpose(1, 2), cache[1, :, :601].transpose(1, 2)
    check([q, k, v])


@pytest.mark.usefixtures("no_second_run")
def test_padding_that_is_not_finite_costs_nothing() -> None:
    """What lies past the lengths of a cache may be anything, inside the last block too: it is not read."""
    q, k, v = draw(2, 8, 2, 1, 700, 32, 32)
    lengths = tw.key_padding(torch.tensor([600, 129]))
    want = tw.attention(q, k, v, mask=lengths, backend="cpu")
    for b, length in enumerate((600, 129)):
        k[b, :, length:], v[b, :, length:] = math.nan, math.inf
    assert torch.equal(tw.attention(q, k, v, mask=lengths, backend="cpu"), want)


def test_a_value_that_is_not_finite_reaches_who_sees_it() -> None:
    q, k, v = draw(1, 4, 2, 3, 300, 16, 16)
    v[:, :, 299] = math.nan
    seen = tw.attention(q, k, v, mask=tw.causal(), backend="cpu").isnan().all(-1)[0]
    assert seen[:, 2].all() and not seen[:, :2].any()


def test_few_and_many_rows_in_one_batch() -> None:
    """Packed sequences, some of one token, and their bits whatever stands beside them."""
    lengths_q, lengths_k = (3, 1, 200, 1), (300, 200, 400, 90)
    cu_q = torch.tensor((0, *lengths_q)).cumsum(0)
    cu_k = torch.tensor((0, *lengths_k)).cumsum(0)
    q, k = torch.randn(sum(lengths_q), 8, 32), torch.randn(sum(lengths_k), 2, 32)
    options = {"mask": tw.causal(), "backend": "cpu", "batch_invariant": True}
    got = tw.attention_varlen(q, k, k, cu_q, cu_k, **options)
    want = tw.attention_varlen(
        q.double(), k.double(), k.double(), cu_q, cu_k, mask=tw.causal(), backend="naive"
    )
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)
    alone = tw.attention(q[None, 3:4].transpose(1, 2), *[k[None, 300:500].transpose(1, 2)] * 2, **options)
    assert torch.equal(got[3:4], alone[0].transpose(0, 1))


def test_bits_do_not_depend_on_threads() -> None:
    tensors = draw(1, 8, 2, 1, 3000, 64, 64, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(tw.attention(*tensors, backend="cpu"))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)


def test_repeated_calls_of_split_keys() -> None:
    """Calls of a kind that was seen go a shorter way, several at once too, with the same bits; lse asked for or not."""
    from concurrent.futures import ThreadPoolExecutor

    cases = [draw(1, 8, 2, 1, 1500, 64, 64) for _ in range(6)]
    first = [tw.attention(*one, backend="cpu", return_lse=True) for one in cases]
    with ThreadPoolExecutor(4) as threads:
        again = list(threads.map(lambda one: tw.attention(*one, backend="cpu"), cases * 5))
    for out, (want, _) in zip(again, first * 5, strict=True):
        assert torch.equal(out, want)
    check(cases[-1])


def _leaf_gradients(tensors: list[torch.Tensor], leaf: torch.Tensor, options: object) -> list[tuple]:
    found = []
    for dtype, backend in ((torch.float32, "cpu"), (torch.float64, "naive")):
        inputs = [t.to(dtype).requires_grad_() for t in tensors]
        held = leaf.to(dtype).detach().requires_grad_() if leaf.is_floating_point() else leaf
        out = tw.attention(*inputs, backend=backend, **options(held))  # type: ignore[operator]
        wanted = [*inputs, held] if leaf.is_floating_point() else inputs
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
        found.append((out, *torch.autograd.grad(out, wanted, weights)))
    return found


@pytest.mark.parametrize("rows", [100, 3], ids=["many", "few"])
@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize("layout", ["pairs", "shared", "padding", "rows", "transposed", "sliced"])
def test_leaves_along_the_keys(kind: str, layout: str, rows: int) -> None:
    """A mask or bias by vectors of keys: every broadcast, whole and ragged groups of keys, views of every stride."""
    b, h, n = 2, 4, 133
    tensors = draw(b, h, 2, rows, n, 16, 16)
    shape = {
        "pairs": (b, h, rows, n), "shared": (rows, n), "padding": (b, 1, 1, n), "rows": (1, h, rows, 1),
        "transposed": (1, h, n, rows), "sliced": (1, 1, rows, n + 5),
    }[layout]  # fmt: skip
    leaf = torch.rand(shape) < 0.6 if kind == "mask" else torch.randn(shape)

    def options(t: torch.Tensor) -> dict:
        view = {"transposed": lambda: t.mT, "sliced": lambda: t[..., 3 : n + 3]}.get(layout, lambda: t)()
        return {"mask": view} if kind == "mask" else {"scores": tw.bias(view), "mask": tw.causal()}

    for got, want in zip(*_leaf_gradients(tensors, leaf, options), strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def test_a_leaf_read_by_position() -> None:
    """Positions outside the leaf read its nearest element, in a group of keys half outside too."""
    tensors = draw(1, 2, 2, 40, 90, 16, 16)
    term = tw.custom_score

    def options(t: torch.Tensor) -> dict:
        return {
            "scores": term(lambda s, h, q, k, table: s + table[h, q, k], t), "k_offset": -4, "q_offset": 2
        }  # fmt: skip

    for got, want in zip(*_leaf_gradients(tensors, torch.randn(2, 45, 70), options), strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def test_documents_far_apart() -> None:
    """Ids read tile by tile, across runs of keys that nobody sees, with int32 and int64, packed heads and few rows."""
    for dtype, rows in ((torch.int64, 700), (torch.int32, 3)):
        ids = torch.arange(700).div(90, rounding_mode="floor").to(dtype).expand(2, 700).contiguous()
        ids[1, 600:] = -1
        mask = tw.document(ids[:, 700 - rows :].contiguous(), ids)
        check(draw(2, 4, 2, rows, 700, 16, 16), mask=mask)
        check(draw(2, 4, 2, rows, 700, 16, 16), mask=~mask & tw.causal())


@pytest.mark.parametrize("cpu", ["haswell", "skylake-avx512"])
def test_other_targets_compile(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask and a bias of pairs, and documents, for vector widths this machine may not have."""
    import llvmlite.ir as ir

    from tilewise.backends.cpu import fold, machine_code
    from tilewise.backends.cpu.isa import detect
    from tilewise.backends.cpu.slots import describe

    monkeypatch.setenv("NUMBA_CPU_NAME", cpu)
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    isa = detect()
    if isa.arch != "x86":
        pytest.skip("an x86 target on another machine")
    ids = torch.zeros(1, 64, dtype=torch.int64)
    mask = tw.dense(torch.ones(1, 1, 64, 64, dtype=torch.bool)) & tw.document(ids, ids)
    bias = tw.bias(torch.zeros(1, 1, 64, 64))
    seen: list[tuple] = []

    class Stop(Exception):
        pass

    def stop(_: object, problem: Problem, inputs: Inputs) -> None:
        seen.append((problem.spec, inputs.leaves))
        raise Stop

    monkeypatch.setattr(Blockwise, "forward", stop)
    q = torch.zeros(1, 1, 64, 16)
    with pytest.raises(Stop):
        tw.attention(q, q, q, mask=mask, scores=bias, backend="blockwise")
    spec = seen[0][0]
    module = ir.Module("fold")
    slots = describe(spec, seen[0][1])
    fold.print_fold(module, "fold_partial", isa, slots, False, spec, True)
    fold.print_classify(module, slots, False, spec.keep)
    assert machine_code.assemble(isa, machine_code.optimise(isa, module))


def test_sources_replaced_under_a_running_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an upgrade writes on disk changes no key of a process that runs the old code."""
    from pathlib import Path

    from tilewise.backends.cpu import machine_code
    from tilewise.backends.cpu.isa import detect

    before = machine_code._key(detect(), "fold")
    machine_code._sources.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"another release")
    assert machine_code._key(detect(), "fold") == before
