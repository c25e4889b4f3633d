"""How a spec's run-time data reach its printed code: leaves, scalars and tables of block extremes, as one flat tuple.

    per leaf: pointer, then per dimension (size, stride / step)     ints     floats     per table: pointer

A leaf's layout class is part of what is printed: which dimension has stride 1, which dimensions do not move
(size 1 or stride 0), the step by which all other strides and the address are divisible, and along which dimensions
the leaf is as long as the call, so that the compiler sees aligned, contiguous rows without specialising any integer.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.spec.attention import AttentionSpec

READABLE = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
BLOCK = 64
"""Rows or columns that share an entry of a table of block extremes."""
_PAIRS = frozenset("ijqk")


class LeafLayout(NamedTuple):
    """unit: the dimension with stride 1 (-1: none). still: dimensions whose index takes no part. step: what divides
    the other strides, in elements. covered: the dimensions indexed by the row or the column itself that have an element
    for each; there no index has to be clamped, which would hide from the compiler that it counts up. A score's leaf
    is covered in both or in none: a line of elements would be loaded ahead, after which ptxas for Hopper waits for
    each product (C7515)."""

    unit: int
    still: tuple[int, ...]
    step: int
    covered: tuple[int, ...] = ()


class Table(NamedTuple):
    """Extremes of leaf `slot` over blocks of dimension `dim`, (2, ...sizes with dim cut into blocks) int32."""

    slot: int
    dim: int


class Slots(NamedTuple):
    """Where each thing stands in the flat tuple."""

    leaves: tuple[LeafLayout, ...]
    leaf_at: tuple[int, ...]
    ints_at: int
    floats_at: int
    tables: tuple[Table, ...]
    tables_at: int
    powers: tuple[int, ...] | None = None
    """Scalars that divide integers and are powers of two: kernels shift and mask by them, and divide by others with a
    product; None where the kernels divide in the ordinary way."""
    fine: bool = False
    """Whether divisions and tanh are rounded to float32's last bit, as in calls of float32."""
    described: tuple[int, ...] = ()
    """Leaves that come by descriptors, too, tile by tile, to the forward's loops: the last entries of the tuple."""

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each entry of the tuple."""
        names: list[str] = []
        edges = (*self.leaf_at, self.ints_at)
        ranks = [(end - at - 1) // 2 for at, end in itertools.pairwise(edges)]
        for slot, rank in enumerate(ranks):
            names.append(f"L{slot}")
            for d in range(rank):
                names += [f"L{slot}_n{d}", f"L{slot}_s{d}"]
        names += [f"n{n}" for n in range(self.floats_at - self.ints_at)]
        names += [f"x{n}" for n in range(self.tables_at - self.floats_at)]
        names += [f"T{n}" for n in range(len(self.tables))]
        return (*names, *(f"D{slot}_desc" for slot in self.described))


def layout_of(leaf: Tensor, pairwise: frozenset[int], lengths: dict[int, int], fewest: int) -> LeafLayout:
    """The layout class; pairwise: dimensions indexed by something that moves within a tile; lengths: how far dimensions
    have to reach that are indexed by a row or a column itself; fewest: of them to be covered, or none is."""
    shape, strides = leaf.shape, leaf.stride()
    still = tuple(d for d in range(leaf.ndim) if d in pairwise and (shape[d] == 1 or strides[d] == 0))
    moving = [d for d in range(leaf.ndim) if d in pairwise and d not in still]
    unit = next((d for d in reversed(moving) if strides[d] == 1), -1)
    step = max(16 // leaf.element_size(), 1)
    aligned = unit >= 0 and leaf.data_ptr() % 16 == 0
    aligned = aligned and all(s % step == 0 for d, s in enumerate(strides) if d != unit and d not in still)
    step = step if aligned else 1
    covered = tuple(
        d for d, length in lengths.items()
        if d not in still and shape[d] >= length and not (d == unit and shape[d] % step)
    )  # fmt: skip
    return LeafLayout(unit, still, step, covered if len(covered) >= fewest else ())


def pairwise_dims(spec: AttentionSpec) -> tuple[frozenset[int], ...]:
    """For each leaf the dimensions whose index reads i, j, q, k or another leaf."""
    roots = [root for root in (spec.keep, spec.score) if root is not None]
    found: list[set[int]] = [set() for _ in spec.leaves]
    for site in ex.loads(*roots):
        for d, index in enumerate(site.args):
            if ex.variables(index) & _PAIRS or ex.loads(index):
                found[int(site.value)].add(d)  # type: ignore[arg-type]
    return tuple(frozenset(f) for f in found)


def plain_dims(spec: AttentionSpec) -> tuple[dict[int, str], ...]:
    """For each leaf the dimensions whose index is `i`, or `j`, wherever the leaf is read."""
    roots = [root for root in (spec.keep, spec.score) if root is not None]
    found: list[dict[int, set[str]]] = [{} for _ in spec.leaves]
    for site in ex.loads(*roots):
        for d, index in enumerate(site.args):
            name = str(index.value) if index.op == "var" else ""
            found[int(site.value)].setdefault(d, set()).add(name)  # type: ignore[arg-type]
    return tuple(
        {d: next(iter(names)) for d, names in sorted(leaf.items()) if names in ({"i"}, {"j"})}
        for leaf in found
    )


@functools.lru_cache(maxsize=1024)
def divisors_of(spec: AttentionSpec) -> tuple[int, ...]:
    """The integer scalars that the spec divides integers by."""
    roots = [root for root in (spec.keep, spec.score) if root is not None]
    nodes = [n for root in roots for n in ex.topological(root) if n.op in ("floordiv", "mod")]
    return tuple(sorted({int(n.args[1].value) for n in nodes if n.args[1].op == "int_scalar"}))  # type: ignore[arg-type]


def powers_of(spec: AttentionSpec, ints: Sequence[int]) -> tuple[int, ...]:
    """Those of them that are powers of two in this call."""
    return tuple(n for n in divisors_of(spec) if ints[n] > 0 and ints[n] & (ints[n] - 1) == 0)


def tables_of(spec: AttentionSpec) -> tuple[Table, ...]:
    """The tables that the interval form of the mask reads: integer or bool leaves along the row or the column."""
    if spec.keep is None:
        return ()
    found = {table_of(site) for site in ex.loads(spec.keep)}
    return tuple(sorted(t for t in found if t is not None))


def table_of(site: ex.Node) -> Table | None:
    """The table that bounds a load, if its only index that moves within a tile is i or j itself."""
    moving = [d for d, a in enumerate(site.args) if ex.variables(a) & (_PAIRS | {"h"}) or ex.loads(a)]
    pairs = [d for d in moving if ex.variables(site.args[d]) != {"h"}]
    if site.type == "float" or len(pairs) != 1:
        return None
    index = site.args[pairs[0]]
    direct = index is ex.variable("i") or index is ex.variable("j")
    return Table(int(site.value), pairs[0]) if direct else None  # type: ignore[arg-type]


def describe(
    spec: AttentionSpec,
    leaves: Sequence[Tensor],
    lengths: tuple[int, int] | None = None,
    powers: tuple[int, ...] | None = None,
    fine: bool = False,
) -> Slots | None:
    """Slots of a call; None if a leaf has an element type that kernels do not read, or no elements.

    lengths: rows and columns of every sequence, where they are known; kernels then read what is as long by vectors.
    powers: what `powers_of` finds, where kernels may know it. fine: see `Slots`.
    """
    if any(leaf.dtype not in READABLE or leaf.numel() == 0 for leaf in leaves):
        return None
    at, where = 0, []
    for leaf in leaves:
        where.append(at)
        at += 1 + 2 * leaf.ndim
    scored = {int(n.value) for n in ex.loads(spec.score)} if spec.score is not None else set()  # type: ignore[arg-type]
    reach = {"i": lengths[0], "j": lengths[1]} if lengths else {}
    layouts = tuple(
        layout_of(
            leaf, moving, {d: reach[name] for d, name in plain.items() if name in reach}, 1 + (n in scored)
        )
        for n, (leaf, moving, plain) in enumerate(
            zip(leaves, pairwise_dims(spec), plain_dims(spec), strict=True)
        )
    )
    floats_at = at + spec.num_ints
    return Slots(
        layouts, tuple(where), at, floats_at, tables_of(spec), floats_at + spec.num_floats, powers, fine
    )


def describable(spec: AttentionSpec, slots: Slots, leaves: Sequence[Tensor]) -> tuple[int, ...]:
    """The leaves of two bytes for each pair that can come by descriptors: read by scores at the row and the column
    themselves, along contiguous rows at multiples of 16 bytes, of the head and the batch entry."""
    if spec.score is None:
        return ()
    sites, plain, found = ex.loads(spec.score), plain_dims(spec), []
    for slot, layout in enumerate(slots.leaves):
        own = [site for site in sites if site.value == slot]
        places = {name: d for d, name in plain[slot].items() if d in layout.covered}
        if not own or set(places) != {"i", "j"} or leaves[slot].dtype not in (torch.bfloat16, torch.float16):
            continue
        others = [a for site in own for d, a in enumerate(site.args) if d not in places.values()]
        near = all(ex.variables(a) <= {"b", "h", "g"} and not ex.loads(a) for a in others)
        apart = all(n == 1 or x for n, x in zip(leaves[slot].shape, leaves[slot].stride(), strict=True))
        if near and apart and layout.step > 1 and layout.unit == places["j"] == leaves[slot].ndim - 1:
            found.append(slot)
    return tuple(found)


def fill(
    slots: Slots,
    leaves: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    tables: Sequence[Tensor],
) -> list[object]:
    """The flat tuple's values, in the order of `Slots.names`."""
    values: list[object] = []
    for leaf, layout in zip(leaves, slots.leaves, strict=True):
        values.append(leaf)
        for size, stride in zip(leaf.shape, leaf.stride(), strict=True):
            values += [size, stride // layout.step]
    return [*values, *ints, *floats, *tables]
