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


def ordinary(q, k, v, *, cap=None, keep=None, sink=None):
    """Attention with the score matrix in memory, float64."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    s = s if cap is None else cap * torch.tanh(s / cap)
    s = s if keep is None else s.masked_fill(~keep, float("-inf"))
    if sink is not None:
        s = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return torch.softmax(s, -1)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_by_complex_numbers(interleaved):
    rotary = twnn.Rotary(6, base=100.0, interleaved=interleaved)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [-3, 7, 7, 1000, 0]])
    pairs = x[..., :6].unflatten(-1, (3, 2) if interleaved else (2, 3))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    frequencies = 100.0 ** (-2 * torch.arange(3, dtype=torch.float64) / 6)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.exp(
        1j * positions[:, None, :, None] * frequencies
    )
    turned = torch.view_as_real(turned)
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    torch.testing.assert_close(rotary(x, positions), torch.cat([turned, x[..., 6:]], -1))
    assert torch.equal(rotary(x, torch.zeros(5, dtype=torch.int64)), x)
    for other in (x[:, :1, ..., :6], x[:, :1].half()):
        pair = rotary.both(x, other, positions)
        assert all(torch.equal(a, rotary(b, positions)) for a, b in zip(pair, (x, other), strict=True))
    with pytest.raises(tw.OptionError, match="even"):
        twnn.Rotary(5)
    with pytest.raises(tw.ShapeError, match="turns 6"):
        rotary(x[..., :4], positions)


def test_every_option_together_against_ordinary_attention():
    torch.manual_seed(0)
    rotary = twnn.Rotary(8)
    module = twnn.Attention(
        mask=tw.causal(),
        window=(3, None),
        softcap=2.0,
        rotary=rotary,
        qk_norm=8,
        sink_heads=4,
        backend="blockwise",
    ).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    q, k, v = (torch.randn(2, h, 9, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    i = torch.arange(9)
    keep = (i <= i[:, None]) & (i[:, None] - i <= 3)

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    turned = [rotary(norm(x, n.weight), i) for x, n in ((q, module.q_norm), (k, module.k_norm))]
    truth = ordinary(*turned, v, cap=2.0, keep=keep, sink=module.sink)
    out = module(q, k, v)
    torch.testing.assert_close(out, truth)
    wanted = [q, k, v, *module.parameters()]
    for a, b in zip(
        torch.autograd.grad(out.pow(2).sum(), wanted),
        torch.autograd.grad(truth.pow(2).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert "softcap=2.0" in repr(module)


def test_a_cache_gives_what_the_whole_sequence_gives():
    """Ninety tokens by pieces of one to forty: positions, rotary and windows go on, memory grows on the way."""
    torch.manual_seed(0)
    module = twnn.MultiheadAttention(
        16, 4, num_heads_kv=2, mask=tw.causal(), window=(20, None), rotary=twnn.Rotary(4), qk_norm=True,
        backend="blockwise",
    ).double()  # fmt: skip
    x = torch.randn(2, 90, 16, dtype=torch.float64)
    whole = module(x)
    cache = twnn.Cache()
    with torch.no_grad():
        parts = [module(part, cache=cache) for part in x.split([40, 1, 1, 30, 1, 17], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert cache.length == 90
    with torch.no_grad():
        cache.crop(50)
        torch.testing.assert_close(module(x[:, 50:60], cache=cache), whole[:, 50:60])
        cache.crop(50)
        cache.reorder(torch.tensor([1, 0]))
        torch.testing.assert_close(module(x.flip(0)[:, 50:60], cache=cache), whole.flip(0)[:, 50:60])
    with pytest.raises(tw.OptionError, match="keeps no gradients"):
        module(x, cache=cache)
    with pytest.raises(tw.OptionError, match="cannot keep"):
        cache.crop(1000)
    with torch.no_grad(), pytest.raises(tw.ShapeError, match="fit those"):
        module(x[:1], cache=cache)
    assert cache.length == 60


def test_options_out_of_range():
    with pytest.raises(tw.OptionError, match="pair"):
        twnn.Attention(window=3)
    module = twnn.Attention(rotary=twnn.Rotary(4), backend="blockwise")
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(tw.OptionError, match="offsets that are ints"):
        module(q, q, q, q_offset=torch.tensor([1]))
    torch.testing.assert_close(module(q, q, q, q_offset=5, k_offset=5), module(q, q, q))


@pytest.mark.parametrize("kind", ["slots", "pages", "layer"])
def test_caches_of_serving_stand_in_for_the_growing_one(kind):
    """The same outputs from a KVCache and from pages, with rotary, norms, window, softcap and sink."""
    layer = twnn.Attention(
        mask=tw.causal(),
        window=(6, 0),
        softcap=5.0,
        sink_heads=4,
        rotary=twnn.Rotary(8),
        qk_norm=16,
        backend="blockwise",
    ).eval()
    growing, options = twnn.Cache(), {}
    if kind == "slots":
        cache = tw.KVCache.allocate(2, 2, 32, 16)
    else:
        pages = tw.PagedKVCache(20, 4, 2, 16, num_layers=2 if kind == "layer" else 1)
        options = {"sequences": [pages.new_sequence(), pages.new_sequence()]}
        cache = pages.layer(1) if kind == "layer" else pages
    with torch.no_grad():
        for n in (5, 1, 3):
            q, k, v = torch.randn(2, 4, n, 16), torch.randn(2, 2, n, 16), torch.randn(2, 2, n, 16)
            want = layer(q, k, v, cache=growing)
            torch.testing.assert_close(layer(q, k, v, cache=cache, **options), want, atol=1e-5, rtol=1e-5)
    assert growing.kv.lengths.tolist() == [9, 9]
