"""What a user may do to a cache between two calls, and what is refused before it reads or writes the wrong keys."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw

B, H, G, D = 3, 4, 2, 16


def qkv(n, batch=B):
    return [torch.randn(batch, heads, n, D) for heads in (H, G, G)]


@pytest.mark.parametrize("name", ["lengths", "leftpad", "pools"])
def test_a_tensor_that_is_replaced_is_looked_at_anew(name):
    cache = tw.KVCache(*(torch.randn(B, G, 16, D) for _ in "kv"), torch.full((B,), 9))
    q = torch.randn(B, H, 1, D)
    for _ in range(2):
        tw.attention_with_cache(q, cache)
    first, last = 0, 9
    if name == "lengths":
        cache.lengths = torch.full((B + 30,), 3, dtype=torch.int32)
    elif name == "leftpad":
        cache.leftpad = torch.full((B + 1,), 4, dtype=torch.int32)
    else:
        cache.k, cache.v = (torch.randn(B, G, 5, D) for _ in "kv")
    with pytest.raises(tw.ShapeError):
        tw.attention_with_cache(q, cache)
    if name == "lengths":
        cache.lengths, last = torch.full((B,), 3, dtype=torch.int32), 3
    elif name == "leftpad":
        cache.leftpad, first = torch.full((B,), 4, dtype=torch.int32), 4
    else:
        cache.lengths, last = torch.full((B,), 5, dtype=torch.int32), 5
    expected = tw.attention(q, cache.k[:, :, first:last], cache.v[:, :, first:last])
    torch.testing.assert_close(tw.attention_with_cache(q, cache), expected)


def test_slots_that_are_written_stand_once_and_may_be_none():
    cache = tw.KVCache.allocate(3, G, 16, D)
    with pytest.raises(tw.OptionError, match="stands once"):
        tw.attention_with_cache(*qkv(2)[:1], cache, *qkv(2)[1:], sequences=[1] * B)
    assert cache.lengths.tolist() == [0, 0, 0]
    q, k, v = qkv(2, 0)
    assert tw.attention_with_cache(q, cache, k, v, sequences=[]).shape == q.shape


def test_a_prefix_that_is_not_shared_is_refused():
    pages = tw.PagedKVCache(16, 4, G, D)
    numbers = [pages.new_sequence() for _ in range(2)]
    q, k, v = qkv(9, 2)
    tw.attention_with_cache(q, pages, k, v, sequences=numbers)
    with pytest.raises(tw.ShapeError, match="different pages"):
        tw.attention_with_cache(q[:, :, :1], pages, sequences=numbers, shared_prefix=8)
    with pytest.raises(tw.ShapeError, match="does not hold"):
        tw.attention_with_cache(q[:1, :, :1], pages, sequences=numbers[:1], shared_prefix=12)


def test_a_batch_that_was_not_advanced_writes_no_page_of_another():
    pages = tw.PagedKVCache(1, 4, G, D)
    first, second = pages.new_sequence(), pages.new_sequence()
    batch = pages.batch([second])
    q, k, v = qkv(4, 1)
    tw.attention_with_cache(q, pages, k, v, sequences=[first])
    before = pages.k.clone(), pages.v.clone()
    with pytest.raises(tw.ShapeError):
        tw.attention_with_cache(q, pages, *qkv(4, 1)[1:], sequences=batch)
    assert torch.equal(pages.k, before[0]) and torch.equal(pages.v, before[1])
    assert batch.lengths.tolist() == [[0]]


@pytest.mark.parametrize("added", [-1, [1, 2], []])
def test_an_advance_that_fits_no_sequence_changes_nothing(added):
    pages = tw.PagedKVCache(4, 4, G, D)
    batch = pages.batch([pages.new_sequence()])
    batch.advance(2)
    with pytest.raises(tw.OptionError, match="advance takes"):
        batch.advance(added)
    assert pages.length(0) == 2 and pages.num_free_pages == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": "causal"}, {"backend": "none"}, {"backend": "hopper"}, {"scale": "2"}, {"sink": torch.zeros(H + 1)},
        {"scores": 3}, {"dropout": 2.0}, {"q_offset": "last"}, {"mask": tw.key_padding(torch.ones(B + 1, 4).bool())},
        {"out": 3}, {"out": torch.empty(B, H, 2, 3)}, {"out": torch.empty(B, H, 2, D).double()}, {"shared_prefix": 3},
        {"out": torch.empty(B, H, 2, D, requires_grad=True)}, {"scores": tw.bias(torch.zeros(3))},
        {"sink": torch.zeros(H, requires_grad=True), "out": torch.empty(B, H, 2, D)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("paged", [False, True])
def test_a_refused_call_writes_and_counts_nothing(wrong, paged):
    q, k, v = qkv(2)
    if paged:
        cache = tw.PagedKVCache(8, 4, G, D)
        named = {"sequences": [cache.new_sequence() for _ in range(B)]}
    else:
        cache, named = tw.KVCache.allocate(B, G, 16, D), {}
    tw.attention_with_cache(q, cache, k, v, **named)
    with pytest.raises((tw.TilewiseError, TypeError)):
        tw.attention_with_cache(q, cache, k, v, **named, **wrong)
    with pytest.raises(tw.TilewiseError):
        tw.attention_with_cache(torch.randn(B, H, 2, D + 8), cache, k, v, **named)
    lengths = [cache.length(n) for n in named["sequences"]] if paged else cache.lengths.tolist()
    assert lengths == [2] * B
    expected = tw.attention(q, torch.cat((k, k), 2), torch.cat((v, v), 2))
    torch.testing.assert_close(tw.attention_with_cache(q, cache, k, v, **named), expected)


@pytest.mark.parametrize("paged", [False, True])
def test_a_bias_that_the_keys_outgrow_is_refused_before_they_are_written(paged):
    """However often calls like it went before, and packed queries likewise."""
    if paged:
        cache = tw.PagedKVCache(32, 4, G, D)
        named = {"sequences": [cache.new_sequence() for _ in range(B)]}
    else:
        cache, named = tw.KVCache.allocate(B, G, 32, D), {}
    columns, rows = tw.bias(torch.randn(H, 1, 7)), tw.bias(torch.randn(H, 2, 1))
    q, k, v = qkv(1)
    for _ in range(7):
        tw.attention_with_cache(q, cache, k, v, scores=columns, **named)
    for _ in range(2):
        with pytest.raises(tw.ShapeError, match="7 columns, and a sequence would hold 8 keys"):
            tw.attention_with_cache(q, cache, k, v, scores=columns, **named)
    assert (cache.length(0) if paged else int(cache.lengths[0])) == 7
    tw.attention_with_cache(q, cache, k, v, **named)
    with pytest.raises(tw.ShapeError, match="not 7"):
        tw.attention_with_cache(q, cache, scores=columns, **named)
    q = torch.randn(6, H, D)
    for _ in range(2):
        tw.attention_with_cache(q, cache, cu_seqlens_q=[0, 2, 4, 6], scores=rows, **named)
    with pytest.raises(tw.ShapeError, match="not 2"):
        tw.attention_with_cache(q, cache, cu_seqlens_q=[0, 2, 3, 6], scores=rows, **named)


def test_terms_that_can_be_read_once_are_applied():
    q, k, v = (4 * t for t in qkv(3))
    cache = tw.KVCache.allocate(B, G, 16, D)
    out = tw.attention_with_cache(q, cache, k, v, scores=(term for term in [tw.softcap(0.5)]))
    torch.testing.assert_close(out, tw.attention(q, k, v, scores=tw.softcap(0.5)))


def test_complex_keys_are_refused():
    q, k, v = qkv(3)
    cache = tw.KVCache.allocate(B, G, 16, D)
    with pytest.raises(tw.DTypeError, match="real"):
        tw.attention_with_cache(q, cache, k.to(torch.complex64), v)


@pytest.mark.parametrize("sequences", [1, 1.0, "ab", [0.5], [None], [True], [[0], [1]], torch.tensor([0.0])])
def test_sequences_that_are_no_integers_are_refused(sequences):
    pages = tw.PagedKVCache(4, 4, G, D)
    for _ in range(2):
        pages.new_sequence()
    cache = tw.KVCache.allocate(2, G, 16, D)
    q = torch.randn(1, H, 1, D)
    calls = [
        lambda: tw.attention_with_cache(q, cache, sequences=sequences), lambda: cache.reset(sequences),
        lambda: tw.attention_with_cache(q, pages, sequences=sequences), lambda: pages.batch(sequences),
        lambda: pages.shared_prefix(sequences),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(tw.DTypeError, match="integers"):
            call()


@pytest.mark.parametrize("name", [7, -1, [0], None])
def test_a_sequence_that_was_never_made_is_named(name):
    pages = tw.PagedKVCache(4, 4, G, D)
    pages.new_sequence()
    for method in (pages.free, pages.pages, pages.fork, pages.length):
        with pytest.raises(tw.OptionError, match="there is no sequence"):
            method(name)


@pytest.mark.parametrize("slots", [[2], [-1], torch.tensor([0, 2])])
def test_a_reset_of_slots_that_are_not_there_changes_nothing(slots):
    cache = tw.KVCache(*(torch.randn(2, G, 16, D) for _ in "kv"), torch.tensor([3, 4]))
    with pytest.raises(tw.ShapeError, match="there is no slot"):
        cache.reset(slots)
    assert cache.lengths.tolist() == [3, 4]
    cache.reset([1])
    assert cache.lengths.tolist() == [3, 0]


def test_the_debug_mode_looks_at_a_shared_prefix_without_reading_it_back(monkeypatch):
    pages = tw.PagedKVCache(16, 4, G, D, debug=True)
    first = pages.new_sequence()
    q, k, v = qkv(9, 1)
    tw.attention_with_cache(q, pages, k, v, sequences=[first])
    numbers = [first, pages.fork(first), pages.new_sequence()]
    tw.attention_with_cache(q, pages, k, v, sequences=numbers[2:])
    # As on a GPU, whose numbers the host does not see.
    monkeypatch.setattr("tilewise.serving.cascade.can_look", lambda t: False)
    one = torch.randn(2, H, 1, D)
    wanted = tw.attention_with_cache(one, pages, sequences=numbers[:2])
    shared = tw.attention_with_cache(one, pages, sequences=numbers[:2], shared_prefix=8)
    torch.testing.assert_close(shared, wanted)
    with pytest.raises(RuntimeError, match="shared prefix of 8 keys"):
        tw.attention_with_cache(one, pages, sequences=numbers[1:], shared_prefix=8)


@pytest.mark.parametrize("name", ["q", "k_new", "v_new", "cos", "sin"])
def test_what_lies_on_another_device_than_the_cache_is_refused(name):
    """Also after calls of the same form, of which only contents and addresses are looked at any more."""
    cache = tw.KVCache.allocate(B, G, 16, D)
    q, k, v = qkv(1)
    angles = torch.arange(32.0)[:, None] * torch.rand(D // 2)
    given = {"q": q, "k_new": k, "v_new": v, "cos": angles.cos(), "sin": angles.sin()}

    def call(q, k_new, v_new, cos, sin):
        return tw.attention_with_cache(q, cache, k_new, v_new, rotary=(cos, sin))

    for _ in range(4):
        call(**given)
    with pytest.raises(tw.DeviceError):
        call(**given | {name: given[name].to("meta")})
    assert cache.lengths.tolist() == [4] * B


def test_a_cache_made_in_inference_mode_is_written_there_only():
    with torch.inference_mode():
        cache = tw.KVCache(*(torch.zeros(B, G, 16, D) for _ in "kv"))
        q, k, v = qkv(1)
        for _ in range(4):
            tw.attention_with_cache(q, cache, k, v)
    with pytest.raises(tw.OptionError, match="inference mode"):
        tw.attention_with_cache(*qkv(1)[:1], cache, *qkv(1)[1:])
    assert cache.lengths.tolist() == [4] * B and not cache.k[:, :, 4:].any()


@pytest.mark.parametrize("new", [False, True])
def test_positions_without_tables_are_refused_before_anything_is_written(new):
    cache = tw.KVCache(*(torch.randn(B, G, 16, D) for _ in "kv"), torch.full((B,), 9))
    q, k, v = qkv(1)
    where = torch.full((B, 1), 3)
    with pytest.raises(tw.OptionError, match="rotary"):
        tw.attention_with_cache(q, cache, *((k, v) if new else ()), positions=where)
    assert cache.lengths.tolist() == [9] * B
