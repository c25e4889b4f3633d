"""Every cached case on every backend, within its budgets; what no sequence uses of the pools is NaN."""

from __future__ import annotations

import pytest
import torch

from tilewise.testing.cases_cached import cached_cases
from tilewise.testing.conformance_cached import run_cached_case

CASES = {case.name: case for case in cached_cases()}


@pytest.mark.parametrize("name", CASES)
def test_cached_case(name: str, backend: str, device: torch.device, poisoned_memory: None) -> None:
    run_cached_case(CASES[name], backend, device)
