"""Calls that follow their like: compared with the last one, and seen to differ where they do."""

import gc
import weakref

import pytest
import torch

import tilewise as tw
from tilewise import quick
from tilewise.errors import TilewiseError

pytest.importorskip("numba")


def draw(*shape):
    return [torch.randn(shape) for _ in range(3)]


@pytest.fixture(autouse=True)
def fresh():
    quick.ready.clear()
    yield
    quick.ready.clear()


def test_a_kind_that_follows_itself_is_not_looked_up(monkeypatch):
    q, k, v = draw(2, 2, 9, 16)
    want = tw.attention(q, k, v, mask=tw.causal(), backend="cpu")
    for _ in range(2):
        tw.attention(q, k, v, mask=tw.causal(), backend="cpu")
    held = quick.ready.last
    assert held is not None
    monkeypatch.setattr(quick, "key_of", None)
    assert torch.equal(tw.attention(q, k, v, mask=tw.causal(), backend="cpu"), want)
    out, lse = tw.attention(q, k, v, mask=tw.causal(), backend="cpu", return_lse=True)
    assert torch.equal(out, want) and lse.shape == (2, 2, 9)
    quick.ready.clear()
    assert quick.ready.last is None


def like_the_last(q, k, v, **options):
    """Three calls of a kind, so that the next is compared with it."""
    for _ in range(3):
        tw.attention(q, k, v, backend="cpu", **options)
    assert quick.ready.last is not None


def test_what_differs_from_the_last_call_is_seen():
    q, k, v = draw(2, 2, 9, 16)
    like_the_last(q, k, v)
    exact = tw.attention(*(t.double() for t in (q, k, v)), backend="naive")
    torch.testing.assert_close(
        tw.attention(torch._neg_view(-q), k, v, backend="cpu").double(), exact, atol=2e-6, rtol=2e-6
    )
    for wrong in ({"k_offset": False}, {"h_offset": False}, {"q_offset": True}):
        with pytest.raises(TilewiseError):
            tw.attention(q, k, v, backend="cpu", **wrong)
    with pytest.raises(TilewiseError):
        tw.attention(q, k.double(), v, backend="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.attention(q, k, v, backend="cpu").dtype == torch.bfloat16
    halves = torch.vmap(lambda x: tw.attention(x, k, v, backend="cpu"))(torch.stack((q, 2 * q)))
    torch.testing.assert_close(halves[0].double(), exact, atol=2e-6, rtol=2e-6)
    leaf = q.clone().requires_grad_()
    (got,) = torch.autograd.grad(tw.attention(leaf, k, v, backend="cpu").sum(), leaf)
    assert got.abs().sum() > 0
    like_the_last(leaf, k, v)
    (again,) = torch.autograd.grad(tw.attention(leaf, k, v, backend="cpu").sum(), leaf)
    assert torch.equal(got, again)
    with torch.no_grad():
        assert not tw.attention(leaf, k, v, backend="cpu").requires_grad


def test_the_last_call_keeps_no_tensor():
    q, k, v = draw(2, 2, 9, 16)
    like_the_last(q, k, v)
    kept = weakref.ref(q)
    del q
    gc.collect()
    assert kept() is None


def test_without_torch_s_comparison_calls_are_looked_up(monkeypatch):
    monkeypatch.delattr("torch._C._dynamo.guards.TensorGuards")
    q, k, v = draw(2, 2, 9, 16)
    for _ in range(4):
        out = tw.attention(q, k, v, backend="cpu")
    assert quick.ready.last is None
    torch.testing.assert_close(out, tw.attention(q, k, v, backend="blockwise"), atol=2e-6, rtol=2e-6)


def run_often(times=5):
    tensors = draw(2, 4, 9, 16)
    for _ in range(times):
        tw.attention(*tensors, backend="cpu")
    return tensors


def test_fake_calls_are_like_no_real_one():
    """The kernel would write where a tensor without memory says its memory is."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    tensors = run_often()
    assert quick.ready.last is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = tw.attention(*tensors, backend="cpu")
    assert isinstance(out, FakeTensor) and out.shape == tensors[0].shape


def test_a_recorded_call_is_in_the_graph():
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = run_often()
    graph = make_fx(lambda x: tw.attention(x, k, v, backend="cpu"))(q)
    other = torch.randn_like(q)
    torch.testing.assert_close(graph(other), tw.attention(other, k, v, backend="naive"))


def test_a_list_of_terms_that_changes_is_read_anew():
    class Terms(list):
        pass

    q, k, v = draw(2, 4, 9, 16)
    terms = Terms([tw.softcap(2.0)])
    for _ in range(5):
        tw.attention(q, k, v, scores=terms, backend="cpu")
    terms[0] = tw.softcap(0.3)
    want = tw.attention(q, k, v, scores=tw.softcap(0.3), backend="naive")
    torch.testing.assert_close(tw.attention(q, k, v, scores=terms, backend="cpu"), want)
