"""What the commands share: tables, progress, and errors of one line.

Rich draws in a terminal where it is installed; plain aligned text goes everywhere else.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

BROKEN_PIPE = 141
"""Exit code of a command whose reader went away, as a shell reports it (128 + SIGPIPE)."""
PIPE_INTERVAL = 5.0
"""Seconds between two lines of progress where nobody watches a bar."""


class UsageError(Exception):
    """What the caller can put right; one line, exit code 2."""


def add_output_arguments(parser: argparse._ActionsContainer, what: str) -> None:
    """--json and --traceback."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON object instead of {what}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")


def names_list(text: str) -> list[str]:
    """Type of an option that takes names separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def guarded(command: str, work: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """work(arguments), an exception turned into one line on stderr and exit code 2."""
    try:
        code = work(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough (head, less): no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if arguments.traceback:
            traceback.print_exc()
            return 2
        print(f"tilewise {command}: {one_line(error)}", file=sys.stderr, flush=True)
        return 2


def one_line(error: BaseException) -> str:
    """The message of an error in one line; errors that nobody raised on purpose also tell their class."""
    from tilewise.errors import TilewiseError

    text = "; ".join(line.strip().rstrip(".;") for line in str(error).splitlines() if line.strip())
    if isinstance(error, (UsageError, TilewiseError)):
        return text
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {text or 'no message'} (--traceback shows where)"


def has_rich() -> bool:
    """Whether Rich is installed."""
    return importlib.util.find_spec("rich") is not None


def draws(stream: Any = None) -> bool:
    """Whether a stream (stdout) is a terminal on which Rich can draw."""
    return (stream or sys.stdout).isatty() and has_rich()


def characters(preferred: str, plain: str) -> str:
    """`preferred` if stdout can print it, else `plain`."""
    try:
        preferred.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return plain
    return preferred


@dataclass
class Table:
    """A table of text.

    columns: names; "<" before a name aligns left, "?" before that leaves the column out of a narrow terminal.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    styles: list[str | None] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)

    def add(self, *cells: str, style: str | None = None) -> None:
        """One row; `style` is a Rich style, used in a terminal only."""
        self.rows.append(cells)
        self.styles.append(style)

    def end_section(self) -> None:
        """Draw a line after the last row."""
        self.ends.add(len(self.rows) - 1)

    def print(self) -> None:
        """To stdout: drawn in a terminal, plain elsewhere."""
        if not draws():
            self._print_plain()
            return
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as Drawn

        console = Console()
        shown = self._fitting(console.width)
        drawn = Drawn(title=escape(self.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for n in shown:
            left = "<" in self.columns[n][:2]
            drawn.add_column(escape(self.columns[n].lstrip("?<")), justify="left" if left else "right")
        for number, (row, style) in enumerate(zip(self.rows, self.styles, strict=True)):
            drawn.add_row(*(escape(row[n]) for n in shown), style=style, end_section=number in self.ends)
        console.print(drawn)

    def _widths(self) -> list[int]:
        heads = [column.lstrip("?<") for column in self.columns]
        return [max(len(line[n]) for line in [heads, *self.rows]) for n in range(len(heads))]

    def _fitting(self, width: int) -> list[int]:
        """The columns that a terminal has room for: optional ones go from the right."""
        widths = self._widths()
        shown = list(range(len(widths)))
        for n in reversed(range(len(widths))):
            # Rich puts a space on each side of a cell and of the table.
            if sum(widths[m] + 2 for m in shown) + len(shown) + 1 > width and self.columns[n].startswith("?"):
                shown.remove(n)
        return shown

    def _print_plain(self) -> None:
        heads, widths = tuple(column.lstrip("?<") for column in self.columns), self._widths()
        print(self.title)
        for number, line in enumerate([heads, *self.rows]):
            cells = [
                text.ljust(width) if "<" in column[:2] else text.rjust(width)
                for text, width, column in zip(line, widths, self.columns, strict=True)
            ]
            print("  " + "  ".join(cells).rstrip())
            if number == 0:
                print("  " + "  ".join("-" * width for width in widths))
            elif number - 1 in self.ends and number < len(self.rows):
                print()
        print()


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that announces the next of `total` steps on stderr.

    A bar in a terminal; elsewhere a line every few seconds, so that a log stays short.
    """
    if draws(sys.stderr):
        from tilewise.cli.demo import progress as bar

        with bar(total) as advance:
            yield advance
        return
    done, last = 0, time.monotonic()

    def line(text: str) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= PIPE_INTERVAL:
            last = time.monotonic()
            print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

    yield line
