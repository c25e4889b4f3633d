"""Tiles of the Hopper forward: what fits the registers and shared memory of a multiprocessor by head dimension.

A choice depends on head dimensions, the spec, the shape and the machine, never on a run. A table of measured choices
is asked first (`tilewise.tuning`, kernel "hopper.forward"), then one of what kinds do not spill with (`wants`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise import tuning
from tilewise.backends.hopper.algebra import COLUMNS, Mask, along_row, mask_of, score_of
from tilewise.backends.hopper.print_fold import stripes_of
from tilewise.backends.hopper.wants import FUNCTIONS, Form, known
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewise.backends.triton.machine import Machine
    from tilewise.problem import Problem
    from tilewise.spec.attention import AttentionSpec
    from tilewise.spec.expression import Node

PARTS = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}
"""A head dimension as the columns of one or two tiles, each a power of two."""
PAIRS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
"""Head dimensions of q and k, and of v, that kernels are made for; smaller ones are filled up with zeros."""
FEWEST_KEYS = 512
"""Keys of a split, at least."""
SHARED = 232448
"""Bytes of shared memory a program may have at compute capability 9.0."""
CACHE = 34 * 2**20
"""Bytes of k and v of the heads that run abreast: two thirds of the second-level cache of an H100 or H200."""
CLOSE = (((128, 128), (192, 128)), 8 * 2**20)
"""Head dimensions whose heads run closer together under a causal mask, and those bytes there; see `abreast`."""


class Tiles(NamedTuple):
    """A choice: warpgroups of 64 rows, keys of a block, stages of the rings; `order` and `lazy` as in the kernel.

    shared_out: out leaves through the room of q. worker, loader, limit: registers of a thread of a consumer, of the
    producer, and of the kernel at its start, from which the first consumer keeps what is left. held: columns of q that
    products read from registers instead of shared memory, all of its first part or of both. apart: the sums of a row's
    weights stay with the threads that hold the columns until the tile ends. fresh: numbers that follow from those of
    the call are made where they stand, rather than kept.
    """

    warpgroups: int
    block_n: int
    stages: int
    order: int
    lazy: bool
    shared_out: bool
    worker: int
    loader: int
    limit: int
    held: int = 0
    apart: bool = False
    fresh: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups


PLAIN = {
    (64, 64): Tiles(3, 128, 3, 5, True, False, 160, 32, 128),
    (96, 96): Tiles(2, 128, 2, 4, True, False, 224, 56, 168, 0, True),
    (128, 128): Tiles(2, 128, 2, 4, True, False, 232, 40, 168, 128, True),
    (192, 192): Tiles(2, 64, 3, 4, True, True, 224, 56, 168, 0, True),
    (192, 128): Tiles(2, 128, 2, 4, True, True, 224, 56, 168, 0, True),
    (256, 256): Tiles(2, 64, 2, 4, True, True, 232, 40, 168, 0, True),
}
"""Without score terms, and with masks of positions alone. Source: sweeps on an H200 (docs/hopper.md)."""
CROWDED = PLAIN | {
    (64, 64): Tiles(2, 128, 3, 5, True, False, 232, 40, 168),
    (192, 128): PLAIN[192, 128]._replace(worker=232, loader=40),
    (256, 256): PLAIN[256, 256]._replace(worker=224, loader=56),
}
"""The same where a mask does more than cut rows at their later ends: shared out so that nothing is spilled."""
SLOPED = PLAIN | {(256, 256): PLAIN[256, 256]._replace(order=-1)}
"""With a tanh that is mostly a polynomial, without loads: as light as plain scores."""
FOLDING = {
    (64, 64): Tiles(2, 128, 2, 5, True, False, 216, 72, 168),
    (96, 96): Tiles(2, 128, 2, -1, True, False, 216, 72, 168),
    (128, 128): Tiles(2, 128, 2, 0, True, False, 224, 56, 168),
    (192, 192): Tiles(2, 64, 3, -1, True, True, 224, 56, 168),
    (192, 128): Tiles(2, 128, 2, -1, True, True, 224, 56, 168),
    (256, 256): Tiles(2, 64, 2, -1, True, True, 232, 40, 168),
}
"""With what wants registers for each element: loads, a tanh; at other head dimensions than 128 every score term.
Source: a sweep on an H200 for (128, 128), TFLOP/s: softcap 580 against 560 with PLAIN, ALiBi 669 against 717."""
SOFT = {(128, 128): Tiles(3, 64, 3, 5, True, False, 152, 56, 128)}
"""With scores that a tanh bounds, which need no maximum: two functions an element keep the unit busy, and three
warpgroups hide more of it than two. TFLOP/s, causal: 637 against 582 with FOLDING and 567 with that and maxima."""
LIGHT = {
    (128, 128): Tiles(2, 128, 2, 5, True, False, 232, 40, 168),
    (192, 128): Tiles(2, 128, 2, -1, True, True, 232, 40, 168),
    (256, 256): Tiles(2, 64, 2, -1, True, True, 232, 40, 168),
}
"""With score terms without loads and functions for each element, which leave no registers for q."""
SPARE = {
    (192, 192): Tiles(2, 64, 3, -1, True, True, 232, 40, 168),
    (192, 128): Tiles(2, 64, 4, -1, True, True, 224, 56, 168),
    (256, 256): Tiles(2, 32, 4, 4, True, True, 224, 56, 168, 0, True),
}
"""With several things at once that want registers: half the keys of a block where that frees enough of them."""
ROOMY = {
    pair: tuple(
        Tiles(2, keys, stages, order, True, out, worker, 504 - 2 * worker, 168, 0, order > 0, True)
        for keys, stages, order, worker in many
    )
    for pair, out, many in (
        ((64, 64), False, ((128, 3, -1, 216), (64, 6, -1, 208))),
        ((96, 96), False, ((64, 4, -1, 208), (64, 4, -1, 200))),
        ((128, 128), False, ((64, 4, 4, 216), (64, 4, -1, 208), (64, 4, -1, 200))),
        ((192, 192), True, ((32, 6, -1, 208), (32, 6, -1, 200))),
        ((192, 128), True, ((64, 4, -1, 208), (64, 4, -1, 200))),
        (
            (256, 256),
            True,
            (
                (64, 2, -1, 216),
                (32, 4, -1, 216),
                (32, 4, -1, 208),
                (32, 4, -1, 232),
                (32, 4, -1, 224),
                (32, 4, -1, 200),
            ),
        ),
    )
}
"""Where a kernel spills with the tiles of choice (`roomier`), in turn: fewer keys, and nothing kept that can be made
again."""
HALVED, SHORT = ((64, 64), (96, 96), (128, 128)), 1024
"""Head dimensions at which `finer` halves the keys of a block, and the mean keys of packed sequences that are short."""
LATER = ((256, 256),)
"""Head dimensions of which a second launch does again what met values that are not finite; others do it themselves."""
MANY = 128
"""Key blocks up to which a producer finds a tile's own by looking at all, for masks that read tensors."""


def hard(spec: AttentionSpec) -> bool:
    """Whether a score asks the special-function unit for every element."""
    score = spec.score
    return score is not None and any(
        n.op in FUNCTIONS and "s" in ex.variables(n) for n in ex.topological(score)
    )


def reads_pairs(spec: AttentionSpec) -> bool:
    """Whether anything is loaded for each pair or column, rather than for a row."""
    score, mask = score_of(spec.score, spec.keep), mask_of(spec.keep)
    each = [n for n in (score.core, score.rest, mask.other) if n is not None]
    return any(not along_row(site) for site in ex.loads(*each))


def crowded(pair: tuple[int, int], mask: Mask, varlen: bool) -> bool:
    """Whether what a mask says of rows and blocks leaves PLAIN's partitions too few registers."""
    if pair == (64, 64):
        return bool(stripes_of(mask)[0]) or (varlen and mask.below)
    return mask.below or mask.other is not None


def several(pair: tuple[int, int], spec: AttentionSpec, varlen: bool) -> bool:
    """Whether a spec asks for more than one thing that wants registers of a tile."""
    score, mask = score_of(spec.score, spec.keep), mask_of(spec.keep)
    terms = spec.score is not None
    sloped = score.slope is not None and score.rest is None
    if pair == (192, 192):
        return terms and varlen and mask.below
    if terms and (mask.below or mask.other is not None):
        return varlen or (pair == (256, 256) and not sloped)
    if pair == (192, 128):
        return varlen and (mask.other is not None or (terms and not sloped))
    return varlen and mask.other is not None


def full_of(pair: tuple[int, int], spec: AttentionSpec, varlen: bool) -> bool:
    """Whether a kind has no registers for what can be made again (`Tiles.fresh`): packed sequences, whose tiles end row
    by row, with masks of more than lines, or with terms where rows are cut from below; at D=64 a tanh with any of
    those."""
    score, mask = score_of(spec.score, spec.keep), mask_of(spec.keep)
    other = mask.other is not None
    if pair == (64, 64) and score.slope is not None and score.rest is None:
        return varlen or other or mask.below
    return varlen and (other or (spec.score is not None and mask.below))


def default(pair: tuple[int, int], spec: AttentionSpec, varlen: bool = False) -> Tiles:
    """The tiles where no table says others."""
    chosen = by_kind(pair, spec, varlen)
    return chosen._replace(fresh=full_of(pair, spec, varlen))


def by_kind(pair: tuple[int, int], spec: AttentionSpec, varlen: bool) -> Tiles:
    """The tiles by what a spec wants of registers for each element."""
    score = score_of(spec.score, spec.keep)
    if pair in SPARE and several(pair, spec, varlen):
        return SPARE[pair]
    if score.slope is not None and score.rest is None and not reads_pairs(spec):
        mask = mask_of(spec.keep)
        cut = pair == (64, 64) and (mask.below or mask.other is not None)
        return (CROWDED if cut else SLOPED)[pair]
    if pair in SOFT and score.bounded:
        return SOFT[pair]
    if reads_pairs(spec):
        chosen = FOLDING[pair]
        if spec.score is None:
            return (
                chosen._replace(worker=chosen.worker - 8, loader=chosen.loader + 16)
                if pair in SPARE
                else chosen
            )
        bare = pair == (256, 256) and spec.keep is None and not varlen
        return chosen._replace(worker=240, loader=24) if bare else chosen
    if spec.score is None:
        return (CROWDED if crowded(pair, mask_of(spec.keep), varlen) else PLAIN)[pair]
    chosen = (FOLDING if hard(spec) else LIGHT).get(pair, FOLDING[pair])
    return chosen._replace(order=4) if pair == (256, 256) and varlen and not hard(spec) else chosen


def pair_of(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The smallest kernel that holds these head dimensions."""
    fitting = [(d, dv) for d, dv in PAIRS if head_dim <= d and head_dim_v <= dv]
    return min(fitting, key=sum) if fitting else None


def table_key(problem: Problem, pair: tuple[int, int]) -> str:
    """What a measured choice depends on."""
    masked = "masked" if problem.spec.keep is not None else "full"
    terms = "-terms" if problem.spec.score is not None else ""
    return f"d{pair[0]}-{pair[1]}-{masked}{terms}"


def looks_up(spec: AttentionSpec) -> bool:
    """Whether a table is read at a place that row and column make together, as one of relative positions is."""
    sites = ex.loads(*filter(None, (spec.score, spec.keep)))
    return any(_of_pairs(place) for site in sites for place in site.args)


def _of_pairs(node: Node) -> bool:
    names = ex.variables(node)
    return bool(names & frozenset("iq") and names & COLUMNS)


def finer(problem: Problem, pair: tuple[int, int]) -> bool:
    """Whether half the keys a block are faster, at head dimensions up to 128: where a table is looked up for each pair;
    where wide stripes, of which smaller blocks leave out more, meet another mask or score terms (of dense calls those
    that read nothing for each pair); and in short packed sequences whose rows a line cuts, with a function of each
    score. Source: 140 kinds on an H200 (docs/hopper.md)."""
    s, spec, options = problem.shape, problem.spec, problem.options
    if pair not in HALVED:
        return False
    mask, varlen, reads = mask_of(spec.keep), options.layout == "varlen", reads_pairs(spec)
    stripes, rest = stripes_of(mask)
    if looks_up(spec) or (
        stripes and (rest is not None or (spec.score is not None and (varlen or not reads)))
    ):
        return True
    # A sequence's bits would depend on its neighbours.
    short = varlen and s.seqlen_k <= SHORT * s.batch and not options.batch_invariant
    return short and any(map(_of_pairs, mask.runs)) and hard(spec) and not reads


def choose(
    problem: Problem, pair: tuple[int, int], machine: Machine, packed: bool = False, split: bool = False
) -> Tiles:
    """The tiles of a call: measured ones, those its kind is known not to spill with, or those by rule. packed: rows of
    a tile are those of several heads; split: keys are divided."""
    measured = tuning.lookup(machine.name, "hopper.forward", table_key(problem, pair))
    if measured:
        return of_numbers(measured)
    numbers = known(problem.spec, pair, form_of(problem, packed, split))
    varlen = problem.options.layout == "varlen"
    chosen = of_numbers(numbers) if numbers else default(pair, problem.spec, varlen)
    if chosen.block_n == 128 and finer(problem, pair):
        return chosen._replace(block_n=64, stages=2 * chosen.stages, fresh=True)
    return chosen


def form_of(problem: Problem, packed: bool, split: bool) -> Form:
    """How a call's tensors lie, as far as its kernel differs."""
    parts = split or problem.out_dtype != problem.dtype
    return Form(problem.options.layout == "varlen", packed, parts, problem.dtype == torch.float16)


def of_numbers(numbers: Sequence[int]) -> Tiles:
    """Tiles as tables hold them."""
    warpgroups, block_n, stages, order, lazy, shared_out, worker, loader, limit, *more = numbers
    held, apart, fresh = (*more, 0, 0, 0)[:3]
    flags = bool(lazy), bool(shared_out)
    return Tiles(
        warpgroups, block_n, stages, order, *flags, worker, loader, limit, held, bool(apart), bool(fresh)
    )


def shared_bytes(tiles: Tiles, pair: tuple[int, int]) -> int:
    """Shared memory of a program: q, out, the rings, and a little for barriers and numbers."""
    d, dv = pair
    out = 0 if tiles.shared_out else tiles.rows * dv
    return 2 * (tiles.rows * d + out + tiles.stages * tiles.block_n * (d + dv)) + 1024


def abreast(problem: Problem, packed: bool) -> int:
    """Heads whose tiles run side by side, so that their keys and values stay in the second-level cache.

    Without a mask all tiles cost the same, and one head after another lets all multiprocessors read the same keys at
    the same time, which takes less power: at D=128, N=16384 a long run holds 678 TFLOP/s at 1650 MHz, where four heads
    abreast held 669 at 1635, with the same bits.

    Under a causal mask tiles differ, and long ones are to come first: at D=128 and (192, 128) as many heads are enough
    as have a tile for each multiprocessor, of short sequences two. Source: docs/hopper.md; at other head dimensions
    fewer were slower (D=64 N=4096, D=96), or were not timed.
    """
    s = problem.shape
    if problem.spec.keep is None and problem.options.layout == "dense":
        return 1 if packed else max(problem.group, 1)
    keys = s.seqlen_k if problem.options.layout == "dense" else -(-s.seqlen_k // max(s.batch, 1))
    each = max(keys * (s.head_dim + s.head_dim_v) * 2, 1)
    units = (1 if problem.options.layout == "varlen" else s.batch) * s.num_heads_kv
    most = max(1, min(64, CACHE // each))
    mask = mask_of(problem.spec.keep)
    if (
        problem.options.layout == "dense"
        and not packed
        and not mask.below
        and pair_of(s.head_dim, s.head_dim_v) in CLOSE[0]
    ):
        row_tiles = -(-s.seqlen_q // 128)
        fewest = -(-(128 if row_tiles >= 32 else 256) // (row_tiles * max(problem.group, 1)))
        most = min(most, max(CLOSE[1] // each, fewest))
    # Sections of equal width: a last one of few heads would leave multiprocessors waiting for its longest tiles.
    sections = -(-units // most)
    groups = -(-units // sections)
    return groups if packed else groups * max(problem.group, 1)


def crammed(problem: Problem) -> bool:
    """Whether a tile of several heads has no registers for all that a spec asks: at head dimensions above 192 a
    function of scores that read tensors, under a mask that is no line."""
    s, spec = problem.shape, problem.spec
    if max(s.head_dim, s.head_dim_v) <= 192 or not hard(spec) or spec.score is None:
        return False
    return mask_of(spec.keep).other is not None and bool(ex.loads(spec.score))


def packing(problem: Problem, rows: int) -> int:
    """Query heads of one KV head that share a tile of rows, so that keys are loaded once for all of them; 1: none.

    It pays where a sequence has few rows; the copy engine takes groups of 2, 4 .. 64 heads.
    """
    group = problem.group
    if crammed(problem):
        return 1
    return group if group in (2, 4, 8, 16, 32, 64) and rows * group <= 512 and rows < 128 else 1


def splits(problem: Problem, programs: int, keys: int, sms: int) -> int:
    """How many ways the keys of each tile are divided: as many as leave no multiprocessor idle, by the shape alone."""
    if programs >= sms or problem.options.batch_invariant:
        return 1
    return max(1, min(sms // max(programs, 1), keys // FEWEST_KEYS))
