"""What torch calls on CUDA for SDPA's flash path, backed by Tilewise: the aten forward and its backward.

torch chooses the flash path (float16 or bfloat16, no mask, causal with equal lengths) and its autograd; these two
functions replace the kernels below it. With a causal bias of unequal lengths torch means bottom-right here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention, attention_partial_backward
from tilewise.errors import OptionError
from tilewise.spec.masks import causal


class Activation:
    """Keeps the kernels registered; `remove()` gives torch its own back."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        """Unregister."""
        if self.library is not None:
            self.library._destroy()
            self.library = None


def activate(dispatch_key: str = "CUDA") -> Activation:
    """Put both kernels in the place of torch's for one dispatch key."""
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    library.impl("_scaled_dot_product_flash_attention", forward, dispatch_key)
    library.impl("_scaled_dot_product_flash_attention_backward", backward, dispatch_key)
    return Activation(library)


def forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention: (out, lse, None, None, L, S, seed as uint64 (2,), unused, no mask)."""
    if return_debug_mask:
        raise OptionError(
            "no debug mask is made\nGive return_debug_mask=False; tilewise.dropout_mask shows what is kept."
        )
    seed = torch.zeros(2, dtype=torch.int64, device=query.device)
    if dropout_p:
        seed[:1] = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=query.device)
    out, lse = attention(query, key, value, return_lse=True, **_options(seed, dropout_p, is_causal, scale))
    unused = torch.zeros((), dtype=torch.int64, device=query.device).view(torch.uint64)
    lengths = query.shape[2], key.shape[2]
    return out, lse, None, None, *lengths, seed.view(torch.uint64), unused, query.new_empty(0)


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
    philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward: (dq, dk, dv)."""
    options = _options(philox_seed.view(torch.int64), dropout_p, is_causal, scale)
    found = attention_partial_backward(query, key, value, out, logsumexp, grad_out, **options)
    return found.dq, found.dk, found.dv


def _options(seed: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> dict[str, Any]:
    mask = causal() if is_causal else None
    return {"mask": mask, "dropout": dropout_p, "seed": seed[:1] if dropout_p else None, "scale": scale}
