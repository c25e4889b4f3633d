"""The page that `tilewise explain` prints: the plan in words and numbers."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from tilewise.analysis import exponentials
from tilewise.analysis.machines import MACHINES, find_machine
from tilewise.analysis.roofline import ROOFS, predict_time, what_if, work_of
from tilewise.cli.terminal import draws
from tilewise.plan import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from tilewise.cli.explain_measured import Measured
    from tilewise.cli.problem_flags import Sizes
    from tilewise.plan import Plan

WIDEST_PAGE = 100
FEW_ROWS = 64
"""Query rows per key below which no tile of the widest matrix unit (64 rows, wgmma) is full."""


def intensity(plan: Plan) -> tuple[float, float]:
    """FLOP per byte of main-memory traffic, forward: of this plan, and of ordinary attention on every pair."""
    visited, every = plan.pairs
    ordinary_flops = plan.flops / visited * every if visited else 0.0
    ours = plan.flops / plan.bytes_tiled if plan.bytes_tiled else 0.0
    return ours, ordinary_flops / plan.bytes_ordinary if plan.bytes_ordinary else 0.0


def bound(plan: Plan) -> str:
    """What bounds the forward pass, in words: no machine is assumed and no time is predicted."""
    ours, ordinary = intensity(plan)
    if not ours:
        return "No pair is visible: there is nothing to compute."
    if plan.schedule is not None and plan.schedule.builds_matrix:
        return f"main memory: {_short(ordinary)} FLOP per byte, and the matrix's traffic grows with N^2."
    limit = _short(ours)
    text = (
        f"{limit} FLOP per byte of main-memory traffic (ordinary attention: {_short(ordinary)}). A machine whose "
        f"matrix rate divided by its memory bandwidth is below {limit} FLOP per byte is kept busy by arithmetic here "
        "(matrix products, and exponentials on their own unit); one above it waits for memory. "
    )
    group = max(plan.problem["num_heads_q"] // max(plan.problem["num_heads_kv"], 1), 1)
    rows = plan.problem["seqlen_q"] * group
    if rows < FEW_ROWS:
        each = "Only one query row uses" if rows == 1 else f"Only {rows} query rows use"
        return text + f"{each} each key that is read, as in decoding: the work is reading K and V."
    return text + "Each key that is read serves a whole tile of queries."


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def roofline(plan: Plan) -> list[tuple[str, str]]:
    """The four roofs of the plan's machine, the time they predict, and what would change it."""
    if plan.machine is None:
        return [("machine", f"not in the table: name one with --machine ({', '.join(MACHINES)})")]
    machine = find_machine(plan.machine)
    if plan.shape is None or plan.predicted_s is None:
        why = f"no source states a rate for {plan.problem['dtype']}" if plan.shape else "nothing to price"
        return [("machine", f"{machine.title}: {why}")]
    known = predict_time(work_of(plan.shape, machine), plan.shape.dtype, machine)
    roofs = [
        f"{name} {'unknown' if value is None else seconds_text(value)}"
        for name, value in zip(ROOFS, known.roofs, strict=True)
    ]
    apart = "" if known.unknown else f", {seconds_text(known.seconds_apart)} if nothing overlaps"
    way = "backward" if plan.shape.backward else "forward"
    changes = [
        f"{change.change}: {seconds_text(change.prediction.seconds)}, {change.prediction.bound}"
        for change in what_if(plan.shape, machine)
    ]
    return [
        ("machine", machine.title),
        ("roofs", ", ".join(roofs)),
        ("limit", f"{known.bound}; {way}"),
        (
            "predicted",
            f"at least {seconds_text(known.seconds)}, if all overlap and every unit runs at its peak{apart}",
        ),
        ("what if", "; ".join(changes)),
    ]


def recorded(plan: Plan, measured: list[Measured]) -> list[tuple[str, str]]:
    """Measured times beside the prediction."""
    if plan.machine is None or plan.predicted_s is None:
        return []
    if not measured:
        return [("measured", "nothing like this on that machine in benchmarks/results")]
    found = []
    for one in measured:
        share = f"{plan.predicted_s / one.seconds:.0%} of the floor's speed"
        found.append(f"{one.library} {seconds_text(one.seconds)} ({share}; from {one.what}, {one.source})")
    return [("measured" if n == 0 else "", text) for n, text in enumerate(found)]


def entries(
    plan: Plan, sizes: Sizes, problem: dict[str, Any], measured: list[Measured]
) -> list[tuple[str, str]]:
    """The page as (name, text) pairs; an empty name continues the entry above."""
    found = [("problem", _problem(sizes, problem)), ("features", ", ".join(plan.spec) or "plain softmax")]
    found.append(
        ("backend", f"{plan.backend}{_choice(plan, problem)}" if plan.backend else "none takes this problem")
    )
    for name, reasons in plan.candidates:
        if name != plan.backend:
            taken = f"it would take the problem, but auto asks {plan.backend} first"
            found.append((f"not {name}", "; ".join(reasons) or taken))
    if plan.schedule is not None:
        s = plan.schedule
        splits = f", keys in {s.splits} splits" if s.splits > 1 else ""
        found.append(("schedule", f"tiles of {s.block_q} x {s.block_k}, {s.loop}{splits}"))
        found += [("", note) for note in s.notes]
    return [
        *found,
        *_numbers(plan, sizes),
        ("bound by", bound(plan)),
        *roofline(plan),
        *recorded(plan, measured),
    ]


def _numbers(plan: Plan, sizes: Sizes) -> list[tuple[str, str]]:
    empty, partial, full = plan.census
    visited, every = plan.pairs
    share = f"{visited / every:.1%}" if every else "none"
    per = "of one head" if sizes.batch == 1 else f"of one head, {sizes.batch} batch entries"
    counts = f"{full:,} full, {partial:,} partial, {empty:,} empty and skipped ({per})"
    exponents = count_text(exponentials(visited * sizes.heads), "")
    builds = plan.schedule is not None and plan.schedule.builds_matrix
    tiled = "" if builds else f"{bytes_text(plan.bytes_tiled)} tiled, "
    found = [
        ("tiles", f"{counts}; {share} of the pairs are visited"),
        ("work", f"{count_text(plan.flops, 'FLOP')} in matrix products, {exponents} exponentials; forward"),
        (
            "traffic",
            f"{tiled}{bytes_text(plan.bytes_ordinary)} by ordinary attention; main memory, forward, a model",
        ),
    ]
    if plan.matrix_bytes_avoided:
        found.append(
            ("not built", f"the score matrix, {bytes_text(plan.matrix_bytes_avoided)} for all heads")
        )
    elif builds:
        found.append(("built", "the score matrix: memory grows with N^2"))
    return [*found, ("workspace", f"{bytes_text(plan.workspace_bytes)} beyond inputs and outputs")]


def _choice(plan: Plan, problem: dict[str, Any]) -> str:
    if problem["backend"] != "auto":
        return " (named)"
    return " (auto: the first registered backend that takes it)" if len(plan.candidates) > 1 else ""


def _problem(sizes: Sizes, problem: dict[str, Any]) -> str:
    grouped = f" on {sizes.heads_kv} KV heads" if sizes.heads != sizes.heads_kv else ""
    queries = f"{sizes.seqlen_q} quer{'y' if sizes.seqlen_q == 1 else 'ies'}"
    same = sizes.seqlen_q == sizes.seqlen_k
    words = [
        f"batch {sizes.batch}",
        f"{sizes.heads} heads{grouped}",
        f"length {sizes.seqlen_q}" if same else f"{queries}, {sizes.seqlen_k} keys",
        f"head dim {sizes.head_dim}"
        + (f" ({sizes.head_dim_v} in v)" if sizes.head_dim_v != sizes.head_dim else ""),
        sizes.dtype,
        f"mask {sizes.mask}",
    ]
    words += [name.replace("_", " ") for name, value in problem.items() if value is True]
    words += [f"{name} {problem[name]:g}" for name in ("softcap", "dropout") if problem[name]]
    words += [f"q_offset {problem['q_offset']}"] if problem["q_offset"] is not None else []
    return ", ".join([*words, f"on {problem['device']}"])


def print_page(
    plan: Plan, sizes: Sizes, problem: dict[str, Any], drawn: list[str], measured: list[Measured]
) -> None:
    """The page: coloured in a terminal, plain elsewhere, the same words in both. drawn: lines of the picture."""
    width = min(shutil.get_terminal_size((WIDEST_PAGE, 24)).columns, WIDEST_PAGE)
    lines = entries(plan, sizes, problem, measured)
    indent = max(len(name) for name, _ in lines) + 2
    console = None
    if draws():
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
    for name, text in lines:
        for n, line in enumerate(textwrap.wrap(text, max(width - indent, 30)) or [""]):
            head = (name if n == 0 else "").ljust(indent)
            if console is None:
                print((head + line).rstrip())
                continue
            style = "" if name != "backend" else "bold green" if plan.backend else "bold red"
            console.print(Text.assemble((head, "cyan"), (line, style)), soft_wrap=True)
    print(*["", *(f"  {line}" for line in drawn)], sep="\n")


def to_dict(
    plan: Plan, problem: dict[str, Any], drawn: list[str], measured: list[Measured]
) -> dict[str, Any]:
    """Everything on the page as plain numbers and text."""
    ours, ordinary = intensity(plan)
    return {
        "command": "explain",
        "schema": 1,
        "asked": problem,
        "plan": plan.to_dict(),
        "flop_per_byte_tiled": ours,
        "flop_per_byte_ordinary": ordinary,
        "bound": bound(plan),
        "roofline": dict(roofline(plan)),
        "measured": [one._asdict() for one in measured],
        "picture": drawn,
    }
