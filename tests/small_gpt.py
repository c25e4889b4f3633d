"""A language model of two layers on Tilewise's modules, or on torch's own attention, with the same weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise import nn as twnn

VOCAB, WIDTH, HEADS = 23, 16, 4


class Block(nn.Module):
    def __init__(self, dropout: float, sdpa: bool, bare: bool, backend: str) -> None:
        super().__init__()
        self.attention = twnn.MultiheadAttention(
            WIDTH, HEADS, num_heads_kv=2, dropout=dropout, backend=backend,
            **({} if bare else {"mask": tw.causal(), "rotary": twnn.Rotary(4)}),
        )  # fmt: skip
        self.sdpa = sdpa
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        if not self.sdpa:
            return self.attention(x)
        own = self.attention
        q, k, v = own.project(x, x, x)
        at = torch.arange(x.shape[1], device=x.device)
        q, k = own.attention.rotary(q, at), own.attention.rotary(k, at)
        out = nn.functional.scaled_dot_product_attention(q, k.to(q.dtype), v, is_causal=True, enable_gqa=True)
        return own.out_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class SmallGPT(nn.Module):
    """tokens (B, N) -> logits (B, N, VOCAB); `bare` has neither mask nor positions."""

    def __init__(
        self, layers: int = 2, dropout: float = 0.0, *, sdpa: bool = False, bare: bool = False,
        backend: str = "blockwise",
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout, sdpa, bare, backend) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCAB)
        self.checkpoint: bool | None = None  # None, or use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpoint is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpoint)
        return self.head(x)


def batch(rows: int = 4, length: int = 12) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(rows + length))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    logits = model(tokens)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}
