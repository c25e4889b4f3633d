"""The CPU backend over caches: pages of every size, in one piece, padded on the left; prepared calls; refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.backends.reference.blockwise import Blockwise
from tilewise.serving.cache import CacheView
from tilewise.serving.read import attend_pages, attend_view
from tilewise.testing.cases_cached import cached_cases
from tilewise.testing.conformance_cached import run_cached_case

pytest.importorskip("numba", reason="the CPU backend needs Numba")

CASES = {case.name.removeprefix("cached-"): case for case in cached_cases()}
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
OPTIONS = (None, None, 0, 0, None, False, "cpu", False)
"""scale, q_offset, k_offset, h_offset, deterministic, batch_invariant, backend, allow_quadratic."""


@pytest.fixture
def no_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that falls back to the reference fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("the call was done again by the reference")

    monkeypatch.setattr(Blockwise, "forward", refuse)


class Pool:
    """Keys and values of sequences, each in random pages of a pool whose other rows are NaN."""

    def __init__(
        self, lengths: list[int], size: int, *, dtype: torch.dtype = torch.float32, dim: int = 32
    ) -> None:
        each = -(-max(lengths) // size) + 1
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.table = (
            torch.randperm(len(lengths) * each + 3)[: len(lengths) * each].view(-1, each).to(torch.int32)
        )
        self.k, self.v = (
            torch.full((len(lengths) * each + 3, 2, size, dim), math.nan, dtype=dtype) for _ in "kv"
        )
        self.keys = [[torch.randn(n, 2, dim).to(dtype) for _ in "kv"] for n in lengths]
        for b, pair in enumerate(self.keys):
            j = torch.arange(lengths[b])
            page, row = self.table[b, j // size].long(), j % size
            self.k[page, :, row], self.v[page, :, row] = pair

    def view(self) -> CacheView:
        return CacheView(self.k, self.v, self.lengths, self.table, trusted=True)

    def expected(self, b: int, q: Tensor, **options: object) -> Tensor:
        """out (H, N_q, D) of one sequence, from its keys alone, in float64."""
        k, v = (t.transpose(0, 1)[None].double() for t in self.keys[b])
        return tw.attention(q[None].double(), k, v, backend="naive", **options)[0]


def attend(view: CacheView, q: Tensor, mask: object = None, options: tuple = OPTIONS) -> Tensor:
    return attend_view(view, q, None, (mask, (), None), options, (0.0, None), False)[0]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[got.dtype], rtol=TOLERANCE[got.dtype])


@pytest.mark.parametrize(
    "name",
    [
        "paged1-one", "paged3-ragged", "paged16-prefill", "paged64-same", "contiguous-ragged", "indexed-same",
        "leftpad-one", "paged-leftpad-ragged", "shared", "seqused_q", "seqused_q-ragged", "no-keys-sink",
        "all-padding", "everything-float16",
        "mask-document-leftpad", "dropout",
    ],
)  # fmt: skip
def test_conformance(name: str, poisoned_memory: None) -> None:
    report = run_cached_case(CASES[name], "cpu")
    assert not report.refused


@pytest.mark.usefixtures("no_second_run")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [1, 5, 16, 64])
def test_decode_over_pages(size: int, dtype: torch.dtype) -> None:
    """One token a sequence, more keys than a block of the kernel, NaN in all that no sequence uses."""
    pool = Pool([700, 3, 333, 64], size, dtype=dtype)
    q = torch.randn(4, 8, 1, 32).to(dtype)
    out = attend(pool.view(), q)
    for b in range(4):
        close(out[b], pool.expected(b, q[b]))


@pytest.mark.usefixtures("no_second_run")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_single_tokens_in_one_call(dtype: torch.dtype) -> None:
    """A chunk of a prompt, a draft and single tokens, packed; each at the end of its sequence."""
    rows, lengths = [90, 1, 3, 1], [400, 650, 65, 2]
    pool = Pool(lengths, 16, dtype=dtype)
    starts = torch.tensor((0, *rows)).cumsum(0)
    q = torch.randn(sum(rows), 8, 32).to(dtype)
    out, _ = attend_pages(
        q, pool.k, pool.v, block_table=pool.table, seqused_k=pool.lengths, cu_seqlens_q=starts, mask=tw.causal(),
        backend="cpu",
    )  # fmt: skip
    for b, first in enumerate(starts[:-1].tolist()):
        part = q[first : first + rows[b]].transpose(0, 1)
        close(out[first : first + rows[b]].transpose(0, 1), pool.expected(b, part, mask=tw.causal()))


@pytest.mark.usefixtures("no_second_run")
def test_a_call_of_a_known_kind_reads_lengths_and_tables_anew() -> None:
    """The same tensors' contents change under a prepared call: keys arrive, sequences move to other pages."""
    first, second = Pool([500, 90], 16), Pool([500, 90], 16)
    q = torch.randn(2, 8, 1, 32)
    view = CacheView(first.k, first.v, first.lengths.clone(), first.table.clone(), trusted=True)
    close(attend(view, q)[0], first.expected(0, q[0]))
    view.lengths -= 41
    first.keys = [[t[:-41] for t in pair] for pair in first.keys]
    for b in range(2):
        close(attend(view, q)[b], first.expected(b, q[b]))
    view.k.copy_(second.k), view.v.copy_(second.v)
    view.lengths.copy_(second.lengths), view.block_table.copy_(second.table)
    for b in range(2):
        close(attend(view, q)[b], second.expected(b, q[b]))


def test_a_known_kind_lays_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.cpu import prepared

    pool, q = Pool([300, 90], 16), torch.randn(2, 8, 1, 32)
    want = attend(pool.view(), q)
    monkeypatch.setattr(prepared.Forward, "__init__", None)
    assert torch.equal(attend(pool.view(), q), want)


@pytest.mark.usefixtures("no_second_run")
@pytest.mark.parametrize("paged", [False, True])
def test_padding_longer_than_a_split(paged: bool) -> None:
    """A split that ends before a sequence's first key has nothing to do, and writes nothing outside its memory."""
    q, (k, v) = torch.randn(4, 4, 1, 32), (torch.randn(4, 2, 4096, 32) for _ in "kv")
    lengths = torch.tensor([4096, 4096, 3500, 4096], dtype=torch.int32)
    padding = torch.tensor([0, 3000, 2600, 4096], dtype=torch.int32)
    pools = [t.view(4, 2, 64, 64, 32).transpose(1, 2).reshape(256, 2, 64, 32) if paged else t for t in (k, v)]
    table = torch.arange(256, dtype=torch.int32).view(4, 64) if paged else None
    view = CacheView(*pools, lengths, table, padding, trusted=True)
    for _ in range(2):
        got = tw.attention_with_cache(q, view, backend="cpu")
        for b, (pad, end) in enumerate(zip(padding.tolist(), lengths.tolist(), strict=True)):
            seen = (t[b : b + 1, :, pad:end].double() for t in (k, v))
            close(got[b : b + 1], tw.attention(q[b : b + 1].double(), *seen, backend="naive"))


def test_drafts_in_a_tree() -> None:
    """Eight drafted tokens: each sees the keys before them and its own branch."""
    parents = [-1, 0, 0, 1, 1, 2, 2, 3]
    seen = torch.eye(8, dtype=torch.bool)
    for i, parent in enumerate(parents):
        seen[i] |= seen[parent] if parent >= 0 else False
    pool, q = Pool([508], 16), torch.randn(1, 8, 8, 32)
    mask = torch.ones(1, 1, 8, pool.table.shape[1] * 16, dtype=torch.bool)
    mask[..., 500:508] = seen
    close(attend(pool.view(), q, tw.dense(mask))[0], pool.expected(0, q[0], mask=mask[..., :508].clone()))


def test_bits_do_not_depend_on_pages_neighbours_or_threads() -> None:
    pool, q = Pool([3000, 77], 16), torch.randn(2, 8, 1, 32)
    options = (*OPTIONS[:5], True, *OPTIONS[6:])
    want = attend(pool.view(), q, None, options)
    k, v = (t.transpose(0, 1)[None].contiguous() for t in pool.keys[0])
    alone = CacheView(k, v, torch.tensor([3000], dtype=torch.int32), trusted=True)
    assert torch.equal(attend(alone, q[:1], None, options)[0], want[0])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 3)
        assert torch.equal(attend(pool.view(), q, None, options), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("no_second_run")
@pytest.mark.parametrize("dim", [32, 128])
def test_splits_that_come_and_go(dim: int) -> None:
    """Lengths grow and shrink under a prepared call, and the number of splits with them: whichever thread ends a head's
    last split merges them, and leaves their count as it was."""
    lengths = [2600, 1, 700, 1300]
    pool, q = Pool(lengths, 16, dim=dim), torch.randn(4, 8, 1, dim)
    view, keys = pool.view(), pool.keys
    before = torch.get_num_threads()
    try:
        for part in (1.0, 0.3, 0.0, 1.0, 0.6):
            used = [int(n * part) for n in lengths]
            view.lengths.copy_(torch.tensor(used, dtype=torch.int32))
            pool.keys = [[t[:n] for t in pair] for n, pair in zip(used, keys, strict=True)]
            found = []
            for threads in (1, 2, 5, 2):
                torch.set_num_threads(threads)
                found.append(attend(view, q))
            assert all(torch.equal(out, found[0]) for out in found)
            for b, n in enumerate(used):
                close(found[0][b], pool.expected(b, q[b]) if n else torch.zeros(8, 1, dim).double())
    finally:
        torch.set_num_threads(before)


def many_heads(size: int, dtype: torch.dtype, tokens_first: bool) -> tuple[CacheView, list[CacheView]]:
    """Three sequences of eight KV heads of 64 in small pages, and each of them in one piece; what is unused is NaN."""
    lengths = [700, 33, 520]
    each = 704 // size + 1
    table = torch.randperm(3 * each + 2)[: 3 * each].view(3, each).to(torch.int32)
    shape = (3 * each + 2, size, 8, 64) if tokens_first else (3 * each + 2, 8, size, 64)
    pools = [torch.full(shape, math.nan, dtype=dtype) for _ in "kv"]
    pools = [t.transpose(1, 2) if tokens_first else t for t in pools]
    alone = []
    for b, n in enumerate(lengths):
        j = torch.arange(n)
        page, row = table[b, j // size].long(), j % size
        pair = [torch.randn(n, 8, 64).to(dtype) for _ in "kv"]
        for pool, t in zip(pools, pair, strict=True):
            pool[page, :, row] = t
        whole = [t.transpose(0, 1)[None].contiguous() for t in pair]
        alone.append(CacheView(*whole, torch.tensor([n], dtype=torch.int32), trusted=True))
    return CacheView(*pools, torch.tensor(lengths, dtype=torch.int32), table, trusted=True), alone


@pytest.mark.usefixtures("no_second_run")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size, tokens_first", [(1, False), (3, False), (16, True)])
def test_heads_that_lie_side_by_side_go_together(size: int, tokens_first: bool, dtype: torch.dtype) -> None:
    view, alone = many_heads(size, dtype, tokens_first)
    options = (*OPTIONS[:5], True, *OPTIONS[6:])
    before = torch.get_num_threads()
    try:
        for heads, rows in ((32, 1), (8, 1), (8, 5), (64, 2)):
            q = torch.randn(3, heads, rows, 64).to(dtype)
            specs = ((tw.causal(), ()), (tw.window(300, 0), ()), (tw.causal(), (tw.softcap(3.0),)))
            for mask, scores in specs if heads == 32 else specs[:1]:
                found = []
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    found.append(
                        attend_view(view, q, None, (mask, scores, None), options, (0.0, None), False)[0]
                    )
                assert torch.equal(*found)
                for b, one in enumerate(alone):
                    k, v = one.k.double(), one.v.double()
                    want = tw.attention(
                        q[b : b + 1].double(), k, v, mask=mask, scores=scores, backend="naive"
                    )
                    close(found[0][b : b + 1], want)
                    by_itself = attend_view(
                        one, q[b : b + 1], None, (mask, scores, None), options, (0.0, None), False
                    )
                    assert torch.equal(by_itself[0], found[0][b : b + 1])
    finally:
        torch.set_num_threads(before)


def test_lengths_and_pages_outside_their_tensors_are_named() -> None:
    pool, q = Pool([100, 90], 16), torch.randn(2, 8, 1, 32)

    def call(table: Tensor, lengths: Tensor) -> None:
        attend_pages(q, pool.k, pool.v, block_table=table, seqused_k=lengths, backend="cpu")

    wrong = pool.table.clone()
    wrong[1, 2] = 99
    with pytest.raises(tw.ShapeError, match="page 2 of sequence 1 is 99"):
        call(wrong, pool.lengths)
    wrong[1, 2], wrong[1, -1] = pool.table[1, 2], -5  # behind the last key
    call(wrong, pool.lengths)
    with pytest.raises(tw.ShapeError, match="sequence 0: 1000"):
        call(pool.table, torch.tensor([1000, 3]))


def test_a_table_that_lies_reads_no_memory_outside() -> None:
    """A known call of a view that vouches for its table is not looked at; what it names is clamped to the pool."""
    pool, q = Pool([100, 90], 16), torch.randn(2, 8, 1, 32)
    pool.k.nan_to_num_(), pool.v.nan_to_num_()
    attend(pool.view(), q)
    pool.table[0, 1], pool.table[1, 0] = 2**31 - 1, -(2**31)
    pool.lengths[1] = 2**30
    assert attend(pool.view(), q).isfinite().all()


def test_storage_it_does_not_read_is_refused() -> None:
    pool, q = Pool([100], 16), torch.randn(1, 8, 1, 32).bfloat16()
    k, v = (t.nan_to_num().to(torch.float8_e4m3fn) for t in (pool.k, pool.v))
    for pair, more in (((k, v), {}), ((pool.k.bfloat16(), pool.v.bfloat16()), {"k_scale": torch.ones(2)})):
        with pytest.raises(tw.UnsupportedProblem, match="storage of a cache(.|\n)*blockwise"):
            attend_pages(q, *pair, block_table=pool.table, seqused_k=pool.lengths, backend="cpu", **more)


def test_gradients_of_pools_come_from_the_reference() -> None:
    pool, q = Pool([70, 40], 16), torch.randn(2, 8, 1, 32)
    found = []
    for backend in ("cpu", "blockwise"):
        k, v = pool.k.clone().requires_grad_(), pool.v.clone().requires_grad_()
        out, _ = attend_pages(q, k, v, block_table=pool.table, seqused_k=pool.lengths, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), (k, v)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_plain_call_compiles_no_form_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.cpu import launch, prepared

    asked: list[tuple] = []
    kernel = launch.kernel

    def record(*arguments: object) -> int:
        asked.append(arguments)
        return kernel(*arguments)

    monkeypatch.setattr(prepared.launch, "kernel", record)
    q, k = torch.randn(1, 4, 70, 16), torch.randn(1, 2, 75, 16)
    tw.attention(q, k, k, mask=tw.causal(), backend="cpu")
    assert asked and not any(arguments[3:] and arguments[3] for arguments in asked)
    asked.clear()
    view = CacheView(k, k, torch.tensor([75], dtype=torch.int32), trusted=True)
    attend(view, q, tw.causal())
    assert asked and not any(arguments[3:] and arguments[3] for arguments in asked)
