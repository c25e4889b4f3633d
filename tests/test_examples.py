"""The examples run at a small size and find what they claim."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import tilewise

FOLDER = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs the source tree")


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tilewise.config, "slow", "quiet")


def test_gpt_learns_and_its_curve_is_that_of_sdpa(tmp_path, capsys):
    """Two seeds of 25 steps: the two attentions' curves lie a thousand times closer than two seeds' do."""
    pytest.importorskip("matplotlib")
    small = {
        "steps": 25,
        "batch": 4,
        "context": 48,
        "width": 32,
        "layers": 1,
        "seeds": 2,
        "sample": 12,
        "rate": 0.01,
    }
    given = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    module = load("gpt")
    found = module.main([*given, "--backend", "blockwise", "--plot", str(tmp_path / "loss.png")])
    assert found["attention_gap"] < 1e-3 * found["seed_gap"]
    losses = found["tilewise"]["losses"][0]
    assert losses[-1] < losses[0] - 0.5
    assert len(found["sample"]) == len("Return ") + 12
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert "tokens/s" in capsys.readouterr().out


def test_t5_table_is_found():
    found = load("t5_bias").main(["--steps", "120", "--length", "64", "--backend", "blockwise"])
    assert found["last"] < 1e-3 * found["first"] and found["error"] < 0.03


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("pair_bias", ["--rows", "4", "--length", "24"]),
        ("swin", ["--size", "14"]),
        ("packed", ["--lengths", "40", "3", "1", "22"]),
        ("custom_mask", ["--length", "96"]),
    ],
)
def test_against_ordinary_attention(name, given, capsys):
    found = load(name).main([*given, "--backend", "blockwise"])
    shares = {"useful_tokens", "skipped_tiles", "skipped"}
    assert all(value < 1e-11 for key, value in found.items() if key not in shares)
    assert all(0 <= value <= 1 for key, value in found.items() if key in shares)
    assert capsys.readouterr().out


def test_every_example_has_a_page_entry_and_a_docstring():
    page = (FOLDER.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"examples/{name}.py" in page
        assert f"python examples/{name}.py" in load(name).__doc__


def test_the_rates_on_the_page_are_those_of_the_results():
    """The GPT's line of a quiet machine: tokens per second of both, and how far curves lie apart."""
    path = FOLDER.parent / "benchmarks" / "results" / "gpt.jsonl"
    page = (FOLDER.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cpu = [line for line in lines if line["options"]["device"] == "cpu"]
    assert cpu
    for kind in ("tilewise", "sdpa"):
        assert f"{cpu[-1][kind]['tokens_per_second']:,.0f}".replace(",", " ") in page
    assert all(line["attention_gap"] < 1e-3 * line["seed_gap"] for line in cpu)
