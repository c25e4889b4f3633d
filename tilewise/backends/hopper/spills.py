"""How much a compiled kernel spills, read from its binary: no GPU is asked, so every machine finds the same.

Source: the ELF format; sections `.nv.info.<kernel>` hold records of (format, attribute, size or value), and the one
of a frame's size is (function, bytes).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FRAME = 0x11
"""EIATTR_FRAME_SIZE"""
_SIZED = 4
"""EIFMT_SVAL: the record's last 16 bits are the bytes that follow."""


def spilled(binary: bytes) -> int:
    """Bytes of a thread's memory that a kernel keeps what registers do not hold in; 0 for a binary of another form."""
    try:
        return max((size for name, part in _sections(binary) for size in _frames(name, part)), default=0)
    except (struct.error, IndexError, ValueError):
        return 0


def _sections(binary: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file."""
    if binary[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", binary, 40)
    size, count, names = struct.unpack_from("<HHH", binary, 58)
    headers = [struct.unpack_from("<IIQQQQ", binary, start + size * n) for n in range(count)]
    text = headers[names][4]
    for name, _, _, _, at, length in headers:
        first = text + name
        yield binary[first : binary.index(b"\0", first)], binary[at : at + length]


def _frames(name: bytes, part: bytes) -> Iterator[int]:
    """The frame sizes that a section holds."""
    if not name.startswith(b".nv.info"):
        return
    at = 0
    while at + 4 <= len(part):
        form, attribute, size = struct.unpack_from("<BBH", part, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute == _FRAME and size == 8:
            yield struct.unpack_from("<II", part, at)[1]
        at += size
