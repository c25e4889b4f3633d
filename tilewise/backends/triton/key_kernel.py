"""dk and dv of a tile of keys, and what leaves get per column. See `backward_words`.

Grid: x = KV heads * key tiles (of all batch entries, or of the packed tokens). One program owns BLOCK_N keys of one KV
head. Loop order: the heads of the group, then their row tiles. Products per tile: s and dp transposed (keys x rows),
so that p and ds are operands as they stand; dv += p do, dk += ds q.
Registers: dk and dv (BLOCK_N, D + DV). Shared memory: k and v, and STAGES of q and do.

Where both sums leave room for small tiles only, two launches make one of them each (PART): s is made twice, of tiles
twice as large.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.backward_words import (
    CHUNK,
    INF,
    add_sums,
    any_marked,
    contribution,
    finite,
    load_marks,
    load_runs,
    locate,
    piece_of,
    pitch_of,
    row_kinds,
    start_sums,
    store_sums,
    store_tile,
    weights,
)
from tilewise.backends.triton.forward_kernel import load_tile, place_of, position_offset
from tilewise.backends.triton.philox import kept_tile
from tilewise.backends.triton.words import LOG2E


@triton.jit
def statistics(m_ptr, delta_ptr, i0, n_q, BLOCK_M: tl.constexpr):
    """m and delta of a tile of rows; one base and one bound for all of them, so that addresses are constants apart."""
    n = tl.arange(0, BLOCK_M)
    inside = n < n_q - i0
    m = tl.load(m_ptr + i0 + n, mask=inside, other=INF)
    return m, tl.load(delta_ptr + i0 + n, mask=inside, other=0.0)


@triton.jit
def absorb_rows(
    dk, dv, sums, k, v, first, full, after, past, tensors, place, numbers, data, derive, keep, ends, holes, classify,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_TERMS: tl.constexpr, SLOPED: tl.constexpr, DROPOUT: tl.constexpr, SITES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, VARLEN: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """dk, dv and the column sums after the row tiles first .. past - 1 of one head.

    PART: "dk" or "dv" where one of them is made alone. MASKED: "no" and "yes" say that all of them are FULL, or
    PARTIAL; "ends", that full .. after - 1 are FULL.
    """
    (
        q_ptr,
        do_ptr,
        m_ptr,
        low_ptr,
        delta_ptr,
        q_n,
        q_d,
        g_n,
        g_d,
        size_d,
        size_dv,
        descriptors,
        b_desc,
        start,
        unit,
    ) = tensors
    q_desc, do_desc, m_desc, delta_desc = descriptors
    j, k_pos, j0, j1, n_q, n_k, q_offset, k_offset, b, h, g = place
    scale, seed, threshold, drop_factor, h_word, b_word = numbers
    for t in tl.range(first, past, num_stages=STAGES):
        i0 = t * BLOCK_M
        rows = i0 + tl.arange(0, BLOCK_M)
        inside = rows < n_q
        if TMA:
            q = q_desc.load([b_desc, h, start + i0, 0]).reshape(BLOCK_M, D_PAD)
            do = do_desc.load([b_desc, h, start + i0, 0]).reshape(BLOCK_M, DV_PAD)
            if VARLEN:
                # Sequences begin anywhere, the copy engine reads from multiples of 16 bytes. The branch, which is
                # always taken, keeps the loads from being made ahead element by element.
                m = tl.full([BLOCK_M], INF, tl.float32)
                delta = tl.zeros([BLOCK_M], tl.float32)
                if i0 < n_q:
                    m, delta = statistics(m_ptr, delta_ptr, i0, n_q, BLOCK_M)
            else:
                # Both before either is used: then they share a barrier.
                m_line, delta_line = m_desc.load([unit, i0]), delta_desc.load([unit, i0])
                m, delta = m_line.reshape(BLOCK_M), delta_line.reshape(BLOCK_M)
        else:
            if MASKED == "yes" and HAS_MASK:
                # A row that sees none of these keys is not read: it may hold anything.
                inside = inside & (classify(rows, rows, j0, j1, q_offset, k_offset, b, h, h, g, data) != 0)
            q = load_tile(q_ptr, rows, q_n, q_d, size_d, inside, MASKED == "yes", D_PAD, EVEN, STEP, UNIT)
            do = load_tile(
                do_ptr, rows, g_n, g_d, size_dv, inside, MASKED == "yes", DV_PAD, EVEN_V, STEP, UNIT
            )
            do = do.to(k.dtype)
            m = tl.load(m_ptr + rows, mask=inside, other=INF)
            delta = tl.load(delta_ptr + rows, mask=inside, other=0.0)
        i = rows[None, :]
        q_pos = i + q_offset
        pivot = m[None, :]
        HOLED: tl.constexpr = HAS_MASK == 2 and not CAREFUL and MASKED != "yes"
        if HOLED:
            # A mask's holes go into the pivots, while the products are under way; a weight is 0 there.
            if not TMA or VARLEN:
                pivot = pivot * -LOG2E
            row, column = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_N)[:, None]
            inner = (row, column, i0, j0, q_offset, k_offset)
            pivot = holes(pivot, i, j, q_pos, k_pos, b, h, g, inner, data)
        # So does a mask that reads leaves, where there is room for a pivot each.
        EARLY: tl.constexpr = (
            HAS_MASK == 3 and not CAREFUL and MASKED == "ends" and D_PAD == 128 and DV_PAD == 128
        )
        if EARLY:
            if not TMA or VARLEN:
                pivot = pivot * -LOG2E
            pivot = tl.broadcast_to(pivot, (BLOCK_N, BLOCK_M))
            if (t < full) | (t >= after):
                pivot = tl.where(ends(pivot, i, j, q_pos, k_pos, b, h, g, data), pivot, -INF)
        low = tl.zeros_like(m)
        if CAREFUL:
            low = tl.load(low_ptr + rows, mask=inside, other=0.0)
        if q.dtype == tl.float32:
            # The statistics of a row are those of q k^T, whose sums may run in another order than those of k q^T.
            s = tl.trans(tl.dot(q, tl.trans(k), input_precision=PRECISION))
            if PART != "dv":
                dp = tl.trans(tl.dot(do, tl.trans(v), input_precision=PRECISION))
        else:
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            if PART != "dv":
                dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        p, found = weights(
            s, pivot, low[None, :], scale, i, j, q_pos, k_pos, b, h, g, data, derive, HAS_TERMS, CAREFUL,
            HOLED or EARLY or (TMA and not VARLEN))  # fmt: skip
        # Columns past the end are not stored, and rows past it have m = +inf.
        if CAREFUL:
            visible = inside[None, :] & (j < n_k) & (m != INF)[None, :]
            if HAS_MASK:
                visible = visible & keep(s, i, j, q_pos, k_pos, b, h, g, data)
            p = tl.where(visible, p, 0.0)
        elif HAS_MASK and MASKED == "yes":
            p = tl.where(keep(s, i, j, q_pos, k_pos, b, h, g, data), p, 0.0)
        elif HAS_MASK and MASKED == "ends" and not EARLY:
            if (t < full) | (t >= after):
                p = tl.where(ends(s, i, j, q_pos, k_pos, b, h, g, data), p, 0.0)
        w = p
        if DROPOUT:
            kept = tl.trans(
                kept_tile(
                    (rows + q_offset)[:, None],
                    j0 + k_offset,
                    h_word,
                    b_word,
                    seed,
                    threshold,
                    BLOCK_M,
                    BLOCK_N,
                )
            )
            w = tl.where(kept, p, 0.0)
            if PART != "dv":
                dp = tl.where(kept, dp * drop_factor, 0.0)
        if PART != "dv":
            ds = p * (dp - delta[None, :])
        if CAREFUL:
            ds = tl.where(visible, ds, 0.0)
            # do that is not finite has made delta so.
            w = tl.where(visible, w + (delta - delta)[None, :], 0.0)
            q, do = finite(q), finite(do)
        if PART != "dv":
            sums = add_sums(sums, p, ds, found, SITES)
            if SLOPED:
                ds = contribution(p, ds, found[1])
        if PART != "dk":
            dv = tl.dot(w.to(do.dtype), do, dv, input_precision=PRECISION)
        if PART != "dv":
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, sums


@triton.jit
def key_tile(
    number, q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr, dk_ptr, dv_ptr, sums_ptr, runs_ptr,
    seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, q_desc, do_desc, m_desc,
    delta_desc, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dk_b, dk_h, dk_n,
    dv_b, dv_h, dv_n, batch, heads, group, seqlen_q, seqlen_k, key_tiles, swizzle, run_b, run_h, q_offset, k_offset,
    h_offset, b_offset, size_d, size_dv, threshold, scale, drop_factor, data, derive, keep, ends, holes, classify,
    HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, SLOPED: tl.constexpr, DROPOUT: tl.constexpr,
    VARLEN: tl.constexpr, LAST: tl.constexpr, SITES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, CAREFUL: tl.constexpr,
    ALIGNED: tl.constexpr, RUNS: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One tile of the grid. Strides of q, k, v, do, dk and dv are in units of STEP elements."""
    # ---- which keys ----
    heads_kv = heads // group
    units = heads_kv if VARLEN else batch * heads_kv
    later, unit = place_of(number, units, key_tiles, swizzle)
    slot = key_tiles - 1 - later
    b, g, tile, tensor_b, row0, n_q, key0, n_k = locate(
        unit, slot, batch, heads_kv, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, seqlen_q, seqlen_k, True, BLOCK_N,
        VARLEN)  # fmt: skip
    q_offset = position_offset(q_offset, q_offset_ptr, b, n_k - n_q, LAST)
    k_offset = position_offset(k_offset, k_offset_ptr, b, 0, False)
    j0 = tile * BLOCK_N
    columns = j0 + tl.arange(0, BLOCK_N)
    j1 = tl.minimum(j0 + BLOCK_N, n_k) - 1
    own = columns < n_k
    j = columns[:, None]
    k_pos = j + k_offset
    b_wide, g_wide = tl.cast(tensor_b, tl.int64), tl.cast(g, tl.int64)
    k_base = k_ptr + (b_wide * k_b + g_wide * k_h + key0 * k_n) * STEP
    v_base = v_ptr + (b_wide * v_b + g_wide * v_h + key0 * v_n) * STEP
    marks_base = marks_ptr + b * heads + g * group
    marks = load_marks(marks_base, group)
    run_base = b_wide * run_b + slot
    if RUNS:
        runs = load_runs(runs_ptr, run_base + tl.cast(g * group, tl.int64) * run_h)
    k = load_tile(k_base, columns, k_n, k_d, size_d, own, True, D_PAD, EVEN, STEP, UNIT)
    v = k
    if PART != "dv":
        v = load_tile(v_base, columns, v_n, v_d, size_dv, own, True, DV_PAD, EVEN_V, STEP, UNIT)
    # Marked heads are left to the second look, which takes no others.
    marked = any_marked(marks, marks_base, group)
    mine = marked if CAREFUL else marked == 0
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    row_tiles = tl.where(j0 < n_k, tl.cdiv(n_q, BLOCK_M), 0)
    dk = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dv = tl.zeros([BLOCK_N, DV_PAD], tl.float32)

    # ---- its rows ----
    for member in range(0, tl.where(mine, group, 0)):
        h = g * group + member
        line = (b_wide * heads + h) * pitch_of(seqlen_q, ALIGNED) + row0
        h_wide = tl.cast(h, tl.int64)
        tensors = (
            q_ptr + (b_wide * q_b + h_wide * q_h + row0 * q_n) * STEP,
            do_ptr + (b_wide * g_b + h_wide * g_h + row0 * g_n) * STEP,
            m_ptr + line, low_ptr + line, delta_ptr + line, q_n, q_d, g_n, g_d, size_d, size_dv,
            (q_desc, do_desc, m_desc, delta_desc), tensor_b, row0, b * heads + h
        )  # fmt: skip
        place = (j, k_pos, j0, j1, n_q, n_k, q_offset, k_offset, b, h, g)
        numbers = (scale, seed, threshold, drop_factor, h + h_offset, b + b_offset)
        sums = start_sums(BLOCK_N, SITES)
        if CAREFUL:
            dk, dv, sums = absorb_rows(
                dk, dv, sums, k, v, 0, 0, 0, row_tiles, tensors, place, numbers, data, derive, keep, ends, holes,
                classify, "yes", True, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES, BLOCK_M, BLOCK_N, D_PAD,
                DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, VARLEN, PART)  # fmt: skip
        elif HAS_MASK:
            first, full, after, past, simple = 0, 0, 0, row_tiles, 0
            if RUNS:
                first, full, after, past, simple = runs
                if (member > 0) & (run_h > 0):
                    first, full, after, past, simple = load_runs(runs_ptr, run_base + h_wide * run_h)
            at = first
            end = past
            while at < end:
                if simple == 0:
                    t = at + tl.arange(0, CHUNK)
                    stop = tl.minimum(at + CHUNK, end)
                    kind = row_kinds(
                        t,
                        stop,
                        tile,
                        (n_q, n_k, q_offset, k_offset, b, h, g),
                        data,
                        classify,
                        BLOCK_M,
                        BLOCK_N,
                    )
                    first, full, after, past = piece_of(kind, t, at, stop)
                if TMA and not SPLIT:
                    dk, dv, sums = absorb_rows(
                        dk, dv, sums, k, v, first, full, after, past, tensors, place, numbers, data, derive, keep,
                        ends, holes, classify, "ends", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES,
                        BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, VARLEN,
                        PART)  # fmt: skip
                    at = past
                else:
                    dk, dv, sums = absorb_rows(
                        dk, dv, sums, k, v, first, full, full, full, tensors, place, numbers, data, derive, keep,
                        ends, holes, classify, "yes", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES,
                        BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, VARLEN,
                        PART)  # fmt: skip
                    dk, dv, sums = absorb_rows(
                        dk, dv, sums, k, v, full, full, after, after, tensors, place, numbers, data, derive, keep,
                        ends, holes, classify, "no", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES,
                        BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, VARLEN,
                        PART)  # fmt: skip
                    at = after
                    first, full, after = after, past, past
        elif TMA:
            dk, dv, sums = absorb_rows(
                dk, dv, sums, k, v, 0, 0, row_tiles, row_tiles, tensors, place, numbers, data, derive, keep, ends,
                holes, classify, "no", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES, BLOCK_M, BLOCK_N,
                D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, VARLEN, PART)  # fmt: skip
        else:
            middle = tl.minimum(n_q // BLOCK_M, row_tiles)
            dk, dv, sums = absorb_rows(
                dk, dv, sums, k, v, 0, 0, middle, middle, tensors, place, numbers, data, derive, keep, ends, holes,
                classify, "no", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES, BLOCK_M, BLOCK_N, D_PAD,
                DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, VARLEN, PART)  # fmt: skip
            dk, dv, sums = absorb_rows(
                dk, dv, sums, k, v, middle, 0, 0, row_tiles, tensors, place, numbers, data, derive, keep, ends,
                holes, classify, "yes", False, STAGES, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, SITES, BLOCK_M, BLOCK_N,
                D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, VARLEN, PART)  # fmt: skip
        at_line = (b_wide * heads + h) * seqlen_k + key0 + columns
        plane = tl.cast(units * group, tl.int64) * seqlen_k
        store_sums(sums_ptr, sums, plane, at_line, own & mine, SITES)

    # ---- finish ----
    if not CAREFUL:
        # Infinities of both signs look like a NaN: then the second look finds what this one did.
        total = tl.sum(dk, 1) + tl.sum(dv, 1)
        if tl.max((own & (total != total)).to(tl.int32), 0) > 0:
            tl.store(marks_ptr + batch * heads, 1)
            for member in range(0, group):
                tl.store(marks_ptr + b * heads + g * group + member, 1)
    if DROPOUT:
        dv = dv * drop_factor
    dk_base = dk_ptr + (b_wide * dk_b + g_wide * dk_h + key0 * dk_n) * STEP
    dv_base = dv_ptr + (b_wide * dv_b + g_wide * dv_h + key0 * dv_n) * STEP
    if PART != "dv":
        store_tile(dk_base, dk * scale, columns, dk_n, size_d, own & mine, D_PAD, STEP)
    if PART != "dk":
        store_tile(dv_base, dv, columns, dv_n, size_dv, own & mine, DV_PAD, STEP)


@triton.jit
def key_program(
    q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr, dk_ptr, dv_ptr, sums_ptr, runs_ptr, seed_ptr,
    q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, q_desc, do_desc, m_desc, delta_desc, q_b,
    q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    batch, heads, group, seqlen_q, seqlen_k, key_tiles, swizzle, run_b, run_h, q_offset, k_offset, h_offset, b_offset,
    size_d, size_dv, threshold, scale, drop_factor, data, derive, keep, ends, holes, classify, HAS_MASK: tl.constexpr,
    HAS_TERMS: tl.constexpr, SLOPED: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, LAST: tl.constexpr,
    SITES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, CAREFUL: tl.constexpr, ALIGNED: tl.constexpr, RUNS: tl.constexpr,
    SPLIT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One program: one tile of the grid; of the second look, a share of all tiles, if any head is marked."""
    if CAREFUL:
        units = heads // group if VARLEN else batch * (heads // group)
        total = tl.where(tl.load(marks_ptr + batch * heads) > 0, units * key_tiles, 0)
        for number in range(tl.program_id(0), total, tl.num_programs(0)):
            key_tile(
                number, q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr, dk_ptr, dv_ptr, sums_ptr,
                runs_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, q_desc,
                do_desc, m_desc, delta_desc, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h,
                g_n, g_d, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, batch, heads, group, seqlen_q, seqlen_k, key_tiles,
                swizzle, run_b, run_h, q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, scale,
                drop_factor, data, derive, keep, ends, holes, classify, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, VARLEN,
                LAST, SITES, BLOCK_M, BLOCK_N, STAGES, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA,
                CAREFUL, ALIGNED, RUNS, SPLIT, PART)  # fmt: skip
    else:
        key_tile(
            tl.program_id(0), q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr, dk_ptr, dv_ptr,
            sums_ptr, runs_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr,
            q_desc, do_desc, m_desc, delta_desc, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h,
            g_n, g_d, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, batch, heads, group, seqlen_q, seqlen_k, key_tiles, swizzle,
            run_b, run_h, q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, scale, drop_factor,
            data, derive, keep, ends, holes, classify, HAS_MASK, HAS_TERMS, SLOPED, DROPOUT, VARLEN, LAST, SITES,
            BLOCK_M, BLOCK_N, STAGES, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, CAREFUL, ALIGNED,
            RUNS, SPLIT, PART)  # fmt: skip
