"""A call written down for the op layer: validated, as (tensors, ints, floats, seed, text)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import checks
from tilewise.errors import DTypeError, OptionError, ShapeError, message
from tilewise.ops import Numbers
from tilewise.problem import NO_MAXIMUM
from tilewise.spec.attention import spec_text
from tilewise.spec.masks import as_mask
from tilewise.spec.scores import as_terms


class Written(NamedTuple):
    """A call as the op layer takes it."""

    tensors: list[Tensor]
    seed: Tensor | None
    numbers: Numbers


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k, v in autocast's dtype, where autocast is on for their device."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(autocast_type(x, kind)) if isinstance(x, Tensor) else x for x in tensors)


def autocast_type(x: Tensor, kind: str | None = None) -> torch.dtype:
    """The type that autocast gives x in an attention call on a kind of device, by default its own; float64 is left
    alone, as torch does."""
    kind = x.device.type if kind is None else kind
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    changes = x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if changes else x.dtype


def _offset(name: str, value: Any, batch: int) -> tuple[str, int, list[Tensor]]:
    """(kind, int, tensors) of a position offset."""
    if value is None:
        return "last", 0, []
    if isinstance(value, Tensor):
        checks.check_int_tensor(name, value, batch)
        return "tensor", 0, [value.reshape(-1)]
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise OptionError(f"{name} is an int or an int tensor of shape (B,), not {value!r}")
    checks.check_offset(name, value)
    return "int", value, []  # type: ignore[return-value]  # a SymInt passes as an int


def _seed(q: Tensor, p: float, seed: Tensor | int | None) -> Tensor | None:
    if p == 0.0:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    if isinstance(seed, int) and not isinstance(seed, bool):
        seed = seed & (2**64 - 1)
        return torch.tensor([seed - 2**64 if seed >= 2**63 else seed], dtype=torch.int64, device=q.device)
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.numel() != 1:
        raise OptionError("seed is an int, or an int64 tensor with one element on q's device")
    checks.check_leaves(q, {"seed": seed})
    return seed.reshape(1)


def _maximum(name: str, value: Any) -> int:
    """A stated longest length. It never changes a result, so a tensor (a sync to read) counts as not stated."""
    if value is None or isinstance(value, Tensor):
        return NO_MAXIMUM
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < 0:
        raise OptionError(f"{name} is a length or None, not {value!r}")
    return value  # type: ignore[return-value]  # a SymInt passes as an int


class Packing(NamedTuple):
    """The tensors and numbers that only packed calls have."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int = NO_MAXIMUM
    max_seqlen_k: int = NO_MAXIMUM


def pack(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlens: tuple[Any, Any],
    seqused: tuple[Tensor | None, Tensor | None],
) -> Packing:
    """What makes a call packed.  Raises DTypeError or ShapeError for tables that do not fit."""
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if t is None and name == "cu_seqlens_k":
            continue
        if not isinstance(t, Tensor):
            raise DTypeError(f"{name} is an int tensor of shape (B + 1,), not {type(t).__name__}")
        checks.check_int_tensor(name, t)
        if t.ndim != 1 or t.shape[0] < 1:
            raise ShapeError(
                message(f"{name} has shape (B + 1,): where each sequence starts, and the end", {name: t})
            )
    if cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens_q.shape:
        given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        raise ShapeError(
            message("cu_seqlens_q and cu_seqlens_k describe the same number of sequences", given)
        )
    for name, used in (("seqused_q", seqused[0]), ("seqused_k", seqused[1])):
        if used is not None:
            checks.check_int_tensor(name, used)
            if used.ndim != 1 or used.shape[0] != cu_seqlens_q.shape[0] - 1:
                raise ShapeError(
                    message(f"{name} has one length per sequence", {name: used, "cu_seqlens_q": cu_seqlens_q})
                )
    maxima = _maximum("max_seqlen_q", max_seqlens[0]), _maximum("max_seqlen_k", max_seqlens[1])
    return Packing(cu_seqlens_q, cu_seqlens_k, *seqused, *maxima)


class Cached(NamedTuple):
    """The tensors and numbers that only calls on pools have, in the order of `problem.OPTIONAL_TENSORS`.

    cu_seqlens_q: (B + 1,) where q is packed. seqused_q, seqused_k, leftpad_k: (B,). block_table: (B, M).
    k_scale, v_scale: (H_kv,) or (P, H_kv). Integers are int32, scales float32.
    """

    cu_seqlens_q: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    leftpad_k: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    max_seqlen_q: int = NO_MAXIMUM

    def batch(self, q: Tensor) -> int:
        """Number of sequences."""
        return q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    def narrowed(self) -> Cached:
        """The same with the types that backends take; tensors that have them are kept."""
        types = (*[torch.int32] * 5, *[torch.float32] * 2)
        tensors = [None if t is None else t.to(kind) for t, kind in zip(self[:7], types, strict=True)]
        return Cached(*tensors, max_seqlen_q=self.max_seqlen_q)  # type: ignore[arg-type, misc]


def _layout_of(
    qkv: tuple[Tensor, ...], packing: Packing | Cached | None
) -> tuple[tuple[Tensor, ...], int, list[tuple[str, Tensor | None]], list[int], list[str]]:
    """(q, k, v; batch; tensors by name; longest lengths stated; options) of dense, packed and cached calls."""
    if isinstance(packing, Cached):
        (q,) = _autocast(qkv[0])
        checks.check_pools(q, qkv[1], qkv[2], packing._asdict())
        packing = packing.narrowed()
        named: list[tuple[str, Tensor | None]] = list(zip(Cached._fields[:7], packing[:7], strict=True))
        options = ["pages=1", *["layout=varlen"] * (packing.cu_seqlens_q is not None)]
        return (q, *qkv[1:]), packing.batch(q), named, [packing.max_seqlen_q, NO_MAXIMUM], options
    q, k, v = _autocast(*qkv)
    checks.check_tensors(q, k, v, "dense" if packing is None else "varlen")
    if packing is None:
        return (q, k, v), q.shape[0], [], [NO_MAXIMUM, NO_MAXIMUM], []
    named = list(zip(Packing._fields[:4], packing[:4], strict=True))
    maxima = [packing.max_seqlen_q, packing.max_seqlen_k]
    return (q, k, v), packing.cu_seqlens_q.shape[0] - 1, named, maxima, ["layout=varlen"]


def write(
    qkv: tuple[Tensor, Tensor, Tensor], packing: Packing | Cached | None, *, mask: Any, scores: Any,
    sink: Tensor | None = None, dropout: float = 0.0, seed: Any = None, scale: float | None = None,
    q_offset: Any = None, k_offset: Any = 0,
    h_offset: int = 0, deterministic: bool | None = None, batch_invariant: bool = False, backend: str = "auto",
    allow_quadratic: bool = False, partial: bool = False, subset: bool = False,
) -> Written:  # fmt: skip
    """Validate a call and write it down for the op layer."""
    (q, k, v), batch, named, maxima, kinds = _layout_of(qkv, packing)
    mask, terms = as_mask(mask), as_terms(scores)
    p = checks.check_dropout(dropout)
    factor = checks.check_scale(scale, q.shape[-1])
    checks.check_sink(q, sink)
    if k_offset is None:
        raise OptionError("k_offset is an int or an int tensor of shape (B,), not None")
    q_kind, q_number, q_tensors = _offset("q_offset", q_offset, batch)
    k_kind, k_number, k_tensors = _offset("k_offset", k_offset, batch)
    h_number = checks.check_h_offset(h_offset)
    if not isinstance(backend, str) or ";" in backend or "#" in backend:  # they separate options in the text
        raise OptionError(f"there is no backend {backend!r}: backend is a name, without ; and #")

    mask_term = mask.term
    leaves = [] if mask_term is None else list(mask_term.leaves)
    ints = [] if mask_term is None else list(mask_term.ints)
    floats = [] if mask_term is None else list(mask_term.floats)
    for term in terms:
        leaves += term.term.leaves
        ints += term.term.ints
        floats += term.term.floats

    options = [f"q_offset={q_kind}"] if q_kind != "last" else []
    options += [f"k_offset={k_kind}"] if k_kind != "int" else []
    extra = ([] if sink is None else [sink]) + q_tensors + k_tensors
    options += kinds
    options += [f"{name}=1" for name, t in named if t is not None and name != "cu_seqlens_q"]
    extra += [t for _, t in named if t is not None]
    flags = (("partial", partial), ("subset", subset), ("deterministic", bool(deterministic)),
             ("batch_invariant", batch_invariant),
             ("allow_quadratic", allow_quadratic))  # fmt: skip
    options += [f"{name}=1" for name, on in flags if on]
    options += [f"backend={backend}"] if backend != "auto" else []

    checks.check_leaves(q, {f"leaf {n} of mask and scores": leaf for n, leaf in enumerate(leaves)})
    checks.check_leaves(q, {f"argument {n}": t for n, t in enumerate(extra)})
    text = spec_text(mask, terms, sink is not None, p > 0.0) + "#" + ";".join(options)
    ints += [q_number, k_number, h_number, 0, *maxima]
    return Written(
        [q, k, v, *leaves, *extra], _seed(q, p, seed), Numbers(tuple(ints), (*floats, factor, float(p)), text)
    )
