"""Tables of the CPU backend on the performance page: features, SDPA's slow path, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Line = dict[str, Any]
Table = Callable[[list[str], list[list[str]]], str]


def latest(lines: Sequence[Line], section: str, names: tuple[str, ...]) -> dict[str, list[Line]]:
    """Lines of a section by machine; of one problem on one machine the last that was measured."""
    found: dict[str, dict[tuple[Any, ...], Line]] = {}
    machine = ""
    for line in lines:
        if line["section"] == "machine":
            machine = f"{line['processor']}, {line['cpu_capability']}, {line['threads']} threads"
        elif line["section"] == section:
            found.setdefault(machine, {})[tuple(line[name] for name in names)] = line
    return {machine: list(rows.values()) for machine, rows in found.items()}


def _tables(
    heads: list[str], found: dict[str, list[Line]], row: Callable[[Line], list[str]], table: Table
) -> str:
    """One table a machine."""
    texts = [f"{machine}\n\n{table(heads, [row(one) for one in lines])}" for machine, lines in found.items()]
    return "\n".join(texts) or "Not measured yet.\n"


def features(lines: Sequence[Line], table: Table) -> str:
    """Speed of a mask or term over the plain kernel's, per visible pair."""
    found = latest(lines, "features", ("feature", "N", "H", "D"))
    heads = ["mask, term or option", "N", "visible", "plain ms", "ms", "speed per visible pair"]
    return _tables(heads, found, lambda one: [
        one["feature"], str(one["N"]), f"{one['visible']:.3g}", f"{1e3 * one['sdpa']['median']:.3g}",
        f"{1e3 * one['tilewise']['median']:.3g}", f"{one['per_visible_pair']:.2f}",
    ], table)  # fmt: skip


def slow_path(lines: Sequence[Line], table: Table) -> str:
    """Time and memory where SDPA builds the matrix."""
    found = latest(lines, "math", ("dtype", "case", "pass", "N", "H", "D"))
    heads = ["problem", "SDPA ms", "Tilewise ms", "SDPA MiB", "Tilewise MiB", "speed-up", "memory"]
    return _tables(heads, found, lambda one: [
        f"{one['dtype']}, {one['case']}, N {one['N']}, H {one['H']}, {one['pass']}",
        *(f"{1e3 * one[who]['median']:.3g}" for who in ("sdpa", "tilewise")),
        *(f"{one[f'{who}_mib']:.3g}" for who in ("sdpa", "tilewise")),
        f"{one['ratio']:.2f}", f"{one['tilewise_mib'] / one['sdpa_mib']:.3f}",
    ], table)  # fmt: skip


def accuracy(lines: Sequence[Line], table: Table) -> str:
    """The largest ratio of an error to SDPA's, over out, dq, dk and dv."""
    found = latest(lines, "accuracy", ("dtype", "D", "N", "causal"))
    heads = ["problem", "rms", "largest"]
    return _tables(heads, found, lambda one: [
        f"{one['dtype']}, D {one['D']}, N {one['N']}, {'causal' if one['causal'] else 'full'}",
        f"{one['rms_ratio']:.2f}", f"{one['max_ratio']:.2f}",
    ], table)  # fmt: skip
