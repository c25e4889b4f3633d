"""Rotary position embedding as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewise.errors import OptionError, ShapeError, message
from tilewise.serving import RotaryTable


class Rotary(nn.Module):
    """Turns pairs of entries of q and k by angles that grow with the position.

    Args:
        dim: how many entries of a head are turned, even; the others stay.
        base: pair n of dim / 2 turns by base^(-2 n / dim) radians per position.
        interleaved: pairs are (2 n, 2 n + 1), as in GPT-J; otherwise (n, n + dim / 2), as in Llama.

    Angles are computed in float32 (float64 for float64), the result has the input's dtype.
    Raises OptionError for an odd or non-positive dim.

    Source: Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864, equation 34.
    """

    inv_freq: Tensor

    def __init__(self, dim: int, *, base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise OptionError(f"rotary turns pairs: dim is even and at least 2, not {dim}")
        self.dim, self.base, self.interleaved = dim, base, interleaved
        self._table: RotaryTable | None = None
        powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        self.register_buffer("inv_freq", base**-powers, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, H, N, D) at positions (N,) or (B, N), integers -> the same shape.

        Raises ShapeError where D is smaller than `dim`.
        """
        return self._turn(x, *self._angles(x, positions))

    def both(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k at the same positions, whose angles are computed once; see `forward`."""
        if q.dtype != k.dtype:
            return self(q, positions), self(k, positions)
        angles = self._angles(q, positions)
        return self._turn(q, *angles), self._turn(k, *angles)

    def _angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for x at positions, (N, dim / 2) or (B, 1, N, dim / 2)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = positions.to(torch.float64)[..., None] * self.inv_freq.to(torch.float64)
        angles = angles if positions.ndim == 1 else angles[:, None]
        return angles.cos().to(wide), angles.sin().to(wide)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.shape[-1] < self.dim:
            raise ShapeError(message(f"rotary turns {self.dim} entries of each head", {"x": x}))
        whole = x.shape[-1] == self.dim
        part = (x if whole else x[..., : self.dim]).to(cos.dtype)
        if self.interleaved:
            a, b = part[..., 0::2], part[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        else:
            a, b = part.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        turned = turned.to(x.dtype)
        return turned if whole else torch.cat((turned, x[..., self.dim :]), -1)

    def table(self, length: int, device: torch.device) -> RotaryTable:
        """The angles of positions 0 to length - 1 in float32, for `attention_with_cache`; kept for the next call."""
        kept = self._table
        if kept is None or kept.cos.shape[0] < length or kept.cos.device != device:
            self._table = kept = RotaryTable.make(
                self.dim, length, base=self.base, interleaved=self.interleaved, device=device
            )
        return kept

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}"
