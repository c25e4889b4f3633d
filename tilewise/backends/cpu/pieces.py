"""The sequences of a call: which rows, which keys, at which positions; lengths clamped to the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tilewise.problem import Inputs, Problem


class Piece(NamedTuple):
    """One batch entry or packed sequence: the slots of SEGMENT of the same names."""

    row0: int
    rows: int
    key0: int
    keys: int
    q_offset: int
    k_offset: int
    b: int
    tensor_b: int
    tensor_kv: int
    pages: int
    first: int
    flat: int

    @staticmethod
    def whole(problem: Problem) -> Piece:
        """All rows and all keys of a call, as one sequence."""
        return Piece(0, problem.shape.seqlen_q, 0, problem.shape.seqlen_k, *[0] * 8)


def pieces(problem: Problem, inputs: Inputs) -> list[Piece]:
    """All segments of the call, lengths clamped to the tensors."""
    s, options = problem.shape, problem.options
    if options.pages:
        return _of_cache(problem, inputs)
    if options.layout == "dense":
        last = s.seqlen_k - s.seqlen_q
        q_offsets = _offsets(last if inputs.q_offset is None else inputs.q_offset, s.batch)
        k_offsets = _offsets(inputs.k_offset, s.batch)
        return [
            Piece(0, s.seqlen_q, 0, s.seqlen_k, q_offsets[b], k_offsets[b], b, b, b, 0, 0, b * s.seqlen_q)
            for b in range(s.batch)
        ]
    rows = _ranges(inputs.cu_seqlens_q, inputs.seqused_q, s.seqlen_q)
    keys = _ranges(inputs.cu_seqlens_k, inputs.seqused_k, s.seqlen_k)
    k_offsets = _offsets(inputs.k_offset, s.batch)
    q_offsets = None if inputs.q_offset is None else _offsets(inputs.q_offset, s.batch)
    found = []
    for b, ((row0, nq), (key0, nk)) in enumerate(zip(rows, keys, strict=True)):
        q_offset = nk - nq if q_offsets is None else q_offsets[b]
        found.append(Piece(row0, nq, key0, nk, q_offset, k_offsets[b], b, 0, 0, 0, 0, 0))
    return found


def _offsets(offset: int | Tensor, batch: int) -> list[int]:
    if not isinstance(offset, torch.Tensor):
        return [int(offset)] * batch
    values = offset.reshape(-1).tolist()
    return values * batch if len(values) == 1 else values


def _ranges(cu_seqlens: Tensor | None, used: Tensor | None, total: int) -> list[tuple[int, int]]:
    edges = [min(max(e, 0), total) for e in cu_seqlens.tolist()]  # type: ignore[union-attr]
    lengths = [max(stop - start, 0) for start, stop in zip(edges, edges[1:], strict=False)]
    if used is not None:
        lengths = [min(n, max(u, 0)) for n, u in zip(lengths, used.tolist(), strict=True)]
    return list(zip(edges, lengths, strict=False))


def _of_cache(problem: Problem, inputs: Inputs) -> list[Piece]:
    """The sequences of a call over pools of pages."""
    s, table, capacity = problem.shape, inputs.block_table, problem.shape.seqlen_k
    packed = problem.options.layout == "varlen"
    if packed:
        rows = _ranges(inputs.cu_seqlens_q, inputs.seqused_q, s.seqlen_q)
    elif inputs.seqused_q is None:
        rows = [(0, s.seqlen_q)] * s.batch
    else:
        rows = [(0, min(max(n, 0), s.seqlen_q)) for n in inputs.seqused_q.tolist()]
    used = [capacity] * s.batch if inputs.seqused_k is None else inputs.seqused_k.tolist()
    padding = [0] * s.batch if inputs.leftpad_k is None else inputs.leftpad_k.tolist()
    q_offsets = None if inputs.q_offset is None else _offsets(inputs.q_offset, s.batch)
    k_offsets = _offsets(inputs.k_offset, s.batch)
    entries, address, step = list(range(s.batch)), 0, 0
    if table is not None and table.shape[1] == 1:
        # One page a sequence is an index of sequences in one piece.
        entries = table[:, 0].clamp(0, max(inputs.k.shape[0] - 1, 0)).tolist()
    elif table is not None:
        entries, address, step = [0] * s.batch, table.data_ptr(), table.stride(0) * 4
    found = []
    for b, (row0, n) in enumerate(rows):
        keys = min(max(used[b], 0), capacity)
        first = min(max(padding[b], 0), keys)
        q_offset = keys - first - n if q_offsets is None else q_offsets[b]
        found.append(Piece(
            row0, n, 0, keys, q_offset, k_offsets[b] - first, b, 0 if packed else b, entries[b],
            address + b * step if address else 0, first, 0 if packed else b * s.seqlen_q,
        ))  # fmt: skip
    return found


def covered(problem: Problem, found: list[Piece]) -> bool:
    """Whether the sequences, one after another, take every row and every key of the call."""
    if problem.options.layout == "dense":
        return all(piece.rows == problem.shape.seqlen_q for piece in found)
    s, row, key, pages = problem.shape, 0, 0, problem.options.pages
    for piece in found:
        if piece.row0 != row or (piece.key0 != key and not pages):
            return False
        row, key = row + piece.rows, key + piece.keys
    return row == s.seqlen_q and (key == s.seqlen_k or pages)
