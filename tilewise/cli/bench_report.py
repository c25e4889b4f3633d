"""How the measurements of `tilewise bench` are shown: table, JSON lines, picture, and ratios to an earlier run."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from tilewise.cli.demo_report import COLOURS, size
from tilewise.cli.terminal import Table, UsageError, characters

if TYPE_CHECKING:
    import argparse

    from tilewise.cli.bench_run import Row

SCHEMA = 1
MORE_COLOURS = {"flex": "#d08c3c"}
NAMED_BACKENDS = ("#57b8d9", "#8e5ea2", "#4f8f5b", "#c97fb0")
SAME_MACHINE = ("torch", "processor", "threads", "gpus", "tilewise")


def seconds_text(seconds: float) -> str:
    """A time with three digits and its unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1.0 or unit == "us":
            value = seconds * factor
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    raise AssertionError("unreachable")


def label(row: Row) -> str:
    """The contender's name with the backend that auto took."""
    return f"{row.name} ({row.backend})" if row.backend and ":" not in row.name else row.name


def _pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """(forward, backward) rows of each problem and contender, in the order measured."""
    backward = {(row.name, row.sizes): row for row in rows if row.direction == "backward"}
    return [(row, backward[row.name, row.sizes]) for row in rows if row.direction == "forward"]


def table(rows: list[Row]) -> Table:
    """One row for each length and contender."""
    first = rows[0]
    on_gpu = any(row.timing and row.timing.hot for row in rows)
    spread = characters("±", "+-")
    parts = ("", spread, "hot", "host") if on_gpu else ("", spread)
    columns = ["seqlen", "<attention"]
    for direction in ("forward", "backward"):
        columns += [direction + " cold" * on_gpu, *(f"?{part}" for part in parts[1:])]
    columns += ["?FLOP/s", "memory", "?with backward", "?error"]
    s = first.sizes
    heads = f"{s.heads} heads" if s.heads == s.heads_kv else f"{s.heads} heads on {s.heads_kv} KV heads"
    keys = "" if all(row.sizes.seqlen_q == row.sizes.seqlen_k for row in rows) else f", {s.seqlen_k} keys"
    made = Table(
        f"batch {s.batch}, {heads}, head dim {s.head_dim}, {s.dtype}, mask {s.mask}{keys}, on {first.device}",
        tuple(columns),
    )
    last = None
    for forward, backward in _pairs(rows):
        if last is not None and forward.sizes != last:
            made.end_section()
        shown = "" if forward.sizes == last else str(forward.sizes.seqlen_q)
        last = forward.sizes
        made.add(shown, label(forward), *_times(forward, len(parts)), *_times(backward, len(parts)),
                 *_rest(forward, backward), style="bold" if forward.name == "tilewise" else None)  # fmt: skip
    return made


def _times(row: Row, count: int) -> list[str]:
    if row.timing is None:
        return [row.status, *[""] * (count - 1)]
    t = row.timing
    more = [seconds_text(one.median) if one else "" for one in (t.hot, t.host)]
    return [seconds_text(t.latency.median), f"{100 * t.latency.spread:.0f} %", *more][:count]


def _rest(forward: Row, backward: Row) -> list[str]:
    rate = ""
    if forward.timing:
        best = forward.timing.hot or forward.timing.latency
        value = forward.flops / best.median
        rate = f"{value / 1e12:.3g} T" if value >= 1e12 else f"{value / 1e9:.2g} G"
    memory = ["" if row.memory is None else size(row.memory) for row in (forward, backward)]
    return [rate, *memory, "" if forward.difference is None else f"{forward.difference:.0e}"]


def notes(rows: list[Row]) -> list[str]:
    """What was skipped and why, each reason once."""
    found: dict[str, list[str]] = {}
    for row in rows:
        text = row.reason or (row.timing.note if row.timing else "")
        if text:
            found.setdefault(
                f"{row.name} {row.direction} {row.status if row.reason else 'note'}: {text}", []
            ).append(str(row.sizes.seqlen_q))
    everywhere = len({row.sizes for row in rows})
    return [text if len(at) == everywhere else f"{text} (at {', '.join(at)})" for text, at in found.items()]


def print_all(
    rows: list[Row],
    changes: list[dict[str, Any]],
    facts: dict[str, Any],
    seconds: float,
    arguments: argparse.Namespace,
) -> None:
    """Table, notes, comparison, files."""
    table(rows).print()
    for note in notes(rows):
        print(note)
    spread = characters("±", "+-")
    print(f"torch {facts['torch']}, {', '.join(facts['gpus']) or facts['processor']}, {facts['threads']} threads. "
          f"Medians; {spread} half the distance of the quartiles; {_protocol(rows)}")  # fmt: skip
    print(
        "memory: peak beyond inputs and results; FLOP/s: forward, on visible pairs; error: to float64, sampled rows."
    )
    if arguments.compare:
        print()
        print_changes(changes, arguments.compare)
    for name, path in (("Measurements", arguments.output), ("Picture", arguments.plot)):
        if path:
            print(f"{name}: {path}")
    print(f"All in {seconds:.0f} s.")


def _protocol(rows: list[Row]) -> str:
    rounds = [len(row.timing.latency.seconds) for row in rows if row.timing]
    if not rounds:
        return "nothing was timed."
    count = f"{min(rounds)} to {max(rounds)}" if min(rounds) != max(rounds) else str(rounds[0])
    if any(row.timing and row.timing.hot for row in rows):
        return f"{count} rounds, cold after 80 ms idle and hot from CUDA graphs, host without."
    return f"{count} interleaved rounds."


def print_json(rows: list[Row], changes: list[dict[str, Any]], facts: dict[str, Any], seconds: float) -> None:
    """One object with everything."""
    report = {"command": "bench", "schema": SCHEMA, "machine": facts, "seconds": round(seconds, 2),
              "rows": [row.to_dict() for row in rows], "compare": changes}  # fmt: skip
    print(json.dumps(report, indent=1))


# ---- JSON lines and comparison -----------------------------------------------------------------------------


def append_rows(path: str, rows: list[Row], facts: dict[str, Any]) -> None:
    """One JSON object a line: a row, the machine, and when it was measured (UTC)."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with open(path, "a", encoding="utf-8") as file:
        for row in rows:
            file.write(
                json.dumps({"schema": SCHEMA, "measured": now, **row.to_dict(), "machine": facts}) + "\n"
            )


def key_of(row: dict[str, Any]) -> tuple:
    """What two runs are compared by: contender, problem, direction."""
    return (row["name"], *row["problem"].values(), row["direction"])


def read_rows(path: str) -> dict[tuple, dict[str, Any]]:
    """The rows of a file of `append_rows`, the last of each key. Raises UsageError."""
    rows = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    if row["schema"] != SCHEMA:
                        raise UsageError(
                            f"{path} has schema {row['schema']}, this version compares schema {SCHEMA}"
                        )
                    rows[key_of(row)] = row
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise UsageError(
                        f"{path}, line {number} is not a measurement of tilewise bench --output"
                    ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return rows


def compare(rows: list[Row], before: dict[tuple, dict[str, Any]]) -> list[dict[str, Any]]:
    """What both runs measured: seconds, bytes, ratios now / before, and whether they are beyond the spread."""
    from tilewise.cli import machine

    found = []
    facts = json.loads(json.dumps(machine.describe()))
    for row in rows:
        now = json.loads(json.dumps(row.to_dict()))
        old = before.get(key_of(now))
        if not old or not old["timing"] or not now["timing"]:
            continue
        a, b = old["timing"]["latency"], now["timing"]["latency"]
        apart = b["first_quartile_s"] > a["third_quartile_s"] or b["third_quartile_s"] < a["first_quartile_s"]
        ratio = b["median_s"] / a["median_s"]
        memory = None
        if old["memory_bytes"] and now["memory_bytes"] is not None:
            memory = now["memory_bytes"] / old["memory_bytes"]
        found.append({
            "name": row.name, "seqlen": row.sizes.seqlen_q, "direction": row.direction, "before_s": a["median_s"],
            "now_s": b["median_s"], "ratio": ratio, "memory_ratio": memory,
            "verdict": ("slower" if ratio > 1 else "faster") if apart else "within the spread",
            "backend_before": old["backend"], "backend_now": row.backend,
            "differs": [name for name in SAME_MACHINE if old["machine"].get(name) != facts.get(name)],
        })  # fmt: skip
    return found


def print_changes(changes: list[dict[str, Any]], path: str) -> None:
    """The ratios as a table; what else changed between the runs beneath it."""
    if not changes:
        print(f"{path} has no measurement of the same problem, contender and direction.")
        return
    columns = ("seqlen", "<attention", "<direction", "before", "now", "now/before", "memory", "<verdict")
    made = Table(f"Compared with {path}", columns)
    last = changes[0]["seqlen"]
    for c in changes:
        if c["seqlen"] != last:
            made.end_section()
            last = c["seqlen"]
        memory = "" if c["memory_ratio"] is None else f"{c['memory_ratio']:.2f}"
        backend = c["backend_before"], c["backend_now"]
        verdict = c["verdict"] + (f" ({backend[0]} before)" if backend[0] != backend[1] else "")
        style = {"slower": "red", "faster": "green"}.get(c["verdict"])
        made.add(str(c["seqlen"]), c["name"], c["direction"], seconds_text(c["before_s"]), seconds_text(c["now_s"]),
                 f"{c['ratio']:.2f}", memory, verdict, style=style)  # fmt: skip
    made.print()
    differs = sorted({name for c in changes for name in c["differs"]})
    if differs:
        print(f"The runs also differ in: {', '.join(differs)}.")


# ---- picture -----------------------------------------------------------------------------------------------


def save_plot(rows: list[Row], path: str, facts: dict[str, Any]) -> None:
    """Three panels over the length: forward and backward latency, peak memory of both together."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.name for row in rows))
    lengths = sorted({row.sizes.seqlen_q for row in rows})
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.6), layout="constrained")
    named = [name for name in names if ":" in name]
    colours = COLOURS | MORE_COLOURS | dict(zip(named, NAMED_BACKENDS, strict=False))
    for name in names:
        mine = [row for row in rows if row.name == name and row.timing]
        if not mine:
            continue
        forward_only = "" if any(row.direction == "backward" for row in mine) else ", no backward"
        style: dict[str, Any] = {
            "color": colours.get(name), "marker": "o", "markersize": 4, "label": label(mine[0]) + forward_only,
            "linestyle": "--" if name in named else "-", "zorder": 3 if name == "tilewise" else 2,
        }  # fmt: skip
        for axis, direction in zip(axes, ("forward", "backward"), strict=False):
            _series(axis, [row for row in mine if row.direction == direction], style)
        last = {row.sizes.seqlen_q: row for row in mine}  # backward where it ran, else forward
        drawn = [(n, (last[n].memory or 0) / 2**20) for n in sorted(last) if last[n].memory]
        if drawn:
            axes[2].plot(*zip(*drawn, strict=True), **style)
    cold = any(row.timing and row.timing.hot for row in rows)
    for axis, title in zip(
        axes, ("Forward", "Backward", "Peak memory beyond inputs and results"), strict=True
    ):
        axis.set(title=title, xscale="log", yscale="log", xlabel="sequence length")
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if axes[0].lines:
        found = axes[0].get_legend_handles_labels()
        figure.legend(*found, loc="outside lower center", ncols=len(names), frameon=False)
    axes[0].set_ylabel("milliseconds (cold)" if cold else "milliseconds")
    axes[1].set_ylabel("milliseconds (cold)" if cold else "milliseconds")
    axes[2].set_ylabel("MB, forward and backward")
    figure.suptitle(f"{table(rows).title}\ntorch {facts['torch']}, {', '.join(facts['gpus']) or facts['processor']}, "
                    f"{facts['threads']} threads", fontsize=10)  # fmt: skip
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _series(axis: Any, rows: list[Row], style: dict[str, Any]) -> None:
    """Medians as a line, quartiles as a band."""
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row.sizes.seqlen_q)
    lengths = [row.sizes.seqlen_q for row in rows]
    latencies = [row.timing.latency for row in rows]  # type: ignore[union-attr]
    axis.plot(lengths, [one.median * 1e3 for one in latencies], **style)
    low, high = zip(*[one.quartiles for one in latencies], strict=True)
    axis.fill_between(
        lengths,
        [x * 1e3 for x in low],
        [x * 1e3 for x in high],
        color=style["color"],
        alpha=0.15,
        linewidth=0,
    )
