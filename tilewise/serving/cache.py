"""Caches in one piece, and what every cache is to a call: pools, a table, lengths."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise import checks, memory
from tilewise.errors import OptionError, ShapeError, message
from tilewise.memory_layout import lies_as
from tilewise.quick import Like, like
from tilewise.serving.books import as_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLAIN = (Tensor, torch.nn.Parameter)
TENSORS = ("k", "v", "lengths", "block_table", "leftpad", "k_scale", "v_scale")
UNKNOWN, MOST_KINDS = -1, 4096
_kinds: dict[tuple[Any, ...], int] = {}
"""Numbers of the kinds of views there were: what a call's preparation depends on but for the queries."""
_numbers = itertools.count()


class CacheView:
    """Keys and values of B sequences as a call reads and extends them; tensors only, so it can be captured in a CUDA
    graph and compiled.

    Args:
        k, v: pools (P, H_kv, S, D) and (P, H_kv, S, D_v), the last stride 1.
        lengths: (B,) int32 keys present, on the pools' device; a call that appends advances them in place. On a GPU
            keys beyond the capacity are counted and not written.
        block_table: (B, M) int32 page of keys j // S of each sequence; None: sequence b is page b.
        leftpad: (B,) int32 keys of padding in front, hidden; positions count behind them. None: no padding.
        k_scale, v_scale: (H_kv,) or (P, H_kv) float32 factors of what is stored, None: 1.
        trusted: whether whoever made the view guarantees room and pages, so that a call looks at neither.

    attended, checked: what the next call is compared with, of those that were attended and of those that were found
    right. held: its tensors, where one of those is known. kind: a number that views of the same shapes, strides, types
    and device share, UNKNOWN before the first call.
    forms: what is known of appends by their shapes: that they fit, and a quick way to do them or None.
    """

    def __init__(
        self, k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor | None = None, leftpad: Tensor | None = None,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None, *, trusted: bool = False,
    ) -> None:  # fmt: skip
        self.k, self.v, self.lengths = k, v, lengths
        self.block_table, self.leftpad = block_table, leftpad
        self.k_scale, self.v_scale, self.trusted = k_scale, v_scale, trusted
        self._learn()

    def __setattr__(self, name: str, value: Any) -> None:
        """A tensor that takes another's place: what is known of the old one no longer holds."""
        super().__setattr__(name, value)
        if name in TENSORS and "kind" in self.__dict__:
            self._learn()

    def _learn(self) -> None:
        self.device, self.plain = self.k.device, type(self.k) in PLAIN and type(self.v) in PLAIN
        self.forms: dict[tuple[Any, ...], Any] = {}
        self.attended: Like | None = None
        self.checked: Like | None = None
        self._before: Any = None
        self.held: list[Tensor] = []
        self._lies: Callable[..., bool] | None = None
        self.kind = UNKNOWN

    def look(self) -> None:
        """Find the kind, before a call; what is known of tensors whose memory was exchanged (`t.data = ...`, `t.set_`)
        for such that lies otherwise no longer holds. The second call makes what later ones are compared by."""
        if self._lies is not None:
            if self._lies(*self.held):
                return
            self._learn()
        kind = self._kind()
        if kind == self.kind and self.plain:
            self.held = self._tensors()
            self._lies = lies_as(self.held)
        elif kind != self.kind != UNKNOWN:
            self._learn()
        self.kind = kind

    def _tensors(self) -> list[Tensor]:
        return [t for name in TENSORS if (t := getattr(self, name)) is not None]

    def _kind(self) -> int:
        tensors = [getattr(self, name) for name in TENSORS]
        kind = tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        found = _kinds.get(kind)
        if found is None:
            if len(_kinds) >= MOST_KINDS:
                _kinds.clear()
            found = _kinds[kind] = next(_numbers)
        return found

    def notice(self, found: Any, q: Tensor, spec: tuple[Any, Any, Any], options: tuple[Any, ...]) -> None:
        """Remember a call of a known kind; the second in a row makes it what the next one is compared with."""
        if self._before is found:
            self.held = self._tensors()
            self.attended = like((q, *self.held), spec, options, found)
        self._before, self.checked = found, None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Keys that one sequence can hold."""
        return self.k.shape[2] * (1 if self.block_table is None else self.block_table.shape[1])


class KVCache(CacheView):
    """Keys and values of B sequences (slots), each in one piece of memory with room for `capacity` keys.

    Args:
        k, v: (B, H_kv, capacity, D) and (B, H_kv, capacity, D_v), the last stride 1; kept, not copied.
        lengths: (B,) integers, keys present; None: none.
        leftpad: (B,) integers, hidden keys in front of each sequence, None: none.
        k_scale, v_scale: (H_kv,) or (B, H_kv) factors of what is stored.

    `attention_with_cache(q, cache, k, v)` appends to every slot; `sequences=` names some of them, in any order.
    `reset` empties slots, `crop` shortens them.

    Raises: ShapeError, DTypeError for tensors that do not fit together.
    """

    def __init__(
        self, k: Tensor, v: Tensor, lengths: Tensor | None = None, leftpad: Tensor | None = None,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
            rule = "k is (B, H_kv, capacity, D) and v (B, H_kv, capacity, D_v)"
            raise ShapeError(message(rule, {"k": k, "v": v}))
        if lengths is None:
            lengths = torch.zeros(k.shape[0], dtype=torch.int32, device=k.device)
        for name, t in (("lengths", lengths), ("leftpad", leftpad)):
            if t is not None:
                checks.check_int_tensor(name, t)
                if tuple(t.shape) != (k.shape[0],):
                    raise ShapeError(message(f"{name} has one number per slot", {name: t, "k": k}))
        leftpad = None if leftpad is None else leftpad.to(k.device, torch.int32)
        super().__init__(k, v, lengths.to(k.device, torch.int32), None, leftpad, k_scale, v_scale)

    @staticmethod
    def allocate(
        batch: int, num_heads_kv: int, capacity: int, head_dim: int, *, head_dim_v: int | None = None,
        dtype: torch.dtype = torch.float32, device: Any = None,
    ) -> KVCache:  # fmt: skip
        """An empty cache; memory is not written."""
        shape = (batch, num_heads_kv, capacity)
        k = memory.pool((*shape, head_dim), dtype, device)
        v = memory.pool((*shape, head_dim if head_dim_v is None else head_dim_v), dtype, device)
        return KVCache(k, v)

    def select(self, sequences: Tensor | Sequence[int], *, apart: bool = False) -> CacheView:
        """A view of some slots, in the order given; appending through it advances its own lengths, not the cache's.

        apart: whether each slot may stand there once, as for a call that appends.
        Raises: ShapeError for a slot that is not there; OptionError for one that stands twice (looked at on the CPU);
            DTypeError for what are no integers.
        """
        index = self._index(sequences, apart)
        leftpad = None if self.leftpad is None else self.leftpad[index]
        table = index.to(torch.int32)[:, None]
        return CacheView(self.k, self.v, self.lengths[index], table, leftpad, self.k_scale, self.v_scale)

    def _index(self, sequences: Tensor | Sequence[int], apart: bool) -> Tensor:
        """(n,) int64 slots, looked at where that needs no synchronisation; apart: each stands there once."""
        if isinstance(sequences, Tensor):
            checks.check_int_tensor("sequences", sequences)
            sequences = sequences.reshape(-1)
            named = sequences.tolist() if checks.can_look(sequences) else None
        else:
            named = list(as_numbers(sequences))
        if named is not None:
            slots = self.k.shape[0]
            for b in named:
                if not 0 <= b < slots:
                    raise ShapeError(f"there is no slot {b}: the cache has slots 0 to {slots - 1}")
            if apart and len(set(named)) != len(named):
                raise OptionError(f"a slot that is written stands once in a call, not as in {named}")
        return torch.as_tensor(
            named if named is not None else sequences, dtype=torch.int64, device=self.k.device
        )

    def store(self, sequences: Tensor | Sequence[int], view: CacheView) -> None:
        """Take over the lengths that a view from `select` has come to."""
        self.lengths.index_copy_(0, self._index(sequences, True), view.lengths)

    def reset(self, sequences: Tensor | Sequence[int] | None = None) -> None:
        """Forget all keys, or those of some slots.

        Raises: ShapeError for a slot that is not there (looked at on the CPU), DTypeError for what are no integers.
        """
        if sequences is None:
            self.lengths.zero_()
        else:
            self.lengths[self._index(sequences, False)] = 0

    def crop(self, length: int) -> None:
        """Keep at most the first `length` keys of every slot.  Raises OptionError for a negative length."""
        if length < 0:
            raise OptionError(f"a cache keeps 0 keys or more, not {length}")
        self.lengths.clamp_(max=length)
