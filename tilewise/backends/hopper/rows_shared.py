"""What the backward's kernels by tiles of rows share that depends on the spec: which rows a tile has, which blocks of
64 keys some of them see, and the weights. A template of `source`: kernels import from its printed form.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.backward_rings import same
from tilewise.backends.hopper.forward_place import owner, sequence
from tilewise.backends.hopper.plain import classify, derive, keep

LOG2 = gl.constexpr(1.4426950408889634)
FIELDS = gl.constexpr(9)
"""Numbers that tell the consumers about the program's rows: blocks to come, b, head, first row in the sequence, its
rows, its keys, its first row in the tensor, positions of its first row and key."""
RING = gl.constexpr(4)
BM = gl.constexpr(128)
BN = gl.constexpr(64)


@gluon.jit
def row_tile(t, sizes, tables, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr):
    """Tile t: batch entry, head, number, rows and keys of the sequence."""
    batch, heads, _, n_q, n_k, row_tiles, _, swizzle = sizes
    cu_q, cu_k, used_q, used_k = tables
    units = heads if VARLEN else batch * heads
    per = row_tiles * swizzle
    section = t // per
    inner = t - section * per
    width = gl.minimum(units - section * swizzle, swizzle)
    tile, unit = row_tiles - 1 - inner // width, section * swizzle + inner % width
    if VARLEN:
        h = unit
        b, tile = owner(cu_q, tile, batch, n_q, BM)
        row0, n_q = sequence(cu_q, used_q, b, n_q, USED_Q)
        key0, n_k = sequence(cu_k, used_k, b, n_k, USED_K)
    else:
        b = unit // heads
        h = unit - b * heads
        row0, key0 = 0, 0
    return b, h, tile, row0, n_q, key0, n_k


@gluon.jit
def codes_of(chunk, i0, i1, n_k, q_offset, k_offset, b, h, g, data):
    """A number for each of 32 key blocks: -1 if EMPTY, else its number times 4, plus 2 unless it is FULL."""
    block = chunk * 32 + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    j0 = block * BN
    j1 = gl.minimum(j0 + BN, n_k) - 1
    kind = classify(i0, i1, gl.minimum(j0, j1), j1, q_offset, k_offset, b, h, h, g, data)
    code = block * 4 + ((kind < 2) | (j0 + BN > n_k)).to(gl.int32) * 2
    return gl.where((kind > 0) & (j0 < n_k), code, -1)


@gluon.jit
def next_code(block, i0, i1, n_k, q_offset, k_offset, b, h, g, data):
    """The number of the first block after this one that is not EMPTY, of which there is one."""
    chunk = (block + 1) // 32
    none = 2147483647
    found = none
    while (found == none) & (chunk * (32 * BN) < n_k):
        codes = codes_of(chunk, i0, i1, n_k, q_offset, k_offset, b, h, g, data)
        found = gl.min(gl.where(codes > block * 4 + 3, codes, none), 0)
        chunk += 1
    return same(found)


@gluon.jit
def blocks(i0, i1, alive, n_k, q_offset, k_offset, b, h, g, data, HAS_MASK: gl.constexpr):
    """How many key blocks are not EMPTY; alive: whether there are such rows."""
    count = gl.where(alive, gl.cdiv(n_k, BN), 0)
    if HAS_MASK:
        most = count
        count = 0
        for chunk in range(0, gl.cdiv(most, 32)):
            codes = codes_of(chunk, i0, i1, n_k, q_offset, k_offset, b, h, g, data)
            count += gl.sum((codes >= 0).to(gl.int32), 0)
    return same(count)


@gluon.jit
def weights(s, m, code, i, h, about, scale, data, columns, HAS_MASK: gl.constexpr, HAS_TERMS: gl.constexpr):
    """(p, slope of the terms) of a tile of raw scores; hidden pairs of a PARTIAL tile have weight 0."""
    b, g, n_k, q_offset, k_offset = about
    j = ((code // 4) * BN + columns)[None, :]
    slope = s
    if HAS_TERMS:
        found = derive(s * scale, i, j, i + q_offset, j + k_offset, b, h, g, data)
        p = gl.exp2(gl.fma(found[0], gl.full_like(s, LOG2), m + gl.full_like(s, -0.0)))
        slope = found[1]
    else:
        # Adding -0.0 changes no number, and the compiler drops it.
        nothing = gl.full_like(s, -0.0)
        p = gl.exp2(gl.fma(s, nothing + scale * LOG2, m + nothing))
    if (code & 2) != 0:
        seen = j < n_k
        if HAS_MASK:
            seen = keep(s, i, j, i + q_offset, j + k_offset, b, h, g, data) & seen
        p = gl.where(seen, p, 0.0)
    return p, slope
