"""The op layer: opcheck, gradcheck of first and second order, vmap, compile, export, autocast, checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from versions import OLD_DYNAMO

import tilewise as tw
from tilewise.ops import Numbers, call

H, HKV, N, M, D, DV = 4, 2, 5, 7, 3, 2


def tensors(dtype=torch.float64, batch=2, n=N, m=M, grad=True):
    make = torch.Generator().manual_seed(3)

    def randn(*shape):
        return torch.randn(*shape, dtype=dtype, generator=make).requires_grad_(grad)

    return randn(batch, H, n, D), randn(batch, HKV, m, D), randn(batch, HKV, m, DV)


def leaf(*shape, seed=5):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=make).requires_grad_()


def plain(leaves):
    return {}


def masked(leaves):
    return {"mask": tw.causal() & tw.window(3, 0) | tw.prefix(2), "q_offset": 0}


def biased(leaves):
    bias, slopes, sink = leaves
    return {"scores": (tw.softcap(2.0), tw.bias(bias), tw.alibi(slopes)), "sink": sink, "mask": tw.causal()}


def dropped(leaves):
    return {"dropout": 0.4, "seed": 17, "mask": tw.causal()}


PROBLEMS = {
    "plain": (plain, ()),
    "masked": (masked, ()),
    "biased": (biased, ((1, H, N, M), (H,), (H,))),
    "dropped": (dropped, ()),
}
each_problem = pytest.mark.parametrize("name", PROBLEMS)


def function(name):
    """(fn(q, k, v, *leaves) -> out, lse with -inf taken out; leaves)."""
    build, shapes = PROBLEMS[name]

    def run(q, k, v, *leaves):
        out, lse = tw.attention(q, k, v, return_lse=True, backend="blockwise", **build(leaves))
        return out, torch.where(torch.isfinite(lse), lse, 0.0)

    return run, tuple(leaf(*shape, seed=n) for n, shape in enumerate(shapes))


@each_problem
def test_gradcheck_forward_and_reverse_mode(name):
    run, leaves = function(name)
    gradcheck(run, (*tensors(), *leaves), check_forward_ad=True)


@each_problem
def test_gradgradcheck(name):
    run, leaves = function(name)
    gradgradcheck(run, (*tensors(batch=1), *leaves), check_fwd_over_rev=True)


@each_problem
def test_second_order_agrees_with_plain_autograd(name):
    """The hessian-vector product against torch's own, on attention written with torch operations."""
    run, leaves = function(name)
    inputs = (*tensors(batch=1), *leaves)
    weights = [torch.randn_like(x) for x in run(*inputs)]

    def plain_attention(q, k, v, *leaves):
        s = q @ k.repeat_interleave(H // HKV, 1).transpose(-1, -2) * D**-0.5
        i, j = torch.arange(N)[:, None], torch.arange(M)
        if name == "biased":
            bias, slopes, sink = leaves
            i = i + M - N
            s = 2.0 * torch.tanh(s / 2.0) + bias - slopes[:, None, None] * (i - j).abs()
        keep = torch.ones(N, M, dtype=torch.bool)
        if name == "masked":
            keep = (j <= i) & (i - j <= 3) | (j < 2)
        elif name in ("biased", "dropped"):
            keep = j <= torch.arange(N)[:, None] + M - N
        s = s.masked_fill(~keep, float("-inf"))
        if name == "biased":
            s = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
        lse = torch.logsumexp(s, -1)
        p = torch.exp(s - lse[..., None])[..., :M]
        if name == "dropped":
            kept = tw.dropout_mask(torch.tensor([17]), 0.4, q.shape[0], H, N, M)
            p = p * kept / (1 - 0.4)
        return p @ v.repeat_interleave(H // HKV, 1), lse

    def second(fn):
        first = torch.autograd.grad(
            sum((w * y).sum() for w, y in zip(weights, fn(*inputs), strict=True)), inputs, create_graph=True
        )
        return torch.autograd.grad(sum((g * g).sum() for g in first), inputs)

    for ours, theirs in zip(second(run), second(plain_attention), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_older_vmap_is_refused_by_name():
    q, k, v = tensors()
    out = tw.attention(q, k, v, backend="blockwise")
    with pytest.raises(tw.UnsupportedProblem, match=r"torch\.func"):
        torch.autograd.grad(out, q, torch.stack([out, out]), is_grads_batched=True)


def test_third_order_raises():
    q, k, v = tensors(batch=1)
    first = torch.autograd.grad(tw.attention(q, k, v, backend="blockwise").sum(), q, create_graph=True)[0]
    second = torch.autograd.grad(first.pow(2).sum(), q, create_graph=True)[0]
    with pytest.raises(tw.UnsupportedProblem, match="third-order"):
        torch.autograd.grad(second.sum(), q)


@each_problem
def test_opcheck(name):
    build, shapes = PROBLEMS[name]
    leaves = [leaf(*shape) for shape in shapes]
    from tilewise.written import write

    written = write(tensors(), None, **{"mask": None, "scores": (), "backend": "blockwise", **build(leaves)})
    q, k, v, *rest = written.tensors
    args = (
        q,
        k,
        v,
        rest,
        list(written.numbers.ints),
        list(written.numbers.floats),
        written.seed,
        written.numbers.text,
    )
    torch.library.opcheck(torch.ops.tilewise.attention.default, args)
    out, lse = torch.ops.tilewise.attention(*args)
    needs = [x.requires_grad for x in (q, k, v, *rest)]
    detached = (q.detach(), k.detach(), v.detach(), [x.detach() for x in rest], *args[4:])
    torch.library.opcheck(
        torch.ops.tilewise.attention_backward.default,
        (*detached, out.detach(), lse.detach(), torch.randn_like(out), torch.randn_like(lse), needs),
    )


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_fake_strides_are_the_real_ones(layout):
    q, k, v = (x.detach() for x in tensors(torch.float32))
    if layout == "bnhd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    real = tw.attention(q, k, v, backend="blockwise")
    meta = tw.attention(q.to("meta"), k.to("meta"), v.to("meta"), backend="blockwise")
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())
    order = sorted(range(4), key=real.stride)
    assert order == sorted(range(4), key=q.stride)


@pytest.mark.parametrize("backend", ["blockwise", "naive"])
@each_problem
def test_op_and_function_agree(name, backend):
    from tilewise.written import write

    build, shapes = PROBLEMS[name]
    leaves = [leaf(*shape) for shape in shapes]
    options = {"mask": None, "scores": (), "backend": backend, **build(leaves)}
    written = write(tensors(), None, **options)
    q, k, v, *rest = written.tensors
    by_op = torch.ops.tilewise.attention(
        q,
        k,
        v,
        rest,
        list(written.numbers.ints),
        list(written.numbers.floats),
        written.seed,
        written.numbers.text,
    )
    by_function = call(written.tensors, written.seed, Numbers(*written.numbers))
    wanted = [x for x in written.tensors if x.requires_grad]
    for a, b in zip(by_op, by_function, strict=True):
        assert torch.equal(a, b)
    grads = [
        torch.autograd.grad(y[0].sum() + y[1].nan_to_num(0, 0, 0).sum(), wanted) for y in (by_op, by_function)
    ]
    for a, b in zip(*grads, strict=True):
        # naive differentiates terms by torch's autograd in eager code and by the tree inside the op: rounding differs.
        assert torch.equal(a, b) if backend == "blockwise" else torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@each_problem
def test_vmap_is_a_loop(name):
    run, leaves = function(name)
    q, k, v = (torch.stack([x, 2 * x, -x]).detach() for x in tensors())

    def forward(q, k, v, *leaves):
        return run(q, k, v, *leaves)[0]

    randomness = "same" if name == "dropped" else "error"
    ours = torch.vmap(forward, in_dims=(0, 0, 0, *[None] * len(leaves)), randomness=randomness)(
        q, k, v, *leaves
    )
    loop = torch.stack([forward(*x, *leaves) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(ours, loop, rtol=1e-12, atol=1e-12)

    def loss(q, k, v, *leaves):
        return forward(q, k, v, *leaves).pow(2).sum()

    which = tuple(range(3 + len(leaves)))
    per_sample = torch.func.grad(loss, which)
    ours = torch.vmap(per_sample, in_dims=(0, 0, 0, *[None] * len(leaves)), randomness=randomness)(
        q, k, v, *leaves
    )
    for n, entry in enumerate(zip(q, k, v, strict=True)):
        for a, b in zip(ours, per_sample(*entry, *leaves), strict=True):
            torch.testing.assert_close(a[n], b, rtol=1e-10, atol=1e-10)


def test_vmap_over_leaves_and_other_dimensions():
    q, k, v = (x.detach() for x in tensors())
    slopes = torch.rand(3, H, dtype=torch.float64)
    ours = torch.vmap(lambda m: tw.attention(q, k, v, scores=tw.alibi(m), backend="blockwise"))(slopes)
    loop = torch.stack([tw.attention(q, k, v, scores=tw.alibi(m), backend="blockwise") for m in slopes])
    torch.testing.assert_close(ours, loop)
    stacked = torch.stack([q, -q], 2)
    ours = torch.vmap(lambda q: tw.attention(q, k, v, backend="blockwise"), in_dims=2, out_dims=1)(stacked)
    loop = torch.stack([tw.attention(x, k, v, backend="blockwise") for x in (q, -q)], 1)
    torch.testing.assert_close(ours, loop)


def test_vmap_randomness():
    q, k, v = (torch.stack([x, x]).detach() for x in tensors())

    def run(q, k, v):
        return tw.attention(q, k, v, dropout=0.5, seed=3, backend="blockwise")

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(run)(q, k, v)
    same = torch.vmap(run, randomness="same")(q, k, v)
    assert torch.equal(same[0], same[1])
    different = torch.vmap(run, randomness="different")(q, k, v)
    assert not torch.equal(different[0], different[1])
    folded = run(*(x.flatten(0, 1) for x in (q, k, v))).unflatten(0, (2, -1))
    torch.testing.assert_close(different, folded)


def test_forward_over_reverse_and_hessian():
    q, k, v = (x.detach() for x in tensors(batch=1, n=2, m=3))

    def loss(q):
        return tw.attention(q, k, v, mask=tw.causal(), backend="blockwise").pow(3).sum()

    forward_over_reverse = torch.func.hessian(loss)(q)
    reverse_over_reverse = torch.func.jacrev(torch.func.jacrev(loss))(q)
    reverse_over_forward = torch.func.jacrev(torch.func.jacfwd(loss))(q)
    torch.testing.assert_close(forward_over_reverse, reverse_over_reverse)
    torch.testing.assert_close(reverse_over_forward, reverse_over_reverse)


@each_problem
def test_compile_fullgraph_with_gradients(name):
    if name == "masked" and OLD_DYNAMO:
        pytest.skip("masks are composed inside the compiled function")
    run, leaves = function(name)
    inputs = (*tensors(), *leaves)

    def loss(*inputs):
        out, lse = run(*inputs)
        return (out * out).sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), loss(*inputs))
    ours = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(ours, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_compile_does_not_recompile_for_another_length():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def run(q, k, v):
        return tw.attention(q, k, v, mask=tw.causal(), backend="blockwise")

    torch._dynamo.reset()
    for n in (5, 9, 31, 64):
        q, k, v = (x.detach() for x in tensors(torch.float32, n=n, m=n + 1))
        torch.testing.assert_close(run(q, k, v), tw.attention(q, k, v, mask=tw.causal(), backend="blockwise"))
    assert counter.frame_count == 1


def test_compile_with_a_custom_mask_made_outside():
    n = 3
    mask = tw.custom(lambda q, k: (q - k) % n == 0) & tw.window(5, None)
    q, k, v = (x.detach() for x in tensors(torch.float32))
    run = torch.compile(
        lambda q, k, v: tw.attention(q, k, v, mask=mask, backend="blockwise"), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(run(q, k, v), tw.attention(q, k, v, mask=mask, backend="blockwise"))


@each_problem
def test_export_with_dynamic_lengths(name):
    if name == "masked" and OLD_DYNAMO:
        pytest.skip("masks are composed inside the exported module")
    build, shapes = PROBLEMS[name]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.leaves = torch.nn.ParameterList(
                [leaf(*(1 if s in (N, M) else s for s in shape)) for shape in shapes]
            )

        def forward(self, q, k, v):
            return tw.attention(q, k, v, backend="blockwise", **build(list(self.leaves)))

    model = Model()
    q, k, v = (x.detach() for x in tensors())
    n, m = torch.export.Dim("n", max=4096), torch.export.Dim("m", max=4096)
    program = torch.export.export(model, (q, k, v), dynamic_shapes=({2: n}, {2: m}, {2: m}))
    for lengths in ((N, M), (11, 13)):
        q, k, v = (x.detach() for x in tensors(n=lengths[0], m=lengths[1]))
        torch.testing.assert_close(program.module()(q, k, v), model(q, k, v))


def test_autocast_casts_and_returns_gradients_in_the_inputs_types():
    q, k, v = tensors(torch.float32)
    v = v.detach().bfloat16().requires_grad_()
    with pytest.raises(tw.DTypeError, match="one dtype"):
        tw.attention(q, k, v, backend="blockwise")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tw.attention(q, k, v, backend="blockwise")
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors()

    def run(q, k, v):
        return tw.attention(q, k, v, dropout=0.3, seed=5, backend="blockwise")

    plain = torch.autograd.grad(run(q, k, v).pow(2).sum(), (q, k, v))
    again = torch.autograd.grad(checkpoint(run, q, k, v, use_reentrant=False).pow(2).sum(), (q, k, v))
    if reentrant:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        checkpoint(run, *leaves, use_reentrant=True).pow(2).sum().backward()
        again = [x.grad for x in leaves]
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


def test_recorders_see_the_op_of_a_call_on_real_tensors():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(tw.attention(q, k, v), FakeTensor)
    graph = make_fx(lambda q, k, v: tw.attention(q, k, v, mask=tw.causal()))(q, k, v)
    torch.testing.assert_close(graph(v, q, k), tw.attention(v, q, k, mask=tw.causal()))
