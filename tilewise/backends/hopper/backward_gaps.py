"""What the Hopper backward writes where a packed call's tokens belong to no sequence, or lie past its used length: 0 to
the gradients, and rows' numbers that take no part. Plain Triton, a part of `backward_line_kernels.fill_lines`: its
first PROGRAMS programs share the gaps, of which there are usually none."""

import triton
import triton.language as tl

PROGRAMS = tl.constexpr(64)
SEARCH = tl.constexpr(128)
"""Gaps looked at together."""
BLOCK = tl.constexpr(1024)


@triton.jit
def fill_range(ptr, first, stop, share, shares, number):
    """Write a number to elements first .. stop - 1, of which this is one of some shares."""
    begin = first + share * BLOCK
    while begin < stop:
        at = begin + tl.arange(0, BLOCK)
        tl.store(ptr + at, tl.full([BLOCK], number, ptr.dtype.element_ty), mask=at < stop)
        begin += shares * BLOCK


@triton.jit
def edges_at(cu_ptr, n, batch, total):
    """Entries n of a table of starts: 0 before it, `total` behind it, and never outside the tensor."""
    found = tl.load(cu_ptr + n, mask=(n >= 0) & (n <= batch), other=0).to(tl.int32)
    return tl.where(n > batch, total, tl.minimum(tl.maximum(found, 0), total))


@triton.jit
def clear_gaps(
    program, cu_ptr, used_ptr, batch, total, first_ptr, first_width, second_ptr, second_width, m_ptr, low_ptr,
    delta_ptr, heads,
):  # fmt: skip
    """Gap n lies before sequence n, the last one behind all. first, second: (total, width) tensors, or None, as m, low
    and delta, which are (heads, total)."""
    parts = tl.cdiv(batch + 1, SEARCH)
    for part in range(program % parts, parts, PROGRAMS):
        share, shares = program // parts, (PROGRAMS - 1 - part) // parts + 1
        n = part * SEARCH + tl.arange(0, SEARCH)
        stop = edges_at(cu_ptr, tl.where(n == batch, batch + 1, n), batch, total)
        begin = edges_at(cu_ptr, n - 1, batch, total)
        length = tl.maximum(edges_at(cu_ptr, n, batch, total) - begin, 0)
        if used_ptr is not None:
            used = tl.load(used_ptr + n - 1, mask=(n > 0) & (n <= batch), other=0).to(tl.int32)
            length = tl.minimum(length, tl.maximum(used, 0))
        begin = tl.where(n > 0, begin + length, 0)
        missing = tl.where(n <= batch, stop - begin, 0)
        at = tl.max(tl.where(missing > 0, n, -1), 0)
        while at >= 0:
            a = tl.max(tl.where(n == at, begin, 0), 0).to(tl.int64)
            z = tl.max(tl.where(n == at, stop, 0), 0).to(tl.int64)
            if first_ptr is not None:
                fill_range(first_ptr, a * first_width, z * first_width, share, shares, 0.0)
            if second_ptr is not None:
                fill_range(second_ptr, a * second_width, z * second_width, share, shares, 0.0)
            if m_ptr is not None:
                for h in range(heads):
                    row = tl.cast(h, tl.int64) * total
                    fill_range(m_ptr, row + a, row + z, share, shares, float("inf"))
                    fill_range(low_ptr, row + a, row + z, share, shares, 0.0)
                    fill_range(delta_ptr, row + a, row + z, share, shares, 0.0)
            at = tl.max(tl.where((missing > 0) & (n < at), n, -1), 0)
