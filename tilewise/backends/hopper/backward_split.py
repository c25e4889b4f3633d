"""Tiles of keys that are too few for another round of all programs, cut into ranges of row tiles.

Where nothing is hidden all tiles of keys are as long, so the last ones keep some programs busy for as long as a whole
round takes, and the others have nothing. Their row tiles, one tile of keys after the other, are divided into ranges of
`span`, one a program, which begin and end anywhere. A tile is then made by two or three programs. The one with its last
rows adds up: the others write their sums of dk and dv to memory, in the order in which threads hold them, and say so;
each does that before it waits for anybody, so nobody waits for ever, however few run at once. Who adds what in which
order follows from the sizes alone, so dk and dv repeat bit by bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.backward_rings import add_constraints, write_text
from tilewise.backends.hopper.backward_sums import announce, await_number, read_text

SECOND = gl.constexpr(1 << 30)
"""Added to the number of a range whose first rows, of a tile that others end, are done."""


@gluon.jit
def piece_of(t, units, left, split):
    """(tile of keys, its first row tile, how many, the range, the tile's first range, whether the range goes on) of
    draw t. units: row tiles of a tile of keys; left: tiles of keys that are cut. The tile's first range is below 0
    where another range ends the tile; of tiles that are made whole it is the range."""
    first, span, _ = split
    n = (t % SECOND) - first
    whole = n < 0
    begin = gl.maximum(n, 0) * span
    end = gl.minimum(begin + span, left * units)
    early, late = begin // units, (end - 1) // units
    # The later tile comes first: another program waits for it.
    goes_on = (late > early) & (t < SECOND) & (n >= 0)
    tile = gl.where(goes_on, late, early)
    u0 = gl.maximum(begin - tile * units, 0)
    u1 = gl.minimum(end - tile * units, units)
    opens = gl.where(u1 == units, tile * units // span, -1)
    return (
        gl.where(whole, t, first + tile), gl.where(whole, 0, u0), gl.where(whole, units, u1 - u0),
        gl.maximum(n, 0), gl.where(whole, 0, opens), goes_on)  # fmt: skip


@gluon.jit
def places_of(ptr, x):
    """Where each thread's floats of a tile like x begin, 64 columns at a time (`backward_rings.fragment_places`)."""
    row = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    col = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    above = (col // 64) * 16384 + (col % 8 // 2) * 16
    thread = ((row // 16) * 512 + (row % 8) * 64)[:, None] + above[None, :]
    return thread.to(gl.int64) + ptr.to(gl.int64, bitcast=True)


@gluon.jit
def write_sums(ptr, x):
    """A tile of sums to memory, as it lies in registers."""
    N: gl.constexpr = min(x.shape[1] // 2, 32)
    asm: gl.constexpr = write_text(N)
    constraints: gl.constexpr = add_constraints(N)
    gl.inline_asm_elementwise(
        asm, constraints, [x, places_of(ptr, x)], dtype=gl.float32, is_pure=False, pack=N)  # fmt: skip


@gluon.jit
def add_sums(ptr, x):
    """x plus what `write_sums` wrote of a tile like it."""
    N: gl.constexpr = min(x.shape[1] // 2, 32)
    asm: gl.constexpr = read_text(N)
    constraints: gl.constexpr = add_constraints(N)
    return x + gl.inline_asm_elementwise(
        asm, constraints, [gl.zeros_like(x), places_of(ptr, x)], dtype=gl.float32, is_pure=False,
        pack=N)  # fmt: skip


@gluon.jit
def share_sums(dk, dv, w: gl.constexpr, n, opens, parts, D: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr):
    """(dk, dv) of a half of a tile of keys, with those of the ranges from `opens` to n, or of range n alone left for
    others to add, if opens is below 0."""
    sums_ptr, said_ptr = parts
    ROOM: gl.constexpr = 64 * D
    for other in range(gl.where(opens < 0, n, opens), n):
        await_number(said_ptr + other * 2 + w, 4)
        ptr = sums_ptr + (other * 2 + w).to(gl.int64) * (2 * ROOM)
        if D2 == 0:
            dk = (add_sums(ptr, dk[0]),)
            dv = (add_sums(ptr + ROOM, dv[0]),)
        else:
            dk = (add_sums(ptr, dk[0]), add_sums(ptr + 64 * D1, dk[1]))
            dv = (add_sums(ptr + ROOM, dv[0]), add_sums(ptr + (ROOM + 64 * D1), dv[1]))
    if opens < 0:
        ptr = sums_ptr + (n * 2 + w).to(gl.int64) * (2 * ROOM)
        write_sums(ptr, dk[0])
        write_sums(ptr + ROOM, dv[0])
        if D2 > 0:
            write_sums(ptr + 64 * D1, dk[1])
            write_sums(ptr + (ROOM + 64 * D1), dv[1])
        # Each of four warps for what it wrote.
        announce(said_ptr + n * 2 + w)
    return dk, dv
