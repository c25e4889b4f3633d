"""How the Hopper backward runs a problem: its kernels, their chunks, stages and registers, and its memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tilewise.problem import Problem

WIDEST_HALVES = 128
"""The head dimension up to which a warpgroup holds dk and dv of its 64 keys in registers."""

LONG = 4096
"""Rows from which a third tile of rows in shared memory is worth more than a second tile of keys; masks hide half."""

BY_HEADS, SIDE_BY_SIDE, FLIPPED = 1, 2, 3
ROWS_SIDE_BY_SIDE, ROWS_FLIPPED = 32768, 65536
"""Rows of a head times KV heads that run abreast, in these orders, of which `backward_rings` tells."""

AHEAD = 4096
"""Rows from which sums of dq are cleared and collected on the way. At head dimension 128, and where walks are shorter,
what that costs between two tiles of keys is as much as it saves."""


WORTH, LEAST, PIECES = 6, 4, 8
"""Row tiles that a program is to save where the last tiles of keys are cut; that a range has at least; and the most
ranges within a tile."""


class BackwardPlan(NamedTuple):
    """d, dv: head dimensions of the kernels, filled up with zeros. width: columns of a chunk where tiles are cut.
    swizzle: KV heads whose tiles run abreast. adds: dq is added up in memory, else it has a kernel of its own; order:
    0, or the fixed order of additions (`backward_rings`). rows: of a tile. stages, keys: tiles of rows and of keys in
    shared memory. second: 0, or of 64 + `second` columns that products are made of, those after the first 64. bulk: the
    copy engine adds to dq's sums. drawn: tiles of rows of wide heads are drawn, with q in registers."""

    d: int
    dv: int
    width: int
    swizzle: int
    adds: bool
    order: int
    rows: int
    stages: int
    keys: int
    second: int
    bulk: bool
    drawn: bool

    @property
    def narrow(self) -> bool:
        return max(self.d, self.dv) <= WIDEST_HALVES

    @property
    def fresh(self) -> bool:
        """The first tile of keys to add to sums of dq writes them."""
        return self.order > 0 and self.second == 0

    @property
    def early(self) -> bool:
        """Registers have room for the keys beside scores of two tiles of rows, shared memory for what comes next."""
        return self.d == 192 and self.dv <= 128

    @property
    def sums(self) -> tuple[int, int]:
        """Parts of a tile of dq, and the columns of each."""
        return (1, self.d) if self.rows == 128 else (2, self.d // 2)

    def key_constants(self) -> dict[str, Any]:
        """Constants of `halves`, `early` or `roles`."""
        if self.narrow:
            return {
                "ST": self.stages, "KV": self.keys, "WORKER": 240, "LOADER": 24, "BM": self.rows, "D": self.d,
                "D2": self.second,
            }  # fmt: skip
        return {
            "ST": 3 if self.early else self.stages, "WORKER": 240, "LOADER": 24, "NC": self.d // self.width,
            "NV": self.dv // self.width, "W": self.width,
        }  # fmt: skip

    def row_constants(self) -> dict[str, Any]:
        """Constants of `rows` or `drawn_rows`: k has two stages, v one where shared memory ends."""
        return {
            "NC": self.d // self.width, "NV": self.dv // self.width, "W": self.width, "KST": 2,
            "VST": 2 if self.d <= 192 else 1, "WORKER": 240, "LOADER": 24,
        }  # fmt: skip


def heads_abreast(problem: Problem, walk: int, narrow: bool, drawn: bool) -> int:
    """KV heads whose tiles run abreast under a mask. The fewer, the more tiles read a head's rows, and add to its sums,
    while they lie in the second-level cache; but of the last of them, whose longest tiles are drawn first, there is to
    be work for all."""
    s = problem.shape
    packed = problem.options.layout == "varlen"
    tiles = s.seqlen_k // (s.batch if packed else 1) // 128
    # Of a group, one program walks all heads. So it is where tiles of only 64 keys are drawn.
    if (problem.group > 1 and walk >= LONG) or drawn or (narrow and tiles >= 128):
        return 4
    if not narrow or tiles < 32:
        return 16
    # As many in each section.
    units = s.num_heads_kv * (1 if packed else s.batch)
    return -(-units // -(-units // 8))


def order_of(problem: Problem, rows: int) -> int:
    """The order in which tiles of keys add to dq; see `backward_rings`. Under a causal mask alone each has fewer row
    tiles than the one before it, and all begin at the same ones; elsewhere those of a program's heads are far apart."""
    if not problem.spec.hides_later_keys_alone:
        return BY_HEADS
    if problem.group > 1:
        return SIDE_BY_SIDE
    return FLIPPED if rows == 128 else BY_HEADS


def abreast(walk: int, rows: int, masked: bool, order: int) -> int:
    """KV heads whose tiles run abreast where additions to dq have an order: the more, the fewer tiles of one head wait
    for each other, which is felt where walks of `walk` rows are short; but the more there is to hold in the
    second-level cache, above all where grouped heads are walked side by side, and where none waits for another."""
    steps = -(-walk // rows)
    if not masked:
        return 2 if steps > 128 else 4 if steps > 16 else 16
    if order == SIDE_BY_SIDE:
        return min(max(ROWS_SIDE_BY_SIDE // max(walk, 1), 2), 16)
    if order == FLIPPED:
        return min(max(ROWS_FLIPPED // max(walk, 1), 4), 16)
    if steps > 128:
        return 8
    return 16 if steps > 32 else 32 if steps > 8 else 64


@functools.lru_cache(maxsize=4096)
def plan_backward(problem: Problem) -> BackwardPlan:
    """The plan of a problem that the forward has let through."""
    s = problem.shape
    d, dv = (-(-x // 64) * 64 for x in (s.head_dim, s.head_dim_v))
    if max(d, dv) <= WIDEST_HALVES:
        d = dv = max(d, dv)
    narrow, o, spec = max(d, dv) <= WIDEST_HALVES, problem.options, problem.spec
    # Narrow heads leave room for the scores of 128 rows, but not for slopes of terms beside them. Packed sequences were
    # not run with them.
    rows = 128 if narrow and d == 64 and spec.score is None and o.layout == "dense" else 64
    order = order_of(problem, rows) if narrow and (o.deterministic or o.batch_invariant) else 0
    # Shared memory holds a third tile of rows, or the next tile of keys, which is wanted sooner where walks are short.
    # There is also room from which the copy engine adds and dk and dv leave: then the next keys come early.
    walk = s.seqlen_q // (s.batch if o.layout == "varlen" else 1)
    wide = d == dv == 128
    bulk = wide and walk >= LONG and not order and spec.score is None and o.layout == "dense"
    long = wide and walk >= (LONG if spec.keep is None else 2 * LONG)
    stages, keys = (3, 1) if bulk or long else (2, 2)
    swizzle = 1 if spec.keep is None else heads_abreast(problem, walk, narrow, d == 192 and dv <= 128)
    if order:
        swizzle = abreast(walk, rows, spec.keep is not None, order)
    # Slopes of terms need those registers.
    drawn = d == 192 and dv <= 128 and spec.score is None
    second = 32 if 64 < max(s.head_dim, s.head_dim_v) <= 96 else 0
    return BackwardPlan(d, dv, 64, swizzle, narrow, order, rows, stages, keys, second, bulk, drawn)


class Way(NamedTuple):
    """How dq's sums are cleared and collected. ahead: on the way, in the main kernel: with each tile of keys a share of
    the sums of the KV head `lead` heads on is cleared, and one of the head `lag` heads back, if all has been added to
    it, becomes dq; what lies before and after them is left to the kernels around it. unit_rows: row tiles of a KV
    head's rows; key_tiles: its tiles of keys."""

    ahead: bool
    lead: int
    lag: int
    units: int
    unit_rows: int
    key_tiles: int
    swizzle: int

    @property
    def first_left(self) -> int:
        """The first row tile that the main kernel leaves."""
        return max(self.units - self.lag, 0) * self.unit_rows

    @property
    def counters(self) -> tuple[int, int, int]:
        """Sections of heads whose tiles run abreast, twice, and shares that may be taken; none is empty."""
        sections = -(-self.units // self.swizzle)
        return (sections, sections, max(self.shares, 1)) if self.ahead else (1, 1, 1)

    @property
    def shares(self) -> int:
        """Shares that the main kernel may take."""
        return max(self.units - self.lag, 0) * self.key_tiles


def way_of(problem: Problem, sms: int) -> Way:
    """The way of a problem on a device of so many multiprocessors, which draw tiles in order."""
    s, plan = problem.shape, plan_backward(problem)
    packed = problem.options.layout == "varlen"
    units = s.num_heads_kv * (1 if packed else s.batch)
    key_tiles, row_tiles = -(-s.seqlen_k // 128), -(-s.seqlen_q // plan.rows)
    # Tiles of so many heads are under way at once, or just done.
    running = -(-sms // key_tiles)
    lead, lag = plan.swizzle + 2 * running, plan.swizzle + 3 * running
    ahead = plan.rows == 128 and not plan.order and not packed and s.seqlen_q >= AHEAD and lead < units
    return Way(ahead, lead, lag, units, max(problem.group, 1) * row_tiles, key_tiles, plan.swizzle)


class Split(NamedTuple):
    """Which tiles of keys are cut where all are as long (`backward_split`). first: tiles made whole; span: row tiles of
    a range; ranges: how many there are, 0 if none is cut."""

    first: int
    span: int
    ranges: int

    @property
    def draws(self) -> int:
        """Tiles and ranges that programs draw."""
        return self.first + self.ranges

    def floats(self, d: int) -> int:
        """Sums of dk and dv that programs leave for each other."""
        return max(self.ranges * 4 * 64 * d, 1)


def split_of(problem: Problem, sms: int) -> Split:
    """The cuts of a problem on a device of so many multiprocessors."""
    way = way_of(problem, sms)
    tiles, units = way.units * way.key_tiles, way.unit_rows
    last = tiles % sms
    saved = units * (sms - last) / sms if last else 0
    if way.ahead or not may_split(problem) or saved < WORTH:
        return Split(tiles, 1, 0)
    span = max(-(-last * units // sms), LEAST, -(-units // PIECES))
    return Split(tiles - last, span, -(-last * units // span))


def may_split(problem: Problem) -> bool:
    """Whether all tiles of keys are as long, and dk and dv may be added up by several programs."""
    plan, spec = plan_backward(problem), problem.spec
    hidden = spec.keep is not None or problem.options.layout != "dense"
    return plan.narrow and not (plan.order or hidden or spec.score is not None)


def describe_backward(problem: Problem) -> str:
    """What the backward does, in a line of the plan."""
    plan = plan_backward(problem)
    keys = "tiles of 128 keys" if plan.narrow else "tiles of 64 keys, a warpgroup for each product's role"
    if plan.order:
        return f"backward: {keys}, which add to dq in float32 in the order of the keys"
    if plan.adds:
        return f"backward: {keys}, which add to dq in float32 in whatever order they come"
    return f"backward: {keys}; dq by tiles of 128 rows, in a kernel of its own"


def workspace_bytes(problem: Problem, sms: int) -> int:
    """Memory of a backward beside inputs, outputs and gradients, on a device of so many multiprocessors."""
    s, plan = problem.shape, plan_backward(problem)
    varlen = problem.options.layout == "varlen"
    rows = plan.rows
    tiles = s.seqlen_q // rows + s.batch if varlen else -(-s.seqlen_q // rows)
    units = s.num_heads_q * (1 if varlen else s.batch)
    lines = units * (s.seqlen_q * 3 * 4 + tiles * rows * 4 * (2 + (plan.d if plan.adds else 0)) + tiles * 4)
    return lines + 4 * split_of(problem, sms).floats(plan.d)
