"""The one door: validate, write the call down as (tensors, ints, floats, seed, text), hand it to the op.

A call's life: `written.write` looks at shapes and names the problem by its spec's and options' text -> `ops.call` ->
`problem.decode_*` -> `dispatch.choose` -> `Backend.forward`; the backward goes the same way. A call whose like was
made before takes a short way: see `quick`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise import quick
from tilewise.errors import DTypeError, OptionError, ShapeError, message
from tilewise.ops import call, run_backward
from tilewise.problem import _read, decode_problem
from tilewise.spec.masks import Mask
from tilewise.spec.scores import ScoreTerm
from tilewise.state import Partial
from tilewise.written import Packing, Written, pack, write

if TYPE_CHECKING:
    from collections.abc import Sequence


_NUMBERS = (float, int)


class Gradients(NamedTuple):
    """What `attention_partial_backward` gives: dq, dk, dv in the inputs' dtypes, and one entry per leaf.

    `leaves` follows the float leaves of the scores and the mask in the order written (masks first);
    None for leaves without a gradient. A leaf has the shape its term holds: (1, H) for slopes (H,), four
    dimensions for a bias.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    leaves: tuple[Tensor | None, ...]


def _finish(written: Written, return_lse: bool, out: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    if out is not None and not isinstance(out, Tensor):
        raise DTypeError(f"out is a tensor, not {type(out).__name__}")
    result, lse = call(written.tensors, written.seed, written.numbers)
    if out is not None:
        if out.shape != result.shape or out.dtype != result.dtype or out.device != result.device:
            raise ShapeError(
                message("out has the result's shape, dtype and device", {"out": out, "result": result})
            )
        if result.requires_grad or out.requires_grad:
            raise OptionError("out= does not support autograd\nCall under torch.no_grad(), or without out=.")
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | Tensor | None = None, scores: ScoreTerm | Sequence[ScoreTerm] = (),
    sink: Tensor | None = None, dropout: float = 0.0, seed: Tensor | int | None = None, scale: float | None = None,
    q_offset: int | Tensor | None = None, k_offset: int | Tensor = 0, h_offset: int = 0, return_lse: bool = False,
    deterministic: bool | None = None, batch_invariant: bool = False, backend: str = "auto",
    allow_quadratic: bool = False, out: Tensor | None = None,
) -> Any:  # fmt: skip
    """Exact attention: out_i = sum_j p_ij v_j, p_i = softmax_j(scale * q_i . k_j, after score terms and masks).

    Args:
        q: (B, H, N_q, D), float64, float32, float16 or bfloat16, any strides.
        k: (B, H_kv, N_k, D), same dtype and device; H % H_kv == 0, query head h uses KV head h // (H / H_kv).
        v: (B, H_kv, N_k, D_v).
        mask: a Mask (`causal()`, `window(l, r)`, ... composed with & | ~) or a bool tensor, True = may attend.
        scores: score terms (`bias`, `alibi`, `softcap`, `relative`, `custom_score`), applied in this order.
        sink: (H,) logits of one more key per head with value 0, after all terms.
        dropout: probability that a weight is dropped, applied as given (a module decides by its training flag).
        seed: int or int64 tensor of one element; None draws one with torch.randint.
        scale: factor of q.k; None is D^-1/2.
        q_offset: position of the first query row, int or (B,); None = N_k - N_q (the last query lines up with
            the last key), 0 = top-left.
        k_offset: position of the first key, int or (B,).
        h_offset: number of the first head, for dropout.
        return_lse: also return the natural log of the softmax's denominator.
        deterministic: gradients that repeat bit by bit; None follows torch.use_deterministic_algorithms.
        batch_invariant: a sequence's bits do not depend on its neighbours.
        backend: "auto", or a name; a named backend runs the call or raises.
        allow_quadratic: lets "auto" take the backend that builds the N_q x N_k matrix.
        out: where to write the result, under no_grad.

    Returns:
        out (B, H, N_q, D_v) in q's dtype, with q's dimension order where q is dense; with return_lse also
        lse (B, H, N_q), float32 (float64 for float64). A row that sees no key has out = 0 and lse = -inf.
        Both are differentiable in q, k, v, sink and the float leaves of the score terms.

    Raises:
        ShapeError, DTypeError, DeviceError, OptionError, SpecError: arguments that do not fit.
        UnsupportedProblem: a named backend does not take this problem.

    Source: Dao et al., FlashAttention, 2022, https://arxiv.org/abs/2205.14135.
    """
    key = None
    options = (
        scale,
        q_offset,
        k_offset,
        h_offset,
        deterministic,
        batch_invariant,
        backend,
        allow_quadratic,
    )
    if out is None and type(dropout) in _NUMBERS and not dropout:
        if not quick.is_traced():  # compiled code must not see the table
            last, tensors = quick.ready.last, (q, k, v)
            if last is not None and last.matches(tensors, mask, scores, sink, options):
                if last.differentiable:
                    return quick.run(last.found, tensors, (), return_lse)
                pair = last.run(q, k, v, (), return_lse)
                return pair if return_lse else pair[0]
        spec = (mask, scores, sink)
        key, extra = quick.key_of(q, k, v, mask, scores, sink, options)
        # Compiled code has no key, and must not see the table: torch 2.5 would compile anew whenever it grows.
        try:
            found = None if key is None else quick.ready.get(key)
        except TypeError:  # what cannot be hashed is refused below
            key = found = None
        if found is not None:
            quick.notice(found, (q, k, v), spec, extra, options)
            return quick.run(found, (q, k, v), extra, return_lse)
    written = write(
        (q, k, v), None, mask=mask, scores=scores, sink=sink, dropout=dropout, seed=seed, scale=scale,
        q_offset=q_offset, k_offset=k_offset, h_offset=h_offset, deterministic=deterministic,
        batch_invariant=batch_invariant, backend=backend, allow_quadratic=allow_quadratic,
    )  # fmt: skip
    result = _finish(written, return_lse, out)
    if key is not None:
        quick.remember(key, written)
    return result


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    max_seqlen_q: int | Tensor | None = None, max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    mask: Mask | Tensor | None = None, scores: ScoreTerm | Sequence[ScoreTerm] = (), sink: Tensor | None = None,
    dropout: float = 0.0, seed: Tensor | int | None = None, scale: float | None = None,
    q_offset: int | Tensor | None = None, k_offset: int | Tensor = 0, h_offset: int = 0, return_lse: bool = False,
    deterministic: bool | None = None, batch_invariant: bool = False, backend: str = "auto",
    allow_quadratic: bool = False, out: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention over packed sequences; sequence b is tokens cu_seqlens[b] to cu_seqlens[b + 1].

    Args:
        q: (T_q, H, D).
        k: (T_k, H_kv, D).
        v: (T_k, H_kv, D_v).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64; cu_seqlens_k None takes cu_seqlens_q for both.
        max_seqlen_q, max_seqlen_k: accepted as a hint; they never change a result. An int, a tensor or None.
        seqused_q, seqused_k: (B,) used lengths, at most the sequence's own.

    The other arguments are those of `attention`. Positions, rows and columns are those inside the sequence, b is
    the sequence's number; q_offset None is used length_k - used length_q per sequence.

    Returns:
        out (T_q, H, D_v); with return_lse also lse (H, T_q). A token outside every sequence or beyond the
        used length has out = 0 and lse = -inf, and no gradient.

    Raises:
        As `attention`; ShapeError for cu_seqlens that fall or leave the tensor (looked at on the CPU; on a
        GPU they are clamped to the tensor).
    """
    packing = pack(cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), (seqused_q, seqused_k))
    written = write(
        (q, k, v), packing, mask=mask, scores=scores, sink=sink, dropout=dropout, seed=seed, scale=scale,
        q_offset=q_offset, k_offset=k_offset, h_offset=h_offset, deterministic=deterministic,
        batch_invariant=batch_invariant, backend=backend, allow_quadratic=allow_quadratic,
    )  # fmt: skip
    return _finish(written, return_lse, out)


def attention_partial(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, **options: Any,
) -> Partial:  # fmt: skip
    """Attention over some of the keys, ready to be merged: Partial(out, lse), out in float32 (float64 for float64).

    Takes the options of `attention` except sink, return_lse and out; with cu_seqlens_q the tensors are packed
    as in `attention_varlen`. Give `q_offset` and `k_offset` so that positions are those of the whole problem.
    `merge(*parts).finalize(sink, dtype)` is attention over all keys. Differentiable.

    Raises: as `attention`; TypeError for an unknown option.
    """
    written = write((q, k, v), _optionalpack(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), partial=True,
                     **_partial_options(options))  # fmt: skip
    return Partial(*call(written.tensors, written.seed, written.numbers))


def attention_partial_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None = None, *,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, **options: Any,
) -> Gradients:  # fmt: skip
    """Gradients that one subset of the keys contributes, given the out and lse of the whole problem.

    The sums over disjoint subsets are the gradients of the whole (dq and leaves add up; dk and dv belong to
    their keys). With a sink, lse includes it.

    Args:
        q, k, v: as in `attention_partial`, with the same options.
        out, lse: the global results, of attention's shapes.
        do, dlse: gradients of out and, if lse was used, of lse.

    Returns: Gradients(dq, dk, dv, leaves).
    Raises: as `attention`; ShapeError where out, lse, do or dlse do not have the call's shapes.
    """
    written = write((q, k, v), _optionalpack(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), partial=True,
                     subset=True, **_partial_options(options))  # fmt: skip
    problem = decode_problem(q, k, v, written.tensors[3:], written.numbers.text)
    for name, t, shape in (
        ("out", out, problem.out_shape), ("do", do, problem.out_shape),
        ("lse", lse, problem.lse_shape), ("dlse", dlse, problem.lse_shape),
    ):  # fmt: skip
        if not isinstance(t, Tensor) and not (name == "dlse" and t is None):
            raise DTypeError(f"{name} is a tensor, not {type(t).__name__}")
        if t is not None and tuple(t.shape) != shape:
            raise ShapeError(message(f"{name} has shape {shape}", {name: t, "q": q, "v": v}))
    spec, _ = _read(written.numbers.text)
    needs = [True] * 3 + [leaf.kind == "float" for leaf in spec.leaves]
    needs += [False] * (len(written.tensors) - len(needs))
    with torch.no_grad():
        found = run_backward(written.tensors, written.seed, written.numbers, (out, lse), (do, dlse), needs)
    dq, dk, dv, *rest = found
    left = iter(rest)
    return Gradients(
        dq, dk, dv, tuple(next(left) if need else None for need in needs[3 : 3 + len(spec.leaves)])
    )


_PARTIAL_OPTIONS = frozenset(
    ("mask", "scores", "dropout", "seed", "scale", "q_offset", "k_offset", "h_offset", "deterministic",
     "batch_invariant", "backend", "allow_quadratic")
)  # fmt: skip


def _partial_options(options: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(options) - _PARTIAL_OPTIONS)
    if unknown:
        raise TypeError(
            f"attention_partial has no option {', '.join(unknown)}; it takes {', '.join(sorted(_PARTIAL_OPTIONS))}"
        )
    return {"mask": None, "scores": (), **options}


def _optionalpack(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> Packing | None:
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None or seqused_q is not None or seqused_k is not None:
            raise OptionError(
                "cu_seqlens_k, seqused_q and seqused_k belong to packed tensors, which give cu_seqlens_q"
            )
        return None
    return pack(cu_seqlens_q, cu_seqlens_k, (None, None), (seqused_q, seqused_k))
