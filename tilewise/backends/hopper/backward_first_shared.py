"""The first row tile of a walk for the second of two halves of keys, of which the mask hides what a causal one hides on
the diagonal: all of 64 rows, or the first 64 of 128. It makes no products there whose results are 0.

A template of `source`: kernels import from its printed form.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip

from tilewise.backends.hopper.backward_rings import ENTRY, RING, number
from tilewise.backends.hopper.backward_shared import weights


@gluon.jit
def nothing_seen(n, ds_s, q_empty, ds_full, ST: gl.constexpr):
    """Row tile number n, the first of a walk, for the second half, whose keys none of its 64 rows sees."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    mbarrier.wait(q_empty.index((n + ST - 1) % ST), ((n - 1) // ST) & 1, pred=n > 0)
    ds_s.index(n & 1).slice(64, 64, 0).store(gl.zeros([64, 64], ds_s.dtype, L))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(n & 1), count=1)
    mbarrier.arrive(q_empty.index(n % ST), count=1)


@gluon.jit
def half_seen(
    n, kv, at, room, ds_s, slots, signals, scale, data, D: gl.constexpr, ST: gl.constexpr, HAS_MASK: gl.constexpr,
    HAS_TERMS: gl.constexpr,
):  # fmt: skip
    """(dk, dv) of row tile number n, the first of a walk, for the second half, whose keys none of its first 64 rows
    sees."""
    q_s, do_s, k_s, v_s, m_s, delta_s = room
    about_s, entry_s = slots
    _, _, q_full, q_empty, do_full, ds_full = signals
    dt: gl.constexpr = q_s.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    zeros = gl.zeros([64, 64], gl.float32, L)
    st = n % ST
    q = q_s.index(st).reshape([128, D]).slice(64, 64, 0)
    do = do_s.index(st).reshape([128, D]).slice(64, 64, 0)
    mbarrier.wait(q_full.index(st), (n // ST) & 1)
    s = warpgroup_mma(
        k_s.index(kv).reshape([128, D]).slice(64, 64, 0), q.permute((1, 0)), zeros, use_acc=False,
        is_async=True)  # fmt: skip
    mbarrier.wait(do_full.index(st), (n // ST) & 1)
    dp = warpgroup_mma(
        v_s.index(kv * 2 + 1).reshape([64, D]), do.permute((1, 0)), zeros, use_acc=False, is_async=True)  # fmt: skip
    s = warpgroup_mma_wait(1, deps=(s,))
    entry = (n % RING) * ENTRY
    code = number(entry_s, entry)
    m = m_s.index(st).slice(64, 64, 1).load(L)
    p, slope = weights(
        s, m, (code // 4 * 2 + 1) * 4 + (code & 3), number(entry_s, entry + 2), 1, about_s, at, scale, data, HAS_MASK,
        HAS_TERMS, True)  # fmt: skip
    pa = gl.convert_layout(p.to(dt), gl.DotOperandLayout(0, L, 2))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    dv = warpgroup_mma(pa, do, zeros, use_acc=False, is_async=True)
    ds = p * (dp - delta_s.index(st).slice(64, 64, 1).load(L))
    if HAS_TERMS:
        ds = gl.where(p == 0, 0.0, ds * slope)
    ds = ds.to(dt)
    mbarrier.wait(q_empty.index((n + ST - 1) % ST), ((n - 1) // ST) & 1, pred=n > 0)
    place = ds_s.index(n & 1).slice(64, 64, 0)
    place.slice(0, 64, 1).store(gl.zeros([64, 64], dt, L))
    place.slice(64, 64, 1).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(n & 1), count=1)
    dk = warpgroup_mma(
        gl.convert_layout(ds, gl.DotOperandLayout(0, L, 2)), q, zeros, use_acc=False, is_async=True)  # fmt: skip
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(q_empty.index(st), count=1)
    return (dk,), (dv,)
