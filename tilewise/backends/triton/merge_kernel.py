"""How the results of splits of the keys become one: by the last program of a unit, or by a launch after it.

State of a result: its unnormalised output, float32, its maximum m in powers of two and its sum of weights l. Results
are added in their order, so bits do not depend on which was there first; the sink enters at the end, once.

Source: the monoid of `tilewise.state`; Dao et al., Flash-Decoding, 2023.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.forward_kernel import absorb_sink
from tilewise.backends.triton.words import LN2, LOG2E

LINES = tl.constexpr(32)
"""Splits whose maxima are read at once."""


@triton.jit
def merge_parts(part_ptr, part_lse_ptr, first, step, live, r, ROWS: tl.constexpr, COUNT: tl.constexpr,
                DV_PAD: tl.constexpr, MERGED: tl.constexpr):  # fmt: skip
    """(acc, m, l) of COUNT rows r from `live` results, in their order, MERGED of them loaded and added at once.

    Result n stands in block first + n * step of ROWS lines.
    """
    n = tl.arange(0, MERGED)
    # The first loads of everything are under way together.
    parts, parts_m, parts_l = load_parts(part_ptr, part_lse_ptr, first, step, live, n, r, ROWS, DV_PAD)
    top = tl.full([COUNT], -float("inf"), tl.float32)
    for start in range(0, live, LINES):
        found = start + tl.arange(0, LINES)
        line = line_of(found, first, step, ROWS)[:, None] + r[None, :]
        part_m = tl.load(
            part_lse_ptr + 2 * line, mask=(found < live)[:, None] & (r >= 0)[None, :], other=-float("inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        top = tl.maximum(top, tl.max(part_m, 0))
    pivot = tl.where(top == -float("inf"), 0.0, top)
    l = tl.zeros([COUNT], tl.float32)  # noqa: E741
    acc = tl.zeros([COUNT, DV_PAD], tl.float32)
    for start in range(0, live, MERGED):
        weight = tl.exp2(parts_m - pivot[None, :])
        l += tl.sum(parts_l * weight, 0)  # noqa: E741
        acc += tl.sum(parts * weight[:, :, None], 0)
        parts, parts_m, parts_l = load_parts(
            part_ptr, part_lse_ptr, first, step, live, start + MERGED + n, r, ROWS, DV_PAD
        )
    return acc, top, l


@triton.jit
def line_of(n, first, step, ROWS: tl.constexpr):
    """Where the lines of result n begin."""
    return (first + n.to(tl.int64) * step) * ROWS


@triton.jit
def load_parts(part_ptr, part_lse_ptr, first, step, live, n, r, ROWS: tl.constexpr, DV_PAD: tl.constexpr):
    """(outputs, m, l) of results n, (N, rows, DV) and (N, rows); from `live` on nothing is read."""
    line = line_of(n, first, step, ROWS)[:, None] + r[None, :]
    there = (n < live)[:, None] & (r >= 0)[None, :]
    m = tl.load(part_lse_ptr + 2 * line, mask=there, other=-float("inf"), cache_modifier=".cg")
    l = tl.load(part_lse_ptr + 2 * line + 1, mask=there, other=0.0, cache_modifier=".cg")  # noqa: E741
    d = tl.arange(0, DV_PAD)
    at = part_ptr + line[:, :, None] * DV_PAD + d[None, None, :]
    return tl.load(at, mask=there[:, :, None], other=0.0, cache_modifier=".cg"), m, l


@triton.jit
def merge_row(part_ptr, part_lse_ptr, first, step, splits, live, DV_PAD: tl.constexpr, MERGED: tl.constexpr,
              ONCE: tl.constexpr):  # fmt: skip
    """(acc, m, l) of one row from `live` results, in their order, MERGED of them loaded and added at once.

    Result n stands in line first + n * step; there is room for `splits` of them. ONCE: that is all of them. One warp
    does it, without shared memory: a launch of a few instructions is over soonest.
    """
    n = tl.arange(0, MERGED)
    # All loads are under way together, before it is known how many results there are.
    parts, parts_m, parts_l = load_row(part_ptr, part_lse_ptr, first, step, splits, live, n, DV_PAD)
    if ONCE:
        top = tl.max(parts_m, 0)
        weight = tl.exp2(parts_m - tl.where(top == -float("inf"), 0.0, top))
        l = tl.sum(parts_l * weight, 0)  # noqa: E741
        acc = tl.sum(parts * weight[:, None], 0)
    else:
        top = tl.max(parts_m, 0)
        live = tl.minimum(live, splits)
        for start in range(MERGED, live, MERGED):
            at = first + (start + n).to(tl.int64) * step
            part_m = tl.load(
                part_lse_ptr + 2 * at, mask=start + n < live, other=-float("inf"), cache_modifier=".cg"
            )
            top = tl.maximum(top, tl.max(part_m, 0))
        pivot = tl.where(top == -float("inf"), 0.0, top)
        l = 0.0  # noqa: E741
        acc = tl.zeros([DV_PAD], tl.float32)
        for start in range(0, live, MERGED):
            weight = tl.exp2(parts_m - pivot)
            l += tl.sum(parts_l * weight, 0)  # noqa: E741
            acc += tl.sum(parts * weight[:, None], 0)
            parts, parts_m, parts_l = load_row(
                part_ptr, part_lse_ptr, first, step, splits, live, start + MERGED + n, DV_PAD
            )
    return acc, top, l


@triton.jit
def load_row(part_ptr, part_lse_ptr, first, step, splits, live, n, DV_PAD: tl.constexpr):
    """(outputs, m, l) of results n, (N, DV) and (N,); those from `live` on are as if they had seen nothing, and of
    those from `splits` on nothing is read."""
    at = first + n.to(tl.int64) * step
    room = n < splits
    m = tl.load(part_lse_ptr + 2 * at, mask=room, other=0.0, cache_modifier=".cg")
    l = tl.load(part_lse_ptr + 2 * at + 1, mask=room, other=0.0, cache_modifier=".cg")  # noqa: E741
    places = part_ptr + at[:, None] * DV_PAD + tl.arange(0, DV_PAD)[None, :]
    parts = tl.load(places, mask=room[:, None], other=0.0, cache_modifier=".cg")
    there = n < live
    return tl.where(there[:, None], parts, 0.0), tl.where(there, m, -float("inf")), tl.where(there, l, 0.0)


@triton.jit
def with_prior(acc, m, l, row, h_rows, alive, size_dv, prior, DV_PAD: tl.constexpr):  # noqa: E741
    """The state (acc, m, l) of rows merged with attention to other keys: prior = (out, lse, strides of head and row of
    both), float32, of one sequence."""
    out_ptr, lse_ptr, out_h, out_n, lse_h, lse_n = prior
    h, n = h_rows.to(tl.int64), row.to(tl.int64)
    other_m = tl.load(lse_ptr + h * lse_h + n * lse_n, mask=alive, other=-float("inf")) * LOG2E
    d = tl.arange(0, DV_PAD)
    # What has seen no key adds nothing, whatever it holds.
    seen = (alive & (other_m != -float("inf")))[:, None] & (d < size_dv)[None, :]
    other = tl.load(out_ptr + (h * out_h + n * out_n)[:, None] + d[None, :], mask=seen, other=0.0)
    top = tl.maximum(m, other_m)
    pivot = tl.where(top == -float("inf"), 0.0, top)
    own, others = tl.exp2(m - pivot), tl.exp2(other_m - pivot)
    return acc * own[:, None] + other * others[:, None], top, l * own + others


@triton.jit
def write_rows(
    acc, m, l, row, h_rows, results,  # noqa: E741
    VARLEN: tl.constexpr, DV_PAD: tl.constexpr, STEP_Q: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """out and lse of rows whose state is (acc, m, l), m in powers of two; the sink enters here, once, and what other
    keys gave, `with_prior`. Rows from n_q on are not used: 0 and -inf (packed rows are set so before). Where not
    `real`, nothing is read or written."""
    out_ptr, lse_ptr, sink_ptr, o_b, o_h, o_n, o_d, l_b, l_h, sequence, row0, sizes, real, prior = results
    n_q, seqlen_q, size_dv = sizes
    alive = (row < n_q if VARLEN else row < seqlen_q) & real
    if prior[0] is not None:
        acc, m, l = with_prior(acc, m, l, row, h_rows, alive, size_dv, prior, DV_PAD)  # noqa: E741
    if sink_ptr is not None:
        logit = tl.load(sink_ptr + h_rows, mask=alive, other=0.0).to(tl.float32)
        m, l, alpha = absorb_sink(m, l, logit * LOG2E, 1.0)  # noqa: E741
        acc = acc * alpha[:, None]
    empty = (l == 0) | (row >= n_q)
    inverse = tl.div_rn(1.0 + tl.zeros_like(l), tl.where(empty, 1.0, l))
    out = tl.where(empty[:, None], 0.0, acc * inverse[:, None])
    lse = tl.where(empty, -float("inf"), (m + tl.log2(l)) * LN2)
    line = tl.cast(sequence, tl.int64) * l_b + h_rows.to(tl.int64) * l_h + row0 + row
    tl.store(lse_ptr + line, lse, mask=alive)
    d = tl.arange(0, DV_PAD)
    at = tl.cast(sequence, tl.int64) * o_b + h_rows.to(tl.int64) * o_h + (row0 + row).to(tl.int64) * o_n
    columns = d if UNIT else d.to(tl.int64) * o_d * STEP_Q
    place = out_ptr + at[:, None] * STEP_Q + columns[None, :]
    inside = alive[:, None] & (d // STEP_Q < size_dv // STEP_Q)[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)
