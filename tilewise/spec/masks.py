"""Masks: which pairs of query and key may attend.

Each mask is one atom, `keep`, over positions q k, rows and columns i j, batch b, head h, KV head g. Masks
compose with `&`, `|`, `~`. Padding (`key_padding`) says which keys exist; it stands beside the formula and
is always ANDed, so no `|` and no `~` can reveal it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.errors import DTypeError, OptionError, ShapeError, message
from tilewise.spec.expression import INT_MAX, INT_MIN
from tilewise.spec.term import Atom, Term


class Mask:
    """A visibility rule: a formula over pairs and, apart from it, which keys exist.

    True = may attend. `a & b`, `a | b` and `~a` act on the formula; paddings are always ANDed.
    """

    __slots__ = ("formula", "padding")

    def __init__(self, formula: Term | None = None, padding: Term | None = None) -> None:
        self.formula = formula
        self.padding = padding

    def __and__(self, other: Mask | Tensor) -> Mask:
        other = as_mask(other)
        if self.formula is None:
            formula = other.formula
        else:
            formula = self.formula if other.formula is None else self.formula.join("&", other.formula)
        return Mask(formula, _both(self.padding, other.padding))

    def __or__(self, other: Mask | Tensor) -> Mask:
        other = as_mask(other)
        either = self.formula is None or other.formula is None
        formula = None if either else self.formula.join("|", other.formula)  # type: ignore[union-attr, arg-type]
        return Mask(formula, _both(self.padding, other.padding))

    def __invert__(self) -> Mask:
        if self.formula is None:
            return Mask(Nothing.bind(), self.padding)
        return Mask(self.formula._replace(text=f"~{self.formula.text}"), self.padding)

    def __rand__(self, other: Tensor) -> Mask:
        return as_mask(other) & self

    def __ror__(self, other: Tensor) -> Mask:
        return as_mask(other) | self

    @property
    def term(self) -> Term | None:
        """Formula and padding together, as the kernels see them; None hides nothing."""
        return _both(self.formula, self.padding)

    def __repr__(self) -> str:
        return f"Mask({self.term.text})" if self.term else "Mask()"

    def __bool__(self) -> bool:
        raise OptionError(
            "a mask has no truth value\nCompose masks with `&`, `|` and `~`, not with and, or, not."
        )


def _both(a: Term | None, b: Term | None) -> Term | None:
    if a is None or b is None:
        return a or b
    return a.join("&", b)


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """A Mask as it is, a bool tensor as `dense`, None as the mask that hides nothing."""
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return dense(mask)
    raise DTypeError(f"a mask is a tilewise Mask or a bool tensor, not {type(mask).__name__}")


# ---- the atoms -----------------------------------------------------------------------------------------------


class Nothing(Atom):
    """Hides every pair."""

    name = "nothing"

    @staticmethod
    def keep():
        return False


class Causal(Atom):
    """Query at position q attends keys at positions k <= q."""

    name = "causal"

    @staticmethod
    def keep(q, k):
        return k <= q


_CAUSAL = Mask(Causal.bind())


class WindowLeft(Atom):
    """Keys at most `left` positions before the query."""

    name = "window_left"
    ints = ("left",)

    @staticmethod
    def keep(q, k, left):
        return q - k <= left


class WindowRight(Atom):
    """Keys at most `right` positions after the query."""

    name = "window_right"
    ints = ("right",)

    @staticmethod
    def keep(q, k, right):
        return k - q <= right


class Prefix(Atom):
    """Keys at positions below n."""

    name = "prefix"
    ints = ("n",)

    @staticmethod
    def keep(k, n):
        return k < n


class PrefixPerBatch(Atom):
    """Keys at positions below n[b]."""

    name = "prefix_per_batch"
    leaves = {"n": ("int", 1)}

    @staticmethod
    def keep(k, b, n):
        return k < n[b]


class Chunk(Atom):
    """Query and key lie in the same run of `size` positions."""

    name = "chunk"
    ints = ("size",)

    @staticmethod
    def keep(q, k, size):
        return q // size == k // size


class Document(Atom):
    """Row and column carry the same id; a negative id is hidden."""

    name = "document"
    leaves = {"ids_q": ("int", 2), "ids_k": ("int", 2)}

    @staticmethod
    def keep(b, i, j, ids_q, ids_k):
        return (ids_q[b, i] == ids_k[b, j]) & (ids_q[b, i] >= 0)


class KeyLength(Atom):
    """Columns below length[b] exist."""

    name = "key_length"
    leaves = {"length": ("int", 1)}

    @staticmethod
    def keep(b, j, length):
        return j < length[b]


class KeyPresent(Atom):
    """Columns where present[b, j] exist."""

    name = "key_present"
    leaves = {"present": ("bool", 2)}

    @staticmethod
    def keep(b, j, present):
        return present[b, j]


class Dense(Atom):
    """Pairs where the given matrix is True."""

    name = "dense"
    leaves = {"allowed": ("bool", 4)}

    @staticmethod
    def keep(b, h, i, j, allowed):
        return allowed[b, h, i, j]


class BlockSparse(Atom):
    """Pairs whose block of rows and columns is True in the layout."""

    name = "block_sparse"
    leaves = {"layout": ("bool", 4)}
    ints = ("block_q", "block_k")

    @staticmethod
    def keep(b, h, i, j, layout, block_q, block_k):
        return layout[b, h, i // block_q, j // block_k]


# ---- the public constructors ---------------------------------------------------------------------------------


def _whole(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise OptionError(f"{name} is an integer, not {value!r}")
    if value < low:
        raise OptionError(f"{name} is {value}, and must be at least {low}")
    if value > INT_MAX:
        raise OptionError(f"{name} is {value}, and positions are int32")
    return value  # type: ignore[return-value]  # a SymInt is an int to everything here


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise DTypeError(f"{name} takes a tensor, not {type(value).__name__}")


_WIDE = (torch.int64, torch.uint32, torch.uint64)


def _ints_leaf(name: str, t: Tensor) -> Tensor:
    """An int leaf whose values fit int32 (looked at on the CPU only: a look at a GPU tensor would be a sync)."""
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise DTypeError(message(f"{name} holds integers", {name: t}))
    if t.dtype in _WIDE and not torch.compiler.is_compiling() and t.device.type == "cpu" and t.numel():
        # Under vmap there is no single value to look at.
        readable = type(t) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        wide = t.double() if t.dtype == torch.uint64 else t.to(torch.int64)
        if readable and bool(((wide > INT_MAX) | (wide < INT_MIN)).any()):
            raise DTypeError(
                message(f"{name} holds values beyond int32, in which indices are computed", {name: t})
            )
    return t


def causal() -> Mask:
    """Query at position q attends keys at positions k <= q.

    With fewer queries than keys the last query lines up with the last key (bottom-right), unless
    `q_offset` says otherwise; q_offset=0 is the top-left alignment.
    """
    return _CAUSAL


def window(left: int | None, right: int | None) -> Mask:
    """Keys from q - left to q + right inclusive; None is unbounded on that side.

    Raises OptionError for a negative size.
    """
    mask = Mask()
    if left is not None:
        mask = mask & Mask(WindowLeft.bind(ints=(_whole("window's left size", left, 0),)))
    if right is not None:
        mask = mask & Mask(WindowRight.bind(ints=(_whole("window's right size", right, 0),)))
    return mask


def prefix(n: int | Tensor) -> Mask:
    """Keys at positions below n, an int or one per batch entry (B,).

    Prefix-LM is causal() | prefix(n); StreamingLLM is causal() & (window(w, 0) | prefix(n)).
    """
    if isinstance(n, Tensor):
        if n.ndim > 1:
            raise ShapeError(message("prefix takes an int or a tensor of shape (B,)", {"n": n}))
        return Mask(PrefixPerBatch.bind(_ints_leaf("prefix", n.reshape(-1))))
    return Mask(Prefix.bind(ints=(_whole("prefix", n, 0),)))


sink_tokens = prefix


def chunk(size: int) -> Mask:
    """Query and key in the same chunk of `size` positions: q // size == k // size."""
    return Mask(Chunk.bind(ints=(_whole("chunk's size", size, 1),)))


def document(ids_q: Tensor, ids_k: Tensor | None = None) -> Mask:
    """Query row and key column with equal, non-negative document ids.

    Args:
        ids_q: (N_q,) or (B, N_q) integers that fit int32; a negative id hides the row or column.
        ids_k: the same for the keys; None takes ids_q for both.
    """
    ids_k = ids_q if ids_k is None else ids_k
    for name, ids in (("ids_q", ids_q), ("ids_k", ids_k)):
        _tensor(name, ids)
        if ids.ndim not in (1, 2):
            raise ShapeError(message("document ids have shape (N,) or (B, N)", {name: ids}))
    pair = [ids[None] if ids.ndim == 1 else ids for ids in (ids_q, ids_k)]
    return Mask(Document.bind(_ints_leaf("ids_q", pair[0]), _ints_leaf("ids_k", pair[1])))


def key_padding(keys: Tensor) -> Mask:
    """Which keys exist: lengths (B,) (columns below the length) or a bool matrix (B, N_k), True = a real key.

    Padding moves no position. It stands beside the mask's formula: `~` and `|` never reveal it.
    """
    _tensor("key_padding", keys)
    if keys.dtype == torch.bool:
        if keys.ndim != 2:
            raise ShapeError(message("a bool key_padding has shape (B, N_k)", {"keys": keys}))
        return Mask(None, KeyPresent.bind(keys))
    if keys.ndim != 1:
        raise ShapeError(
            message("key_padding takes lengths of shape (B,) or bools of shape (B, N_k)", {"keys": keys})
        )
    return Mask(None, KeyLength.bind(_ints_leaf("key_padding", keys)))


def dense(allowed: Tensor) -> Mask:
    """Pairs where a bool tensor, broadcast to (B, H, N_q, N_k), is True."""
    _tensor("a dense mask", allowed)
    if allowed.dtype != torch.bool:
        raise DTypeError(
            message(
                "a dense mask is a bool tensor, True = may attend",
                {"mask": allowed},
                "A float tensor that is added to the scores is a score term: scores=tilewise.bias(tensor).",
            )
        )
    return Mask(Dense.bind(four_dimensional("mask", allowed)))


def block_sparse(layout: Tensor, block: int | tuple[int, int]) -> Mask:
    """Pairs whose block is True in the layout.

    Args:
        layout: bool, broadcast to (B, H, ceil(N_q / block_q), ceil(N_k / block_k)).
        block: rows and columns of a block, one int for both or (block_q, block_k).
    """
    _tensor("block_sparse", layout)
    if layout.dtype != torch.bool:
        raise DTypeError(
            message("a block_sparse layout is a bool tensor, True = may attend", {"layout": layout})
        )
    block_q, block_k = block if isinstance(block, tuple) else (block, block)
    sizes = (_whole("block_q", block_q, 1), _whole("block_k", block_k, 1))
    return Mask(BlockSparse.bind(four_dimensional("layout", layout), ints=sizes))


def four_dimensional(name: str, t: Tensor) -> Tensor:
    """A view with leading size-1 dimensions up to four.  Raises ShapeError beyond four."""
    if t.ndim > 4:
        raise ShapeError(message(f"{name} has at most four dimensions, (B, H, N_q, N_k)", {name: t}))
    return t[(None,) * (4 - t.ndim)] if t.ndim < 4 else t
