"""The debug mode of a paged cache: a tag per page on the device says who may write it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.errors import ShapeError

if TYPE_CHECKING:
    from tilewise.serving.books import Books
    from tilewise.serving.cache import CacheView

FREE, SHARED = -1, -2


class Owners:
    """Tags (P,) int32: the number of the sequence that holds a page alone, SHARED, or FREE."""

    def __init__(self, books: Books, device: torch.device) -> None:
        self.books, self.stale = books, False
        self.tags = torch.full((len(books.holders),), FREE, dtype=torch.int32, device=device)

    def refresh(self) -> None:
        """Write the tags anew from the books."""
        tags = [FREE if not n else SHARED for n in self.books.holders]
        for number, sequence in self.books.sequences.items():
            for page in sequence.pages:
                if self.books.holders[page] == 1:
                    tags[page] = number
        self.tags.copy_(torch.tensor(tags, dtype=torch.int32))
        self.stale = False

    def check(self, view: CacheView, sequences: tuple[int, ...], added: Tensor | int) -> None:
        """Every page that a call reads is its sequence's own or shared, and every page it writes its own.

        Raises: ShapeError on the CPU; elsewhere an assertion on the device.
        """
        if self.stale:
            self.refresh()
        table, size = view.block_table, view.k.shape[2]
        assert table is not None
        after = view.lengths + added
        first = torch.arange(table.shape[1], device=table.device) * size
        read = first < after[:, None]
        written = read & (first + size > view.lengths[:, None]) & (after > view.lengths)[:, None]
        tag = self.tags[table.clamp(0, len(self.tags) - 1).to(torch.int64)]
        own = tag == torch.tensor(sequences, dtype=torch.int32, device=table.device)[:, None]
        there = (table >= 0) & (table < len(self.tags))
        right = (there & (own | ((tag == SHARED) & ~written))) | ~read
        if table.device.type != "cpu":
            torch._assert_async(right.all(), "a sequence reads or writes a page that is not its own")
        elif not bool(right.all()):
            b, n = (~right).nonzero()[0].tolist()
            what = "write" if bool(written[b, n]) else "read"
            raise ShapeError(
                f"sequence {sequences[b]} would {what} page {int(table[b, n])}, which is not its own\n"
                f"  entry {n} of its row of the table; tag of the page: {int(tag[b, n])} ({FREE} free, {SHARED} shared)"
            )
