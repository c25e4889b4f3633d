"""The theorem that FlashAttention rests on, its edges, and what schedules do beside it.

With N rows of d elements and a fast memory of M elements, ordinary attention moves Theta(N d + N^2) elements, tiled
attention Theta(N^2 d^2 / M) for d <= M <= N d, and no exact algorithm moves less than that order for every M in
the range. The edges, in M, for square problems:

    d        a row does not fit: no tile
    c d^2    below it, tiles are so small that keys are read again more often than the matrix would be written:
             ordinary attention moves less. c is a constant of the schedule, found by `crossover`
    4 N d    about where one tile takes everything but the matrix; nothing is read twice from here on
    N^2      the matrix itself fits, with everything else: no schedule moves more than it must

Source: Dao et al. 2022 (https://arxiv.org/abs/2205.14135), theorem 2, theorem 5 (backward) and proposition 3 (the
lower bound).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from tilewise.analysis import schedule_ordinary
from tilewise.analysis.schedules import SCHEDULES, predict, tiles_for
from tilewise.analysis.sizes import Sizes
from tilewise.errors import OptionError, message

__all__ = [
    "Edges",
    "Exponents",
    "crossover",
    "edges",
    "fit_exponents",
    "longest_that_fits",
    "order_ordinary",
    "order_tiled",
]


class Exponents(NamedTuple):
    """traffic ~ constant * N^n * d^d * M^m, and the largest relative distance of a point from that."""

    n: float
    d: float
    m: float
    constant: float
    distance: float


class Edges(NamedTuple):
    """Where a schedule's regime changes as M grows, in elements of the fast memory.

    smallest: the least M with a tile. pays: from here tiling moves less than ordinary attention. once: from here
    nothing is read twice. fits: from here the whole problem fits, and ordinary attention moves no more either.
    """

    smallest: int
    pays: int
    once: int
    fits: int

    def regime(self, capacity: int) -> str:
        """The regime of an M: "no tile", "matrix is cheaper", "tiling pays", "read once" or "all fits"."""
        for edge, name in zip(
            self, ("no tile", "matrix is cheaper", "tiling pays", "read once"), strict=True
        ):
            if capacity < edge:
                return name
        return "all fits"


def order_ordinary(seqlen: int, head_dim: int) -> int:
    """N d + N^2, the order of ordinary attention's traffic, in elements."""
    return seqlen * head_dim + seqlen * seqlen


def order_tiled(seqlen: int, head_dim: int, capacity: int) -> float:
    """N^2 d^2 / M, the order of tiled attention's traffic for d <= M <= N d, in elements."""
    return seqlen * seqlen * head_dim * head_dim / capacity


def _total(name: str, sizes: Sizes, capacity: int, backward: bool) -> float:
    """Elements moved; infinite where no tile fits."""
    try:
        return predict(name, sizes, capacity, backward=backward).total
    except OptionError:
        return math.inf


def _least(low: int, high: int, holds: object) -> int:
    """The least M in [low, high] from which on `holds(M)`, by bisection; high if it never does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)  # type: ignore[operator]
    return low


def crossover(sizes: Sizes, name: str = "flash2", backward: bool = False) -> int:
    """The least M at which a schedule moves less than ordinary attention does with the same M.

    Found from the two predictions; it grows as d^2, and barely with N. Where the whole problem fits before that,
    it is where that happens.
    """

    def pays(capacity: int) -> bool:
        ordinary = _total("ordinary", sizes, capacity, backward)
        return _total(name, sizes, capacity, backward) < ordinary or schedule_ordinary.fits(
            sizes, capacity, backward
        )

    return _least(1, _fits_from(sizes, backward), pays)


def _fits_from(sizes: Sizes, backward: bool) -> int:
    return _least(
        1, 4 * (sizes.matrix + 2 * sizes.tensors), lambda m: schedule_ordinary.fits(sizes, m, backward)
    )


def edges(sizes: Sizes, name: str = "flash2", backward: bool = False) -> Edges:
    """Where the regimes of a tiled schedule meet for a problem, in M.

    Raises: OptionError for a schedule that keeps the matrix, or an unknown one.
    """
    if name not in SCHEDULES or SCHEDULES[name].keeps_matrix:
        raise OptionError(message(f"{name!r} is no tiled schedule", {}, f"Known: {', '.join(SCHEDULES)}."))
    fits = _fits_from(sizes, backward)
    smallest = _least(1, fits, lambda m: math.isfinite(_total(name, sizes, m, backward)))

    def once(capacity: int) -> bool:
        if capacity < smallest:
            return False
        tiles = tiles_for(name, sizes, capacity, backward)
        return tiles.block_q >= sizes.seqlen_q or tiles.block_k >= sizes.seqlen_k

    largest = 8 * sizes.tensors
    return Edges(
        smallest,
        max(smallest, crossover(sizes, name, backward)),
        _least(smallest, largest, once),
        max(fits, smallest),
    )


def longest_that_fits(head_dim: int, capacity: int, backward: bool = False) -> int:
    """The longest square problem that lies in the fast memory with its matrix: up to there tiling gains nothing."""

    def too_long(seqlen: int) -> bool:
        return not schedule_ordinary.fits(Sizes(seqlen, seqlen, head_dim, head_dim), capacity, backward)

    return _least(1, capacity + 1, too_long) - 1


def fit_exponents(
    name: str, points: Iterable[tuple[int, int, int]], *, backward: bool = False, counted: object = None
) -> Exponents:
    """Least squares on the logarithms of a schedule's traffic.

    Args:
        name: a key of SCHEDULES. points: (N, d, M) of square problems, at least two values of each.
        counted: a function (N, d, M) -> elements; default the prediction.

    Returns: Exponents. Raises: OptionError as `predict`.
    """
    import torch

    def total(n: int, d: int, m: int) -> float:
        if counted is not None:
            return float(counted(n, d, m))  # type: ignore[operator]
        return float(predict(name, Sizes(n, n, d, d), m, backward=backward).total)

    points = list(points)
    rows = torch.tensor(
        [[math.log(n), math.log(d), math.log(m), 1.0] for n, d, m in points], dtype=torch.float64
    )
    logs = torch.tensor([[math.log(total(*point))] for point in points], dtype=torch.float64)
    found = torch.linalg.lstsq(rows, logs).solution
    distance = (rows @ found - logs).abs().max().expm1()
    n, d, m, constant = found.flatten().tolist()
    return Exponents(n, d, m, math.exp(constant), float(distance))
