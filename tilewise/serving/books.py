"""The books of a paged cache, on the host: which pages are free, who holds which, how long every sequence is."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.errors import OptionError, TilewiseError


class OutOfPages(TilewiseError, RuntimeError):
    """No page is free."""


@dataclass
class Sequence:
    """One sequence: its pages in order, and its keys in each layer."""

    pages: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class Books:
    """Pages with reference counts. A page that several sequences hold is read by all and written by none."""

    def __init__(self, num_pages: int, page_size: int, num_layers: int) -> None:
        self.page_size, self.num_layers = page_size, num_layers
        self.holders = [0] * num_pages
        self.free = list(range(num_pages - 1, -1, -1))
        self.sequences: dict[int, Sequence] = {}
        self.next = 0

    def add(self, sequence: Sequence | None = None) -> int:
        """A new sequence's number, never used before."""
        number, self.next = self.next, self.next + 1
        self.sequences[number] = Sequence(lengths=[0] * self.num_layers) if sequence is None else sequence
        return number

    def find(self, number: int) -> Sequence:
        """Raises OptionError for a sequence that was never made or is freed."""
        found = self.sequences.get(number)
        if found is None:
            raise OptionError(f"there is no sequence {number!r}: it was never made, or it is freed")
        return found

    def take(self) -> int:
        """A free page, held once.  Raises OutOfPages."""
        if not self.free:
            raise OutOfPages(
                f"all {len(self.holders)} pages are in use\nFree sequences, or make a cache of more pages."
            )
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def let_go(self, page: int) -> None:
        """One holder less; a page without holders is free."""
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free.append(page)

    def missing(self, sequence: Sequence, first: int, stop: int) -> tuple[list[int], int]:
        """(places in the sequence whose shared pages must be copied, pages to be added) before keys first..stop - 1
        can be written."""
        size, held = self.page_size, len(sequence.pages)
        touched = range(first // size, min(-(-stop // size), held)) if stop > first else range(0)
        shared = [n for n in touched if self.holders[sequence.pages[n]] > 1]
        return shared, max(0, -(-stop // size) - held)
