"""Named attention problems: sizes, dtype, features, layout in memory, and how to draw them. Pure data and
builders.

A `Case` is everything the conformance suite needs to know about one problem. `draw` makes its values on the
CPU from its seed; `options` turns them into keyword arguments of `tilewise.attention` or
`tilewise.attention_varlen`; `segments` cuts it into dense problems for the hand-written evaluation in
`tilewise.testing.ordinary`. No value of a case depends on the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.testing.cases_masks import Draw, MaskFeature
from tilewise.testing.cases_scores import ScoreFeature
from tilewise.testing.grid import Grid, make_grid


class Sizes(NamedTuple):
    """B, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v; when packed, the lengths come
    from `Packing`.
    """

    B: int
    H: int
    Hkv: int
    Nq: int
    Nk: int
    D: int
    Dv: int


@dataclass(frozen=True)
class Packing:
    """Lengths of packed sequences; `used_*` are seqused (None = all used); `before`/`after` tokens lie
    outside every sequence.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    before: int = 0
    after: int = 0

    def starts(self, which: str) -> list[int]:
        """First token of each sequence, and the end of the last."""
        starts = [self.before]
        for length in getattr(self, which):
            starts.append(starts[-1] + length)
        return starts

    def used(self, which: str) -> tuple[int, ...]:
        used = getattr(self, f"used_{which}")
        return getattr(self, which) if used is None else used

    def total(self, which: str) -> int:
        return self.before + sum(getattr(self, which)) + self.after


class Segment(NamedTuple):
    """A dense part of a case: rows and columns of the packed tensors (None when the case is dense) and its
    grid.
    """

    rows: slice | None
    columns: slice | None
    grid: Grid


@dataclass
class Values:
    """Tensors of one drawn case, on one device. Leaves are the tensors inside masks and score terms, in
    order.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sink: Tensor | None
    mask_leaves: tuple[Tensor, ...]
    score_leaves: tuple[tuple[Tensor, ...], ...]

    def differentiable(self) -> dict[str, Tensor]:
        """Every tensor that gets a gradient, by name, in a fixed order."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        if self.sink is not None:
            named["sink"] = self.sink
        for t, leaves in enumerate(self.score_leaves):
            for n, leaf in enumerate(leaves):
                if leaf.is_floating_point():
                    named[f"score{t}.{n}"] = leaf
        return named

    def map(self, change: Any) -> Values:
        """change(name, tensor) applied to every tensor; names of `differentiable`, mask.n, dout, dlse."""
        return Values(
            *(change(name, getattr(self, name)) for name in ("q", "k", "v", "dout", "dlse")),
            sink=None if self.sink is None else change("sink", self.sink),
            mask_leaves=tuple(change(f"mask.{n}", leaf) for n, leaf in enumerate(self.mask_leaves)),
            score_leaves=tuple(
                tuple(change(f"score{t}.{n}", leaf) for n, leaf in enumerate(leaves))
                for t, leaves in enumerate(self.score_leaves)
            ),
        )


Offset = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Case:
    """One named problem.

    strides: how q, k, v and dout lie in memory, a name of `tilewise.testing.poison.LAYOUTS`.
    poison: "none"; "surround" (views into NaN-filled buffers); "hidden" (also NaN in every key, query and
    bias cell no pair may see).
    offsets: an int, a (B,) tensor given as a tuple, or None for the default. spread multiplies q.
    """

    name: str
    sizes: Sizes
    dtype: torch.dtype = torch.float32
    mask: MaskFeature | None = None
    scores: tuple[ScoreFeature, ...] = ()
    sink: bool = False
    dropout: float = 0.0
    scale: float | None = None
    q_offset: Offset = None
    k_offset: Offset = 0
    h_offset: int = 0
    packing: Packing | None = None
    strides: str = "contiguous"
    poison: str = "none"
    spread: float = 1.0
    seed: int = 0

    @property
    def features(self) -> str:
        """The features of the case in one line, for reports."""
        words = [self.mask.name if self.mask else "unmasked", *(term.name for term in self.scores)]
        words += ["sink"] * self.sink + [f"dropout {self.dropout}"] * bool(self.dropout)
        return " + ".join(words + ["packed"] * (self.packing is not None))

    @property
    def batch(self) -> int:
        return self.sizes.B if self.packing is None else len(self.packing.q)

    def lengths(self) -> tuple[int, int]:
        """Largest (seqlen_q, seqlen_k)."""
        if self.packing is None:
            return self.sizes.Nq, self.sizes.Nk
        return max(self.packing.q, default=0), max(self.packing.k, default=0)

    def draw(self) -> Values:
        """The case's values, CPU, contiguous, without gradients; the same in every process."""
        sizes = self.sizes
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + _stable_hash(self.name))
        d = Draw(generator, self.batch, (sizes.H, sizes.Hkv), self.lengths(), self.dtype)
        if self.packing is None:
            shape_q, shape_k = (sizes.B, sizes.H, sizes.Nq), (sizes.B, sizes.Hkv, sizes.Nk)
            shape_lse = shape_q
        else:
            shape_q = (self.packing.total("q"), sizes.H)
            shape_k = (self.packing.total("k"), sizes.Hkv)
            shape_lse = (sizes.H, self.packing.total("q"))
        q = (d.normal(*shape_q, sizes.D) * self.spread).to(self.dtype)
        k, v = d.normal(*shape_k, sizes.D).to(self.dtype), d.normal(*shape_k, sizes.Dv).to(self.dtype)
        dout, dlse = d.normal(*shape_q, sizes.Dv).to(self.dtype), d.normal(*shape_lse).to(d.leaf_dtype)
        if self.strides == "expanded":
            q, k, v, dout = (t[:1].expand_as(t).contiguous() for t in (q, k, v, dout))
        sink = d.normal(sizes.H).to(d.leaf_dtype) if self.sink else None
        mask_leaves = self.mask.draw(d) if self.mask else ()
        return Values(q, k, v, dout, dlse, sink, mask_leaves, tuple(term.draw(d) for term in self.scores))

    def dropout_seed(self) -> Tensor:
        """One int64, larger than 32 bits so that both key words count."""
        return torch.tensor(0x1234_5678_9ABC + self.seed, dtype=torch.int64)

    def options(self, values: Values, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Keyword arguments of `attention` (or of `attention_varlen`, with its lengths) built from these
        leaves.
        """
        made: dict[str, Any] = {"scale": self.scale, "h_offset": self.h_offset, "dropout": self.dropout}
        made["q_offset"], made["k_offset"] = (
            torch.tensor(o, dtype=torch.int32, device=device) if isinstance(o, tuple) else o
            for o in (self.q_offset, self.k_offset)
        )
        if self.mask is not None:
            made["mask"] = self.mask.make(*values.mask_leaves)
        terms = zip(self.scores, values.score_leaves, strict=True)
        made["scores"] = tuple(term.make(*leaves) for term, leaves in terms)
        if values.sink is not None:
            made["sink"] = values.sink
        if self.dropout:
            made["seed"] = self.dropout_seed().to(device)
        if self.packing is not None:
            made.update(self._packed_options(device))
        return made

    def _packed_options(self, device: torch.device | str) -> dict[str, Any]:
        packing = self.packing
        made: dict[str, Any] = {}
        for which in ("q", "k"):
            made[f"cu_seqlens_{which}"] = torch.tensor(
                packing.starts(which), dtype=torch.int32, device=device
            )
            used = getattr(packing, f"used_{which}")
            if used is not None:
                made[f"seqused_{which}"] = torch.tensor(used, dtype=torch.int32, device=device)
        return made

    def segments(self) -> Iterator[Segment]:
        """The dense problems the case consists of: itself, or one for each packed sequence."""
        heads = (self.sizes.H, self.sizes.Hkv)
        if self.packing is None:
            lengths = self.lengths()
            offsets = self._offsets(lengths, None)
            yield Segment(None, None, make_grid(torch.arange(self.batch), heads, lengths, offsets))
            return
        starts_q, starts_k = self.packing.starts("q"), self.packing.starts("k")
        for b, used in enumerate(zip(self.packing.used("q"), self.packing.used("k"), strict=True)):
            grid = make_grid(torch.tensor([b]), heads, used, self._offsets(used, b))
            rows, columns = (
                slice(starts[b], starts[b] + n) for starts, n in zip((starts_q, starts_k), used, strict=True)
            )
            yield Segment(rows, columns, grid)

    def _offsets(self, lengths: tuple[int, int], b: int | None) -> tuple[Tensor, Tensor]:
        default = lengths[1] - lengths[0]

        def each(offset: Offset, missing: int) -> Tensor:
            offset = missing if offset is None else offset
            if isinstance(offset, tuple):
                return torch.tensor(offset if b is None else offset[b : b + 1])
            return torch.full((self.batch if b is None else 1,), offset)

        return each(self.q_offset, default), each(self.k_offset, 0)


def _stable_hash(text: str) -> int:
    value = 2166136261
    for byte in text.encode():  # FNV-1a: Python's own hash differs from process to process
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case of the suite, in a fixed order. Raises ValueError if two share a name."""
    from tilewise.testing.cases_crossed import crossed_cases
    from tilewise.testing.cases_named import named_cases

    cases = (*named_cases(), *crossed_cases())
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"case names must differ, these repeat: {twice}")
    return cases


def find_case(name: str) -> Case:
    """The case of that name. Raises KeyError."""
    return {case.name: case for case in all_cases()}[name]
