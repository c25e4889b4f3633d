"""Multi-head attention with projections, in Tilewise's form and in torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tilewise.errors import OptionError, ShapeError, message
from tilewise.nn.attention import Attention
from tilewise.nn.torch_form import TorchCall, attend_as_torch, to_tilewise_names, to_torch_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.spec.masks import Mask
    from tilewise.spec.scores import ScoreTerm


class MultiheadAttention(nn.Module):
    """Multi-head attention with projections, grouped queries included.

    Called with x, or x and context, it takes Tilewise's masks and gives the output alone. Called with query, key
    and value it is torch.nn.MultiheadAttention: same state dict, same arguments and polarity, same results, a
    pair. `from_torch` makes one from torch's module, and `load_state_dict` takes both modules' names.

    Args:
        embed_dim: size of the inputs and of the result.
        num_heads: query heads; num_heads_kv: KV heads, a divisor of it (default: the same).
        dropout: probability that a weight is dropped, in training mode only.
        bias: whether the projections have one.
        head_dim: size per head, default embed_dim // num_heads.
        kdim, vdim: sizes of key and value inputs, default embed_dim.
        add_bias_kv: learn one more key and value (`bias_k`, `bias_v`), which every query sees.
        add_zero_attn: one more key and value of zeros, which every query sees.
        batch_first: layout of the call with query, key and value: (B, N, E), else (N, B, E) as torch's default.
            x and context are always (B, N, E).
        mask, scale, backend, window, softcap, rotary: as in `Attention`.
        sink: whether to learn a sink per head. qk_norm: whether to normalise q and k per head.

    Raises: OptionError for sizes that do not divide.
    """

    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    in_proj_weight = in_proj_bias = None
    """torch's encoder layers look at these and at `_qkv_same_embed_dim`, and then leave the work to `forward`."""
    _qkv_same_embed_dim = False

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        device: Any = None, dtype: torch.dtype | None = None, *, num_heads_kv: int | None = None,
        head_dim: int | None = None, sink: bool = False, qk_norm: bool = False, **attention: Any,
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
        made = {"device": device, "dtype": dtype}
        self.embed_dim, self.batch_first, self.add_zero_attn = embed_dim, batch_first, add_zero_attn
        self.num_heads, self.num_heads_kv, self.head_dim = num_heads, heads_kv, head_dim
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias, **made)
        self.k_proj = nn.Linear(self.kdim, heads_kv * head_dim, bias=bias, **made)
        self.v_proj = nn.Linear(self.vdim, heads_kv * head_dim, bias=bias, **made)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias, **made)
        self.bias_k = self.bias_v = None
        if add_bias_kv:
            self.bias_k, self.bias_v = (
                nn.Parameter(torch.empty(1, 1, heads_kv * head_dim, **made)) for _ in "kv"
            )
            nn.init.xavier_normal_(self.bias_k)
            nn.init.xavier_normal_(self.bias_v)
        self.attention = Attention(
            dropout=dropout,
            sink_heads=num_heads if sink else None,
            qk_norm=head_dim if qk_norm else None,
            **attention,
        ).to(device=device, dtype=dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        to_tilewise_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, backend: str = "auto") -> MultiheadAttention:
        """A module with the weights (copied), options, mode, device and dtype of torch's."""
        weight = module.out_proj.weight
        made = cls(
            module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
            kdim=module.kdim, vdim=module.vdim, add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn, batch_first=module.batch_first, device=weight.device,
            dtype=weight.dtype, backend=backend,
        )  # fmt: skip
        made.load_state_dict(module.state_dict())
        return made.train(module.training)

    def torch_state_dict(self) -> dict[str, Tensor]:
        """The weights under the names of torch.nn.MultiheadAttention, which can load them.

        Raises OptionError for what torch's module has not: fewer KV heads, a head size of its own, sink, norms.
        """
        return to_torch_names(self)

    @property
    def dropout(self) -> float:
        """Probability that a weight is dropped while training."""
        return self.attention.dropout

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
        key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
        average_attn_weights: bool = True, is_causal: bool = False, *, context: Tensor | None = None,
        mask: Mask | Tensor | None = None, scores: ScoreTerm | Sequence[ScoreTerm] = (), **options: Any,
    ) -> Any:  # fmt: skip
        """Two forms: (x, context=None, mask, scores, cache, ...) -> out, and torch's (query, key, value, ...) -> pair.

        Tilewise's: x (B, N_q, embed_dim) attends itself or context (B, N_k, kdim) -> (B, N_q, embed_dim); masks say
        True = may attend, options are those of `Attention.forward`.

        torch's: query (N_q, B, E), key and value (N_k, B, ...), with batch_first (B, N, ...), unbatched (N, ...).
            key_padding_mask (B, N_k) and attn_mask (N_q, N_k) or (B * H, N_q, N_k): bool with True = hidden, or
            float to add. is_causal: attn_mask is the causal mask (top-left), which is then not read.
            need_weights: also give the weights (B, N_q, N_k), or (B, H, N_q, N_k) without average_attn_weights;
            that matrix is what was asked for, and costs N_q * N_k. False gives None, in linear memory.
            A row that sees no key is 0, where torch gives NaN.

        Raises: ShapeError for inputs that do not fit; OptionError for arguments of one form in the other.
        """
        if value is None:
            foreign = (key_padding_mask, attn_mask)
            if any(t is not None for t in foreign) or is_causal or (key is not None and context is not None):
                raise OptionError(
                    "key_padding_mask, attn_mask and is_causal belong to the call with query, key and value\n"
                    "With x alone, or x and context, give mask=tw.causal(), mask=tw.key_padding(present)."
                )
            source = context if context is not None else key
            return self._own_form(
                query, query if source is None else source, mask=mask, scores=scores, **options
            )
        if key is None or context is not None or mask is not None or scores != () or options:
            raise OptionError(
                "context, mask, scores and options belong to the call with x and context\n"
                "With query, key and value, give attn_mask and key_padding_mask."
            )
        call = TorchCall(key_padding_mask, attn_mask, need_weights, average_attn_weights, is_causal)
        return attend_as_torch(self, (query, key, value), call)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, ...) inputs -> q (B, H, N_q, D), k and v (B, H_kv, N_k, D)."""
        pairs = ((self.q_proj, query, self.num_heads), (self.k_proj, key, self.num_heads_kv),
                 (self.v_proj, value, self.num_heads_kv))  # fmt: skip
        q, k, v = (proj(t).unflatten(-1, (heads, self.head_dim)).transpose(1, 2) for proj, t, heads in pairs)
        return q, k, v

    def _own_form(self, x: Tensor, source: Tensor, **options: Any) -> Tensor:
        for name, t, size in (("x", x, self.embed_dim), ("context", source, self.kdim)):
            if t.ndim != 3 or t.shape[-1] != size:
                raise ShapeError(message(f"{name} has shape (B, N, {size})", {name: t}))
        if self.kdim != self.vdim or self.bias_k is not None or self.add_zero_attn:
            raise OptionError(
                "kdim unlike vdim, add_bias_kv and add_zero_attn belong to the call with query, key and value"
            )
        out = self.attention(*self.project(x, source, source), **options)
        result: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return result
