"""The command `tilewise`: one subcommand per module of this package, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# name: module with SUMMARY, add_arguments(parser) and run(arguments) -> exit code
COMMANDS = {
    "demo": "tilewise.cli.demo",
    "check": "tilewise.cli.check",
    "bench": "tilewise.cli.bench",
    "explain": "tilewise.cli.explain",
    "trace": "tilewise.cli.trace",
}


def version() -> str:
    """The installed version, or the word that says it runs from a source tree."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("tilewise")
    except PackageNotFoundError:
        return "(source tree, not installed)"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="tilewise",
        description="Tilewise: exact attention, evaluated tile by tile, so the score matrix never exists.",
    )
    parser.add_argument("--version", action="version", version=f"tilewise {version()}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        sub = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 success, 1 a check failed, 2 it could not run."""
    chosen = build_parser().parse_args(arguments)
    try:
        return chosen.run(chosen)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
