"""Generated cases: every pair of values of any two factors (mask, term, sink, dropout, heads, dtype, lengths,
layout) occurs at least once.

Single features are easy to get right; what breaks is a window with a sink under GQA in bf16. A pairwise cover
of eight factors takes as many cases as its two longest factors multiplied, instead of a hundred thousand for
the full cross.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch

from tilewise.testing import cases_masks as masks
from tilewise.testing import cases_scores as terms
from tilewise.testing.cases import Case, Packing, Sizes
from tilewise.testing.cases_masks import CAUSAL, both, negated

Level = tuple[str, Any]

FACTORS: tuple[tuple[Level, ...], ...] = (
    (
        ("full", None),
        ("causal", CAUSAL),
        ("window", masks.window(9, 3)),
        ("streaming", masks.STREAMING),
        ("prefix_lm", masks.PREFIX_LM),
        ("chunk", both(CAUSAL, masks.chunk(7), "causal_chunk")),
        ("document", masks.DOCUMENT),
        ("padding", both(CAUSAL, masks.PADDING_LENGTHS)),
        ("dense", masks.DENSE_FULL),
        ("blocks", masks.block_sparse(8)),
        ("custom", masks.CUSTOM_HEAD_REACH),
        ("negated", negated(masks.window(2, 2))),
    ),
    (
        ("bare", ()),
        ("bias", (terms.BIAS_FULL,)),
        ("minus_inf", (terms.BIAS_HIDING,)),
        ("alibi", (terms.ALIBI_BATCH,)),
        ("softcap", (terms.softcap(3.0),)),
        ("relative", (terms.relative(5),)),
        ("outer", (terms.CUSTOM_OUTER,)),
        ("scatter", (terms.CUSTOM_SCATTER,)),
        ("gate_bias", (terms.CUSTOM_GATE, terms.BIAS_HEAD)),
    ),
    (("nosink", False), ("sink", True)),
    (("keep", 0.0), ("drop", 0.25)),
    (("mha", (3, 3)), ("gqa", (4, 2)), ("mqa", (5, 1))),
    (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp64", torch.float64)),
    (
        ("31x31", (31, 31)),
        ("1x37", (1, 37)),
        ("29x13", (29, 13)),
        ("13x66", (13, 66)),
        ("67x67", (67, 67)),
        ("64x5", (64, 5)),
    ),
    (("bhnd", "contiguous"), ("bnhd", "bnhd"), ("sliced", "sliced"), ("odd", "rows")),
)

PACKED_FACTORS: tuple[tuple[Level, ...], ...] = (
    FACTORS[0][:6],
    tuple(level for level in FACTORS[1] if level[0] in ("bare", "alibi", "softcap", "relative", "scatter")),
    FACTORS[2],
    FACTORS[3],
    FACTORS[4],
    FACTORS[5],
    (
        ("even", Packing((16, 16), (16, 16))),
        ("ragged", Packing((1, 33, 7), (19, 33, 2))),
        ("holes", Packing((0, 9, 5), (4, 0, 21), after=2)),
        ("used", Packing((12, 8), (12, 17), used_q=(5, 8), used_k=(11, 0))),
    ),
    (("thd", "contiguous"), ("htd", "bnhd"), ("sliced", "sliced")),
)


def pairwise(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of level numbers such that every pair of levels of every two factors occurs in some row. Greedy,
    deterministic.

    counts: number of levels of each factor. Returns a list of rows, one level number per factor.
    """
    open_pairs = {
        (f, a, g, b)
        for f, g in combinations(range(len(counts)), 2)
        for a in range(counts[f])
        for b in range(counts[g])
    }
    rows = []
    while open_pairs:
        f, a, g, b = min(open_pairs)
        row: dict[int, int] = {f: a, g: b}
        for factor in range(len(counts)):
            if factor not in row:
                row[factor] = max(
                    range(counts[factor]), key=lambda level: _gain(row, factor, level, counts, open_pairs)
                )
        rows.append(tuple(row[factor] for factor in range(len(counts))))
        open_pairs -= {(f, rows[-1][f], g, rows[-1][g]) for f, g in combinations(range(len(counts)), 2)}
    return rows


def _gain(
    row: dict[int, int], factor: int, level: int, counts: Sequence[int], open_pairs: set
) -> tuple[int, int]:
    """New pairs this level closes with the levels chosen so far; ties go to a level that rotates with the
    row.
    """
    closed = 0
    for other, chosen in row.items():
        pair = (other, chosen, factor, level) if other < factor else (factor, level, other, chosen)
        closed += pair in open_pairs
    turn = (level + sum(row.values())) % counts[factor]
    return closed, turn


def crossed_cases() -> Iterator[Case]:
    """The dense cross, then the packed one."""
    for number, row in enumerate(pairwise([len(levels) for levels in FACTORS])):
        yield _dense(number, [levels[n] for levels, n in zip(FACTORS, row, strict=True)])
    for number, row in enumerate(pairwise([len(levels) for levels in PACKED_FACTORS])):
        yield _packed(number, [levels[n] for levels, n in zip(PACKED_FACTORS, row, strict=True)])


def _dense(number: int, levels: list[Level]) -> Case:
    words = [word for word, _ in levels]
    mask, scores, sink, dropout, heads, dtype, lengths, strides = (value for _, value in levels)
    return Case(
        "cross-" + "-".join(words),
        Sizes(2, *heads, *lengths, *_head_dims(number)),
        dtype,
        mask,
        scores,
        sink,
        dropout,
        strides=strides,
        poison="hidden",
    )


def _packed(number: int, levels: list[Level]) -> Case:
    words = [word for word, _ in levels]
    mask, scores, sink, dropout, heads, dtype, packing, strides = (value for _, value in levels)
    return Case(
        "packed-cross-" + "-".join(words),
        Sizes(0, *heads, 0, 0, *_head_dims(number)),
        dtype,
        mask,
        scores,
        sink,
        dropout,
        packing=packing,
        strides=strides,
        poison="hidden",
    )


def _head_dims(number: int) -> tuple[int, int]:
    """Head dims rotate over the cases: aligned, odd, and D_v != D."""
    return ((16, 16), (20, 12), (32, 32), (7, 9), (8, 24))[number % 5]
