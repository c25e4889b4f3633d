"""The launch that does again what tiles of the Hopper forward left, where that kernel has no registers for this code.

Grid: that kernel's; a program reads the lists of the program with its number, which are empty as a rule. Beside the
code, ptxas kept barriers and slots of the D=256 loops in registers of each thread, and their producer had a third more
instructions between two loads: 6 % of the speed (docs/hopper.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.backends.hopper.forward_again_shared import repeat
from tilewise.backends.hopper.rings import barriers, put_wide, slots_of


@gluon.jit
def again_program(
    q_desc, q_desc2, k_desc, k_desc2, v_desc, v_desc2, o_desc, o_desc2, out_ptr, lse_ptr, sink_ptr,
    counter_ptr, q_offset_ptr, k_offset_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, range_ptr, again_ptr, o_s, o_b,
    o_h, o_n, l_s, l_b, l_h, batch, heads, group, seqlen_q, seqlen_k, row_tiles, swizzle, splits, split_tiles,
    early, range_b, range_h, q_offset, k_offset, size_dv, scale, data, FUSED: gl.constexpr, NWG: gl.constexpr,
    BN: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr,
    USED_Q: gl.constexpr, USED_K: gl.constexpr, Q_OFFSET: gl.constexpr, K_OFFSET: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """As `forward_program`, whose arguments these are; one warpgroup."""
    dt: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dt, [1] + q_desc.block_shape, q_desc.layout)
    k_s = gl.allocate_shared_memory(dt, [1] + k_desc.block_shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(dt, [2] + v_desc.block_shape, v_desc.layout)
    q_s2, k_s2 = q_s, k_s
    if D1 > 0:
        q_s2 = gl.allocate_shared_memory(dt, [1] + q_desc2.block_shape, q_desc2.layout)
        k_s2 = gl.allocate_shared_memory(dt, [1] + k_desc2.block_shape, k_desc2.layout)
    again_s, loaded = slots_of(NWG), barriers(1, 1)
    for w in gl.static_range(NWG):
        put_wide(again_s, w, gl.load(again_ptr + gl.program_id(0) * NWG + w))
    fence_async_shared()
    repeat(
        again_s, loaded, q_desc, q_desc2, k_desc, k_desc2, v_desc, q_s, q_s2, k_s, k_s2, v_s, out_ptr, lse_ptr,
        sink_ptr, (batch, heads, seqlen_q, seqlen_k, row_tiles, swizzle, splits, early),
        (cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr), (q_offset, q_offset_ptr, k_offset, k_offset_ptr),
        (o_s, o_b, o_h, o_n, l_s, l_b, l_h), group, split_tiles, size_dv, scale, data, FUSED, NWG, BN, D0, D1,
        E0, PACK, VARLEN, USED_Q, USED_K, Q_OFFSET, K_OFFSET, SINK)  # fmt: skip
