"""Pictures for the performance pages: traffic over the fast memory, and the field on an H200 under its roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {
    "cuDNN": "#8e5ea2",
    "FlashAttention-2": "#8a8a8a",
    "FlashAttention-3": "#2f6f8f",
    "FlashAttention-4": "#d08c3c",
}
LENGTH, DIM = 4096, 64


def draw(folder: Path, peers: list[dict[str, Any]]) -> None:
    """io-model.png and performance.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, backward in zip(axes, (False, True), strict=True):
        traffic(axis, backward)
    axes[0].set_ylabel("elements moved over N^2")
    figure.savefig(folder / "io-model.png", dpi=90)
    pyplot.close(figure)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, section in zip(axes, ("forward", "backward"), strict=True):
        field(axis, [line for line in peers if line["section"] == section], section)
    axes[0].set_ylabel("TFLOP/s, one H200, bf16, cold")
    axes[0].set_ylim(0, 1250)
    axes[0].legend(fontsize=8, frameon=False, ncols=2)
    figure.savefig(folder / "performance.png", dpi=90)
    pyplot.close(figure)


def traffic(axis: Any, backward: bool) -> None:
    """Each schedule's prediction over M, and the edges."""
    from tilewise.analysis.schedules import SCHEDULES, predict
    from tilewise.analysis.sizes import Sizes
    from tilewise.analysis.theorem import edges
    from tilewise.errors import OptionError

    sizes = Sizes(LENGTH, LENGTH, DIM, DIM)
    memories = [int(2 ** (exponent / 4)) for exponent in range(4 * 9, 4 * 26)]
    for name, one in SCHEDULES.items():
        if one.same_as:
            continue
        points = []
        for memory in memories:
            try:
                points.append((memory, predict(name, sizes, memory, backward=backward).total / sizes.matrix))
            except OptionError:
                continue
        axis.plot(*zip(*points, strict=True), label=one.title, linewidth=1.5)
    for where, name in zip(edges(sizes, backward=backward), ("a tile", "pays", "once", "fits"), strict=True):
        axis.axvline(where, color="#999999", linewidth=0.8, linestyle=":")
        axis.text(where, 0.03, f" {name}", fontsize=7, rotation=90, color="#555555")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("M, elements of the fast memory")
    axis.set_title(f"{'backward' if backward else 'forward'}, N {LENGTH}, d {DIM}", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, frameon=False)


def field(axis: Any, lines: list[dict[str, Any]], section: str) -> None:
    """Bars of each library for the causal problems, and the roofline above them."""
    from performance_pages import floor_of

    causal = [line for line in lines if line["causal"] and line["H"] == line["H_kv"]]
    names = list(dict.fromkeys((line["D"], line["N"]) for line in causal))
    width = 0.2
    for number, (library, colour) in enumerate(COLOURS.items()):
        chosen = {(line["D"], line["N"]): line for line in causal if line["library"] == library}
        at = [names.index(key) + (number - 1.5) * width for key in chosen]
        axis.bar(at, [line["cold_tflops"] for line in chosen.values()], width, color=colour, label=library)
    for at, key in enumerate(names):
        line = next(one for one in causal if (one["D"], one["N"]) == key)
        axis.hlines(floor_of(line)[0], at - 0.45, at + 0.45, color="black", linewidth=1)
    axis.set_xticks(range(len(names)), [f"D {d}\nN {n}" for d, n in names], fontsize=7)
    axis.set_title(f"{section}, causal; the line is the roofline", fontsize=9)
    axis.grid(alpha=0.3, axis="y")
