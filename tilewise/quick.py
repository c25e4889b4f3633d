"""The short way of a call whose like was made before.

Validation, text and dispatch depend on everything about a call but the tensors' contents and addresses. So the
first call of a kind goes the long way; then its backend may `prepare` a function for its like, found here by a
key of shapes, strides, types, devices, the spec's text and numbers, and the options. Where one kind follows itself
even that is not asked: torch compares the tensors with those of the last call. What is not plain (compiled or
transformed code, tensors that autocast converts, tensor subclasses, dropout, offsets in tensors, numbers that memory
does not hold as they are) always goes the long way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tilewise.dispatch import choose, registry
from tilewise.leaf_extents import room_of_leaves
from tilewise.memory_layout import compares_records, laid_out_as
from tilewise.ops import Attention, Numbers
from tilewise.problem import decode_inputs, decode_problem, is_lazy
from tilewise.recorders import PRE_DISPATCH, key_included
from tilewise.spec.masks import as_mask
from tilewise.spec.scores import ScoreTerm, as_terms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tilewise.backends.protocol import Prepared
    from tilewise.written import Written

MOST = 2048
"""Kinds of calls remembered; then all are forgotten."""
_PLAIN = (Tensor, nn.Parameter)
_NUMBERS = (int, type(None))

# Looked up once: a call of this kind takes microseconds.
is_compiling = torch.compiler.is_compiling
is_traced = torch.compiler.is_dynamo_compiling  # other compilers run Python in modes, which `Like` sees
is_autocast_enabled = torch.is_autocast_enabled
is_grad_enabled = torch.is_grad_enabled
transforms_active = torch._C._are_functorch_transforms_active
len_dispatch_stack = torch._C._len_torch_dispatch_stack


class Known(torch.autograd.Function):
    """`ops.Attention` of a call that a backend has prepared for, where no transform and no forward mode is active: the
    context is filled on the way, which saves a call of Python."""

    @staticmethod
    def forward(
        ctx: Any, numbers: Numbers, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        run: Any = numbers.run
        out, lse = run(q, k, v, extra, True)
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(None, out, lse, q, k, v, *extra)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        return again(ctx, do, dlse) or Attention.backward(ctx, do, dlse, 1)


class KnownOut(torch.autograd.Function):
    """`Known` of a call whose lse nobody asked for. A second output is a third of what autograd costs."""

    @staticmethod
    def forward(ctx: Any, numbers: Numbers, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        run: Any = numbers.run
        out: Tensor
        out, lse = run(q, k, v, extra, True)
        ctx.numbers = numbers
        ctx.save_for_backward(None, out, lse, q, k, v, *extra)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> Any:
        return again(ctx, do, None) or Attention.backward(ctx, do, None, 1)


def again(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """What `Attention.backward` gives, by a backend that made a backward like this one before; None: the long way."""
    backward = getattr(ctx.numbers.run, "backward", None)
    if (
        backward is None
        or do is None
        or is_compiling()
        or is_grad_enabled()
        or type(do) not in _PLAIN
        or (dlse is not None and type(dlse) not in _PLAIN)
        or transforms_active()
        or len_dispatch_stack()
        or forward_ad._current_level >= 0
        or is_lazy(do)
        or (dlse is not None and is_lazy(dlse))
    ):
        return None
    _, out, lse, *tensors = ctx.saved_tensors
    found = backward(tensors, (out, lse), (do, dlse), ctx.needs_input_grad[1:])
    return None if found is None else (None, *found)


# Without a transform's binding of arguments (`ops.apply`).
apply: Any = super(torch.autograd.Function, Known).apply
apply_out: Any = super(torch.autograd.Function, KnownOut).apply


class Ready(NamedTuple):
    """A kind of call: how to run it without gradients, its numbers for the way with them, and `room_of_leaves`."""

    run: Prepared
    numbers: Numbers
    room: tuple[int | None, int | None]


class Kinds(dict[tuple[Any, ...] | None, Ready | None]):
    """The kinds of calls by key; None for one that has no short way. before: the kind of the last call that was looked
    up, last: what to compare the next one with. known: what holds of all kinds that are known, [True]; it is exchanged
    when they are forgotten."""

    def __init__(self) -> None:
        self.before: Ready | None = None
        self.last: Like | None = None
        self.known = [True]

    def clear(self) -> None:
        """Forget all kinds."""
        super().clear()
        self.before = self.last = None
        self.known[0] = False
        self.known = [True]


ready = Kinds()
registry.changed.append(ready.clear)


class Like:
    """A call that others are compared with, whose spec holds no tensors: a third of what a key takes.

    Torch compares what torch.compile's guards do: type, dtype, device, shape, strides, whether a gradient is required,
    and all that changes what a call means, such as transforms and modes. Not to be made where autocast is on: its dtype
    is not compared.

    matches(tensors, mask, scores, sink, options of `key_of`): whether a call is like this one.
    run: how to run it without gradients.
    """

    def __init__(
        self, same: Callable[..., bool], spec: tuple[Any, Any, Any], options: tuple[Any, ...], found: Any
    ) -> None:
        self.found = found
        run = None if found is None else found.run
        self.run: Prepared = getattr(run, "without_gradients", run)  # type: ignore[assignment]
        self.differentiable = True
        self.matches = _matches(same, spec, options)


def _matches(
    same: Callable[..., bool], spec: tuple[Any, Any, Any], options: tuple[Any, ...]
) -> Callable[..., bool]:
    """`Like.matches`, in one function that meets little memory: after work that fills the caches that is its time."""
    known, watched = ready.known, not compares_records()
    held = (same, known, watched, spec[0], spec[1], options)

    def matches(
        tensors: tuple[Any, ...], mask: Any, scores: Any, sink: Any, options: tuple[Any, ...]
    ) -> bool:
        same, known, watched, mask_, scores_, options_ = held
        scale_, q_, k_, h_, ordered_, invariant_, backend_, quadratic_ = options_
        scale, q_offset, k_offset, h_offset, ordered, invariant, backend, quadratic = options
        # Numbers that are equal may be of a type that is refused: True, 1.0, a tensor.
        return (
            mask is mask_
            and scores is scores_
            and sink is None
            and (scale is scale_ or (type(scale) is float and scale == scale_))
            and q_offset is q_
            and k_offset is k_
            and h_offset is h_
            and ordered is ordered_
            and invariant is invariant_
            and backend is backend_
            and quadratic is quadratic_
            and known[0]
            and forward_ad._current_level < 0
            and not len_dispatch_stack()  # modes, which it does not compare
            and not (watched and key_included(PRE_DISPATCH))
            and same(*tensors)
        )

    return matches


def like(
    tensors: tuple[Tensor, ...], spec: tuple[Any, Any, Any], options: tuple[Any, ...], found: Any
) -> Like | None:
    """What calls are compared with that may be like this one; None where torch has no such comparison, or autocast is
    on."""
    if spec[2] is not None or not (type(spec[1]) is tuple or isinstance(spec[1], ScoreTerm)):
        return None  # what holds terms and may change
    if is_autocast_enabled("cuda" if tensors[0].is_cuda else "cpu"):
        return None
    same = laid_out_as(tensors)
    if same is None:
        return None
    made = Like(same, spec, options, found)
    made.differentiable = any([t.requires_grad for t in tensors])
    return made


def notice(
    found: Ready, tensors: tuple[Tensor, Tensor, Tensor], spec: tuple[Any, Any, Any], extra: Sequence[Tensor],
    options: tuple[Any, ...],
) -> None:  # fmt: skip
    """Remember a call of a known kind, the tensors of its mask and scores beside it; the second in a row makes it what
    the next one is compared with."""
    if ready.before is not found:
        ready.before = found
    elif not extra and (ready.last is None or ready.last.found is not found):
        ready.last = like(tensors, spec, options, found)


def key_of(
    q: Any, k: Any, v: Any, mask: Any, scores: Any, sink: Any, options: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, Sequence[Tensor]]:
    """(key, the call's tensors after q, k and v); the key is None for a call that always goes the long way.

    options: scale, q_offset, k_offset, h_offset, and the rest of the keywords that are no tensors, in a fixed order.
    True and 1.0 equal 1 and are refused as offsets: only int and None have a short way. The caller looks the key up,
    which raises TypeError for options that cannot be hashed.
    """
    if (
        is_compiling()
        or type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        or transforms_active()
        or len_dispatch_stack()
        or key_included(PRE_DISPATCH)
        or forward_ad._current_level >= 0
        or q.is_neg()  # `problem.is_lazy`
        or k.is_neg()
        or v.is_neg()
        or q._is_zerotensor()
        or k._is_zerotensor()
        or v._is_zerotensor()
    ):
        return None, ()
    if q.is_cuda:
        kind, device = "cuda", q.get_device()
        if k.get_device() != device or v.get_device() != device:
            return None, ()
    elif q.is_cpu and k.is_cpu and v.is_cpu:
        kind, device = "cpu", -1
    else:
        return None, ()
    # Without an argument it asks for cuda, and is quicker.
    if is_autocast_enabled() if kind == "cuda" else is_autocast_enabled(kind):
        # Autocast would change nothing here; what a backend prepared only launches kernels.
        target = torch.get_autocast_dtype(kind)
        if q.dtype != target or k.dtype != target or v.dtype != target:
            return None, ()
    _, q_offset, k_offset, h_offset, *_ = options
    if type(k_offset) is not int or type(h_offset) is not int or type(q_offset) not in _NUMBERS:
        return None, ()
    extra: list[Tensor] | tuple[()] = ()
    spec: Any = None
    if mask is not None or sink is not None or (scores is not None and scores != ()):
        extra = []
        spec = _spec_key(mask, scores, sink, extra)
        if spec is None:
            return None, ()
    try:
        layout = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
    except RuntimeError:  # what has no strides is refused on the long way
        return None, ()
    key = (
        *layout, q.dtype, k.dtype, v.dtype,
        device, spec, options, registry.version,
    )  # fmt: skip
    return key, extra


def _spec_key(mask: Any, scores: Any, sink: Any, extra: list[Tensor]) -> tuple[Any, ...] | None:
    """The part of the key that the spec makes; its tensors go to `extra`. None: the long way."""
    spec: tuple[Any, ...] = ()
    if mask is not None:
        term = as_mask(mask).term
        if term is not None:
            spec = (term.text, term.ints, term.floats)
            extra += term.leaves
    if scores is not None and scores != ():
        if not isinstance(scores, (ScoreTerm, tuple, list)):  # one that can be read only once
            return None
        for score in as_terms(scores):
            spec += (score.term.text, score.term.ints, score.term.floats)
            extra += score.term.leaves
    if sink is not None:
        if not isinstance(sink, Tensor):
            return None
        spec += ("sink",)
        extra.append(sink)
    for t in extra:
        if type(t) not in _PLAIN or is_lazy(t):
            return None
        spec += (t.shape, t.stride(), t.dtype, t.device)
    return spec


def run(
    found: Ready, qkv: tuple[Tensor, Tensor, Tensor], extra: Sequence[Tensor], return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """The result of a call of a known kind, differentiable."""
    q, k, v = qkv
    if is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (extra and any([t.requires_grad for t in extra]))
    ):
        if not return_lse:
            alone: Tensor = apply_out(found.numbers, q, k, v, *extra)
            return alone
        out, lse = apply(found.numbers, q, k, v, *extra)
    else:
        out, lse = found.run(q, k, v, extra, return_lse)
    return (out, lse) if return_lse else out


def remember(key: tuple[Any, ...], written: Written) -> None:
    """Let the backend that ran this call prepare for its like."""
    if key in ready:
        return
    q, k, v, *leaves = written.tensors
    numbers = written.numbers
    problem = decode_problem(q, k, v, leaves, numbers.text)
    prepare = getattr(choose(problem), "prepare", None)
    prepared = None
    room: tuple[int | None, int | None] = (None, None)
    if prepare is not None:
        inputs = decode_inputs(problem, (q, k, v, leaves), numbers.ints, numbers.floats, None)
        prepared, room = prepare(problem, inputs), room_of_leaves(problem, inputs)
    if len(ready) >= MOST:
        ready.clear()
    ready[key] = None if prepared is None else Ready(prepared, numbers._replace(run=prepared), room)
