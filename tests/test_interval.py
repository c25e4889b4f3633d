"""Interval arithmetic: bounds hold for every value inside, in fp32 and fp64, and are tight where they can be."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from expression_strategies import FUNCTIONS, calls, tile_slices, trees
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from tilewise.spec import expression as ex
from tilewise.spec.print_torch import Env, compile_torch
from tilewise.spec.tiles import EMPTY, FULL, PARTIAL, TileGrid, bounds, classify_tiles

INF = math.inf
blocks = st.sampled_from([1, 2, 3, 4, 16])


@examples(150)
@given(trees(depth=4), calls(), blocks, blocks)
def test_bounds_are_sound(tree, call, block_q, block_k):
    grid = call.grid(block_q, block_k)
    found = bounds(tree, grid, call.leaves, call.ints, call.floats)
    shape = (grid.num_q_tiles, grid.num_k_tiles)
    lo, hi = (t.expand(shape) for t in (found.lo, found.hi))
    for dtype in (torch.float32, torch.float64):
        values = call.values(tree, dtype)
        for at, where in tile_slices(grid):
            tile = values[where]
            if tree.type == "float":
                tile = tile.double()
                nan = tile.isnan()
                assert found.nan.expand(shape)[at] or not nan.any(), (at, dtype)
                tile = tile[~nan]
            else:
                tile = tile.long()
            assert ((tile >= lo[at].item()) & (tile <= hi[at].item())).all(), (at, dtype)


INT_PAIRS = [(lo, hi) for lo in range(-3, 4) for hi in range(lo, 4)]


@pytest.mark.parametrize("op", ["add", "sub", "mul", "floordiv", "mod", "min", "max"])
def test_integer_bounds_hold_for_every_small_range(op):
    """Ranges on both sides of zero, divisors that contain it; tight for all but mod."""
    node = ex.apply(op, ex.variable("i"), ex.variable("j"))
    for a in INT_PAIRS:
        for b in INT_PAIRS:
            # Positions reach negative numbers; i and j do not, so the ranges travel in q and k.
            root = ex.substitute(
                node, {ex.variable("i"): ex.variable("q"), ex.variable("j"): ex.variable("k")}
            )
            lengths = a[1] - a[0] + 1, b[1] - b[0] + 1
            found = bounds(root, TileGrid(*lengths, *lengths, a[0], a[0], b[0], b[0]), [], [], [])
            q = torch.arange(a[0], a[1] + 1, dtype=torch.int32)[:, None]
            k = torch.arange(b[0], b[1] + 1, dtype=torch.int32)[None]
            (values,) = compile_torch((root,))(Env({"q": q, "k": k}, {}, [], [], [], torch.float32))
            lo, hi = int(values.min()), int(values.max())
            assert int(found.lo) <= lo and hi <= int(found.hi), (a, b)
            if op != "mod":
                assert (int(found.lo), int(found.hi)) == (lo, hi), (a, b)


HARD_FLOATS = [-INF, -3e38, -1e20, -2.5, -1.0, -1e-39, 0.0, 1e-39, 0.75, 3.0, 1e20, 3e38, INF, math.nan]


@pytest.mark.parametrize(
    "op", ["add", "sub", "mul", "div", "floordiv", "mod", "min", "max", *FUNCTIONS, "abs"]
)
def test_float_bounds_hold_for_every_hard_range(op):
    """Overflow, inf - inf, 0 * inf, x / 0, denormals, NaN: three numbers a side, every tile at once."""
    triples = torch.tensor(list(itertools.combinations_with_replacement(HARD_FLOATS, 3)))
    n = triples.numel()
    x, y = ex.load(0, "float", (ex.variable("i"),)), ex.load(1, "float", (ex.variable("j"),))
    root = ex.apply(op, *(x, y)[: ex.ARITY[op]])
    columns = n if ex.ARITY[op] == 2 else 3
    leaves = [triples.flatten(), triples.flatten()]
    found = bounds(root, TileGrid(3, 3, n, columns), leaves, [], [])
    i, j = torch.arange(n, dtype=torch.int32)[:, None], torch.arange(columns, dtype=torch.int32)[None]
    for dtype in (torch.float32, torch.float64):
        (values,) = compile_torch((root,))(
            Env({"i": i, "j": j}, {"i": (0, n), "j": (0, columns)}, leaves, [], [], dtype)
        )
        tiles = values.double().expand(1, 1, n, columns).reshape(n // 3, 3, columns // 3, 3)
        lo, hi, nan = (t[:, None, :, None] for t in found)
        assert (tiles.isnan() & nan | (tiles >= lo) & (tiles <= hi)).all(), dtype


@pytest.mark.parametrize("number", [math.nan, INF, -INF, 2.0**31, -(2.0**40)])
def test_what_has_no_integer_is_unknown(number):
    """NaN and numbers beyond int32 become what the backend makes of them; others are cut towards zero."""
    node = ex.cast(ex.load(0, "float", (ex.variable("i"),)), "int")
    found = bounds(node, TileGrid(2, 1, 4, 1), [torch.tensor([0.5, number, -2.75, 7.9])], [], [])
    assert found.lo.flatten().tolist() == [ex.INT_MIN, -2] and found.hi.flatten().tolist() == [ex.INT_MAX, 7]


def test_nan_from_arithmetic_has_no_integer():
    x = ex.load(0, "float", (ex.variable("i"),))
    node = ex.cast(ex.apply("mul", x, ex.const(INF)), "int")
    found = bounds(node, TileGrid(1, 1, 1, 1), [torch.tensor([0.0])], [], [])
    assert (int(found.lo), int(found.hi)) == (ex.INT_MIN, ex.INT_MAX)


def test_heads_and_groups_range_over_all_of_them():
    """A tile stands for every head: certain only if it is for the first and the last one."""
    for name, number in (("h", "num_heads_q"), ("g", "num_heads_kv")):
        node = ex.apply("gt", ex.variable("j"), ex.variable(name))
        grid = TileGrid(1, 1, 1, 5, **{"num_heads_q": 6, number: 3})
        assert classify_tiles(node, grid, [], [], []).tolist() == [[EMPTY, PARTIAL, PARTIAL, FULL, FULL]]


def test_mod_is_tight_inside_one_period():
    node = ex.apply("mod", ex.variable("q"), ex.const(8))
    found = bounds(node, TileGrid(3, 1, 24, 1, -8, -8), [], [], [])
    assert found.lo.flatten().tolist() == [0, 3, 0, 1, 4, 0, 2, 5]
    assert found.hi.flatten().tolist() == [2, 5, 7, 3, 6, 7, 4, 7]


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_integers_that_wrap_are_unknown(op):
    big = ex.apply("mul", ex.variable("q"), ex.const(2**30))
    node = ex.apply("gt", ex.apply(op, big, ex.const(-(2**31))), ex.const(0))
    for q in range(-3, 4):
        (value,) = compile_torch((node,))(
            Env({"q": torch.tensor(q, dtype=torch.int32)}, {}, [], [], [], torch.float32)
        )
        klass = classify_tiles(node, TileGrid(1, 1, 1, 1, q, q), [], [], []).item()
        assert klass in (PARTIAL, FULL if value else EMPTY)


def test_nan_is_never_certain():
    leaf = torch.tensor([1.0, 1.0, 1.0, float("nan")])
    x = ex.load(0, "float", (ex.variable("j"),))
    grid = TileGrid(1, 2, 1, 4)
    classes = {
        op: classify_tiles(ex.apply(op, x, ex.const(1.0)), grid, [leaf], [], [])[0].tolist()
        for op in ex.COMPARISON
    }
    assert classes["le"] == classes["ge"] == classes["eq"] == [FULL, PARTIAL]
    assert classes["ne"] == classes["lt"] == classes["gt"] == [EMPTY, PARTIAL]


def test_fp32_rounding_of_a_literal_is_inside():
    """0.1 in a float32 leaf equals the literal 0.1 in float32 arithmetic and exceeds it in float64."""
    node = ex.apply("gt", ex.load(0, "float", (ex.variable("j"),)), ex.const(0.1))
    assert classify_tiles(node, TileGrid(1, 1, 1, 1), [torch.tensor([0.1])], [], []).item() == PARTIAL
    exact = ex.apply("ge", ex.load(0, "float", (ex.variable("j"),)), ex.const(0.5))
    assert classify_tiles(exact, TileGrid(1, 1, 1, 1), [torch.tensor([0.5])], [], []).item() == FULL
