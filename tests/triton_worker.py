"""Runs the Triton backend in Triton's interpreter, in a process of its own: the interpreter is chosen at import.

    TRITON_INTERPRET=1 python tests/triton_worker.py TASK [NAME ...]      prints one JSON object a line

Tasks: `cases` runs conformance cases with gradients; `functions` the named functions of this file.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator

import guards
import torch
import triton_interpreter

import tilewise as tw


def cases(names: list[str]) -> Iterator[dict]:
    """Each case: its worst error over budget, or what failed."""
    from tilewise.testing.cases import find_case
    from tilewise.testing.conformance import run_case

    for name in names:
        start = time.perf_counter()
        try:
            found = {"worst": run_case(find_case(name), "triton").worst, "failed": ""}
        except AssertionError as error:
            found = {"worst": math.inf, "failed": str(error)}
        yield {"name": name, **found, "seconds": time.perf_counter() - start}


def _gradients(backend: str, q, k, v, do, leaf=None, **options) -> tuple[torch.Tensor, ...]:
    inputs = [t.clone().requires_grad_() for t in (q, k, v, *(() if leaf is None else (leaf,)))]
    scores = (tw.bias(inputs[3]),) if leaf is not None else ()
    out = tw.attention(*inputs[:3], scores=scores, backend=backend, **options)
    return torch.autograd.grad(out, inputs, do)


def _same(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    """Equal up to the rounding in which the usual way and the second look differ; NaN is not equal to anything."""
    return all(torch.allclose(a, b, rtol=1e-5, atol=2e-6) for a, b in zip(got, wanted, strict=True))


def hidden_values() -> bool:
    """What a mask hides, and rows without a cotangent, change no gradient, whatever they hold."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 80, 16) for _ in range(4))
    do[:, :, 40:] = 0
    results = []
    for value in (0.0, math.nan, math.inf):
        k[:, :, 40:, 3] = v[:, :, 40:, 5] = value
        results.append(_gradients("triton", q, k, v, do, mask=tw.causal()))
    return all(_same(other, results[0]) for other in results[1:])


def visible_values_spread() -> bool:
    """A NaN that rows do see reaches their gradients, and no other row's."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 80, 16) for _ in range(4))
    clean = _gradients("triton", q, k, v, do, mask=tw.causal())[0]
    k[:, :, 50, 3] = math.nan
    dirty = _gradients("triton", q, k, v, do, mask=tw.causal())[0]
    return bool(dirty[:, :, 50:].isnan().all()) and _same((dirty[:, :, :50],), (clean[:, :, :50],))


def one_visible_key() -> bool:
    """A row that sees one key has a slope of 0 to the last bit."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 33, 24) for _ in range(4))
    dq, dk, _ = _gradients("triton", q, k, v, do, mask=tw.window(0, 0))
    return not dq.any() and not dk.any()


def large_scores() -> bool:
    """Scores in the thousands: weights keep their digits though lse has lost them."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 96, 16) for _ in range(4))
    bias = torch.randn(1, 1, 96, 96) * 3 + 30000.0
    got = _gradients("triton", q, k, v, do, bias)
    wanted = _gradients("naive", *(t.double() for t in (q, k, v, do, bias)))
    # The scores themselves are rounded to 2e-3 by adding 30000 to them in float32.
    return all(float((a - b).abs().max()) < 0.02 for a, b in zip(got, wanted, strict=True))


def part_of_the_keys() -> bool:
    """A subset's backward takes the whole's lse and out, and the parts add up."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 70, 16) for _ in range(4))
    out, lse = tw.attention(q, k, v, backend="blockwise", return_lse=True)
    whole = _gradients("blockwise", q, k, v, do)
    parts = [
        tw.attention_partial_backward(q, k[:, :, a:b], v[:, :, a:b], out, lse, do, backend="triton")
        for a, b in ((0, 30), (30, 70))
    ]
    dq = parts[0].dq + parts[1].dq
    dk = torch.cat([p.dk for p in parts], 2)
    return all(float((a - b).abs().max()) < 1e-5 for a, b in ((dq, whole[0]), (dk, whole[1])))


def one_leaf_in_two_batches() -> bool:
    """Who sums a bias depends on the batch it meets: a call's kernels are not those of another batch."""
    torch.manual_seed(0)
    bias, results = torch.randn(1, 2, 20, 20), []
    for batch in (1, 2):
        q, k, v, do = (torch.randn(batch, 2, 20, 16) for _ in range(4))
        results.append([_gradients(b, q, k, v, do, bias) for b in ("triton", "blockwise")])
    pairs = [pair for got, wanted in results for pair in zip(got, wanted, strict=True)]
    return all(float((a - b).abs().max()) < 1e-5 for a, b in pairs)


def two_leaves_by_column_packed() -> bool:
    """Sums of several leaves along the columns of packed sequences lie one behind the other."""
    torch.manual_seed(0)
    edges = torch.tensor([0, 20, 23, 50], dtype=torch.int32)
    q, k, v, do = (torch.randn(50, 2, 16) for _ in range(4))
    leaves, results = [torch.randn(1, 1, 1, 27) for _ in range(2)], []
    for backend in ("triton", "blockwise"):
        inputs = [t.clone().requires_grad_() for t in (q, k, v, *leaves)]
        scores = tuple(tw.bias(t) for t in inputs[3:])
        out = tw.attention_varlen(*inputs[:3], edges, scores=scores, backend=backend)
        results.append(torch.autograd.grad(out, inputs, do))
    return all(float((a - b).abs().max()) < 1e-5 for a, b in zip(*results, strict=True))


def nothing_written_outside() -> bool:
    """Sums of several leaves by column and by row, of packed sequences with holes, and the sink's, stay inside what
    was made for them; the rest of the cases runs on a device."""
    found = guards.backward_written_outside("cpu", torch.float32, ("packed columns", "packed rows"))
    return len(found) == 2 and not any(found.values())


def _patches(q, k):
    return ((q // 48 + k // 80) % 3 != 0) | (q == k)


def loads_ahead() -> bool:
    """Tiles by descriptors, where one loop takes PARTIAL and FULL ones, give the bits of those by pointers, with any
    order of kinds."""
    from tilewise.backends.triton import launch_backward
    from tilewise.backends.triton.tiles import Tiles

    torch.manual_seed(0)
    q, do = (torch.randn(1, 2, 208, 40, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(1, 1, 300, 40, dtype=torch.float16) for _ in range(2))
    work, choose, holds = launch_backward.TMA_WORK, launch_backward.choose_backward, True
    try:
        for mask, rows in ((tw.custom(_patches), 32), (tw.causal() & tw.window(70, 0), 64), (None, 32)):
            tiles = {"keys": Tiles(rows, 32, 4, 2), "rows": Tiles(32, 32, 4, 2)}
            launch_backward.choose_backward = lambda *of, tiles=tiles: choose(*of)._replace(**tiles)
            found = []
            for launch_backward.TMA_WORK in (0.0, math.inf):
                launch_backward._tiles.cache_clear()
                found.append(_gradients("triton", q, k, v, do, mask=mask))
            holds = holds and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        launch_backward.TMA_WORK, launch_backward.choose_backward = work, choose
        launch_backward._tiles.cache_clear()
    return holds


def sums_made_apart() -> bool:
    """dk and dv by a launch of their own each, as wide heads have them: the bits of one launch for both."""
    from tilewise.backends.triton import launch_backward
    from tilewise.backends.triton.tiles import Tiles

    torch.manual_seed(0)
    q, do = (torch.randn(1, 2, 100, 40, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(1, 1, 130, 40, dtype=torch.float16) for _ in range(2))
    bias = torch.randn(1, 1, 1, 130)
    work, choose, found = launch_backward.TMA_WORK, launch_backward.choose_backward, []
    tiles = Tiles(32, 64, 4, 2)
    try:
        launch_backward.TMA_WORK = 0.0
        for apart in (None, (tiles, tiles), (tiles, Tiles(64, 32, 4, 2))):
            launch_backward.choose_backward = lambda *of, apart=apart: choose(*of)._replace(
                keys=tiles, apart=apart
            )
            launch_backward._tiles.cache_clear()
            found.append(_gradients("triton", q, k, v, do, bias, mask=tw.causal() & tw.custom(_of_heads)))
    finally:
        launch_backward.TMA_WORK, launch_backward.choose_backward = work, choose
        launch_backward._tiles.cache_clear()
    once, same, other = found
    close = (float((a - b).abs().max()) < 5e-3 for a, b in zip(once, other, strict=True))
    return all(torch.equal(a, b) for a, b in zip(once, same, strict=True)) and all(close)


def _twice(s, q, k, x, y):
    return s + x[q] * (s + x[q] * y[k]) * x[q] * y[k] - abs(q - k) * 0.01


def products_used_twice() -> bool:
    """A product that the score adds to something, where its derivative wants it alone."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 40, 16) for _ in range(4))
    leaves, found = [torch.rand(40) for _ in range(2)], []
    for backend in ("triton", "blockwise"):
        inputs = [t.clone().requires_grad_() for t in (q, k, v, *leaves)]
        out = tw.attention(*inputs[:3], scores=(tw.custom_score(_twice, *inputs[3:]),), backend=backend)
        found.append((out, *torch.autograd.grad(out, inputs, do)))
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*found, strict=True))


def _of_heads(q, k, h):
    return ((q // 24 + k // 40 + h) % 3 != 0) | (q == k)


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
    """Backward calls by tiles of 32 by 32, by descriptors however short."""
    from tilewise.backends.triton import launch_backward
    from tilewise.backends.triton.tiles import Tiles

    work, choose = launch_backward.TMA_WORK, launch_backward.choose_backward
    tiles = {"keys": Tiles(32, 32, 4, 2), "rows": Tiles(32, 32, 4, 2)}
    launch_backward.choose_backward = lambda *of: choose(*of)._replace(**tiles)
    launch_backward.TMA_WORK = 0.0
    launch_backward._tiles.cache_clear()
    try:
        yield
    finally:
        launch_backward.TMA_WORK, launch_backward.choose_backward = work, choose
        launch_backward._tiles.cache_clear()


def tiles_looked_at_before() -> bool:
    """Where the visible tiles of a head, and of a packed sequence, begin and end is known before the walk."""
    torch.manual_seed(0)
    edges = torch.tensor([0, 40, 41, 41, 100], dtype=torch.int32)
    holds = True
    with small_tiles():
        for packed, mask in ((False, tw.causal() & tw.custom(_of_heads)), (True, tw.custom(_of_heads))):
            q, do = (torch.randn(100, 2, 40) if packed else torch.randn(2, 2, 70, 40) for _ in range(2))
            k, v = (torch.randn(100, 1, 40) if packed else torch.randn(2, 1, 90, 40) for _ in range(2))
            found = []
            for backend, dtype in (("triton", torch.float16), ("blockwise", torch.float64)):
                inputs = [t.half().to(dtype).requires_grad_() for t in (q, k, v)]
                call = (tw.attention_varlen, (edges,)) if packed else (tw.attention, ())
                out = call[0](*inputs, *call[1], mask=mask, backend=backend)
                found.append(torch.autograd.grad(out, inputs, do.half().to(dtype)))
            errors = [float((a.double() - b).abs().max()) for a, b in zip(*found, strict=True)]
            holds = holds and max(errors) < 5e-3
    return holds


def leaves_in_the_pivots() -> bool:
    """Heads of 65 to 128: documents, and keys that a leaf hides, in long calls and in packed sequences."""
    torch.manual_seed(0)
    edges = torch.tensor([0, 40, 41, 110], dtype=torch.int32)
    seen, ids = torch.rand(70) > 0.2, (torch.arange(110) // 23).to(torch.int32)
    holds = True
    with small_tiles():
        for packed in (False, True):
            mask = tw.custom(lambda q, k, x: x[k] | (q == k), seen) if packed else tw.document(ids[None])
            shape = (110, 2, 72) if packed else (1, 2, 110, 72)
            tensors = [torch.randn(shape).half() for _ in range(4)]
            found = []
            for backend, dtype in (("triton", torch.float16), ("blockwise", torch.float64)):
                *inputs, do = (t.to(dtype).requires_grad_() for t in tensors)
                call = (tw.attention_varlen, (edges,)) if packed else (tw.attention, ())
                out = call[0](*inputs, *call[1], mask=tw.causal() & mask, backend=backend)
                found.append(torch.autograd.grad(out, inputs, do.detach()))
            errors = [float((a.double() - b).abs().max()) for a, b in zip(*found, strict=True)]
            holds = holds and max(errors) < 5e-3
    return holds


HOLED: tuple[tuple[Callable[..., object], Callable[[], tw.Mask] | None], ...] = (
    (lambda q, k: (q - k) % 4 < 2, tw.causal),
    (lambda q, k: (k - q) % 12 >= 6, lambda: tw.window(50, 9)),
    (lambda q, k: (3 * q + k) % 8 != 5, None),
    (lambda q, k: (q - 5) % 7 + k % 3 > 3, tw.causal),
    (lambda q, k: ((q - k) % 31 == 5) | ((q - k) % 31 > 20), tw.causal),
    (lambda q, k, n=12: (q - k) % n < n // 2, tw.causal),
    (lambda q, k, n=40: (k - q) % n < 30, tw.causal),
    (lambda q, k: ((q - k) % 7) * 0.1 < 0.3, tw.causal),
    (lambda q, k: ((q - k) % 5 < 2) & ((k - q) % 7 != 1), None),
    (lambda q, k: k % 5 != 3, tw.causal),
)
"""Masks with holes in every tile, and what they are joined with."""


def holes_in_every_tile() -> bool:
    """Masks of which a part applies to FULL tiles, too; positions begin anywhere; by descriptors, some without."""
    from tilewise.backends.triton import launch_backward

    torch.manual_seed(0)
    holds = True
    q, do = (torch.randn(1, 2, 75, 40).half() for _ in range(2))
    k, v = (torch.randn(1, 1, 107, 40).half() for _ in range(2))
    with small_tiles():
        for n, (function, other) in enumerate(HOLED):
            mask = tw.custom(function) if other is None else other() & tw.custom(function)
            wanted = _gradients("blockwise", *(t.double() for t in (q, k, v, do)), mask=mask)
            for launch_backward.TMA_WORK in (0.0, math.inf) if n % 4 == 0 else (0.0,):
                launch_backward._tiles.cache_clear()
                found = _gradients("triton", q, k, v, do, mask=mask)
                errors = [float((a.double() - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
                holds = holds and max(errors) < 5e-3
        # What holes hide may hold anything.
        k[:, :, 3::5], v[:, :, 3::5] = math.nan, math.inf
        dirty = _gradients("triton", q, k, v, do, mask=mask)
        holds = holds and all(float((a - b).abs().max()) < 5e-3 for a, b in zip(dirty, found, strict=True))
    return holds


def tanh_keeps_its_digits() -> bool:
    """In relative terms, however small the number; 0, its sign, infinities and NaN exactly."""
    import triton_words

    worst, exact = triton_words.tanh_errors("cpu", False)
    fine, exact_fine = triton_words.tanh_errors("cpu", True)
    return worst < 4e-7 and fine < 0.75 and exact and exact_fine


def patterns_are_what_they_should_be() -> bool:
    """Every period that is printed as a pattern of bits, of tiles that lie either way round and begin anywhere."""
    import triton_words

    return not triton_words.patterns_differ("cpu", [n for n in range(3, 32) if n & (n - 1)])


def an_infinite_sink() -> bool:
    """A row that has no more than a sink of +inf: lse = +inf and out = 0."""
    from sinks import infinite_sink

    try:
        for keys in (0, 4, 300):
            infinite_sink("triton", torch.float32, keys)
    except AssertionError:
        return False
    return True


FUNCTIONS: tuple[Callable[[], bool], ...] = (
    hidden_values, visible_values_spread, one_visible_key, large_scores, part_of_the_keys, one_leaf_in_two_batches,
    two_leaves_by_column_packed, loads_ahead, tiles_looked_at_before, products_used_twice,
    nothing_written_outside, sums_made_apart, holes_in_every_tile,
    leaves_in_the_pivots,
    tanh_keeps_its_digits, patterns_are_what_they_should_be, an_infinite_sink,
)  # fmt: skip


def functions(names: list[str]) -> Iterator[dict]:
    """Each function's answer."""
    for function in FUNCTIONS:
        if not names or function.__name__ in names:
            yield {"name": function.__name__, "holds": function()}


if __name__ == "__main__":
    triton_interpreter.repair()
    torch.set_num_threads(1)
    for line in {"cases": cases, "functions": functions}[sys.argv[1]](sys.argv[2:]):
        print(json.dumps(line), flush=True)
