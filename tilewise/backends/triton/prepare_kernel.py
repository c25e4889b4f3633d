"""The rows' share of the backward: m, low and delta, from which weights and slopes are made.

Grid: x = heads * row tiles (of all batch entries, or of the packed tokens). One program owns BLOCK_M rows of one head.

    delta = sum_d do out - dlse          m = lse          low = 0

and, where the key kernel loads ahead, -m log2 e in a plane behind m. A row that takes no part (it saw no key, or all
its cotangents are 0) gets m = +inf, so that its weights are 0.

lse = m + log l is rounded to the size of m, and out to its own type. Where that would be felt (|lse| beyond `limit`,
or so few keys that one may be the only visible one) the program computes m, log2 l and delta afresh from q, k, v and
do, and marks its head, whose tiles then take the slower way of `backward_words`. The choice is made here, on the
device: nothing is read by the host, and the usual call pays for reading do and out once.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.backward_words import INF, locate, pitch_of
from tilewise.backends.triton.forward_kernel import load_tile, position_offset
from tilewise.backends.triton.philox import kept_tile
from tilewise.backends.triton.words import LOG2E


@triton.jit
def afresh(
    rows, own, do, tensors, place, numbers, sink_ptr, seed_ptr, data, derive, keep, HAS_MASK: tl.constexpr,
    HAS_TERMS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """m, l and the sum of p dp of each row, from q, k, v and do."""
    q_ptr, k_ptr, v_ptr, q_n, q_d, k_n, k_d, v_n, v_d, size_d, size_dv = tensors
    n_q, n_k, q_offset, k_offset, b, h, g = place
    scale, threshold, drop_factor, h_word, b_word = numbers
    q = load_tile(q_ptr, rows, q_n, q_d, size_d, own, True, D_PAD, EVEN, STEP, UNIT)
    do = do.to(q.dtype)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    i = rows[:, None]
    q_pos = i + q_offset
    top = tl.full([BLOCK_M], -INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741  # the letter of the literature
    total = tl.zeros([BLOCK_M], tl.float32)
    for t in tl.range(0, tl.cdiv(n_k, BLOCK_N), num_stages=1):
        j0 = t * BLOCK_N
        columns = j0 + tl.arange(0, BLOCK_N)
        j = columns[None, :]
        inside = columns < n_k
        k = load_tile(k_ptr, columns, k_n, k_d, size_d, inside, True, D_PAD, EVEN, STEP, UNIT)
        v = load_tile(v_ptr, columns, v_n, v_d, size_dv, inside, True, DV_PAD, EVEN_V, STEP, UNIT)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        k_pos = j + k_offset
        s = s * scale
        if HAS_TERMS:
            found = derive(s, i, j, q_pos, k_pos, b, h, g, data)
            s = found[0]
        visible = inside[None, :] & (i < n_q)
        if HAS_MASK:
            visible = visible & keep(s, i, j, q_pos, k_pos, b, h, g, data)
        s = tl.where(visible, s, -INF)
        if DROPOUT:
            kept = kept_tile(q_pos, j0 + k_offset, h_word, b_word, seed, threshold, BLOCK_M, BLOCK_N)
            dp = tl.where(kept, dp * drop_factor, 0.0)
        higher = tl.maximum(top, tl.max(s, 1))
        pivot = tl.where(higher == -INF, 0.0, higher)
        p = tl.exp2((s - pivot[:, None]) * LOG2E)
        alpha = tl.exp2((top - pivot) * LOG2E)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        total = total * alpha + tl.sum(tl.where(s == -INF, 0.0, p * dp), 1)
        top = higher
    if sink_ptr is not None:
        logit = tl.load(sink_ptr + h).to(tl.float32)
        higher = tl.maximum(top, logit)
        pivot = tl.where(higher == -INF, 0.0, higher)
        alpha = tl.exp2((top - pivot) * LOG2E)
        l = l * alpha + tl.exp2((logit - pivot) * LOG2E)  # noqa: E741
        total = total * alpha
        top = higher
    return top, l, total


@triton.jit
def prepare_tile(
    number, q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_ptr, dlse_ptr, sink_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr,
    seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, q_b, q_h, q_n, q_d, k_b, k_h,
    k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, o_b, o_h, o_n, o_d, l_b, l_h, l_n, dl_b, dl_h, dl_n, batch,
    heads, group, seqlen_q, seqlen_k, row_tiles, q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold,
    few, scale, drop_factor, limit, data, derive, keep, classify, EXACT: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_TERMS: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, LAST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr = 1,
):  # fmt: skip
    """Tile `number` of the grid: see the header. Strides of q, k, v, do and out are in units of STEP elements."""
    tile = number % row_tiles
    unit = number // row_tiles
    b, h, tile, tensor_b, row0, n_q, key0, n_k = locate(
        unit, tile, batch, heads, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, seqlen_q, seqlen_k, False, BLOCK_M,
        VARLEN)  # fmt: skip
    g = h // group
    i0 = tile * BLOCK_M
    rows = i0 + tl.arange(0, BLOCK_M)
    own = rows < n_q
    b_wide, g_wide, h_wide = tl.cast(tensor_b, tl.int64), tl.cast(g, tl.int64), tl.cast(h, tl.int64)
    do_base = do_ptr + (b_wide * g_b + h_wide * g_h + row0 * g_n) * STEP
    out_base = out_ptr + (b_wide * o_b + h_wide * o_h + row0 * o_n) * STEP
    do = load_tile(do_base, rows, g_n, g_d, size_dv, own, True, DV_PAD, EVEN_V, STEP, UNIT)
    out = load_tile(out_base, rows, o_n, o_d, size_dv, own, True, DV_PAD, EVEN_V, STEP, UNIT)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    alive = own & (tl.sum(tl.abs(do.to(tl.float32)), 1) != 0)
    lse_row = l_b * b_wide + l_h * h_wide + (row0 + rows).to(tl.int64) * l_n
    lse = tl.load(lse_ptr + lse_row, mask=own, other=-INF)
    dlse = tl.zeros_like(lse)
    if dlse_ptr is not None:
        dlse_row = dl_b * b_wide + dl_h * h_wide + (row0 + rows).to(tl.int64) * dl_n
        dlse = tl.load(dlse_ptr + dlse_row, mask=own, other=0.0).to(tl.float32)
        alive = alive | (dlse != 0)
    alive = alive & (lse != -INF)
    m = lse
    low = tl.zeros_like(m)

    # ---- afresh, where roundings would be felt ----
    if EXACT:
        large = ((tl.abs(lse) > limit) | (n_k <= few)) & alive
        if tl.max(large.to(tl.int32), 0) > 0:
            tensors = (
                q_ptr + (b_wide * q_b + h_wide * q_h + row0 * q_n) * STEP,
                k_ptr + (b_wide * k_b + g_wide * k_h + key0 * k_n) * STEP,
                v_ptr + (b_wide * v_b + g_wide * v_h + key0 * v_n) * STEP, q_n, q_d, k_n, k_d, v_n, v_d, size_d, size_dv
            )  # fmt: skip
            place = (
                n_q, n_k, position_offset(q_offset, q_offset_ptr, b, n_k - n_q, LAST),
                position_offset(k_offset, k_offset_ptr, b, 0, False), b, h, g
            )  # fmt: skip
            numbers = (scale, threshold, drop_factor, h + h_offset, b + b_offset)
            top, l, total = afresh(  # noqa: E741
                rows, own, do, tensors, place, numbers, sink_ptr, seed_ptr, data, derive, keep, HAS_MASK, HAS_TERMS,
                DROPOUT, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION)  # fmt: skip
            fresh = large & (l > 0)
            m = tl.where(fresh, top, m)
            low = tl.where(fresh, tl.log2(tl.where(fresh, l, 1.0)), low)
            delta = tl.where(fresh, total / tl.where(fresh, l, 1.0), delta)
            tl.store(marks_ptr + b * heads + h, 1)
            tl.store(marks_ptr + batch * heads, 1)
    line = (b_wide * heads + h) * pitch_of(seqlen_q, ALIGNED) + row0 + rows
    tl.store(m_ptr + line, tl.where(alive, m, INF), mask=own)
    tl.store(low_ptr + line, low, mask=own)
    if ALIGNED > 4:
        # Tiles of the key kernel read these lines past the rows' end, where nothing takes part.
        power_ptr = m_ptr + tl.cast(batch * heads, tl.int64) * pitch_of(seqlen_q, ALIGNED)
        tl.store(power_ptr + line, tl.where(alive, m * -LOG2E, -INF))
        own = rows < pitch_of(seqlen_q, ALIGNED)
    tl.store(delta_ptr + line, tl.where(alive, delta - dlse, 0.0), mask=own)


@triton.jit
def prepare_program(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_ptr, dlse_ptr, sink_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr, seed_ptr,
    q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, o_b, o_h, o_n, o_d, l_b, l_h, l_n, dl_b, dl_h, dl_n, batch, heads, group,
    seqlen_q, seqlen_k, row_tiles, q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, few, scale,
    drop_factor, limit, data, derive, keep, classify, EXACT: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_TERMS: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, LAST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program: one tile."""
    prepare_tile(
        tl.program_id(0), q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_ptr, dlse_ptr, sink_ptr, m_ptr, low_ptr,
        delta_ptr, marks_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, q_b,
        q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, o_b, o_h, o_n, o_d, l_b, l_h, l_n,
        dl_b, dl_h, dl_n, batch, heads, group, seqlen_q, seqlen_k, row_tiles, q_offset, k_offset, h_offset, b_offset,
        size_d, size_dv, threshold, few, scale, drop_factor, limit, data, derive, keep, classify, EXACT, HAS_MASK,
        HAS_TERMS, DROPOUT, VARLEN, LAST, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION,
        ALIGNED)  # fmt: skip
