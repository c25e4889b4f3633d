"""How many numbers the leaves of a spec must have: what their dimensions are indexed by, and how far that goes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tilewise.errors import ShapeError, message
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tilewise.problem import Inputs, Problem
    from tilewise.spec.attention import AttentionSpec


@functools.lru_cache(maxsize=512)
def leaf_extents(spec: AttentionSpec) -> tuple[tuple[int, int, str, ex.Node | None], ...]:
    """(leaf, dimension, variable, divisor) for each index that is a bare variable, or one divided by a number."""
    found = set()
    for keep in (spec.keep, spec.score):
        for site in ex.loads(keep) if keep is not None else ():
            for dim, index in enumerate(site.args):
                divisor = None
                if index.op == "floordiv" and index.args[1].op in ("const", "int_scalar"):
                    index, divisor = index.args
                if index.op == "var" and str(index.value) in "bhgij":
                    found.add((int(site.value), dim, str(index.value), divisor))  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda x: x[:3]))


def check_extents(problem: Problem, inputs: Inputs, sizes: Mapping[str, int | None]) -> None:
    """Raise ShapeError for a leaf of another size than the call's extents of b, h, g, i, j; None: not known."""
    ragged = _ragged(problem)
    for slot, dim, name, divisor in leaf_extents(problem.spec):
        needed = sizes[name]
        if needed is None:
            continue
        needed = -(-needed // _block(divisor, inputs))
        size = inputs.leaves[slot].shape[dim]
        if size not in (1, needed) and not (name in ragged and size >= needed):
            _refuse_leaf(problem, inputs, (slot, dim, name), needed)


def _ragged(problem: Problem) -> str:
    """The indices whose extents are no shape of a call's tensors, but values in its lengths."""
    return "ij" if problem.options.layout == "varlen" else "j" if problem.options.pages else ""


def _block(divisor: ex.Node | None, inputs: Inputs) -> int:
    """By how much an index is divided; 1 where that is no positive number."""
    if divisor is None:
        return 1
    number = int(divisor.value if divisor.op == "const" else inputs.ints[divisor.value])  # type: ignore[arg-type, index]
    return max(number, 1)


def room_of_leaves(problem: Problem, inputs: Inputs) -> tuple[int | None, int | None]:
    """(rows, columns) of a sequence for which the leaves have numbers, where lengths say how many it has; None: any
    number, or the call's shapes say it."""
    ragged, room = _ragged(problem), dict[str, int]()
    for slot, dim, name, divisor in leaf_extents(problem.spec) if ragged else ():
        size = inputs.leaves[slot].shape[dim]
        if name in ragged and size != 1:
            size *= _block(divisor, inputs)
            room[name] = min(size, room.get(name, size))
    return room.get("i"), room.get("j")


def _refuse_leaf(problem: Problem, inputs: Inputs, where: tuple[int, int, str], needed: int) -> None:
    slot, dim, name = where
    meaning = {"b": "batch", "h": "query head", "g": "KV head", "i": "row", "j": "column"}[name]
    leaf = inputs.leaves[slot]
    raise ShapeError(
        message(
            f"leaf {slot} of {'+'.join(problem.spec.names)} is indexed by {meaning} in dimension {dim}, "
            f"whose size is 1 or {needed}, not {leaf.shape[dim]}",
            {f"leaf {slot}": leaf, "q": inputs.q, "k": inputs.k},
        )
    )
