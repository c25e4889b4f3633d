"""Where the rows of a cache lie: jit functions that turn columns of a sequence into rows of the pools k and v.

PAGING says how: "whole", the sequence is one page (dense tensors, contiguous caches with or without a batch index);
"tile", a key tile lies inside one page; a number, pages of that size, of which whole ones make a tile (below 0: whole
tiles make the table, too); "shift", the page size is a power of two; "divide", any page size. What is the same for a
tile, or for a page of it, is found once: a program of few tiles takes as long as its instructions.
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
    """The entry of page n of tile t, which is made of pages of PAGING keys."""
    SIZE: tl.constexpr = PAGING if PAGING > 0 else -PAGING
    COUNT: tl.constexpr = BLOCK_N // SIZE
    if PAGING > 0:
        found = tl.load(pool[0] + tl.minimum(t * COUNT + n, most // SIZE - 1))
    else:
        found = tl.load(pool[0] + tl.minimum(t * COUNT, most // SIZE - COUNT) + n)
    return found.to(tl.int32)


@triton.jit
def entries_of(t, most, pool, PAGING: tl.constexpr, BLOCK_N: tl.constexpr):
    """The entries of up to eight pages that make tile t, unclamped; none beyond `most` columns is read."""
    COUNT: tl.constexpr = BLOCK_N // (PAGING if PAGING > 0 else -PAGING)
    e0 = entry_of(t, most, pool, 0, PAGING, BLOCK_N)
    e1 = entry_of(t, most, pool, 1, PAGING, BLOCK_N) if COUNT > 1 else e0
    e2 = entry_of(t, most, pool, 2, PAGING, BLOCK_N) if COUNT > 2 else e0
    e3 = entry_of(t, most, pool, 3, PAGING, BLOCK_N) if COUNT > 3 else e0
    e4 = entry_of(t, most, pool, 4, PAGING, BLOCK_N) if COUNT > 4 else e0
    e5 = entry_of(t, most, pool, 5, PAGING, BLOCK_N) if COUNT > 5 else e0
    e6 = entry_of(t, most, pool, 6, PAGING, BLOCK_N) if COUNT > 6 else e0
    e7 = entry_of(t, most, pool, 7, PAGING, BLOCK_N) if COUNT > 7 else e0
    return e0, e1, e2, e3, e4, e5, e6, e7


@triton.jit
def page_of(entry, pages, UNSIGNED: tl.constexpr):
    """(page, whether it is one of the pool's) of an entry. UNSIGNED: an entry below 0 is one beyond all; fewer
    instructions, which make long loops over pages of 16 slower."""
    if UNSIGNED:
        number = entry.to(tl.uint32, bitcast=True)
        most = pages.to(tl.uint32, bitcast=True)
        page, owned = tl.minimum(number, most - 1).to(tl.int32, bitcast=True), number < most
    else:
        page, owned = tl.maximum(tl.minimum(entry, pages - 1), 0), (entry >= 0) & (entry < pages)
    return page, owned


@triton.jit
def rows_of(n, entries, pool, PAGING: tl.constexpr, BLOCK_N: tl.constexpr):
    """`page_rows` of all columns n of a tile that is made of pages with these entries."""
    SIZE: tl.constexpr = PAGING if PAGING > 0 else -PAGING
    for c in tl.static_range(0, BLOCK_N // SIZE):
        its, right = page_of(entries[c], pool[4], PAGING == 64 or PAGING < 0)
        if c == 0:
            page, owned = n * 0 + its, (n >= 0) & right
        else:
            page, owned = tl.where(n >= c * SIZE, its, page), tl.where(n >= c * SIZE, right, owned)
    return page, n % SIZE, owned
