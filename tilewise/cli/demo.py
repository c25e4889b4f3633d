"""`tilewise demo`: a language model reads a text with three attentions, and the answers are compared."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.cli import demo_attention, demo_model, demo_report, demo_run
from tilewise.cli.demo_error import DemoError
from tilewise.errors import SlowPathWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SUMMARY = "run a language model with ordinary attention, SDPA and Tilewise, and compare"
DEFAULT_LENGTHS = (512, 1024, 2048, 4096)
LONG_LENGTHS = (*DEFAULT_LENGTHS, 8192)
# Module and what pip calls it.
NEEDED = (
    ("transformers", "transformers"),
    ("gguf", "gguf"),
    ("accelerate", "accelerate"),
    ("psutil", "psutil"),
    ("rich", "rich"),
    ("matplotlib", "matplotlib"),
)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers such as 512,2048"
        ) from None
    if lengths[0] < 2:
        raise argparse.ArgumentTypeError("a length is at least 2")
    return lengths


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a Hugging Face folder or name; default: SmolLM2-135M-Instruct, fetched once",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="a text file to read; default: the sources of Python's standard library",
    )
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N",
        help="numbers of tokens to read; default: 512,1024,2048,4096",
    )
    lengths.add_argument("--long", action="store_true", help="go on to 8192 tokens (more time and memory)")
    parser.add_argument(
        "--tokens", type=_count, default=8, metavar="N", help="tokens to generate each time; default: 8"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ...; default: cuda where there is one, else cpu"
    )
    parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads; default: PyTorch's choice")
    plot = parser.add_mutually_exclusive_group()
    plot.add_argument("--plot", default="tilewise-demo.png", metavar="PATH", help="where the picture goes")
    plot.add_argument("--no-plot", dest="plot", action="store_const", const=None, help="draw no picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")


def missing_packages(plot: bool = True) -> list[str]:
    """The packages of the extra `demo` that are not installed."""
    return [
        name
        for module, name in NEEDED
        if (plot or module != "matplotlib") and importlib.util.find_spec(module) is None
    ]


@contextmanager
def progress(total: int, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function that announces the next step on stderr: a bar in a terminal, else one line each."""
    if quiet:
        yield lambda text: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:<46}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            started = False

            def advance(text: str) -> None:
                nonlocal started
                bar.update(task, description=text, advance=1 if started else 0)
                started = True

            yield advance
    else:
        done = 0

        def line(text: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

        yield line


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if every check held, 1 if one failed, 2 if it could not run."""
    missing = missing_packages(plot=arguments.plot is not None)
    if missing:
        _say(f'tilewise demo needs {", ".join(missing)}: python -m pip install "tilewise[demo]"')
        return 2
    try:
        return measure(arguments)
    except DemoError as error:
        if arguments.traceback:
            raise
        _say(f"tilewise demo: {error}")
    except Exception as error:
        if arguments.traceback:
            raise
        _say(f"tilewise demo: {type(error).__name__}: {error}\n(--traceback shows where)")
    return 2


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DemoError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def measure(arguments: argparse.Namespace) -> int:
    """Load, measure, show. Raises DemoError for what the caller can put right."""
    import torch

    if arguments.plot is not None and not Path(arguments.plot).resolve().parent.is_dir():
        raise DemoError(f"--plot {arguments.plot}: there is no such folder")
    start = time.perf_counter()
    lengths = arguments.lengths or (LONG_LENGTHS if arguments.long else DEFAULT_LENGTHS)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = _device(arguments.device)
    demo_attention.register()
    network, tokenizer, name = demo_model.load(arguments.model, device, _say)
    limit = getattr(network.config, "max_position_embeddings", None)
    if limit is not None and lengths[-1] > limit:
        raise DemoError(f"{name} reads up to {limit} tokens; --lengths asks for {lengths[-1]}")
    if device.type == "cpu":
        demo_run.check_fits(network.config, lengths[-1])
    tokens, text_name = demo_model.read_tokens(tokenizer, arguments.text, lengths[-1])
    tokens = tokens.to(device)
    results = []
    with warnings.catch_warnings(), progress(1 + len(lengths) * demo_run.STEPS_PER_LENGTH) as step:
        # The report names the backend; the library's own warning would only tear the bar apart.
        warnings.simplefilter("ignore", SlowPathWarning)
        step("warming up")
        demo_run.warm_up(network, tokens)
        for length in lengths:
            results.append(
                demo_run.run_length(network, tokenizer, tokens[:, :length], arguments.tokens, step)
            )
    found = demo_run.checks(results)
    title = f"{name} reads {text_name} ({device}, float32)"
    _show(arguments, title, results, found, time.perf_counter() - start)
    return 0 if all(check.passed for check in found) else 1


def _show(
    arguments: argparse.Namespace, title: str, results: list[Any], found: list[Any], seconds: float
) -> None:
    passed = all(check.passed for check in found)
    if arguments.json:
        report = demo_report.to_json(title, results, found, seconds)
        print(json.dumps({**report, "plot": arguments.plot}, indent=1))
    else:
        demo_report.print_table(results, title)
        demo_report.print_generated(results)
        demo_report.print_checks(found)
        print(f"\n{demo_report.closing(results, passed)}")
    # Last, so that a picture that cannot be drawn or written costs nothing but itself.
    if arguments.plot is not None:
        demo_report.save_plot(results, arguments.plot, title)
        if not arguments.json:
            print(f"Picture: {arguments.plot}")
    if not arguments.json:
        print(f"All in {seconds:.0f} s.")
