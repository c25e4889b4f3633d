"""Cases named by hand: each feature alone, odd sizes, head dims, empty shapes, layouts, poison, offsets,
packing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tilewise.testing import cases_masks as masks
from tilewise.testing import cases_scores as terms
from tilewise.testing.cases import Case, Packing, Sizes
from tilewise.testing.cases_masks import CAUSAL, MaskFeature, both, either, negated
from tilewise.testing.poison import LAYOUTS

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
WORD = {FP32: "fp32", FP64: "fp64", BF16: "bf16", FP16: "fp16"}
SMALL = Sizes(2, 4, 2, 19, 23, 16, 16)

MASKS: tuple[MaskFeature, ...] = (
    CAUSAL,
    masks.window(5, 0),
    masks.window(3, 4),
    masks.window(None, 2),
    masks.window(6, None),
    masks.window(0, 5),
    masks.prefix(7),
    masks.PREFIX_TENSOR,
    masks.PREFIX_LM,
    masks.STREAMING,
    masks.chunk(5),
    masks.DOCUMENT,
    masks.PADDING_LENGTHS,
    masks.PADDING_BOOL,
    masks.DENSE_FULL,
    masks.DENSE_SHARED,
    masks.DENSE_COLUMNS,
    masks.block_sparse(4),
    masks.block_sparse(3, 5, by_head=True),
    masks.CUSTOM_DILATED,
    masks.CUSTOM_HEAD_REACH,
    masks.NOTHING,
    negated(CAUSAL),
    negated(masks.PADDING_LENGTHS),
    negated(both(CAUSAL, masks.chunk(4)), "not_causal_chunk"),
    both(CAUSAL, masks.PADDING_LENGTHS),
    either(masks.prefix(3), masks.PADDING_BOOL, "prefix_or_padding"),
    both(both(CAUSAL, masks.DOCUMENT), masks.window(6, 0), "causal_document_window"),
    either(masks.block_sparse(5), masks.window(1, 1), "bigbird"),
)
TERMS: tuple[terms.ScoreFeature, ...] = (
    terms.BIAS_FULL,
    terms.BIAS_HEAD,
    terms.BIAS_COLUMN,
    terms.BIAS_ROW,
    terms.BIAS_SCALAR,
    terms.BIAS_HIDING,
    terms.ALIBI,
    terms.ALIBI_BATCH,
    terms.softcap(2.0),
    terms.relative(6),
    terms.RELATIVE_BUCKET,
    terms.CUSTOM_SLOPE,
    terms.CUSTOM_GATE,
    terms.CUSTOM_OUTER,
    terms.CUSTOM_SCATTER,
    terms.CUSTOM_WORDS,
    terms.CUSTOM_GROUP,
)


def named_cases() -> Iterator[Case]:
    """Every hand-named case, in a fixed order."""
    yield from _features_alone()
    yield from _orders_of_terms()
    yield from _sizes()
    yield from _head_dims()
    yield from _empty()
    yield from _layouts_and_poison()
    yield from _positions()
    yield from _packed()


def _features_alone() -> Iterator[Case]:
    for dtype in (FP32, FP64, BF16, FP16):
        yield Case(f"plain-{WORD[dtype]}", SMALL, dtype)
    for mask in MASKS:
        yield Case(f"mask-{mask.name}", SMALL, mask=mask)
    for term in TERMS:
        yield Case(f"term-{term.name}", SMALL, scores=(term,))
    yield Case("mask-document_self", SMALL._replace(Nq=21, Nk=21), mask=masks.DOCUMENT_SELF)
    yield Case("sink", SMALL, sink=True)
    yield Case("sink-nothing_visible", SMALL, mask=masks.NOTHING, sink=True)
    yield Case("dropout", SMALL, dropout=0.3)
    yield Case("dropout-all", SMALL, dropout=1.0)
    yield Case("dropout-h_offset", SMALL, dropout=0.5, h_offset=3, mask=CAUSAL)
    yield Case("scale-negative", SMALL, scale=-0.5)
    yield Case("scale-zero", SMALL, scale=0.0)
    for dtype in (FP32, BF16, FP16):
        yield Case(f"large_logits-{WORD[dtype]}", SMALL, dtype, mask=CAUSAL, spread=20.0)


def _orders_of_terms() -> Iterator[Case]:
    cap, alibi = terms.softcap(1.5), terms.ALIBI
    yield Case("order-softcap_then_alibi", SMALL, scores=(cap, alibi))
    yield Case("order-alibi_then_softcap", SMALL, scores=(alibi, cap))
    yield Case("order-bias_softcap_bias", SMALL, scores=(terms.BIAS_HEAD, cap, terms.BIAS_FULL), mask=CAUSAL)
    yield Case("order-minus_inf_then_softcap", SMALL, scores=(terms.BIAS_HIDING, cap))
    yield Case(
        "order-four_terms_sink", SMALL, scores=(terms.relative(3), cap, alibi, terms.CUSTOM_GATE), sink=True
    )
    everything = both(masks.STREAMING, masks.PADDING_BOOL, "streaming_padding")
    for dtype in (FP32, FP64, BF16):
        yield Case(
            f"everything-{WORD[dtype]}",
            SMALL._replace(H=6, Hkv=3, D=24, Dv=20),
            dtype,
            mask=everything,
            scores=(terms.BIAS_FULL, cap, alibi),
            sink=True,
            dropout=0.2,
            strides="bnhd",
            poison="hidden",
        )


def _sizes() -> Iterator[Case]:
    one_head = Sizes(1, 2, 1, 0, 0, 8, 8)
    pairs = (
        (1, 1),
        (1, 2),
        (2, 1),
        (3, 31),
        (31, 3),
        (15, 16),
        (17, 15),
        (63, 65),
        (64, 64),
        (67, 61),
        (127, 129),
        (129, 127),
    )
    for nq, nk in pairs:
        for mask in (None, CAUSAL):
            word = "causal" if mask else "full"
            yield Case(f"size-{nq}x{nk}-{word}", one_head._replace(Nq=nq, Nk=nk), mask=mask)
    yield Case("size-decode-1x257-gqa", Sizes(3, 8, 2, 1, 257, 32, 32), BF16, mask=CAUSAL)
    yield Case("size-300x40-causal", one_head._replace(Nq=300, Nk=40), mask=CAUSAL)
    yield Case("size-97x293-window", one_head._replace(Nq=97, Nk=293), mask=masks.window(50, 0), sink=True)
    for heads in ((1, 1), (3, 1), (6, 2), (7, 7), (9, 3), (12, 4)):
        yield Case(
            f"heads-{heads[0]}_{heads[1]}",
            SMALL._replace(H=heads[0], Hkv=heads[1]),
            mask=CAUSAL,
            scores=(terms.ALIBI,),
        )


def _head_dims() -> Iterator[Case]:
    base = Sizes(1, 2, 1, 17, 21, 0, 0)
    for d in (1, 2, 3, 7, 8, 15, 31, 33, 40, 64, 72, 80, 96, 100, 128, 129, 160, 192, 255, 256, 257):
        yield Case(f"head_dim-{d}", base._replace(D=d, Dv=d), mask=CAUSAL)
    for d, dv in ((8, 16), (192, 128), (1, 33), (65, 1), (24, 7), (576, 512)):
        yield Case(f"head_dims-{d}_{dv}", base._replace(D=d, Dv=dv), mask=CAUSAL, sink=True)
    for dtype in (BF16, FP16):
        yield Case(f"head_dim-72-{WORD[dtype]}", base._replace(D=72, Dv=72), dtype, mask=CAUSAL)


def _empty() -> Iterator[Case]:
    small = Sizes(2, 4, 2, 5, 7, 8, 8)
    changes = (
        {"Nk": 0},
        {"Nq": 0},
        {"Nq": 0, "Nk": 0},
        {"B": 0},
        {"H": 0, "Hkv": 0},
        {"D": 0},
        {"Dv": 0},
        {"D": 0, "Dv": 0},
    )
    for change in changes:
        name = "_".join(f"{key}{value}" for key, value in change.items())
        yield Case(f"empty-{name}", small._replace(**change), mask=CAUSAL, scale=0.5)
    yield Case("empty-Nk0-sink", small._replace(Nk=0), sink=True, scores=(terms.ALIBI,))
    yield Case("empty-Nq0-bias", small._replace(Nq=0), scores=(terms.BIAS_COLUMN,))
    yield Case("empty-B0-padding", small._replace(B=0), mask=masks.PADDING_LENGTHS, scores=(terms.BIAS_HEAD,))


def _layouts_and_poison() -> Iterator[Case]:
    for layout in LAYOUTS:
        yield Case(f"layout-{layout}", SMALL, mask=CAUSAL, strides=layout, poison="surround")
        yield Case(
            f"layout-{layout}-bf16", SMALL._replace(D=40, Dv=24), BF16, strides=layout, poison="surround"
        )
    hiding = (
        masks.PADDING_LENGTHS,
        masks.PADDING_BOOL,
        masks.DENSE_COLUMNS,
        masks.window(2, 1),
        masks.prefix(4),
        masks.DOCUMENT,
    )
    for mask in hiding:
        yield Case(f"poison-{mask.name}", SMALL, mask=mask, poison="hidden", scores=(terms.BIAS_FULL,))
        capped = (terms.BIAS_FULL, terms.softcap(2.0), terms.CUSTOM_GATE)
        yield Case(f"poison-{mask.name}-capped", SMALL, mask=mask, poison="hidden", scores=capped, sink=True)
    yield Case("poison-empty_rows", SMALL._replace(Nq=40, Nk=9), mask=CAUSAL, poison="hidden")
    yield Case(
        "poison-causal-bias", SMALL, mask=CAUSAL, poison="hidden", scores=(terms.BIAS_FULL,), dropout=0.2
    )


def _positions() -> Iterator[Case]:
    features = {"mask": masks.STREAMING, "scores": (terms.ALIBI, terms.relative(4)), "dropout": 0.2}
    base = Case("position", SMALL, **features)
    yield replace(base, name="position-top_left", q_offset=0)
    yield replace(base, name="position-negative", q_offset=-9, k_offset=-13)
    yield replace(base, name="position-far", q_offset=1_000_003, k_offset=1_000_001)
    yield replace(base, name="position-tensor", q_offset=(5, -3))
    yield replace(base, name="position-both_tensors", q_offset=(5, -3), k_offset=(2, -6))
    yield replace(base, name="position-k_shard", q_offset=11, k_offset=6)
    for mask in (CAUSAL, masks.chunk(4), masks.prefix(3), masks.window(4, 2), masks.CUSTOM_DILATED):
        yield Case(f"position-negative-{mask.name}", SMALL, mask=mask, q_offset=-7, k_offset=-11)
    rows = both(masks.DOCUMENT, masks.PADDING_LENGTHS)
    yield Case(
        "position-moves_no_rows",
        SMALL,
        mask=rows,
        scores=(terms.BIAS_FULL, terms.CUSTOM_OUTER),
        q_offset=50,
        k_offset=9,
    )
    yield Case("position-nothing_visible", SMALL, mask=CAUSAL, q_offset=-100)


def _packed() -> Iterator[Case]:
    sizes = Sizes(0, 4, 2, 0, 0, 16, 16)
    plain = Packing((5, 17, 1), (7, 12, 9))
    holes = Packing((0, 13, 0, 4), (3, 0, 0, 11))
    outside = Packing((6, 9), (8, 10), used_q=(4, 9), used_k=(5, 0), after=3)
    for name, packing in (("plain", plain), ("holes", holes), ("outside", outside)):
        for mask in (None, CAUSAL, masks.window(3, 1), masks.STREAMING, masks.PREFIX_TENSOR):
            word = mask.name if mask else "full"
            yield Case(f"packed-{name}-{word}", sizes, packing=packing, mask=mask, poison="hidden")
    features = (terms.ALIBI, terms.softcap(3.0), terms.relative(3))
    yield Case("packed-terms", sizes, packing=plain, mask=CAUSAL, scores=features, sink=True)
    yield Case("packed-dropout", sizes, packing=plain, mask=CAUSAL, dropout=0.3)
    yield Case("packed-bias", sizes, packing=holes, scores=(terms.BIAS_FULL, terms.BIAS_HEAD))
    yield Case(
        "packed-custom", sizes, packing=plain, mask=masks.CUSTOM_HEAD_REACH, scores=(terms.CUSTOM_OUTER,)
    )
    yield Case("packed-padding", sizes, packing=plain, mask=both(CAUSAL, masks.PADDING_LENGTHS), sink=True)
    yield Case("packed-dense", sizes, packing=plain, mask=masks.DENSE_FULL, scores=(terms.BIAS_HIDING,))
    yield Case("packed-document", sizes, packing=plain, mask=both(CAUSAL, masks.DOCUMENT), poison="hidden")
    yield Case("packed-blocks", sizes, packing=holes, mask=masks.block_sparse(4, by_head=True))
    yield Case(
        "packed-offsets",
        sizes,
        packing=plain,
        mask=CAUSAL,
        scores=(terms.ALIBI,),
        q_offset=(3, -2, 8),
        k_offset=2,
    )
    yield Case(
        "packed-used_q",
        sizes,
        packing=Packing((6, 5), (4, 9), used_q=(2, 5)),
        mask=CAUSAL,
        sink=True,
        poison="hidden",
    )
    yield Case("packed-none", sizes, packing=Packing((), ()), mask=CAUSAL)
    yield Case("packed-all_empty", sizes, packing=Packing((0, 0), (0, 0)), mask=CAUSAL)
    yield Case("packed-no_keys", sizes, packing=Packing((3, 4), (0, 0)), sink=True)
    for dtype in (FP64, BF16, FP16):
        yield Case(
            f"packed-{WORD[dtype]}", sizes._replace(Dv=24), dtype, packing=outside, mask=CAUSAL, sink=True
        )
    for layout in ("sliced", "bnhd", "interleaved", "stepped"):
        yield Case(
            f"packed-layout-{layout}", sizes, packing=plain, mask=CAUSAL, strides=layout, poison="surround"
        )
    yield Case(
        "packed-starts_late",
        sizes,
        packing=Packing((4, 5), (6, 2), before=2, after=1),
        mask=CAUSAL,
        poison="hidden",
    )
