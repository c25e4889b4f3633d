"""The spec's canonical text: readable, free of the run-time numbers, and the same spec in any process."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
from expression_strategies import (
    LEAF_KINDS,
    LEAF_SHAPES,
    NUM_FLOATS,
    NUM_INTS,
    calls,
    floats_between,
    trees,
    value_at,
)
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from tilewise.errors import SpecError
from tilewise.spec import expression as ex
from tilewise.spec.attention import AttentionSpec, LeafType, spec_text
from tilewise.spec.custom import custom, custom_score
from tilewise.spec.masks import (
    Mask,
    block_sparse,
    causal,
    chunk,
    dense,
    document,
    key_padding,
    prefix,
    window,
)
from tilewise.spec.scores import ScoreTerm, alibi, bias, relative, softcap
from tilewise.spec.term import Term, atom_text

IDS = torch.tensor([0, 0, 1])
BOOLS = torch.ones(3, 3, dtype=torch.bool)
FLOATS = torch.ones(3, 3)

MASKS = {
    "none": Mask(),
    "causal": causal(),
    "window": window(3, 1),
    "prefix per batch": prefix(IDS),
    "formula": causal() & (window(3, 0) | prefix(2)) & ~chunk(4),
    "padding": (document(IDS) | dense(BOOLS)) & key_padding(IDS) & key_padding(BOOLS),
    "block_sparse": ~block_sparse(BOOLS, (2, 3)),
    "custom": custom(lambda q, k, h, t: (q - k) % 3 == t[h], IDS) | causal(),
    "nothing": ~Mask(),
}
SCORES = {
    "none": (),
    "bias": (bias(FLOATS),),
    "three": (softcap(3.0), alibi(FLOATS), relative(FLOATS)),
    "buckets": (relative(FLOATS, IDS), softcap(2.0), softcap(4.0)),
    "custom": (custom_score(lambda s, q, k, t: s * t[q, k] - 0.5 * abs(q - k), FLOATS),),
}


def parsed(mask=None, scores=(), sink=False, dropout=False) -> AttentionSpec:
    return AttentionSpec.parse(spec_text(Mask() if mask is None else mask, scores, sink, dropout))


ALL = [(m, s) for m in MASKS for s in SCORES]


@pytest.mark.parametrize(("mask", "scores"), ALL)
def test_slots_count_the_data(mask, scores):
    """Leaves, ints and floats of the call, in the order of the text, fit the spec's slots."""
    spec = parsed(MASKS[mask], SCORES[scores])
    terms = [t for t in (MASKS[mask].term, *(s.term for s in SCORES[scores])) if t]
    leaves = [leaf for t in terms for leaf in t.leaves]
    assert len(spec.leaves) == len(leaves)
    for declared, leaf in zip(spec.leaves, leaves, strict=True):
        kind = "float" if leaf.is_floating_point() else "bool" if leaf.dtype == torch.bool else "int"
        assert declared == LeafType(kind, leaf.ndim)
    assert spec.num_ints == sum(len(t.ints) for t in terms)
    assert spec.num_floats == sum(len(t.floats) for t in terms)
    roots = [r for r in (spec.keep, spec.score) if r is not None]
    for node in ex.topological(*roots):
        if node.op == "load":
            assert spec.leaves[node.value] == (node.type, len(node.args))
        if node.op in ("int_scalar", "float_scalar"):
            assert node.value < (spec.num_ints if node.op == "int_scalar" else spec.num_floats)


def test_every_slot_is_read_by_its_own_atom():
    spec = parsed(window(3, 1) & prefix(2), (softcap(1.0), softcap(2.0)))
    assert {n.value for n in ex.topological(spec.keep) if n.op == "int_scalar"} == {0, 1, 2}
    assert {n.value for n in ex.topological(spec.score) if n.op == "float_scalar"} == {0, 1}
    two = parsed(document(IDS, IDS) & document(IDS, IDS), (bias(FLOATS), bias(FLOATS)))
    assert [n.value for n in ex.loads(two.keep)] == [0, 1, 2, 3]
    assert sorted(n.value for n in ex.loads(two.score)) == [4, 5]


def test_texts_by_heart():
    assert spec_text(causal(), (), False, False) == "tilewise/1|mask=causal[;0;0]{le k q}|scores="
    assert spec_text(Mask(), (softcap(2.0),), True, True) == (
        "tilewise/1|mask=|scores=softcap[;0;1]{div s x0;tanh %0;mul x0 %1}|sink|dropout"
    )
    assert spec_text(causal() & ~window(1, None), (), False, False) == (
        "tilewise/1|mask=(causal[;0;0]{le k q} & ~window_left[;1;0]{sub q k;ge n0 %0})|scores="
    )


def test_numbers_are_not_in_the_text():
    """Another window, cap, length or tensor is the same kernel."""

    def call(left, cap, tensor):
        mask = window(left, None) & key_padding(tensor) & custom(lambda q, k: q - k != left)
        return spec_text(mask, (softcap(cap), custom_score(lambda s: s * cap)), False, False)

    assert call(3, 2.0, IDS) == call(77, 0.125, torch.tensor([5, 6, 7, 8]))


def test_scores_fold_in_order():
    s, x0, x1 = ex.variable("s"), ex.float_scalar(0), ex.float_scalar(1)

    def cap(value, x):
        return ex.apply("mul", x, ex.apply("tanh", ex.apply("div", value, x)))

    assert parsed(scores=(softcap(1.0), softcap(2.0))).score is cap(cap(s, x0), x1)


def test_flags_and_nothing():
    for sink in (False, True):
        for dropout in (False, True):
            spec = parsed(sink=sink, dropout=dropout)
            assert (spec.sink, spec.dropout, spec.keep, spec.score) == (sink, dropout, None, None)
    assert parsed(~Mask()).keep is ex.const(False)
    assert parsed(causal() | ~~Mask(), ()).keep is None


def test_variables():
    spec = parsed(causal(), (bias(FLOATS),))
    assert spec.variables == {"q", "k", "s", "b", "h", "i", "j"}
    assert parsed().variables == frozenset()


@pytest.mark.parametrize(("mask", "scores"), ALL)
def test_parsing_is_stable_and_pickles(mask, scores):
    spec = parsed(MASKS[mask], SCORES[scores], sink=True)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec and again.keep is spec.keep and again.score is spec.score


@st.composite
def atoms(draw, kind):
    root = draw(trees(kind, variables=("q", "k", "h") if kind == "bool" else ("s", "q", "k", "h")))
    leaves = tuple((LEAF_KINDS[slot], len(LEAF_SHAPES[slot])) for slot in LEAF_KINDS)
    return root, Term(atom_text("custom", leaves, NUM_INTS, NUM_FLOATS, root))


@examples(150)
@given(atoms("bool"), atoms("bool"), st.sampled_from("&|"), st.booleans(), calls(), calls())
def test_any_formula_reads_its_own_data(one, two, sign, negate, data, other):
    """A formula of two atoms, each with its data, means the formula of what the atoms mean."""
    term = Mask(one[1]) & Mask(two[1]) if sign == "&" else Mask(one[1]) | Mask(two[1])
    spec = parsed(~term if negate else term)
    assert len(spec.leaves) == 2 * len(LEAF_KINDS)
    assert (spec.num_ints, spec.num_floats) == (2 * NUM_INTS, 2 * NUM_FLOATS)
    both = data.leaves + other.leaves, data.ints + other.ints, data.floats + other.floats
    for q, k in ((0, 0), (3, -2), (-7, 5)):
        point = {**data.point(0, 1, 0, 0), "q": q, "k": k}
        first = value_at(one[0], point, data.leaves, data.ints, data.floats)
        second = value_at(two[0], point, other.leaves, other.ints, other.floats)
        want = (first and second) if sign == "&" else (first or second)
        got = True if spec.keep is None else value_at(spec.keep, point, *both)
        assert got == (want != negate)


@examples(150)
@given(atoms("float"), atoms("float"), calls(), calls(), floats_between(-4, 4))
def test_any_terms_fold_in_order_with_their_own_data(one, two, data, other, s):
    spec = parsed(scores=(ScoreTerm(one[1]), ScoreTerm(two[1])))
    both = data.leaves + other.leaves, data.ints + other.ints, data.floats + other.floats
    point = {**data.point(0, 1, 0, 0), "q": 2, "k": -1, "s": s}
    inner = value_at(one[0], point, data.leaves, data.ints, data.floats)
    want = value_at(two[0], {**point, "s": inner}, other.leaves, other.ints, other.floats)
    got = value_at(spec.score, point, *both)
    assert got == want or (got != got and want != want)


SECOND_PROCESS = """
import sys
from tilewise.spec.attention import AttentionSpec
from tilewise.spec.expression import to_text
for line in sys.stdin.read().splitlines():
    spec = AttentionSpec.parse(line)
    print([None if r is None else to_text(r) for r in (spec.keep, spec.score)], spec.leaves, spec.names)
"""


def test_a_second_process_reads_the_same_trees():
    texts = [spec_text(MASKS[m], SCORES[s], True, False) for m, s in ALL]
    assert not any("\n" in text for text in texts)
    done = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS],
        input="\n".join(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(texts)
    for text, line in zip(texts, lines, strict=True):
        spec = AttentionSpec.parse(text)
        roots = [None if r is None else ex.to_text(r) for r in (spec.keep, spec.score)]
        assert line == f"{roots} {spec.leaves} {spec.names}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tilewise/1",
        "tilewise/0|mask=|scores=",
        "tilewise/1|mask=causal|scores=",
        "tilewise/1|mask=causal[;0;0]{le k q|scores=",
        "tilewise/1|mask=causal[;0;0]{le k q}}|scores=",
        "tilewise/1|mask=(causal[;0;0]{le k q} & )|scores=",
        "tilewise/1|mask=(causal[;0;0]{le k q} ^ causal[;0;0]{le k q})|scores=",
        "tilewise/1|mask=(causal[;0;0]{le k q}|scores=",
        "tilewise/1|mask=a[long2;0;0]{le k q}|scores=",
        "tilewise/1|mask=a[;0;0]{load L0 q}|scores=",
        "tilewise/1|mask=a[;0;0]{le k}|scores=",
        "tilewise/1|mask=a[;0;0]{__import__ os}|scores=",
        "tilewise/1|mask=|scores=softcap[;0;1]{mul s x0}softcap[;0;1]{mul s x0}",
        "tilewise/1|mask=|scores=|sunk",
        # a slot beyond what the atom declares, a number as a mask, a score in a mask, too few indices
        "tilewise/1|mask=a[;0;0]{le k n0}|scores=",
        "tilewise/1|mask=a[;0;1]{gt x1 0.5}|scores=",
        "tilewise/1|mask=a[;0;0]{sub q k}|scores=",
        "tilewise/1|mask=a[;0;0]{gt s 0.0}|scores=",
        "tilewise/1|mask=a[bool2;0;0]{load L0 q}|scores=",
    ],
)
def test_foreign_text_is_refused(text):
    with pytest.raises(SpecError):
        AttentionSpec.parse(text)
