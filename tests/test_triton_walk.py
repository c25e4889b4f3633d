"""How the Triton forward walks its tiles, looked for by a kernel before it or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_triton_forward import _problem
from versions import needs_triton

import tilewise as tw

pytestmark = needs_triton

RUN = """
import json, sys
import torch
sys.path.insert(0, "tests")
import triton_interpreter
triton_interpreter.repair()
import tilewise as tw
from tilewise.backends.triton import launch_forward
launch_forward.TMA_WORK = 0.0
found = {}
def apart(name, call, *args, **options):
    ran = [call(*args, backend=backend, **options).float() for backend in ("triton", "blockwise")]
    found[name] = float((ran[0] - ran[1]).abs().max())
by_head = torch.randint(0, 100, (2, 140)).int()
by_head[1, :128] = 0
back = torch.stack([torch.arange(140) // 50 % 2, torch.arange(140) // 23]).int()
q, k = (torch.randn(2, 2, 140, 40).half() for _ in range(2))
packed = [t[0].transpose(0, 1) for t in (q, k, k)]
edges = torch.tensor([0, 70, 70, 140]).int()
within = tw.causal() & tw.document(back[:1].expand(3, -1))
apart("packed", tw.attention_varlen, *packed, edges, edges, mask=within)
k = k.clone()
k[:, :, 10] = float("nan")
hidden = tw.custom(lambda k: k != 10)
apart("documents that come back", tw.attention, q, k, k, mask=hidden & tw.document(back))
apart("causal documents", tw.attention, q, k, k, mask=hidden & tw.causal() & tw.document(back[1:]))
apart("heads apart", tw.attention, q, k, k,
      mask=hidden & tw.custom(lambda h, j, leaf: leaf[h, j] > 50, by_head) & tw.window(60, 60))
assert len(launch_forward._recipes) == 4
assert all(recipe.before is not None for recipe in launch_forward._recipes.values())
lowest = torch.randn(1, 2, 140, 140)
lowest[..., :70] = torch.finfo(torch.float32).min  # tiles of nothing else, then others
lowest[:, :, 30:33] = torch.finfo(torch.float32).min
lowest[:, :, 100], lowest[:, 1, 5] = -2e38, -float("inf")
apart("as low as numbers are", tw.attention, q, q, q, scores=(tw.bias(lowest),), sink=torch.randn(2))
q = torch.randn(1, 2, 140, 72).half()
apart("a bias that leaves room", tw.attention, q, q, q, scores=(tw.bias(lowest.clamp(-9.0).half()),), mask=tw.causal())
assert [recipe.tiles.loop for recipe in launch_forward._recipes.values()][-2:] == ["plain", "held"]
q, k = torch.randn(2, 4, 140, 72).half(), torch.randn(2, 2, 136, 72).half()
leaf = torch.randn(2, 4, 150, 144).half()
added = tw.custom_score(lambda s, i, j, leaf: s + leaf[i, j], leaf[1, 2, :140, :136])
not_one = tw.custom(lambda j, ids: ids[j] != 1, back[1, :136])
wide = tw.custom_score(lambda s, h, i, j, leaf: s + leaf[h, i, j], leaf[0, :1, :140, :136].expand(4, -1, -1))
for name, term, mask, slots in (
    ("a bias by descriptors", tw.bias(leaf[:, :, :140, :136]), None, (0,)),
    ("rows apart", tw.bias(torch.randn(1, 1, 280, 136).half()[:, :, ::2]), tw.window(70, 3), (0,)),
    ("beside a mask's leaf", tw.bias(leaf[:1, :, :140, :136]), tw.causal() & not_one, (1,)),
    ("after a softcap", (tw.softcap(9.0), added), tw.causal(), (0,)),
    ("one for all heads", wide, None, ()),
    ("full precision", tw.bias(leaf[:, :, :140, :136].float()), None, ()),
):
    apart(name, tw.attention, q, k, k, mask=mask, scores=term)
    recipe = list(launch_forward._recipes.values())[-1]
    assert recipe.slots.described == slots, name
    assert (recipe.before is not None) == ("leaf" in name)
q = torch.randn(1, 2, 140, 72).half()
before = len(launch_forward._recipes)
def striped(by):
    return tw.causal() & tw.custom(lambda q, k: (q - k) % by < by // 2)
for by in (4, 12):
    apart(f"stripes of {by}", tw.attention, q, q, q, mask=striped(by))
apart("packed stripes", tw.attention_varlen, *packed, edges, edges, mask=striped(7))
apart("stripes of documents", tw.attention, q, q, q, mask=striped(5) & tw.document(back[1:]))
holed = list(launch_forward._recipes.values())[before:]
assert [dict(recipe.run.constants)["HOLES"] for recipe in holed] == 4 * [True]
assert [recipe.tiles.lazy for recipe in holed] == [True, True, False, False]
apart("hidden blocks", tw.attention, q, q, q, mask=tw.custom(lambda k: (k // 64) % 2 == 1))
assert not dict(list(launch_forward._recipes.values())[-1].run.constants)["HOLES"]
dirty = q.clone()
dirty[:, :, 3::5] = float("nan")
apart("a NaN in a hole", tw.attention, q, dirty, dirty, mask=striped(10**6) & tw.custom(lambda k: k % 5 != 3))
print(json.dumps(found))
"""
CASES = ("packed", "documents that come back", "causal documents", "heads apart")
LEAVES = (
    "a bias by descriptors", "rows apart", "beside a mask's leaf", "after a softcap", "one for all heads",
    "full precision",
)  # fmt: skip
HOLES = (
    "stripes of 4", "stripes of 12", "packed stripes", "stripes of documents", "hidden blocks", "a NaN in a hole",
)  # fmt: skip
TERMS = ("as low as numbers are", "a bias that leaves room")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    """The largest difference to the reference, by case."""
    root = Path(__file__).parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_runs_that_were_looked_for_before_are_those_of_the_mask(name, interpreted):
    """By descriptors, with leaves that a mask reads: in any order, with a NaN where nobody looks."""
    assert interpreted[name] < 1e-2


@pytest.mark.parametrize("name", LEAVES)
def test_elements_for_each_pair_come_by_descriptors(name, interpreted):
    """Those of two bytes, of contiguous rows; others by ordinary loads."""
    assert interpreted[name] < 1e-2


@pytest.mark.parametrize("name", HOLES)
def test_holes_are_cut_out_of_every_tile(name, interpreted):
    """Short periods that a function captures have kernels of their own; what hides whole tiles is no hole."""
    assert interpreted[name] < 1e-2


@pytest.mark.parametrize("name", TERMS)
def test_what_is_added_to_scores_may_be_as_low_as_numbers_are(name, interpreted):
    """Rows of nothing but the lowest number see every key alike, as on the reference."""
    assert interpreted[name] < 1e-2


@pytest.mark.parametrize("rows, work, stages", [(1, 0.0, 3), (256, 0.0, 3), (1, 1e18, 3), (256, 1e18, 2)])
def test_two_programs_share_a_multiprocessor_of_hopper_whichever_way_keys_come(
    rows, work, stages, monkeypatch
):
    """A bias per pair and q take the room of the third stage where q is in shared memory, as without descriptors."""
    from tilewise.backends.triton import launch_forward
    from tilewise.backends.triton.machine import Machine

    wanted = []
    monkeypatch.setattr(launch_forward, "TMA_WORK", work)
    monkeypatch.setattr(launch_forward, "machine_of", lambda device: Machine("cuda", 90, 232448, 132))
    monkeypatch.setattr(
        launch_forward, "kernel_launchers", lambda made: wanted.extend(made) or [None] * len(made)
    )
    tensors = [torch.zeros(8, 16, 256, 128, dtype=torch.bfloat16) for _ in range(3)]
    problem, inputs = _problem(None, (tw.bias(torch.zeros(1, 1, rows, 256, dtype=torch.bfloat16)),), tensors)
    launch_forward.make_recipe(problem, inputs, launch_forward.slots_of(problem, inputs))
    build = wanted[0].build
    assert (build.stages, dict(build.constants)["LOOP"]) == (stages, "plain" if work else "held")
    assert wanted[0].slots.described == ((0,) if rows > 1 and not work else ())
