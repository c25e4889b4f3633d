"""The forward pass: from a Problem and its tensors to launches of the forward kernel, its splits and their merge."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.triton import descriptors
from tilewise.backends.triton import tiles as choice
from tilewise.backends.triton.compile import Build, types_of
from tilewise.backends.triton.holes import has_holes, settle, short_periods
from tilewise.backends.triton.launch import (
    Wanted,
    dropout_numbers,
    four_strides,
    kernel_launchers,
    per_batch,
    precision_of,
    reads_by_descriptors,
    tables,
)
from tilewise.backends.triton.launch_runs import RowRuns, aligned_leaves, table_strides, wanted_runs
from tilewise.backends.triton.launch_splits import combine_parts, parts_of
from tilewise.backends.triton.layout import Slots, describable, describe, fill, pairwise_dims, powers_of
from tilewise.backends.triton.machine import machine_of
from tilewise.backends.triton.source import Entry, argument_types
from tilewise.backends.triton.strides import Strides, step_of, strides_of
from tilewise.problem import empty_in_order

if TYPE_CHECKING:
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
        "cu_q_ptr", "cu_k_ptr", "used_q_ptr", "used_k_ptr", "k_desc", "v_desc", "flag_ptr", "runs_ptr",
        *STRIDES,
        "batch", "heads", "group", "seqlen_q", "seqlen_k", "row_tiles", "swizzle", "splits", "split_tiles", "run_b",
        "run_h", "q_offset", "k_offset", "h_offset", "b_offset", "size_d", "size_dv", "threshold:u32", "scale:fp32",
        "drop_factor:fp32",
    ),
    ("score", "score", "keep", "keep", "holes", "classify", "classify", "classify_coarse"),
    (
        "HAS_MASK", "HAS_TERMS", "FUSED", "DROPOUT", "VARLEN", "LAST", "PACKED", "BLOCK_M", "BLOCK_N", "D_PAD",
        "DV_PAD", "EVEN", "EVEN_V", "STEP", "UNIT", "PRECISION", "TMA", "LOOP",
        "PARTS", "LAZY", "ADDED", "RUNS", "HOLES", "CARE", "RATIO",
    ),
)  # fmt: skip
AT = {argument.partition(":")[0]: n for n, argument in enumerate(FORWARD.arguments)}
OFFSETS = slice(AT["q_offset"], AT["b_offset"] + 1)
SCALE = AT["scale"]
TABLE_STRIDES = slice(AT["run_b"], AT["run_h"] + 1)
FLAG, TABLE = AT["flag_ptr"], AT["runs_ptr"]
NOTES = 128
"""`forward_kernel.NOTES`, which cannot be imported without Triton."""
CARE_M = 32
"""Rows of a tile that is done again, and the tallest that is done again inside its own kernel. Taller ones would form
their products by instructions that Triton 3.6 gets wrong in loops without pipelining (measured on an H200)."""
TMA_WORK = 2.0e10
"""Operations from which descriptors are worth their host time (about 40 microseconds of an H200)."""
_recipes: dict[tuple[object, ...], Recipe] = {}
MOST_RECIPES = 4096


class Recipe(NamedTuple):
    """A launch of the forward kernel with everything that calls of one kind share; see `kind_of`.

    run: the kernel; again: the launch after it that repeats noted tiles, or None; before: the launch that finds where
    visible tiles begin and end, or None. values: the arguments, in which a call's own are replaced (`_own_values`).
    grid: programs. aligned: addresses are multiples of 16 bytes. problem: as `settle` leaves it; asked: as it came,
    whose spec lives as long as its identity is a key.
    """

    run: Any
    again: Any
    before: RowRuns | None
    values: list[object]
    types: tuple[str, ...]
    grid: int
    splits: int
    tiles: Tiles
    tma: bool
    aligned: bool
    out_strides: tuple[int, ...]
    slots: Slots
    problem: Problem
    asked: Problem


def kind_of(problem: Problem, inputs: Inputs) -> tuple[object, ...]:
    """What a recipe depends on: nothing that changes between two calls of the same shapes and options.

    The spec and the options come from a cache of texts and live as long as the recipe, so their identity is a key.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    key = (
        id(problem.spec), id(problem.options), problem.shape.batch, q.dtype, q.shape, q.stride(), k.shape,
        k.stride(), v.shape, v.stride(),
        q.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0, inputs.scale > 0,
    )  # fmt: skip
    if q.dtype == torch.float32:
        key += (torch.backends.cuda.matmul.allow_tf32,)
    others = (
        inputs.sink, inputs.q_offset, inputs.k_offset, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q,
        inputs.seqused_k,
    )  # fmt: skip
    key += tuple(t.dtype if isinstance(t, torch.Tensor) else t is None for t in others)
    if inputs.ints:
        key += (powers_of(problem.spec, inputs.ints), short_periods(problem.spec, inputs.ints))
    if inputs.leaves:
        leaves = inputs.leaves
        key += tuple((t.dtype, t.shape, t.stride(), t.data_ptr() & 15 == 0) for t in leaves)
    return key


def slots_of(problem: Problem, inputs: Inputs) -> Slots | None:
    """Slots of a call of this pass; None if a leaf cannot be read."""
    s = problem.shape
    lengths = (s.seqlen_q, s.seqlen_k) if problem.options.layout == "dense" else None
    fine = problem.dtype == torch.float32
    return describe(problem.spec, inputs.leaves, lengths, powers_of(problem.spec, inputs.ints), fine)


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """(out, lse); None where a leaf is of a type that kernels do not read, or is empty."""
    kind = kind_of(problem, inputs)
    recipe = _recipes.get(kind)
    if recipe is None:
        slots = slots_of(problem, inputs)
        if slots is None:
            return None
        recipe = make_recipe(problem, inputs, slots)
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        _recipes[kind] = recipe
    device = inputs.q.device
    out = torch.empty_strided(problem.out_shape, recipe.out_strides, dtype=problem.out_dtype, device=device)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=device)
    if recipe.splits == 1:
        if problem.options.layout == "varlen":
            out.zero_()
            lse.fill_(-math.inf)
        _run(recipe, _own_values(recipe, inputs, out, lse), device)
        return out, lse
    parts, part_lse = parts_of(problem, inputs, recipe.splits)
    if problem.options.layout == "varlen":
        parts.zero_()
        part_lse.fill_(-math.inf)
    _run(recipe, _own_values(recipe, inputs, parts, part_lse), device)
    combine_parts(problem, inputs, (parts, part_lse), (out, lse))
    return out, lse


def _run(recipe: Recipe, values: list[object], device: torch.device) -> None:
    """Launch a recipe, and after it what repeats the tiles that met something not finite."""
    if recipe.again is not None:
        values[FLAG] = torch.empty(recipe.grid, dtype=torch.int32, device=device)
    if recipe.before is not None:
        values[TABLE] = recipe.before.find(values, AT, device)
    recipe.run(recipe.grid, values)
    if recipe.again is not None:
        recipe.again(-(-recipe.grid // NOTES), values)


@functools.lru_cache(maxsize=4096)
def schedule(
    problem: Problem, machine: Any, vectors: bool = True, pairs: int | None = None
) -> tuple[Tiles, tuple[int, int]]:
    """Tiles and splits of a problem on a machine; vectors, pairs: as `tiles.choose` takes them."""
    tiles = choice.choose(problem, machine, vectors, pairs)
    return tiles, choice.splits_of(problem, tiles, machine)


def make_recipe(problem: Problem, inputs: Inputs, slots: Slots) -> Recipe:
    """Decide how calls of this kind run, and compile their kernel."""
    asked, problem = problem, settle(problem, inputs.ints)
    device = max(inputs.q.get_device(), 0)
    tensors = (inputs.q, inputs.k, inputs.v)
    step, pairs = step_of(problem, tensors), _pair_bytes(inputs, slots, problem)
    tiles, (splits, split_tiles) = schedule(problem, machine_of(device), step > 1, pairs)
    result = empty_in_order(inputs.q, problem.out_shape, problem.out_dtype)
    out, out_strides, lse_strides = _written(problem, inputs, splits, result)
    strides = strides_of(problem, tensors, out_strides, step)
    # Descriptors under short tiles fault (Triton 3.6 on an H200), and reading bytes needs none.
    tma = tiles.block_m > CARE_M and _wants_tma(problem, strides, device)
    if pairs and tiles.loop == "held" and not tma:
        tiles = tiles._replace(stages=2)  # q and the leaf share the room of the third
    if tma and not tiles.packed:
        slots = slots._replace(described=describable(problem.spec, slots, inputs.leaves))
    values = _shared_values(problem, inputs, slots, tiles, (splits, split_tiles), strides, lse_strides)
    values[AT["out_ptr"]], values[AT["lse_ptr"]] = out, out.new_empty(0, dtype=torch.float32)
    if splits > 1:
        values[AT["sink_ptr"]] = None
    if tma:
        values[AT["k_desc"]], values[AT["v_desc"]] = descriptors.of_keys(problem, inputs, tiles)
    hides = (
        problem.spec.keep is not None or problem.spec.score is not None or problem.options.layout == "varlen"
    )
    care = ("inline" if tiles.block_m <= CARE_M else "flag") if hides else "none"
    if care == "flag":
        values[FLAG] = torch.empty(0, dtype=torch.int32, device=out.device)
    # A mask of positions alone is asked about a tile in less time than a table is read.
    looked = tma and splits == 1 and not tiles.packed and bool(slots.tables)
    rows = choice.row_tiles(problem, tiles)
    if looked:
        values[TABLE] = torch.empty(0, dtype=torch.int32, device=out.device)
        values[TABLE_STRIDES] = table_strides(problem, rows)
    holed = tma and not tiles.packed and has_holes(problem.spec.keep)
    entry = _entry(holed, bool(slots.described))
    entries = (entry, entry._replace(name="again", program="again_program"))
    constants = _constants(problem, inputs, tiles, strides, tma, looked, holed)
    names = [a.partition(":")[0] for a in FORWARD.arguments] + list(slots.names)
    aligned = (*range(4 if strides.step > 1 else 0), *aligned_leaves(slots, len(FORWARD.arguments)))
    types = types_of(names, values, argument_types(FORWARD, slots))
    wholes = (*constants, ("CARE", care), ("RATIO", 1))
    build = Build(types, aligned, wholes, tiles.warps, tiles.stages, tiles.registers)
    wanted = [Wanted(problem, slots, entry, build, device, entries)]
    if care == "flag":
        build = _build_of_again(build, constants, tiles)
        wanted.append(Wanted(problem, slots, entries[1], build, device, entries))
    if looked:
        wanted.append(wanted_runs(problem, slots, tiles, values, AT, device, holed))
    run, *others = kernel_launchers(wanted)
    before = RowRuns(others.pop(), problem, rows, len(slots.described)) if looked else None
    again = others[0] if others else None
    heads = problem.shape.num_heads_kv if tiles.packed else problem.shape.num_heads_q
    units = heads if problem.options.layout == "varlen" else problem.shape.batch * heads
    # The recipe keeps no tensor alive: a call puts its own in.
    kept = [None if isinstance(x, torch.Tensor) or hasattr(x, "block_shape") else x for x in values]
    return Recipe(
        run, again, before, kept, types, units * rows * splits, splits, tiles, tma, strides.step > 1,
        result.stride(), slots, problem, asked,
    )  # fmt: skip


def _entry(holed: bool, ahead: bool) -> Entry:
    """The forward's kernel. holed: of a mask with holes, which every tile applies: a tile is FULL or not by the rest
    alone; ahead: with leaves by descriptors."""
    words = ("ends", "holes", "classify", "classify_ends") if holed else FORWARD.functions[3:-1]
    score = "score_ahead" if ahead else "score"
    return FORWARD._replace(functions=("score", score, "keep", *words, "classify_coarse"))


def _written(
    problem: Problem, inputs: Inputs, splits: int, result: Tensor
) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """(what the kernel writes: the result, or the parts of its splits; its strides; those of lse)."""
    if splits == 1:
        per_head = problem.shape.seqlen_q
        per_batch_entry = problem.shape.num_heads_q * per_head if problem.options.layout == "dense" else 0
        return result, (0, *four_strides(problem, result)), (0, per_batch_entry, per_head)
    out, lse = parts_of(problem, inputs, splits)
    return out, out.stride(), lse.stride()[:3]


def _build_of_again(build: Build, constants: tuple[tuple[str, object], ...], tiles: Tiles) -> Build:
    """The build of the launch after one whose tiles are tall: a tile in parts of CARE_M rows."""
    off = dict.fromkeys(("TMA", "PARTS", "LAZY", "ADDED", "RUNS", "HOLES"), False)
    other = {"BLOCK_M": CARE_M, "LOOP": "plain", **off}
    low = tuple((name, other.get(name, value)) for name, value in constants)
    return Build(
        build.types, build.aligned, (*low, ("CARE", "again"), ("RATIO", tiles.block_m // CARE_M)), 4, 1
    )


def _pair_bytes(inputs: Inputs, slots: Slots, problem: Problem) -> int:
    """Bytes of each pair in leaves that have an element for it: one that is broadcast along rows or columns has not."""
    moving = zip(pairwise_dims(problem.spec), slots.leaves, inputs.leaves or (), strict=True)
    return sum(leaf.dtype.itemsize for dims, layout, leaf in moving if len(dims - set(layout.still)) > 1)


def _shared_values(
    problem: Problem, inputs: Inputs, slots: Slots, tiles: Tiles, splits: tuple[int, int], strides: Strides,
    lse_strides: tuple[int, ...],
) -> list[object]:  # fmt: skip
    """All arguments of a call but out, lse and descriptors."""
    s, varlen = problem.shape, problem.options.layout == "varlen"
    heads = s.num_heads_kv if tiles.packed else s.num_heads_q
    threshold, factor = dropout_numbers(problem, inputs.dropout)
    abreast = choice.heads_abreast(problem, tiles, machine_of(max(inputs.q.get_device(), 0)))
    l_s, l_b, l_h = lse_strides
    return [
        inputs.q, inputs.k, inputs.v, None, None, *_optional(problem, inputs), None, None, None, None,
        *strides.q, *strides.k, *strides.v, *strides.out, l_s, 0 if varlen else l_b, l_h,
        s.batch, heads, max(problem.group, 1), s.seqlen_q, s.seqlen_k, choice.row_tiles(problem, tiles), abreast,
        *splits, 0, 0, _number(inputs.q_offset), _number(inputs.k_offset), inputs.h_offset, inputs.b_offset,
        s.head_dim, s.head_dim_v, threshold, inputs.scale, factor, *_data(inputs, slots, tiles),
    ]  # fmt: skip


def _number(offset: object) -> int:
    return offset if isinstance(offset, int) else 0


def _optional(problem: Problem, inputs: Inputs) -> list[Tensor | None]:
    """sink_ptr .. used_k_ptr, in the kernel's order."""
    batch = problem.shape.batch
    return [
        None if inputs.sink is None else inputs.sink.contiguous(),
        inputs.seed if problem.spec.dropout else None,
        per_batch(inputs.q_offset, batch), per_batch(inputs.k_offset, batch),
        per_batch(inputs.cu_seqlens_q, 1), per_batch(inputs.cu_seqlens_k, 1),
        per_batch(inputs.seqused_q, 1), per_batch(inputs.seqused_k, 1),
    ]  # fmt: skip


def _data(inputs: Inputs, slots: Slots, tiles: Tiles | None = None) -> list[object]:
    """What the spec reads; tiles: where leaves come by descriptors, too."""
    device = max(inputs.q.get_device(), 0)
    made = tables(slots, inputs.leaves, device)
    data = fill(slots, inputs.leaves, inputs.ints, inputs.floats, made)
    return data if tiles is None else [*data, *descriptors.of_leaves(slots, inputs.leaves, tiles)]


def _own_values(recipe: Recipe, inputs: Inputs, out: Tensor, lse: Tensor) -> list[object]:
    """The arguments of one call."""
    problem, values = recipe.problem, recipe.values.copy()
    values[0], values[1], values[2], values[3], values[4] = inputs.q, inputs.k, inputs.v, out, lse
    if problem.tensor_names or problem.spec.dropout:
        values[5:13] = _optional(problem, inputs)
        if recipe.splits > 1:
            values[5] = None
    if recipe.tma:
        values[13:15] = descriptors.of_keys(problem, inputs, recipe.tiles)
    values[OFFSETS] = (_number(inputs.q_offset), _number(inputs.k_offset), inputs.h_offset, inputs.b_offset)
    values[SCALE] = inputs.scale
    if problem.spec.dropout:
        values[SCALE - 1], values[SCALE + 1] = dropout_numbers(problem, inputs.dropout)
    spec = problem.spec
    if spec.leaves or spec.num_ints or spec.num_floats:
        values[len(FORWARD.arguments) :] = _data(inputs, recipe.slots, recipe.tiles)
    return values


def _constants(
    problem: Problem, inputs: Inputs, tiles: Tiles, strides: Strides, tma: bool, looked: bool, holed: bool
) -> tuple[tuple[str, object], ...]:
    spec, s = problem.spec, problem.shape
    d, dv = choice.padded(s.head_dim), choice.padded(s.head_dim_v)
    return (
        ("HAS_MASK", spec.keep is not None), ("HAS_TERMS", spec.score is not None),
        ("FUSED", spec.score is None and inputs.scale > 0), ("DROPOUT", spec.dropout),
        ("VARLEN", problem.options.layout == "varlen"), ("LAST", inputs.q_offset is None), ("PACKED", tiles.packed),
        ("BLOCK_M", tiles.block_m), ("BLOCK_N", tiles.block_n), ("D_PAD", d), ("DV_PAD", dv),
        ("EVEN", d == s.head_dim), ("EVEN_V", dv == s.head_dim_v), ("STEP", strides.step), ("UNIT", strides.unit),
        ("PRECISION", precision_of(problem.dtype)), ("TMA", tma),
        ("LOOP", tiles.loop if tma else "plain"), ("PARTS", tma and tiles.parts), ("LAZY", tma and tiles.lazy),
        ("ADDED", tma and choice.adds_to_scores(problem)), ("RUNS", looked),
        ("HOLES", holed),
    )  # fmt: skip


def _wants_tma(problem: Problem, strides: Strides, device: int) -> bool:
    """Whether key tiles come by descriptors: where the hardware has them, and the call is long enough."""
    if not reads_by_descriptors(problem, strides.step, strides.unit, machine_of(device)):
        return False
    s = problem.shape
    batch = 1 if problem.options.layout == "varlen" else s.batch
    work = 2.0 * batch * s.num_heads_q * s.seqlen_q * s.seqlen_k * (s.head_dim + s.head_dim_v)
    return work >= TMA_WORK and min(s.num_heads_kv, s.seqlen_k) > 0
