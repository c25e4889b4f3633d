"""Counts of operations and of bytes, from sizes alone: plain Python integers, no tensors."""

from __future__ import annotations

from .flops import attention_flops, exponentials
from .io_model import bytes_ordinary, bytes_tiled, matrix_bytes_avoided

__all__ = ["attention_flops", "bytes_ordinary", "bytes_tiled", "exponentials", "matrix_bytes_avoided"]
