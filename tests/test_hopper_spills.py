"""Registers of the Hopper forward: kinds of calls that want many things at once compile without spills, what a binary
says of its spills is what the assembler says, and a kernel that spills gives way to roomier tiles."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw

triton = pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="needs Gluon")

from tilewise.backends.hopper import roomier, wants  # noqa: E402
from tilewise.backends.hopper.backend import Hopper  # noqa: E402
from tilewise.backends.hopper.launch_forward import schedule  # noqa: E402
from tilewise.backends.hopper.spills import spilled  # noqa: E402
from tilewise.backends.hopper.tiles import (  # noqa: E402
    HALVED,
    PAIRS,
    ROOMY,
    SHARED,
    choose,
    default,
    of_numbers,
    shared_bytes,
)
from tilewise.backends.triton.machine import Machine  # noqa: E402
from tilewise.problem import Options, Problem, Shape  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "hopper_kinds.py"
pytestmark = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) != (3, 6) or not SCRIPT.exists(),
    reason="kernels are held to Triton 3.6; needs the source tree",
)
MANY = (
    ((64, 64), "sequences", "softcap"),
    ((64, 64), "dense", "softcap, in a window"),
    ((64, 64), "heads", "softcap, alibi"),
    ((96, 96), "sequences", "alibi, in a window"),
    ((128, 128), "sequences", "narrow stripes"),
    ((128, 128), "sequences", "documents"),
    ((128, 128), "heads", "softcap, alibi"),
    ((128, 128), "sequences", "softcap, in a window"),
    ((192, 128), "dense", "documents and stripes"),
    ((256, 256), "heads", "softcap, alibi, documents"),
)
"""Kinds that spilled 12 to 220 bytes with the tiles of their head dimension."""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("hopper_kinds", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hopper_kinds"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def without_table(monkeypatch):
    """Tiles by the rules of registers, as of a kind that the table lacks."""
    from tilewise.backends.hopper import tiles

    monkeypatch.setattr(tiles, "known", lambda *of: None)
    monkeypatch.setattr(tiles, "finer", lambda *of: False)
    schedule.cache_clear()
    yield
    schedule.cache_clear()


def _holds(found) -> None:
    """Nothing spilled, at the first attempt."""
    assert found.spilled == found.serialised == 0
    assert len(found.tried) == 1
    assert found.shared <= SHARED


@pytest.mark.parametrize("pair, form, kind", MANY, ids=lambda x: str(x))
def test_many_things_at_once_keep_their_registers(script, pair, form, kind):
    _holds(script.compiled(pair, form, kind))


@pytest.mark.slow
@pytest.mark.parametrize("form", ("dense", "heads", "sequences"))
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_kinds_of_the_table_keep_their_registers(script, pair, form):
    """Some of each; `benchmarks/hopper_kinds.py` compiles all, in about an hour."""
    at = 7 * PAIRS.index(pair) + ("dense", "heads", "sequences").index(form)
    for kind in list(script.kinds(script.FORMS[form]))[at % 19 :: 19]:
        _holds(script.compiled(pair, form, kind))


def _keys(script, pair, form, mask, scores, **options) -> int:
    """Keys of a block that a call's tiles have."""
    if isinstance(form, str):
        form = script.FORMS[form]
    problem, _ = script.laid_out(pair, form, mask, scores)
    problem = replace(problem, options=replace(problem.options, **options))
    return choose(problem, pair, Machine(*script.MACHINE)).block_n


@pytest.mark.parametrize("pair", HALVED, ids=str)
def test_blocks_have_half_the_keys_where_that_is_faster(script, pair):
    """A table of relative positions, wide stripes that meet something else, short packed sequences."""
    packed, dense = script.FORMS["sequences"], script.FORMS["dense"]
    for form in (packed, dense):
        kinds = script.kinds(form)
        for kind in (
            "relative",
            "relative, all pairs",
            "alibi, stripes",
            "documents and stripes",
            "much at once",
        ):
            assert _keys(script, pair, form, *kinds[kind]) == 64, kind
        for kind in ("bias", "bias, documents", "alibi", "causal", "stripes"):
            assert _keys(script, pair, form, *kinds[kind]) == 128, kind
    assert _keys(script, pair, packed, *script.kinds(packed)["bias, stripes"]) == 64
    assert _keys(script, pair, dense, *script.kinds(dense)["bias, stripes"]) == 128


@pytest.mark.parametrize("pair", HALVED, ids=str)
def test_short_packed_sequences_have_half_the_keys_a_block(script, pair):
    short = script.FORMS["sequences"]
    long = short._replace(rows=16400, keys=16400)
    causal, full = script.kinds(short)["exp2"], (None, script.kinds(short)["exp2"][1])
    assert _keys(script, pair, short, *causal) == 64
    assert _keys(script, pair, long, *causal) == 128
    assert _keys(script, pair, short, *full) == 128
    # Otherwise a sequence's bits would depend on how long its neighbours are.
    assert _keys(script, pair, short, *causal, batch_invariant=True) == 128


def test_few_bytes_cost_no_keys_of_a_block(script, without_table):
    found = script.compiled((256, 256), "dense", "softcap, stripes")
    assert found.tried[0] > found.spilled == 0
    assert found.tiles[:3] == default((256, 256), _problem().spec)[:3]


def test_a_binary_says_what_it_spills(script, monkeypatch, without_table):
    """The first tiles of a kind that is known to spill, and roomier ones."""
    found = script.compiled((128, 128), "heads", "much at once")
    assert found.tried[0] > 0 == found.tried[-1] == found.spilled
    monkeypatch.setattr(roomier, "instead", lambda pair, tiles, least: ())
    again = script.compiled((128, 128), "heads", "much at once")
    assert again.spilled > 0 and again.tried == found.tried[:1]


@pytest.mark.parametrize(
    "binary", [b"", b"\x7fELF\x02", b"no file of this form" * 10, b"\x7fELF\x02" + bytes(100)]
)
def test_another_binary_spills_nothing(binary):
    assert spilled(binary) == 0


def _recipe(tiles, spills, again=None):
    run = SimpleNamespace(spilled=spills)
    return SimpleNamespace(
        run=run, again=None if again is None else SimpleNamespace(spilled=again), pair=(128, 128), tiles=tiles
    )


def _problem(mask=None, scores=()) -> Problem:
    from hopper_compile import spec_of

    spec, _ = spec_of(mask, scores)
    return Problem(spec, Options(), Shape(4, 16, 16, 4096, 4096, 128, 128), torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    "spills, again, chosen, tries",
    [
        ((0, 9), None, 0, 1), ((4, 0, 9), None, 1, 2), ((4, 8, 0), None, 2, 3), ((16, 8, 12, 20, 9), None, 1, 5),
        ((4, 4, 4, 4, 4), None, 0, 5), ((0, 0), (8, 0), 1, 2),
    ],
)  # fmt: skip
def test_the_first_tiles_without_spills_are_taken_or_those_with_fewest(
    monkeypatch, spills, again, chosen, tries
):
    monkeypatch.setattr(roomier, "_settled", {})
    problem, first = _problem(tw.causal()), default((128, 128), _problem(tw.causal()).spec)
    others = (first._replace(fresh=True), *ROOMY[128, 128])
    assert roomier.instead((128, 128), first, 4) == others
    assert roomier.instead((128, 128), first, 400) == others[1:]
    assert roomier.instead((128, 128), others[1], 400) == others[2:]
    asked = []

    def make(tiles):
        asked.append(tiles)
        n = len(asked) - 1
        return _recipe(tiles or first, spills[n], again and again[n])

    found = roomier.least_spilled(make, problem)
    assert found.tiles == (first, *others)[chosen]
    assert asked == [None, *others][:tries]
    assert roomier.settled(problem) == (None if chosen == 0 else found.tiles)


def test_tiles_of_the_table_are_those_found_without_it(script, without_table):
    found = script.compiled((128, 128), "heads", "softcap, alibi")
    assert len(found.tried) > 1
    assert wants.table()[found.key] == tuple(map(int, found.tiles))


def test_the_table_holds_tiles_that_fit():
    choices = wants.table()
    assert len(choices) > 100
    for key, numbers in choices.items():
        pair, tiles = tuple(map(int, key.partition(" ")[0].split("x"))), of_numbers(numbers)
        assert shared_bytes(tiles, pair) <= SHARED
        assert tiles in ROOMY[pair] or tiles.fresh


def test_findings_are_kept_in_the_table(script, tmp_path, monkeypatch):
    """Of two findings of a key the later attempt; kinds that took one attempt are not written."""
    path = tmp_path / "table.json"
    path.write_text('{"target": "any", "choices": {"old": [1, 2], "b": [3, 4]}}')
    monkeypatch.setattr(wants, "TABLE", path)
    lines = [
        ("a", [9, 0], [5, 6]),
        ("a", [9, 9, 0], [7, 8]),
        ("a", [9, 0], [5, 6]),
        ("c", [0], [1, 1]),
        ("b", [4, 0], [9, 9]),
    ]
    found = tmp_path / "found.jsonl"
    found.write_text("".join(json.dumps({"key": k, "tried": t, "tiles": x}) + "\n" for k, t, x in lines))
    script.keep([found])
    table = json.loads(path.read_text())
    assert table == {"target": "any", "choices": {"a": [7, 8], "b": [9, 9], "old": [1, 2]}}


@pytest.mark.parametrize("other", ("form", "pair", "mask", "score"))
def test_kinds_that_differ_have_other_keys(other):
    def key(mask, score=(), pair=(128, 128), **form):
        return wants.key_of(_problem(mask, score).spec, pair, wants.Form(**form))

    causal = tw.causal()
    plain = key(causal)
    others = {
        "form": [key(causal, varlen=True), key(causal, heads=True), key(causal, varlen=True, heads=True)]
        + [key(causal, parts=True), key(causal, half=True)],
        "pair": [key(causal, pair=(64, 64)), key(causal, pair=(192, 128))],
        "mask": [key(None), key(causal & tw.window(500, 0)), key(causal & tw.custom(lambda q, k: (q - k) % 7 < 3))],
        "score": [key(causal, tw.softcap(30.0)), key(causal, tw.alibi(torch.ones(16)))],
    }[other]  # fmt: skip
    assert len({plain, *others}) == 1 + len(others)
    assert key(causal & tw.window(500, 0)) == key(causal & tw.window(400, 0))
    assert key(causal, tw.softcap(30.0)) == key(causal, tw.softcap(50.0))


def test_a_call_without_a_recipe_has_none():
    assert roomier.least_spilled(lambda tiles: None, _problem()) is None


def test_explain_tells_of_roomier_tiles(monkeypatch):
    monkeypatch.setattr(roomier, "_settled", {})
    problem = _problem(tw.causal())
    plain, first = Hopper().plan(problem), default((128, 128), problem.spec)
    tiles = ROOMY[128, 128][0]
    roomier.least_spilled(lambda t: _recipe(t or first, 0 if t == tiles else 8), problem)
    plan = Hopper().plan(problem)
    assert (plain.block_k, plan.block_k) == (128, 64)
    assert any("roomier" in note for note in plan.notes) and not any("roomier" in n for n in plain.notes)
    machine = Machine("cuda", 90, SHARED, 132)
    assert schedule(problem, machine).tiles.block_n == 128


def test_roomier_tiles_fit_and_share_out_all_registers():
    for pair, many in ROOMY.items():
        for tiles in many:
            assert shared_bytes(tiles, pair) <= SHARED
            assert 4 * (tiles.warpgroups * tiles.worker + tiles.loader) <= 4 * 3 * tiles.limit
