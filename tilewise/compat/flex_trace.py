"""From a score_mod or mask_mod to a term: the function is called once with symbols, as `tilewise.custom` does."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.compat.flex_capture import Capture
from tilewise.compat.flex_symbols import Value
from tilewise.errors import SpecError, TilewiseError
from tilewise.spec import expression as ex
from tilewise.spec.masks import _ints_leaf
from tilewise.spec.term import Term, atom_text
from tilewise.spec.trace import _NotSymbolic, symbol


class Mod(NamedTuple):
    """A traced function: its tree, the term it becomes, and the variables that each leaf's dimensions run along."""

    root: ex.Node
    term: Term
    along: tuple[tuple[str, ...], ...]

    def fitted(self, sizes: dict[str, int]) -> Term:
        """The term for a call of these sizes (b, h, i, j): tensors that are longer are cut to what is read.

        A shorter one is left, and refused by the attention.
        """
        leaves = []
        for leaf, along in zip(self.term.leaves, self.along, strict=True):
            for dim, name in enumerate(along):
                if name and leaf.shape[dim] > sizes[name]:
                    leaf = leaf.narrow(dim, 0, sizes[name])
            leaves.append(leaf)
        return self.term._replace(leaves=tuple(leaves))


def sizes_of(query: Tensor, key: Tensor) -> dict[str, int]:
    """Extents of b, h, i, j for query (B, H, N_q, D) and key (B, H_kv, N_k, D)."""
    return dict(zip("bhij", (*query.shape[:3], key.shape[2]), strict=True))


def trace_mod(fn: Callable[..., Any], *, mask: bool) -> Mod:
    """Trace mask_mod(b, h, q_idx, kv_idx) or score_mod(score, b, h, q_idx, kv_idx).

    q_idx and kv_idx are rows and columns of the tensors. Tensors that the function reaches (closure, globals,
    defaults, attributes of what it closes over) become leaves, with gradients if they float; numbers become run-time
    scalars, or literals where they steer Python.

    Raises: SpecError with the reason and the user's line for what is no expression.
    """
    if not callable(fn):
        raise SpecError(f"a {_kind(mask)} is a function, not {type(fn).__name__}")
    _check_arity(fn, mask)
    try:
        capture, result = _call(fn, mask, fixed=False)
    except _NotSymbolic:
        capture, result = _call(fn, mask, fixed=True)
    root = symbol(result).node
    if mask and root.type != "bool":
        raise SpecError(f"{_name(fn)} yields a {root.type}; a mask_mod yields a condition, True = may attend")
    root = root if mask else ex.cast(root, "float")
    leaves = tuple(leaf for leaf, _ in capture.leaves)
    kinds = tuple((_leaf_kind(n, leaf), leaf.ndim) for n, leaf in enumerate(leaves))
    text = atom_text("mask_mod" if mask else "score_mod", kinds, len(capture.ints), len(capture.floats), root)
    term = Term(text, leaves, tuple(capture.ints), tuple(capture.floats))
    return Mod(root, term, tuple(along for _, along in capture.leaves))


# What torch.compiler.disable sets, without importing dynamo for it: the graph is interrupted here, and says why.
trace_mod._torchdynamo_disable = True  # type: ignore[attr-defined]
trace_mod._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "Tilewise traces a score_mod or mask_mod itself, outside the graph. To keep one graph make "
    "tilewise.compat.flex.ScoreMod(score_mod) and create_block_mask(mask_mod, ...) outside the compiled function"
)


def _call(fn: Callable[..., Any], mask: bool, fixed: bool) -> tuple[Capture, Any]:
    capture = Capture(fixed)
    arguments = [Value(ex.variable(name)) for name in ("b", "h", "i", "j")]
    if not mask:
        arguments.insert(0, Value(ex.variable("s")))
    try:
        return capture, symbol(capture.seen(fn)(*arguments))
    except TilewiseError:
        raise
    except Exception as error:
        # Whatever the function itself runs into: torch refusing a symbol, an attribute that is not there.
        raise SpecError(
            f"{_name(fn)} cannot be traced: {type(error).__name__}: {error}{_line(error)}"
        ) from error


def _line(error: Exception) -> str:
    """Where in the user's code the error came from."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "tilewise/" not in f.filename.replace("\\", "/")
    ]
    if not frames:
        return ""
    return f"\n  {frames[-1].filename}:{frames[-1].lineno}" + (
        f": {frames[-1].line}" if frames[-1].line else ""
    )


def _leaf_kind(n: int, leaf: Tensor) -> str:
    if leaf.is_floating_point():
        return "float"
    if str(leaf.dtype) == "torch.bool":
        return "bool"
    _ints_leaf(f"captured tensor {n}", leaf)
    return "int"


def _kind(mask: bool) -> str:
    return "mask_mod(b, h, q_idx, kv_idx)" if mask else "score_mod(score, b, h, q_idx, kv_idx)"


def _name(fn: Callable[..., Any]) -> str:
    fn = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(fn, "__name__", type(fn).__name__)


def _check_arity(fn: Callable[..., Any], mask: bool) -> None:
    """Four or five positional arguments without a default, as in the original."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:
        return
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in positional)
    if needed != (4 if mask else 5):
        raise SpecError(f"{_name(fn)} has {needed} positional arguments, and this is a {_kind(mask)}")
