"""The Hopper forward without a GPU: every kind of kernel compiles without spills and without products that wait for
one another, fits the chip, and the backend says what it does not take."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest
import torch

import tilewise as tw

triton = pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="needs Gluon")

from hopper_compile import alibi_of, compile_forward, reused_barriers, spec_of  # noqa: E402
from test_hopper_backward import _call  # noqa: E402

from tilewise.backends.hopper import launch_forward  # noqa: E402
from tilewise.backends.hopper.launch_forward import early_lines, schedule  # noqa: E402
from tilewise.backends.hopper.source import print_module  # noqa: E402
from tilewise.backends.hopper.tiles import PAIRS, SHARED, abreast, pair_of  # noqa: E402
from tilewise.backends.hopper.worth import reasons_for_auto  # noqa: E402
from tilewise.backends.triton.layout import describe  # noqa: E402
from tilewise.backends.triton.machine import Machine  # noqa: E402
from tilewise.problem import Options, Problem, Shape  # noqa: E402

pytestmark = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) != (3, 6), reason="kernels are held to Triton 3.6"
)
WIDTH, HUGE = 300, 1000
KINDS = {
    "plain": lambda: compile_forward((128, 128)),
    "terms": lambda: compile_forward((128, 128), tw.causal(), tw.softcap(30.0)),
    "alibi": lambda: compile_forward((128, 128), tw.causal(), alibi_of(16)),
    "user": lambda: compile_forward((128, 128), tw.causal() & tw.custom(lambda q, k: (q - k) % 4 < 2)),
    "stripes": lambda: compile_forward((128, 128), tw.custom(lambda q, k: (q - k) % 1000 < WIDTH)),
    "window": lambda: compile_forward((256, 256), tw.causal() & tw.window(500, 0)),
    "packed heads": lambda: compile_forward((128, 128), tw.causal(), PACK=8),
    "packed sequences": lambda: compile_forward((256, 256), tw.causal(), VARLEN=True, GAPS=True),
    "bounded": lambda: compile_forward((128, 128), tw.causal(), tw.softcap(30.0), FUSED=True, BOUNDED=True),
    "float32 out": lambda: compile_forward((128, 128), tw.causal(), dtype=torch.float16, STORE="rows"),
    "sink": lambda: compile_forward((64, 64), tw.window(100, 0), SINK=True),
    "again": lambda: compile_forward((256, 256), tw.causal(), again=True),
}

BIAS = torch.zeros(1, 1, 4096, 4096, dtype=torch.bfloat16)
DOCUMENT = torch.zeros(1, 4096, dtype=torch.int32)
PACKED = {"VARLEN": True, "GAPS": True, "CARE": True}
RARE = {
    "documents": lambda: compile_forward((128, 128), tw.causal() & tw.document(DOCUMENT), RANGES=True),
    "wide documents": lambda: compile_forward((256, 256), tw.causal() & tw.document(DOCUMENT)),
    "wide alibi": lambda: compile_forward((256, 256), tw.causal(), alibi_of(16)),
    "uneven alibi": lambda: compile_forward((192, 128), tw.causal(), alibi_of(16)),
    "wide packed": lambda: compile_forward((256, 256), **PACKED),
    "wide packed window": lambda: compile_forward((256, 256), tw.causal() & tw.window(500, 0), **PACKED),
    "uneven packed window": lambda: compile_forward((192, 128), tw.causal() & tw.window(500, 0), **PACKED),
    "narrow packed window": lambda: compile_forward((64, 64), tw.window(500, 300), **PACKED),
    "wide window to both sides": lambda: compile_forward((256, 256), tw.window(500, 300)),
    "wide stripes": lambda: compile_forward((256, 256), tw.causal() & tw.custom(lambda q, k: (q - k) % HUGE < WIDTH)),
    "narrow stripes": lambda: compile_forward((64, 64), tw.causal() & tw.custom(lambda q, k: (q - k) % HUGE < WIDTH)),
    "narrow bounded": lambda: compile_forward((64, 64), tw.causal(), tw.softcap(30.0), FUSED=True, BOUNDED=True),
    "wide softcap": lambda: compile_forward((256, 256), tw.causal(), tw.softcap(30.0), torch.float16, FUSED=True),
    "packed heads, alibi": lambda: compile_forward((128, 128), tw.causal(), alibi_of(16), PACK=4),
    "wide packed heads, alibi": lambda: compile_forward((256, 256), tw.causal(), alibi_of(16), PACK=4),
    "uneven packed heads, alibi": lambda: compile_forward((192, 128), tw.causal(), alibi_of(16), PACK=4),
    "packed alibi": lambda: compile_forward((128, 128), tw.causal(), alibi_of(16), **PACKED),
    "uneven packed alibi": lambda: compile_forward((192, 128), tw.causal(), alibi_of(16), **PACKED),
    "wide packed heads and sequences, alibi": lambda: compile_forward(
        (256, 256), tw.causal(), alibi_of(16), PACK=4, **PACKED
    ),
    "wide bias": lambda: compile_forward((256, 256), tw.causal(), tw.bias(BIAS)),
    "wide bias, all pairs": lambda: compile_forward((256, 256), None, tw.bias(BIAS)),
    "wide alibi in a window": lambda: compile_forward((256, 256), tw.causal() & tw.window(500, 0), alibi_of(16)),
    "uneven documents": lambda: compile_forward((192, 128), tw.causal() & tw.document(DOCUMENT)),
    "uneven packed softcap in a window": lambda: compile_forward(
        (192, 128), tw.causal() & tw.window(500, 0), tw.softcap(30.0), FUSED=True, BOUNDED=True, **PACKED
    ),
}  # fmt: skip
"""Kinds in which something was spilled once: why tiles differ by kind (`tiles.crowded`, `forward_place.lanes_of`)."""
OFTEN = (
    "documents", "wide alibi", "uneven alibi", "wide packed window", "narrow packed window", "narrow stripes",
    "narrow bounded", "packed heads, alibi", "uneven packed heads, alibi", "wide bias",
)  # fmt: skip


def _sound(facts) -> None:
    assert not facts.serialised
    assert facts.spilled == 0
    assert facts.shared <= SHARED
    assert not reused_barriers(facts.ptx)
    assert "wgmma.mma_async" in facts.ptx


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_causal_kernels_keep_their_registers(pair):
    facts = compile_forward(pair, tw.causal())
    _sound(facts)
    assert "setmaxnreg" in facts.ptx


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_calls_keep_their_registers(kind):
    _sound(KINDS[kind]())


@pytest.mark.parametrize("kind", [k if k in OFTEN else pytest.param(k, marks=pytest.mark.slow) for k in RARE])
def test_rare_kinds_keep_their_registers(kind):
    _sound(RARE[kind]())


def test_a_block_of_keys_costs_one_barrier_of_a_warpgroup():
    """Stages are given back by single warps: an arrival of the library's would add two barriers to each."""
    text = compile_forward((128, 128)).ptx
    wait = r"wgmma\.wait_group\.sync\.aligned"
    softmax = re.findall(rf"{wait} 1;(.*?){wait} 0;", text, re.DOTALL)
    assert len(softmax) == 2
    assert all("bar.sync" not in part and "mbarrier.arrive.expect_tx" in part for part in softmax)


def test_a_printed_module_holds_the_spec_and_the_roles():
    spec, leaves = spec_of(tw.causal() & tw.window(100, 0), tw.softcap(20.0))
    slots = describe(spec, leaves)
    from tilewise.backends.hopper.launch_forward import FORWARD, TEMPLATE

    text = print_module(spec, slots, TEMPLATE, (FORWARD,))
    assert spec.text in text and "forward_shared" not in text
    text += print_module(spec, slots, "tilewise.backends.hopper.forward_shared", ())
    for role in (
        "def producer(",
        "def consumer(",
        "def row_parts(",
        "def scores(",
        "def limits(",
        "def stripes(",
        "def sees(",
        "def kinds(",
        "def reach(",
        "def forward(",
    ):
        assert text.count(role) == 1
    assert "tl.arange" not in text and "hopper.plain" not in text
    again = print_module(spec, slots, "tilewise.backends.hopper.forward_again_shared", ())
    assert "def repeat(" in again and "import LINES, fold" in again and "forward_shared" not in again


@pytest.mark.parametrize(
    "options",
    [
        {}, {"mask": tw.causal(), "packed": True}, {"mask": tw.causal(), "scores": tw.softcap(20.0)},
        {"scores": tw.alibi(tw.alibi_slopes(4))},
        {"mask": tw.causal() | tw.prefix(torch.tensor([7]))},
        {"scores": tw.bias(torch.zeros(1, 4, 4096, 4096, dtype=torch.bfloat16)), "n": 4096},
    ],
    ids=("plain", "packed", "softcap", "alibi", "prefix", "bias"),
)  # fmt: skip
def test_a_call_is_laid_out_as_its_kernel_takes_it(options, monkeypatch):
    """All of a forward but its launches, which here only count what they are given."""
    given = []

    def launchers(spec, slots, builds, device):
        def launch(grid, values):
            given.append((grid, len(values)))

        launch.device, launch.spilled = 0, 0
        return [launch for _ in builds]

    problem, inputs, (out, lse), *_ = _call(128, 128, **options)
    monkeypatch.setattr(launch_forward, "launchers", launchers)
    monkeypatch.setattr(launch_forward, "_recipes", {})
    monkeypatch.setattr(launch_forward, "machine_of", lambda device: Machine("cuda", 90, SHARED, 132))
    monkeypatch.setattr(launch_forward, "counter", lambda device, stream: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    found = launch_forward.forward(problem, inputs)
    assert found is not None and found[0].shape == out.shape and found[1].shape == lse.shape
    (recipe,) = launch_forward._recipes.values()
    assert given and all(grid > 0 and n == len(recipe.types) for grid, n in given)


def test_head_dimensions_take_the_smallest_kernel_that_holds_them():
    assert pair_of(64, 64) == (64, 64)
    assert pair_of(80, 80) == (96, 96)
    assert pair_of(192, 128) == (192, 128)
    assert pair_of(192, 192) == (192, 192)
    assert pair_of(264, 64) is None


def test_the_backend_says_why_not():
    q = torch.randn(1, 2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(tw.UnsupportedProblem, match="compute capability 9.0"):
        tw.attention(q, q, q, backend="hopper")
    reasons = dict(tw.explain(q, q, q).candidates)["hopper"]
    assert any("compute capability 9.0" in str(reason) for reason in reasons)


def _problem(n: int, d: int, mask=None, scores=(), needs_grad: bool = False, batch: int = 4) -> Problem:
    spec, _ = spec_of(mask, scores)
    return Problem(spec, Options(), Shape(batch, 16, 16, n, n, d, d), torch.bfloat16, "cuda", needs_grad)


def test_the_rows_that_a_tile_lacks_are_the_first_ones_under_a_mask():
    """4096 rows are 21 tiles of 192 and 64 rows, which are to see 64 keys and not all."""
    machine = Machine("cuda", 90, SHARED, 132)

    def early(problem: Problem, look: bool = False) -> int:
        return early_lines(problem, schedule(problem, machine), look)

    assert early(_problem(4096, 64, tw.causal())) == 128
    assert (
        early(_problem(4000, 64, tw.causal())) == 0
    )  # the last 32 rows of a warpgroup, which would cut it in two
    assert early(_problem(1000, 64, tw.causal())) == 128
    assert early(_problem(4096, 128, tw.causal())) == early(_problem(4096, 64)) == 0
    assert early(_problem(4096, 64, tw.causal()), look=True) == 0
    leaves = tw.causal() & tw.document(torch.zeros(4, 4096, dtype=torch.int32))
    packed = replace(_problem(16384, 64, tw.causal(), batch=17), options=Options(layout="varlen"))
    assert early(_problem(4096, 64, leaves)) == early(packed) == 0


def test_auto_brings_here_what_was_measured():
    slopes, ids = tw.alibi_slopes(16), torch.zeros(4, 4096, dtype=torch.int32)
    packed = replace(_problem(16384, 128, tw.causal(), batch=17), options=Options(layout="varlen"))
    taken = (
        _problem(4096, 128),
        _problem(1024, 64, tw.causal(), batch=16),
        _problem(4096, 256, tw.causal() & tw.window(1000, 0), needs_grad=True),
        _problem(4096, 128, tw.causal(), tw.alibi(slopes)),
        _problem(4096, 128, tw.causal(), tw.alibi(slopes), needs_grad=True),
        replace(_problem(4096, 128, tw.causal(), needs_grad=True), dtype=torch.float16),
        _problem(4096, 128, tw.window(100, None)),
        packed,
        replace(packed, needs_grad=True),
    )
    left = {
        "rows of a sequence": _problem(512, 128, batch=64),
        "operations": _problem(1024, 64, batch=1),
        "head dimensions": _problem(8192, 32),
        "for each pair or column": _problem(4096, 128, tw.causal() & tw.document(ids)),
        "at least 768": replace(packed, shape=packed.shape._replace(batch=64)),
    }
    for problem in taken:
        assert reasons_for_auto(problem) == []
    for why, problem in left.items():
        (reason,) = reasons_for_auto(problem)
        assert why in str(reason) and "'auto'" in str(reason)


def test_without_a_mask_one_head_follows_another():
    """All multiprocessors read the same keys then; under a mask long tiles come first, of as many heads as it takes."""
    assert abreast(_problem(16384, 128), False) == 1
    assert abreast(_problem(16384, 64, tw.causal()), False) > 1
    assert [abreast(_problem(n, 128, tw.causal()), False) for n in (1024, 4096, 16384)] == [32, 4, 1]
    shared = replace(_problem(16384, 128), shape=Shape(4, 16, 4, 16384, 16384, 128, 128))
    assert abreast(shared, False) == 4  # query heads of the same keys
    assert abreast(shared, True) == 1  # in one tile
    packed = replace(_problem(16384, 128), options=Options(layout="varlen"))
    assert abreast(packed, False) > 1


def test_compiling_leaves_the_collector_as_it_was():
    from tilewise.backends.hopper.compile import uncollected

    for collecting in (True, False):
        (gc.enable if collecting else gc.disable)()
        try:
            with pytest.raises(ValueError), uncollected():
                assert not gc.isenabled()
                raise ValueError
            assert gc.isenabled() == collecting
        finally:
            gc.enable()


def test_a_margin_of_multiprocessors_is_a_number(monkeypatch):
    monkeypatch.setattr(tw.config, "sm_margin", 8)
    for value in (-1, 1.5, True, "8"):
        with pytest.raises(tw.OptionError, match="sm_margin"):
            tw.config.sm_margin = value
