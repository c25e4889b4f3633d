"""How a program takes keys in: tiles of a cache, folded into the state (acc, m, l) of a tile of rows.

Two forms. `absorb_keys`: all warps share a tile of keys and one state, acc (BLOCK_M, DV), m and l (BLOCK_M).
`absorb_by_warps`, for few rows: each warp has keys and a state of its own, acc (WARPS, BLOCK_M, DV), m and l (WARPS,
BLOCK_M), so that no warp waits for another one's maximum; `join_warps` merges them at the end.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.compile import interpreting
from tilewise.backends.triton.forward_kernel import weigh
from tilewise.backends.triton.pages import entries_of, page_numbers, page_rows, rows_of
from tilewise.backends.triton.words import LOG2E

INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def load_rows(base, at, d, columns, inside, EVEN: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr):
    """Rows of k or v at offsets `at`, in units of STEP elements; what lies outside is 0 and is not read."""
    mask = inside[:, None]
    if not EVEN:
        mask = mask & columns[None, :]
    return tl.load(
        base + at[:, None].to(tl.int64) * STEP + d[None, :], mask=mask, other=0.0, eviction_policy=EVICT
    )


@triton.jit
def row_offsets(page, slot, page_stride, row_stride):
    """Offsets of rows of a pool, in units of STEP; strides of 32 bits say that no such offset needs more."""
    if row_stride.dtype == tl.int32:
        found = page * page_stride + slot * row_stride
    else:
        found = page.to(tl.int64) * page_stride + slot.to(tl.int64) * row_stride
    return found


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
def quarters(acc, LEAD: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns n, n + 1, n + 2, n + 3 of every four of acc (LEAD..., COLUMNS), each (LEAD..., COLUMNS / 4)."""
    even, odd = tl.split(tl.reshape(acc, LEAD + [COLUMNS // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def whole(first, second, third, fourth, LEAD: tl.constexpr, COLUMNS: tl.constexpr):
    """What `quarters` took apart."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), LEAD + [COLUMNS])


@triton.jit
def widened(words):
    """The four float8_e4m3fn numbers of each word, as float16; those of two keys by one instruction."""
    if INTERPRETED:
        first = words.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (words >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        third = (words >> 16).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        fourth = (words >> 24).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            .reg .b16 a, b, c, d;
            prmt.b32 low, $4, $5, 0x5140;
            prmt.b32 high, $4, $5, 0x7362;
            mov.b32 {a, b}, low;
            mov.b32 {c, d}, high;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            cvt.rn.f16x2.e4m3x2 $2, c;
            cvt.rn.f16x2.e4m3x2 $3, d;
            }
            """,
            "=r,=r,=r,=r,r,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second, third, fourth


@triton.jit
def absorb_keys(
    acc, m, l, q, first, last, inner, outer, tensors, pool, scaling, rows, data, score, keep, classify,  # noqa: E741
    FOLDED: tl.constexpr, CAREFUL: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr,
    PAGING: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr,
    PRECISION: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The state after the key tiles first .. last - 1. FOLDED says into which the mask is folded: "none", "all", or
    "outer", all but inner .. outer - 1."""
    k_base, v_base, k_p, k_n, v_p, v_n, size_d, size_dv, n_k, pad, pad_ptr, most = tensors
    i, q_pos, i0, i1, q_offset, k_offset, b, h, h0, h1, g = rows
    scale, k_scale_ptr, v_scale_ptr, ks_p, ks_h, vs_p, vs_h, power, q_ptr = scaling
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    n = tl.arange(0, BLOCK_N)
    VECTOR: tl.constexpr = PAGING != "whole" and PAGING != "tile"
    SIZED: tl.constexpr = PAGING == 16 or PAGING == -16 or PAGING == 32 or PAGING == 64
    GROUPS: tl.constexpr = SIZED and BLOCK_N % PAGING == 0
    # Weights times the scales of pages may be too small for float16.
    NARROWED: tl.constexpr = q_ptr.dtype.element_ty != q.dtype
    WIDE: tl.constexpr = tl.bfloat16 if NARROWED and SCALES == "page" else q.dtype
    if WORDS:
        # Of four neighbouring numbers of v the first ones, the second ones, ...
        acc0, acc1, acc2, acc3 = quarters(acc, [acc.shape[0]], DV_PAD)
        dw = tl.arange(0, DV_PAD // 4)
    if GROUPS:
        e0, e1, e2, e3, e4, e5, e6, e7 = entries_of(first, most, pool, PAGING, BLOCK_N)
    else:
        numbers = page_numbers(first * BLOCK_N, first * BLOCK_N + n, most, pool, PAGING, BLOCK_N)
    for t in tl.range(first, last, num_stages=1 if CAREFUL else None):
        columns = t * BLOCK_N + n
        # Entries are read a tile ahead, so that no load waits for the table.
        if GROUPS:
            page, slot, owned = rows_of(n, (e0, e1, e2, e3, e4, e5, e6, e7), pool, PAGING, BLOCK_N)
            e0, e1, e2, e3, e4, e5, e6, e7 = entries_of(t + 1, most, pool, PAGING, BLOCK_N)
        else:
            page, slot, owned = page_rows(t * BLOCK_N, columns, numbers, pool, PAGING)
            if PAGING != "whole":
                numbers = page_numbers((t + 1) * BLOCK_N, columns + BLOCK_N, most, pool, PAGING, BLOCK_N)
        inside = columns < n_k
        if pad_ptr is not None:
            inside = inside & (columns >= pad)
        if PAGING != "whole":  # the one page was looked at before
            inside = inside & owned
        k_at = row_offsets(page, slot, k_p, k_n)
        k = load_rows(k_base, k_at, d, d // STEP < size_d // STEP, inside, EVEN, STEP, EVICT)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        j = columns[None, :]
        k_pos = j + k_offset
        if not FUSED:
            stored = scales_of(k_scale_ptr, page, ks_p, g, ks_h, SCALES)
            if SCALES == "page" and VECTOR:
                s = s * (stored * scale)[None, :]
                s = s * power[:, None] if NARROWED else s
            elif NARROWED:
                s = s * (power * (stored * scale))[:, None]
            else:
                s = s * (stored * scale)
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
        visible = s != -float("inf")
        v_at = k_at if v_n is None else row_offsets(page, slot, v_p, v_n)
        if SCALES == "page":
            stored = scales_of(v_scale_ptr, page, vs_p, g, vs_h, SCALES)
            p = p * stored[None, :] if VECTOR else p * stored
        if WORDS:
            v_words = v_base.to(tl.pointer_type(tl.int32))
            words = load_rows(v_words, v_at, dw, dw // 4 < size_dv // STEP, inside, EVEN_V, STEP // 4, EVICT)
            v0, v1, v2, v3 = widened(words)
            acc0 = weigh(p, v0.to(WIDE), acc0 * alpha[:, None], visible, CAREFUL, PRECISION)
            acc1 = weigh(p, v1.to(WIDE), acc1 * alpha[:, None], visible, CAREFUL, PRECISION)
            acc2 = weigh(p, v2.to(WIDE), acc2 * alpha[:, None], visible, CAREFUL, PRECISION)
            acc3 = weigh(p, v3.to(WIDE), acc3 * alpha[:, None], visible, CAREFUL, PRECISION)
        else:
            acc = acc * alpha[:, None]
            v = load_rows(v_base, v_at, dv, dv // STEP < size_dv // STEP, inside, EVEN_V, STEP, EVICT)
            acc = weigh(p, v.to(WIDE), acc, visible, CAREFUL, PRECISION)
        m = m_new
    if WORDS:
        acc = whole(acc0, acc1, acc2, acc3, [acc.shape[0]], DV_PAD)
    return acc, m, l


@triton.jit
def absorb_by_warps(
    acc, m, l, q, first, last, inner, outer, tensors, pool, scaling, rows, data, score, keep, classify,  # noqa: E741
    FOLDED: tl.constexpr, CAREFUL: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr,
    PAGING: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, EVICT: tl.constexpr,
    PRECISION: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """`absorb_keys` with a state for each warp: products are batches over the warps, (WARPS, BLOCK_M, keys of one)."""
    k_base, v_base, k_p, k_n, v_p, v_n, size_d, size_dv, n_k, pad, pad_ptr, most = tensors
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
    if WORDS:
        acc0, acc1, acc2, acc3 = quarters(acc, [acc.shape[0], acc.shape[1]], DV_PAD)
        dw = tl.arange(0, DV_PAD // 4)
    numbers = page_numbers(first * BLOCK_N, first * BLOCK_N + n, most, pool, PAGING, BLOCK_N)
    for t in tl.range(first, last, num_stages=1 if CAREFUL else None):
        columns = t * BLOCK_N + n
        page, slot, owned = page_rows(t * BLOCK_N, columns, numbers, pool, PAGING)
        if PAGING != "whole":
            # One tile ahead, so that no load waits for the table.
            numbers = page_numbers((t + 1) * BLOCK_N, columns + BLOCK_N, most, pool, PAGING, BLOCK_N)
        inside = columns < n_k
        if pad_ptr is not None:
            inside = inside & (columns >= pad)
        if PAGING != "whole":  # the one page was looked at before
            inside = inside & owned
        k_at = row_offsets(page, slot, k_p, k_n)
        mask = inside[:, :, None]
        if not EVEN:
            mask = mask & (d // STEP < size_d // STEP)[None, None, :]
        k = tl.load(
            k_base + k_at[:, :, None].to(tl.int64) * STEP + d[None, None, :], mask=mask, other=0.0,
            eviction_policy=EVICT,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k.to(q.dtype), 0, 2, 1), input_precision=PRECISION)
        j = columns[:, None, :]
        k_pos = j + k_offset
        if not FUSED:
            stored = scales_of(k_scale_ptr, page, ks_p, g, ks_h, SCALES)
            if SCALES == "page" and VECTOR:
                s = s * (stored * scale)[:, None, :]
                s = s * power[None, :, None] if NARROWED else s
            elif NARROWED:
                s = s * (power * (stored * scale))[None, :, None]
            else:
                s = s * (stored * scale)
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
        visible = s != -float("inf")
        v_at = k_at if v_n is None else row_offsets(page, slot, v_p, v_n)
        if SCALES == "page":
            stored = scales_of(v_scale_ptr, page, vs_p, g, vs_h, SCALES)
            p = p * stored[:, None, :] if VECTOR else p * stored
        mask = inside[:, :, None]
        if WORDS:
            if not EVEN_V:
                mask = mask & (dw // 4 < size_dv // STEP)[None, None, :]
            words = tl.load(
                v_base.to(tl.pointer_type(tl.int32)) + v_at[:, :, None].to(tl.int64) * (STEP // 4) + dw[None, None, :],
                mask=mask, other=0, eviction_policy=EVICT,
            )  # fmt: skip
            v0, v1, v2, v3 = widened(words)
            acc0 = weigh(p, v0.to(WIDE), acc0 * alpha[:, :, None], visible, CAREFUL, PRECISION)
            acc1 = weigh(p, v1.to(WIDE), acc1 * alpha[:, :, None], visible, CAREFUL, PRECISION)
            acc2 = weigh(p, v2.to(WIDE), acc2 * alpha[:, :, None], visible, CAREFUL, PRECISION)
            acc3 = weigh(p, v3.to(WIDE), acc3 * alpha[:, :, None], visible, CAREFUL, PRECISION)
        else:
            if not EVEN_V:
                mask = mask & (dv // STEP < size_dv // STEP)[None, None, :]
            v_rows = v_base + v_at[:, :, None].to(tl.int64) * STEP + dv[None, None, :]
            v = tl.load(v_rows, mask=mask, other=0.0, eviction_policy=EVICT)
            acc = weigh(p, v.to(WIDE), acc * alpha[:, :, None], visible, CAREFUL, PRECISION)
        m = m_new
    if WORDS:
        acc = whole(acc0, acc1, acc2, acc3, [acc.shape[0], acc.shape[1]], DV_PAD)
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
    element: tl.constexpr = tensors[1].dtype.element_ty
    # Products want neighbouring keys of v side by side. Of what is stored in bytes, words are read and taken apart.
    WORDS: tl.constexpr = element == tl.float8e4nv and STEP == 16 and DV_PAD >= 64 and not CAREFUL
    if WARPS > 1:
        acc, m, l = absorb_by_warps(  # noqa: E741
            acc, m, l, q, first, last, inner, outer, tensors, pool, scaling, rows, data, score, keep, classify,
            FOLDED, CAREFUL, HAS_TERMS, FUSED, PAGING, SCALES, BLOCK_N, WARPS, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, EVICT,
            PRECISION, WORDS)  # fmt: skip
    else:
        acc, m, l = absorb_keys(  # noqa: E741
            acc, m, l, q, first, last, inner, outer, tensors, pool, scaling, rows, data, score, keep, classify,
            FOLDED, CAREFUL, HAS_TERMS, FUSED, PAGING, SCALES, BLOCK_N, D_PAD, DV_PAD, EVEN, EVEN_V, STEP, EVICT,
            PRECISION, WORDS)  # fmt: skip
    return acc, m, l


@triton.jit
def join_warps(acc, m, l):  # noqa: E741
    """The state of all warps, from (WARPS, BLOCK_M, DV), m in powers of two."""
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == -float("inf"), 0.0, top)[None, :])
    return tl.sum(acc * weight[:, :, None], 0), top, tl.sum(l * weight, 0)
