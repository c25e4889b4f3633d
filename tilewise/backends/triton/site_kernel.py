"""Gradients of leaves that no program of the main kernels owns: one load site at a time, two products a tile.

MODE "scatter"    x = batch * heads * row tiles; walks the keys; float32 atomic additions at the site's own indices
MODE "pairs"      x = tiles of the leaf's (batch, head, row, column); walks the batch entries and heads that share an
                  element and writes the tile once
MODE "diagonal"   x = batch * heads * tile diagonals; walks down one diagonal of square tiles and writes the sums along
                  its diagonals: 2 x BLOCK_N, those at or above the tiles' own diagonal and those below

Registers: s, dp and, for pairs, the sum, each (BLOCK_M, BLOCK_N). Every tile is treated as PARTIAL; a tile that the
mask empties is not computed.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.backward_words import INF, contribution, pitch_of, weights
from tilewise.backends.triton.forward_kernel import find_sequence, load_tile, position_offset, sequence_length
from tilewise.backends.triton.philox import kept_tile


@triton.jit
def share_of(
    q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h,
    v_n, v_d,
    g_b, g_h, g_n, g_d, b, tensor_b, h, g, i0, j0, row0, n_q, key0, n_k, heads, seqlen_q, q_offset, k_offset, size_d,
    size_dv, scale, seed, threshold, drop_factor, h_word, b_word, data, derive, keep,
    SITE: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile's contributions to the site's leaf, (BLOCK_M, BLOCK_N) float32; 0 where the pair is hidden."""
    rows, columns = i0 + tl.arange(0, BLOCK_M), j0 + tl.arange(0, BLOCK_N)
    own, inside = rows < n_q, columns < n_k
    b_wide, g_wide, h_wide = tl.cast(tensor_b, tl.int64), tl.cast(g, tl.int64), tl.cast(h, tl.int64)
    q_base = q_ptr + (b_wide * q_b + h_wide * q_h + row0 * q_n) * STEP
    do_base = do_ptr + (b_wide * g_b + h_wide * g_h + row0 * g_n) * STEP
    k_base = k_ptr + (b_wide * k_b + g_wide * k_h + key0 * k_n) * STEP
    v_base = v_ptr + (b_wide * v_b + g_wide * v_h + key0 * v_n) * STEP
    q = load_tile(q_base, rows, q_n, q_d, size_d, own, True, D_PAD, EVEN, STEP, UNIT)
    do = load_tile(do_base, rows, g_n, g_d, size_dv, own, True, DV_PAD, EVEN_V, STEP, UNIT).to(q.dtype)
    k = load_tile(k_base, columns, k_n, k_d, size_d, inside, True, D_PAD, EVEN, STEP, UNIT)
    v = load_tile(v_base, columns, v_n, v_d, size_dv, inside, True, DV_PAD, EVEN_V, STEP, UNIT)
    line = (b_wide * heads + h) * pitch_of(seqlen_q, ALIGNED) + row0 + rows
    m = tl.load(m_ptr + line, mask=own, other=INF)
    low = tl.load(low_ptr + line, mask=own, other=0.0)
    delta = tl.load(delta_ptr + line, mask=own, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    i, j = rows[:, None], columns[None, :]
    q_pos, k_pos = i + q_offset, j + k_offset
    p, found = weights(
        s, m[:, None], low[:, None], scale, i, j, q_pos, k_pos, b, h, g, data, derive, True, True
    )
    visible = own[:, None] & inside[None, :] & (m != INF)[:, None]
    if HAS_MASK:
        visible = visible & keep(s, i, j, q_pos, k_pos, b, h, g, data)
    p = tl.where(visible, p, 0.0)
    if DROPOUT:
        kept = kept_tile(q_pos, j0 + k_offset, h_word, b_word, seed, threshold, BLOCK_M, BLOCK_N)
        dp = tl.where(kept, dp * drop_factor, 0.0)
    ds = p * (dp - delta[:, None])
    return contribution(p, ds, found[2 + SITE])


@triton.jit
def add_at(ptr, part, indices, t0, t1, t2, t3):
    """Atomic additions at a site's indices; t0 .. t3 are the leaf's strides."""
    strides = (t0, t1, t2, t3)
    at = tl.zeros(part.shape, tl.int64)
    for n in tl.static_range(len(indices)):
        at = at + indices[n].to(tl.int64) * strides[n]
    tl.atomic_add(ptr + at, part, mask=part != 0, sem="relaxed")


@triton.jit
def along_diagonals(part, BLOCK: tl.constexpr):
    """Sums of a square tile along its diagonals: column - row = 0 .. BLOCK - 1, and the same minus BLOCK."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    skewed = tl.gather(part, (column + row) % BLOCK, 1)
    above = column + row < BLOCK
    return tl.sum(tl.where(above, skewed, 0.0), 0), tl.sum(tl.where(above, 0.0, skewed), 0)


@triton.jit
def site_program(
    q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, target_ptr, seed_ptr, q_offset_ptr, k_offset_ptr,
    cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, t0, t1, t2, t3,
    batch, heads, group, seqlen_q, seqlen_k, row_tiles, key_tiles, leaf_batch, leaf_heads,
    q_offset, k_offset, h_offset, b_offset, size_d, size_dv, threshold, scale, drop_factor,
    data, derive, keep, classify, indices_of,
    MODE: tl.constexpr, SITE: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr,
    LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program: see the header. t0 .. t3: strides of the leaf's sums; of pairs those of batch, head, row, column."""
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    pid = tl.program_id(0)
    if MODE == "pairs":
        tile_j, tile_i = pid % key_tiles, pid // key_tiles % row_tiles
        leaf_unit = pid // key_tiles // row_tiles
        leaf_b, leaf_h = leaf_unit // leaf_heads, leaf_unit % leaf_heads
        i0, j0 = tile_i * BLOCK_M, tile_j * BLOCK_N
        i1, j1 = tl.minimum(i0 + BLOCK_M, seqlen_q) - 1, tl.minimum(j0 + BLOCK_N, seqlen_k) - 1
        first_b, last_b = tl.where(leaf_batch > 1, leaf_b, 0), tl.where(leaf_batch > 1, leaf_b + 1, batch)
        first_h, last_h = tl.where(leaf_heads > 1, leaf_h, 0), tl.where(leaf_heads > 1, leaf_h + 1, heads)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for b in range(first_b, last_b):
            q0 = position_offset(q_offset, q_offset_ptr, b, seqlen_k - seqlen_q, LAST)
            k0 = position_offset(k_offset, k_offset_ptr, b, 0, False)
            for h in range(first_h, last_h):
                g = h // group
                if classify(i0, i1, j0, j1, q0, k0, b, h, h, g, data) != 0:
                    total += share_of(
                        q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, q_b, q_h, q_n, q_d, k_b, k_h,
                        k_n, k_d,
                        v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, b, b, h, g, i0, j0, 0, seqlen_q, 0, seqlen_k, heads,
                        seqlen_q, q0, k0, size_d, size_dv, scale, seed, threshold, drop_factor, h + h_offset,
                        b + b_offset, data, derive, keep, SITE, HAS_MASK, DROPOUT, BLOCK_M, BLOCK_N, D_PAD, DV_PAD,
                        EVEN, EVEN_V, STEP, UNIT, PRECISION, ALIGNED)  # fmt: skip
        rows, columns = i0 + tl.arange(0, BLOCK_M), j0 + tl.arange(0, BLOCK_N)
        at = (leaf_b.to(tl.int64) * t0 + leaf_h.to(tl.int64) * t1
              + (rows.to(tl.int64) * t2)[:, None] + (columns.to(tl.int64) * t3)[None, :])  # fmt: skip
        inside = (rows < seqlen_q)[:, None] & (columns < seqlen_k)[None, :]
        tl.store(target_ptr + at, total.to(target_ptr.dtype.element_ty), mask=inside)
    else:
        lines = row_tiles if MODE == "scatter" else row_tiles + key_tiles - 1
        tile, unit = pid % lines, pid // lines
        if VARLEN:
            b, tile = find_sequence(cu_q_ptr, tile, batch, seqlen_q, BLOCK_M)
            h, tensor_b = unit, 0
            row0, n_q = sequence_length(cu_q_ptr, used_q_ptr, b, seqlen_q)
            key0, n_k = sequence_length(cu_k_ptr, used_k_ptr, b, seqlen_k)
        else:
            b, h, tensor_b = unit // heads, unit % heads, unit // heads
            row0, n_q, key0, n_k = 0, seqlen_q, 0, seqlen_k
        q0 = position_offset(q_offset, q_offset_ptr, b, n_k - n_q, LAST)
        k0 = position_offset(k_offset, k_offset_ptr, b, 0, False)
        g = h // group
        # A tile's row and key numbers are `step` apart on a diagonal; a row tile walks all keys.
        if MODE == "diagonal":
            apart = tile - (row_tiles - 1)
            first = tl.maximum(-apart, 0)
            last = tl.minimum(row_tiles, key_tiles - apart)
        else:
            apart, first = 0, 0
            last = tl.where(tile * BLOCK_M < n_q, tl.cdiv(n_k, BLOCK_N), 0)
        above = tl.zeros([BLOCK_N], tl.float32)
        below = tl.zeros([BLOCK_N], tl.float32)
        for t in range(first, last):
            if MODE == "diagonal":
                i0, j0 = t * BLOCK_M, (t + apart) * BLOCK_N
            else:
                i0, j0 = tile * BLOCK_M, t * BLOCK_N
            i1, j1 = tl.minimum(i0 + BLOCK_M, n_q) - 1, tl.minimum(j0 + BLOCK_N, n_k) - 1
            if classify(i0, i1, j0, j1, q0, k0, b, h, h, g, data) != 0:
                part = share_of(
                    q_ptr, k_ptr, v_ptr, do_ptr, m_ptr, low_ptr, delta_ptr, q_b, q_h, q_n, q_d, k_b, k_h, k_n,
                    k_d, v_b,
                    v_h, v_n, v_d, g_b, g_h, g_n, g_d, b, tensor_b, h, g, i0, j0, row0, n_q, key0, n_k, heads,
                    seqlen_q,
                    q0, k0, size_d, size_dv, scale, seed, threshold, drop_factor, h + h_offset, b + b_offset, data,
                    derive, keep, SITE, HAS_MASK, DROPOUT, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT,
                    PRECISION, ALIGNED)  # fmt: skip
                if MODE == "diagonal":
                    more_above, more_below = along_diagonals(part, BLOCK_N)
                    above += more_above
                    below += more_below
                else:
                    i = i0 + tl.arange(0, BLOCK_M)[:, None]
                    j = j0 + tl.arange(0, BLOCK_N)[None, :]
                    found = indices_of(part, i, j, i + q0, j + k0, b, h, g, data)
                    add_at(target_ptr, part, found, t0, t1, t2, t3)
        if MODE == "diagonal":
            place = (
                target_ptr + (tl.cast(unit, tl.int64) * lines + tile) * (2 * BLOCK_N) + tl.arange(0, BLOCK_N)
            )
            tl.store(place, above)
            tl.store(place + BLOCK_N, below)
