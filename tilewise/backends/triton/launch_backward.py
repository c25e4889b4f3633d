"""The backward pass: row statistics, dq, dk and dv, and the gradients of leaves and of the sink."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from tilewise.backends.protocol import Gradients, Needs
from tilewise.backends.triton.backward_entries import KEYS, PREPARE, ROWS, site_entry
from tilewise.backends.triton.backward_layout import key_descriptors, layout_of, pair_strides, row_descriptors
from tilewise.backends.triton.backward_tiles import MOST_ROWS, BackwardTiles, choose_backward, narrow
from tilewise.backends.triton.compile import Build, types_of
from tilewise.backends.triton.holes import mask_kind, settle
from tilewise.backends.triton.launch import (
    Wanted,
    dropout_numbers,
    four_strides,
    kernel_launcher,
    kernel_launchers,
    per_batch,
    precision_of,
    reads_by_descriptors,
    tables,
)
from tilewise.backends.triton.launch_runs import NO_RUNS, Runs, find_runs
from tilewise.backends.triton.layout import Slots, fill
from tilewise.backends.triton.leaf_gradients import LeafGradients, no_pairs, sink_gradient
from tilewise.backends.triton.leaf_sums import Sites, sort_sites
from tilewise.backends.triton.machine import machine_of
from tilewise.backends.triton.source import argument_types, is_sloped
from tilewise.backends.triton.tiles import padded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tilewise.backends.triton.source import Entry
    from tilewise.backends.triton.tiles import Tiles
    from tilewise.problem import Inputs, Problem

TMA_WORK = 2.0e10
"""Operations from which descriptors are worth their host time; the forward's number."""
FEWEST_AHEAD = 32
"""Rows of a tile that comes by a descriptor, at least: 16 fault in Triton 3.6 (measured on an H200)."""
SLOPES = -1
"""In the place of a site: the sum of a row's slopes."""
FEW_REGISTERS = 64
"""Of a thread of `prepare_kernel`, for each 128 of the head dimension: what it does as a rule needs no more, and is
over soonest where many programs read at once. Its slow part spills."""
FEW_KEYS = 64
"""So few keys that a row may see one only, whose slope must be 0 to the last bit."""
LARGE = {torch.float32: 8.0, torch.float16: 256.0, torch.bfloat16: 1024.0}
"""|lse| beyond which its rounding (2^-24 of it, in every weight of the row) is felt beside the type's own."""


class Call:
    """One backward pass: what its kernels have in common."""

    ALIGNED = True
    """Whether each head's statistics of rows begin at a multiple of 16 bytes (packed sequences' never do)."""

    def __init__(
        self, problem: Problem, inputs: Inputs, saved: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor | None],
        slots: Slots,
    ) -> None:  # fmt: skip
        self.problem, self.inputs, self.slots = problem, inputs, slots
        self.ahead: list[Wanted] | None = None
        self.runs: Iterator[Any] | None = None
        self.out, self.lse = saved
        self.do, self.dlse = grads
        if self.do.stride(-1) != 1:  # a sum's gradient is one number, expanded
            self.do = self.do.contiguous()
        self.device = max(inputs.q.get_device(), 0)
        self.tiles: BackwardTiles = _tiles(problem, machine_of(self.device))
        self.varlen = problem.options.layout == "varlen"
        self.layout = layout_of(problem, (inputs.q, inputs.k, inputs.v, self.do, self.out))
        if self.layout.step == 1 or not self.layout.unit or self.do.dtype != problem.dtype:
            self.tiles = narrow(self.tiles)
        s = problem.shape
        self.d, self.dv = padded(s.head_dim), padded(s.head_dim_v)
        threshold, factor = dropout_numbers(problem, inputs.dropout)
        first = inputs.q_offset if isinstance(inputs.q_offset, int) else 0
        first_key = inputs.k_offset if isinstance(inputs.k_offset, int) else 0
        self.places = (
            inputs.seed if problem.spec.dropout else None,
            per_batch(inputs.q_offset, s.batch), per_batch(inputs.k_offset, s.batch),
            per_batch(inputs.cu_seqlens_q, 1), per_batch(inputs.cu_seqlens_k, 1),
            per_batch(inputs.seqused_q, 1), per_batch(inputs.seqused_k, 1),
        )  # fmt: skip
        self.sizes = (s.batch, s.num_heads_q, max(problem.group, 1), s.seqlen_q, s.seqlen_k)
        self.offsets = (
            first, first_key, inputs.h_offset, inputs.b_offset, s.head_dim, s.head_dim_v, threshold
        )  # fmt: skip
        self.factors = (inputs.scale, factor)
        self.data = fill(
            slots, inputs.leaves, inputs.ints, inputs.floats, tables(slots, inputs.leaves, self.device)
        )
        self.tma = self._wants_tma()
        self.aligned = (MOST_ROWS if self.tma else 4) if self.ALIGNED and not self.varlen else 1
        self.pitch = -(-s.seqlen_q // self.aligned) * self.aligned
        lines = (1 if self.varlen else s.batch) * s.num_heads_q * self.pitch
        # What lies outside of every sequence is written by nobody, and takes no part.
        self.power: Tensor | None = None
        if self.varlen:
            self.m = inputs.q.new_full((lines,), math.inf, dtype=torch.float32)
        elif self.aligned == MOST_ROWS:
            # -m log2 e, behind m.
            self.m, self.power = self._floats(2 * lines).split(lines)
        else:
            self.m = self._floats(lines)
        self.low, self.delta = self._floats(lines), self._floats(lines)
        if self.varlen:
            self.low.zero_()
            self.delta.zero_()
        self.tile_runs: Runs | None = None
        # One per batch entry and head, and one for all of them.
        self.marks = inputs.q.new_zeros((max(s.batch, 1) * s.num_heads_q + 1,), dtype=torch.int32)

    def _floats(self, n: int) -> Tensor:
        return self.inputs.q.new_empty((n,), dtype=torch.float32)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.inputs.q, self.inputs.k, self.inputs.v, self.do)

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.m, self.low, self.delta

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(x for f in self.layout.strides[:4] for x in f)

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """Every constant that some kernel takes, of which each takes its own."""
        spec, s = self.problem.spec, self.problem.shape
        return {
            "HAS_MASK": mask_kind(spec.keep), "HAS_TERMS": spec.score is not None, "SLOPED": is_sloped(spec),
            "DROPOUT": spec.dropout,
            "VARLEN": self.varlen, "LAST": self.inputs.q_offset is None, "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n, "STAGES": tiles.stages, "D_PAD": self.d, "DV_PAD": self.dv,
            "EVEN": self.d == s.head_dim, "EVEN_V": self.dv == s.head_dim_v, "STEP": self.layout.step,
            "UNIT": self.layout.unit, "PRECISION": precision_of(self.problem.dtype), "ALIGNED": self.aligned,
            "SPLIT": self.tiles.split,
        }  # fmt: skip

    def blocks(self, block: int, rows: bool) -> int:
        """Tiles of one head along rows or keys; packed, as many as any division into sequences needs."""
        s = self.problem.shape
        total = s.seqlen_q if rows else s.seqlen_k
        return total // block + s.batch if self.varlen else -(-total // block)

    def launch(
        self, entry: Entry, tiles: Tiles, grid: int, values: tuple[object, ...], registers: int = 0,
        **constants: object,
    ) -> None:  # fmt: skip
        """Run; what is not known beforehand (`backward`) is compiled at first use, or noted in `ahead`, if that is a
        list. registers: the most a thread may have, 0 for no bound."""
        values = (*values, *self.data)
        if self.runs is not None:
            next(self.runs)(grid, values)
            return
        names = [a.partition(":")[0] for a in entry.arguments] + list(self.slots.names)
        aligned = ()
        if self.layout.step > 1:
            aligned = tuple(
                n for n, name in enumerate(names) if name in ("q_ptr", "k_ptr", "v_ptr", "do_ptr", "out_ptr")
            )
            aligned += tuple(n for n, name in enumerate(names) if name in ("dq_ptr", "dk_ptr", "dv_ptr"))
        if constants.get("PAIR_STEP", 1) != 1:
            aligned += (names.index("pair_ptr"),)
        aligned += tuple(
            len(entry.arguments) + at
            for at, layout in zip(self.slots.leaf_at, self.slots.leaves, strict=True) if layout.step > 1
        )  # fmt: skip
        known = self.constants(tiles) | constants
        build = Build(
            types_of(names, values, argument_types(entry, self.slots)), aligned,
            tuple((name, known[name]) for name in entry.constants), tiles.warps, max(tiles.stages, 1), registers,
        )  # fmt: skip
        wanted = Wanted(self.problem, self.slots, entry, build, self.device, (entry,))
        if self.ahead is not None:
            self.ahead.append(wanted)
        else:
            kernel_launcher(*wanted)(grid, values)

    def grid(self, tiles: int, careful: bool) -> int:
        """Programs of a launch; the second look, which is usually for nothing, has a few that share the tiles."""
        return min(tiles, 4 * machine_of(self.device).sms) if careful else tiles

    # ---- the kernels ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """m, low and delta of every row."""
        s, tiles = self.problem.shape, self.tiles.prepare
        row_tiles = self.blocks(tiles.block_m, True) if self.power is None else self.pitch // tiles.block_m
        units = s.num_heads_q * (1 if self.varlen else s.batch)
        dlse = self.dlse

        def per_row(t: Tensor | None) -> tuple[int, ...]:
            if t is None:
                return 0, 0, 0
            return (0, *t.stride()) if self.varlen else t.stride()

        sink = None if self.inputs.sink is None else self.inputs.sink.detach().contiguous()
        values = (
            *self.tensors[:3], self.out, self.do, self.lse, dlse, sink, *self.rows, self.marks, *self.places,
            *self.strides, *self.layout.strides[4], *per_row(self.lse), *per_row(dlse), *self.sizes, row_tiles,
            *self.offsets, FEW_KEYS, *self.factors, LARGE[self.problem.dtype],
        )  # fmt: skip
        few = FEW_REGISTERS * (1 if max(self.d, self.dv) <= 128 else 2)
        registers = few if machine_of(self.device).kind == "cuda" and max(self.d, self.dv) <= 256 else 0
        exact = not self.problem.options.subset
        self.launch(PREPARE, tiles, units * row_tiles, values, registers, EXACT=exact)

    def key_gradients(
        self, sites: tuple[int, ...], made: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dk, dv and column sums of some sites, (sites, B, H, columns); made: dk and dv that want the last look."""
        s = self.problem.shape
        dk, dv = made or tuple(self._gradient(t) for t in (self.inputs.k, self.inputs.v))
        sums = self._sums(sites, s.seqlen_k)
        units = s.num_heads_kv * (1 if self.varlen else s.batch)
        for part, tiles in self.tiles.key_parts(self.tma)[-1 if made else 0 :]:
            careful = part == "careful"
            key_tiles = self.blocks(tiles.block_n, False)
            tma = self.tma and not careful and tiles.block_m >= FEWEST_AHEAD
            runs = NO_RUNS if careful else self.find_runs(part)
            found = row_descriptors(self, tiles.block_m) if tma else (None,) * 4
            values = (
                *self.tensors, *self.rows, self.marks, dk, dv, sums, runs.keys, *self.places, *found,
                *self.strides, *self.written(dk), *self.written(dv), *self.sizes, key_tiles,
                self.tiles.swizzle, *runs.strides, *self.offsets, *self.factors,
            )  # fmt: skip
            self.launch(
                KEYS, tiles, self.grid(units * key_tiles, careful), values, 0 if careful else self.tiles.registers,
                SITES=sites if part != "dv" else (), TMA=tma, CAREFUL=careful, RUNS=runs.keys is not None, PART=part,
            )  # fmt: skip
        return dk, dv, sums

    def row_gradients(
        self, sites: tuple[int, ...], pair: int, target: Tensor | None, made: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """dq and the row sums of some sites, (sites, B, H, rows); a pairwise leaf's gradient goes to `target`. made: dq
        that only wants the second look."""
        s = self.problem.shape
        dq = self._gradient(self.inputs.q) if made is None else made
        sums = self._sums(sites, s.seqlen_q)
        units = s.num_heads_q * (1 if self.varlen else s.batch)
        strides, step = ((0, 0, 0, 0), 1) if target is None else pair_strides(self.problem, pair, target)
        passes = ((False, self.tiles.rows), (True, self.tiles.careful))
        for careful, tiles in passes[made is not None :]:
            row_tiles = self.blocks(tiles.block_m, True)
            tma = self.tma and not careful and tiles.block_n >= FEWEST_AHEAD
            runs = NO_RUNS if careful else self.find_runs()
            found = key_descriptors(self, tiles.block_n) if tma else (None, None)
            values = (
                *self.tensors, *self.rows, self.marks, dq, sums, dq if target is None else target, runs.rows,
                *self.places, *found, *self.strides, *self.written(dq), *strides, *self.sizes, row_tiles,
                self.tiles.swizzle, *runs.strides, *self.offsets, *self.factors,
            )  # fmt: skip
            self.launch(
                ROWS, tiles, self.grid(units * row_tiles, careful), values, SITES=sites, PAIR=pair, PAIR_STEP=step,
                TMA=tma, CAREFUL=careful, RUNS=runs.rows is not None,
            )  # fmt: skip
        return dq, sums

    def site_gradient(self, site: int, mode: str, target: Tensor, strides: tuple[int, ...]) -> None:
        """One site by `site_kernel` into its target."""
        s, tiles = self.problem.shape, self.tiles.prepare
        row_tiles, key_tiles = self.blocks(tiles.block_m, True), self.blocks(tiles.block_n, False)
        units = s.num_heads_q * (1 if self.varlen else s.batch)
        leaf_batch, leaf_heads = target.shape[:2] if mode == "pairs" else (1, 1)
        grid = {
            "pairs": leaf_batch * leaf_heads * row_tiles * key_tiles, "scatter": units * row_tiles,
            "diagonal": units * (row_tiles + key_tiles - 1),
        }[mode]  # fmt: skip
        values = (
            *self.tensors, *self.rows, target, *self.places, *self.strides, *strides, *self.sizes, row_tiles,
            key_tiles,
            leaf_batch, leaf_heads, *self.offsets, *self.factors,
        )  # fmt: skip
        self.launch(site_entry(site), tiles, grid, values, MODE=mode, SITE=site)

    def find_runs(self, part: str = "") -> Runs:
        """Where the visible tiles of each tile begin and end; looked at when first asked for. part: of `key_parts`."""
        (_, keys), (_, values), *_ = self.tiles.key_parts(self.tma)
        if part == "dv":
            return find_runs(self, values, None)
        self.tile_runs = self.tile_runs or find_runs(self, keys, self.tiles.rows)
        return self.tile_runs

    def _wants_tma(self) -> bool:
        """Whether tiles come by descriptors: in long calls that can have them."""
        layout, s = self.layout, self.problem.shape
        if not reads_by_descriptors(self.problem, layout.step, layout.unit, machine_of(self.device)):
            return False
        lines = (1 if self.varlen else s.batch) * s.num_heads_q * s.seqlen_q
        work = 5.0 * lines * s.seqlen_k * (s.head_dim + s.head_dim_v)
        return self.do.dtype == self.problem.dtype and work >= TMA_WORK and lines < 2**30

    # ---- memory --------------------------------------------------------------------------------------------

    def _gradient(self, like: Tensor) -> Tensor:
        made = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return made.zero_() if self.varlen else made

    def written(self, t: Tensor) -> tuple[int, ...]:
        """(batch, head, token) strides of a gradient in units of the step, which divides head dimensions."""
        return tuple(x // self.layout.step for x in four_strides(self.problem, t)[:3])

    def _sums(self, sites: tuple[int, ...], tokens: int) -> Tensor:
        s = self.problem.shape
        shape = (len(sites), 1 if self.varlen else s.batch, s.num_heads_q, tokens)
        make = self.inputs.q.new_zeros if self.varlen else self.inputs.q.new_empty
        return make(shape if sites else (1,), dtype=torch.float32)


_known: dict[tuple[object, ...], list[Any]] = {}
"""The launchers of a kind of call, in the order of its launches."""
MOST_KINDS = 4096


@functools.lru_cache(maxsize=4096)
def _tiles(problem: Problem, machine: Any) -> BackwardTiles:
    return choose_backward(problem, machine)


def needs_atomics(problem: Problem, inputs: Inputs, needs: Needs) -> bool:
    """Whether some leaf's gradient is a gather whose sums have no order."""
    return bool(any(needs.leaves) and sort_sites(problem, inputs.leaves, tuple(needs.leaves)).scatters)


def backward(
    problem: Problem, inputs: Inputs, saved: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor | None], needs: Needs,
    slots: Slots,
) -> Gradients:  # fmt: skip
    """All gradients that are asked for."""
    s = problem.shape
    if 0 in (s.batch, s.num_heads_q, s.seqlen_q, s.seqlen_k):
        return no_pairs(inputs, saved[1], grads[1], needs)
    problem = settle(problem, inputs.ints)
    call = Call(problem, inputs, saved, grads, slots)
    sites = (
        sort_sites(problem, inputs.leaves, tuple(needs.leaves))
        if any(needs.leaves)
        else Sites((), (), -1, (), (), ())
    )
    kind = _kind(call, grads[1], needs)
    runs = _known.get(kind)
    if runs is None:
        # Once without a launch, to see which kernels there are, so that they are compiled side by side.
        call.ahead = []
        _run(call, sites, needs)
        runs = kernel_launchers(call.ahead)
        call.ahead = call.tile_runs = None
        if len(_known) >= MOST_KINDS:
            _known.clear()
        _known[kind] = runs
    call.runs = iter(runs)
    return _run(call, sites, needs)


def _kind(call: Call, dlse: Tensor | None, needs: Needs) -> tuple[object, ...]:
    """What a call's kernels, and their order, depend on; who sums a leaf's gradient follows from its shape beside the
    call's."""
    problem, inputs, s = call.problem, call.inputs, call.problem.shape
    tensors = (call.do, call.out, call.lse, dlse, inputs.sink, *call.places)
    return (
        problem.spec.text, problem.options, problem.dtype, s.head_dim, s.head_dim_v, call.slots, call.layout[1:],
        call.tiles, call.tma, call.device, needs, precision_of(problem.dtype), inputs.q_offset is None,
        tuple(None if t is None else t.dtype for t in tensors),
        tuple((t.dtype, t.shape, t.stride()) for t in inputs.leaves), s if inputs.leaves else None,
    )  # fmt: skip


def _run(call: Call, sites: Sites, needs: Needs) -> Gradients:
    inputs = call.inputs
    call.prepare()
    leaves = LeafGradients(call, sites, needs)
    dq = dk = dv = None
    if needs.k or needs.v or sites.columns:
        dk, dv, sums = call.key_gradients(sites.columns)
        leaves.add_tokens(sites.columns, sums, rows=False)
    sink = None
    wants_sink = needs.sink and inputs.sink is not None
    whole = wants_sink and not call.problem.options.subset
    if needs.q or sites.rows or sites.pair >= 0 or whole:
        rows = (*sites.rows, SLOPES) if whole else sites.rows
        dq, sums = call.row_gradients(rows, sites.pair, leaves.pair_target)
        leaves.add_tokens(sites.rows, sums, rows=True)
    leaves.add_others()
    if wants_sink:
        sink = sink_gradient(call, sums[-1] if whole else None)
    return Gradients(dq, dk, dv, leaves.finish(), sink)
