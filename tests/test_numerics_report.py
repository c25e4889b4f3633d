"""The numerics report: its script at a small size, and what the recorded lines promise."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from tilewise.testing.budgets import FORWARD_FACTOR, GRADIENT_FACTOR

ROOT = Path(__file__).parents[1]
SPACING = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="needs the source tree")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("numerics", ROOT / "benchmarks" / "numerics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def within(line: dict, ordinary: dict) -> bool:
    """The rule of tilewise.testing.budgets on recorded errors, which are over the truth's root mean square."""
    factors = {"out": FORWARD_FACTOR, "dq": GRADIENT_FACTOR, "dk": GRADIENT_FACTOR, "dv": GRADIENT_FACTOR}
    return all(
        line[name]["rms"] <= factor * ordinary[name]["rms"] + SPACING[line["dtype"]]
        for name, factor in factors.items()
    )


def test_the_script_measures_every_setting(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "BASE", {"N": 24, "D": 8, "spread": 1.0, "mask": "causal"})
    monkeypatch.setattr(script, "SWEEPS", {"N": (16, 24), "spread": (1.0,), "mask": ("none", "window")})
    lines = list(script.measure(["blockwise", "ordinary", "sdpa"]))
    assert len(lines) == 3 * (5 * len(script.DTYPES) + 4)
    assert {line["section"] for line in lines} == {"N", "spread", "mask", "storage"}
    assert all(math.isfinite(line[name]["rms"]) for line in lines for name in script.NAMES)
    by_type = {
        line["dtype"]: line["out"]["rms"]
        for line in lines
        if (line["section"], line["contender"]) == ("storage", "blockwise")
    }
    assert by_type["fp32"] < by_type["fp16"] < by_type["bf16"] < by_type["fp8 e4m3"]


def test_recorded_errors_are_within_budget():
    text = (ROOT / "benchmarks" / "results" / "numerics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()][1:]
    names = ("section", "dtype", "N", "D", "spread", "mask")
    ordinary = {tuple(line[key] for key in names): line for line in lines if line["contender"] == "ordinary"}
    checked = 0
    for line in lines:
        if line["contender"] in ("blockwise", "cpu") and line["section"] != "storage":
            assert within(line, ordinary[tuple(line[key] for key in names)]), line
            checked += 1
    assert checked == 2 * 3 * 13
