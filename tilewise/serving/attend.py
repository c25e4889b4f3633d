"""`attention_with_cache`: append, rotate, attend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise import checks
from tilewise.backends.protocol import Append
from tilewise.errors import DeviceError, DTypeError, OptionError, ShapeError, message
from tilewise.quick import is_compiling
from tilewise.serving.append import append, check_new, prepare
from tilewise.serving.books import as_numbers
from tilewise.serving.cache import CacheView, KVCache
from tilewise.serving.cascade import attend_cascade, check_cascade
from tilewise.serving.paged import Batch, PagedKVCache, PagedLayer
from tilewise.serving.read import attend_view, check_call, check_out
from tilewise.serving.rotary import (
    RotaryTable,
    check_positions,
    check_reach,
    check_table,
    query_positions,
    table_of,
    turn,
)
from tilewise.spec.scores import ScoreTerm, as_terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.serving.read import Kind
    from tilewise.spec.masks import Mask

Edges = Tensor | list[int] | None
MOST_FORMS = 256
FITS = object()
"""What is known of an append that has no quick way."""


class _New(NamedTuple):
    """The new tokens of a call: k (B, H_kv, N, D) or packed (T, H_kv, D) by `edges` (B + 1,), v alike; given: the
    edges as the caller gave them."""

    k: Tensor
    v: Tensor
    edges: Tensor | None
    given: Edges

    def counts(self) -> int | list[int]:
        """Tokens of each sequence, on the host.  Raises OptionError where they are on a device."""
        if self.edges is None:
            return self.k.shape[2]
        given = self.given
        if isinstance(given, Tensor):
            if given.device.type != "cpu":
                raise OptionError(
                    "a paged cache has to see the new tokens' cu_seqlens on the host\n"
                    "Give a list or a CPU tensor, or a batch that you advance yourself: PagedKVCache.batch."
                )
            given = given.tolist()
        assert given is not None
        counts = [stop - start for start, stop in zip(given, given[1:], strict=False)]
        if given[0] < 0 or given[-1] > self.k.shape[0] or min(counts, default=0) < 0:
            raise ShapeError(
                f"cu_seqlens_new rises from 0 or more to at most {self.k.shape[0]}: {given[:12]}"
            )
        return counts


def attention_with_cache(
    q: Tensor, cache: KVCache | CacheView | PagedKVCache | PagedLayer, k_new: Tensor | None = None,
    v_new: Tensor | None = None, *, rotary: RotaryTable | tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None, sequences: Sequence[int] | Tensor | Batch | None = None,
    cu_seqlens_q: Edges = None, cu_seqlens_new: Edges = None, shared_prefix: int = 0,
    mask: Mask | Tensor | None = None, scores: ScoreTerm | Sequence[ScoreTerm] = (), sink: Tensor | None = None,
    dropout: float = 0.0, seed: Tensor | int | None = None, scale: float | None = None,
    q_offset: int | Tensor | None = None, k_offset: int | Tensor = 0, h_offset: int = 0, return_lse: bool = False,
    deterministic: bool | None = None, batch_invariant: bool = False, backend: str = "auto",
    allow_quadratic: bool = False, out: Tensor | None = None,
) -> Any:  # fmt: skip
    """Write new keys and values into a cache, turn queries and keys to their positions, and attend to all keys.

    Args:
        q: (B, H, N_q, D), or packed (T, H, D) with cu_seqlens_q.
        cache: a `KVCache`, a `PagedKVCache` (of one layer, or `.layer(n)`), or a `CacheView`.
        k_new, v_new: (B, H_kv, N, D) and (B, H_kv, N, D_v), or packed by cu_seqlens_new; converted to the cache's
            dtype and written behind the keys present, whose number grows. None: nothing is written.
        rotary: a `RotaryTable`, or (cos, sin) of (positions, dim / 2) in the half style: new keys are turned before
            they are written, and queries before they are used, by their positions.
        positions: rows of the rotary tables for new keys and queries alike, (B, N) or (T,); None: a new key stands
            behind the keys present (less padding on the left), and the last query where the last key does. They move
            nothing in a mask, and are refused without tables.
        sequences: which of the cache's sequences the call is about: slots of a KVCache (ints or a tensor), numbers of
            a PagedKVCache (it needs them), or a `Batch` of one. None: all of them, in order.
        cu_seqlens_q, cu_seqlens_new: (B + 1,) where each sequence's tokens start, in one call for sequences of any
            lengths; a list, or a tensor. cu_seqlens_new None: cu_seqlens_q. A paged cache that keeps its own books
            has to see them on the host: a list or a CPU tensor.
        shared_prefix: keys that all sequences of the call share, whole pages of the first one
            (`PagedKVCache.shared_prefix` counts them): read once for all of them, and merged. 0: no such thing.

    The other arguments are those of `attention`. mask None sees every key present; positions are those of the
    sequence, so `causal()` is right for a prefill, a chunk and a token alike. Rows and columns, for `bias` and the
    like, are those of the sequence. q_offset None: the last query lines up with the last key.

    Returns: out in q's layout, (B, H, N_q, D_v) or (T, H, D_v); with return_lse also lse, (B, H, N_q) or (H, T).
        Differentiable in q, the cache's tensors, sink and the terms' leaves; new keys and values get no gradients.

    Raises: as `attention`; DeviceError unless q, new keys and tables are where the cache is; ShapeError for keys
        without room, sequences and pages outside the cache (on the CPU, or where the host keeps the books; on a GPU
        they are clamped); OutOfPages; OptionError for arguments that exclude each other.
    """
    if not isinstance(q, Tensor):
        raise DTypeError(f"q is a tensor, not {type(q).__name__}")
    table = table_of(rotary, positions)
    edges_q = None if cu_seqlens_q is None else _edges("cu_seqlens_q", cu_seqlens_q, q.device)
    new = None
    if k_new is not None or v_new is not None:
        given = cu_seqlens_q if cu_seqlens_new is None else cu_seqlens_new
        new = _new_tokens(k_new, v_new, given, edges_q if cu_seqlens_new is None else None, q.device)
    view, books = _resolve(cache, sequences, new)
    # What is wrong is refused before the books count anything and before anything is written.
    form, known, kind, given_q = None, None, None, q
    if not is_compiling():  # there sizes may be symbols
        form, known = _known(view, q, new, table)
    if known is None:
        _check_devices(view, q, new, table)
        if new is not None:
            check_new(new.k, new.v, new.edges, (view.k, view.v), view.lengths.shape[0])
        if table is not None:
            check_table(q, table.cos, table.sin)
    if table is not None:
        _check_rotary(view, q, edges_q, new, table, positions)
    options = (scale, q_offset, k_offset, h_offset, deterministic, batch_invariant, backend, allow_quadratic)
    spec = (mask, scores if isinstance(scores, (ScoreTerm, tuple, list)) else as_terms(scores), sink)
    if new is not None and not is_compiling():
        following = (_added(new), shared_prefix)
        kind = _check_before(view, q, edges_q, spec, options, (dropout, seed), following)
    if out is not None:
        check_out(out, q, view, spec)
    if books is not None:
        books.enter(new)
    if new is not None or table is not None:
        q = _append(view, q, edges_q, new, table, positions, (form, known))
    if books is not None and books.slots is not None and new is not None:
        books.slots[0].store(books.slots[1], view)
    lse: Tensor | None
    if shared_prefix:
        debug = books is not None and books.debug
        result, lse = attend_cascade(
            view, q, edges_q, shared_prefix, spec, options, (dropout, seed), debug=debug
        )
    else:
        if q is not given_q and (q.stride() != given_q.stride() or type(q) is not type(given_q)):
            kind = None  # the turned queries lie otherwise
        result, lse = attend_view(
            view, q, edges_q, spec, options, (dropout, seed), return_lse, kind=kind, looked=new is not None
        )
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _known(
    view: CacheView, q: Tensor, new: _New | None, table: RotaryTable | None
) -> tuple[tuple[Any, ...], Any]:
    """The form of an append, and what is known of such."""
    if new is not None:
        view.look()
    form = _form(q, new, table)
    return form, view.forms.get(form)


def _form(q: Tensor, new: _New | None, table: RotaryTable | None) -> tuple[Any, ...]:
    """All of an append but its tensors' contents and addresses, beside the view."""
    form: tuple[Any, ...] = ()
    if new is not None:
        k, v, edges = new.k, new.v, new.edges
        form = (
            k.shape,
            k.stride(),
            k.dtype,
            v.shape,
            v.stride(),
            v.dtype,
            k.device,
            v.device,
            None if edges is None else edges.shape,
        )
    if table is not None:
        cos, sin, style = table
        turned = (
            q.shape,
            q.stride(),
            q.dtype,
            q.device,
            *(cos.shape, cos.stride(), cos.dtype, cos.device),
            *(sin.shape, sin.stride(), sin.dtype, sin.device),
        )
        form = (*form, *turned, style)
    return form


def _check_before(
    view: CacheView, q: Tensor, edges_q: Tensor | None, spec: tuple[Any, Any, Any], options: tuple[Any, ...],
    random: tuple[float, Any], following: tuple[int | Tensor, int],
) -> Kind | None:  # fmt: skip
    """Raise what attention would raise once the new keys are written; gives what `check_call` gives.

    following: how many keys are written, and how many the sequences are said to share.
    """
    added, shared_prefix = following
    _check_inference(view)
    kind = check_call(view, q, edges_q, spec, options, random, added)
    if shared_prefix:
        check_cascade(view, q, edges_q, shared_prefix, spec, options, random, added=added)
    return kind


def _check_inference(view: CacheView) -> None:
    """Raise OptionError where torch itself would refuse to write, and a kernel would not."""
    if view.k.is_inference() and not torch.is_inference_mode_enabled():
        raise OptionError(
            "a cache that was made in inference mode is written in inference mode only\n"
            "Make it under torch.no_grad(), or call under torch.inference_mode()."
        )


def _check_devices(view: CacheView, q: Tensor, new: _New | None, table: RotaryTable | None) -> None:
    """Raise DeviceError unless all that an append reads is where the cache is: a kernel would follow any address."""
    given = {"k": view.k, "q": q}
    if new is not None:
        given |= {"k_new": new.k, "v_new": new.v}
    if table is not None:
        given |= {"cos": table.cos, "sin": table.sin}
    if any(t.device != view.k.device for t in given.values()):
        raise DeviceError(message("queries, new keys and rotary tables are where the cache is", given))


def _edges(name: str, given: Edges, device: torch.device) -> Tensor:
    edges = torch.tensor(given, dtype=torch.int32) if isinstance(given, (list, tuple)) else given
    if not isinstance(edges, Tensor):
        raise DTypeError(f"{name} is a list or an int tensor of shape (B + 1,), not {type(given).__name__}")
    checks.check_int_tensor(name, edges)
    if edges.ndim != 1 or not edges.shape[0]:
        raise ShapeError(message(f"{name} has shape (B + 1,)", {name: edges}))
    return edges.to(device, torch.int32, non_blocking=True)


def _new_tokens(
    k: Tensor | None, v: Tensor | None, given: Edges, edges: Tensor | None, device: torch.device
) -> _New:
    if not isinstance(k, Tensor) or not isinstance(v, Tensor):
        raise OptionError("k_new and v_new are tensors, given together")
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise OptionError(
            "a cache keeps no gradients\nCall under torch.no_grad(), or detach k_new and v_new."
        )
    if given is None or k.ndim == 4:
        return _New(k, v, None, None)
    return _New(k, v, _edges("cu_seqlens_new", given, device) if edges is None else edges, given)


class _Books(NamedTuple):
    """What is to be written down beside the tensors: the batch of a paged cache and its layer, or a cache's slots.

    counts: whether the call counts the batch's keys; otherwise its caller does.
    """

    batch: Batch | None
    layer: int
    slots: tuple[KVCache, Any] | None = None
    counts: bool = True

    @property
    def debug(self) -> bool:
        """Whether the cache looks at every call."""
        return self.batch is not None and self.batch.cache.owners is not None

    def enter(self, new: _New | None) -> None:
        """Find room for the new keys and count them; in the debug mode look at the pages' tags."""
        if self.batch is None:
            return
        batch = self.batch
        owners, view = batch.cache.owners, batch.views[self.layer]
        if self.counts and new is not None:
            batch.count(range(self.layer, self.layer + 1), new.counts())
        if owners is not None:
            owners.check(view, batch.sequences, _added(new))


def _resolve(cache: Any, sequences: Any, new: _New | None) -> tuple[CacheView, _Books | None]:
    """The view of the call's sequences, and the books that the call moves."""
    if isinstance(cache, CacheView):
        if sequences is None:
            return cache, None
        if isinstance(cache, KVCache):
            return cache.select(sequences, apart=new is not None), _Books(None, 0, (cache, sequences))
        raise OptionError("a CacheView is its own sequences: leave sequences out")
    layer = 0
    if isinstance(cache, PagedLayer):
        cache, layer = cache.cache, cache.index
    elif not isinstance(cache, PagedKVCache):
        raise DTypeError(f"cache is a KVCache, a PagedKVCache or a CacheView, not {type(cache).__name__}")
    elif cache.num_layers != 1:
        raise OptionError(f"the cache has {cache.num_layers} layers: give cache.layer(n)")
    if isinstance(sequences, Batch):
        if sequences.cache is not cache:
            raise OptionError("the batch belongs to another cache")
        return sequences.views[layer], None if cache.owners is None else _Books(sequences, layer, None, False)
    if sequences is None:
        raise OptionError("a paged cache is told which sequences a call is about: sequences=[...]")
    batch = cache.current(as_numbers(sequences))
    return batch.views[layer], _Books(batch, layer)


def _added(new: _New | None) -> Tensor | int:
    if new is None:
        return 0
    return new.k.shape[2] if new.edges is None else new.edges[1:] - new.edges[:-1]


def _first(view: CacheView) -> Tensor:
    """Position of the next key of each sequence."""
    return view.lengths if view.leftpad is None else view.lengths - view.leftpad


def _check_rotary(
    view: CacheView,
    q: Tensor,
    edges_q: Tensor | None,
    new: _New | None,
    table: RotaryTable,
    positions: Tensor | None,
) -> None:
    """Raise for positions that do not fit."""
    if positions is None:
        if view.lengths.is_cpu:
            check_reach(_first(view), _added(new), table.cos)
        return
    checks.check_int_tensor("positions", positions.reshape(-1))
    shape = (q.shape[0],) if edges_q is not None else (q.shape[0], q.shape[2])
    if tuple(positions.shape) != shape:
        given = {"positions": positions, "q": q}
        raise ShapeError(message(f"positions has a number for each query, {shape}", given))
    if new is not None and (
        (new.edges is None) != (edges_q is None) or new.k.shape[-2 if edges_q is None else 0] != shape[-1]
    ):
        rule = "positions say where queries and new keys stand: there are as many of both"
        raise ShapeError(message(rule, {"q": q, "k_new": new.k}))
    check_positions(positions, table.cos)


def _append(
    view: CacheView, q: Tensor, edges_q: Tensor | None, new: _New | None, table: RotaryTable | None,
    positions: Tensor | None, kept: tuple[tuple[Any, ...] | None, Any],
) -> Tensor:  # fmt: skip
    """Write the new tokens, advance the view's lengths; gives q, turned if there is a table."""
    cos, sin, interleaved = (None, None, False) if table is None else table
    turned: Tensor | None = None
    # A gradient of q goes through torch's own operations.
    apart = new is None or (q.requires_grad and torch.is_grad_enabled())
    if apart and table is not None:
        end = _first(view) + _added(new)
        at = query_positions(q, end, edges_q) if positions is None else positions
        turned = turn(
            q if edges_q is not None else q.transpose(1, 2), table.cos, table.sin, at, table.interleaved
        )
        turned = turned if edges_q is not None else turned.transpose(1, 2)
    if new is not None:
        with_q = table is not None and not apart
        given = None if positions is None or table is None else positions.to(torch.int32)
        inputs = Append(
            new.k, new.v, view.k, view.v, view.lengths, view.block_table, new.edges, q if with_q else None,
            edges_q if with_q else None, cos, sin, interleaved, given if with_q else None, given,
            None if view.leftpad is None or table is None else _first(view), view.k_scale, view.v_scale,
        )  # fmt: skip
        form, known = kept
        if known is not None and known is not FITS and given is None and not apart:
            found = known(inputs)
        else:
            found = append(inputs, trusted=view.trusted)
            if known is None and form is not None and given is None and not apart:
                _remember(view, form, inputs)
        turned = found if with_q else turned
        view.lengths.add_(_added(new))
    return q if turned is None else turned


def _remember(view: CacheView, form: tuple[Any, ...], inputs: Append) -> None:
    """What is known of appends of this form from now on."""
    if len(view.forms) >= MOST_FORMS:
        view.forms.clear()
    view.forms[form] = prepare(inputs) or FITS
