"""Every lesson of docs/ladder runs, names its source, and is a page; the pages beside them run as well."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import tilewise

LADDER = Path(__file__).parents[1] / "docs" / "ladder"
LESSONS = sorted(LADDER.glob("*.py"))
PAGES = sorted(LADDER.glob("*.md"))

pytestmark = pytest.mark.skipif(not LADDER.exists(), reason="needs the source tree")


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_lesson_runs(lesson, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(lesson)])
    monkeypatch.setattr(tilewise.config, "slow", "quiet")
    state = torch.random.get_rng_state()
    try:
        runpy.run_path(str(lesson), run_name="__main__")
    finally:
        torch.random.set_rng_state(state)
    assert capsys.readouterr().out.strip(), "a lesson shows something"


def test_lessons_are_numbered_without_a_gap():
    assert [int(lesson.name[:2]) for lesson in LESSONS] == list(range(1, 12))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_lesson_is_a_page_with_a_source(lesson):
    pytest.importorskip("myst_parser")
    sys.path.insert(0, str(LADDER.parent))
    try:
        from lessons import as_markdown, cells
    finally:
        sys.path.pop(0)
    text = lesson.read_text(encoding="utf-8")
    kinds = [prose for prose, _ in cells(text)]
    assert kinds[0] and len(kinds) >= 4
    page = as_markdown(text)
    assert re.match(rf"# {int(lesson.name[:2])}\. \w", page)
    first = page.partition("```python")[0]
    source = first.partition("Source: ")[2]
    assert re.search(r"https://arxiv\.org/abs/\d{4}\.\d{5}", source), "a lesson names its paper"
    assert re.search(r"(section|algorithm|equation|appendix|theorem)s? \w", source), "and the place in it"
    assert page.count("```") % 2 == 0 and "noqa" not in page and "TODO" not in page
    code = [line for prose, lines in cells(text) if not prose for line in lines]
    assert any(line.lstrip().startswith("assert ") for line in code)


@pytest.mark.parametrize("page", [*LESSONS, *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        assert "://" in target or (page.parent / target.partition("#")[0]).exists(), (
            f"{page.name} links to {target}"
        )


def test_the_index_lists_every_lesson_twice():
    index = (LADDER / "index.md").read_text(encoding="utf-8")
    for lesson in LESSONS:
        assert f"]({lesson.name})" in index and f"\n{lesson.stem}\n" in index, lesson.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page, monkeypatch):
    sybil = pytest.importorskip("sybil")
    from sybil.parsers.markdown import PythonCodeBlockParser

    monkeypatch.setattr(tilewise.config, "slow", "quiet")
    blocks = list(sybil.Sybil(parsers=[PythonCodeBlockParser()]).parse(page).examples())
    assert len(blocks) == page.read_text(encoding="utf-8").count("\n```python\n")
    for block in blocks:
        block.evaluate()
