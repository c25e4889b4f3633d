"""Built-in masks against formulas written by hand, and the laws of `&`, `|` and `~`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from tilewise.errors import DTypeError, OptionError, ShapeError, TilewiseError
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.custom import custom
from tilewise.spec.masks import (
    Mask,
    as_mask,
    block_sparse,
    causal,
    chunk,
    dense,
    document,
    key_padding,
    prefix,
    sink_tokens,
    window,
)
from tilewise.spec.print_torch import Env, compile_torch

B, H, NQ, NK = 2, 4, 7, 9
Q_OFFSET, K_OFFSET = torch.tensor([2, -3]), torch.tensor([0, -5])


def axes():
    """b h i j q k as int64 tensors that broadcast to (B, H, N_q, N_k)."""
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    i, j = torch.arange(NQ)[:, None], torch.arange(NK)
    return b, h, i, j, i + Q_OFFSET[b], j + K_OFFSET[b]


b, h, i, j, q, k = axes()


def visible(mask: Mask) -> torch.Tensor:
    """The pairs that the mask's spec shows, (B, H, N_q, N_k)."""
    spec = AttentionSpec.parse(spec_text(mask, (), False, False))
    if spec.keep is None:
        return torch.ones(B, H, NQ, NK, dtype=torch.bool)
    term = mask.term
    named = dict(b=b, h=h, g=h // 2, i=i, j=j, q=q, k=k)
    variables = {name: t.to(torch.int32) for name, t in named.items()}
    ranges = dict(b=(0, B), h=(0, H), i=(0, NQ), j=(0, NK))
    env = Env(variables, ranges, term.leaves, term.ints, term.floats, torch.float32)
    (keep,) = compile_torch((spec.keep,))(env)
    assert keep.dtype == torch.bool
    return keep.expand(B, H, NQ, NK)


def bools(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5


def loop(rule) -> torch.Tensor:
    """The mask by Python loops: rule(b, h, i, j, q, k) of Python integers."""
    result = torch.zeros(B, H, NQ, NK, dtype=torch.bool)
    for batch in range(B):
        for head in range(H):
            for row in range(NQ):
                for column in range(NK):
                    positions = row + int(Q_OFFSET[batch]), column + int(K_OFFSET[batch])
                    result[batch, head, row, column] = rule(batch, head, row, column, *positions)
    return result


IDS_Q = torch.tensor([[0, 0, 1, 1, -1, 2, 2], [3, 3, 3, -2, 0, 0, 1]])
IDS_K = torch.tensor([[0, 1, 1, 1, -1, -1, 2, 2, 0], [3, 0, 0, -2, 1, 1, 3, 3, 0]])
PER_BATCH = torch.tensor([4, -1])
DENSE, LAYOUT, PRESENT = bools(B, H, NQ, NK), bools(B, 1, 3, 3, seed=1), bools(B, NK, seed=2)

BUILT_IN = {
    "causal": (causal(), lambda b, h, i, j, q, k: k <= q),
    "window": (window(2, 1), lambda b, h, i, j, q, k: -2 <= k - q <= 1),
    "window of one": (window(0, 0), lambda b, h, i, j, q, k: k == q),
    "window to the left": (window(3, None), lambda b, h, i, j, q, k: k >= q - 3),
    "window to the right": (window(None, 2), lambda b, h, i, j, q, k: k <= q + 2),
    "window of all": (window(None, None), lambda b, h, i, j, q, k: True),
    "prefix": (prefix(3), lambda b, h, i, j, q, k: k < 3),
    "prefix of none": (prefix(0), lambda b, h, i, j, q, k: k < 0),
    "prefix per batch": (prefix(PER_BATCH), lambda b, h, i, j, q, k: k < [4, -1][b]),
    "chunk": (chunk(3), lambda b, h, i, j, q, k: q // 3 == k // 3),
    "chunk of one": (chunk(1), lambda b, h, i, j, q, k: q == k),
    "document": (
        document(IDS_Q, IDS_K),
        lambda b, h, i, j, q, k: int(IDS_Q[b, i]) == int(IDS_K[b, j]) and int(IDS_Q[b, i]) >= 0,
    ),
    "one document row": (
        document(IDS_K[0]),
        lambda b, h, i, j, q, k: int(IDS_K[0, i]) == int(IDS_K[0, j]) and int(IDS_K[0, j]) >= 0,
    ),
    "lengths": (key_padding(torch.tensor([5, 0])), lambda b, h, i, j, q, k: j < [5, 0][b]),
    "present": (key_padding(PRESENT), lambda b, h, i, j, q, k: bool(PRESENT[b, j])),
    "dense": (dense(DENSE), lambda b, h, i, j, q, k: bool(DENSE[b, h, i, j])),
    "dense of two": (dense(DENSE[1, 2]), lambda b, h, i, j, q, k: bool(DENSE[1, 2, i, j])),
    "dense of heads": (dense(DENSE[1, :, :1, :]), lambda b, h, i, j, q, k: bool(DENSE[1, h, 0, j])),
    "dense of one": (dense(torch.tensor(False)), lambda b, h, i, j, q, k: False),
    "block_sparse": (
        block_sparse(LAYOUT, (3, 4)),
        lambda b, h, i, j, q, k: bool(LAYOUT[b, 0, i // 3, j // 4]),
    ),
    "block_sparse, square": (
        block_sparse(LAYOUT[0], 4),
        lambda b, h, i, j, q, k: bool(LAYOUT[0, 0, i // 4, j // 4]),
    ),
    "custom": (custom(lambda q, k, h: (q - k) % 2 == h % 2), lambda b, h, i, j, q, k: (q - k) % 2 == h % 2),
    "custom by group": (custom(lambda g, k: k > g), lambda b, h, i, j, q, k: k > h // 2),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    mask, _ = BUILT_IN[name]
    assert torch.equal(visible(mask), SHOWN[name])


SHOWN = {name: loop(rule) for name, (_, rule) in BUILT_IN.items()}
FORMULAS = {name: m for name, (m, _) in BUILT_IN.items() if m.padding is None}


@pytest.mark.parametrize("name", FORMULAS)
def test_not(name):
    mask = FORMULAS[name]
    assert torch.equal(visible(~mask), ~visible(mask))
    assert torch.equal(visible(~~mask), visible(mask))


@pytest.mark.parametrize("name", BUILT_IN)
def test_double_negation_is_the_same_rule(name):
    mask = BUILT_IN[name][0]
    parse = AttentionSpec.parse
    assert parse(spec_text(~~mask, (), False, False)).keep is parse(spec_text(mask, (), False, False)).keep


# ---- laws --------------------------------------------------------------------------------------------------

formulas = st.sampled_from([*FORMULAS.values(), Mask(), ~Mask()])
law = examples(60)


@law
@given(formulas, formulas)
def test_de_morgan(one, two):
    assert torch.equal(visible(~(one & two)), visible(~one | ~two))
    assert torch.equal(visible(~(one | two)), visible(~one & ~two))


@law
@given(formulas, formulas, formulas)
def test_lattice(one, two, three):
    assert torch.equal(visible(one & two), visible(one) & visible(two))
    assert torch.equal(visible(one | two), visible(one) | visible(two))
    assert torch.equal(visible((one & two) & three), visible(one & (two & three)))
    assert torch.equal(visible((one | two) & three), visible((one & three) | (two & three)))
    assert torch.equal(visible(one & two), visible(two & one))


@st.composite
def masks(draw, depth=3):
    """A mask of any composition and, apart from it, what its formula and its padding show."""
    if depth == 0 or draw(st.booleans()):
        name = draw(st.sampled_from(list(BUILT_IN)))
        mask, _ = BUILT_IN[name]
        everything = torch.ones(B, H, NQ, NK, dtype=torch.bool)
        shown = SHOWN[name]
        return (mask, shown, everything) if mask.padding is None else (mask, everything, shown)
    one, rule, padding = draw(masks(depth=depth - 1))
    sign = draw(st.sampled_from("&|~"))
    if sign == "~":
        return ~one, ~rule, padding
    two, other_rule, other_padding = draw(masks(depth=depth - 1))
    both = padding & other_padding
    return (one & two, rule & other_rule, both) if sign == "&" else (one | two, rule | other_rule, both)


@examples(100)
@given(masks())
def test_any_composition(found):
    """`&`, `|` and `~` act on the formula; what any padding hides stays hidden."""
    mask, rule, padding = found
    assert torch.equal(visible(mask), rule & padding)


@pytest.mark.parametrize("keys", [torch.tensor([4, 2]), PRESENT], ids=["lengths", "bool"])
def test_padding_is_never_revealed(keys):
    padding = key_padding(keys)
    hidden = ~visible(padding)
    everything = Mask()
    for mask in (
        ~padding, ~~padding, padding | causal(), causal() | padding, everything | padding,
        ~(padding | causal()), ~(padding & causal()), (causal() & padding) | ~causal(),
        padding | ~padding, ~(~padding & window(1, 1)),
    ):  # fmt: skip
        assert not (visible(mask) & hidden).any()
    assert torch.equal(visible(padding | causal()), visible(padding))
    assert torch.equal(visible(~(causal() & padding)), ~visible(causal()) & visible(padding))


def test_a_tensor_joins_as_dense():
    for mask in (DENSE & causal(), causal() & DENSE):
        assert torch.equal(visible(mask), DENSE & visible(causal()))
    for mask in (DENSE | causal(), causal() | DENSE):
        assert torch.equal(visible(mask), DENSE | visible(causal()))
    assert torch.equal(visible(as_mask(DENSE)), DENSE)


def test_prefix_lm_and_streaming():
    assert torch.equal(visible(causal() | prefix(3)), (k <= q) | (k < 3) | (i < 0) | (h < 0))
    streaming = causal() & (window(2, 0) | sink_tokens(1))
    assert torch.equal(visible(streaming), loop(lambda b, h, i, j, q, k: k <= q and (q - k <= 2 or k < 1)))


def test_composition_does_not_change_its_parts():
    base = causal()
    text = base.term.text
    assert (base & window(1, None)).term.text != text
    assert (~base).term.text == f"~{text}"
    assert base.term.text == text


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "kind", "word"),
    [
        (lambda: window(-1, 0), OptionError, "left"),
        (lambda: window(0, -1), OptionError, "right"),
        (lambda: window(1.5, 0), OptionError, "integer"),
        (lambda: window(True, 0), OptionError, "integer"),
        (lambda: chunk(0), OptionError, "at least 1"),
        (lambda: chunk(-4), OptionError, "at least 1"),
        (lambda: prefix(-1), OptionError, "prefix"),
        (lambda: prefix(2.0), OptionError, "integer"),
        (lambda: prefix(torch.zeros(2, 2, dtype=torch.int64)), ShapeError, r"shape \(2, 2\)"),
        (lambda: prefix(torch.zeros(2)), DTypeError, "integers"),
        (lambda: prefix(torch.ones(2, dtype=torch.bool)), DTypeError, "integers"),
        (lambda: document(torch.zeros(1, 1, 1, dtype=torch.int64)), ShapeError, "ids_q"),
        (lambda: document(torch.zeros(3, dtype=torch.int64), torch.tensor(1)), ShapeError, "ids_k"),
        (lambda: document(torch.tensor([1, 2**31])), DTypeError, "int32"),
        (lambda: document(torch.tensor([0]), torch.tensor([-(2**31) - 1])), DTypeError, "int32"),
        (lambda: document(torch.zeros(3)), DTypeError, "integers"),
        (lambda: key_padding(torch.zeros(2)), DTypeError, "integers"),
        (lambda: key_padding(torch.zeros(2, 3, dtype=torch.int64)), ShapeError, "lengths"),
        (lambda: key_padding(torch.zeros(2, dtype=torch.bool)), ShapeError, "bool"),
        (lambda: dense(torch.zeros(3, 3)), DTypeError, "bias"),
        (lambda: dense(torch.zeros(1, 1, 1, 3, 3, dtype=torch.bool)), ShapeError, "four"),
        (lambda: block_sparse(torch.zeros(3, 3), 4), DTypeError, "bool"),
        (lambda: block_sparse(LAYOUT, 0), OptionError, "block_q"),
        (lambda: block_sparse(LAYOUT, (4, -1)), OptionError, "block_k"),
        (lambda: as_mask("causal"), DTypeError, "str"),
        (lambda: causal() & 3, DTypeError, "int"),
        (lambda: bool(causal()), OptionError, "truth"),
        (lambda: causal() and window(1, 1), OptionError, "`&`"),
    ],
)  # fmt: skip
def test_refusals(build, kind, word):
    with pytest.raises(kind, match=word) as error:
        build()
    assert isinstance(error.value, (TilewiseError, ValueError))


def test_the_largest_ids_are_fine():
    ids = torch.tensor([2**31 - 1, 0, 1, 2, 3, 4, 5])
    assert visible(document(ids, torch.cat([ids, ids[:2]])))[0, 0, 0].tolist() == [
        True,
        *[False] * 6,
        True,
        False,
    ]
