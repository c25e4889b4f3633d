"""Tracing atoms: what becomes a scalar, what is refused and with which words."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from expression_strategies import value_at

import tilewise.spec.words as tw
from tilewise.errors import SpecError
from tilewise.spec import expression as ex
from tilewise.spec.custom import custom, custom_score
from tilewise.spec.trace import trace

REACH = 5
SHARPNESS = 0.25
STEPS = 3


def line_of(fn) -> str:
    """file:line of the first line of a function."""
    return f"{__file__}:{fn.__code__.co_firstlineno}"


def text(fn, *leaves, mask=True) -> str:
    return ex.to_text(trace(fn, leaves, mask=mask).root)


# ---- control flow ------------------------------------------------------------------------------------------


def test_if_names_the_line():
    def atom(q, k):
        if q > k:
            return q == k
        return q != k

    with pytest.raises(SpecError, match="per pair") as error:
        trace(atom, mask=True)
    first = atom.__code__.co_firstlineno
    assert f"{__file__}:{first + 1}: if q > k:" in str(error.value)
    assert "tw.where" in str(error.value)


@pytest.mark.parametrize(
    "atom",
    [
        lambda q, k: q > k and k > 3,
        lambda q, k: q > k or k > 3,
        lambda q, k: not q > k,
        lambda q, k: 0 <= k <= q,
        lambda q, k: (q == k) in (True, False),
        lambda q, k: max(q, k) == q,
        lambda q, k: [True, False][k],
        lambda q, k: range(3)[k] == q,
        lambda q, k: math.floor(k / 2) == q,
        lambda q, k: int(k) == q,
        lambda q, k: float(k) == q,
        lambda q, k: len(k) == q,
        lambda q, k: all(x == q for x in k),
        lambda q, k: k**q == 1,
        lambda q, k: k**0.5 == 1,
        lambda q, k: k**-1 == 1,
        lambda q, k: q[k] == 1,
        lambda q, k: q & 1 == 1,
        lambda q, k: ~q == k,
        lambda q, k: (q == k) ^ q,
        lambda q, k: torch.sin(q) == k,
    ],
)
def test_what_needs_a_number_is_refused_with_the_line(atom):
    with pytest.raises(SpecError) as error:
        trace(atom, mask=True)
    assert line_of(atom) in str(error.value)


def test_the_line_is_that_of_the_innermost_function():
    def nearest(a, b):
        return a if a < b else b

    def atom(q, k):
        return nearest(q, k) == k

    with pytest.raises(SpecError) as error:
        trace(atom, mask=True)
    assert f"{__file__}:{nearest.__code__.co_firstlineno + 1}" in str(error.value)


# ---- results, parameters, leaves ---------------------------------------------------------------------------


def test_a_mask_yields_a_condition():
    with pytest.raises(SpecError, match="yields a int"):
        trace(lambda q, k: q - k, mask=True)
    with pytest.raises(SpecError, match="yields a float"):
        custom(lambda q, k: q / k)
    with pytest.raises(SpecError, match="numbers and leaves"):
        trace(lambda q, k: None, mask=True)


def test_a_mask_does_not_see_the_score():
    with pytest.raises(SpecError, match="custom_score"):
        custom(lambda s, q: s > 0)


def test_a_score_is_a_float_whatever_it_yields():
    assert text(lambda q: q, mask=False) == "to_float q"
    assert text(lambda q, k: q == k, mask=False) == "eq q k;to_float %0"
    assert text(lambda: 3, mask=False) == "mov 3.0"


@pytest.mark.parametrize("atom", [lambda *args: True, lambda q, **more: True, lambda q, /, k: q == k])
def test_parameters_have_names(atom):
    with pytest.raises(SpecError, match="names its parameters"):
        trace(atom, mask=True)


def test_number_of_leaves():
    leaf = torch.ones(3)
    with pytest.raises(SpecError, match="'t'") as error:
        custom(lambda q, t: t[q] > 0)
    assert "0 leaf(s) were given" in str(error.value)
    with pytest.raises(SpecError, match="fewer leaves than the 2"):
        custom(lambda q, t: t[q] > 0, leaf, leaf)
    with pytest.raises(SpecError, match="fewer leaves than the 1"):
        custom(lambda q, k: q > k, leaf)


def test_number_of_indices():
    leaf = torch.ones(3, 4)
    for atom in (
        lambda q, t: t[q] > 0,
        lambda q, k, t: t[q, k, q] > 0,
        lambda q, t: t > 0,
        lambda q, t: t[()] > 0,
    ):
        with pytest.raises(SpecError, match=r"2 dimension\(s\)") as error:
            custom(atom, leaf)
        assert line_of(atom) in str(error.value)


def test_indices_are_integers():
    leaf = torch.ones(3)
    for atom in (lambda q, t: t[q / 2] > 0, lambda q, t: t[1.5] > 0, lambda q, k, t: t[q > k] > 0):
        with pytest.raises(SpecError, match="integers"):
            custom(atom, leaf)
    with pytest.raises(SpecError):
        custom(lambda q, t: t[:] > 0, leaf)


def test_a_leaf_with_no_dimension_is_a_number():
    assert text(lambda q, t: q > t, ("int", 0)) == "load L0;lt %0 q"
    assert text(lambda s, t: s * t + abs(t) - -t, ("float", 0), mask=False).startswith("load L0;mul s %0")
    assert text(lambda q, t: t[()] > q, ("int", 0)) == "load L0;gt %0 q"


def test_leaves_come_in_order_beside_the_variables():
    assert text(lambda a, q, b_, k: a[q] == b_[k], ("int", 1), ("int", 1)) == "load L0 q;load L1 k;eq %0 %1"


def test_leaf_kinds():
    leaves = torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    term = custom(lambda q, x, n, c: (x[q] > 0) & (n[q] > 0) & c[q], *leaves).formula
    assert term.text.startswith("custom[float1,int1,bool1;0;0]{")
    with pytest.raises(TypeError, match="tensor, not int"):
        custom(lambda q, n: q < n, 3)
    with pytest.raises(TypeError, match="complex"):
        custom(lambda q, n: q < n[q], torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="int32"):
        custom(lambda q, n: q < n[q], torch.tensor([2**40]))


@pytest.mark.parametrize(
    "thing", [math.sqrt, max, functools.partial(lambda q, k: q == k, k=3), object(), "k <= q", 3]
)
def test_an_atom_is_a_plain_function(thing):
    with pytest.raises(SpecError, match="plain Python function"):
        custom(thing)


# ---- captured values ---------------------------------------------------------------------------------------


def scalars(fn, mask=True, leaves=()):
    traced = trace(fn, leaves, mask=mask)
    return ex.to_text(traced.root), traced.ints, traced.floats


def test_a_closure_number_is_a_scalar():
    def build(n, x):
        return lambda s, q, k: s - x * (q - k) * n

    assert scalars(build(3, 0.5), mask=False)[0] == scalars(build(-9, 7.25), mask=False)[0]
    assert scalars(build(3, 0.5), mask=False)[1:] == ((3,), (0.5,))
    assert "n0" in scalars(build(3, 0.5), mask=False)[0] and "x0" in scalars(build(3, 0.5), mask=False)[0]


def test_a_default_is_a_scalar():
    def build(n):
        def atom(q, k, reach=n, *, sharp=2.5 * n):
            return (q - k) * sharp <= reach

        return atom

    one, two = scalars(build(3)), scalars(build(4))
    assert one[0] == two[0] and one[1:] == ((3,), (7.5,)) and two[1:] == ((4,), (10.0,))


def test_a_global_is_a_scalar(monkeypatch):
    def atom(s, q, k):
        return s - SHARPNESS * (q - k) + REACH

    before = scalars(atom, mask=False)
    assert before[1:] == ((5,), (0.25,))
    monkeypatch.setitem(globals(), "REACH", 77)
    after = scalars(atom, mask=False)
    assert after[0] == before[0] and after[1] == (77,)
    assert REACH == 77, "tracing leaves the module alone"


def test_numpy_style_numbers_are_scalars():
    numpy = pytest.importorskip("numpy")
    n, x = numpy.int64(4), numpy.float32(0.5)
    _, ints, floats = scalars(lambda s, q: s + n * q * x, mask=False)
    assert (ints, floats) == ((4,), (0.5,)) and type(ints[0]) is int and type(floats[0]) is float


def test_a_captured_bool_is_a_literal():
    flag = True
    assert scalars(lambda q, k: (k <= q) & flag)[0] == "le k q"
    strict = False
    assert scalars(lambda q, k: k < q if strict else k <= q)[0] == "le k q"


def test_a_number_that_steers_python_is_a_literal():
    def build(steps):
        def atom(q, k):
            hit = q == k
            for n in range(steps):
                hit = hit | (q - k == 2**n)
            return hit

        return atom

    three, four = scalars(build(3)), scalars(build(4))
    assert three[1:] == ((), ()) and three[0] != four[0]
    assert three[0].count("or") == 3 and four[0].count("or") == 4

    def switch(reach):
        return lambda q, k: (q - k <= reach) if reach else (k <= q)

    assert scalars(switch(0))[0] == "le k q"
    assert scalars(switch(7))[0] == "sub q k;le %0 7"


def test_a_steering_default_is_a_literal():
    def atom(q, k, steps=2):
        return [k <= q, k < q, k == q][steps]

    assert scalars(atom) == ("eq k q", (), ())


def test_a_captured_tensor_is_refused_by_name():
    slopes = torch.ones(4)
    with pytest.raises(SpecError, match="captures the tensor 'slopes'"):
        custom_score(lambda s, h: s * slopes[h])
    parameter = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(SpecError, match="captures the tensor 'parameter'"):
        custom_score(lambda s, h: s * parameter[h])
    with pytest.raises(SpecError, match="leaf"):
        custom_score(lambda s, h, table=slopes: s * table)
    holder = {"slopes": slopes}
    with pytest.raises(SpecError):
        custom_score(lambda s, h: s * holder["slopes"])


def test_integers_beyond_int32_are_refused():
    large = 2**31
    with pytest.raises(SpecError, match="int32"):
        custom(lambda q, k: q - k < large)
    with pytest.raises(SpecError, match="int32"):
        custom(lambda q, k: q - k < 2**31)


def test_nested_functions_see_the_scalars():
    reach, sharp = 4, 0.5

    def near(a, b):
        return abs(a - b) <= reach

    def atom(q, k):
        def inside(x):
            return x * sharp < reach

        return near(q, k) & inside(q)

    root, ints, floats = scalars(atom)
    point = {"q": 3, "k": 1}
    assert value_at(trace(atom, mask=True).root, point, (), ints, floats) is True
    assert value_at(trace(atom, mask=True).root, {"q": 9, "k": 8}, (), ints, floats) is False


def test_recursion_and_keyword_only_functions():
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    def atom(q, *, rule=power):
        return rule(q, 3) > 8

    assert scalars(atom)[0] == "mul q q;mul q %0;gt %1 8"


# ---- words -------------------------------------------------------------------------------------------------


def test_torch_spelling_is_the_same_tree():
    def torch_atom(s, q, k):
        return torch.where(k <= q, torch.tanh(s), torch.exp2(torch.minimum(s, torch.log2(torch.abs(s)))))

    def word_atom(s, q, k):
        return tw.where(k <= q, tw.tanh(s), tw.exp2(tw.minimum(s, tw.log2(abs(s)))))

    assert trace(torch_atom, mask=False).root is trace(word_atom, mask=False).root


def test_torch_logic_is_the_same_tree():
    def torch_atom(q, k):
        return torch.logical_or(torch.logical_and(k <= q, k > 0), torch.logical_not(q > 3))

    assert (
        trace(torch_atom, mask=True).root
        is trace(lambda q, k: ((k <= q) & (k > 0)) | ~(q > 3), mask=True).root
    )


OPERATORS = {
    "q + k": 5, "q - k": 9, "q * k": -14, "q / k": -3.5, "q // k": -4, "q % k": -1, "-q": -7, "+q": 7,
    "abs(k)": 2,
    "q ** 2": 49, "q ** 0": 1, "k ** 3": -8, "10 + q": 17, "10 - q": 3, "10 * q": 70, "14 / q": 2.0,
    "20 // q": 2, "20 % q": 6, "-20 // q": -3, "-20 % q": 1, "q < k": False, "q <= 7": True,
    "7 < q": False, "7 >= q": True,
    "q == 7": True, "q != 7": False, "(q > k) & (k > 0)": False, "(q > k) | (k > 0)": True, "~(q > k)": False,
    "(q > k) ^ (k > 0)": True, "True & (q > k)": True, "False | (q > k)": True, "tw.minimum(q, k)": -2,
    "tw.maximum(q, 9)": 9, "tw.where(q > k, 1, 2)": 1, "tw.absolute(k)": 2, "(q > k) + 1": 2,
    "(q > k) * 0.5": 0.5,
    "tw.log2(8 + q * 0)": 3.0, "tw.exp2(k)": 0.25, "tw.logical_not(q)": False,
}  # fmt: skip


@pytest.mark.parametrize("written", OPERATORS)
def test_operators_mean_what_python_means(written):
    atom = eval(f"lambda q, k: {written}", {"tw": tw})
    got = value_at(trace(atom, mask=isinstance(OPERATORS[written], bool)).root, {"q": 7, "k": -2})
    assert got == OPERATORS[written]


def test_exp_and_log_are_natural():
    for x in (0.1, 1.0, 3.5):
        assert math.isclose(value_at(trace(lambda s: tw.exp(s), mask=False).root, {"s": x}), math.exp(x))
        assert math.isclose(value_at(trace(lambda s: tw.log(s), mask=False).root, {"s": x}), math.log(x))


def test_math_constants_are_literals():
    assert text(lambda s: s * math.pi, mask=False) == f"mul s {math.pi!r}"


def test_the_atom_is_called_once():
    calls = []

    def atom(q, k):
        calls.append(1)
        return k <= q

    trace(atom, mask=True)
    assert calls == [1]
