"""How a program takes keys in: tiles of a cache, folded into the state (acc, m, l) of a tile of rows.

Two forms. `absorb_keys`: all warps share a tile of keys and one state, acc (BLOCK_M, DV), m and l (BLOCK_M).
`absorb_by_warps`, for few rows: each warp has keys and a state of its own, acc (WARPS, BLOCK_M, DV), m and l (WARPS,
BLOCK_M), so that no warp waits for another one's maximum; `join_warps` merges them at the end.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.forward_kernel import weigh
from tilewise.backends.triton.pages import page_numbers, page_rows
from tilewise.backends.triton.words import LOG2E


@triton.jit
def load_rows(base, at, d, columns, inside, EVEN: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr):
    """Rows of k or v at offsets `at`, in units of STEP elements; what lies outside is 0 and is not read."""
    mask = inside[:, None]
    if not EVEN:
        mask = mask & columns[None, :]
    return tl.load(base + at[:, None] * STEP + d[None, :], mask=mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def scales_of(ptr, page, page_stride, g, head_stride, MODE: tl.constexpr):
    """Scales of stored numbers: 1.0, one of the head ("head"), or those of the pages of a tile's columns ("page")."""
    if MODE == "page":
        found = tl.load(ptr + page.to(tl.int64) * page_stride + g * head_stride)
    elif MODE == "head":
        found = tl.load(ptr + g * head_stride)
    else:
        found = 1.0
    return found


@triton.jit
def narrowed(q):
    """(q in float16, powers of two by which its rows were divided): what is stored in float8 becomes float16 by one
    instruction, and bfloat16 by four. Division by a row's own power of two keeps every digit of bfloat16."""
    wide = q.to(tl.float32)
    top = tl.max(tl.abs(wide), 1)
    bits = top.to(tl.int32, bitcast=True) & 0x7F800000
    # 0, subnormal, infinite and NaN rows stay as they are.
    power = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, bits).to(tl.float32, bitcast=True)
    return (wide / power[:, None]).to(tl.float16), power


@triton.jit
def absorb_keys(
    acc, m, l, q, first, last, inner, outer, tensors, pool, scaling, rows, data, score, keep, classify,  # noqa: E741
    FOLDED: tl.constexpr, CAREFUL: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr,
    PAGING: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the key tiles first .. last - 1. FOLDED says into which the mask is folded: "none", "all", or
    "outer", all but inner .. outer - 1."""
    k_base, v_base, k_p, k_n, v_p, v_n, size_d, size_dv, n_k, pad = tensors
    i, q_pos, i0, i1, q_offset, k_offset, b, h, h0, h1, g = rows
    scale, k_scale_ptr, v_scale_ptr, ks_p, ks_h, vs_p, vs_h, power, q_ptr = scaling
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    n = tl.arange(0, BLOCK_N)
    VECTOR: tl.constexpr = PAGING == "shift" or PAGING == "divide"
    # Weights times the scales of pages may be too small for float16.
    NARROWED: tl.constexpr = q_ptr.dtype.element_ty != q.dtype
    WIDE: tl.constexpr = tl.bfloat16 if NARROWED and SCALES == "page" else q.dtype
    numbers = page_numbers(first * BLOCK_N, first * BLOCK_N + n, n_k, pool, PAGING)
    for t in tl.range(first, last, num_stages=1 if CAREFUL else None):
        columns = t * BLOCK_N + n
        page, slot, owned = page_rows(columns, numbers, pool, PAGING)
        if PAGING != "whole":
            # One tile ahead, so that no load waits for the table.
            numbers = page_numbers((t + 1) * BLOCK_N, columns + BLOCK_N, n_k, pool, PAGING)
        inside = (columns < n_k) & (columns >= pad) & owned
        k_at = page.to(tl.int64) * k_p + slot.to(tl.int64) * k_n
        k = load_rows(k_base, k_at, d, d // STEP < size_d // STEP, inside, EVEN, STEP, EVICT)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        j = columns[None, :]
        k_pos = j + k_offset
        if not FUSED:
            stored = scales_of(k_scale_ptr, page, ks_p, g, ks_h, SCALES)
            s = s * (stored * scale)[None, :] if SCALES == "page" and VECTOR else s * (stored * scale)
        if NARROWED:
            s = s * power[:, None]
        if HAS_TERMS:
            s = score(s, i, j, q_pos, k_pos, b, h, g, data)
        visible = inside[None, :]
        if FOLDED == "all":
            visible = visible & keep(s, i, j, q_pos, k_pos, b, h, g, data)
            # What surely no row of the tile may see is not read: padding may hold anything.
            inside = inside & (
                classify(i0, i1, columns, columns, q_offset, k_offset, b, h0, h1, g, data) != 0
            )
        s = tl.where(visible, s, -float("inf"))
        if FOLDED == "outer":
            if (t < inner) | (t >= outer):
                s = tl.where(keep(s, i, j, q_pos, k_pos, b, h, g, data), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen no key has m = -inf: subtract 0 instead, exp2(-inf) is the 0 it should be.
        pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        step = scale * LOG2E if FUSED else LOG2E
        if FUSED:
            p = tl.exp2(tl.fma(s, step, (-pivot * step)[:, None]))
        else:
            p = tl.exp2((s - pivot[:, None]) * step)
        alpha = tl.exp2((m - pivot) * step)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        acc = acc * alpha[:, None]
        visible = s != -float("inf")
        v_at = page.to(tl.int64) * v_p + slot.to(tl.int64) * v_n
        v = load_rows(v_base, v_at, dv, dv // STEP < size_dv // STEP, inside, EVEN_V, STEP, EVICT)
        if SCALES == "page":
            stored = scales_of(v_scale_ptr, page, vs_p, g, vs_h, SCALES)
            p = p * stored[None, :] if VECTOR else p * stored
        acc = weigh(p, v.to(WIDE), acc, visible, CAREFUL, PRECISION)
        m = m_new
    return acc, m, l


@triton.jit
def absorb_by_warps(
    acc, m, l, q, first, last, inner, outer, tensors, pool, scaling, rows, data, score, keep, classify,  # noqa: E741
    FOLDED: tl.constexpr, CAREFUL: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr,
    PAGING: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`absorb_keys` with a state for each warp: products are batches over the warps, (WARPS, BLOCK_M, keys of one)."""
    k_base, v_base, k_p, k_n, v_p, v_n, size_d, size_dv, n_k, pad = tensors
    i, q_pos, i0, i1, q_offset, k_offset, b, h, h0, h1, g = rows
    scale, k_scale_ptr, v_scale_ptr, ks_p, ks_h, vs_p, vs_h, power, q_ptr = scaling
    EACH: tl.constexpr = BLOCK_N // WARPS
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    n = tl.arange(0, WARPS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    VECTOR: tl.constexpr = PAGING == "shift" or PAGING == "divide"
    # Weights times the scales of pages may be too small for float16.
    NARROWED: tl.constexpr = q_ptr.dtype.element_ty != q.dtype
    WIDE: tl.constexpr = tl.bfloat16 if NARROWED and SCALES == "page" else q.dtype
    numbers = page_numbers(first * BLOCK_N, first * BLOCK_N + n, n_k, pool, PAGING)
    for t in tl.range(first, last, num_stages=1 if CAREFUL else None):
        columns = t * BLOCK_N + n
        page, slot, owned = page_rows(columns, numbers, pool, PAGING)
        if PAGING != "whole":
            # One tile ahead, so that no load waits for the table.
            numbers = page_numbers((t + 1) * BLOCK_N, columns + BLOCK_N, n_k, pool, PAGING)
        inside = (columns < n_k) & (columns >= pad) & owned
        mask = inside[:, :, None]
        if not EVEN:
            mask = mask & (d // STEP < size_d // STEP)[None, None, :]
        k_at = page.to(tl.int64) * k_p + slot.to(tl.int64) * k_n
        k = tl.load(
            k_base + k_at[:, :, None] * STEP + d[None, None, :], mask=mask, other=0.0, eviction_policy=EVICT
        )
        s = tl.dot(q, tl.trans(k.to(q.dtype), 0, 2, 1), input_precision=PRECISION)
        j = columns[:, None, :]
        k_pos = j + k_offset
        if not FUSED:
            stored = scales_of(k_scale_ptr, page, ks_p, g, ks_h, SCALES)
            s = s * (stored * scale)[:, None, :] if SCALES == "page" and VECTOR else s * (stored * scale)
        if NARROWED:
            s = s * power[None, :, None]
        if HAS_TERMS:
            s = score(s, i, j, q_pos, k_pos, b, h, g, data)
        visible = inside[:, None, :]
        if FOLDED == "all":
            visible = visible & keep(s, i, j, q_pos, k_pos, b, h, g, data)
            # What surely no row of the tile may see is not read: padding may hold anything.
            inside = inside & (
                classify(i0, i1, columns, columns, q_offset, k_offset, b, h0, h1, g, data) != 0
            )
        s = tl.where(visible, s, -float("inf"))
        if FOLDED == "outer":
            if (t < inner) | (t >= outer):
                s = tl.where(keep(s, i, j, q_pos, k_pos, b, h, g, data), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 2))
        # A row that has seen no key has m = -inf: subtract 0 instead, exp2(-inf) is the 0 it should be.
        pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        step = scale * LOG2E if FUSED else LOG2E
        if FUSED:
            p = tl.exp2(tl.fma(s, step, (-pivot * step)[:, :, None]))
        else:
            p = tl.exp2((s - pivot[:, :, None]) * step)
        alpha = tl.exp2((m - pivot) * step)
        l = l * alpha + tl.sum(p, 2)  # noqa: E741
        acc = acc * alpha[:, :, None]
        visible = s != -float("inf")
        mask = inside[:, :, None]
        if not EVEN_V:
            mask = mask & (dv // STEP < size_dv // STEP)[None, None, :]
        v_at = page.to(tl.int64) * v_p + slot.to(tl.int64) * v_n
        v = tl.load(
            v_base + v_at[:, :, None] * STEP + dv[None, None, :], mask=mask, other=0.0, eviction_policy=EVICT
        )
        if SCALES == "page":
            stored = scales_of(v_scale_ptr, page, vs_p, g, vs_h, SCALES)
            p = p * stored[:, None, :] if VECTOR else p * stored
        acc = weigh(p, v.to(WIDE), acc, visible, CAREFUL, PRECISION)
        m = m_new
    return acc, m, l


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, DV_PAD: tl.constexpr, WARPS: tl.constexpr):
    """(acc, m, l) before the first key."""
    if WARPS > 1:
        m = tl.full([WARPS, BLOCK_M], -float("inf"), tl.float32)
        l = tl.zeros([WARPS, BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([WARPS, BLOCK_M, DV_PAD], tl.float32)
    else:
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    return acc, m, l


@triton.jit
def absorb(
    acc, m, l, q, first, last, inner, outer, tensors, pool, scaling, rows, data, score, keep, classify,  # noqa: E741
    FOLDED: tl.constexpr, CAREFUL: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr,
    PAGING: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the key tiles first .. last - 1, of all warps or of each."""
    if WARPS > 1:
        acc, m, l = absorb_by_warps(  # noqa: E741
            acc, m, l, q, first, last, inner, outer, tensors, pool, scaling, rows, data, score, keep, classify,
            FOLDED, CAREFUL, HAS_TERMS, FUSED, PAGING, SCALES, BLOCK_N, WARPS, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, EVICT,
            PRECISION)  # fmt: skip
    else:
        acc, m, l = absorb_keys(  # noqa: E741
            acc, m, l, q, first, last, inner, outer, tensors, pool, scaling, rows, data, score, keep, classify,
            FOLDED, CAREFUL, HAS_TERMS, FUSED, PAGING, SCALES, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, EVICT,
            PRECISION)  # fmt: skip
    return acc, m, l


@triton.jit
def join_warps(acc, m, l):  # noqa: E741
    """The state of all warps, from (WARPS, BLOCK_M, DV), m in powers of two."""
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == -float("inf"), 0.0, top)[None, :])
    return tl.sum(acc * weight[:, :, None], 0), top, tl.sum(l * weight, 0)
