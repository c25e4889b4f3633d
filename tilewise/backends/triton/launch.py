"""From a Problem and its tensors to kernel launches: the forward pass, its splits and their merge."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.triton import tiles as choice
from tilewise.backends.triton.compile import Build, launcher, types_of
from tilewise.backends.triton.layout import BLOCK, Slots, fill
from tilewise.backends.triton.machine import machine_of
from tilewise.backends.triton.source import Entry, argument_types, module_of
from tilewise.spec.dropout import keep_threshold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.backends.triton.tiles import Tiles
    from tilewise.problem import Inputs, Problem

STRIDES = tuple(
    f"{name}:i64" for name in (
        "q_b", "q_h", "q_n", "q_d", "k_b", "k_h", "k_n", "k_d", "v_b", "v_h", "v_n", "v_d",
        "o_s", "o_b", "o_h", "o_n", "o_d", "l_s", "l_b", "l_h",
    )
)  # fmt: skip
FORWARD = Entry(
    "forward", "tilewise.backends.triton.forward_kernel", "forward_program",
    (
        "q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr", "sink_ptr", "seed_ptr", "q_offset_ptr", "k_offset_ptr",
        "cu_q_ptr", "cu_k_ptr", "used_q_ptr", "used_k_ptr", "k_desc", "v_desc", *STRIDES,
        "batch", "heads", "group", "seqlen_q", "seqlen_k", "row_tiles", "swizzle", "splits", "split_tiles",
        "q_offset", "k_offset", "h_offset", "b_offset", "size_d", "size_dv", "threshold:u32", "scale:fp32",
        "drop_factor:fp32",
    ),
    ("score", "keep", "classify", "classify_coarse"),
    (
        "HAS_MASK", "HAS_TERMS", "FUSED", "DROPOUT", "VARLEN", "LAST", "PACKED", "BLOCK_M", "BLOCK_N", "D_PAD",
        "DV_PAD", "EVEN", "EVEN_V", "STEP", "UNIT", "PRECISION", "TMA",
    ),
)  # fmt: skip
TMA_WORK = 2.0e10
"""Operations from which descriptors are worth their host time (about 40 microseconds of an H200)."""
SWIZZLE = 8
"""Heads whose row tiles run side by side, so that their K and V share the second-level cache."""
_lock = threading.Lock()
_launchers: dict[tuple[object, ...], Any] = {}


class Strides(NamedTuple):
    """(batch, head, token, d) strides of q, k, v and out in units of `step`; unit: every last stride is 1."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    step: int
    unit: bool


def four_strides(problem: Problem, t: Tensor) -> tuple[int, int, int, int]:
    """(batch, head, token, d) strides in elements of a q-, k-, v- or out-like tensor."""
    if problem.options.layout == "dense":
        return t.stride()  # type: ignore[return-value]
    n, h, d = t.stride()
    return 0, h, n, d


def strides_of(problem: Problem, tensors: Sequence[Tensor]) -> Strides:
    """The strides of q, k, v and out, and the step that divides them all where addresses allow it."""
    found = [four_strides(problem, t) for t in tensors]
    unit = all(f[3] == 1 or t.shape[-1] <= 1 for f, t in zip(found, tensors, strict=True))
    step = 16 // problem.dtype.itemsize
    aligned = unit and not any(t.data_ptr() & 15 for t in tensors)
    if not (aligned and not any(x % step for f in found for x in f[:3])):
        step = 1
    scaled = [tuple(x // step for x in f) for f in found]
    return Strides(*scaled, step, unit)  # type: ignore[arg-type]


def kernel_launcher(
    problem: Problem, slots: Slots, entry: Entry, build: Build, device: int, entries: tuple[Entry, ...]
) -> Any:
    """The launcher of a kernel of the spec's module, compiled once per device and build."""
    key = (problem.spec.text, slots, entry.name, build, device)
    found = _launchers.get(key)
    if found is None:
        with _lock:
            found = _launchers.get(key)
            if found is None:
                module = module_of(problem.spec, slots, entries)
                found = launcher(getattr(module, entry.name), build, device)
                _launchers[key] = found
    return found


def plain_launcher(kernel: Any, build: Build, device: int) -> Any:
    """The launcher of a kernel that depends on no spec."""
    key = (kernel.__module__, kernel.__name__, build, device)
    found = _launchers.get(key)
    if found is None:
        with _lock:
            found = _launchers.setdefault(key, launcher(kernel, build, device))
    return found


# ---- tables --------------------------------------------------------------------------------------------------


def tables(slots: Slots, leaves: Sequence[Tensor], device: int) -> list[Tensor]:
    """The tables of block extremes that the spec's mask reads."""
    return [block_table(leaves[t.slot], t.dim, device) for t in slots.tables]


def block_table(leaf: Tensor, dim: int, device: int) -> Tensor:
    """(2, ...) int32: least and greatest of each BLOCK elements of one dimension."""
    from tilewise.backends.triton.extremes_kernel import block_extremes

    shape = list(leaf.shape)
    length, stride = shape[dim], leaf.stride(dim)
    blocks = -(-length // BLOCK)
    others = [(shape[d], leaf.stride(d)) for d in range(leaf.ndim) if d != dim]
    after = 1
    for d in range(dim + 1, leaf.ndim):
        after *= shape[d]
    lines = 1
    for size, _ in others:
        lines *= size
    while len(others) > 3:
        raise AssertionError("leaves have at most four dimensions")
    others = [(1, 0)] * (3 - len(others)) + others
    shape[dim] = blocks
    table = torch.empty((2, *shape), dtype=torch.int32, device=leaf.device)
    plane = lines * blocks
    names = (
        "leaf_ptr",
        "table_ptr",
        "length",
        "stride",
        "n1",
        "n2",
        "s0",
        "s1",
        "s2",
        "blocks",
        "after",
        "plane",
    )
    values = (
        leaf, table, length, stride, others[1][0], others[2][0], others[0][1], others[1][1], others[2][1],
        blocks, after, plane,
    )  # fmt: skip
    kinds = dict.fromkeys(("stride", "s0", "s1", "s2", "plane"), "i64")
    build = Build(types_of(names, values, kinds), (), (("BLOCK", BLOCK),), 1, 1)
    run = plain_launcher(block_extremes, build, device)
    # The first grid dimension is the one that may be large.
    run(blocks * lines, values)
    return table


# ---- the forward pass ----------------------------------------------------------------------------------------


def precision_of(dtype: torch.dtype) -> str:
    """How products of float32 are formed: in full, unless torch allows TF32."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def per_batch(t: object, batch: int) -> Tensor | None:
    """An offset or length tensor as one contiguous entry per batch element; None if it is no tensor."""
    if not isinstance(t, torch.Tensor):
        return None
    t = t.reshape(-1)
    return (t.expand(batch) if t.shape[0] == 1 and batch > 1 else t).contiguous()


def dropout_numbers(problem: Problem, p: float) -> tuple[int, float]:
    """(threshold of the kept words, factor of the kept weights)."""
    if not problem.spec.dropout:
        return 0, 1.0
    return min(keep_threshold(p), 2**32 - 1), 1.0 / (1.0 - p) if p < 1.0 else 0.0


def forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, slots: Slots) -> None:
    """Write out and lse (every row of every sequence; what lies outside of them is left alone)."""
    device = max(inputs.q.get_device(), 0)
    machine = machine_of(device)
    tiles, (splits, split_tiles) = schedule(problem, machine)
    s = problem.shape
    if splits == 1:
        _launch(problem, inputs, (out, lse), slots, tiles, (1, split_tiles), device)
        return
    parts = inputs.q.new_empty((splits, *problem.out_shape), dtype=torch.float32)
    part_lse = inputs.q.new_empty((splits, *problem.lse_shape), dtype=torch.float32)
    if problem.options.layout == "varlen":
        part_lse.fill_(-float("inf"))
        parts = inputs.q.new_empty((splits, s.num_heads_q, s.seqlen_q, s.head_dim_v), dtype=torch.float32)
        parts.zero_()
        part_view = parts.transpose(1, 2)
    else:
        part_view = parts
    _launch(problem, inputs, (part_view, part_lse), slots, tiles, (splits, split_tiles), device)
    _combine(problem, inputs, (parts, part_lse), (out, lse), device)


@functools.lru_cache(maxsize=4096)
def schedule(problem: Problem, machine: Any) -> tuple[Tiles, tuple[int, int]]:
    """Tiles and splits of a problem on a machine."""
    tiles = choice.choose(problem, machine)
    return tiles, choice.splits_of(problem, tiles, machine)


def _launch(
    problem: Problem, inputs: Inputs, results: tuple[Tensor, Tensor], slots: Slots, tiles: Tiles,
    splits: tuple[int, int], device: int,
) -> None:  # fmt: skip
    s, options, spec = problem.shape, problem.options, problem.spec
    out, lse = results
    split = splits[0] > 1
    one = out[0] if split else out
    strides = strides_of(problem, (inputs.q, inputs.k, inputs.v, one))
    varlen = options.layout == "varlen"
    lse_strides = (lse.stride(0), *lse.stride()[1:]) if split else (0, *lse.stride())
    l_b, l_h = (0, lse_strides[1]) if varlen else lse_strides[1:3]
    threshold, factor = dropout_numbers(problem, inputs.dropout)
    heads = s.num_heads_kv if tiles.packed else s.num_heads_q
    rows = choice.row_tiles(problem, tiles)
    d, dv = choice.padded(s.head_dim), choice.padded(s.head_dim_v)
    tma = _wants_tma(problem, tiles, strides, device)
    k_desc, v_desc = _descriptors(problem, inputs, tiles, (d, dv)) if tma else (None, None)
    sink = None if split or inputs.sink is None else inputs.sink.contiguous()
    q_offset = inputs.q_offset if isinstance(inputs.q_offset, int) else 0
    k_offset = inputs.k_offset if isinstance(inputs.k_offset, int) else 0
    values = [
        inputs.q, inputs.k, inputs.v, out, lse, sink, inputs.seed if spec.dropout else None,
        per_batch(inputs.q_offset, s.batch), per_batch(inputs.k_offset, s.batch),
        per_batch(inputs.cu_seqlens_q, 1), per_batch(inputs.cu_seqlens_k, 1),
        per_batch(inputs.seqused_q, 1), per_batch(inputs.seqused_k, 1), k_desc, v_desc,
        *strides.q, *strides.k, *strides.v, out.stride(0) // strides.step if split else 0, *strides.out,
        lse_strides[0] if split else 0, l_b, l_h,
        s.batch, heads, max(problem.group, 1), s.seqlen_q, s.seqlen_k, rows, SWIZZLE, splits[0], splits[1],
        q_offset, k_offset, inputs.h_offset, inputs.b_offset, s.head_dim, s.head_dim_v, threshold, inputs.scale,
        factor, *fill(slots, inputs.leaves, inputs.ints, inputs.floats, tables(slots, inputs.leaves, device)),
    ]  # fmt: skip
    constants = (
        ("HAS_MASK", spec.keep is not None), ("HAS_TERMS", spec.score is not None),
        ("FUSED", spec.score is None and inputs.scale > 0), ("DROPOUT", spec.dropout), ("VARLEN", varlen),
        ("LAST", inputs.q_offset is None), ("PACKED", tiles.packed), ("BLOCK_M", tiles.block_m),
        ("BLOCK_N", tiles.block_n), ("D_PAD", d), ("DV_PAD", dv), ("EVEN", d == s.head_dim),
        ("EVEN_V", dv == s.head_dim_v), ("STEP", strides.step), ("UNIT", strides.unit),
        ("PRECISION", precision_of(problem.dtype)), ("TMA", tma),
    )  # fmt: skip
    names = [a.partition(":")[0] for a in FORWARD.arguments] + list(slots.names)
    aligned = tuple(range(4)) if strides.step > 1 else ()
    aligned += tuple(
        len(FORWARD.arguments) + at
        for at, layout in zip(slots.leaf_at, slots.leaves, strict=True)
        if layout.step > 1
    )
    build = Build(
        types_of(names, values, argument_types(FORWARD, slots)), aligned, constants, tiles.warps, tiles.stages
    )
    run = kernel_launcher(problem, slots, FORWARD, build, device, (FORWARD,))
    units = heads if varlen else s.batch * heads
    run(units * rows * splits[0], values)


def _wants_tma(problem: Problem, tiles: Tiles, strides: Strides, device: int) -> bool:
    """Whether key tiles come by descriptors: where the hardware has them, and the call is long enough."""
    s, machine = problem.shape, machine_of(device)
    if machine.kind != "cuda" or machine.arch < 90 or problem.dtype == torch.float32 or not strides.unit:
        return False
    if strides.step == 1 or problem.options.batch_invariant or max(s.head_dim, s.head_dim_v) > 256:
        return False
    batch = 1 if problem.options.layout == "varlen" else s.batch
    work = 2.0 * batch * s.num_heads_q * s.seqlen_q * s.seqlen_k * (s.head_dim + s.head_dim_v)
    return work >= TMA_WORK and min(s.num_heads_kv, s.seqlen_k, s.head_dim, s.head_dim_v) > 0


def _descriptors(problem: Problem, inputs: Inputs, tiles: Tiles, sizes: tuple[int, int]) -> tuple[Any, Any]:
    """Descriptors of k and v as (batch, head, token, d), blocks of BLOCK_N tokens."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    found = []
    for t, width in zip((inputs.k, inputs.v), sizes, strict=True):
        view = t if problem.options.layout == "dense" else t.transpose(0, 1).unsqueeze(0)
        strides = [
            x if n > 1 else _still(view, d)
            for d, (x, n) in enumerate(zip(view.stride(), view.shape, strict=True))
        ]
        found.append(TensorDescriptor(view, list(view.shape), strides, [1, 1, tiles.block_n, width]))
    return found[0], found[1]


def _still(view: Tensor, d: int) -> int:
    """A stride for a dimension of size 1, where any will do that the hardware takes."""
    return 1 if d == view.ndim - 1 else 16


def _combine(
    problem: Problem,
    inputs: Inputs,
    parts: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    device: int,
) -> None:
    from tilewise.backends.triton.combine_kernel import combine

    s, (out, lse) = problem.shape, results
    batch = 1 if problem.options.layout == "varlen" else s.batch
    lines = batch * s.num_heads_q * s.seqlen_q
    width = choice.padded(s.head_dim_v)
    rows = max(1, min(16, 4096 // width))
    names = (
        "part_ptr", "part_lse_ptr", "out_ptr", "lse_ptr", "sink_ptr", "o_b", "o_h", "o_n", "o_d", "lines", "heads",
        "seqlen_q", "splits", "size_dv",
    )  # fmt: skip
    values = (
        *parts, out, lse, None if inputs.sink is None else inputs.sink.contiguous(), *four_strides(problem, out),
        lines, s.num_heads_q, s.seqlen_q, parts[0].shape[0], s.head_dim_v,
    )  # fmt: skip
    kinds = dict.fromkeys(("o_b", "o_h", "o_n", "o_d", "lines"), "i64")
    build = Build(types_of(names, values, kinds), (), (("BLOCK_M", rows), ("DV_PAD", width)), 4, 1)
    plain_launcher(combine, build, device)(-(-lines // rows), values)
