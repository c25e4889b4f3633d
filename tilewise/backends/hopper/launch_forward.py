"""The Hopper forward: from a Problem and its tensors to a launch and a merge of splits."""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.hopper import tiles as choice
from tilewise.backends.hopper.call_numbers import bounded, divisors, rises
from tilewise.backends.hopper.compile import GluonLauncher, descriptor_type
from tilewise.backends.hopper.counters import counter
from tilewise.backends.hopper.descriptors import DESCRIPTORS, blocks_of, descriptors, readable
from tilewise.backends.hopper.launch_ranges import Ranges, make_ranges, wanted
from tilewise.backends.hopper.print_fold import with_literals
from tilewise.backends.hopper.roomier import least_spilled
from tilewise.backends.hopper.source import module_of
from tilewise.backends.triton import launch_forward as low
from tilewise.backends.triton.compile import POINTERS, Build
from tilewise.backends.triton.launch import four_strides
from tilewise.backends.triton.launch_gaps import clear_gaps
from tilewise.backends.triton.launch_splits import combine_parts, parts_of
from tilewise.backends.triton.layout import Slots, describe
from tilewise.backends.triton.machine import machine_of
from tilewise.backends.triton.source import Entry, argument_types
from tilewise.backends.triton.tiles import Tiles as LowTiles
from tilewise.backends.triton.tiles import row_tiles
from tilewise.config import config
from tilewise.problem import empty_in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilewise.backends.hopper.tiles import Tiles
    from tilewise.problem import Inputs, Problem
    from tilewise.spec.attention import AttentionSpec

TEMPLATE = "tilewise.backends.hopper.forward_kernel"
FORWARD = Entry(
    "forward", TEMPLATE, "forward_program",
    (
        *DESCRIPTORS, "out_ptr", "lse_ptr", "sink_ptr", "counter_ptr", "q_offset_ptr", "k_offset_ptr", "cu_q_ptr",
        "cu_k_ptr", "used_q_ptr", "used_k_ptr", "range_ptr", "again_ptr", "o_s:i64", "o_b:i64", "o_h:i64", "o_n:i64",
        "l_s:i64", "l_b:i64", "l_h:i64", "batch", "heads", "group", "seqlen_q", "seqlen_k", "row_tiles", "swizzle",
        "splits", "split_tiles", "early", "range_b", "range_h", "q_offset", "k_offset", "size_dv", "scale:fp32",
    ),
    (),
    (
        "FUSED", "NWG", "BN", "D0", "D1", "E0", "E1", "ST", "PACK", "VARLEN", "USED_Q", "USED_K", "Q_OFFSET",
        "K_OFFSET", "SINK", "CARE", "STORE", "SHARED_OUT", "RANGES", "ORDER", "LAZY", "HELD", "APART",
        "BOUNDED", "FRESH", "GAPS", "LATER", "WORKER", "LOADER",
    ),
)  # fmt: skip
AGAIN = Entry(
    "again", "tilewise.backends.hopper.forward_again_kernel", "again_program", FORWARD.arguments, (),
    (
        "FUSED", "NWG", "BN", "D0", "D1", "E0", "PACK", "VARLEN", "USED_Q", "USED_K", "Q_OFFSET", "K_OFFSET", "SINK",
    ),
)  # fmt: skip
AT = {argument.partition(":")[0]: n for n, argument in enumerate(FORWARD.arguments)}
OPTIONAL = (
    "sink_ptr", "", "q_offset_ptr", "k_offset_ptr", "cu_q_ptr", "cu_k_ptr", "used_q_ptr", "used_k_ptr",
)  # fmt: skip
"""The pointers that a call may lack, in the order of `triton.launch_forward`."""
_launchers: dict[tuple[object, ...], GluonLauncher] = {}
_recipes: dict[tuple[object, ...], Recipe | None] = {}
MOST_RECIPES = 4096


class Recipe(NamedTuple):
    """A launch with everything that calls of one kind share.

    values: the arguments, in which a call's own are replaced. again: the launch that does again what the first left.
    """

    run: GluonLauncher
    again: GluonLauncher | None
    types: tuple[str, ...]
    values: list[object]
    grid: int
    splits: int
    tiles: Tiles
    pair: tuple[int, int]
    pack: int
    by_tiles: bool
    out_strides: tuple[int, ...]
    slots: Slots
    problem: Problem
    ranges: Ranges | None


# ---- what is compiled ----------------------------------------------------------------------------------------


def kernel_types(
    dtype: torch.dtype, tiles: Tiles, pair: tuple[int, int], store: str, pack: int, slots: Slots,
    leaves: Sequence[Tensor], present: frozenset[str] = frozenset(), out: torch.dtype | None = None,
    offsets: torch.dtype = torch.int32, sink: torch.dtype = torch.float32,
) -> tuple[str, ...]:  # fmt: skip
    """Types of the kernel's arguments; present: the optional pointers that the call has."""
    blocks = blocks_of(tiles, pair, pack)
    pointers = {
        "out_ptr": POINTERS[out or dtype], "lse_ptr": "*fp32", "counter_ptr": "*i32",
        **{name: POINTERS[offsets] for name in present}, "sink_ptr": POINTERS[sink],
    }  # fmt: skip
    kinds, found = argument_types(FORWARD, slots), []
    for argument in FORWARD.arguments:
        name = argument.partition(":")[0]
        if name in DESCRIPTORS:
            block = blocks[name] if name[0] != "o" or store == "tiles" else None
            found.append("constexpr" if block is None else descriptor_type(dtype, block))
        elif name.endswith("_ptr"):
            needed = name in ("out_ptr", "lse_ptr", "counter_ptr") or name in present
            found.append(pointers[name] if needed else "constexpr")
        else:
            found.append(kinds[name])
    data = iter(leaves)
    for name in slots.names:
        if name[0] == "L" and name[1:].isdigit():
            found.append(POINTERS[next(data).dtype])
        else:
            found.append("*i32" if name[0] == "T" else kinds[name])
    return tuple(found)


def constants_of(
    flags: dict[str, object], tiles: Tiles, pair: tuple[int, int], entry: Entry = FORWARD
) -> tuple[tuple[str, object], ...]:
    """The kernel's constants: those of the call, and those that follow from its tiles."""
    (d0, d1), (e0, e1) = choice.PARTS[pair[0]], choice.PARTS[pair[1]]
    found = flags | {
        "NWG": tiles.warpgroups, "BN": tiles.block_n, "D0": d0, "D1": d1, "E0": e0, "E1": e1, "ST": tiles.stages,
        "SHARED_OUT": tiles.shared_out and flags["STORE"] == "tiles", "ORDER": tiles.order, "LAZY": tiles.lazy,
        "HELD": tiles.held, "APART": tiles.apart, "LATER": flags["CARE"] and pair in choice.LATER,
        "RANGES": flags.get("RANGES", False), "GAPS": flags.get("GAPS", False),
        "BOUNDED": flags.get("BOUNDED", False), "FRESH": tiles.fresh,
        "WORKER": tiles.worker, "LOADER": tiles.loader,
    }  # fmt: skip
    return tuple((name, found[name]) for name in entry.constants)


# ---- one call ------------------------------------------------------------------------------------------------


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """(out, lse); None where tensors are not laid out as the copy engine reads them, or a leaf is of another type."""
    signs = (*(x > 0 for x in inputs.floats), bounded(problem, inputs))
    kind = (*low.kind_of(problem, inputs), config.sm_margin, signs, divisors(problem, inputs))
    if kind in _recipes:
        recipe = _recipes[kind]
    else:
        recipe = make_recipe(problem, inputs)
        if len(_recipes) >= MOST_RECIPES:
            _recipes.clear()
        _recipes[kind] = recipe
    if recipe is None:
        return None
    device = inputs.q.device
    out = torch.empty_strided(problem.out_shape, recipe.out_strides, dtype=problem.out_dtype, device=device)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=device)
    if recipe.splits == 1:
        _run(recipe, inputs, out, lse)
        return out, lse
    parts, part_lse = parts_of(problem, inputs, recipe.splits)
    if problem.options.layout == "varlen":  # tokens that belong to no sequence, or lie past its used length
        clear_gaps(problem, inputs, out, lse)
        parts.zero_()
        part_lse.fill_(-math.inf)
    _run(recipe, inputs, parts, part_lse)
    combine_parts(problem, inputs, (parts, part_lse), (out, lse))
    return out, lse


def _run(recipe: Recipe, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    """Launch a recipe."""
    values = recipe.values.copy()
    problem = recipe.problem
    values[: len(DESCRIPTORS)] = descriptors(recipe, inputs, out)
    values[AT["out_ptr"]], values[AT["lse_ptr"]] = out, lse
    stream = torch._C._cuda_getCurrentRawStream(recipe.run.device)
    values[AT["counter_ptr"]] = counter(recipe.run.device, stream)
    values[AT["q_offset"]], values[AT["k_offset"]] = (
        low._number(inputs.q_offset),
        low._number(inputs.k_offset),
    )
    values[AT["scale"]] = inputs.scale
    optional = low._optional(problem, inputs)
    sink, _, q_offset, k_offset, cu_q, cu_k, used_q, used_k = optional
    values[AT["sink_ptr"]] = sink if recipe.splits == 1 else None
    values[AT["q_offset_ptr"] : AT["used_k_ptr"] + 1] = (q_offset, k_offset, cu_q, cu_k, used_q, used_k)
    data = low._data(inputs, recipe.slots)
    if recipe.ranges is not None:
        values[AT["range_ptr"]] = recipe.ranges(inputs, data)
    values[len(FORWARD.arguments) :] = data
    if recipe.again is not None:
        values[AT["again_ptr"]] = lists_of(recipe, out.device)
    recipe.run(recipe.grid, values)
    if recipe.again is not None:
        recipe.again(recipe.grid, values)


def lists_of(recipe: Recipe, device: torch.device) -> Tensor:
    """Room for the lists of what a launch leaves, (programs, warpgroups)."""
    return torch.empty(recipe.grid * recipe.tiles.warpgroups, dtype=torch.int32, device=device)


# ---- how calls of a kind run ---------------------------------------------------------------------------------


class Schedule(NamedTuple):
    """What a problem's shape decides on a machine. pack: heads of a KV head that share a tile of rows."""

    tiles: Tiles
    pair: tuple[int, int]
    pack: int
    row_tiles: int
    splits: int


@functools.lru_cache(maxsize=4096)
def schedule(problem: Problem, machine: Any, margin: int = 0, tiles: Tiles | None = None) -> Schedule:
    """The schedule of a problem that `supports` has let through; tiles: those to take in place of the chosen ones."""
    s, varlen = problem.shape, problem.options.layout == "varlen"
    pair = choice.pair_of(s.head_dim, s.head_dim_v)
    assert pair is not None
    rows = s.seqlen_q if not varlen else -(-s.seqlen_q // max(s.batch, 1))
    pack = choice.packing(problem, rows)
    programs = (1 if varlen else s.batch) * (s.num_heads_kv if pack > 1 else s.num_heads_q)
    keys = s.seqlen_k if not varlen else -(-s.seqlen_k // max(s.batch, 1))

    def divided(tiles: Tiles) -> tuple[int, int]:
        row_tiles = _slots(problem, tiles.rows, pack)
        return row_tiles, choice.splits(problem, programs * row_tiles, keys, machine.sms - margin)

    if tiles is None:
        tiles = choice.choose(problem, pair, machine, pack > 1)
        if divided(tiles)[1] > 1:
            tiles = choice.choose(problem, pair, machine, pack > 1, True)
    row_tiles, splits = divided(tiles)
    return Schedule(tiles, pair, pack, row_tiles, splits)


def _slots(problem: Problem, rows: int, pack: int) -> int:
    """Tiles of `rows` lines of one unit, as `triton.tiles.row_tiles` counts them."""
    return row_tiles(problem, LowTiles(rows, 16, 4, 1, packed=pack > 1))


def make_recipe(problem: Problem, inputs: Inputs) -> Recipe | None:
    """Decide how calls of this kind run, and compile their kernels: with other tiles if registers do not suffice."""
    return least_spilled(lambda tiles: _recipe(problem, inputs, tiles), problem)


def _recipe(problem: Problem, inputs: Inputs, tiles: Tiles | None) -> Recipe | None:
    """How calls of a kind run with these tiles, or those of choice."""
    tensors = (inputs.q, inputs.k, inputs.v)
    slots = describe(problem.spec, inputs.leaves)
    if slots is None or not readable(problem, tensors):
        return None
    device, margin = inputs.q.get_device(), config.sm_margin
    machine = machine_of(device)
    spec = with_literals(problem.spec, divisors(problem, inputs))
    plan = schedule(replace(problem, spec=spec), machine, margin, tiles)
    tiles, pack, s = plan.tiles, plan.pack, problem.shape
    varlen = problem.options.layout == "varlen"
    result = empty_in_order(inputs.q, problem.out_shape, problem.out_dtype)
    out, lse_strides = result, (0, 0 if varlen else s.num_heads_q * s.seqlen_q, s.seqlen_q)
    out_strides: tuple[int, ...] = (0, *four_strides(problem, out))
    if plan.splits > 1:
        out, lse = parts_of(problem, inputs, plan.splits)
        out_strides, lse_strides = out.stride(), lse.stride()[:3]
    by_tiles = plan.splits == 1 and out.dtype == problem.dtype and readable(problem, (out,))
    if out_strides[4] != 1 and s.head_dim_v > 1:
        return None
    look = wanted(problem, slots, tiles)
    flags = _flags(problem, inputs, plan, by_tiles, look)
    ranges = (
        make_ranges(problem, inputs, slots, tiles, pack, plan.row_tiles, _offset_kinds(inputs))
        if look
        else None
    )
    steps = (0, 0) if ranges is None else (ranges.batch_step, ranges.head_step)
    heads = s.num_heads_kv if pack > 1 else s.num_heads_q
    units = heads if varlen else s.batch * heads
    swizzle = choice.abreast(problem, pack > 1)
    optional = low._optional(problem, inputs)
    present = {n: t for n, t in zip(OPTIONAL, optional, strict=True) if n and t is not None}
    if plan.splits > 1:
        present.pop("sink_ptr", None)
    later = bool(flags["CARE"]) and plan.pair in choice.LATER
    own = {name for name, there in (("range_ptr", look), ("again_ptr", later)) if there}
    types = list(kernel_types(
        problem.dtype, tiles, plan.pair, str(flags["STORE"]), pack, slots, inputs.leaves, frozenset(present) | own,
        out.dtype,
    ))  # fmt: skip
    for name, t in present.items():
        types[AT[name]] = POINTERS[t.dtype]
    build = Build(tuple(types), (), constants_of(flags, tiles, plan.pair), 4, 1, tiles.limit)
    builds = {FORWARD: build}
    if later:
        builds[AGAIN] = build._replace(constants=constants_of(flags, tiles, plan.pair, AGAIN), registers=0)
    run, again = (*launchers(spec, slots, builds, device), None)[:2]
    data = low._data(inputs, slots)
    values: list[object] = [None] * len(FORWARD.arguments) + [None if torch.is_tensor(x) else x for x in data]
    values[AT["o_s"] : AT["scale"] + 1] = [
        *out_strides[:4], *lse_strides, s.batch, heads, max(problem.group, 1), s.seqlen_q, s.seqlen_k, plan.row_tiles,
        swizzle, plan.splits, 0, early_lines(problem, plan, look), *steps, 0, 0, s.head_dim_v, inputs.scale,
    ]  # fmt: skip
    total = units * plan.row_tiles * plan.splits
    return Recipe(
        run, again, tuple(types), values,
        min(total, max(machine.sms - margin, 1)), plan.splits, tiles, plan.pair, pack, by_tiles, result.stride(),
        slots, problem, ranges,
    )  # fmt: skip


def early_lines(problem: Problem, plan: Schedule, look: bool) -> int:
    """Lines of the first tile that lie before the first row, whole warpgroups of them: a tile that is not full then has
    the rows that see the fewest keys. Leaves are read at rows, of which none lie there."""
    s = problem.shape
    lasts = problem.spec.keep is not None and not look and not problem.spec.leaves
    if not lasts or plan.pack > 1 or plan.splits > 1 or problem.options.layout != "dense":
        return 0
    return (plan.row_tiles * plan.tiles.rows - s.seqlen_q) // 64 * 64


def hides_pairs(problem: Problem) -> bool:
    """Whether a call may hide a value from a row, which then has to stay unharmed by it."""
    spec = problem.spec
    return spec.keep is not None or spec.score is not None or problem.options.layout == "varlen"


def _flags(
    problem: Problem, inputs: Inputs, plan: Schedule, by_tiles: bool, ranges: bool
) -> dict[str, object]:
    """The kernel's constants that the call decides."""
    spec = problem.spec
    return {
        "FUSED": rises(spec, inputs), "PACK": plan.pack,
        "VARLEN": problem.options.layout == "varlen", "USED_Q": inputs.seqused_q is not None,
        "USED_K": inputs.seqused_k is not None, "Q_OFFSET": _offset_kind(inputs.q_offset),
        "K_OFFSET": _offset_kind(inputs.k_offset), "SINK": inputs.sink is not None and plan.splits == 1,
        "CARE": hides_pairs(problem), "STORE": "tiles" if by_tiles else "rows",
        "RANGES": ranges, "BOUNDED": bounded(problem, inputs),
        "GAPS": problem.options.layout == "varlen" and plan.splits == 1,
    }  # fmt: skip


def _offset_kinds(inputs: Inputs) -> tuple[str, str]:
    return _offset_kind(inputs.q_offset), _offset_kind(inputs.k_offset)


def _offset_kind(offset: object) -> str:
    return "tensor" if isinstance(offset, torch.Tensor) else "last" if offset is None else "int"


def launchers(
    spec: AttentionSpec, slots: Slots, builds: dict[Entry, Build], device: int
) -> list[GluonLauncher]:
    """The launchers of several kernels of a spec, compiled side by side: more than half of a compilation leaves the
    interpreter free."""
    for entry in builds:
        module_of(spec, slots, entry.module, (entry,))
    if len(builds) == 1:
        return [gluon_launcher(spec, slots, build, device, entry) for entry, build in builds.items()]
    with ThreadPoolExecutor(len(builds)) as pool:
        made = [pool.submit(gluon_launcher, spec, slots, b, device, e) for e, b in builds.items()]
    return [one.result() for one in made]


def gluon_launcher(
    spec: AttentionSpec, slots: Slots, build: Build, device: int, entry: Entry = FORWARD
) -> GluonLauncher:
    """The launcher of a kernel of a spec, compiled once per device and build."""
    key = (entry.name, spec.text, slots, build, device)
    found = _launchers.get(key)
    if found is None:
        module = module_of(spec, slots, entry.module, (entry,))
        found = _launchers.setdefault(key, GluonLauncher(getattr(module, entry.name), build, device))
    return found
