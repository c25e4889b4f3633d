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


def test_a_backend_keeps_what_it_likes_beside_its_call():
    """A kernel's launcher was called in place of what a GPU backend had prepared: it has the attribute `direct`."""
    from types import SimpleNamespace

    run = SimpleNamespace(direct=None, again=None, launch=None, run=None)
    found = quick.Ready(run, None, (None, None))
    assert quick.Like(lambda *t: True, (None, None, None), (None,) * 8, found).run is run


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


Q, K, V = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
CAUSAL = tw.causal()
DIFFERENT = {
    "mask": {"mask": tw.window(2, 0)},
    "no mask": {"mask": None},
    "scores": {"scores": tw.softcap(0.5)},
    "sink": {"sink": torch.full((4,), 2.0)},
    "scale": {"scale": 0.7},
    "q_offset": {"q_offset": 3},
    "k_offset": {"k_offset": 3},
    "h_offset": {"h_offset": 3},
    "dropout": {"dropout": 0.5, "seed": 3},
    "backend": {"backend": "naive", "allow_quadratic": True},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_an_option_changes_is_seen(name):
    for _ in range(4):
        plain = tw.attention(Q, K, V, **{"mask": CAUSAL, "backend": "cpu"})
    assert quick.ready.last is not None
    options = {"mask": CAUSAL, "backend": "cpu"} | DIFFERENT[name]
    got = tw.attention(Q, K, V, **options)
    quick.ready.clear()
    assert torch.equal(got, tw.attention(Q, K, V, **options))
    assert name in ("h_offset", "backend") or not torch.allclose(got, plain, atol=1e-3)


def test_options_that_change_no_number_are_compared_too():
    for _ in range(4):
        tw.attention(Q, K, V, mask=CAUSAL, backend="cpu")
    known = quick.ready.last.matches
    options = (None, None, 0, 0, None, False, "cpu", False)
    assert known((Q, K, V), CAUSAL, (), None, options)
    for at, other in ((1, 0), (4, True), (5, True), (6, "auto"), (7, True), (3, False), (2, 0.0)):
        changed = (*options[:at], other, *options[at + 1 :])
        assert not known((Q, K, V), CAUSAL, (), None, changed), at


def test_tensors_that_lie_otherwise_are_seen():
    for _ in range(4):
        want = tw.attention(Q, K, V, backend="cpu")
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (Q, K, V)]
    assert torch.equal(tw.attention(*turned, backend="cpu"), want)
    shorter = [K[:, :, :5], V[:, :, :5]]
    got = tw.attention(Q, *shorter, backend="cpu")
    torch.testing.assert_close(got, tw.attention(Q, *shorter, backend="naive"))


def test_a_backend_that_is_registered_is_asked():
    from tilewise.dispatch import registry

    tensors = run_often()
    held = quick.ready.last
    options = (None, (), None, (None, None, 0, 0, None, False, "cpu", False))
    assert held.matches(tensors, *options)
    entries = dict(registry._entries)
    try:
        registry.register("another", "tilewise.backends.reference.naive", "Naive")
        assert quick.ready.last is None
        assert not held.matches(tensors, *options)
    finally:
        registry._entries = entries


def test_a_mode_sees_a_call_that_is_like_the_last():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensors = run_often()
    want = tw.attention(*tensors, backend="cpu")
    with Watch():
        got = tw.attention(*tensors, backend="cpu")
    assert seen and torch.equal(got, want)


def test_threads_are_those_of_now_and_change_no_bit():
    q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4096, 64), torch.randn(1, 2, 4096, 64)
    had, found = torch.get_num_threads(), []
    try:
        for threads in (2, 2, 2, 1, 3, 2):
            torch.set_num_threads(threads)
            found.append(tw.attention(q, k, v, backend="cpu"))
    finally:
        torch.set_num_threads(had)
    assert all(torch.equal(found[0], out) for out in found[1:])


def test_calls_at_once_share_nothing():
    from concurrent.futures import ThreadPoolExecutor

    calls = [
        [torch.randn(1, 4, 1, 64), torch.randn(1, 2, 2048, 64), torch.randn(1, 2, 2048, 64)] for _ in range(4)
    ]
    want = [tw.attention(*x, backend="cpu") for x in calls]
    run_often()
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda n: tw.attention(*calls[n % 4], backend="cpu"), range(200)))
    assert all(torch.equal(out, want[n % 4]) for n, out in enumerate(got))


def test_tangents_go_through_a_call_that_is_like_the_last():
    from torch.autograd import forward_ad

    q, k, v = run_often()
    tangent = torch.randn_like(q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        got = forward_ad.unpack_dual(tw.attention(dual, k, v, backend="cpu")).tangent
    _, want = torch.func.jvp(lambda x: tw.attention(x, k, v, backend="naive"), (q,), (tangent,))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
