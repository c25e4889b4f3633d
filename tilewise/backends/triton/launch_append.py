"""Appending to a cache: from `Append` to one launch of the append kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.reference import append as reference
from tilewise.backends.triton.compile import Build, Launcher, types_of
from tilewise.backends.triton.direct import Direct
from tilewise.backends.triton.launch import plain_launcher
from tilewise.backends.triton.tiles import padded
from tilewise.memory_layout import lies_as

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.backends.protocol import Append

TENSORS = (
    "k_new_ptr", "v_new_ptr", "k_ptr", "v_ptr", "q_ptr", "q_out_ptr", "lengths_ptr", "table_ptr", "cu_new_ptr",
    "cu_q_ptr", "cos_ptr", "sin_ptr", "at_q_ptr", "at_k_ptr", "first_ptr", "k_scale_ptr", "v_scale_ptr",
)  # fmt: skip
STRIDES = (
    "kn_b", "kn_h", "kn_n", "vn_b", "vn_h", "vn_n", "q_b", "q_h", "q_n", "o_b", "o_h", "o_n", "k_p", "k_h", "k_n",
    "v_p", "v_h", "v_n", "table_b", "cos_n", "sin_n", "ks_p", "ks_h", "vs_p", "vs_h",
)  # fmt: skip
SIZES = (
    "batch", "heads_kv", "heads", "tokens", "each", "rows", "rows_each", "pages", "page_size", "capacity",
    "positions", "size_d", "size_dv",
)  # fmt: skip
ALIGNED = (0, 1, 2, 3, 4, 5)
"""Numbers of the tensors whose rows may begin at multiples of 16 bytes."""
OUT = TENSORS.index("q_out_ptr")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_RECIPES = 1024
_recipes: dict[tuple[object, ...], _Recipe] = {}


class _Recipe(NamedTuple):
    """A launch that calls of one kind share; direct: with its arguments laid out, or None."""

    run: Any
    direct: Direct | None
    numbers: tuple[object, ...]
    grid: int


def append(inputs: Append) -> Tensor | None:
    """Turn and write the new keys and values; gives the turned q, None where no query was to be turned.

    float64, and float8 on devices without it, go to the reference.
    """
    if not _takes(inputs):
        return reference.append(inputs)
    tensors = _tensors(inputs)
    out, aligned = tensors[OUT], _joint(tensors) & 15 == 0
    recipe = _recipe(inputs, tensors, aligned)
    if recipe.direct is None or torch._C._cuda_getDevice() != recipe.direct.device:
        recipe.run(recipe.grid, [*tensors, *recipe.numbers])
    elif recipe.grid:
        block = recipe.direct.block()
        for n, t in enumerate(tensors):
            if t is not None:
                block.words[recipe.direct.slots[n]] = t.data_ptr()
        recipe.direct(recipe.grid, block)
        recipe.direct.free.append(block)
    _written(inputs)
    return out


def _written(inputs: Append) -> None:
    """What autograd kept of the pools is no longer what it was."""
    torch.autograd.graph.increment_version(inputs.k)
    torch.autograd.graph.increment_version(inputs.v)


def _recipe(inputs: Append, tensors: list[Tensor | None], aligned: bool) -> _Recipe:
    key = (
        *[None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors],
        aligned, inputs.interleaved, inputs.k.get_device(),
    )  # fmt: skip
    recipe = _recipes.get(key)
    if recipe is None:
        recipe = _make(inputs, tensors, aligned)
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        _recipes[key] = recipe
    return recipe


def _tensors(inputs: Append) -> list[Tensor | None]:
    """The tensors of a launch, in the order of TENSORS, as the kernel reads them."""
    turning = inputs.q is not None and inputs.cos is not None
    q = _rows(inputs.q) if turning and inputs.q is not None else None
    return [
        _rows(inputs.k_new), _rows(inputs.v_new), inputs.k, inputs.v, q, inputs.empty_q() if q is not None else None,
        _plain(inputs.lengths), _plain(inputs.block_table), _plain(inputs.cu_seqlens_new),
        _plain(inputs.cu_seqlens_q) if q is not None else None,
        _rows(inputs.cos), _rows(inputs.sin), _plain(inputs.positions_q), _plain(inputs.positions_k),
        _plain(inputs.first), _plain(inputs.k_scale), _plain(inputs.v_scale),
    ]  # fmt: skip


def _joint(tensors: list[Tensor | None]) -> int:
    """The addresses that may have to be aligned, by or."""
    joint = 0
    for n in ALIGNED:
        t = tensors[n]
        joint |= 0 if t is None else t.data_ptr()
    return joint


class Prepared:
    """Appends of dense tokens that differ from one that was made in their tensors' contents and addresses only."""

    def __init__(
        self, direct: Direct, grid: int, out: Tensor | None, aligned: bool, held: list[Tensor]
    ) -> None:
        self.held = lies_as(held)
        self.direct, self.grid, self.aligned = direct, grid, aligned
        self.at = [direct.slots.get(n) for n in range(len(TENSORS))]
        self.out = None if out is None else (out.shape, out.stride(), out.dtype, out.device)

    def __call__(self, inputs: Append) -> Tensor | None:
        """As `append`."""
        if not self.held(*inputs.held()):
            return append(inputs)
        q, out = inputs.q, None
        k_new, v_new, k, v = (
            inputs.k_new.data_ptr(),
            inputs.v_new.data_ptr(),
            inputs.k.data_ptr(),
            inputs.v.data_ptr(),
        )
        joint, block, at = k_new | v_new | k | v, self.direct.block(), self.at
        words = block.words
        words[at[0]], words[at[1]], words[at[2]], words[at[3]] = k_new, v_new, k, v
        words[at[6]] = inputs.lengths.data_ptr()
        if q is not None and self.out is not None and inputs.cos is not None and inputs.sin is not None:
            shape, strides, dtype, device = self.out
            out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            words[at[4]], words[at[5]] = q.data_ptr(), out.data_ptr()
            joint |= q.data_ptr()
            words[at[10]], words[at[11]] = inputs.cos.data_ptr(), inputs.sin.data_ptr()
        if inputs.block_table is not None:
            words[at[7]] = inputs.block_table.data_ptr()
        if (joint & 15 and self.aligned) or torch._C._cuda_getDevice() != self.direct.device:
            self.direct.free.append(block)
            return append(inputs)
        self.direct(self.grid, block)
        self.direct.free.append(block)
        _written(inputs)
        return out


def prepare(inputs: Append) -> Prepared | None:
    """A function for appends like one that `append` has done; None where the long way is as good: packed tokens,
    given positions, factors of what is stored, tensors that the kernel reads as copies."""
    plain = (
        inputs.cu_seqlens_new, inputs.cu_seqlens_q, inputs.positions_q, inputs.positions_k, inputs.first,
        inputs.k_scale, inputs.v_scale,
    )  # fmt: skip
    if any(t is not None for t in plain) or not _takes(inputs):
        return None
    turning = inputs.q is not None and inputs.cos is not None
    if not turning and (inputs.q is not None or inputs.cos is not None):
        return None
    tensors = _tensors(inputs)
    given = (
        inputs.k_new, inputs.v_new, inputs.k, inputs.v, inputs.q, tensors[OUT], inputs.lengths, inputs.block_table,
        None, None, inputs.cos, inputs.sin,
    )  # fmt: skip
    if any(a is not b for a, b in zip(tensors, given, strict=False)):
        return None
    aligned = _joint(tensors) & 15 == 0
    recipe = _recipe(inputs, tensors, aligned)
    if recipe.direct is None or not recipe.grid:
        return None
    return Prepared(recipe.direct, recipe.grid, tensors[OUT], aligned, inputs.held())


def _takes(inputs: Append) -> bool:
    if inputs.k_new.dtype not in TYPES or inputs.v_new.dtype not in TYPES or not len(inputs.lengths):
        return False
    if inputs.q is not None and inputs.q.dtype not in TYPES:
        return False
    for pool in (inputs.k, inputs.v):
        if pool.dtype == torch.float8_e4m3fn:
            if pool.is_cuda and (torch.version.hip or torch.cuda.get_device_capability(pool.device) < (8, 9)):
                return False
        elif pool.dtype not in TYPES:
            return False
    return inputs.cos is None or inputs.cos.dtype != torch.float64


def _rows(t: Tensor | None) -> Tensor | None:
    """A tensor whose last stride is 1."""
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def _plain(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.is_contiguous() else t.contiguous()


def _make(inputs: Append, tensors: list[Tensor | None], aligned: bool) -> _Recipe:
    """Decide how calls of this kind run, and compile their kernel."""
    k_new, v_new, k, v, q, out = tensors[:6]
    assert k_new is not None and v_new is not None and k is not None and v is not None
    packed, packed_q = inputs.cu_seqlens_new is not None, q is not None and q.ndim == 3
    size_d, size_dv = k.shape[3], v.shape[3]
    step = _step([t for t in (k_new, v_new, q, out) if t is not None], (size_d, size_dv), aligned)
    step_p = _step([k, v], (size_d, size_dv), aligned)
    cos, sin = tensors[10], tensors[11]
    half = 0 if cos is None else cos.shape[-1]
    strides = [
        *_three(k_new, step), *_three(v_new, step), *_three(q, step), *_three(out, step),
        *(x // step_p for x in k.stride()[:3]), *(x // step_p for x in v.stride()[:3]),
        0 if tensors[7] is None else tensors[7].shape[1], 0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0), *_scale_strides(tensors[15]), *_scale_strides(tensors[16]),
    ]  # fmt: skip
    batch, pages, page_size = len(inputs.lengths), k.shape[0], k.shape[2]
    each = 0 if packed else k_new.shape[2]
    tokens = k_new.shape[0] if packed else batch * each
    rows_each = 0 if q is None or packed_q else q.shape[2]
    rows = 0 if q is None else q.shape[0] if packed_q else batch * rows_each
    heads = 0 if q is None else q.shape[1]
    capacity = page_size * (1 if tensors[7] is None else tensors[7].shape[1])
    numbers = (
        *strides, batch, k.shape[1], heads, tokens, max(each, 1), rows, max(rows_each, 1), pages, page_size,
        capacity, 1 if cos is None else cos.shape[0], size_d, size_dv,
    )  # fmt: skip
    d, dv = padded(size_d), padded(size_dv)
    block = max(1, min(16, 2048 // max(d, dv)))
    constants = (
        ("PACKED", packed), ("PACKED_Q", packed_q), ("HALF", half), ("NEIGHBOURS", inputs.interleaved),
        ("BLOCK_T", block), ("D_PAD", d), ("DV_PAD", dv), ("STEP", step), ("STEP_P", step_p),
    )  # fmt: skip
    grid = (2 * k.shape[1] + heads) * -(-max(tokens, rows) // block)
    return _compiled(tensors, numbers, constants, (step, step_p), grid)


def _compiled(
    tensors: list[Tensor | None], numbers: tuple[object, ...], constants: tuple[tuple[str, object], ...],
    steps: tuple[int, int], grid: int,
) -> _Recipe:  # fmt: skip
    from tilewise.backends.triton.append_kernel import append_program

    values = [*tensors, *numbers]
    types = types_of((*TENSORS, *STRIDES, *SIZES), values, dict.fromkeys(STRIDES, "i64"))
    aligned = tuple(
        n for n in ALIGNED if tensors[n] is not None and (steps[1] if n in (2, 3) else steps[0]) > 1
    )
    device = tensors[2].get_device()  # type: ignore[union-attr]
    run = plain_launcher(append_program, Build(types, aligned, constants, 4, 1), max(device, 0))
    direct = None
    if isinstance(run, Launcher):
        try:
            direct = Direct(run, types, values)
        except ValueError:
            direct = None
    return _Recipe(run, direct, numbers, grid)


def _step(tensors: list[Tensor], sizes: tuple[int, int], aligned: bool) -> int:
    """Elements of 16 bytes if all rows begin at multiples of them, else 1."""
    size = tensors[0].element_size()
    step = 16 // size
    if not aligned or any(t.element_size() != size for t in tensors) or any(x % step for x in sizes):
        return 1
    for t in tensors:
        if any(n > 1 and x % step for x, n in zip(t.stride()[:-1], t.shape, strict=False)):
            return 1
    return step


def _three(t: Tensor | None, step: int) -> tuple[int, int, int]:
    """(sequence, head, token) strides, in steps."""
    if t is None:
        return 0, 0, 0
    if t.ndim == 3:
        return 0, t.stride(1) // step, t.stride(0) // step
    return t.stride(0) // step, t.stride(1) // step, t.stride(2) // step


def _scale_strides(t: Tensor | None) -> tuple[int, int]:
    """(page, head) strides of scales, (H_kv,) or (P, H_kv)."""
    if t is None:
        return 0, 0
    return (t.shape[1], 1) if t.ndim == 2 else (0, 1)
