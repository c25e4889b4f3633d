"""A cache in pages that sequences allocate, share and give back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise import memory
from tilewise.errors import OptionError, ShapeError
from tilewise.serving.books import Books, OutOfPages, Sequence, as_numbers
from tilewise.serving.cache import CacheView
from tilewise.serving.owners import Owners

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

KEPT_BATCHES = 64
"""Batches of sequences whose tables are kept on the device."""


class PagedKVCache:
    """Keys and values of any number of sequences in a pool of pages.

    Args:
        num_pages, page_size: of the pool; a page holds page_size keys, 1 or more, of one sequence.
        num_heads_kv, head_dim, head_dim_v: of keys and values.
        num_layers: pools that share the pages' numbers and tables, so that one allocation serves a whole model.
        max_length: keys that one sequence may come to, default all pages. It is the width of the tables, and the
            length that calls are planned for.
        dtype: of the pools; float8_e4m3fn stores at half the size of bfloat16, with the scales.
        k_scale, v_scale: (H_kv,) float32 factors of what is stored, None: 1.
        debug: fill pages that nobody holds with NaN, and check at every call that each sequence reads pages of its own
            or shared ones and writes pages of its own alone (on a GPU by an assertion on the device, without a sync).

    `new_sequence` gives a number; `attention_with_cache(q, cache, k, v, sequences=[a, b])` appends and attends; `fork`
    makes a sequence that shares the pages of another one, which are copied when one of the two is to write into them;
    `free` gives pages back. In a model of several layers a layer's calls take `cache.layer(n)`.

    k, v: the pools, (num_layers, P, H_kv, page_size, D) and (..., D_v).

    Raises: OptionError for sizes below 1.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_heads_kv: int, head_dim: int, *, head_dim_v: int | None = None,
        num_layers: int = 1, max_length: int | None = None, dtype: torch.dtype = torch.float32, device: Any = None,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None, debug: bool = False,
    ) -> None:  # fmt: skip
        for name, n in (("num_pages", num_pages), ("page_size", page_size), ("num_layers", num_layers)):
            if n < 1:
                raise OptionError(f"{name} is 1 or more, not {n}")
        shape = (num_layers, num_pages, num_heads_kv, page_size)
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.k = memory.pool((*shape, head_dim), dtype, device)
        self.v = memory.pool((*shape, head_dim_v), dtype, device)
        self.k_scale, self.v_scale = k_scale, v_scale
        self.page_size, self.num_pages, self.num_layers = page_size, num_pages, num_layers
        most = num_pages * page_size if max_length is None else min(max_length, num_pages * page_size)
        self.pages_each = -(-most // page_size)
        self.max_length = most
        self.books = Books(num_pages, page_size, num_layers)
        self.version = 0
        self.owners = Owners(self.books, self.k.device) if debug else None
        self._batches: OrderedDict[tuple[int, ...], Batch] = OrderedDict()
        self._poison(range(num_pages))

    # ---- sequences -----------------------------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self.books.free)

    def new_sequence(self) -> int:
        """The number of a new, empty sequence."""
        return self.books.add()

    def length(self, sequence: int, layer: int = 0) -> int:
        """Keys of a sequence in a layer."""
        return self.books.find(sequence).lengths[layer]

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages that a sequence holds, in order."""
        return tuple(self.books.find(sequence).pages)

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence whose first `length` keys (None: all) are those of another, in the same pages.

        Raises: OptionError for more keys than there are, or between the layers of a step.
        """
        parent = self.books.find(sequence)
        present = min(parent.lengths)
        if max(parent.lengths) != present:
            raise OptionError(f"sequence {sequence} is between the layers of a step: {parent.lengths} keys")
        length = present if length is None else length
        if not 0 <= length <= present:
            raise OptionError(f"sequence {sequence} holds {present} keys and cannot share {length}")
        shared = parent.pages[: -(-length // self.page_size)]
        for page in shared:
            self.books.holders[page] += 1
        self._changed()
        return self.books.add(Sequence(list(shared), [length] * self.num_layers))

    def crop(self, sequence: int, length: int) -> None:
        """Forget the keys from `length` on.  Raises OptionError for a negative length."""
        found = self.books.find(sequence)
        if length < 0:
            raise OptionError(f"a sequence keeps 0 keys or more, not {length}")
        found.lengths = [min(n, length) for n in found.lengths]
        self._shorten(found, -(-max(found.lengths) // self.page_size))

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages that nobody else holds are free."""
        self._shorten(self.books.find(sequence), 0)
        del self.books.sequences[sequence]

    def _shorten(self, found: Sequence, kept: int) -> None:
        freed = []
        while len(found.pages) > kept:
            page = found.pages.pop()
            self.books.let_go(page)
            freed += [page] * (not self.books.holders[page])
        self._poison(freed)
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        if self.owners is not None:
            self.owners.stale = True

    def _poison(self, pages: Any) -> None:
        if self.owners is None or not len(pages):
            return
        for pool in (self.k, self.v):
            pool.view(torch.uint8)[:, list(pages)] = 0xFF  # NaN in every floating type

    # ---- steps ---------------------------------------------------------------------------------------------

    def layer(self, index: int) -> PagedLayer:
        """One layer's part of the cache, for `attention_with_cache`.  Raises OptionError for one that is not there."""
        if not 0 <= index < self.num_layers:
            raise OptionError(f"the cache has layers 0 to {self.num_layers - 1}, not {index}")
        return PagedLayer(self, index)

    def batch(self, sequences: Many[int]) -> Batch:
        """The device side of some sequences, for calls whose books you keep: see `Batch`."""
        return Batch(self, as_numbers(sequences), trusted=False)

    def shared_prefix(self, sequences: Many[int]) -> int:
        """Keys, in whole pages, that all these sequences share."""
        found = [self.books.find(n) for n in as_numbers(sequences)]
        if len(found) < 2:
            return 0
        whole = min(min(s.lengths) for s in found) // self.page_size
        count = 0
        for pages in zip(*(s.pages[:whole] for s in found), strict=True):
            if len(set(pages)) > 1:
                break
            count += 1
        return count * self.page_size

    def reserve(self, numbers: Many[int], layers: range, added: list[int]) -> list[tuple[int, int, int]]:
        """Pages of their own for so many more keys of each sequence.

        Returns: what has changed, (number of the sequence in `numbers`, place among its pages, page).
        Raises: OutOfPages, ShapeError for a sequence that would grow beyond max_length; nothing has changed then.
        """
        plans, taken, wanted = [], Counter[int](), 0
        for number, more in zip(numbers, added, strict=True):
            found = self.books.find(number)
            first, stop = min(found.lengths[n] for n in layers), max(found.lengths[n] for n in layers) + more
            if stop > self.max_length:
                raise ShapeError(
                    f"sequence {number} would hold {stop} keys, and max_length is {self.max_length}"
                )
            shared, extra = self.books.missing(found, first, stop)
            copied = []
            for n in shared:
                page = found.pages[n]
                # Of those that hold a page and write into it the last one keeps it.
                if self.books.holders[page] - taken[page] > 1:
                    taken[page] += 1
                    copied.append(n)
            plans.append((found, copied, extra))
            wanted += len(copied) + extra
        if wanted > len(self.books.free):
            rule = f"{wanted} pages are needed, and {len(self.books.free)} of {self.num_pages} are free"
            raise OutOfPages(f"{rule}\nFree sequences, or make a cache of more pages.")
        return self._take(plans) if wanted else []

    def _take(self, plans: list[tuple[Sequence, list[int], int]]) -> list[tuple[int, int, int]]:
        """Copy and add the pages of each plan: (sequence, places to copy, pages to add)."""
        changes, old, new = [], [], []
        for b, (found, copied, extra) in enumerate(plans):
            for n in copied:
                old.append(found.pages[n])
                found.pages[n] = self.books.take()
                self.books.let_go(old[-1])
                new.append(found.pages[n])
            start = len(found.pages)
            found.pages += [self.books.take() for _ in range(extra)]
            changes += [(b, n, found.pages[n]) for n in (*copied, *range(start, start + extra))]
        if old:
            self.k[:, new], self.v[:, new] = self.k[:, old], self.v[:, old]
        self._changed()
        return changes

    def current(self, numbers: tuple[int, ...]) -> Batch:
        """The batch of these sequences whose books the cache keeps, as they stand."""
        batch = self._batches.get(numbers)
        if batch is None:
            batch = self._batches[numbers] = Batch(self, numbers)
            if len(self._batches) > KEPT_BATCHES:
                self._batches.popitem(last=False)
        elif batch.version != self.version:
            batch.refresh()
        return batch


class PagedLayer:
    """One layer of a PagedKVCache."""

    def __init__(self, cache: PagedKVCache, index: int) -> None:
        self.cache, self.index = cache, index


class Batch:
    """The device side of some sequences of a paged cache: their table (B, M) and their lengths (num_layers, B).

    Given as `sequences=` it makes a call touch tensors alone, so that it can be captured in a CUDA graph or compiled;
    the books are the caller's: `advance(n)` before each step finds pages for n more keys of each sequence, counts
    them, and writes the table in place. Then each layer's call advances the lengths of its layer on the device.

    Made by `PagedKVCache.batch`. trusted: whether its books say how far it goes, so that a call need not look (on the
    CPU) whether the table has a page for each key.
    """

    def __init__(self, cache: PagedKVCache, sequences: tuple[int, ...], *, trusted: bool = True) -> None:
        if len(set(sequences)) != len(sequences):
            raise OptionError(f"a sequence stands once in a call, not as in {list(sequences)}")
        self.cache, self.sequences = cache, sequences
        self.records = [cache.books.find(n) for n in sequences]
        device, count = cache.k.device, len(sequences)
        self.table = torch.full((count, cache.pages_each), -1, dtype=torch.int32, device=device)
        # What the device's table is copied from; on the processor it is the table.
        self._table = self.table if device.type == "cpu" else torch.empty_like(self.table, device="cpu")
        self.lengths = torch.zeros(cache.num_layers, count, dtype=torch.int32, device=device)
        self.views = [
            CacheView(k, v, n, self.table, None, cache.k_scale, cache.v_scale, trusted=trusted)
            for k, v, n in zip(cache.k, cache.v, self.lengths, strict=True)
        ]
        self.room = [0] * cache.num_layers
        self.refresh()

    def refresh(self) -> None:
        """Write table and lengths anew from the books."""
        self.records = [self.cache.books.find(n) for n in self.sequences]
        self._table.fill_(-1)
        self._write([(b, n, page) for b, s in enumerate(self.records) for n, page in enumerate(s.pages)])
        if self.records:
            self.lengths.copy_(torch.tensor([s.lengths for s in self.records], dtype=torch.int32).t())
        self.room = [0] * self.cache.num_layers
        self.version = self.cache.version

    def _write(self, changes: list[tuple[int, int, int]]) -> None:
        """Entries of the table, (row, column, page); they reach the device in one copy."""
        if changes:
            row, column, page = torch.tensor(changes).unbind(1)
            self._table[row, column] = page.to(torch.int32)
        if self._table is not self.table:
            self.table.copy_(self._table, non_blocking=True)

    def advance(self, added: int | list[int]) -> None:
        """Room for so many more keys of each sequence, in every layer; the books count them. One call for each advance:
        the keys are to be appended before another batch is advanced.

        Raises: OutOfPages, ShapeError for a sequence that would grow beyond max_length; OptionError unless `added` is
            0 or more, or one such number for each sequence.
        """
        more = [added] if isinstance(added, int) else added
        if min(more, default=0) < 0 or len(more) != (1 if isinstance(added, int) else len(self.records)):
            raise OptionError(f"advance takes a number of keys, or one for each sequence, not {added}")
        if self.version != self.cache.version:
            self.refresh()
        self.count(range(self.cache.num_layers), added)

    def count(self, layers: range, added: int | list[int]) -> None:
        """Reserve and count new keys in some layers."""
        more = [added] * len(self.records) if isinstance(added, int) else added
        most = max(more, default=0)
        if not most:
            return
        cache = self.cache
        if any(self.room[n] < most for n in layers):
            changes = cache.reserve(self.sequences, layers, more)
            if changes:
                self._write(changes)
            size = cache.page_size
            for n in layers:
                stops = [s.lengths[n] + m for s, m in zip(self.records, more, strict=True)]
                # Keys that fit behind the new ones in pages that are written now; who writes nothing may share them.
                behind = min(min(-(-e // size) * size, cache.max_length) - e for e in stops)
                self.room[n] = most + (behind if all(more) else 0)
        for s, m in zip(self.records, more, strict=True):
            for n in layers:
                s.lengths[n] += m
        for n in layers:
            self.room[n] -= most
        cache.version += 1
        self.version = cache.version
