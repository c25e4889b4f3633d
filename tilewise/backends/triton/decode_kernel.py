"""The decode kernel: rows of queries against the keys of a cache, at the speed at which the keys are read.

Grid: x = units: row tiles * KV heads * batch entries (packed: row tiles of all sequences), y = splits. One program
owns one split of the keys of one sequence and KV head, for a tile of rows: query rows times the query heads of the
group, so that few rows read every byte of k and v once. Loop order: key tiles from first to last, as in the forward
kernel; a sequence divides its own keys evenly over the splits, and a split without keys exits at once. The last
program of a unit that finishes merges the splits, in their order (MERGE "here"), or a launch after it ("later").
State in registers: acc (BLOCK_M, DV), m and l (BLOCK_M), of each warp where WARPS > 1: then each warp owns keys of
its own, and waits for no other. Shared memory: num_stages of k and v.

Source: Dao et al., Flash-Decoding, 2023; the merge is the monoid of `tilewise.state`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewise.backends.triton.absorb_kernel import absorb, join_warps, narrowed, nothing_seen
from tilewise.backends.triton.forward_kernel import (
    CARE_N,
    CHUNK,
    NOTES,
    find_sequence,
    position_offset,
    sequence_length,
)
from tilewise.backends.triton.merge_kernel import merge_parts, merge_row, write_rows
from tilewise.backends.triton.pages import table_row
from tilewise.backends.triton.words import LOG2E

FEW_ROWS = tl.constexpr(32)
"""Rows of a tile up to which a tile that the mask does not touch may ask whether it does."""


@triton.jit
def await_grid(PDL: tl.constexpr):
    """PDL: this launch begins while the one before it ends; nothing is read before that one is done, and the next
    launch may begin."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def clamped_length(ptr, b, most, real):
    """Entry b of a tensor of lengths, never negative nor beyond `most`; `most` where there is no tensor. Where not
    `real`, nothing is read."""
    found = most
    if ptr is not None:
        found = tl.minimum(tl.maximum(tl.load(ptr + b, mask=real, other=0).to(tl.int32), 0), most)
    return found


@triton.jit
def quotient(x, n, by, QUICK: tl.constexpr):
    """x // n; QUICK: by the reciprocal that `decode_plan.reciprocal` gives, where x is small enough for it. A program
    that reads a few tiles waits for its own divisions."""
    if QUICK:
        most = tl.umulhi(tl.cast(x, tl.uint32), tl.cast(by, tl.uint32))
        found = tl.where(n == 1, x, most.to(tl.int32))
    else:
        found = x // n
    return found


@triton.jit
def place_of_unit(unit, heads, by_heads, group, batch, seqlen_q, row_tiles, cu_q_ptr, used_q_ptr, real,
                  VARLEN: tl.constexpr, TILE: tl.constexpr, SINGLE: tl.constexpr):  # fmt: skip
    """(sequence, KV head, row tile, first row in the tensors, rows) of a unit; of a head the last tiles come first,
    which are the longest under a causal mask. TILE: query rows times heads of a tile. SINGLE: there is one tile,
    and numbers are small. Where not `real`, no length of a dense call is read."""
    if SINGLE:
        tile = 0
        b = quotient(unit, heads, by_heads, True)
        g = unit - b * heads
    else:
        tile = row_tiles - 1 - unit % row_tiles
        b, g = unit // row_tiles // heads, unit // row_tiles % heads
    if VARLEN:
        b, tile = find_sequence(cu_q_ptr, tile, batch, seqlen_q, TILE // group)
        row0, n_q = sequence_length(cu_q_ptr, used_q_ptr, b, seqlen_q)
    else:
        row0, n_q = 0, clamped_length(used_q_ptr, b, seqlen_q, real)
    return b, g, tile, row0, n_q


@triton.jit
def share_of(used_k_ptr, leftpad_ptr, b, seqlen_k, splits, by_splits, split_tiles, real, BLOCK_N: tl.constexpr,
             SINGLE: tl.constexpr):  # fmt: skip
    """(keys, hidden keys before them, first tile, tiles of a split, tiles) of a sequence; where not `real`, nothing is
    read."""
    n_k = clamped_length(used_k_ptr, b, seqlen_k, real)
    pad = clamped_length(leftpad_ptr, b, n_k, real) if leftpad_ptr is not None else 0
    first = pad // BLOCK_N
    tiles = tl.maximum(tl.cdiv(n_k, BLOCK_N) - first, 0)
    even = quotient(tiles + (splits - 1), splits, by_splits, SINGLE)
    return n_k, pad, first, tl.where(split_tiles > 0, split_tiles, tl.maximum(even, 1)), tiles


@triton.jit
def live_splits(share):
    """Splits that have keys: of a sequence without keys, one."""
    return tl.maximum(tl.cdiv(share[4], share[3]), 1)


@triton.jit
def queries(q_ptr, here, part, q_b, q_h, q_n, q_d, group, by_group, size_d, VARLEN: tl.constexpr,
            BLOCK_M: tl.constexpr, D_PAD: tl.constexpr, STEP_Q: tl.constexpr, UNIT: tl.constexpr,
            SINGLE: tl.constexpr, RATIO: tl.constexpr):  # fmt: skip
    """The rows of q of a part of a tile. They are asked for before anything else, so that nothing waits for them."""
    b, g, tile, row0, n_q = here
    r = (tile * RATIO + part) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = quotient(r, group, by_group, SINGLE)
    h_rows = g * group + (r - row * group)
    sequence = 0 if VARLEN else b
    d = tl.arange(0, D_PAD)
    if q_n.dtype == tl.int32:
        rows = sequence * q_b + (row0 + row) * q_n + h_rows * q_h
    else:
        rows = tl.cast(sequence, tl.int64) * q_b + (row0 + row).to(tl.int64) * q_n + h_rows.to(tl.int64) * q_h
    columns = d if UNIT else d.to(tl.int64) * q_d * STEP_Q
    inside = (row < n_q)[:, None] & (d // STEP_Q < size_d // STEP_Q)[None, :]
    return tl.load(q_ptr + rows[:, None].to(tl.int64) * STEP_Q + columns[None, :], mask=inside, other=0.0)


@triton.jit
def decode_part(
    unit, split, part, here, share, q,
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, count_ptr, flag_ptr, sink_ptr, q_offset_ptr,
    k_offset_ptr, cu_q_ptr, used_q_ptr, used_k_ptr, leftpad_ptr, table_ptr, k_scale_ptr, v_scale_ptr, prior_ptr,
    prior_lse_ptr,
    q_b, q_h, q_n, q_d, k_p, k_h, k_n, v_p, v_h, v_n, o_b, o_h, o_n, o_d, l_b, l_h, table_b, ks_p, ks_h, vs_p, vs_h,
    pr_h, pr_n, prl_h, prl_n,
    batch, units, heads, group, seqlen_q, seqlen_k, row_tiles, splits, split_tiles, pages, page_size, page_shift,
    q_offset, k_offset, size_d, size_dv, scale, by_heads, by_splits, by_group,
    data, score, keep, classify, classify_coarse,
    HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr, LAST: tl.constexpr, VARLEN: tl.constexpr,
    PAGING: tl.constexpr, SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr,
    STEP_Q: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr, MERGE: tl.constexpr,
    MERGED: tl.constexpr, WARPS: tl.constexpr, SINGLE: tl.constexpr, CARE: tl.constexpr,
    RATIO: tl.constexpr,
):  # fmt: skip
    """One split of a unit, if it has keys: its part of the result, or all of it where it is the only one.

    CARE, where pairs can be hidden: "inline" does a tile with something not finite again at once, "flag" notes it,
    "again" does a part of a noted tile, BLOCK_M of its RATIO * BLOCK_M rows.
    """
    b, g, tile, row0, n_q = here
    n_k, pad, first_tile, each, tiles = share
    q_offset = position_offset(q_offset, q_offset_ptr, b, n_k - pad - n_q, LAST)
    k_offset = position_offset(k_offset, k_offset_ptr, b, 0, False) - pad
    tile = tile * RATIO + part
    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = quotient(r, group, by_group, SINGLE)
    h_rows = g * group + (r - row * group)
    i0 = quotient(tile * BLOCK_M, group, by_group, SINGLE)
    i1 = tl.minimum(quotient(tile * BLOCK_M + BLOCK_M - 1, group, by_group, SINGLE), n_q - 1)
    h0, h1 = g * group, g * group + group - 1
    if WARPS > 1:
        i, h = row[None, :, None], h_rows[None, :, None]
    else:
        i, h = row[:, None], h_rows[:, None]

    # ---- where its keys are ----
    sequence = 0 if VARLEN else b
    table_at, page0 = table_row(table_ptr, table_b, b, lse_ptr)
    if PAGING == "whole":
        n_k = tl.where((page0 >= 0) & (page0 < pages), n_k, 0)
    pool = (table_at, page0, page_size, page_shift, pages)
    k_base = k_ptr + tl.cast(g, tl.int64) * k_h * STEP
    v_base = v_ptr + tl.cast(g, tl.int64) * v_h * STEP
    begin = first_tile if MERGE == "none" else first_tile + split * each
    end = tl.where(i0 < n_q, tl.minimum(begin + each, tl.cdiv(n_k, BLOCK_N)), begin)
    power = scale
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q, power = narrowed(q)
    if WARPS > 1:
        q = tl.broadcast_to(q[None, :, :], (WARPS, BLOCK_M, D_PAD))

    # ---- its key tiles ----
    MASKED: tl.constexpr = "all" if HAS_MASK else "none"
    REDO_N: tl.constexpr = BLOCK_N if WARPS > 1 else CARE_N
    acc, m, l = nothing_seen(BLOCK_M, DV_PAD, WARPS)  # noqa: E741
    tensors = (k_base, v_base, k_p, k_n, v_p, v_n, size_d, size_dv, n_k, pad, leftpad_ptr, seqlen_k)
    scaling = (scale, k_scale_ptr, v_scale_ptr, ks_p, ks_h, vs_p, vs_h, power, q_ptr)
    rows = (i, i + q_offset, i0, i1, q_offset, k_offset, b, h, h0, h1, g)
    if CARE == "again":
        first, last = begin * BLOCK_N // REDO_N, tl.cdiv(tl.minimum(end * BLOCK_N, n_k), REDO_N)
        acc, m, l = absorb(  # noqa: E741
            acc, m, l, q, first, last, 0, 0, tensors, pool, scaling, rows, data, score, keep, classify, MASKED, True,
            HAS_TERMS, FUSED, PAGING, SCALES, REDO_N, WARPS, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, "",
            PRECISION)  # fmt: skip
    elif HAS_MASK:
        chunk = begin
        while chunk < end:
            stop = tl.minimum(chunk + CHUNK, end)
            last_column = tl.minimum(stop * BLOCK_N, n_k) - 1
            dead = (
                classify_coarse(i0, i1, chunk * BLOCK_N, last_column, q_offset, k_offset, b, h0, h1, g, data)
                == 0
            )
            at = tl.where(dead, stop, chunk)
            t = chunk + tl.arange(0, CHUNK)
            high = tl.minimum(t * BLOCK_N + BLOCK_N, n_k) - 1
            kind = classify(
                i0, i1, t * BLOCK_N, high, q_offset, k_offset, b, h0, h1, g, data
            ) + tl.zeros_like(t)
            kind = tl.where(t < stop, kind, 0)
            while at < stop:
                first = tl.min(tl.where((t >= at) & (kind != 0), t, stop), 0)
                if BLOCK_M <= FEW_ROWS:
                    # One loop over PARTIAL, FULL and PARTIAL tiles, since each loop waits for its first tile.
                    inner = tl.min(tl.where((t >= first) & (kind != 1), t, stop), 0)
                    outer = tl.min(tl.where((t >= inner) & (kind != 2), t, stop), 0)
                    at = tl.min(tl.where((t >= outer) & (kind != 1), t, stop), 0)
                    acc, m, l = absorb(  # noqa: E741
                        acc, m, l, q, first, at, inner, outer, tensors, pool, scaling, rows, data, score, keep,
                        classify, "outer", False, HAS_TERMS, FUSED, PAGING, SCALES, BLOCK_N, WARPS, D_PAD, DV_PAD,
                        EVEN, EVEN_V, STEP, EVICT, PRECISION)  # fmt: skip
                else:
                    middle = tl.min(tl.where((t >= first) & (kind != 2), t, stop), 0)
                    at = tl.min(tl.where((t >= middle) & (kind != 1), t, stop), 0)
                    acc, m, l = absorb(  # noqa: E741
                        acc, m, l, q, first, middle, 0, 0, tensors, pool, scaling, rows, data, score, keep,
                        classify, "none", False, HAS_TERMS, FUSED, PAGING, SCALES, BLOCK_N, WARPS, D_PAD, DV_PAD,
                        EVEN, EVEN_V, STEP, EVICT, PRECISION)  # fmt: skip
                    acc, m, l = absorb(  # noqa: E741
                        acc, m, l, q, middle, at, 0, 0, tensors, pool, scaling, rows, data, score, keep,
                        classify, "all", False, HAS_TERMS, FUSED, PAGING, SCALES, BLOCK_N, WARPS, D_PAD, DV_PAD,
                        EVEN, EVEN_V, STEP, EVICT, PRECISION)  # fmt: skip
            chunk = stop
    else:
        acc, m, l = absorb(  # noqa: E741
            acc, m, l, q, begin, end, 0, 0, tensors, pool, scaling, rows, data, score, keep, classify, "none", False,
            HAS_TERMS, FUSED, PAGING, SCALES, BLOCK_N, WARPS, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, EVICT,
            PRECISION)  # fmt: skip
    # A weight of 0 times a hidden NaN is NaN. It is rare, and then the tile of rows is done again with care.
    if CARE == "flag":
        tl.store(flag_ptr + split * units + unit, tl.max(((acc - acc) != 0).to(tl.int32)))
    elif CARE == "inline":
        if tl.max(((acc - acc) != 0).to(tl.int32)) > 0:
            first, last = begin * BLOCK_N // REDO_N, tl.cdiv(tl.minimum(end * BLOCK_N, n_k), REDO_N)
            acc, m, l = nothing_seen(BLOCK_M, DV_PAD, WARPS)  # noqa: E741
            acc, m, l = absorb(  # noqa: E741
                acc, m, l, q, first, last, 0, 0, tensors, pool, scaling, rows, data, score, keep, classify,
                MASKED, True, HAS_TERMS, FUSED, PAGING, SCALES, REDO_N, WARPS, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, "",
                PRECISION)  # fmt: skip

    # ---- finish: m in units of which weights are powers of two ----
    m = m * (scale * LOG2E) if FUSED else m * LOG2E
    if WARPS > 1:
        acc, m, l = join_warps(acc, m, l)  # noqa: E741
    if SCALES == "head":
        acc = acc * tl.load(v_scale_ptr + g * vs_h)
    prior = (prior_ptr, prior_lse_ptr, pr_h, pr_n, prl_h, prl_n)
    results = (
        out_ptr, lse_ptr, sink_ptr, o_b, o_h, o_n, o_d, l_b, l_h, sequence, row0,
        (n_q, seqlen_q, size_dv), True, prior,
    )  # fmt: skip
    if MERGE == "none" or each >= tiles:
        write_rows(acc, m, l, row, h_rows, results, VARLEN, DV_PAD, STEP_Q, UNIT)
    else:
        own = part * BLOCK_M + tl.arange(0, BLOCK_M)
        line = (tl.cast(split, tl.int64) * units + unit) * ROWS + own
        dv = tl.arange(0, DV_PAD)
        tl.store(part_ptr + line[:, None] * DV_PAD + dv[None, :], acc, mask=(own < ROWS)[:, None])
        tl.store(part_lse_ptr + 2 * line, m, mask=own < ROWS)
        tl.store(part_lse_ptr + 2 * line + 1, l, mask=own < ROWS)
        if MERGE == "here":
            # All threads' stores come before the count, and the count before the loads of the one that merges.
            tl.debug_barrier()
            live = live_splits(share)
            before = tl.atomic_add(count_ptr + unit, 1, sem="acq_rel", scope="gpu")
            if before == live - 1:
                tl.store(count_ptr + unit, 0)
                lines = tl.arange(0, ROWS)
                whole, whole_m, whole_l = merge_parts(
                    part_ptr, part_lse_ptr, unit, units, live, lines, ROWS, ROWS, DV_PAD, MERGED
                )
                lines = tile * BLOCK_M + lines
                write_rows(
                    whole, whole_m, whole_l, lines // group, g * group + lines % group, results, VARLEN,
                    DV_PAD, STEP_Q, UNIT,
                )  # fmt: skip


@triton.jit
def decode_program(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, count_ptr, flag_ptr, sink_ptr, q_offset_ptr,
    k_offset_ptr, cu_q_ptr, used_q_ptr, used_k_ptr, leftpad_ptr, table_ptr, k_scale_ptr, v_scale_ptr, prior_ptr,
    prior_lse_ptr,
    q_b, q_h, q_n, q_d, k_p, k_h, k_n, v_p, v_h, v_n, o_b, o_h, o_n, o_d, l_b, l_h, table_b, ks_p, ks_h, vs_p, vs_h,
    pr_h, pr_n, prl_h, prl_n,
    batch, units, heads, group, seqlen_q, seqlen_k, row_tiles, splits, split_tiles, pages, page_size, page_shift,
    q_offset, k_offset, size_d, size_dv, scale, by_heads, by_splits, by_group,
    data, score, keep, classify, classify_coarse,
    HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr, LAST: tl.constexpr, VARLEN: tl.constexpr,
    PAGING: tl.constexpr, SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr,
    STEP_Q: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr, MERGE: tl.constexpr,
    MERGED: tl.constexpr, WARPS: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
    CARE: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """One program of the decode launch: see the header. Strides are in units of STEP (k, v) and STEP_Q elements."""
    await_grid(PDL)
    unit, split = tl.program_id(0), tl.program_id(1)
    here = place_of_unit(
        unit, heads, by_heads, group, batch, seqlen_q, row_tiles, cu_q_ptr, used_q_ptr, True, VARLEN, RATIO * BLOCK_M,
        SINGLE,
    )  # fmt: skip
    q = queries(
        q_ptr, here, 0, q_b, q_h, q_n, q_d, group, by_group, size_d, VARLEN, BLOCK_M, D_PAD, STEP_Q, UNIT, SINGLE,
        RATIO,
    )  # fmt: skip
    share = share_of(
        used_k_ptr, leftpad_ptr, here[0], seqlen_k, splits, by_splits, split_tiles, True, BLOCK_N, SINGLE
    )
    if (split == 0) | (split * share[3] < share[4]):
        decode_part(
            unit, split, 0, here, share, q,
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, count_ptr, flag_ptr, sink_ptr,
            q_offset_ptr, k_offset_ptr, cu_q_ptr, used_q_ptr, used_k_ptr, leftpad_ptr, table_ptr, k_scale_ptr,
            v_scale_ptr, prior_ptr, prior_lse_ptr, q_b, q_h, q_n, q_d, k_p, k_h, k_n, v_p, v_h, v_n, o_b, o_h, o_n,
            o_d, l_b, l_h, table_b, ks_p, ks_h, vs_p, vs_h, pr_h, pr_n, prl_h, prl_n, batch, units, heads, group,
            seqlen_q, seqlen_k, row_tiles, splits, split_tiles, pages, page_size, page_shift, q_offset, k_offset,
            size_d, size_dv, scale, by_heads, by_splits, by_group, data, score, keep, classify, classify_coarse,
            HAS_MASK, HAS_TERMS, FUSED, LAST, VARLEN, PAGING, SCALES, BLOCK_M, BLOCK_N, ROWS, D_PAD, DV_PAD, EVEN,
            EVEN_V, STEP, STEP_Q, UNIT, PRECISION, EVICT, MERGE, MERGED, WARPS, SINGLE, CARE, RATIO,
        )  # fmt: skip
    elif CARE == "flag":
        tl.store(flag_ptr + split * units + unit, 0)


@triton.jit
def again_program(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, count_ptr, flag_ptr, sink_ptr, q_offset_ptr,
    k_offset_ptr, cu_q_ptr, used_q_ptr, used_k_ptr, leftpad_ptr, table_ptr, k_scale_ptr, v_scale_ptr, prior_ptr,
    prior_lse_ptr,
    q_b, q_h, q_n, q_d, k_p, k_h, k_n, v_p, v_h, v_n, o_b, o_h, o_n, o_d, l_b, l_h, table_b, ks_p, ks_h, vs_p, vs_h,
    pr_h, pr_n, prl_h, prl_n,
    batch, units, heads, group, seqlen_q, seqlen_k, row_tiles, splits, split_tiles, pages, page_size, page_shift,
    q_offset, k_offset, size_d, size_dv, scale, by_heads, by_splits, by_group,
    data, score, keep, classify, classify_coarse,
    HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr, LAST: tl.constexpr, VARLEN: tl.constexpr,
    PAGING: tl.constexpr, SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr,
    STEP_Q: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr, MERGE: tl.constexpr,
    MERGED: tl.constexpr, WARPS: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
    CARE: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """One program of the launch after it: does the noted tiles among every NOTES again, in RATIO parts."""
    total = units * splits
    n = tl.program_id(0) * NOTES + tl.arange(0, NOTES)
    noted = tl.load(flag_ptr + n, mask=n < total, other=0) != 0
    at = tl.min(tl.where(noted, n, total), 0)
    while at < total:
        here = place_of_unit(
            at % units, heads, by_heads, group, batch, seqlen_q, row_tiles, cu_q_ptr, used_q_ptr, True, VARLEN,
            RATIO * BLOCK_M, SINGLE,
        )  # fmt: skip
        share = share_of(
            used_k_ptr, leftpad_ptr, here[0], seqlen_k, splits, by_splits, split_tiles, True, BLOCK_N, SINGLE
        )
        for part in range(0, RATIO):
            q = queries(
                q_ptr, here, part, q_b, q_h, q_n, q_d, group, by_group, size_d, VARLEN, BLOCK_M, D_PAD, STEP_Q, UNIT,
                SINGLE, RATIO,
            )  # fmt: skip
            decode_part(
                at % units, at // units, part, here, share, q,
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, count_ptr, flag_ptr, sink_ptr,
                q_offset_ptr, k_offset_ptr, cu_q_ptr, used_q_ptr, used_k_ptr, leftpad_ptr, table_ptr, k_scale_ptr,
                v_scale_ptr, prior_ptr, prior_lse_ptr, q_b, q_h, q_n, q_d, k_p, k_h, k_n, v_p, v_h, v_n, o_b, o_h,
                o_n, o_d, l_b, l_h, table_b, ks_p, ks_h, vs_p, vs_h, pr_h, pr_n, prl_h, prl_n, batch, units, heads,
                group, seqlen_q, seqlen_k, row_tiles, splits, split_tiles, pages, page_size, page_shift, q_offset,
                k_offset, size_d, size_dv, scale, by_heads, by_splits, by_group, data, score, keep, classify,
                classify_coarse, HAS_MASK, HAS_TERMS, FUSED, LAST, VARLEN, PAGING, SCALES, BLOCK_M, BLOCK_N, ROWS,
                D_PAD, DV_PAD, EVEN, EVEN_V, STEP, STEP_Q, UNIT, PRECISION, EVICT, MERGE, MERGED, WARPS, SINGLE, CARE,
                RATIO,
            )  # fmt: skip
        at = tl.min(tl.where(noted & (n > at), n, total), 0)


@triton.jit
def merge_program(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, count_ptr, flag_ptr, sink_ptr, q_offset_ptr,
    k_offset_ptr, cu_q_ptr, used_q_ptr, used_k_ptr, leftpad_ptr, table_ptr, k_scale_ptr, v_scale_ptr, prior_ptr,
    prior_lse_ptr,
    q_b, q_h, q_n, q_d, k_p, k_h, k_n, v_p, v_h, v_n, o_b, o_h, o_n, o_d, l_b, l_h, table_b, ks_p, ks_h, vs_p, vs_h,
    pr_h, pr_n, prl_h, prl_n,
    batch, units, heads, group, seqlen_q, seqlen_k, row_tiles, splits, split_tiles, pages, page_size, page_shift,
    q_offset, k_offset, size_d, size_dv, scale, by_heads, by_splits, by_group,
    data,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, DV_PAD: tl.constexpr, STEP_Q: tl.constexpr,
    UNIT: tl.constexpr, VARLEN: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr, MERGED: tl.constexpr,
    ONCE: tl.constexpr, REHEARSED: tl.constexpr,
):  # fmt: skip
    """Merges one row of a unit (MERGE "later"), with the arguments of the launch before it; where one split was all,
    that has written the result itself.

    REHEARSED: what is to be done is gone through once before, reading and writing nothing, while the launch before this
    one still runs: the first pass over a kernel's instructions takes microseconds, because they come from memory.
    """
    unit, r = tl.program_id(0) // ROWS, tl.program_id(0) % ROWS
    first = tl.cast(unit, tl.int64) * ROWS + r
    # The compiler must not know how often it is, or it writes everything down twice.
    turns = tl.minimum(units, 1) + 1 if REHEARSED else 1
    for turn in range(0, turns):
        real = turn == turns - 1
        if real:
            await_grid(PDL)
        b, g, tile, row0, n_q = place_of_unit(
            unit, heads, by_heads, group, batch, seqlen_q, row_tiles, cu_q_ptr, used_q_ptr, real, VARLEN, BLOCK_M,
            SINGLE,
        )  # fmt: skip
        share = share_of(
            used_k_ptr, leftpad_ptr, b, seqlen_k, splits, by_splits, split_tiles, real, BLOCK_N, SINGLE
        )
        live = tl.where(real, live_splits(share), splits)
        room = tl.where(real, splits, 0)
        acc, m, l = merge_row(  # noqa: E741
            part_ptr, part_lse_ptr, first, tl.cast(units, tl.int64) * ROWS, room, live, DV_PAD, MERGED, ONCE
        )
        if live > 1:
            sequence = 0 if VARLEN else b
            at = tile * BLOCK_M + r + tl.arange(0, 1)
            state_m, state_l = tl.zeros([1], tl.float32) + m, tl.zeros([1], tl.float32) + l
            prior = (prior_ptr, prior_lse_ptr, pr_h, pr_n, prl_h, prl_n)
            results = (
                out_ptr, lse_ptr, sink_ptr, o_b, o_h, o_n, o_d, l_b, l_h, sequence, row0,
                (n_q, seqlen_q, size_dv), real, prior,
            )  # fmt: skip
            h_rows = g * group + at % group
            state = (acc[None, :], state_m, state_l)
            write_rows(*state, at // group, h_rows, results, VARLEN, DV_PAD, STEP_Q, UNIT)
