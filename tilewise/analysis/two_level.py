"""A memory of two levels, simulated: whole tensors in the slow one, tiles in a fast one of M elements, LRU.

An algorithm that runs on it computes with nothing but tiles that lie in the fast memory, and what it wants to
keep it writes there; a written tile goes back to the slow memory when it is evicted or flushed. So its answer is
right only if every load and store that it needs was made, and was counted. A tensor is always cut along the same
lines between two flushes, as the tile is the unit that moves.

Source: the model is that of Dao et al. 2022 (https://arxiv.org/abs/2205.14135), section 3.2; replacing the least
recently used tile is what caches do, while a kernel with managed memory may do better.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from tilewise.errors import OptionError, message

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Range", "Traffic", "TwoLevelMemory", "ranges"]

Range = tuple[int, int]
"""First index and the one after the last."""
Key = tuple[str, tuple[Range, ...]]


class Traffic(NamedTuple):
    """Elements that moved: loads from the slow memory into the fast one, stores back."""

    loads: int
    stores: int

    @property
    def total(self) -> int:
        """Loads and stores together."""
        return self.loads + self.stores

    def plus(self, other: Traffic) -> Traffic:
        """Both one after the other."""
        return Traffic(self.loads + other.loads, self.stores + other.stores)

    def times(self, count: int) -> Traffic:
        """The same `count` times."""
        return Traffic(self.loads * count, self.stores * count)


def ranges(length: int, block: int, start: int = 0) -> list[Range]:
    """[start, start + length) cut into ranges of `block`, the last one shorter where it does not divide."""
    return [(at, min(at + block, start + length)) for at in range(start, start + length, block)]


class TwoLevelMemory:
    """Slow memory of any size, fast memory of `capacity` elements, and counters between them.

    Fields:
        capacity: M, elements of the fast memory.
        loads, stores: elements moved so far, towards the fast memory and back.
        peak: most elements that lay in the fast memory at a time.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise OptionError(message(f"a fast memory holds at least one element, got {capacity}"))
        self.capacity = capacity
        self.loads = self.stores = self.peak = 0
        self._slow: dict[str, Tensor] = {}
        self._tiles: OrderedDict[Key, Tensor] = OrderedDict()
        self._dirty: set[Key] = set()
        self._used = 0

    @property
    def traffic(self) -> Traffic:
        """The counters."""
        return Traffic(self.loads, self.stores)

    def place(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into the slow memory. Where a problem starts is not traffic, so nothing is counted."""
        self._slow[name] = tensor

    def result(self, name: str) -> Tensor:
        """A tensor as the slow memory holds it; what is still dirty in the fast memory is not in it."""
        return self._slow[name]

    def read(self, name: str, *where: Range) -> Tensor:
        """A tile of a tensor, loaded if the fast memory does not hold it. To be read, not to be changed."""
        key = (name, where)
        tile = self._tiles.get(key)
        if tile is None:
            tile = self._slow[name][tuple(slice(*one) for one in where)].clone()
            self.loads += tile.numel()
            self._insert(key, tile)
        self._tiles.move_to_end(key)
        return tile

    def write(self, name: str, where: tuple[Range, ...], tile: Tensor) -> None:
        """Replace a tile of a tensor by one that was made on the chip: no load, and a store when it leaves."""
        key = (name, where)
        self._drop(key)
        self._insert(key, tile)
        self._dirty.add(key)

    def hold(self, name: str, tile: Tensor) -> Tensor:
        """Keep what has no place in the slow memory: scores of a tile, an accumulator. Until `release`."""
        key = (name, ())
        self._drop(key)
        self._insert(key, tile)
        return tile

    def held(self, name: str) -> Tensor:
        """What `hold` keeps under that name, and it was used just now.

        Raises: RuntimeError if it was evicted: the algorithm's tiles are too large for this memory.
        """
        key = (name, ())
        if key not in self._tiles:
            raise RuntimeError(f"{name} was evicted: the tiles do not fit into {self.capacity} elements")
        self._tiles.move_to_end(key)
        return self._tiles[key]

    def release(self, name: str) -> Tensor:
        """Forget what `hold` keeps, and return it. Raises as `held`."""
        tile = self.held(name)
        self._drop((name, ()))
        return tile

    def flush(self) -> None:
        """Write back what is dirty and forget everything: the end of a kernel, whose fast memory dies with it."""
        for key in list(self._tiles):
            self._evict(key)

    def discard(self, name: str) -> None:
        """Forget the tiles of a temporary tensor, without a store."""
        for key in [key for key in self._tiles if key[0] == name]:
            self._drop(key)

    def _insert(self, key: Key, tile: Tensor) -> None:
        if tile.numel() > self.capacity:
            raise RuntimeError(f"a tile of {key[0]} has {tile.numel()} elements, the memory {self.capacity}")
        while self._used + tile.numel() > self.capacity:
            self._evict(next(iter(self._tiles)))
        self._tiles[key] = tile
        self._used += tile.numel()
        self.peak = max(self.peak, self._used)

    def _evict(self, key: Key) -> None:
        if key in self._dirty:
            name, where = key
            self._slow[name][tuple(slice(*one) for one in where)] = self._tiles[key]
            self.stores += self._tiles[key].numel()
        self._drop(key)

    def _drop(self, key: Key) -> None:
        tile = self._tiles.pop(key, None)
        if tile is not None:
            self._used -= tile.numel()
            self._dirty.discard(key)
