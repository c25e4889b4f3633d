"""Fixtures of the whole suite: one seed, the device, the backends, and poisoned allocations."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("TILEWISE_TEST_DEVICE", "cpu"))
BACKENDS = tuple(os.environ.get("TILEWISE_TEST_BACKENDS", "blockwise,naive").split(","))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, with the reason, unless the suite's device is a GPU."""
    if DEVICE.type != "cpu":
        return
    skip = pytest.mark.skip(reason="needs a GPU: set TILEWISE_TEST_DEVICE=cuda")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """TILEWISE_TEST_DEVICE, by default cpu."""
    return DEVICE


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each of TILEWISE_TEST_BACKENDS, by default blockwise and naive."""
    return request.param


@pytest.fixture
def poisoned_memory():
    """torch.empty and its kin return NaN-filled memory to the library while the test runs."""
    from tilewise.testing.poison import poisoned_memory

    with poisoned_memory():
        yield


@pytest.fixture
def check(backend: str, device: torch.device):
    """Calls of one backend, held to the tolerance of the reported cases. See tests/reported.py."""
    from reported import Checker

    return Checker(backend, device)
