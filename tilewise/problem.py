"""Problem: a spec together with sizes, types, device and options; everything a backend may decide on.

A call travels through the op layer as (q, k, v, leaves, ints, floats, seed, text). `api` writes it,
`decode_problem` and `decode_inputs` read it; they know the order of the lists from the text alone:

    text    SPEC#layout=dense;q_offset=last;k_offset=int;backend=auto;...
    leaves  the spec's leaves, then those of OPTIONAL_TENSORS that the text names, in that order
    ints    the spec's, then q_offset, k_offset, h_offset, b_offset, max_seqlen_q, max_seqlen_k
    floats  the spec's, then scale, dropout

With the option `pages` k and v are pools (P, H_kv, page_size, D) that sequences read through block_table: key j of
sequence b is row j % page_size of page block_table[b, j // page_size], or of page b where there is no table.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tilewise.dtypes import lookup
from tilewise.errors import SpecError
from tilewise.spec.attention import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

OPTIONAL_TENSORS = (
    "sink", "q_offset", "k_offset", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
    "block_table", "leftpad_k", "k_scale", "v_scale",
)  # fmt: skip
NO_MAXIMUM = -1
"""max_seqlen when the caller stated none."""


class Shape(NamedTuple):
    """Sizes of a call. Dense: batch entries of seqlen_q x seqlen_k. Packed: batch sequences, seqlen_* are totals.
    With pages seqlen_k is the capacity of one sequence, in either layout."""

    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int


@dataclass(frozen=True)
class Options:
    """What a call asks for beside the mathematics.

    partial: out is wanted in the compute type, to be merged. subset (backward only): the keys are a part of the
    whole, whose out and lse are given, so neither can be computed afresh from them. pages: k and v are pools; the
    tensors block_table (B, pages) and leftpad_k (B,) come with pages only, k_scale and v_scale, (H_kv,) or (P, H_kv)
    factors of what is stored, too.
    """

    layout: str = "dense"
    q_offset: str = "last"
    k_offset: str = "int"
    cu_seqlens_k: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    pages: bool = False
    block_table: bool = False
    leftpad_k: bool = False
    k_scale: bool = False
    v_scale: bool = False
    partial: bool = False
    subset: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    allow_quadratic: bool = False
    backend: str = "auto"

    def text(self) -> str:
        """Canonical text: the options that differ from the default."""
        changed = [(name, value) for name, value in self.__dict__.items() if value != _DEFAULTS[name]]
        return ";".join([f"{name}={'1' if value is True else value}" for name, value in changed])

    @staticmethod
    def parse(text: str) -> Options:
        """Read `text` back.  Raises SpecError for a name or value this version does not write."""
        found: dict[str, str | bool] = {}
        for part in filter(None, text.split(";")):
            name, _, value = part.partition("=")
            if name not in _DEFAULTS:
                raise SpecError(f"unknown option in a problem's text: {part!r}")
            found[name] = value == "1" if isinstance(_DEFAULTS[name], bool) else value
        return Options(**found)  # type: ignore[arg-type]


_DEFAULTS = {name: value.default for name, value in Options.__dataclass_fields__.items()}


@dataclass(frozen=True)
class Problem:
    """One attention call without its tensors. Hashable; backends answer `supports` and `plan` from it alone.

    page_size: rows of a page, 0 without pages. kv_dtype: of k and v as stored, where it is not q's."""

    spec: AttentionSpec
    options: Options
    shape: Shape
    dtype: torch.dtype
    device_type: str
    needs_grad: bool = False
    page_size: int = 0
    stored_dtype: torch.dtype | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type in which k and v are stored: q's, but for pools of float8."""
        return self.dtype if self.stored_dtype is None else self.stored_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of scores, lse and partial outputs."""
        return lookup(self.dtype).compute

    @property
    def out_dtype(self) -> torch.dtype:
        return self.compute_dtype if self.options.partial else self.dtype

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.shape.num_heads_q // self.shape.num_heads_kv if self.shape.num_heads_kv else 1

    @property
    def out_shape(self) -> tuple[int, ...]:
        s = self.shape
        if self.options.layout == "varlen":
            return (s.seqlen_q, s.num_heads_q, s.head_dim_v)
        return (s.batch, s.num_heads_q, s.seqlen_q, s.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        s = self.shape
        if self.options.layout == "varlen":
            return (s.num_heads_q, s.seqlen_q)
        return (s.batch, s.num_heads_q, s.seqlen_q)

    def with_gradient(self) -> Problem:
        """The same problem, whose backward will be asked for."""
        return replace(self, needs_grad=True)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The optional tensors the call carries, in the order in which they follow the spec's leaves."""
        o = self.options
        present = {
            "sink": self.spec.sink,
            "q_offset": o.q_offset == "tensor",
            "k_offset": o.k_offset == "tensor",
            "cu_seqlens_q": o.layout == "varlen",
            "cu_seqlens_k": o.cu_seqlens_k,
            "seqused_q": o.seqused_q,
            "seqused_k": o.seqused_k,
            "block_table": o.block_table,
            "leftpad_k": o.leftpad_k,
            "k_scale": o.k_scale,
            "v_scale": o.v_scale,
        }
        return tuple(name for name in OPTIONAL_TENSORS if present[name])


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> tuple[AttentionSpec, Options]:
    spec, _, options = text.partition("#")
    return AttentionSpec.parse(spec), Options.parse(options)


@dataclass(frozen=True)
class Inputs:
    """The tensors and numbers of a call, by name.

    q, k, v as given; leaves are the spec's; ints and floats are the spec's scalars. cu_seqlens_k is
    cu_seqlens_q where the call gave one table for both (None with pages).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    leaves: tuple[Tensor, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    seed: Tensor | None
    scale: float
    dropout: float
    h_offset: int
    b_offset: int
    q_offset: int | Tensor | None
    k_offset: int | Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    leftpad_k: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def shape_of(q: Tensor, k: Tensor, v: Tensor, layout: str, num_sequences: int = 0) -> Shape:
    """Sizes from the tensors' own."""
    if layout == "varlen":
        return Shape(num_sequences, q.shape[1], k.shape[1], q.shape[0], k.shape[0], q.shape[2], v.shape[2])
    return Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])


def is_lazy(t: Tensor) -> bool:
    """Whether t's numbers are not what its memory holds: a view whose sign torch turns when it is read, as `.imag`
    of a conjugate is, or zeros without memory."""
    return t.is_neg() or t._is_zerotensor()


def in_memory(t: Tensor) -> Tensor:
    """t, or a copy that holds its numbers, for code that reads memory by address."""
    if t._is_zerotensor():
        return t.new_zeros(t.shape)
    return t.resolve_neg()


def decode_problem(q: Tensor, k: Tensor, v: Tensor, leaves: Sequence[Tensor], text: str) -> Problem:
    """The problem a call poses (also on fake tensors)."""
    spec, options = _read(text)
    num_sequences = 0
    at = len(spec.leaves) + spec.sink + (options.q_offset == "tensor") + (options.k_offset == "tensor")
    if options.layout == "varlen":
        num_sequences = leaves[at].shape[0] - 1
    if not options.pages:
        shape = shape_of(q, k, v, options.layout, num_sequences)
        return Problem(spec, options, shape, q.dtype, q.device.type)
    packed = options.layout == "varlen"
    pages = 1
    if options.block_table:
        pages = leaves[at + packed + options.seqused_q + options.seqused_k].shape[1]
    page_size = k.shape[2]
    shape = Shape(
        num_sequences if packed else q.shape[0], q.shape[1], k.shape[1], q.shape[0 if packed else 2],
        pages * page_size, q.shape[-1], v.shape[3],
    )  # fmt: skip
    stored = None if k.dtype == q.dtype else k.dtype
    return Problem(spec, options, shape, q.dtype, q.device.type, page_size=page_size, stored_dtype=stored)


def decode_inputs(
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor, Sequence[Tensor]],
    ints: Sequence[int],
    floats: Sequence[float],
    seed: Tensor | None,
) -> Inputs:
    """Name the entries of a call's lists."""
    q, k, v, leaves = tensors
    spec, options = problem.spec, problem.options
    extra = dict(zip(problem.tensor_names, leaves[len(spec.leaves) :], strict=True))
    q_offset, k_offset, h_offset, b_offset, max_q, max_k = ints[spec.num_ints :]
    scale, dropout = floats[spec.num_floats :]
    return Inputs(
        q, k, v, tuple(leaves[: len(spec.leaves)]), tuple(ints[: spec.num_ints]), tuple(floats[: spec.num_floats]),
        seed, scale, dropout, h_offset, b_offset,
        q_offset=extra.get("q_offset", None if options.q_offset == "last" else q_offset),
        k_offset=extra.get("k_offset", k_offset),
        max_seqlen_q=max_q, max_seqlen_k=max_k,
        sink=extra.get("sink"),
        cu_seqlens_q=extra.get("cu_seqlens_q"),
        cu_seqlens_k=extra.get("cu_seqlens_k", None if options.pages else extra.get("cu_seqlens_q")),
        seqused_q=extra.get("seqused_q"), seqused_k=extra.get("seqused_k"),
        block_table=extra.get("block_table"), leftpad_k=extra.get("leftpad_k"),
        k_scale=extra.get("k_scale"), v_scale=extra.get("v_scale"),
    )  # fmt: skip


def empty_in_order(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor with the dimension order of `like` if `like` is dense, else contiguous.

    Used for outputs by the backends and by the fakes alike, so that both say the same strides.
    """
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    expected = 1
    for d in reversed(order):
        if like.shape[d] != 1 and like.stride(d) != expected:
            return like.new_empty(shape, dtype=dtype)
        expected *= like.shape[d]
    permuted = like.new_empty([shape[d] for d in order], dtype=dtype)
    return permuted.permute([order.index(d) for d in range(like.ndim)])
