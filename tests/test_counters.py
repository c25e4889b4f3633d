"""The counted bytes of device memory: how ncu's table is read, and that the model's prices meet the counters."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from tilewise.analysis.machines import find_machine
from tilewise.analysis.roofline import Shape, device_bytes

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs the source tree")


@pytest.fixture(scope="module")
def counters():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("counters", FOLDER / "counters.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


TABLE = """==PROF== Connected to process 12
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","byte","byte"
"0","12","at::spin_kernel(long)","64","0"
"1","12","forward","1,000","200"
"2","12","again","10","1"
"3","12","at::spin_kernel(long)","0","0"
"4","12","reduce_kernel","536870912","50"
"5","12","at::spin_kernel(long)","0","0"
"6","12","other","5","5"
"7","12","at::spin_kernel(long)","0","0"
"8","12","reduce_kernel","536870912","0"
"""


def test_a_case_is_what_stands_between_its_markers(counters, tmp_path):
    """A call's reads and writes, and what it left in the cache; the flush's own reads belong to nobody."""
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    cases = [{"cell": "a"}, {"cell": "b", "failed": "no such kernel"}, {"cell": "c"}]
    found = counters.split_cases(counters.read_kernels(path), cases)
    assert [case.get("counted_bytes") for case in found] == [1000 + 200 + 10 + 1 + 50, None, 10]
    assert found[0]["kernels"][0] == {"name": "forward", "read": 1000.0, "written": 200.0}
    with pytest.raises(RuntimeError, match="2 cases ran"):
        counters.split_cases(iter([]), cases)


@pytest.mark.parametrize("n, heads, heads_kv, dim, wanted", [
    (1024, 32, 32, 128, "most"), (8192, 32, 32, 128, "most"), (16384, 16, 16, 128, "most"), (1 << 16, 4, 4, 128, 1),
    (1 << 15, 32, 8, 64, "most"), (1 << 16, 32, 8, 128, "most"), (1 << 18, 32, 8, 128, 1), (1 << 17, 4, 4, 256, 1),
])  # fmt: skip
def test_triton_runs_fewer_heads_abreast_where_rows_are_so_long_that_no_cache_holds_their_keys(
    n, heads, heads_kv, dim, wanted
):
    """On an H200's 60 MiB; query heads of a group count once, since they read the same keys."""
    from tilewise.backends.triton.machine import Machine
    from tilewise.backends.triton.tiles import MOST_ABREAST, Tiles, heads_abreast
    from tilewise.problem import Options, Problem
    from tilewise.problem import Shape as Sizes
    from tilewise.spec.attention import AttentionSpec, spec_text
    from tilewise.spec.masks import Mask

    shape = Sizes(1, heads, heads_kv, n, n, dim, dim)
    problem = Problem(
        AttentionSpec.parse(spec_text(Mask(), (), False, False)), Options(), shape, torch.bfloat16, "cuda"
    )
    tiles = Tiles(64, 64, 4, 3)
    machine = Machine("cuda", 90, 232448, 132, "H200", 60 * 2**20)
    assert heads_abreast(problem, tiles, machine) == (MOST_ABREAST if wanted == "most" else wanted)
    assert heads_abreast(problem, tiles, machine._replace(cache=0)) == MOST_ABREAST


def test_keys_move_once_a_head_where_the_cache_holds_them_and_once_a_generation_elsewhere():
    """Written out by hand for 132 workers with 128 rows in flight each, and 60 MiB."""
    machine = find_machine("h200")
    shape = Shape(32, 8192, 8192, 128, 128, 64, 64, 32 * 8192 * 8192, 32 * 128 * 8192, 2, "bfloat16")
    rows, keys = 32 * 8192 * (256 * 2 + 4), 32 * 8192 * 256 * 2
    assert device_bytes(shape, machine) == rows + keys
    # Eight heads' keys are 32 MiB, more than half of the cache: 8 * 8192 rows are 3.88 generations.
    beyond = device_bytes(shape._replace(heads_abreast=8), machine)
    assert beyond == pytest.approx(rows + keys * 8 * 8192 / (132 * 128), rel=1e-6)
    nothing = machine.with_changes(cache_bytes=None)
    assert device_bytes(shape, nothing) == rows + keys * 128  # each of the 128 tiles of a head reads its own


LINES = FOLDER / "results" / "counters.jsonl"


def counted(kind):
    """Lines of the results that have a `shape` (our kernels) or `bytes_ordinary`."""
    lines = [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "counted_bytes" in line and line["which"] == "forward" and kind in line]


def test_predicted_bytes_of_our_kernels_are_within_15_percent_of_the_counters():
    """Wherever the keys of the heads that ran abreast fit the cache: beyond it tiles drift apart."""
    found, machine = {}, find_machine("h200")
    for line in counted("shape"):
        shape = Shape(**line["shape"])
        keys = shape.heads_abreast * shape.seqlen_k * (shape.head_dim + shape.head_dim_v) * shape.itemsize
        if keys <= machine.cache_bytes.value:
            found[line["cell"], line["contender"]] = device_bytes(shape, machine) / line["counted_bytes"]
    assert len({cell for cell, _ in found}) >= 5 and all(0.85 < ratio < 1.15 for ratio in found.values()), (
        found
    )


def test_ordinary_attention_moves_its_matrix_four_times():
    found = [line["bytes_ordinary"] / line["counted_bytes"] for line in counted("bytes_ordinary")]
    assert len(found) >= 3 and all(0.85 < ratio < 1.15 for ratio in found)
