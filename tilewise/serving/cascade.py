"""Cascade: a prefix that all sequences of a call share is read once, by all their queries together.

Attention over the prefix and attention over the rest are merged by the monoid of `tilewise.state`. For the prefix the
queries of all sequences are the rows of one: nothing of the call may then depend on which row or sequence a query is,
or on where it stands.
Source: Juravsky et al. 2024, Hydragen, https://arxiv.org/abs/2402.05099.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilewise.checks import can_look
from tilewise.dispatch import choose
from tilewise.errors import OptionError, ShapeError, UnsupportedProblem
from tilewise.problem import decode_inputs, decode_problem
from tilewise.serving.cache import CacheView
from tilewise.serving.read import OPTIONS, attend_view, key_of, write_view
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.masks import Mask, as_mask
from tilewise.spec.scores import as_terms
from tilewise.spec.tiles import FULL, TileGrid, classify_tiles
from tilewise.state import Partial, merge

FARTHEST = 2**30
MOST_PREPARED = 256
_prepared: dict[Any, Any] = {}
"""What runs calls over a prefix, by kind."""


def attend_cascade(
    view: CacheView, q: Tensor, cu_seqlens_q: Tensor | None, prefix: int, spec: tuple[Any, Any, Any],
    options: tuple[Any, ...], random: tuple[float, Any], *, debug: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) where the first `prefix` keys of every sequence are the pages of the first; as `attend_view`.

    debug: on a GPU, too, look whether every sequence holds the prefix in the same pages, by an assertion on the device.
    Raises as `check_cascade`.
    """
    check_cascade(view, q, cu_seqlens_q, prefix, spec, options, random, debug=debug)
    mask, scores, sink = spec
    mask, size, table = as_mask(mask), view.k.shape[2], view.block_table
    assert table is not None
    named = dict(zip(OPTIONS, options, strict=True))
    folded = q if cu_seqlens_q is not None else q.transpose(1, 2).flatten(0, 1)
    scales = (view.k_scale, view.v_scale)
    # Its pages are full: no length to say, and on a GPU none to make.
    full: Any = None
    head = CacheView(view.k, view.v, full, table[:1, : prefix // size], None, *scales, trusted=view.trusted)
    visible = AttentionSpec.parse(spec_text(mask, (), False, False))
    if visible.keep is not None and not visible.hides_later_keys_alone:  # those need no true positions
        named |= {"k_offset": prefix, "q_offset": _first_positions(view.lengths, q, cu_seqlens_q)}
    after = view.lengths - prefix
    tail = CacheView(view.k, view.v, after, table[:, prefix // size :], None, *scales, trusted=view.trusted)
    given = tuple(named.values())
    rest = attend_view(tail, q, cu_seqlens_q, (mask, scores, None), given, random, True, partial=True)
    folded = folded.transpose(0, 1)[None]
    if q.is_cuda:
        whole = _onto(head, folded, (None, scores, sink), options, _folded(rest, cu_seqlens_q))
        if whole is not None:
            return _unfolded(whole, q, cu_seqlens_q)
    first = attend_view(head, folded, None, (None, scores, None), options, random, True, partial=True)
    out, lse = _unfolded(first, q, cu_seqlens_q)
    if q.is_cuda and (joined := _joined((out, lse), rest, sink, q.dtype)) is not None:
        return joined
    merged = merge(Partial(out, lse), Partial(*rest))  # type: ignore[arg-type]  # lse was asked for
    merged = merged if sink is None else merged.with_sink(sink)
    return merged.finalize(dtype=q.dtype), merged.lse


def check_cascade(
    view: CacheView, q: Tensor, cu_seqlens_q: Tensor | None, prefix: int, spec: tuple[Any, Any, Any],
    options: tuple[Any, ...], random: tuple[float, Any], *, added: int | Tensor = 0, debug: bool = False,
) -> None:  # fmt: skip
    """Raise what `attend_cascade` raises, before so many more keys are written.

    Raises: OptionError for a prefix that is no whole number of pages, of views without a table or with padding;
        ShapeError for one that not all sequences hold in the same pages (looked at on the CPU);
        UnsupportedProblem for masks that hide a part of the prefix, and for what depends on row, sequence or position.
    """
    size, table = view.k.shape[2], view.block_table
    if table is None or view.leftpad is not None:
        raise OptionError("a shared prefix lies in pages: shared_prefix takes a paged cache, without padding")
    if prefix < 0 or prefix % size or prefix > view.capacity:
        raise OptionError(
            f"shared_prefix is a multiple of the page size {size} up to {view.capacity}, not {prefix}"
        )
    named = dict(zip(OPTIONS, options, strict=True))
    if named["q_offset"] is not None or named["k_offset"] != 0 or random[0]:
        raise OptionError("shared_prefix goes with neither offsets nor dropout")
    if table.shape[0] == 0:
        raise OptionError("shared_prefix needs a sequence")
    lengths = view.lengths if isinstance(added, int) and not added else view.lengths + added
    _check_shared(lengths, table[:, : prefix // size], prefix, debug)
    _refuse(lengths, q, cu_seqlens_q, as_mask(spec[0]), spec[1], prefix)


def _folded(part: Any, cu_seqlens_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of all sequences as those of one: (1, H, T, D_v) and (1, H, T)."""
    out, lse = part
    if cu_seqlens_q is None:
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return out.transpose(0, 1)[None], lse[None]


def _unfolded(part: Any, q: Tensor, cu_seqlens_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) in q's layout, from those of one sequence."""
    out, lse = part[0][0].transpose(0, 1), part[1][0]
    if cu_seqlens_q is None:
        out = out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)
        lse = lse.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)
    return out, lse


def _onto(
    view: CacheView,
    q: Tensor,
    spec: tuple[Any, Any, Any],
    options: tuple[Any, ...],
    prior: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of q over a view's keys, which are all there, merged with `prior` by the launch that merges the splits
    of the keys; None where there is no such launch, or where gradients are wanted."""
    tensors = (q, view.k, view.v, *prior)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    if not torch.compiler.is_compiling():
        view.look()
    key, extra = key_of(view, q, spec, options)
    if key is None or any(t.requires_grad for t in extra):
        return None
    key = (*key, prior[0].stride(), prior[1].stride(), prior[0].dtype)
    found = _prepared.get(key, _prepare)
    if found is _prepare:  # not looked at yet
        if len(_prepared) >= MOST_PREPARED:
            _prepared.clear()
        found = _prepared[key] = _prepare(view, q, spec, options, prior)
    if found is None:
        return None
    more = [*extra, *[t for t in (view.block_table, view.k_scale, view.v_scale) if t is not None]]
    merged: tuple[Tensor, Tensor] = found(q, view.k, view.v, more, True, prior)
    return merged


def _prepare(
    view: CacheView,
    q: Tensor,
    spec: tuple[Any, Any, Any],
    options: tuple[Any, ...],
    prior: tuple[Tensor, Tensor],
) -> Any:
    """What runs calls like this one; None where nothing does."""
    (q, k, v, *rest), seed, numbers = write_view(view, q, None, spec, options, (0.0, None))
    problem = decode_problem(q, k, v, rest, numbers.text)
    if choose(problem).name != "triton" or prior[0].dtype != torch.float32:
        return None
    from tilewise.backends.triton import prepared_decode

    inputs = decode_inputs(problem, (q, k, v, rest), numbers.ints, numbers.floats, seed)
    return prepared_decode.prepare(problem, inputs, prior)


def _joined(a: Any, b: Any, sink: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Both parts merged by one launch, where there is a kernel for it."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or type(a[0]) is not Tensor:
        return None
    try:
        from tilewise.backends.triton.launch_join import join
    except ImportError:  # no Triton here
        return None
    return join(a, b, sink, dtype)


def _check_shared(lengths: Tensor, pages: Tensor, prefix: int, debug: bool) -> None:
    """Raise ShapeError unless every sequence holds the prefix, and in the same pages; looked at on the CPU, and with
    `debug` by an assertion on the device, without a synchronisation."""
    if not can_look(pages) or not can_look(lengths):
        if debug:
            right = (pages == pages[:1]).all() & (lengths >= prefix).all()
            torch._assert_async(
                right, f"not all sequences hold a shared prefix of {prefix} keys in the same pages"
            )
        return
    shortest = int(lengths.min())
    if shortest < prefix:
        raise ShapeError(f"a sequence of {shortest} keys does not hold a prefix of {prefix}")
    if bool((pages != pages[:1]).any()):
        raise ShapeError(
            f"the first {prefix} keys lie in different pages: the sequences do not share them\n"
            "PagedKVCache.shared_prefix counts the keys that they share."
        )


def _refuse(
    lengths: Tensor, q: Tensor, cu_seqlens_q: Tensor | None, mask: Mask, scores: Any, prefix: int
) -> None:
    """Raise UnsupportedProblem unless every query sees the whole prefix, and scores depend on head and score alone."""
    spec = AttentionSpec.parse(spec_text(Mask(), as_terms(scores), False, False))
    moving = sorted(spec.variables - {"s", "h", "g"})
    if moving:
        raise UnsupportedProblem(
            f"a score term depends on {', '.join(moving)}, which differ between the queries that read a shared prefix\n"
            "Leave shared_prefix out."
        )
    term = mask.term
    if term is None:
        return
    if term.leaves or not _sees(spec_text(mask, (), False, False), term.ints, term.floats, prefix):
        raise UnsupportedProblem(
            f"the mask may hide a part of the first {prefix} keys from a query behind them\nLeave shared_prefix out."
        )
    if can_look(lengths):
        first = _first_positions(lengths, q, cu_seqlens_q)
        if first.numel() and int(first.min()) < prefix:
            raise ShapeError(
                f"queries of a shared prefix stand behind its {prefix} keys: one is at {int(first.min())}"
            )


def _first_positions(lengths: Tensor, q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    rows = q.shape[2] if cu_seqlens_q is None else cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    return lengths - rows


@functools.lru_cache(maxsize=256)
def _sees(text: str, ints: tuple[int, ...], floats: tuple[float, ...], prefix: int) -> bool:
    """Whether any query from position `prefix` on sees every key before it, by the mask's interval form."""
    spec = AttentionSpec.parse(text)
    if (
        "j" in spec.variables
    ):  # the rest is read as a sequence of its own, whose columns begin behind the prefix
        return False
    rows = 2**16
    grid = TileGrid(rows, prefix, rows, prefix, prefix, FARTHEST, 0, 0, 0, 2**16, 2**10, 2**10)
    return bool((classify_tiles(spec.keep, grid, (), ints, floats) == FULL).all())
