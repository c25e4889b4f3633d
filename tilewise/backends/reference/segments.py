"""Cut a call into segments: batch entries that share a row range and a key range.

Dense and packed calls look alike from here on: every tensor is (B, H, N, D), a packed one has B = 1, and a
segment says which rows, which keys, which value of b, and how rows and columns become positions. With pages each
sequence is a segment; its keys are columns of the sequence, found by `pages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.errors import UnsupportedProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tilewise.problem import Inputs, Problem


@dataclass(frozen=True)
class Segment:
    """batch: entries of the tensors' first dimension; first_batch: the value of b at the first of them.
    rows, keys: ranges of the tensors' third dimension. q_offset, k_offset: int or (entries,) int tensor.
    first_key: columns before it are left padding."""

    batch: slice
    first_batch: int
    rows: slice
    keys: slice
    q_offset: int | Tensor
    k_offset: int | Tensor
    first_key: int = 0

    @property
    def entries(self) -> int:
        return int(self.batch.stop) - int(self.batch.start)

    @property
    def seqlen_q(self) -> int:
        return int(self.rows.stop) - int(self.rows.start)

    @property
    def seqlen_k(self) -> int:
        return int(self.keys.stop) - int(self.keys.start)


def uniform(problem: Problem, t: Tensor) -> Tensor:
    """A q-, k-, v- or out-like tensor as a (B, H, N, D) view, an lse-like one as (B, H, N)."""
    if problem.options.layout == "dense" or t.ndim == 4:  # a pool lies in pages whatever the layout of q
        return t
    return t.transpose(0, 1)[None] if t.ndim == 3 else t[None]


def _pick(offset: int | Tensor, batch: slice) -> int | Tensor:
    if not isinstance(offset, Tensor):
        return offset
    if offset.ndim == 0 or offset.shape[0] == 1:
        return offset.reshape(1).expand(batch.stop - batch.start)
    return offset[batch]


def segments(problem: Problem, inputs: Inputs, entries: int) -> Iterator[Segment]:
    """All segments of a call, at most `entries` batch entries each."""
    if problem.options.pages:
        yield from _paged(problem, inputs)
        return
    if problem.options.layout == "varlen":
        yield from _packed(problem, inputs)
        return
    shape = problem.shape
    last = shape.seqlen_k - shape.seqlen_q
    q_offset = last if inputs.q_offset is None else inputs.q_offset
    for start in range(0, shape.batch, entries):
        batch = slice(start, min(start + entries, shape.batch))
        yield Segment(
            batch, start, slice(0, shape.seqlen_q), slice(0, shape.seqlen_k),
            _pick(q_offset, batch), _pick(inputs.k_offset, batch),
        )  # fmt: skip


def _paged(problem: Problem, inputs: Inputs) -> Iterator[Segment]:
    shape, packed = problem.shape, problem.options.layout == "varlen"
    if packed:
        rows = _ranges(inputs.cu_seqlens_q, inputs.seqused_q, shape.seqlen_q)
    else:
        rows = [slice(0, n) for n in _counts(inputs.seqused_q, shape.seqlen_q, shape.batch, shape.seqlen_q)]
    used = _counts(inputs.seqused_k, shape.seqlen_k, shape.batch, shape.seqlen_k)
    padded = _counts(inputs.leftpad_k, shape.seqlen_k, shape.batch, 0)
    for b, (row, length, pad) in enumerate(zip(rows, used, padded, strict=True)):
        here = slice(b, b + 1)
        last = length - pad - (row.stop - row.start)
        q_offset = last if inputs.q_offset is None else _pick(inputs.q_offset, here)
        # Positions count from the first key that is no padding.
        k_offset = _pick(inputs.k_offset, here) - pad
        batch = slice(0, 1) if packed else here
        yield Segment(batch, b, row, slice(0, length), q_offset, k_offset, min(pad, length))


def _counts(given: Tensor | None, most: int, batch: int, missing: int) -> list[int]:
    """A length of each sequence, clamped to 0..most."""
    if given is None:
        return [missing] * batch
    _refuse_capture(given)
    return [min(max(n, 0), most) for n in given.tolist()]


def _packed(problem: Problem, inputs: Inputs) -> Iterator[Segment]:
    rows = _ranges(inputs.cu_seqlens_q, inputs.seqused_q, problem.shape.seqlen_q)
    keys = _ranges(inputs.cu_seqlens_k, inputs.seqused_k, problem.shape.seqlen_k)
    for b, (row, key) in enumerate(zip(rows, keys, strict=True)):
        last = (key.stop - key.start) - (row.stop - row.start)
        here = slice(b, b + 1)
        q_offset = last if inputs.q_offset is None else _pick(inputs.q_offset, here)
        yield Segment(slice(0, 1), b, row, key, q_offset, _pick(inputs.k_offset, here))


def _ranges(cu_seqlens: Tensor | None, used: Tensor | None, total: int) -> list[slice]:
    """Token ranges of the sequences, clamped to the tensor: lengths on a device are never trusted."""
    assert cu_seqlens is not None  # a packed call carries it
    _refuse_capture(cu_seqlens)
    edges = [min(max(e, 0), total) for e in cu_seqlens.tolist()]
    lengths = [max(stop - start, 0) for start, stop in zip(edges, edges[1:], strict=False)]
    if used is not None:
        lengths = [min(n, max(u, 0)) for n, u in zip(lengths, used.tolist(), strict=True)]
    return [slice(start, start + n) for start, n in zip(edges, lengths, strict=False)]


def _refuse_capture(lengths: Tensor) -> None:
    if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedProblem(
            "blockwise reads lengths on the host, which a CUDA graph capture does not allow\n"
            "Capture dense calls with tilewise.key_padding, or run packed and cached ones outside the graph."
        )
