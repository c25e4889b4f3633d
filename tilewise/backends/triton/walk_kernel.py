"""How a tile of rows walks its key tiles: runs of them, one after the other (see `forward_kernel`).

PARTIAL tiles fold the mask, FULL ones carry no mask work, EMPTY ones are jumped over. Which tile is what comes from
the mask's interval form, evaluated for CHUNK tiles at once, or from a table that `runs_kernel` made of it.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.philox import kept_tile
from tilewise.backends.triton.runs_words import piece_of
from tilewise.backends.triton.softmax_words import raised, rescaled, summed

CHUNK = tl.constexpr(128)
"""Key tiles classified at once."""


@triton.jit
def load_tile(ptr, rows, stride_n, stride_d, size_d, row_mask, MASKED: tl.constexpr, D_PAD: tl.constexpr,
              EVEN: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Rows of a (tokens, D) view as (len(rows), D_PAD); what lies outside is 0 and is not read.

    STEP divides D, so that the mask is one bit for each 16 bytes and rows are read by vectors.
    """
    d = tl.arange(0, D_PAD)
    columns = (d // STEP < size_d // STEP)[None, :]
    base = ptr + (rows.to(tl.int64) * stride_n)[:, None] * STEP
    if UNIT:
        pointers = base + d[None, :]
    else:
        pointers = base + (d.to(tl.int64) * stride_d)[None, :] * STEP
    if EVEN:
        if MASKED:
            tile = tl.load(pointers, mask=row_mask[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    elif MASKED:
        tile = tl.load(pointers, mask=row_mask[:, None] & columns, other=0.0)
    else:
        tile = tl.load(pointers, mask=columns, other=0.0)
    return tile


@triton.jit
def weigh(p, v, acc, visible, CAREFUL: tl.constexpr, PRECISION: tl.constexpr):
    """acc + p v. CAREFUL: an entry of v that is not finite makes NaN of the rows that see it, and of no other."""
    weights = p.to(v.dtype)
    if CAREFUL:
        finite = (v - v) == 0
        acc = tl.dot(weights, tl.where(finite, v, 0.0).to(v.dtype), acc, input_precision=PRECISION)
        seen = tl.dot(visible.to(v.dtype), (finite == 0).to(v.dtype), input_precision=PRECISION)
        acc = tl.where(seen > 0, float("nan"), acc)
    else:
        acc = tl.dot(weights, v, acc, input_precision=PRECISION)
    return acc


@triton.jit
def absorb_run(
    acc, m, l, q, first, last, inner, outer, tensors, rows, numbers, data, score, keep, holes, classify,  # noqa: E741
    MASKED: tl.constexpr, CAREFUL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_TERMS: tl.constexpr, FUSED: tl.constexpr,
    DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, PARTS: tl.constexpr, LAZY: tl.constexpr, ADDED: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """The state after the key tiles first .. last - 1. MASKED says which are PARTIAL, or cut by the end: "none", "all",
    or "outer", all but inner .. outer - 1. HOLES: holes of a mask go into the scores of every tile, beside `keep`."""
    k_ptr, v_ptr, k_n, k_d, v_n, v_d, size_d, size_dv, n_k, k_desc, v_desc, tensor_b, key0 = tensors
    i, q_pos, i0, i1, q_offset, k_offset, b, h, h0, h1, g = rows
    scale, seed, threshold, h_word, b_word = numbers
    for t in tl.range(first, last, num_stages=1 if CAREFUL else None):
        j0 = t * BLOCK_N
        columns = j0 + tl.arange(0, BLOCK_N)
        inside = columns < n_k
        if TMA:
            k = k_desc.load([tensor_b, g, key0 + j0, 0]).reshape(BLOCK_N, D_PAD)
        else:
            k = load_tile(k_ptr, columns, k_n, k_d, size_d, inside, MASKED == "all", D_PAD, EVEN, STEP, UNIT)
        if ADDED and not CAREFUL:
            # Before the product is begun: it is read, and waited for, while the last tile's values are multiplied.
            # To -0.0 anything is added as it is.
            nothing = tl.full([BLOCK_M, BLOCK_N], -(2**31), tl.int32).to(tl.float32, bitcast=True)
            added = score(
                nothing, i, columns[None, :], q_pos, columns[None, :] + k_offset, b, h, g, data + (i0, j0))  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        j = columns[None, :]
        k_pos = j + k_offset
        if ADDED and not CAREFUL:
            s = tl.fma(s, scale, added)
        else:
            if not FUSED:
                s = s * scale
            if HAS_TERMS:
                s = score(s, i, j, q_pos, k_pos, b, h, g, data + (i0, j0))
        if HOLES:
            row, column = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
            s = holes(s, i, j, q_pos, k_pos, b, h, g, (row, column, i0, j0, q_offset, k_offset), data)
        visible = inside[None, :]
        if MASKED == "outer":
            if (t < inner) | (t >= outer):
                s = tl.where(visible & keep(s, i, j, q_pos, k_pos, b, h, g, data), s, -float("inf"))
        elif MASKED == "all":
            if HAS_MASK:
                visible = visible & keep(s, i, j, q_pos, k_pos, b, h, g, data)
                # What surely no row of the tile may see is not read: padding may hold anything.
                inside = inside & (
                    classify(i0, i1, columns, columns, q_offset, k_offset, b, h0, h1, g, data) != 0
                )
            s = tl.where(visible, s, -float("inf"))
        m, p, alpha = raised(m, s, scale, FUSED, LAZY, PARTS, ADDED and not CAREFUL)
        if not PARTS:
            l = summed(l, alpha, p, False)  # noqa: E741
        weights = p
        if DROPOUT:
            kept = kept_tile(q_pos, j0 + k_offset, h_word, b_word, seed, threshold, BLOCK_M, BLOCK_N)
            weights = tl.where(kept, p, 0.0)
        if PARTS:
            weights = weights.to(v_desc.dtype)
        acc = rescaled(acc, alpha, LAZY)
        if TMA:
            v = v_desc.load([tensor_b, g, key0 + j0, 0]).reshape(BLOCK_N, DV_PAD)
        else:
            v = load_tile(
                v_ptr, columns, v_n, v_d, size_dv, inside, MASKED == "all", DV_PAD, EVEN_V, STEP, UNIT
            )
        visible = s != -float("inf")
        if DROPOUT:
            visible = visible & kept
        acc = weigh(weights, v, acc, visible, CAREFUL, PRECISION)
        if PARTS:
            l = summed(l, alpha, p, True)  # noqa: E741
    return acc, m, l


@triton.jit
def absorb_visible(
    acc, m, l, q, begin, end, tensors, rows, numbers, data, score, keep, holes, classify, classify_coarse,  # noqa: E741
    HAS_TERMS: tl.constexpr, FUSED: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr, LAZY: tl.constexpr,
    ADDED: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """The state after those of the key tiles begin .. end - 1 of which the mask shows something."""
    i, q_pos, i0, i1, q_offset, k_offset, b, h, h0, h1, g = rows
    n_k = tensors[8]
    chunk = begin
    while chunk < end:
        stop = tl.minimum(chunk + CHUNK, end)
        last_column = tl.minimum(stop * BLOCK_N, n_k) - 1
        live = classify_coarse(i0, i1, chunk * BLOCK_N, last_column, q_offset, k_offset, b, h0, h1, g, data)
        if live != 0:
            at = chunk
            t = chunk + tl.arange(0, CHUNK)
            high = tl.minimum(t * BLOCK_N + BLOCK_N, n_k) - 1
            kind = classify(i0, i1, t * BLOCK_N, high, q_offset, k_offset, b, h0, h1, g, data)
            kind = tl.where((t + 1) * BLOCK_N > n_k, tl.minimum(kind, 1), kind + tl.zeros_like(t))
            kind = tl.where(t < stop, kind, 0)
            while at < stop:
                first = tl.min(tl.where((t >= at) & (kind != 0), t, stop), 0)
                if TMA:
                    first, inner, outer, at = piece_of(kind, t, at, stop)
                    acc, m, l = absorb_run(  # noqa: E741
                        acc, m, l, q, first, at, inner, outer, tensors, rows, numbers, data, score, keep, holes,
                        classify, "outer", False, True, HAS_TERMS, FUSED, DROPOUT, BLOCK_M, BLOCK_N,
                        D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, PARTS, LAZY, ADDED, HOLES)  # fmt: skip
                else:
                    middle = tl.min(tl.where((t >= first) & (kind != 2), t, stop), 0)
                    at = tl.min(tl.where((t >= middle) & (kind != 1), t, stop), 0)
                    acc, m, l = absorb_run(  # noqa: E741
                        acc, m, l, q, first, middle, 0, 0, tensors, rows, numbers, data, score, keep, holes,
                        classify, "none", False, True, HAS_TERMS, FUSED, DROPOUT, BLOCK_M, BLOCK_N,
                        D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, PARTS, LAZY, ADDED, HOLES)  # fmt: skip
                    acc, m, l = absorb_run(  # noqa: E741
                        acc, m, l, q, middle, at, 0, 0, tensors, rows, numbers, data, score, keep, holes,
                        classify, "all", False, True, HAS_TERMS, FUSED, DROPOUT, BLOCK_M, BLOCK_N,
                        D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, PARTS, LAZY, ADDED, HOLES)  # fmt: skip
        chunk = stop
    return acc, m, l


@triton.jit
def absorb_found(
    acc, m, l, q, found, end, tensors, rows, numbers, data, score, keep, holes, classify,  # noqa: E741
    HAS_TERMS: tl.constexpr, FUSED: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, STEP: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr, LAZY: tl.constexpr,
    ADDED: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """The state after the visible ones of the key tiles 0 .. end - 1, which `runs_kernel` found: asked about again only
    where they are not PARTIAL, FULL, PARTIAL."""
    i, q_pos, i0, i1, q_offset, k_offset, b, h, h0, h1, g = rows
    n_k = tensors[8]
    first, inner, outer, past, simple = found
    at = first
    last = tl.where(end > 0, past, first)
    while at < last:
        if simple == 0:
            stop = tl.minimum(at + CHUNK, last)
            t = at + tl.arange(0, CHUNK)
            high = tl.minimum(t * BLOCK_N + BLOCK_N, n_k) - 1
            kind = classify(i0, i1, t * BLOCK_N, high, q_offset, k_offset, b, h0, h1, g, data)
            kind = tl.where((t + 1) * BLOCK_N > n_k, tl.minimum(kind, 1), kind + tl.zeros_like(t))
            first, inner, outer, past = piece_of(tl.where(t < stop, kind, 0), t, at, stop)
        acc, m, l = absorb_run(  # noqa: E741
            acc, m, l, q, first, past, inner, outer, tensors, rows, numbers, data, score, keep, holes,
            classify, "outer", False, True, HAS_TERMS, FUSED, DROPOUT, BLOCK_M, BLOCK_N,
            D_PAD, DV_PAD, EVEN, EVEN_V, STEP, UNIT, PRECISION, TMA, PARTS, LAZY, ADDED, HOLES)  # fmt: skip
        at = past
    return acc, m, l
