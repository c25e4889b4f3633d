"""The folds of plain attention: templates import them, and a printed module has a spec's folds in their place."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.forward_finish import LOG2
from tilewise.backends.hopper.words import rate_if, times_unless

LINES = gl.constexpr(False)
"""Whether the mask has conditions that leave each row a run of columns."""
BELOW = gl.constexpr(False)
"""Whether some of them cut columns from below."""
OTHER = gl.constexpr(False)
"""Whether the mask has anything else."""
SIMPLE = gl.constexpr(True)
"""Whether there are no score terms, and the mask cuts rows at their later ends alone."""
SCORED = gl.constexpr(False)
"""Whether there are score terms."""
PAIRED = gl.constexpr(False)
"""Whether bounded weights are made in pairs, with their sums (`words.capped_weights`)."""
STRIPES, REST = gl.constexpr(False), gl.constexpr(False)
"""Whether that has stripes of a number of the call, and whether anything but those."""


@gluon.jit
def row_parts(i, q, b, h, g, scale, data):
    """What belongs to rows, made once for a tile."""
    return (scale * LOG2,)


@gluon.jit
def scores(
    raw,
    parts,
    i,
    j,
    q,
    k,
    j0,
    k0,
    b,
    h,
    g,
    scale,
    FUSED: gl.constexpr,
    BOUNDED: gl.constexpr,
    FRESH: gl.constexpr,
    data,
):
    """(u, rate, shift): u * rate + shift is the score in powers of two; if BOUNDED, u is 2^(score - shift)."""
    return times_unless(FUSED, raw, parts[0]), rate_if(FUSED, parts[0]), gl.to_tensor(0.0)


@gluon.jit
def limits(parts, i, q, n_k, k_offset, b, h, g, scale, data):
    """The first and the last column that lines leave a row."""
    return gl.to_tensor(0), n_k - 1


@gluon.jit
def stripes(marks, parts, i, j, q, k, j0, k0, b, h, g, scale, data):
    """marks without the bits of a thread's columns that a stripe of the mask hides."""
    return marks


@gluon.jit
def sees(raw, parts, i, j, q, k, j0, k0, b, h, g, scale, FRESH: gl.constexpr, data):
    """Which pairs the rest of the mask's other part lets through."""
    return gl.to_tensor(True)


@gluon.jit
def kinds(i0, i1, j0, j1, q_offset, k_offset, b, h0, h1, g, data):
    """Bit 0 unless EMPTY; bit 1 unless lines are FULL, bit 2 the others."""
    return gl.full_like(j0, 1)


@gluon.jit
def reach(i0, i1, q_offset, k_offset, b, h0, h1, g, data):
    """The first and the last column that lines leave any of the rows."""
    return gl.to_tensor(0), gl.to_tensor(2**31 - 1)


@gluon.jit
def keep(s, i, j, q, k, b, h, g, data):
    """Which pairs are visible."""
    return gl.to_tensor(True)


@gluon.jit
def derive(s, i, j, q, k, b, h, g, data):
    """Score, and d score / d s."""
    return s, gl.full_like(s, 1.0)


@gluon.jit
def classify(i0, i1, j0, j1, q_offset, k_offset, b, h0, h1, g, data):
    """0 EMPTY, 1 PARTIAL, 2 FULL."""
    return gl.full_like(j0, 2)
