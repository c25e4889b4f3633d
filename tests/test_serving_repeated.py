"""Steps over a cache that follow their like: compared with the last one, and seen to differ where they do."""

import gc
import weakref

import pytest
import torch

import tilewise as tw
from tilewise.serving import read
from tilewise.serving.cache import CacheView
from tilewise.serving.rotary import RotaryTable

pytest.importorskip("numba")

H, H_KV, D = 4, 2, 32


def made(paged):
    if not paged:
        return tw.KVCache.allocate(2, H_KV, 64, D), {}
    cache = tw.PagedKVCache(16, 16, H_KV, D)
    return cache, {"sequences": [cache.new_sequence() for _ in range(2)]}


def new(n):
    return torch.randn(2, H, n, D), torch.randn(2, H_KV, n, D), torch.randn(2, H_KV, n, D)


def read_view(k, v):
    return CacheView(k, v, torch.full((k.shape[0],), k.shape[2], dtype=torch.int32))


def attend(view, q):
    chosen = {
        "k_offset": 0,
        "h_offset": 0,
        "batch_invariant": False,
        "backend": "cpu",
        "allow_quadratic": False,
    }
    options = tuple(chosen.get(name) for name in read.OPTIONS)
    return read.attend_view(view, q, None, (None, (), None), options, (0.0, None), False)[0]


class Steps:
    """A cache, and all that was written into it."""

    def __init__(self, paged):
        self.cache, self.where = made(paged)
        self.keys, self.values = [], []

    def __call__(self, n=1, **options):
        q, k, v = new(n)
        self.keys.append(k)
        self.values.append(v)
        out = tw.attention_with_cache(
            q, self.cache, k, v, mask=tw.causal(), backend="cpu", **self.where, **options
        )
        whole = (q, torch.cat(self.keys, 2), torch.cat(self.values, 2))
        want = tw.attention(*(t.double() for t in whole), mask=tw.causal(), backend="naive")
        torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("paged", [False, True])
def test_steps_that_follow_their_like_are_not_looked_up(paged, monkeypatch):
    step = Steps(paged)
    step(7)
    for _ in range(5):
        step()
    monkeypatch.setattr(read, "key_of", None)
    for _ in range(4):
        step()
    monkeypatch.undo()
    step(3)
    step()


@pytest.mark.parametrize("paged", [False, True])
def test_what_differs_is_seen(paged):
    step = Steps(paged)
    for _ in range(5):
        step()
    q, k, v = new(1)
    call = {"backend": "cpu", "mask": tw.causal(), **step.where}
    for wrong in ({"k_offset": False}, {"h_offset": False}, {"q_offset": True}):
        with pytest.raises(tw.TilewiseError):
            tw.attention_with_cache(q, step.cache, k, v, **call, **wrong)
    with pytest.raises(tw.TilewiseError):
        tw.attention_with_cache(q.double(), step.cache, k, v, **call)
    step()
    leaf = q.clone().requires_grad_()
    out = tw.attention_with_cache(leaf, step.cache, **call)
    assert out.requires_grad and torch.autograd.grad(out.sum(), leaf)[0].abs().sum() > 0
    if not paged:
        step.cache.k.requires_grad_()
        assert tw.attention_with_cache(q, step.cache, **call).requires_grad
        step.cache.k.requires_grad_(False)
    want = tw.attention_with_cache(q, step.cache, **call)
    assert torch.equal(tw.attention_with_cache(torch._neg_view(-q), step.cache, **call), want)


def test_what_is_compared_keeps_no_queries():
    step = Steps(False)
    for _ in range(5):
        step()
    q = new(1)[0]
    for _ in range(3):
        tw.attention_with_cache(q, step.cache, backend="cpu")
    kept = weakref.ref(q)
    del q
    gc.collect()
    assert kept() is None


def test_queries_that_are_turned_lie_otherwise_and_are_compared_too(monkeypatch):
    cache, table = tw.KVCache.allocate(2, H_KV, 64, D), RotaryTable.make(D, 64)
    for _ in range(5):
        tw.attention_with_cache(*new(1)[:1], cache, *new(1)[1:], rotary=table, backend="cpu")
    monkeypatch.setattr(read, "key_of", None)
    tw.attention_with_cache(*new(1)[:1], cache, *new(1)[1:], rotary=table, backend="cpu")
    assert cache.lengths.tolist() == [6, 6]


def exchanged(t, way):
    """The numbers of t in other memory, where heads and keys lie the other way round."""
    other = torch.empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2).copy_(t)
    if way == "data":
        t.data = other
    else:
        t.set_(other)


@pytest.mark.parametrize("way", ["data", "set_"])
@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_reads_follow_a_cache_whose_memory_was_exchanged_for_such_that_lies_otherwise(way, calls):
    k, v = (torch.randn(2, H_KV, 64, D) for _ in range(2))
    cache = tw.KVCache(k, v, torch.tensor([64, 20]))
    q = new(1)[0]
    want = tw.attention_with_cache(q, tw.KVCache(k.clone(), v.clone(), torch.tensor([64, 20])), backend="cpu")
    for _ in range(calls):
        tw.attention_with_cache(q, cache, backend="cpu")
    exchanged(cache.k, way)
    for _ in range(4):
        assert torch.equal(tw.attention_with_cache(q, cache, backend="cpu"), want)
    exchanged(cache.v, way)
    assert torch.equal(tw.attention_with_cache(q, cache, backend="cpu"), want)


@pytest.mark.parametrize("paged", [False, True])
def test_steps_follow_a_cache_whose_memory_was_exchanged(paged):
    step = Steps(paged)
    step(7)
    for _ in range(4):
        step()
    for t in (step.cache.k, step.cache.v) if not paged else ():
        exchanged(t, "set_")
    if paged:
        for view in step.cache.current(tuple(step.where["sequences"])).views:
            exchanged(view.k, "data")
    for _ in range(4):
        step()


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_gradients_wanted_after_calls_that_wanted_none(which):
    view = read_view(torch.randn(2, H_KV, 64, D), torch.randn(2, H_KV, 64, D))
    q = torch.randn(2, H, 1, D)
    for _ in range(4):
        assert not attend(view, q).requires_grad
    wanted = {"q": q, "k": view.k, "v": view.v}[which].requires_grad_()
    for _ in range(4):
        out = attend(view, q)
        (got,) = torch.autograd.grad(out.sum(), wanted)
        wide = [t.detach().double() for t in (q, view.k, view.v)]
        wide["qkv".index(which)].requires_grad_()
        want = tw.attention(*wide, backend="naive").sum()
        right = torch.autograd.grad(want, wide["qkv".index(which)])[0]
        torch.testing.assert_close(got.double(), right, atol=2e-6, rtol=2e-6)
    wanted.requires_grad_(False)
    assert not attend(view, q).requires_grad
