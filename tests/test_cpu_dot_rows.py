"""Few rows of q and bf16: scores by dot products of pairs."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise as tw
from tilewise import quick
from tilewise.backends.reference.blockwise import Blockwise

pytest.importorskip("numba", reason="the CPU backend needs Numba")


@pytest.mark.parametrize("d", [16, 20, 40, 72, 100, 128])
@pytest.mark.parametrize("way", ["", "plain"])
@pytest.mark.parametrize("heads, rows", [((8, 2), 1), ((3, 3), 1), ((5, 1), 3)])
def test_few_rows_by_pairs(
    d: int, heads: tuple[int, int], rows: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of few rows as products of pairs: head sizes that end amid a vector, before numbers that are no head's;
    one row of q and several; a negative scale. By the instructions of this processor, and by those that any has."""
    if way:
        monkeypatch.setenv("TILEWISE_CPU_BF16", way)

    def refuse(*_: object) -> None:
        raise AssertionError("the call was done again by the reference")

    monkeypatch.setattr(Blockwise, "forward", refuse)
    quick.ready.clear()
    (h, hkv), wide = heads, d + 9
    q, k, v = (torch.randn(2, n, m, d).bfloat16() for n, m in ((h, rows), (hkv, 77), (hkv, 77)))
    held = torch.full((2, hkv, 77, wide), math.nan, dtype=torch.bfloat16)
    held[..., :d] = k
    out, lse = tw.attention(q, held[..., :d], v, scale=-0.4, mask=tw.causal(), backend="cpu", return_lse=True)
    want, want_lse = tw.attention(
        *(t.double() for t in (q, k, v)), scale=-0.4, mask=tw.causal(), backend="naive", return_lse=True
    )
    assert (out.double() - want).abs().max() < 2e-2
    assert (lse.double() - want_lse).abs().max() < 1e-4
    quick.ready.clear()
