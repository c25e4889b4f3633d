"""Keys of half the width that become float32 before a pass over them, where enough blocks of rows meet them."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw

pytest.importorskip("numba", reason="needs Numba")

from test_cpu_backend import draw


def widened_calls(dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Calls whose keys are widened before the pass: out and lse of rows far apart, of a group of heads, of a head size
    that fills no vector, of packed sequences; then the gradients of the last."""
    torch.manual_seed(1)
    found = []
    for sizes, mask in (((2, 4, 2, 300, 333, 40, 24), None), ((1, 3, 1, 200, 260, 128, 64), tw.causal())):
        q, k, v = draw(*sizes, dtype=dtype)
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        found.append(tw.attention(q, k, v, mask=mask, backend="cpu", return_lse=True))
    q, k, v = (torch.randn(700, heads, 64).to(dtype).requires_grad_() for heads in (4, 2, 2))
    lengths = torch.tensor([0, 390, 401, 700], dtype=torch.int32)
    out, lse = tw.attention_varlen(q, k, v, lengths, lengths, backend="cpu", return_lse=True)
    return [*found, (out, lse, *torch.autograd.grad(out.float().square().sum(), (q, k, v)))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_widened_once_give_the_same_bits(
    dtype: torch.dtype, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where enough blocks of rows meet them, k and v become float32 before the pass; few keys once per thread and head;
    others block by block."""
    from tilewise import quick
    from tilewise.backends.cpu import kept_keys, launch

    monkeypatch.setenv("TILEWISE_CPU_BF16", "wide")
    said, turner = [], launch.turner
    monkeypatch.setattr(launch, "turner", lambda *a: said.append(a) or turner(*a))
    results, counts = [], []
    for least, own in ((1, kept_keys.OWN), (1 << 30, kept_keys.OWN), (1 << 30, 0)):
        monkeypatch.setattr(kept_keys, "OWN", own)
        monkeypatch.setattr(launch, "LEAST_READERS", dict.fromkeys((4, 8, 16), least))
        quick.ready.clear()
        results.append(widened_calls(dtype))
        counts.append(len(said))
    quick.ready.clear()
    assert counts[0] >= 3 and counts[2] == counts[1] == counts[0]
    for once, kept, block_by_block in zip(*results, strict=True):
        assert all(map(torch.equal, once, block_by_block)) and all(map(torch.equal, kept, block_by_block))


def test_a_pass_before_is_for_twice_as_many_blocks_where_copies_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilewise import quick
    from tilewise.backends.cpu import launch

    said, turner = [], launch.turner
    monkeypatch.setattr(launch, "turner", lambda *a: said.append(a) or turner(*a))
    monkeypatch.setattr(launch, "LEAST_READERS", dict.fromkeys((4, 8, 16), 2))
    quick.ready.clear()
    for rows, head_dim, before in ((192, 64, False), (256, 64, True), (128, 1024, True)):
        said.clear()
        q = torch.randn(1, 1, rows, head_dim, dtype=torch.float16)
        k = torch.randn(1, 1, 640 if head_dim == 1024 else rows, head_dim, dtype=torch.float16)
        tw.attention(q, k, k, backend="cpu")
        assert bool(said) == before
    quick.ready.clear()
