"""Names of Gluon that moved between Triton 3.6 and 3.9."""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    """Add a tile of shared memory to a tensor by the copy engine."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )


# Renamed in 3.8; the old names are gone in 3.9. The addition is public from 3.8; 3.6 has the builder's method.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_reduce_add = getattr(tma, "async_atomic_add", None) or _reduce_add
