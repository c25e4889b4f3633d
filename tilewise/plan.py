"""`explain`: what a call would do, as an object, without running it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.analysis import attention_flops, bytes_ordinary, bytes_tiled, matrix_bytes_avoided
from tilewise.analysis.machines import find_machine, machine_here
from tilewise.analysis.roofline import Prediction, Shape, predict_time, work_of
from tilewise.backends.protocol import Schedule
from tilewise.dispatch import candidates, registry
from tilewise.errors import OptionError, ShapeError
from tilewise.problem import Inputs, Problem, decode_inputs, decode_problem
from tilewise.spec.tiles import EMPTY, TileGrid, classify_tiles
from tilewise.written import Cached, Packing, pack, write

if TYPE_CHECKING:
    from tilewise.backends.reference.segments import Segment


@dataclass(frozen=True)
class Plan:
    """What a call would do.

    backend: the one that would run, None if all refuse. candidates: (name, reasons against it) in the order
    asked. spec: names of masks and terms. schedule: tiles, loop order, workspace. census: (EMPTY, PARTIAL, FULL)
    tiles of one head, over all batch entries. pairs: of one head, in tiles that are visited, and all.
    flops: of the visited tiles, forward, over all heads. bytes_ordinary / bytes_tiled: main-memory traffic of
    ordinary attention / of this schedule, forward (Dao et al. 2022, theorem 2). matrix_bytes_avoided: the
    N_q x N_k matrix in the inputs' type, which is not built. workspace_bytes: beyond inputs and outputs.
    machine: a name of `tilewise.analysis.machines`, None if the table lacks the one asked about. roofs: seconds of
    each roof there (`tilewise.analysis.roofline.ROOFS`), None where no source states its number; bound: the slowest
    known one; predicted_s: its seconds, a floor for these tiles on that machine, of the backward pass alone if one is
    planned for. shape: what was priced, of all heads.
    """

    backend: str | None
    candidates: tuple[tuple[str, tuple[str, ...]], ...]
    spec: tuple[str, ...]
    problem: dict[str, Any]
    schedule: Schedule | None
    census: tuple[int, int, int]
    pairs: tuple[int, int]
    flops: int
    bytes_ordinary: int
    bytes_tiled: int
    matrix_bytes_avoided: int
    workspace_bytes: int
    machine: str | None = None
    roofs: tuple[float | None, ...] = ()
    bound: str | None = None
    predicted_s: float | None = None
    shape: Shape | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return asdict(self)

    def __str__(self) -> str:
        visited, every = self.pairs
        empty, partial, full = self.census
        share = f"{visited / every:.1%}" if every else "none"
        lines = [
            f"backend      {self.backend or 'none takes it'}",
            *(f"  not {name:<10} {reason}" for name, reasons in self.candidates for reason in reasons),
            f"problem      {', '.join(f'{name} {value}' for name, value in self.problem.items())}",
            f"spec         {', '.join(self.spec) or 'plain softmax'}",
        ]
        if self.schedule is not None:
            s = self.schedule
            lines.append(f"schedule     {s.block_q} x {s.block_k} tiles, {s.loop}, key splits {s.splits}")
            lines += [f"             {note}" for note in s.notes]
        lines += [
            f"tiles        {full} full, {partial} partial, {empty} empty (skipped); {share} of the pairs are visited",
            f"work         {count_text(self.flops, 'FLOP')} forward",
            f"traffic      {bytes_text(self.bytes_tiled)} tiled, "
            f"{bytes_text(self.bytes_ordinary)} by ordinary attention",
            f"not built    the score matrix, {bytes_text(self.matrix_bytes_avoided)}",
            f"workspace    {bytes_text(self.workspace_bytes)}",
        ]
        if self.predicted_s is not None:
            lines.append(
                f"bound        {self.bound}, at least {seconds_text(self.predicted_s)} on {self.machine}"
            )
        return "\n".join(lines)


def count_text(n: float, unit: str) -> str:
    """A number with a decimal prefix and its unit."""
    for prefix in ("", "k", "M", "G", "T"):
        if n < 1000:
            return f"{n:.4g} {prefix}{unit}"
        n /= 1000
    return f"{n:.4g} P{unit}"


def seconds_text(seconds: float) -> str:
    """A time with three digits and its unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def bytes_text(n: float) -> str:
    """A number of bytes with a binary prefix."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} TiB"


def _meta(x: Tensor | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach()
    if not all(isinstance(n, int) and n >= 0 for n in x):
        raise ShapeError(f"a shape is a tuple of sizes, not {x!r}")
    return torch.empty(x, dtype=dtype, device="meta")


MOST_TILES = 1 << 20
"""Tiles that are classified at once, so that explaining a long call takes little memory."""
_DOOR_ONLY = ("return_lse", "out", "device", "dtype", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
              "seqused_q", "seqused_k", "backward", "machine", "pages", "block_table", "leftpad_k", "k_scale",
              "v_scale")  # fmt: skip


def explain(q: Any, k: Any, v: Any, **options: Any) -> Plan:
    """What `attention` (or, with cu_seqlens_q, `attention_varlen`) would do with these arguments.

    Args:
        q, k, v: tensors, meta tensors, or shapes as tuples.
        options: those of the function, and for shapes and meta tensors dtype= (default float32) and
            device= (the device type asked about, default "cpu"). backward=True plans for a backward too.
            pages=True: k and v are pools, read through block_table= (B, M), with seqused_k= and the like, as
            `tilewise.serving.attend_pages` takes them.
            machine= a name of `tilewise.analysis.machines.MACHINES` whose roofs are asked about; default the one
            this process runs on, if the table has it.

    Returns: Plan. Allocates no output and runs no kernel; a mask's leaves are read for the census.
    Raises: as `attention`, except that a refusal by every backend is part of the Plan.
    """
    dtype = options.get("dtype", torch.float32)
    q, k, v = (_meta(x, dtype) for x in (q, k, v))
    device = options.get("device") or ("cpu" if q.device.type == "meta" else q.device.type)
    used = {name: options[name] for name in options if name not in _DOOR_ONLY}
    packing: Packing | Cached | None = None
    if options.get("pages"):
        tensors_of = {name: options.get(name) for name in Cached._fields[:-1]}
        packing = Cached(**tensors_of)  # type: ignore[arg-type]  # the last field is no tensor
    elif options.get("cu_seqlens_q") is not None:
        maxima = options.get("max_seqlen_q"), options.get("max_seqlen_k")
        packing = pack(
            options["cu_seqlens_q"],
            options.get("cu_seqlens_k"),
            maxima,
            (options.get("seqused_q"), options.get("seqused_k")),
        )
    if used.get("dropout"):
        used["seed"] = used.get("seed") if used.get("seed") is not None else 0
    try:
        written = write((q, k, v), packing, **{"mask": None, "scores": (), **used})
    except TypeError as error:
        raise OptionError(f"explain takes the options of attention: {error}") from None
    tensors, numbers = written.tensors, written.numbers
    problem = decode_problem(tensors[0], tensors[1], tensors[2], tensors[3:], numbers.text)
    problem = replace(
        problem, device_type=torch.device(device).type, needs_grad=bool(options.get("backward", False))
    )
    inputs = decode_inputs(problem, (*tensors[:3], tensors[3:]), numbers.ints, numbers.floats, written.seed)  # type: ignore[arg-type]
    return _plan(problem, inputs, options.get("machine"))


def _plan(problem: Problem, inputs: Inputs, machine: str | None) -> Plan:
    from tilewise.backends.reference.segments import segments  # the package's import brings no backend along

    asked = candidates(problem)
    name = problem.options.backend
    if name != "auto":
        asked = [(name, registry.get(name).supports(problem))]
    taken = next((name for name, reasons in asked if not reasons), None)
    schedule = None if taken is None else registry.get(taken).plan(problem)
    shape = problem.shape
    census, visited, every, q_tokens = [0, 0, 0], 0, 0, 0
    for segment in segments(problem, inputs, max(shape.batch, 1)):
        counts, pairs = _count_tiles(problem, inputs, segment, schedule or Schedule(128, 128, ""))
        census = [a + segment.entries * b for a, b in zip(census, counts, strict=True)]
        visited += segment.entries * pairs
        every += segment.entries * segment.seqlen_q * segment.seqlen_k
        q_tokens += segment.entries * segment.seqlen_q
    itemsize = torch.empty(0, dtype=problem.dtype).element_size()
    sizes = {
        # The query heads of a KV head are folded into its rows, so K and V are read once for all of them.
        "batch": 1, "num_heads_q": shape.num_heads_kv, "seqlen_q": q_tokens * problem.group, "seqlen_k": 1,
        "head_dim": shape.head_dim, "head_dim_v": shape.head_dim_v, "itemsize": itemsize,
    }  # fmt: skip
    block_q = min(schedule.block_q if schedule else 128, max(q_tokens, 1))
    # Key rows read: each visited tile reads its columns once.
    rows_read = visited // max(block_q, 1)
    heads = shape.num_heads_q
    if machine is not None:
        find_machine(machine)  # an unknown name is refused, whether it would be priced or not
    machine = machine or machine_here(problem.device_type)
    priced = _priced(problem, schedule, (visited, q_tokens))
    predicted = _predict(priced, machine, schedule)
    return Plan(
        backend=taken,
        candidates=tuple((name, tuple(str(r) for r in reasons)) for name, reasons in asked),
        spec=(*problem.spec.names, *["sink"] * problem.spec.sink, *["dropout"] * problem.spec.dropout),
        problem={**shape._asdict(), "dtype": str(problem.dtype).removeprefix("torch."), "device": problem.device_type,
                 "layout": problem.options.layout},
        schedule=schedule,
        census=(census[0], census[1], census[2]),
        pairs=(visited, every),
        flops=attention_flops(visited, shape.head_dim, shape.head_dim_v, heads),
        bytes_ordinary=_ordinary(problem, every, q_tokens, itemsize),
        bytes_tiled=bytes_tiled(**sizes, block_q=max(block_q, 1), key_rows_read=rows_read) if q_tokens else 0,
        matrix_bytes_avoided=(
            0 if schedule and schedule.builds_matrix else matrix_bytes_avoided(1, heads, every, 1, itemsize)
        ),
        workspace_bytes=schedule.workspace_bytes if schedule else 0,
        machine=machine,
        roofs=predicted.roofs if predicted else (),
        bound=predicted.bound if predicted else None,
        predicted_s=predicted.seconds if predicted else None,
        shape=priced,
    )  # fmt: skip


def _packs_keys(problem: Problem) -> bool:
    """Whether seqlen_k is the sum over the sequences; with pages it is what one of them can hold."""
    return problem.options.layout == "varlen" and not problem.options.pages


def _priced(problem: Problem, schedule: Schedule | None, counts: tuple[int, int]) -> Shape | None:
    """What the roofline prices: KV heads of all sequences, the query heads of a group folded into their rows."""
    visited, q_tokens = counts
    shape = problem.shape
    sequences = max(shape.batch, 1)
    if schedule is None or not visited:
        return None
    rows = q_tokens * problem.group // sequences
    columns = shape.seqlen_k // (sequences if _packs_keys(problem) else 1)
    block_q = max(min(schedule.block_q, rows), 1)
    return Shape(
        shape.num_heads_kv * sequences, rows, columns, shape.head_dim, shape.head_dim_v,
        block_q, max(min(schedule.block_k, columns), 1), visited * shape.num_heads_q,
        visited * shape.num_heads_q // block_q, torch.empty(0, dtype=problem.dtype).element_size(),
        str(problem.dtype).removeprefix("torch."), problem.needs_grad, schedule.heads_abreast,
    )  # fmt: skip


def _predict(priced: Shape | None, machine: str | None, schedule: Schedule | None) -> Prediction | None:
    """The roofs of a machine over these tiles; None for an unknown machine, type, or a schedule with the matrix."""
    if machine is None or priced is None or schedule is None or schedule.builds_matrix:
        return None
    found = find_machine(machine)
    return (
        None
        if found.rate(priced.dtype) is None
        else predict_time(work_of(priced, found), priced.dtype, found)
    )


def _ordinary(problem: Problem, every: int, q_tokens: int, itemsize: int) -> int:
    """Traffic of ordinary attention over the same pairs; packed calls count their own pairs, not a padded square."""
    shape = problem.shape
    per_token = (shape.head_dim + shape.head_dim_v) * itemsize
    k_tokens = shape.seqlen_k * (1 if _packs_keys(problem) else shape.batch)
    one = bytes_ordinary(
        batch=1,
        num_heads_q=1,
        num_heads_kv=1,
        seqlen_q=1,
        seqlen_k=1,
        head_dim=0,
        head_dim_v=0,
        itemsize=itemsize,
    )
    return (
        every * shape.num_heads_q * one
        + (q_tokens * shape.num_heads_q + k_tokens * shape.num_heads_kv) * per_token
    )


def _count_tiles(
    problem: Problem, inputs: Inputs, segment: Segment, schedule: Schedule
) -> tuple[list[int], int]:
    """(EMPTY, PARTIAL, FULL) counts of one batch entry of a segment, and the pairs in tiles that are not EMPTY."""
    from tilewise.backends.reference.walk import span

    if segment.seqlen_q == 0 or segment.seqlen_k == 0:
        return [0, 0, 0], 0
    grid = TileGrid(
        max(schedule.block_q, 1), max(schedule.block_k, 1), segment.seqlen_q, segment.seqlen_k,
        *span(segment.q_offset), *span(segment.k_offset),
        segment.first_batch, segment.first_batch + segment.entries - 1,
        problem.shape.num_heads_q, problem.shape.num_heads_kv,
    )  # fmt: skip
    if problem.spec.keep is None:
        return [0, 0, grid.num_q_tiles * grid.num_k_tiles], segment.seqlen_q * segment.seqlen_k
    counts, pairs = [0, 0, 0], 0
    for slab in grid.slabs(MOST_TILES):
        classes = classify_tiles(problem.spec.keep, slab, inputs.leaves, inputs.ints, inputs.floats)
        counts = [n + int((classes == kind).sum()) for kind, n in enumerate(counts)]
        rows, columns = slab.rows(), slab.columns()
        visited = (classes != EMPTY).to(torch.int64) @ (columns.hi - columns.lo + 1).reshape(-1)
        pairs += int(((rows.hi - rows.lo + 1).reshape(-1) * visited).sum())
    return counts, pairs
