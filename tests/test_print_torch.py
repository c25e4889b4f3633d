"""The torch printer against the plain-Python interpreter, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from expression_strategies import (
    FLOAT_RULES,
    FUNCTIONS,
    INT_RULES,
    SHARED_RULES,
    calls,
    element,
    trees,
    value_at,
    values_at,
)
from hypothesis import given

from examples import examples
from tilewise.errors import ShapeError
from tilewise.spec import expression as ex
from tilewise.spec.print_torch import Env, accumulate, compile_torch, source

INTS = [0, 1, -1, 2, -2, 3, 7, -7, 46341, 2**31 - 1, -(2**31), -(2**31) + 1]
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    2.5,
    -2.5,
    7.25,
    -7.25,
    1e300,
    1e-300,
    50.0,
    math.inf,
    -math.inf,
    math.nan,
]


def same(got: float, want: float, rtol: float = 0.0) -> bool:
    """Equal, NaN to NaN, and of equal sign where it is zero."""
    if math.isnan(want):
        return math.isnan(got)
    if want in (0, math.inf, -math.inf) or rtol == 0:
        return got == want
    return math.isclose(got, want, rel_tol=rtol, abs_tol=1e-300)


def operands(op: str, kind: str) -> list[ex.Node]:
    """Leaves of dimension 1, indexed by i for the first argument and by j for the second."""
    kinds = ["bool", kind, kind] if op == "where" else [kind] * ex.ARITY[op]
    indices = [ex.variable(n) for n in ("b", "i", "j")[-len(kinds) :]]
    if len(kinds) == 1:
        indices = [ex.variable("i")]
    return [ex.load(n, t, (index,)) for n, (t, index) in enumerate(zip(kinds, indices, strict=True))]


VALUES = {"int": INTS, "float": FLOATS, "bool": [False, True]}
DTYPES = {"int": torch.int32, "float": torch.float64, "bool": torch.bool}
NODE_KINDS = (
    [(op, "int") for op in INT_RULES]
    + [(op, "float") for op in FLOAT_RULES]
    + [(op, kind) for op in ex.COMPARISON for kind in ("int", "float")]
    + [(op, "bool") for op in ("and", "or", "not")]
    + [("where", kind) for kind in ("int", "float", "bool")]
    + [("to_float", "int"), ("to_float", "bool"), ("to_int", "bool"), ("to_int", "float")]
)


def test_every_node_kind_is_tried():
    assert {op for op, _ in NODE_KINDS} == set(ex.ARITY) - {"mov"}
    assert set(INT_RULES) | set(FLOAT_RULES) | set(SHARED_RULES) == set(ex.ARITY) - {"mov"}


@pytest.mark.parametrize(("op", "kind"), NODE_KINDS)
def test_node_kind_on_all_pairs_of_hard_values(op, kind):
    arguments = operands(op, kind)
    casts = {"to_int": "int", "to_float": "float"}
    node = ex.cast(arguments[0], casts[op]) if op in casts else ex.apply(op, *arguments)
    assert node.op == op
    # A float beyond int32 has no defined integer.
    tame = [x for x in VALUES[kind] if op != "to_int" or abs(x) < 2**31]
    values = {**VALUES, kind: tame}
    leaves = [torch.tensor(values[a.type], dtype=DTYPES[a.type]) for a in arguments]
    batch, n = 2 if op == "where" else 1, len(tame)

    def axis(size, dim):
        return torch.arange(size, dtype=torch.int32).reshape([-1 if d == dim else 1 for d in range(4)])

    variables = {"b": axis(batch, 0), "h": axis(1, 1), "i": axis(n, 2), "j": axis(n, 3)}
    ranges = {"b": (0, batch), "h": (0, 1), "i": (0, n), "j": (0, n)}
    (got,) = compile_torch((node,))(Env(variables, ranges, leaves, [], [], torch.float64))
    assert got.dtype == DTYPES[node.type]
    got = got.expand(batch, 1, n, n)
    for b in range(batch):
        for i in range(n):
            for j in range(n):
                point = {"b": b, "h": 0, "i": i, "j": j}
                want = value_at(node, point, leaves)
                seen = [value_at(a, point, leaves) for a in arguments]
                assert same(got[b, 0, i, j].item(), want, 1e-12 if op in FUNCTIONS else 0.0), (op, seen)


@examples(120)
@given(trees(depth=5, functions=False), calls())
def test_random_tree(tree, call):
    got = call.values(tree, torch.float64)
    for point in list(call.points())[::7]:
        where = tuple(point[n] for n in ("b", "h", "i", "j"))
        known = values_at(tree, point, call.leaves, call.ints, call.floats)
        if any(n.op in ("min", "max") and all(known[a] == 0 for a in n.args) for n in known):
            continue  # which of 0.0 and -0.0 is the smaller is left open, and a division would show it
        want = known[tree]
        assert same(got[where].item(), want), (point, ex.to_text(tree))


@examples(60)
@given(trees(depth=3), trees(depth=3), calls())
def test_several_roots_print_together(one, two, call):
    together = compile_torch((one, two, one))(call.env(torch.float64))
    for got, root in zip(together, (one, two, one), strict=True):
        alone = call.values(root, torch.float64)
        assert torch.equal(got.expand(alone.shape).nan_to_num(7.5), alone.nan_to_num(7.5))


@examples(100)
@given(trees(kind="float", depth=3), calls(specials=False))
def test_accumulate_is_the_transpose_of_load(tree, call):
    """Summing a contribution of 1 per pair counts how often each element is read."""
    sites = tuple(n for n in ex.loads(tree) if n.type == "float")
    env = call.env(torch.float64)
    compile_torch((tree,), sites)(env)
    pairs = list(call.points())
    ones = torch.ones(len(call.q_offset), call.num_heads_q, call.seqlen_q, call.seqlen_k, dtype=torch.float64)
    for site in sites:
        leaf = call.leaves[site.value]
        got, want = torch.zeros(leaf.shape, dtype=torch.float64), torch.zeros(leaf.shape, dtype=torch.float64)
        accumulate(env, site, got, ones.clone())
        for point in pairs:
            want[element(leaf, tuple(_index(a, point, call) for a in site.args))] += 1
        assert torch.equal(got, want)


def _index(node, point, call):
    return value_at(node, point, call.leaves, call.ints, call.floats)


def test_float32_is_computed_in_float32():
    node = ex.apply("add", ex.const(1.0), ex.apply("mul", ex.variable("s"), ex.const(2.0**-24)))
    for dtype, want in ((torch.float32, 1.0), (torch.float64, 1.0 + 2.0**-24)):
        env = Env({"s": torch.ones((), dtype=dtype)}, {}, [], [], [], dtype)
        (got,) = compile_torch((node,))(env)
        assert got.dtype == dtype and got.item() == want


def test_indices_are_int32_and_wrap():
    node = ex.apply("add", ex.variable("q"), ex.const(2**31 - 1))
    (got,) = compile_torch((node,))(
        Env({"q": torch.tensor(1, dtype=torch.int32)}, {}, [], [], [], torch.float64)
    )
    assert got.dtype == torch.int32 and got.item() == -(2**31)


def test_loads_outside_read_the_nearest_element():
    leaf = torch.tensor([10.0, 11.0, 12.0])
    node = ex.load(0, "float", (ex.variable("q"),))
    q = torch.tensor([-(2**31), -1, 0, 2, 3, 2**31 - 1], dtype=torch.int32)
    (got,) = compile_torch((node,))(Env({"q": q}, {}, [leaf], [], [], torch.float32))
    assert got.tolist() == [10, 10, 10, 12, 12, 12]


def test_a_leaf_without_elements_is_refused():
    node = ex.load(0, "float", (ex.variable("q"),))
    with pytest.raises(ShapeError, match="without elements"):
        compile_torch((node,))(
            Env({"q": torch.zeros(1, dtype=torch.int32)}, {}, [torch.empty(0)], [], [], torch.float32)
        )


def test_the_source_can_be_read():
    text = source((ex.apply("le", ex.variable("k"), ex.variable("q")),))
    assert text.splitlines()[-1].startswith("    return (") and "<=" in text
