"""The short way of repeated calls: the same results as the long way, and never taken for a call that differs."""

import gc
import threading
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise import quick
from tilewise.errors import OptionError, ShapeError, TilewiseError

pytest.importorskip("numba")


def draw(*shape, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for _ in range(3)]


def is_short(call):
    """Whether the second of two equal calls takes the short way."""
    quick.ready.clear()
    call()
    before = [key for key, found in quick.ready.items() if found is not None]
    call()
    return bool(before) and len(quick.ready) == 1


@pytest.fixture(autouse=True)
def fresh():
    quick.ready.clear()
    yield
    quick.ready.clear()


OPTIONS = {
    "plain": dict,
    "causal": lambda: {"mask": tw.causal()},
    "window": lambda: {"mask": tw.causal() & tw.window(5, 0)},
    "alibi": lambda: {"scores": tw.alibi(torch.tensor([0.5, 0.25]))},
    "bias and softcap": lambda: {"scores": (tw.bias(torch.randn(1, 2, 9, 9)), tw.softcap(3.0))},
    "sink": lambda: {"sink": torch.randn(2)},
    "offsets": lambda: {"mask": tw.causal(), "q_offset": -3, "k_offset": 2},
    "scale": lambda: {"scale": 0.3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_repeated_calls_equal_the_first_and_the_reference(name):
    options = OPTIONS[name]()
    first = draw(2, 2, 9, 16)
    tw.attention(*first, backend="cpu", **options)
    q, k, v = draw(2, 2, 9, 16)
    out, lse = tw.attention(q, k, v, backend="cpu", return_lse=True, **options)
    want, want_lse = tw.attention(
        *(x.double() for x in (q, k, v)), backend="naive", return_lse=True, allow_quadratic=True, **options
    )
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-6, rtol=2e-6)
    assert is_short(lambda: tw.attention(q, k, v, backend="cpu", **options))


def test_new_leaves_of_the_same_shape_are_read():
    q, k, v = draw(1, 2, 9, 16)
    results = []
    for _ in range(3):
        bias = torch.randn(1, 2, 9, 9)
        got = tw.attention(q, k, v, scores=tw.bias(bias), backend="cpu")
        want = tw.attention(q, k, v, scores=tw.bias(bias), backend="blockwise")
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
        results.append(got)
    assert not torch.equal(results[1], results[2])


def test_gradients_on_the_short_way():
    for _ in range(2):
        tensors = [x.requires_grad_() for x in draw(1, 2, 70, 16)]
        slopes = torch.tensor([0.5, 0.25], requires_grad=True)
        options = {"mask": tw.causal(), "scores": tw.alibi(slopes)}
        do = torch.randn(1, 2, 70, 16)
        got = torch.autograd.grad(tw.attention(*tensors, backend="cpu", **options), [*tensors, slopes], do)
        want = torch.autograd.grad(
            tw.attention(*tensors, backend="blockwise", **options), [*tensors, slopes], do
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_second_order_forward_mode_and_vmap_after_a_short_call():
    q, k, v = (x.requires_grad_() for x in draw(1, 1, 6, 8))

    def f(q):
        return tw.attention(q, k, v, mask=tw.causal(), backend="cpu")

    f(q), f(q)
    (g,) = torch.autograd.grad(f(q).square().sum(), q, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), q)
    want = torch.func.grad(
        lambda x: torch.func.grad(lambda y: tw.attention(y, k, v, mask=tw.causal()).square().sum())(x).sum()
    )(q)
    torch.testing.assert_close(h, want, atol=1e-4, rtol=1e-4)
    stacked = torch.randn(3, 1, 1, 6, 8)
    torch.testing.assert_close(
        torch.func.vmap(f)(stacked), torch.stack([f(x) for x in stacked]), atol=1e-5, rtol=1e-5
    )
    _, tangent = torch.func.jvp(f, (q,), (torch.ones_like(q),))
    assert tangent.abs().sum() > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k[:, :, :8], v),
        lambda q, k, v: (q, k, v.double()),
        lambda q, k, v: (q[..., :8], k, v),
    ],
)
def test_a_call_that_does_not_fit_is_refused_after_one_that_did(change):
    q, k, v = draw(1, 2, 9, 16)
    for _ in range(3):
        tw.attention(q, k, v, backend="cpu")
    with pytest.raises(TilewiseError):
        tw.attention(*change(q, k, v), backend="cpu")


def test_a_bias_that_does_not_fit_is_refused_after_one_that_did():
    q, k, v = draw(1, 2, 9, 16)
    for _ in range(2):
        tw.attention(q, k, v, scores=tw.bias(torch.zeros(1, 2, 9, 9)), backend="cpu")
    with pytest.raises(ShapeError):
        tw.attention(q, k, v, scores=tw.bias(torch.zeros(1, 2, 9, 8)), backend="cpu")


def test_autocast_deterministic_and_inference_mode_keep_their_meaning():
    q, k, v = draw(1, 2, 9, 16)
    for _ in range(2):
        assert tw.attention(q, k, v, backend="cpu").dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.attention(q, k, v, backend="cpu").dtype == torch.bfloat16
    with torch.inference_mode():
        assert tw.attention(q, k, v, backend="cpu").is_inference()
    q.requires_grad_()
    assert tw.attention(q, k, v, backend="cpu").requires_grad
    with torch.no_grad():
        assert not tw.attention(q, k, v, backend="cpu").requires_grad


def test_autocast_that_changes_nothing_takes_the_short_way():
    """As in training: projections give what autocast wants, and their gradients are the long way's."""
    q, k, v = (t.requires_grad_() for t in draw(1, 2, 9, 16, dtype=torch.bfloat16))
    plain = tw.attention(q, k, v, mask=tw.causal(), backend="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert is_short(lambda: tw.attention(q, k, v, mask=tw.causal(), backend="cpu"))
        out = tw.attention(q, k, v, mask=tw.causal(), backend="cpu")
        wide = tw.attention(q.float(), k, v, mask=tw.causal(), backend="cpu")
    assert torch.equal(out, plain) and torch.equal(wide, plain)
    for one, other in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(plain.sum(), (q, k, v)), strict=True
    ):
        assert torch.equal(one, other)
    with torch.autocast("cpu", torch.float16):
        assert tw.attention(q, k, v, mask=tw.causal(), backend="cpu").dtype == torch.float16


def test_a_value_that_is_not_finite_reaches_who_sees_it_only():
    q, k, v = draw(1, 1, 9, 16)
    for _ in range(2):
        tw.attention(q, k, v, mask=tw.causal(), backend="cpu")
    v[0, 0, 5, 3] = float("nan")
    out = tw.attention(q, k, v, mask=tw.causal(), backend="cpu")
    seen = torch.isnan(out)
    assert seen[0, 0, 5:, 3].all()
    assert seen.sum() == 4


def test_threads_share_nothing():
    inputs = [draw(1, 4, 200, 32) for _ in range(4)]
    want = [tw.attention(*x, mask=tw.causal(), backend="cpu") for x in inputs]
    wrong = []

    def work(n):
        for _ in range(30):
            if not torch.equal(tw.attention(*inputs[n], mask=tw.causal(), backend="cpu"), want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_permuted_layouts_keep_their_order():
    q, k, v = (x.transpose(1, 2) for x in draw(2, 9, 4, 16))
    for _ in range(2):
        out = tw.attention(q, k, v, backend="cpu")
        assert out.stride() == q.stride()
    torch.testing.assert_close(out, tw.attention(q, k, v, backend="blockwise"), atol=2e-6, rtol=2e-6)


def test_the_store_is_bounded(monkeypatch):
    monkeypatch.setattr(quick, "MOST", 4)
    for n in range(1, 12):
        tw.attention(*draw(1, 1, n, 8), backend="cpu")
    assert len(quick.ready) <= 4


def test_scores_that_can_be_read_once_are_all_applied():
    q, k, v = draw(1, 2, 9, 16)
    bias = torch.randn(1, 2, 9, 9)
    want = tw.attention(q, k, v, scores=tw.bias(bias), backend="blockwise")
    for _ in range(3):
        got = tw.attention(q, k, v, scores=(tw.bias(t) for t in [bias]), backend="cpu")
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    "options",
    [{"q_offset": True}, {"q_offset": 1.0}, {"k_offset": True}, {"h_offset": True}, {"dropout": False}],
    ids=str,
)
def test_what_equals_a_number_and_is_none_is_refused_after_the_number(options):
    q, k, v = draw(1, 2, 9, 16)
    for _ in range(2):
        tw.attention(q, k, v, backend="cpu", q_offset=1, k_offset=1, h_offset=1)
    with pytest.raises(OptionError):
        tw.attention(q, k, v, backend="cpu", **{"q_offset": 1, "k_offset": 1, "h_offset": 1} | options)


@pytest.mark.parametrize("other", [torch._neg_view, lambda t: torch._efficientzerotensor(t.shape)])
@pytest.mark.parametrize("at", range(5))
def test_numbers_that_memory_does_not_hold_are_read(other, at):
    tensors = [*draw(1, 2, 9, 16), torch.randn(1, 2, 9, 9), torch.randn(2)]

    def run(q, k, v, bias, sink, backend="cpu"):
        return tw.attention(q, k, v, scores=tw.bias(bias), sink=sink, backend=backend)

    run(*tensors), run(*tensors)
    want = [*tensors]
    want[at] = other(tensors[at]) + torch.zeros_like(tensors[at])
    tensors[at] = other(tensors[at])
    for _ in range(2):
        torch.testing.assert_close(run(*tensors), run(*want, backend="blockwise"), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("at", range(2))
def test_gradients_whose_numbers_memory_does_not_hold_are_read(at):
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 70, 16))
    given = [torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70)]
    turned = [torch._neg_view(-g) if n == at else g for n, g in enumerate(given)]
    results = tw.attention(q, k, v, return_lse=True, backend="cpu")
    got = torch.autograd.grad(results, (q, k, v), turned, retain_graph=True)
    want = torch.autograd.grad(results, (q, k, v), given)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_a_bias_that_is_the_imaginary_part_of_a_conjugate():
    q, k, v = draw(1, 2, 9, 16)
    z = torch.randn(1, 2, 9, 9, dtype=torch.complex64)
    for _ in range(2):
        got = tw.attention(q, k, v, scores=tw.bias(z.conj().imag), backend="cpu")
        want = tw.attention(q, k, v, scores=tw.bias(-z.imag), backend="blockwise")
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("known", [True, False])
def test_what_a_backend_prepared_may_know_the_backward_too(known, monkeypatch):
    """It is asked in first order only, and where it has none the ordinary backward gives the same gradients."""
    tensors = [x.requires_grad_() for x in draw(1, 2, 33, 16)]
    do, asked = torch.randn(1, 2, 33, 16), []

    def call():
        return tw.attention(*tensors, mask=tw.causal(), backend="cpu")

    def backward(given, saved, grads, needs):
        asked.append((given, saved, grads, needs))
        return tuple(torch.full_like(t, 7.0) for t in given) if known else None

    want = torch.autograd.grad(call(), tensors, do)
    (found,) = quick.ready.values()
    monkeypatch.setattr(type(found.run), "backward", staticmethod(backward), raising=False)
    out = call()
    got = torch.autograd.grad(out, tensors, do)
    ((given, saved, grads, needs),) = asked
    assert all(a is b for a, b in zip(given, tensors, strict=True)) and needs == (True,) * 3
    assert torch.equal(saved[0], out) and torch.equal(grads[0], do) and grads[1] is None
    assert all(
        torch.equal(a, torch.full_like(b, 7.0) if known else b) for a, b in zip(got, want, strict=True)
    )
    (first,) = torch.autograd.grad(call().sum(), tensors[0], create_graph=True)
    torch.autograd.grad(first.sum(), tensors[1])
    assert len(asked) == 1


def _storages(*tensors):
    from torch.multiprocessing.reductions import StorageWeakRef

    return [StorageWeakRef(t.untyped_storage()) for t in tensors]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", ["cpu", "blockwise"])
def test_what_is_remembered_of_a_call_holds_none_of_its_memory(backend, name):
    """Neither inputs nor results nor gradients, of the first call of a kind nor of later ones, without a collection."""

    def step():
        options = OPTIONS[name]()
        tensors = [x.requires_grad_() for x in draw(1, 2, 9, 16)]
        terms = [*options.get("scores", ())] if isinstance(options.get("scores"), tuple) else []
        terms += [options["scores"]] if "scores" in options and not terms else []
        leaves = [leaf for term in terms for leaf in term.term.leaves]
        leaves += [options["sink"]] if "sink" in options else []
        out = tw.attention(*tensors, backend=backend, **options)
        grads = torch.autograd.grad(out, tensors, torch.randn_like(out))
        return _storages(*tensors, *leaves, out, *grads)

    gc.disable()
    try:
        for _ in range(4):
            assert all(storage.expired() for storage in step())
    finally:
        gc.enable()


def test_what_triton_prepared_holds_no_memory_of_the_call(monkeypatch):
    """Launches aside: what is laid out for the next call of a kind has no tensor of this one."""
    from tilewise.backends.cpu.backend import Cpu
    from tilewise.backends.triton import prepared

    laid_out = SimpleNamespace(slots={n: n for n in range(200)})
    monkeypatch.setattr(prepared, "Direct", lambda *_: laid_out)
    monkeypatch.setattr(prepared, "UNREAD", 0)

    def prepare(self, problem, inputs):
        leaf_at = tuple(range(len(inputs.leaves)))
        slots = SimpleNamespace(leaf_at=leaf_at, leaves=[SimpleNamespace(step=1)] * len(leaf_at))
        recipe = SimpleNamespace(
            run=None, again=None, types=(), values=[], grid=1, aligned=False, slots=slots, problem=problem,
            out_strides=inputs.q.stride(),
        )  # fmt: skip
        made.append(prepared.Prepared(recipe, inputs))
        return made[-1]

    def step():
        tensors, sink, bias = draw(1, 2, 9, 16), torch.randn(2), torch.randn(1, 2, 9, 9)
        tw.attention(*tensors, scores=tw.bias(bias), sink=sink, backend="cpu")
        return _storages(*tensors, sink, bias)

    made = []
    monkeypatch.setattr(Cpu, "prepare", prepare)
    storages = step()
    assert len(made) == 1 and all(storage.expired() for storage in storages)
