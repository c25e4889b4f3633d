"""The Hopper backward: from a call and its cotangents to launches.

    fill_lines            m and delta of every row, also as tiles; clears the sums of dq; marks heads whose rows need a
                          second look
    prepare_again         m, low and delta of marked heads once more, exactly; usually for nothing
    halves                dk, dv, and the sums of dq; head dimensions up to 128
    collect_rows          dq
    roles, rows           for wider heads: dk and dv; dq
    early, drawn_rows     the same, for head dimensions of 192 with up to 128 of v
    second look (Triton)  keys and rows of marked heads once more; the usual call has none, and the host reads nothing

A leaf whose gradient is summed along rows or pairs, and the sink's, need a pass of the Triton backend, which then gives
dq, too; other leaves have passes of their own there, and of those along columns the whole backward is made there.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.backends.hopper.backward_entries import AGAIN, DRAWN_ROWS, EARLY, HALVES, ROLES, ROWS
from tilewise.backends.hopper.backward_tiles import Split, may_split, plan_backward, split_of, way_of
from tilewise.backends.hopper.boxes import Box, bare, boxed, keyed_strides, line_box, sums_box
from tilewise.backends.hopper.compile import GluonLauncher
from tilewise.backends.hopper.counters import is_capturing
from tilewise.backends.hopper.descriptors import readable
from tilewise.backends.hopper.repeat_backward import Own, Tape, kind_of, outside, remember, tapes
from tilewise.backends.hopper.source import module_of
from tilewise.backends.protocol import Gradients, Needs
from tilewise.backends.triton.backward_entries import PREPARE
from tilewise.backends.triton.compile import Build, types_of
from tilewise.backends.triton.launch import kernel_launcher, plain_launcher
from tilewise.backends.triton.launch_backward import FEW_KEYS, LARGE, SLOPES, Call
from tilewise.backends.triton.launch_forward import _number
from tilewise.backends.triton.layout import describe
from tilewise.backends.triton.leaf_gradients import LeafGradients, sink_gradient
from tilewise.backends.triton.leaf_sums import Sites, sort_sites
from tilewise.backends.triton.machine import machine_of
from tilewise.backends.triton.source import argument_types

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tilewise.backends.triton.source import Entry
    from tilewise.backends.triton.tiles import Tiles
    from tilewise.problem import Inputs, Problem

_launchers: dict[tuple[object, ...], GluonLauncher] = {}
_compiled: set[tuple[object, ...]] = set()
"""Kinds of calls whose kernels were compiled side by side."""


class Lines(NamedTuple):
    """The rows' numbers by tiles, and the tiles' sums of dq (none where another pass gives dq), each with a number that
    says which tile of keys is to add next."""

    m: Tensor
    delta: Tensor
    sums: Tensor
    turns: Tensor
    tiles: int


def line_tiles(problem: Problem) -> int:
    """Tiles of rows of one head; packed, as many as any division into sequences needs."""
    s, rows = problem.shape, plan_backward(problem).rows
    return s.seqlen_q // rows + s.batch if problem.options.layout == "varlen" else -(-s.seqlen_q // rows)


class HopperCall(Call):
    """One backward pass: the Triton backend's, and the kernels of this backend."""

    ALIGNED = False
    own_do: Tensor
    """do as the copy engine reads it, in the inputs' type."""
    wanted: list[Callable[[], Any]] | None = None
    """Where nothing is launched, what would be."""

    def __init__(self, *values: Any) -> None:
        self.tape = Tape()
        super().__init__(*values)
        if self.varlen:
            self.tape.own = [Own(self.m, None), Own(self.low, None), Own(self.delta, None)]
        self.plan = plan_backward(self.problem)
        self.way = way_of(self.problem, machine_of(self.device).sms)
        self.split = split_of(self.problem, machine_of(self.device).sms)
        parts = (self.marks.numel(), 1, *self.way.counters, max(2 * self.split.ranges, 1))
        room = self.tape.keep(self.marks.new_zeros(sum(parts)), 0.0)
        self.marks, self.counter, *self.signs, self.said = room.split(parts)

    # ---- memory and launches, which the tape notes ---------------------------------------------------------

    def _floats(self, n: int) -> Tensor:
        return self.tape.keep(super()._floats(n))

    def _gradient(self, like: Tensor) -> Tensor:
        return self.tape.keep(super()._gradient(like), 0.0 if self.varlen else None)

    def gradient(self, like: Tensor) -> Tensor:
        """A gradient that kernels of this backend make: `fill_lines` clears what no sequence owns."""
        return self.tape.keep(torch.empty(like.shape, dtype=like.dtype, device=like.device))

    def _sums(self, sites: tuple[int, ...], tokens: int) -> Tensor:
        return self.tape.keep(super()._sums(sites, tokens), 0.0 if self.varlen and sites else None)

    def start(self, make: Callable[[], Any], grid: int, values: Sequence[object]) -> None:
        """Launch a kernel; make gives its launcher, and compiles it at first use."""
        if self.wanted is not None:
            self.wanted.append(make)
            return
        run = make()
        self.tape.note(run, grid, values)
        run(grid, values)

    # ---- around the main kernels ---------------------------------------------------------------------------

    def fill_lines(self, floats: int, made: tuple[Tensor | None, Tensor, Tensor]) -> Lines:
        """m, low and delta of every row, and as tiles; floats: sums of a tile, cleared unless the main kernel does,
        or writes before it adds.
        made: gradients, cleared where packed tokens belong to no sequence."""
        from tilewise.backends.hopper.backward_gaps import PROGRAMS
        from tilewise.backends.hopper.backward_line_kernels import fill_lines

        s, tiles = self.problem.shape, line_tiles(self.problem)
        count = tiles * s.num_heads_q * (1 if self.varlen else s.batch)
        rows = count * self.plan.rows
        m, delta, sums = (self._floats(n) for n in (rows, rows, count * (floats + 1)))
        out = self.out if readable(self.problem, (self.out,)) else laid_out(self.out, self.out.dtype)
        strides = [x // 8 for t in (self.own_do, out) for x in keyed_strides(self.problem, t)]
        exact = not self.problem.options.subset
        values = (
            out, self.own_do, self.lse, self.dlse, *self.rows, m, delta, sums, self.marks, *self.places[3:4],
            self.places[5], self.places[4], self.places[6], *(made if self.varlen else (None, None, None)), *strides,
            *self.line_strides(self.lse), *self.line_strides(self.dlse), s.batch, s.num_heads_q, s.seqlen_q,
            s.seqlen_k, tiles, s.head_dim_v, s.num_heads_q * s.head_dim, s.num_heads_kv * s.head_dim,
            s.num_heads_kv * s.head_dim_v, FEW_KEYS,
            0 if self.plan.fresh else min(self.way.lead * self.way.unit_rows, count) if self.way.ahead else count,
            LARGE[self.problem.dtype],
        )  # fmt: skip
        names = fill_lines.arg_names[: len(values)]
        kinds = {n: "i64" for n in names if n[-2:] in ("_b", "_h", "_n")} | {"limit": "fp32"}
        constants = (
            ("VARLEN", self.varlen), ("FLOATS", floats), ("EXACT", exact), ("DV_PAD", self.dv),
            ("EVEN", self.dv == s.head_dim_v), ("BM", self.plan.rows),
        )  # fmt: skip
        build = Build(types_of(names, values, kinds), (0, 1, 7, 8, 9), constants, 4, 1)
        grid = count + (PROGRAMS.value if self.varlen else 0)
        self.start(lambda: plain_launcher(fill_lines, build, self.device), grid, values)
        if exact:
            self.prepare()
        return Lines(m, delta, sums, sums[count * floats :].view(torch.int32), tiles)

    def line_strides(self, t: Tensor | None) -> tuple[int, ...]:
        """(batch, head, row) strides of numbers of rows."""
        if t is None:
            return 0, 0, 0
        return (0, *t.stride()) if self.varlen else t.stride()

    def launch(
        self, entry: Entry, tiles: Tiles, grid: int, values: tuple[object, ...], registers: int = 0,
        **constants: object,
    ) -> None:  # fmt: skip
        """As the Triton backend does; but rows are prepared afresh only if some head is marked."""
        if entry is PREPARE:
            entry, grid = AGAIN, min(grid, 4 * machine_of(self.device).sms)
        self.ahead = []
        super().launch(entry, tiles, grid, values, registers, **constants)
        kernel = self.ahead[0]
        self.start(lambda: kernel_launcher(*kernel), grid, (*values, *self.data))

    def collect(self, lines: Lines, dq: Tensor, parts: int, width: int) -> None:
        """dq from its sums, where the main kernel did not make it."""
        from tilewise.backends.hopper.backward_line_kernels import SHARES, collect_rows

        s, way = self.problem.shape, self.way
        strides = [x // 8 for x in keyed_strides(self.problem, dq)]
        first, taken = (way.first_left, self.signs[2]) if way.ahead else (0, None)
        turns = lines.turns if self.plan.fresh else None
        values = (
            lines.sums, dq, self.marks, taken, turns, self.places[3], self.places[5], *strides, s.batch, s.num_heads_q,
            s.seqlen_q, lines.tiles, s.head_dim, first, way.unit_rows, way.key_tiles, self.inputs.scale,
        )  # fmt: skip
        names = collect_rows.arg_names[: len(values)]
        kinds = {"dq_b": "i64", "dq_h": "i64", "dq_n": "i64", "scale": "fp32"}
        build = Build(
            types_of(names, values, kinds), (0, 1),
            (
                ("VARLEN", self.varlen), ("BM", self.plan.rows), ("PARTS", parts), ("WIDTH", width),
                ("EVEN", s.head_dim == parts * width),
            ), 4, 1,
        )  # fmt: skip
        heads = s.num_heads_q * (1 if self.varlen else s.batch)
        shares = -(-way.shares // SHARES.value) if way.ahead else 0
        grid = lines.tiles * heads - first + shares
        self.start(lambda: plain_launcher(collect_rows, build, self.device), grid, values)

    # ---- the main kernels ----------------------------------------------------------------------------------

    def keys(self, lines: Lines, dq: Tensor | None, dk: Tensor, dv: Tensor) -> None:
        """dk and dv, and the sums of dq, if it is given; on the way, some of dq."""
        s, plan, x, way = self.problem.shape, self.plan, self.inputs, self.way
        ahead, bulk = dq is not None and way.ahead, dq is not None and plan.bulk
        narrow = plan.narrow
        split = may_split(self.problem) and dq is not None and not ahead
        cuts = self.split if split else Split(0, 1, 0)
        rows, width = (128, plan.d) if narrow else (64, plan.width)
        key_tiles = s.seqlen_k // rows + s.batch if self.varlen else -(-s.seqlen_k // rows)
        units = s.num_heads_kv * (1 if self.varlen else s.batch)
        sums = (
            self.box(dq if ahead else dk, 64, 64), sums_box(lines.sums) if bulk else self.box(dk, 64, 64), lines.sums,
        )  # fmt: skip
        values = (
            self.box(x.q, plan.rows, width), self.box(self.own_do, plan.rows, width), self.box(x.k, rows, width),
            self.box(x.v, 64, width), line_box(lines.m, plan.rows), line_box(lines.delta, plan.rows),
            self.box(dk, 64, width), self.box(dv, 64, width), dk, dv,
            *(sums if narrow else ()), self.marks,
            *(
                (self.counter, lines.turns, *self.signs, self._floats(cuts.floats(plan.d)), self.said)
                if narrow else (self.counter,) if plan.early else ()
            ),
            *self.places[1:], *keyed_strides(self.problem, dk), *keyed_strides(self.problem, dv), *self.sizes,
            lines.tiles, key_tiles, plan.swizzle, *((way.lead, way.lag, *cuts) if narrow else ()), _number(x.q_offset),
            _number(x.k_offset), s.head_dim, s.head_dim_v, x.scale,
        )  # fmt: skip
        adds = {"ADD": dq is not None, "ORDER": plan.order if dq is not None else 0, "AHEAD": ahead, "BULK": bulk,
                "SPLIT": split}  # fmt: skip
        constants = self.flags() | plan.key_constants() | adds
        grid = cuts.draws if split else units * key_tiles
        if narrow or plan.early:
            grid = min(grid, machine_of(self.device).sms)
        self.gluon(HALVES if narrow else EARLY if plan.early else ROLES, grid, values, constants, 168)

    def row_tiles(self, lines: Lines, dq: Tensor) -> None:
        """dq without additions to memory."""
        s, plan, x = self.problem.shape, self.plan, self.inputs
        tiles = s.seqlen_q // 128 + s.batch if self.varlen else -(-s.seqlen_q // 128)
        units = s.num_heads_q * (1 if self.varlen else s.batch)
        values = (
            self.box(x.q, 64, plan.width), self.box(self.own_do, 64, plan.width), self.box(x.k, 64, plan.width),
            self.box(x.v, 64, plan.width), self.box(dq, 64, plan.width), dq, lines.m, lines.delta, self.marks,
            *((self.signs[0],) if plan.drawn else ()), *self.places[1:], *keyed_strides(self.problem, dq),
            *self.sizes, tiles, lines.tiles, plan.swizzle, _number(x.q_offset), _number(x.k_offset), s.head_dim,
            x.scale,
        )  # fmt: skip
        entry, grid = ROWS, units * tiles
        if plan.drawn:
            entry, grid = DRAWN_ROWS, min(grid, machine_of(self.device).sms)
        self.gluon(entry, grid, values, self.flags() | plan.row_constants(), 168)

    def flags(self) -> dict[str, Any]:
        """Constants that follow from the call."""
        spec, o = self.problem.spec, self.problem.options
        return {
            "HAS_MASK": spec.keep is not None, "HAS_TERMS": spec.score is not None, "VARLEN": self.varlen,
            "USED_Q": o.seqused_q, "USED_K": o.seqused_k, "Q_OFFSET": o.q_offset, "K_OFFSET": o.k_offset,
        }  # fmt: skip

    def gluon(
        self, entry: Entry, grid: int, values: tuple[object, ...], constants: dict[str, Any], registers: int
    ) -> None:
        """Compile a kernel of the spec at first use, and run it."""
        values = (*values, *self.data)
        names = [a.partition(":")[0] for a in entry.arguments] + list(self.slots.names)
        kinds = argument_types(entry, self.slots)
        types = tuple(
            value.kind if isinstance(value, Box) else known
            for value, known in zip(values, types_of(names, [bare(v) for v in values], kinds), strict=True)
        )
        aligned = tuple(
            len(entry.arguments) + at
            for at, layout in zip(self.slots.leaf_at, self.slots.leaves, strict=True) if layout.step > 1
        )  # fmt: skip
        build = Build(types, aligned, tuple((n, constants[n]) for n in entry.constants), 4, 1, registers)
        key = (self.problem.spec.text, self.slots, entry.name, build, self.device)

        def make() -> GluonLauncher:
            run = _launchers.get(key)
            if run is None:
                module = module_of(self.problem.spec, self.slots, entry.module, (entry,))
                made = GluonLauncher(getattr(module, entry.name), build, self.device)
                run = _launchers.setdefault(key, made)
            return run

        self.start(make, grid, [bare(v) for v in values])

    def box(self, t: Tensor, rows: int, width: int) -> Box:
        """A descriptor of a q-, k- or v-like tensor in blocks of rows x width."""
        view = t.transpose(0, 1).unsqueeze(0) if self.varlen else t
        # A dimension of one element may have any stride that the hardware takes.
        strides = [x if n > 1 else 8 for n, x in zip(view.shape[:3], view.stride()[:3], strict=True)] + [1]
        return boxed(t, list(view.shape), strides, [1, 1, rows, width])


def laid_out(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that begins at a multiple of 16 bytes, which `contiguous` leaves as it is where only that is missing."""
    return torch.empty(t.shape, dtype=dtype, device=t.device).copy_(t)


# ---- one backward --------------------------------------------------------------------------------------------


def backward(
    problem: Problem,
    inputs: Inputs,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    needs: Needs,
) -> Gradients | None:
    """All gradients that are asked for; None where the Triton backend is to make them: for tensors that the copy engine
    does not read, and leaves of another type, summed along columns, or in no order although bits must repeat."""
    given = outside(inputs, saved, grads)
    kind = kind_of(problem, inputs, given, needs)
    tape = None if kind is None else tapes.get(kind)
    if tape is not None:
        return tape(given)
    slots = describe(problem.spec, inputs.leaves)
    if slots is None or not readable(problem, (inputs.q, inputs.k, inputs.v)):
        return None
    sites = Sites((), (), -1, (), (), ())
    if any(needs.leaves):
        sites = sort_sites(problem, inputs.leaves, tuple(needs.leaves))
    if sites.columns or (problem.options.deterministic and sites.scatters):
        return None
    call = HopperCall(problem, inputs, saved, grads, slots)
    if not (inputs.q.is_cuda and is_capturing()) and compile_together(call, sites, needs):
        call = HopperCall(problem, inputs, saved, grads, slots)
    found = run(call, sites, needs)
    # Tables of blocks are made from what the leaves hold.
    if kind is not None and kind not in tapes and not slots.tables:
        remember(kind, call.tape, given, found)
    return found


def run(call: HopperCall, sites: Sites, needs: Needs) -> Gradients:
    """The launches of a call, in order."""
    inputs, problem, plan = call.inputs, call.problem, call.plan
    wants_sink = needs.sink and inputs.sink is not None
    # The sink's gradient is made from the sums of all slopes of rows, where all keys are there.
    rows = (*sites.rows, SLOPES) if wants_sink and not problem.options.subset else sites.rows
    own_rows = not rows and sites.pair < 0
    add = own_rows and plan.adds
    call.own_do = call.do
    if call.do.dtype != problem.dtype or not readable(problem, (call.do,)):
        call.own_do = laid_out(call.do, problem.dtype)
    leaves = LeafGradients(call, sites, needs)
    dq = call.gradient(inputs.q) if own_rows else None
    dk, dv = call.gradient(inputs.k), call.gradient(inputs.v)
    lines = call.fill_lines(plan.rows * plan.d if add else 0, (dq, dk, dv))
    call.keys(lines, dq if add else None, dk, dv)
    if dq is not None and add:
        call.collect(lines, dq, *plan.sums)
    elif dq is not None:
        call.row_tiles(lines, dq)
    dk, dv, _ = call.key_gradients((), (dk, dv))
    dq, sums = call.row_gradients(rows, sites.pair, leaves.pair_target, dq)
    leaves.add_tokens(sites.rows, sums, rows=True)
    leaves.add_others()
    sink = None
    if wants_sink:
        sink = sink_gradient(call, None if problem.options.subset else sums[-1])
    return Gradients(dq, dk, dv, leaves.finish(), sink)


def compile_together(call: HopperCall, sites: Sites, needs: Needs) -> bool:
    """The first call of a kind is gone through once without a launch, to see which kernels there are, and those are
    compiled side by side: Triton spends most of that time outside of Python. False if that was done before."""
    problem, s = call.problem, call.problem.shape
    kind = (
        problem.spec.text, problem.options, problem.dtype, s.head_dim, s.head_dim_v, call.slots, call.plan,
        call.way.ahead, call.device, needs, call.inputs.q_offset is None, call.dlse is None,
    )  # fmt: skip
    if kind in _compiled:
        return False
    call.wanted = []
    run(call, sites, needs)
    with ThreadPoolExecutor(len(call.wanted)) as pool:
        for done in [pool.submit(make) for make in call.wanted]:
            done.exception()  # what failed is tried again, and raises there
    _compiled.add(kind)
    return True
