"""The derivative of a score's tree: against finite differences in float64, and by rule at ties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from expression_strategies import (
    PAIR_VARIABLES,
    calls,
    divide,
    element,
    floor,
    small_floats,
    trees,
    value_at,
    values_at,
)
from hypothesis import event, given
from hypothesis import strategies as st

import tilewise.spec.words as tw
from examples import examples
from tilewise.spec import expression as ex
from tilewise.spec.derivative import differentiate, tangent
from tilewise.spec.print_torch import Env, compile_torch
from tilewise.spec.trace import trace

STEP = 1e-6
NUM_LEAVES = 5


def decisions(known: dict) -> list | None:
    """Which side of every kink and jump the numbers are on; None on a kink."""
    sides = []
    for node in known:
        values = [known[a] for a in node.args]
        if node.op == "abs":
            values = [*values, 0]
        if node.op in ("abs", "min", "max", *ex.COMPARISON) and node.args[0].type != "bool":
            if values[0] == values[1] and node.args[0].type == "float":
                return None
            sides.append(values[0] < values[1])
        if node.op in ("floordiv", "mod") and node.type == "float":
            sides.append(floor(divide(*values)))
            if divide(*values) == sides[-1]:
                return None
        if node.op == "to_int":
            sides.append(known[node])
    return sides


def sample(tree, point, *data) -> tuple[float, list | None]:
    """The value and the decisions on the way; none where a node is so large that differences say nothing."""
    known = values_at(tree, point, *data)
    tame = all(abs(x) < 1e4 for node, x in known.items() if node.type == "float" and node.op != "const")
    return known[tree], decisions(known) if tame else None


def slope(f) -> float | None:
    """f'(0) by central differences; None at a kink, a jump, or where the numbers are too wild to tell."""
    samples = {n: f(n * STEP) for n in (-4, -1, 0, 1, 4)}
    sides = samples[0][1]
    if sides is None or any(other != sides for _, other in samples.values()):
        return None
    at = {n: value for n, (value, _) in samples.items()}
    estimates = [(at[n] - at[0]) / (n * STEP) for n in (-4, -1, 1, 4)]
    if max(estimates) - min(estimates) > 1e-4 * (1 + max(map(abs, estimates))):
        return None
    return (estimates[1] + estimates[2]) / 2


def agrees(got: float, want: float | None) -> bool:
    event("kink" if want is None else "zero" if want == 0 else "slope")
    return want is None or math.isclose(got, want, rel_tol=1e-3, abs_tol=1e-3)


score_trees = trees("float", depth=4, variables=("s", "s", *PAIR_VARIABLES), smooth=True)
law = examples(120)


@st.composite
def sampled_pairs(draw):
    """A tame call, and one of its pairs with a score."""
    call = draw(calls(specials=False))
    b, h = draw(st.integers(0, len(call.q_offset) - 1)), draw(st.integers(0, call.num_heads_q - 1))
    i, j = draw(st.integers(0, call.seqlen_q - 1)), draw(st.integers(0, call.seqlen_k - 1))
    call.ints = [max(-9, min(9, n)) for n in call.ints]
    call.leaves = [leaf.double() if leaf.is_floating_point() else leaf for leaf in call.leaves]
    return call, {**call.point(b, h, i, j), "s": draw(small_floats)}


@law
@given(score_trees, sampled_pairs())
def test_derivative_with_respect_to_the_score(tree, pair):
    call, point = pair
    data = call.leaves, call.ints, call.floats
    got = value_at(differentiate(tree).s, point, *data)
    assert agrees(got, slope(lambda e: sample(tree, {**point, "s": point["s"] + e}, *data)))


@law
@given(score_trees, sampled_pairs())
def test_derivative_with_respect_to_every_element(tree, pair):
    call, point = pair
    found: dict = {}
    for site, adjoint in differentiate(tree).loads:
        index = tuple(value_at(a, point, call.leaves, call.ints, call.floats) for a in site.args)
        where = site.value, element(call.leaves[site.value], index)
        found[where] = found.get(where, 0.0) + value_at(adjoint, point, call.leaves, call.ints, call.floats)
    for slot, leaf in enumerate(call.leaves):
        if not leaf.is_floating_point():
            continue
        for at in itertools.product(*map(range, leaf.shape)):
            where = slot, at
            if where in found or leaf.ndim < 2:

                def moved(e, slot=slot, at=at):
                    leaves = [t.clone() for t in call.leaves]
                    leaves[slot][at] += e
                    return sample(tree, point, leaves, call.ints, call.floats)

                assert agrees(found.get(where, 0.0), slope(moved)), where


@law
@given(score_trees, sampled_pairs(), st.integers(0, 2**31))
def test_tangent_is_the_directional_derivative(tree, pair, seed):
    call, point = pair
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in call.leaves]
    s_dot = torch.randn((), generator=generator).item()
    both = call.leaves + directions
    got = value_at(tangent(tree, NUM_LEAVES), {**point, "s_dot": s_dot}, both, call.ints, call.floats)

    def along(e):
        leaves = [
            t + e * d if t.is_floating_point() else t for t, d in zip(call.leaves, directions, strict=True)
        ]
        return sample(tree, {**point, "s": point["s"] + e * s_dot}, leaves, call.ints, call.floats)

    assert agrees(got, slope(along))


@law
@given(score_trees, sampled_pairs(), st.integers(0, 2**31))
def test_forward_and_reverse_mode_agree(tree, pair, seed):
    """tangent = ds * s_dot + sum over load sites of adjoint * direction, at kinks too."""
    call, point = pair
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in call.leaves]
    data = call.leaves + directions, call.ints, call.floats
    point = {**point, "s_dot": 0.75}
    derivative = differentiate(tree)
    parts = [value_at(derivative.s, point, *data) * 0.75]
    for site, adjoint in derivative.loads:
        moved = ex.load(site.value + NUM_LEAVES, "float", site.args)
        parts.append(value_at(adjoint, point, *data) * value_at(moved, point, *data))
    want, got = sum(parts), value_at(tangent(tree, NUM_LEAVES), point, *data)
    if math.isfinite(want) and math.isfinite(got):
        scale = sum(map(abs, parts)) + abs(got)
        assert math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-9 * (1 + scale))


# ---- atoms that people write -------------------------------------------------------------------------------

ATOMS = {
    "softcap": lambda s: 3.0 * tw.tanh(s / 3.0),
    "alibi": lambda s, q, k, h, slope: s - slope[h] * abs(q - k),
    "relu": lambda s: tw.maximum(s, 0.25),
    "least": lambda s, q, slope: tw.minimum(s * s, slope[q] + 1),
    "distance": lambda s, q, k: s / (1 + abs(q - k)),
    "power": lambda s, slope: slope[0] ** 2 * s**3,
    "log": lambda s, slope: tw.log(1 + s * s) * tw.exp(slope[1]),
    "twice": lambda s, q, slope: slope[q] * slope[q + 1] + s * slope[q],
    "select": lambda s, q, k, slope: tw.where(q > k, s * slope[0], s - slope[1]),
    "remainder": lambda s, slope: s % (1 + slope[2] ** 2),
    "negative": lambda s: -(-s * 2) - s / -4,
    "hidden": lambda s, q, k: tw.where(k <= q, s, float("-inf")),
}


@pytest.mark.parametrize("name", ATOMS)
def test_atoms(name):
    fn = ATOMS[name]
    takes_leaf = "slope" in fn.__code__.co_varnames
    root = trace(fn, (("float", 1),) if takes_leaf else (), mask=False).root
    leaf = torch.tensor([0.3, -0.7, 1.1, 0.45], dtype=torch.float64)
    derivative = differentiate(root)
    checked = 0
    for q, k, s in ((0, 0, 0.8), (2, 1, -1.7), (1, 2, 2.3), (1, 1, 0.1)):
        point = {"q": q, "k": k, "h": 1, "s": s}
        want = slope(lambda e, point=point: sample(root, {**point, "s": point["s"] + e}, [leaf]))
        if want is None:  # -inf hides the pair
            assert value_at(derivative.s, point, [leaf]) == 0
            continue
        checked += 1
        assert math.isclose(value_at(derivative.s, point, [leaf]), want, rel_tol=1e-5, abs_tol=1e-6)
        for n in range(4 if takes_leaf else 0):
            direction = torch.eye(4, dtype=torch.float64)[n]
            want = slope(lambda e, point=point, d=direction: sample(root, point, [leaf + e * d]))
            got = sum(
                value_at(adjoint, point, [leaf])
                for site, adjoint in derivative.loads
                if element(leaf, (value_at(site.args[0], point, [leaf]),)) == (n,)
            )
            assert math.isclose(got, want, rel_tol=1e-5, abs_tol=1e-6), (point, n)
    assert checked >= 2


def derivative_at(fn, s: float) -> float:
    return value_at(differentiate(trace(fn, mask=False).root).s, {"s": s})


def test_ties():
    """abs has derivative 0 at 0; minimum and maximum give it to the first argument."""
    assert derivative_at(lambda s: abs(s), 0.0) == 0
    assert derivative_at(lambda s: tw.minimum(s * 2, s * 3), 0.0) == 2
    assert derivative_at(lambda s: tw.maximum(s * 2, s * 3), 0.0) == 2
    assert derivative_at(lambda s: tw.minimum(s * 3, s * 2), 0.0) == 3
    assert derivative_at(lambda s: tw.maximum(s, s), 1.5) == 1
    assert derivative_at(lambda s: tw.maximum(0.0, s), 0.0) == 0


def test_what_does_not_move_has_derivative_zero():
    zero, one = ex.const(0.0), ex.const(1.0)
    assert differentiate(trace(lambda q: q, mask=False).root) == (zero, ())
    assert differentiate(trace(lambda s: s, mask=False).root) == (one, ())
    assert derivative_at(lambda s: s // 2, 0.7) == 0
    assert derivative_at(lambda s: (s > 0) * 1.0, 0.7) == 0
    assert tangent(trace(lambda q, k: q * k, mask=False).root, 3) is zero


def test_loads_of_integers_have_no_adjoint():
    kinds = (("int", 1), ("bool", 1), ("float", 1))
    root = trace(lambda s, q, n, c, x: s * n[q] + tw.where(c[q], x[n[q]], 0.0), kinds, mask=False).root
    assert [site.value for site, _ in differentiate(root).loads] == [2]


@pytest.mark.parametrize(
    "fn",
    [
        lambda s: tw.where(s > 0, tw.log2(s), 0.0),
        lambda s: tw.where(s > 0, 1 / s, s),
        lambda s: tw.where(s > 0, s * (1 / s), s),
        lambda s: tw.where(s > 0, tw.exp2(1 / s), 2 * s),
    ],
)
def test_the_branch_not_taken_leaves_no_nan(fn):
    for s in (0.0, -0.0):
        assert derivative_at(fn, s) in (0.0, 1.0, 2.0)


def test_printed_derivative_matches_autograd():
    """The torch printer's derivative equals torch's own backward through the printed value."""
    kinds = (("float", 2),)
    root = trace(
        lambda s, h, q, k, t: 2.0 * tw.tanh(s * t[h, abs(q - k)]) + t[h, q] * s, kinds, mask=False
    ).root
    generator = torch.Generator().manual_seed(3)
    s = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    table = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    axes = {
        "h": torch.arange(3).reshape(1, 3, 1, 1).int(),
        "q": torch.arange(4).reshape(1, 1, 4, 1).int(),
        "k": torch.arange(5).reshape(1, 1, 1, 5).int(),
    }
    env = Env({**axes, "s": s}, {}, [table], [], [], torch.float64)
    value, by_tree = compile_torch((root, differentiate(root).s))(env)
    (by_torch,) = torch.autograd.grad(value.sum(), s)
    torch.testing.assert_close(by_tree, by_torch)
