"""NaN where nothing may look: tensors inside NaN-filled buffers, and allocations that return NaN-filled
memory.

Uninitialised memory is usually zero or old data of about the right size, so a read past the end of a row or
an accumulator that was never cleared passes most tests. Filling both with NaN makes such faults visible in
every result they touch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")


def poisonous(*size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A tensor full of NaN (floating dtypes) or of a large odd number (integers, True for bool)."""
    return fill_with_poison(torch.zeros(size, dtype=dtype, device=device))


def fill_with_poison(t: Tensor) -> Tensor:
    """Overwrite t with NaN, with 77 for integers and with True for bool; returns t."""
    if t.is_floating_point() or t.is_complex():
        return t.fill_(NAN)
    return t.fill_(True) if t.dtype == torch.bool else t.fill_(77)


def _contiguous(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _offset(t: Tensor) -> Tensor:
    """Contiguous, its first element one element past an aligned address."""
    buffer = poisonous(t.numel() + 8, dtype=t.dtype, device=t.device)
    return buffer[1 : 1 + t.numel()].view(t.shape).copy_(t)


def _swapped(t: Tensor) -> Tensor:
    """Stored with the two dimensions before the last swapped: (B, N, H, D) seen as (B, H, N, D)."""
    buffer = poisonous(*t.transpose(-2, -3).shape, dtype=t.dtype, device=t.device)
    return buffer.transpose(-2, -3).copy_(t)


def _sliced(t: Tensor) -> Tensor:
    """The interior of a buffer that is larger in every dimension."""
    buffer = poisonous(*(n + 3 for n in t.shape), dtype=t.dtype, device=t.device)
    return buffer[tuple(slice(1, 1 + n) for n in t.shape)].copy_(t)


def _rows(t: Tensor) -> Tensor:
    """Rows whose stride is head_dim + 3, an odd number of bytes away from any alignment."""
    buffer = poisonous(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype, device=t.device)
    return buffer[..., : t.shape[-1]].copy_(t)


def _stepped(t: Tensor) -> Tensor:
    """Every second element of the last dimension, so the innermost stride is 2."""
    buffer = poisonous(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=t.device)
    return buffer[..., ::2].copy_(t)


def _reversed(t: Tensor) -> Tensor:
    """Dimensions stored in reverse order: head_dim has the largest stride."""
    order = tuple(range(t.ndim))[::-1]
    buffer = poisonous(*t.shape[::-1], dtype=t.dtype, device=t.device)
    return buffer.permute(order).copy_(t)


def _interleaved(t: Tensor) -> Tensor:
    """One of three neighbours per token, as in a packed (…, N, 3, H, D) projection."""
    stored = t.transpose(-2, -3).shape if t.ndim == 4 else t.shape
    buffer = poisonous(*stored[:-2], 3, *stored[-2:], dtype=t.dtype, device=t.device)
    view = buffer[..., 1, :, :]
    return (view.transpose(-2, -3) if t.ndim == 4 else view).copy_(t)


def _expanded(t: Tensor) -> Tensor:
    """First element of the first dimension, expanded with stride 0. Its rows must be equal."""
    return t[:1].clone().expand_as(t)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "bnhd": _swapped,
    "sliced": _sliced,
    "rows": _rows,
    "stepped": _stepped,
    "reversed": _reversed,
    "interleaved": _interleaved,
    "expanded": _expanded,
}


def place(t: Tensor, layout: str) -> Tensor:
    """A view with t's values, laid out as named inside a NaN-filled buffer. Raises KeyError for an unknown
    name.
    """
    with torch.no_grad():
        return LAYOUTS[layout](t.detach())


def surround(t: Tensor, layout: str, margin: int = 128) -> Tensor:
    """As `place`, with `margin` elements of NaN before and after the storage."""
    with torch.no_grad():
        placed = LAYOUTS[layout](t.detach())
        stored = placed.untyped_storage().nbytes() // placed.element_size()
        buffer = poisonous(stored + 2 * margin, dtype=t.dtype, device=t.device)
        buffer[margin : margin + stored] = torch.as_strided(placed, (stored,), (1,), 0)
        return torch.as_strided(buffer, placed.shape, placed.stride(), placed.storage_offset() + margin)


ALLOCATORS: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


def _called_from(package: str, depth: int) -> bool:
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return name == package or name.startswith(package + ".")


@contextmanager
def poisoned_memory(package: str = "tilewise") -> Iterator[None]:
    """While active, torch.empty and its kin return poisoned memory to callers inside `package`, and plain
    memory to others.

    A custom op's body runs below every torch function mode, so the allocators are replaced where modules look
    them up. numpy.empty and numpy.empty_like are covered when numpy is loaded. Fake and meta tensors hold no
    memory and are left as they are.
    """
    targets = list(ALLOCATORS)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        targets += [(numpy, "empty"), (numpy, "empty_like")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in targets]
    try:
        for owner, name, original in originals:
            setattr(owner, name, _poisoning(original, package))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _poisoning(original: Callable[..., Any], package: str) -> Callable[..., Any]:
    def allocate(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if not _called_from(package, 2):
            return made
        if isinstance(made, Tensor):
            if made.is_meta or type(made) is not Tensor:
                return made
            with torch.no_grad():
                return fill_with_poison(made)
        if made.dtype.kind == "f":
            made.fill(NAN)
        return made

    return allocate
