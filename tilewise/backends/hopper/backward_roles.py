"""The roles of the Hopper backward's wide kernel that fold nothing: dP, dS and dK, and dq. See `backward_kernel`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from tilewise.backends.hopper.backward_rings import (
    ENTRY,
    RING,
    add_fragments,
    add_products,
    any_wrong,
    note,
    number,
    product_of,
    store_chunks,
    zeros_of,
)  # fmt: skip


@gluon.jit
def sloper(
    dk_out, marks_ptr, room, p_s, ds_s, stage_s, slots, signals, p_full, p_empty, ds_full, ds_empty, sizes, scale,
    NC: gl.constexpr, NV: gl.constexpr, W: gl.constexpr, ST: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `roles`: dP^T, dS^T, dK."""
    q_s, do_s, _, v_s, _, delta_s = room
    about_s, _ = slots
    kv_full, q_full, q_empty, do_full, do_empty = signals
    dt: gl.constexpr = q_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    OL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16]
    )
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    batch, heads, group, _, _, _, _, _ = sizes
    dk = zeros_of(NC, 64, W, OL)
    mbarrier.wait(kv_full, 0)
    count = number(about_s, 0)
    mbarrier.wait(do_full.index(0), 0, pred=count > 0)
    dp = product_of(v_s, 0, do_s, 0, NV, W, SL)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    for it in range(0, count):
        st, slot = it % ST, it & 1
        zero = it >> 30
        dp = dp - delta_s.index(st).load(SL)
        mbarrier.arrive(do_empty.index(st), count=1)
        mbarrier.wait(p_full.index(slot), (it >> 1) & 1)
        ds = (p_s.index(slot).load(SL).to(gl.float32) * dp).to(dt)
        mbarrier.arrive(p_empty.index(slot), count=1)
        mbarrier.wait(ds_empty.index(slot), ((it >> 1) & 1) ^ 1)
        ds_s.index(slot).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(slot), count=1)
        mbarrier.wait(q_full.index(st), (it // ST) & 1)
        dk = add_products(dk, gl.convert_layout(ds, PL), q_s, st * NC, NC, W)
        ahead = it + 1
        mbarrier.wait(do_full.index(ahead % ST), (ahead // ST) & 1, pred=ahead < count)
        dp = product_of(v_s, zero, do_s, ahead % ST * NV, NV, W, SL)
        dk = warpgroup_mma_wait(1, deps=dk)
        mbarrier.arrive(q_empty.index(st), count=1)
        dp = warpgroup_mma_wait(0, deps=(dp,))
    b, g, j0, n_k = number(about_s, 1), number(about_s, 2), number(about_s, 3), number(about_s, 4)
    note(marks_ptr, any_wrong(dk, NC), b, g, heads, group, batch)
    row = number(about_s, 5) + j0
    tb = 0 if VARLEN else b
    store_chunks(dk_out, dk, scale, stage_s, 0, tb, g, row, n_k - j0, NC, W, OL, VARLEN)


@gluon.jit
def adder(dq_ptr, k_s, ds_s, slots, kv_full, ds_full, ds_empty, done, NC: gl.constexpr, W: gl.constexpr):
    """A warpgroup of `roles`: dq of each tile of rows, added to memory chunk by chunk."""
    about_s, entry_s = slots
    QL: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16]
    )
    mbarrier.wait(kv_full, 0)
    count = number(about_s, 0)
    for it in range(0, count):
        slot = it & 1
        mbarrier.wait(ds_full.index(slot), (it >> 1) & 1)
        tile = number(entry_s, (it % RING) * ENTRY + 1)
        # Not unrolled: additions still read their registers when the next product wants them.
        for c in range(0, NC):
            dq = warpgroup_mma(
                ds_s.index(slot).permute((1, 0)), k_s.index(c).reshape([64, W]), gl.zeros([64, W], gl.float32, QL),
                use_acc=False, is_async=True)  # fmt: skip
            dq = warpgroup_mma_wait(0, deps=(dq,))
            add_fragments(dq_ptr + (tile.to(gl.int64) * NC + c) * (64 * W), dq, W // 2)
        mbarrier.arrive(ds_empty.index(slot), count=1)
    mbarrier.arrive(done, count=1)
