"""Where the kernels find what: slots of the parameter block of a call, of its segments, and of a thread's scratch.

Everything is int64 and little-endian; a float32 stands in the low half of its slot. Strides are in bytes.
"""

from __future__ import annotations

from types import ModuleType

from tilewise.backends.cpu.isa import BLOCK_ROWS


def _places(name: str, places: dict[str, int]) -> ModuleType:
    """Names for numbers. A module, since Numba takes its attributes for constants: those of a named tuple are its
    parts, all of which it lowers again at each mention."""
    found = ModuleType(name)
    vars(found).update(places)
    return found


def _slots(name: str, fields: str) -> ModuleType:
    return _places(name, {field: n for n, field in enumerate(fields.split())})


P = _slots(
    "P",
    "task thread flag num_tasks threads q k v out lse scratch segments num_segments scratch_bytes "
    "q_b q_h q_n k_b k_h k_n v_b v_h v_n out_b out_h out_n lse_b lse_h "
    "do do_b do_h do_n dq dq_b dq_h dq_n dk dk_b dk_h dk_n dv dv_b dv_h dv_n dlse dlse_b dlse_h "
    "sink_rows sink_rows_b sink_rows_h "
    "exact heads heads_kv group head_dim head_dim_v packed wide_out total_rows block_rows key_block superblock "
    "part_out part_lse arrived part_dq dq_rows turned_v copied leaf_parts leaf_part_bytes page_size num_pages together "
    "untouched fresh fresh_pages "
    "scale sink "
    "dropout threshold factor seed_low seed_high h_offset b_offset "
    "classify fold_full fold_partial slopes_full slopes_partial spec own count",
)
"""A call; first what differs from call to call, side by side. classify, fold_*, slopes_*: addresses of the spec's
code, 0 where the spec has none. turned_v: v turned for products of pairs, or k and v in float32; 0 where each block is
brought into shape when it is met. block_rows: rows of a task of the forward pass; dq_rows: rows of a block of dq.
together: KV heads of a task of decode. arrived: splits that are done, by segment and head, all 0 between calls.
untouched, fresh, fresh_pages: the next of so many huge pages that nobody has met, and where they begin. threads: of
the call, by which tasks of decode are shared out. own: keys for which each thread's scratch has room, of one head in
float32, kept over its blocks of rows; 0 for none. count: of the slots."""

STRIDES = {P.q: P.q_b, P.k: P.k_b, P.v: P.v_b, P.out: P.out_b, P.lse: P.lse_b}
"""Where the strides of those begin that do not follow their address."""

SEGMENT = _slots(
    "SEGMENT",
    "row0 rows key0 keys q_offset k_offset b tensor_b first_task splits chunk table columns first_tile first_group "
    "tensor_kv pages first flat size",
)
"""A batch entry or a packed sequence; its tasks are first_task and on. table: address of the
classes of its tiles, rows of `columns` bytes, where the host made them. first_tile and first_group: blocks of rows
of dq and groups of 32 keys of those before it. tensor_kv: entry of k and v, as tensor_b of q and out. pages: address
of its row of the table of pages, 0 where its keys lie in one piece. first: the first key that is no padding. flat:
the number, among all rows of the call, of the row before its first."""

DECODE_BLOCKS, DECODE_BLOCK = {16: 256}, 128
"""Keys of a block of `decode_kernel`, by lanes, and those of others: long runs of k and of v in turn. At 64 memory gave
a tenth less, at 256 no more (measured on Zen 3, bf16 heads of 128: 0.65, 0.73 and 0.71 of what torch.sum reads); on
Zen 5 256 give 1.04, and 512 no more in bf16, 1.02 in fp32."""
DECODE_LEAST = 64
"""Keys of a sequence from which `decode_kernel` takes it."""

LANE = 4 * BLOCK_ROWS
_VECTORS = ["m", "l", "pivot", "alpha", "top", "inverse", "lse", "sink", "counter", "low", "delta"]
LANES = _places(
    "LANES",
    {"i": 0, "q": LANE, "h": 2 * LANE, "numbers": 3 * LANE, "row_address": 4 * LANE, "out_address": 6 * LANE}
    | {name: (8 + n) * LANE for n, name in enumerate([*_VECTORS, "tile"])},
)
"""Byte offsets in a thread's scratch: vectors of the block's rows, then `tile`, where its tiles begin."""

NUMBER = _slots("NUMBER", "b g h_first h_last q_offset k_offset")
"""int32 at LANES.numbers: what is one number for the whole block."""
TABLE = _slots(
    "TABLE",
    "a b c d e f g h address columns first end asks leaf leaf_row slope slope_row held_segment held_head held",
)
"""int64 at LANES.numbers, after those: the segment's table of tile classes; the keys that the block of rows meets
before the rows below it meet them (end is out of reach where other rows follow); whether products ask for the numbers
of leaves that the next tile reads, and where code of the spec says that these lie, and those of their gradients:
address of the first row's, bytes between rows. held: so many first keys of a head of a segment stand in the thread's
own copy."""
