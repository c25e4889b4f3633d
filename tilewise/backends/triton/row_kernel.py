"""dq of a tile of rows, and what leaves get per row or per pair. See `backward_words`.

Grid: x = heads * row tiles (of all batch entries, or of the packed tokens). One program owns BLOCK_M rows of one query
head and loops over the key tiles: s, dp, dq += ds k.
Registers: dq (BLOCK_M, D). Shared memory: q and do, and STAGES of k and v.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.backward_words import (
    CHUNK,
    INF,
    add_sums,
    column_kinds,
    contribution,
    finite,
    load_runs,
    locate,
    piece_of,
    pitch_of,
    start_sums,
    store_sums,
    store_tile,
    weights,
)
from tilewise.backends.triton.forward_kernel import load_tile, place_of, position_offset
from tilewise.backends.triton.philox import kept_tile
from tilewise.backends.triton.words import LOG2E


@triton.jit
def store_pairs(ptr, part, i, j, pair_i, pair_j, n_q, n_k, STEP: tl.constexpr):
    """Write a tile of a leaf that has an element for each pair; pair_i is in units of STEP, which, if not 1, says that
    columns are contiguous and their number divisible, so that they are written by vectors."""
    if STEP > 1:
        at = i.to(tl.int64) * pair_i * STEP + j
    else:
        at = i.to(tl.int64) * pair_i + j.to(tl.int64) * pair_j
    tl.store(ptr + at, part.to(ptr.dtype.element_ty), mask=(i < n_q) & (j // STEP < n_k // STEP))


@triton.jit
def absorb_keys(
    dq, sums, q, do, m, low, delta, first, full, after, past, tensors, place, numbers, data, derive, keep, ends,
    holes, classify, MASKED: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_TERMS: tl.constexpr, SLOPED: tl.constexpr, DROPOUT: tl.constexpr, SITES: tl.constexpr, PAIR: tl.constexpr,
    PAIR_STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dq and the row sums after the key tiles first .. past - 1. MASKED is that of `key_kernel.absorb_rows`."""
    (
        k_ptr,
        v_ptr,
        pair_ptr,
        k_desc,
        v_desc,
        b_desc,
        start,
        k_n,
        k_d,
        v_n,
        v_d,
        pair_i,
        pair_j,
        size_d,
        size_dv,
    ) = tensors
    i, q_pos, i0, i1, n_q, n_k, q_offset, k_offset, b, h, g = place
    scale, seed, threshold, drop_factor, h_word, b_word = numbers
    for t in tl.range(first, past, num_stages=STAGES):
        j0 = t * BLOCK_N
        columns = j0 + tl.arange(0, BLOCK_N)
        inside = columns < n_k
        if TMA:
            k = k_desc.load([b_desc, g, start + j0, 0]).reshape(BLOCK_N, D_PAD)
            v = v_desc.load([b_desc, g, start + j0, 0]).reshape(BLOCK_N, DV_PAD)
        else:
            if MASKED == "yes" and HAS_MASK:
                # What surely no row of the tile may see is not read: padding may hold anything.
                inside = inside & (
                    classify(i0, i1, columns, columns, q_offset, k_offset, b, h, h, g, data) != 0
                )
            k = load_tile(k_ptr, columns, k_n, k_d, size_d, inside, MASKED == "yes", D_PAD, EVEN, STEP, UNIT)
            v = load_tile(
                v_ptr, columns, v_n, v_d, size_dv, inside, MASKED == "yes", DV_PAD, EVEN_V, STEP, UNIT
            )
        j = columns[None, :]
        k_pos = j + k_offset
        pivot = m[:, None]
        HOLED: tl.constexpr = HAS_MASK == 2 and not CAREFUL and MASKED != "yes"
        if HOLED:
            # See `key_kernel`.
            row, column = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
            inner = (row, column, i0, j0, q_offset, k_offset)
            pivot = holes(pivot * -LOG2E, i, j, q_pos, k_pos, b, h, g, inner, data)
        EARLY: tl.constexpr = (
            HAS_MASK == 3 and not CAREFUL and MASKED == "ends" and D_PAD == 128 and DV_PAD == 128
        )
        if EARLY:
            pivot = tl.broadcast_to(pivot * -LOG2E, (BLOCK_M, BLOCK_N))
            if (t < full) | (t >= after):
                visible = inside[None, :] & ends(pivot, i, j, q_pos, k_pos, b, h, g, data)
                pivot = tl.where(visible, pivot, -INF)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        p, found = weights(
            s, pivot, low[:, None], scale, i, j, q_pos, k_pos, b, h, g, data, derive, HAS_TERMS, CAREFUL,
            HOLED or EARLY)  # fmt: skip
        # Rows past the end have m = +inf.
        if MASKED == "yes":
            visible = inside[None, :]
            if HAS_MASK:
                visible = visible & keep(s, i, j, q_pos, k_pos, b, h, g, data)
            if CAREFUL:
                visible = visible & (m != INF)[:, None]
            p = tl.where(visible, p, 0.0)
        elif MASKED == "ends" and not EARLY:
            if (t < full) | (t >= after):
                visible = inside[None, :]
                if HAS_MASK:
                    visible = visible & ends(s, i, j, q_pos, k_pos, b, h, g, data)
                p = tl.where(visible, p, 0.0)
        if DROPOUT:
            kept = kept_tile(q_pos, j0 + k_offset, h_word, b_word, seed, threshold, BLOCK_M, BLOCK_N)
            dp = tl.where(kept, dp * drop_factor, 0.0)
        ds = p * (dp - delta[:, None])
        if CAREFUL:
            ds = tl.where(visible, ds, 0.0)
            k = finite(k)
        sums = add_sums(sums, p, ds, found, SITES)
        if PAIR >= 0:
            part = contribution(p, ds, found[2 + PAIR])
            store_pairs(pair_ptr, part, i, j, pair_i, pair_j, n_q, n_k, PAIR_STEP)
        if SLOPED:
            ds = contribution(p, ds, found[1])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, sums


@triton.jit
def row_tile(
    number, q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr, dq_ptr, sums_ptr, pair_ptr, runs_ptr,
    seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, k_desc, v_desc, q_b, q_h, q_n,
    q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, pair_b, pair_h, pair_i, pair_j,
    batch, heads, group, seqlen_q, seqlen_k, row_tiles, swizzle, run_b, run_h, q_offset, k_offset, h_offset, b_offset,
    size_d, size_dv, threshold, scale, drop_factor, data, derive, keep, ends, holes, classify, HAS_MASK: tl.constexpr,
    HAS_TERMS: tl.constexpr, SLOPED: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, LAST: tl.constexpr,
    SITES: tl.constexpr, PAIR: tl.constexpr, PAIR_STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, CAREFUL: tl.constexpr,
    ALIGNED: tl.constexpr, RUNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of the grid. Strides of q, k, v, do and dq are in units of STEP elements."""
    # ---- which rows ----
    units = heads if VARLEN else batch * heads
    slot, unit = place_of(number, units, row_tiles, swizzle)
    b, h, tile, tensor_b, row0, n_q, key0, n_k = locate(
        unit, slot, batch, heads, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, seqlen_q, seqlen_k, False, BLOCK_M,
        VARLEN)  # fmt: skip
    g = h // group
    q_offset = position_offset(q_offset, q_offset_ptr, b, n_k - n_q, LAST)
    k_offset = position_offset(k_offset, k_offset_ptr, b, 0, False)
    i0 = tile * BLOCK_M
    rows = i0 + tl.arange(0, BLOCK_M)
    i1 = tl.minimum(i0 + BLOCK_M, n_q) - 1
    own = rows < n_q
    i = rows[:, None]
    q_pos = i + q_offset
    b_wide, g_wide, h_wide = tl.cast(tensor_b, tl.int64), tl.cast(g, tl.int64), tl.cast(h, tl.int64)
    q_base = q_ptr + (b_wide * q_b + h_wide * q_h + row0 * q_n) * STEP
    do_base = do_ptr + (b_wide * g_b + h_wide * g_h + row0 * g_n) * STEP
    tensors = (
        k_ptr + (b_wide * k_b + g_wide * k_h + key0 * k_n) * STEP,
        v_ptr + (b_wide * v_b + g_wide * v_h + key0 * v_n) * STEP,
        pair_ptr + (b_wide * pair_b + h_wide * pair_h) * PAIR_STEP, k_desc, v_desc, tensor_b, key0, k_n, k_d,
        v_n, v_d,
        pair_i, pair_j, size_d, size_dv
    )  # fmt: skip
    if RUNS:
        first, full, after, past, simple = load_runs(runs_ptr, b_wide * run_b + h_wide * run_h + slot)
    q = load_tile(q_base, rows, q_n, q_d, size_d, own, True, D_PAD, EVEN, STEP, UNIT)
    do = load_tile(do_base, rows, g_n, g_d, size_dv, own, True, DV_PAD, EVEN_V, STEP, UNIT).to(q.dtype)
    line = (b_wide * heads + h) * pitch_of(seqlen_q, ALIGNED) + row0 + rows
    m = tl.load(m_ptr + line, mask=own, other=INF)
    low = tl.load(low_ptr + line, mask=own, other=0.0)
    delta = tl.load(delta_ptr + line, mask=own, other=0.0)
    marked = tl.load(marks_ptr + b * heads + h) > 0
    # Marked heads are left to the second look, which takes no others.
    mine = marked if CAREFUL else marked == 0
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    # ---- its keys ----
    end = tl.where(mine & (i0 < n_q), tl.cdiv(n_k, BLOCK_N), 0)
    place = (i, q_pos, i0, i1, n_q, n_k, q_offset, k_offset, b, h, g)
    numbers = (scale, seed, threshold, drop_factor, h + h_offset, b + b_offset)
    dq = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    sums = start_sums(BLOCK_M, SITES)
    if CAREFUL:
        dq, sums = absorb_keys(
            dq, sums, q, do, m, low, delta, 0, 0, 0, end, tensors, place, numbers, data, derive, keep, ends, holes,
            classify, "yes", True, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES, PAIR, PAIR_STEP, BLOCK_M,
            BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA)  # fmt: skip
    elif HAS_MASK:
        if RUNS:
            at = first
            last = tl.where(end > 0, past, first)
        else:
            first, full, after, past, simple = 0, 0, 0, 0, 0
            at = 0
            last = end
        while at < last:
            if simple == 0:
                t = at + tl.arange(0, CHUNK)
                stop = tl.minimum(at + CHUNK, last)
                kind = column_kinds(
                    t, stop, tile, (n_q, n_k, q_offset, k_offset, b, h, g), data, classify, BLOCK_M, BLOCK_N
                )
                first, full, after, past = piece_of(kind, t, at, stop)
            if TMA and not SPLIT:
                dq, sums = absorb_keys(
                    dq, sums, q, do, m, low, delta, first, full, after, past, tensors, place, numbers, data, derive,
                    keep, ends, holes, classify, "ends", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES,
                    PAIR, PAIR_STEP, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION,
                    TMA)  # fmt: skip
                at = past
            else:
                dq, sums = absorb_keys(
                    dq, sums, q, do, m, low, delta, first, full, full, full, tensors, place, numbers, data, derive,
                    keep, ends, holes, classify, "yes", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES,
                    PAIR, PAIR_STEP, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION,
                    TMA)  # fmt: skip
                dq, sums = absorb_keys(
                    dq, sums, q, do, m, low, delta, full, full, after, after, tensors, place, numbers, data, derive,
                    keep, ends, holes, classify, "no", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES,
                    PAIR, PAIR_STEP, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION,
                    TMA)  # fmt: skip
                at = after
                first, full, after = after, past, past
    else:
        middle = tl.minimum(n_k // BLOCK_N, end)
        if TMA:
            dq, sums = absorb_keys(
                dq, sums, q, do, m, low, delta, 0, 0, middle, end, tensors, place, numbers, data, derive, keep, ends,
                holes, classify, "ends", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES, PAIR, PAIR_STEP,
                BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA)  # fmt: skip
        else:
            dq, sums = absorb_keys(
                dq, sums, q, do, m, low, delta, 0, 0, middle, middle, tensors, place, numbers, data, derive, keep,
                ends, holes, classify, "no", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES, PAIR,
                PAIR_STEP, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA)  # fmt: skip
            dq, sums = absorb_keys(
                dq, sums, q, do, m, low, delta, middle, 0, 0, end, tensors, place, numbers, data, derive, keep, ends,
                holes, classify, "yes", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES, PAIR, PAIR_STEP,
                BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA)  # fmt: skip

    # ---- finish ----
    if not CAREFUL:
        total = tl.sum(dq, 1)
        if tl.max((total != total).to(tl.int32), 0) > 0:
            tl.store(marks_ptr + b * heads + h, 1)
            tl.store(marks_ptr + batch * heads, 1)
    at_line = (b_wide * heads + h) * seqlen_q + row0 + rows
    store_sums(sums_ptr, sums, tl.cast(units, tl.int64) * seqlen_q, at_line, own & mine, SITES)
    dq_base = dq_ptr + (b_wide * dq_b + h_wide * dq_h + row0 * dq_n) * STEP
    store_tile(dq_base, dq * scale, rows, dq_n, size_d, own & mine, D_PAD, STEP)


@triton.jit
def row_program(
    q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr, dq_ptr, sums_ptr, pair_ptr, runs_ptr, seed_ptr,
    q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, k_desc, v_desc, q_b, q_h, q_n, q_d, k_b,
    k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, pair_b, pair_h, pair_i, pair_j, batch,
    heads, group, seqlen_q, seqlen_k, row_tiles, swizzle, run_b, run_h, q_offset, k_offset, h_offset, b_offset,
    size_d, size_dv, threshold, scale, drop_factor, data, derive, keep, ends, holes, classify, HAS_MASK: tl.constexpr,
    HAS_TERMS: tl.constexpr, SLOPED: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, LAST: tl.constexpr,
    SITES: tl.constexpr, PAIR: tl.constexpr, PAIR_STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, CAREFUL: tl.constexpr,
    ALIGNED: tl.constexpr, RUNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: one tile of the grid; of the second look, a share of all tiles, if any head is marked."""
    if CAREFUL:
        units = heads if VARLEN else batch * heads
        total = tl.where(tl.load(marks_ptr + batch * heads) > 0, units * row_tiles, 0)
        for number in range(tl.program_id(0), total, tl.num_programs(0)):
            row_tile(
                number, q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr, dq_ptr, sums_ptr, pair_ptr,
                runs_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, k_desc,
                v_desc, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h,
                dq_n, pair_b, pair_h, pair_i, pair_j, batch, heads, group, seqlen_q, seqlen_k, row_tiles, swizzle,
                run_b, run_h, q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, scale, drop_factor,
                data, derive, keep, ends, holes, classify, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, VARLEN, LAST, SITES,
                PAIR, PAIR_STEP, BLOCK_M, BLOCK_N, STAGES, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA,
                CAREFUL, ALIGNED, RUNS, SPLIT)  # fmt: skip
    else:
        row_tile(
            tl.program_id(0), q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr, dq_ptr, sums_ptr,
            pair_ptr, runs_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr,
            k_desc, v_desc, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b,
            dq_h, dq_n, pair_b, pair_h, pair_i, pair_j, batch, heads, group, seqlen_q, seqlen_k, row_tiles, swizzle,
            run_b, run_h, q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, scale, drop_factor,
            data, derive, keep, ends, holes, classify, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, VARLEN, LAST, SITES,
            PAIR, PAIR_STEP, BLOCK_M, BLOCK_N, STAGES, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA,
            CAREFUL, ALIGNED, RUNS, SPLIT)  # fmt: skip
