"""The Hopper backward: kernels compile for compute capability 9.0 without a GPU, spill nothing and keep their matrix
products in flight; on a GPU, gradients against float64, packed and grouped, bits that repeat, and what masks hide."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hopper_compile import reused_barriers

import tilewise as tw
from tilewise.backends.protocol import Needs
from tilewise.problem import Inputs, Options, Problem, Shape
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.masks import as_mask
from tilewise.spec.scores import as_terms

triton = pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="needs Gluon")
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
N = 300


def _call(
    d: int, d_v: int, mask=None, scores=(), packed=False, deterministic=False, n: int = N, *, batch=1, heads=(4, 2)
):  # fmt: skip
    """(problem, inputs, saved, grads, needs) of a call on tensors of the processor, of which no number is read."""
    term_mask, terms = as_mask(mask), as_terms(scores)
    spec = AttentionSpec.parse(spec_text(term_mask, terms, False, False))
    found = [*([term_mask.term] if term_mask.term is not None else []), *[t.term for t in terms]]
    cu = torch.tensor([0, 100, n], dtype=torch.int32)

    def make(h: int, width: int) -> torch.Tensor:
        return torch.zeros((n, h, width) if packed else (batch, h, n, width), dtype=torch.bfloat16)

    tables = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {}
    q, k, v, out = make(heads[0], d), make(heads[1], d), make(heads[1], d_v), make(heads[0], d_v)
    options = Options(layout="varlen" if packed else "dense", deterministic=deterministic)
    problem = Problem(
        spec, options, Shape(2 if packed else batch, *heads, n, n, d, d_v), torch.bfloat16, "cuda"
    )
    inputs = Inputs(
        q, k, v, tuple(x for t in found for x in t.leaves), tuple(n for t in found for n in t.ints),
        tuple(x for t in found for x in t.floats), None, 0.1, 0.0, 0, 0, None, 0, n, n, **tables,
    )  # fmt: skip
    lse = torch.zeros((heads[0], n) if packed else (batch, heads[0], n))
    return problem, inputs, (out, lse), (out.clone(), None), Needs(leaves=(False,) * len(inputs.leaves))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    """The Gluon kernels that calls launch, as (kernel, build), instead of launches."""
    from tilewise.backends.hopper import launch_backward, repeat_backward
    from tilewise.backends.triton import launch_backward as low
    from tilewise.backends.triton.machine import INTERPRETED

    found: list[tuple[object, object]] = []

    def note(kernel: object, build: object, device: int):
        found.append((kernel, build))
        return lambda *launch: None

    monkeypatch.setattr(launch_backward, "GluonLauncher", note)
    monkeypatch.setattr(launch_backward, "_launchers", {})
    monkeypatch.setattr(launch_backward, "plain_launcher", lambda *a: lambda *launch: None)
    monkeypatch.setattr(launch_backward, "kernel_launcher", lambda *a: lambda *launch: None)
    monkeypatch.setattr(repeat_backward, "tapes", {})
    monkeypatch.setattr(launch_backward, "tapes", repeat_backward.tapes)
    monkeypatch.setattr(low, "machine_of", lambda device: INTERPRETED)
    monkeypatch.setattr(launch_backward, "machine_of", lambda device: INTERPRETED)
    return found


def _assembled(kernel: object, build: object) -> tuple[str, int, str]:
    """What the assembler says about a kernel, its bytes of shared memory, and its text."""
    from triton.backends.compiler import GPUTarget

    from tilewise.backends.hopper.compile import compile_gluon

    made = compile_gluon(kernel, build, GPUTarget("cuda", 90, 32))
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        command = [str(assembler), "-v", "--gpu-name=sm_90a", str(source), "-o", str(source) + ".o"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return said, made.metadata.shared, made.asm["ptx"]


VARIANTS = {
    "plain-128": (128, 128, {}),
    "causal-128": (128, 128, {"mask": tw.causal()}),
    "long-128": (128, 128, {"n": 4096}),
    "long-causal-128": (128, 128, {"mask": tw.causal(), "n": 4096}),
    "long-causal-96": (96, 96, {"mask": tw.causal(), "n": 4096}),
    "plain-64": (64, 64, {}),
    "padding-128": (128, 128, {"mask": tw.key_padding(torch.tensor([N - 50]))}),  # which reads no row
    "many-heads-64": (64, 64, {"n": 4096, "batch": 3}),
    "softcap-64": (64, 64, {"scores": tw.softcap(20.0)}),
    "causal-256": (256, 256, {"mask": tw.causal()}),
    "plain-192-128": (192, 128, {}),
    "plain-96": (96, 96, {}),
    "causal-80": (80, 80, {"mask": tw.causal()}),
    "deterministic-packed-96": (96, 96, {"deterministic": True, "mask": tw.causal(), "packed": True}),
    "deterministic-64": (64, 64, {"deterministic": True}),
    "deterministic-long-128": (128, 128, {"deterministic": True, "n": 4096}),
    "deterministic-causal-128": (128, 128, {"deterministic": True, "mask": tw.causal()}),
    "deterministic-packed-128": (128, 128, {"deterministic": True, "mask": tw.causal(), "packed": True}),
} | {f"causal-packed-{d}": (d, d, {"mask": tw.causal(), "packed": True}) for d in (64, 128)}
SPILLED = {"plain-64": 120, "causal-packed-64": 160, "long-128": 160}
SPILLED |= {"long-causal-128": 200, "deterministic-long-128": 240}
"""Bytes of a thread that kernels may spill: those that hold more tiles or taller ones, and are faster all the same."""
SHARED = 232448  # bytes that a program may have


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_compile_without_waits(name: str, builds: list) -> None:
    """C75xx are ptxas's notes that it could not keep asynchronous products in flight."""
    from tilewise.backends.hopper.launch_backward import backward

    d, d_v, options = VARIANTS[name]
    assert backward(*_call(d, d_v, **options)) is not None
    assert len(builds) == (2 if max(d, d_v) > 128 else 1)  # of wide heads dk and dv, and dq apart
    if name == "many-heads-64":
        assert dict(builds[0][1].constants)["AHEAD"]
    for build in builds:
        said, shared, text = _assembled(*build)
        assert "C75" not in said and shared <= SHARED, said
        assert not reused_barriers(text)
        if max(d, d_v) <= 128:
            # Where walks are long the copy engine adds to dq, else threads do.
            assert ("cp.reduce.async.bulk" in text) == name.startswith("long")
            assert ("red.global.add" in text) != ("cp.reduce.async.bulk" in text)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)]
        assert spilled and max(spilled) <= SPILLED.get(name, 40), said


@pytest.mark.parametrize(
    ("d", "d_v", "options"),
    [(128, 128, {"deterministic": True}), (64, 64, {}), (192, 128, {}), (256, 256, {})],
)
def test_the_plan_says_how_dq_is_made(d: int, d_v: int, options: dict) -> None:
    from tilewise.backends.hopper.backward_tiles import describe_backward

    narrow = max(d, d_v) <= 128
    said = describe_backward(_call(d, d_v, **options)[0])
    assert ("in whatever order" in said) == (narrow and not options)
    assert ("in the order of the keys" in said) == (narrow and bool(options))
    assert ("dq by tiles of 128 rows" in said) != narrow


@pytest.mark.parametrize(
    "options", [{}, {"mask": tw.causal()}, {"packed": True}, {"deterministic": True}], ids=str
)
@pytest.mark.parametrize(("d", "d_v"), [(128, 128), (192, 128)])
def test_a_second_backward_launches_the_same_on_its_own_tensors(
    d: int, d_v: int, options: dict, builds: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tape: the same numbers, and in the place of each tensor the one of this call."""
    from tilewise.backends.hopper import launch_backward, repeat_backward

    noted: list[tuple[int, list]] = []

    def launcher(*made: object):
        return lambda grid, values: noted.append((grid, list(values)))

    for name in ("GluonLauncher", "plain_launcher", "kernel_launcher"):
        monkeypatch.setattr(launch_backward, name, launcher)
    problem, inputs, saved, grads, needs = _call(d, d_v, **options)
    others = replace(inputs, q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone())
    saved_too, grads_too = tuple(t.clone() for t in saved), (grads[0].clone(), None)
    first = launch_backward.backward(problem, inputs, saved, grads, needs)
    ordinary = noted.copy()
    noted.clear()
    second = launch_backward.backward(problem, others, saved_too, grads_too, needs)
    (tape,) = repeat_backward.tapes.values()
    assert tape is not None and len(noted) == len(ordinary)
    old = (inputs.q, inputs.k, inputs.v, *saved, grads[0], first.dq, first.dk, first.dv)
    new = (others.q, others.k, others.v, *saved_too, grads_too[0], second.dq, second.dk, second.dv)
    places = {a.data_ptr(): b.data_ptr() for a, b in zip(old, new, strict=True)}
    assert all(a.shape == b.shape and a.stride() == b.stride() for a, b in zip(old, new, strict=True))
    seen = set()
    for (grid, values), (grid_too, values_too) in zip(ordinary, noted, strict=True):
        assert grid == grid_too
        for a, b in zip(values, values_too, strict=True):
            base = getattr(a, "base", a)
            if isinstance(base, torch.Tensor):
                got = b.data_ptr() if hasattr(b, "data_ptr") else b
                wanted = places.get(base.data_ptr())
                seen.add(wanted)
                assert wanted is None or got == wanted
                if base is not a:
                    assert (list(a.shape), list(a.strides)) == (list(b.shape), list(b.strides))
            else:
                assert a == b
    assert seen >= set(places.values())


class Laid:
    """Stands for a launch whose arguments the driver takes as a block: the words written into it, the addresses."""

    def __init__(self, values: list) -> None:
        self.slots = {n: n for n, v in enumerate(values) if isinstance(v, torch.Tensor)}
        self.maps = {n: n for n, v in enumerate(values) if hasattr(v, "base")}
        self.function = self
        self.launched: list[dict[int, int]] = []

    def block(self) -> SimpleNamespace:
        words: dict[int, int] = {}
        return SimpleNamespace(words=words, config=SimpleNamespace(), config_at=words, parameters_at=None)

    @staticmethod
    def launch(words: dict[int, int], one: Laid, parameters: None, extra: None) -> int:
        one.launched.append(words.copy())
        return 0


@pytest.mark.parametrize("agree", [True, False])
def test_blocks_of_arguments_hold_each_address_once_both_ways_agree(
    agree: bool, builds: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second backward is made both ways; from the third on the driver launches, if the results were the same."""
    from tilewise.backends.hopper import launch_backward, repeat_backward

    laid: list[Laid] = []
    others: list[list] = []

    def note(run: object, grid: int, values: list) -> Laid:
        laid.append(Laid(values))
        return laid[-1]

    monkeypatch.setattr(repeat_backward, "laid_out", note)
    monkeypatch.setattr(repeat_backward, "_right", {})
    monkeypatch.setattr(repeat_backward, "alike", lambda *found: agree)
    monkeypatch.setattr(repeat_backward, "is_capturing", lambda: False)
    monkeypatch.setattr(repeat_backward, "current_device", lambda: -1)
    monkeypatch.setattr(repeat_backward, "current_stream", lambda index: 7)
    filled: list[tuple[int, ...]] = []
    monkeypatch.setattr(repeat_backward, "set_words", lambda *filling: filled.append(filling))
    for name in ("GluonLauncher", "plain_launcher", "kernel_launcher"):
        monkeypatch.setattr(
            launch_backward, name, lambda *made: lambda grid, values: others.append(list(values))
        )
    call = _call(64, 64, mask=tw.causal())
    for _ in range(2):
        launch_backward.backward(*call)
    launches = len(laid)
    assert launches and [len(one.launched) for one in laid] == [1] * launches and len(others) == 2 * launches
    found = launch_backward.backward(*call)
    assert [len(one.launched) for one in laid] == [1 + agree] * launches
    assert len(others) == (2 if agree else 3) * launches
    if agree:
        problem, inputs, saved, grads, _ = call
        given = (inputs.q, inputs.k, inputs.v, *saved, grads[0], found.dq, found.dk, found.dv)
        written = {address for one in laid for address in one.launched[-1].values()}
        assert written >= {t.data_ptr() for t in given}
        assert all(set(one.launched[-1]) == {*one.slots, *one.maps} for one in laid)
        assert all(one[1:] == (0, *filled[0][2:]) and one[2] > 4 and one[3] == 7 for one in filled)


def test_memory_is_linear_in_length() -> None:
    from tilewise.backends.hopper.backward_tiles import split_of, workspace_bytes

    problem, sizes = _call(128, 128)[0], []
    for n in (4096, 8192):
        longer = replace(problem, shape=problem.shape._replace(seqlen_q=n, seqlen_k=n))
        parts = 4 * split_of(longer, 132).floats(128)
        assert parts <= 132 * 2**17  # dk and dv of 128 keys, once a program
        sizes.append(workspace_bytes(longer, 132) - parts)
    assert sizes[1] == 2 * sizes[0]
    assert sizes[0] <= 4096 * 4 * 4 * (128 + 8)  # rows, heads, bytes, floats a row


# ---- on a GPU ------------------------------------------------------------------------------------------------


def _truth(q, k, v, do, causal: bool):
    """dq, dk, dv in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
        s = s.masked_fill(torch.arange(k.shape[2], device=q.device)[None, :] > i, -math.inf)
    out = torch.softmax(s, -1) @ v.repeat_interleave(group, 1)
    return torch.autograd.grad(out, (q, k, v), do.double())


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_against_float64(d: int, causal: bool, deterministic: bool) -> None:
    torch.manual_seed(0)
    q, k, v, do = _drawn(2, 4, 333, d), _drawn(2, 2, 777, d), _drawn(2, 2, 777, d), _drawn(2, 4, 333, d)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = tw.attention(
        *inputs, mask=tw.causal() if causal else None, backend="hopper", deterministic=deterministic
    )
    got = torch.autograd.grad(out, inputs, do, retain_graph=True)
    for one, wanted in zip(got, _truth(q, k, v, do, causal), strict=True):
        assert _error(one, wanted) < 6e-3
    if deterministic:
        for _ in range(20):
            again = torch.autograd.grad(out, inputs, do, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_later_backwards_are_as_right_as_the_first(d: int, options: dict) -> None:
    """They are launched from a tape, at last by the driver, with each call's own tensors in its memory's own places."""
    from tilewise.backends.hopper import repeat_backward

    repeat_backward.tapes.clear()
    torch.manual_seed(0)
    held = []
    for _ in range(5):
        q, k, v = (_drawn(2, 260, h, d).transpose(1, 2).requires_grad_() for h in (4, 2, 2))
        do = _drawn(2, 4, 260, d)
        out = tw.attention(q, k, v, mask=tw.causal(), backend="hopper", **options)
        got = torch.autograd.grad(out, (q, k, v), do)
        for one, wanted in zip(got, _truth(q, k, v, do, True), strict=True):
            assert _error(one, wanted) < 6e-3
        held.append((out, got, torch.full((3 << 20,), math.nan, device="cuda")))
    (tape,) = repeat_backward.tapes.values()
    assert tape is not None and tape.direct and all(repeat_backward._right.values())


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "n"), [(128, 8200), (96, 4200)])
def test_long_walks_against_float64(d: int, n: int, causal: bool) -> None:
    """Where shared memory holds more tiles of rows and the copy engine adds."""
    torch.manual_seed(0)
    q, k, v, do = (_drawn(1, heads, n, d) for heads in (2, 1, 1, 2))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = tw.attention(*inputs, mask=tw.causal() if causal else None, backend="hopper")
    got = torch.autograd.grad(out, inputs, do)
    for one, wanted in zip(got, _truth(q, k, v, do, causal), strict=True):
        assert _error(one, wanted) < 6e-3


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_packed_sequences_have_their_own_gradients(d: int) -> None:
    torch.manual_seed(0)
    lengths = (100, 1, 700, 64, 333)
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    cu = torch.tensor(edges, dtype=torch.int32, device="cuda")
    q, k, v, do = (_drawn(edges[-1], h, d) for h in (4, 2, 2, 4))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = tw.attention_varlen(*inputs, cu, mask=tw.causal(), backend="hopper")
    got = torch.autograd.grad(out, inputs, do)
    for a, b in zip(edges, edges[1:], strict=False):
        parts = [t[a:b].transpose(0, 1)[None] for t in (q, k, v, do)]
        for one, wanted in zip(got, _truth(*parts, True), strict=True):
            error = (one[a:b].transpose(0, 1)[None].double() - wanted).norm()
            assert error < 6e-3 * max(float(wanted.norm()), 0.1)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_is_hidden_changes_no_gradient(d: int) -> None:
    torch.manual_seed(0)
    q, k, v, do = (_drawn(1, 2, 500, d) for _ in range(4))
    lengths = torch.tensor([450], device="cuda")
    results = []
    for value in (0.0, math.nan, math.inf):
        k[:, :, 450:] = v[:, :, 450:] = value
        inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = tw.attention(*inputs, mask=tw.key_padding(lengths), q_offset=0, backend="hopper")
        results.append(torch.autograd.grad(out, inputs, do))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.isfinite(b).all()
            assert (a.float() - b.float()).abs().max() < 0.03
