"""attention_with_cache over KVCache and PagedKVCache: append, rotate, attend, against attention of plain tensors."""

from __future__ import annotations

import pytest
import torch
from test_compat_flash_cache import turned

import tilewise as tw
from tilewise.serving import (
    CacheView,
    KVCache,
    PagedKVCache,
    RotaryTable,
    ancestors,
    attention_with_cache,
    rotate,
    tree,
    tree_depths,
)

B, H, G, D = 3, 4, 2, 16


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


def qkv(n, batch=B, dtype=torch.float32):
    return [torch.randn(batch, heads, n, D).to(dtype) for heads in (H, G, G)]


class Contiguous:
    """A KVCache, called as the paged one is."""

    def __init__(self, dtype=torch.float32, batch=B, **more):
        self.cache, self.more = KVCache.allocate(batch, G, 64, D, dtype=dtype), {}
        self.cache.k.fill_(float("nan")), self.cache.v.fill_(float("nan"))


class Paged:
    """A PagedKVCache of pages of 3 keys, with its sequences."""

    def __init__(self, dtype=torch.float32, batch=B, **more):
        self.cache = PagedKVCache(80, 3, G, D, dtype=dtype, debug=True, **more)
        self.more = {"sequences": [self.cache.new_sequence() for _ in range(batch)]}


@pytest.fixture(params=[Contiguous, Paged])
def kind(request):
    return request.param


def close(a, b, **tolerance):
    torch.testing.assert_close(a, b, **{"atol": 2e-6, "rtol": 1e-5, **tolerance})


def rotated(x, table, positions):
    """x (B, H, N, D) at positions (B, N) by complex multiplication in float64."""
    rows = [
        turned(x[b].transpose(0, 1), table.cos, table.sin, positions[b], table.interleaved)
        for b in range(len(x))
    ]
    return torch.stack(rows).transpose(1, 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [16, 6])
def test_chunks_and_tokens_are_one_prefill(kind, interleaved, dim):
    """A sequence fed as chunks of 5, 1, 1, 9 and 3 tokens gives what the whole one gives at once."""
    table, held = RotaryTable.make(dim, 64, base=100.0, interleaved=interleaved), kind()
    parts = [qkv(n) for n in (5, 1, 1, 9, 3)]
    options = {"mask": tw.window(8, 0), "scores": tw.softcap(3.0), "sink": torch.randn(H)}
    outs = [
        attention_with_cache(q, held.cache, k, v, rotary=table, return_lse=True, **options, **held.more)
        for q, k, v in parts
    ]
    q, k, v = (torch.cat(t, 2) for t in zip(*parts, strict=True))
    place = torch.arange(19).expand(B, 19)
    want = tw.attention(
        rotated(q, table, place), rotated(k, table, place), v.double(),
        return_lse=True, **{**options, "sink": options["sink"].double()},
    )  # fmt: skip
    close(torch.cat([out for out, _ in outs], 2).double(), want[0])
    close(torch.cat([lse for _, lse in outs], 2).double(), want[1])


def test_an_angle_table_is_what_it_says():
    table = RotaryTable.make(6, 20, base=50.0)
    assert table.cos.shape == (20, 3)
    close(table.sin[7, 2], torch.tensor(7 * 50.0 ** (-4 / 6)).sin())
    for dim in (0, 5):
        with pytest.raises(tw.OptionError, match="even"):
            RotaryTable.make(dim, 8)


def test_padding_on_the_left_moves_positions():
    k, v = torch.randn(2, B, G, 30, D).unbind(0)
    pad, lengths = torch.tensor([4, 0, 7]), torch.tensor([11, 9, 7])
    cache = KVCache(k.clone(), v.clone(), lengths, pad)
    cache.k[0, :, :4] = cache.v[0, :, :4] = float("nan")
    table = RotaryTable.make(D, 40)
    q, k_new, v_new = qkv(2)
    out = attention_with_cache(
        q, cache, k_new, v_new, rotary=table, mask=tw.causal(), scores=tw.alibi(torch.rand(H))
    )
    torch.manual_seed(0)
    torch.randn(2, B, G, 30, D), qkv(2)
    slopes = torch.rand(H)
    for b in range(B):
        n, p = int(lengths[b]), int(pad[b])
        place = torch.arange(n - p, n - p + 2)[None]
        keys = torch.cat((k[b : b + 1, :, p:n].double(), rotated(k_new[b : b + 1], table, place)), 2)
        values = torch.cat((v[b : b + 1, :, p:n], v_new[b : b + 1]), 2).double()
        turned_q = rotated(q[b : b + 1], table, place)
        want = tw.attention(turned_q, keys, values, mask=tw.causal(), scores=tw.alibi(slopes.double()))
        close(out[b : b + 1].double(), want)


def test_some_slots_of_a_larger_cache():
    cache, other = Contiguous(batch=6).cache, Contiguous(batch=3).cache
    slots = [4, 0, 2]
    for n in (5, 1, 2):
        q, k, v = qkv(n)
        out = attention_with_cache(q, cache, k, v, sequences=slots, mask=tw.causal())
        assert torch.equal(out, attention_with_cache(q, other, k, v, mask=tw.causal()))
        slots = torch.as_tensor(slots)
    assert cache.lengths.tolist() == [8, 0, 8, 0, 8, 0] and cache.k[1].isnan().all()
    cache.reset([4]), cache.crop(5)
    assert cache.lengths.tolist() == [5, 0, 5, 0, 0, 0]
    with pytest.raises(tw.ShapeError, match="no slot 6"):
        attention_with_cache(*qkv(1)[:1], cache, sequences=[0, 1, 6])


def test_sequences_of_any_lengths_in_one_call(kind):
    """A prefill, a token, nothing and a chunk side by side."""
    held, alone = kind(batch=4), [kind(batch=1) for _ in range(4)]
    table = RotaryTable.make(D, 64)
    for counts in ((7, 2, 1, 4), (1, 1, 0, 6), (0, 3, 1, 1)):
        total, edges = sum(counts), [0, *torch.tensor(counts).cumsum(0).tolist()]
        q, k, v = torch.randn(total, H, D), torch.randn(total, G, D), torch.randn(total, G, D)
        given = torch.tensor(edges) if counts[0] == 1 else edges
        out, lse = attention_with_cache(
            q,
            held.cache,
            k,
            v,
            cu_seqlens_q=given,
            rotary=table,
            mask=tw.causal(),
            return_lse=True,
            **held.more,
        )
        for b, part in enumerate(alone):
            rows = slice(edges[b], edges[b + 1])
            if counts[b]:
                one = [t[rows].transpose(0, 1)[None] for t in (q, k, v)]
                want = attention_with_cache(
                    one[0], part.cache, *one[1:], rotary=table, mask=tw.causal(), return_lse=True, **part.more
                )
                close(out[rows], want[0][0].transpose(0, 1))
                close(lse[:, rows], want[1][0])


def test_more_queries_or_fewer_than_new_keys(kind):
    held = kind()
    q, k, v = qkv(9)
    out = attention_with_cache(q[:, :, -2:], held.cache, k, v, mask=tw.causal(), **held.more)
    close(out, tw.attention(q, k, v, mask=tw.causal())[:, :, -2:])
    out = attention_with_cache(q, held.cache, mask=tw.causal(), **held.more)
    close(out, tw.attention(q, k, v, mask=tw.causal()))


@pytest.mark.parametrize("packed", [False, True])
def test_a_draft_tree_is_its_paths(kind, packed):
    """Every draft token sees what it would see as the last token of its own path."""
    held, table = kind(), RotaryTable.make(D, 64)
    parents = torch.tensor([-1, 0, 0, 1, -1, 4])
    assert tree_depths(parents).tolist() == [0, 1, 1, 2, 0, 1]
    q0, k0, v0 = qkv(7)
    attention_with_cache(q0, held.cache, k0, v0, rotary=table, **held.more)
    q, k, v = qkv(6)
    place = (7 + tree_depths(parents)).expand(B, 6)
    mask = tree(parents if not packed else parents.expand(B, 6))
    if packed:
        flat = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
        edges = [0, 6, 12, 18]
        out = attention_with_cache(
            flat[0], held.cache, *flat[1:], cu_seqlens_q=edges, rotary=table, positions=place.flatten(), mask=mask,
            **held.more,
        ).unflatten(0, (B, 6)).transpose(1, 2)  # fmt: skip
    else:
        out = attention_with_cache(q, held.cache, k, v, rotary=table, positions=place, mask=mask, **held.more)
    seen = ancestors(parents)
    before = torch.arange(7).expand(B, 7)
    keys = torch.cat((rotated(k0, table, before), rotated(k, table, place)), 2)
    values = torch.cat((v0, v), 2).double()
    for n in range(6):
        path = torch.cat((torch.ones(7, dtype=torch.bool), seen[n]))
        want = tw.attention(rotated(q, table, place)[:, :, n : n + 1], keys[:, :, path], values[:, :, path])
        close(out[:, :, n : n + 1].double(), want)


def test_reading_is_differentiable():
    """Gradients, and theirs, of q, pools, sink and a term, through rotary, equal those of plain attention."""
    table, pools = RotaryTable.make(8, 64), torch.randn(2, 5, G, 4, D, dtype=torch.float64)
    pages = torch.tensor([[3, 1], [0, 3]], dtype=torch.int32)
    lengths = torch.tensor([6, 8], dtype=torch.int32)
    q = torch.randn(2, H, 2, D, dtype=torch.float64)
    sink, slopes = torch.randn(H, dtype=torch.float64), torch.rand(H, dtype=torch.float64)
    inputs = [t.clone().requires_grad_() for t in (q, *pools, sink, slopes)]

    def options(sink, slopes):
        return {"mask": tw.causal(), "sink": sink, "scores": tw.alibi(slopes), "return_lse": True}

    def read(q, k, v, sink, slopes):
        return attention_with_cache(q, CacheView(k, v, lengths, pages), rotary=table, **options(sink, slopes))

    def plain(q, k, v, sink, slopes):
        place = (lengths - 2)[:, None] + torch.arange(2)
        q = rotate(q.transpose(1, 2), table.cos, table.sin, place, False).transpose(1, 2)
        whole = [t[pages.long()].transpose(1, 2).flatten(2, 3) for t in (k, v)]
        rows = [
            tw.attention(
                q[b : b + 1], *(t[b : b + 1, :, :n] for t in whole), backend="naive", **options(sink, slopes)
            )
            for b, n in enumerate(lengths.tolist())
        ]
        return [torch.cat(t) for t in zip(*rows, strict=True)]

    found = []
    for function in (read, plain):
        out, lse = function(*inputs)
        first = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        found.append([out, lse, *first, *second])
    for a, b in zip(*found, strict=True):
        close(a, b, atol=1e-10, rtol=1e-9)


def test_a_prefix_that_all_share_is_read_once():
    cache = PagedKVCache(60, 4, G, D, debug=True)
    (first,) = (cache.new_sequence(),)
    q, k, v = qkv(22, 1)
    attention_with_cache(q, cache, k, v, sequences=[first])
    numbers = [first, cache.fork(first), cache.fork(first)]
    sink, table = torch.randn(H), RotaryTable.make(D, 64)
    for n in (1, 3, 1):
        q, k, v = qkv(n)
        attention_with_cache(q, cache, k, v, sequences=numbers)
        prefix = cache.shared_prefix(numbers)
        assert prefix == 20
        for options in (
            {}, {"mask": tw.causal(), "sink": sink}, {"scores": tw.softcap(2.0)}, {"rotary": table},
            {"mask": tw.causal() | tw.prefix(4)}, {"mask": tw.causal(), "batch_invariant": True},
        ):  # fmt: skip
            got, want = (
                attention_with_cache(q, cache, sequences=numbers, return_lse=True, shared_prefix=p, **options)
                for p in (prefix, 0)
            )
            close(got[0], want[0]), close(got[1], want[1])
    flat, edges = torch.randn(4, H, D), [0, 1, 3, 4]
    got, want = (
        attention_with_cache(
            flat, cache, sequences=numbers, cu_seqlens_q=edges, mask=tw.causal(), shared_prefix=p
        )
        for p in (prefix, 0)
    )
    close(got, want)
    x = q.clone().requires_grad_()
    grads = [
        torch.autograd.grad(
            attention_with_cache(x, cache, sequences=numbers, sink=sink, shared_prefix=p).square().sum(), x
        )[0]
        for p in (prefix, 0)
    ]
    close(*grads, atol=1e-5)
    for options in ({"mask": tw.window(5, 0)}, {"scores": tw.alibi(torch.rand(H))}, {"mask": tw.chunk(4)}):
        with pytest.raises(tw.UnsupportedProblem, match="shared_prefix"):
            attention_with_cache(q, cache, sequences=numbers, shared_prefix=prefix, **options)
    for options in ({"shared_prefix": 3}, {"shared_prefix": 20, "q_offset": 3}):
        with pytest.raises(tw.OptionError, match="shared_prefix"):
            attention_with_cache(q, cache, sequences=numbers, **options)
    with pytest.raises(tw.OptionError, match="pages"):
        attention_with_cache(q, Contiguous().cache, shared_prefix=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float8_is_stored_with_scales(dtype):
    """What is read back is within half a step of e4m3 of what was appended; large values do not become NaN."""
    scale = torch.tensor([0.5, 2.0])
    cache = PagedKVCache(40, 4, G, D, dtype=torch.float8_e4m3fn, k_scale=scale, v_scale=scale)
    numbers = [cache.new_sequence() for _ in range(B)]
    q, k, v = qkv(6, dtype=dtype)
    k[0, 0, 0, 0] = 1000.0
    out = attention_with_cache(q, cache, k, v, sequences=numbers, mask=tw.causal())
    pages = torch.tensor([cache.pages(n) for n in numbers])
    back = cache.k[0].float()[pages].transpose(2, 3).flatten(1, 2)[:, :6] * scale[:, None]
    assert back[0, 0, 0, 0] == 448 * 0.5
    back, k_plain = back.transpose(1, 2), k.float()
    back[0, 0, 0, 0] = k_plain[0, 0, 0, 0] = 0.0
    # Half a step of a number with 3 bits behind the point, or half the smallest step.
    assert ((back - k_plain).abs() <= k_plain.abs() / 16 + scale[:, None, None] * 2.0**-10).all()
    k_read, v_read = (
        (t[0].float()[pages].transpose(2, 3).flatten(1, 2)[:, :6] * scale[:, None]).transpose(1, 2)
        for t in (cache.k, cache.v)
    )
    want = tw.attention(q.double(), k_read.double(), v_read.double(), mask=tw.causal())
    assert (out.double() - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max()
    with pytest.raises(tw.DTypeError, match="float8"):
        attention_with_cache(q.float(), cache, sequences=numbers)


def test_bits_do_not_depend_on_neighbours(kind):
    held, alone = kind(), kind(batch=1)
    for n in (9, 1, 1):
        q, k, v = qkv(n)
        out = attention_with_cache(q, held.cache, k, v, mask=tw.causal(), batch_invariant=True, **held.more)
        one = attention_with_cache(
            q[1:2], alone.cache, k[1:2], v[1:2], mask=tw.causal(), batch_invariant=True, **alone.more
        )
        assert torch.equal(out[1:2], one)


def test_no_room_is_an_error_before_anything_is_written():
    cache = KVCache(torch.zeros(2, G, 8, D), torch.zeros(2, G, 8, D))
    q, k, v = qkv(5, 2)
    attention_with_cache(q, cache, k, v)
    kept = cache.k.clone()
    with pytest.raises(tw.ShapeError, match=r"5 \+ 5 keys, and has room for 8"):
        attention_with_cache(q, cache, k, v)
    view = CacheView(cache.k, cache.v, torch.tensor([1, 1], dtype=torch.int32), torch.tensor([[0], [9]]))
    with pytest.raises(tw.ShapeError, match="page 0 of sequence 1 is 9"):
        attention_with_cache(q, view, k, v)
    with pytest.raises(tw.ShapeError, match="page 0 of sequence 1 is 9"):
        attention_with_cache(q, view)
    view = CacheView(cache.k, cache.v, torch.tensor([1, 99], dtype=torch.int32))
    with pytest.raises(tw.ShapeError, match="from 0 to 8"):
        attention_with_cache(q, view)
    assert torch.equal(cache.k, kept) and cache.lengths.tolist() == [5, 5]


def test_arguments_that_do_not_fit():
    cache = Contiguous().cache
    q, k, v = qkv(2)
    table, zeros = RotaryTable.make(D, 4), torch.zeros(B, 1, dtype=torch.int32)
    cases = [
        (tw.DTypeError, "cache is a KVCache", (q, k), {}),
        (tw.DTypeError, "q is a tensor", (None, cache), {}),
        (tw.ShapeError, "heads", (q, cache, k[:, :1], v[:, :1]), {}),
        (tw.ShapeError, "3 sequences", (q[:2], cache, k[:2], v[:2]), {}),
        (tw.ShapeError, "one length", (q, cache, k, v[:, :, :1]), {}),
        (tw.ShapeError, "rotary_dim", (q, cache, k, v), {"rotary": RotaryTable.make(D + 2, 8)}),
        (tw.DTypeError, "rotary is", (q, cache, k, v), {"rotary": 3}),
        (tw.ShapeError, "positions run from", (q, cache, k, v), {"rotary": table, "positions": torch.full((B, 2), 4)}),
        (tw.ShapeError, "number for each query", (q, cache, k, v), {"rotary": table, "positions": torch.arange(2)}),
        (tw.ShapeError, "as many of both", (q[:, :, :1], cache, k, v), {"rotary": table, "positions": zeros}),
        (tw.DTypeError, "the cache has q's dtype", (q.half(), cache), {}),
        (tw.ShapeError, "out has", (q, cache), {"out": q[..., :1]}),
    ]  # fmt: skip
    for error, match, args, options in cases:
        with pytest.raises(error, match=match):
            attention_with_cache(*args, **options)
    assert cache.lengths.tolist() == [0, 0, 0]
    long = RotaryTable.make(D, 3)
    attention_with_cache(q, cache, k, v, rotary=long)
    with pytest.raises(tw.ShapeError, match="tables have 3 rows"):
        attention_with_cache(q, cache, k, v, rotary=long)


def test_edges_that_leave_their_tokens(kind):
    held = kind(batch=2)
    q, k, v = torch.randn(5, H, D), torch.randn(5, G, D), torch.randn(5, G, D)
    for edges in ([0, 3, 9], [0, 4, 3], [-1, 2, 5]):
        with pytest.raises(tw.ShapeError, match="rises"):
            attention_with_cache(q, held.cache, k, v, cu_seqlens_q=edges, **held.more)
    for _ in range(3):  # the third is of a kind that was made before
        attention_with_cache(q, held.cache, k, v, cu_seqlens_q=[0, 3, 5], **held.more)
    with pytest.raises(tw.ShapeError, match="rises"):
        attention_with_cache(q, held.cache, cu_seqlens_q=[0, 3, 9], **held.more)


def test_out_is_written(kind):
    held = kind()
    q, k, v = qkv(3)
    out = torch.empty_like(q)
    assert attention_with_cache(q, held.cache, k, v, out=out, **held.more) is out
    close(out, tw.attention(q, k, v))


def test_new_keys_take_the_cache_type_and_autocast_reaches_q():
    held = Contiguous(torch.bfloat16)
    q, k, v = qkv(4)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_with_cache(q, held.cache, k, v)
    half = [t.bfloat16() for t in (q, k, v)]
    assert out.dtype == torch.bfloat16
    close(out.float(), tw.attention(*(t.float() for t in half)), atol=2e-2, rtol=2e-2)
