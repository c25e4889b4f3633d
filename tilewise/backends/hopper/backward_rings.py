"""What the backward's partitions share: numbers that threads know to be the same, chunks of columns, additions.

A tile of a tensor is a list of chunks, each ROWS x W columns in shared memory of its own, so a head dimension is any
multiple of W. Sums of a tile are a tuple of accumulators, one a chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from tilewise.backends.hopper.forward_place import owner, sequence
from tilewise.backends.hopper.names import tma_load, tma_store

FIELDS = gl.constexpr(14)
"""Numbers that tell the others about the program's keys: row tiles to come, b, KV head, first key in the sequence, its
keys, its first key in the tensor, positions of its first row and key, its rows, and how many of the row tiles come
first because some of their pairs may be hidden; where the order of additions is flipped, in the place after the next
whether this tile's is; where dq is collected on the way (`clear_and_collect`), also the
tile's own number, and the first row tile of which dq is to be collected, and how many they are; where tiles of keys are
cut (`backward_split`), in the place of the last two the range, and the first of the tile or a number below 0. At
last whether no row of the first row tile (of 128, of its first 64) sees a key behind the first 64."""
ENTRY = gl.constexpr(4)
"""Numbers that go with each row tile: its number in its head times 4, plus 2 if PARTIAL; its number among all; its
head; where additions have an order, 0 if nobody has added to it yet."""
BY_HEADS, SIDE_BY_SIDE, FLIPPED = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
"""In which order tiles of keys add to dq, where it has one: from the first keys on, each from the last rows on, head of
a group by head, or the heads of a group side by side; or from the last keys on, each from the first rows on."""
RING = gl.constexpr(4)
"""Row tiles that may be told about at once: more than there are stages."""


@gluon.jit
def same(n):
    """n, an int32 that all threads of a warp agree on. The reduction says so to the compiler, which then keeps what is
    made of it in the registers that a warp shares."""
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [n], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def number(slots, n):
    """Read a slot, in four warps."""
    return gl.max(same(slots.index(n).load(gl.BlockedLayout([1], [32], [4], [0]))), 0)


@gluon.jit
def number_here(slots, n):
    """Read a slot, in one warp."""
    return gl.max(same(slots.index(n).load(gl.BlockedLayout([1], [32], [1], [0]))), 0)


@gluon.jit
def turn_at(ptr):
    """Read a number that other programs write, and from now on what they wrote before it."""
    place = ptr.to(gl.int64, bitcast=True)
    return same(gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [place], dtype=gl.int32, is_pure=False, pack=1))  # fmt: skip


@gluon.jit
def pass_turn(ptr, value):
    """Write a number behind all that the program has written up to the barrier that the caller waited for."""
    place = ptr.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        "st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;", "=r,l,r", [place, value], dtype=gl.int32, is_pure=False,
        pack=1)  # fmt: skip


@gluon.jit
def tiles_of(sizes, VARLEN: gl.constexpr):
    """How many tiles of keys there are."""
    batch, heads, group, _, _, _, key_tiles, _ = sizes
    return (heads // group) * (1 if VARLEN else batch) * key_tiles


@gluon.jit
def key_tile(
    t, sizes, tables, VARLEN: gl.constexpr, USED_Q: gl.constexpr, USED_K: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """Tile t of keys: batch entry, KV head, number, rows and keys of the sequence, and its first row tile."""
    batch, heads, group, n_q, n_k, row_tiles, key_tiles, swizzle = sizes
    cu_q, cu_k, used_q, used_k = tables
    heads_kv = heads // group
    units = heads_kv if VARLEN else batch * heads_kv
    per = key_tiles * swizzle
    section = t // per
    inner = t - section * per
    width = gl.minimum(units - section * swizzle, swizzle)
    tile, unit = inner // width, section * swizzle + inner % width
    if VARLEN:
        g = unit
        b, tile = owner(cu_k, tile, batch, n_k, BN)
        row0, n_q = sequence(cu_q, used_q, b, n_q, USED_Q)
        key0, n_k = sequence(cu_k, used_k, b, n_k, USED_K)
        first = row0 // BM + b
    else:
        b = unit // heads_kv
        g = unit - b * heads_kv
        row0, key0 = 0, 0
        first = b * heads * row_tiles
    return b, g, tile, row0, n_q, key0, n_k, first


@gluon.jit
def load_chunks(desc, tile, full, b, h, row, first, N: gl.constexpr, W: gl.constexpr):
    """Issue the loads of N chunks of a tile; its barrier expects their bytes."""
    for c in gl.static_range(N):
        tma_load(desc, [b, h, row, c * W], full, tile.index(first + c))


@gluon.jit
def zeros_of(N: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr):
    """N chunks of zeros."""
    made = ()
    for _ in gl.static_range(N):
        made = made + (gl.zeros([ROWS, W], gl.float32, LAYOUT),)
    return made


@gluon.jit
def product_of(a_s, a, b_s, b, N: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue A B^T over N chunks of 64 rows."""
    zeros = gl.zeros([64, 64], gl.float32, LAYOUT)
    left, right = a_s.index(a).reshape([64, W]), b_s.index(b).reshape([64, W])
    s = warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)
    for c in gl.static_range(1, N):
        left, right = a_s.index(a + c).reshape([64, W]), b_s.index(b + c).reshape([64, W])
        s = warpgroup_mma(left, right.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def operands_of(a_s, a, N: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr):
    """N chunks of 64 rows as left operands in registers, of products that lie there as LAYOUT."""
    made = ()
    for c in gl.static_range(N):
        made = made + (a_s.index(a + c).reshape([64, W]).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
    return made


@gluon.jit
def product_with(a, b_s, b, N: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue A B^T over N chunks of 64 rows, of which those of A lie in registers."""
    zeros = gl.zeros([64, 64], gl.float32, LAYOUT)
    s = warpgroup_mma(
        a[0], b_s.index(b).reshape([64, W]).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    for c in gl.static_range(1, N):
        s = warpgroup_mma(a[c], b_s.index(b + c).reshape([64, W]).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def add_products(sums, a, b_s, b, N: gl.constexpr, W: gl.constexpr):
    """Issue sums += A B, a chunk of 64 rows of B for each of them."""
    made = ()
    for c in gl.static_range(N):
        made = made + (warpgroup_mma(a, b_s.index(b + c).reshape([64, W]), sums[c], is_async=True),)
    return made


@gluon.jit
def product_over(a, b, zeros, D1: gl.constexpr, D2: gl.constexpr):
    """Issue A B^T over the first D1 + D2 columns."""
    if D2 == 0:
        return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(
            a.slice(0, D1, 1), b.slice(0, D1, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)  # fmt: skip
        return warpgroup_mma(a.slice(D1, D2, 1), b.slice(D1, D2, 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def add_over(sums, a, b, L1: gl.constexpr, L2: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr):
    """Issue sums += A B for the first D1 + D2 columns of B."""
    left = gl.convert_layout(a, gl.DotOperandLayout(0, L1, 2))
    if D2 == 0:
        return (warpgroup_mma(left, b, sums[0], is_async=True),)
    else:
        first = warpgroup_mma(left, b.slice(0, D1, 1), sums[0], is_async=True)
        left = gl.convert_layout(a, gl.DotOperandLayout(0, L2, 2))
        return (first, warpgroup_mma(left, b.slice(D1, D2, 1), sums[1], is_async=True))


@gluon.jit
def wait_for(sums, N: gl.constexpr, D2: gl.constexpr):
    """Wait until at most N products later than these are on their way."""
    if D2 == 0:
        return (warpgroup_mma_wait(N, deps=sums),)
    else:
        return warpgroup_mma_wait(N, deps=sums)


@gluon.jit
def line_sums(sums, N: gl.constexpr):
    """The sum of each row over the chunks: not finite where an element is not."""
    total = gl.sum(sums[0], 1)
    for c in gl.static_range(1, N):
        total += gl.sum(sums[c], 1)
    return total


@gluon.jit
def note(marks_ptr, total, b, h, n, heads, batch):
    """Leave n heads from h on to the second look if a number of some row is not finite."""
    wrong = (total - total) != 0.0
    place = gl.zeros_like(total).to(gl.int32)
    gl.store(marks_ptr + (batch * heads + place), place + 1, mask=wrong)
    for member in range(0, n):
        gl.store(marks_ptr + (b * heads + h + member + place), place + 1, mask=wrong)


@gluon.jit
def store_tiles(desc, sums, factor, stage, first, b, h, row, N: gl.constexpr, W: gl.constexpr):
    """64 rows of chunks to memory by the copy engine, through chunks `first` .. of shared memory; nobody waits."""
    for c in gl.static_range(N):
        stage.index(first + c).reshape([64, W]).store((sums[c] * factor).to(stage.dtype))
    fence_async_shared()
    for c in gl.static_range(N):
        tma_store(desc, [b, h, row, c * W], stage.index(first + c))


@gluon.jit
def store_rows(
    out, sums, factor, b, h, row, rows_left, N: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr
):
    """The first rows of chunks to memory, row by row."""
    _, ptr, s_b, s_h, s_n, size = out
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    places = ptr + b * s_b + h * s_h + (row + n).to(gl.int64) * s_n
    for c in gl.static_range(N):
        d = c * W + gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))
        inside = (n < rows_left)[:, None] & (d < size)[None, :]
        gl.store(places[:, None] + d[None, :], (sums[c] * factor).to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def store_chunks(out, sums, factor, stage, first, b, h, row, rows_left, N: gl.constexpr, W: gl.constexpr,
                 LAYOUT: gl.constexpr, CUT: gl.constexpr):  # fmt: skip
    """64 rows of chunks to memory; CUT: those from rows_left on are not this tile's. out: descriptor, pointer, strides
    of batch, head and token, columns."""
    if CUT:
        if rows_left >= 64:
            store_tiles(out[0], sums, factor, stage, first, b, h, row, N, W)
        else:
            store_rows(out, sums, factor, b, h, row, rows_left, N, W, LAYOUT)
    else:
        store_tiles(out[0], sums, factor, stage, first, b, h, row, N, W)


@gluon.jit
def part_sums(sums, D2: gl.constexpr):
    """The sum of each row over the parts: not finite where an element is not."""
    total = gl.sum(sums[0], 1)
    if D2 > 0:
        total += gl.convert_layout(gl.sum(sums[1], 1), total.type.layout)
    return total


@gluon.jit
def store_parts(out, sums, factor, stage, first, b, h, row, rows_left, D1: gl.constexpr, D2: gl.constexpr,
                CUT: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """64 rows of a tile in one or two parts to memory, as `store_chunks`. SPLIT: all, or none if rows_left is 0."""
    if CUT:
        if rows_left >= 64:
            store_whole(out, sums, factor, stage, first, b, h, row, D1, D2)
        else:
            store_part(out, sums[0], factor, b, h, row, rows_left, 0)
            if D2 > 0:
                store_part(out, sums[1], factor, b, h, row, rows_left, D1)
    elif SPLIT:
        if rows_left > 0:
            store_whole(out, sums, factor, stage, first, b, h, row, D1, D2)
    else:
        store_whole(out, sums, factor, stage, first, b, h, row, D1, D2)


@gluon.jit
def store_whole(out, sums, factor, stage, first, b, h, row, D1: gl.constexpr, D2: gl.constexpr):
    """64 rows of a tile in one or two parts by the copy engine."""
    tile = stage.index(first).reshape([64, stage.shape[-1]])
    if D2 == 0:
        tile.store((sums[0] * factor).to(stage.dtype))
    else:
        tile.slice(0, D1, 1).store((sums[0] * factor).to(stage.dtype))
        tile.slice(D1, D2, 1).store((sums[1] * factor).to(stage.dtype))
    fence_async_shared()
    tma_store(out[0], [b, h, row, 0], stage.index(first))


@gluon.jit
def store_part(out, x, factor, b, h, row, rows_left, BEGIN: gl.constexpr):
    """The first rows of a part to memory, row by row."""
    _, ptr, s_b, s_h, s_n, size = out
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))
    d = BEGIN + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    places = ptr + b * s_b + h * s_h + (row + n).to(gl.int64) * s_n
    inside = (n < rows_left)[:, None] & (d < size)[None, :]
    gl.store(places[:, None] + d[None, :], (x * factor).to(ptr.dtype.element_ty), mask=inside)


@gluon.constexpr_function
def _add_text(n):
    text = [
        f"red.global.add.v4.f32 [${2 * n}+{2048 * i}], {{${4 * i}, ${4 * i + 1}, ${4 * i + 2}, ${4 * i + 3}}};"
        for i in range(n // 4)
    ]
    return " ".join(["{", *text, "}"])


@gluon.constexpr_function
def write_text(n):
    """Assembler text that writes n floats where `add_fragments` adds them."""
    text = [
        f"st.global.cg.v4.f32 [${2 * n}+{2048 * i}], {{${4 * i}, ${4 * i + 1}, ${4 * i + 2}, ${4 * i + 3}}};"
        for i in range(n // 4)
    ]
    return " ".join(["{", *text, "}"])


@gluon.constexpr_function
def add_constraints(n):
    """Of an assembler text with n floats in and out and an address."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["l"] * n)


@gluon.jit
def fragment_places(ptr, x):
    """Where each thread's floats of a tile like x begin, in the order of `add_fragments`."""
    row = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    col = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    thread = ((row // 16) * 512 + (row % 8) * 64)[:, None] + ((col % 8 // 2) * 16)[None, :]
    return thread.to(gl.int64) + ptr.to(gl.int64, bitcast=True)


@gluon.jit
def add_fragments(ptr, x, N: gl.constexpr):
    """Add a warpgroup's tile of 128 N floats to memory in the order in which threads hold it, 16 bytes a thread at a
    time: element c of group a of thread t is float (128 a + t) 4 + c. `backward_line_kernels.collect_tile` and
    `backward_sums.read_fragments` read it back."""
    asm: gl.constexpr = _add_text(N)
    constraints: gl.constexpr = add_constraints(N)
    gl.inline_asm_elementwise(
        asm, constraints, [x, fragment_places(ptr, x)], dtype=gl.float32, is_pure=False, pack=N
    )


@gluon.jit
def write_fragments(ptr, x, N: gl.constexpr):
    """As `add_fragments`, to memory of which nothing is read."""
    asm: gl.constexpr = write_text(N)
    constraints: gl.constexpr = add_constraints(N)
    gl.inline_asm_elementwise(
        asm, constraints, [x, fragment_places(ptr, x)], dtype=gl.float32, is_pure=False, pack=N
    )
