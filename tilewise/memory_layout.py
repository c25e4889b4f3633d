"""Comparing how tensors lie in memory with how others did, at the price of a call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def laid_out_as(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Whether as many tensors are like these in all but contents and addresses: type, dtype, device, shape, strides,
    whether a gradient is required, and transforms and modes of torch's dispatcher (its Python modes are not compared).
    None where torch has no such comparison."""
    try:
        from torch._C._dynamo import guards  # not an interface that torch promises

        make: Any = guards.TensorGuards
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        return make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]
    except (ImportError, AttributeError, TypeError, SystemError):
        return None


def lies_as(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """As `laid_out_as`; where torch has no such comparison, of dtypes, devices, shapes and strides alone."""
    return laid_out_as(tensors) or functools.partial(_equal, [_layout(t) for t in tensors])


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.shape, t.stride()


def _equal(layouts: list[tuple[Any, ...]], *tensors: Tensor) -> bool:
    return [_layout(t) for t in tensors] == layouts
