"""The measured pages say what the results say."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from versions import needs_triton

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="needs the source tree")


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location(
        "performance_pages", ROOT / "tools" / "performance_pages.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_triton  # whose plans a table tells
def test_pages_equal_what_the_results_render(pages):
    for name in pages.PAGES:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert text == pages.render(text), (
            f"docs/{name} differs from benchmarks/results: tools/performance_pages.py"
        )


def test_every_table_stands_on_a_page(pages):
    texts = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in pages.PAGES)
    marked = re.findall(r"<!-- table: ([\w-]+) -->", texts)
    assert sorted(marked) == sorted(pages.TABLES)


def test_a_changed_result_is_a_changed_page(pages, tmp_path, monkeypatch):
    for path in pages.RESULTS.glob("*.jsonl"):
        (tmp_path / path.name).write_text(path.read_text())
    line = {"section": "forward", "library": "cuDNN", "dtype": "bf16", "B": 1, "H": 4, "H_kv": 4, "N": 64, "D": 64,
            "causal": True, "cold_tflops": 123, "hot_tflops": 123}  # fmt: skip
    with (tmp_path / "gpu_peers.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "bf16, D 64, N 64, H 4, causal | **123** |" in pages.render(text)
    cell = {
        "cell": "D64-full",
        "which": "forward",
        "section": "long",
        "contenders": {"ours": {"cold_tflops": 7.5}},
    }
    (tmp_path / "gpu.jsonl").write_text(json.dumps(cell))
    assert "| D64-full, forward | 7.5 |" in pages.render(text)
    (tmp_path / "gpu.jsonl").unlink()
    (tmp_path / "cpu.jsonl").unlink()
    assert pages.render(text).count("Not measured yet.") == 8


def test_numbers_of_libraries_page_are_those_of_the_results():
    """The four rows of speed on the page of libraries."""
    text = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
    lines = [
        json.loads(line) for line in (ROOT / "benchmarks/results/gpu_peers.jsonl").read_text().splitlines()
    ]
    rows = re.findall(r"^\| (\w+), d = (\d+), N = (\d+), (\w+) \| (.+) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 4
    for way, dim, length, mask, numbers in rows:
        found = {
            line["library"]: str(line["cold_tflops"]) for line in lines
            if (line["section"], line.get("D"), line.get("N"), line.get("H") == line.get("H_kv"))
            == (way, int(dim), int(length), True) and line["causal"] == (mask == "causal")
        }  # fmt: skip
        names = ("cuDNN", "FlashAttention-2", "FlashAttention-3", "FlashAttention-4")
        assert [found.get(name, "not run") for name in names] == numbers.split(" | ")
