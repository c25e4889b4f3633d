"""The modules."""

import pytest
import torch

import tilewise as tw
from tilewise import nn as twnn


def test_dropout_follows_training():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 9, 4)
    module = twnn.Attention(dropout=0.5, backend="blockwise")
    plain = tw.attention(q, q, q, backend="blockwise")
    assert not torch.equal(module(q, q, q), plain)
    assert torch.equal(module.eval()(q, q, q), plain)


def test_multihead_equals_torch_module():
    torch.manual_seed(0)
    ours = twnn.MultiheadAttention(12, 3, mask=tw.causal(), backend="blockwise").double()
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias]))
        theirs.out_proj.weight.copy_(ours.out_proj.weight)
        theirs.out_proj.bias.copy_(ours.out_proj.bias)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    torch.testing.assert_close(ours(x), theirs(x, x, x, attn_mask=hidden, need_weights=False)[0])


def test_grouped_heads_context_and_sink_train():
    torch.manual_seed(0)
    module = twnn.MultiheadAttention(
        10, 4, num_heads_kv=2, head_dim=3, sink=True, dropout=0.1, backend="blockwise"
    )
    x, context = torch.randn(2, 5, 10), torch.randn(2, 8, 10)
    out = module(x, context, mask=tw.key_padding(torch.tensor([8, 3])))
    assert out.shape == (2, 5, 10)
    out.pow(2).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())
    assert module.attention.sink.grad.abs().sum() > 0


def test_refusals():
    with pytest.raises(tw.OptionError, match="multiple"):
        twnn.MultiheadAttention(10, 4, num_heads_kv=3)
    with pytest.raises(tw.OptionError, match="dropout"):
        twnn.Attention(dropout=1.5)
    with pytest.raises(tw.ShapeError, match="context"):
        twnn.MultiheadAttention(8, 2)(torch.zeros(1, 2, 8), torch.zeros(1, 2, 7))
