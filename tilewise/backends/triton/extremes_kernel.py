"""The table of a leaf's extremes over blocks of rows or columns, from which masks classify tiles.

Grid: x = blocks times all other indices of the leaf in one line. Memory: two int32 per block and line, O(N / BLOCK).
"""

import triton
import triton.language as tl


@triton.jit
def block_extremes(
    leaf_ptr, table_ptr, length, stride, n1, n2, s0, s1, s2, blocks, after, plane, BLOCK: tl.constexpr
):
    """table (2, before, blocks, after): least and greatest of each run of BLOCK elements along one dimension.

    The other dimensions are (n0, n1, n2) with strides s0, s1, s2; `after` counts the elements of those that follow it.
    """
    block = tl.program_id(0) % blocks
    line = tl.program_id(0) // blocks
    x2, x1, x0 = line % n2, line // n2 % n1, line // n2 // n1
    base = leaf_ptr + x0.to(tl.int64) * s0 + x1.to(tl.int64) * s1 + x2.to(tl.int64) * s2
    at = tl.minimum(block * BLOCK + tl.arange(0, BLOCK), length - 1)
    values = tl.load(base + at.to(tl.int64) * stride).to(tl.int32)
    place = (line // after).to(tl.int64) * blocks * after + block.to(tl.int64) * after + line % after
    tl.store(table_ptr + place, tl.min(values, 0))
    tl.store(table_ptr + plane + place, tl.max(values, 0))
