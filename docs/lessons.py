"""Lessons as pages: Sphinx reads the programs of docs/ladder, whose cells are prose or code.

A lesson is a Python file in the percent format that editors open as a notebook: `# %% [markdown]` starts a cell of
prose, each line behind `# `; `# %%` starts a cell of code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from myst_parser.parsers.sphinx_ import MystParser

if TYPE_CHECKING:
    from docutils import nodes

PROSE, CODE = "# %% [markdown]", "# %%"


def cells(text: str) -> list[tuple[bool, list[str]]]:
    """(is prose, lines) of each cell. Raises ValueError for a line before the first cell, or code in prose."""
    found: list[tuple[bool, list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line in (PROSE, CODE):
            found.append((line == PROSE, []))
        elif not found:
            raise ValueError(f"line {number}: a lesson starts with a cell")
        elif found[-1][0]:
            if line and not line.startswith("#"):
                raise ValueError(f"line {number}: code in a cell of prose")
            found[-1][1].append(line.removeprefix("#").removeprefix(" "))
        else:
            found[-1][1].append(line)
    return found


def as_markdown(text: str) -> str:
    """The lesson as Markdown: prose as it is, code in fences."""
    parts = []
    for prose, lines in cells(text):
        body = "\n".join(lines).strip("\n")
        body = "\n".join(line.split("  # noqa")[0].split("  # fmt")[0] for line in body.split("\n"))
        parts.append(body if prose else f"```python\n{body}\n```")
    return "\n\n".join(parts) + "\n"


class LessonParser(MystParser):  # type: ignore[misc]  # myst_parser has no types for it
    """Reads a lesson as the Markdown that it contains."""

    supported = ("lesson",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(as_markdown(inputstring), document)
