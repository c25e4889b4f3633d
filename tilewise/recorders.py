"""Who watches a call: compilers, recorders and tensor subclasses, which see ops and nothing that hides from them."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.errors import UnsupportedProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# These modes see ops, and give real tensors fake results.
_RECORDERS = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]

key_included = torch._C._dispatch_tls_is_dispatch_key_included
PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
"""Included where calls are recorded before autograd sees them: make_fx(pre_dispatch=True), the tracing of export."""


def is_recorded() -> bool:
    """Whether autograd (as under create_graph=True), forward mode or a transform looks at what is done now."""
    transformed = torch._C._are_functorch_transforms_active()
    return transformed or torch.is_grad_enabled() or forward_ad._current_level >= 0


def goes_through_op(tensors: Sequence[Tensor]) -> bool:
    """Whether somebody watches who must see an op."""
    if torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(m) is not None for m in _RECORDERS):
        return True
    if key_included(PRE_DISPATCH):
        return True
    # Only what dispatches by itself (fake, functional, distributed tensors) needs the op; a subclass that merely
    # renames Tensor keeps its forward mode, second order and vmap.
    own = Tensor.__torch_dispatch__
    return any(type(x).__torch_dispatch__ is not own or x.device.type == "meta" for x in tensors)


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn, which dynamo leaves alone: autograd runs it inside compiled code that it interrupts.

    torch.compiler.disable does that, and imports dynamo, some seconds; it is asked once dynamo is there.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return fn(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(fn))
        return disabled[0](*args)

    return run


def refuse_transforms() -> None:
    """Transforms of torch.func do not see through an op.  Without fullgraph the frame then runs uncompiled."""
    if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise UnsupportedProblem(
            "transforms of torch.func around attention inside torch.compile are not implemented\n"
            "Leave the transform outside torch.compile, or leave out fullgraph=True: it then runs uncompiled."
        )


def refuse_forward_mode() -> None:
    """An op has no forward mode, and torch would take its tangents as zero without a word."""
    if forward_ad._current_level >= 0:
        _refuse_derivative()


def refuse_recording(tensors: Sequence[Tensor | None]) -> None:
    """Forward mode and second order are no ops."""
    if goes_through_op([x for x in tensors if x is not None]):
        _refuse_derivative()


def _refuse_derivative() -> None:
    raise UnsupportedProblem(
        "forward mode and second order inside compiled, recorded, fake or meta code are not implemented\n"
        "Call torch.func.jvp, hessian or a double backward outside torch.compile and make_fx."
    )
