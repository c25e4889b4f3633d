"""Where large tensors of a CPU lie."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewise import memory
from tilewise.serving import KVCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pools_begin_with_a_huge_page(dtype: torch.dtype) -> None:
    shape = (3, 5, 1 << 20)
    t = memory.pool(shape, dtype)
    assert t.shape == shape and t.dtype == dtype and t.is_contiguous() and t._base is None
    if sys.platform.startswith("linux"):
        assert t.data_ptr() % memory.HUGE == 0
    t.view(torch.uint8).fill_(3)
    assert int(t.view(torch.uint8).sum(dtype=torch.int64)) == 3 * t.numel() * t.element_size()


def test_tensors_without_memory_and_small_ones() -> None:
    assert memory.pool((3, 1 << 23), device="meta").device.type == "meta"
    assert memory.pool((2, 3)).untyped_storage().nbytes() == 24
    with torch.device("meta"):
        assert memory.pool((3, 1 << 23), device=None).device.type == "meta"
    with FakeTensorMode():
        assert memory.pool((3, 1 << 23), torch.bfloat16).shape == (3, 1 << 23)


def test_a_view_is_written_and_saved_as_any_tensor(tmp_path) -> None:
    with torch.inference_mode():
        inner = memory.pool((1 << 22,))
    assert inner.is_inference()
    t = memory.pool((1 << 22,)).zero_().requires_grad_()
    (2 * t).sum().backward()
    assert t.grad is not None and float(t.grad[0]) == 2.0
    torch.save(t.detach(), tmp_path / "t.pt")
    torch.testing.assert_close(torch.load(tmp_path / "t.pt"), t.detach())


def test_large_caches_take_any_device() -> None:
    """Without a device, with one that is named, and with one that is not the processor."""
    for device in (None, "cpu", torch.device("cpu"), "meta"):
        cache = KVCache.allocate(1, 2, 16384, 128, device=device)
        assert cache.k.shape == (1, 2, 16384, 128)
        assert cache.k.device.type == ("meta" if device == "meta" else "cpu")
