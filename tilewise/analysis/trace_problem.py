"""What a trace steps through: one head of one batch entry, its scores, and the classes of its tiles.

The mask and the score terms are the spec's own trees, printed as torch code and evaluated on the whole head,
which is small; the tiles are classified by their interval form, as every backend classifies them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..dtypes import lookup
from ..errors import DTypeError, OptionError, ShapeError, message
from ..spec import expression as ex
from ..spec.attention import AttentionSpec, spec_text
from ..spec.derivative import differentiate
from ..spec.masks import as_mask
from ..spec.print_torch import Env, compile_torch
from ..spec.scores import as_terms
from ..spec.tiles import TileGrid, classify_tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..spec.term import Term

LONGEST, WIDEST = 128, 64
"""Rows or keys, and head dimension, that a page can show."""


@dataclass(frozen=True)
class Head:
    """One head, in the computing type (float32, float64 for float64), on the CPU.

    Fields:
        q: (N_q, D). k: (N_k, D). v: (N_k, D_v). do: (N_q, D_v), the gradient of out.
        scores: (N_q, N_k), natural units, after score terms and masks; -inf hides the pair.
        slopes: (N_q, N_k), d score / d s of the terms, s = scale q k^T; 1 without terms.
        scale: the factor of q k^T.
        sink: the head's sink logit, 0-d, or None.
        dtype: the type the tensors were given in; what is moved is counted in it.
        words: the problem in words, by name.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    scores: Tensor
    slopes: Tensor
    scale: float
    sink: Tensor | None
    dtype: torch.dtype
    words: dict[str, Any]
    _grid: TileGrid
    _mask: tuple[ex.Node | None, Term | None]

    def classes(self, block_q: int, block_k: int) -> Tensor:
        """EMPTY, PARTIAL or FULL for every tile, (q tiles, k tiles) uint8; for all heads at once, as in a call."""
        grid = TileGrid(**{**self._grid.__dict__, "block_q": block_q, "block_k": block_k})
        keep, term = self._mask
        if keep is None or term is None:
            return classify_tiles(None, grid, (), (), ())
        return classify_tiles(keep, grid, term.leaves, term.ints, term.floats)


def read_head(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, *, mask: Any, scores: Any, sink: Tensor | None,
    scale: float | None, offsets: tuple[int | Tensor | None, int | Tensor], batch: int, head: int,
) -> Head:  # fmt: skip
    """One head of a call, checked, with its scores. Arguments and errors are those of `trace`."""
    q, k, v = _four_dimensions(q, k, v)
    _check_sizes(q, k, v, batch, head)
    do = _cotangent(q, v, do)
    group = q.shape[1] // k.shape[1]
    dtype, wide = q.dtype, lookup(q.dtype).compute
    q_offset, k_offset = (_offset(value, batch) for value in offsets)
    q_offset = k.shape[2] - q.shape[2] if q_offset is None else q_offset
    k_offset = k_offset or 0
    mask, terms = as_mask(mask), as_terms(scores)
    spec = AttentionSpec.parse(spec_text(mask, terms, sink is not None, False))
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if sink is not None and sink.shape != q.shape[1:2]:
        raise ShapeError(message("a sink holds one logit per query head, (H,)", {"sink": sink, "q": q}))
    sizes = {"num_heads_q": q.shape[1], "num_heads_kv": k.shape[1]}
    grid = TileGrid(
        1, 1, q.shape[2], k.shape[2], q_offset, q_offset, k_offset, k_offset, batch, batch, **sizes
    )
    one = [
        x.detach().to("cpu", wide) for x in (q[batch, head], k[batch, head // group], v[batch, head // group])
    ]
    env = _env(grid, (batch, head), [mask.term, *(t.term for t in terms)], wide)
    values, slopes = _scores(spec, env, (one[0] * factor) @ one[1].mT)
    words = {
        "mask": _name(mask.term), "scores": " + ".join(_name(t.term) for t in terms) or "none",
        "dtype": str(dtype).removeprefix("torch."), "batch": batch, "head": head, "heads": list(sizes.values()),
        "q_offset": q_offset, "k_offset": k_offset,
    }  # fmt: skip
    logit = None if sink is None else sink[head].detach().to("cpu", wide)
    cotangent = do[batch, head].detach().to("cpu", wide)
    return Head(
        one[0], one[1], one[2], cotangent, values, slopes, factor, logit, dtype, words, grid, (spec.keep, mask.term)
    )  # fmt: skip


def _four_dimensions(*tensors: Tensor) -> tuple[Tensor, ...]:
    for name, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, Tensor):
            raise DTypeError(f"{name} is a tensor, not {type(x).__name__}")
    given = dict(zip("qkv", tensors, strict=True))
    if len({x.ndim for x in tensors}) != 1 or tensors[0].ndim not in (2, 4):
        raise ShapeError(message("q, k, v are (N, D) each, or (B, H, N, D) each", given))
    if len({x.dtype for x in tensors}) != 1:
        raise DTypeError(message("q, k, v have one dtype", given))
    lookup(tensors[0].dtype)
    return tuple(x if x.ndim == 4 else x[None, None] for x in tensors)


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, batch: int, head: int) -> None:
    given = {"q": q, "k": k, "v": v}
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(message("q (B, H, N_q, D), k (B, H_kv, N_k, D), v (B, H_kv, N_k, D_v)", given))
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(message("num_heads_q is a multiple of num_heads_kv", given))
    longest, widest = max(q.shape[2], k.shape[2]), max(q.shape[3], v.shape[3])
    if min(q.shape[2], k.shape[2], q.shape[3], v.shape[3]) < 1 or longest > LONGEST or widest > WIDEST:
        rule = f"a trace shows 1 to {LONGEST} queries and keys, and head dimensions of 1 to {WIDEST}"
        raise ShapeError(message(rule, given, "Cut a part out: q[..., :64, :32] and so on."))
    if not 0 <= batch < q.shape[0] or not 0 <= head < q.shape[1]:
        raise OptionError(f"batch {batch}, head {head} is not among {q.shape[0]} x {q.shape[1]}")


def _cotangent(q: Tensor, v: Tensor, do: Tensor | None) -> Tensor:
    """do as given, or the one that a loss of sum(out * w) has, w a fixed wave: no row and no column alike."""
    shape = (*q.shape[:3], v.shape[3])
    if do is None:
        angle = torch.arange(shape[2] * shape[3], dtype=torch.float64, device="cpu").view(shape[2:])
        return torch.cos(angle * 2.399963).to(q.dtype).expand(shape)  # the golden angle
    do = do[None, None] if isinstance(do, Tensor) and do.ndim == 2 else do
    if not isinstance(do, Tensor) or tuple(do.shape) != shape:
        raise ShapeError(
            message(f"do has the shape of out, {shape}", {"do": do if isinstance(do, Tensor) else None})
        )
    return do


def _offset(value: int | Tensor | None, batch: int) -> int | None:
    if isinstance(value, Tensor):
        flat = value.reshape(-1)
        return int(flat[batch if flat.numel() > 1 else 0])
    return value


def _env(grid: TileGrid, place: tuple[int, int], terms: Sequence[Term | None], dtype: torch.dtype) -> Env:
    """Every variable over the whole head, as one tile (1, 1, N_q, N_k)."""
    batch, head = place
    i = torch.arange(grid.seqlen_q, dtype=torch.int32, device="cpu").view(1, 1, -1, 1)
    j = torch.arange(grid.seqlen_k, dtype=torch.int32, device="cpu").view(1, 1, 1, -1)
    group = grid.num_heads_q // grid.num_heads_kv
    numbers = {"b": batch, "h": head, "g": head // group}
    variables = {
        name: torch.full((1, 1, 1, 1), n, dtype=torch.int32, device="cpu") for name, n in numbers.items()
    }
    variables |= {"i": i, "j": j, "q": i + grid.q_offset_lo, "k": j + grid.k_offset_lo}
    ranges = {
        "b": (batch, batch + 1),
        "h": (head, head + 1),
        "i": (0, grid.seqlen_q),
        "j": (0, grid.seqlen_k),
    }
    present = [term for term in terms if term is not None]
    leaves = [leaf.detach().cpu() for term in present for leaf in term.leaves]
    ints = [n for term in present for n in term.ints]
    floats = [x for term in present for x in term.floats]
    return Env(variables, ranges, leaves, ints, floats, dtype)


def _scores(spec: AttentionSpec, env: Env, s: Tensor) -> tuple[Tensor, Tensor]:
    """(scores after terms and masks, their slope in s)."""
    slopes = torch.ones_like(s)
    if spec.score is not None:
        env.variables["s"] = s[None, None]
        roots = (spec.score, differentiate(spec.score).s)
        s, slopes = (x.to(s.dtype).expand(1, 1, *s.shape)[0, 0] for x in compile_torch(roots)(env))
    if spec.keep is not None:
        visible = compile_torch((spec.keep,))(env)[0].expand(1, 1, *s.shape)[0, 0]
        s = s.masked_fill(~visible, -math.inf)
    return s.contiguous(), slopes.contiguous()


def _name(term: Term | None) -> str:
    """The atoms' names without their formulas: `(causal & window_left)`."""
    text = "none" if term is None else re.sub(r"\[[^]]*\]\{[^}]*\}", "", term.text)
    return text[1:-1] if text.startswith("(") else text  # a joined formula is always in brackets
