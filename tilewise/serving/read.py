"""Attention of queries over keys and values that lie in pages: the call that every cache ends in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import quick
from tilewise.checks import can_look, check_cu_seqlens, check_pages, check_values
from tilewise.dispatch import choose, registry
from tilewise.errors import DTypeError, OptionError, ShapeError, message
from tilewise.leaf_extents import room_of_leaves
from tilewise.ops import call
from tilewise.problem import decode_inputs, decode_problem, is_lazy
from tilewise.serving.cache import PLAIN, UNKNOWN
from tilewise.spec.masks import as_mask
from tilewise.spec.scores import as_terms
from tilewise.written import Cached, autocast_type, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.serving.cache import CacheView
    from tilewise.written import Written

    Room = tuple[int | None, int | None]
    Kind = tuple[tuple[Any, ...] | None, Sequence[Tensor]]
    """What a call's preparation depends on (None: it is not known), and the tensors of its mask and scores."""

OPTIONS = (
    "scale", "q_offset", "k_offset", "h_offset", "deterministic", "batch_invariant", "backend", "allow_quadratic",
)  # fmt: skip
"""The options of a call that are no tensors, in the order in which `attend_view` takes them."""


_right: dict[tuple[Any, ...], Room] = {}
"""Kinds of calls that were found right, as far as their leaves go: the queries that are attended may lie otherwise than
those that were given."""


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, *, block_table: Tensor | None = None, seqused_k: Tensor | None = None,
    seqused_q: Tensor | None = None, leftpad_k: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of q over pools of pages, differentiable in q, the pools, sink and the terms' leaves.

    Args:
        q: (B, H, N_q, D), or (T, H, D) with cu_seqlens_q (B + 1,).
        k, v: pools (P, H_kv, page_size, D) and (P, H_kv, page_size, D_v), the last stride 1; q's dtype, or
            float8_e4m3fn with q in float16 or bfloat16.
        block_table: (B, M) page of the keys j // page_size of each sequence; None: sequence b is page b.
        seqused_k: (B,) keys of each sequence; None: all M * page_size. seqused_q: (B,) rows used.
        leftpad_k: (B,) keys before it are hidden, and positions count from there.
        k_scale, v_scale: (H_kv,) or (P, H_kv) factors of what is stored.
        options: those of `attention` but return_lse and out, and partial=True for out in float32, to be merged;
            q_offset None is seqused_k - leftpad_k - rows of the sequence. Rows and columns, for bias and the like,
            are those of the sequence, padding included.

    Returns: out in q's layout, lse (B, H, N_q) or (H, T).
    Raises: as `attention`; ShapeError for lengths and pages outside their tensors (looked at on the CPU; on a GPU
        they are clamped, and what they name is never read beyond the tensors).
    """
    cached = Cached(cu_seqlens_q, seqused_q, seqused_k, block_table, leftpad_k, k_scale, v_scale)
    written = write((q, k, v), cached, **{"mask": None, "scores": (), **options})
    return call(written.tensors, written.seed, written.numbers)


def attend_view(
    view: CacheView, q: Tensor, cu_seqlens_q: Tensor | None, spec: tuple[Any, Any, Any], options: tuple[Any, ...],
    random: tuple[float, Any], want_lse: bool, *, partial: bool = False, kind: Kind | None = None,
    looked: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse) of q over what a view holds; calls of a kind that was made before take the short way.

    spec: mask, scores, sink. options: those of OPTIONS. random: dropout, seed. partial: out in float32, to be merged.
    kind: what `check_call` gave for these arguments, None: it is found out. looked: whether `view.look` was called.
    """
    key = None
    dropout, single = random[0], False
    plain = type(dropout) in (float, int) and not dropout
    if not quick.is_traced():
        single, like = cu_seqlens_q is None and not partial, view.attended
        if like is not None and single and plain and like.matches((q, *view.held), *spec, options):
            return _run_again(like, view, q, want_lse)
        if not looked and not quick.is_compiling():
            view.look()
    if plain:
        key, extra = key_of(view, q, spec, options) if kind is None else kind
        if key is not None:
            key = (*key, None if cu_seqlens_q is None else cu_seqlens_q.shape, partial)
            found = quick.ready.get(key)
            if found is not None and _fits(found.room, view, cu_seqlens_q):
                if view.k.is_cpu:
                    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "T_q", q.shape[0])
                    if not view.trusted:
                        check_view(view)
                tensors = (
                    cu_seqlens_q,
                    view.lengths,
                    view.block_table,
                    view.leftpad,
                    view.k_scale,
                    view.v_scale,
                )
                if single and not extra:
                    view.notice(found, q, spec, options)
                more = [*extra, *[t for t in tensors if t is not None]]
                result = quick.run(found, (q, view.k, view.v), more, want_lse)
                return result if want_lse else (result, None)  # type: ignore[return-value]
    written = write_view(view, q, cu_seqlens_q, spec, options, random, partial=partial)
    result = call(written.tensors, written.seed, written.numbers)
    if key is not None:
        quick.remember(key, written)
    return result


def _run_again(like: quick.Like, view: CacheView, q: Tensor, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """A call of a view that is like its last one."""
    if view.k.is_cpu and not view.trusted:
        check_view(view)
    more = view.held[2:]
    if like.differentiable:
        result = quick.run(like.found, (q, view.k, view.v), more, want_lse)
        return result if want_lse else (result, None)  # type: ignore[return-value]
    return like.run(q, view.k, view.v, more, want_lse)


def write_view(
    view: CacheView, q: Tensor, cu_seqlens_q: Tensor | None, spec: tuple[Any, Any, Any], options: tuple[Any, ...],
    random: tuple[float, Any], *, partial: bool = False,
) -> Written:  # fmt: skip
    """The call of `attend_view`, validated and written down."""
    mask, scores, sink = spec
    cached = Cached(
        cu_seqlens_q, None, view.lengths, view.block_table, view.leftpad, view.k_scale, view.v_scale
    )
    return write(
        (q, view.k, view.v), cached, mask=mask, scores=scores, sink=sink, dropout=random[0], seed=random[1],
        partial=partial, **dict(zip(OPTIONS, options, strict=True)),
    )  # fmt: skip


def check_call(
    view: CacheView, q: Tensor, cu_seqlens_q: Tensor | None, spec: tuple[Any, Any, Any], options: tuple[Any, ...],
    random: tuple[float, Any], added: int | Tensor = 0,
) -> Kind | None:  # fmt: skip
    """Raise what `attend_view` would raise for these arguments, before anything is written for them; gives the kind of
    the call, if it had to be found out. added: keys that are about to be written.

    A kind of call that was made before is right as it is, and costs a look at what is known.
    """
    dropout, seed = random
    kind = None
    if type(dropout) in (float, int) and not dropout:
        single = cu_seqlens_q is None and not quick.is_compiling()
        if single and view.checked is not None and view.checked.matches((q,), *spec, options):
            return None
        kind = key_of(view, q, spec, options)
        shape = None if cu_seqlens_q is None else cu_seqlens_q.shape
        if kind[0] is not None:
            key = (*kind[0], shape)
            if key in _right and _fits(_right[key], view, cu_seqlens_q, added):
                if single and not kind[1] and view.checked is None:
                    view.checked = quick.like((q,), spec, options, None)
                if view.k.is_cpu:
                    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "T_q", q.shape[0])
                return kind
    # A seed is given, so that none is drawn here.
    (q, k, v, *rest), drawn, numbers = write_view(
        view, q, cu_seqlens_q, spec, options, (dropout, 0 if seed is None else seed)
    )
    problem = decode_problem(q, k, v, rest, numbers.text)
    inputs = decode_inputs(problem, (q, k, v, rest), numbers.ints, numbers.floats, drawn)
    check_values(problem, inputs)
    room = room_of_leaves(problem, inputs)
    if not _fits(room, view, cu_seqlens_q, added):
        raise ShapeError(
            f"a leaf of {'+'.join(problem.spec.names)} has numbers for {room[1]} columns, and a sequence would hold "
            f"{int((view.lengths + added).max())} keys"
        )
    choose(problem)
    if kind is not None and kind[0] is not None:
        if len(_right) >= quick.MOST:
            _right.clear()
        _right[key] = room
    return kind


def _fits(room: Room, view: CacheView, cu_seqlens_q: Tensor | None, added: int | Tensor = 0) -> bool:
    """Whether leaves have numbers for every row and column, with so many more keys; True where nobody may look."""
    rows, columns = room
    if (rows is None and columns is None) or not can_look(view.k):
        return True
    if rows is not None and cu_seqlens_q is not None and int(cu_seqlens_q.diff().max()) > rows:
        return False
    if columns is None or (view.lengths is not None and not len(view.lengths)):
        return True
    return (view.capacity if view.lengths is None else int((view.lengths + added).max())) <= columns


def key_of(view: CacheView, q: Tensor, spec: tuple[Any, Any, Any], options: tuple[Any, ...]) -> Kind:
    """As `quick.key_of`, where all that is known of keys and values is one number."""
    if (
        quick.is_compiling()
        or not view.plain
        or view.kind == UNKNOWN
        or type(q) not in PLAIN
        or quick.transforms_active()
        or quick.len_dispatch_stack()
        or forward_ad._current_level >= 0
        or is_lazy(q)
        or q.device != view.device
        or view.device.type not in ("cpu", "cuda")
        or quick.is_autocast_enabled(view.device.type)
        or isinstance(options[1], Tensor)
        or isinstance(options[2], Tensor)
    ):
        return None, ()
    try:
        hash(options)
    except TypeError:  # what cannot be hashed is refused on the long way
        return None, ()
    extra: list[Tensor] | tuple[()] = ()
    made: Any = None
    mask, scores, sink = spec
    if mask is not None or sink is not None or (scores is not None and scores != ()):
        extra = []
        made = quick._spec_key(mask, scores, sink, extra)
        if made is None:
            return None, ()
    kinds = (type(options[1]), type(options[2]), type(options[3]))
    return ("cache", view.kind, q.shape, q.stride(), q.dtype, made, options, kinds, registry.version), extra


def check_out(out: Any, q: Tensor, view: CacheView, spec: tuple[Any, Any, Any]) -> None:
    """Raise unless the result can be written to `out`; nothing has been computed yet."""
    if not isinstance(out, Tensor):
        raise DTypeError(f"out is a tensor, not {type(out).__name__}")
    shape, kind = (*q.shape[:-1], view.v.shape[-1]), autocast_type(q)
    if tuple(out.shape) != shape or out.dtype != kind or out.device != q.device:
        rule = f"out has the result's shape, dtype and device: {shape}, {kind}, {q.device}"
        raise ShapeError(message(rule, {"out": out, "q": q}))
    mask, scores, sink = spec
    terms = [as_mask(mask).term, *[s.term for s in as_terms(scores)]]
    inputs = [q, view.k, view.v, sink, *[t for term in terms if term is not None for t in term.leaves]]
    if out.requires_grad or (
        torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
    ):
        raise OptionError("out= does not support autograd\nCall under torch.no_grad(), or without out=.")


def check_view(view: CacheView) -> None:
    """Raise ShapeError for lengths, padding and pages outside their tensors, on the processor."""
    capacity = view.capacity
    for name, t in (("lengths", view.lengths), ("leftpad", view.leftpad)):
        for b, n in enumerate(() if t is None else t.tolist()):
            if not 0 <= n <= capacity:
                raise ShapeError(f"{name} are from 0 to {capacity}\n  sequence {b}: {n}")
    if view.block_table is not None:
        spans = (view.leftpad, view.lengths)
        check_pages(view.block_table, view.k.shape[2], view.k.shape[0], spans)
