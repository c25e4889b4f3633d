"""torch.func.vmap over a call: folded into the batch where no meaning depends on the batch index, else a loop.

Dropout under vmap: randomness "error" raises, "same" repeats the batch numbers of the call, "different"
continues them over the folded batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.problem import Options, _read

if TYPE_CHECKING:
    from tilewise.ops import Numbers


def batch_by_loop(function: Any, info: Any, in_dims: tuple, numbers: Numbers, *args: Any) -> tuple:
    """One call per entry, results stacked; right for everything."""
    spec, options = _read(numbers.text)
    if spec.dropout and info.randomness == "error":
        raise RuntimeError(
            "vmap: dropout is a random operation, and vmap's randomness is 'error'\n"
            "Pass randomness='same' or randomness='different' to torch.func.vmap."
        )
    dims = in_dims[1:]
    results = []
    for n in range(max(info.batch_size, 1)):
        chosen = [_entry(x, dim, n, info.batch_size) for x, dim in zip(args, dims, strict=True)]
        moved = (
            _renumber(numbers, spec.num_ints, n, info.batch_size, chosen, options)
            if info.randomness == "different"
            else numbers
        )
        results.append(function.apply(moved, *chosen))
    stacked = tuple(torch.stack(parts)[: info.batch_size] for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _entry(x: Any, dim: Any, n: int, size: int) -> Any:
    if not isinstance(x, Tensor) or dim is None:
        return x
    return x.select(dim, n) if size else x.new_zeros(x.movedim(dim, 0).shape[1:])


def _renumber(numbers: Numbers, num_ints: int, n: int, size: int, args: list, options: Options) -> Numbers:
    """Shift b_offset so that entry n has batch numbers of its own."""
    ints = list(numbers.ints)
    # An inner vmap has put its own shift there; times the size, the two never meet.
    ints[num_ints + 3] = ints[num_ints + 3] * size + n * _batch(options, args)
    return numbers._replace(ints=tuple(ints), run=None)


def _batch(options: Options, args: list) -> int:
    """Number of batch entries, or of sequences when packed."""
    if options.layout == "dense":
        return next(x.shape[0] for x in args if isinstance(x, Tensor) and x.ndim == 4)
    # The call's tensors come last, but for as many tangents, where a count says that there are some.
    tangents = next((x for x in args if type(x) is int), 0)
    after = options.cu_seqlens_k + options.seqused_q + options.seqused_k
    after += options.block_table + options.leftpad_k + options.k_scale + options.v_scale
    return args[len(args) - tangents - after - 1].shape[0] - 1


def _folds(numbers: Numbers, dims: tuple) -> bool:
    """True if the vmapped dimension can simply join the batch."""
    spec, options = _read(numbers.text)
    plain = options.layout == "dense" and not options.pages
    plain = plain and options.q_offset != "tensor" and options.k_offset != "tensor"
    return plain and not spec.dropout and "b" not in spec.variables and all(d is None for d in dims)


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(batch, ...) with a vmapped dimension as (size * batch, ...)."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


def batch_forward(
    function: Any, info: Any, in_dims: tuple, numbers: Numbers, seed: Tensor | None, *tensors: Tensor
) -> tuple:
    """vmap of the forward."""
    dims = in_dims[2:]
    if info.batch_size == 0 or not _folds(numbers, dims[3:]):
        return batch_by_loop(function, info, in_dims, numbers, seed, *tensors)
    qkv = [_fold(x, dim, info.batch_size) for x, dim in zip(tensors[:3], dims[:3], strict=True)]
    out, lse = function.apply(numbers, seed, *qkv, *tensors[3:])
    return (_unfold(out, info.batch_size), _unfold(lse, info.batch_size)), (0, 0)


def batch_backward(
    function: Any, info: Any, in_dims: tuple, numbers: Numbers, needs: Any, *args: Any
) -> tuple:
    """vmap of the backward; a leaf's gradient per entry is not a sum over the folded batch, so those loop."""
    dims = in_dims[2:]
    if info.batch_size == 0 or any(needs[3:]) or not _folds(numbers, dims[8:]):
        return batch_by_loop(function, info, in_dims, numbers, needs, *args)
    seed, *rows = args[:8]
    folded = [
        x if x is None else _fold(x, dim, info.batch_size) for x, dim in zip(rows, dims[1:8], strict=True)
    ]
    grads = function.apply(numbers, needs, seed, *folded, *args[8:])
    return tuple(_unfold(g, info.batch_size) for g in grads), (0,) * len(grads)


def refuse_old_vmap(*grads: Tensor | None) -> None:
    """torch.autograd's own batching (is_grads_batched, vectorize=True) reaches no Function; torch.func does."""
    if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads):
        from tilewise.errors import UnsupportedProblem

        raise UnsupportedProblem(
            "is_grads_batched=True and vectorize=True use an older vmap that cannot batch this function\n"
            "Use torch.func.vjp or jvp under torch.func.vmap, torch.func.jacrev or jacfwd."
        )
