"""The named schedules of the literature: what each moves between slow and fast memory, predicted and counted.

`predict` prices a schedule from sizes, tiles and loop order; `count` runs it on a simulated memory of two levels,
in float64, with real tensors, and returns its answer beside what was moved. FlashAttention-3 and -4 keep the order
of -2: what they change is when things happen, not what is moved, and they run as -2 does.

Sources: the modules `schedule_*` of this package name a paper and an algorithm for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewise.analysis import schedule_flash, schedule_flash_backward, schedule_ordinary, schedule_rabe_staats
from tilewise.analysis.sizes import Sizes, Tiles, Visit
from tilewise.analysis.two_level import Traffic, TwoLevelMemory
from tilewise.errors import OptionError, message

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SCHEDULES", "Counted", "Named", "count", "count_backward", "predict", "tiles_for"]


@dataclass(frozen=True)
class Named:
    """A schedule of the literature. same_as: the one whose traffic it has; keeps_matrix: whether S is a tensor."""

    title: str
    source: str
    about: str
    same_as: str = ""
    keeps_matrix: bool = False


SCHEDULES: dict[str, Named] = {
    "ordinary": Named(
        "ordinary attention",
        "Dao et al. 2022, algorithms 0 and 3, https://arxiv.org/abs/2205.14135",
        "three kernels; the matrix is written and read twice",
        keeps_matrix=True,
    ),
    "rabe-staats": Named(
        "Rabe and Staats",
        "Rabe and Staats 2021, https://arxiv.org/abs/2112.05682",
        "chunks of sqrt(N) whatever the fast memory; a summary of each goes to the slow memory",
    ),
    "flash1": Named(
        "FlashAttention-1",
        "Dao et al. 2022, algorithms 1 and 4, https://arxiv.org/abs/2205.14135",
        "keys outer; out, m and l travel with the queries and are divided at each step",
    ),
    "flash2": Named(
        "FlashAttention-2",
        "Dao 2023, algorithms 1 and 2, https://arxiv.org/abs/2307.08691",
        "queries outer; out stays undivided on the chip and is divided once",
    ),
    "flash3": Named(
        "FlashAttention-3",
        "Shah et al. 2024, https://arxiv.org/abs/2407.08608",
        "the order and the traffic of -2; loads, products and softmax overlap, and FP8 halves the bytes",
        same_as="flash2",
    ),
    "flash4": Named(
        "FlashAttention-4",
        "Zadouri et al. 2026, https://arxiv.org/abs/2603.05451",
        "the order and the traffic of -2; part of the exponentials on the multiply-add units, pairs of cores share "
        "operands on the chip: other roofs, not other traffic",
        same_as="flash2",
    ),
}


class Counted:
    """Result of a counted run.

    Fields:
        results: tensors by name: out and lse forward, or out alone where the schedule keeps no lse; dq, dk, dv.
        traffic: elements moved. peak: most elements in the fast memory at a time. tiles: those used.
    """

    def __init__(self, memory: TwoLevelMemory, names: tuple[str, ...], tiles: Tiles) -> None:
        self.results = {name: memory.result(name) for name in names}
        self.traffic, self.peak, self.tiles = memory.traffic, memory.peak, tiles


def _order(name: str) -> str:
    """The schedule that runs for a name. Raises OptionError for an unknown one."""
    if name not in SCHEDULES:
        raise OptionError(message(f"there is no schedule {name!r}", {}, f"Known: {', '.join(SCHEDULES)}."))
    return SCHEDULES[name].same_as or name


def tiles_for(name: str, sizes: Sizes, capacity: int, backward: bool = False) -> Tiles:
    """The tiles that a schedule takes for a fast memory of `capacity` elements.

    Raises: OptionError for an unknown name, or if no tile fits.
    """
    order = _order(name)
    if order == "ordinary":
        return schedule_ordinary.tiles_for(sizes, capacity, backward)
    if order == "rabe-staats":
        return schedule_rabe_staats.tiles_for(sizes, capacity, backward)
    return schedule_flash.tiles_for(sizes, capacity, backward, keys_outer=order == "flash1")


def predict(
    name: str,
    sizes: Sizes,
    capacity: int,
    *,
    backward: bool = False,
    tiles: Tiles | None = None,
    visit: Visit | None = None,
) -> Traffic:
    """Elements that a schedule moves for one head, from sizes, tiles and loop order alone.

    Args:
        name: a key of SCHEDULES. sizes: of one head. capacity: M, elements of the fast memory.
        backward: price the backward pass alone.
        tiles: None takes `tiles_for`.
        visit: whether a tile (range of queries, range of keys) is visited; None = all. Ordinary attention and
            Rabe and Staats' skip none.

    Returns: Traffic, in elements.
    Raises: OptionError as `tiles_for`.
    """
    order, tiles = _order(name), tiles or tiles_for(name, sizes, capacity, backward)
    if order == "ordinary":
        return schedule_ordinary.predict(sizes, tiles, capacity, backward)
    if order == "rabe-staats":
        return schedule_rabe_staats.predict(sizes, tiles, capacity, backward)
    first = order == "flash1"
    if backward:
        return schedule_flash.predict_backward(sizes, tiles, capacity, visit, delta_once=not first)
    return schedule_flash.predict(sizes, tiles, capacity, visit, keys_outer=first)


def count(
    name: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    capacity: int,
    *,
    scale: float | None = None,
    tiles: Tiles | None = None,
    keep: Tensor | None = None,
) -> Counted:
    """Run a schedule forward on one head and count what it moves.

    Args:
        name: a key of SCHEDULES. capacity: M, elements of the fast memory.
        qkv: q (N_q, D), k (N_k, D), v (N_k, D_v), any float dtype; computed in float64.
        scale: default D^-1/2. tiles: default `tiles_for`. keep: bool (N_q, N_k), True = may attend.

    Returns: Counted, with out (N_q, D_v), and lse (N_q) but for ordinary attention and -1, which keeps m and l.
    Raises: OptionError as `tiles_for`, or if given tiles do not fit.
    """
    sizes, memory, scale = _start(qkv, capacity, scale)
    order, tiles = _chosen(name, sizes, capacity, tiles, False)
    if order == "ordinary":
        schedule_ordinary.run(memory, sizes, tiles, scale, keep)
        return Counted(memory, ("out",), tiles)
    if order == "rabe-staats":
        schedule_rabe_staats.run(memory, sizes, tiles, scale, keep)
        return Counted(memory, ("out", "lse"), tiles)
    run = schedule_flash.run_keys_outer if order == "flash1" else schedule_flash.run_queries_outer
    run(memory, sizes, tiles, scale, keep)
    return Counted(memory, ("out", "m", "l") if order == "flash1" else ("out", "lse"), tiles)


def count_backward(
    name: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    do: Tensor,
    capacity: int,
    *,
    scale: float | None = None,
    tiles: Tiles | None = None,
    keep: Tensor | None = None,
) -> Counted:
    """Run a schedule backward on one head and count what the backward pass alone moves.

    Args: as `count`, and do (N_q, D_v). What the forward keeps (weights, out, lse) is computed beforehand, uncounted.

    Returns: Counted, with dq, dk and dv. Raises: as `count`.
    """
    import torch

    sizes, memory, scale = _start(qkv, capacity, scale)
    order, tiles = _chosen(name, sizes, capacity, tiles, True)
    s = scale * (memory.result("q") @ memory.result("k").mT)
    s = s if keep is None else s.masked_fill(~keep, -torch.inf)
    m, l, p = schedule_flash.weights(s)  # noqa: E741
    p = p / l.masked_fill(l == 0, 1.0)[:, None]
    kept = {"s": p, "m": m, "l": l, "lse": m + torch.log(l), "out": p @ memory.result("v"), "do": do.double(),
            "dp": torch.zeros_like(s), "delta": torch.zeros_like(m)}  # fmt: skip
    for tensor, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        kept[tensor] = torch.zeros_like(memory.result(like))
    for tensor, value in kept.items():
        memory.place(tensor, value)
    if order == "ordinary":
        schedule_ordinary.run_backward(memory, sizes, tiles, scale)
    elif order == "rabe-staats":
        schedule_rabe_staats.run_backward(memory, sizes, tiles, scale, keep)
    else:
        schedule_flash_backward.run_backward(memory, sizes, tiles, scale, keep, delta_once=order == "flash2")
    return Counted(memory, ("dq", "dk", "dv"), tiles)


def _chosen(name: str, sizes: Sizes, capacity: int, tiles: Tiles | None, backward: bool) -> tuple[str, Tiles]:
    """The order that runs and its tiles. Raises OptionError for given tiles of Flash orders that do not fit."""
    order = _order(name)
    if tiles is None:
        return order, tiles_for(name, sizes, capacity, backward)
    if order in ("flash1", "flash2"):
        needed = schedule_flash.working_set(sizes, tiles, backward, keys_outer=order == "flash1")
        if needed > capacity:
            rule = f"tiles of {tiles.block_q} x {tiles.block_k} need {needed} elements, the fast memory has {capacity}"
            raise OptionError(message(rule, {}, "Leave tiles out to have them chosen."))
    return order, tiles


def _start(
    qkv: tuple[Tensor, Tensor, Tensor], capacity: int, scale: float | None
) -> tuple[Sizes, TwoLevelMemory, float]:
    """Sizes, a memory with the tensors of the forward in its slow level, and the scale."""
    import torch

    q, k, v = qkv
    sizes = Sizes(q.shape[0], k.shape[0], q.shape[1], v.shape[1])
    memory = TwoLevelMemory(capacity)
    for name, tensor in zip("qkv", qkv, strict=True):
        memory.place(name, tensor.detach().double())
    rows = torch.zeros(sizes.seqlen_q, dtype=torch.float64)
    memory.place("out", torch.zeros(sizes.seqlen_q, sizes.head_dim_v, dtype=torch.float64))
    for name in ("m", "lse"):
        memory.place(name, torch.full_like(rows, -torch.inf))
    memory.place("l", rows)
    memory.place("s", torch.zeros(sizes.seqlen_q, sizes.seqlen_k, dtype=torch.float64))
    return sizes, memory, sizes.head_dim**-0.5 if scale is None else scale
