"""`tilewise trace`: write an HTML page that steps through a run of attention, tile by tile.

The tensors are random, from a seed, or come from a file: a .pt file with a dict, or a .npz file, that holds q, k, v
and, if you like, do and sink; (N, D) each or (B, H, N, D), of at most 128 tokens and a head dimension of 64. The page
needs no network and no server. Before it is written, its answer and gradients are held against `tilewise.attention`.

Exit code: 0 written, 1 the run and `tilewise.attention` differ, 2 it could not run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.cli import problem_flags as flags
from tilewise.cli.terminal import UsageError, add_output_arguments, guarded

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.analysis import Trace

SUMMARY = "write a page that steps through attention tile by tile, on small tensors"
NAMES = ("q", "k", "v", "do", "sink")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tilewise trace`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    whole = flags.whole(1)
    parser.add_argument(
        "--file", metavar="FILE", help="tensors from a .pt or .npz file instead of random ones"
    )
    sizes = parser.add_argument_group("random tensors")
    sizes.add_argument("--seqlen", type=whole, default=32, metavar="N", help="queries; default: 32")
    sizes.add_argument("--seqlen-k", type=whole, metavar="N", help="keys; default: as many")
    sizes.add_argument("--heads", type=whole, default=1, metavar="H", help="query heads; default: 1")
    sizes.add_argument("--heads-kv", type=whole, metavar="H", help="KV heads; default: as many")
    sizes.add_argument("--head-dim", type=whole, default=8, metavar="D", help="default: 8")
    sizes.add_argument("--head-dim-v", type=whole, metavar="D", help="of v and out; default: as of q")
    sizes.add_argument("--dtype", type=flags.dtype_name, default="float32", help="default: fp32")
    sizes.add_argument("--seed", type=int, default=0, help="default: 0")
    sizes.add_argument(
        "--spread", type=float, default=2.0, metavar="S", help="standard deviation of the scores; default: 2"
    )
    problem = parser.add_argument_group("problem")
    problem.add_argument("--mask", default="causal", help=flags.MASK_HELP)
    problem.add_argument("--softcap", type=float, metavar="C", help="scores become C tanh(s / C)")
    problem.add_argument("--alibi", action="store_true", help="the usual ALiBi slopes")
    problem.add_argument("--sink", action="store_true", help="one random sink logit per head")
    problem.add_argument("--scale", type=float, metavar="X", help="factor of q.k; default: D^-1/2")
    problem.add_argument(
        "--q-offset", type=int, metavar="N", help="position of the first query; default: last meets last"
    )
    page = parser.add_argument_group("page")
    page.add_argument("--block-q", type=whole, metavar="N", help="queries in a tile; default: a quarter")
    page.add_argument("--block-k", type=whole, metavar="N", help="keys in a tile; default: a quarter")
    page.add_argument(
        "--batch", type=flags.whole(0), default=0, metavar="B", help="which batch entry; default: 0"
    )
    page.add_argument(
        "--head", type=flags.whole(0), default=0, metavar="H", help="which query head; default: 0"
    )
    page.add_argument("--title", default="", help="heading of the page")
    page.add_argument("--output", default="trace.html", metavar="FILE", help="default: trace.html")
    page.add_argument("--open", action="store_true", help="show it in the browser")
    add_output_arguments(page, "the lines")


def run(arguments: argparse.Namespace) -> int:
    """Write the page. Returns 0, 1 or 2 as the module says."""
    return guarded("trace", write, arguments)


def write(arguments: argparse.Namespace) -> int:
    """Run, check, write, tell. Raises UsageError for what the caller can put right."""
    from tilewise.analysis import trace

    tensors = read_file(arguments.file) if arguments.file else random_tensors(arguments)
    q, k, v = (tensors[name] for name in "qkv")
    options = options_of(arguments, tensors)
    blocks = {"block_q": arguments.block_q, "block_k": arguments.block_k}
    place = {"batch": arguments.batch, "head": arguments.head}
    made = trace(q, k, v, do=tensors.get("do"), **options, **blocks, **place)
    errors = differences(made, tensors, options, (arguments.batch, arguments.head))
    path = made.save(arguments.output, arguments.title)
    fits = all(error <= 1.0 for error, _ in errors.values())
    if arguments.json:
        print(json.dumps(to_dict(made, path, errors), indent=1))
    else:
        print_lines(made, path, errors)
    if arguments.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0 if fits else 1


def random_tensors(arguments: argparse.Namespace) -> dict[str, Tensor]:
    """q, k, v (1, H, N, D) from the seed: the same on every machine."""
    import torch

    heads_kv = arguments.heads_kv or arguments.heads
    flags.check_heads(arguments.heads, heads_kv)
    generator = torch.Generator().manual_seed(arguments.seed)
    keys = arguments.seqlen_k or arguments.seqlen
    width = arguments.head_dim_v or arguments.head_dim
    shapes = {
        "q": (1, arguments.heads, arguments.seqlen, arguments.head_dim),
        "k": (1, heads_kv, keys, arguments.head_dim),
        "v": (1, heads_kv, keys, width),
    }
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["q"] *= arguments.spread
    return {name: x.to(getattr(torch, arguments.dtype)) for name, x in found.items()}


def read_file(path: str) -> dict[str, Tensor]:
    """Tensors by name from a .pt or .npz file. Raises UsageError."""
    import torch

    suffix = Path(path).suffix
    try:
        if suffix == ".npz":
            import numpy

            with numpy.load(path, allow_pickle=False) as file:
                found: Any = {name: torch.from_numpy(file[name]) for name in file.files}
        elif suffix in (".pt", ".pth"):
            found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            raise UsageError(f"{path}: a .pt or an .npz file is read")
    except ModuleNotFoundError:
        raise UsageError("an .npz file needs NumPy; a .pt file does not") from None
    except UsageError:
        raise
    except FileNotFoundError:
        raise UsageError(f"cannot read {path}: no such file") from None
    except Exception as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict) or not all(isinstance(found.get(name), torch.Tensor) for name in "qkv"):
        raise UsageError(f"{path} does not hold the tensors q, k and v")
    return {name: found[name] for name in NAMES if isinstance(found.get(name), torch.Tensor)}


def options_of(arguments: argparse.Namespace, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Keyword arguments that `trace` and `tilewise.attention` share."""
    import torch

    import tilewise as tw

    q, k = tensors["q"], tensors["k"]
    heads = q.shape[1] if q.ndim == 4 else 1
    scores = [tw.softcap(arguments.softcap)] if arguments.softcap is not None else []
    scores += [tw.alibi(tw.alibi_slopes(heads))] if arguments.alibi else []
    sink = tensors.get("sink")
    if sink is None and arguments.sink:
        sink = torch.randn(heads, generator=torch.Generator().manual_seed(arguments.seed + 1))
    return {
        "mask": flags.parse_mask(arguments.mask).build(q.shape[-2], k.shape[-2]), "scores": scores,
        "sink": sink, "scale": arguments.scale, "q_offset": arguments.q_offset,
    }  # fmt: skip


def differences(
    made: Trace, tensors: dict[str, Tensor], options: dict[str, Any], place: tuple[int, int]
) -> dict[str, tuple[float, float]]:
    """(in units of `allowed`, largest absolute) difference of out, dq, dk, dv from `tilewise.attention`."""
    import torch

    import tilewise as tw

    q, k, v = (
        (x if x.ndim == 4 else x[None, None]).detach().to(made.head.q.dtype).requires_grad_()
        for x in (tensors[name] for name in "qkv")
    )
    batch, head = place
    group = q.shape[1] // k.shape[1]
    out = tw.attention(q, k, v, **options, backend="blockwise")
    do = torch.zeros_like(out)
    do[batch, head] = made.head.do
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    last = made.recording
    theirs = {
        "out": out.detach()[batch, head],
        "dq": dq[batch, head],
        "dk": dk[batch, head // group],
        "dv": dv[batch, head // group],
    }
    mine = {"out": made.out, "dq": last.dq[-1], "dk": last.dk[-1], "dv": last.dv[-1]}
    found = {}
    for name, units in allowed(made).items():
        off = (mine[name] - theirs[name]).abs()
        alike = mine[name].isfinite() == theirs[name].isfinite()
        ratio = torch.where(off > 0, off / units, 0.0).nan_to_num(0.0, 0.0)
        found[name] = (
            float(ratio.max()) if alike.all() else float("inf"),
            float(off.nan_to_num(0.0, 0.0).max()),
        )
    return found


def allowed(made: Trace) -> dict[str, Tensor]:
    """What roundings let two orders of the same arithmetic differ by, entry by entry.

    A score errs by about eps times its terms' absolute sum, and a weight by that relatively; from there on sums of
    absolute values bound the sums. Eight such errors are allowed.
    """
    import torch

    head, abs_do = made.head, made.head.do.abs().nan_to_num(0.0, 0.0)
    q, k, v = (x.abs().nan_to_num(0.0, 0.0) for x in (head.q, head.k, head.v))
    size = head.scores.abs().nan_to_num(0.0, posinf=0.0)
    eps = 8 * torch.finfo(head.q.dtype).eps
    relative = eps * (4 + (size + abs(head.scale) * (q @ k.mT)).amax(-1, keepdim=True))
    p = made.p.nan_to_num(0.0, 0.0) * relative
    ds = p * (abs_do @ v.mT + (abs_do * made.out.abs().nan_to_num(0.0, 0.0)).sum(-1, keepdim=True))
    ds = abs(head.scale) * ds * head.slopes.abs().nan_to_num(0.0, 0.0)
    return {"out": p @ v, "dq": ds @ k, "dk": ds.mT @ q, "dv": p.mT @ abs_do}


def print_lines(made: Trace, path: Path, errors: dict[str, tuple[float, float]]) -> None:
    """What was written, and how it compares."""
    from tilewise.analysis.trace_page import heading

    sizes = ", ".join(f"{a} x {b}" for a, b in made.recordings)
    print(f"{heading(made)}")
    print(f"tiles     {made.block_q} x {made.block_k}; also recorded: {sizes}")
    listed = ", ".join(f"{name} {difference:.1e}" for name, (_, difference) in errors.items())
    print(f"against tilewise.attention, largest difference: {listed}")
    print(f"written   {path} ({path.stat().st_size / 1024:,.0f} KiB)")


def to_dict(made: Trace, path: Path, errors: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The same as plain numbers and text."""
    return {
        "command": "trace",
        "schema": 1,
        "output": str(path),
        "bytes": path.stat().st_size,
        "words": made.head.words,
        "block_q": made.block_q,
        "block_k": made.block_k,
        "tiles": [list(pair) for pair in made.recordings],
        "differences": {name: difference for name, (_, difference) in errors.items()},
    }
