"""The Triton backend's backward: in the interpreter here, on the device where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import guards
import pytest
import torch
from versions import needs_triton

import tilewise as tw
from tilewise import tuning

pytestmark = needs_triton
HERE = Path(__file__).parent
CASES = (
    "plain-bf16", "mask-streaming", "term-bias_full", "term-bias_head",
    "term-relative_bucket", "term-custom_scatter", "term-alibi_batch", "order-four_terms_sink", "sink-nothing_visible",
    "dropout-h_offset", "large_logits-fp32", "size-1x1-causal", "heads-9_3", "packed-holes-streaming", "packed-fp16",
    "packed-terms", "cross-custom-outer-sink-keep-mha-fp16-67x67-bhnd",
)  # fmt: skip
FUNCTIONS = (
    "hidden_values", "visible_values_spread", "one_visible_key", "large_scores", "part_of_the_keys",
    "one_leaf_in_two_batches", "two_leaves_by_column_packed", "loads_ahead",
    "tiles_looked_at_before", "products_used_twice", "nothing_written_outside", "sums_made_apart",
    "holes_in_every_tile", "leaves_in_the_pivots",
    "tanh_keeps_its_digits", "patterns_are_what_they_should_be", "an_infinite_sink",
)  # fmt: skip


def work(task: str, *names: str) -> dict[str, dict]:
    """The worker's answers by name."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parent),
    }
    command = [sys.executable, str(HERE / "triton_worker.py"), task, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in found}


@pytest.fixture(scope="module")
def interpreted_cases() -> dict[str, dict]:
    return work("cases", *CASES)


@pytest.fixture(scope="module")
def interpreted_functions() -> dict[str, dict]:
    return work("functions")


@pytest.mark.parametrize("name", CASES)
def test_gradients_within_budget(name: str, interpreted_cases: dict[str, dict]) -> None:
    found = interpreted_cases[name]
    assert found["worst"] <= 1, found["failed"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_must_hold_exactly(name: str, interpreted_functions: dict[str, dict]) -> None:
    assert interpreted_functions[name]["holds"], name


# ---- who sums a leaf's gradient ----------------------------------------------------------------------------------


def _problem(scores, layout: str = "dense", mask=None):
    from tilewise.problem import Options, Problem, Shape
    from tilewise.spec.attention import AttentionSpec, spec_text
    from tilewise.spec.masks import Mask

    spec = AttentionSpec.parse(spec_text(Mask(None) if mask is None else mask, scores, False, False))
    options = replace(Options(), layout=layout)
    return Problem(spec, options, Shape(2, 4, 2, 24, 32, 16, 16), torch.float32, "cuda")


def _gather(s, q, k, table):
    return s + table[(q * 3 + k * 5) % 7]


def _by_row(s, q, table):
    return s + table[q % 7]


KINDS = {
    "alibi": (lambda: tw.alibi(torch.ones(4)), "row"),
    "relative": (lambda: tw.relative(torch.ones(4, 9)), "diagonal"),
    "bias": (lambda: tw.bias(torch.ones(2, 4, 24, 32)), "pair"),
    "bias of heads": (lambda: tw.bias(torch.ones(1, 4, 24, 32)), "pairs"),
    "bias of columns": (lambda: tw.bias(torch.ones(2, 1, 1, 32)), "column"),
    "bias of rows": (lambda: tw.bias(torch.ones(2, 4, 24, 1)), "row"),
    "a gather by rows": (lambda: tw.custom_score(_by_row, torch.ones(7)), "row"),
    "any gather": (lambda: tw.custom_score(_gather, torch.ones(7)), "scatter"),
}


@pytest.mark.parametrize("name", KINDS)
def test_leaf_gradients_are_ordered_where_they_can_be(name: str) -> None:
    from tilewise.backends.triton.leaf_sums import kind_of
    from tilewise.backends.triton.source import derivative_roots

    make, wanted = KINDS[name]
    term = make()
    problem = _problem((term,))
    (site,) = derivative_roots(problem.spec)[1]
    shape = tuple(term.term.leaves[int(site.value)].shape)
    assert kind_of(problem, site, shape) == wanted


# ---- tiles and tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [49152, 65536, 101376, 166912, 232448])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [16, 64, 96, 128, 256, 512])
def test_tiles_fit_the_shared_memory(shared: int, dtype: torch.dtype, d: int) -> None:
    from tilewise.backends.triton.backward_tiles import choose_backward
    from tilewise.backends.triton.machine import Machine
    from tilewise.backends.triton.tiles import padded

    problem = replace(_problem(()), dtype=dtype, shape=_problem(()).shape._replace(head_dim=d, head_dim_v=d))
    found = choose_backward(problem, Machine("cuda", 80, shared, 100, "unknown"))
    for own, other in ((found.keys.block_n, found.keys.block_m), (found.rows.block_m, found.rows.block_n)):
        assert own >= 16 and other >= 16
        # The smallest tiles there are, 16 x 16, are taken where nothing fits.
        assert (own + other) * 2 * padded(d) * dtype.itemsize <= shared or own == other == 16


def test_wide_heads_make_dk_and_dv_apart() -> None:
    """Where the table says so, and tiles are loaded ahead; both fit the shared memory."""
    from tilewise.backends.triton.backward_tiles import choose_backward
    from tilewise.backends.triton.machine import Machine

    machine = Machine("cuda", 90, 232448, 132, "NVIDIA H200")
    shape = _problem(()).shape._replace(head_dim=256, head_dim_v=256)
    found = choose_backward(replace(_problem(()), dtype=torch.bfloat16, shape=shape), machine)
    assert [part for part, _ in found.key_parts(True)] == ["dk", "dv", "careful"]
    assert [part for part, _ in found.key_parts(False)] == ["both", "careful"]
    for tiles, operands in zip(found.apart, (2, 1), strict=True):
        size = 2 * 256 * (operands * tiles.block_n + 2 * tiles.stages * tiles.block_m)
        assert size <= machine.shared
    narrow = choose_backward(replace(_problem(()), dtype=torch.bfloat16), machine)
    assert narrow.apart is None


def test_tables_of_tiles_are_whole() -> None:
    for path in tuning.FOLDER.glob("*.json"):
        table = json.loads(path.read_text())
        assert path == tuning.table_path(table["device"])
        assert {"when", "torch", "triton", "command"} <= set(table["measured"])
        for kernel, entries in table["choices"].items():
            for key, numbers in entries.items():
                assert all(isinstance(n, int) and n > 0 for n in numbers), (kernel, key)
                assert tuning.lookup(table["device"], kernel, key) == tuple(numbers)


def test_a_device_without_a_table_has_no_entry() -> None:
    assert tuning.lookup("No such device", "triton.keys", "16-d128-128-full") is None
    assert tuning.lookup("", "triton.keys", "16-d128-128-full") is None


# ---- compiling without a device ----------------------------------------------------------------------------------


TARGETS = {
    "7.5": (75, 65536, torch.float16), "8.0": (80, 166912, torch.bfloat16), "8.6": (86, 101376, torch.bfloat16),
    "9.0": (90, 232448, torch.bfloat16), "10.0": (100, 232448, torch.bfloat16),
}  # fmt: skip
SLOW = {"7.5", "8.6", "9.0", "10.0"}


@pytest.mark.parametrize("target", [pytest.param(t, marks=[pytest.mark.slow] * (t in SLOW)) for t in TARGETS])
def test_kernels_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of a causal call with a trained slope, for a device that is not here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from tilewise.backends.protocol import Needs
    from tilewise.backends.triton import launch, launch_backward
    from tilewise.backends.triton.compile import compile_kernel
    from tilewise.backends.triton.layout import describe
    from tilewise.backends.triton.machine import Machine
    from tilewise.problem import Inputs

    arch, shared, dtype = TARGETS[target]
    made = []

    def compiled(kernel, build, device):
        made.append(compile_kernel(kernel, build, GPUTarget("cuda", arch, 32)))
        return lambda grid, values: None

    if not torch.cuda.is_available():
        monkeypatch.setattr(driver, "_active", None, raising=False)
    monkeypatch.setattr(launch, "launcher", compiled)
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(launch_backward, "machine_of", lambda device: Machine("cuda", arch, shared, 100))
    monkeypatch.setattr(launch_backward, "TMA_WORK", 0.0)
    monkeypatch.setattr(launch_backward, "_known", {})
    launch_backward._tiles.cache_clear()
    mask, term = tw.causal(), tw.alibi(torch.ones(2))
    problem = _problem((term,), mask=mask)
    problem = replace(problem, dtype=dtype, shape=problem.shape._replace(
        batch=1, num_heads_q=2, num_heads_kv=2, seqlen_q=256, seqlen_k=256, head_dim=64, head_dim_v=64))  # fmt: skip
    q, k, v = (torch.zeros(1, 2, 256, 64, dtype=dtype) for _ in range(3))
    inputs = Inputs(q, k, v, term.term.leaves, (), (), None, 0.125, 0.0, 0, 0, None, 0, -1, -1)
    slots = describe(problem.spec, inputs.leaves)
    saved = (torch.zeros_like(q), torch.zeros(1, 2, 256))
    launch_backward.backward(problem, inputs, saved, (q, None), Needs(leaves=(True,)), slots)
    assert len(made) == (6 if arch >= 90 else 5)  # what loads ahead knows beforehand where its tiles are
    for kernel in made:
        assert "cubin" in kernel.asm and kernel.metadata.shared <= shared


def test_elements_per_pair_are_read_by_ordinary_loads() -> None:
    """The key kernel's tiles lie the other way round: what reads two columns at once in place would be wrong there."""
    from tilewise.backends.triton import launch_forward
    from tilewise.backends.triton.source import print_folds
    from tilewise.problem import Inputs

    term = tw.bias(torch.ones(2, 4, 24, 32, dtype=torch.bfloat16))
    problem = replace(_problem((term,)), dtype=torch.bfloat16)
    q, k, v = (torch.zeros(2, 4, n, 16, dtype=torch.bfloat16) for n in (24, 32, 32))
    inputs = Inputs(q, k, v, term.term.leaves, (), (), None, 0.25, 0.0, 0, 0, None, 0, -1, -1)
    slots = launch_forward.slots_of(problem, inputs)
    assert slots is not None and slots.leaves[0].covered and slots.leaves[0].step > 1
    assert "load_where(" in print_folds(problem.spec, slots)


def test_conjuncts_with_short_periods_are_holes() -> None:
    """What no tile is inside of is told apart; long periods, leaves and what depends on heads are not."""
    from tilewise.backends.triton.holes import mask_kind, split_holes
    from tilewise.spec.expression import to_text

    strided = tw.custom(lambda q, k: (q - k) % 4 < 2)
    keep = _problem((), mask=tw.causal() & strided).spec.keep
    ends, holes = (to_text(part) for part in split_holes(keep))
    assert mask_kind(keep) == 2 and "mod" not in ends and "le k q" in ends
    assert "mod" in holes and "le k q" not in holes
    assert split_holes(_problem((), mask=strided).spec.keep)[0].op == "const"
    leaf = torch.ones(32, dtype=torch.int32)
    others = {
        tw.causal(): 1,
        tw.custom(lambda q, k: (q - k) % 1000 < 500): 1,
        tw.causal() & tw.document(torch.zeros(2, 32, dtype=torch.int32)): 3,
        tw.custom(lambda q, k, x: (q - k) % 4 < x[k], leaf): 3,
        tw.custom(lambda q, k, h: (q - k) % 4 < h): 1,
    }
    for mask, kind in others.items():
        keep = _problem((), mask=mask).spec.keep
        assert mask_kind(keep) == kind and split_holes(keep)[0] is keep
    assert mask_kind(None) == 0


def test_a_short_period_is_a_pattern_of_bits() -> None:
    """Bit n says what the mask says of a column n ahead of its row, whichever way the difference is taken."""
    from tilewise.backends.triton.holes import bits_of, split_holes, stripes_of

    functions = (
        (12, lambda q, k: (q - k) % 12 < 6),
        (12, lambda q, k: (k - q) % 12 >= 7),
        (31, lambda q, k: ((q - k) % 31 == 5) | ((q - k) % 31 > 20)),
    )
    for period, function in functions:
        hole = split_holes(_problem((), mask=tw.custom(function)).spec.keep)[1]
        stripes = stripes_of(hole)
        assert stripes is not None and stripes.row.value == "q" and stripes.column.value == "k"
        row = torch.tensor(period * 9)
        wanted = sum(int(function(row, row + n)) << n for n in range(period))
        assert bits_of(stripes, hole) == wanted
    for function in (
        lambda q, k: (q - k) % 4 + k % 3 > 1,
        lambda q, k: (q + k) % 7 < 3,
        lambda q, k: q % 7 < 3,
    ):
        assert stripes_of(split_holes(_problem((), mask=tw.custom(function)).spec.keep)[1]) is None


def test_a_pattern_whose_bits_are_not_sure_is_printed_as_it_stands() -> None:
    """Bounds leave room about floats that all but meet, and about integers that wrap: a bit may not be guessed."""
    from tilewise.backends.triton.holes import bits_of, split_holes, stripes_of

    for function in (
        lambda q, k: ((q - k) % 7) * 0.1 < 0.3,
        lambda q, k: ((q - k) % 7) / 7 < 3 / 7,
        lambda q, k: ((k - q) % 31) * 2000000000 > 0,
    ):
        hole = split_holes(_problem((), mask=tw.custom(function)).spec.keep)[1]
        stripes = stripes_of(hole)
        assert stripes is not None and bits_of(stripes, hole) is None


def test_short_periods_that_a_function_captures_are_literals_of_the_backward() -> None:
    """Long ones stay numbers of the call, and so does everything in a score."""
    from tilewise.backends.triton.holes import mask_kind, settle

    for period, kind in ((12, 2), (4, 2), (1000, 1), (1, 1)):
        mask = tw.causal() & tw.custom(lambda q, k, n=period: (q - k) % n < n // 2)
        problem = _problem((), mask=mask)
        found = settle(problem, mask.term.ints)
        assert mask_kind(found.spec.keep) == kind and (found is problem) == (kind == 1)
        assert found.spec.text != problem.spec.text or kind == 1
        assert settle(problem, mask.term.ints) == found


# ---- on a device -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_repeat_bit_by_bit(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v, do = (torch.randn(2, 4, 1111, 64, device=device, dtype=dtype) for _ in range(4))
    table, slopes = torch.randn(4, 65, device=device), torch.rand(4, device=device)
    first = None
    for _ in range(20):
        inputs = [t.detach().requires_grad_() for t in (q, k, v, table, slopes)]
        scores = (tw.relative(inputs[3]), tw.alibi(inputs[4]))
        out = tw.attention(*inputs[:3], mask=tw.causal(), scores=scores, backend="triton")
        found = torch.autograd.grad(out, inputs, do)
        first = found if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_is_written_outside(
    dtype: torch.dtype, ahead: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, statistics, and sums of leaves of every kind stay inside the memory made for them."""
    from tilewise.backends.triton import launch_backward

    if ahead:
        monkeypatch.setattr(launch_backward, "TMA_WORK", 0.0)
    found = guards.backward_written_outside(str(device), dtype)
    assert len(found) == 8 and not any(found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("fine", [False, True])
def test_tanh_keeps_its_digits(fine: bool, device: torch.device) -> None:
    import triton_words

    worst, exact = triton_words.tanh_errors(str(device), fine)
    assert worst < (0.75 if fine else 4e-7) and exact


@pytest.mark.gpu
def test_patterns_are_what_they_should_be(device: torch.device) -> None:
    import triton_words

    assert triton_words.patterns_differ(str(device), (3, 12, 31)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["plain", "alibi", "column bias", "relative", "dropout"])
def test_backward_memory_is_linear(feature: str, device: torch.device) -> None:
    peaks = []
    for n in (2048, 4096):
        inputs = [
            torch.randn(1, 4, n, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        terms = {
            "alibi": lambda: (tw.alibi(torch.rand(4, device=device, requires_grad=True)),),
            "column bias": lambda n=n: (tw.bias(torch.randn(1, 1, 1, n, device=device, requires_grad=True)),),
            "relative": lambda: (tw.relative(torch.randn(4, 257, device=device, requires_grad=True)),),
        }
        scores = terms[feature]() if feature in terms else ()
        out = tw.attention(
            *inputs, mask=tw.causal(), scores=scores, dropout=0.1 * (feature == "dropout"), backend="triton"
        )
        do = torch.randn_like(out)
        torch.autograd.grad(out, inputs, do, retain_graph=True)
        torch.cuda.synchronize()
        # Autograd's thread drops its gradients after it has told the caller.
        time.sleep(0.01)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, inputs, do)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0]
