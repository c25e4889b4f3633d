"""Around the backward's main kernel: the rows' numbers before it, the sums of dq after it. Plain Triton.

`fill_lines` writes what the copy engine loads with each tile of 64 rows: minus the rows' lse in powers of two, and
delta, padded to whole tiles by rows that take no part (-inf and 0), and clears the tile's sums.
`collect_rows` reads the sums, in the order in which threads held them (`backward_rings.add_fragments`), and writes dq.

Grid: x = heads * row tiles of 64 (of all batch entries, or of the packed tokens).
Tile t of head h is number t + h * row_tiles, packed counted from (cu_q[b] // 64 + b).
"""

import triton
import triton.language as tl

from tilewise.backends.triton.forward_kernel import find_sequence, sequence_length
from tilewise.backends.triton.words import LOG2E


@triton.jit
def locate(cu_q_ptr, used_q_ptr, batch, heads, seqlen_q, row_tiles, VARLEN: tl.constexpr):
    """(number of the tile, batch entry, head, first row, first row of the sequence, its rows)."""
    number = tl.program_id(0)
    tile, unit = number % row_tiles, number // row_tiles
    if VARLEN:
        b, tile = find_sequence(cu_q_ptr, tile, batch, seqlen_q, 64)
        row0, n_q = sequence_length(cu_q_ptr, used_q_ptr, b, seqlen_q)
        h = unit
    else:
        b, h = unit // heads, unit % heads
        row0, n_q = 0, seqlen_q
    return number, b, h, tile * 64, row0, n_q


@triton.jit
def fill_lines(
    m_ptr, delta_ptr, line_m_ptr, line_delta_ptr, sums_ptr, cu_q_ptr, used_q_ptr, batch, heads, seqlen_q, row_tiles,
    VARLEN: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """See the header. FLOATS: sums of a tile, 0 if there are none."""
    number, b, h, i0, row0, n_q = locate(cu_q_ptr, used_q_ptr, batch, heads, seqlen_q, row_tiles, VARLEN)
    rows = i0 + tl.arange(0, 64)
    unit = h if VARLEN else b * heads + h
    line = unit.to(tl.int64) * seqlen_q + row0 + rows
    m = tl.load(m_ptr + line, mask=rows < n_q, other=float("inf"))
    delta = tl.load(delta_ptr + line, mask=rows < n_q, other=0.0)
    at = number.to(tl.int64) * 64 + tl.arange(0, 64)
    tl.store(line_m_ptr + at, m * -LOG2E)
    tl.store(line_delta_ptr + at, delta)
    if FLOATS > 0:
        place = sums_ptr + number.to(tl.int64) * FLOATS
        for n in tl.static_range(FLOATS // 1024):
            tl.store(place + n * 1024 + tl.arange(0, 1024), tl.zeros([1024], tl.float32))


@triton.jit
def collect_rows(
    sums_ptr, dq_ptr, marks_ptr, cu_q_ptr, used_q_ptr, dq_b, dq_h, dq_n, batch, heads, seqlen_q, row_tiles, size_d,
    scale, VARLEN: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """See the header. A tile of sums is PARTS times 64 x WIDTH."""
    number, b, h, i0, row0, n_q = locate(cu_q_ptr, used_q_ptr, batch, heads, seqlen_q, row_tiles, VARLEN)
    rows = i0 + tl.arange(0, 64)
    tensor_b = 0 if VARLEN else b
    places = dq_ptr + tensor_b * dq_b + h * dq_h + (row0 + rows).to(tl.int64) * dq_n
    bad = 0
    for part in tl.static_range(PARTS):
        at = sums_ptr + (number.to(tl.int64) * PARTS + part) * (64 * WIDTH)
        x = tl.load(at + tl.arange(0, 64 * WIDTH))
        bad = tl.maximum(bad, tl.max(((x - x) != 0).to(tl.int32), 0))
        # Groups of 8 columns, warps, rows, pairs of columns, rows 8 apart, columns.
        x = tl.reshape(x, [WIDTH // 8, 4, 8, 4, 2, 2])
        x = tl.reshape(tl.permute(x, [1, 4, 2, 0, 3, 5]), [64, WIDTH])
        d = part * WIDTH + tl.arange(0, WIDTH)
        inside = (rows < n_q)[:, None] & (d < size_d)[None, :]
        tl.store(places[:, None] + d[None, :], (x * scale).to(dq_ptr.dtype.element_ty), mask=inside)
    if bad > 0:
        if i0 < n_q:
            tl.store(marks_ptr + b * heads + h, 1)
            tl.store(marks_ptr + batch * heads, 1)
