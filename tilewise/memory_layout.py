"""Comparing how tensors lie in memory with how others did, at the price of a call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def laid_out_as(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Whether as many tensors are like these in all but contents and addresses: type, dtype, device, shape, strides,
    whether a gradient is required, and transforms and modes of torch's dispatcher (its Python modes are not
    compared).
    None where torch has no such comparison."""
    try:
        from torch._C._dynamo import guards  # not an interface that torch promises

        make: Any = guards.TensorGuards
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        return make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]
    except (ImportError, AttributeError, TypeError, SystemError):
        return None


@functools.lru_cache(maxsize=1)
def compares_records() -> bool:
    """Whether `laid_out_as` sees that calls are recorded before autograd sees them (`recorders.PRE_DISPATCH`)."""
    t = torch.empty(0, device="cpu")
    same = laid_out_as((t,))
    if same is None or not same(t):
        return False
    with torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.PreDispatch):
        return not same(t)


def lies_as(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """As `laid_out_as`; where torch has no such comparison, of dtypes, devices, shapes and strides alone."""
    return laid_out_as(tensors) or functools.partial(_equal, [_layout(t) for t in tensors])


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.shape, t.stride()


def _equal(layouts: list[tuple[Any, ...]], *tensors: Tensor) -> bool:
    return [_layout(t) for t in tensors] == layouts
