"""How the results of `tilewise check` are shown: tables, JSON, and the text of a bug report."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tilewise.cli import machine
from tilewise.cli.check_run import GROUPS, Result, Summary, group_of, line_to_dict
from tilewise.cli.terminal import Table, draws

if TYPE_CHECKING:
    from tilewise.testing.budgets import Line
    from tilewise.testing.cases import Case

MOST_FAILURES = 10
"""Failures shown in full on the screen and in a report; the JSON has all."""


def closest(line: Line) -> tuple[float, float]:
    """(error, budget) of the measure, max or rms, that is closest to its budget."""
    return max(
        zip(line.error, line.budget, strict=True), key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0]
    )


def print_tables(summary: Summary, details: bool = False) -> None:
    """One table per backend and device, then each failure; `details` also prints the error of every tensor."""
    order = sorted(summary.results, key=lambda r: (r.device, r.backend))
    for (device, backend), part in groupby(order, key=lambda r: (r.device, r.backend)):
        results = list(part)
        refused = sum(r.status == "refused" for r in results)
        if refused == len(results):
            count = "the 1 case" if len(results) == 1 else f"the {len(results)} cases"
            print(f"{backend} takes none of {count} on {device}: {results[0].message}\n")
        elif details:
            _tensor_table(f"{backend} on {device}", results).print()
        else:
            _group_table(f"{backend} on {device}", results).print()
    for result in summary.failures[:MOST_FAILURES]:
        _print_failure(result)
    if len(summary.failures) > MOST_FAILURES:
        print(f"... and {len(summary.failures) - MOST_FAILURES} more failures (--json lists all)\n")
    _print_closing(summary)


def _group_table(title: str, results: list[Result]) -> Table:
    table = Table(title, ("<what", "cases", "<result", "error", "budget", "used", "?<closest to its budget"))
    for group in (*GROUPS.values(), "other"):
        rows = [r for r in results if group_of(r.case.name) == group]
        if not rows:
            continue
        counts = {status: sum(r.status == status for r in rows) for status in ("failed", "refused")}
        words = [f"{counts['failed']} FAILED"] if counts["failed"] else ["ok"]
        words = [] if counts["refused"] == len(rows) else words
        words += [f"{counts['refused']} refused"] if counts["refused"] else []
        worst = max((r for r in rows if r.worst), key=lambda r: r.worst.ratio, default=None)  # type: ignore[union-attr]
        style = "bold red" if counts["failed"] else "yellow" if counts["refused"] else None
        table.add(group, str(len(rows)), ", ".join(words), *_numbers(worst.worst if worst else None),
                  f"{worst.worst.name} of {worst.case.name}" if worst and worst.worst else "", style=style)  # fmt: skip
    return table


def _tensor_table(title: str, results: list[Result]) -> Table:
    table = Table(title, ("<case", "<tensor", "<result", "error", "budget", "used"))
    for result in results:
        word = {"passed": "ok", "failed": "FAILED", "refused": "refused"}[result.status]
        for n, line in enumerate(result.lines or (None,)):
            wrong = result.status == "failed" and (line is None or not line.ratio <= 1)
            name = result.case.name if n == 0 else ""
            shown = word if line is None else "FAILED" if wrong else "ok"
            table.add(
                name, line.name if line else "", shown, *_numbers(line), style="bold red" if wrong else None
            )
        table.end_section()
    return table


def _numbers(line: Line | None) -> tuple[str, str, str]:
    if line is None:
        return "", "", ""
    error, budget = closest(line)
    share = f"{100 * line.ratio:.0f} %" if line.ratio < 100 else f"{line.ratio:.1e} x"
    return f"{error:.1e}", f"{budget:.1e}", share


def _print_failure(result: Result) -> None:
    print(f"FAILED {result.case.name} on {result.backend}, {result.device}: {result.case.features}")
    for text in result.message.splitlines()[:8]:
        print(f"  {text}")
    for line in result.lines:
        if not line.ratio <= 1:
            print(f"  {line}")
    if result.place:
        print(f"  raised in {result.place[-1]}")
    print(f"  again: {result.command}\n")


def _print_closing(summary: Summary) -> None:
    backends = (
        ", ".join(dict.fromkeys(r.backend for r in summary.results if r.status != "refused")) or "no backend"
    )
    devices = ", ".join(dict.fromkeys(r.device for r in summary.results))
    counts = f"{summary.count('passed')} passed"
    counts += f", {summary.count('failed')} FAILED" if summary.failures else ""
    # A backend that is made for other devices is told above; its cases count as none.
    took = {(r.backend, r.device) for r in summary.results if r.status != "refused"}
    refused = sum(r.status == "refused" and (r.backend, r.device) in took for r in summary.results)
    counts += f", {refused} refused with a reason" if refused else ""
    text = f"{counts}: {backends} on {devices}, in {summary.seconds:.0f} s."
    if draws():
        from rich.console import Console
        from rich.text import Text

        Console().print(Text(text, style="bold green" if summary.passed else "bold red"))
    else:
        print(text)
    if summary.failures:
        print("A wrong result is a bug: please report it with the file that --report FILE writes.")
    else:
        print("Outputs, log-sum-exps and gradients are as close to float64 as their budgets ask "
              "(2x the rounding of ordinary attention, 3x for gradients).")  # fmt: skip


def print_json(summary: Summary) -> None:
    """One object: counts, machine, and every result with every error."""
    report = {
        "command": "check",
        "schema": 1,
        "passed": summary.passed,
        "counts": {status: summary.count(status) for status in ("passed", "failed", "refused")},
        "seconds": round(summary.seconds, 2),
        "machine": machine.describe(),
        "results": [_without_private_words(result.to_dict()) for result in summary.results],
    }
    print(json.dumps(_finite(report), indent=1))


def _without_private_words(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "message": machine.scrub(result["message"])}


def _finite(value: Any) -> Any:
    """NaN and infinity as text: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value


def problem_of(case: Case) -> dict[str, Any]:
    """Everything that fixes a case's values and meaning, as plain numbers and text."""
    found: dict[str, Any] = {
        "case": case.name,
        "features": case.features,
        "seed": case.seed,
        "dtype": str(case.dtype).removeprefix("torch."),
        "sizes (B, H, H_kv, N_q, N_k, D, D_v)": list(case.sizes),
    }
    if case.packing is not None:
        packing = case.packing
        found["packed lengths of q, k"] = [list(packing.q), list(packing.k)]
        found["used lengths of q, k"] = [list(packing.used("q")), list(packing.used("k"))]
    plain = {"dropout": 0.0, "scale": None, "q_offset": None, "k_offset": 0, "h_offset": 0, "sink": False,
             "strides": "contiguous", "poison": "none", "spread": 1.0}  # fmt: skip
    found.update({name: getattr(case, name) for name, usual in plain.items() if getattr(case, name) != usual})
    return found


def bug_report(summary: Summary) -> str:
    """Markdown for an issue: versions, machine, counts, and each failing problem with its error numbers."""
    counts = ", ".join(f"{summary.count(status)} {status}" for status in ("passed", "failed", "refused"))
    lines = ["# tilewise check", "", f"{counts} in {summary.seconds:.0f} s", "", "## Machine", ""]
    lines += [
        f"- {name}: {value}" for name, value in machine.describe().items() if value not in (None, [], "")
    ]
    lines += ["", "## Backends", ""]
    order = sorted(summary.results, key=lambda r: (r.device, r.backend))
    for (device, backend), part in groupby(order, key=lambda r: (r.device, r.backend)):
        results = list(part)
        counted = ", ".join(
            f"{sum(r.status == s for r in results)} {s}" for s in ("passed", "failed", "refused")
        )
        worst = max((r.worst.ratio for r in results if r.worst), default=0.0)
        lines.append(f"- {backend} on {device}: {counted}; largest error {100 * worst:.0f} % of its budget")
    for result in summary.failures[:MOST_FAILURES]:
        lines += ["", f"## Failed: {result.case.name} on {result.backend}, {result.device}", ""]
        lines += [f"- {name}: {value}" for name, value in problem_of(result.case).items()]
        lines += [f"- repeat: `{result.command}`", "", "```text", machine.scrub(result.message), "```", ""]
        if result.place:
            lines += ["Raised in:", "", *(f"- {place}" for place in result.place), ""]
        lines += _error_table(result)
    if len(summary.failures) > MOST_FAILURES:
        names = [f"{r.case.name} ({r.backend}, {r.device})" for r in summary.failures[MOST_FAILURES:]]
        lines += ["", "## Also failed", "", *(f"- {name}" for name in names)]
    return "\n".join(lines) + "\n"


def _error_table(result: Result) -> list[str]:
    if not result.lines:
        return []
    rows = [line_to_dict(line) for line in result.lines]
    names = ("error_max", "budget_max", "ordinary_max", "error_rms", "budget_rms", "ordinary_rms")
    lines = [
        "| tensor | ratio | " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|---" * 8 + "|",
    ]
    lines += [
        f"| {row['tensor']} | {row['ratio']:.3g} | " + " | ".join(f"{row[name]:.2e}" for name in names) + " |"
        for row in rows
    ]
    return lines
