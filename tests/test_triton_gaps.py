"""Packed tokens that belong to no sequence get 0 and -inf, and nothing else is touched; in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from versions import needs_triton

pytestmark = needs_triton

PROGRAM = """
import torch, triton_interpreter
triton_interpreter.repair()
from tilewise.backends.triton.gap_kernel import fill_gaps

edges = torch.tensor([3, 10, 10, 40, 41], dtype=torch.int32)
lengths = torch.tensor([4, 0, 33, 1], dtype=torch.int32)
for used in (None, lengths):
    out, lse = torch.ones(60, 2, 24, dtype=torch.float16), torch.ones(2, 60)
    fill_gaps[(5, 3)](
        out, lse, edges, used, *out.stride(), lse.stride(0), 60, 4, 2, 24, USED=used is not None, BLOCK_D=32
    )
    owned = torch.zeros(60, dtype=torch.bool)
    for b in range(4):
        n = int(edges[b + 1] - edges[b])
        owned[edges[b] : edges[b] + (n if used is None else min(n, int(used[b])))] = True
    assert torch.equal(out != 0, owned[:, None, None].expand(60, 2, 24))
    assert torch.equal(lse, torch.where(owned, 1.0, -torch.inf).expand(2, 60))
"""


def test_gaps_are_filled_and_nothing_else():
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
