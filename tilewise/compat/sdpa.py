"""PyTorch's scaled_dot_product_attention, in its own meaning: a function, and a way to route a model's calls here.

`is_causal` is aligned at the top left, a bool mask is True = may attend, a float mask is added, dropout is applied as
given. A row that sees nothing gives 0 with gradients 0, as torch's CPU and fused kernels do (its math path did not
before torch 2.5).
"""

from __future__ import annotations

import functools
import math
from contextlib import ContextDecorator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise.api import attention
from tilewise.checks import check_strided
from tilewise.errors import OptionError, ShapeError, UnsupportedProblem, message
from tilewise.spec.masks import Mask, causal, dense
from tilewise.spec.scores import ScoreTerm, bias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["register", "route", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """softmax(scale * q k^T + mask) v, with torch's arguments.

    Args:
        query: (..., H, L, E). key: (..., H_kv, S, E). value: (..., H_kv, S, E_v). Leading dimensions broadcast; two
            dimensions are enough.
        attn_mask: bool (True = may attend) or floating (added; gets a gradient), broadcast to (..., H, L, S), or one of
            torch.nn.attention.bias's causal masks, of which no matrix is made.
        dropout_p: applied as given, in evaluation too.
        is_causal: row i sees columns up to i, whatever the lengths; ANDed with attn_mask.
        scale: default E^-1/2. enable_gqa: H_kv divides H and each KV head serves a run of query heads.
        backend: Tilewise's.

    Returns: (..., H, L, E_v).
    Raises: ShapeError, DTypeError, OptionError for arguments that do not fit, UnsupportedProblem for nested and
        sparse tensors.
    """
    query, key, value, lead = _four_dimensional(query, key, value, enable_gqa)
    rank = len(lead) + 2
    offset: int | None = 0
    mask = Mask()
    scores: list[ScoreTerm] = []
    if attn_mask is not None and _is_causal_bias(attn_mask):
        if is_causal:
            raise OptionError("a causal attn_mask comes without is_causal=True")
        is_causal, offset = True, _causal_offset(attn_mask, query, key)
    elif attn_mask is not None:
        mask, scores = _masks(attn_mask, lead, rank)
    out = attention(
        query, key, value, mask=mask & causal() if is_causal else mask, scores=scores, dropout=dropout_p, scale=scale,
        q_offset=offset, backend=backend,
    )  # fmt: skip
    return out.reshape(*lead, *out.shape[-2:])  # type: ignore[no-any-return]


def _four_dimensional(
    q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Views (B, H, N, D) of the three, and the leading dimensions of the result."""
    given = {"query": q, "key": k, "value": v}
    check_strided(given)
    if min(t.ndim for t in given.values()) < 2:
        raise ShapeError(message("query, key and value have at least two dimensions", given))
    if enable_gqa:
        k, v = _grouped(q, k, v, given)
    # One KV head for many query heads needs no copy; other sizes of 1 are expanded, which copies nothing either.
    shared = min(t.ndim for t in given.values()) > 2 and k.shape[-3] == v.shape[-3]
    shared = shared and (enable_gqa or k.shape[-3] == 1)
    try:
        batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (q, k, v)))
        alike = (q,) if shared else (q, k, v)
        heads = torch.broadcast_shapes(*(t.shape[-3:-2] for t in alike))
    except RuntimeError:
        remedy = "Give enable_gqa=True where H_kv divides H." if q.ndim > 2 else ""
        raise ShapeError(
            message("the leading dimensions of query, key and value broadcast", given, remedy)
        ) from None
    flat = math.prod(batch)

    def four(t: Tensor, heads: tuple[int, ...]) -> Tensor:
        return t.expand(*batch, *heads, *t.shape[-2:]).reshape(flat, *(heads or (1,)), *t.shape[-2:])

    heads_kv = tuple(k.shape[-3:-2]) if shared else heads
    return four(q, heads), four(k, heads_kv), four(v, heads_kv), (*batch, *heads)


def _grouped(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """k and v with one number of heads that divides q's."""
    if min(t.ndim for t in (q, k, v)) < 3 or any(
        t.shape[-3] == 0 or q.shape[-3] % t.shape[-3] for t in (k, v)
    ):
        raise ShapeError(message("with enable_gqa the heads of key and value divide those of query", given))
    heads = math.lcm(k.shape[-3], v.shape[-3])
    return tuple(t.repeat_interleave(heads // t.shape[-3], -3) if t.shape[-3] != heads else t for t in (k, v))  # type: ignore[return-value]


def _masks(attn_mask: Tensor, lead: tuple[int, ...], rank: int) -> tuple[Mask, list[ScoreTerm]]:
    """The mask as Tilewise has it: dense or a bias, in four dimensions."""
    if not isinstance(attn_mask, Tensor) or not 2 <= attn_mask.ndim <= rank:
        shown = {"attn_mask": attn_mask} if isinstance(attn_mask, Tensor) else None
        raise ShapeError(
            message(f"attn_mask is a tensor with 2 to {rank} dimensions, broadcast to (..., L, S)", shown)
        )
    if rank > 4 and attn_mask.ndim > 3:
        missing = (1,) * (rank - attn_mask.ndim)
        full = attn_mask.reshape(*missing, *attn_mask.shape)
        attn_mask = full.expand(*lead[:-1], *full.shape[-3:]).flatten(0, -4)
    if attn_mask.dtype == torch.bool:
        return dense(attn_mask), []
    return Mask(), [bias(attn_mask)]


def _is_causal_bias(attn_mask: Any) -> bool:
    return type(attn_mask).__name__ == "CausalBias" and hasattr(attn_mask, "variant")


def _causal_offset(attn_mask: Any, q: Tensor, k: Tensor) -> int | None:
    """Top-left, or bottom-right (None), by the mask's own sizes: as in torch, a square one is top-left."""
    sizes = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    if attn_mask.variant.name != "LOWER_RIGHT" or sizes[0] == sizes[1]:
        return 0
    if sizes != (q.shape[-2], k.shape[-2]):
        raise ShapeError(message(f"attn_mask was made for lengths {sizes}", {"query": q, "key": k}))
    return None


# ---- routing -------------------------------------------------------------------------------------------------


class Route(TorchFunctionMode, ContextDecorator):
    """See `route`."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        kwargs = {} if kwargs is None else kwargs
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return scaled_dot_product_attention(*args, **kwargs, backend=self.backend)
        if name in _WRITTEN_IN_PYTHON and isinstance(func, FunctionType):
            with self:
                return _unguarded(func)(*args, **kwargs)
        return func(*args, **kwargs)


_WRITTEN_IN_PYTHON = {"multi_head_attention_forward", "backward", "grad"}
"""Functions of torch that hand themselves to the mode and may meet attention inside: in their own body, or where a
backward recomputes a checkpoint. A mode is off while it handles a call, so it would not see what is inside."""


@functools.lru_cache(maxsize=8)
def _unguarded(theirs: FunctionType) -> Callable[..., Any]:
    """The same function without its own hand-over, so that it can run with the mode on."""
    guards = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**theirs.__globals__, **dict.fromkeys(guards, lambda *_: False)}
    ours = FunctionType(theirs.__code__, scope, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours


def route(backend: str = "auto") -> Route:
    """While active, every scaled_dot_product_attention of this thread is Tilewise's.

    A context manager and a decorator. It nests, ends with an exception, and does not touch other threads; a backward
    that is started inside it carries it along, so that activation checkpointing recomputes by the same route. Names
    that a module imported earlier are caught too, as is torch.nn.MultiheadAttention, whose fused inference path
    steps aside. A call that Tilewise refuses raises; nothing falls back in silence.

    Not seen: attention inside C++ (torch.jit, AOTInductor), and MultiheadAttention with need_weights=True, which builds
    the weights without that function.
    """
    return Route(backend)


def register(name: str = "tilewise") -> None:
    """Offer Tilewise to torch's own SDPA on CUDA: `torch.nn.attention.activate_flash_attention_impl(name)` takes it.

    Raises UnsupportedProblem where this torch has no such registry.
    """
    from tilewise.compat.sdpa_kernel import activate

    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise UnsupportedProblem(
            f"torch {torch.__version__} has no registry of flash attention\nUse tilewise.compat.sdpa.route()."
        )
    torch.nn.attention.register_flash_attention_impl(name, register_fn=activate)
