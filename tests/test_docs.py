"""The pages agree with the library: every public name is documented, every link leads somewhere, the site builds.

The code blocks of the pages run in tests/test_pages.py.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise
import tilewise.nn

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
ALIASES = {"sink_tokens"}

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source tree")


def public_objects() -> list[tuple[str, object]]:
    """Public names that are functions or classes, and the public members of the classes."""
    found: list[tuple[str, object]] = []
    for name in tilewise.__all__:
        thing = getattr(tilewise, name)
        if not (inspect.isfunction(thing) or inspect.isclass(thing)):
            continue
        found.append((name, thing))
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            own = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")]
            # A slot or a field of a named tuple is documented in its class.
            found += [(f"{name}.{key}", value) for key, value in own if inspect.isfunction(value)]
    return found


@pytest.mark.parametrize("name", [name for name, _ in public_objects()])
def test_public_names_have_docstrings(name):
    thing = dict(public_objects())[name]
    text = inspect.getdoc(thing) or ""
    assert len(text) > 10 and not text.startswith(f"{name}("), f"{name} has no docstring"


def test_the_reference_lists_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"auto\w+:: (?:tilewise\.)?(\w+)", page))
    wanted = {name for name, _ in public_objects() if "." not in name} - ALIASES
    assert wanted <= listed, f"docs/api.md lacks {sorted(wanted - listed)}"
    assert {name for name in listed if not hasattr(tilewise, name)} <= {"nn"}


def test_every_row_of_the_semantics_table_has_a_section():
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = design.partition("### Semantics, decided once")[2].partition("\n## ")[0]
    rows = [row.strip() for row in re.findall(r"^\| ([\w ]+) \|", table, flags=re.MULTILINE)][1:]
    page = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    headings = {heading.lower() for heading in re.findall(r"^## (.+)$", page, flags=re.MULTILINE)}
    told_in_the_introduction = {"words we use"}
    missing = {row.lower() for row in rows} - headings - told_in_the_introduction
    assert rows and not missing, f"docs/semantics.md has no section for {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        aimed = page.parent / path if path else page
        assert aimed.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", aimed.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name} links to {target}"


def test_the_site_builds_without_a_warning(tmp_path):
    for module in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(module)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "docs",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "index.html").exists()
