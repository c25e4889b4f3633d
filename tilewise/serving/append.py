"""The op `tilewise::append_to_cache`: new keys and values into pools in place, queries and keys turned on the way.

Eager code calls the function of the device's backend family; compiled and fake code goes through the op, whose
schema says that the pools are changed.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.backends.protocol import Append
from tilewise.errors import DTypeError, ShapeError, message
from tilewise.quick import is_compiling, len_dispatch_stack

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = (Tensor, torch.nn.Parameter)

torch.library.define(
    "tilewise::append_to_cache",
    "(Tensor k_new, Tensor v_new, Tensor(a!) k, Tensor(b!) v, Tensor lengths, Tensor? block_table,"
    " Tensor? cu_seqlens_new, Tensor? q, Tensor? cu_seqlens_q, Tensor? cos, Tensor? sin, bool interleaved,"
    " Tensor? positions_q, Tensor? positions_k, Tensor? first, Tensor? k_scale, Tensor? v_scale) -> Tensor",
)


@torch.library.impl("tilewise::append_to_cache", "CompositeExplicitAutograd")
def _append_op(*args: Any) -> Tensor:
    inputs = Append(*args)
    check_room(inputs)
    turned = run(inputs)
    return inputs.k_new.new_empty(0) if turned is None else turned


@torch.library.register_fake("tilewise::append_to_cache")  # type: ignore[untyped-decorator]
def _append_fake(*args: Any) -> Tensor:
    inputs = Append(*args)
    if inputs.q is None or inputs.cos is None:
        return inputs.k_new.new_empty(0)
    return inputs.empty_q()


def check_room(inputs: Append) -> None:
    """Raise ShapeError unless every new key has a place in the pools; looked at on the CPU only."""
    lengths, table = inputs.lengths, inputs.block_table
    if lengths.device.type != "cpu":
        return
    size, pages = inputs.k.shape[2], inputs.k.shape[0]
    capacity = size * (1 if table is None else table.shape[1])
    present = lengths.tolist()
    if inputs.cu_seqlens_new is None:
        added = [inputs.k_new.shape[2]] * len(present)
    else:
        edges = inputs.cu_seqlens_new.tolist()
        added = [stop - start for start, stop in zip(edges, edges[1:], strict=False)]
        if edges[0] < 0 or edges[-1] > inputs.k_new.shape[0] or min(added, default=0) < 0:
            total = inputs.k_new.shape[0]
            raise ShapeError(f"cu_seqlens_new rises from 0 or more to at most {total}: {edges[:12]}")
    for b, (before, more) in enumerate(zip(present, added, strict=True)):
        if before < 0 or before + more > capacity:
            raise ShapeError(
                f"sequence {b} would hold {before} + {more} keys, and has room for {capacity}\n"
                "Give a longer cache, or more pages in the table."
            )
        if table is None or not more:
            continue
        used = table[b, before // size : -(-(before + more) // size)].tolist()
        for n, page in enumerate(used, before // size):
            if not 0 <= page < pages:
                raise ShapeError(f"page {n} of sequence {b} is {page}, and there are {pages} pages")


def check_new(k: Tensor, v: Tensor, edges: Tensor | None, pools: tuple[Tensor, Tensor], count: int) -> None:
    """Raise ShapeError unless the new keys and values of `count` sequences fit the pools; edges: cu_seqlens_new."""
    packed = edges is not None
    rank, head, token = (3, 1, 0) if packed else (4, 1, 2)
    given = {"k_new": k, "v_new": v, "k": pools[0], "v": pools[1]}
    if k.is_complex() or v.is_complex():
        raise DTypeError(message("k_new and v_new are real numbers", given))
    if k.ndim != rank or v.ndim != rank:
        shapes = "(T, H_kv, D) and (T, H_kv, D_v)" if packed else "(B, H_kv, N, D) and (B, H_kv, N, D_v)"
        raise ShapeError(message(f"k_new and v_new are {shapes}", given))
    held = [(pool.shape[1], pool.shape[3]) for pool in pools]
    if [(k.shape[head], k.shape[-1]), (v.shape[head], v.shape[-1])] != held:
        raise ShapeError(message("k_new and v_new have the cache's heads and head sizes", given))
    if k.shape[token] != v.shape[token]:
        raise ShapeError(message("k_new and v_new have one length", given))
    batch = k.shape[0] if edges is None else len(edges) - 1
    if batch != count or (not packed and v.shape[0] != count):
        raise ShapeError(message(f"k_new and v_new hold {count} sequences, as the call does", given))


def run(inputs: Append) -> Tensor | None:
    """The turned q, by the device's family of backends."""
    if inputs.k.device.type == "cuda":
        compiled = _of_backend("triton.launch_append", "append")
        if compiled is not None:
            return compiled(inputs)  # type: ignore[no-any-return]
    from tilewise.backends.reference import (
        append as reference,  # the package's import brings no backend along
    )

    return reference.append(inputs)


def prepare(inputs: Append) -> Callable[[Append], Tensor | None] | None:
    """A function for appends like this one, which was done; None where there is none that is quicker."""
    if type(inputs.k) in PLAIN and inputs.k.is_cpu:
        compiled = _of_backend("cpu.append", "prepare")
        return None if compiled is None else compiled(inputs, check_room, append)
    compiled = _of_backend("triton.launch_append", "prepare") if inputs.k.device.type == "cuda" else None
    return None if compiled is None else compiled(inputs)


@functools.lru_cache(maxsize=4)
def _of_backend(module: str, name: str) -> Callable[..., Any] | None:
    """A function of a module of the backends; None where its compiler is not installed."""
    try:
        return getattr(importlib.import_module(f"tilewise.backends.{module}"), name, None)
    except ImportError:
        return None


def append(inputs: Append, *, trusted: bool = False) -> Tensor | None:
    """Write new keys and values in place; gives the turned q, None where no query was to be turned.

    trusted: the places were checked by the caller.
    Raises: ShapeError, on the CPU, for keys without a place.
    """
    if is_compiling() or len_dispatch_stack() or type(inputs.k) not in PLAIN or inputs.k.is_meta:
        turned = torch.ops.tilewise.append_to_cache(*inputs)
        return None if inputs.q is None or inputs.cos is None else turned
    if not trusted:
        check_room(inputs)
    with torch.no_grad():
        return run(inputs)
