"""The signatures of the backward kernels for Hopper, as `source` prints them."""

from __future__ import annotations

from tilewise.backends.triton.backward_entries import PREPARE
from tilewise.backends.triton.source import Entry

_PLACES = ("q_offset_ptr", "k_offset_ptr", "cu_q_ptr", "cu_k_ptr", "used_q_ptr", "used_k_ptr")
_FLAGS = ("VARLEN", "USED_Q", "USED_K", "Q_OFFSET", "K_OFFSET")
_TENSORS = (
    "q_desc", "do_desc", "k_desc", "v_desc", "m_desc", "delta_desc", "dk_desc", "dv_desc", "dk_ptr", "dv_ptr",
)  # fmt: skip
_NUMBERS = (
    *_PLACES, "dk_b:i64", "dk_h:i64", "dk_n:i64", "dv_b:i64", "dv_h:i64", "dv_n:i64", "batch",
    "heads", "group", "seqlen_q", "seqlen_k", "row_tiles", "key_tiles", "swizzle",
)  # fmt: skip
_LAST = ("q_offset", "k_offset", "size_d", "size_dv", "scale:fp32")
HALVES = Entry(
    "halves", "tilewise.backends.hopper.backward_kernel", "halves_program",
    (
        *_TENSORS, "dq_desc", "sums_desc", "dq_ptr", "marks_ptr", "counter_ptr", "turns_ptr", "clear_ptr", "done_ptr",
        "taken_ptr", "parts_ptr", "said_ptr", *_NUMBERS, "lead", "lag", "first", "span", "ranges", *_LAST,
    ),
    (),
    (
        "HAS_MASK", "HAS_TERMS", "BM", "D", "D2", "ST", "KV", *_FLAGS, "ADD", "ORDER", "WORKER", "LOADER", "AHEAD",
        "BULK", "SPLIT",
    ),
)  # fmt: skip
ROLES = Entry(
    "roles", "tilewise.backends.hopper.backward_roles", "roles_program",
    (*_TENSORS, "marks_ptr", *_NUMBERS, *_LAST), (),
    ("HAS_MASK", "HAS_TERMS", "NC", "NV", "W", "ST", *_FLAGS, "WORKER", "LOADER"),
)  # fmt: skip
EARLY = Entry(
    "early", "tilewise.backends.hopper.backward_early", "early_program",
    (*_TENSORS, "marks_ptr", "counter_ptr", *_NUMBERS, *_LAST), (),
    ("HAS_MASK", "HAS_TERMS", "NC", "NV", "W", "ST", *_FLAGS, "WORKER", "LOADER"),
)  # fmt: skip
_ROW_TENSORS = (
    "q_desc", "do_desc", "k_desc", "v_desc", "dq_desc", "dq_ptr", "m_ptr", "delta_ptr", "marks_ptr",
)  # fmt: skip
_ROW_NUMBERS = (
    *_PLACES, "dq_b:i64", "dq_h:i64", "dq_n:i64", "batch", "heads", "group", "seqlen_q", "seqlen_k", "row_tiles",
    "line_tiles", "swizzle", "q_offset", "k_offset", "size_d", "scale:fp32",
)  # fmt: skip
_ROW_CONSTANTS = ("HAS_MASK", "HAS_TERMS", "NC", "NV", "W", "KST", "VST", *_FLAGS, "WORKER", "LOADER")
ROWS = Entry(
    "rows", "tilewise.backends.hopper.backward_row_kernel", "rows_program", (*_ROW_TENSORS, *_ROW_NUMBERS), (),
    _ROW_CONSTANTS,
)  # fmt: skip
DRAWN_ROWS = Entry(
    "drawn_rows", "tilewise.backends.hopper.backward_drawn_rows", "rows_program",
    (*_ROW_TENSORS, "counter_ptr", *_ROW_NUMBERS), (), _ROW_CONSTANTS,
)  # fmt: skip
AGAIN = Entry(
    "prepare_again", "tilewise.backends.hopper.backward_line_kernels", "again_program", PREPARE.arguments,
    PREPARE.functions, tuple(c for c in PREPARE.constants if c != "ALIGNED"),
)  # fmt: skip
