"""Packed tokens that belong to no sequence have no gradient, also those before the first sequence: what writes it runs
in Triton's interpreter here, and on a Hopper GPU backwards are compared with float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from versions import needs_triton

import tilewise as tw

pytestmark = needs_triton
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

PROGRAM = """
import torch, triton, triton_interpreter
import triton.language as tl
triton_interpreter.repair()
from tilewise.backends.hopper.backward_gaps import PROGRAMS, clear_gaps

@triton.jit
def run(cu, used, batch, total, a, a_width, b, b_width, m, low, delta, heads):
    clear_gaps(tl.program_id(0), cu, used, batch, total, a, a_width, b, b_width, m, low, delta, heads)

CASES = (
    ([0, 10, 20], 20, None), ([5, 10, 10, 400], 700, [3, 0, 300]), ([0], 10, None), (list(range(300)), 310, None),
)
for edges, total, lengths in CASES:
    cu = torch.tensor(edges, dtype=torch.int32)
    used = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    a, b = (torch.ones(total, 3, width, dtype=torch.bfloat16) for width in (16, 8))
    m, low, delta = (torch.ones(3, total) for _ in range(3))
    run[(PROGRAMS.value,)](cu, used, len(edges) - 1, total, a, 48, b, 24, m, low, delta, 3)
    owned = torch.zeros(total, dtype=torch.bool)
    for n, (start, stop) in enumerate(zip(edges, edges[1:])):
        owned[start : stop if lengths is None else min(stop, start + lengths[n])] = True
    for t in (a, b):
        assert torch.equal(t != 0, owned[:, None, None].expand(t.shape))
    assert torch.equal(m, torch.where(owned, 1.0, torch.inf).expand(3, total))
    assert all(torch.equal(t, owned.float().expand(3, total)) for t in (low, delta))
"""


def test_what_no_sequence_owns_is_cleared_and_nothing_else() -> None:
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("used", (False, True))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_tokens_of_no_sequence_have_no_gradient(d: int, used: bool, deterministic: bool) -> None:
    torch.manual_seed(0)
    edges = torch.tensor([300, 430, 430, 431, 900], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([100, 0, 1, 400], device="cuda", dtype=torch.int32) if used else None
    given = {"seqused_q": lengths, "seqused_k": lengths} if used else {}
    q, k, v, do = (torch.randn(1300, 4, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def gradients(backend: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        tensors = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        how = {"mask": tw.causal(), "backend": backend, "deterministic": deterministic}
        out = tw.attention_varlen(*tensors, edges, edges, **how, **given)
        for _ in range(3):  # by the ordinary way, by both, and by the tape
            torch.empty(256 << 20, device="cuda").fill_(float("nan"))
            found = torch.autograd.grad(out, tensors, do.to(dtype), retain_graph=True)
        return found

    owned = torch.zeros(1300, dtype=torch.bool, device="cuda")
    for b in range(4):
        start = int(edges[b])
        owned[start : start + (int(lengths[b]) if used else int(edges[b + 1]) - start)] = True
    for got, wanted in zip(
        gradients("hopper", torch.bfloat16), gradients("blockwise", torch.float64), strict=True
    ):
        assert (got[~owned] == 0).all()
        assert (got.double() - wanted).norm() < 6e-3 * wanted.norm()
