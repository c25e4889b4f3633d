"""Modules: attention whose dropout follows `training`, and multi-head attention with its projections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tilewise import checks
from tilewise.api import attention
from tilewise.errors import OptionError, ShapeError, message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.spec.masks import Mask
    from tilewise.spec.scores import ScoreTerm


class Attention(nn.Module):
    """`tilewise.attention` as a module: dropout only while training, fixed options, optional learned sink.

    Args:
        mask, scale, backend: as in `attention`; a mask given to `forward` is ANDed with the module's.
        dropout: probability, used in training mode only.
        sink_heads: number of query heads of a learned sink (a parameter `sink`, starting at 0), or None.
    """

    def __init__(
        self, *, mask: Mask | None = None, dropout: float = 0.0, scale: float | None = None,
        sink_heads: int | None = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.mask, self.scale, self.backend = mask, scale, backend
        self.dropout = checks.check_dropout(dropout)
        self.sink = None if sink_heads is None else nn.Parameter(torch.zeros(sink_heads))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | Tensor | None = None,
        scores: ScoreTerm | Sequence[ScoreTerm] = (), **options: Any,
    ) -> Any:  # fmt: skip
        """(B, H, N_q, D), (B, H_kv, N_k, D), (B, H_kv, N_k, D_v) -> (B, H, N_q, D_v); options as `attention`."""
        if self.mask is not None:
            mask = self.mask if mask is None else self.mask & mask
        return attention(
            q, k, v, mask=mask, scores=scores, sink=self.sink, scale=self.scale, backend=self.backend,
            dropout=self.dropout if self.training else 0.0, **options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"mask={self.mask}, dropout={self.dropout}, scale={self.scale}, backend={self.backend!r}"


class MultiheadAttention(nn.Module):
    """Multi-head attention with projections, grouped queries included; batch first.

    Args:
        embed_dim: size of the inputs and of the result.
        num_heads: query heads; num_heads_kv: KV heads, a divisor of it (default: the same).
        head_dim: size per head, default embed_dim // num_heads.
        bias: whether the projections have one.
        mask, dropout, scale, backend: as in `Attention`. sink: whether to learn a sink per head.

    Unlike torch.nn.MultiheadAttention masks are True = may attend, and only the output is returned.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, num_heads_kv: int | None = None, head_dim: int | None = None,
        bias: bool = True, mask: Mask | None = None, dropout: float = 0.0, scale: float | None = None,
        sink: bool = False, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if num_heads < 1 or heads_kv < 1 or num_heads % heads_kv:
            raise OptionError(f"num_heads ({num_heads}) is a multiple of num_heads_kv ({heads_kv})")
        if head_dim is None:
            if embed_dim % num_heads:
                raise OptionError(
                    f"embed_dim ({embed_dim}) is a multiple of num_heads ({num_heads}), or give head_dim"
                )
            head_dim = embed_dim // num_heads
        self.num_heads, self.num_heads_kv, self.head_dim = num_heads, heads_kv, head_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, heads_kv * head_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, heads_kv * head_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias)
        self.attention = Attention(
            mask=mask, dropout=dropout, scale=scale, sink_heads=num_heads if sink else None, backend=backend
        )

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, mask: Mask | Tensor | None = None,
        scores: ScoreTerm | Sequence[ScoreTerm] = (), **options: Any,
    ) -> Tensor:  # fmt: skip
        """(B, N_q, embed_dim), attending itself or `context` (B, N_k, embed_dim) -> (B, N_q, embed_dim).

        Raises ShapeError for inputs that are not (B, N, embed_dim).
        """
        source = x if context is None else context
        for name, t in (("x", x), ("context", source)):
            if t.ndim != 3 or t.shape[-1] != self.q_proj.in_features:
                raise ShapeError(message(f"{name} has shape (B, N, {self.q_proj.in_features})", {name: t}))

        def split(t: Tensor, heads: int) -> Tensor:
            return t.view(*t.shape[:-1], heads, self.head_dim).transpose(1, 2)

        q = split(self.q_proj(x), self.num_heads)
        k, v = (split(proj(source), self.num_heads_kv) for proj in (self.k_proj, self.v_proj))
        out = self.attention(q, k, v, mask=mask, scores=scores, **options)
        result: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return result
