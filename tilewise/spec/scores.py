"""Score terms: what is done to the score of a pair before the softmax, in the order written.

Each term is one atom, `value(s, ...)`, in natural units (the score is scale * q.k). Tensors in them get
gradients; the derivative is taken from the atom.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.errors import DTypeError, OptionError, ShapeError, message
from tilewise.spec.masks import _ints_leaf, _tensor, four_dimensional
from tilewise.spec.term import Atom, Term

if TYPE_CHECKING:
    from collections.abc import Sequence


LARGEST = 3.4028234e38
"""The largest float32."""


class ScoreTerm:
    """One change of the score. Terms apply in the order in which `scores=` lists them."""

    __slots__ = ("term",)

    def __init__(self, term: Term) -> None:
        self.term = term

    def __repr__(self) -> str:
        return f"ScoreTerm({self.term.text})"


def as_terms(scores: ScoreTerm | Sequence[ScoreTerm] | None) -> tuple[ScoreTerm, ...]:
    """One term or a sequence of terms as a tuple."""
    if scores is None:
        return ()
    if isinstance(scores, ScoreTerm):
        return (scores,)
    if isinstance(scores, Tensor):
        raise DTypeError(
            message(
                "scores takes score terms, not a tensor",
                {"scores": scores},
                "Write scores=tilewise.bias(tensor).",
            )
        )
    terms = tuple(scores)
    for term in terms:
        if not isinstance(term, ScoreTerm):
            raise DTypeError(
                f"scores takes score terms such as tilewise.bias(...), not {type(term).__name__}"
            )
    return terms


class Bias(Atom):
    """Adds a tensor."""

    name = "bias"
    leaves = {"tensor": ("float", 4)}

    @staticmethod
    def value(s, b, h, i, j, tensor):
        return s + tensor[b, h, i, j]


class Alibi(Atom):
    """Subtracts slope * |q - k|."""

    name = "alibi"
    leaves = {"slopes": ("float", 2)}

    @staticmethod
    def value(s, b, h, q, k, slopes):
        return s - slopes[b, h] * abs(q - k)


class Softcap(Atom):
    """cap * tanh(s / cap)."""

    name = "softcap"
    floats = ("cap",)

    @staticmethod
    def value(s, cap):
        from tilewise.spec.words import tanh

        return cap * tanh(s / cap)


class Relative(Atom):
    """Adds table[h, clamp(k - q, -reach, reach) + reach]."""

    name = "relative"
    leaves = {"table": ("float", 2)}
    ints = ("reach",)

    @staticmethod
    def value(s, q, k, h, table, reach):
        from tilewise.spec.words import maximum, minimum

        return s + table[h, minimum(maximum(k - q, -reach), reach) + reach]


class RelativeBucket(Atom):
    """Adds table[h, bucket[clamp(k - q, -reach, reach) + reach]]."""

    name = "relative_bucket"
    leaves = {"table": ("float", 2), "bucket": ("int", 1)}
    ints = ("reach",)

    @staticmethod
    def value(s, q, k, h, table, bucket, reach):
        from tilewise.spec.words import maximum, minimum

        return s + table[h, bucket[minimum(maximum(k - q, -reach), reach) + reach]]


def _float_leaf(name: str, t: Tensor) -> Tensor:
    if not t.is_floating_point():
        raise DTypeError(message(f"{name} holds floating-point numbers", {name: t}))
    return t


def bias(tensor: Tensor) -> ScoreTerm:
    """Adds a tensor broadcast to (B, H, N_q, N_k), of any floating dtype; its gradient has its own shape.

    -inf hides the pair. Rows and columns are those of this call (inside the sequence when packed).
    """
    _tensor("bias", tensor)
    if tensor.dtype == torch.bool:
        raise DTypeError(
            message("a bias is added to the scores and is not bool", {"bias": tensor}, "Write mask=tensor.")
        )
    return ScoreTerm(Bias.bind(four_dimensional("bias", _float_leaf("bias", tensor))))


def alibi(slopes: Tensor) -> ScoreTerm:
    """Subtracts slopes[h] * |q - k|.

    Args:
        slopes: (H,) or (B, H), any floating dtype; gets a gradient. `alibi_slopes(H)` gives the usual ones.

    Source: Press et al., Train Short, Test Long (ALiBi), 2021, https://arxiv.org/abs/2108.12409.
    """
    _tensor("alibi", slopes)
    if slopes.ndim not in (1, 2):
        raise ShapeError(message("ALiBi slopes have shape (H,) or (B, H)", {"slopes": slopes}))
    slopes = slopes[None] if slopes.ndim == 1 else slopes
    return ScoreTerm(Alibi.bind(_float_leaf("slopes", slopes)))


def alibi_slopes(num_heads: int) -> Tensor:
    """The slopes of the ALiBi paper for any number of heads, (H,) float32.

    A geometric series from 2^(-8/H) for powers of two; otherwise the series of the next lower power of two
    followed by every second one of the double size. Source: Press et al. 2021, section 3 and its code.
    """
    if num_heads < 1:
        return torch.empty(0)
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * n + 1) / power) for n in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


def softcap(cap: float) -> ScoreTerm:
    """cap * tanh(s / cap).  Raises OptionError unless cap > 0 and finite.

    Source: Gemma 2 report, 2024, section 2, https://arxiv.org/abs/2408.00118.
    """
    try:
        number = math.nan if isinstance(cap, str) else float(cap)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < LARGEST:
        raise OptionError(f"softcap is {cap!r}, and must be a number that is positive and finite")
    return ScoreTerm(Softcap.bind(floats=(number,)))


def relative(table: Tensor, bucket: Tensor | None = None) -> ScoreTerm:
    """Adds a learned value per head and distance k - q.

    Args:
        table: (H, 2R+1) (or (1, 2R+1)): column clamp(k - q, -R, R) + R. With a bucket: (H, num_buckets).
        bucket: (2R+1,) int, the table's column for each clamped distance, for example `t5_bucket()`.

    Source: Shaw et al. 2018, https://arxiv.org/abs/1803.02155; Raffel et al. (T5) 2019, https://arxiv.org/abs/1910.10683.
    """
    _tensor("relative", table)
    if bucket is not None:
        _tensor("bucket", bucket)
    if table.ndim != 2:
        raise ShapeError(message("a relative table has shape (H, 2R+1)", {"table": table}))
    span = table if bucket is None else bucket
    if bucket is not None and bucket.ndim != 1:
        raise ShapeError(message("a bucket has shape (2R+1,)", {"bucket": bucket}))
    if span.shape[-1] % 2 != 1:
        raise ShapeError(
            message("distances run from -R to R, so their number is odd", {"table": table, "bucket": bucket})
        )
    reach = (span.shape[-1] - 1) // 2
    if bucket is None:
        return ScoreTerm(Relative.bind(_float_leaf("table", table), ints=(reach,)))
    bucket = _ints_leaf("bucket", bucket).to(table.device)
    return ScoreTerm(RelativeBucket.bind(_float_leaf("table", table), bucket, ints=(reach,)))


def t5_bucket(num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
    """T5's bucket of each distance k - q from -max_distance to max_distance, (2*max_distance+1,) int32.

    Half of the buckets are exact distances, the rest grow logarithmically up to max_distance.
    T5 stores its table as (num_buckets, H): hand over its transpose.

    Source: Raffel et al. 2019, section 2.1 and its code.
    """
    distance = torch.arange(-max_distance, max_distance + 1)
    result = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        result += (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    if exact < 1 or max_distance <= exact:
        raise OptionError(f"{num_buckets} buckets a side do not fit distances up to {max_distance}")
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (num_buckets - exact)).to(torch.int64)).clamp(max=num_buckets - 1)
    return (result + torch.where(distance < exact, distance, far)).to(torch.int32)
