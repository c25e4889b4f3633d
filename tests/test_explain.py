"""`explain`: the plan as an object."""

import json

import pytest
import torch

import tilewise as tw


def test_the_matrix_that_is_not_built():
    one = tw.explain((1, 1, 8192, 64), (1, 1, 8192, 64), (1, 1, 8192, 64), dtype=torch.bfloat16)
    many = tw.explain((1, 32, 8192, 64), (1, 8, 8192, 64), (1, 8, 8192, 64), dtype=torch.bfloat16)
    assert one.matrix_bytes_avoided == 128 * 2**20
    assert many.matrix_bytes_avoided == 4 * 2**30
    assert many.bytes_ordinary > 4 * many.matrix_bytes_avoided > many.bytes_tiled
    naive = tw.explain((1, 1, 64, 8), (1, 1, 64, 8), (1, 1, 64, 8), backend="naive")
    assert naive.backend == "naive" and naive.matrix_bytes_avoided == 0


def test_census_is_counted_by_hand_for_a_window():
    # 1024 x 1024 in tiles of 256 x 512, causal window of 100: row tiles 0 and 2 end before the next column tile.
    plan = tw.explain(
        (1, 1, 1024, 8),
        (1, 1, 1024, 8),
        (1, 1, 1024, 8),
        mask=tw.causal() & tw.window(100, 0),
        backend="blockwise",
    )
    assert (plan.schedule.block_q, plan.schedule.block_k) == (256, 512)
    # Row tiles 0 and 1 see column tile 0 only, row tile 2 (rows 512..767) reaches back to 412: both, row tile 3 only 1.
    assert plan.census == (3, 5, 0)
    assert plan.pairs == (5 * 256 * 512, 1024 * 1024)
    assert plan.flops == 2 * plan.pairs[0] * (8 + 8)


def test_a_call_of_a_million_tokens_is_counted_in_parts(monkeypatch):
    """Its tiles are too many to be classified at once: they took 9 GB."""
    from tilewise import plan as module

    sizes, classify = [], module.classify_tiles
    monkeypatch.setattr(module, "classify_tiles", lambda *a: sizes.append(classify(*a)) or sizes[-1])
    monkeypatch.setattr(module, "MOST_TILES", 1 << 12)
    shapes = ((1, 8, 2**16, 64),) * 3
    plan = tw.explain(*shapes, mask=tw.causal() & tw.window(100, 0), backend="blockwise")
    assert max(classes.numel() for classes in sizes) <= 1 << 12 and len(sizes) > 7
    rows, columns = 2**16 // plan.schedule.block_q, 2**16 // plan.schedule.block_k
    assert sum(plan.census) == rows * columns and plan.census[1] * 4 > rows and plan.census[2] == 0
    assert plan.pairs[0] == plan.census[1] * plan.schedule.block_q * plan.schedule.block_k


def test_reasons_and_refusals():
    plan = tw.explain((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4), dtype=torch.float64)
    assert plan.backend == "blockwise"
    reasons = dict(plan.candidates)
    assert "float64" in reasons["cpu"][0]
    assert reasons["blockwise"] == () and "allow_quadratic" in reasons["naive"][0]
    with pytest.raises(tw.OptionError, match="no backend 'fast'"):
        tw.explain((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4), backend="fast")
    with pytest.raises(tw.ShapeError):
        tw.explain((1, 2, 8, 4), (1, 3, 8, 4), (1, 3, 8, 4))


def test_auto_takes_the_compiled_backend_where_numba_is():
    pytest.importorskip("numba")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert tw.explain(*[(1, 2, 8, 4)] * 3, dtype=dtype).backend == "cpu"


def test_the_plan_says_what_its_backend_notes():
    pytest.importorskip("numba")
    plan = tw.explain(*[(1, 2, 64, 32)] * 3, backend="cpu")
    assert plan.schedule.notes and all(note in str(plan) for note in plan.schedule.notes)


def test_plan_prints_and_serialises():
    bias = torch.zeros(1, 2, 8, 8)
    plan = tw.explain(
        *[(1, 2, 8, 4)] * 3, mask=tw.causal(), scores=tw.bias(bias), sink=torch.zeros(2), dropout=0.1
    )
    text = str(plan)
    for word in (plan.backend, "causal", "bias", "sink", "dropout", "not built"):
        assert word in text
    assert json.loads(json.dumps(plan.to_dict()))["backend"] == plan.backend


def test_explain_reads_tensors_and_packed_calls():
    q = torch.zeros(300, 4, 16)
    plan = tw.explain(q, q, q, cu_seqlens_q=torch.tensor([0, 100, 300]), mask=tw.causal())
    assert plan.pairs[1] == 100 * 100 + 200 * 200
    assert plan.problem["batch"] == 2


def test_explain_allocates_nothing():
    plan = tw.explain((1, 64, 2**20, 128), (1, 64, 2**20, 128), (1, 64, 2**20, 128), dtype=torch.bfloat16)
    assert plan.matrix_bytes_avoided == 64 * 2 * 2**40
