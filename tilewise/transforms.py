"""Rewritings of a problem into the form a kernel wants, each with its inverse.

A transform T is an object with three methods, and one law that makes it safe to put around any attention f:

    accepts(...)              can this problem be rewritten?
    apply(...)                the rewritten tensors
    invert(result, ...)       the result of the original problem

    invert(f(apply(x))) = f(x)

so that no kernel needs a flag for grouped heads, odd head dimensions, key splits or packing.
`invert_gradients` does for (dq, dk, dv) what `invert` does for (out, lse). Positions do not follow by
themselves: each docstring says which row of the rewritten problem has which position.

Source of the shape: the reductions of cvxpy (accepts, apply, invert); Agrawal et al. 2018, "A rewriting
system for convex optimization problems" (arXiv:1709.04494).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import OptionError, ShapeError, message
from .state import Partial, merge

__all__ = [
    "HEAD_DIMS",
    "FoldGQA",
    "Pack",
    "Packing",
    "PadHeadDim",
    "SplitKV",
    "Tensors",
    "fold_gqa",
    "pack",
    "pad_head_dim",
    "split_kv",
]

Sequences = Tensor | Sequence[Tensor]
Lengths = Sequence[int] | Tensor | None

# The padded head dimensions kernels are built for (docs/design.md, "Ops, sizes, errors").
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256, 512)


class Tensors(NamedTuple):
    """The tensors of one problem, (B, H, N, D); ``do``, the gradient of out, only for a backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None = None


class FoldGQA:
    """Query heads that share a KV head become rows of one head, so each K and V tile is read once per group.

    q (B, H, N_q, D) -> (B, H_kv, G * N_q, D) with G = H / H_kv. Rows are g-major: row ``g * N_q + i`` is row
    i of query head ``h_kv * G + g``, and keeps the position of row i. K and V are passed through, not copied;
    q is a view where its head and row dimensions can be joined.
    """

    def accepts(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """True if H is a positive multiple of H_kv."""
        heads, heads_kv = q.shape[1], k.shape[1]
        return heads_kv == v.shape[1] and heads_kv > 0 and heads > 0 and heads % heads_kv == 0

    def apply(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None = None) -> Tensors:
        """Fold q (B, H, N_q, D) and, if given, do (B, H, N_q, D_v).

        Raises: ShapeError if H is not a multiple of H_kv.
        """
        if not self.accepts(q, k, v):
            raise ShapeError(message("num_heads_q is a multiple of num_heads_kv", {"q": q, "k": k, "v": v}))
        num_heads_kv = k.shape[1]
        return Tensors(self.rows(q, num_heads_kv), k, v, None if do is None else self.rows(do, num_heads_kv))

    def rows(self, tensor: Tensor, num_heads_kv: int) -> Tensor:
        """Fold any per-row tensor, (B, H, N_q) or (B, H, N_q, D): lse, delta, out."""
        batch, heads, seqlen_q = tensor.shape[:3]
        return tensor.reshape(batch, num_heads_kv, heads // num_heads_kv * seqlen_q, *tensor.shape[3:])

    def unfold(self, tensor: Tensor, num_heads_q: int) -> Tensor:
        """The inverse of `rows`: (B, H_kv, G * N_q, ...) -> (B, H, N_q, ...)."""
        batch, num_heads_kv, folded = tensor.shape[:3]
        group = num_heads_q // num_heads_kv
        return tensor.reshape(batch, num_heads_q, folded // group, *tensor.shape[3:])

    def invert(self, result: Partial, num_heads_q: int) -> Partial:
        """out (B, H, N_q, D_v) and lse (B, H, N_q) from those of the folded problem."""
        return Partial(self.unfold(result.out, num_heads_q), self.unfold(result.lse, num_heads_q))

    def invert_gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, num_heads_q: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq unfolded; dk and dv are already summed over the group."""
        return self.unfold(dq, num_heads_q), dk, dv


class PadHeadDim:
    """Zeros are appended to D and to D_v, each up to the next of `HEAD_DIMS`.

    A zero adds nothing to q . k, and a zero column of v gives a zero column of out. The default scale is
    D^-1/2 of the unpadded D: pass the scale explicitly. A tensor that has a listed size already is passed
    through.
    """

    def padded(self, head_dim: int) -> int | None:
        """The smallest of `HEAD_DIMS` that holds ``head_dim``, or None."""
        place = bisect_left(HEAD_DIMS, head_dim)
        return HEAD_DIMS[place] if head_dim > 0 and place < len(HEAD_DIMS) else None

    def accepts(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """True if 1 <= D = D of k and D_v <= the largest of `HEAD_DIMS`."""
        fits = self.padded(q.shape[-1]) is not None and self.padded(v.shape[-1]) is not None
        return q.shape[-1] == k.shape[-1] and fits

    def apply(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None = None) -> Tensors:
        """Pad the last dimension of q and k, and of v and do.

        Raises: ShapeError if q and k differ in D, or D or D_v is 0 or above the largest of `HEAD_DIMS`.
        """
        if not self.accepts(q, k, v):
            rule = f"q and k share head_dim, and head_dim and head_dim_v are 1 to {HEAD_DIMS[-1]}"
            raise ShapeError(message(rule, {"q": q, "k": k, "v": v}))
        return Tensors(self._pad(q), self._pad(k), self._pad(v), None if do is None else self._pad(do))

    def invert(self, result: Partial, head_dim_v: int) -> Partial:
        """The first D_v columns of out; lse is unchanged."""
        return Partial(result.out[..., :head_dim_v], result.lse)

    def invert_gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, head_dim: int, head_dim_v: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first D columns of dq and dk, and the first D_v of dv."""
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim_v]

    def _pad(self, tensor: Tensor) -> Tensor:
        padded = self.padded(tensor.shape[-1])
        return tensor if padded in (None, tensor.shape[-1]) else pad(tensor, (0, padded - tensor.shape[-1]))


@dataclass(frozen=True)
class SplitKV:
    """The keys in at most n consecutive ranges, attended to separately and merged: split-KV decoding.

    Range ``[start, stop)`` is a problem of its own, with ``k_offset + start`` as its k_offset, an explicit
    q_offset, and no sink: a sink is merged once, at the end (`Partial.finalize`).

    Fields:
        n: number of ranges, at least 1.
        block: every range but the last is a multiple of this many keys.

    Raises: OptionError if n or block is below 1.
    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """

    n: int
    block: int = 1

    def __post_init__(self) -> None:
        if self.n < 1 or self.block < 1:
            raise OptionError(message(f"split_kv takes n >= 1 and block >= 1, got {self.n}, {self.block}"))

    def accepts(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """True if k and v hold the same number of keys."""
        return k.shape[-2] == v.shape[-2]

    def ranges(self, seqlen_k: int) -> list[slice]:
        """Disjoint key ranges that cover 0 .. seqlen_k in order; sizes differ by at most one block.

        None is empty, so there may be fewer than n; no keys at all give one empty range.
        """
        blocks = -(-seqlen_k // self.block)
        count = max(1, min(self.n, blocks))
        edges = [min(seqlen_k, blocks * i // count * self.block) for i in range(count + 1)]
        return [slice(start, stop) for start, stop in pairwise(edges)]

    def apply(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensors]:
        """One problem for each of `ranges`: q itself, and views of k and v.

        Raises: ShapeError if k and v hold different numbers of keys.
        """
        if not self.accepts(q, k, v):
            raise ShapeError(message("k and v hold the same keys", {"k": k, "v": v}))
        return [Tensors(q, k[..., part, :], v[..., part, :]) for part in self.ranges(k.shape[-2])]

    def invert(self, results: Sequence[Partial]) -> Partial:
        """The Partials of all ranges, merged. Differentiable."""
        return merge(*results)


class Packing(NamedTuple):
    """How sequences lie in a packed tensor.

    Fields:
        cu_seqlens: (B + 1,) int32; sequence b is tokens ``cu_seqlens[b]`` up to ``cu_seqlens[b + 1]``.
        lengths: the B lengths, on the host.
        padded: length N of the padded tensor they came from, or None if they came as a list.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    padded: int | None


class Pack:
    """Sequences of differing lengths, end to end in one tensor (T, H, D), without padding.

    From a list of (1, H, N_b, D), or from a padded (B, H, N, D) with B lengths. Row i of sequence b is token
    ``cu_seqlens[b] + i`` and keeps position i within its sequence. Pack q, k and v with one call each.
    """

    def accepts(self, sequences: Sequences, lengths: Lengths = None) -> bool:
        """True for (B, H, N, D) with B lengths in 0 .. N, or a list that agrees in H and D; not for none."""
        if len(sequences) == 0:
            return False
        if isinstance(sequences, Tensor):
            if sequences.ndim != 4 or lengths is None or len(lengths) != sequences.shape[0]:
                return False
            return all(0 <= n <= sequences.shape[2] for n in _on_host(lengths))
        alike = {(x.ndim, x.shape[0], x.shape[1], x.shape[-1]) for x in sequences if x.ndim > 1}
        return lengths is None and len(alike) == 1 and next(iter(alike))[:2] == (4, 1)

    def apply(self, sequences: Sequences, lengths: Lengths = None) -> tuple[Tensor, Packing]:
        """Pack a list, or a padded tensor; a tensor of lengths is read on the host.

        Returns: (T, H, D), and the Packing that undoes it.
        Raises: ShapeError unless `accepts`.
        """
        if not self.accepts(sequences, lengths):
            given = {"sequences": sequences} if isinstance(sequences, Tensor) else dict(enumerate(sequences))
            rule = "pack takes a list of (1, H, N_b, D), or (B, H, N, D) with B lengths in 0 .. N"
            raise ShapeError(message(rule, {str(name): t for name, t in given.items()}))
        if isinstance(sequences, Tensor):
            rows, sizes, padded = list(sequences), _on_host(lengths), sequences.shape[2]
        else:
            rows, sizes, padded = [x[0] for x in sequences], tuple(x.shape[2] for x in sequences), None
        packed = torch.cat([x[:, :size].transpose(0, 1) for x, size in zip(rows, sizes, strict=True)])
        edges = torch.tensor((0, *sizes)).cumsum(0).to(packed.device, torch.int32)
        return packed, Packing(edges, sizes, padded)

    def invert(self, result: Partial, packing: Packing) -> Partial | list[Partial]:
        """The result in the form the sequences had: one padded Partial, or one for each sequence of the list.

        Padding rows have out = 0 and lse = -inf, as every row that sees no key.
        """
        out, lse = self.unpack(result.out, packing), result.lse.split(packing.lengths, dim=-1)
        if packing.padded is None or not isinstance(out, Tensor):
            return [Partial(x, z[None]) for x, z in zip(out, lse, strict=True)]
        filled = [pad(z, (0, packing.padded - z.shape[-1]), value=float("-inf")) for z in lse]
        return Partial(out, torch.stack(filled))

    def unpack(self, packed: Tensor, packing: Packing) -> Tensor | list[Tensor]:
        """(T, H, D) -> (B, H, N, D) with zeros in the padding, or a list of (1, H, N_b, D)."""
        rows = [x.transpose(0, 1) for x in packed.split(packing.lengths)]
        if packing.padded is None:
            return [x[None] for x in rows]
        return torch.stack([pad(x, (0, 0, 0, packing.padded - x.shape[1])) for x in rows])

    def invert_gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, packing_q: Packing, packing_k: Packing
    ) -> tuple[Tensor | list[Tensor], ...]:
        """Each gradient in the form its sequences had; 0 in the padding."""
        return self.unpack(dq, packing_q), self.unpack(dk, packing_k), self.unpack(dv, packing_k)


fold_gqa = FoldGQA()
pad_head_dim = PadHeadDim()
pack = Pack()


def split_kv(n: int, block: int = 1) -> SplitKV:
    """The transform that splits the keys into at most ``n`` ranges of whole blocks. See `SplitKV`."""
    return SplitKV(n, block)


def _on_host(lengths: Lengths) -> tuple[int, ...]:
    return tuple(lengths.tolist() if isinstance(lengths, Tensor) else lengths or ())
