"""The stream kernel: decoding without a mask, where every program reads as many keys as any other.

The key tiles of all units (KV heads of sequences), one unit after the other, form one line; program p owns the p-th
share of it and walks through it without a pause: the loads of the next unit are under way while the last one
ends. Grid: x = programs. Shares follow from the lengths on the device, so a captured call stays right, and balanced,
while its sequences grow. A unit that lies inside one share is written at once; of one that is cut, every program
writes a piece, and the last of them merges the pieces in their order.
State in registers: acc (BLOCK_M, DV), m and l (BLOCK_M). Shared memory: num_stages of k, v and q.

Source: Osama et al., Stream-K, 2023; the merge is the monoid of `tilewise.state`.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.absorb_kernel import load_rows, scales_of
from tilewise.backends.triton.decode_kernel import await_grid, clamped_length, merge_parts, write_rows
from tilewise.backends.triton.forward_kernel import weigh
from tilewise.backends.triton.pages import page_numbers, page_rows, table_row
from tilewise.backends.triton.words import LOG2E

SCANNED = tl.constexpr(128)
"""Lengths that are read at once."""


@triton.jit
def extent(used_k_ptr, leftpad_ptr, b, there, seqlen_k, BLOCK_N: tl.constexpr):
    """(keys, hidden keys before them, tiles) of sequences b; a sequence without keys has a tile that is all hidden."""
    n_k = seqlen_k
    if used_k_ptr is not None:
        found = tl.load(used_k_ptr + b, mask=there, other=0).to(tl.int32)
        n_k = tl.minimum(tl.maximum(found, 0), seqlen_k)
    pad = b * 0
    if leftpad_ptr is not None:
        found = tl.load(leftpad_ptr + b, mask=there, other=0).to(tl.int32)
        pad = tl.minimum(tl.maximum(found, 0), n_k)
    return n_k, pad, tl.maximum(tl.cdiv(n_k, BLOCK_N) - pad // BLOCK_N, 1)


@triton.jit
def all_tiles(used_k_ptr, leftpad_ptr, batch, heads, seqlen_k, BLOCK_N: tl.constexpr):
    """Key tiles of all units."""
    if used_k_ptr is None and leftpad_ptr is None:
        total = batch * heads * tl.maximum(tl.cdiv(seqlen_k, BLOCK_N), 1)
    else:
        total = 0
        for start in range(0, batch, SCANNED):
            b = start + tl.arange(0, SCANNED)
            tiles = extent(used_k_ptr, leftpad_ptr, b, b < batch, seqlen_k, BLOCK_N)[2]
            total += tl.sum(tl.where(b < batch, tiles, 0)) * heads
    return total


@triton.jit
def unit_at(at, used_k_ptr, leftpad_ptr, batch, heads, seqlen_k, BLOCK_N: tl.constexpr):
    """(sequence, KV head, tile inside the unit) of tile `at` of the line."""
    if used_k_ptr is None and leftpad_ptr is None:
        tiles = tl.maximum(tl.cdiv(seqlen_k, BLOCK_N), 1)
        unit = at // tiles
        b, g, j = unit // heads, unit % heads, at % tiles
    else:
        b = 0
        before = 0  # tiles of the sequences before b
        running = 0
        for start in range(0, batch, SCANNED):
            n = start + tl.arange(0, SCANNED)
            tiles = extent(used_k_ptr, leftpad_ptr, n, n < batch, seqlen_k, BLOCK_N)[2] * heads
            upto = running + tl.cumsum(tl.where(n < batch, tiles, 0), 0)
            passed = (upto <= at) & (n < batch)
            b += tl.sum(passed.to(tl.int32))
            before = tl.maximum(before, tl.max(tl.where(passed, upto, 0)))
            running = tl.max(upto)
        b = tl.minimum(b, batch - 1)
        own = extent(used_k_ptr, leftpad_ptr, b, True, seqlen_k, BLOCK_N)[2]
        g, j = (at - before) // own, (at - before) % own
    return b, g, j


@triton.jit
def stream_program(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, count_ptr, flag_ptr, sink_ptr, q_offset_ptr,
    k_offset_ptr, cu_q_ptr, used_q_ptr, used_k_ptr, leftpad_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    q_b, q_h, q_n, q_d, k_p, k_h, k_n, v_p, v_h, v_n, o_b, o_h, o_n, o_d, l_b, l_h, table_b, ks_p, ks_h, vs_p, vs_h,
    batch, units, heads, group, seqlen_q, seqlen_k, row_tiles, splits, split_tiles, pages, page_size, page_shift,
    q_offset, k_offset, size_d, size_dv, scale,
    data, score, keep, classify, classify_coarse,
    HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr, LAST: tl.constexpr, VARLEN: tl.constexpr,
    PAGING: tl.constexpr, SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr,
    STEP_Q: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr, MERGE: tl.constexpr,
    MERGED: tl.constexpr, WARPS: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr, CARE: tl.constexpr,
    RATIO: tl.constexpr,
):  # fmt: skip
    """One program: see the header. Arguments are the decode kernel's; split_tiles: tiles of a program, at least."""
    await_grid(PDL)
    # ---- its share of the line ----
    program = tl.program_id(0)
    total = all_tiles(used_k_ptr, leftpad_ptr, batch, heads, seqlen_k, BLOCK_N)
    each = tl.maximum(tl.maximum(tl.cdiv(total, splits), split_tiles), 1)
    begin = program * each
    stop = tl.minimum(begin + each, total)
    if begin < stop:
        b, g, j = unit_at(begin, used_k_ptr, leftpad_ptr, batch, heads, seqlen_k, BLOCK_N)
        n_k, pad, tiles = extent(used_k_ptr, leftpad_ptr, b, True, seqlen_k, BLOCK_N)
        table_at, page0 = table_row(table_ptr, table_b, b, lse_ptr)
        pool = (table_at, page0, page_size, page_shift, pages)
        n = tl.arange(0, BLOCK_N)
        column = (pad // BLOCK_N + j) * BLOCK_N
        numbers = page_numbers(column, column + n, n_k, pool, PAGING)

        # ---- what its tiles have in common ----
        VECTOR: tl.constexpr = PAGING == "shift" or PAGING == "divide"
        d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
        r = tl.arange(0, BLOCK_M)
        row, h_row = r // group, r % group
        q_columns = d if UNIT else d.to(tl.int64) * q_d * STEP_Q
        q_inside = (row < seqlen_q)[:, None] & (d // STEP_Q < size_d // STEP_Q)[None, :]
        step = scale * LOG2E if FUSED else LOG2E
        acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        b0, g0, tiles0, begin0 = b, g, tiles, begin - j
        fresh = j == 0  # whether the unit began in this share

        for at in tl.range(begin, stop):
            # ---- where the tile after this one lies; its length and pages are looked up a tile ahead ----
            ended = j + 1 == tiles
            turned = ended & (g + 1 == heads)
            b_next = tl.where(turned, tl.minimum(b + 1, batch - 1), b)
            g_next = tl.where(turned, 0, tl.where(ended, g + 1, g))
            j_next = tl.where(ended, 0, j + 1)
            n_k_next, pad_next, tiles_next = extent(used_k_ptr, leftpad_ptr, b_next, True, seqlen_k, BLOCK_N)
            table_at, page0 = table_row(table_ptr, table_b, b_next, lse_ptr)
            pool_next = (table_at, page0, page_size, page_shift, pages)
            column_next = (pad_next // BLOCK_N + j_next) * BLOCK_N
            numbers_next = page_numbers(column_next, column_next + n, n_k_next, pool_next, PAGING)

            # ---- the tile ----
            columns = (pad // BLOCK_N + j) * BLOCK_N + n
            page, slot, owned = page_rows(columns, numbers, pool, PAGING)
            inside = (columns < n_k) & (columns >= pad) & owned
            q_rows = b.to(tl.int64) * q_b + row.to(tl.int64) * q_n + (g * group + h_row).to(tl.int64) * q_h
            q = tl.load(q_ptr + q_rows[:, None] * STEP_Q + q_columns[None, :], mask=q_inside, other=0.0)
            k_at = g.to(tl.int64) * k_h + page.to(tl.int64) * k_p + slot.to(tl.int64) * k_n
            k = load_rows(k_ptr, k_at, d, d // STEP < size_d // STEP, inside, EVEN, STEP, EVICT)
            s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
            if not FUSED:
                stored = scales_of(k_scale_ptr, page, ks_p, g, ks_h, SCALES)
                s = s * (stored * scale)[None, :] if SCALES == "page" and VECTOR else s * (stored * scale)
            s = tl.where(inside[None, :], s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
            if FUSED:
                p = tl.exp2(tl.fma(s, step, (-pivot * step)[:, None]))
            else:
                p = tl.exp2((s - pivot[:, None]) * step)
            alpha = tl.exp2((m - pivot) * step)
            l = l * alpha + tl.sum(p, 1)  # noqa: E741
            v_at = g.to(tl.int64) * v_h + page.to(tl.int64) * v_p + slot.to(tl.int64) * v_n
            v = load_rows(v_ptr, v_at, dv, dv // STEP < size_dv // STEP, inside, EVEN_V, STEP, EVICT)
            if SCALES == "page":
                stored = scales_of(v_scale_ptr, page, vs_p, g, vs_h, SCALES)
                p = p * stored[None, :] if VECTOR else p * stored
            acc = weigh(p, v.to(q.dtype), acc * alpha[:, None], None, False, PRECISION)
            m = m_new

            # ---- the end of a unit, or of the share ----
            leaves = ended | (at + 1 == stop)
            if leaves:
                whole = acc
                if SCALES == "head":
                    whole = acc * tl.load(v_scale_ptr + g * vs_h)
                if ended & fresh:
                    n_q = clamped_length(used_q_ptr, b, seqlen_q)
                    results = (
                        out_ptr, lse_ptr, sink_ptr, o_b, o_h, o_n, o_d, l_b, l_h, b, 0, n_q, seqlen_q, size_dv,
                    )  # fmt: skip
                    write_rows(
                        whole, m * step, l, row, g * group + h_row, results, False, DV_PAD, STEP_Q, UNIT
                    )
                else:
                    line = (2 * program + fresh.to(tl.int32)).to(tl.int64) * ROWS + r
                    tl.store(part_ptr + line[:, None] * DV_PAD + dv[None, :], whole, mask=(r < ROWS)[:, None])
                    tl.store(part_lse_ptr + 2 * line, m * step, mask=r < ROWS)
                    tl.store(part_lse_ptr + 2 * line + 1, l, mask=r < ROWS)
            acc = tl.where(leaves, 0.0, acc)
            m = tl.where(leaves, -float("inf"), m)
            l = tl.where(leaves, 0.0, l)  # noqa: E741
            fresh = fresh | ended
            b, g, j, numbers = b_next, g_next, j_next, numbers_next
            n_k, pad, tiles = n_k_next, pad_next, tiles_next

        # ---- its pieces: at most the first unit's, which began before, and the last one's, which goes on ----
        # All threads' stores come before the count, and the count before the loads of the one that merges.
        tl.debug_barrier()
        for which in range(0, 2):
            first = which == 0
            if tl.where(first, begin0 < begin, fresh & (j != 0)):
                start = tl.where(first, begin0, stop - j)
                oldest = start // each
                live = (start + tl.where(first, tiles0, tiles) - 1) // each - oldest + 1
                its_b, its_g = tl.where(first, b0, b), tl.where(first, g0, g)
                before = tl.atomic_add(count_ptr + its_b * heads + its_g, 1, sem="acq_rel", scope="gpu")
                if before == live - 1:
                    tl.store(count_ptr + its_b * heads + its_g, 0)
                    # Of all pieces the oldest alone is its program's second one.
                    lines = tl.arange(0, ROWS)
                    whole, whole_m, whole_l = merge_parts(
                        part_ptr, part_lse_ptr, 2 * oldest, 2, 1, live, lines, ROWS, ROWS, DV_PAD, MERGED
                    )
                    n_q = clamped_length(used_q_ptr, its_b, seqlen_q)
                    results = (
                        out_ptr, lse_ptr, sink_ptr, o_b, o_h, o_n, o_d, l_b, l_h, its_b, 0, n_q, seqlen_q, size_dv,
                    )  # fmt: skip
                    write_rows(
                        whole, whole_m, whole_l, lines // group, its_g * group + lines % group, results, False, DV_PAD,
                        STEP_Q, UNIT,
                    )  # fmt: skip
