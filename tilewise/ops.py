"""The op layer: four functions (forward, backward, jvp, hvp) as torch.library ops and as autograd Functions.

Eager code goes through the Functions, which are quicker and know forward mode, second order and vmap;
compiled, exported and fake code goes through the ops. Both call the same `run_*`, and a test holds them
equal. A call is (q, k, v, leaves, ints, floats, seed, text): see `problem`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.backends.protocol import Gradients, Needs
from tilewise.checks import check_values
from tilewise.dispatch import choose
from tilewise.problem import Inputs, Problem, decode_inputs, decode_problem, empty_in_order, in_memory
from tilewise.recorders import (
    goes_through_op,
    is_recorded,
    refuse_forward_mode,
    refuse_recording,
    refuse_transforms,
    uncompiled,
)
from tilewise.vmap import batch_backward, batch_by_loop, batch_forward, refuse_old_vmap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.backends.protocol import Prepared
    from tilewise.backends.reference.second_order import Direction


class Numbers(NamedTuple):
    """The part of a call that holds no tensor."""

    ints: tuple[int, ...]
    floats: tuple[float, ...]
    text: str
    run: Prepared | None = None


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply; without a transform's binding of arguments, 40 microseconds, where none is active."""
    if torch._C._are_functorch_transforms_active():
        return uncompiled(function.apply)(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _decode(tensors: Sequence[Tensor], seed: Tensor | None, numbers: Numbers) -> tuple[Problem, Inputs]:
    q, k, v, *leaves = [in_memory(t) for t in tensors]
    problem = decode_problem(q, k, v, leaves, numbers.text)
    return problem, decode_inputs(problem, (q, k, v, leaves), numbers.ints, numbers.floats, seed)


def run_forward(tensors: Sequence[Tensor], seed: Tensor | None, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """(out, lse) by the chosen backend; tensors are q, k, v and the leaves."""
    if numbers.run is not None:
        return numbers.run(*tensors[:3], tensors[3:], True)  # type: ignore
    problem, inputs = _decode(tensors, seed, numbers)
    check_values(problem, inputs)
    with _own_precision(inputs.q):
        return choose(problem).forward(problem, inputs)


def _own_precision(q: Tensor) -> torch.autocast:
    """No autocast inside: the types were settled at the door, and float32 arithmetic stays float32."""
    return torch.autocast(q.device.type, enabled=False)


def run_backward(
    tensors: Sequence[Tensor], seed: Tensor | None, numbers: Numbers, saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None], needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of those tensors for which `needs` is True, in order."""
    problem, inputs = _decode(tensors, seed, numbers)
    problem = problem.with_gradient()
    out, lse, do = map(in_memory, (*saved, grads[0]))
    dlse = None if grads[1] is None else in_memory(grads[1])
    if problem.options.subset:  # no forward has looked at this call
        check_values(problem, inputs)
    num = len(problem.spec.leaves)
    wanted = Needs(
        needs[0], needs[1], needs[2], tuple(needs[3 : 3 + num]), problem.spec.sink and needs[3 + num]
    )
    with _own_precision(inputs.q):
        found = choose(problem).backward(problem, inputs, (out, lse), (do, dlse), wanted)
    return _select(_in_order(found, len(tensors)), tensors, needs)


def _in_order(found: Gradients, count: int) -> list[Tensor | None]:
    """Gradients in the order of the call's tensors; offsets and lengths have none."""
    listed = [found.dq, found.dk, found.dv, *found.leaves, found.sink]
    return [*listed[:count], *[None] * (count - len(listed))]


def _select(found: list[Tensor | None], tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    chosen = zip(found, tensors, needs, strict=True)
    return [torch.zeros_like(x) if g is None else g for g, x, need in chosen if need]


def _direction(problem: Problem, dots: Sequence[Tensor | None]) -> Direction:
    from tilewise.backends.reference.second_order import Direction

    num = len(problem.spec.leaves)
    sink = dots[3 + num] if problem.spec.sink else None
    return Direction(dots[0], dots[1], dots[2], tuple(dots[3 : 3 + num]), sink)


def run_jvp(
    tensors: Sequence[Tensor], seed: Tensor | None, numbers: Numbers, saved: tuple[Tensor, Tensor],
    dots: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tangents of (out, lse) along `dots`, one per tensor or None."""
    from tilewise.backends.reference.second_order import jvp

    problem, inputs = _decode(tensors, seed, numbers)
    with _own_precision(inputs.q):
        return jvp(problem, inputs, _direction(problem, dots), *saved)


def run_hvp(
    tensors: Sequence[Tensor], seed: Tensor | None, numbers: Numbers, saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None], dots: Sequence[Tensor | None], needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Tangents along `dots` of the gradients that `run_backward` gives."""
    from tilewise.backends.reference.second_order import hvp, jvp

    problem, inputs = _decode(tensors, seed, numbers)
    direction = _direction(problem, dots)
    with _own_precision(inputs.q):
        outputs = (*saved, *jvp(problem, inputs, direction, *saved))
        found = hvp(problem, inputs, direction, outputs, grads)
    return _select(_in_order(found, len(tensors)), tensors, needs)


_CALL = "Tensor q, Tensor k, Tensor v, Tensor[] leaves, SymInt[] ints, float[] floats, Tensor? seed, str text"
torch.library.define("tilewise::attention", f"({_CALL}) -> (Tensor, Tensor)")
torch.library.define(
    "tilewise::attention_backward",
    f"({_CALL}, Tensor out, Tensor lse, Tensor do, Tensor? dlse, bool[] needs) -> Tensor[]",
)


@torch.library.impl("tilewise::attention", "CompositeExplicitAutograd")
def _attention_op(q, k, v, leaves, ints, floats, seed, text):
    return run_forward([q, k, v, *leaves], seed, Numbers(tuple(ints), tuple(floats), text))


@torch.library.register_fake("tilewise::attention")
def _attention_fake(q, k, v, leaves, ints, floats, seed, text):
    problem = decode_problem(q, k, v, leaves, text)
    out = empty_in_order(q, problem.out_shape, problem.out_dtype)
    return out, q.new_empty(problem.lse_shape, dtype=problem.compute_dtype)


@torch.library.impl("tilewise::attention_backward", "CompositeExplicitAutograd")
def _backward_op(q, k, v, leaves, ints, floats, seed, text, out, lse, do, dlse, needs):
    numbers = Numbers(tuple(ints), tuple(floats), text)
    return run_backward([q, k, v, *leaves], seed, numbers, (out, lse), (do, dlse), needs)


@torch.library.register_fake("tilewise::attention_backward")
def _backward_fake(q, k, v, leaves, ints, floats, seed, text, out, lse, do, dlse, needs):
    return [x.new_empty(x.shape) for x, need in zip([q, k, v, *leaves], needs, strict=True) if need]


def _op_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, leaves, ints, floats, seed, text = inputs
    ctx.save_for_backward(q, k, v, seed, *output, *leaves)
    ctx.numbers = (ints, floats, text)
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple:
    q, k, v, seed, out, lse, *leaves = ctx.saved_tensors
    ints, floats, text = ctx.numbers
    needs = [*ctx.needs_input_grad[:3], *(x.requires_grad for x in leaves)]
    do = torch.zeros_like(out) if do is None else do
    found = iter(
        torch.ops.tilewise.attention_backward(
            q, k, v, leaves, ints, floats, seed, text, out, lse, do, dlse, needs
        )
    )
    grads = [next(found) if need else None for need in needs]
    return (*grads[:3], grads[3:], None, None, None, None)


torch.library.register_autograd("tilewise::attention", _op_backward, setup_context=_op_setup)


def _refuse_double_backward(ctx: Any, *_: Any) -> None:
    from tilewise.errors import UnsupportedProblem

    raise UnsupportedProblem(
        "the op has no second derivative in compiled code or on fake tensors\nTake it in eager code, which has."
    )


torch.library.register_autograd("tilewise::attention_backward", _refuse_double_backward)


def _written(tensors: Sequence[Tensor], seed: Tensor | None, numbers: Numbers) -> tuple[Any, ...]:
    """A call as the ops take it."""
    ints, floats = list(numbers.ints), list(numbers.floats)
    return (*tensors[:3], list(tensors[3:]), ints, floats, seed, numbers.text)


class Attention(torch.autograd.Function):
    """(out, lse) of a call: forward mode by Jvp, reverse mode by Backward."""

    @staticmethod
    def forward(numbers: Numbers, seed: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        if numbers.run is None and goes_through_op(tensors):  # below a transform of torch.func
            return torch.ops.tilewise.attention(*_written(tensors, seed, numbers))
        return run_forward(tensors, seed, numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.numbers, seed, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(seed, *output, *tensors)
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            ctx.save_for_forward(seed, *output, *tensors)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, others: int = 2) -> tuple:
        seed, out, lse, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[others:]
        if (do is None and dlse is None) or not any(needs):
            return (None,) * (others + len(tensors))
        do = torch.zeros_like(out) if do is None else do
        refuse_old_vmap(do, dlse)
        given = (ctx.numbers, needs, seed, out.detach(), lse.detach(), do, dlse, *tensors)
        found = iter(apply(Backward, *given) if is_recorded() else Backward.forward(*given))
        return (*(None,) * others, *(next(found) if need else None for need in needs))

    @staticmethod
    @uncompiled
    def jvp(ctx: Any, *dots: Any) -> tuple[Tensor, Tensor]:
        refuse_old_vmap(*dots)
        seed, out, lse, *tensors = ctx.saved_tensors
        return apply(Jvp, ctx.numbers, seed, out.detach(), lse.detach(), len(tensors), *tensors, *dots[2:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, numbers: Numbers, seed: Tensor | None, *tensors: Tensor) -> tuple:
        return batch_forward(Attention, info, in_dims, numbers, seed, *tensors)


class Backward(torch.autograd.Function):
    """Gradients of a call from do and dlse. out and lse are constants here: what they depend on is in hvp."""

    @staticmethod
    def forward(numbers, needs, seed, out, lse, do, dlse, *tensors):
        if goes_through_op(tensors):  # below a transform of torch.func
            written = _written(tensors, seed, numbers)
            return tuple(torch.ops.tilewise.attention_backward(*written, out, lse, do, dlse, list(needs)))
        return tuple(run_backward(tensors, seed, numbers, (out, lse), (do, dlse), needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.numbers, ctx.needs, *saved = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def _dots(needs: Sequence[bool], given: Sequence[Tensor | None]) -> list[Tensor | None]:
        values = iter(given)
        return [next(values) if need else None for need in needs]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        seed, out, lse, do, dlse, *tensors = ctx.saved_tensors
        dots = Backward._dots(ctx.needs, cotangents)
        ddo = ddlse = None
        if ctx.needs_input_grad[5] or ctx.needs_input_grad[6]:
            ddo, ddlse = apply(Jvp, ctx.numbers, seed, out, lse, len(tensors), *tensors, *dots)
        wanted = ctx.needs_input_grad[7:]
        found: Any = iter(())
        if any(wanted):
            found = iter(
                apply(Hvp, ctx.numbers, wanted, seed, out, lse, do, dlse, len(tensors), *tensors, *dots)
            )
        grads = (next(found) if want else None for want in wanted)
        return (None, None, None, None, None, ddo, None if dlse is None else ddlse, *grads)

    @staticmethod
    @uncompiled
    def jvp(ctx: Any, *dots: Any) -> tuple:
        seed, out, lse, do, dlse, *tensors = ctx.saved_tensors
        do_dot, dlse_dot, *tensor_dots = dots[5:]
        total = apply(
            Hvp, ctx.numbers, ctx.needs, seed, out, lse, do, dlse, len(tensors), *tensors, *tensor_dots
        )
        if do_dot is not None or dlse_dot is not None:
            do_dot = torch.zeros_like(do) if do_dot is None else do_dot
            more = apply(Backward, ctx.numbers, ctx.needs, seed, out, lse, do_dot, dlse_dot, *tensors)
            total = tuple(a + b for a, b in zip(total, more, strict=True))
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return batch_backward(Backward, info, in_dims, *args)


class Jvp(torch.autograd.Function):
    """Tangents of out and lse; arguments after `count` are that many tensors and as many tangents."""

    @staticmethod
    def forward(numbers, seed, out, lse, count, *both):
        refuse_recording(both)
        return run_jvp(both[:count], seed, numbers, (out, lse), both[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.numbers, seed, out, lse, ctx.count, *both = inputs
        ctx.save_for_backward(seed, out, lse, *both)
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple:
        seed, out, lse, *both = ctx.saved_tensors
        tensors, dots = both[: ctx.count], both[ctx.count :]
        do = torch.zeros_like(out) if do is None else do
        wanted, wanted_dots = ctx.needs_input_grad[5 : 5 + ctx.count], ctx.needs_input_grad[5 + ctx.count :]
        first: Any = iter(())
        second: Any = iter(())
        if any(wanted):
            first = iter(
                apply(Hvp, ctx.numbers, wanted, seed, out, lse, do, dlse, ctx.count, *tensors, *dots)
            )
        if any(wanted_dots):
            second = iter(apply(Backward, ctx.numbers, wanted_dots, seed, out, lse, do, dlse, *tensors))
        grads = [next(first) if want else None for want in wanted]
        return (None,) * 5 + (*grads, *(next(second) if want else None for want in wanted_dots))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        from tilewise.errors import UnsupportedProblem

        raise UnsupportedProblem(
            "forward over forward mode of attention is not implemented\n"
            "Use forward over reverse (torch.func.hessian, or jvp of torch.func.grad)."
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return batch_by_loop(Jvp, info, in_dims, *args)


class Hvp(torch.autograd.Function):
    """Tangents of the gradients; the end of the line: its own derivative would be third order."""

    @staticmethod
    def forward(numbers, needs, seed, out, lse, do, dlse, count, *both):
        refuse_recording(both)
        return tuple(run_hvp(both[:count], seed, numbers, (out, lse), (do, dlse), both[count:], needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def _refuse() -> None:
        from tilewise.errors import UnsupportedProblem

        raise UnsupportedProblem(
            "third-order derivatives of attention are not implemented; first and second are"
        )

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        Hvp._refuse()

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        Hvp._refuse()

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return batch_by_loop(Hvp, info, in_dims, *args)


def call(tensors: list[Tensor], seed: Tensor | None, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, differentiable."""
    refuse_transforms()
    if not torch._C._are_functorch_transforms_active() and goes_through_op(tensors):
        refuse_forward_mode()
        return torch.ops.tilewise.attention(*_written(tensors, seed, numbers))
    # Transforms know Functions, not ops; their forward takes the op where something records it.
    return apply(Attention, numbers, seed, *tensors)
