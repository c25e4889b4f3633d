"""Where the rows of a cache lie: jit functions that turn columns of a sequence into rows of the pools k and v.

PAGING says how: "whole", the sequence is one page (dense tensors, contiguous caches with or without a batch index);
"tile", a key tile lies inside one page; "shift", the page size is a power of two; "divide", any page size.
`pool` is (table_row, page0, page_size, page_shift, pages): the sequence's row of the block table (None: page0 is
its page), and the number of pages of the pool. Entries outside the pool are clamped, and their keys are hidden.
"""

import triton
import triton.language as tl


@triton.jit
def table_row(table_ptr, table_b, b, unused):
    """(row of the block table, first page) of sequence b; without a table its page is b and the row is `unused`."""
    if table_ptr is not None:
        row = table_ptr + tl.cast(b, tl.int64) * table_b
        page = tl.load(row).to(tl.int32)
    else:
        row = unused
        page = b
    return row, page


@triton.jit
def page_numbers(first, columns, n_k, pool, PAGING: tl.constexpr):
    """The entries of the block table, unclamped, for the columns of a tile from `first` on; none is read beyond n_k."""
    row, page0, size, shift, pages = pool
    if PAGING == "whole":
        found = page0
    elif PAGING == "tile":
        found = tl.load(row + tl.minimum(first, tl.maximum(n_k - 1, 0)) // size).to(tl.int32)
    elif PAGING == "shift":
        found = tl.load(row + (columns >> shift), mask=columns < n_k, other=0).to(tl.int32)
    else:
        found = tl.load(row + columns // size, mask=columns < n_k, other=0).to(tl.int32)
    return found


@triton.jit
def page_rows(columns, numbers, pool, PAGING: tl.constexpr):
    """(page, row inside it, whether the page is one of the pool's) of columns whose table entries are `numbers`."""
    row, page0, size, shift, pages = pool
    owned = (numbers >= 0) & (numbers < pages)
    page = tl.maximum(tl.minimum(numbers, pages - 1), 0)
    if PAGING == "whole":
        slot = columns
    elif PAGING == "shift":
        slot = columns & (size - 1)
    else:
        slot = columns % size
    return page, slot, owned
