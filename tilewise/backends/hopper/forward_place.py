"""Where the tiles of the Hopper forward lie: which rows and keys a tile's number means."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCKS = gl.constexpr(32)
"""Key blocks classified at once: one a lane."""
RECORD = gl.constexpr(40)
"""int32 that `range_kernel` leaves for a tile: first block, one past the last, and from CODES on 32 codes."""
CODES = gl.constexpr(8)
BEYOND = gl.constexpr(2**24)
"""More lines than a call has."""
SEARCH = gl.constexpr(256)
"""Sequence starts looked at together."""


@gluon.jit
def edge(cu_ptr, n, total):
    """Entry n of a table of sequence starts, never outside the tensor."""
    return gl.minimum(gl.maximum(gl.load(cu_ptr + n).to(gl.int32), 0), total)


@gluon.jit
def sequence(cu_ptr, used_ptr, b, total, USED: gl.constexpr):
    """First token and length of packed sequence b, clamped to the tensor."""
    first = edge(cu_ptr, b, total)
    length = gl.maximum(edge(cu_ptr, b + 1, total) - first, 0)
    if USED:
        length = gl.minimum(length, gl.maximum(gl.load(used_ptr + b).to(gl.int32), 0))
    return first, length


@gluon.jit
def owner(cu_ptr, slot, batch, total, tokens, WARPS: gl.constexpr = 1):
    """The packed sequence that owns a slot, and the slot's number in it: b owns those from cu[b] // tokens + b on. One
    before the first sequence's gets a number beyond all."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    count = 0
    for start in range(0, batch, SEARCH):
        n = start + gl.arange(0, SEARCH, layout=lanes)
        first = gl.load(cu_ptr + n, mask=n < batch, other=0).to(gl.int32)
        first = gl.minimum(gl.maximum(first, 0), total)
        count += gl.sum(((first // tokens + n <= slot) & (n < batch)).to(gl.int32), 0)
    b = gl.maximum(count - 1, 0)
    return b, gl.where(count > 0, slot - (edge(cu_ptr, b, total) // tokens + b), BEYOND // 16)


@gluon.jit
def place(
    t, sizes, tables, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr, NWG: gl.constexpr,
    PACK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Tile t, by its first line: the last rows first, `swizzle` heads abreast, splits of the keys side by side.

    Lines that tiles have more than there are rows lie behind the last row, but `early` ones before the first, where
    a causal row sees few keys.
    """
    batch, heads, n_q, n_k, row_tiles, swizzle, splits, early = sizes
    cu_q, cu_k, used_q, used_k = tables
    split = t % splits
    rest = t // splits
    units = heads if VARLEN else batch * heads
    per = row_tiles * swizzle
    section = rest // per
    inner = rest - section * per
    width = gl.minimum(units - section * swizzle, swizzle)
    tile, unit = row_tiles - 1 - inner // width, section * swizzle + inner % width
    if VARLEN:
        head = unit
        b, tile = owner(cu_q, tile, batch, n_q, 64 * NWG // PACK, WARPS)
        row0, n_q = sequence(cu_q, used_q, b, n_q, USED_Q)
        key0, n_k = sequence(cu_k, used_k, b, n_k, USED_K)
    else:
        b = unit // heads
        head = unit - b * heads
        row0, key0 = 0, 0
    return b, head, tile * (64 * NWG) - early, split, row0, n_q, key0, n_k


@gluon.jit
def line_of(base, w):
    """The first line of warpgroup w of a tile; of one before the first row, a line behind the last."""
    line = base + w * 64
    return gl.where(line < 0, line + BEYOND, line)


@gluon.jit
def looked_at(records, n, begin, end):
    """(begin, end, top, codes): blocks begin .. end - 1 narrowed to those that record n names, and the codes of the 32
    below `top`."""
    at = records + n * RECORD
    low, top = gl.load(at), gl.load(at + 1)
    codes = gl.load(at + CODES + gl.arange(0, BLOCKS, layout=gl.BlockedLayout([1], [32], [1], [0])))
    begin = gl.maximum(begin, low)
    return begin, gl.minimum(end, top), top, gl.where((codes >> 10) >= begin, codes, -1)


@gluon.jit
def unlooked(end):
    """(top, codes) where nothing was looked at before `end`."""
    return end + BLOCKS, gl.full([BLOCKS], -1, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def offset_of(offset, offset_ptr, b, default, KIND: gl.constexpr):
    """Position of the first row or column: a number, one per batch entry, or the default."""
    if KIND == "tensor":
        found = gl.load(offset_ptr + b).to(gl.int32)
    elif KIND == "last":
        found = default
    else:
        found = offset
    return found


@gluon.jit
def heads_of(head, group, PACK: gl.constexpr):
    """(KV head, first query head, last query head) of a tile; PACK: query heads in it."""
    if PACK > 1:
        return head, head * PACK, head * PACK + (PACK - 1)
    else:
        return head // group, head, head


@gluon.jit
def lanes_of(RL: gl.constexpr, AFRESH: gl.constexpr):
    """0 .. 63, of a warpgroup's lines. AFRESH: from a thread's number in its warp, which is read where it stands."""
    lanes = gl.arange(0, 64, layout=RL)
    if AFRESH:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.u32 t, %laneid; shr.u32 t, t, 2; add.s32 $0, $2, t; add.s32 $1, $0, 8; }",
            "=r,=r,r,r", [lanes & 48], dtype=gl.int32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        return lanes


@gluon.jit
def lines_of(head, base, w, PACK: gl.constexpr, RL: gl.constexpr, AFRESH: gl.constexpr = False):
    """Rows of a warpgroup's lines, and their heads."""
    line = line_of(base, w) + lanes_of(RL, AFRESH)
    if PACK > 1:
        return line // PACK, head * PACK + line % PACK
    else:
        return line, head + line * 0
