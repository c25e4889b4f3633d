"""Caches and decoding: from a Problem on pools of pages, or of few rows, to launches of the decode kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.triton import decode_plan
from tilewise.backends.triton.compile import Build, interpreting, types_of
from tilewise.backends.triton.counters import counters
from tilewise.backends.triton.launch import (
    four_strides,
    kernel_launcher,
    per_batch,
    precision_of,
    tables,
)
from tilewise.backends.triton.launch_forward import CARE_M, NOTES
from tilewise.backends.triton.layout import Slots, describe, fill
from tilewise.backends.triton.machine import machine_of
from tilewise.backends.triton.source import Entry, argument_types
from tilewise.backends.triton.tiles import padded
from tilewise.problem import empty_in_order

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.backends.triton.decode_plan import DecodePlan
    from tilewise.backends.triton.machine import Machine
    from tilewise.problem import Inputs, Problem

DECODE = Entry(
    "decode", "tilewise.backends.triton.decode_kernel", "decode_program",
    (
        "q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr", "part_ptr", "part_lse_ptr", "count_ptr", "flag_ptr",
        "sink_ptr", "q_offset_ptr", "k_offset_ptr", "cu_q_ptr", "used_q_ptr", "used_k_ptr", "leftpad_ptr", "table_ptr",
        "k_scale_ptr", "v_scale_ptr", "prior_ptr", "prior_lse_ptr",
        *(f"{name}:i64" for name in (
            "q_b", "q_h", "q_n", "q_d", "k_p", "k_h", "k_n", "v_p", "v_h", "v_n", "o_b", "o_h", "o_n", "o_d",
            "l_b", "l_h", "table_b", "ks_p", "ks_h", "vs_p", "vs_h", "pr_h", "pr_n", "prl_h", "prl_n",
        )),
        "batch", "units", "heads", "group", "seqlen_q", "seqlen_k", "row_tiles", "splits", "split_tiles", "pages",
        "page_size", "page_shift", "q_offset", "k_offset", "size_d", "size_dv", "scale:fp32", "by_heads:u32",
        "by_splits:u32", "by_group:u32",
    ),
    ("score", "keep", "classify", "classify_coarse"),
    (
        "HAS_MASK", "HAS_TERMS", "FUSED", "LAST", "VARLEN", "PAGING", "SCALES", "BLOCK_M", "BLOCK_N", "ROWS",
        "D_PAD", "DV_PAD", "EVEN", "EVEN_V", "STEP", "STEP_Q", "UNIT", "PRECISION", "EVICT", "MERGE", "MERGED",
        "WARPS", "SINGLE", "PDL", "CARE", "RATIO",
    ),
)  # fmt: skip
AGAIN = DECODE._replace(name="again", program="again_program")
AT = {argument.partition(":")[0]: n for n, argument in enumerate(DECODE.arguments)}
MERGE = DECODE._replace(
    name="merge", program="merge_program", functions=(),
    constants=("BLOCK_M", "BLOCK_N", "ROWS", "DV_PAD", "STEP_Q", "UNIT", "VARLEN", "SINGLE", "PDL", "MERGED",
        "ONCE", "REHEARSED"),
)  # fmt: skip
MOST_RECIPES = 4096
_recipes: dict[tuple[object, ...], Recipe] = {}


class Recipe(NamedTuple):
    """Launches of the decode kernel with everything that calls of one kind share.

    run: the kernel; again: the launch after it that repeats noted tiles, or None; merge: the launch that merges the
    splits, or None where the kernel does. values: the arguments, in which a call's own are replaced. aligned:
    addresses are multiples of 16 bytes. units: row tiles of all KV heads of all sequences.
    """

    run: Any
    again: Any
    merge: Any
    values: list[object]
    types: tuple[str, ...]
    plan: DecodePlan
    units: int
    aligned: bool
    out_strides: tuple[int, ...]
    slots: Slots
    problem: Problem


def takes(problem: Problem, inputs: Inputs) -> bool:
    """Whether this call goes to the decode kernel."""
    return problem.options.pages or (
        decode_plan.is_decoding(problem) and inputs.k.stride(3) == 1 and inputs.v.stride(3) == 1
    )


def forward(
    problem: Problem, inputs: Inputs, prior: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor] | None:
    """(out, lse); None where a leaf is of a type that kernels do not read, or something is empty.

    prior: (out, lse), float32, (1, H, N, D_v) and (1, H, N), of the same queries over other keys, merged with these;
    dense calls of one sequence have it.
    """
    s = problem.shape
    if not (s.batch and s.num_heads_kv and s.head_dim and s.head_dim_v and s.seqlen_k and inputs.k.shape[0]):
        return None
    tall = problem.options.layout == "varlen" and problem.group > CARE_M
    if tall and _step((inputs.k, inputs.v), (s.head_dim, s.head_dim_v)) == 1:
        return None
    kind = (*_kind_of(problem, inputs), prior_strides(prior))
    recipe = _recipes.get(kind)
    if recipe is None:
        slots = describe(problem.spec, inputs.leaves, fine=problem.dtype == torch.float32)
        if slots is None:
            return None
        recipe = make_recipe(problem, inputs, slots, prior)
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        _recipes[kind] = recipe
    device = inputs.q.device
    out = torch.empty_strided(problem.out_shape, recipe.out_strides, dtype=problem.out_dtype, device=device)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=device)
    if problem.options.layout == "varlen":
        out.zero_()
        lse.fill_(-math.inf)
    values = _own_values(recipe, inputs, out, lse)
    if prior is not None:
        values[AT["prior_ptr"]], values[AT["prior_lse_ptr"]] = prior
    recipe.run(recipe.units, values, recipe.plan.splits)
    if recipe.again is not None:
        recipe.again(-(-recipe.units * recipe.plan.splits // NOTES), values)
    if recipe.merge is not None:
        recipe.merge(recipe.units * recipe.plan.rows, values)
    return out, lse


def _kind_of(problem: Problem, inputs: Inputs) -> tuple[object, ...]:
    """What a recipe depends on; see `launch_forward.kind_of`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    key: tuple[object, ...] = (
        id(problem.spec), id(problem.options), problem.shape, q.dtype, q.shape, q.stride(), k.dtype, k.shape,
        k.stride(), v.shape, v.stride(), q.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0, inputs.scale > 0, _no_offset(inputs.k_offset),
    )  # fmt: skip
    if q.dtype == torch.float32:
        key += (torch.backends.cuda.matmul.allow_tf32,)
    others = (
        inputs.sink, inputs.q_offset, inputs.k_offset, inputs.cu_seqlens_q, inputs.seqused_q, inputs.seqused_k,
        inputs.leftpad_k, inputs.block_table, inputs.k_scale, inputs.v_scale,
    )  # fmt: skip
    key += tuple(t.dtype if isinstance(t, torch.Tensor) else t is None for t in others)
    key += tuple(t.dim() for t in (inputs.k_scale, inputs.v_scale) if t is not None)
    key += () if inputs.block_table is None else inputs.block_table.stride()
    key += tuple((t.dtype, t.shape, t.stride(), t.data_ptr() & 15 == 0) for t in inputs.leaves)
    return key


# ---- recipes -------------------------------------------------------------------------------------------------


def prior_strides(prior: tuple[Tensor, Tensor] | None) -> tuple[int | None, ...]:
    """Strides of head and row of a prior's out and lse."""
    return (None,) * 4 if prior is None else (*prior[0].stride()[1:3], *prior[1].stride()[1:])


def make_recipe(
    problem: Problem, inputs: Inputs, slots: Slots, prior: tuple[Tensor, Tensor] | None = None
) -> Recipe:
    """Decide how calls of this kind run, and compile their kernel."""
    device = max(inputs.q.get_device(), 0)
    out = empty_in_order(inputs.q, problem.out_shape, problem.out_dtype)
    step_q = _step((inputs.q, out), (problem.shape.head_dim, problem.shape.head_dim_v))
    step = _step((inputs.k, inputs.v), (problem.shape.head_dim, problem.shape.head_dim_v))
    machine = machine_of(device)
    masked = problem.spec.keep is not None and not _sees_all(problem, inputs)
    plan = decode_plan.plan_of(problem, machine, step > 1, masked)
    values = _shared_values(problem, inputs, slots, plan, (step, step_q), out)
    count = inputs.q.new_empty(0, dtype=torch.int32)
    floats = inputs.q.new_empty(0, dtype=torch.float32)
    values[AT["out_ptr"]] = out
    values[AT["pr_h"] : AT["prl_n"] + 1] = prior_strides(prior)
    if prior is not None:
        values[AT["prior_ptr"]], values[AT["prior_lse_ptr"]] = prior
    for name in ("lse_ptr", "part_ptr", "part_lse_ptr"):
        values[AT[name]] = floats
    values[AT["count_ptr"]] = count
    if plan.care == "flag":
        values[AT["flag_ptr"]] = count
    constants = (("HAS_MASK", masked), *_constants(problem, inputs, plan, (step, step_q), out))
    names = [a.partition(":")[0] for a in DECODE.arguments] + list(slots.names)
    types = types_of(names, values, argument_types(DECODE, slots) | _row_types(inputs, step))
    aligned = _aligned(slots, step, step_q)
    early = waits_for_grids(machine)
    own = (*constants, ("PDL", early), ("CARE", plan.care), ("RATIO", 1))
    # Where a launch after it merges, calls of other splits share the kernel.
    apart = tuple((n, 1 if n == "MERGED" and plan.merge != "here" else value) for n, value in own)
    build = Build(types, aligned, apart, plan.warps, plan.stages, early=early)
    run = kernel_launcher(problem, slots, DECODE, build, device, (DECODE, AGAIN))
    again = merge = None
    if plan.care == "flag":
        low = tuple((name, CARE_M if name == "BLOCK_M" else value) for name, value in constants)
        ratio = plan.block_m // CARE_M
        build = Build(types, aligned, (*low, ("PDL", False), ("CARE", "again"), ("RATIO", ratio)), 4, 1)
        again = kernel_launcher(problem, slots, AGAIN, build, device, (DECODE, AGAIN))
    if plan.merge == "later":
        own = tuple((name, value) for name, value in own if name in MERGE.constants)
        once = plan.splits <= plan.merged and not problem.options.batch_invariant  # 0 + -0 is not -0
        own += (("ONCE", once), ("REHEARSED", rehearses(problem, early)))
        build = Build(types, aligned, own, 1, 1, early=early)
        merge = kernel_launcher(problem, slots, MERGE, build, device, (MERGE,))
    # The recipe keeps no tensor alive: a call puts its own in.
    kept = [None if isinstance(x, torch.Tensor) else x for x in values]
    units = decode_plan.units_of(problem, plan)
    return Recipe(
        run, again, merge, kept, types, plan, units, max(step, step_q) > 1, out.stride(), slots, problem
    )


def _sees_all(problem: Problem, inputs: Inputs) -> bool:
    """Whether the mask hides nothing of a row that lines up with the last key."""
    return decode_plan.last_row_sees_all(problem) and inputs.q_offset is None and _no_offset(inputs.k_offset)


def _no_offset(offset: object) -> bool:
    return isinstance(offset, int) and offset == 0


def rehearses(problem: Problem, early: bool) -> bool:
    """Whether the launch that merges goes through its work once before the splits are done. Edges of packed sequences
    would be read too soon."""
    return early and problem.options.layout == "dense"


def waits_for_grids(machine: Machine) -> bool:
    """Whether kernels can wait for the launch before them (griddepcontrol)."""
    return machine.kind == "cuda" and machine.arch >= 90 and not interpreting()


def _aligned(slots: Slots, step: int, step_q: int) -> tuple[int, ...]:
    """Numbers of the pointers that are multiples of 16 bytes."""
    found = [AT["part_ptr"], AT["part_lse_ptr"]]
    found += [AT["k_ptr"], AT["v_ptr"]] if step > 1 else []
    found += [AT["q_ptr"], AT["out_ptr"]] if step_q > 1 else []
    layouts = zip(slots.leaf_at, slots.leaves, strict=True)
    found += [len(DECODE.arguments) + at for at, layout in layouts if layout.step > 1]
    return tuple(sorted(found))


def _step(tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> int:
    """Elements of 16 bytes if every row of the tensors begins at a multiple of them, else 1."""
    step = 16 // tensors[0].element_size()
    for t in tensors:
        if t.element_size() * step != 16 or t.stride(-1) != 1 or t.data_ptr() & 15:
            return 1
        if any(n > 1 and x % step for x, n in zip(t.stride()[:-1], t.shape, strict=False)):
            return 1
    return 1 if any(size % step for size in sizes) else step


def _scales(inputs: Inputs) -> str:
    """Where the scales of stored numbers come from."""
    found = [t for t in (inputs.k_scale, inputs.v_scale) if t is not None]
    if not found:
        return "none"
    return "page" if any(t.dim() == 2 for t in found) else "head"


def _constants(
    problem: Problem, inputs: Inputs, plan: DecodePlan, steps: tuple[int, int], out: Tensor
) -> tuple[tuple[str, object], ...]:
    spec, s = problem.spec, problem.shape
    d, dv = padded(s.head_dim), padded(s.head_dim_v)
    scales, paging = _scales(inputs), decode_plan.paging(problem, plan)
    unit = inputs.q.stride(-1) == 1 and out.stride(-1) == 1
    fused = spec.score is None and inputs.scale > 0 and scales == "none" and problem.kv_dtype == problem.dtype
    return (
        ("HAS_TERMS", spec.score is not None), ("FUSED", fused), ("LAST", inputs.q_offset is None),
        ("VARLEN", problem.options.layout == "varlen"), ("PAGING", paging), ("SCALES", scales),
        ("BLOCK_M", plan.block_m), ("BLOCK_N", plan.block_n), ("ROWS", plan.rows), ("D_PAD", d), ("DV_PAD", dv),
        ("EVEN", d == s.head_dim), ("EVEN_V", dv == s.head_dim_v), ("STEP", steps[0]), ("STEP_Q", steps[1]),
        ("UNIT", unit), ("PRECISION", precision_of(problem.dtype)), ("EVICT", plan.evict), ("MERGE", plan.merge),
        ("MERGED", plan.merged), ("WARPS", plan.each), ("SINGLE", decode_plan.divides_quickly(problem, plan)),
    )  # fmt: skip


def _shared_values(
    problem: Problem, inputs: Inputs, slots: Slots, plan: DecodePlan, steps: tuple[int, int], out: Tensor
) -> list[object]:
    """All arguments of a call but out, lse and the splits' room."""
    s, (step, step_q) = problem.shape, steps
    pages, size = inputs.k.shape[0], inputs.k.shape[2]
    table = _in_rows(inputs.block_table)
    q_strides, o_strides = four_strides(problem, inputs.q), four_strides(problem, out)
    rows = s.seqlen_q
    v_strides: list[int | None] = [x // step for x in inputs.v.stride()[:3]]
    if inputs.v.stride() == inputs.k.stride():  # a row of v begins where one of k does, which is counted once
        v_strides[0] = v_strides[2] = None
    strides: list[int | None] = [
        *(x // step_q for x in q_strides[:3]), q_strides[3],
        *(x // step for x in inputs.k.stride()[:3]), *v_strides,
        *(x // step_q for x in o_strides[:3]), o_strides[3],
        0 if problem.options.layout == "varlen" else s.num_heads_q * rows, rows,
        0 if table is None else table.stride(0), *_scale_strides(inputs.k_scale), *_scale_strides(inputs.v_scale),
        *prior_strides(None),
    ]  # fmt: skip
    return [
        inputs.q, inputs.k, inputs.v, None, None, None, None, None, None, *_optional(problem, inputs), None, None,
        *strides,
        s.batch, decode_plan.units_of(problem, plan), s.num_heads_kv, max(problem.group, 1), s.seqlen_q, s.seqlen_k,
        plan.row_tiles, plan.splits, plan.split_tiles, pages, size, max(size.bit_length() - 1, 0),
        _number(inputs.q_offset), _number(inputs.k_offset), s.head_dim, s.head_dim_v, inputs.scale,
        *map(decode_plan.reciprocal, (s.num_heads_kv, plan.splits, problem.group)),
        *_data(problem, inputs, slots),
    ]  # fmt: skip


def _row_types(inputs: Inputs, step: int) -> dict[str, str]:
    """Types of strides: 32 bits where no row begins farther, which halves the instructions that find rows."""
    found: dict[str, str] = {}
    q, table = inputs.q, inputs.block_table
    farthest = 0
    for t in (inputs.k, inputs.v):
        farthest = max(farthest, sum((t.shape[n] - 1) * t.stride(n) // step for n in (0, 2)))
    if farthest < 2**31:
        found |= dict.fromkeys(("k_p", "k_n", "v_p", "v_n"), "i32")
    if sum((n - 1) * x for n, x in zip(q.shape[:-1], q.stride(), strict=False)) < 2**31:
        found |= dict.fromkeys(("q_b", "q_h", "q_n"), "i32")
    if table is not None and (table.shape[0] - 1) * table.stride(0) < 2**31:
        found["table_b"] = "i32"
    return found


def _scale_strides(t: Tensor | None) -> tuple[int, int]:
    """(page, head) strides of scales, (H_kv,) or (P, H_kv)."""
    if t is None:
        return 0, 0
    return (t.shape[1], 1) if t.dim() == 2 else (0, 1)


def _number(offset: object) -> int:
    return offset if isinstance(offset, int) else 0


def _optional(problem: Problem, inputs: Inputs) -> list[Tensor | None]:
    """sink_ptr .. v_scale_ptr, in the kernel's order; where only one of k and v has scales, the other's are ones."""
    batch = problem.shape.batch
    k_scale, v_scale = inputs.k_scale, inputs.v_scale
    if (k_scale is None) != (v_scale is None):
        k_scale = torch.ones_like(v_scale) if k_scale is None else k_scale  # type: ignore[arg-type]
        v_scale = torch.ones_like(k_scale) if v_scale is None else v_scale
    return [
        _contiguous(inputs.sink), per_batch(inputs.q_offset, batch), per_batch(inputs.k_offset, batch),
        per_batch(inputs.cu_seqlens_q, 1), per_batch(inputs.seqused_q, batch), per_batch(inputs.seqused_k, batch),
        per_batch(inputs.leftpad_k, batch),
        _in_rows(inputs.block_table), _contiguous(k_scale), _contiguous(v_scale),
    ]  # fmt: skip


def _in_rows(table: Tensor | None) -> Tensor | None:
    """A block table whose rows are each in one piece, wherever they lie: columns of a larger one are read in place."""
    return table if table is None or table.stride(1) == 1 else table.contiguous()


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _data(problem: Problem, inputs: Inputs, slots: Slots) -> list[object]:
    made = tables(slots, inputs.leaves, max(inputs.q.get_device(), 0))
    return fill(slots, inputs.leaves, inputs.ints, inputs.floats, made)


def _own_values(recipe: Recipe, inputs: Inputs, out: Tensor, lse: Tensor) -> list[object]:
    """The arguments of one call."""
    problem, values = recipe.problem, recipe.values.copy()
    values[:5] = (inputs.q, inputs.k, inputs.v, out, lse)
    part = torch.empty(room_size(recipe), dtype=torch.float32, device=inputs.q.device)
    values[5], values[6] = part, part[split_at(recipe) :]
    values[7] = counters(inputs.q.device, recipe.units)
    if recipe.again is not None:
        flags = recipe.units * recipe.plan.splits
        values[8] = torch.empty(flags, dtype=torch.int32, device=inputs.q.device)
    if problem.tensor_names:
        values[AT["sink_ptr"] : AT["v_scale_ptr"] + 1] = _optional(problem, inputs)
    values[AT["q_offset"]], values[AT["k_offset"]] = _number(inputs.q_offset), _number(inputs.k_offset)
    values[AT["scale"]] = inputs.scale
    spec = problem.spec
    if spec.leaves or spec.num_ints or spec.num_floats:
        values[len(DECODE.arguments) :] = _data(problem, inputs, recipe.slots)
    return values


def split_at(recipe: Recipe) -> int:
    """Floats of the unnormalised outputs that are merged, after which their (m, l) stand."""
    lines = recipe.plan.parts(recipe.units) * recipe.plan.rows
    return lines * padded(recipe.problem.shape.head_dim_v)


def room_size(recipe: Recipe) -> int:
    """Floats of the results that are merged: outputs (parts, rows, DV), then (m, l) of each line; 0 without merging."""
    return split_at(recipe) + 2 * recipe.plan.parts(recipe.units) * recipe.plan.rows
