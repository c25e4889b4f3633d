"""The I/O model: what schedules move, predicted from sizes, against what they move on a simulated memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import tilewise as tw
from tilewise.analysis import bytes_tiled
from tilewise.analysis.schedules import SCHEDULES, count, count_backward, predict, tiles_for
from tilewise.analysis.sizes import Sizes, Tiles
from tilewise.analysis.theorem import (
    crossover,
    edges,
    fit_exponents,
    longest_that_fits,
    order_ordinary,
    order_tiled,
)
from tilewise.analysis.two_level import Traffic, TwoLevelMemory, ranges
from tilewise.errors import OptionError
from tilewise.testing.budgets import FLOAT64_BUDGET

APART = ("ordinary", "rabe-staats", "flash1", "flash2")
SIZES = [Sizes(96, 96, 16, 16), Sizes(256, 256, 32, 32), Sizes(150, 260, 24, 40)]
MEMORIES = (2000, 6000, 20_000, 150_000, 500_000)


def draw(sizes: Sizes) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """q, k, v and do of one head, float64."""
    n, m, d, dv = sizes
    make = torch.Generator().manual_seed(n + m + d)
    q, k, v, do = (
        torch.randn(*shape, generator=make, dtype=torch.float64)
        for shape in ((n, d), (m, d), (m, dv), (n, dv))
    )
    return (q, k, v), do


def library(qkv, do, mask=None) -> dict[str, torch.Tensor]:
    """out, lse and gradients by the library, in float64."""
    leaves = [t[None, None].clone().requires_grad_() for t in qkv]
    out, lse = tw.attention(*leaves, mask=mask, backend="blockwise", return_lse=True)
    grads = torch.autograd.grad(out, leaves, do[None, None])
    named = zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True)
    return {name: t[0, 0] for name, t in named}


def assert_same(results, expected) -> None:
    for name, value in results.items():
        if name in expected:
            truth = expected[name]
            budget = FLOAT64_BUDGET * max(1.0, float(truth[truth.isfinite()].abs().max()))
            assert torch.allclose(value, truth, rtol=0.0, atol=budget), name


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prediction_and_answer_over_the_grid(name, sizes):
    """Predicted within 1 % of what was counted, and the counted run computes attention and its gradients."""
    qkv, do = draw(sizes)
    expected = library(qkv, do)
    tried = 0
    for capacity, backward in itertools.product(MEMORIES, (False, True)):
        try:
            tiles_for(name, sizes, capacity, backward)
        except OptionError:
            continue
        ran = count_backward(name, qkv, do, capacity) if backward else count(name, qkv, capacity)
        guess = predict(name, sizes, capacity, backward=backward)
        where = f"M {capacity}, {'backward' if backward else 'forward'}: {guess} for {ran.traffic}"
        assert abs(guess.total - ran.traffic.total) <= 0.01 * ran.traffic.total, where
        assert ran.peak <= capacity
        assert_same(ran.results, expected)
        tried += 1
    assert tried >= 8


@pytest.mark.parametrize("name", ["flash1", "flash2"])
@pytest.mark.parametrize("lengths", [(256, 256), (100, 230), (230, 100)])
def test_masked_tiles_are_neither_visited_nor_paid(name, lengths):
    sizes, capacity = Sizes(*lengths, 16, 16), 3000
    qkv, do = draw(sizes)
    offset = lengths[1] - lengths[0]
    keep = torch.arange(lengths[1])[None, :] <= torch.arange(lengths[0])[:, None] + offset

    def visit(rows, columns):
        return columns[0] <= rows[1] - 1 + offset

    expected = library(qkv, do, tw.causal())
    for backward in (False, True):
        ran = (
            count_backward(name, qkv, do, capacity, keep=keep)
            if backward
            else count(name, qkv, capacity, keep=keep)
        )
        guess = predict(name, sizes, capacity, backward=backward, visit=visit)
        assert abs(guess.total - ran.traffic.total) <= 0.01 * ran.traffic.total
        assert guess.total < predict(name, sizes, capacity, backward=backward).total
        assert_same(ran.results, expected)


def test_three_and_four_move_what_two_moves():
    sizes, capacity = Sizes(128, 128, 32, 32), 6000
    qkv, do = draw(sizes)
    for name in ("flash3", "flash4"):
        assert SCHEDULES[name].same_as == "flash2"
        assert count(name, qkv, capacity).traffic == count("flash2", qkv, capacity).traffic
        assert predict(name, sizes, capacity, backward=True) == predict(
            "flash2", sizes, capacity, backward=True
        )
        assert_same(count_backward(name, qkv, do, capacity).results, library(qkv, do))


def test_counts_written_out_by_hand():
    # 4 queries, 6 keys, d = 2: FlashAttention-2 with tiles of 2 x 3 reads q once and k, v for each of two tiles.
    sizes = Sizes(4, 6, 2, 2)
    qkv, _ = draw(sizes)
    ran = count("flash2", qkv, 34, tiles=Tiles(2, 3))
    assert ran.traffic == Traffic(4 * 2 + 2 * 6 * (2 + 2), 4 * 2 + 4)
    # -1 passes q by for each of two tiles of keys; out, m and l come back once.
    ran = count("flash1", qkv, 34, tiles=Tiles(2, 3))
    assert ran.traffic == Traffic(6 * 4 + 2 * 4 * 2 + 4 * (2 + 2), 2 * 4 * (2 + 2))
    # Ordinary attention in a memory that holds everything reads q, k, v and writes out.
    assert count("ordinary", qkv, 100).traffic == Traffic(4 * 2 + 6 * 4, 4 * 2)


def test_order_of_the_model_is_the_library_s_own_count():
    # bytes_tiled prices the library's schedule, in bytes: the same as -2's order with those tiles.
    n, d, block = 1000, 64, 128
    traffic = predict("flash2", Sizes(n, n, d, d), 60_000, tiles=Tiles(block, 64))
    ours = bytes_tiled(
        batch=1, num_heads_q=1, seqlen_q=n, seqlen_k=n, head_dim=d, head_dim_v=d, itemsize=1, block_q=block,
        lse_itemsize=1,
    )  # fmt: skip
    assert traffic.total == ours


def grid(lowest: float, highest: float) -> list[tuple[int, int, int]]:
    """(N, d, M) with lowest d^2 <= M <= highest N d."""
    points = itertools.product((8192, 16384, 32768), (32, 64, 128), (2**14, 2**15, 2**16, 2**17))
    return [(n, d, m) for n, d, m in points if lowest * d * d <= m <= highest * n * d]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["flash1", "flash2"])
def test_exponents_of_theorem_2(name, backward):
    found = fit_exponents(name, grid(4, 0.125), backward=backward)
    assert found.n == pytest.approx(2, abs=0.05)
    assert found.d == pytest.approx(2, abs=0.05)
    assert found.m == pytest.approx(-1, abs=0.05)
    assert found.distance < 0.02
    for n, d, m in grid(4, 0.125):  # Theta: between two constants over the whole range
        ratio = predict(name, Sizes(n, n, d, d), m, backward=backward).total / order_tiled(n, d, m)
        assert 4 < ratio < 50


def test_exponents_of_ordinary_attention():
    # The products' own tiles add N^2 d / sqrt(M) or N^2 d^2 / M: with M well above d^2 the matrix is what counts.
    found = fit_exponents("ordinary", grid(16, 0.125))
    assert found.n == pytest.approx(2, abs=0.06)
    assert abs(found.d) < 0.2 and abs(found.m) < 0.2
    for n, d, m in grid(16, 0.125):
        assert 3.9 < predict("ordinary", Sizes(n, n, d, d), m).total / order_ordinary(n, d) < 6


def test_exponents_from_counted_runs():
    """The same fit on what was counted, at sizes that run in a second."""

    def counted(n, d, m):
        qkv, _ = draw(Sizes(n, n, d, d))
        return count("flash2", qkv, m).traffic.total

    points = [
        (n, d, m) for n, d, m in itertools.product((256, 512), (16, 32), (2048, 4096)) if m >= 2 * d * d
    ]
    found = fit_exponents("flash2", points, counted=counted)
    assert found.n == pytest.approx(2, abs=0.15) and found.m == pytest.approx(-1, abs=0.15)
    assert found.d == pytest.approx(2, abs=0.15)


def test_rabe_and_staats_do_not_use_a_larger_memory():
    n, d = 4096, 64
    sizes = Sizes(n, n, d, d)
    chunk = math.isqrt(n)
    enough = predict("rabe-staats", sizes, 2 * chunk * chunk + 4 * chunk * d)
    assert predict("rabe-staats", sizes, 64 * chunk * chunk) == enough  # and linear memory all the same
    assert enough.total > 10 * predict("flash2", sizes, 64 * chunk * chunk).total
    assert enough.total < predict("rabe-staats", sizes, 8192).total  # chunks that do not fit


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("backward, low, high", [(False, 1.0, 2.0), (True, 2.0, 4.0)])
def test_below_the_square_of_d_the_matrix_is_cheaper(dim, backward, low, high):
    """The crossover is a constant times d^2, whatever N."""
    for n in (2048, 16384):
        sizes = Sizes(n, n, dim, dim)
        least = crossover(sizes, "flash2", backward)
        assert low < least / dim**2 < high
        for capacity, cheaper in ((int(0.9 * least), False), (int(1.1 * least), True)):
            tiled = predict("flash2", sizes, capacity, backward=backward).total
            assert (tiled < predict("ordinary", sizes, capacity, backward=backward).total) == cheaper


def test_crossover_is_counted_too():
    sizes = Sizes(256, 256, 32, 32)
    qkv, _ = draw(sizes)
    least = crossover(sizes)
    for capacity, cheaper in ((least * 2 // 3, False), (least * 3 // 2, True)):
        tiled, ordinary = (count(name, qkv, capacity).traffic.total for name in ("flash2", "ordinary"))
        assert (tiled < ordinary) == cheaper


def test_where_all_fits_tiling_gains_nothing():
    dim, capacity = 32, 20_000
    n = longest_that_fits(dim, capacity)
    assert n * n + 4 * n * dim <= capacity < (n + 1) ** 2 + 4 * (n + 1) * dim
    for length, gain in ((n, 0.0), (n + 1, 1.0)):
        qkv, _ = draw(Sizes(length, length, dim, dim))
        ordinary, tiled = (count(name, qkv, capacity).traffic.total for name in ("ordinary", "flash2"))
        assert (ordinary > 1.5 * tiled) == bool(gain)


def test_edges_are_in_order_and_name_their_regimes():
    n, d = 4096, 64
    found = edges(Sizes(n, n, d, d))
    assert d < found.smallest < found.pays < found.once < found.fits
    assert found.once == pytest.approx(4 * n * d, rel=0.01)
    assert found.fits == n * n + 4 * n * d
    names = [found.regime(m) for m in (d, 1024, 2**17, 2**22, 2**30)]
    assert names == ["no tile", "matrix is cheaper", "tiling pays", "read once", "all fits"]
    with pytest.raises(OptionError, match="no tiled schedule"):
        edges(Sizes(n, n, d, d), "ordinary")


def test_memory_keeps_what_was_used_last():
    memory = TwoLevelMemory(4)
    memory.place("x", torch.arange(6.0))
    for at in ((0, 2), (2, 4), (0, 2), (4, 6), (0, 2)):  # (2, 4) is the oldest when (4, 6) comes
        memory.read("x", at)
    assert memory.traffic == Traffic(6, 0)
    memory.read("x", (2, 4))
    assert memory.traffic == Traffic(8, 0)


def test_memory_writes_back_what_is_dirty_only():
    memory = TwoLevelMemory(4)
    memory.place("x", torch.zeros(4))
    memory.read("x", (0, 2))
    memory.write("x", ((2, 4),), torch.ones(2))
    assert memory.result("x").sum() == 0 and memory.traffic == Traffic(2, 0)
    memory.flush()
    assert memory.result("x").tolist() == [0, 0, 1, 1] and memory.traffic == Traffic(2, 2)
    memory.write("x", ((0, 2),), torch.ones(2))
    memory.discard("x")
    memory.flush()
    assert memory.traffic == Traffic(2, 2) and memory.result("x").sum() == 2


def test_tiles_that_do_not_fit_are_told():
    qkv, _ = draw(Sizes(32, 32, 8, 8))
    with pytest.raises(OptionError, match="need 800 elements, the fast memory has 799"):
        count("flash2", qkv, 799, tiles=Tiles(16, 16))
    assert count("flash2", qkv, 800, tiles=Tiles(16, 16)).peak == 800
    with pytest.raises(OptionError, match="holds no tile"):
        count("flash2", qkv, 20)
    with pytest.raises(OptionError, match="holds no tile"):
        count("ordinary", qkv, 2)
    with pytest.raises(OptionError, match="no schedule 'flash9'"):
        predict("flash9", Sizes(8, 8, 8, 8), 1000)
    with pytest.raises(OptionError, match="at least one element"):
        TwoLevelMemory(0)
    assert ranges(5, 2, 10) == [(10, 12), (12, 14), (14, 15)]
