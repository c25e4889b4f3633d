"""Where the rows of a cache lie: jit functions that turn columns of a sequence into rows of the pools k and v.

PAGING says how: "whole", the sequence is one page (dense tensors, contiguous caches with or without a batch index);
"tile", a key tile lies inside one page; a number, pages of that size, of which whole ones make a tile; "shift", the
page size is a power of two; "divide", any page size. What is the same for a tile, or for a page of it, is found once:
a program of few tiles takes as long as its instructions.
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
    """The entries of the block table, unclamped, for the columns of a tile from `first` on: one, or one of each column.
    None is read for columns from `most` on."""
    row, page0, size, shift, pages = pool
    if PAGING == "whole":
        found = page0
    elif PAGING == "tile":
        found = tl.load(row + tl.minimum(first, tl.maximum(most - 1, 0)) // size).to(tl.int32)
    elif PAGING == "divide":
        found = tl.load(row + columns // size, mask=columns < most, other=0).to(tl.int32)
    else:
        found = tl.load(row + (columns >> shift), mask=columns < most, other=0).to(tl.int32)
    return found


@triton.jit
def page_rows(first, columns, numbers, pool, PAGING: tl.constexpr):
    """(page, row inside it, whether the page is one of the pool's) of the columns of a tile from `first` on; numbers:
    their table entries."""
    row, page0, size, shift, pages = pool
    owned = (numbers >= 0) & (numbers < pages)
    page = tl.maximum(tl.minimum(numbers, pages - 1), 0)
    if PAGING == "whole":
        slot = columns
    elif PAGING == "tile":
        slot = columns - first // size * size
    elif PAGING == "divide":
        slot = columns % size
    else:
        slot = columns & (size - 1)
    return page, slot, owned


@triton.jit
def entry_of(t, most, pool, n: tl.constexpr, PAGING: tl.constexpr, BLOCK_N: tl.constexpr):
    """The entry of page n of tile t, which is made of pages of PAGING keys; of fewer pages the first one's."""
    COUNT: tl.constexpr = BLOCK_N // PAGING
    at = t * COUNT + (n if n < COUNT else 0)
    return tl.load(pool[0] + tl.minimum(at, most // PAGING - 1)).to(tl.int32)


@triton.jit
def entries_of(t, most, pool, PAGING: tl.constexpr, BLOCK_N: tl.constexpr):
    """The entries of up to eight pages that make tile t, unclamped; none beyond `most` columns is read."""
    e0 = entry_of(t, most, pool, 0, PAGING, BLOCK_N)
    e1 = entry_of(t, most, pool, 1, PAGING, BLOCK_N)
    e2 = entry_of(t, most, pool, 2, PAGING, BLOCK_N)
    e3 = entry_of(t, most, pool, 3, PAGING, BLOCK_N)
    e4 = entry_of(t, most, pool, 4, PAGING, BLOCK_N)
    e5 = entry_of(t, most, pool, 5, PAGING, BLOCK_N)
    e6 = entry_of(t, most, pool, 6, PAGING, BLOCK_N)
    e7 = entry_of(t, most, pool, 7, PAGING, BLOCK_N)
    return e0, e1, e2, e3, e4, e5, e6, e7


@triton.jit
def rows_of(n, entries, pool, PAGING: tl.constexpr, BLOCK_N: tl.constexpr):
    """`page_rows` of all columns n of a tile that is made of pages with these entries."""
    pages = pool[4]
    page = n * 0 + tl.maximum(tl.minimum(entries[0], pages - 1), 0)
    owned = (n >= 0) & ((entries[0] >= 0) & (entries[0] < pages))
    for c in tl.static_range(1, BLOCK_N // PAGING):
        entry = entries[c]
        page = tl.where(n >= c * PAGING, tl.maximum(tl.minimum(entry, pages - 1), 0), page)
        owned = tl.where(n >= c * PAGING, (entry >= 0) & (entry < pages), owned)
    return page, n % PAGING, owned
