"""The append kernel: new keys and values into pools, keys and queries turned to their positions, in one launch.

Grid: x = tiles of tokens times heads: H_kv heads of k_new, H_kv of v_new, H of q. One program owns BLOCK_T tokens
of one head: it loads them, turns them (k, q), divides by the scale (pools of float8), and writes them where the
block table says. A token without a place in the pools is not written; positions are clamped to the tables.
Memory: BLOCK_T x D in registers, no shared memory but for pairs of neighbours.

Source: Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864; the meaning is `backends.protocol.Append`.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.words import maximum_float, minimum_float

LARGEST_FLOAT8 = tl.constexpr(448.0)
"""torch.finfo(torch.float8_e4m3fn).max; the conversion itself makes NaN of what is larger."""
SEARCH = tl.constexpr(64)


@triton.jit
def sequence_of(cu_ptr, token, batch, each, PACKED: tl.constexpr):
    """(sequence, place inside it, tokens of it) of tokens of the call: by the edges cu, else `each` to a sequence."""
    if PACKED:
        b = tl.zeros_like(token)
        for start in range(0, batch, SEARCH):
            n = start + tl.arange(0, SEARCH)
            edge = tl.load(cu_ptr + 1 + n, mask=n < batch, other=2**31 - 1)
            b += tl.sum((edge[None, :] <= token[:, None]).to(tl.int32), 1)
        b = tl.minimum(b, batch - 1)
        first = tl.load(cu_ptr + b).to(tl.int32)
        count = tl.load(cu_ptr + b + 1).to(tl.int32) - first
        place = token - first
    else:
        b, place = token // each, token % each
        count = each + tl.zeros_like(token)
    return b, place, count


@triton.jit
def turned(x, base, cos_ptr, sin_ptr, position, cos_n, sin_n, d, alive, HALF: tl.constexpr,
           NEIGHBOURS: tl.constexpr, D_PAD: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """x (BLOCK_T, D_PAD) turned in float32 and rounded to its type; base: pointers to its rows."""
    if NEIGHBOURS:
        pair = tl.arange(0, D_PAD // 2)
        a, b = tl.split(x.to(tl.float32).reshape(BLOCK_T, D_PAD // 2, 2))
        there = alive[:, None] & (pair < HALF)[None, :]
        c = tl.load(cos_ptr + (position * cos_n)[:, None] + pair[None, :], mask=there, other=1.0).to(
            tl.float32
        )
        s = tl.load(sin_ptr + (position * sin_n)[:, None] + pair[None, :], mask=there, other=0.0).to(
            tl.float32
        )
        result = tl.join(a * c - b * s, a * s + b * c).reshape(BLOCK_T, D_PAD)
        result = tl.where((d < 2 * HALF)[None, :], result, x.to(tl.float32))
    else:
        low, high = (d < HALF)[None, :], ((d >= HALF) & (d < 2 * HALF))[None, :]
        rows = alive[:, None]
        right = tl.load(base[:, None] + (d + HALF)[None, :], mask=rows & low, other=0.0).to(tl.float32)
        left = tl.load(base[:, None] + (d - HALF)[None, :], mask=rows & high, other=0.0).to(tl.float32)
        there = rows & (low | high)
        angle = (d % HALF)[None, :]
        c = tl.load(cos_ptr + (position * cos_n)[:, None] + angle, mask=there, other=1.0).to(tl.float32)
        s = tl.load(sin_ptr + (position * sin_n)[:, None] + angle, mask=there, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        result = tl.where(low, wide * c - right * s, left * s + wide * c)
        result = tl.where(low | high, result, wide)
    return result.to(x.dtype)


@triton.jit
def write_pool(
    x, pool_ptr, scale_ptr, page, slot, head, strides, scale_strides, d, inside, STEP: tl.constexpr
):
    """Rows x of one head into their pages, divided by their scales where the pool has some."""
    p_p, p_h, p_n = strides
    if scale_ptr is not None:
        s_p, s_h = scale_strides
        scale = tl.load(scale_ptr + page.to(tl.int64) * s_p + head * s_h)
        x = tl.div_rn(x.to(tl.float32), scale[:, None] + tl.zeros_like(x).to(tl.float32))
    if pool_ptr.dtype.element_ty == tl.float8e4nv:
        x = minimum_float(maximum_float(x.to(tl.float32), -LARGEST_FLOAT8), LARGEST_FLOAT8)
    at = page.to(tl.int64) * p_p + tl.cast(head, tl.int64) * p_h + slot.to(tl.int64) * p_n
    tl.store(pool_ptr + at[:, None] * STEP + d[None, :], x.to(pool_ptr.dtype.element_ty), mask=inside)


@triton.jit
def place_of_tokens(
    token, lengths_ptr, table_ptr, cu_new_ptr, table_b, batch, tokens, each, pages, page_size, capacity,
    PACKED: tl.constexpr,
):  # fmt: skip
    """(sequence, number inside the call, page, row of it, whether it has a place) of new tokens."""
    alive = token < tokens
    b, t, count = sequence_of(cu_new_ptr, token, batch, each, PACKED)
    b = tl.where(alive, b, 0)
    present = tl.load(lengths_ptr + b).to(tl.int32)
    place = present + t
    row = place // page_size
    kept = alive & (t >= 0) & (t < count) & (present >= 0) & (place < capacity)
    if table_ptr is not None:
        page = tl.load(table_ptr + b.to(tl.int64) * table_b + row, mask=kept, other=0).to(tl.int32)
    else:
        page = b
    kept = kept & (page >= 0) & (page < pages)
    return b, t, tl.where(kept, page, 0), place - row * page_size, kept


@triton.jit
def rows_of(ptr, b, token, t, strides, head, PACKED: tl.constexpr, STEP: tl.constexpr):
    """Pointers to the rows of one head: token t of sequence b, or, packed, of the whole."""
    s_b, s_h, s_n = strides
    if PACKED:
        at = token.to(tl.int64) * s_n
    else:
        at = b.to(tl.int64) * s_b + t.to(tl.int64) * s_n
    return ptr + (at + tl.cast(head, tl.int64) * s_h) * STEP


@triton.jit
def append_keys(
    places, token, head, k_new_ptr, k_ptr, cos_ptr, sin_ptr, at_k_ptr, first_ptr, lengths_ptr, k_scale_ptr, new_strides,
    strides, scale_strides, cos_n, sin_n, tokens, positions, size_d, PACKED: tl.constexpr, HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr, BLOCK_T: tl.constexpr, D_PAD: tl.constexpr, STEP: tl.constexpr, STEP_P: tl.constexpr,
):  # fmt: skip
    """New keys of one head, turned, into the pool."""
    b, t, page, slot, kept = places
    d = tl.arange(0, D_PAD)
    base = rows_of(k_new_ptr, b, token, t, new_strides, head, PACKED, STEP)
    inside = kept[:, None] & (d // STEP < size_d // STEP)[None, :]
    x = tl.load(base[:, None] + d[None, :], mask=inside, other=0.0)
    if HALF:
        if at_k_ptr is not None:
            position = tl.load(at_k_ptr + token, mask=token < tokens, other=0).to(tl.int32)
        elif first_ptr is not None:
            position = tl.load(first_ptr + b).to(tl.int32) + t
        else:
            position = tl.load(lengths_ptr + b).to(tl.int32) + t
        position = tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64)
        x = turned(
            x, base, cos_ptr, sin_ptr, position, cos_n, sin_n, d, kept, HALF, NEIGHBOURS, D_PAD, BLOCK_T
        )
    write_pool(x, k_ptr, k_scale_ptr, page, slot, head, strides, scale_strides, d, inside, STEP_P)


@triton.jit
def append_values(
    places, token, head, v_new_ptr, v_ptr, v_scale_ptr, new_strides, strides, scale_strides, size_dv,
    PACKED: tl.constexpr, DV_PAD: tl.constexpr, STEP: tl.constexpr, STEP_P: tl.constexpr,
):  # fmt: skip
    """New values of one head into the pool."""
    b, t, page, slot, kept = places
    d = tl.arange(0, DV_PAD)
    base = rows_of(v_new_ptr, b, token, t, new_strides, head, PACKED, STEP)
    inside = kept[:, None] & (d // STEP < size_dv // STEP)[None, :]
    x = tl.load(base[:, None] + d[None, :], mask=inside, other=0.0)
    write_pool(x, v_ptr, v_scale_ptr, page, slot, head, strides, scale_strides, d, inside, STEP_P)


@triton.jit
def turn_queries(
    token, head, q_ptr, q_out_ptr, lengths_ptr, cu_new_ptr, cu_q_ptr, cos_ptr, sin_ptr, at_q_ptr, first_ptr, strides,
    out_strides, cos_n, sin_n, batch, each, rows, rows_each, positions, size_d, PACKED: tl.constexpr,
    PACKED_Q: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK_T: tl.constexpr, D_PAD: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Queries of one head, turned, into fresh memory: the last one of a sequence stands where its last key does."""
    alive = token < rows
    d = tl.arange(0, D_PAD)
    b, i, count = sequence_of(cu_q_ptr, token, batch, rows_each, PACKED_Q)
    b = tl.where(alive, b, 0)
    if at_q_ptr is not None:
        position = tl.load(at_q_ptr + token, mask=alive, other=0).to(tl.int32)
    else:
        start = tl.load((first_ptr if first_ptr is not None else lengths_ptr) + b).to(tl.int32)
        if PACKED:
            added = tl.load(cu_new_ptr + b + 1).to(tl.int32) - tl.load(cu_new_ptr + b).to(tl.int32)
        else:
            added = each
        position = start + added - count + i
    position = tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64)
    base = rows_of(q_ptr, b, token, i, strides, head, PACKED_Q, STEP)
    inside = alive[:, None] & (d // STEP < size_d // STEP)[None, :]
    x = tl.load(base[:, None] + d[None, :], mask=inside, other=0.0)
    x = turned(x, base, cos_ptr, sin_ptr, position, cos_n, sin_n, d, alive, HALF, NEIGHBOURS, D_PAD, BLOCK_T)
    to = rows_of(q_out_ptr, b, token, i, out_strides, head, PACKED_Q, STEP)
    tl.store(to[:, None] + d[None, :], x, mask=inside)


@triton.jit
def append_program(
    k_new_ptr, v_new_ptr, k_ptr, v_ptr, q_ptr, q_out_ptr, lengths_ptr, table_ptr, cu_new_ptr, cu_q_ptr, cos_ptr,
    sin_ptr, at_q_ptr, at_k_ptr, first_ptr, k_scale_ptr, v_scale_ptr,
    kn_b, kn_h, kn_n, vn_b, vn_h, vn_n, q_b, q_h, q_n, o_b, o_h, o_n, k_p, k_h, k_n, v_p, v_h, v_n,
    table_b, cos_n, sin_n, ks_p, ks_h, vs_p, vs_h,
    batch, heads_kv, heads, tokens, each, rows, rows_each, pages, page_size, capacity, positions, size_d, size_dv,
    PACKED: tl.constexpr, PACKED_Q: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK_T: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, STEP: tl.constexpr, STEP_P: tl.constexpr,
):  # fmt: skip
    """One program of the append launch: see the header. Strides are in units of STEP and, of the pools, STEP_P."""
    lanes = 2 * heads_kv + heads
    lane, tile = tl.program_id(0) % lanes, tl.program_id(0) // lanes
    token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    if lane < 2 * heads_kv:
        places = place_of_tokens(
            token, lengths_ptr, table_ptr, cu_new_ptr, table_b, batch, tokens, each, pages, page_size, capacity, PACKED
        )  # fmt: skip
        if lane < heads_kv:
            append_keys(
                places, token, lane, k_new_ptr, k_ptr, cos_ptr, sin_ptr, at_k_ptr, first_ptr, lengths_ptr, k_scale_ptr,
                (kn_b, kn_h, kn_n), (k_p, k_h, k_n), (ks_p, ks_h), cos_n, sin_n, tokens, positions, size_d, PACKED,
                HALF, NEIGHBOURS, BLOCK_T, D_PAD, STEP, STEP_P,
            )  # fmt: skip
        else:
            append_values(
                places, token, lane - heads_kv, v_new_ptr, v_ptr, v_scale_ptr, (vn_b, vn_h, vn_n), (v_p, v_h, v_n),
                (vs_p, vs_h), size_dv, PACKED, DV_PAD, STEP, STEP_P,
            )  # fmt: skip
    elif q_ptr is not None:
        turn_queries(
            token, lane - 2 * heads_kv, q_ptr, q_out_ptr, lengths_ptr, cu_new_ptr, cu_q_ptr, cos_ptr, sin_ptr,
            at_q_ptr, first_ptr, (q_b, q_h, q_n), (o_b, o_h, o_n), cos_n, sin_n, batch, each, rows, rows_each,
            positions, size_d, PACKED, PACKED_Q, HALF, NEIGHBOURS, BLOCK_T, D_PAD, STEP,
        )  # fmt: skip
