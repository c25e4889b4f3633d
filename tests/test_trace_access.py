"""The trace page as a screen reader and a keyboard have it: the browser's own accessibility tree, and the focus."""

from __future__ import annotations

import sys

import pytest
import torch

import tilewise as tw
from tilewise.analysis import trace

if sys.platform == "win32":
    pytest.skip("the browser is driven over inherited descriptors", allow_module_level=True)

from browser import Browser, find_chromium

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium on PATH")
CONTROLS = {"button", "combobox", "slider", "radio", "checkbox", "link", "DisclosureTriangle"}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 2, 24, 8) for _ in range(3))
    made = trace(q, k, v, mask=tw.causal(), head=1)
    path = made.save(tmp_path_factory.mktemp("page") / "trace.html")
    with Browser(str(PROGRAM)) as one:
        one.call("Accessibility.enable")
        one.open(path)
        one.run("go(3)")
        yield one


def tree(page):
    """(role, name, node) of everything that is not ignored."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    return [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip(), node)
        for node in nodes if not node.get("ignored") and "role" in node
    ]  # fmt: skip


def test_everything_that_is_operated_or_drawn_has_a_name(page):
    found = tree(page)
    named = [(role, name) for role, name, _ in found if role in CONTROLS | {"image", "img", "region"}]
    assert len(named) > 20 and all(name for _, name in named), named
    # Two controls with one name and one role could not be told apart.
    operated = [pair for pair in named if pair[0] in CONTROLS]
    assert len(set(operated)) == len(operated)
    assert not any("\ufffd" in name or "undefined" in name or "NaN" in name for _, name in named)


def test_landmarks_and_headings_are_in_order(page):
    assert page.run("document.documentElement.lang") == "en" and page.run("document.title.trim().length > 0")
    roles = [role for role, _, _ in tree(page)]
    assert roles.count("main") == 1 and roles.count("banner") == 1
    levels = page.run("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    assert all(page.run("[...document.querySelectorAll('h1, h2, h3')].map((h) => h.textContent.trim())"))
    ids = page.run("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(set(ids)) == len(ids)
    wanted = page.run(
        "[...document.querySelectorAll('[aria-labelledby], [for], [aria-describedby], [aria-controls]')].flatMap("
        "(e) => ['aria-labelledby', 'for', 'aria-describedby', 'aria-controls'].map((a) => e.getAttribute(a)))"
        ".filter((x) => x).flatMap((x) => x.split(' '))"
    )
    assert set(wanted) <= set(ids)


def test_tables_say_what_their_rows_and_columns_are(page):
    """Each number lies under a column header and beside a row header."""
    tables = page.run(
        "[...document.querySelectorAll('table')].map((t) => ({name: t.getAttribute('aria-label') "
        "|| t.caption?.textContent || t.closest('[aria-labelledby]') ? 'named' : '', "
        "columns: t.tHead ? [...t.tHead.rows].every((r) => [...r.cells].every((c) => c.tagName === 'TH' "
        "|| !c.textContent.trim())) : false, "
        "rows: [...t.tBodies[0].rows].every((r) => r.cells[0].tagName === 'TH')}))"
    )
    assert len(tables) >= 2 and all(t["name"] and t["columns"] and t["rows"] for t in tables), tables


def test_a_step_is_told_and_nothing_else_interrupts(page):
    live = page.run(
        "[...document.querySelectorAll('[aria-live], [role=status], [role=alert]')].map((e) => e.id)"
    )
    assert live == ["sentence"]
    before = page.run("document.getElementById('sentence').textContent")
    page.run("go(4)")
    told = page.run("document.getElementById('sentence').textContent")
    assert told != before and len(told) > 20
    status = next(node for role, _, node in tree(page) if role == "status")
    assert {p["name"]: p["value"].get("value") for p in status["properties"]}["live"] == "polite"


def test_the_focus_runs_down_the_page_is_always_seen_and_comes_back(page):
    """Tab from the top: positions never jump up by more than a row of controls; each stop shows an outline."""
    page.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    seen: list[dict] = []
    for _ in range(60):
        page.press("Tab", 9)
        one = page.run(
            "(() => { const e = document.activeElement; if (e === document.body) return null;"
            " const inner = e.nextElementSibling; const b = e.getBoundingClientRect();"
            " const ring = (x) => { if (!x) return false; const s = getComputedStyle(x);"
            " return (s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1) || s.boxShadow !== 'none'; };"
            " return {id: e.id || e.name + e.value || e.tagName, top: b.top + scrollY, left: b.left,"
            " section: e.closest('section, header, details, body')?.id || '',"
            " ring: ring(e) || ring(inner) || ring(e.parentElement)}; })()"
        )
        if one is None or (seen and one["id"] == seen[0]["id"]):
            break
        seen.append(one)
    assert 15 < len(seen) < 60
    assert [stop for stop in seen if not stop["ring"]] == []
    assert len({stop["id"] for stop in seen}) == len(seen)  # no trap, no stop twice
    controls = [stop["top"] for stop in seen if stop["section"] == "controls"]
    assert all(b >= a - 40 for a, b in zip(controls, controls[1:], strict=False))
    page.press("Tab", 9)


def test_who_wants_less_motion_gets_none(page):
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    moving = page.run(
        "[...document.querySelectorAll('body *')].filter((e) => { const s = getComputedStyle(e);"
        " return parseFloat(s.transitionDuration) > 0.01 || (s.animationName !== 'none'"
        " && parseFloat(s.animationDuration) > 0.01); }).map((e) => e.id || e.className || e.tagName)"
    )
    assert moving == []
    page.call("Emulation.setEmulatedMedia", features=[])


def test_targets_are_large_enough_for_a_finger(page):
    """24 by 24 CSS pixels at least, the label of a small box counted with it (WCAG 2.2, 2.5.8)."""
    small = page.run(
        "[...document.querySelectorAll('button, select, input')].filter((e) => e.offsetParent).map((e) => {"
        " const t = ['radio', 'checkbox'].includes(e.type) ? e.closest('label') : e;"
        " const b = t.getBoundingClientRect(); return [e.id || e.name, Math.round(b.width), Math.round(b.height)]; })"
        ".filter(([, w, h]) => w < 24 || h < 24)"
    )
    assert small == []
