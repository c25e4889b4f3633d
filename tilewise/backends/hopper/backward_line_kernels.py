"""Around the backward's main kernel: the rows' numbers before it, the sums of dq after it. Plain Triton.

`fill_lines` makes m and delta of every row from do, out and lse (see `triton.prepare_kernel`), writes what the copy
engine loads with each tile of BM rows: minus m in powers of two, and delta, padded to whole tiles by rows that take no
part (-inf and 0), and clears the tile's sums. It marks heads of which some rows have an lse so large, or so few keys,
that roundings would be felt; for those `again_program` computes m, low and delta afresh, and the second look follows.
`collect_rows` reads the sums, in the order in which threads held them (`backward_rings.add_fragments`), and writes dq.

Grid: x = heads * row tiles of BM (of all batch entries, or of the packed tokens, behind those that see to gaps).
Tile t of head h is number t + h * row_tiles, packed counted from (cu_q[b] // BM + b).
"""

import triton
import triton.language as tl

from tilewise.backends.hopper.backward_gaps import PROGRAMS, clear_gaps
from tilewise.backends.triton.forward_kernel import find_sequence, load_tile, sequence_length
from tilewise.backends.triton.prepare_kernel import prepare_tile
from tilewise.backends.triton.words import LOG2E

SHARES = tl.constexpr(64)
"""Shares of dq that a program asks about at once."""


@triton.jit
def locate(
    number, cu_q_ptr, used_q_ptr, batch, heads, seqlen_q, row_tiles, VARLEN: tl.constexpr, BM: tl.constexpr
):
    """(batch entry, head, first row, first row of the sequence, its rows) of a tile."""
    tile, unit = number % row_tiles, number // row_tiles
    if VARLEN:
        b, tile = find_sequence(cu_q_ptr, tile, batch, seqlen_q, BM)
        row0, n_q = sequence_length(cu_q_ptr, used_q_ptr, b, seqlen_q)
        h = unit
    else:
        b, h = unit // heads, unit % heads
        row0, n_q = 0, seqlen_q
    return b, h, tile * BM, row0, n_q


@triton.jit
def fill_lines(
    out_ptr, do_ptr, lse_ptr, dlse_ptr, m_ptr, low_ptr, delta_ptr, line_m_ptr, line_delta_ptr, sums_ptr, marks_ptr,
    cu_q_ptr, used_q_ptr, cu_k_ptr, used_k_ptr, dq_ptr, dk_ptr, dv_ptr, g_b, g_h, g_n, o_b, o_h, o_n, l_b, l_h, l_n,
    dl_b, dl_h, dl_n, batch, heads, seqlen_q, seqlen_k, row_tiles, size_dv, dq_width, dk_width, dv_width, few, cleared,
    limit, VARLEN: tl.constexpr, FLOATS: tl.constexpr, EXACT: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """See the header. Strides of do and out are in units of 8 elements. FLOATS: sums of a tile, 0 if there are none;
    those of the first `cleared` tiles are cleared here, the others by the main kernel. Behind those of all tiles stand
    their turns (`backward_kernel.keeper`). Packed, the first programs see to what no sequence owns."""
    if VARLEN:
        program = tl.program_id(0)
        if program < PROGRAMS:
            clear_gaps(
                program, cu_q_ptr, used_q_ptr, batch, seqlen_q, dq_ptr, dq_width, None, 0, m_ptr, low_ptr, delta_ptr,
                heads)  # fmt: skip
            clear_gaps(
                program, cu_k_ptr, used_k_ptr, batch, seqlen_k, dk_ptr, dk_width, dv_ptr, dv_width, None, None, None,
                heads)  # fmt: skip
        else:
            fill_tile(
                program - PROGRAMS, out_ptr, do_ptr, lse_ptr, dlse_ptr, m_ptr, low_ptr, delta_ptr, line_m_ptr,
                line_delta_ptr, sums_ptr, marks_ptr, cu_q_ptr, used_q_ptr, cu_k_ptr, used_k_ptr, g_b, g_h, g_n, o_b,
                o_h, o_n, l_b, l_h, l_n, dl_b, dl_h, dl_n, batch, heads, seqlen_q, seqlen_k, row_tiles, size_dv, few,
                cleared, limit, VARLEN, FLOATS, EXACT, DV_PAD, EVEN, BM)  # fmt: skip
    else:
        fill_tile(
            tl.program_id(0), out_ptr, do_ptr, lse_ptr, dlse_ptr, m_ptr, low_ptr, delta_ptr, line_m_ptr,
            line_delta_ptr, sums_ptr, marks_ptr, cu_q_ptr, used_q_ptr, cu_k_ptr, used_k_ptr, g_b, g_h, g_n, o_b, o_h,
            o_n, l_b, l_h, l_n, dl_b, dl_h, dl_n, batch, heads, seqlen_q, seqlen_k, row_tiles, size_dv, few, cleared,
            limit, VARLEN, FLOATS, EXACT, DV_PAD, EVEN, BM)  # fmt: skip


@triton.jit
def fill_tile(
    number, out_ptr, do_ptr, lse_ptr, dlse_ptr, m_ptr, low_ptr, delta_ptr, line_m_ptr, line_delta_ptr, sums_ptr,
    marks_ptr, cu_q_ptr, used_q_ptr, cu_k_ptr, used_k_ptr, g_b, g_h, g_n, o_b, o_h, o_n, l_b, l_h, l_n, dl_b, dl_h,
    dl_n, batch, heads, seqlen_q, seqlen_k, row_tiles, size_dv, few, cleared, limit, VARLEN: tl.constexpr,
    FLOATS: tl.constexpr, EXACT: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One tile of rows."""
    if FLOATS > 0:
        place = sums_ptr + number.to(tl.int64) * FLOATS
        if number < cleared:
            for n in tl.static_range(FLOATS // 1024):
                tl.store(place + n * 1024 + tl.arange(0, 1024), tl.zeros([1024], tl.float32))
        tiles = tl.cast(row_tiles, tl.int64) * heads * (1 if VARLEN else batch)
        tl.store(sums_ptr + tiles * FLOATS + number, 0.0)
    b, h, i0, row0, n_q = locate(number, cu_q_ptr, used_q_ptr, batch, heads, seqlen_q, row_tiles, VARLEN, BM)
    rows = i0 + tl.arange(0, BM)
    own = rows < n_q
    tokens = (row0 + rows).to(tl.int64)
    tensor_b = tl.cast(0 if VARLEN else b, tl.int64)
    h_wide = tl.cast(h, tl.int64)
    do_base = do_ptr + (tensor_b * g_b + h_wide * g_h) * 8
    out_base = out_ptr + (tensor_b * o_b + h_wide * o_h) * 8
    do = load_tile(do_base, tokens, g_n, 1, size_dv, own, True, DV_PAD, EVEN, 8, True).to(tl.float32)
    out = load_tile(out_base, tokens, o_n, 1, size_dv, own, True, DV_PAD, EVEN, 8, True).to(tl.float32)
    lse = tl.load(lse_ptr + l_b * tensor_b + l_h * h_wide + tokens * l_n, mask=own, other=-float("inf"))
    alive = tl.max((do != 0).to(tl.int32), 1) > 0
    delta = tl.sum(do * out, 1)
    if dlse_ptr is not None:
        at = dl_b * tensor_b + dl_h * h_wide + tokens * dl_n
        dlse = tl.load(dlse_ptr + at, mask=own, other=0.0).to(tl.float32)
        alive = alive | (dlse != 0)
        delta -= dlse
    alive = alive & own & (lse != -float("inf"))
    m = tl.where(alive, lse, float("inf"))
    delta = tl.where(alive, delta, 0.0)
    line = (tensor_b * heads + h) * seqlen_q + tokens
    tl.store(m_ptr + line, m, mask=own)
    tl.store(low_ptr + line, tl.zeros_like(m), mask=own)
    tl.store(delta_ptr + line, delta, mask=own)
    at = number.to(tl.int64) * BM + tl.arange(0, BM)
    tl.store(line_m_ptr + at, m * -LOG2E)
    tl.store(line_delta_ptr + at, delta)
    if EXACT:
        n_k = seqlen_k
        if VARLEN:
            _, n_k = sequence_length(cu_k_ptr, used_k_ptr, b, seqlen_k)
        large = alive & ((tl.abs(lse) > limit) | (n_k <= few))
        if tl.max(large.to(tl.int32), 0) > 0:
            tl.store(marks_ptr + b * heads + h, 1)
            tl.store(marks_ptr + batch * heads, 1)


@triton.jit
def collect_rows(
    sums_ptr, dq_ptr, marks_ptr, taken_ptr, turns_ptr, cu_q_ptr, used_q_ptr, dq_b, dq_h, dq_n, batch, heads, seqlen_q,
    row_tiles, size_d, first, unit_rows, shares, scale, VARLEN: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """See the header. Strides of dq are in units of 8 elements; EVEN: all columns are dq's. Program x collects tile
    first + x; those after them see to SHARES shares each of the tiles before `first` that the main kernel did not take:
    `shares` shares of each unit of `unit_rows` tiles. turns_ptr: whose turn it is; where that is 0, nobody wrote
    sums."""
    at = first + tl.program_id(0)
    if taken_ptr is None:
        collect_tile(
            at, sums_ptr, dq_ptr, marks_ptr, turns_ptr, cu_q_ptr, used_q_ptr, dq_b, dq_h, dq_n, batch, heads, seqlen_q,
            row_tiles, size_d, scale, VARLEN, BM, PARTS, WIDTH, EVEN)  # fmt: skip
    else:
        total = row_tiles * heads * (1 if VARLEN else batch)
        own = at < total
        start = tl.maximum(at - total, 0) * SHARES
        most = first // unit_rows * shares
        places = start + tl.arange(0, SHARES)
        taken = tl.load(taken_ptr + places, mask=places < most, other=1)
        end = start
        if own:
            end += 1
        else:
            if tl.min(taken, 0) == 0:
                end += SHARES
        per = tl.cdiv(unit_rows, shares)
        for place in range(start, end):
            unit = place // shares
            a = tl.minimum((place - unit * shares) * per, unit_rows)
            b = tl.minimum(a + per, unit_rows)
            a += unit * unit_rows
            b += unit * unit_rows
            if own:
                a, b = at, at + 1
            else:
                if place >= most:
                    b = a
                else:
                    if tl.load(taken_ptr + place) != 0:
                        b = a
            for r in range(a, b):
                collect_tile(
                    r, sums_ptr, dq_ptr, marks_ptr, turns_ptr, cu_q_ptr, used_q_ptr, dq_b, dq_h, dq_n, batch, heads,
                    seqlen_q, row_tiles, size_d, scale, VARLEN, BM, PARTS, WIDTH, EVEN)  # fmt: skip


@triton.jit
def collect_tile(
    number, sums_ptr, dq_ptr, marks_ptr, turns_ptr, cu_q_ptr, used_q_ptr, dq_b, dq_h, dq_n, batch, heads, seqlen_q,
    row_tiles, size_d, scale, VARLEN: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of dq. 64 rows of sums are PARTS times 64 x WIDTH, and there are two such parts."""
    tl.static_assert(BM // 64 * PARTS == 2)
    at = sums_ptr + tl.cast(number, tl.int64) * (2 * 64 * WIDTH) + tl.arange(0, 64 * WIDTH)
    # They come while it is found whose they are.
    first, second = tl.load(at), tl.load(at + 64 * WIDTH)
    if turns_ptr is not None:
        written = tl.load(turns_ptr + number) != 0
        first, second = tl.where(written, first, 0.0), tl.where(written, second, 0.0)
    b, h, i0, row0, n_q = locate(number, cu_q_ptr, used_q_ptr, batch, heads, seqlen_q, row_tiles, VARLEN, BM)
    wrong = ((first - first) != 0) | ((second - second) != 0)
    base = dq_ptr + (tl.cast(0 if VARLEN else b, tl.int64) * dq_b + tl.cast(h, tl.int64) * dq_h) * 8
    leave_part(base, first * scale, dq_n, i0, row0, n_q, 0, size_d, WIDTH, EVEN)
    leave_part(
        base, second * scale, dq_n, i0 + (64 if PARTS == 1 else 0), row0, n_q, 0 if PARTS == 1 else WIDTH, size_d,
        WIDTH, EVEN)  # fmt: skip
    if tl.max(wrong.to(tl.int32), 0) > 0:
        if i0 < n_q:
            tl.store(marks_ptr + b * heads + h, 1)
            tl.store(marks_ptr + batch * heads, 1)


@triton.jit
def leave_part(base, x, dq_n, i0, row0, n_q, column, size_d, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """64 rows of sums, in the order in which threads held them, as rows of dq. EVEN: all columns are dq's."""
    # Groups of 8 columns, warps, rows, pairs of columns, rows 8 apart, columns.
    x = tl.reshape(x, [WIDTH // 8, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [1, 4, 2, 0, 3, 5]), [64, WIDTH])
    rows = i0 + tl.arange(0, 64)
    d = column + tl.arange(0, WIDTH)
    places = base + ((row0 + rows).to(tl.int64) * dq_n)[:, None] * 8 + d[None, :]
    inside = (rows < n_q)[:, None]
    if not EVEN:
        inside = inside & (d // 8 < size_d // 8)[None, :]
    tl.store(places, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def again_program(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_ptr, dlse_ptr, sink_ptr, m_ptr, low_ptr, delta_ptr, marks_ptr,
    seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, o_b, o_h, o_n, o_d,
    l_b, l_h, l_n, dl_b, dl_h, dl_n, batch, heads, group, seqlen_q, seqlen_k, row_tiles,
    q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, few, scale, drop_factor, limit,
    data, derive, keep, classify,
    EXACT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr,
    LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `prepare` of the Triton backend does where roundings would be felt, if `fill_lines` marked a head."""
    units = heads if VARLEN else batch * heads
    total = tl.where(tl.load(marks_ptr + batch * heads) > 0, units * row_tiles, 0)
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        prepare_tile(
            number, q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_ptr, dlse_ptr, sink_ptr, m_ptr, low_ptr,
            delta_ptr, marks_ptr, seed_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, q_b,
            q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, o_b, o_h, o_n, o_d, l_b, l_h,
            l_n, dl_b, dl_h, dl_n, batch, heads, group, seqlen_q, seqlen_k, row_tiles, q_offset, k_offset, h_offset,
            b_offset, size_d, size_dv, threshold, few, scale, drop_factor, limit, data, derive, keep, classify, EXACT,
            HAS_MASK, HAS_TERMS, DROPOUT, VARLEN, LAST, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT,
            PRECISION)  # fmt: skip
