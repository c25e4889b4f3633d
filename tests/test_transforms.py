"""Every transform obeys invert(f(apply(x))) = f(x), for out, lse and the three gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from tilewise.errors import OptionError, ShapeError
from tilewise.state import Partial
from tilewise.transforms import HEAD_DIMS, fold_gqa, pack, pad_head_dim, split_kv

INF = float("inf")
law = examples(30)


def attend(q, k, v, *, scale, q_pos=None, k_pos=None):
    """Plain fp64 attention with grouped heads; causal by position where positions are given."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = scale * q @ k.mT
    if q_pos is not None:
        scores = scores.masked_fill(k_pos > q_pos[:, None], -INF)
    empty = (scores == -INF).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, scores), -1))
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else torch.full(scores.shape[:-1], -INF)
    return Partial(weights @ v, lse.to(q.dtype))


def attend_packed(q, k, v, packing_q, packing_k, *, scale):
    """Plain fp64 attention on (T, H, D), sequence by sequence, from cu_seqlens."""
    outs, lses = [], []
    edges_q, edges_k = packing_q.cu_seqlens.tolist(), packing_k.cu_seqlens.tolist()
    for (a, b), (c, d) in zip(pairwise(edges_q), pairwise(edges_k), strict=True):
        part = attend(*(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])), scale=scale)
        outs.append(part.out[0].transpose(0, 1))
        lses.append(part.lse[0])
    return Partial(torch.cat(outs), torch.cat(lses, -1))


def assert_same(got, want):
    torch.testing.assert_close(tuple(got), tuple(want), rtol=1e-11, atol=1e-11)


def problem(seed, heads=(4, 2), rows=3, keys=7, dims=(5, 6), batch=2):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    return (
        draw(batch, heads[0], rows, dims[0]),
        draw(batch, heads[1], keys, dims[0]),
        draw(batch, heads[1], keys, dims[1]),
    )


def gradients(part, inputs, weights):
    """Gradients of <out, weights> + sum lse, at rows that see a key."""
    seen = torch.where(part.lse == -INF, 0.0, part.lse)
    return torch.autograd.grad((part.out * weights).sum() + seen.sum(), inputs, retain_graph=True)


@given(st.integers(0, 99), st.integers(1, 3), st.integers(1, 4), st.integers(0, 5))
@law
def test_fold_gqa(seed, heads_kv, group, rows):
    q, k, v = problem(seed, (heads_kv * group, heads_kv), rows)
    q_pos, k_pos = torch.arange(rows) + 2, torch.arange(7)
    want = attend(q, k, v, scale=0.3, q_pos=q_pos, k_pos=k_pos)
    weights = torch.randn_like(want.out)
    folded = fold_gqa.apply(q, k, v, do=weights)
    assert folded.k is k and folded.v is v
    assert folded.q.shape == (2, heads_kv, group * rows, 5)
    assert folded.q.data_ptr() == q.data_ptr()
    inner = attend(folded.q, folded.k, folded.v, scale=0.3, q_pos=q_pos.repeat(group), k_pos=k_pos)
    assert_same(fold_gqa.invert(inner, q.shape[1]), want)
    found = gradients(inner, (folded.q, k, v), folded.do)
    assert_same(fold_gqa.invert_gradients(*found, q.shape[1]), gradients(want, (q, k, v), weights))


def test_fold_gqa_rows_are_group_major():
    q = torch.arange(2 * 6 * 3).reshape(2, 6, 3, 1)
    kv = torch.zeros(2, 2, 4, 1)
    folded = fold_gqa.apply(q, kv, kv).q
    for h in range(6):
        for i in range(3):
            assert (folded[:, h // 3, h % 3 * 3 + i] == q[:, h, i]).all()
    strided = torch.randn(2, 3, 6, 1).transpose(1, 2)  # (B, N, H, D) storage
    assert torch.equal(fold_gqa.unfold(fold_gqa.apply(strided, kv, kv).q, 6), strided)


@given(st.integers(0, 99), st.integers(1, 70), st.integers(1, 70))
@law
def test_pad_head_dim(seed, head_dim, head_dim_v):
    q, k, v = problem(seed, dims=(head_dim, head_dim_v))
    want = attend(q, k, v, scale=head_dim**-0.5)
    weights = torch.randn_like(want.out)
    padded = pad_head_dim.apply(q, k, v, do=weights)
    assert padded.q.shape[-1] == padded.k.shape[-1] == min(d for d in HEAD_DIMS if d >= head_dim)
    assert padded.v.shape[-1] == padded.do.shape[-1] == min(d for d in HEAD_DIMS if d >= head_dim_v)
    inner = attend(padded.q, padded.k, padded.v, scale=head_dim**-0.5)
    assert_same(pad_head_dim.invert(inner, head_dim_v), want)
    found = gradients(inner, (padded.q, padded.k, padded.v), padded.do)
    inverted = pad_head_dim.invert_gradients(*found, head_dim, head_dim_v)
    assert_same(inverted, gradients(want, (q, k, v), weights))


def test_pad_head_dim_sizes():
    assert [pad_head_dim.padded(d) for d in (1, 16, 17, 80, 512)] == [16, 16, 32, 96, 512]
    assert pad_head_dim.padded(513) is None and pad_head_dim.padded(0) is None
    q = torch.zeros(1, 1, 2, 64)
    assert pad_head_dim.apply(q, q, q).q is q


@given(st.integers(0, 99), st.integers(0, 20), st.integers(1, 9), st.integers(1, 5))
@law
def test_split_kv(seed, keys, n, block):
    q, k, v = problem(seed, keys=keys)
    q_pos, k_pos = (
        torch.arange(3) - 1,
        torch.arange(keys),
    )  # the first row sees nothing, others some splits only
    want = attend(q, k, v, scale=0.3, q_pos=q_pos, k_pos=k_pos)
    transform = split_kv(n, block)
    parts = [
        attend(*split[:3], scale=0.3, q_pos=q_pos, k_pos=k_pos[where])
        for split, where in zip(transform.apply(q, k, v), transform.ranges(keys), strict=True)
    ]
    got = transform.invert(parts)
    assert_same(got, want)
    weights = torch.randn_like(want.out)
    assert_same(gradients(got, (q, k, v), weights), gradients(want, (q, k, v), weights))


@given(st.integers(0, 1000), st.integers(1, 50), st.integers(1, 64))
@law
def test_split_kv_ranges(keys, n, block):
    ranges = split_kv(n, block).ranges(keys)
    assert [i for part in ranges for i in range(keys)[part]] == list(range(keys))
    assert 1 <= len(ranges) <= n
    sizes = [part.stop - part.start for part in ranges]
    assert all(sizes) or keys == 0
    assert all(size % block == 0 for size in sizes[:-1])
    assert max(sizes) - min(sizes) < 2 * block


lengths_of = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=4)


@given(st.integers(0, 99), lengths_of, st.booleans())
@law
def test_pack_padded(seed, lengths, as_tensor):
    rows, keys = map(list, zip(*lengths, strict=True))
    q, k, v = problem(seed, rows=5, keys=7, batch=len(rows))
    if as_tensor:
        rows, keys = torch.tensor(rows), torch.tensor(keys)
    (qp, packing_q), (kp, packing_k), (vp, _) = pack.apply(q, rows), pack.apply(k, keys), pack.apply(v, keys)
    assert packing_q.cu_seqlens.dtype == torch.int32
    assert qp.shape == (int(sum(rows)), 4, 5)
    inner = attend_packed(qp, kp, vp, packing_q, packing_k, scale=0.3)
    got = pack.invert(inner, packing_q)
    out, lse = torch.zeros(len(rows), 4, 5, 6).double(), torch.full((len(rows), 4, 5), -INF).double()
    for b, (n, m) in enumerate(zip(rows, keys, strict=True)):
        one = slice(b, b + 1)
        part = attend(q[one, :, :n], k[one, :, :m], v[one, :, :m], scale=0.3)
        out[one, :, :n], lse[one, :, :n] = part
    assert_same(got, (out, lse))
    weights = torch.randn_like(got.out)
    found = gradients(inner, (qp, kp, vp), pack.apply(weights, rows)[0])
    inverted = pack.invert_gradients(*found, packing_q, packing_k)
    assert_same(inverted, gradients(got, (q, k, v), weights))


@given(st.integers(0, 99), lengths_of)
@law
def test_pack_list(seed, lengths):
    problems = [problem(seed + b, rows=n, keys=m, batch=1) for b, (n, m) in enumerate(lengths)]
    (q, packing_q), (k, packing_k), (v, _) = (
        pack.apply(list(tensors)) for tensors in zip(*problems, strict=True)
    )
    got = pack.invert(attend_packed(q, k, v, packing_q, packing_k, scale=0.3), packing_q)
    for part, tensors in zip(got, problems, strict=True):
        assert_same(part, attend(*tensors, scale=0.3))
    assert all(torch.equal(x, y[0]) for x, y in zip(pack.unpack(q, packing_q), problems, strict=True))


def test_refusals():
    q, k, v = problem(0, heads=(4, 3))
    assert not fold_gqa.accepts(q, k, v)
    with pytest.raises(ShapeError, match="multiple of num_heads_kv"):
        fold_gqa.apply(q, k, v)
    q, k, v = problem(0, dims=(513, 4))
    assert not pad_head_dim.accepts(q, k, v)
    with pytest.raises(ShapeError, match="1 to 512"):
        pad_head_dim.apply(q, k, v)
    with pytest.raises(ShapeError, match="same keys"):
        split_kv(2).apply(q, k, v[:, :, 1:])
    with pytest.raises(OptionError, match="n >= 1"):
        split_kv(0)
    for sequences, lengths in (
        (q, None),
        (q, [1]),
        (q, [1, 9]),
        ([q], None),
        ([], None),
        ([q[:1], k[:1]], None),
    ):
        assert not pack.accepts(sequences, lengths)
        with pytest.raises(ShapeError, match="pack takes"):
            pack.apply(sequences, lengths)
