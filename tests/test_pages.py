"""Every Python block of README.md, CONTRIBUTING.md and docs/ runs, in order; the blocks of a page share their names."""

from __future__ import annotations

from pathlib import Path

import pytest

import tilewise

sybil = pytest.importorskip("sybil")

ROOT = Path(__file__).parents[1]
SKETCHES = {"design.md"}  # signatures and fragments, not programs
PAGES = sorted(
    page for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    if page.name not in SKETCHES and "```python" in page.read_text(encoding="utf-8")
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Pages speak of the slow path where they want to."""
    monkeypatch.setattr(tilewise.config, "slow", "quiet")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page):
    from sybil.parsers.markdown import PythonCodeBlockParser

    document = sybil.Sybil(parsers=[PythonCodeBlockParser()]).parse(page)
    blocks = list(document.examples())
    assert len(blocks) == page.read_text(encoding="utf-8").count("\n```python\n")
    for block in blocks:
        block.evaluate()
