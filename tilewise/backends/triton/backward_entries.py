"""The signatures of the backward kernels, as `source` prints them."""

from __future__ import annotations

from tilewise.backends.triton.source import Entry

_PLACES = ("seed_ptr", "q_offset_ptr", "k_offset_ptr", "cu_q_ptr", "cu_k_ptr", "used_q_ptr", "used_k_ptr")
_STRIDES = tuple(f"{t}_{x}:i64" for t in ("q", "k", "v", "g") for x in ("b", "h", "n", "d"))
_SIZES = ("batch", "heads", "group", "seqlen_q", "seqlen_k")
_OFFSETS = ("q_offset", "k_offset", "h_offset", "b_offset", "size_d", "size_dv", "threshold:u32")
_FACTORS = ("scale:fp32", "drop_factor:fp32")
_SHAPE = ("D_PAD", "DV_PAD", "EVEN", "EVEN_V", "STEP", "UNIT", "PRECISION")
_ROWS = ("m_ptr", "low_ptr", "delta_ptr")
_FOLDS = ("derive", "keep", "classify")
_PARTS = ("derive", "keep", "ends", "holes", "classify_ends")

PREPARE = Entry(
    "prepare", "tilewise.backends.triton.prepare_kernel", "prepare_program",
    (
        "q_ptr", "k_ptr", "v_ptr", "out_ptr", "do_ptr", "lse_ptr", "dlse_ptr", "sink_ptr", *_ROWS, "marks_ptr",
        *_PLACES, *_STRIDES, "o_b:i64", "o_h:i64", "o_n:i64", "o_d:i64", "l_b:i64", "l_h:i64", "l_n:i64",
        "dl_b:i64", "dl_h:i64", "dl_n:i64", *_SIZES, "row_tiles", *_OFFSETS, "few", *_FACTORS, "limit:fp32",
    ),
    _FOLDS,
    ("EXACT", "HAS_MASK", "HAS_TERMS", "DROPOUT", "VARLEN", "LAST", "BLOCK_M", "BLOCK_N", *_SHAPE, "ALIGNED"),
)  # fmt: skip
KEYS = Entry(
    "key_gradients", "tilewise.backends.triton.key_kernel", "key_program",
    (
        "q_ptr", "k_ptr", "v_ptr", "do_ptr", *_ROWS, "marks_ptr", "dk_ptr", "dv_ptr", "sums_ptr", "runs_ptr", *_PLACES,
        "q_desc", "do_desc", "m_desc", "delta_desc", *_STRIDES,
        "dk_b:i64", "dk_h:i64", "dk_n:i64", "dv_b:i64", "dv_h:i64", "dv_n:i64", *_SIZES, "key_tiles", "swizzle",
        "run_b", "run_h",
        *_OFFSETS, *_FACTORS,
    ),
    _PARTS,
    (
        "HAS_MASK", "HAS_TERMS", "SLOPED", "DROPOUT", "VARLEN", "LAST", "SITES", "BLOCK_M", "BLOCK_N",
        "STAGES", *_SHAPE,
        "TMA", "CAREFUL", "ALIGNED", "RUNS", "SPLIT", "PART",
    ),
)  # fmt: skip
RUNS = Entry(
    "runs", "tilewise.backends.triton.runs_kernel", "runs_program",
    ("runs_ptr", *_PLACES[1:], *_SIZES, "key_tiles", "row_tiles", "q_offset", "k_offset"),
    ("classify_ends",), ("VARLEN", "LAST", "KEYS_M", "KEYS_N", "ROWS_M", "ROWS_N"),
)  # fmt: skip
"""For kernels that apply a mask's holes to FULL tiles, too."""
ROWS = Entry(
    "row_gradients", "tilewise.backends.triton.row_kernel", "row_program",
    (
        "q_ptr", "k_ptr", "v_ptr", "do_ptr", *_ROWS, "marks_ptr", "dq_ptr", "sums_ptr", "pair_ptr", "runs_ptr",
        *_PLACES, "k_desc", "v_desc", *_STRIDES, "dq_b:i64", "dq_h:i64", "dq_n:i64", "pair_b:i64", "pair_h:i64",
        "pair_i:i64", "pair_j:i64", *_SIZES, "row_tiles", "swizzle", "run_b", "run_h", *_OFFSETS, *_FACTORS,
    ),
    _PARTS,
    (
        "HAS_MASK", "HAS_TERMS", "SLOPED", "DROPOUT", "VARLEN", "LAST", "SITES", "PAIR", "PAIR_STEP",
        "BLOCK_M", "BLOCK_N",
        "STAGES", *_SHAPE, "TMA", "CAREFUL", "ALIGNED", "RUNS", "SPLIT",
    ),
)  # fmt: skip


def site_entry(site: int) -> Entry:
    """The kernel of one load site."""
    return Entry(
        f"site{site}_gradient", "tilewise.backends.triton.site_kernel", "site_program",
        (
            "q_ptr", "k_ptr", "v_ptr", "do_ptr", *_ROWS, "target_ptr", *_PLACES, *_STRIDES,
            "t0:i64", "t1:i64", "t2:i64", "t3:i64", *_SIZES, "row_tiles", "key_tiles", "leaf_batch", "leaf_heads",
            *_OFFSETS, *_FACTORS,
        ),
        (*_FOLDS, f"site{site}_indices"),
        ("MODE", "SITE", "HAS_MASK", "DROPOUT", "VARLEN", "LAST", "BLOCK_M", "BLOCK_N", *_SHAPE, "ALIGNED"),
    )  # fmt: skip
