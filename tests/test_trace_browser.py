"""The trace page in a real browser: steps by mouse and by keyboard, the library's numbers, no error, both palettes.

Needs Chromium on PATH (or TILEWISE_CHROMIUM); skipped where there is none.
"""

from __future__ import annotations

import math
import sys

import pytest
import torch

import tilewise as tw
from tilewise.analysis import trace
from tilewise.state import OnlineSoftmaxState

if sys.platform == "win32":
    pytest.skip("the browser is driven over inherited descriptors", allow_module_level=True)

from browser import Browser, find_chromium

PROGRAM = find_chromium()

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium on PATH")

KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Home": 36, "End": 35, "PageDown": 34, "Tab": 9}
MASK = tw.causal() & tw.window(19, 0)


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(4)
    q, k, v = torch.randn(1, 4, 32, 8), torch.randn(1, 2, 32, 8), torch.randn(1, 2, 32, 8)
    return trace(2 * q, k, v, mask=MASK, scores=tw.softcap(6.0), sink=torch.randn(4), head=2)


@pytest.fixture(scope="module")
def browser():
    with Browser(str(PROGRAM)) as one:
        yield one


@pytest.fixture
def page(browser, made, tmp_path):
    """The browser with the page freshly opened, and no message so far."""
    path = made.save(tmp_path / "trace.html")
    browser.messages.clear()
    browser.requests.clear()
    browser.open(path)
    yield browser
    assert browser.messages == []
    assert [address.partition(":")[0] for address in browser.requests] == ["file"]


def text(page: Browser, selector: str) -> str:
    return page.run(f"document.querySelector({selector!r}).textContent")


def press(page: Browser, *keys: str) -> None:
    for key in keys:
        page.press(key, KEYS[key])


def table(page: Browser, selector: str = "#state") -> list[dict[str, float]]:
    """The named numbers of each row of a table, with every digit, as text that Python reads."""
    rows = page.run(
        f"[...document.querySelectorAll('{selector} tbody tr')].map((tr) => Object.fromEntries("
        "[['row', tr.dataset.row], ...[...tr.querySelectorAll('td[data-name][data-value]')]"
        ".map((td) => [td.dataset.name, td.dataset.value])]))"
    )
    return [
        {name: float(str(value).replace("Infinity", "inf")) for name, value in row.items()} for row in rows
    ]


def numbers(page: Browser, selector: str) -> list[list[float]]:
    """The numbers of a table, row by row, with every digit."""
    return page.run(
        f"[...document.querySelectorAll('{selector} tbody tr')]"
        ".map((line) => [...line.cells].slice(1).map((cell) => Number(cell.dataset.value)))"
    )


def test_loads_quickly(browser, made, tmp_path):
    path = made.save(tmp_path / "trace.html")
    assert min(browser.open(path) for _ in range(3)) < 1.0


def test_steps_by_mouse_and_keyboard(page):
    count = len(list(page.run("run().steps")))
    assert text(page, "#counter") == f"Step 1 of {count}"
    page.click("#forth")
    page.click("#forth")
    page.click("#back")
    assert text(page, "#counter") == f"Step 2 of {count}"
    press(page, "ArrowRight", "ArrowRight", "ArrowLeft")
    assert text(page, "#counter") == f"Step 3 of {count}"
    press(page, "End")
    assert text(page, "#counter") == f"Step {count} of {count}"
    assert page.run("document.getElementById('forth').getAttribute('aria-disabled')") == "true"
    page.click("#forth")
    press(page, "Home", "PageDown")
    assert text(page, "#counter") == f"Step 11 of {count}"
    page.click("#timeline", (0.01, 0.5))
    assert text(page, "#counter") == f"Step 1 of {count}"
    # The slider has keys of its own.
    page.run("document.getElementById('slider').focus()")
    press(page, "ArrowRight", "ArrowRight")
    assert text(page, "#counter") == f"Step 3 of {count}"
    assert text(page, "#sentence") in page.run(
        "document.getElementById('slider').getAttribute('aria-valuetext')"
    )


def test_plays_and_pauses(page):
    page.run("document.getElementById('speed').value = '5'")
    page.click("#play")
    assert text(page, "#play") == "Pause"
    page.run(
        "new Promise((done) => { const look = () => view.step > 1 ? done() : setTimeout(look, 20); look(); })"
    )
    page.click("#play")
    here = text(page, "#counter")
    assert text(page, "#play") == "Play"
    page.run("new Promise((done) => setTimeout(done, 500))")
    assert text(page, "#counter") == here
    # At the end it stops by itself.
    press(page, "End", "ArrowLeft")
    page.click("#play")
    page.run(
        "new Promise((done) => { const look = () => timer === null ? done() : setTimeout(look, 20); look(); })"
    )
    assert text(page, "#play") == "Play" and page.run("view.step === run().steps.length - 1")


def test_every_number_of_the_forward_is_the_library_s(page, made):
    """A second run of OnlineSoftmaxState, by hand, against every row that the page shows at every step."""
    one, head = made.recording, made.head
    state: dict[int, OnlineSoftmaxState] = {}
    for n, step in enumerate(one.steps["forward", "queries outer"]):
        page.run(f"go({n})")
        rows = slice(step.row * one.block_q, (step.row + 1) * one.block_q)
        before = state.get(step.row, OnlineSoftmaxState.empty((one.block_q,), 8))
        shown = table(page)
        assert [row["row"] for row in shown] == list(range(rows.start, rows.stop))
        if step.kind == "finish":
            wanted = {"m": before.m, "l": before.l, "lse": made.lse[rows]}
            assert numbers(page, "#tile") == made.out[rows].tolist()
        else:
            keys = slice(step.column * one.block_k, (step.column + 1) * one.block_k)
            after = before.absorb(head.scores[rows, keys], head.v[keys])
            wanted = {"m-before": before.m, "l-before": before.l, "m": after.m, "l": after.l}
            state[step.row] = after
            far = (after.finalize().out - made.out[rows]).abs().amax(-1)
            wanted["distance"] = far
        for name, column in wanted.items():
            assert [row[name] for row in shown] == column.tolist(), (n, name)


@pytest.mark.parametrize("loop", ["queries outer", "keys outer"])
def test_backward_and_bytes(page, made, loop):
    page.click("input[name=pass][value=backward] + span")
    page.run(f"(() => {{ const s = document.getElementById('loop'); s.value = {loop!r};"
             " s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    steps = made.recording.steps["backward", loop]
    press(page, "Home")
    assert text(page, "#counter") == f"Step 1 of {len(steps)}"
    assert [row["delta"] for row in table(page)] == made.delta.tolist()
    press(page, "End")
    last = steps[-1]
    shown = page.run(
        "[...document.querySelectorAll('#bytes [data-name]')].map((x) => [x.dataset.name, x.dataset.value])"
    )
    assert dict(shown) == {"tiled": str(last.tiled), "ordinary": str(last.ordinary)}
    rows = slice(last.row * 8, last.row * 8 + 8)
    columns = slice(last.column * 8, last.column * 8 + 8)
    assert numbers(page, "#tile") == made.ds[rows, columns].tolist()
    label = page.run(
        "document.querySelector('#state [data-name=dq-after] canvas').getAttribute('aria-label')"
    )
    row = made.recording.dq[last.column, last.row * 8].tolist()
    told = [float(x.replace("−", "-")) for x in label.partition(": ")[2].split(", ")]
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(told, row, strict=True))


def test_tile_sizes_keep_the_place(page, made):
    page.run("go(5)")
    for block in ("4", "16", "8"):
        kind, row, first = page.run("[step().kind, rowsOf(step().i)[0], keysOf(step().j)[0]]")
        page.run(f"(() => {{ const s = document.getElementById('block_k'); s.value = '{block}';"
                 " s.dispatchEvent(new Event('change')); })()")  # fmt: skip
        key, end = page.run("keysOf(step().j)")
        assert kind == "tile" and key <= first < end
        assert page.run("[step().kind, rowsOf(step().i)[0]]") == [kind, row]
        steps = made.recordings[8, int(block)].steps["forward", "queries outer"]
        assert text(page, "#counter").endswith(f"of {len(steps)}")


def test_a_click_on_the_matrix_goes_there(page, made):
    page.click("#map", (0.53, 0.55))
    kind, i, j = page.run("run().steps[view.step].slice(0, 3)")
    assert kind == "tile" and (i, j) in {(1, 1), (2, 1), (2, 2), (1, 2)}
    before = text(page, "#row-title")
    press(page, "ArrowDown")
    assert text(page, "#row-title") != before
    page.click("#tile tbody tr:last-child td:last-child")
    assert page.run("view.row") == i * 8 + 7 and page.run("view.key") == j * 8 + 7


def test_every_control_has_a_name_and_takes_the_focus(page):
    nameless = page.run(
        "[...document.querySelectorAll('button, select, input, [role=region], canvas[role=img], svg[role=img]')]"
        ".filter((e) => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim()"
        " || e.closest('label')?.textContent.trim())).map((e) => e.outerHTML)"
    )
    assert nameless == []
    order = []
    for _ in range(40):
        press(page, "Tab")
        order.append(page.run("document.activeElement.id"))
    wanted = [
        "theme",
        "block_q",
        "block_k",
        "loop",
        "first",
        "back",
        "play",
        "forth",
        "last",
        "slider",
        "speed",
    ]
    assert [name for name in order if name in wanted][: len(wanted)] == wanted
    assert {"layer", "everything", "tile-layer", "tile", "state", "row"} <= set(order)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1320, 390])
def test_text_stands_out_in_both_palettes(page, scheme, width):
    page.resize(width, 900)
    page.prefer(scheme)
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.run("document.documentElement.dataset.theme") == scheme
    page.run("go(5)")
    low = page.run("""(() => {
      const parse = (c) => c.match(/[\\d.]+/g).map(Number);
      const light = (c) => { const [r, g, b] = c.map((x) => { const s = x / 255;
        return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
        if (c.length === 3 || c[3] > 0.99) return c.slice(0, 3); } return [255, 255, 255]; };
      const found = [];
      for (const e of document.querySelectorAll('body *')) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || !e.offsetParent || e.closest('script, style, svg, .skip')) continue;
        const [a, b] = [light(parse(getComputedStyle(e).color).slice(0, 3)), light(ground(e))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) found.push([e.tagName, e.textContent.slice(0, 30), ratio]);
      }
      return found;
    })()""")
    assert low == []
    assert page.run("document.documentElement.scrollWidth") <= width
    page.resize(1320, 1000)
