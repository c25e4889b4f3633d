"""Which key blocks a tile of rows sees, and what the spec makes of a block's scores: the part of the Hopper forward
that is printed for each spec. `forward_kernel`, `forward_again_shared` and `range_kernel` are built on it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.forward_place import BLOCKS, heads_of, line_of
from tilewise.backends.hopper.forward_state import sums_of, weigh, whole_sums
from tilewise.backends.hopper.plain import (
    BELOW,
    LINES,
    OTHER,
    PAIRED,
    REST,
    SCORED,
    SIMPLE,
    STRIPES,
    kinds,
    limits,
    reach,
    row_parts,
    scores,
    sees,
    stripes,
)
from tilewise.backends.hopper.rings import fresh, here, hidden  # noqa: F401 - the first by what is printed
from tilewise.backends.hopper.stripes import cut, hide, stripe  # noqa: F401 - the last one by what is printed
from tilewise.backends.hopper.words import capped_weights

CROWDED = gl.constexpr(not SIMPLE)
"""Whether folds want many registers."""
LEAPS = gl.constexpr(STRIPES)
"""Whether a warpgroup often sees nothing of a block in the midst of a tile."""


@gluon.jit
def codes_of(top, begin, end, b, head, base, n_q, n_k, q_offset, k_offset, group, data, NWG: gl.constexpr,
             BN: gl.constexpr, PACK: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """A number for each of the 32 key blocks below `top`: -1 if it is EMPTY for all rows, else the block << 10, and for
    warpgroup w bit 1 + w if it is EMPTY, bit 4 + w and 7 + w unless a condition of the mask is FULL."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    block = top - BLOCKS + gl.arange(0, BLOCKS, layout=lanes)
    j0 = block * BN
    j1 = gl.minimum(j0 + BN, n_k) - 1
    g, h0, h1 = heads_of(head, group, PACK)
    code = block << 10
    seen = block < 0
    # One copy of the printed code: the producer has few registers.
    for w in range(hidden(NWG)):
        row = line_of(base, w)
        i0 = row // PACK
        i1 = gl.minimum((row + 63) // PACK, n_q - 1)
        kind = kinds(gl.minimum(i0, i1), i1, j0, j1, q_offset, k_offset, b, h0, h1, g, data)
        kind = gl.where((block < end) & (i0 < n_q), kind, kind & -2)
        code |= ((kind & 1) ^ 1) << (1 + w)
        code |= ((kind >> 1) & 1) << (4 + w)
        code |= ((kind >> 2) & 1) << (7 + w)
        seen |= (kind & 1) != 0
    return gl.where(seen & (block >= begin), code, -1)


@gluon.jit
def next_code(j, top, codes, begin, end, b, head, base, n_q, n_k, q_offset, k_offset, group, data,
              NWG: gl.constexpr, BN: gl.constexpr, PACK: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """The code of the last block below j that some row sees, or -1; and the end of the 32 blocks it was found in."""
    found = gl.max(gl.where((codes >> 10) < j, codes, -1), 0)
    while (found < 0) & (top - BLOCKS > begin):
        top -= BLOCKS
        codes = codes_of(
            top, begin, end, b, head, base, n_q, n_k, q_offset, k_offset, group, data, NWG, BN, PACK, WARPS
        )
        found = gl.max(codes, 0)
    return found, top, codes


@gluon.jit
def seen_blocks(begin, end, b, head, base, n_q, q_offset, k_offset, group, data, NWG: gl.constexpr, BN: gl.constexpr,
                PACK: gl.constexpr):  # fmt: skip
    """begin and end narrowed to the key blocks that the comparisons of the mask leave to the rows of a tile."""
    g, h0, h1 = heads_of(head, group, PACK)
    i0 = gl.maximum(base, 0) // PACK
    i1 = gl.minimum((base + 64 * NWG - 1) // PACK, n_q - 1)
    low, high = reach(i0, i1, q_offset, k_offset, b, h0, h1, g, data)
    return gl.maximum(begin, gl.maximum(low, 0) // BN), gl.minimum(end, high // BN + 1)


@gluon.jit
def parts_of(rows, q_offset, b, h, g, scale, data):
    """What belongs to rows of a tile, made once for it."""
    return row_parts(rows[:, None], rows[:, None] + q_offset, b, h, g, scale, data)


@gluon.constexpr_function
def tight(packed, varlen, width):
    """Whether a kind has no registers for what rows and columns make before the loop: packed heads or sequences, or
    rows cut from below, with score terms that are no tanh of the products alone."""
    return bool(SCORED and not PAIRED and (packed > 1 or BELOW or (varlen and width != 256)))


@gluon.jit
def parts_here(parts, TIGHT: gl.constexpr):
    """`parts_of`; if TIGHT, hidden: what follows from them and a column is not made before the loop, and kept."""
    made = ()
    for n in gl.static_range(len(parts)):
        made = made + (here(parts[n]) if TIGHT else parts[n],)
    return made


@gluon.jit
def marks_of(
    code, w, parts, rows, h, b, g, q_offset, k_offset, scale, data, BN: gl.constexpr, SL: gl.constexpr
):
    """For each row a bit for each of the thread's columns that stripes leave, where a block needs them.

    Made while products are waited for.
    """
    marks = gl.full([64], -1, gl.int32, gl.SliceLayout(1, SL))
    if STRIPES:
        if ((code >> (7 + w)) & 1) != 0:
            j0 = (code >> 10) * BN
            j = (j0 + gl.arange(0, BN, layout=gl.SliceLayout(0, SL)))[None, :]
            i = here(rows)[:, None]
            left = stripes(
                marks[:, None],
                parts,
                i,
                j,
                i + q_offset,
                j + k_offset,
                j0,
                j0 + k_offset,
                b,
                h,
                g,
                scale,
                data,
            )
            marks = gl.max(left, 1)
    return marks


@gluon.jit
def fold(s, code, w, marks, parts, rows, h, b, g, n_k, q_offset, k_offset, scale, data,
         FIRST: gl.constexpr, FUSED: gl.constexpr, BOUNDED: gl.constexpr, BN: gl.constexpr,
         SL: gl.constexpr, FRESH: gl.constexpr = False):  # fmt: skip
    """(u, rate, shift) of a tile of products: u * rate + shift is its score in powers of two, -inf where hidden.

    marks: of its rows, see `marks_of`. BOUNDED: u is 2^(score - shift), 0 where hidden. If PAIRED, it is (that, its
    sums over the columns of each of a row's threads). FRESH: numbers of the call are hidden, so that what follows from
    them is made in each block instead of kept.
    """
    if FRESH:
        scale, n_k, q_offset, k_offset = here(scale), here(n_k), here(q_offset), here(k_offset)
    POWERS: gl.constexpr = BOUNDED * (1 + PAIRED)
    HIDE: gl.constexpr = 0.0 if BOUNDED else float("-inf")
    j0 = (code >> 10) * BN
    k0 = j0 + k_offset
    j = (j0 + gl.arange(0, BN, layout=gl.SliceLayout(0, SL)))[None, :]
    i = rows[:, None]
    u, rate, shift = scores(
        s, parts, i, j, i + q_offset, j + k_offset, j0, k0, b, h, g, scale, FUSED, POWERS, FRESH, data
    )
    shift = gl.full([64, 1], 0.0, gl.float32, SL) + shift
    if POWERS == 2:
        cuts = gl.to_tensor(False)
        first = gl.full([64, 1], 0, gl.int32, SL)
        last = first
        if LINES:
            cuts = ((code >> (4 + w)) & 1) != 0
        if FIRST:
            cuts |= j0 + BN > n_k
        if LINES or FIRST:
            if cuts:
                i = here(rows)[:, None]
                low, high = limits(parts, i, i + q_offset, n_k, k_offset, b, h, g, scale, data)
                first, last = first + (low - j0), last + (high - j0)
        x, k, rate = u
        u = capped_weights(x, k, rate, cuts.to(gl.int32), first, last, BELOW)
        rate = gl.to_tensor(1.0)
    elif LINES or FIRST:
        cuts = False
        if LINES:
            cuts = ((code >> (4 + w)) & 1) != 0
        # The last keys, which may be missing, come first.
        if FIRST:
            cuts |= j0 + BN > n_k
        if cuts:
            i = here(rows)[:, None]
            if (STRIPES or (CROWDED and not BELOW)) and not FRESH:
                n_k, k_offset = here(n_k), here(k_offset)
            first, last = limits(parts, i, i + q_offset, n_k, k_offset, b, h, g, scale, data)
            u = cut(u, first - j0, last - j0, BELOW, BN // 2, BOUNDED)
    if OTHER:
        if ((code >> (7 + w)) & 1) != 0:
            i = here(rows)[:, None]
            if STRIPES:
                u = hide(u, marks, BN // 2, BOUNDED)
            if REST:
                seen = sees(s, parts, i, j, i + q_offset, j + k_offset, j0, k0, b, h, g, scale, FRESH, data)
                u = gl.where(seen, u, HIDE)
    return u, rate, gl.max(shift, 1)


@gluon.jit
def weights_of(u, m, rate, shift, BOUNDED: gl.constexpr, APART: gl.constexpr, BN: gl.constexpr,
               RL: gl.constexpr, dt: gl.constexpr):  # fmt: skip
    """(weights, their sums) of a tile as `fold` leaves it."""
    if BOUNDED and PAIRED:
        return u[0].to(dt), u[1] if APART else whole_sums(u[1], True, RL)
    else:
        p = u if BOUNDED else weigh(u, m, rate, shift)
        return p.to(dt), sums_of(p, APART, BN)
