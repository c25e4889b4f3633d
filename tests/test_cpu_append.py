"""Appends prepared for the processor: the bits of the reference, its refusals, and what autograd is told."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilewise as tw
from tilewise.backends.protocol import Append
from tilewise.backends.reference import append as reference
from tilewise.serving import append as serving
from tilewise.serving.rotary import RotaryTable

pytest.importorskip("numba", reason="the CPU backend needs Numba")

from tilewise.backends.cpu.append import PreparedAppend, prepare

LENGTHS = (0, 17, 33)


def draw(
    dtype: torch.dtype, dim: int, turned: int, size: int, packed: bool, interleaved: bool, padded: bool
) -> Append:
    """New tokens for three sequences of a cache in one piece (size 0) or in random pages of that size."""
    b, h, h_kv, dim_v = 3, 4, 2, 48
    table = None
    if size:
        each = 80 // size
        table = torch.randperm(b * each + 2)[: b * each].view(b, each).to(torch.int32)
    pages = (b, h_kv, 80) if table is None else (b * each + 2, h_kv, size)
    k, v = (torch.randn(*pages, d).to(dtype) for d in (dim, dim_v))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    edges = None
    if packed:
        edges = torch.tensor([0, 7, 7, 8], dtype=torch.int32)
        k_new, v_new, q = (torch.randn(8, n, d).to(dtype) for n, d in ((h_kv, dim), (h_kv, dim_v), (h, dim)))
    else:
        k_new = torch.randn(b, 3, h_kv, dim).transpose(1, 2).to(dtype)
        v_new, q = torch.randn(b, h_kv, 3, dim_v).to(dtype), torch.randn(b, h, 5, dim).to(dtype)
    cos = sin = first = None
    if turned:
        cos, sin, _ = RotaryTable.make(turned, 64)
        first = lengths - torch.tensor([0, 3, 5], dtype=torch.int32) if padded else None
    with_q = turned > 0
    return Append(
        k_new, v_new, k, v, lengths, table, edges, q if with_q else None, edges if with_q else None, cos, sin,
        interleaved, None, None, first,
    )  # fmt: skip


def prepared(inputs: Append) -> PreparedAppend:
    found = prepare(inputs, serving.check_room, serving.append)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_the_reference(dtype: torch.dtype) -> None:
    cases = itertools.product(((64, 64), (40, 22), (33, 0), (128, 128)), (0, 1, 16), (False, True))
    for n, ((dim, turned), size, packed) in enumerate(cases):
        inputs = draw(dtype, dim, turned, size, packed, n % 3 == 1, n % 2 == 1)
        found = prepared(inputs)
        mine = inputs._replace(k=inputs.k.clone(), v=inputs.v.clone())
        got, want = [found(mine) for _ in range(2)][1], reference.append(inputs)
        assert torch.equal(mine.k, inputs.k) and torch.equal(mine.v, inputs.v)
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert torch.equal(got, want) and got.stride() == want.stride()


def test_a_long_append_is_shared_by_threads() -> None:
    inputs = draw(torch.float32, 64, 64, 16, False, False, False)
    k_new, v_new = torch.randn(3, 2, 1000, 64), torch.randn(3, 2, 1000, 48)
    table = RotaryTable.make(64, 2000)
    pages = torch.randperm(200)[:198].view(3, 66).to(torch.int32)
    k, v = torch.zeros(200, 2, 16, 64), torch.zeros(200, 2, 16, 48)
    inputs = inputs._replace(
        k_new=k_new, v_new=v_new, k=k, v=v, block_table=pages, cos=table.cos, sin=table.sin
    )
    mine = inputs._replace(k=k.clone(), v=v.clone())
    got, want = prepared(mine)(mine), reference.append(inputs)
    assert torch.equal(mine.k, k) and torch.equal(mine.v, v)
    assert got is not None and want is not None and torch.equal(got, want)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"lengths": torch.tensor([0, 17, 79], dtype=torch.int32)}, r"79 \+ 3 keys, and has room for 80"),
        ({"lengths": torch.tensor([0, -1, 33], dtype=torch.int32)}, r"sequence 1 would hold -1"),
        ({"table": (1, 1, 17)}, "page 1 of sequence 1 is 17, and there are 17 pages"),
        ({"table": (0, 0, -1)}, "page 0 of sequence 0 is -1"),
    ],
)
def test_refusals_are_the_reference_s_and_write_nothing(change: dict, text: str) -> None:
    inputs = draw(torch.float32, 64, 64, 16, False, False, False)
    found = prepared(inputs)
    if "table" in change:
        b, n, page = change["table"]
        assert inputs.block_table is not None
        inputs.block_table[b, n] = page
        inputs = inputs._replace(lengths=torch.tensor([0, 17, 33], dtype=torch.int32))
    else:
        inputs = inputs._replace(**change)
    before = inputs.k.clone(), inputs.v.clone()
    with pytest.raises(tw.ShapeError, match=text):
        found(inputs)
    assert torch.equal(before[0], inputs.k) and torch.equal(before[1], inputs.v)


@pytest.mark.parametrize("edges", [[0, 7, 7, 9], [-1, 7, 7, 8], [0, 7, 6, 8]])
def test_edges_that_leave_their_tokens(edges: list[int]) -> None:
    inputs = draw(torch.float32, 64, 0, 16, True, False, False)
    found = prepared(inputs)
    with pytest.raises(tw.ShapeError, match="rises"):
        found(inputs._replace(cu_seqlens_new=torch.tensor(edges, dtype=torch.int32)))


def test_steps_of_a_cache_are_prepared_and_what_is_saved_is_known_to_be_old() -> None:
    cache = tw.KVCache.allocate(2, 2, 32, 32)
    table = RotaryTable.make(32, 64)
    for _ in range(3):
        q, k, v = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 1, 32), torch.randn(2, 2, 1, 32)
        tw.attention_with_cache(q, cache, k, v, rotary=table)
    assert [type(form) for form in cache.forms.values()] == [PreparedAppend]
    q.requires_grad_()
    out = tw.attention_with_cache(q, cache)
    with torch.no_grad():
        tw.attention_with_cache(q, cache, k, v, rotary=table)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tensors_whose_memory_is_not_their_numbers_go_the_long_way() -> None:
    inputs = draw(torch.float32, 64, 64, 16, False, False, False)
    found = prepared(inputs)
    turned = inputs._replace(k_new=torch._neg_view(inputs.k_new))
    want = inputs._replace(k_new=-inputs.k_new, k=inputs.k.clone(), v=inputs.v.clone())
    reference.append(want)
    found(turned)
    assert torch.equal(inputs.k, want.k)


@pytest.mark.parametrize(
    "change",
    [
        {"k": "half"},
        {"k_scale": torch.ones(2)},
        {"cos": torch.zeros(64, 32, dtype=torch.bfloat16)},
        {"positions_k": torch.zeros(3, 3, dtype=torch.int32)},
    ],
)
def test_what_is_not_prepared(change: dict) -> None:
    inputs = draw(torch.float32, 64, 64, 16, False, False, False)
    if change.get("k") == "half":
        change = {"k": inputs.k.half()}
    assert prepare(inputs._replace(**change), serving.check_room, serving.append) is None


@pytest.mark.parametrize("how", ["data", "set"])
def test_pools_with_other_memory_are_looked_at_anew(how: str) -> None:
    """Smaller pools in the place of those that appends were laid out for, under the same tensors."""
    cache = tw.KVCache(*(torch.randn(2, 2, 64, 32) for _ in "kv"))

    def call() -> None:
        tw.attention_with_cache(
            torch.randn(2, 4, 1, 32), cache, *(torch.randn(2, 2, 1, 32) for _ in "kv"), backend="cpu"
        )

    for _ in range(5):
        call()
    room = torch.zeros(2, 2, 64, 32)
    small = room.view(-1)[: 2 * 2 * 8 * 32].view(2, 2, 8, 32)
    if how == "data":
        cache.k.data = cache.v.data = small
    else:
        cache.k.set_(small), cache.v.set_(small)
    cache.lengths.fill_(20)
    with pytest.raises(tw.ShapeError):
        call()
    assert not room.any() and cache.lengths.tolist() == [20, 20]


def test_lengths_of_another_type_are_not_read_as_what_they_were() -> None:
    cache = tw.KVCache(*(torch.zeros(2, 2, 64, 32) for _ in "kv"))
    q, k, v = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 1, 32), torch.randn(2, 2, 1, 32)
    for _ in range(5):
        tw.attention_with_cache(q, cache, k, v, backend="cpu")
    cache.lengths.data = torch.full((2,), 9, dtype=torch.int64)
    tw.attention_with_cache(q, cache, k, v, backend="cpu")
    assert torch.equal(cache.k[:, :, 9], k[:, :, 0]) and torch.equal(cache.v[:, :, 9], v[:, :, 0])
    assert not cache.k[:, :, 5:9].any()
