"""Laws and worked numbers of the online softmax state and of merging partials."""

from __future__ import annotations

import math

import pytest
import torch
from expression_strategies import floats_between
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from tilewise.errors import ShapeError
from tilewise.state import OnlineSoftmaxState, Partial, merge, stream

INF = float("inf")
E = math.e
law = examples(60)


def exact(scores, values):
    """Attention over all keys at once, fp64; rows that see nothing give (0, -inf)."""
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(scores == -INF, 0.0, torch.exp(scores - lse[..., None]))
    return Partial((weights[..., None] * values).sum(-2), lse)


def assert_same(got, want, tolerance=1e-12):
    torch.testing.assert_close(tuple(got), tuple(want), rtol=tolerance, atol=tolerance)


@st.composite
def tiles(draw, count=1, rows=3, head_dim_v=2, max_keys=5):
    """`count` tiles of (scores, values), fp64, some pairs and some whole rows hidden."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.1, 3.0, 300.0]))
    found = []
    for _ in range(count):
        keys = draw(st.integers(0, max_keys))
        hidden = draw(st.sampled_from([0.0, 0.4, 1.0]))
        scores = torch.randn(rows, keys, generator=generator, dtype=torch.float64) * spread
        scores[torch.rand(rows, keys, generator=generator) < hidden] = -INF
        found.append((scores, torch.randn(rows, keys, head_dim_v, generator=generator, dtype=torch.float64)))
    return found


def empty(rows=3, head_dim_v=2):
    return OnlineSoftmaxState.empty((rows,), head_dim_v, dtype=torch.float64)


# Laws of the state. Equality is on finalize.


@given(tiles())
@law
def test_identity(found):
    state = empty().absorb(*found[0])
    want = state.finalize()
    for got in (state.merge(empty()), empty().merge(state), state.absorb(*(t[:, :0] for t in found[0]))):
        assert_same(got.finalize(), want, 0)


@given(tiles(count=3))
@law
def test_associativity_and_commutativity(found):
    a, b, c = (empty().absorb(*tile) for tile in found)
    assert_same(a.merge(b).merge(c).finalize(), a.merge(b.merge(c)).finalize())
    assert_same(a.merge(b).finalize(), b.merge(a).finalize(), 0)


@given(tiles(count=2))
@law
def test_absorb_of_a_concatenation(found):
    (s1, v1), (s2, v2) = found
    scores, values = torch.cat([s1, s2], -1), torch.cat([v1, v2], -2)
    want = exact(scores, values)
    at_once = empty().absorb(scores, values)
    in_sequence = empty().absorb(s1, v1).absorb(s2, v2)
    merged = empty().absorb(s1, v1).merge(empty().absorb(s2, v2))
    one_by_one = empty()
    for j in range(scores.shape[-1]):
        one_by_one = one_by_one.absorb_key(scores[..., j], values[..., j, :])
    for state in (at_once, in_sequence, merged, one_by_one):
        assert_same(state.finalize(), want)
    assert_same(merge(exact(s1, v1), exact(s2, v2)), want)


@given(tiles(), floats_between(-1000, 1000))
@law
def test_shift(found, c):
    scores, values = found[0]
    plain = empty().absorb(scores, values).finalize()
    shifted = empty().absorb(scores + c, values).finalize()
    assert_same(shifted, Partial(plain.out, plain.lse + c), 1e-9)


@given(tiles(count=3))
@law
def test_after_every_prefix(found):
    got = list(stream((s for s, _ in found), (v for _, v in found)))
    assert len(got) == 3
    for n, partial in enumerate(got, start=1):
        prefix = [
            torch.cat([tile[0] for tile in found[:n]], -1),
            torch.cat([tile[1] for tile in found[:n]], -2),
        ]
        assert_same(partial, exact(*prefix))


def test_empty():
    partial = OnlineSoftmaxState.empty((2, 3, 4), 5).finalize()
    assert partial.out.shape == (2, 3, 4, 5)
    assert partial.out.dtype == torch.float32
    assert (partial.out == 0).all()
    assert (partial.lse == -INF).all()


@given(tiles(count=2))
@law
def test_merge_of_partials_obeys_the_same_laws(found):
    a, b = (empty().absorb(*tile).finalize() for tile in found)
    none = empty().finalize()
    assert_same(merge(a), a, 0)
    assert_same(merge(a, none), a, 0)
    assert_same(merge(a, b), merge(b, a), 0)
    assert_same(merge(a, merge(b, none)), merge(merge(a, b), none))
    assert_same(a.merge(b), empty().absorb(*found[0]).absorb(*found[1]).finalize())


# Worked numbers.


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_three_keys(shift):
    # exp(0), exp(1), exp(2) over their sum weigh 10, 20, 30.
    scores, values = torch.tensor([0.0, 1.0, 2.0]) + shift, torch.tensor([10.0, 20.0, 30.0])[:, None]
    out = OnlineSoftmaxState.empty((), 1).absorb(scores, values).finalize().out
    assert round(out.item(), 5) == round(25.752104, 5)
    out = OnlineSoftmaxState.empty((), 1, dtype=torch.float64).absorb(scores, values).finalize().out
    assert round(out.item(), 6) == 25.752104


def test_two_blocks_by_hand():
    first = torch.tensor([2.0, 1.0]).double(), torch.tensor([[1.0], [2.0]]).double()
    second = torch.tensor([4.0, 3.0]).double(), torch.tensor([[3.0], [4.0]]).double()
    state = OnlineSoftmaxState.empty((), 1, dtype=torch.float64).absorb(*first)
    # m = 2; l = e^(2-2) + e^(1-2); acc = 1 e^(2-2) + 2 e^(1-2).
    assert state.m.item() == 2
    assert state.l.item() == pytest.approx(1 + E**-1, rel=1e-15)
    assert state.acc.item() == pytest.approx(1 + 2 * E**-1, rel=1e-15)
    state = state.absorb(*second)
    # The maximum rises by 2, so what was kept shrinks by e^-2:
    # m = 4; l = e^-2 (1 + e^-1) + e^(4-4) + e^(3-4); acc = e^-2 (1 + 2 e^-1) + 3 + 4 e^-1.
    assert state.m.item() == 4
    assert state.l.item() == pytest.approx(1 + E**-1 + E**-2 + E**-3, rel=1e-15)
    assert state.acc.item() == pytest.approx(3 + 4 * E**-1 + E**-2 + 2 * E**-3, rel=1e-15)
    partial = state.finalize()
    assert partial.lse.item() == pytest.approx(math.log(E**4 + E**3 + E**2 + E), rel=1e-15)


def test_390_scalar_rows():
    generator = torch.Generator().manual_seed(0)
    for length in range(1, 40):
        scores = torch.randn(10, length, generator=generator) * 5
        values = torch.randn(10, length, 1, generator=generator)
        state = OnlineSoftmaxState.empty((10,), 1)
        for j in range(length):
            state = state.absorb_key(scores[:, j], values[:, j])
        want = (torch.softmax(scores.double(), -1)[..., None] * values.double()).sum(-2)
        torch.testing.assert_close(state.finalize().out.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            state.finalize().lse.double(), torch.logsumexp(scores.double(), -1), rtol=1e-5, atol=1e-5
        )


def test_averaging_blocks_is_another_answer():
    scores, values = torch.tensor([2.0, 1.0, 4.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    blocks = [
        OnlineSoftmaxState.empty((), 1).absorb(scores[i], values[i]).finalize()
        for i in (slice(2), slice(2, 4))
    ]
    merged = merge(*blocks).out.item()
    average = sum(block.out.item() for block in blocks) / 2
    assert merged == pytest.approx((torch.softmax(scores, 0) @ values).item(), rel=1e-6)
    assert abs(merged - average) > 0.5


def test_merge_of_far_apart_parts():
    parts = [
        Partial(torch.tensor([1.0]), torch.tensor(-100.0)),
        Partial(torch.tensor([3.0]), torch.tensor(100.0)),
    ]
    for order in (parts, parts[::-1]):
        out, lse = merge(*order)
        assert (out.item(), lse.item()) == (3.0, 100.0)


# Hidden and non-finite content.


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_hidden_values_never_matter(poison):
    scores = torch.tensor([[0.0, -INF, 1.0], [-INF, -INF, -INF]], requires_grad=True)
    clean = torch.tensor([[1.0], [0.0], [2.0]])
    dirty = torch.tensor([[1.0], [poison], [2.0]], requires_grad=True)
    state = OnlineSoftmaxState.empty((2,), 1)
    got = state.absorb(scores, dirty.expand(2, 3, 1).masked_fill(torch.tensor([[[0]], [[1]]]).bool(), poison))
    want = state.absorb(scores.detach(), clean).finalize()
    partial = got.finalize()
    assert_same(partial, want, 0)
    (partial.out.sum() + partial.lse[0]).backward()
    assert dirty.grad.isfinite().all()
    assert dirty.grad[1] == 0
    assert scores.grad.isfinite().all()
    assert (scores.grad[1] == 0).all()


def test_visible_nan_reaches_its_row_only():
    values = torch.tensor([[1.0], [float("nan")]])
    scores = torch.tensor([[0.0, -1000.0], [0.0, -INF]])  # a weight that underflows is still visible
    out, lse = OnlineSoftmaxState.empty((2,), 1).absorb(scores, values).finalize()
    assert out[0].isnan().all()
    assert out[1].item() == 1
    assert lse.isfinite().all()
    scores = torch.tensor([[float("nan"), -INF], [0.0, -INF]])
    out, lse = OnlineSoftmaxState.empty((2,), 1).absorb(scores, torch.ones(2, 1)).finalize()
    assert out[0].isnan().all() and lse[0].isnan()
    assert out[1].item() == 1


def test_finfo_min_is_finite():
    lowest = torch.finfo(torch.float32).min
    scores = torch.full((1, 2), lowest)
    out, lse = OnlineSoftmaxState.empty((1,), 1).absorb(scores, torch.tensor([[1.0], [3.0]])).finalize()
    assert out.item() == 2
    assert lse.item() == lowest


def test_merge_ignores_the_output_of_an_empty_part():
    good = Partial(torch.tensor([2.0]), torch.tensor(1.0))
    junk = Partial(torch.tensor([float("nan")]), torch.tensor(-INF))
    assert_same(merge(junk, good), good, 0)
    assert_same(merge(junk, junk), Partial(torch.tensor([0.0]), torch.tensor(-INF)), 0)


# Gradients.


def parts_with(lses, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in lses]
    return outs, [torch.tensor(lse, dtype=torch.float64, requires_grad=True) for lse in lses]


def test_gradient_of_merge():
    outs, lses = parts_with([[0.3, -2.0], [1.1, 5.0], [-0.7, 0.2]])

    def flat(*tensors):
        return tuple(merge(*map(Partial, tensors[:3], tensors[3:])))

    assert torch.autograd.gradcheck(flat, (*outs, *lses), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(flat, (*outs, *lses))


@pytest.mark.parametrize("lses", [[[-INF, 1.0], [2.0, -INF]], [[-INF, -INF], [-INF, -INF]], [[-INF, 0.0]]])
def test_gradient_of_merge_with_empty_parts(lses):
    outs, lses = parts_with(lses)
    merged = merge(*map(Partial, outs, lses))
    (merged.out.sum() + (3 * merged.lse).nan_to_num(neginf=0).sum()).backward()
    for out, lse in zip(outs, lses, strict=True):
        assert out.grad.isfinite().all() and lse.grad.isfinite().all()
        hidden = lse == -INF
        assert (out.grad[hidden] == 0).all() and (lse.grad[hidden] == 0).all()
        alone = ~hidden  # a part that is alone in its row passes its gradient through
        assert (out.grad[alone] == 1).all()
        assert torch.allclose(lse.grad[alone], torch.tensor(3.0, dtype=torch.float64))


def test_gradient_of_absorb():
    scores = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def two_steps(s, v):
        state = OnlineSoftmaxState.empty((2,), 4, dtype=torch.float64)
        return tuple(state.absorb(s[:, :1], v[:, :1]).absorb(s[:, 1:], v[:, 1:]).finalize())

    assert torch.autograd.gradcheck(two_steps, (scores, values))


# Sink, layouts, transforms of torch.


def test_sink_is_one_more_key_of_value_zero():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 3, 4, 6, generator=generator, dtype=torch.float64)
    scores[0, 0, 0] = -INF
    values = torch.randn(2, 3, 4, 6, 5, generator=generator, dtype=torch.float64)
    sink = torch.randn(3, generator=generator, dtype=torch.float64)
    partial = OnlineSoftmaxState.empty((2, 3, 4), 5, dtype=torch.float64).absorb(scores, values).finalize()
    with_key = torch.cat([scores, sink.reshape(1, 3, 1, 1).expand(2, 3, 4, 1)], -1)
    want = exact(with_key, torch.cat([values, torch.zeros(2, 3, 4, 1, 5)], -2))
    assert_same(partial.with_sink(sink), want)
    assert partial.with_sink(sink).lse[0, 0, 0] == sink[0]
    assert partial.finalize(sink, torch.bfloat16).dtype == torch.bfloat16
    torch.testing.assert_close(partial.finalize(sink), want.out)
    assert partial.finalize() is partial.out
    assert_same(partial.with_sink(torch.full((3,), -INF)), partial, 0)
    packed = Partial(partial.out[0].transpose(0, 1), partial.lse[0])  # (T, H, D_v) with (H, T)
    torch.testing.assert_close(packed.finalize(sink), want.out[0].transpose(0, 1))
    with pytest.raises(ShapeError, match="one logit for each query head"):
        partial.finalize(sink[:2])


def test_an_infinite_sink_that_is_all_a_row_has():
    lse = torch.tensor([[[-INF, 1.0], [-INF, 1.0]]], dtype=torch.float64)
    partial = Partial(torch.full((1, 2, 2, 3), math.nan, dtype=torch.float64), lse)
    sink = torch.tensor([INF, 2.0], dtype=torch.float64, requires_grad=True)
    found = partial.with_sink(sink)
    assert found.lse[0, :, 0].tolist() == [INF, 2.0] and not found.out[0, :, 0].any()
    assert bool(found.lse[0, 0, 1].isnan()), "beside keys it is an infinite score"
    alone = Partial(partial.out[:, :, :1], lse[:, :, :1]).with_sink(sink)
    assert torch.autograd.grad(alone.lse.sum(), sink)[0].tolist() == [1.0, 1.0]
    crowd = [Partial(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -INF)) for _ in range(300)]
    assert merge(*crowd, Partial(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), INF))).lse.item() == INF


def test_gradient_of_sink():
    out = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    lse = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda o, z, s: tuple(Partial(o, z).with_sink(s)), (out, lse, sink))


def test_packed_layout_is_decided_by_rank():
    outs = [torch.randn(5, 2, 3, dtype=torch.float64) for _ in range(2)]
    lses = [torch.randn(2, 5, dtype=torch.float64) for _ in range(2)]
    packed = merge(*map(Partial, outs, lses))
    dense = merge(*(Partial(o.transpose(0, 1)[None], z[None]) for o, z in zip(outs, lses, strict=True)))
    assert torch.equal(packed.out, dense.out[0].transpose(0, 1))
    assert torch.equal(packed.lse, dense.lse[0])
    state = OnlineSoftmaxState.empty((5, 2), 3).finalize()
    assert state.lse.shape == (2, 5)


def test_vmap_and_compile():
    outs = [torch.randn(4, 2, 3, 5, 6) for _ in range(2)]
    lses = [torch.randn(4, 2, 3, 5) for _ in range(2)]
    lses[0][0] = -INF
    want = merge(*map(Partial, outs, lses))
    assert_same(torch.vmap(merge)(*map(Partial, outs, lses)), want, 0)
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*map(Partial, outs, lses)), want, 0)


def test_half_precision_outputs_merge_in_the_precision_of_lse():
    part = Partial(torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2))
    assert merge(part, part).out.dtype == torch.float32


def test_refusals():
    part = Partial(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3))
    with pytest.raises(ShapeError, match="at least one"):
        merge()
    with pytest.raises(ShapeError, match=r"parts\[1\].out"):
        merge(part, Partial(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4)))
    with pytest.raises(ShapeError, match="needs a batch"):
        merge(Partial(torch.zeros(2, 3, 4), torch.zeros(2, 3)))
    state = OnlineSoftmaxState.empty((2,), 3)
    with pytest.raises(ShapeError, match="a tile is"):
        state.absorb(torch.zeros(2, 4), torch.zeros(2, 5, 3))
    with pytest.raises(ShapeError, match="a tile is"):
        state.absorb(torch.zeros(1, 4), torch.zeros(4, 3))
    with pytest.raises(ShapeError, match="a tile is"):
        state.absorb(torch.zeros(2, 4), torch.zeros(7, 2, 4, 3))
    with pytest.raises(ShapeError, match="states merge"):
        state.merge(OnlineSoftmaxState.empty((3,), 3))
