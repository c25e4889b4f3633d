"""The expression tree: typing, interning, its canonical text, pickling."""

from __future__ import annotations

import math
import pickle

import pytest
from expression_strategies import LEAF_KINDS, calls, trees, value_at
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from tilewise.errors import SpecError
from tilewise.spec import expression as ex

law = examples(150)
q, k, s = ex.variable("q"), ex.variable("k"), ex.variable("s")


@law
@given(trees())
def test_text_rebuilds_the_same_tree(tree):
    assert ex.parse(ex.to_text(tree), LEAF_KINDS) is tree
    assert ex.parse(ex.to_text(tree), ex.leaf_kinds(tree)) is tree


@law
@given(trees())
def test_pickle_gives_the_same_tree(tree):
    assert pickle.loads(pickle.dumps(tree)) is tree


@law
@given(trees())
def test_substituting_nothing_gives_the_same_tree(tree):
    assert ex.substitute(tree, {}) is tree


@examples(60)
@given(trees(), calls(), st.integers(-5, 5))
def test_substitution_is_evaluation_elsewhere(tree, call, elsewhere):
    moved = ex.substitute(tree, {q: ex.const(elsewhere)})
    point = call.point(0, 1, 0, 0)
    data = call.leaves, call.ints, call.floats
    want = value_at(tree, {**point, "q": elsewhere}, *data)
    got = value_at(moved, point, *data)
    assert got == want or (got != got and want != want)
    assert "q" not in ex.variables(moved)


@law
@given(trees())
def test_arguments_come_before_uses_and_once(tree):
    order = ex.topological(tree)
    assert len(order) == len(set(order)) and order[-1] is tree
    for place, node in enumerate(order):
        assert all(a in order[:place] for a in node.args)


@pytest.mark.parametrize(
    "value", [0, -7, 2**31 - 1, -(2**31), 0.0, -0.0, 1e300, math.inf, -math.inf, True, False]
)
def test_literals_survive_text(value):
    node = ex.const(value)
    again = ex.parse(ex.to_text(node))
    assert again is node and type(again.value) is type(value)
    assert math.copysign(1, again.value) == math.copysign(1, value)


def test_nan_survives_text():
    node = ex.const(math.nan)
    assert ex.parse(ex.to_text(node)) is node


@pytest.mark.parametrize(
    ("node", "type_", "text"),
    [
        (ex.apply("sub", q, k), "int", "sub q k"),
        (ex.apply("div", q, k), "float", "to_float q;to_float k;div %0 %1"),
        (ex.apply("floordiv", q, k), "int", "floordiv q k"),
        (ex.apply("add", q, ex.const(0.5)), "float", "to_float q;add %0 0.5"),
        (ex.apply("add", q, ex.const(True)), "int", "add q 1"),
        (ex.apply("mul", s, ex.apply("lt", q, k)), "float", "lt q k;to_float %0;mul s %1"),
        (ex.apply("and", q, ex.apply("lt", q, k)), "bool", "ne q 0;lt q k;and %0 %1"),
        (ex.apply("where", ex.apply("le", k, q), s, ex.const(0)), "float", "le k q;where %0 s 0.0"),
        (ex.apply("tanh", q), "float", "to_float q;tanh %0"),
        (ex.apply("eq", ex.apply("le", q, k), ex.const(True)), "bool", "le q k;to_int %0;eq %1 1"),
        (ex.apply("not", ex.apply("not", ex.apply("le", q, k))), "bool", "le q k"),
        (ex.apply("and", ex.apply("le", q, k), ex.const(True)), "bool", "le q k"),
        (ex.apply("or", ex.apply("le", q, k), ex.const(True)), "bool", "mov true"),
        (ex.apply("and", ex.apply("le", q, k), ex.const(False)), "bool", "mov false"),
        (ex.load(3, "float", (q, k)), "float", "load L3 q k"),
        (ex.int_scalar(2), "int", "mov n2"),
        (ex.float_scalar(1), "float", "mov x1"),
    ],
)
def test_typing_and_text(node, type_, text):
    assert node.type == type_
    assert ex.to_text(node) == text


def test_equal_trees_are_one_object():
    assert ex.apply("sub", q, k) is ex.apply("sub", ex.variable("q"), ex.variable("k"))
    assert ex.const(1) is not ex.const(1.0) and ex.const(1) is not ex.const(True)
    assert ex.const(0.0) is not ex.const(-0.0)


def test_shared_subtrees_are_written_once():
    d = ex.apply("sub", q, k)
    assert ex.to_text(ex.apply("mul", d, d)) == "sub q k;mul %0 %0"


def test_integers_beyond_int32_are_refused():
    with pytest.raises(SpecError, match="int32"):
        ex.const(2**31)


def test_a_float_is_no_index():
    with pytest.raises(SpecError, match="integers"):
        ex.load(0, "float", (s,))


@pytest.mark.parametrize(
    "text",
    [
        "", ";", "sub q", "sub q k k", "sub q z", "import os", "sub q %0", "sub q %7", "load", "load L0",
        "load Lx q", "load L5 q", "mov __import__", "neg q;", "where q", "add q q;add %1 %1",
        "sub q k\nsub q k;",
    ],
)  # fmt: skip
def test_foreign_text_is_refused(text):
    with pytest.raises(SpecError):
        ex.parse(text, {0: "float"} if text != "load L0" else {})
