"""transformers' mask functions, read as Tilewise masks.

transformers describes a mask as a function (b, h, q, k) -> bool over absolute indices, built by a handful of
builders (`and_masks`, `sliding_window_overlay`, ...), beside a padding mask (B, N). Eager code reads a builder's
name and arguments from the function's closure; compiled code cannot, so `register` has the builders return a
`Named`, which carries both. A function of the user's own is traced like `tilewise.custom`, its captured tensors
as leaves.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tilewise.errors import SpecError, UnsupportedProblem
from tilewise.spec.custom import custom
from tilewise.spec.masks import Mask, causal, document, key_padding, window

if TYPE_CHECKING:
    from collections.abc import Callable

BUILDERS = {
    "and_masks": ("mask_functions",),
    "or_masks": ("mask_functions",),
    "sliding_window_overlay": ("sliding_window",),
    "sliding_window_bidirectional_overlay": ("sliding_window",),
    "chunked_overlay": ("chunk_size", "left_padding"),
    "blockwise_overlay": ("block_sequence_ids",),
    "packed_sequence_mask_function": ("packed_sequence_mask",),
    "remap_positions_for_packed_sequence": ("mask_function", "position_ids"),
}
"""Builders in transformers.masking_utils, with the names of their arguments (which their closures keep)."""


class Named:
    """A mask function that knows its builder's name and arguments; called, it is that function."""

    def __init__(self, function: Callable[..., Any], name: str, values: dict[str, Any]) -> None:
        self.function, self.name, self.values = function, name, values

    def __call__(self, batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(batch_idx, head_idx, q_idx, kv_idx)


def named_builder(name: str, original: Callable[..., Any]) -> Callable[..., Named]:
    """transformers' builder, its result a Named."""
    names = BUILDERS[name]

    def build(*args: Any, **kwargs: Any) -> Named:
        values = (
            {"mask_functions": args} if names[0] == "mask_functions" else dict(zip(names, args, strict=False))
        )
        return Named(original(*args, **kwargs), name, {**values, **kwargs})

    build.tilewise_original = original  # type: ignore[attr-defined]
    build.__doc__ = original.__doc__
    return build


class MaskPlan(BlockMask):
    """What the layers of one forward pass share: the mask, and where its rows and columns stand.

    mask : visibility by position, row and column.  q_offset : position of the first query, an int or a tensor
    (1,); k_offset : that of the first key.  sizes : (B, N_q, N_k).

    It holds O(N) numbers. It is a BlockMask by name only, because transformers hands on a mask that it has made
    before (as generate does) if it is a tensor or a BlockMask with four dimensions, and rebuilds it otherwise.
    """

    def __init__(self, mask: Mask, offsets: tuple[Any, Any], sizes: tuple[Any, Any, Any]) -> None:
        self.mask, self.sizes = mask, sizes
        self.q_offset, self.k_offset = offsets

    @property
    def seqlen_k(self) -> Any:
        """Number of keys it was made for."""
        return self.sizes[2]

    @property
    def shape(self) -> tuple[Any, ...]:
        """(B, 1, N_q, N_k), of a matrix that does not exist."""
        return (self.sizes[0], 1, self.sizes[1], self.sizes[2])

    @property
    def ndim(self) -> int:
        """4."""
        return 4

    def __repr__(self) -> str:
        return (
            f"MaskPlan({self.mask}, q_offset={self.q_offset}, k_offset={self.k_offset}, shape={self.shape})"
        )

    __str__ = __repr__

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedProblem(
            "this model's code slices the attention mask, which here is a description and not a matrix\n"
            "Use attn_implementation='sdpa' for this model, or pass a 4-D attention_mask of your own."
        )

    def to(self, device: Any = None, *_: Any, **__: Any) -> MaskPlan:
        """The plan with its tensors on a device."""
        if device is None or not isinstance(device, (str, int, torch.device)):
            return self
        q_offset = self.q_offset.to(device) if isinstance(self.q_offset, Tensor) else self.q_offset
        moved = [
            None if term is None else term._replace(leaves=tuple(leaf.to(device) for leaf in term.leaves))
            for term in (self.mask.formula, self.mask.padding)
        ]
        return MaskPlan(Mask(*moved), (q_offset, self.k_offset), self.sizes)


class Rows:
    """Absolute indices of a call's rows and columns, and the leaves that are read by them."""

    def __init__(self, q: tuple[Any, Any], k: tuple[Any, Any], device: Any) -> None:
        self.q, self.k, self.device = q, k, device
        self.absolute = False  # whether some part of the mask needs absolute positions

    def indices(self, which: tuple[Any, Any]) -> Tensor:
        places: Tensor = torch.arange(which[1], device=self.device) + which[0]
        return places

    def read(self, ids: Tensor, which: tuple[Any, Any]) -> Tensor:
        """ids (B, N) at the call's rows or columns: (B, N_q or N_k)."""
        start, size = which
        return ids[:, start : start + size] if isinstance(start, int) else ids[:, self.indices(which)]


def describe(fn: Any) -> tuple[str, dict[str, Any]] | None:
    """(builder's name, its arguments) of a mask function, or None if it is nobody's we know."""
    if isinstance(fn, Named):
        return fn.name, fn.values
    if torch.compiler.is_compiling() or not isinstance(fn, types.FunctionType) or fn.__closure__ is None:
        return None
    name = fn.__qualname__.split(".")[0]
    if fn.__module__ != "transformers.masking_utils" or name not in BUILDERS:
        return None
    cells = zip(fn.__code__.co_freevars, (c.cell_contents for c in fn.__closure__), strict=True)
    values = dict(cells)
    return (name, values) if set(BUILDERS[name]) == set(values) else None


def to_mask(fn: Any, rows: Rows, library: Any, packed: Any = None) -> Mask:
    """A mask function as a Mask.

    library : transformers.masking_utils.  packed : position_ids (B, N) inside `remap_positions_...`, where
    positions restart with every sequence; what stands beside it says which pairs share a sequence.

    Raises UnsupportedProblem for a function that cannot be read.
    """
    if fn is library.causal_mask_function:
        return causal()
    if fn is getattr(library, "bidirectional_mask_function", None):
        return Mask()
    known = describe(fn)
    if known is None:
        return _traced(fn, rows, packed)
    name, values = known
    if name in ("and_masks", "or_masks"):
        return _joined(name, values["mask_functions"], rows, library, packed)
    if name == "remap_positions_for_packed_sequence":
        return _traced(
            fn, rows, packed
        )  # only beside the packing does it mean what it is read as: see _joined
    if name == "sliding_window_overlay":
        return window(values["sliding_window"] - 1, None)  # the query itself counts
    if name == "sliding_window_bidirectional_overlay":
        return window(values["sliding_window"], values["sliding_window"])
    if name == "chunked_overlay":
        return _chunks(values, rows, packed)
    ids: Tensor = values["block_sequence_ids" if name == "blockwise_overlay" else "packed_sequence_mask"]
    return document(rows.read(ids, rows.q), rows.read(ids, rows.k))


def _joined(name: str, functions: Any, rows: Rows, library: Any, packed: Any) -> Mask:
    """All, or any, of several mask functions."""
    parts = [(fn, describe(fn)) for fn in functions]
    beside_packing = name == "and_masks" and any(
        d is not None and d[0] == "packed_sequence_mask_function" for _, d in parts
    )
    masks = []
    for fn, known in parts:
        if beside_packing:
            masks.append(_in_sequence(fn, known, rows, library, packed))
        else:
            masks.append(to_mask(fn, rows, library, packed))
    result = masks[0]
    for mask in masks[1:]:
        result = result & mask if name == "and_masks" else result | mask
    return result


def _in_sequence(fn: Any, known: Any, rows: Rows, library: Any, packed: Any) -> Mask:
    """A mask function that only counts inside a packed sequence.

    There positions rise by one from token to token, so distances and order are those of the rows themselves.
    """
    if known is not None and known[0] == "remap_positions_for_packed_sequence":
        return to_mask(known[1]["mask_function"], rows, library, known[1]["position_ids"])
    if known is not None and known[0] == "or_masks":
        parts = [_in_sequence(f, describe(f), rows, library, packed) for f in known[1]["mask_functions"]]
        return functools.reduce(lambda a, b: a | b, parts)
    return to_mask(fn, rows, library, packed)


def _chunks(values: dict[str, Any], rows: Rows, packed: Any) -> Mask:
    """Runs of `chunk_size` tokens, counted from the first token that is no padding; each run has a number."""
    pad, size = values["left_padding"].reshape(-1, 1), values["chunk_size"]
    places = [
        rows.indices(which)[None] if packed is None else rows.read(packed, which)
        for which in (rows.q, rows.k)
    ]
    # A negative number would hide what lies before the first token: count up from 0.
    first = (pad + size - 1) // size
    numbers = [(place - pad) // size + first for place in places]
    return document(numbers[0], numbers[1])


def _traced(fn: Any, rows: Rows, packed: Any) -> Mask:
    """A function of the user's own, traced over absolute positions."""
    if torch.compiler.is_compiling() or packed is not None:
        where = "inside compiled code" if packed is None else "on packed sequences"
        raise UnsupportedProblem(
            f"a mask function that is not one of transformers' own cannot be read {where}\n"
            "Make the mask outside, in eager code, and pass it as a 4-D attention_mask."
        )
    tensors: list[Tensor] = []
    _lift(fn, tensors, None)
    rows.absolute = True

    def keep(b: Any, h: Any, q: Any, k: Any, leaves: tuple[Any, ...]) -> Any:
        return _lift(fn, tensors, leaves)(b, h, q, k)

    try:
        return custom(
            lambda b, h, q, k, l0=None, l1=None, l2=None, l3=None: keep(b, h, q, k, (l0, l1, l2, l3)),
            *tensors,
        )
    except (SpecError, TypeError, AttributeError) as error:
        raise UnsupportedProblem(
            f"the mask function {getattr(fn, '__qualname__', fn)} cannot be read: {error}\n"
            "It may compute with its arguments and index captured tensors (four at most); or pass a 4-D "
            "attention_mask."
        ) from error


def _lift(fn: Any, tensors: list[Tensor], leaves: tuple[Any, ...] | None) -> Any:
    """The function with its captured tensors replaced by leaves, through the functions that it captures.

    tensors : collects the captured tensors while leaves is None, and numbers them afterwards.
    """
    if isinstance(fn, Named):
        fn = fn.function
    if isinstance(fn, tuple):
        return tuple(_lift(part, tensors, leaves) for part in fn)
    if isinstance(fn, Tensor):
        place = next((n for n, t in enumerate(tensors) if t is fn), None)
        if place is None:
            tensors.append(fn)
        return fn if leaves is None or place is None else leaves[place]
    if not isinstance(fn, types.FunctionType) or not fn.__closure__:
        return fn
    cells = tuple(types.CellType(_lift(cell.cell_contents, tensors, leaves)) for cell in fn.__closure__)
    return types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)


def make_mask_function(library: Any) -> Callable[..., MaskPlan]:
    """The mask function to register; library is transformers.masking_utils."""

    def tilewise_mask(
        *, batch_size: Any = None, kv_length: Any, q_length: Any = None, q_offset: Any = None, kv_offset: Any = 0,
        mask_function: Any = library.causal_mask_function, attention_mask: Tensor | None = None,
        cache_position: Tensor | None = None, device: Any = None, **_: Any,
    ) -> MaskPlan:  # fmt: skip
        # Up to transformers 5.1 the rows come as their positions.
        if cache_position is not None and q_length is None:
            q_length, q_offset, device = cache_position.shape[0], cache_position[:1], cache_position.device
        if attention_mask is not None:
            device = attention_mask.device
        q_offset = 0 if q_offset is None else q_offset
        if isinstance(q_offset, Tensor):
            # The length of a static cache, which the cache moves on before the layers attend.
            q_offset = q_offset.reshape(-1).clone()
        rows = Rows((q_offset, q_length), (kv_offset, kv_length), device)
        mask = to_mask(mask_function, rows, library) & _padding(attention_mask, kv_offset, kv_length)
        offsets = (q_offset, kv_offset) if rows.absolute else (q_offset - kv_offset, 0)
        return MaskPlan(mask, offsets, (batch_size, q_length, kv_length))

    return tilewise_mask


def _padding(attention_mask: Tensor | None, start: Any, length: Any) -> Mask:
    """Columns `start` to `start + length` of a padding mask (B, N); what lies past its end is no key yet."""
    if attention_mask is None:
        return Mask()
    missing = start + length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    present = attention_mask[:, start : start + length].to(torch.bool)
    # On a GPU the look would be a sync, and costs more than the leaf.
    if present.device.type == "cpu" and not torch.compiler.is_compiling() and bool(present.all()):
        return Mask()
    return key_padding(present)
