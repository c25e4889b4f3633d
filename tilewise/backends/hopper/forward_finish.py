"""How a tile of the Hopper forward ends: its sums become out and lse, and leave the registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewise.backends.hopper.forward_place import line_of
from tilewise.backends.hopper.names import tma_store
from tilewise.backends.hopper.rings import get, here, put_wide

LOWEST = gl.constexpr(-3.4028234e38)
LOG2 = gl.constexpr(1.4426950408889634)
LN = gl.constexpr(0.6931471805599453)


@gluon.jit
def close_rows(m, l, h_rows, alive, sink_ptr, SINK: gl.constexpr):  # noqa: E741
    """(lse, what acc is multiplied by), the sink merged once; -inf and 0 for a row that saw no key.

    m is in units of which weights are powers of two.
    """
    if SINK:
        logit = gl.load(sink_ptr + h_rows, mask=alive, other=0.0).to(gl.float32) * LOG2
        both = gl.maximum(m, logit)
        weight = gl.exp2(m - both)
        # A sink that is all a row has weighs 1, infinite as it may be.
        below = gl.where((logit == float("inf")) & (l == 0.0), 0.0, logit - both)
        l = gl.fma(l, weight, gl.exp2(below))  # noqa: E741
        base = both * LN
    else:
        weight = gl.full(l.shape, 1.0, gl.float32, l.type.layout)
        base = m * LN
    empty = l == 0.0
    lse = gl.where(empty, float("-inf"), base + gl.log2(l) * LN)
    return lse, gl.where(empty, 0.0, weight / gl.where(empty, 1.0, l))


@gluon.jit
def broken_in_warps(acc, E: gl.constexpr):
    """For each warp 1 if a sum of its rows is not finite, else 0, (4,)."""
    total = gl.sum(gl.sum(acc.reshape([64, E // 8, 4, 2]), 3), 1)
    return gl.max(((total - total) != 0.0).to(gl.int32).reshape([4, 64]), 1)


@gluon.jit
def tell_broken(broken_s, acc, acc2, E0: gl.constexpr, E1: gl.constexpr):
    """Write which warps met something not finite: a weight of 0 times a hidden NaN is NaN."""
    found = broken_in_warps(acc, E0)
    if E1 > 0:
        found |= gl.convert_layout(broken_in_warps(acc2, E1), found.type.layout)
    broken_s.store(found)


@gluon.jit
def is_broken(broken_s):
    """Whether any warp told so, after a barrier."""
    return gl.max(broken_s.load(gl.BlockedLayout([4], [32], [4], [0])), 0)


@gluon.jit
def leave(again_s, w, about, number, row0, n_q, lse_ptr, strides, PACK: gl.constexpr,
          VARLEN: gl.constexpr):  # fmt: skip
    """Put a warpgroup's tile, which has a number, into its list of those that are done again.

    Until then the place of the tile's first lse tells which one is done after it. All warps have written theirs: that
    the tile is broken was found by all together. Everything is read anew, rather than kept while out is written.
    """
    b, head, base, split = about
    o_s, o_b, o_h, o_n, l_s, l_b, l_h = strides
    first = line_of(base, w) // PACK
    if first < n_q:
        line = lse_ptr + split.to(gl.int64) * l_s
        line = line + row0 if VARLEN else line + b * l_b
        line = line + (head * PACK).to(gl.int64) * l_h + first
        gl.store(line, get(again_s, w).to(gl.float32, bitcast=True))
        put_wide(again_s, w, number)


@gluon.jit
def columns_of(E: gl.constexpr, OL: gl.constexpr, FRESH: gl.constexpr):
    """0 .. E - 1. FRESH: from a thread's number in its warp, which is read where it stands: else the compiler makes
    them, and which of them are columns of out, before all tiles and keeps them."""
    d = gl.arange(0, E, layout=gl.SliceLayout(0, OL))
    if FRESH:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.u32 t, %laneid; and.b32 t, t, 3; shl.b32 t, t, 1; add.s32 $0, $2, t; "
            "add.s32 $1, $0, 1; }",
            "=r,=r,r,r", [d & -8], dtype=gl.int32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        return d


@gluon.jit
def store_rows(
    pointers, acc, inverse, alive, size, FIRST, E: gl.constexpr, OL: gl.constexpr, FRESH: gl.constexpr = False
):
    """acc * inverse to memory, row by row."""
    d = FIRST + columns_of(E, OL, FRESH)
    out = (acc * inverse[:, None]).to(pointers.dtype.element_ty)
    gl.store(pointers[:, None] + d[None, :], out, mask=alive[:, None] & (d < size)[None, :])


@gluon.jit
def write_rows(pointers, acc, acc2, inverse, alive, size, E0: gl.constexpr, E1: gl.constexpr, OL: gl.constexpr,
               OL2: gl.constexpr, FRESH: gl.constexpr):  # fmt: skip
    """Both parts of a tile to memory, row by row; pointers, inverse, alive: of rows, in the layout of the scores."""
    if FRESH:
        size = here(size)
    RO: gl.constexpr = gl.SliceLayout(1, OL)
    RO2: gl.constexpr = gl.SliceLayout(1, OL2)
    store_rows(
        gl.convert_layout(pointers, RO), acc, gl.convert_layout(inverse, RO), gl.convert_layout(alive, RO), size, 0,
        E0, OL, FRESH)  # fmt: skip
    if E1 > 0:
        store_rows(
            gl.convert_layout(pointers, RO2), acc2, gl.convert_layout(inverse, RO2), gl.convert_layout(alive, RO2),
            size, E0, E1, OL2, FRESH)  # fmt: skip


@gluon.jit
def write_tile(desc, desc2, o, o2, at, acc, acc2, inverse, broken_s, WAIT: gl.constexpr, CARE: gl.constexpr,
               E0: gl.constexpr, E1: gl.constexpr, OL: gl.constexpr, OL2: gl.constexpr):  # fmt: skip
    """Both parts of a tile to shared memory, from where the copy engine takes them unless it is broken: what the warps
    said of it is read after the barrier that the copy waits for anyway. Whether it is. WAIT: for the tile before."""
    if WAIT:
        tma.store_wait(0)
    inner = gl.convert_layout(inverse, gl.SliceLayout(1, OL))[:, None]
    o.reshape([64, E0]).store((acc * inner).to(o.dtype))
    if E1 > 0:
        inner2 = gl.convert_layout(inverse, gl.SliceLayout(1, OL2))[:, None]
        o2.reshape([64, E1]).store((acc2 * inner2).to(o.dtype))
    fence_async_shared()
    broken = 0
    if CARE:
        gl.thread_barrier()
        broken = is_broken(broken_s)
        if broken == 0:
            tma_store(desc, at + (0,), o)
            if E1 > 0:
                tma_store(desc2, at + (E0,), o2)
    else:
        tma_store(desc, at + (0,), o)
        if E1 > 0:
            tma_store(desc2, at + (E0,), o2)
    return broken


@gluon.jit
def write_out(
    desc, desc2, o, o2, out_ptr, strides, where, acc, acc2, inverse, rows, h_rows, size, broken_s, WAIT: gl.constexpr,
    CARE: gl.constexpr, STORE: gl.constexpr, VARLEN: gl.constexpr, PACK: gl.constexpr, E0: gl.constexpr,
    E1: gl.constexpr, OL: gl.constexpr, OL2: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """A tile to memory unless it is broken: by the copy engine if STORE says so and it is whole, else row by row.

    Whether it is broken, 1 or 0; broken_s: (4,) int32 for the warps to say so.
    """
    o_s, o_b, o_h, o_n = strides
    split, b, row0, n_q, first, head, g, group = where
    broken = 0
    if CARE:
        tell_broken(broken_s, acc, acc2, E0, E1)
    if STORE == "rows" or (VARLEN and first + 64 // PACK > n_q):
        pointers = out_ptr + split.to(gl.int64) * o_s + b * o_b + row0 * o_n
        pointers = pointers + h_rows.to(gl.int64) * o_h + rows.to(gl.int64) * o_n
        alive = rows < n_q
        if CARE:
            gl.thread_barrier()
            broken = is_broken(broken_s)
            alive = alive & (broken == 0)
        write_rows(pointers, acc, acc2, inverse, alive, size, E0, E1, OL, OL2, FRESH)
    else:
        inner = 0 if PACK > 1 else head - g * group
        at = (b, g, row0 + first, inner)
        broken = write_tile(desc, desc2, o, o2, at, acc, acc2, inverse, broken_s, WAIT, CARE, E0, E1, OL, OL2)
    return broken
