"""The forward kernel: out and lse of one tile of rows.

Grid: x = splits * heads * row tiles (of all batch entries, or of the packed tokens). One program owns BLOCK_M rows
of one query head, or, packed, of a group of heads that share K and V. Loop order: key tiles from first to last;
PARTIAL tiles fold the mask, FULL ones carry no mask work, EMPTY ones are jumped over. Which tile is what comes from
the mask's interval form, evaluated for CHUNK tiles at once. With descriptors a run is PARTIAL tiles, FULL tiles,
PARTIAL tiles in one loop, since each loop waits for its first tile (the branch is three instructions on Hopper);
without them, where PARTIAL tiles are read with masks, both are loops of their own. RUNS: a kernel before has looked.
State in registers: acc (BLOCK_M, DV), m (BLOCK_M), l (BLOCK_M) or (BLOCK_M, COLUMNS). Shared memory: q (BLOCK_M, D) and
num_stages of k and v.

Source: Dao, FlashAttention-2, 2023, algorithm 1, https://arxiv.org/abs/2307.08691.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.ahead_kernel import absorb_ahead, absorb_behind
from tilewise.backends.triton.runs_words import load_runs
from tilewise.backends.triton.softmax_words import in_registers, kept_in_registers, no_sums
from tilewise.backends.triton.walk_kernel import (  # noqa: F401 for other kernels
    CHUNK,
    absorb_found,
    absorb_run,
    absorb_visible,
    load_tile,
    weigh,
)  # fmt: skip
from tilewise.backends.triton.words import LN2, LOG2E

SEARCH = tl.constexpr(256)
NOTES = tl.constexpr(128)
"""Tiles whose notes one program of the launch after reads."""
CARE_N = tl.constexpr(16)
"""Keys of a tile that is done again with care; divides every BLOCK_N."""


@triton.jit
def clamped_edge(cu_ptr, n, total):
    """Entry n of a table of sequence starts, never outside the tensor."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + n).to(tl.int32), 0), total)


@triton.jit
def sequence_length(cu_ptr, used_ptr, b, total):
    """First token and length of packed sequence b, clamped to the tensor."""
    first = clamped_edge(cu_ptr, b, total)
    length = tl.maximum(clamped_edge(cu_ptr, b + 1, total) - first, 0)
    if used_ptr is not None:
        length = tl.minimum(length, tl.maximum(tl.load(used_ptr + b).to(tl.int32), 0))
    return first, length


@triton.jit
def find_sequence(cu_ptr, slot, batch, total, block):
    """The sequence that owns a slot, and the slot's number inside it.

    Sequence b owns the slots from cu[b] // block + b on: at least as many as it has tiles of `block` tokens, so no
    prefix sum is needed. One before the first sequence's gets a number beyond all.
    """
    count = 0
    for start in range(0, batch, SEARCH):
        n = start + tl.arange(0, SEARCH)
        edge = tl.load(cu_ptr + n, mask=n < batch, other=0).to(tl.int32)
        edge = tl.minimum(tl.maximum(edge, 0), total)
        count += tl.sum(((edge // block + n <= slot) & (n < batch)).to(tl.int32), 0)
    b = tl.maximum(count - 1, 0)
    return b, tl.where(count > 0, slot - (clamped_edge(cu_ptr, b, total) // block + b), total // block + 1)


@triton.jit
def place_of(rest, units, row_tiles, swizzle):
    """A program's row tile and unit (a head of a batch entry): the last tiles first, `swizzle` units abreast."""
    per = row_tiles * swizzle
    section = rest // per
    inner = rest - section * per
    width = tl.minimum(units - section * swizzle, swizzle)
    return row_tiles - 1 - inner // width, section * swizzle + inner % width


@triton.jit
def position_offset(offset, offset_ptr, b, default, LAST: tl.constexpr):
    """Position of the first row or column: the default, a number, or one per batch entry."""
    if offset_ptr is not None:
        found = tl.load(offset_ptr + b).to(tl.int32)
    elif LAST:
        found = default
    else:
        found = offset
    return found


@triton.jit
def is_lost(acc, m, l, ADDED: tl.constexpr):  # noqa: E741
    """1 where a tile of rows has to be done again, else 0: something in it is not finite, or (ADDED) all scores of a
    row are as low as numbers are, and `raised` gave them no weight."""
    found = tl.max(((acc - acc) != 0).to(tl.int32), 1)
    if ADDED:
        found = tl.maximum(found, ((l == 0) & (m > -float("inf"))).to(tl.int32))
    return tl.max(found, 0)


@triton.jit
def forward_tile(
    program, part,
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr,
    used_q_ptr, used_k_ptr, k_desc, v_desc, flag_ptr, runs_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_s, o_b, o_h, o_n, o_d, l_s, l_b, l_h,
    batch, heads, group, seqlen_q, seqlen_k, row_tiles, swizzle, splits, split_tiles, run_b, run_h,
    q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, scale, drop_factor,
    data, score, score_ahead, keep, ends, holes, classify, classify_ends, classify_coarse,
    HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr,
    LAST: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, LOOP: tl.constexpr, PARTS: tl.constexpr, LAZY: tl.constexpr,
    ADDED: tl.constexpr, RUNS: tl.constexpr, HOLES: tl.constexpr, CARE: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """out and lse of a tile of rows. Strides are in units of STEP elements.

    CARE, where pairs can be hidden: "inline" does a tile with something not finite again at once, "flag" notes it,
    "again" does a part of a noted tile, BLOCK_M of its RATIO * BLOCK_M rows.
    """
    # ---- which rows ----
    split = program % splits
    rest = program // splits
    units = heads if VARLEN else batch * heads
    slot, unit = place_of(rest, units, row_tiles, swizzle)
    if VARLEN:
        tokens = RATIO * BLOCK_M // group if PACKED else RATIO * BLOCK_M
        b, tile = find_sequence(cu_q_ptr, slot, batch, seqlen_q, tokens)
        head = unit
        row0, n_q = sequence_length(cu_q_ptr, used_q_ptr, b, seqlen_q)
        key0, n_k = sequence_length(cu_k_ptr, used_k_ptr, b, seqlen_k)
        tensor_b = 0
    else:
        b, head, tile = unit // heads, unit % heads, slot
        row0, n_q, key0, n_k = 0, seqlen_q, 0, seqlen_k
        tensor_b = b
    q_offset = position_offset(q_offset, q_offset_ptr, b, n_k - n_q, LAST)
    k_offset = position_offset(k_offset, k_offset_ptr, b, 0, False)
    if CARE == "again":
        tile = tile * RATIO + part
    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACKED:
        g = head
        rows, h_rows = r // group, g * group + r % group
        i0, i1 = tile * BLOCK_M // group, tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, n_q - 1)
        h0, h1 = g * group, g * group + group - 1
        h = h_rows[:, None]
    else:
        g = head // group
        rows, h_rows = r, head + tl.zeros_like(r)
        i0, i1 = tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, n_q) - 1
        h, h0, h1 = head, head, head
    alive = rows < n_q
    i = rows[:, None]
    q_pos = i + q_offset

    # ---- its queries, and where its keys are ----
    d = tl.arange(0, D_PAD)
    q_base = q_ptr + (tl.cast(tensor_b, tl.int64) * q_b + row0 * q_n) * STEP
    q_rows = (rows.to(tl.int64) * q_n + h_rows.to(tl.int64) * q_h)[:, None] * STEP
    q_columns = d[None, :] if UNIT else (d.to(tl.int64) * q_d)[None, :] * STEP
    q_inside = alive[:, None] & (d // STEP < size_d // STEP)[None, :]
    q = tl.load(q_base + q_rows + q_columns, mask=q_inside, other=0.0)
    if LOOP == "ahead" or LOOP == "held":
        q = in_registers(q)
    k_base = k_ptr + (tl.cast(tensor_b, tl.int64) * k_b + tl.cast(g, tl.int64) * k_h + key0 * k_n) * STEP
    v_base = v_ptr + (tl.cast(tensor_b, tl.int64) * v_b + tl.cast(g, tl.int64) * v_h + key0 * v_n) * STEP
    seed = tl.load(seed_ptr) if DROPOUT else 0

    # ---- its key tiles ----
    tiles = tl.cdiv(n_k, BLOCK_N)
    each = tl.where(split_tiles > 0, split_tiles, tl.cdiv(tiles, splits))
    begin = split * each
    end = tl.where(i0 < n_q, tl.minimum(begin + each, tiles), begin)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = no_sums(BLOCK_M, PARTS)  # noqa: E741
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    tensors = (k_base, v_base, k_n, k_d, v_n, v_d, size_d, size_dv, n_k, k_desc, v_desc, tensor_b, key0)
    here = (i, q_pos, i0, i1, q_offset, k_offset, b, h, h0, h1, g)
    numbers = (scale, seed, threshold, h + h_offset, b + b_offset)
    if LOOP == "held":
        q, l = kept_in_registers(q, l)  # noqa: E741
    if CARE == "again":
        first, last = begin * BLOCK_N // CARE_N, tl.cdiv(tl.minimum(end * BLOCK_N, n_k), CARE_N)
        acc, m, l = absorb_run(  # noqa: E741
            acc, m, l, q, first, last, 0, 0, tensors, here, numbers, data, score, keep, holes, classify, "all", True,
            HAS_MASK, HAS_TERMS, FUSED, DROPOUT, BLOCK_M, CARE_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT,
            PRECISION, False, False, False, ADDED, False)  # fmt: skip
    elif RUNS:
        found = load_runs(runs_ptr, tl.cast(tensor_b, tl.int64) * run_b + head * run_h + slot)
        acc, m, l = absorb_found(  # noqa: E741
            acc, m, l, q, found, end, tensors, here, numbers, data, score_ahead, ends, holes, classify_ends,
            HAS_TERMS, FUSED, DROPOUT, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION,
            TMA, PARTS, LAZY, ADDED, HOLES)  # fmt: skip
    elif HAS_MASK:
        acc, m, l = absorb_visible(  # noqa: E741
            acc, m, l, q, begin, end, tensors, here, numbers, data, score_ahead, ends, holes, classify_ends,
            classify_coarse, HAS_TERMS, FUSED, DROPOUT, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT,
            PRECISION, TMA, PARTS, LAZY, ADDED, HOLES)  # fmt: skip
    elif LOOP == "ahead":
        if begin < end:
            acc, m, l = absorb_ahead(  # noqa: E741
                acc, m, l, q, begin, end, tensors, g, scale, FUSED, LAZY, BLOCK_N, D_PAD, DV_PAD, PRECISION
            )
    elif LOOP == "behind":
        if begin < end:
            acc, m, l = absorb_behind(  # noqa: E741
                acc, m, l, q, begin, end, tensors, g, scale, FUSED, LAZY, BLOCK_M, BLOCK_N, D_PAD, DV_PAD,
                PRECISION,
            )  # fmt: skip
    else:
        # In a block of its own, outside of which nothing keeps shared memory that a loop needs.
        if begin < end:
            middle = tl.maximum(tl.minimum(end, n_k // BLOCK_N), begin)
            acc, m, l = absorb_run(  # noqa: E741
                acc, m, l, q, begin, middle, 0, 0, tensors, here, numbers, data, score_ahead, keep, holes, classify,
                "none", False, HAS_MASK, HAS_TERMS, FUSED, DROPOUT, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP,
                UNIT, PRECISION, TMA, PARTS, LAZY, ADDED, HOLES)  # fmt: skip
            acc, m, l = absorb_run(  # noqa: E741
                acc, m, l, q, middle, end, 0, 0, tensors, here, numbers, data, score_ahead, keep, holes, classify,
                "all", False, HAS_MASK, HAS_TERMS, FUSED, DROPOUT, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP,
                UNIT, PRECISION, TMA, PARTS, LAZY, ADDED, HOLES)  # fmt: skip
    if PARTS:
        l = tl.sum(l, 1)  # noqa: E741
    # A weight of 0 times a hidden NaN is NaN. It is rare, and then the tile of rows is done again with care.
    if CARE == "flag":
        tl.store(flag_ptr + program, is_lost(acc, m, l, ADDED))
    elif CARE == "inline":
        if is_lost(acc, m, l, False) > 0:
            first, last = begin * BLOCK_N // CARE_N, tl.cdiv(tl.minimum(end * BLOCK_N, n_k), CARE_N)
            m = tl.full([BLOCK_M], -float("inf"), tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
            acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
            acc, m, l = absorb_run(  # noqa: E741
                acc, m, l, q, first, last, 0, 0, tensors, here, numbers, data, score, keep, holes, classify, "all",
                True, HAS_MASK, HAS_TERMS, FUSED, DROPOUT, BLOCK_M, CARE_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT,
                PRECISION, False, False, False, ADDED, False)  # fmt: skip

    # ---- finish ----
    # In units of which the weights are powers of two (FUSED) the pivot that was subtracted is m * step exactly.
    if FUSED:
        m = m * (scale * LOG2E)
    if sink_ptr is not None:
        logit = tl.load(sink_ptr + h_rows, mask=alive, other=0.0).to(tl.float32)
        unit_m: tl.constexpr = 1.0 if FUSED else LOG2E
        m, l, alpha = absorb_sink(m, l, logit * (LOG2E / unit_m), unit_m)  # noqa: E741
        acc = acc * alpha[:, None]
    empty = l == 0
    inverse = tl.div_rn(1.0 + tl.zeros_like(l), tl.where(empty, 1.0, l))
    if DROPOUT:
        inverse = inverse * drop_factor
    out = tl.where(inverse[:, None] == 0, 0.0, acc * inverse[:, None])
    lse = (m + tl.log2(l)) * LN2 if FUSED else m + tl.log2(l) * LN2
    lse = tl.where(empty, -float("inf"), lse)
    lse_base = lse_ptr + tl.cast(split, tl.int64) * l_s + tl.cast(tensor_b, tl.int64) * l_b + row0
    tl.store(lse_base + rows + h_rows.to(tl.int64) * l_h, lse, mask=alive)
    dv = tl.arange(0, DV_PAD)
    out_base = (
        out_ptr + (tl.cast(split, tl.int64) * o_s + tl.cast(tensor_b, tl.int64) * o_b + row0 * o_n) * STEP
    )
    out_rows = (rows.to(tl.int64) * o_n + h_rows.to(tl.int64) * o_h)[:, None] * STEP
    out_columns = dv[None, :] if UNIT else (dv.to(tl.int64) * o_d)[None, :] * STEP
    tl.store(
        out_base + out_rows + out_columns, out.to(out_ptr.dtype.element_ty),
        mask=alive[:, None] & (dv // STEP < size_dv // STEP)[None, :],
    )  # fmt: skip


@triton.jit
def absorb_sink(m, l, logit, unit: tl.constexpr):  # noqa: E741
    """(m, l, alpha) after one more key with value 0; weights are 2 ** (unit * (logit - m))."""
    top = tl.maximum(m, logit)
    pivot = tl.where(top == -float("inf"), 0.0, top)
    alpha = tl.exp2((m - pivot) * unit)
    # A sink that is all a row has weighs 1, infinite as it may be; beside keys, an infinite one is an infinite score.
    below = tl.where((logit == float("inf")) & (l == 0), 0.0, logit - pivot)
    return top, l * alpha + tl.exp2(below * unit), alpha


@triton.jit
def forward_program(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr,
    used_q_ptr, used_k_ptr, k_desc, v_desc, flag_ptr, runs_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_s, o_b, o_h, o_n, o_d, l_s, l_b, l_h,
    batch, heads, group, seqlen_q, seqlen_k, row_tiles, swizzle, splits, split_tiles, run_b, run_h,
    q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, scale, drop_factor,
    data, score, score_ahead, keep, ends, holes, classify, classify_ends, classify_coarse,
    HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr,
    LAST: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, LOOP: tl.constexpr, PARTS: tl.constexpr, LAZY: tl.constexpr,
    ADDED: tl.constexpr, RUNS: tl.constexpr, HOLES: tl.constexpr, CARE: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """One program of the forward launch: see the header and `forward_tile`."""
    forward_tile(
        tl.program_id(0), 0,
         q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr,
        cu_k_ptr, used_q_ptr, used_k_ptr, k_desc, v_desc, flag_ptr, runs_ptr, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
        v_b, v_h, v_n, v_d, o_s, o_b, o_h, o_n, o_d, l_s, l_b, l_h, batch, heads, group, seqlen_q, seqlen_k,
        row_tiles, swizzle, splits, split_tiles, run_b, run_h, q_offset, k_offset, h_offset, b_offset, size_d, size_dv,
        threshold, scale, drop_factor, data, score, score_ahead, keep, ends, holes, classify, classify_ends,
        classify_coarse, HAS_MASK, HAS_TERMS, FUSED, DROPOUT, VARLEN, LAST, PACKED, BLOCK_M, BLOCK_N, D_PAD, DV_PAD,
        EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, LOOP, PARTS, LAZY, ADDED, RUNS, HOLES, CARE, RATIO,
    )  # fmt: skip


@triton.jit
def again_program(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr,
    used_q_ptr, used_k_ptr, k_desc, v_desc, flag_ptr, runs_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_s, o_b, o_h, o_n, o_d, l_s, l_b, l_h,
    batch, heads, group, seqlen_q, seqlen_k, row_tiles, swizzle, splits, split_tiles, run_b, run_h,
    q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, scale, drop_factor,
    data, score, score_ahead, keep, ends, holes, classify, classify_ends, classify_coarse,
    HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr,
    LAST: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, LOOP: tl.constexpr, PARTS: tl.constexpr, LAZY: tl.constexpr,
    ADDED: tl.constexpr, RUNS: tl.constexpr, HOLES: tl.constexpr, CARE: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """One program of the launch after it: does the noted tiles among every NOTES again, in RATIO parts."""
    units = heads if VARLEN else batch * heads
    total = units * row_tiles * splits
    start = tl.program_id(0) * NOTES
    n = start + tl.arange(0, NOTES)
    noted = tl.load(flag_ptr + n, mask=n < total, other=0) != 0
    at = tl.min(tl.where(noted, n, total), 0)
    while at < total:
        for part in range(0, RATIO):
            forward_tile(
                at, part, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sink_ptr, seed_ptr, q_offset_ptr, k_offset_ptr,
                cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, k_desc, v_desc, flag_ptr, runs_ptr, q_b, q_h, q_n, q_d, k_b,
                k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_s, o_b, o_h, o_n, o_d, l_s, l_b, l_h, batch, heads, group,
                seqlen_q, seqlen_k, row_tiles, swizzle, splits, split_tiles, run_b, run_h, q_offset, k_offset, h_offset,
                b_offset, size_d, size_dv, threshold, scale, drop_factor, data, score, score_ahead, keep, ends, holes,
                classify, classify_ends, classify_coarse, HAS_MASK, HAS_TERMS, FUSED, DROPOUT, VARLEN, LAST, PACKED,
                BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, LOOP, PARTS, LAZY, ADDED,
                RUNS, HOLES, CARE, RATIO,
            )  # fmt: skip
        at = tl.min(tl.where(noted & (n > at), n, total), 0)
