"""PagedKVCache: a long random run against plain dictionaries, sharing and copies, refusals, and forged tables."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import Dense, dense_attention

import tilewise as tw
from tilewise.serving import OutOfPages, PagedKVCache, attention_with_cache

HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 4, 6


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


class Model:
    """What a paged cache should hold: for each sequence a list of (key, value), (H_kv, D) and (H_kv, D_v)."""

    def __init__(self):
        self.tokens = {}

    def append(self, number, k, v):
        k, v = k.cpu().double(), v.cpu().double()
        self.tokens[number] += [(k[:, n], v[:, n]) for n in range(k.shape[1])]

    def attend(self, number, q):
        """Attention of q (H, N, D), its last row at the last key, by another program in float64."""
        rows = self.tokens[number]
        if not rows:
            return torch.zeros(*q.shape[:2], DIM_V, dtype=torch.float64)
        k, v = (torch.stack(part, 1)[None] for part in zip(*rows, strict=True))
        seen = torch.arange(len(rows)) <= torch.arange(q.shape[1])[:, None] + len(rows) - q.shape[1]
        return dense_attention(q.double()[None], k, v, Dense(keep=seen))[0][0]


def held_and_right(cache, model):
    """Every page that nobody holds is NaN, and every sequence finds its own keys and values in its own pages."""
    held = {page for number in model.tokens for page in cache.pages(number)}
    stored_k, stored_v = cache.k[0].cpu().double(), cache.v[0].cpu().double()
    for page in set(range(cache.num_pages)) - held:
        assert stored_k[page].isnan().all() and stored_v[page].isnan().all()
    for number, tokens in model.tokens.items():
        assert cache.length(number) == len(tokens)
        pages = cache.pages(number)
        assert len(pages) == -(-len(tokens) // cache.page_size)
        for n, (k, v) in enumerate(tokens):
            page, row = pages[n // cache.page_size], n % cache.page_size
            assert torch.equal(stored_k[page, :, row], k) and torch.equal(stored_v[page, :, row], v)
    assert cache.num_free_pages == cache.num_pages - len(held)


def step(cache, model, chance):
    """One random operation on both; gives its name."""
    numbers = list(model.tokens)
    action = chance.choices(("new", "append", "fork", "free", "crop", "read"), (2, 12, 3, 2, 2, 3))[0]
    if action == "new" or not numbers:
        model.tokens[cache.new_sequence()] = []
    elif action in ("append", "read"):
        chosen = chance.sample(numbers, chance.randint(1, min(4, len(numbers))))
        added = 0 if action == "read" else chance.choice((1, 1, 1, 2, 5))
        rows = added or chance.randint(1, 3)
        shapes = (HEADS, rows, DIM), (HEADS_KV, rows, DIM), (HEADS_KV, rows, DIM_V)
        q, k, v = (torch.randn(len(chosen), *shape, device=cache.k.device) for shape in shapes)
        new = (k, v) if added else ()
        before = {n: (cache.pages(n), cache.length(n)) for n in numbers}
        try:
            out = attention_with_cache(q, cache, *new, sequences=chosen, mask=tw.causal())
        except OutOfPages:
            assert before == {n: (cache.pages(n), cache.length(n)) for n in numbers}
            return "full"
        for b, number in enumerate(chosen):
            if added:
                model.append(number, k[b], v[b])
            wanted = model.attend(number, q[b].cpu())
            torch.testing.assert_close(out[b].cpu().double(), wanted, atol=1e-5, rtol=1e-5)
    elif action == "fork":
        number = chance.choice(numbers)
        length = chance.choice((None, chance.randint(0, len(model.tokens[number]))))
        model.tokens[cache.fork(number, length)] = list(model.tokens[number][:length])
    elif action == "free":
        number = chance.choice(numbers)
        cache.free(number)
        del model.tokens[number]
    else:
        number = chance.choice(numbers)
        length = chance.randint(0, len(model.tokens[number]) + 2)
        cache.crop(number, length)
        model.tokens[number] = model.tokens[number][:length]
    return action


def random_run(page_size, steps, device="cpu"):
    """That many random operations on an empty cache and the model, in the same order for a page size."""
    chance = random.Random(page_size)
    cache = PagedKVCache(
        96 // page_size, page_size, HEADS_KV, DIM, head_dim_v=DIM_V, debug=True, device=device
    )
    model, done = Model(), set()
    for n in range(steps):
        done.add(step(cache, model, chance))
        if n % 25 == 0:
            held_and_right(cache, model)
    held_and_right(cache, model)
    assert done == {"new", "append", "fork", "free", "crop", "read", "full"}
    for number in list(model.tokens):
        cache.free(number)
    assert cache.num_free_pages == cache.num_pages and cache.k.isnan().all() and cache.v.isnan().all()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_long_random_run_agrees_with_dictionaries(page_size):
    random_run(page_size, 1500)


def grown(cache, *lengths):
    """New sequences of those lengths, with their keys."""
    numbers = []
    for n in lengths:
        numbers.append(cache.new_sequence())
        k, v = torch.randn(1, HEADS_KV, n, DIM), torch.randn(1, HEADS_KV, n, DIM_V)
        attention_with_cache(torch.randn(1, HEADS, 1, DIM), cache, k, v, sequences=numbers[-1:])
    return numbers


def make(pages=20, size=4, **more):
    return PagedKVCache(pages, size, HEADS_KV, DIM, **{"head_dim_v": DIM_V, "debug": True, **more})


def one(batch, n=1):
    return (
        torch.randn(batch, HEADS, n, DIM),
        torch.randn(batch, HEADS_KV, n, DIM),
        torch.randn(batch, HEADS_KV, n, DIM_V),
    )


def test_a_shared_page_is_copied_by_the_first_who_writes_and_kept_by_the_last():
    cache = make()
    (a,) = grown(cache, 6)
    b = cache.fork(a)
    c = cache.fork(a, 4)
    first, second = cache.pages(a)
    assert cache.pages(b) == (first, second) and cache.pages(c) == (first,) and cache.num_free_pages == 18
    attention_with_cache(*_with(cache, one(2)), sequences=[a, b])
    assert cache.pages(b)[0] == cache.pages(a)[0] == first and cache.pages(a)[1] != cache.pages(b)[1]
    assert second in (cache.pages(a)[1], cache.pages(b)[1]) and cache.num_free_pages == 17
    assert cache.shared_prefix([a, b, c]) == 4 and cache.shared_prefix([a]) == 0
    cache.free(a), cache.free(c)
    assert cache.num_free_pages == 18
    assert cache.length(b) == 7


def _with(cache, qkv):
    q, k, v = qkv
    return q, cache, k, v


def test_nothing_changes_where_pages_run_out():
    cache = make(pages=3)
    a, b = grown(cache, 8, 3)
    kept = cache.k.clone()
    with pytest.raises(OutOfPages, match="2 pages are needed, and 0 of 3 are free"):
        attention_with_cache(*_with(cache, one(2, 2)), sequences=[a, b])
    assert (cache.length(a), cache.length(b)) == (8, 3) and torch.equal(
        cache.k.nan_to_num(9), kept.nan_to_num(9)
    )
    attention_with_cache(*_with(cache, one(1)), sequences=[b])
    assert cache.length(b) == 4


def test_max_length_is_kept():
    cache = make(max_length=6)
    (a,) = grown(cache, 6)
    with pytest.raises(tw.ShapeError, match="max_length is 6"):
        attention_with_cache(*_with(cache, one(1)), sequences=[a])


def test_refusals_name_what_is_wrong():
    cache = make()
    a, b = grown(cache, 3, 2)
    q, k, v = one(2)
    for sequences, match in (([a, 77], "no sequence 77"), ([a, a], "stands once"), (None, "sequences=")):
        with pytest.raises(tw.OptionError, match=match):
            attention_with_cache(q, cache, k, v, sequences=sequences)
    with pytest.raises(tw.ShapeError, match="2 sequences"):
        attention_with_cache(*one(3)[:1], cache, *one(3)[1:], sequences=[a, b])
    with pytest.raises(tw.ShapeError, match="heads"):
        attention_with_cache(q, cache, k[:, :1], v[:, :1], sequences=[a, b])
    with pytest.raises(tw.OptionError, match="given together"):
        attention_with_cache(q, cache, k, sequences=[a, b])
    with pytest.raises(tw.OptionError, match="no gradients"):
        attention_with_cache(q, cache, k.requires_grad_(), v, sequences=[a, b])
    assert (cache.length(a), cache.length(b)) == (3, 2)
    cache.free(a)
    with pytest.raises(tw.OptionError, match="freed"):
        cache.fork(a)
    for call in (lambda: cache.fork(b, 3), lambda: cache.crop(b, -1), lambda: cache.layer(1)):
        with pytest.raises(tw.OptionError):
            call()
    for more in ({"pages": 0}, {"size": 0}, {"num_layers": 0}):
        with pytest.raises(tw.OptionError, match="1 or more"):
            make(**more)


@pytest.mark.parametrize("forged", ["another's page", "a free page", "no page", "a shared page, written"])
def test_a_forged_table_is_noticed(forged):
    """The debug mode looks at the tags on the device: whoever writes into a table reaches nobody else's keys."""
    cache = make()
    a, b = grown(cache, 6, 7)
    shared = cache.fork(b)
    batch = cache.batch([a])
    batch.advance(1)
    page = {"another's page": cache.pages(b)[1], "a free page": cache.books.free[0], "no page": 999}
    batch.table[0, 1] = page.get(forged, cache.pages(shared)[1])
    with pytest.raises(tw.ShapeError, match="not its own"):
        attention_with_cache(*_with(cache, one(1)), sequences=batch)


def test_layers_share_pages_and_count_apart():
    cache = make(num_layers=3)
    a, b = cache.new_sequence(), cache.new_sequence()
    for _ in range(6):
        parts = [one(2) for _ in range(3)]
        for n, part in enumerate(parts):
            q, k, v = part
            attention_with_cache(q, cache.layer(n), k, v, sequences=[a, b])
            if n < 2:
                with pytest.raises(tw.OptionError, match="between the layers"):
                    cache.fork(a)
    assert cache.length(a, 2) == 6 and cache.num_free_pages == 16
    with pytest.raises(tw.OptionError, match=r"cache\.layer"):
        attention_with_cache(q, cache, k, v, sequences=[a, b])
    c = cache.fork(a)
    attention_with_cache(q[:1], cache.layer(0), k[:1], v[:1], sequences=[c])
    new, old = cache.pages(c)[1], cache.pages(a)[1]
    assert new != old
    assert torch.equal(cache.k[1:, new, :, :2], cache.k[1:, old, :, :2])  # a copy is of all layers


def test_a_batch_that_the_caller_advances():
    cache, other = make(), make()
    numbers, same = grown(cache, 3, 6), grown(other, 3, 6)
    other.k.copy_(cache.k), other.v.copy_(cache.v)
    batch = cache.batch(numbers)
    for _ in range(5):
        q, k, v = one(2)
        batch.advance(1)
        out = attention_with_cache(q, cache, k, v, sequences=batch, mask=tw.causal())
        assert torch.equal(out, attention_with_cache(q, other, k, v, sequences=same, mask=tw.causal()))
    assert [cache.length(n) for n in numbers] == batch.lengths[0].tolist() == [8, 11]
    cache.crop(numbers[1], 2)
    batch.advance([0, 1])
    assert batch.lengths[0].tolist() == [8, 2]
    with pytest.raises(tw.OptionError, match="another cache"):
        attention_with_cache(q, other, k, v, sequences=batch)


def test_two_batches_of_one_sequence_see_each_other():
    cache = make()
    a, b, c = grown(cache, 3, 1, 2)
    for chosen in ([a, b], [c, a], [a, b, c], [a, b], [b]):
        attention_with_cache(*_with(cache, one(len(chosen))), sequences=chosen)
    assert [cache.length(n) for n in (a, b, c)] == [7, 5, 4]


def test_ragged_appends_count_on_the_host():
    cache = make()
    numbers = grown(cache, 3, 6, 0)
    edges = [0, 4, 4, 6]
    q, k, v = torch.randn(6, HEADS, DIM), torch.randn(6, HEADS_KV, DIM), torch.randn(6, HEADS_KV, DIM_V)
    out = attention_with_cache(q, cache, k, v, sequences=numbers, cu_seqlens_q=edges, mask=tw.causal())
    assert [cache.length(n) for n in numbers] == [7, 6, 2] and out.shape == (6, HEADS, DIM_V)
    alone = attention_with_cache(q[:4].transpose(0, 1)[None], cache, sequences=numbers[:1], mask=tw.causal())
    torch.testing.assert_close(out[:4], alone[0].transpose(0, 1))


def test_who_appends_nothing_keeps_sharing():
    cache = make()
    (a,) = grown(cache, 2)
    b, c = cache.fork(a), cache.new_sequence()
    q, k, v = (torch.randn(1, heads, d) for heads, d in ((HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V)))
    attention_with_cache(q, cache, k, v, sequences=[b, c], cu_seqlens_q=[0, 0, 1])
    assert cache.pages(a) == cache.pages(b)
    attention_with_cache(*_with(cache, one(2)), sequences=[b, c])
    assert cache.pages(a) != cache.pages(b) and (cache.length(b), cache.length(c)) == (3, 2)
