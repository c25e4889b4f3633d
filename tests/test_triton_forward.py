"""The Triton backend's forward without a GPU: kernels compile for every target, and Triton's interpreter runs them.

The interpreter has to be chosen before a kernel is imported, so those cases run in a process of their own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from versions import needs_triton

import tilewise as tw
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.masks import as_mask
from tilewise.spec.scores import as_terms

pytestmark = needs_triton

INTERPRETED = (
    "plain-fp32",
    "sink-nothing_visible",
    "head_dims-65_1",
    "layout-sliced-bf16",
    "poison-document",
    "packed-used_q",
    "packed-dropout",
    "size-decode-1x257-gqa",
    "cross-custom-alibi-nosink-keep-gqa-fp16-1x37-odd",
)
RUN = """
import json, sys
import torch
sys.path.insert(0, "tests")
import triton_interpreter
triton_interpreter.repair()
from tilewise.testing.cases import find_case
from tilewise.testing.conformance import call, compare, expected, prepare
found = {}
for name in sys.argv[1:]:
    case = find_case(name)
    values, truth, ordinary = expected(case)
    with torch.no_grad():
        out, lse = call(case, prepare(case, values), "triton")
    found[name] = [compare(n, t, ordinary[n], truth[n]).ratio for n, t in (("out", out), ("lse", lse))]
import tilewise as tw
def apart(q, k, **options):
    ran = [tw.attention(q, k, k, backend=name, **options).float() for name in ("triton", "blockwise")]
    return float((ran[0] - ran[1]).abs().max())
q, k, v = (torch.randn(1, 2, 70, 16).half() for _ in range(3))
hidden = (torch.arange(70) % 3 == 1)[None, None, None]
clean = tw.attention(q, k, v, mask=tw.causal() & ~tw.dense(hidden), backend="triton")
k[..., hidden[0, 0, 0], :] = v[..., hidden[0, 0, 0], :] = float("nan")
same = tw.attention(q, k, v, mask=tw.causal() & ~tw.dense(hidden), backend="triton")
v[0, 0, 60, 3] = float("inf")
seen = ~tw.attention(q, k, v, mask=tw.causal() & ~tw.dense(hidden), backend="triton")[0].isfinite()
wanted = torch.zeros_like(seen)
wanted[0, 60:, 3] = True
found["again"] = [float((clean - same).abs().max()), float(not torch.equal(seen, wanted))]
parts = tw.custom(lambda q, k: ((q - k) % 4 < 2) & ((q - 50) // 8 != k // 4))
found["shifts"] = [apart(*(torch.randn(1, 2, 70, 16).half() for _ in range(2)), mask=parts)]
from tilewise.backends.triton import launch_forward
launch_forward.TMA_WORK = 0.0
ids = (torch.arange(300) // 70)[None].to(torch.int32)
q, k = (torch.randn(1, 4, 300, 16).half() for _ in range(2))
gap = tw.causal() & (tw.window(64, 0) | tw.prefix(70))
bias = tw.bias(torch.randn(1, 4, 300, 300).half())
found["divisors"] = []
for by in (1, 2, 3, 7, 64, 1000, 2**30, 2**31 - 1, 0, -1, -5):
    parts = tw.custom(lambda q, k: ((q - k) * 40000000 % by < 20) | ((k - q) * 29999999 // by % 3 == 1))
    found["divisors"].append(apart(q[:, :, :70], k[:, :, :70], mask=parts))
q[:, :, :5] = 0.0
found["divisors"].append(apart(q, k, scores=tw.custom_score(lambda s: s * 1e-30 / 1e-39 * 1e-9)))
found["descriptors"], (q, k) = [], (torch.randn(1, 4, 300, 72).half() for _ in range(2))
for options in ({"mask": tw.causal() & tw.document(ids)}, {"mask": gap}, {"scores": bias, "mask": tw.chunk(96)}):
    found["descriptors"].append(apart(q, k, **options))
assert {(r.tiles.parts, r.tiles.lazy) for r in launch_forward._recipes.values()} >= {(True, False), (True, True)}
for loop, dim in (("ahead", 80), ("behind", 40)):
    q, (k, v) = 2 * torch.randn(1, 2, 100, dim).half(), torch.randn(2, 1, 2, 1100, dim).half()
    for keys, scale in ((1100, None), (1088, -0.2), (1029, -0.2), (1024, 0.9)):
        k[:, :, 700:] *= 1.5  # maxima that outgrow a pivot late
        ran = [tw.attention(q, k[:, :, :keys], v[:, :, :keys], scale=scale, backend=name, return_lse=True)
               for name in ("triton", "blockwise")]
        found.setdefault(loop, []).append(max(float((a - b).float().abs().max()) for a, b in zip(*ran)))
    assert sum(r.tiles.loop == loop and r.tma for r in launch_forward._recipes.values()) == 4
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[float]]:
    """Errors over budgets of out and lse, by case."""
    root = Path(__file__).parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *INTERPRETED], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreter_agrees_with_float64_within_the_budgets(name, interpreted):
    assert max(interpreted[name]) <= 1.0


def test_a_tall_tile_that_met_a_hidden_nan_is_done_again(interpreted):
    difference, elsewhere = interpreted["again"]
    assert difference < 1e-3 and not elsewhere


def test_negative_numbers_divide_by_shifts_as_they_should(interpreted):
    assert interpreted["shifts"][0] < 1e-2


def test_numbers_of_a_call_divide_exactly(interpreted):
    assert max(interpreted["divisors"]) < 1e-2


def test_runs_of_tiles_by_descriptors_fold_masks_where_they_should(interpreted):
    assert max(interpreted["descriptors"]) < 1e-2


@pytest.mark.parametrize("loop", ("ahead", "behind"))
def test_loops_with_two_products_under_way_end_where_the_keys_end(loop, interpreted):
    assert max(interpreted[loop]) < 1e-2


# ---- compiling -----------------------------------------------------------------------------------------------


def _problem(mask, scores, tensors, **options):
    """A call's Problem and Inputs, as a backend receives them."""
    from tilewise.problem import Inputs, Options, Problem, shape_of

    q, k, v = tensors
    mask, terms = as_mask(mask), as_terms(scores)
    parts = [mask.term, *(t.term for t in terms)]
    leaves = tuple(leaf for p in parts if p is not None for leaf in p.leaves)
    ints = tuple(n for p in parts if p is not None for n in p.ints)
    floats = tuple(x for p in parts if p is not None for x in p.floats)
    spec = AttentionSpec.parse(spec_text(mask, terms, False, options.pop("dropout", False)))
    problem = Problem(spec, Options(**options), shape_of(q, k, v, "dense"), q.dtype, "cuda")
    seed = torch.zeros((), dtype=torch.int64)
    inputs = Inputs(q, k, v, leaves, ints, floats, seed, q.shape[-1] ** -0.5, 0.1, 0, 0, None, 0, -1, -1)
    return problem, inputs


SPECS = {
    "plain": (None, ()),
    "causal": (tw.causal(), ()),
    "document": (tw.causal() & tw.document(torch.zeros(1, 256, dtype=torch.int32)), ()),
    "column bias": (None, (tw.bias(torch.zeros(1, 1, 1, 256)),)),
    "terms": (tw.window(64, 0), (tw.softcap(30.0), tw.alibi(torch.ones(2)))),
    "custom": (
        tw.custom(lambda q, k: (q - k) % 2 == 0),
        (tw.custom_score(lambda s, h, q, k, slope: s - slope[h] * abs(q - k), torch.ones(2)),),
    ),
}
TARGETS = {75: torch.float16, 80: torch.bfloat16, 90: torch.bfloat16, 100: torch.bfloat16}


def _compile(monkeypatch, machine, problem, inputs):
    """The binaries that a call of this kind would use on a machine, as launch_forward builds them."""
    from triton.backends.compiler import GPUTarget

    from tilewise.backends.triton import compile as compiling
    from tilewise.backends.triton import launch, launch_forward

    made = []

    def compiled(kernel, build, device):
        target = GPUTarget(machine.kind, machine.arch or "gfx942", 64 if machine.kind == "hip" else 32)
        made.append(compiling.compile_kernel(kernel, build, target))
        return lambda grid, values: None

    monkeypatch.setattr(launch, "launcher", compiled)
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(launch_forward, "machine_of", lambda device: machine)
    monkeypatch.setattr(launch_forward, "TMA_WORK", 0.0)
    slots = launch_forward.slots_of(problem, inputs)
    launch_forward.make_recipe(problem, inputs, slots)
    return made


@pytest.fixture
def no_driver(monkeypatch):
    """Triton asks the driver for nothing but a target, which the test names."""
    from triton.runtime import driver

    if torch.cuda.is_available():
        return
    monkeypatch.setattr(driver, "_active", None, raising=False)


@pytest.mark.parametrize(
    "arch, spec", [(75, "plain"), (80, "plain"), (90, "terms"), (90, "custom"), (100, "causal")]
)
def test_kernels_compile_for_every_architecture(arch, spec, monkeypatch, no_driver):
    from tilewise.backends.triton.machine import Machine

    shared = {75: 65536, 80: 166912, 90: 232448, 100: 232448}[arch]
    tensors = [torch.zeros(1, 2, 256, 64, dtype=TARGETS[arch]) for _ in range(3)]
    problem, inputs = _problem(*SPECS[spec], tensors)
    for made in _compile(monkeypatch, Machine("cuda", arch, shared, 100), problem, inputs):
        assert "cubin" in made.asm and made.metadata.shared <= shared


@pytest.mark.parametrize(
    "spec, head_dim", [("document", 40), ("causal", 128), ("causal", 256), ("column bias", 64)]
)
def test_hopper_kernels_keep_their_state_in_registers(spec, head_dim, monkeypatch, no_driver):
    """Spilled accumulators would be re-read on every key tile; what little is spilled must not be those."""
    from tilewise.backends.triton.machine import Machine

    tensors = [torch.zeros(8, 16, 256, head_dim, dtype=torch.bfloat16) for _ in range(3)]
    problem, inputs = _problem(*SPECS[spec], tensors)
    made = _compile(monkeypatch, Machine("cuda", 90, 232448, 132), problem, inputs)
    first = next(m for m in made if m.metadata.name == "forward")
    assert "wgmma" in first.asm["ptx"] and spilled(first) <= 256
    # Sums and maxima of rows take a few exchanges; scores that move to another layout take hundreds.
    assert first.asm["ptx"].count("shfl.sync") < 60


@pytest.mark.parametrize("spec, head_dim, programs", [("plain", 128, 2), ("causal", 64, 3), ("plain", 64, 3)])
def test_long_calls_fill_a_multiprocessor_of_hopper_and_wait_for_no_product(
    spec, head_dim, programs, monkeypatch, no_driver
):
    """As many programs as were measured fit its registers and shared memory, and no product waits for the one before
    it: the compiler lines them up where anything else writes what they add to."""
    from tilewise.backends.triton.machine import Machine

    tensors = [torch.zeros(8, 16, 2048, head_dim, dtype=torch.bfloat16) for _ in range(3)]
    problem, inputs = _problem(*SPECS[spec], tensors)
    made = _compile(monkeypatch, Machine("cuda", 90, 232448, 132), problem, inputs)
    first = next(m for m in made if m.metadata.name == "forward")
    report = ptxas_says(first)
    assert "wgmma.mma_async instructions are serialized" not in report and spilled(first) == 0
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    assert programs * 32 * first.metadata.num_warps * -(-registers // 8) * 8 <= 65536
    assert programs * (first.metadata.shared + 1024) <= 228 * 1024


@pytest.mark.parametrize("head_dims", [(128, 128), (256, 256), (192, 128), (128, 40), (40, 136)], ids=str)
def test_the_jump_over_products_sees_every_row_of_its_warp(head_dims, monkeypatch, no_driver):
    """A warpgroup's accumulator gives a thread two, which take turns by two elements."""
    from tilewise.backends.triton.machine import Machine

    tensors = [torch.zeros(8, 16, 256, d, dtype=torch.bfloat16) for d in (head_dims[0], *head_dims)]
    problem, inputs = _problem(*SPECS["causal"], tensors)
    made = _compile(monkeypatch, Machine("cuda", 90, 232448, 132), problem, inputs)
    first = next(m for m in made if m.metadata.name == "forward")
    ((rows, layout),) = set(re.findall(r"SKIPRESCALE.*-> tensor<(\d+)x\d+xf32, (#\w+)>", first.asm["ttgir"]))
    said = re.search(f"{layout} = .*versionMajor = 3.*warpsPerCTA = \\[(\\d+), 1\\]", first.asm["ttgir"])
    assert int(said[1]) == first.metadata.num_warps and int(rows) == 16 * int(said[1])


def spilled(compiled) -> int:
    """Bytes of spill stores, as ptxas reports them."""
    return int(re.search(r"(\d+) bytes spill stores", ptxas_says(compiled))[1])


def ptxas_says(compiled) -> str:
    """The report of ptxas about a kernel for Hopper."""
    import tempfile

    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not ptxas.exists():
        pytest.skip("this Triton brings no ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"])
        command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(path), "-o", str(path.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_an_amd_target_compiles(monkeypatch, no_driver):
    from tilewise.backends.triton.machine import Machine

    tensors = [torch.zeros(1, 2, 256, 64, dtype=torch.float16) for _ in range(3)]
    problem, inputs = _problem(*SPECS["causal"], tensors)
    for made in _compile(monkeypatch, Machine("hip", 0, 65536, 100), problem, inputs):
        assert "hsaco" in made.asm


# ---- what is printed -----------------------------------------------------------------------------------------


def _text(mask, scores, length=64):
    from tilewise.backends.triton.launch_forward import FORWARD, slots_of
    from tilewise.backends.triton.source import print_module

    tensors = [torch.zeros(1, 2, length, 16) for _ in range(3)]
    problem, inputs = _problem(mask, scores, tensors)
    return print_module(problem.spec, slots_of(problem, inputs), (FORWARD,))


def _function(text, name):
    """The text of one printed function."""
    start = text.index(f"def {name}(")
    return text[start : text.index("@triton.jit", start)]


def test_a_new_length_prints_the_same_module():
    texts = {_text(tw.causal(), (tw.bias(torch.zeros(1, 2, n, n)),), n) for n in (64, 128, 4096)}
    assert len(texts) == 1


def test_window_sizes_are_numbers_of_the_call():
    assert _text(tw.window(5, 0), ()) == _text(tw.window(4096, 0), ())


def test_printed_modules_name_no_feature():
    code = _text(tw.causal() & tw.window(5, 0), (tw.alibi(torch.ones(2)), tw.softcap(3.0))).split('"""', 2)[2]
    assert not any(word in code for word in ("causal", "window", "alibi", "softcap"))


def test_powers_of_two_divide_by_shifts():
    code = _text(tw.custom(lambda q, k: ((q - k) % 4 < 2) & (q // 8 == k // 8)), ())
    keep = _function(code, "keep")
    assert "& 3" in keep and ">> 3" in keep and "_int(" not in keep
    assert "mod_int(" in _text(tw.custom(lambda q, k: (q - k) % 3 == 0), ())


@pytest.mark.parametrize("size, word", [(8, "exponent("), (6, "floordiv_by(")])
def test_numbers_of_a_call_that_are_powers_of_two_divide_by_shifts(size, word):
    assert word in _function(_text(tw.chunk(size), ()), "keep")


def test_leaves_as_long_as_the_call_are_read_by_vectors():
    """An index that is clamped counts up no longer, as far as the compiler sees; a mask may hold for vectors."""
    score = _function(_text(None, (tw.bias(torch.zeros(1, 2, 64, 64)),)), "score")
    assert "inside(j" not in score and "(j // 4 < " in score
    by_position = tw.custom_score(lambda s, h, k, table: s + table[h, k], torch.zeros(2, 64))
    assert "inside(k" in _function(_text(None, (by_position,)), "score")


@pytest.mark.parametrize("rows, kind", [(1, "bfloat16"), (256, "bfloat16"), (256, "float32")])
def test_a_bias_leaves_room_for_three_stages(rows, kind):
    """Two programs of three stages share a multiprocessor; an element of two bytes per pair takes as much as q."""
    from tilewise.backends.triton import launch_forward
    from tilewise.backends.triton.machine import Machine

    tensors = [torch.zeros(8, 16, 256, 128, dtype=torch.bfloat16) for _ in range(3)]
    bias = tw.bias(torch.zeros(1, 1, rows, 256, dtype=getattr(torch, kind)))
    problem, inputs = _problem(None, (bias,), tensors)
    pairs = launch_forward._pair_bytes(inputs, launch_forward.slots_of(problem, inputs), problem)
    tiles = launch_forward.choice.choose(problem, Machine("cuda", 90, 232448, 132), True, pairs)
    assert (tiles.stages, tiles.loop) == ((2, "plain") if kind == "float32" else (3, "held"))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_bias_per_pair_is_loaded_ahead_by_a_descriptor_or_by_vectors(kind, monkeypatch, no_driver):
    from tilewise.backends.triton.machine import Machine

    tensors = [torch.zeros(8, 16, 256, 128, dtype=torch.bfloat16) for _ in range(3)]
    problem, inputs = _problem(None, (tw.bias(torch.zeros(8, 16, 256, 256, dtype=kind)),), tensors)
    made = _compile(monkeypatch, Machine("cuda", 90, 232448, 132), problem, inputs)
    first = next(m for m in made if m.metadata.name == "forward")
    assert ("cp.async.cg.shared.global" in first.asm["ptx"]) == (kind == torch.float32) and not spilled(first)
    assert 2 * (first.metadata.shared + 1024) <= 233472


def test_a_printed_module_is_a_file_that_can_be_read():
    from tilewise.backends.triton.source import load_text

    module = load_text(_text(tw.causal(), ()))
    assert Path(module.__file__).read_text(encoding="utf-8").startswith('"""Printed by Tilewise')


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors, word",
    [
        ([torch.zeros(1, 1, 2, 8, dtype=torch.float64)] * 3, "element type"),
        ([torch.zeros(1, 1, 2, 513)] * 3, "head dimension"),
    ],
)
def test_reasons_name_rule_and_limit(tensors, word):
    from tilewise.backends.triton.backend import Triton

    problem, _ = _problem(None, (), tensors)
    reasons = Triton().supports(problem)
    assert any(word in reason.rule and reason.allowed for reason in reasons)


def test_processor_tensors_are_refused_by_name():
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(tw.UnsupportedProblem, match="runs on GPUs"):
        tw.attention(q, q, q, backend="triton")
