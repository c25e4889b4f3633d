"""Keys and values that lie in pages, read and written by columns of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tilewise.backends.reference.segments import Segment
    from tilewise.problem import Inputs, Problem


def _rows(pool: Tensor, page: Tensor, row: Tensor) -> Tensor:
    """pool[page, :, row]; bytes are indexed where the elements are, which older torch cannot for float8 on a CPU."""
    if pool.element_size() > 1:
        return pool[page, :, row]
    return pool.view(torch.uint8)[page, :, row].view(pool.dtype)


class Pages:
    """The pools of a call. A read copies the columns asked for and no more."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.size, self.table, self.wide = problem.page_size, inputs.block_table, problem.compute_dtype

    def _places(self, pool: Tensor, segment: Segment, columns: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """(page, row) of each column, clamped to the pool: tables on a device are never trusted."""
        column = torch.arange(*columns, device=pool.device)
        if self.table is None:
            page = torch.full_like(column, segment.first_batch)
        else:
            page = self.table[segment.first_batch][column // max(self.size, 1)].to(torch.int64)
        return page.clamp(0, max(pool.shape[0] - 1, 0)), column % max(self.size, 1)

    def _factor(self, scale: Tensor, page: Tensor) -> Tensor:
        """Scales (H_kv,) or (P, H_kv) of the columns, (1, H_kv, columns or 1, 1)."""
        scale = scale.to(self.wide)
        return scale.view(1, -1, 1, 1) if scale.ndim == 1 else scale[page].t()[None, :, :, None]

    def read(self, pool: Tensor, segment: Segment, columns: tuple[int, int], scale: Tensor | None) -> Tensor:
        """(1, H_kv, columns, D) in the compute type, times the scale."""
        if columns[0] >= columns[1]:
            return torch.zeros(1, pool.shape[1], 0, pool.shape[3], dtype=self.wide, device=pool.device)
        page, row = self._places(pool, segment, columns)
        tile = _rows(pool, page, row).to(self.wide).transpose(0, 1)[None].contiguous()
        return tile if scale is None else tile * self._factor(scale, page)

    def add(
        self, total: Tensor, segment: Segment, columns: tuple[int, int], tile: Tensor, scale: Tensor | None
    ) -> None:
        """Add gradients (1, H_kv, columns, D) of what `read` gave to those of the pool; a shared page gets the sum."""
        if columns[0] >= columns[1]:
            return
        page, row = self._places(total, segment, columns)
        tile = tile if scale is None else tile * self._factor(scale, page)
        heads = torch.arange(total.shape[1], device=total.device)
        index = (page[:, None], heads[None, :], row[:, None])
        total.index_put_(index, tile[0].transpose(0, 1), accumulate=True)
