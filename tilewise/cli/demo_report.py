"""How the demo's numbers are shown: a table, a picture, JSON, and two sentences."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tilewise.cli.demo_attention import LEGS

if TYPE_CHECKING:
    from tilewise.cli.demo_run import Check, Length

# Short enough for 80 columns. Memory of the whole pass, memory inside one attention call, |logits - ordinary logits|,
# and how often the most likely next token is the same.
COLUMNS = ("tokens", "attention", "reads in", "pass mem", "att. mem", "mean diff", "max diff", "same top")
COLOURS = {"ordinary": "#b0413e", "sdpa": "#7d7d7d", "tilewise": "#1f6f8b"}


def size(count: float) -> str:
    """Bytes as text, in units of 2^10."""
    for unit in ("B", "KB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GB"


def rows(results: list[Length]) -> list[list[str]]:
    """One row of text for each length and attention."""
    table = []
    for result in results:
        for leg in LEGS:
            row = result.legs[leg]
            reference = leg == "ordinary"
            table.append(
                [
                    str(result.length) if reference else "",
                    leg,
                    f"{row.prefill_seconds:.2f} s",
                    size(row.pass_bytes),
                    size(row.attention_bytes),
                    "-" if reference else f"{row.mean_difference:.1e}",
                    "-" if reference else f"{row.max_difference:.1e}",
                    "-" if reference else f"{100 * row.same_choice:.2f} %",
                ]
            )
    return table


def print_table(results: list[Length], title: str) -> None:
    """A drawn table in a terminal, aligned plain text elsewhere."""
    table = rows(results)
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        drawn = Table(
            title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
        )
        for column in COLUMNS:
            drawn.add_column(column, justify="left" if column == "attention" else "right")
        for i, row in enumerate(table):
            drawn.add_row(
                *row,
                style="bold" if row[1] == "tilewise" else None,
                end_section=i % len(LEGS) == len(LEGS) - 1,
            )
        Console().print(drawn)
        print(LEGEND)
        return
    widths = [max(len(line[i]) for line in [list(COLUMNS), *table]) for i in range(len(COLUMNS))]
    print(title)
    for line in [list(COLUMNS), *table]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    print(LEGEND)


LEGEND = """pass mem: peak of the whole reading beyond the weights. att. mem: peak inside one layer's attention
beyond its inputs and output. Differences are between logits, all positions and words, against ordinary
attention in float32; same top: positions with the same most likely next token."""


def print_generated(results: list[Length]) -> None:
    """What the model wrote after the longest text, under each attention."""
    last = results[-1]
    print(f"\nAfter {last.length} tokens the model goes on with:")
    for leg in LEGS:
        print(f"  {leg:>8}: {last.legs[leg].text!r}")


def print_checks(found: list[Check]) -> None:
    """Each promise with its numbers, the failed ones marked."""
    print("\nChecks (Tilewise against ordinary attention in float32):")
    width = max((len(check.name) for check in found), default=0)
    for check in found:
        print(f"  {'ok    ' if check.passed else 'FAILED'} {check.name:<{width}}  {check.detail}")


def closing(results: list[Length], passed: bool) -> str:
    """The demo's conclusion in words; it claims only what was measured in this run."""
    if not passed:
        return "Not every check held; the lines marked FAILED say which."
    last = results[-1]
    full, ours = last.legs["ordinary"].attention_bytes, last.legs["tilewise"].attention_bytes
    return (
        "What changed is where the work happens, not the answer: "
        f"at {last.length} tokens the same model wrote the same text,\n"
        f"and one layer's attention took {size(ours)} beside its inputs and output instead of {size(full)}.\n"
        "Memory is linear now; the arithmetic is as much as before. Times are one run each and no benchmark.\n"
        f"Tilewise ran its backend {last.backend!r}."
    )


def to_json(title: str, results: list[Length], found: list[Check], seconds: float) -> dict[str, Any]:
    """The whole report as plain numbers, text and lists."""
    import torch

    return {
        "title": title,
        "passed": all(check.passed for check in found),
        "checks": [asdict(check) for check in found],
        "lengths": [asdict(row) for row in results],
        "seconds": round(seconds, 1),
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.system(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
        },
    }


def save_plot(results: list[Length], path: str, title: str) -> None:
    """Three panels over the length: memory inside attention, seconds, logit difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = [result.length for result in results]

    def series(leg: str, name: str, unit: float = 1.0) -> list[float]:
        return [getattr(result.legs[leg], name) / unit for result in results]

    figure, (memory, seconds, difference) = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for leg in LEGS:
        style: dict[str, Any] = {"color": COLOURS[leg], "marker": "o", "label": leg}
        memory.plot(lengths, series(leg, "attention_bytes", 2**20), **style)
        seconds.plot(lengths, series(leg, "prefill_seconds"), **style)
        if leg != "ordinary":
            difference.plot(lengths, series(leg, "max_difference"), **style)
            difference.plot(
                lengths,
                series(leg, "mean_difference"),
                **{**style, "linestyle": ":", "label": f"{leg}, mean"},
            )
    memory.plot(
        lengths,
        [result.matrix_bytes / 2**20 for result in results],
        color="black",
        linestyle="--",
        label="N × N scores",
    )
    memory.set(title="Memory inside one layer's attention (MB)", yscale="log")
    seconds.set(title="Reading the text (s, one run)")
    difference.set(title="Logit difference to ordinary attention", yscale="log")
    for axis in (memory, seconds, difference):
        axis.set(xscale="log", xlabel="tokens")
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
