"""Counted loops on an LLVM builder."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tilewise.backends.cpu.words import I64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import llvmlite.ir as ir


@contextlib.contextmanager
def loop(
    b: ir.IRBuilder, count: ir.Value, name: str, done: Callable[[], ir.Value] | None = None
) -> Iterator[ir.Value]:
    """for index in range(count), int64; left early where `done` says so, asked before each turn."""
    before = b.block
    head, body, after = (b.append_basic_block(f"{name}_{part}") for part in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64, name)
    index.add_incoming(I64(0), before)
    more = b.icmp_signed("<", index, count)
    if done is not None:
        more = b.and_(more, b.not_(done()))
    b.cbranch(more, body, after)
    b.position_at_end(body)
    yield index
    index.add_incoming(b.add(index, I64(1)), b.block)
    b.branch(head)
    b.position_at_end(after)
