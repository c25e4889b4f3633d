"""The last tiles of keys, where they are too few for all programs, cut into ranges of row tiles: each row tile of each
is made once, and dk and dv add up."""

from __future__ import annotations

import pytest
import torch
from test_hopper_backward_sums import _problem, _truth, on_gpu

import tilewise as tw
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.masks import as_mask
from tilewise.spec.scores import as_terms

pytest.importorskip("triton", reason="needs Triton")
SMS = 132


@pytest.mark.parametrize(
    ("batch", "heads", "n", "m", "d"),
    [
        (16, (16, 16), 1024, 1024, 128),
        (1, (16, 16), 16384, 16384, 128),
        (2, (8, 2), 333, 777, 64),
        (1, (1, 1), 100000, 100, 96),
        (3, (15, 5), 3000, 9000, 128),
    ],
)
def test_ranges_cover_what_is_left(batch, heads, n, m, d) -> None:
    from tilewise.backends.hopper.backward_tiles import PIECES, split_of, way_of

    problem = _problem(batch, heads, n, m, d)
    split, way = split_of(problem, SMS), way_of(problem, SMS)
    tiles, units = way.units * way.key_tiles, way.unit_rows
    assert split.ranges and split.first % SMS == 0 and 0 < tiles - split.first < SMS
    assert split.ranges <= SMS and split.span <= units <= split.span * PIECES
    left = (tiles - split.first) * units
    assert (split.ranges - 1) * split.span < left <= split.ranges * split.span
    # A range is at most the end of one tile and the beginning of the next: its program leaves sums of one tile.
    for r in range(split.ranges):
        begin, end = r * split.span, min((r + 1) * split.span, left)
        assert (end - 1) // units - begin // units <= 1


def test_equal_tiles_alone_are_cut() -> None:
    from dataclasses import replace

    from tilewise.backends.hopper.backward_tiles import split_of

    plain = _problem(2, (4, 4), 1000, 1000, 128)
    assert split_of(plain, SMS).ranges
    assert not split_of(plain, 64).ranges  # 64 tiles
    assert not split_of(_problem(2, (4, 4), 100, 1000, 128), SMS).ranges  # too short
    assert not split_of(_problem(2, (4, 4), 1000, 1000, 128, True), SMS).ranges
    assert not split_of(_problem(2, (4, 4), 1000, 1000, 128, deterministic=True), SMS).ranges
    assert not split_of(_problem(2, (4, 4), 1000, 1000, 256), SMS).ranges
    capped = AttentionSpec.parse(spec_text(as_mask(None), as_terms(tw.softcap(20.0)), False, False))
    assert not split_of(replace(plain, spec=capped), SMS).ranges


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "heads", "n", "m", "d"),
    [
        (2, (9, 9), 900, 1000, 128),
        (1, (17, 17), 1500, 1100, 64),
        (1, (4, 2), 4200, 4300, 128),
        (1, (5, 5), 1000, 1300, 96),
        (1, (1, 1), 5000, 100, 64),
        (3, (8, 2), 333, 777, 128),
    ],
)
def test_cut_tiles_against_float64(batch, heads, n, m, d) -> None:
    from tilewise.backends.hopper.backward_tiles import split_of

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert split_of(_problem(batch, heads, n, m, d), sms).ranges

    def make(h: int, rows: int) -> torch.Tensor:
        return torch.randn(batch, h, rows, d, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = make(heads[0], n), make(heads[1], m), make(heads[1], m), make(heads[0], n)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = tw.attention(*inputs, backend="hopper")
    wanted = _truth(q, k, v, do, False)
    found = []
    for _ in range(5):
        torch.empty(256 << 20, device="cuda").fill_(float("nan"))
        found.append(torch.autograd.grad(out, inputs, do, retain_graph=True))
        for one, other in zip(found[-1], wanted, strict=True):
            assert float((one.double() - other).norm() / other.norm()) < 6e-3
    assert all(torch.equal(a, b) for got in found for a, b in zip(got[1:], found[0][1:], strict=True))


def test_a_copy_for_the_copy_engine_begins_where_it_reads() -> None:
    from tilewise.backends.hopper.launch_backward import laid_out

    late = torch.randn(1 + 2 * 3 * 8).bfloat16()[1:].view(1, 2, 3, 8)
    made = laid_out(late, torch.float16)
    assert late.is_contiguous() and late.data_ptr() & 15 and not laid_out(late, late.dtype).data_ptr() & 15
    assert torch.equal(made, late.half()) and laid_out(late.expand(2, 2, 3, 8), late.dtype).is_contiguous()
