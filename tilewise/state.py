"""The state that survives after each tile of keys, and the monoid it forms.

Attention of one query row over keys j is ``out = sum_j exp(s_j) v_j / sum_j exp(s_j)``. Kept as

    m = max_j s_j        l = sum_j exp(s_j - m)        acc = sum_j exp(s_j - m) v_j

it can be built from any split of the keys, in any order: `absorb` adds a tile, `merge` joins two states over
disjoint keys, `finalize` divides. Tiling, split-KV decoding, paged caches, cascades and ring attention are
different orders of the same merges. After any prefix of the keys, `finalize` is attention over that prefix.

A finalized state is a `Partial`: ``(out, lse)`` with ``lse = m + log l``. Partials merge too, and their merge
is differentiable in every ``out`` and every ``lse``.

Three rules keep empty rows and hidden values harmless:
  - hidden means a score of true -inf, and the pivot that is subtracted is 0 where the maximum is -inf;
  - what is hidden is removed by a select, never by a multiplication: NaN and Inf behind a mask never matter;
  - the pivot is a constant for differentiation, since the result does not depend on it.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867); Rabe and
Staats 2021 (arXiv:2112.05682); Dao et al. 2022 (arXiv:2205.14135), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import ShapeError, message

__all__ = ["OnlineSoftmaxState", "Partial", "merge", "stream"]

NEG_INF = float("-inf")


class Partial(NamedTuple):
    """Attention over a subset of the keys: its normalised output and the log of its softmax sum.

    Fields:
        out: (..., D_v), fp32 (fp64 for fp64 problems). 0 in a row with no visible key.
        lse: (...), natural log of ``sum_j exp(s_j)``. -inf in a row with no visible key.

    Layouts: ``out`` (B, H, N, D_v) with ``lse`` (B, H, N), and so on for any number of leading dimensions,
    with one exception, decided by rank alone: a three-dimensional ``out`` with a two-dimensional ``lse`` is
    packed, ``out`` (T, H, D_v) with ``lse`` (H, T), transposed. So a dense (H, N, D_v) needs its batch
    dimension, also inside vmap.
    """

    out: Tensor
    lse: Tensor

    def merge(self, other: Partial) -> Partial:
        """Attention over the keys of both, which must be disjoint. See `merge`."""
        return merge(self, other)

    def with_sink(self, sink: Tensor) -> Partial:
        """Attention with one more key per head, whose score is ``sink`` and whose value is 0.

        Apply it once, after all merges: a sink merged once per split is counted once per split.

        Args:
            sink: (H,), any float dtype, natural units, not scaled. -inf is no sink.

        Returns: Partial of the same shapes; where no key is visible, out = 0 and lse = sink.
        Raises: ShapeError if ``sink`` does not hold one number for each head of ``lse``.
        """
        if self.lse.ndim < 2 or sink.shape != self.lse.shape[-2:-1]:
            rule = "a sink holds one logit for each query head: sink (H,), lse (..., H, N) or (H, T)"
            raise ShapeError(message(rule, {"lse": self.lse, "sink": sink}))
        logit = sink.to(self.lse.dtype)[:, None].expand(self.lse.shape)
        return merge(self, Partial(torch.zeros_like(self.out), logit))

    def finalize(self, sink: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The output, after the sink (H,), if there is one, and in ``dtype``, if one is named.

        Returns: (..., D_v), in ``dtype`` or the dtype of ``out``.
        Raises: ShapeError as `with_sink`.
        """
        out = self.out if sink is None else self.with_sink(sink).out
        return out if dtype is None else out.to(dtype)


def merge(*parts: Partial) -> Partial:
    """Attention over the union of the keys of all parts, which must be disjoint.

    ``lse = log sum_p exp(lse_p)``, ``out = sum_p exp(lse_p - lse) out_p``. A part with lse = -inf in a row
    adds nothing to that row, whatever its ``out`` holds there; a part that is all a row has is the row, also
    with lse = +inf (an infinite sink). Differentiable, to any order, in every out and lse; the gradients of
    empty rows are 0, never NaN.

    Args:
        parts: one or more Partials of one layout and shape (see `Partial`).

    Returns: Partial of that shape.
    Raises: ShapeError if there is no part, if an lse does not fit its out, or if the parts' shapes differ.
    Source: Dao et al. 2022 (arXiv:2205.14135), section 3.1, for two blocks; symmetric in any number here.
    """
    _check_parts(parts)
    pivot = _finite_pivot(reduce(torch.maximum, [part.lse.detach() for part in parts]))
    count = reduce(torch.add, [(part.lse != NEG_INF).to(torch.int32) for part in parts])
    alone = [(part.lse == -NEG_INF) & (count == 1) for part in parts]
    weights = [
        torch.exp((part.lse - pivot).masked_fill(one, 0.0)) for part, one in zip(parts, alone, strict=True)
    ]
    total = reduce(torch.add, weights)
    none_visible = total == 0
    total = torch.where(none_visible, 1.0, total)
    lse = torch.where(none_visible, NEG_INF, pivot + torch.log(total))
    for part, one in zip(parts, alone, strict=True):
        lse = torch.where(one, part.lse, lse)
    terms = []
    for part, weight in zip(parts, weights, strict=True):
        visible_out = torch.where(_over_head_dim(part.lse == NEG_INF, part), 0.0, part.out)
        terms.append(visible_out * _over_head_dim(weight / total, part))
    return Partial(reduce(torch.add, terms), lse)


@dataclass(frozen=True)
class OnlineSoftmaxState:
    """Row maximum, row sum and unnormalised row of attention over the keys absorbed so far.

    Two states are equal when they finalize to the same Partial: m, l and acc may differ by a common pivot.
    Differentiable in scores and values; ``m`` carries no gradient.

    Fields:
        m: (...), the largest score so far; -inf if no key was visible.
        l: (...), ``sum_j exp(s_j - m)``.
        acc: (..., D_v), ``sum_j exp(s_j - m) v_j``.
    """

    m: Tensor
    l: Tensor  # noqa: E741 (the paper's letter)
    acc: Tensor

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        head_dim_v: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> OnlineSoftmaxState:
        """The state of ``shape`` rows that have seen no key: the identity of `merge`."""
        m = torch.full(shape, NEG_INF, dtype=dtype, device=device)
        return cls(m, torch.zeros_like(m), torch.zeros(*shape, head_dim_v, dtype=dtype, device=device))

    def absorb(self, scores: Tensor, values: Tensor) -> OnlineSoftmaxState:
        """The state after K more keys.

        Args:
            scores: (..., K), natural units; -inf hides the pair. K may be 0.
            values: (..., K, D_v), leading dimensions broadcastable to the rows'; what stands at a hidden pair
                is never used, NaN and Inf included, while NaN at a visible pair reaches the row.

        Returns: a new state, in this state's dtype.
        Raises: ShapeError if the tile does not fit the state.
        """
        self._check_tile(scores, values)
        if scores.shape[-1] == 0:
            return self
        scores, values = scores.to(self.m.dtype), values.to(self.acc.dtype)
        m = torch.maximum(self.m, scores.detach().amax(-1))
        pivot = _finite_pivot(m)
        visible = scores != NEG_INF
        p = torch.where(visible, torch.exp(scores - pivot[..., None]), 0.0)
        tile = (p[..., None, :] @ torch.where(visible[..., None], values, 0.0)).squeeze(-2)
        alpha = torch.exp(self.m - pivot)
        return OnlineSoftmaxState(m, self.l * alpha + p.sum(-1), self.acc * alpha[..., None] + tile)

    def absorb_key(self, score: Tensor, value: Tensor) -> OnlineSoftmaxState:
        """The state after one more key: score (...), value (..., D_v). Otherwise as `absorb`."""
        return self.absorb(score[..., None], value[..., None, :])

    def merge(self, other: OnlineSoftmaxState) -> OnlineSoftmaxState:
        """The state over the keys of both, which must be disjoint; ShapeError if their shapes differ."""
        if self.acc.shape != other.acc.shape:
            rule = "states merge when their rows and head_dim_v agree"
            raise ShapeError(message(rule, {"acc": self.acc, "other.acc": other.acc}))
        m = torch.maximum(self.m, other.m)
        pivot = _finite_pivot(m)
        a, b = torch.exp(self.m - pivot), torch.exp(other.m - pivot)
        acc = self.acc * a[..., None] + other.acc * b[..., None]
        return OnlineSoftmaxState(m, self.l * a + other.l * b, acc)

    def finalize(self) -> Partial:
        """Attention over the keys absorbed so far: (0, -inf) in rows that have seen none.

        Returns: Partial. Rows of two dimensions are packed, (T, H), so their lse is returned as (H, T).
        """
        none_visible = (self.m == NEG_INF) | (self.l == 0)
        total = torch.where(none_visible, 1.0, self.l)
        lse = torch.where(none_visible, NEG_INF, self.m + torch.log(total))
        out = torch.where(none_visible[..., None], 0.0, self.acc / total[..., None])
        return Partial(out, lse.mT if lse.ndim == 2 else lse)

    def _check_tile(self, scores: Tensor, values: Tensor) -> None:
        rows, lead = tuple(self.m.shape), tuple(values.shape[:-2])
        fits = tuple(scores.shape[:-1]) == rows and values.ndim >= 2 and len(lead) <= len(rows)
        fits = fits and tuple(values.shape[-2:]) == (scores.shape[-1], self.acc.shape[-1])
        fits = fits and all(a in (1, b) for a, b in zip(lead, rows[len(rows) - len(lead) :], strict=True))
        if not fits:
            rule = "a tile is scores (..., K) and values (..., K, D_v), with the state's rows (...) and D_v"
            raise ShapeError(message(rule, {"acc": self.acc, "scores": scores, "values": values}))


def stream(score_blocks: Iterable[Tensor], value_blocks: Iterable[Tensor]) -> Iterator[Partial]:
    """After each block of keys, attention over exactly the keys seen so far.

    Args:
        score_blocks: tensors (..., K), K free to vary from block to block, 0 included.
        value_blocks: as many tensors (..., K, D_v), leading dimensions broadcastable.

    Yields: one Partial for each block; fp64 if the first block holds fp64, else fp32.
    Raises: ShapeError if a block does not fit the first one; ValueError if one side has more blocks.
    """
    state = None
    for scores, values in zip(score_blocks, value_blocks, strict=True):
        if state is None:
            dtype = torch.float64 if torch.float64 in (scores.dtype, values.dtype) else torch.float32
            rows = tuple(scores.shape[:-1])
            state = OnlineSoftmaxState.empty(rows, values.shape[-1], dtype=dtype, device=scores.device)
        state = state.absorb(scores, values)
        yield state.finalize()


def _finite_pivot(top: Tensor) -> Tensor:
    """``top``, but 0 where it is -inf: there -inf - (-inf) would be NaN, and exp(-inf - 0) is 0."""
    return torch.where(top == NEG_INF, 0.0, top)


def _is_packed(part: Partial) -> bool:
    return part.out.ndim == 3 and part.lse.ndim == 2


def _over_head_dim(rows: Tensor, part: Partial) -> Tensor:
    """A tensor shaped like ``part.lse``, laid out to broadcast over ``part.out``."""
    return (rows.mT if _is_packed(part) else rows)[..., None]


def _check_parts(parts: tuple[Partial, ...]) -> None:
    if not parts:
        raise ShapeError(message("merge needs at least one Partial"))
    for number, part in enumerate(parts):
        here = {f"parts[{number}].out": part.out, f"parts[{number}].lse": part.lse}
        rows = part.lse.mT.shape if _is_packed(part) else part.lse.shape
        if part.out.ndim != part.lse.ndim + 1 or part.out.shape[:-1] != rows:
            rule = "a Partial is out (..., D_v) with lse (...), or, packed, out (T, H, D_v) with lse (H, T)"
            raise ShapeError(message(rule, here, "a dense (H, N, D_v) needs a batch: out[None], lse[None]"))
        if part.out.shape != parts[0].out.shape:
            here = {"parts[0].out": parts[0].out, **here}
            raise ShapeError(message("Partials merge when their shapes agree", here))
