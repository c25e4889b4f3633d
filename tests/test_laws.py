"""Laws without an oracle, on every backend: layout, poison, no future leak, split = whole, determinism,
batch, dropout.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise.testing import cases_masks as masks
from tilewise.testing import cases_scores as terms
from tilewise.testing import laws
from tilewise.testing.cases import Case, Packing, Sizes, find_case
from tilewise.testing.cases_masks import CAUSAL, both

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = Sizes(2, 4, 2, 37, 45, 24, 20)
PLAIN = Case("law-plain", SIZES)
RICH = Case("law-rich", SIZES, mask=CAUSAL, scores=(terms.ALIBI, terms.softcap(3.0)), sink=True)
BF16 = replace(RICH, name="law-bf16", dtype=torch.bfloat16)
BIASED = replace(PLAIN, name="law-bias", scores=(terms.BIAS_HEAD, terms.CUSTOM_OUTER, terms.CUSTOM_SCATTER))
DROPPED = replace(RICH, name="law-dropout", dropout=0.3)
PACKED = Case(
    "law-packed",
    SIZES,
    packing=Packing((5, 17, 1), (9, 12, 7)),
    mask=CAUSAL,
    scores=(terms.ALIBI,),
    sink=True,
)


def by_name(*cases: Case):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@by_name(PLAIN, RICH, BF16, BIASED, PACKED)
def test_layout_changes_no_bit(case: Case, backend: str, device: torch.device) -> None:
    laws.layout_invariance(case, backend, device)


@by_name(
    *(
        replace(RICH, name=f"law-{mask.name}", mask=mask)
        for mask in (masks.PADDING_LENGTHS, masks.DENSE_COLUMNS)
    ),
    replace(PLAIN, name="law-window", mask=masks.window(2, 1), scores=(terms.BIAS_FULL, terms.softcap(2.0))),
    replace(PLAIN, name="law-empty_rows", mask=CAUSAL, q_offset=-20),
    replace(PACKED, packing=Packing((6, 9), (8, 10), used_q=(4, 9), used_k=(5, 0), after=3)),
)
def test_poison_changes_no_bit(case: Case, backend: str, device: torch.device) -> None:
    laws.poison_invariance(case, backend, device)


@by_name(
    RICH,
    BF16,
    DROPPED,
    replace(RICH, name="law-top_left", q_offset=0),
    replace(RICH, name="law-streaming", mask=masks.STREAMING),
    replace(RICH, name="law-causal_window", mask=masks.window(9, 0)),
    replace(RICH, name="law-causal_document", mask=both(CAUSAL, masks.DOCUMENT)),
    replace(RICH, name="law-tiles", sizes=SIZES._replace(B=1, Nq=150, Nk=170)),
)
def test_no_row_sees_the_future(case: Case, backend: str, device: torch.device) -> None:
    case = replace(case, mask=replace(case.mask, causal=True))
    laws.no_future_leak(case, backend, device, positions=(-3, 0, 1, 8, 15, 16, 31, 32, 44, 63, 64, 128))


SHARDED = (
    PLAIN,
    RICH,
    BF16,
    DROPPED,
    replace(RICH, name="law-fp64", dtype=torch.float64),
    replace(
        PLAIN, name="law-relative", scores=(terms.relative(5), terms.CUSTOM_GATE), mask=masks.window(9, 4)
    ),
    replace(PLAIN, name="law-prefix_lm", mask=masks.PREFIX_LM, q_offset=3, k_offset=-2),
    replace(PLAIN, name="law-nothing", mask=masks.NOTHING),
)
CUTS = ((), (10,), (0,), (45,), (0, 0, 13, 13, 45), (1, 2, 3, 44), (16, 32))


@by_name(*SHARDED)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_split_merges_to_the_whole(
    case: Case, cuts: tuple[int, ...], backend: str, device: torch.device
) -> None:
    laws.split_is_whole(case, backend, cuts, device)


@by_name(*(case for case in SHARDED if not case.sink), replace(RICH, name="law-nosink", sink=False))
@pytest.mark.parametrize("cuts", CUTS[1:], ids=str)
def test_backward_of_parts_sums_to_the_whole(
    case: Case, cuts: tuple[int, ...], backend: str, device: torch.device
) -> None:
    laws.backward_by_parts(case, backend, cuts, device)


@by_name(RICH, BF16, BIASED, DROPPED, PACKED)
def test_determinism(case: Case, backend: str, device: torch.device) -> None:
    laws.determinism(case, backend, device)


@by_name(
    PLAIN,
    RICH,
    BF16,
    replace(PACKED, name="law-packed_long", packing=Packing((5, 130, 1), (9, 300, 7))),
    replace(PLAIN, name="law-decode", sizes=SIZES._replace(B=3, Nq=1, Nk=300), mask=CAUSAL),
    PACKED,
)
def test_batch_invariance(case: Case, backend: str, device: torch.device) -> None:
    laws.batch_invariance(case, backend, device)


@by_name(RICH, BIASED, replace(PLAIN, name="law-decode", sizes=SIZES._replace(Nq=1, Nk=700), mask=CAUSAL))
def test_threads_change_no_bit(case: Case, backend: str) -> None:
    laws.thread_invariance(case, backend)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.93])
def test_dropout_keeps_the_right_fraction(p: float, backend: str, device: torch.device) -> None:
    laws.dropout_fraction(backend, p, device)


def test_laws_can_fail() -> None:
    """Each comparison notices what it is for."""
    one = {"out": torch.ones(3)}
    with pytest.raises(AssertionError, match="differs"):
        laws.same_bits("law", one, {"out": torch.tensor([1.0, 1.0, 1.0 + 2**-20])})
    with pytest.raises(AssertionError, match="shapes"):
        laws.same_bits("law", one, {"out": torch.ones(2)})
    with pytest.raises(AssertionError):
        laws.same_bits("law", one, {"out": torch.tensor([1.0, 1.0, float("nan")])})
    laws.same_bits(
        "law", {"out": torch.tensor([float("nan"), 0.0])}, {"out": torch.tensor([float("nan"), -0.0])}
    )
    with pytest.raises(ValueError):
        laws.no_future_leak(find_case("plain-fp32"), "blockwise")
    with pytest.raises(ValueError):
        laws.split_is_whole(find_case("mask-document"), "blockwise", (3,))
