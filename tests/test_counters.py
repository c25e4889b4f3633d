"""The counted bytes of device memory: how ncu's table is read, and that the model's prices meet the counters."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

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
