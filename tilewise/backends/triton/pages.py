"""Where the rows of a cache lie: jit functions that turn columns of a sequence into rows of the pools k and v.

PAGING says how: "whole", the sequence is one page (dense tensors, contiguous caches with or without a batch index);
"tile", a key tile lies inside one page; a number, pages of that size, of which whole ones make a tile; "shift", the
page size is a power of two; "divide", any page size.
`pool` is (table_row, page0, page_size, page_shift, pages): the sequence's row of the block table (None: page0 is
its page), and the number of pages of the pool. Entries outside the pool are clamped, and their keys are hidden.
"""

import triton
import triton.language as tl


@triton.jit
def begin_of(table_ptr, table_b, b):
    """Where the row of sequence b begins in the block table; a stride of 32 bits says that no offset needs more."""
    if table_b.dtype == tl.int32:
        row = table_ptr + b * table_b
    else:
        row = table_ptr + tl.cast(b, tl.int64) * table_b
    return row


@triton.jit
def table_row(table_ptr, table_b, b, unused):
    """(row of the block table, first page) of sequence b; without a table its page is b and the row is `unused`."""
    if table_ptr is not None:
        row = begin_of(table_ptr, table_b, b)
        page = tl.load(row).to(tl.int32)
    else:
        row = unused
        page = b
    return row, page


@triton.jit
def page_numbers(first, columns, most, pool, PAGING: tl.constexpr, BLOCK_N: tl.constexpr):
    """The entries of the block table, unclamped, for the columns of a tile from `first` on: one, one of each page, or
    one of each column. None is read for columns from `most` on."""
    row, page0, size, shift, pages = pool
    GROUPS: tl.constexpr = (PAGING == 16 or PAGING == 32 or PAGING == 64) and BLOCK_N % PAGING == 0
    if PAGING == "whole":
        found = page0
    elif PAGING == "tile":
        found = tl.load(row + tl.minimum(first, tl.maximum(most - 1, 0)) // size).to(tl.int32)
    elif GROUPS:
        n = tl.arange(0, BLOCK_N // PAGING)
        found = tl.load(row + (first // PAGING + n), mask=first + n * PAGING < most, other=0).to(tl.int32)
    elif PAGING == "divide":
        found = tl.load(row + columns // size, mask=columns < most, other=0).to(tl.int32)
    else:
        found = tl.load(row + (columns >> shift), mask=columns < most, other=0).to(tl.int32)
    return found


@triton.jit
def of_columns(x, PAGING: tl.constexpr, BLOCK_N: tl.constexpr):
    """What each page has, for its columns."""
    return tl.reshape(tl.broadcast_to(x[:, None], [BLOCK_N // PAGING, PAGING]), [BLOCK_N])


@triton.jit
def page_rows(columns, numbers, pool, PAGING: tl.constexpr, BLOCK_N: tl.constexpr):
    """(page, row inside it, whether the page is one of the pool's) of columns whose table entries are `numbers`."""
    row, page0, size, shift, pages = pool
    GROUPS: tl.constexpr = (PAGING == 16 or PAGING == 32 or PAGING == 64) and BLOCK_N % PAGING == 0
    owned = (numbers >= 0) & (numbers < pages)
    page = tl.maximum(tl.minimum(numbers, pages - 1), 0)
    if PAGING == "whole":
        slot = columns
    elif GROUPS:
        slot = columns % PAGING
        page, owned = of_columns(page, PAGING, BLOCK_N), of_columns(owned, PAGING, BLOCK_N)
    elif PAGING == "divide" or PAGING == "tile":
        slot = columns % size
    else:
        slot = columns & (size - 1)
    return page, slot, owned
