"""What the Hopper forward's producer loads, what it tells the consumers, and how they look for their first block.

Triton reads the body of a loop twice for each loop around it, and a function once: what stands in loops is here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.hopper.forward_place import line_of
from tilewise.backends.hopper.rings import get, here, hidden, load_tile, put, release

FIELDS = gl.constexpr(9)
"""Numbers that tell the consumers about a tile: b, head, KV head, first line, split, first row, rows, keys, its own."""


@gluon.jit
def here_all(sizes):
    """sizes, hidden so that nothing made of them is kept from tile to tile: the producer has few registers."""
    batch, heads, n_q, n_k, row_tiles, swizzle, splits, early = sizes
    return (
        here(batch), here(heads), here(n_q), here(n_k), here(row_tiles), here(swizzle), here(splits), here(early),
    )  # fmt: skip


@gluon.jit
def tiles_of(sizes, VARLEN: gl.constexpr):
    """How many tiles there are."""
    batch, heads, _, _, row_tiles, _, splits, _ = here_all(sizes)
    units = heads if VARLEN else batch * heads
    return units * row_tiles * splits


@gluon.jit
def load_keys(it, code, at, k_desc, k_desc2, k_s, k_s2, code_s, k_full, k_empty, D0: gl.constexpr, D1: gl.constexpr,
              BN: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    """The key block of use `it` and its number."""
    st = it % ST
    mbarrier.wait(k_empty.index(st), ((it // ST) & 1) ^ 1)
    put(code_s, st, code)
    load_tile(k_desc, k_desc2, k_s.index(st), k_s2.index(st), k_full.index(st), at, D0, D1, BN)


@gluon.jit
def load_values(it, at, v_desc, v_desc2, v_s, v_s2, v_full, v_empty, E0: gl.constexpr, E1: gl.constexpr,
                BN: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    """The value block of use it - 1."""
    sv = (it - 1) % ST
    mbarrier.wait(v_empty.index(sv), (((it - 1) // ST) & 1) ^ 1)
    load_tile(v_desc, v_desc2, v_s.index(sv), v_s2.index(sv), v_full.index(sv), at, E0, E1, BN)


@gluon.jit
def tell(ti, about, tile_s, tile_full, tile_empty):
    """Tell the consumers about tile ti of the program."""
    slot = ti & 1
    mbarrier.wait(tile_empty.index(slot), ((ti >> 1) & 1) ^ 1)
    for f in gl.static_range(FIELDS):
        put(tile_s, slot * FIELDS + f, about[f])
    mbarrier.arrive(tile_full.index(slot), count=1)


@gluon.jit
def tell_end(ti, tile_s, tile_full, tile_empty):
    """Tell them that there is no tile ti."""
    slot = ti & 1
    mbarrier.wait(tile_empty.index(slot), ((ti >> 1) & 1) ^ 1)
    put(tile_s, slot * FIELDS, -1)
    mbarrier.arrive(tile_full.index(slot), count=1)


@gluon.jit
def load_rows(ti, tb, head, g, base, row0, group, q_desc, q_desc2, q_s, q_s2, q_full, q_empty, D0: gl.constexpr,
              D1: gl.constexpr, NWG: gl.constexpr, PACK: gl.constexpr):  # fmt: skip
    """q of tile ti, for each warpgroup."""
    for w in gl.static_range(NWG):
        row = line_of(base, w)
        if PACK > 1:
            at = (tb, g, row0 + row // PACK, 0)
        else:
            at = (tb, g, row0 + row, head - g * group)
        mbarrier.wait(q_empty.index(w), (ti & 1) ^ 1)
        load_tile(q_desc, q_desc2, q_s.index(w), q_s2.index(w), q_full.index(w), at, D0, D1, 64)


@gluon.jit
def unseen(it, code_s, k_full, k_empty, v_full, v_empty, ST: gl.constexpr):
    """Give back a block of which the warpgroup sees nothing; (use of the ring, code) of the next."""
    st = it % ST
    # All warps have read the code before the stage is given back.
    gl.thread_barrier()
    release(k_empty.index(st))
    mbarrier.wait(v_full.index(st), (it // ST) & 1)
    release(v_empty.index(st))
    it += 1
    st = it % ST
    mbarrier.wait(k_full.index(st), (it // ST) & 1)
    return it, get(code_s, st)


@gluon.jit
def first_seen(it, w, code_s, k_full, k_empty, v_full, v_empty, ST: gl.constexpr):
    """(use of the ring, code) of the first block of which warpgroup w sees anything; the last one if there is none."""
    st = it % ST
    mbarrier.wait(k_full.index(st), (it // ST) & 1)
    code = get(code_s, st)
    while ((code >> (1 + w)) & (code ^ 1) & 1) != 0:
        it, code = unseen(it, code_s, k_full, k_empty, v_full, v_empty, ST)
    return it, code


@gluon.jit
def next_seen(it, w, code, code_s, k_full, k_empty, v_full, v_empty, ST: gl.constexpr):
    """(use of the ring, code, stage) of a block, or of the next if warpgroup w sees nothing of it.

    Only one is left out: the values of the block before, still to be added, hold a stage. With two stages that leaves a
    warpgroup nothing to go on with, and to look costs 1.7 % at D=128 (docs/hopper.md).
    """
    if ((code >> (1 + w)) & (code ^ 1) & 1) != 0:
        it, code = unseen(it, code_s, k_full, k_empty, v_full, v_empty, ST)
        # Hidden from the assembler, which takes a number that a branch makes for known behind it.
        it = hidden(it)
    return it, code, it % ST
