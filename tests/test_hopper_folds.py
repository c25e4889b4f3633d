"""How the Hopper forward writes a spec's score and mask: the same numbers as the spec says, for few instructions."""

from __future__ import annotations

import types

import pytest
import torch
from hopper_compile import spec_of

import tilewise as tw
from tilewise.backends.hopper import algebra
from tilewise.backends.hopper.launch_forward import divisors
from tilewise.backends.hopper.print_fold import (
    plan,
    print_limits,
    print_reach,
    print_sees,
    print_stripes,
    stripes_of,
    with_literals,
)
from tilewise.backends.hopper.tiles import FOLDING, PLAIN, default
from tilewise.backends.triton.layout import describe
from tilewise.spec import expression as ex
from tilewise.spec import words
from tilewise.spec.masks import as_mask

ROWS, COLUMNS, FIRST = 40, 24, 16
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

_BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne, "and": torch.logical_and, "or": torch.logical_or,
    "min": torch.minimum, "max": torch.maximum, "mod": torch.remainder,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
}  # fmt: skip
_UNARY = {
    "neg": torch.neg, "not": torch.logical_not, "abs": torch.abs, "tanh": torch.tanh, "exp2": torch.exp2,
    "log2": torch.log2, "to_float": lambda a: a.double(), "to_int": lambda a: a.long(),
}  # fmt: skip


def value(root, variables, leaves, ints, floats):
    """A tree in float64 and int64."""
    known = {}
    for node in ex.topological(root):
        a = [known[x] for x in node.args]
        if node.op == "const":
            known[node] = torch.tensor(
                node.value, dtype={"float": torch.float64, "int": torch.int64}.get(node.type)
            )
        elif node.op == "var":
            known[node] = variables[node.value]
        elif node.op == "int_scalar":
            known[node] = torch.tensor(ints[node.value])
        elif node.op == "float_scalar":
            known[node] = torch.tensor(floats[node.value], dtype=torch.float64)
        elif node.op == "load":
            leaf = leaves[node.value]
            known[node] = leaf[tuple(x.clamp(0, n - 1) for x, n in zip(a, leaf.shape, strict=True))]
            if node.type == "float":
                known[node] = known[node].double()
        elif node.op == "fma":
            known[node] = a[0] * a[1] + a[2]
        elif node.op == "where":
            known[node] = torch.where(*a)
        else:
            known[node] = _UNARY[node.op](*a) if len(a) == 1 else _BINARY[node.op](*a)
    return known[root]


def tile():
    """The variables of a tile, the raw products random."""
    torch.manual_seed(0)
    i = torch.arange(ROWS)[:, None]
    j = FIRST + torch.arange(COLUMNS)[None, :]
    raw, scale = torch.randn(ROWS, COLUMNS, dtype=torch.float64) * 5, torch.tensor(0.3, dtype=torch.float64)
    first = torch.tensor(FIRST)
    return {
        "i": i, "j": j, "q": i + 9, "k": j + 2, "j0": first, "k0": first + 2, "b": torch.tensor(0),
        "h": torch.tensor(2), "g": torch.tensor(1), "raw": raw, "scale": scale, "s": raw * scale,
    }  # fmt: skip


SCORES = {
    "alibi": (tw.causal(), tw.alibi(SLOPES)),
    "alibi both ways": (None, tw.alibi(SLOPES)),
    "alibi after": (tw.custom(lambda q, k: k > q), tw.alibi(SLOPES)),
    "softcap": (tw.causal(), tw.softcap(30.0)),
    "softcap then alibi": (tw.causal(), [tw.softcap(30.0), tw.alibi(SLOPES)]),
    "alibi then softcap": (tw.causal(), [tw.alibi(SLOPES), tw.softcap(30.0)]),
    "bias": (None, tw.bias(torch.randn(1, 4, ROWS, COLUMNS + FIRST))),
    "bias of columns": (tw.causal(), [tw.bias(torch.randn(1, 1, 1, COLUMNS + FIRST)), tw.alibi(SLOPES)]),
    "relative": (None, tw.relative(torch.randn(4, 65))),
    "sum": (None, tw.custom_score(lambda s, q, k: 2.0 * (s - 0.25 * q) + 0.5 * (k - q) - s / 4.0 + 1.5)),
    "two of s": (None, tw.custom_score(lambda s, q: s * s + words.tanh(s) * 3.0 - 0.1 * q)),
    "no s": (None, tw.custom_score(lambda s, q, k: 0.01 * (q * k))),
    "where": (tw.causal(), tw.custom_score(lambda s, q, k: words.where(q - k < 5, s, s - 2.0))),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_its_parts(name):
    mask, scores = SCORES[name]
    spec, leaves = spec_of(mask, scores)
    variables, numbers = tile(), ([32] * spec.num_ints, [30.0] * spec.num_floats)
    want = value(spec.score, variables, leaves, *numbers) * algebra.LOG2E
    parts = algebra.score_of(spec.score, spec.keep)
    found = value(parts.core, variables, leaves, *numbers) * value(parts.rate, variables, leaves, *numbers)
    for part in (parts.shift, parts.rest):
        if part is not None:
            found = found + value(part, variables, leaves, *numbers)
    seen = torch.tensor(True) if spec.keep is None else value(spec.keep, variables, leaves, *numbers)
    seen, want, found = torch.broadcast_tensors(seen, want, found)
    torch.testing.assert_close(found[seen], want[seen], rtol=1e-12, atol=1e-12)


def test_what_belongs_to_rows_meets_no_element():
    score, _, rows = plan(spec_of(tw.causal(), tw.alibi(SLOPES))[0])
    assert not ex.variables(score.shift) & {"j", "k", "raw"}
    assert ex.variables(score.rest) <= {"b", "h", "k", "k0"} and score.core is algebra.RAW
    assert any(ex.loads(node) for node in rows)
    assert "abs" not in {n.op for n in ex.topological(score.rest)}


def test_a_softcap_takes_maxima_of_the_tanh():
    score = plan(spec_of(tw.causal(), tw.softcap(30.0))[0])[0]
    assert score.rising and score.core.op == "tanh" and score.rest is None


def test_a_tanh_of_products_alone_has_a_slope():
    """It is printed with its numbers as one word, and takes the tiles of plain scores."""
    slope = {name: plan(spec_of(*SCORES[name])[0])[0].slope for name in SCORES}
    assert {name for name, k in slope.items() if k is not None} == {"softcap", "softcap then alibi"}
    one = tw.custom_score(lambda s, q: 7.0 * words.tanh(0.25 * s) - 0.1 * q)
    assert plan(spec_of(None, one)[0])[0].slope is not None
    assert default((128, 128), spec_of(tw.causal(), tw.softcap(30.0))[0]) == PLAIN[128, 128]
    assert default((128, 128), spec_of(*SCORES["softcap then alibi"])[0]) == FOLDING[128, 128]


def test_the_polynomials_of_a_tanh():
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="needs Gluon")
    from tilewise.backends.hopper.words import NEAR, NEARER

    for texts, most in ((NEAR, 0.75), (NEARER, 11 / 32)):
        bits = torch.tensor([int(text[2:], 16) for text in texts.value]).to(torch.int32)
        a, b, *c = bits.view(torch.float32).double()
        y = torch.linspace(1e-4, most, 10001, dtype=torch.float64)
        t = y * y
        found = a + t * (b + t * (c[0] if c else 0.0))
        assert (found * y / torch.tanh(y) - 1).abs().max() < 2.3e-4


# ---- masks ---------------------------------------------------------------------------------------------------

LINES = {
    "causal": (tw.causal(), (), lambda q, k, i, j: k <= q),
    "window": (tw.window(6, 3), (6, 3), lambda q, k, i, j: (q - k <= 6) & (k - q <= 3)),
    "prefix": (tw.prefix(20), (20,), lambda q, k, i, j: k < 20),
    "after": (tw.causal() & tw.custom(lambda k: k >= 21), (), lambda q, k, i, j: (k <= q) & (k >= 21)),
    "strict": (tw.custom(lambda i, j: i + 3 > j), (), lambda q, k, i, j: i + 3 > j),
    "equal": (tw.custom(lambda i, j: i == j), (), lambda q, k, i, j: i == j),
    "rows": (tw.causal() & tw.custom(lambda q: q % 5 != 2), (), lambda q, k, i, j: (k <= q) & (q % 5 != 2)),
}


class Language:
    """What printed lines use of Triton, on torch tensors."""

    int64, int32, float32, int1 = torch.int64, torch.int32, torch.float32, torch.bool
    where, maximum, minimum = torch.where, torch.maximum, torch.minimum

    @staticmethod
    def full(shape, number, dtype):
        return torch.full(shape, number, dtype=dtype)

    @staticmethod
    def cast(x, dtype):
        return torch.as_tensor(x).to(dtype)


def stripe(marks, x, n, t, sign, wanted):
    """What the kernel's word of that name says, with an element for each of its bits."""
    seen = (x + sign * torch.arange(marks.shape[1])) % n < t
    return marks & (seen == wanted)


def run(text, name, *arguments):
    """Call a printed function."""
    tl = Language()
    tl.maximum = lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    tl.minimum = lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    tl.where = lambda c, a, b: torch.where(torch.as_tensor(c), torch.as_tensor(a), torch.as_tensor(b))
    low, high = -(2**31), 2**31 - 1

    def whole_if_wild(a, b):
        wild = (a < low) | (b > high)
        return torch.where(wild, low, a), torch.where(wild, high, b)

    space = {
        "triton": types.SimpleNamespace(jit=lambda f: f), "tl": tl, "INT_MIN": low, "INT_MAX": high,
        "inside_int32": lambda x: torch.as_tensor(x).clamp(low, high), "whole_if_wild": whole_if_wild,
        "mod_int": torch.remainder,
        "here": lambda n: n, "fresh": lambda n, wanted: n, "stripe": stripe,
    }  # fmt: skip
    exec(compile(text, "printed", "exec"), space)
    return space[name](*arguments)


@pytest.mark.parametrize("name", LINES)
def test_lines_leave_each_row_a_run_of_columns(name):
    mask, ints, allowed = LINES[name]
    spec, leaves = spec_of(mask)
    parts, slots = plan(spec)[1], describe(spec, leaves)
    data = tuple(torch.tensor(n) for n in ints or (0,))
    assert parts.other is None
    i = torch.arange(ROWS)[:, None]
    q, n_k, offset = i + 9, 45, torch.tensor(2)
    given = {"i": i, "q": q, "scale": torch.tensor(1.0)}
    rows = [value(node, given, leaves, ints, ()) for node in plan(spec)[2]]
    zero = torch.tensor(0)
    first, last = run(
        print_limits(spec, slots),
        "limits",
        rows,
        i,
        q,
        torch.tensor(n_k),
        offset,
        zero,
        zero,
        zero,
        1.0,
        data,
    )
    j = torch.arange(64)[None, :]
    want = allowed(q, j + 2, i, j) & (j < n_k)
    assert torch.equal((j >= first) & (j <= last), want)
    low, high = run(
        print_reach(spec, slots), "reach", torch.tensor(8), torch.tensor(15), torch.tensor(9), offset, zero, zero, zero,
        zero, data,
    )  # fmt: skip
    seen = allowed(q, j + 2, i, j)[8:16].any(0).nonzero()
    assert seen.numel() == 0 or (low <= seen.min() and high >= seen.max())


def test_a_mask_is_told_apart():
    spec, _ = spec_of(tw.causal() & tw.custom(lambda q, k: (q - k) % 3 < 2) & tw.window(9, None))
    mask = algebra.mask_of(spec.keep)
    assert len(mask.lines) == 2 and mask.below and mask.other is not None
    assert not algebra.mask_of(spec_of(tw.causal() | tw.prefix(3))[0].keep).lines


def test_divisors_become_literals():
    size = 8
    spec, leaves = spec_of(tw.custom(lambda q, k: (q - k) % size < size // 2))
    written = with_literals(spec, ((0, size),))
    variables = tile()
    want = value(spec.keep, variables, leaves, [size], ())
    assert torch.equal(value(written.keep, variables, leaves, [size], ()), want)
    assert written.text != spec.text and written.text != with_literals(spec, ((0, 4),)).text
    assert "mod %0 8" in ex.to_text(written.keep)
    assert with_literals(spec, ()) is spec


@pytest.mark.parametrize(
    ("divisor", "word"), ((12, "mod_along("), (1000, "mod_along("), (8, "& 7"), (-5, "mod_int("))
)
def test_a_remainder_along_columns_is_divided_once_a_row(divisor, word):
    spec, leaves = spec_of(tw.causal() & tw.custom(lambda q, k: (q - k) % divisor == 1))
    found = divisors(types.SimpleNamespace(spec=spec), types.SimpleNamespace(ints=(divisor, 1)))
    assert found == (() if divisor == 1000 else ((0, divisor),))
    assert word in print_sees(with_literals(spec, found), describe(spec, leaves))


STRIPES = {
    "less": lambda q, k: (q - k) % WIDE < 9,
    "not less": lambda q, k: (q - k) % WIDE >= 9,
    "at most": lambda q, k: (q + k) % WIDE <= 9,
    "more": lambda q, k: k % WIDE > WIDE - 270,
    "turned": lambda q, k: (k - q) % WIDE > WIDE - 280,
    "two": lambda q, k: ((q - k) % WIDE < 20) & ((q + k) % WIDE >= 30),
    "literal": lambda q, k: (q - k) % 300 < 10,
}
WIDE = 290


@pytest.mark.parametrize("name", STRIPES)
def test_stripes_are_told_from_the_rest(name):
    """A remainder by a number beyond two blocks' columns that is compared with a number has a word of its own."""
    mask = tw.causal() & tw.custom(STRIPES[name])
    (spec, leaves), ints = spec_of(mask), as_mask(mask).term.ints
    found, rest = stripes_of(plan(spec)[1])
    assert len(found) == (2 if name == "two" else 1) and rest is None
    variables, marks, zero = tile(), torch.ones(ROWS, COLUMNS, dtype=torch.bool), torch.tensor(0)
    rows = [value(node, variables, leaves, ints, ()) for node in plan(spec)[2]]
    given = [variables[n] for n in ("i", "j", "q", "k", "j0", "k0")]
    got = run(
        print_stripes(spec, describe(spec, leaves)), "stripes", marks, rows, *given, zero, zero, zero, 1.0,
        tuple(map(torch.tensor, ints or (0,))),
    )  # fmt: skip
    want = value(spec.keep, variables, leaves, ints, ()) | (variables["k"] > variables["q"])
    assert torch.equal(got | (variables["k"] > variables["q"]), want)


def test_narrow_stripes_stay_with_the_rest():
    for divisor in (12, 255):
        spec = spec_of(tw.custom(lambda q, k: (q - k) % divisor < 5))[0]  # noqa: B023
        assert not stripes_of(plan(with_literals(spec, ((0, divisor),)))[1])[0]


def test_a_quotient_of_columns_alone_begins_at_the_block():
    spec, leaves = spec_of(tw.custom(lambda q, k: q // 12 == k // 12))
    text = print_sees(with_literals(spec, ((0, 12), (1, 12))), describe(spec, leaves))
    assert "floordiv_along(k0, j - j0, 1, " in text and "floordiv_int" not in text


def test_bounds_that_leave_int32_cut_nothing():
    spec, leaves = spec_of(tw.custom(lambda q, k: k <= q + 2_000_000_000))
    zero = torch.tensor(0)
    low, high = run(
        print_reach(spec, describe(spec, leaves)), "reach", torch.tensor(2**28), torch.tensor(2**28), zero, zero, zero,
        zero, zero, zero, (0,),
    )  # fmt: skip
    assert low <= 0 and high == 2**31 - 1


def test_the_host_knows_how_long_a_record_is():
    """Numbers that kernels and launches share, where a launch may not import a kernel."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="needs Gluon")
    from tilewise.backends.hopper import forward_place, launch_ranges
    from tilewise.backends.triton import backward_words, launch_runs

    assert forward_place.RECORD.value == launch_ranges.RECORD
    assert backward_words.RUN.value == launch_runs.RUN
