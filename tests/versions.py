"""Marks for what needs more than the oldest torch and Triton that Tilewise runs with."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _triton() -> tuple[int, ...]:
    try:
        return release(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return (0,)


TORCH = release(torch.__version__)
OLD_DYNAMO = TORCH < (2, 11)
"""torch 2.5 to 2.10 cannot trace `&`, `|` and masks' own objects (made outside the compiled code they work)."""
needs_dynamo = pytest.mark.skipif(OLD_DYNAMO, reason="masks are composed inside the compiled function")
needs_triton = pytest.mark.skipif(_triton() < (3, 6), reason="needs Triton 3.6")
