"""Errors of attention and its gradients against float64: Tilewise, ordinary attention and SDPA, side by side.

    python benchmarks/numerics.py [--output benchmarks/results/numerics.jsonl] [--contenders blockwise,cpu]
    python benchmarks/numerics.py --plot docs/images/numerics.png       draws what the results hold

One setting is varied at a time around N = 512, D = 64, normal inputs, a causal mask. spread multiplies q, so scores
have that standard deviation. The truth is float64 from the same rounded inputs; errors are root mean square and
maximum, divided by the truth's root mean square. The lines of "storage" compare with the truth of the inputs before
they were rounded to the type they are stored in (float8 is widened to bfloat16 for the arithmetic).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from tilewise.cli.machine import describe

RESULTS = Path(__file__).parent / "results" / "numerics.jsonl"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BASE = {"N": 512, "D": 64, "spread": 1.0, "mask": "causal"}
SWEEPS = {"N": (128, 512, 2048), "D": (32, 64, 128), "spread": (0.25, 1.0, 4.0, 16.0),
          "mask": ("none", "causal", "window")}  # fmt: skip
HEADS, WINDOW = 2, 100
NAMES = ("out", "dq", "dk", "dv")
Attend = Callable[[Tensor, Tensor, Tensor, str], Tensor]


def keep_of(mask: str, n: int) -> Tensor | None:
    """The mask as a bool matrix, None for none."""
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    return {"none": None, "causal": j <= i, "window": (j <= i) & (j >= i - WINDOW)}[mask]


def ordinary(q: Tensor, k: Tensor, v: Tensor, mask: str) -> Tensor:
    """The matrix in the inputs' type, softmax in float32 (float64 for float64), as it is usually written."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    keep = keep_of(mask, q.shape[2])
    s = s if keep is None else s.masked_fill(~keep, -math.inf)
    wide = torch.float64 if s.dtype == torch.float64 else torch.float32
    return torch.softmax(s.to(wide), -1).to(v.dtype) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: str) -> Tensor:
    """F.scaled_dot_product_attention, causal by its flag."""
    if mask == "causal":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep_of(mask, q.shape[2]))


def tilewise(backend: str) -> Attend:
    """tilewise.attention with a named backend."""
    masks = {"none": None, "causal": tw.causal(), "window": tw.window(WINDOW, 0)}
    return lambda q, k, v, mask: tw.attention(q, k, v, mask=masks[mask], backend=backend)


CONTENDERS: dict[str, Attend] = {
    "blockwise": tilewise("blockwise"), "cpu": tilewise("cpu"), "ordinary": ordinary, "sdpa": sdpa,
}  # fmt: skip


def draw(setting: dict) -> list[Tensor]:
    """q, k, v and do, float64."""
    make = torch.Generator().manual_seed(7)
    shape = (1, HEADS, setting["N"], setting["D"])
    q, k, v, do = (torch.randn(shape, generator=make, dtype=torch.float64) for _ in range(4))
    return [q * setting["spread"], k, v, do]


def results(attend: Attend, tensors: list[Tensor], mask: str) -> dict[str, Tensor]:
    """out and the gradients of q, k and v."""
    *leaves, do = tensors
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    out = attend(*leaves, mask)
    grads = torch.autograd.grad(out, leaves, do)
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Root mean square and maximum of the difference, over the truth's root mean square."""
    line = {}
    for name in NAMES:
        size = truth[name].square().mean().sqrt()
        difference = (found[name].double() - truth[name]).abs()
        line[name] = {
            "rms": float(f"{difference.square().mean().sqrt() / size:.4g}"),
            "max": float(f"{difference.max() / size:.4g}"),
        }
    return line


def settings() -> Iterator[tuple[str, dict]]:
    """(what is varied, setting)."""
    for name, values in SWEEPS.items():
        for value in values:
            yield name, {**BASE, name: value}


def measure(contenders: list[str]) -> Iterator[dict]:
    """One line for each contender, type and setting."""
    done = {}
    for varied, setting in settings():
        drawn = draw(setting)
        for dtype, kind in DTYPES.items():
            rounded = [t.to(kind) for t in drawn]
            truth = results(ordinary, [t.double() for t in rounded], setting["mask"])
            for name in contenders:
                key = (name, dtype, *setting.values())
                if key not in done:
                    done[key] = errors(results(CONTENDERS[name], rounded, setting["mask"]), truth)
                yield {"section": varied, "dtype": dtype, **setting, "contender": name, **done[key]}
    drawn = draw(BASE)
    truth = results(ordinary, drawn, BASE["mask"])
    for stored, kind in {**DTYPES, "fp8 e4m3": torch.float8_e4m3fn}.items():
        wide = torch.bfloat16 if stored.startswith("fp8") else kind
        tensors = [*(t.to(kind).to(wide) for t in drawn[:3]), drawn[3].to(wide)]
        for name in contenders:
            line = errors(results(CONTENDERS[name], tensors, BASE["mask"]), truth)
            yield {"section": "storage", "dtype": stored, **BASE, "contender": name, **line}


def plot(lines: list[dict], path: Path) -> None:
    """Root mean square errors of out and dq over each sweep, one panel a sweep."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"fp32": "#2f6f8f", "bf16": "#d08c3c", "fp16": "#4f8f5b"}
    styles = {"blockwise": ("o", "-"), "cpu": ("s", "-"), "ordinary": ("x", ":"), "sdpa": ("+", "--")}
    figure, axes = pyplot.subplots(2, len(SWEEPS), figsize=(11, 5), sharey="row", layout="constrained")
    for column, sweep in enumerate(SWEEPS):
        for row, tensor in enumerate(("out", "dq")):
            axis = axes[row][column]
            for dtype, colour in colours.items():
                for name, (marker, line) in styles.items():
                    chosen = [one for one in lines if one["section"] == sweep and one["dtype"] == dtype]
                    chosen = [one for one in chosen if one["contender"] == name]
                    x = [str(one[sweep]) for one in chosen]
                    axis.plot(x, [one[tensor]["rms"] for one in chosen], color=colour, marker=marker, linestyle=line,
                              linewidth=1, markersize=5, label=f"{dtype} {name}")  # fmt: skip
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
            axis.set_title(
                f"{tensor}, over {sweep}" if sweep != "spread" else f"{tensor}, over scores' spread",
                fontsize=9,
            )
    axes[0][0].set_ylabel("rms error / rms")
    axes[1][0].set_ylabel("rms error / rms")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=7, frameon=False)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="the lines replace this file")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--plot", type=Path, help="draw the results instead of measuring")
    chosen = parser.parse_args()
    if chosen.plot:
        plot([json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()], chosen.plot)
        return
    lines = [{"section": "machine", **describe(), "command": "python benchmarks/numerics.py"}]
    for line in measure(chosen.contenders.split(",")):
        print(json.dumps(line), flush=True)
        lines.append(line)
    if chosen.output:
        chosen.output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
