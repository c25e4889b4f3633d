"""The site's configuration: Sphinx, MyST for Markdown pages, autodoc for the reference.

Build: python -m sphinx -W --keep-going -b html docs build/docs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from lessons import LessonParser  # noqa: E402  # beside this file

project = "Tilewise"
author = "The Tilewise authors"
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".py": "lesson"}
exclude_patterns = ["_build", "conf.py", "lessons.py"]
nitpicky = False
myst_heading_anchors = 3
suppress_warnings: list[str] = []

html_theme = "furo"
html_title = "Tilewise"
html_copy_source = False
html_show_sphinx = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Fields", "params_style"), "Errors", "Source", "Layouts"]

SECTIONS = ("Args", "Returns", "Errors", "Yields", "Fields", "Source", "Layouts", "Example")


def outside_code(text: str) -> str:
    """Docstrings are Markdown: what reStructuredText would read as markup outside of `code` is escaped."""
    pieces = re.split(r"(``?[^`]+``?)", text)
    escaped = [
        f"``{piece.strip('`')}``" if n % 2 else re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", piece)
        for n, piece in enumerate(pieces)
    ]
    return "".join(escaped)


def as_rest(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite one docstring in place: code spans, and sections that start on their heading's line."""
    written: list[str] = []
    for line in lines:
        # Our Raises are sentences, not a list of classes: a plain section.
        line = re.sub(r"^(\s*)Raises:", r"\1Errors:", line)
        section = re.match(rf"(\s*)({'|'.join(SECTIONS)}): +(\S.*)$", line)
        if section is not None:
            if written and written[-1].strip():
                written.append("")
            written += [f"{section[1]}{section[2]}:", f"{section[1]}    {outside_code(section[3])}"]
            continue
        written.append(outside_code(line))
    lines[:] = written


def setup(app: Sphinx) -> None:
    """Runs before napoleon, which reads the sections."""
    app.add_source_parser(LessonParser)
    app.connect("autodoc-process-docstring", as_rest, priority=100)
