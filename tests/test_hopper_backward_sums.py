"""dq's sums in calls of many heads: cleared and collected on the way, by shares, each exactly once."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise as tw
from tilewise.problem import Options, Problem, Shape
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.masks import as_mask

triton = pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="needs Gluon")
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def _problem(batch: int, heads: tuple[int, int], n: int, m: int, d: int, causal=False, **options) -> Problem:
    mask = as_mask(tw.causal() if causal else None)
    spec = AttentionSpec.parse(spec_text(mask, (), False, False))
    shape = Shape(batch, *heads, n, m, d, d)
    return Problem(spec, Options(layout="dense", **options), shape, torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("heads", "n", "m", "causal"),
    [
        ((32, 32), 4096, 4096, False),
        ((32, 32), 4096, 4096, True),
        ((8, 2), 5000, 4096, True),
        ((4, 4), 4100, 300, False),
    ],
)
def test_shares_cover_every_row_tile_once(heads, n, m, causal) -> None:
    from tilewise.backends.hopper.backward_tiles import plan_backward, way_of

    problem = _problem(64, heads, n, m, 64, causal)
    way = way_of(problem, 132)
    assert way.ahead
    assert way.units == 64 * heads[1]
    assert way.unit_rows == heads[0] // heads[1] * -(-n // plan_backward(problem).rows)
    per = -(-way.unit_rows // way.key_tiles)
    shares = [(min(i * per, way.unit_rows), min(i * per + per, way.unit_rows)) for i in range(way.key_tiles)]
    assert [r for a, b in shares for r in range(a, b)] == list(range(way.unit_rows))
    # Whoever waits for cleared sums waits for tiles drawn before its own: those of a section run abreast.
    assert way.lead >= way.swizzle
    assert way.lag >= way.swizzle
    assert way.first_left + way.lag * way.unit_rows == way.units * way.unit_rows


def test_few_heads_and_ordered_sums_go_the_other_way() -> None:
    from tilewise.backends.hopper.backward_tiles import way_of

    assert not way_of(_problem(1, (4, 4), 4096, 4096, 64), 132).ahead
    assert not way_of(_problem(64, (16, 16), 4096, 4096, 64, deterministic=True), 132).ahead
    assert not way_of(_problem(64, (16, 16), 4096, 4096, 256), 132).ahead


# ---- on a GPU ------------------------------------------------------------------------------------------------


def _truth(q, k, v, do, causal: bool):
    """dq, dk, dv in float64, a batch entry at a time."""
    found = []
    for entry in zip(q, k, v, do, strict=True):
        one, two, three, slope = (t.detach().double() for t in entry)
        group = one.shape[0] // two.shape[0]
        leaves = [t.requires_grad_() for t in (one, two, three)]
        s = one @ two.repeat_interleave(group, 0).transpose(-1, -2) / math.sqrt(one.shape[-1])
        if causal:
            i = torch.arange(one.shape[1], device=q.device)[:, None] + two.shape[1] - one.shape[1]
            s = s.masked_fill(torch.arange(two.shape[1], device=q.device)[None, :] > i, -math.inf)
        out = torch.softmax(s, -1) @ three.repeat_interleave(group, 0)
        found.append(torch.autograd.grad(out, leaves, slope))
    return [torch.stack(ts) for ts in zip(*found, strict=True)]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "heads", "n", "m", "causal"),
    [(20, (4, 4), 4096, 1000, False), (10, (4, 4), 4200, 4200, True), (24, (4, 2), 4100, 4200, True)],
)  # fmt: skip
def test_many_heads_against_float64(batch, heads, n, m, causal) -> None:
    from tilewise.backends.hopper.backward_tiles import way_of

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert way_of(_problem(batch, heads, n, m, 64, causal), sms).shares > 0
    torch.manual_seed(0)

    def make(h: int, rows: int) -> torch.Tensor:
        return torch.randn(batch, h, rows, 64, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = make(heads[0], n), make(heads[1], m), make(heads[1], m), make(heads[0], n)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = tw.attention(*inputs, mask=tw.causal() if causal else None, backend="hopper")
    wanted = _truth(q, k, v, do, causal)
    for _ in range(5):
        got = torch.autograd.grad(out, inputs, do, retain_graph=True)
        for one, other in zip(got, wanted, strict=True):
            assert float((one.double() - other).norm() / other.norm()) < 6e-3
