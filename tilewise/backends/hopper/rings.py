"""What the partitions of a kernel share: barriers, numbers in slots of shared memory, loads by the copy engine.

Waiting and arriving follow one rule: a stage has a `full` and an `empty` barrier; use n of a ring of ST stages waits
for phase (n // ST) & 1 of `full` before it reads, and its producer for the opposite phase of `empty` before it writes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.hopper.names import tma_load


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """n barriers, each complete after `count` arrivals.

    A kernel makes only those that it uses: the room of one that nobody waits for is given to something else, but the
    hardware keeps its state, and writes it there when another process's turn on the device comes.
    """
    made = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def release(empty):
    """Arrive at a stage's `empty` barrier from one warp, when products that read the stage have been waited for.

    A group of products is the warpgroup's: when one warp has waited for it, all four are done with the stage. An
    arrival of the library's waits for all warps before and, since it counts as a write of all shared memory, after it.
    """
    mbarrier.expect(empty, 0)


@gluon.jit
def give_back(empty):
    """`release` of what loads have read, in any of the warps."""
    gl.thread_barrier()
    release(empty)


@gluon.jit
def slots_of(n: gl.constexpr):
    """n slots for an int32 each."""
    return gl.allocate_shared_memory(gl.int32, [n, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def put(slots, n, value):
    """Write a slot, from one warp."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(n).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def put_wide(slots, n, value):
    """Write a slot, from four warps."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slots.index(n).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def get(slots, n):
    """Read a slot, in four warps."""
    return gl.max(slots.index(n).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def hidden(n):
    """n, behind the compiler's back: a loop up to it is not unrolled."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def here(n):
    """n, and what is derived from it is computed where it stands: not before a branch, nor before a loop."""
    if n.dtype.is_fp32():
        return gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [n], dtype=gl.float32, is_pure=False, pack=1
        )
    elif n.dtype.primitive_bitwidth == 64:
        return gl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [n], dtype=gl.int64, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def fresh(n, FRESH: gl.constexpr):
    """n; if FRESH, `here`."""
    if FRESH:
        return here(n)
    else:
        return n


@gluon.jit
def write(ptr, number):
    """A number to global memory, by every thread: no thread is told from another."""
    gl.inline_asm_elementwise(
        "st.global.b32 [$1], $2; mov.b32 $0, $2;",
        "=r,l,r",
        [ptr, number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def after(raw):
    """raw and the programs of the launch, whose number is read where it stands: no register keeps it."""
    return raw + gl.inline_asm_elementwise(
        "mov.u32 $0, %nctaid.x;", "=r,r", [raw], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fetch(desc, desc2, tile, tile2, full, at, WIDTH: gl.constexpr, WIDTH2: gl.constexpr):
    """Rows of a tensor into shared memory: columns 0 .. WIDTH - 1, and the WIDTH2 after them as a tile of their own."""
    tma_load(desc, at + (0,), full, tile)
    if WIDTH2 > 0:
        tma_load(desc2, at + (WIDTH,), full, tile2)


@gluon.jit
def load_tile(
    desc, desc2, tile, tile2, full, at, WIDTH: gl.constexpr, WIDTH2: gl.constexpr, ROWS: gl.constexpr
):
    """`fetch` of ROWS rows, of which the barrier is told."""
    mbarrier.expect(full, ROWS * (WIDTH + WIDTH2) * 2)
    fetch(desc, desc2, tile, tile2, full, at, WIDTH, WIDTH2)


@gluon.constexpr_function
def _rescale_text(n):
    text = [
        "{ .reg .pred p; .reg .f32 t;", f"min.f32 t, ${2 * n}, ${2 * n + 2};", "setp.lt.f32 p, t, 0f3F800000;",
        "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra.uni SKIPRESCALE;",
    ]  # fmt: skip
    text += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return " ".join([*text, "SKIPRESCALE: }"])


@gluon.constexpr_function
def _rescale_operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale(acc, alpha, LAZY: gl.constexpr, N: gl.constexpr):
    """acc * alpha[:, None] of an accumulator with N elements a thread, of two rows.

    LAZY: a warp whose alphas are all 1 jumps over the products. Elements 0, 1 belong to one row and 2, 3 to the other.
    """
    if LAZY:
        wide = gl.full(acc.shape, 0.0, gl.float32, acc.type.layout) + alpha[:, None]
        text: gl.constexpr = _rescale_text(N)
        operands: gl.constexpr = _rescale_operands(N)
        return gl.inline_asm_elementwise(text, operands, [acc, wide], dtype=gl.float32, is_pure=False, pack=N)
    else:
        return acc * alpha[:, None]
