"""Four roofs over one attention: matrix units, exponentials, on-chip traffic, device memory.

Each unit gets its work from sizes, tiles and the share of pairs that is visited; its time is work over rate. If all
overlap perfectly, the slowest is the time, and no kernel with these tiles is faster: the prediction is a floor. If
nothing overlaps, it is their sum. What FlashAttention-3 and -4 gain lies between the two, at the same traffic.

    matrix units     2 (D + D_v) FLOP a pair forward, 5 (D + D_v) backward
    exponentials     one a pair
    on-chip traffic  a step of b_q x b_k reads its operands once from the tile memory: forward q, k and v (the weights
                     stay where they were made); backward twice q, k and do, and v, and ds three times (written
                     once, read twice). Where scores lie in a cache, four passes of float32 more
    device memory    the tiled traffic of the I/O model behind the shared cache (`device_bytes`)

Sources: Williams, Waterman and Patterson 2009, "Roofline", https://doi.org/10.1145/1498765.1498785; shared memory and
exponentials as roofs of their own: Zadouri et al. 2026, https://arxiv.org/abs/2603.05451, whose pairs of cores that
share operands are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tilewise.analysis.io_model import bytes_tiled
from tilewise.analysis.machines import Machine, Number

__all__ = ["ROOFS", "Prediction", "Shape", "Work", "device_bytes", "predict_time", "what_if", "work_of"]

ROOFS = ("matrix units", "exponentials", "on-chip traffic", "device memory")


class Shape(NamedTuple):
    """What is priced: sizes of the whole call, its tiles, and the pairs of all heads that are visited.

    key_rows: rows of K that the query tiles of all heads read, as the mask leaves them. Grouped heads are folded:
    pass H_kv heads of G * N_q rows. heads_abreast: heads (KV heads) whose tiles run side by side, at least.
    """

    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    pairs: int
    key_rows: int
    itemsize: int
    dtype: str
    backward: bool = False
    heads_abreast: int = 1


class Work(NamedTuple):
    """Work of the four units: FLOP, exponentials, bytes on the chip, bytes of device memory."""

    matrix: float
    exponentials: float
    on_chip: float
    memory: float


class Prediction(NamedTuple):
    """Seconds of each roof, None where the machine's number is unknown. bound: the slowest known roof.

    seconds: as if all overlapped, a floor. seconds_apart: as if nothing did. unknown: roofs left out.
    """

    roofs: tuple[float | None, ...]
    bound: str
    seconds: float
    seconds_apart: float
    unknown: tuple[str, ...]


def work_of(shape: Shape, machine: Machine) -> Work:
    """The work of a call on the four units of a machine."""
    d, dv, size = shape.head_dim, shape.head_dim_v, shape.itemsize
    steps = shape.pairs / max(shape.block_q * shape.block_k, 1)
    rows, columns, scores = shape.block_q * size, shape.block_k * size, shape.block_q * shape.block_k
    if shape.backward:
        step = 2 * rows * (d + dv) + columns * (2 * d + dv) + 3 * scores * size
    else:
        step = rows * d + columns * (d + dv)
    step += machine.score_passes * scores * 4 * (2 if shape.backward else 1)
    flops = shape.pairs * (d + dv) * (5 if shape.backward else 2)
    return Work(flops, shape.pairs, steps * step, device_bytes(shape, machine))


def device_bytes(shape: Shape, machine: Machine) -> float:
    """Bytes of device memory of a call: what must move once, and keys again where a shared cache does not hold them.

    Tiles in flight, as many a worker as fit its memory, run side by side over the keys of some heads. If those keys
    fill no more than half of the cache that all workers share, they are read once a head; else once for each
    generation of tiles, which read them at about the same time. Keys beyond the whole cache are priced alike, too low:
    tiles drift apart there. Without such a cache every tile reads its own keys.

    Backward: as FlashAttention-2's second pass, queries streamed past key tiles.

    Source: counters of an H200, docs/io-model.md; the cache keeps two copies of what all workers read.
    """
    d, dv, size = shape.head_dim, shape.head_dim_v, shape.itemsize
    if not shape.backward:
        key_rows = _streamed(shape, machine, (shape.seqlen_q, shape.block_q), shape.seqlen_k, shape.key_rows)
        return bytes_tiled(
            batch=1, num_heads_q=1, seqlen_q=shape.heads * shape.seqlen_q, seqlen_k=1, head_dim=d, head_dim_v=dv,
            itemsize=size, block_q=max(shape.block_q, 1), key_rows_read=key_rows,
        )  # fmt: skip
    # A pass for delta; q and do past key tiles, with dq in float32 read and written.
    every = int(shape.pairs / max(shape.block_k, 1))
    query_rows = _streamed(shape, machine, (shape.seqlen_k, shape.block_k), shape.seqlen_q, every)
    queries = query_rows * ((d + dv) * size + 8 + 2 * 4 * d)
    keys = 2 * shape.heads * shape.seqlen_k * (d + dv) * size
    return shape.heads * shape.seqlen_q * (2 * dv * size + 4) + queries + keys


def _streamed(shape: Shape, machine: Machine, tiled: tuple[int, int], streamed: int, every: int) -> int:
    """Rows that come from memory where tiles of `tiled` (rows of a head, of a tile) have `streamed` rows of the other
    side pass by; every: all rows that all tiles read."""
    once = min(shape.heads * streamed, every)
    if machine.cache_bytes is None:
        return every
    length, block = tiled
    in_flight = machine.workers * _tiles_a_worker(shape, machine) * block
    abreast = min(shape.heads_abreast, shape.heads)
    together = min(max(abreast, -(-in_flight // max(length, 1))), shape.heads)
    working = together * streamed * (shape.head_dim + shape.head_dim_v) * shape.itemsize
    if 2 * working <= machine.cache_bytes.value:
        return once
    # A generation takes in_flight of the rows of the heads that run abreast.
    return max(once, int(every / -(-length // block) * length * abreast / in_flight))


def _tiles_a_worker(shape: Shape, machine: Machine) -> int:
    """Tiles that share a worker: q's and two stages of k's and v's must fit its memory. A core has one."""
    if machine.device == "cpu":
        return 1
    width = shape.head_dim + shape.head_dim_v
    tile = (shape.block_q * shape.head_dim + 2 * shape.block_k * width) * shape.itemsize
    return max(1, int(machine.tile_bytes.value // max(tile, 1)))


def predict_time(work: Work, dtype: str, machine: Machine) -> Prediction:
    """The roofs' times and what bounds. dtype: the element type of the products."""
    rates = (machine.rate(dtype), machine.exponentials, machine.on_chip, machine.memory)
    times = tuple(
        None if rate is None else amount / rate.value for amount, rate in zip(work, rates, strict=True)
    )
    known = [(seconds, name) for seconds, name in zip(times, ROOFS, strict=True) if seconds is not None]
    seconds, bound = max(known)
    missing = tuple(name for name, value in zip(ROOFS, times, strict=True) if value is None)
    return Prediction(times, bound, seconds, sum(value for value, _ in known), missing)


class WhatIf(NamedTuple):
    """One change, and the prediction that it leads to."""

    change: str
    prediction: Prediction


def _scaled(number: Number | None, factor: float) -> Number | None:
    return (
        None
        if number is None
        else Number(number.value * factor, f"{factor:g} times: {number.source}", "derived")
    )


def what_if(shape: Shape, machine: Machine) -> list[WhatIf]:
    """Three changes, one at a time: twice the tile memory, half the exponentials, products in FP8.

    Twice the tile memory takes tiles of twice as many queries. Half the exponentials stands for computing half of
    them on the multiply-add units, whose load is not counted. FP8 halves the bytes of the inputs and takes the FP8
    rate, where the machine has one.
    """
    wider = shape._replace(
        block_q=min(2 * shape.block_q, max(shape.seqlen_q, 1)), key_rows=max(shape.key_rows // 2, 1)
    )
    faster = machine.with_changes(exponentials=_scaled(machine.exponentials, 2.0))
    changes: list[tuple[str, Callable[[], Prediction]]] = [
        ("twice the tile memory", lambda: predict_time(work_of(wider, machine), shape.dtype, machine)),
        ("half the exponentials", lambda: predict_time(work_of(shape, faster), shape.dtype, faster)),
    ]
    if machine.rate("float8") is not None and shape.itemsize == 2:
        small = shape._replace(itemsize=1, dtype="float8")
        changes.append(("FP8", lambda: predict_time(work_of(small, machine), "float8", machine)))
    return [WhatIf(name, make()) for name, make in changes]
