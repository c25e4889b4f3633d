"""Atoms and the text they become.

A feature is a class with one plain-Python atom (`keep` or `value`), traced once when the class is made.
A `Term` is such an atom with its data bound: text, leaves, numbers. Terms hold strings and tuples only,
so that they can be built inside compiled code.

    atom  := NAME[LEAVES;NI;NF]{STATEMENTS}     causal[;0;0]{le k q}     LEAVES such as float2,int1
    mask  := atom | (mask & mask) | (mask | mask) | ~mask
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tilewise.spec import expression as ex
from tilewise.spec.trace import trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Term(NamedTuple):
    """An atom, or a formula of atoms, with its leaves and numbers in the order of the text."""

    text: str
    leaves: tuple[Tensor, ...] = ()
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()

    def join(self, sign: str, other: Term) -> Term:
        """`(self sign other)`."""
        return Term(
            f"({self.text} {sign} {other.text})",
            self.leaves + other.leaves,
            self.ints + other.ints,
            self.floats + other.floats,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: a view of a parameter becomes a view of the parameter's copy, and learns with it."""
        return _restored, (self.text, tuple(_held(leaf) for leaf in self.leaves), self.ints, self.floats)


def _held(leaf: Tensor) -> tuple[Tensor, int]:
    """The parameter that a leaf is a view of, and the dimensions added in front; (leaf, 0) for any other."""
    base = leaf._base
    if base is None or leaf.is_leaf or not base.is_leaf:
        return leaf, 0
    added = leaf.ndim - base.ndim
    same = added > 0 and leaf.shape == (*(1,) * added, *base.shape) and leaf.stride()[added:] == base.stride()
    return (base, added) if same and leaf.storage_offset() == base.storage_offset() else (leaf, 0)


def _restored(
    text: str, held: tuple[tuple[Tensor, int], ...], ints: tuple[int, ...], floats: tuple[float, ...]
) -> Term:
    return Term(text, tuple(t[(None,) * added] if added else t for t, added in held), ints, floats)


def atom_text(
    name: str, leaves: tuple[tuple[str, int], ...], num_ints: int, num_floats: int, root: ex.Node
) -> str:
    """Text of one atom."""
    kinds = ",".join(f"{kind}{ndim}" for kind, ndim in leaves)
    return f"{name}[{kinds};{num_ints};{num_floats}]{{{ex.to_text(root)}}}"


class Atom:
    """Base of the features. A subclass gives `keep` or `value` as a staticmethod.

    `leaves` names the atom's tensor parameters with (kind, number of dimensions); `ints` and `floats` name
    its run-time numbers. The other parameters are the variables of `expression.VARIABLES`.
    """

    name: ClassVar[str]
    leaves: ClassVar[dict[str, tuple[str, int]]] = {}
    ints: ClassVar[tuple[str, ...]] = ()
    floats: ClassVar[tuple[str, ...]] = ()
    text: ClassVar[str]

    def __init_subclass__(cls) -> None:
        function: Callable[..., Any] | None = getattr(cls, "keep", None) or getattr(cls, "value", None)
        if function is None:
            return
        numbers = dict.fromkeys(cls.ints, "int") | dict.fromkeys(cls.floats, "float")
        # While tracing, numbers are 0-d leaves that come after the real ones; they become scalar slots.
        kinds = tuple(cls.leaves.values()) + tuple((kind, 0) for kind in numbers.values())
        root = trace(function, kinds, mask=hasattr(cls, "keep")).root
        first = len(cls.leaves)
        slots = {}
        for n, kind in enumerate(numbers.values()):
            scalar = ex.int_scalar(n) if kind == "int" else ex.float_scalar(n - len(cls.ints))
            slots[ex.load(first + n, kind, ())] = scalar
        root = ex.substitute(root, slots)
        cls.text = atom_text(cls.name, tuple(cls.leaves.values()), len(cls.ints), len(cls.floats), root)

    @classmethod
    def bind(cls, *leaves: Tensor, ints: tuple[int, ...] = (), floats: tuple[float, ...] = ()) -> Term:
        """The atom with its data."""
        return Term(cls.text, leaves, ints, floats)
