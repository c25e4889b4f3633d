"""bert_padding and layers.rotary: round trips, gradients, both rotary styles, offsets, in-place forms."""

from __future__ import annotations

import pytest
import torch
from test_compat_flash_cache import turned

import tilewise as tw
from tilewise.compat import bert_padding, rotary

MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_unpad_and_pad_are_inverse(kind):
    x = torch.randn(3, 4, 2, 5, dtype=torch.float64, requires_grad=True)
    tokens, indices, edges, longest, used = bert_padding.unpad_input(x, MASK.to(kind))
    assert (
        indices.tolist() == [0, 1, 9, 10, 11]
        and edges.tolist() == [0, 2, 2, 5]
        and used.tolist() == [2, 0, 3]
    )
    assert longest == 3 and edges.dtype == used.dtype == torch.int32
    back = bert_padding.pad_input(tokens, indices, 3, 4)
    assert torch.equal(back, x * MASK[..., None, None])
    assert torch.autograd.gradcheck(
        lambda t: bert_padding.pad_input(bert_padding.unpad_input(t, MASK)[0], indices, 3, 4), x
    )


def test_allocated_but_unused_tokens_are_packed_and_not_counted():
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    _, indices, edges, longest, used = bert_padding.unpad_input(torch.zeros(3, 4, 1), MASK, unused)
    assert indices.tolist() == [0, 1, 2, 8, 9, 10, 11] and edges.tolist() == [0, 3, 3, 7]
    assert longest == 4 and used.tolist() == [2, 0, 3]


def test_several_sequences_in_a_row():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.arange(12.0).view(2, 6, 1)
    tokens, indices, edges, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert edges.tolist() == [0, 2, 5, 11] and longest == 6
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11] and torch.equal(
        tokens, x.flatten(0, 1)[indices]
    )


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(tw.ShapeError, match="attention_mask"):
        bert_padding.unpad_input(torch.zeros(3, 5, 1), MASK)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("offsets", ["zero", "number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotary(interleaved, fraction, offsets, dtype):
    x = torch.randn(2, 9, 3, 32).to(dtype).requires_grad_()
    angle = torch.rand(20, int(16 * fraction)) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    start = {"zero": 0, "number": 4, "tensor": torch.tensor([7, 1])}[offsets]
    got = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=start)
    first = torch.zeros(2, dtype=torch.int64) + start
    want = torch.stack(
        [turned(x[b], cos, sin, int(first[b]) + torch.arange(9), interleaved) for b in range(2)]
    )
    one_rounding = 1e-14 if dtype == torch.float64 else 2**-8
    do = torch.randn_like(got)
    ours, theirs = (torch.autograd.grad(y, x, do.to(y.dtype))[0].double() for y in (got, want))
    for mine, truth in ((got.detach().double(), want.detach()), (ours, theirs)):
        assert (mine - truth).abs().max() <= one_rounding * truth.abs().max()
    flat = rotary.apply_rotary_emb(
        x.flatten(0, 1),
        cos,
        sin,
        interleaved,
        seqlen_offsets=start,
        cu_seqlens=torch.tensor([0, 9, 18]),
        max_seqlen=9,
    )
    assert torch.equal(flat, got.flatten(0, 1))
    place = x.detach().clone()
    assert rotary.apply_rotary_emb(place, cos, sin, interleaved, True, start) is place
    assert torch.equal(place, got)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_in_place_forms_of_packed_tensors(interleaved, grouped):
    angle = torch.rand(9, 8)
    cos, sin = angle.cos(), angle.sin()
    q, k, v = torch.randn(2, 9, 4, 16), *(torch.randn(2, 9, 2 if grouped else 4, 16) for _ in range(2))
    base = (torch.cat((q, k, v), 2) if grouped else torch.stack((q, k, v), 2)).requires_grad_()
    qkv = base * 1.0
    got = rotary.apply_rotary_emb_qkv_(
        qkv, cos, sin, interleaved=interleaved, num_heads_q=4 if grouped else None
    )
    assert got is qkv
    parts = got.split([4, 2, 2], 2) if grouped else got.unbind(2)
    for x, y in zip((q, k), parts, strict=False):
        torch.testing.assert_close(y, rotary.apply_rotary_emb(x, cos, sin, interleaved))
    assert torch.equal(parts[2], v)
    (gradient,) = torch.autograd.grad(got.square().sum(), base)
    torch.testing.assert_close(gradient, 2 * base.detach())  # a rotation keeps lengths
    kv = torch.stack((k, v), 2)
    rotary.apply_rotary_emb_kv_(kv, cos, sin, interleaved)
    torch.testing.assert_close(kv[:, :, 0], rotary.apply_rotary_emb(k, cos, sin, interleaved))


@pytest.mark.parametrize("scale_base", [None, 512])
def test_module_depends_on_distances_alone(scale_base):
    """The product of a rotated query and a rotated key is the same at every pair of positions of one distance."""
    module = rotary.RotaryEmbedding(16, interleaved=True, scale_base=scale_base)
    one = torch.randn(1, 1, 1, 1, 16).expand(1, 40, 3, 1, 16).contiguous()
    turned_qkv = module(one.clone())
    score = torch.einsum("bihd,bjhd->bhij", turned_qkv[:, :, 0], turned_qkv[:, :, 1])[0, 0]
    for distance in (0, 3, -5):
        line = score.diagonal(distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))
    later = module(one[:, :4].clone(), seqlen_offset=3)
    torch.testing.assert_close(later, turned_qkv[:, 3:7]) if scale_base is None else None
    q, kv = module(one[:, :, 0].clone(), one[:, :, 1:].clone())
    torch.testing.assert_close(q, turned_qkv[:, :, 0])
    torch.testing.assert_close(kv[:, :, 0], turned_qkv[:, :, 1])


def test_refusals_name_the_tables():
    x = torch.zeros(1, 9, 2, 16)
    with pytest.raises(tw.ShapeError, match="4 rows"):
        rotary.apply_rotary_emb(x, torch.zeros(4, 8), torch.zeros(4, 8))
    with pytest.raises(tw.ShapeError, match="num_heads_q"):
        rotary.apply_rotary_emb_qkv_(x, torch.zeros(9, 8), torch.zeros(9, 8))
    with pytest.raises(tw.OptionError, match="max_seqlen"):
        rotary.RotaryEmbedding(16)(
            x[:, :, None].expand(1, 9, 3, 2, 16).clone(), seqlen_offset=torch.tensor([1])
        )


def test_rotary_refuses_other_shapes():
    x, table = torch.zeros(2, 6, 4, 8), torch.ones(10, 4)
    for given, options in (
        (x[0], {}), (x, {"cu_seqlens": torch.tensor([0, 6])}), (x, {"seqlen_offsets": torch.tensor([1, 2, 3])}),
    ):  # fmt: skip
        with pytest.raises(tw.ShapeError, match="dimensions|seqlen_offsets"):
            rotary.apply_rotary_emb(given, table, table, **options)
    one = rotary.apply_rotary_emb(x + 1, table, table, seqlen_offsets=torch.tensor([1]))
    assert torch.equal(one, rotary.apply_rotary_emb(x + 1, table, table, seqlen_offsets=1))
