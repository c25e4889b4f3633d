"""PyTorch's SDPA by Tilewise: torch's meaning, shape for shape, and routing of unmodified models."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from flash_reference import hold, run, short, thin
from oracle import Dense
from torch.nn.functional import scaled_dot_product_attention as captured_early
from torch.utils.checkpoint import checkpoint
from versions import needs_dynamo

import tilewise as tw
from tilewise.compat import sdpa, sdpa_kernel

bias_module = pytest.importorskip("torch.nn.attention.bias")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


@pytest.fixture
def calls(monkeypatch):
    """How often Tilewise's attention ran under a shim."""
    seen = []
    plain = sdpa.attention

    def counted(*args, **kwargs):
        seen.append(kwargs.get("backend"))
        return plain(*args, **kwargs)

    monkeypatch.setattr(sdpa, "attention", counted)
    return seen


def same(*args, rtol=1e-5, **kwargs):
    """The shim equals torch, value and shape, in float64 against torch's own float64."""
    got, want = (
        sdpa.scaled_dot_product_attention(*args, **kwargs),
        F.scaled_dot_product_attention(*args, **kwargs),
    )
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-7)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


LENGTHS = [(4, 4), (8, 64), (64, 8), (143, 128), (1, 37), (65, 65), (256, 152), (37, 312)]
AXES = {
    "dtype": [torch.float16, torch.bfloat16, torch.float32],
    "dim": [8, 16, 21, 32, 64, 72, 96, 203],
    "mask": [None, "causal", "bool", "float", "float and causal", "row"],
    "scale": [None, "1/D"],
    "grouped": [False, True],
}


def check_torch_grid(case, lengths):
    """torch's own suite's shapes, held to float64 by the 2x and 3x rule, mask gradient included."""
    nq, nk = lengths
    heads = (4, 2) if case["grouped"] else (4, 4)
    shapes = {"q": (nq, heads[0]), "k": (nk, heads[1]), "v": (nk, heads[1])}
    inputs = {name: torch.randn(1, n, h, case["dim"]).to(case["dtype"]) for name, (n, h) in shapes.items()}
    scale = None if case["scale"] is None else 1 / case["dim"]
    kind = case["mask"] or ""
    keep = torch.ones(nq, nk, dtype=torch.bool).tril() if "causal" in kind else None
    allowed = torch.rand(1, 1, nq, nk) < 0.8 if kind == "bool" else None
    if "float" in kind or kind == "row":
        inputs["mask"] = torch.randn(*((4, nq, nk) if "float" in kind else (1, 1, 1, nk))).to(case["dtype"])
    do = torch.randn_like(inputs["q"])

    def call(x):
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        out = sdpa.scaled_dot_product_attention(
            q, k, v, x.get("mask", allowed), 0.0, "causal" in kind, scale=scale, enable_gqa=case["grouped"]
        )
        return out.transpose(1, 2), out.new_zeros(1, 4, nq)

    def build(x):
        added = (lambda s: s + x["mask"]) if "mask" in x else None
        return Dense(keep=keep if allowed is None else allowed, score=added, scale=scale)

    got = run(call, inputs, do)
    del got["lse"]
    hold(got, inputs, build, do)


@pytest.mark.parametrize("case", thin(24, 9, lengths=LENGTHS, **AXES), ids=short)
def test_torch_grid(case):
    check_torch_grid(case, case["lengths"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", thin(30, 10, lengths=[*LENGTHS, (512, 1024), (2048, 587), (1024, 1024)], **AXES), ids=short
)
def test_torch_grid_full(case):
    check_torch_grid(case, case["lengths"])


def test_ranks_and_broadcasting():
    same(randn(5, 8), randn(7, 8), randn(7, 8))
    same(randn(3, 5, 8), randn(3, 7, 8), randn(3, 7, 4), attn_mask=randn(3, 5, 7))
    same(randn(2, 3, 5, 8), randn(2, 1, 7, 8), randn(2, 1, 7, 8))
    same(randn(1, 3, 5, 8), randn(4, 3, 7, 8), randn(4, 3, 7, 8), is_causal=True)
    same(randn(2, 3, 2, 5, 8), randn(2, 1, 2, 7, 8), randn(1, 3, 1, 7, 8), attn_mask=randn(2, 1, 1, 5, 7))
    same(randn(2, 3, 2, 5, 8), randn(2, 1, 2, 7, 8), randn(1, 3, 1, 7, 8), attn_mask=randn(3, 2, 5, 7) > -0.5)
    same(randn(2, 2, 0, 8), randn(2, 2, 4, 8), randn(2, 2, 4, 8))
    same(randn(2, 2, 3, 8), randn(2, 2, 0, 8), randn(2, 2, 0, 8))
    same(randn(2, 2, 3, 8), randn(2, 2, 4, 8), randn(2, 2, 4, 8), scale=0.0)


def test_grouped_heads_only_when_asked():
    q, k, v = randn(2, 6, 5, 8), randn(2, 2, 7, 8), randn(2, 3, 7, 8)
    same(q, k, v, enable_gqa=True)
    with pytest.raises(tw.ShapeError, match="enable_gqa"):
        sdpa.scaled_dot_product_attention(q, k, k)
    with pytest.raises(tw.ShapeError, match="divide"):
        sdpa.scaled_dot_product_attention(q, randn(2, 4, 7, 8), randn(2, 4, 7, 8), enable_gqa=True)


@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (6, 6)])
def test_causal_is_top_left_and_the_bias_objects_say_otherwise(lengths):
    q, k = randn(1, 2, lengths[0], 8), randn(1, 2, lengths[1], 8)
    same(q, k, k, is_causal=True)
    same(q, k, k, attn_mask=bias_module.causal_upper_left(*lengths))
    if lengths[0] <= lengths[1]:
        same(q, k, k, attn_mask=bias_module.causal_lower_right(*lengths))
    with pytest.raises(tw.OptionError, match="is_causal"):
        sdpa.scaled_dot_product_attention(
            q, k, k, attn_mask=bias_module.causal_lower_right(*lengths), is_causal=True
        )


def test_a_causal_mask_made_for_other_lengths():
    """Torch looks at the mask's own sizes: a square one is top-left, another one fits the call or is refused."""
    q, k = randn(1, 2, 4, 8), randn(1, 2, 9, 8)
    for made in (bias_module.causal_lower_right(3, 3), bias_module.causal_upper_left(3, 5)):
        same(q, k, k, attn_mask=made)
    with pytest.raises(tw.ShapeError, match=r"lengths \(3, 5\)"):
        sdpa.scaled_dot_product_attention(q, k, k, attn_mask=bias_module.causal_lower_right(3, 5))


def test_rows_that_see_nothing_are_zero_as_in_torch():
    allowed = torch.ones(3, 4, dtype=torch.bool)
    allowed[1] = False
    added = torch.zeros(3, 4, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    for mask in (allowed, added):
        x = [randn(1, 2, n, 8).requires_grad_() for n in (3, 4, 4)]
        same(*x, attn_mask=mask)
        out = sdpa.scaled_dot_product_attention(*x, attn_mask=mask)
        assert not out[:, :, 1].any() and all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), x))
    lowest = added.float().clamp(min=torch.finfo(torch.float32).min)
    same(*(t.float() for t in x), attn_mask=lowest)  # a finite minimum is no mask: the mean of the values


def test_dropout_is_applied_as_given_and_drawn_from_torch():
    q = randn(1, 2, 64, 16)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(sdpa.scaled_dot_product_attention(q, q, q, dropout_p=0.3))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert not sdpa.scaled_dot_product_attention(q, q, q, dropout_p=1.0).any()
    with pytest.raises(tw.OptionError, match="from 0 to 1"):
        sdpa.scaled_dot_product_attention(q, q, q, dropout_p=1.5)


def test_masks_of_other_kinds_are_refused():
    q = randn(1, 2, 3, 8)
    with pytest.raises(tw.DTypeError):
        sdpa.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(3, 3, dtype=torch.int64))
    for mask in (torch.ones(3).bool(), torch.ones(2, 1, 1, 3, 3).bool(), [1, 2]):
        with pytest.raises(tw.ShapeError, match="attn_mask"):
            sdpa.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    with pytest.raises(tw.UnsupportedProblem, match="attention_varlen"):
        x = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 4, 8)])
        sdpa.scaled_dot_product_attention(x, x, x)


# ---- routing -------------------------------------------------------------------------------------------------


def test_route_catches_every_name_and_gives_torch_back(calls):
    q = torch.randn(1, 2, 5, 8)
    with sdpa.route():
        F.scaled_dot_product_attention(q, q, q)
        captured_early(q, q, q)
        torch.ops.aten.scaled_dot_product_attention(q, q, q)
        torch._C._nn.scaled_dot_product_attention(q, q, q)
    assert len(calls) == 4
    captured_early(q, q, q)
    assert len(calls) == 4


def test_route_nests_decorates_and_ends_with_an_exception(calls):
    q = torch.randn(1, 2, 5, 8)

    @sdpa.route(backend="naive")
    def decorated():
        return captured_early(q, q, q)

    with pytest.raises(ZeroDivisionError), sdpa.route():
        captured_early(q, q, q)
        decorated()
        captured_early(q, q, q)
        raise ZeroDivisionError
    captured_early(q, q, q)
    assert calls == ["auto", "naive", "auto"]


def test_route_is_this_threads_alone(calls):
    q = torch.randn(1, 2, 5, 8)
    with sdpa.route():
        other = threading.Thread(target=captured_early, args=(q, q, q))
        other.start()
        other.join()
        assert calls == []
        captured_early(q, q, q)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "options", [{}, {"padding": True}, {"mask": True}, {"mask": True, "is_causal": True}], ids=str
)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_route_a_transformer_encoder(calls, options, grad):
    """Its fused inference path (grad=False) steps aside; values agree where the path without routing defines them."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, dtype=torch.float64)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, hidden = randn(2, 6, 8), torch.zeros(2, 6, dtype=torch.bool)
    given = {"is_causal": options.get("is_causal", False)}
    if "padding" in options:
        hidden[1, 4:] = True
        given["src_key_padding_mask"] = hidden
    if "mask" in options:
        given["mask"] = torch.nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        want = model(x, **given)
        with sdpa.route():
            got = model(x, **given)
    assert len(calls) == 2
    torch.testing.assert_close(got[~hidden], want[~hidden])


def test_route_a_decoder_and_its_gradients(calls):
    model = torch.nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, dropout=0.0, dtype=torch.float64)
    x, memory = randn(2, 5, 8), randn(2, 7, 8)
    want = torch.autograd.grad(model(x, memory).square().sum(), list(model.parameters()))
    with sdpa.route():
        got = torch.autograd.grad(model(x, memory).square().sum(), list(model.parameters()))
    assert len(calls) == 2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("by", ["backward", "grad", "autograd.backward"])
def test_route_survives_checkpointing(calls, reentrant, by):
    if reentrant and by == "grad":
        return  # torch refuses that pair
    q = randn(1, 2, 5, 8).requires_grad_()
    with sdpa.route():
        loss = checkpoint(lambda x: captured_early(x, x, x), q, use_reentrant=reentrant).square().sum()
        if by == "backward":
            loss.backward()
        elif by == "autograd.backward":
            torch.autograd.backward(loss)
        else:
            q.grad = torch.autograd.grad(loss, q)[0]
    assert len(calls) == 2
    twin = q.detach().clone().requires_grad_()
    captured_early(twin, twin, twin).square().sum().backward()
    torch.testing.assert_close(q.grad, twin.grad)


@needs_dynamo
def test_route_a_compiled_function(calls):
    @torch.compile(backend="eager", fullgraph=True)
    def fn(x):
        return F.scaled_dot_product_attention(x * 1, x, x, is_causal=True)

    x = torch.randn(1, 2, 6, 8)
    want = fn(x)
    with sdpa.route():
        got = fn(x)
    assert len(calls) == 1
    torch.testing.assert_close(got, want)
    fn(x)
    assert len(calls) == 1


def test_a_refused_call_raises_and_does_not_fall_back():
    x = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 4, 8)])
    with sdpa.route(), pytest.raises(tw.UnsupportedProblem):
        F.scaled_dot_product_attention(x, x, x)


# ---- torch's own registry ------------------------------------------------------------------------------------

REGISTERED = """
import torch, torch.nn.functional as F, tilewise as tw
from tilewise.compat import sdpa, sdpa_kernel
tw.config.slow = "quiet"
sdpa.register()
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl
activate_flash_attention_impl("tilewise")
assert current_flash_attention_impl() == "tilewise"
restore_flash_attention_impl()
assert current_flash_attention_impl() is None
"""


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch has no registry"
)
def test_torch_activates_and_restores_the_registered_kernels():
    subprocess.run([sys.executable, "-c", REGISTERED], cwd=Path(tw.__file__).parents[1], check=True)


@pytest.mark.skipif(not hasattr(torch, "uint64"), reason="torch has no uint64")
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("lengths", [(6, 6), (4, 9)])
def test_flash_kernels_under_torchs_own_autograd(p, lengths):
    """The pair that torch calls on CUDA, here under the CPU's dispatch key, with torch's autograd above it."""
    op = torch.ops.aten._scaled_dot_product_flash_attention
    x = [randn(1, 2, n, 8).requires_grad_() for n in (lengths[0], lengths[1], lengths[1])]
    do = randn(1, 2, lengths[0], 8)
    activation = sdpa_kernel.activate("CPU")
    try:
        found = op(*x, p, True, scale=0.5)
        got = torch.autograd.grad(found[0], x, do)
    finally:
        activation.remove()
    seed = found[6].view(torch.int64)[:1]
    want, lse = tw.attention(
        *x, mask=tw.causal(), dropout=p, seed=seed if p else None, scale=0.5, return_lse=True
    )
    torch.testing.assert_close(found[0], want)
    torch.testing.assert_close(found[1], lse)
    for a, b in zip(got, torch.autograd.grad(want, x, do), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(NotImplementedError):
        op(*x, p, True)
