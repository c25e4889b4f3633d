"""What `benchmarks/gpu.py` times: the cells, and each library through the call its user would make.

A contender is a function of a cell that returns (layout, attend) or raises `Refused` with the reason; attend takes
q, k, v and the cell's trained leaf, if it has one, and returns out. What a user makes once (a block mask, compiled
code, slopes) is made before and is in no time.

    triton, hopper, ...   tilewise.attention with that backend; `+atomics` says deterministic=False, `+exact` True
    sdpa                  scaled_dot_product_attention with the backend that it picks; not beside the next two
    sdpa_flash, sdpa_cudnn   the same held to one backend
    flex, flex_tuned, flex_flash   flex_attention compiled by default, with mode max-autotune-no-cudagraphs, and with
                          its kernel of flash_attn.cute (BACKEND="FLASH"); flex@M1-N1-M2-N2-STAGES-WARPS holds its
                          backward, flex@M-N-STAGES-WARPS its forward to a choice that max-autotune looks at
    fa3, fa4              fa3_fwd_interface and flash_attn.cute
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw

Attend = Callable[..., Tensor]
ROWS_AT_ONCE = 1024
STRIDE = 4
"""The user's mask: causal, and of every STRIDE distances the first half."""


class Refused(Exception):
    """Why a library does not take a cell."""


@dataclass(frozen=True)
class Cell:
    """One problem. mask: full, causal, window:W (causal, W keys back), documents:MEAN (causal inside each), packed:MEAN
    (the same as packed sequences), user (causal, and of every STRIDE distances the first half) or user:STRIDE, whose
    number a function captures, or literal:STRIDE, where it stands in the function's text; prefix:W (causal, and the
    first W keys for all, a number for each batch entry).
    score: "", alibi, softcap, bias (a trained (1, H, N, N)), column_bias (trained, (B, 1, 1, N)), and trained (H,):
    sink, slopes (of ALiBi), factor (of a user's term)."""

    name: str
    batch: int
    heads: int
    heads_kv: int
    n: int
    d: int
    mask: str = "full"
    score: str = ""
    dropout: float = 0.0
    d_v: int = 0
    dtype: torch.dtype = torch.bfloat16
    q_rows: int = 0

    @property
    def rows(self) -> int:
        return self.q_rows or self.n

    @property
    def head_dim_v(self) -> int:
        return self.d_v or self.d

    @property
    def mask_number(self) -> int:
        return int(self.mask.partition(":")[2] or 0)

    @property
    def starts(self) -> Tensor:
        """Starts of the documents as packed sequences, (sequences + 1,) int32."""
        ends = torch.bincount(self.documents).cumsum(0)
        return torch.cat((ends.new_zeros(1), ends)).to(torch.int32)

    @functools.cached_property
    def documents(self) -> Tensor:
        """Document of each token, (n,) int32: lengths drawn between half and one and a half of the mean."""
        mean, generator = self.mask_number, torch.Generator().manual_seed(0)
        lengths = torch.randint(mean // 2, mean * 3 // 2, (2 * self.n // mean + 1,), generator=generator)
        ids = torch.arange(len(lengths)).repeat_interleave(lengths)[: self.n]
        return ids.to("cuda", torch.int32)

    def keep(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether row i sees column j; rows stand at the end of the columns."""
        q = i + (self.n - self.rows)
        kind = self.mask.partition(":")[0]
        if kind == "full":
            return (q >= 0) & (j >= 0)
        causal = j <= q
        if kind == "window":
            return causal & (q - j <= self.mask_number)
        if kind in ("documents", "packed"):
            return causal & (self.documents[i] == self.documents[j])
        if kind == "prefix":
            return causal | (j < self.mask_number)
        stride = self.mask_number or STRIDE
        return causal & ((q - j) % stride < stride // 2) if kind in ("user", "literal") else causal

    def pairs(self) -> int:
        """Visible pairs of one head."""
        columns = torch.arange(self.n, device="cuda")[None, :]
        parts = torch.arange(self.rows, device="cuda")[:, None].split(ROWS_AT_ONCE)
        return sum(int(self.keep(rows, columns).sum()) for rows in parts)

    def flops(self, which: str, pairs: int) -> float:
        """Two products forward, five backward; multiplications and additions."""
        per_pair = self.d + self.head_dim_v if which == "forward" else 3 * self.d + 2 * self.head_dim_v
        return 2.0 * self.batch * self.heads * pairs * per_pair

    def draw(self, layout: str) -> list[Tensor]:
        """q, k, v and the trained leaf, if any."""

        def make(heads: int, n: int, d: int) -> Tensor:
            sizes = {
                "bhnd": (self.batch, heads, n, d),
                "bnhd": (self.batch, n, heads, d),
                "nhd": (n, heads, d),
            }
            return torch.randn(sizes[layout], device="cuda", dtype=self.dtype)

        made = [
            make(self.heads, self.rows, self.d),
            make(self.heads_kv, self.n, self.d),
            make(self.heads_kv, self.n, self.head_dim_v),
        ]
        if self.score == "bias":
            made.append(torch.randn(1, self.heads, self.rows, self.n, device="cuda", dtype=self.dtype))
        if self.score == "column_bias":
            made.append(torch.randn(self.batch, 1, 1, self.n, device="cuda", dtype=self.dtype))
        if self.score == "slopes":
            made.append(tw.alibi_slopes(self.heads).to("cuda"))
        if self.score in ("sink", "factor"):
            made.append(torch.randn(self.heads, device="cuda"))
        return made


# ---- tilewise ------------------------------------------------------------------------------------------------


LITERAL = {
    4: lambda q, k: (q - k) % 4 < 2,
    7: lambda q, k: (q - k) % 7 < 3,
    12: lambda q, k: (q - k) % 12 < 6,
}


def _dilated(stride: int) -> tw.Mask:
    return tw.custom(lambda q, k: (q - k) % stride < stride // 2)


def ours(cell: Cell, backend: str) -> tuple[str, Attend]:
    """tilewise.attention by a named backend."""
    name, _, option = backend.partition("+")
    kind = cell.mask.partition(":")[0]
    mask = None if kind == "full" else tw.causal()
    if kind == "window":
        mask = mask & tw.window(cell.mask_number, 0)
    if kind == "documents":
        mask = mask & tw.document(cell.documents[None].expand(cell.batch, -1))
    if kind == "prefix":
        mask = mask | tw.prefix(torch.full((cell.batch,), cell.mask_number, device="cuda"))
    if kind == "user":
        mask = mask & _dilated(cell.mask_number or STRIDE)
    if kind == "literal":
        mask = mask & tw.custom(LITERAL[cell.mask_number])
    fixed = {
        "alibi": lambda: (tw.alibi(tw.alibi_slopes(cell.heads).to("cuda")),),
        "softcap": lambda: (tw.softcap(30.0),),
    }
    trained = {"slopes": tw.alibi, "factor": lambda t: tw.custom_score(lambda s, h, t: s * t[h], t)}
    terms = fixed[cell.score]() if cell.score in fixed else ()
    deterministic = {"atomics": False, "exact": True}.get(option)
    if kind == "packed":
        starts = cell.starts

        def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tw.attention_varlen(
                q, k, v, starts, starts, mask=mask, scores=terms, backend=name, deterministic=deterministic
            )

        return "nhd", attend_packed

    def attend(q: Tensor, k: Tensor, v: Tensor, *leaf: Tensor) -> Tensor:
        sink = leaf[0] if cell.score == "sink" else None
        term = trained.get(cell.score, tw.bias)
        scores = terms if sink is not None else tuple(term(t) for t in leaf) or terms
        return tw.attention(
            q, k, v, mask=mask, scores=scores, sink=sink, dropout=cell.dropout, backend=name,
            deterministic=deterministic,
        )  # fmt: skip

    return "bhnd", attend


# ---- the others ----------------------------------------------------------------------------------------------


def sdpa(cell: Cell, backend: str | None = None) -> tuple[str, Attend]:
    """scaled_dot_product_attention, of one backend or as it comes."""
    if cell.mask not in ("full", "causal") or cell.score or (cell.mask == "causal" and cell.rows != cell.n):
        raise Refused("a boolean matrix or a bias is another kernel")
    flags = {n: n == backend for n in ("flash", "mem_efficient", "math", "cudnn") if backend}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for name, on in flags.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=cell.mask == "causal",
            dropout_p=cell.dropout,
            enable_gqa=cell.heads != cell.heads_kv,
        )

    return "bhnd", attend


def flex(cell: Cell, mode: str | None, options: dict[str, Any] | None = None) -> tuple[str, Attend]:
    """flex_attention, compiled; options: those of its kernel."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if cell.dropout or cell.score == "sink":
        raise Refused("flex_attention has neither dropout nor sinks")
    if cell.score in ("slopes", "factor") or cell.mask.startswith("prefix"):
        raise Refused("not written for flex_attention here")
    if cell.mask.startswith("packed"):
        raise Refused("packed sequences are documents as a mask")
    torch._dynamo.reset()
    # The backward is timed alone, again and again on one graph, whose buffers it must not take for itself.
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    block_mask = None
    if cell.mask.startswith("documents"):
        _ = cell.documents  # drawn here: create_block_mask lets nothing be drawn
    if cell.mask != "full":
        block_mask = create_block_mask(
            lambda b, h, i, j: cell.keep(i, j), None, None, cell.rows, cell.n, device="cuda"
        )
    slopes = tw.alibi_slopes(cell.heads).to("cuda")
    gqa = cell.heads != cell.heads_kv

    def attend(q: Tensor, k: Tensor, v: Tensor, *leaf: Tensor) -> Tensor:
        def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s - slopes[h] * (i - j).abs()

        def softcap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return 30.0 * torch.tanh(s / 30.0)

        def bias(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + leaf[0][0, h, i, j]

        def column_bias(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + leaf[0][b, 0, 0, j]

        terms = {"alibi": alibi, "softcap": softcap, "bias": bias, "column_bias": column_bias}
        return compiled(
            q,
            k,
            v,
            score_mod=terms.get(cell.score),
            block_mask=block_mask,
            enable_gqa=gqa,
            kernel_options=options,
        )

    return "bhnd", attend


def flash(cell: Cell, version: str) -> tuple[str, Attend]:
    """The flash_attn packages, (B, N, H, D)."""
    kind = cell.mask.partition(":")[0]
    if kind not in ("full", "causal", "window", "packed") or cell.score or cell.dropout:
        raise Refused("not among its features")
    if version == "fa3":
        from fa3_fwd_interface import flash_attn_func, flash_attn_varlen_func
    else:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    if kind == "packed":
        starts, longest = cell.starts, int(torch.bincount(cell.documents).max())

        def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            numbers = {"max_seqlen_q": longest, "max_seqlen_k": longest}
            found = flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, **numbers
            )
            return found[0] if isinstance(found, tuple) else found

        return "nhd", attend_packed
    options: dict[str, Any] = {"window_size": (cell.mask_number, 0)} if kind == "window" else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v, causal=kind != "full", **options)
        return out[0] if isinstance(out, tuple) else out

    return "bnhd", attend


def contender(name: str, cell: Cell) -> tuple[str, Attend]:
    """(layout, attend) of the library of that name. Raises Refused, or whatever the library raises."""
    others = {
        "sdpa": lambda: sdpa(cell),
        "sdpa_flash": lambda: sdpa(cell, "flash"),
        "sdpa_cudnn": lambda: sdpa(cell, "cudnn"),
        "flex": lambda: flex(cell, None),
        "flex_tuned": lambda: flex(cell, "max-autotune-no-cudagraphs"),
        "flex_flash": lambda: flex(cell, None, {"BACKEND": "FLASH"}),
        "fa3": lambda: flash(cell, "fa3"),
        "fa4": lambda: flash(cell, "fa4"),
    }
    if name.startswith("flex@"):
        numbers = [int(n) for n in name.removeprefix("flex@").split("-")]
        which = "fwd" if len(numbers) == 4 else "bwd"
        blocks = {"fwd": "BLOCK_M BLOCK_N", "bwd": "BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2"}[which]
        words = (*blocks.split(), "num_stages", "num_warps")
        return flex(cell, None, {f"{which}_{w}": n for w, n in zip(words, numbers, strict=True)})
    return others[name]() if name in others else ours(cell, name)


# ---- cells ---------------------------------------------------------------------------------------------------


def _plain(d: int, n: int, causal: bool) -> Cell:
    kind = "causal" if causal else "full"
    return Cell(f"D{d}-N{n}-{kind}", 16384 // n, 2048 // d, 2048 // d, n, d, kind)


SECTIONS: dict[str, tuple[Cell, ...]] = {
    "long": tuple(_plain(d, 16384, causal) for d in (128, 64, 256) for causal in (False, True)),
    "short": tuple(
        _plain(d, n, causal) for d in (64, 128, 256) for n in (1024, 4096) for causal in (False, True)
        if d == 128 or n > 1024
    ),
    "features": (
        Cell("window1024", 1, 16, 16, 16384, 128, "window:1024"),
        Cell("documents1024", 1, 16, 16, 16384, 128, "documents:1024"),
        Cell("packed1024", 1, 16, 16, 16384, 128, "packed:1024"),
        Cell("alibi-causal", 1, 16, 16, 16384, 128, "causal", "alibi"),
        Cell("softcap-causal", 1, 16, 16, 16384, 128, "causal", "softcap"),
        Cell("bias", 1, 16, 16, 8192, 128, "full", "bias"),
        Cell("column_bias", 1, 16, 16, 16384, 128, "full", "column_bias"),
        Cell("dropout-causal", 1, 16, 16, 16384, 128, "causal", dropout=0.1),
        Cell("user-causal", 1, 16, 16, 16384, 128, "user"),
        Cell("user12-causal", 1, 16, 16, 16384, 128, "user:12"),
        Cell("user7-causal", 1, 16, 16, 16384, 128, "user:7"),
        Cell("user1000-causal", 1, 16, 16, 16384, 128, "user:1000"),
        *(Cell(f"literal{n}-causal", 1, 16, 16, 16384, 128, f"literal:{n}") for n in LITERAL),
    ),
    "grouped": (
        Cell("gqa32/8-D128-N8192-causal", 2, 32, 8, 8192, 128, "causal"),
        Cell("window4096-D128-N32768", 1, 16, 16, 32768, 128, "window:4096"),
        Cell("D96-N8192-causal", 2, 21, 21, 8192, 96, "causal"),
        Cell("D192_128-N8192-causal", 2, 16, 16, 8192, 192, "causal", d_v=128),
    ),
    "worth": (
        Cell("packed1024-D64", 1, 32, 32, 16384, 64, "packed:1024"),
        Cell("packed1024-D128-gqa", 1, 16, 4, 16384, 128, "packed:1024"),
        Cell("packed1024-D96", 1, 21, 21, 16384, 96, "packed:1024"),
        Cell("packed1024-D256", 1, 8, 8, 16384, 256, "packed:1024"),
        Cell("packed1024-D128-softcap", 1, 16, 16, 16384, 128, "packed:1024", "softcap"),
        Cell("packed4096-D128", 1, 16, 16, 16384, 128, "packed:4096"),
        Cell("softcap-D128-N4096-causal", 4, 16, 16, 4096, 128, "causal", "softcap"),
        Cell("softcap-D256-N4096-window1024-gqa", 4, 8, 4, 4096, 256, "window:1024", "softcap"),
        Cell("softcap-D64-N1024-causal", 16, 32, 32, 1024, 64, "causal", "softcap"),
        Cell("alibi-D128-N4096-causal", 4, 16, 16, 4096, 128, "causal", "alibi"),
        Cell("alibi-D64-N1024-causal", 16, 32, 32, 1024, 64, "causal", "alibi"),
        Cell("alibi-D96-N4096-causal", 4, 21, 21, 4096, 96, "causal", "alibi"),
        Cell("sink-D64-N4096-causal-gqa", 4, 32, 4, 4096, 64, "causal", "sink"),
        Cell("sink-D64-N4096-window128-gqa", 4, 32, 4, 4096, 64, "window:128", "sink"),
        Cell("sink-D128-N1024-causal", 16, 16, 16, 1024, 128, "causal", "sink"),
        Cell("slopes-D128-N4096-causal", 4, 16, 16, 4096, 128, "causal", "slopes"),
        Cell("slopes-D64-N4096-causal", 4, 32, 32, 4096, 64, "causal", "slopes"),
        Cell("factor-D128-N4096-causal", 4, 16, 16, 4096, 128, "causal", "factor"),
        Cell("prefix512-D128-N4096", 4, 16, 16, 4096, 128, "prefix:512"),
        Cell("prefix512-D64-N1024", 16, 32, 32, 1024, 64, "prefix:512"),
        Cell("documents1024-D128", 1, 16, 16, 16384, 128, "documents:1024"),
        Cell("documents1024-D64", 1, 32, 32, 16384, 64, "documents:1024"),
        Cell("D256-N1024-causal", 16, 8, 8, 1024, 256, "causal"),
        Cell("window128-D128-N4096", 4, 16, 16, 4096, 128, "window:128"),
    ),
    "decode": tuple(
        Cell(f"decode-B{b}-H{h}/{hkv}-N{n}", b, h, hkv, n, 128, "full", q_rows=1)
        for b, h, hkv, n in (
            (8, 32, 8, 32768), (1, 32, 8, 131072), (64, 32, 8, 4096), (1, 32, 8, 8192),
            (128, 32, 8, 1024), (16, 64, 8, 16384), (16, 16, 1, 32768),
        )
    ),
}  # fmt: skip
