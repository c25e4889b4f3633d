"""The books of a paged cache, on the host: which pages are free, who holds which, how long every sequence is."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tilewise.checks import check_int_tensor
from tilewise.errors import DTypeError, OptionError, TilewiseError

if TYPE_CHECKING:
    from collections.abc import Iterable


class OutOfPages(TilewiseError, RuntimeError):
    """No page is free."""


@dataclass
class Sequence:
    """One sequence: its pages in order, and its keys in each layer."""

    pages: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


def as_numbers(sequences: Iterable[Any] | Tensor) -> tuple[int, ...]:
    """The numbers of sequences or slots, given as integers or as an integer tensor (of a GPU: it is read back).

    Raises: DTypeError, ShapeError for anything else.
    """
    if isinstance(sequences, Tensor):
        check_int_tensor("sequences", sequences)
        return tuple(sequences.reshape(-1).tolist())
    try:
        found = tuple(sequences)
        if any(isinstance(n, bool) for n in found):
            raise TypeError
        return tuple(operator.index(n) for n in found)
    except TypeError:
        given = f"{sequences!r}"[:80]
        raise DTypeError(
            f"sequences are integers, in a list or a tensor, not {type(sequences).__name__}: {given}"
        ) from None


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
        try:
            found = self.sequences.get(number)
        except TypeError:  # what cannot be a number of a sequence, such as a list
            found = None
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
