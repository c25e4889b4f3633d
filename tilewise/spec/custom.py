"""Masks and score terms of the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tilewise.errors import DTypeError
from tilewise.spec.masks import Mask, _ints_leaf
from tilewise.spec.scores import ScoreTerm
from tilewise.spec.term import Term, atom_text
from tilewise.spec.trace import trace

if TYPE_CHECKING:
    from collections.abc import Callable


def _kind(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        raise DTypeError(f"a leaf is a tensor, not {type(leaf).__name__}; a number can simply be captured")
    if leaf.is_complex():
        raise DTypeError("a leaf holds floats, integers or bools, not complex numbers")
    if leaf.is_floating_point():
        return "float"
    return "bool" if str(leaf.dtype) == "torch.bool" else "int"


def _bind(fn: Callable[..., Any], leaves: tuple[Tensor, ...], *, mask: bool) -> Term:
    kinds = tuple((_kind(leaf), leaf.ndim) for leaf in leaves)
    for n, (kind, _) in enumerate(kinds):
        if kind == "int":
            _ints_leaf(f"leaf {n}", leaves[n])
    traced = trace(fn, kinds, mask=mask)
    name = "custom" if mask else "custom_score"
    text = atom_text(name, kinds, len(traced.ints), len(traced.floats), traced.root)
    return Term(text, leaves, traced.ints, traced.floats)


def custom(fn: Callable[..., Any], *leaves: Tensor) -> Mask:
    """A mask of your own: `fn` yields True where the pair may attend.

    Args:
        fn: plain Python over q k (positions), i j (row, column), b, h, g (batch, head, KV head), by name,
            and the leaves, in order. Called once; numbers it captures are run-time scalars.
        leaves: tensors, read with one index per dimension (an index outside reads the nearest element).

    Raises:
        SpecError: control flow on a symbolic value, a captured tensor, a result that is not a condition.

    Example: `every_second = custom(lambda q, k: (q - k) % 2 == 0)`.
    """
    return Mask(_bind(fn, leaves, mask=True))


def custom_score(fn: Callable[..., Any], *leaves: Tensor) -> ScoreTerm:
    """A score term of your own: `fn(s, ...)` yields the new score; floating leaves get gradients.

    The derivative is taken from the expression; at a tie abs has derivative 0, minimum and maximum give it
    to their first argument. -inf hides the pair. Arguments and errors as for `custom`.

    Example: `custom_score(lambda s, h, q, k, slope: s - slope[h] * abs(q - k), slopes)`.
    """
    return ScoreTerm(_bind(fn, leaves, mask=False))
