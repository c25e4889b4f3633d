"""`tilewise bench`: Tilewise beside SDPA, FlexAttention and ordinary attention, on your shapes.

All of them get the same tensors, precision and mask in one process; calls are interleaved and their order
rotates. Shown are medians with their spread, and the peak memory beyond inputs and outputs. Before anything is
timed, each output is held against float64.

Exit code: 0 measured, 1 a result was wrong (or --fail-above was exceeded), 2 it could not run.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.cli import problem_flags as flags
from tilewise.cli.terminal import UsageError, add_output_arguments, guarded, names_list, progress

if TYPE_CHECKING:
    import argparse

    import torch

    from tilewise.cli.bench_run import Row

SUMMARY = "time Tilewise, SDPA, FlexAttention and ordinary attention on the same shapes"
OTHERS = ("sdpa", "flex", "ordinary")


class Defaults(NamedTuple):
    """What is measured where nothing was asked for: a run of under a minute."""

    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: str


DEFAULTS = {
    "cpu": Defaults((512, 1024, 2048), 8, 64, "float32"),
    "cpu, slow": Defaults(
        (256, 512, 1024), 4, 64, "float32"
    ),  # no compiled backend: the readable one in PyTorch
    "cuda": Defaults((1024, 2048, 4096, 8192), 16, 128, "bfloat16"),
    "cuda, slow": Defaults((1024, 2048), 16, 128, "bfloat16"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tilewise bench`."""
    whole = flags.whole(1)
    problem = parser.add_argument_group("problem")
    problem.add_argument(
        "--seqlen", type=flags.lengths, metavar="N,N", help="default: a few that take under a minute"
    )
    problem.add_argument("--seqlen-k", type=whole, metavar="N", help="keys; default: as many as queries")
    problem.add_argument("--batch", type=whole, default=1, metavar="B", help="default: 1")
    problem.add_argument(
        "--heads", type=whole, metavar="H", help="query heads; default: 8 on a CPU, 16 on a GPU"
    )
    problem.add_argument("--heads-kv", type=whole, metavar="H", help="KV heads; default: as many")
    problem.add_argument("--head-dim", type=whole, metavar="D", help="default: 64 on a CPU, 128 on a GPU")
    problem.add_argument("--dtype", type=flags.dtype_name, help="default: fp32 on a CPU, bf16 on a GPU")
    problem.add_argument("--mask", default="causal", help=flags.MASK_HELP)
    problem.add_argument("--device", help="default: cuda where there is one, else cpu")
    run_group = parser.add_argument_group("measurement")
    run_group.add_argument(
        "--backend",
        type=names_list,
        action="extend",
        metavar="NAME",
        help="also this Tilewise backend, beside auto's choice",
    )
    run_group.add_argument(
        "--against",
        type=names_list,
        default=list(OTHERS),
        metavar="NAMES",
        help="default: sdpa,flex,ordinary; none: nothing",
    )
    run_group.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="time spent on rounds, in all; default: 20"
    )
    run_group.add_argument(
        "--threads", type=whole, metavar="N", help="CPU threads; default: PyTorch's choice"
    )
    results = parser.add_argument_group("results")
    results.add_argument("--output", metavar="FILE", help="append the measurements to FILE as JSON lines")
    results.add_argument("--plot", metavar="FILE", help="draw a picture (PNG, SVG or PDF; needs matplotlib)")
    results.add_argument("--compare", metavar="FILE", help="ratios to an earlier run, written by --output")
    results.add_argument(
        "--fail-above",
        type=float,
        metavar="R",
        help="with --compare: exit code 1 if Tilewise takes R times as long",
    )
    add_output_arguments(results, "the table")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark. Returns 0, 1 or 2 as the module says."""
    return guarded("bench", bench, arguments)


def bench(arguments: argparse.Namespace) -> int:
    """Check, measure, show. Raises UsageError for what the caller can put right."""
    import torch

    from tilewise.cli import bench_report, machine
    from tilewise.cli.check import open_for_writing, usable_device
    from tilewise.config import config

    start = time.perf_counter()
    _check(arguments)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = usable_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = ["tilewise", *(f"tilewise:{name}" for name in arguments.backend), *arguments.against]
    before = bench_report.read_rows(arguments.compare) if arguments.compare else None
    if arguments.output:
        open_for_writing(arguments.output)
    slow, config.slow = config.slow, "quiet"  # the table names the backend
    try:
        rows = _measure(arguments, names, device)
    finally:
        config.slow = slow
    facts = machine.describe()
    if arguments.output:
        bench_report.append_rows(arguments.output, rows, facts)
    if arguments.plot:
        bench_report.save_plot(rows, arguments.plot, facts)
    changes = bench_report.compare(rows, before) if before is not None else []
    seconds = time.perf_counter() - start
    if arguments.json:
        bench_report.print_json(rows, changes, facts, seconds)
    else:
        bench_report.print_all(rows, changes, facts, seconds, arguments)
    return exit_code(rows, changes, arguments.fail_above)


def _check(arguments: argparse.Namespace) -> None:
    from tilewise.dispatch import registry

    arguments.against = [] if arguments.against == ["none"] else arguments.against
    unknown = [name for name in arguments.against if name not in OTHERS]
    if unknown:
        raise UsageError(f"--against takes {', '.join(OTHERS)} or none, not {', '.join(unknown)}")
    arguments.backend = [name for name in dict.fromkeys(arguments.backend or ()) if name != "auto"]
    for name in arguments.backend:
        registry.get(name)
    flags.parse_mask(arguments.mask)
    if arguments.fail_above is not None and not arguments.compare:
        raise UsageError("--fail-above needs --compare FILE")
    if arguments.plot:
        import importlib.util

        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--plot needs matplotlib: python -m pip install matplotlib")
        from tilewise.cli.check import open_for_writing

        open_for_writing(arguments.plot)


def problems(arguments: argparse.Namespace, device: torch.device) -> list[flags.Sizes]:
    """The problems asked for, one for each length. Raises UsageError for sizes that do not fit."""
    from tilewise.cli.bench_run import resolve

    def made(defaults: Defaults) -> list[flags.Sizes]:
        heads = arguments.heads or defaults.heads
        heads_kv = arguments.heads_kv or heads
        flags.check_heads(heads, heads_kv)
        dim = arguments.head_dim or defaults.head_dim
        return [
            flags.Sizes(arguments.batch, heads, heads_kv, n, arguments.seqlen_k or n, dim, dim,
                        arguments.dtype or defaults.dtype, arguments.mask)
            for n in arguments.seqlen or defaults.lengths
        ]  # fmt: skip

    kind = "cuda" if device.type == "cuda" else "cpu"
    usual = made(DEFAULTS[kind])
    return made(DEFAULTS[f"{kind}, slow"]) if resolve("tilewise", usual[0], device, True)[1] else usual


def _measure(arguments: argparse.Namespace, names: list[str], device: torch.device) -> list[Row]:
    from tilewise.cli import bench_run
    from tilewise.cli.timing import Limits

    asked = problems(arguments, device)
    # A GPU's clock needs its dozen rounds; a CPU gives as many as fit.
    least = 12 if device.type == "cuda" else 5
    limits = Limits(least, max(25, least), arguments.seconds / (len(asked) * len(bench_run.DIRECTIONS)))
    rows = []
    with progress(len(asked) * 2 * (2 * len(names) + 1)) as step:
        for sizes in asked:
            rows += bench_run.measure(sizes, names, device, limits, step)
    return rows


def exit_code(rows: list[Row], changes: list[dict[str, Any]], limit: float | None) -> int:
    """1 if something is wrong or slower than allowed; 2 if Tilewise ran nothing; else 0."""
    if any(row.status == "wrong" for row in rows):
        return 1
    if limit is not None and any(c["ratio"] > limit for c in changes if c["name"].startswith("tilewise")):
        return 1
    return 0 if any(row.timing for row in rows) else 2
