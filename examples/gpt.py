r"""Train a small character-level GPT on Python's own documentation, with Tilewise and with PyTorch's SDPA side by side.

    python examples/gpt.py                           two runs on the CPU, minutes; needs numba for the quick backend
    python examples/gpt.py --backend auto --device cuda --dtype bfloat16 --width 512 --heads 8 --layers 8 --batch 8 \
        --context 2048 --attention tilewise sdpa-flash sdpa-cudnn
    python examples/gpt.py --seeds 3 --plot loss.png loss curves of three seeds (matplotlib)

All models start from the same weights and see the same batches; their steps alternate, so that the tokens per second
are taken under the same conditions. `sdpa` lets PyTorch choose its kernel, `sdpa-flash` and the like name one. The loss
curves must agree far better than two seeds do: attention is the same function. The text is the docstrings of the
standard library, which ship with Python.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.nn import Cache, MultiheadAttention, Rotary

MODULES = (
    "argparse", "ast", "asyncio.base_events", "calendar", "collections", "configparser", "copy", "csv", "ctypes",
    "datetime", "decimal", "difflib", "doctest", "email.message", "enum", "fractions", "functools", "gettext", "heapq",
    "http.client", "inspect", "ipaddress", "json", "locale", "logging", "mailbox", "optparse", "os", "pathlib", "pdb",
    "pickle", "platform", "random", "shutil", "smtplib", "socket", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "traceback", "turtle", "typing", "unittest.case", "urllib.parse",
    "urllib.request", "uuid", "zipfile",
)  # fmt: skip


SDPA = {"sdpa": "", "sdpa-flash": "FLASH_ATTENTION", "sdpa-cudnn": "CUDNN_ATTENTION", "sdpa-math": "MATH"}
"""torch.nn.attention.SDPBackend by the names of --attention; "" lets PyTorch choose."""


def text() -> str:
    """The docstrings of MODULES, in order, ASCII only."""
    parts = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        path = Path(spec.origin) if spec is not None and spec.origin else None
        if path is None or path.suffix != ".py" or not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                parts.append(ast.get_docstring(node) or "")
    return "\n\n".join(part for part in parts if part).encode("ascii", "ignore").decode()


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int, attention: str, backend: str) -> None:
        super().__init__()
        self.kind = attention
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = MultiheadAttention(
            width, heads, mask=tw.causal(), rotary=Rotary(width // heads), bias=False, backend=backend
        )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x: Tensor, cache: Cache | None) -> Tensor:
        if self.kind == "tilewise":
            return self.attention(x, cache=cache)
        own = self.attention
        q, k, v = own.project(x, x, x)
        positions = torch.arange(x.shape[1], device=x.device)
        q, k = own.attention.rotary.both(q, k, positions)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return own.out_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attend(self.norm_1(x), cache)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """tokens (B, N) -> logits (B, N, vocabulary)."""

    def __init__(self, vocabulary: int, options: argparse.Namespace, attention: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, options.width)
        self.blocks = nn.ModuleList(
            [Block(options.width, options.heads, attention, options.backend) for _ in range(options.layers)]
        )
        self.norm, self.head = nn.LayerNorm(options.width), nn.Linear(options.width, vocabulary)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for n, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[n])
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, start: Tensor, length: int) -> Tensor:
        """`length` tokens after start (1, N), drawn one at a time; every layer has a cache."""
        caches, tokens, new = [Cache() for _ in self.blocks], start, start
        for _ in range(length):
            weights = torch.softmax(self(new, caches)[:, -1] / 0.7, -1)
            new = torch.multinomial(weights, 1)
            tokens = torch.cat((tokens, new), 1)
        return tokens


def sdpa_kernel(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Inside, scaled_dot_product_attention is the kernel that `kind` names."""
    name = SDPA.get(kind)
    if not name:
        return contextlib.nullcontext()
    return torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, name))


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what it was given, so that clocks tell the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train(data: Tensor, vocabulary: int, options: argparse.Namespace, seed: int) -> dict[str, dict[str, Any]]:
    """All models, step by step in turn: losses, seconds and bytes of each step, and the trained model."""
    runs: dict[str, dict[str, Any]] = {}
    dtype = getattr(torch, options.dtype)
    for kind in options.attention:
        torch.manual_seed(seed)
        model = GPT(vocabulary, options, kind).to(options.device)
        runs[kind] = {"model": model, "losses": [], "seconds": [], "bytes": []}
        runs[kind]["optimiser"] = torch.optim.AdamW(model.parameters(), lr=options.rate)
    make = torch.Generator().manual_seed(seed)
    try:
        for step in progress(range(options.steps), f"seed {seed}"):
            starts = torch.randint(len(data) - options.context - 1, (options.batch,), generator=make)
            batch = torch.stack([data[s : s + options.context + 1] for s in starts.tolist()])
            for kind in options.attention if step % 2 else options.attention[::-1]:
                train_step(kind, runs[kind], batch.to(options.device), dtype)
    except KeyboardInterrupt:  # the steps that all models have done are reported
        done = min(len(run["seconds"]) for run in runs.values())
        for run in runs.values():
            for name in ("losses", "seconds", "bytes"):
                del run[name][done:]
    return runs


def train_step(kind: str, run: dict[str, Any], batch: Tensor, dtype: torch.dtype) -> None:
    """One step of a model; its loss, seconds and, on a GPU, bytes at the peak go to `run`."""
    run["optimiser"].zero_grad()
    held = start_memory(batch.device)
    before = time.perf_counter()
    with sdpa_kernel(kind), torch.autocast(batch.device.type, dtype, enabled=dtype != torch.float32):
        logits = run["model"](batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    run["optimiser"].step()
    run["losses"].append(float(loss.detach()))
    synchronise(batch.device)
    run["seconds"].append(time.perf_counter() - before)
    if batch.device.type == "cuda":
        run["bytes"].append(torch.cuda.max_memory_allocated(batch.device) - held)


def start_memory(device: torch.device) -> int:
    """Bytes allocated on a GPU now, from where its peak is counted anew; the GPU is idle then."""
    synchronise(device)
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def progress(steps: Any, name: str) -> Any:
    """The steps under a progress bar, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, desc=name, leave=False)


def plot(curves: dict[str, list[list[float]]], path: str) -> None:
    """The loss curves, one line for each attention and seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (kind, lines), colour, style in zip(
        curves.items(), ("tab:blue", "tab:orange"), ("-", "--"), strict=False
    ):
        for n, line in enumerate(lines):
            axes.plot(line, style, color=colour, alpha=0.8, label=kind if n == 0 else None)
    axes.set(xlabel="step", ylabel="cross entropy in nats per character")
    axes.legend()
    figure.savefig(path, dpi=150)


def report(
    curves: dict[str, list[list[float]]], seconds: dict[str, list[float]], tokens: int
) -> dict[str, Any]:
    """Tokens per second, last losses, and how far the curves lie apart: between attentions, and between seeds."""
    result: dict[str, Any] = {}
    for kind, lines in curves.items():
        times = seconds[kind]
        result[kind] = {
            "tokens_per_second": tokens / statistics.median(times),
            "last_loss": statistics.mean(line[-1] for line in lines),
            "losses": lines,
        }
        print(
            f"{kind:>9}: {result[kind]['tokens_per_second']:10.0f} tokens/s, last loss {result[kind]['last_loss']:.4f}"
        )
    for one, other in itertools.combinations(curves, 2):
        pairs = zip(curves[one], curves[other], strict=True)
        gap = max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True))
        print(f"largest distance of a seed's curves, {one} and {other}: {gap:.2e}")
        result.setdefault("gaps", {})[f"{one}, {other}"] = gap
        result.setdefault("attention_gap", gap)
    first = next(iter(curves.values()))
    if len(first) > 1:
        result["seed_gap"] = max(
            abs(a - b) for line in first[1:] for a, b in zip(first[0], line, strict=True)
        )
        print(f"largest distance of two seeds' curves: {result['seed_gap']:.2e}")
    return result


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", choices=("tilewise", *SDPA), default=["tilewise", "sdpa"])
    parser.add_argument(
        "--backend", default="cpu", help="Tilewise's backend: cpu (compiled), auto, blockwise, ..."
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast"
    )
    for name, value in (("steps", 300), ("batch", 4), ("context", 256), ("width", 128), ("heads", 4), ("layers", 3),
                        ("seeds", 1), ("sample", 200)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--output", metavar="FILE", help="add the result to this file as a line of JSON")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Train, compare, plot and write a sample; returns what `report` returns."""
    options = arguments(given)
    characters = text()
    vocabulary = sorted(set(characters))
    data = torch.tensor([vocabulary.index(c) for c in characters])
    print(f"{len(characters)} characters, {len(vocabulary)} different ones")
    curves: dict[str, list[list[float]]] = {kind: [] for kind in options.attention}
    seconds: dict[str, list[float]] = {kind: [] for kind in options.attention}
    most: dict[str, int] = {}
    for seed in range(options.seeds):
        runs = train(data, len(vocabulary), options, seed)
        for kind, run in runs.items():
            curves[kind].append(run["losses"])
            seconds[kind] += run["seconds"][min(5, options.steps // 2) :]  # the first steps compile
            most[kind] = max([most.get(kind, 0), *run["bytes"][1:]])
    result = report(curves, seconds, options.batch * options.context)
    for kind, size in most.items():
        if size:
            result[kind]["step_bytes"] = size
            print(f"{kind:>9}: {size / 2**20:.0f} MiB at the peak of a step, beside weights and optimiser")
    if options.plot:
        plot(curves, options.plot)
    if options.sample and "tilewise" in options.attention:
        start = torch.tensor([[vocabulary.index(c) for c in "Return "]], device=options.device)
        result["sample"] = "".join(
            vocabulary[c] for c in runs["tilewise"]["model"].write(start, options.sample)[0].tolist()
        )
        print(result["sample"])
    if options.output:
        write_line(result, options)
    return result


def write_line(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Add a run to a file of JSON lines: the machine, the options, rates, last losses, gaps, and every tenth loss."""
    from tilewise.cli.machine import describe

    line: dict[str, Any] = {"machine": describe(), "when": time.strftime("%Y-%m-%d %H:%M")}
    line["options"] = {name: value for name, value in vars(options).items() if name not in ("plot", "output")}
    for kind in options.attention:
        thinned = [[round(loss, 6) for loss in losses[::10]] for losses in result[kind]["losses"]]
        line[kind] = {**result[kind], "losses": thinned}
    line |= {name: result[name] for name in ("attention_gap", "gaps", "seed_gap") if name in result}
    with Path(options.output).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
