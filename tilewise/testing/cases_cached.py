"""Cases of attention over caches: keys in pages, in one piece, shared, padded on the left, in float8.

A `CachedCase` is a packed `Case`, whose k and v are the tokens of the sequences one after another, and a way in
which those tokens lie in pools. What no sequence uses is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilewise.testing import cases_masks as masks
from tilewise.testing import cases_scores as terms
from tilewise.testing.cases import Case, Packing, Segment, Sizes, Values
from tilewise.testing.cases_masks import CAUSAL
from tilewise.testing.grid import make_grid

NAN = float("nan")
FLOAT8 = torch.float8_e4m3fn
FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class CachedCase(Case):
    """One problem over a cache; `packing` has the rows of q and the keys of each sequence, padding included.

    page_size: rows of a page. table: whether there is a block table; without it sequence b is page b, and the
    page size is the capacity. spare: pages beyond those in use, per sequence in the table and in the pool.
    leftpad: padding of each sequence. shared: keys that all sequences share with the first (whole pages of it).
    dense: q is (B, H, N, D) and not packed. tokens_first: a page is stored (page_size, H_kv, D).
    scales: None, "head" (H_kv,) or "page" (P, H_kv). float8: the pools are float8_e4m3fn.
    """

    page_size: int = 16
    table: bool = True
    spare: int = 1
    leftpad: tuple[int, ...] = ()
    shared: int = 0
    dense: bool = False
    tokens_first: bool = False
    scales: str | None = None
    float8: bool = False

    def pads(self) -> tuple[int, ...]:
        """Padding of each sequence."""
        return self.leftpad or (0,) * self.batch

    def segments(self) -> Iterator[Segment]:
        """One dense problem per sequence; columns are keys of the packed tensors, without padding."""
        assert self.packing is not None
        heads, starts_q, starts_k = (
            (self.sizes.H, self.sizes.Hkv),
            self.packing.starts("q"),
            self.packing.starts("k"),
        )
        for b, (rows, keys, pad) in enumerate(
            zip(self.packing.used("q"), self.packing.k, self.pads(), strict=True)
        ):
            count = max(keys - pad, 0)
            q_offset, k_offset = self._offsets((rows, count), b)
            grid = make_grid(torch.tensor([b]), heads, (rows, count), (q_offset, k_offset))
            grid = replace(grid, j=grid.j + pad)
            columns = slice(starts_k[b] + keys - count, starts_k[b] + keys)
            yield Segment(slice(starts_q[b], starts_q[b] + rows), columns, grid)

    @property
    def pages_each(self) -> int:
        """Entries of a row of the table."""
        assert self.packing is not None
        return -(-max(self.packing.k, default=0) // self.page_size) + self.spare if self.table else 1


@dataclass
class Cache:
    """The pools of a case and how its sequences find their keys: tensors as `attend_pages` takes them."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    places: Tensor
    """(T_k, 2) page and row of each packed key, int64."""
    k_scale: Tensor | None
    v_scale: Tensor | None


def lay_out(case: CachedCase, values: Values) -> Cache:
    """Put the packed keys and values of a case into pools whose other entries are NaN."""
    assert case.packing is not None
    generator = torch.Generator().manual_seed(case.seed + 17)
    each, batch, size = case.pages_each, case.batch, case.page_size
    pages = batch * (each + case.spare) if case.table else batch + case.spare
    order = torch.randperm(pages, generator=generator) if case.table else torch.arange(pages)
    table = order[: batch * each].view(batch, each)
    table[:, : case.shared // size] = table[:1, : case.shared // size]
    places = torch.zeros(case.packing.total("k"), 2, dtype=torch.int64)
    starts = case.packing.starts("k")
    for b, n in enumerate(case.packing.k):
        key = torch.arange(n)
        places[starts[b] : starts[b] + n] = torch.stack((table[b, key // size], key % size), 1)
    shapes = {None: None, "head": (case.sizes.Hkv,), "page": (pages, case.sizes.Hkv)}
    k_scale, v_scale = (
        None if shapes[case.scales] is None else torch.rand(shapes[case.scales], generator=generator) + 0.5
        for _ in range(2)
    )
    pools = []
    for t in (values.k, values.v):
        pool = torch.full((pages, t.shape[1], size, t.shape[2]), NAN, dtype=t.dtype)
        # Keys that sequences share are written by each of them; the last one is what all of them hold.
        for first, n in zip(starts, case.packing.k, strict=False):
            page, row = places[first : first + n].unbind(1)
            pool[page, :, row] = t[first : first + n]
        pool = pool.to(FLOAT8) if case.float8 else pool
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2) if case.tokens_first else pool
        pools.append(pool)
    # A row of the table ends where its sequence does; what stands behind it is no page.
    for b, n in enumerate(case.packing.k):
        table[b, -(-n // size) :] = 10**6 if b % 2 else -1
    if not case.table:
        return Cache(pools[0], pools[1], None, places, k_scale, v_scale)
    return Cache(pools[0], pools[1], table.to(torch.int32), places, k_scale, v_scale)


SMALL = Sizes(3, 4, 2, 0, 0, 16, 16)
RAGGED = Packing((1, 5, 3), (37, 64, 5))
LONG = Packing((1, 1, 1), (300, 71, 512))
PREFILL = Packing((40, 33, 7), (40, 97, 7))


@cache
def cached_cases() -> tuple[CachedCase, ...]:
    """Every case, in a fixed order."""
    return tuple([*_layouts(), *_features(), *_storage(), *_edges()])


def _case(name: str, packing: Packing = RAGGED, dtype: torch.dtype = FP32, **more: Any) -> CachedCase:
    sizes = more.pop("sizes", SMALL)._replace(B=len(packing.q))
    return CachedCase(f"cached-{name}", sizes, dtype, packing=packing, **more)


def _layouts() -> Iterator[CachedCase]:
    one, same = Packing((1, 1, 1), (37, 64, 5)), Packing((4, 4, 4), (37, 64, 5))
    for size in (1, 3, 16, 64):
        yield _case(f"paged{size}-one", one, page_size=size, dense=True, mask=CAUSAL)
        yield _case(f"paged{size}-same", same, page_size=size, dense=True, mask=CAUSAL, tokens_first=True)
        yield _case(f"paged{size}-ragged", page_size=size, mask=CAUSAL)
        yield _case(f"paged{size}-prefill", PREFILL, BF16, page_size=size, mask=CAUSAL)
    for word, packing in (("one", one), ("same", same), ("ragged", RAGGED)):
        more: dict[str, Any] = {"mask": CAUSAL, "dense": word != "ragged", "page_size": 80}
        yield _case(f"contiguous-{word}", packing, table=False, **more)
        yield _case(f"indexed-{word}", packing, spare=0, **more)
        yield _case(f"leftpad-{word}", packing, table=False, leftpad=(3, 0, 5), **more)
        yield _case(f"paged-leftpad-{word}", packing, leftpad=(20, 7, 1), **{**more, "page_size": 8})
    yield _case("shared", Packing((1, 2, 1), (50, 44, 33)), shared=32, mask=CAUSAL)
    yield _case("shared-one-page-size", Packing((2, 1, 3), (9, 12, 8)), shared=7, page_size=1, mask=CAUSAL)
    yield _case("long-one", LONG, dense=True, page_size=16, sizes=SMALL._replace(D=64, Dv=64))
    yield _case("long-one-bf16", LONG, BF16, dense=True, page_size=64, sizes=SMALL._replace(H=8, D=64, Dv=64))
    wide = SMALL._replace(D=64, Dv=64)
    yield _case("long-contiguous", LONG, BF16, dense=True, page_size=640, table=False, sizes=wide)
    yield _case("seqused_q", Packing((4, 4, 4), (37, 64, 5), used_q=(4, 0, 2)), dense=True, mask=CAUSAL)
    yield _case(
        "seqused_q-ragged", Packing((4, 2, 5), (37, 64, 5), used_q=(1, 2, 0), before=2, after=3), mask=CAUSAL
    )


def _features() -> Iterator[CachedCase]:
    for mask in (
        masks.window(9, 0), masks.window(4, 2), masks.prefix(6), masks.chunk(8), masks.STREAMING, masks.DENSE_FULL,
        masks.DOCUMENT, masks.PADDING_LENGTHS, masks.PADDING_BOOL, masks.CUSTOM_HEAD_REACH, masks.NOTHING,
        masks.block_sparse(4),
    ):  # fmt: skip
        yield _case(f"mask-{mask.name}", mask=mask, page_size=8)
        yield _case(f"mask-{mask.name}-leftpad", mask=mask, page_size=8, leftpad=(11, 2, 0))
    for term in (
        terms.ALIBI, terms.softcap(2.0), terms.BIAS_FULL, terms.BIAS_HEAD, terms.relative(6), terms.CUSTOM_GATE,
        terms.CUSTOM_OUTER,
    ):  # fmt: skip
        yield _case(f"term-{term.name}", scores=(term,), mask=CAUSAL, page_size=8)
        yield _case(f"term-{term.name}-leftpad", scores=(term,), page_size=8, leftpad=(11, 2, 0))
    yield _case("sink", sink=True, mask=CAUSAL)
    yield _case("sink-contiguous", sink=True, mask=CAUSAL, table=False, page_size=70, leftpad=(5, 0, 2))
    yield _case("dropout", dropout=0.3, mask=CAUSAL, leftpad=(5, 0, 2))
    yield _case("offsets", q_offset=(30, 60, 1), mask=CAUSAL)
    yield _case("offset-number", q_offset=4, k_offset=3, mask=masks.window(6, 6), leftpad=(2, 0, 1))
    yield _case("scale", scale=-0.3)
    both = {"scores": (terms.softcap(1.5), terms.ALIBI), "sink": True, "mask": masks.window(30, 0)}
    for dtype in (FP64, FP32, BF16, FP16):
        yield _case(
            f"everything-{dtype}".replace("torch.", ""), dtype=dtype, leftpad=(3, 9, 0), page_size=3, **both
        )


def _storage() -> Iterator[CachedCase]:
    for scales in ("head", "page"):
        yield _case(f"scaled-{scales}", scales=scales, mask=CAUSAL)
        for dtype in (BF16, FP16):
            word = f"{scales}-{dtype}".replace("torch.", "")
            yield _case(f"float8-{word}", dtype=dtype, float8=True, scales=scales, mask=CAUSAL)
    wide = SMALL._replace(D=64, Dv=64)
    yield _case("float8", LONG, BF16, float8=True, dense=True, sizes=wide)
    yield _case(
        "float8-contiguous", LONG, BF16, float8=True, dense=True, sizes=wide, table=False, page_size=520
    )


def _edges() -> Iterator[CachedCase]:
    yield _case("no-keys", Packing((1, 2, 1), (0, 9, 0)), mask=CAUSAL)
    yield _case("no-keys-sink", Packing((1, 2, 1), (0, 9, 0)), mask=CAUSAL, sink=True)
    yield _case("no-rows", Packing((0, 2, 0), (7, 9, 3)), mask=CAUSAL)
    yield _case("more-rows-than-keys", Packing((6, 2, 3), (4, 9, 3)), mask=CAUSAL)
    yield _case("all-padding", Packing((1, 2, 1), (6, 9, 4)), mask=CAUSAL, leftpad=(6, 1, 4))
    yield _case("full-pages", Packing((1, 2, 1), (32, 16, 48)), mask=CAUSAL, spare=0)
    yield _case("one-sequence", Packing((3,), (70,)), mask=CAUSAL, dense=True)
    for heads, kv in ((1, 1), (8, 1), (6, 6), (9, 3)):
        yield _case(f"heads-{heads}-{kv}", mask=CAUSAL, sizes=SMALL._replace(H=heads, Hkv=kv))
    for dim, dim_v in ((32, 8), (80, 80), (128, 128), (96, 256)):
        yield _case(f"dims-{dim}-{dim_v}", RAGGED, BF16, mask=CAUSAL, sizes=SMALL._replace(D=dim, Dv=dim_v))
