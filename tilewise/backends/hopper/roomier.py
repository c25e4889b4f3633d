"""Tiles for kernels that spill with those of choice: what a compiled kernel says of its registers decides.

Tiles are chosen by what a spec holds (`tiles.choose`), and a user's tree can be greater than any rule or table
foresees. So a kernel that keeps numbers in memory for want of registers is compiled once more: with numbers made
again, registers shared out otherwise, and fewer keys a block, whose scores leave half of theirs to the rest. It is a
function of the kernel's binary alone: all processes find the same, and both kernels are kept in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewise.backends.hopper.tiles import ROOMY

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewise.backends.hopper.launch_forward import Recipe
    from tilewise.backends.hopper.tiles import Tiles
    from tilewise.problem import Problem

FEW = 16
"""Bytes up to which numbers that are made again may be enough; beyond, they seldom were."""
_settled: dict[tuple[Any, ...], Tiles] = {}
_MOST = 4096


def instead(pair: tuple[int, int], tiles: Tiles, least: int) -> tuple[Tiles, ...]:
    """What to try in place of tiles with which a kernel spills at least so many bytes, in turn."""
    same, ladder = (tiles._replace(fresh=True),) if least <= FEW else (), ROOMY[pair]
    above = ladder.index(tiles) + 1 if tiles in ladder else 0
    return tuple(other for other in (*same, *ladder[above:], *ladder[:above]) if other != tiles)


def least_spilled(make: Callable[[Tiles | None], Recipe | None], problem: Problem) -> Recipe | None:
    """What `make` finds with the tiles of choice (None), or with the first others whose kernels spill nothing; where
    all spill, with those that spill least."""
    found = make(None)
    if found is None or not spilled(found):
        return found
    for tiles in instead(found.pair, found.tiles, spilled(found)):
        other = make(tiles)
        if other is not None and spilled(other) < spilled(found):
            found = other
            if len(_settled) >= _MOST:
                _settled.clear()
            _settled[_kind(problem)] = tiles
        if not spilled(found):
            break
    return found


def spilled(recipe: Recipe) -> int:
    """Bytes a thread that a recipe's kernels keep in memory for want of registers."""
    return recipe.run.spilled + (0 if recipe.again is None else recipe.again.spilled)


def settled(problem: Problem) -> Tiles | None:
    """The tiles that this process took for a kind in place of the chosen ones; None where those were right, or no call
    was made."""
    return _settled.get(_kind(problem))


def _kind(problem: Problem) -> tuple[Any, ...]:
    """What a call shares with others of its kind."""
    return problem.spec, problem.shape, problem.dtype, problem.options.layout
