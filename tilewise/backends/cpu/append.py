"""Appends to a cache on the processor that were laid out once: one call of compiled code for each.

The reference takes a dozen of torch's operations, 0.2 ms; what is done here is copying a few rows.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.backends.cpu import pool
from tilewise.backends.cpu.isa import detect
from tilewise.backends.cpu.launch import NAMES, kernel
from tilewise.memory_layout import lies_as

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewise.backends.protocol import Append

CHUNK = 64
"""Tokens of a task."""
ALONE = 1 << 18
"""Bytes of new keys and values up to which one thread writes them."""
PLAIN = (Tensor, torch.nn.Parameter)
len_dispatch_stack = torch._C._len_torch_dispatch_stack
transforms_active = torch._C._are_functorch_transforms_active


class PreparedAppend:
    """Appends that differ from one that was made in their tensors' contents and addresses only.

    refuse: says what is wrong with an append whose keys have no place. long: any other append, on the long way.
    """

    def __init__(
        self, inputs: Append, refuse: Callable[[Append], None], long: Callable[[Append], Tensor | None]
    ) -> None:
        from tilewise.backends.cpu.append_kernel import A

        self._slots: Any = A
        self._refuse, self._long = refuse, long
        self._free: list[tuple[Any, int]] = []
        values = (ctypes.c_int64 * A.count)()
        self._turned = _lay_out(values, inputs)
        self._values, self._tasks = bytes(values), values[A.num_tasks]
        function = kernel(detect(), "append", NAMES[inputs.k.dtype])
        self._function, self._worker = function, pool.worker(function)
        size = (inputs.k_new.numel() + inputs.v_new.numel()) * inputs.k.element_size()
        self._alone = size <= ALONE
        self._held = lies_as(inputs.held())

    def __call__(self, inputs: Append) -> Tensor | None:
        """As `append` of the reference.  Raises ShapeError for keys without a place; nothing is written then."""
        k_new, v_new, k, v, lengths, table, edges, q, edges_q, cos, sin = inputs[:11]
        first, a = inputs.first, self._slots
        if (
            len_dispatch_stack()
            or transforms_active()
            or not self._held(*inputs.held())
            or not _is_plain(k_new)
            or not _is_plain(v_new)
            or (q is not None and not _is_plain(q))
            or (cos is not None and not (_is_plain(cos) and _is_plain(sin)))
            or (edges is not None and not edges.is_contiguous())
            or (edges_q is not None and not edges_q.is_contiguous())
        ):
            return self._long(inputs)
        try:
            values, address = self._free.pop()
        except IndexError:
            values = (ctypes.c_int64 * a.count).from_buffer_copy(self._values)
            address = ctypes.addressof(values)
        values[a.k_new], values[a.v_new] = k_new.data_ptr(), v_new.data_ptr()
        values[a.k], values[a.v], values[a.lengths] = k.data_ptr(), v.data_ptr(), lengths.data_ptr()
        if table is not None:
            values[a.table] = table.data_ptr()
        if edges is not None:
            values[a.edges] = edges.data_ptr()
        if first is not None:
            values[a.first] = first.data_ptr()
        out = None
        if cos is not None and sin is not None:
            values[a.cos], values[a.sin] = cos.data_ptr(), sin.data_ptr()
            if q is not None:
                shape, strides, dtype = self._turned  # type: ignore[misc]
                out = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
                values[a.q], values[a.out] = q.data_ptr(), out.data_ptr()
                if edges_q is not None:
                    values[a.edges_q] = edges_q.data_ptr()
        values[a.task] = values[a.flag] = 0
        if self._alone:
            self._worker(address)
        else:
            pool.run_parallel(self._function, address, min(pool.num_threads(), self._tasks))
        wrong = values[a.flag]
        self._free.append((values, address))
        if wrong:
            self._refuse(inputs)
            return self._long(inputs)
        # What autograd kept of the pools is no longer what it was.
        torch.autograd.graph.increment_version(k)
        torch.autograd.graph.increment_version(v)
        return out


def prepare(
    inputs: Append, refuse: Callable[[Append], None], long: Callable[[Append], Tensor | None]
) -> PreparedAppend | None:
    """A function for appends like this one, which was done; None where they go the long way: other types, tables of
    angles that are not float32, factors of what is stored, given positions, memory that the kernel does not read."""
    from tilewise.backends.cpu.backend import DTYPES, _missing

    angles = [t for t in (inputs.cos, inputs.sin) if t is not None]
    rows = [inputs.k_new, inputs.v_new, inputs.k, inputs.v, *([] if inputs.q is None else [inputs.q])]
    whole = [inputs.lengths, inputs.first, inputs.cu_seqlens_new, inputs.cu_seqlens_q]
    isa = None if _missing() else detect()
    if (
        isa is None
        or isa.tall < 6
        or inputs.k.dtype not in DTYPES
        or (inputs.k.dtype == torch.float16 and not isa.half)
        or any(t.dtype != inputs.k.dtype or t.stride(-1) != 1 or not t.numel() for t in rows)
        or any(t is not None and (t.dtype != torch.int32 or not t.is_contiguous()) for t in whole)
        or any(
            t is not None for t in (inputs.positions_q, inputs.positions_k, inputs.k_scale, inputs.v_scale)
        )
        or (inputs.block_table is not None and not _rows_of_numbers(inputs.block_table))
        or (inputs.q is not None and not angles)
        or any(t.dtype != torch.float32 or t.stride(-1) != 1 for t in angles)
    ):
        return None
    return PreparedAppend(inputs, refuse, long)


def _is_plain(t: Tensor | None) -> bool:
    """Whether a tensor's memory holds its numbers."""
    return t is not None and type(t) in PLAIN and t.is_cpu and not t.is_neg() and not t._is_zerotensor()


def _rows_of_numbers(table: Tensor) -> bool:
    return table.dtype == torch.int32 and (table.shape[1] <= 1 or table.stride(1) == 1)


def _lay_out(values: Any, inputs: Append) -> tuple[Any, ...] | None:
    """Write strides and sizes; gives shape, strides and type of the turned q."""
    from tilewise.backends.cpu.append_kernel import A

    def strides(slot: int, t: Tensor, *dims: int) -> None:
        for n, dim in enumerate(dims, slot + 1):
            values[n] = 0 if dim < 0 else t.stride(dim) * t.element_size()

    packed, size = inputs.cu_seqlens_new is not None, inputs.k.shape[2]
    for slot, t in ((A.k_new, inputs.k_new), (A.v_new, inputs.v_new)):
        strides(slot, t, *((-1, 1, 0) if packed else (0, 1, 2)))
    for slot, t in ((A.k, inputs.k), (A.v, inputs.v)):
        strides(slot, t, 0, 1, 2)
    batch, tokens = len(inputs.lengths), inputs.k_new.shape[0 if packed else 2]
    numbers = {
        A.batch: batch, A.tokens: tokens, A.total: tokens, A.heads_kv: inputs.k.shape[1], A.page_size: size,
        A.pages: inputs.k.shape[0], A.capacity: size, A.dim: inputs.k.shape[3], A.dim_v: inputs.v.shape[3],
        A.chunk: tokens if packed else CHUNK, A.chunks: 1 if packed else -(-tokens // CHUNK),
    }  # fmt: skip
    if inputs.block_table is not None:
        numbers[A.capacity] = size * inputs.block_table.shape[1]
        numbers[A.table_b] = inputs.block_table.stride(0) * 4
    turned = None
    if inputs.cos is not None and inputs.sin is not None:
        numbers |= {
            A.positions: inputs.cos.shape[0],
            A.half: inputs.cos.shape[1],
            A.pairs: int(inputs.interleaved),
        }
        strides(A.cos, inputs.cos, 0)
        strides(A.sin, inputs.sin, 0)
        if inputs.q is not None:
            packed_q, out = inputs.cu_seqlens_q is not None, inputs.empty_q()
            order = (-1, 1, 0) if packed_q else (0, 1, 2)
            rows = inputs.q.shape[0 if packed_q else 2]
            strides(A.q, inputs.q, *order)
            strides(A.out, out, *order)
            numbers |= {A.rows: rows, A.total_q: rows, A.heads: inputs.q.shape[1]}
            numbers |= {A.chunks_q: 1 if packed or packed_q else -(-rows // CHUNK)}
            numbers[A.chunk] = max(tokens, rows) if packed or packed_q else CHUNK
            numbers[A.chunks] = 1 if packed or packed_q else numbers[A.chunks]
            turned = (out.shape, out.stride(), out.dtype)
    numbers[A.num_tasks] = batch * (numbers[A.chunks] + numbers.get(A.chunks_q, 0))
    for slot, number in numbers.items():
        values[slot] = number
    return turned
