"""BlockMask: a mask_mod with its sizes, and the counts of blocks for those who look at them.

Attention needs the function alone: tiles are classified while it runs. The block tensors that the original keeps are
made when they are asked for, exactly, one row of blocks at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.compat.flex_trace import Mod, trace_mod
from tilewise.errors import ShapeError, message
from tilewise.spec.masks import Mask, block_sparse
from tilewise.spec.print_torch import Env, compile_torch

BLOCK = 128
WHOLE = 1 << 30
"""torch's block size of a mask that hides nothing and fits every length."""


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask_mod that hides nothing."""
    return True


class BlockMask:
    """Which pairs may attend: mask_mod(b, h, q_idx, kv_idx) over (B, H, Q_LEN, KV_LEN).

    Made by `create_block_mask`, by `from_kv_blocks`, or from torch's own BlockMask. Where block lists are given, as in
    the two latter, a pair is visible if its block is full, or is listed and mask_mod says so. Everything else that
    torch's BlockMask has (kv_num_blocks, sparsity(), to_dense(), to_string(), indexing, ...) is there, from a torch
    BlockMask made at the first use.
    """

    def __init__(
        self, mask_mod: Callable[..., Any], sizes: tuple[int, int], seq_lengths: tuple[int, int],
        block_size: tuple[int, int] = (BLOCK, BLOCK), device: Any = None, *, separate_full_blocks: bool = True,
        blocks: Any = None,
    ) -> None:  # fmt: skip
        self.sizes, self.seq_lengths = sizes, seq_lengths
        self.BLOCK_SIZE: tuple[int, int] = (block_size[0], block_size[1])
        self.device = torch.device("cpu" if device is None else device)
        self._separate, self._given, self._made = separate_full_blocks, blocks, blocks
        self._mask_mod = mask_mod
        self._traced: Mod | None = None

    @property
    def mask_mod(self) -> Callable[..., Any]:
        """The function; setting it keeps the block lists that were given, as in the original."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, fn: Callable[..., Any]) -> None:
        self._mask_mod, self._traced, self._made = fn, None, self._given
        if self._given is not None:
            self._given.mask_mod = fn

    @property
    def traced(self) -> Mod:
        """mask_mod as an expression, traced once.  Raises SpecError."""
        if self._traced is None:
            self._traced = trace_mod(self._mask_mod, mask=True)
        return self._traced

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN)."""
        return (*self.sizes, *self.seq_lengths)

    @classmethod
    def from_torch(cls, theirs: Any) -> BlockMask:
        """A torch BlockMask, or a tuple-like of its fields, read by its lists and its mask_mod."""
        sizes = tuple(theirs.kv_num_blocks.shape[:-1])
        sizes = (1,) * (2 - len(sizes)) + sizes
        lengths = tuple(getattr(theirs, "seq_lengths", theirs.shape[-2:]))
        return cls(
            theirs.mask_mod, sizes, lengths, theirs.BLOCK_SIZE, theirs.kv_num_blocks.device, blocks=theirs
        )

    @classmethod
    def from_kv_blocks(cls, *args: Any, **kwargs: Any) -> BlockMask:
        """torch's arguments: kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, BLOCK_SIZE, mask_mod."""
        from torch.nn.attention import flex_attention as theirs

        return cls.from_torch(theirs.BlockMask.from_kv_blocks(*args, **kwargs))

    def mask(self, sizes: dict[str, int]) -> Mask:
        """The same rule as a Tilewise mask over rows and columns, for a call with these extents of b, h, i, j."""
        root = self.traced.root
        keep = Mask() if root.op == "const" and root.value is True else Mask(self.traced.fitted(sizes))
        blocks = self._given
        if blocks is None or self.BLOCK_SIZE[0] == self.BLOCK_SIZE[1] == WHOLE:
            return keep
        listed = keep & block_sparse(self._layout(blocks.kv_num_blocks, blocks.kv_indices), self.BLOCK_SIZE)
        if blocks.full_kv_num_blocks is None:
            return listed
        full = self._layout(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        return block_sparse(full, self.BLOCK_SIZE) | listed

    def _layout(self, count: Tensor, columns: Tensor) -> Tensor:
        """Bool (..., block rows, block columns): which blocks the list names."""
        width = max(-(-self.seq_lengths[1] // self.BLOCK_SIZE[1]), columns.shape[-1])
        valid = torch.arange(columns.shape[-1], device=columns.device) < count[..., None]
        where = torch.where(valid, columns, width).to(torch.int64)
        layout = torch.zeros(*columns.shape[:-1], width + 1, dtype=torch.bool, device=columns.device)
        rows, used = (-(-n // size) for n, size in zip(self.seq_lengths, self.BLOCK_SIZE, strict=True))
        return layout.scatter_(-1, where, True)[..., :rows, :used]

    def rows(self, start: int, stop: int) -> Tensor:
        """The mask itself for rows start to stop, bool (B, H, stop - start, KV_LEN)."""
        shape = (*self.sizes, stop - start, self.seq_lengths[1])
        term = self.traced.term
        device = term.leaves[0].device if term.leaves else self.device
        ranges = {"b": (0, shape[0]), "h": (0, shape[1]), "i": (start, stop), "j": (0, shape[3])}
        variables = {}
        for axis, (name, (low, high)) in enumerate(ranges.items()):
            view = [1, 1, 1, 1]
            view[axis] = high - low
            variables[name] = torch.arange(low, high, dtype=torch.int32, device=device).view(view)
        leaves = [leaf.detach() for leaf in term.leaves]
        env = Env(variables, ranges, leaves, term.ints, term.floats, torch.float32)
        return compile_torch((self.traced.root,))(env)[0].to(device).expand(shape)

    def torch(self) -> Any:
        """A torch BlockMask with the same lists, made once."""
        if self._made is None:
            self._made = self._count_blocks()
        return self._made

    def _count_blocks(self) -> Any:
        from torch.nn.attention import flex_attention as theirs

        (block_q, block_k), (length_q, length_k) = self.BLOCK_SIZE, self.seq_lengths
        columns = -(-length_k // block_k)
        counts = []
        for start in range(0, length_q, block_q):
            seen = self.rows(start, min(start + block_q, length_q)).sum(2)
            seen = torch.nn.functional.pad(seen, (0, columns * block_k - length_k))
            counts.append(seen.unflatten(-1, (columns, block_k)).sum(-1))
        visible = (
            torch.stack(counts, 2) if counts else torch.zeros(*self.sizes, 0, columns, dtype=torch.int64)
        )
        full = (visible == block_q * block_k) & self._separate
        lists = [*_listed((visible > 0) & ~full), *(_listed(full) if self._separate else (None, None))]
        known = inspect.signature(theirs.BlockMask.from_kv_blocks).parameters
        extra: dict[str, Any] = {"seq_lengths": self.seq_lengths} if "seq_lengths" in known else {}
        extra |= {"BLOCK_SIZE": self.BLOCK_SIZE, "mask_mod": self._mask_mod}
        return theirs.BlockMask.from_kv_blocks(*lists, **extra)

    def __getitem__(self, index: Any) -> BlockMask:
        """Block lists of part of the batch, heads and rows of blocks; its mask_mod must be set anew, as in torch."""
        return BlockMask.from_torch(self.torch()[index])

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The upper left corner: the same function over other lengths."""
        if self._given is not None:
            return BlockMask.from_torch(self._given._adjust(new_q_len, new_kv_len))
        return BlockMask(
            self._mask_mod, self.sizes, (new_q_len, new_kv_len), self.BLOCK_SIZE, self.device,
            separate_full_blocks=self._separate,
        )  # fmt: skip

    def to(self, device: Any) -> BlockMask:
        """Lists on another device; the tensors mask_mod reaches stay where they are."""
        if self._given is not None:
            return BlockMask.from_torch(self._given.to(device))
        return BlockMask(
            self._mask_mod,
            self.sizes,
            self.seq_lengths,
            self.BLOCK_SIZE,
            device,
            separate_full_blocks=self._separate,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.torch(), name)

    def __str__(self) -> str:
        return str(self.torch())

    def __repr__(self) -> str:
        name = getattr(self._mask_mod, "__name__", self._mask_mod)
        return f"BlockMask(shape={self.shape}, BLOCK_SIZE={tuple(self.BLOCK_SIZE)}, mask_mod={name})"


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(count, columns) of each row of blocks, int32, the named columns first."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def check_sizes(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    """Raise ShapeError unless the mask was made for these lengths and broadcasts to this batch and these heads."""
    lengths = (query.shape[2], key.shape[2])
    if tuple(block_mask.BLOCK_SIZE) != (WHOLE, WHOLE) and tuple(block_mask.seq_lengths) != lengths:
        raise ShapeError(
            message(
                f"block_mask was made for lengths {tuple(block_mask.seq_lengths)}, and these are {lengths}",
                {"query": query, "key": key},
                "Make it for these lengths; block_mask._adjust(q_len, kv_len) crops it to the upper left.",
            )
        )
    for size, wanted in zip(block_mask.sizes, query.shape[:2], strict=True):
        if size not in (1, wanted):
            raise ShapeError(
                message(f"block_mask was made for (B, H) = {block_mask.sizes}", {"query": query})
            )
