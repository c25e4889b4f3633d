"""The roofline: work written out by hand, rates with sources, and what bounds which problem."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise.analysis.machines import MACHINES, Number, find_machine, machine_here, match_machine
from tilewise.analysis.roofline import ROOFS, Shape, predict_time, what_if, work_of

ROOT = Path(__file__).parents[1]
TILE = Shape(1, 128, 128, 128, 128, 128, 128, 128 * 128, 128, 2, "bfloat16")


def cycles(shape: Shape, machine) -> list[float]:
    """Clocks of one SM for each roof but memory, from 8192 FLOP, 16 exponentials and 128 bytes a clock."""
    work = work_of(shape, machine)
    return [work.matrix / 8192, work.exponentials / 16, work.on_chip / 128]


def test_one_tile_in_clocks():
    # 128 x 128 x 128 forward: 1024 clocks of products, 1024 of exponentials, 768 of shared memory.
    assert cycles(TILE, find_machine("b200")) == [1024, 1024, 768]
    backward = cycles(TILE._replace(backward=True), find_machine("b200"))
    assert backward == [
        2560,
        1024,
        2560,
    ]  # products: five of 512; ten tiles of 32 KiB, without dq's own way out


def test_work_by_hand():
    shape = Shape(2, 4, 6, 8, 16, 2, 3, 48, 24, 2, "bfloat16")
    machine = find_machine("h200")
    work = work_of(shape, machine)
    assert (work.matrix, work.exponentials) == (48 * 2 * 24, 48)
    assert work.on_chip == 48 / 6 * (2 * 8 + 3 * 24) * 2
    # q, out and lse once; k and v once a head, since they fit the shared cache.
    assert work.memory == 2 * 4 * (24 * 2 + 4) + 2 * 6 * 24 * 2
    nothing = machine.with_changes(cache_bytes=None)
    assert work_of(shape, nothing).memory == 2 * 4 * (24 * 2 + 4) + 24 * 24 * 2
    cpu = find_machine("zen4")
    assert work_of(shape, cpu).on_chip == work.on_chip + 48 / 6 * 4 * 6 * 4


def test_bound_is_the_slowest_known_roof():
    machine = find_machine("h200")
    work = work_of(TILE, machine)
    known = predict_time(work, "bfloat16", machine)
    assert known.seconds == max(known.roofs) and known.bound == ROOFS[known.roofs.index(known.seconds)]
    assert known.seconds_apart == pytest.approx(sum(known.roofs)) and known.unknown == ()
    missing = predict_time(work, "bfloat16", find_machine("mi300x"))
    assert missing.unknown == ("exponentials",) and missing.roofs[1] is None


def test_long_rows_are_bound_by_arithmetic_and_one_query_by_memory():
    sizes = {"dtype": torch.bfloat16, "device": "cuda", "backend": "blockwise", "machine": "h200"}
    prefill = tw.explain((1, 32, 8192, 128), (1, 8, 8192, 128), (1, 8, 8192, 128), **sizes)
    decode = tw.explain((8, 32, 1, 128), (8, 8, 32768, 128), (8, 8, 32768, 128), **sizes)
    assert prefill.bound == "matrix units" and decode.bound == "device memory"
    # Decoding reads K and V once: 4.8 TB/s.
    assert decode.predicted_s == pytest.approx(2 * 8 * 8 * 32768 * 128 * 2 / 4.8e12, rel=0.01)
    assert "device memory, at least" in str(decode)
    assert json.loads(json.dumps(decode.to_dict()))["bound"] == "device memory"


def test_exponentials_bound_small_heads_on_blackwell():
    sizes = {"dtype": torch.bfloat16, "device": "cuda", "backend": "blockwise", "machine": "b200"}
    plan = tw.explain(*[(1, 32, 8192, 64)] * 3, **sizes)
    assert plan.bound == "exponentials"
    changes = {one.change: one.prediction for one in what_if(plan.shape, find_machine("b200"))}
    assert changes["half the exponentials"].seconds == pytest.approx(plan.predicted_s / 2, rel=0.01)


def test_what_if():
    shape = TILE._replace(seqlen_q=8192, seqlen_k=8192, pairs=8192**2, key_rows=64 * 8192)
    machine = find_machine("h100").with_changes(cache_bytes=None, memory=Number(1e11, "a slow memory"))
    before = predict_time(work_of(shape, machine), "bfloat16", machine)
    changes = {one.change: one.prediction for one in what_if(shape, machine)}
    assert before.bound == "device memory"
    assert changes["twice the tile memory"].seconds == pytest.approx(before.seconds / 2, rel=0.05)
    assert changes["FP8"].seconds == pytest.approx(before.seconds / 2, rel=0.05)
    assert "FP8" not in {one.change for one in what_if(shape, find_machine("a100"))}


def test_no_machine_no_prediction(monkeypatch):
    monkeypatch.setattr("tilewise.plan.machine_here", lambda kind: None)
    plan = tw.explain(*[(1, 2, 64, 16)] * 3)
    assert (plan.machine, plan.bound, plan.predicted_s, plan.roofs) == (None, None, None, ())
    naive = tw.explain(*[(1, 2, 64, 16)] * 3, backend="naive", machine="zen3")
    assert naive.machine == "zen3" and naive.predicted_s is None
    for backend in ("auto", "naive"):
        with pytest.raises(tw.OptionError, match="there is no machine 'h300'"):
            tw.explain(*[(1, 2, 64, 16)] * 3, machine="h300", backend=backend)


def test_packed_and_empty_calls_are_priced_too():
    q = torch.zeros(300, 4, 16)
    packed = tw.explain(
        q, q, q, cu_seqlens_q=torch.tensor([0, 100, 300]), backend="blockwise", machine="zen3"
    )
    # 100 + 200 rows, in tiles of 256 x 512 clipped to the sequences: 4 D FLOP a pair on 166.6 GFLOP/s.
    assert packed.roofs[0] == pytest.approx((100**2 + 200**2) * 4 * 4 * 16 / 166.6e9)
    empty = tw.explain((1, 2, 64, 16), (1, 2, 0, 16), (1, 2, 0, 16), backend="blockwise", machine="zen3")
    assert empty.predicted_s is None and empty.shape is None
    wide = tw.explain(*[(1, 2, 64, 16)] * 3, dtype=torch.float64, backend="blockwise", machine="zen3")
    assert wide.predicted_s is None  # no source states a rate for float64


def numbers(machine) -> list[Number]:
    named = [machine.exponentials, machine.on_chip, machine.memory, machine.tile_bytes, machine.cache_bytes]
    return [one for one in (*machine.matrix.values(), *named) if one is not None]


@pytest.mark.parametrize("name", MACHINES)
def test_every_number_has_a_source(name):
    for number in numbers(MACHINES[name]):
        assert number.value > 0 and len(number.source) > 10
        assert number.kind in ("vendor", "derived", "measured")
        for file in re.findall(r"benchmarks/results/\w+\.jsonl", number.source):
            assert (ROOT / file).exists() or not (ROOT / "benchmarks").exists()


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="needs the source tree")
def test_measured_numbers_stand_in_their_file():
    lines = [
        json.loads(line) for line in (ROOT / "benchmarks/results/machines.jsonl").read_text().splitlines()
    ]
    mine = next(line for line in lines if line["name"] == "zen3")
    machine = MACHINES["zen3"]
    assert machine.matrix["float32"].value == mine["fma_gflops_2"] * 1e9
    assert machine.exponentials.value == mine["exp_gelem_2"] * 1e9
    assert machine.on_chip.value == mine["cache_gbytes_2"] * 1e9
    reads = [line["read_gbytes"] for line in lines if line["name"] == "zen3"]
    assert round(max(reads), 1) * 1e9 == pytest.approx(machine.memory.value)
    zen4 = next(line for line in lines if line["name"] == "zen4")
    low, high = zen4["fma_gflops_2"]
    assert low * 1e9 <= MACHINES["zen4"].matrix["float32"].value <= high * 1e9


def test_machines_are_known_by_their_names(monkeypatch):
    assert match_machine("NVIDIA H200") == "h200" and match_machine("NVIDIA A100-SXM4-80GB") == "a100"
    assert match_machine("AMD EPYC AVX2") == "zen3" and match_machine("AMD EPYC AVX512") == "zen4"
    assert match_machine("Cray-1") is None
    monkeypatch.setattr("tilewise.analysis.machines.processor_name", lambda: "AMD EPYC")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    for cores, name in ((2, "zen3"), (64, None)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert machine_here("cpu") == name
    assert machine_here("mps") is None
