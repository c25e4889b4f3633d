"""A run of attention on one small head, tile by tile, with everything that was true after each step.

The forward is a run through `OnlineSoftmaxState` over the tiles that `classify_tiles` does not call EMPTY; the
backward accumulates ds = p (dp - delta) tile by tile. Both are recorded for several tile sizes. The loop order
changes neither: a row absorbs its keys, and a key its rows, in the same order in both (see `trace_moves`).

Source: Dao et al. 2022, "FlashAttention" (https://arxiv.org/abs/2205.14135), algorithms 1 and 4 and appendix B.2;
Milakov and Gimelshein 2018 (https://arxiv.org/abs/1805.02867), algorithm 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..spec.tiles import EMPTY
from ..state import OnlineSoftmaxState
from .trace_moves import LOOPS, Sizes, Step, backward_steps, forward_steps
from .trace_problem import Head, read_head

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

__all__ = ["Recording", "Trace", "trace"]

BUDGET = 1 << 19
"""Numbers recorded for all tile sizes together; the smallest tiles are left out beyond it."""


@dataclass(frozen=True, repr=False)
class Recording:
    """One choice of tile sizes.

    Fields, with T_q x T_k tiles:
        block_q, block_k: rows and keys of a tile.
        classes: (T_q, T_k), of EMPTY, PARTIAL, FULL.
        m, l, alpha: (T_k, N_q); acc: (T_k, N_q, D_v). Entry t is the state of the row after its column tile t, and
            the factor by which that tile rescaled l and acc; a tile that is not visited changes nothing, alpha = 1.
        out: (N_q, D_v), lse: (N_q,), the answer, after the sink if there is one.
        dq: (T_k, N_q, D), after each column tile. dk: (T_q, N_k, D), dv: (T_q, N_k, D_v), after each row tile.
        steps: by (pass, loop), pass "forward" or "backward", loop one of `LOOPS`.
    """

    block_q: int
    block_k: int
    classes: Tensor
    m: Tensor
    l: Tensor  # noqa: E741 (the paper's letter)
    alpha: Tensor
    acc: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    steps: dict[tuple[str, str], list[Step]]


@dataclass(frozen=True, repr=False)
class Trace:
    """A recorded run. `save` writes the page, `recordings` holds the numbers by (block_q, block_k).

    Fields:
        head: what was run; block_q, block_k: the tile sizes that the page opens with.
        delta: (N_q,). p, dp, ds: (N_q, N_k), the weights, their gradients and the gradients of
            the scores before terms, 0 where a pair is hidden.
    """

    head: Head
    block_q: int
    block_k: int
    delta: Tensor
    p: Tensor
    dp: Tensor
    ds: Tensor
    recordings: dict[tuple[int, int], Recording]

    def __repr__(self) -> str:
        from .trace_page import heading

        return f"Trace({heading(self)}, tiles {self.block_q} x {self.block_k})"

    @property
    def recording(self) -> Recording:
        """The recording of the tile sizes that were asked for."""
        return self.recordings[self.block_q, self.block_k]

    @property
    def out(self) -> Tensor:
        """(N_q, D_v), of the tile sizes that were asked for."""
        return self.recording.out

    @property
    def lse(self) -> Tensor:
        """(N_q,), likewise."""
        return self.recording.lse

    def html(self, title: str = "") -> str:
        """The page: one HTML document that needs nothing beside itself."""
        from .trace_page import page

        return page(self, title)

    def save(self, path: str | os.PathLike[str], title: str = "") -> Path:
        """Write the page to a file and return its path. Raises: OSError."""
        path = Path(path)
        path.write_text(self.html(title), encoding="utf-8")
        return path


def trace(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, scores: Any = (), sink: Tensor | None = None,
    scale: float | None = None, q_offset: int | Tensor | None = None, k_offset: int | Tensor = 0,
    do: Tensor | None = None, block_q: int | None = None, block_k: int | None = None, batch: int = 0, head: int = 0,
) -> Trace:  # fmt: skip
    """Run attention on one head, forward and backward, and record every step.

    Args:
        q: (N_q, D), or (B, H, N_q, D). k: (N_k, D) or (B, H_kv, N_k, D). v likewise with D_v. At most 128 rows and
            keys and a head dimension of 64: a page to look at.
        mask, scores, sink, scale, q_offset, k_offset: as for `tilewise.attention`.
        do: the gradient of out, of its shape; None takes a fixed one.
        block_q, block_k: rows and keys of a tile; None takes a quarter of the length, rounded up to a power of two.
        batch, head: which entry and which query head to run.

    Returns: a Trace, in float32 (float64 for float64).
    Raises: ShapeError, DTypeError, SpecError as `tilewise.attention`; OptionError for tiles below 1 or a head that
        is not there.
    Example: `tilewise.analysis.trace(q, k, v, mask=tilewise.causal()).save("trace.html")`
    """
    with torch.no_grad():
        one = read_head(
            q, k, v, do, mask=mask, scores=scores, sink=sink, scale=scale, offsets=(q_offset, k_offset),
            batch=batch, head=head,
        )  # fmt: skip
        chosen = []
        for name, block, length in (("block_q", block_q, len(one.q)), ("block_k", block_k, len(one.k))):
            if block is not None and (not isinstance(block, int) or isinstance(block, bool) or block < 1):
                raise OptionError(f"{name} is a whole number from 1 on, got {block!r}")
            chosen.append(min(block or _power(-(-length // 4)), length))
        return _run(one, chosen[0], chosen[1])


def _power(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _choices(asked: int, length: int) -> list[int]:
    """Tile sizes to offer: the one asked for and powers of two from an eighth of the length to all of it."""
    powers = {min(_power(-(-length // 8)) << n, length) for n in range(4)}
    return sorted({asked, *powers})


def _run(head: Head, block_q: int, block_k: int) -> Trace:
    rows, columns = _choices(block_q, len(head.q)), _choices(block_k, len(head.k))
    while _numbers(head, rows, columns) > BUDGET:
        side, asked = (rows, block_q) if rows[0] <= columns[0] else (columns, block_k)
        side.remove(min((size for size in side if size != asked), default=asked))
        if not rows or not columns:  # even the asked sizes alone are beyond it: they are what was asked for
            rows, columns = rows or [block_q], columns or [block_k]
            break
    state = OnlineSoftmaxState.empty((len(head.q),), head.v.shape[1], dtype=head.q.dtype, device="cpu")
    backward = _gradients(head, _with_sink(head, state.absorb(head.scores, head.v)))
    recordings = {(a, b): _record(head, backward[1:], a, b) for a in rows for b in columns}
    return Trace(head, block_q, block_k, *backward, recordings)


def _numbers(head: Head, rows: Sequence[int], columns: Sequence[int]) -> int:
    (n_q, d), (n_k, d_v) = head.q.shape, head.v.shape
    across = sum(-(-n_k // size) for size in columns) * len(rows) * n_q * (3 + d_v + d)
    return across + sum(-(-n_q // size) for size in rows) * len(columns) * n_k * (d + d_v)


def _with_sink(head: Head, state: OnlineSoftmaxState) -> OnlineSoftmaxState:
    """The state after the sink, one more key of value 0, which comes after all others."""
    if head.sink is None:
        return state
    return state.absorb_key(head.sink.expand(state.m.shape), torch.zeros_like(state.acc))


def _gradients(head: Head, state: OnlineSoftmaxState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(delta, p, dp, ds) of all pairs from the final state, elementwise in (row, key) and so the same for every tiling.

    As in the reference, p = exp(s - m) / l and delta = sum p dp: lse = m + log l and out carry a rounding more, so
    exp(s - lse) and do . out, which the papers use, would carry it into every gradient.
    """
    visible = head.scores != -math.inf
    pivot = state.m.masked_fill(state.m == -math.inf, 0.0)[:, None]
    total = state.l.masked_fill(state.l == 0, 1.0)[:, None]
    p = torch.where(visible, torch.exp(head.scores - pivot) / total, 0.0)
    dp = torch.where(visible, head.do @ torch.where(visible.any(0)[:, None], head.v, 0.0).mT, 0.0)
    delta = (p * dp).sum(-1)
    ds = torch.where(visible, p * (dp - delta[:, None]) * head.slopes, 0.0)
    return delta, p, dp, ds


def _over(weights: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """weights @ x, where what x holds at a hidden pair takes no part, NaN and Inf included."""
    return (weights[:, None, :] @ torch.where(seen[..., None], x, 0.0)).squeeze(1)


def _record(head: Head, weights: tuple[Tensor, Tensor, Tensor], block_q: int, block_k: int) -> Recording:
    """Run the tiles of one choice of sizes, forward and backward."""
    classes = head.classes(block_q, block_k)
    (n_q, d), (n_k, d_v) = head.q.shape, head.v.shape
    down, across = classes.shape
    new = head.q.new_zeros
    m, l, alpha = new(across, n_q), new(across, n_q), new(across, n_q)  # noqa: E741
    acc, dq = new(across, n_q, d_v), new(across, n_q, d)
    out, lse = new(n_q, d_v), new(n_q)
    dk, dv = new(down, n_k, d), new(down, n_k, d_v)
    p, _, ds = weights
    for i in range(down):
        rows = slice(i * block_q, min((i + 1) * block_q, n_q))
        state = OnlineSoftmaxState.empty((rows.stop - rows.start,), d_v, dtype=head.q.dtype, device="cpu")
        dk[i], dv[i] = dk[max(i - 1, 0)], dv[max(i - 1, 0)]
        for j in range(across):
            columns = slice(j * block_k, min((j + 1) * block_k, n_k))
            before, dq[j, rows] = state, dq[max(j - 1, 0), rows]
            if classes[i, j] != EMPTY:
                state = state.absorb(head.scores[rows, columns], head.v[columns])
                seen = head.scores[rows, columns] != -math.inf
                dq[j, rows] += head.scale * _over(ds[rows, columns], head.k[columns], seen)
                dk[i, columns] += head.scale * _over(ds[rows, columns].mT, head.q[rows], seen.mT)
                dv[i, columns] += _over(p[rows, columns].mT, head.do[rows], seen.mT)
            pivot = state.m.masked_fill(state.m == -math.inf, 0.0)
            # A row that had seen nothing has nothing to rescale; absorb multiplies its zeros by exp(-inf) = 0.
            alpha[j, rows] = torch.exp(before.m - pivot) if state is not before else 1.0
            m[j, rows], l[j, rows], acc[j, rows] = state.m, state.l, state.acc
        out[rows], lse[rows] = _with_sink(head, state).finalize()
    item, wide = torch.empty(0, dtype=head.dtype).element_size(), head.q.element_size()
    sizes = Sizes(n_q, n_k, d, d_v, item, wide, block_q, block_k)
    kinds = classes.tolist()
    passes = {"forward": forward_steps, "backward": backward_steps}
    steps = {(name, loop): count(sizes, kinds, loop) for name, count in passes.items() for loop in LOOPS}
    return Recording(block_q, block_k, classes, m, l, alpha, acc, out, lse, dq, dk, dv, steps)
