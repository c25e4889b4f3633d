"""The flags that describe an attention problem, shared by `bench` and `explain`, and the text form of a mask.

    MASK  := TERM { "&" TERM }, "none" hides nothing
    TERM  := causal | window:LEFT[:RIGHT] | prefix:N | chunk:N | documents:N | not TERM

`window:256` looks back 256 keys and not ahead; `*` as LEFT or RIGHT is unbounded. `documents:N` packs
documents of N tokens that do not see each other.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.cli.terminal import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tilewise.spec.masks import Mask

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
MASK_HELP = (
    'none, causal, window:256[:0], prefix:N, chunk:N, documents:N, "not MASK", joined by "&"; '
    "default: %(default)s"
)


def whole(low: int) -> Callable[[str], int]:
    """Type of an option that is a whole number from `low` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
        return int(text)

    return read


def lengths(text: str) -> tuple[int, ...]:
    """Type of an option that takes sequence lengths separated by commas."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers such as 512,2048"
        ) from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError("a length is at least 1")
    return found


def dtype_name(text: str) -> str:
    """Type of --dtype: float32 for fp32 and so on."""
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(DTYPES)}, {', '.join(DTYPES.values())}"
        )
    return name


class Sizes(NamedTuple):
    """Sizes, element type and mask of one problem."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of q, k, v."""
        return (
            (self.batch, self.heads, self.seqlen_q, self.head_dim),
            (self.batch, self.heads_kv, self.seqlen_k, self.head_dim),
            (self.batch, self.heads_kv, self.seqlen_k, self.head_dim_v),
        )


def check_heads(heads: int, heads_kv: int) -> None:
    """Raises UsageError if query heads cannot share the KV heads."""
    if heads % heads_kv:
        raise UsageError(
            f"{heads} query heads cannot share {heads_kv} KV heads: heads is a multiple of heads-kv"
        )


@dataclass(frozen=True)
class MaskTerm:
    """One word of a mask's text with its numbers; None is an unbounded side."""

    name: str
    values: tuple[int | None, ...]
    negated: bool

    def build(self, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu") -> Mask:
        """The term as a Tilewise mask."""
        import torch

        import tilewise as tw

        size = self.values[0] if self.values else None
        if self.name == "documents" and size is not None:
            rows, columns = (
                torch.arange(n, dtype=torch.int32, device=device) // size for n in (seqlen_q, seqlen_k)
            )
            mask = tw.document(rows, columns)
        else:
            mask = getattr(tw, self.name)(*self.values)
        return ~mask if self.negated else mask

    def keep(self, q: Any, k: Any, i: Any, j: Any) -> Any:
        """The same as a formula on positions q, k and on rows and columns i, j, for attentions other than ours."""
        if self.name == "causal":
            seen = k <= q
        elif self.name == "window":
            left, right = self.values
            seen = k == k if left is None else q - k <= left
            seen = seen if right is None else seen & (k - q <= right)
        elif self.name == "prefix":
            seen = k < self.values[0]
        elif self.name == "chunk":
            seen = q // self.values[0] == k // self.values[0]
        else:
            seen = i // self.values[0] == j // self.values[0]
        return ~seen if self.negated else seen


@dataclass(frozen=True)
class MaskText:
    """A parsed mask: terms that must all hold; none hides nothing."""

    terms: tuple[MaskTerm, ...]

    @property
    def is_causal(self) -> bool:
        """Whether the mask is `causal` and nothing else."""
        return self.terms == (MaskTerm("causal", (), False),)

    def build(self, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu") -> Mask | None:
        """The mask as Tilewise takes it."""
        masks = [term.build(seqlen_q, seqlen_k, device) for term in self.terms]
        return reduce(lambda a, b: a & b, masks) if masks else None

    def keep(self, q: Any, k: Any, i: Any, j: Any) -> Any:
        """Whether a pair is visible, as a formula on tensors; only for a mask with terms."""
        return reduce(lambda a, b: a & b, [term.keep(q, k, i, j) for term in self.terms])


def parse_mask(text: str) -> MaskText:
    """Read the text of a mask. Raises UsageError for what is not one."""
    terms = [_term(part.strip()) for part in text.split("&")]
    return MaskText(tuple(term for term in terms if term is not None))


def _term(text: str) -> MaskTerm | None:
    if text == "none":
        return None
    negated = text.startswith("not ")
    name, *numbers = text.removeprefix("not ").strip().split(":")
    values = tuple(_number(number, text) for number in numbers)
    if name == "window" and len(values) == 1:
        values = (values[0], 0)
    wanted = {"causal": 0, "window": 2, "prefix": 1, "chunk": 1, "documents": 1}.get(name)
    fits = wanted == len(values) and (name == "window" or None not in values)
    if not fits or (name in ("chunk", "documents") and values == (0,)):
        raise UsageError(f"{text!r} is not a mask; masks are none, causal, window:256, window:256:0, prefix:N, "
                         'chunk:N, documents:N, "not MASK", joined by &')  # fmt: skip
    return MaskTerm(name, values, negated)


def _number(text: str, whole_text: str) -> int | None:
    if text == "*":
        return None
    if not text.isdecimal():
        raise UsageError(f"{text!r} in the mask {whole_text!r} is not a whole number")
    return int(text)
