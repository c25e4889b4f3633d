"""The Hopper backward of heads with 192 columns and up to 128 of v: its kernels, what the assembler says, gradients;
and masks that read no row."""

from __future__ import annotations

import re

import pytest
import torch

import tilewise as tw

pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="needs Gluon")

from hopper_compile import reused_barriers
from test_hopper_backward import SHARED, _assembled, _call, _drawn, _error, _truth, builds, on_gpu

__all__ = ["builds"]
VARIANTS = {
    "causal": (128, {"mask": tw.causal()}),
    "causal-packed": (128, {"mask": tw.causal(), "packed": True}),
    "softcap": (128, {"mask": tw.causal(), "scores": tw.softcap(20.0)}),
    "narrow-v": (64, {"mask": tw.causal()}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_of_wide_heads(name: str, builds: list) -> None:
    """Tiles are drawn, of rows only where no slopes of terms want the registers of q; nothing waits or spills."""
    from tilewise.backends.hopper.launch_backward import backward

    d_v, options = VARIANTS[name]
    assert backward(*_call(192, d_v, **options)) is not None
    names = {kernel.__name__ for kernel, _ in builds}
    assert names == {"early", "rows" if "scores" in options else "drawn_rows"}
    for build in builds:
        said, shared, text = _assembled(*build)
        assert "C75" not in said and shared <= SHARED, said
        assert not reused_barriers(text)
        assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", said)) <= 40, said


@pytest.mark.parametrize("d", [64, 128, 192])
def test_masks_of_which_no_row_is_read(d: int, builds: list) -> None:
    """The kind of a tile is then one number for all tiles that are looked at together."""
    from tilewise.backends.hopper.launch_backward import backward

    assert backward(*_call(d, min(d, 128), mask=tw.key_padding(torch.tensor([250])))) is not None
    assert len(builds) == (2 if d > 128 else 1)
    for build in builds:
        assert "C75" not in _assembled(*build)[0]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("d_v", [128, 64])
@pytest.mark.parametrize(("n", "m"), [(1, 130), (300, 1301), (2100, 2100)])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_wide_heads(causal: bool, n: int, m: int, d_v: int) -> None:
    """Grouped heads, lengths that fill no tile, more tiles than run at once; five times the same bits."""
    torch.manual_seed(n + m)
    q, k, v, do = _drawn(2, 34, n, 192), _drawn(2, 17, m, 192), _drawn(2, 17, m, d_v), _drawn(2, 34, n, d_v)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = tw.attention(*inputs, mask=tw.causal() if causal else None, backend="hopper")
    got = torch.autograd.grad(out, inputs, do, retain_graph=True)
    for one, wanted in zip(got, _truth(q, k, v, do, causal), strict=True):
        assert _error(one, wanted) < 6e-3
    for _ in range(4):
        again = torch.autograd.grad(out, inputs, do, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
