"""Counts of operations and of bytes, from sizes alone, and traces: runs of attention recorded tile by tile."""

from __future__ import annotations

from .flops import attention_flops, exponentials
from .io_model import bytes_ordinary, bytes_tiled, matrix_bytes_avoided
from .trace_run import Trace, trace

__all__ = [
    "Trace",
    "attention_flops",
    "bytes_ordinary",
    "bytes_tiled",
    "exponentials",
    "matrix_bytes_avoided",
    "trace",
]
