"""Transforms of torch.func under those who record ops (make_fx) and under torch.compile: taken, or refused by name."""

from __future__ import annotations

import pytest
import torch
from versions import TORCH, needs_dynamo

import tilewise as tw

func = torch.func


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


def drawn():
    return [torch.randn(2, h, n, 4, dtype=torch.float64) for h, n in ((4, 5), (2, 7), (2, 7))]


def loss(q, k, v):
    out, lse = tw.attention(q, k, v, mask=tw.causal(), scores=tw.softcap(3.0), return_lse=True)
    return out.square().sum() + lse.sin().sum()


def one(q, k, v):
    return loss(q[None], k[None], v[None])


ALL = (0, 1, 2)
TAKEN = {
    "grad": func.grad(loss, argnums=ALL),
    "grad_and_value": func.grad_and_value(loss, argnums=ALL),
    "vjp": lambda *x: func.vjp(loss, *x)[1](torch.ones((), dtype=torch.float64)),
    "vmap": func.vmap(one),
    "per-sample": func.vmap(func.grad(one, argnums=ALL)),
}
DERIVATIVES = {
    "jvp": lambda *x: func.jvp(loss, tuple(x), tuple(x)),
    "hessian": lambda *x: func.grad(lambda q: func.grad(loss)(q, *x[1:]).sum())(x[0]),
}


def flat(result):
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", TAKEN)
def test_make_fx_over_transforms_records_the_ops(name, mode):
    """The graph holds Tilewise's ops and nothing of their inside, and gives the same for other tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(TAKEN[name], tracing_mode=mode)(*drawn())
    targets = [str(node.target) for node in graph.graph.nodes]
    assert sum(target.startswith("tilewise.attention.") for target in targets) == 1
    backward = sum(target.startswith("tilewise.attention_backward.") for target in targets)
    assert backward == (name != "vmap")
    assert not {"aten.bmm.default", "aten.mm.default", "aten.exp.default", "aten.amax.default"} & set(targets)
    other = drawn()
    torch.testing.assert_close(flat(graph(*other)), flat(TAKEN[name](*other)))


@pytest.mark.parametrize("name", DERIVATIVES)
def test_make_fx_over_what_is_no_op_says_so(name):
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(tw.UnsupportedProblem, match="second order inside compiled, recorded.*\n.*outside"):
        make_fx(DERIVATIVES[name])(*drawn())


@pytest.mark.parametrize("name", [*TAKEN, *DERIVATIVES])
def test_transforms_inside_compiled_code_run_uncompiled(name):
    """The frame is given up and runs eagerly, with the same result, forward mode and second order included."""
    if name == "vjp" and TORCH < (2, 8):
        pytest.skip("this dynamo cannot run func.vjp uncompiled")
    torch._dynamo.reset()
    fn, x = {**TAKEN, **DERIVATIVES}[name], drawn()
    compiled = torch.compile(lambda *x: fn(*x), backend="aot_eager")
    torch.testing.assert_close(flat(compiled(*x)), flat(fn(*x)))


@needs_dynamo
def test_transforms_inside_one_whole_graph_are_refused_with_the_reason():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: func.grad(loss)(*x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="transforms of torch.func around attention inside torch.compile"):
        compiled(*drawn())


def test_a_backward_of_eager_attention_inside_compiled_code():
    """dynamo interrupts the graph for it, and leaves the library's own frames alone."""
    torch._dynamo.reset()
    x = [t.requires_grad_() for t in drawn()]
    value = loss(*x)
    want = torch.autograd.grad(value, x, retain_graph=True)

    def step(y):
        y = y * 2
        value.backward()
        return y + 1

    assert torch.compile(step, backend="eager")(torch.ones(1)) == 3
    torch.testing.assert_close([t.grad for t in x], list(want))


def test_recorders_before_dispatch_see_each_call():
    from torch.fx.experimental.proxy_tensor import make_fx

    def three(q, k, v):
        for _ in range(3):  # the second finds what the first one left
            out = tw.attention(q, k, v, mask=tw.causal())
        return out

    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    three(q, k, v)
    graph = make_fx(three, pre_dispatch=True)(q, k, v)
    assert sum(node.target == torch.ops.tilewise.attention.default for node in graph.graph.nodes) == 3
    torch.testing.assert_close(graph(v, q, k), three(v, q, k))


@pytest.mark.skipif(TORCH < (2, 11), reason="not tried with an older torch")
def test_recorders_before_dispatch_see_gradients():
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradients(q, k, v):
        return torch.autograd.grad(tw.attention(q, k, v, mask=tw.causal()).pow(2).sum(), (q, k, v))

    given, others = ([torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3)] for _ in range(2))
    graph = make_fx(gradients, pre_dispatch=True)(*given)
    torch.testing.assert_close(list(graph(*others)), list(gradients(*others)))
