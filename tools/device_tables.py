"""Tables of the pages on the I/O model and the roofline: what an H200 counted and took, beside what was predicted."""

from __future__ import annotations

import re
from typing import Any

LONG = re.compile(r"D(\d+)-N(\d+)-(full|causal)")
TITLES = {"sdpa_flash": "SDPA, FlashAttention-2", "sdpa_cudnn": "SDPA, cuDNN", "ordinary": "ordinary"}


def counters(lines: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: megabytes of device memory counted by ncu, predicted, and what must move at least."""
    from tilewise.analysis.machines import find_machine
    from tilewise.analysis.roofline import Shape, device_bytes

    rows, last = [], {}
    for line in lines:
        if "counted_bytes" in line:
            last[line["cell"], line["which"], line["contender"], line.get("note", "")] = line
    for (cell, which, contender, note), line in last.items():
        predicted = line.get("bytes_ordinary")
        if "shape" in line and which == "forward":
            predicted = device_bytes(Shape(**line["shape"]), find_machine("h200"))
        name = TITLES.get(contender, contender) + (f", {note}" if note else "")
        ratio = "" if predicted is None else f"{predicted / line['counted_bytes']:.2f}"
        rows.append([f"{cell}, {which}", name, f"{line['counted_bytes'] / 1e6:.0f}",
                     "" if predicted is None else f"{predicted / 1e6:.0f}", ratio,
                     f"{line['compulsory_bytes'] / 1e6:.0f}"])  # fmt: skip
    return ["cell", "by", "counted MB", "predicted MB", "predicted over counted", "once each MB"], rows


def floors(lines: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: milliseconds measured of our backends on an H200, the floor of their tiles, and its bound."""
    import torch

    import tilewise as tw
    from tilewise.dispatch import registry

    last: dict[tuple[str, str, str], float] = {}
    for line in lines:
        for name, found in line.get("contenders", {}).items():
            if "latency" in found:
                last[line["cell"], line["which"], name] = found["latency"]["median_s"]
    rows = []
    for (cell, which, name), seconds in last.items():
        parts = LONG.fullmatch(cell)
        backend = name.partition("+")[0]
        if parts is None or backend not in registry.names:
            continue
        dim, length = int(parts[1]), int(parts[2])
        shape = (16384 // length, 2048 // dim, length, dim)
        plan = tw.explain(
            shape, shape, shape, dtype=torch.bfloat16, device="cuda", backend=backend, machine="h200",
            mask=tw.causal() if parts[3] == "causal" else None, backward=which == "backward",
        )  # fmt: skip
        if plan.predicted_s is not None:
            rows.append([f"{cell}, {which}", name, f"{seconds * 1e3:.3g}", f"{plan.predicted_s * 1e3:.3g}",
                         f"{plan.predicted_s / seconds:.0%}", str(plan.bound)])  # fmt: skip
    return ["cell", "backend", "measured ms", "predicted floor ms", "floor over measured", "bound"], rows
