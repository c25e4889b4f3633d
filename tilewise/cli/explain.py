"""`tilewise explain`: what a call would do and why, from sizes alone: nothing is allocated and nothing runs.

The problem comes from flags or from a small TOML or JSON file with the same names:

    seqlen = 8192
    heads = 32
    heads_kv = 8
    head_dim = 128
    dtype = "bf16"
    mask = "causal & window:1024"
    device = "cuda"

Exit code: 0 a backend takes the problem, 1 none does, 2 the problem cannot be read.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tilewise.analysis.machines import find_machine
from tilewise.cli import problem_flags as flags
from tilewise.cli.terminal import UsageError, add_output_arguments, guarded

SUMMARY = "print the plan for a problem: backend, tiles, work, memory, and what bounds it"
# Names in a file, and what they are where neither the file nor a flag says so.
DEFAULTS: dict[str, Any] = {
    "seqlen": None, "seqlen_k": None, "batch": 1, "heads": 8, "heads_kv": None, "head_dim": 64, "head_dim_v": None,
    "dtype": "bfloat16", "mask": "causal", "device": None, "softcap": None, "alibi": False, "sink": False,
    "dropout": 0.0, "q_offset": None, "backward": False, "deterministic": False, "batch_invariant": False,
    "backend": "auto", "allow_quadratic": False, "machine": None,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tilewise explain`. Flags that are not given are None, so that a file can speak."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    whole = flags.whole(1)
    parser.add_argument(
        "--file", metavar="FILE", help="a problem in TOML or JSON; flags go before what it says"
    )
    sizes = parser.add_argument_group("problem")
    sizes.add_argument("--seqlen", type=whole, metavar="N", help="queries, and keys unless --seqlen-k")
    sizes.add_argument("--seqlen-k", type=whole, metavar="N", help="keys")
    sizes.add_argument("--batch", type=whole, metavar="B", help="default: 1")
    sizes.add_argument("--heads", type=whole, metavar="H", help="query heads; default: 8")
    sizes.add_argument("--heads-kv", type=whole, metavar="H", help="KV heads; default: as many")
    sizes.add_argument("--head-dim", type=whole, metavar="D", help="default: 64")
    sizes.add_argument("--head-dim-v", type=whole, metavar="D", help="of v and out; default: as of q")
    sizes.add_argument("--dtype", type=flags.dtype_name, help="fp32, bf16, fp16 or fp64; default: bf16")
    sizes.add_argument("--mask", help=flags.MASK_HELP.replace("%(default)s", "causal"))
    sizes.add_argument(
        "--q-offset", type=int, metavar="N", help="position of the first query; default: last meets last"
    )
    sizes.add_argument(
        "--device",
        help="cpu, cuda, ...: the kind asked about, it need not be here; default: the machine's, else cpu",
    )
    terms = parser.add_argument_group("terms and options")
    terms.add_argument("--softcap", type=float, metavar="C", help="scores become C tanh(s / C)")
    terms.add_argument("--dropout", type=float, metavar="P", help="probability that a weight is dropped")
    for name, text in (
        ("alibi", "the usual ALiBi slopes"),
        ("sink", "one sink logit per head"),
        ("backward", "plan for a backward pass too"),
        ("deterministic", "gradients that repeat bit by bit"),
        ("batch-invariant", "bits that do not depend on the neighbours in the batch"),
        ("allow-quadratic", "let auto take the backend that builds the matrix"),
    ):
        terms.add_argument(f"--{name}", action="store_const", const=True, help=text)
    terms.add_argument("--backend", metavar="NAME", help="ask this backend only; default: auto")
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="whose roofs bound it: a100, h100, h200, b200, mi300x, zen3, ...; default: the one this runs on",
    )
    parser.add_argument(
        "--results",
        metavar="FOLDER",
        help="measurements to show beside it; default: the source tree's, if any",
    )
    add_output_arguments(parser, "the page")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns 0, 1 or 2 as the module says."""
    return guarded("explain", explain, arguments)


def explain(arguments: argparse.Namespace) -> int:
    """Read the problem, plan it, print it. Raises UsageError for what the caller can put right."""
    import tilewise as tw
    from tilewise.cli import explain_measured, explain_page, tile_picture

    problem = read_problem(arguments)
    sizes = sizes_of(problem)
    plan = tw.explain(*sizes.shapes, **options_of(problem, sizes))
    measured = explain_measured.find(plan, sizes, problem, arguments.results)
    lines, legend = tile_picture.draw(plan, sizes, problem["q_offset"])
    if arguments.json:
        print(json.dumps(explain_page.to_dict(plan, problem, lines, measured), indent=1))
    else:
        explain_page.print_page(plan, sizes, problem, [*lines, legend] if lines else [], measured)
    return 0 if plan.backend else 1


def read_problem(arguments: argparse.Namespace) -> dict[str, Any]:
    """Flags over file over defaults, by the names of DEFAULTS. Raises UsageError."""
    problem = dict(DEFAULTS)
    if arguments.file:
        problem |= _read_file(arguments.file)
    given = {name: getattr(arguments, name) for name in DEFAULTS}
    problem |= {name: value for name, value in given.items() if value is not None}
    if problem["seqlen"] is None:
        raise UsageError("the problem has no length: give --seqlen N, or seqlen in the file")
    flags.parse_mask(problem["mask"])
    kind = find_machine(problem["machine"]).device if problem["machine"] else "cpu"
    problem["device"] = problem["device"] or kind
    return problem


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    if path.endswith(".json"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
    else:
        found = _read_toml(path, text)
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no table of names and values")
    found = {name.replace("-", "_"): value for name, value in found.items()}
    unknown = sorted(set(found) - set(DEFAULTS))
    if unknown:
        raise UsageError(f"{path}: unknown {', '.join(unknown)}; names are {', '.join(DEFAULTS)}")
    for name, value in found.items():
        found[name] = _checked(path, name, value)
    return found


def _read_toml(path: str, text: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef, import-not-found, unused-ignore]
        except ModuleNotFoundError:
            raise UsageError(
                "TOML needs Python 3.11 or the package tomli; a .json file works everywhere"
            ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error


def _checked(path: str, name: str, value: Any) -> Any:
    """A value of a file, held to the same rules as the flag. Raises UsageError."""
    kinds = {
        "mask": str,
        "machine": str,
        "device": str,
        "backend": str,
        "dtype": str,
        "softcap": (int, float),
        "dropout": (int, float),
    }
    switches = [known for known, usual in DEFAULTS.items() if isinstance(usual, bool)]
    kind = bool if name in switches else kinds.get(name, int)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))  # type: ignore[arg-type]
    low = 1 if kind is int and name != "q_offset" else None
    if not fits or (low is not None and value < low):
        raise UsageError(f"{path}: {name} = {value!r} does not fit")
    if name == "dtype":
        try:
            return flags.dtype_name(value)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{path}: {error}") from None
    return value


def sizes_of(problem: dict[str, Any]) -> flags.Sizes:
    """The sizes of a problem, defaults that follow others filled in. Raises UsageError if heads do not divide."""
    heads_kv = problem["heads_kv"] or problem["heads"]
    flags.check_heads(problem["heads"], heads_kv)
    return flags.Sizes(
        problem["batch"], problem["heads"], heads_kv, problem["seqlen"], problem["seqlen_k"] or problem["seqlen"],
        problem["head_dim"], problem["head_dim_v"] or problem["head_dim"], problem["dtype"], problem["mask"],
    )  # fmt: skip


def options_of(problem: dict[str, Any], sizes: flags.Sizes) -> dict[str, Any]:
    """Keyword arguments of `tilewise.explain`."""
    import torch

    import tilewise as tw

    try:
        device = torch.device(problem["device"]).type
    except RuntimeError as error:
        raise UsageError(f"{problem['device']!r} is not a device: {str(error).splitlines()[0]}") from error
    scores = [tw.softcap(float(problem["softcap"]))] if problem["softcap"] is not None else []
    scores += [tw.alibi(tw.alibi_slopes(sizes.heads))] if problem["alibi"] else []
    passed = (
        "dropout",
        "q_offset",
        "deterministic",
        "batch_invariant",
        "backend",
        "allow_quadratic",
        "backward",
        "machine",
    )
    return {
        "mask": flags.parse_mask(problem["mask"]).build(sizes.seqlen_q, sizes.seqlen_k),
        "scores": scores,
        "sink": torch.empty(sizes.heads, device="meta") if problem["sink"] else None,
        "dtype": sizes.torch_dtype,
        "device": device,
        **{name: problem[name] for name in passed},
    }
