"""Tile sizes, warps and stages of the backward kernels: a device's measured table first, else what fits.

key kernel: block_n keys are owned, block_m rows are walked; row kernel: the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise import tuning
from tilewise.backends.triton.holes import mask_kind, split_holes
from tilewise.backends.triton.tiles import Tiles, keys_per_sequence, padded, rows_per_sequence
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.backends.triton.machine import Machine
    from tilewise.problem import Problem


UNPIPELINED = 32
"""Rows of a product whose tiles are not loaded ahead: from 64 rows on Triton 3.6 takes Hopper's warp group
instructions, and gives wrong results or faults for some widths where loads are not pipelined (measured on an H200)."""


class BackwardTiles(NamedTuple):
    """A choice for each kernel; careful: those of the second look; registers: the most that a thread of the key kernel
    has, 0 for no bound; split: whether PARTIAL and FULL tiles that are loaded ahead have loops of their own; apart: the
    key kernel's where dk and dv are launches of their own, for calls that load ahead."""

    keys: Tiles
    rows: Tiles
    prepare: Tiles
    careful: Tiles
    swizzle: int
    registers: int = 0
    split: bool = False
    apart: tuple[Tiles, Tiles] | None = None

    def key_parts(self, ahead: bool) -> tuple[tuple[str, Tiles], ...]:
        """The launches of the key kernel and their tiles: "both", or "dk" and "dv", and at last "careful", the second
        look. ahead: whether tiles are loaded ahead."""
        if ahead and self.apart is not None:
            return ("dk", self.apart[0]), ("dv", self.apart[1]), ("careful", self.careful)
        return ("both", self.keys), ("careful", self.careful)


WIDEST_SPLIT = 64
"""Head dimension up to which PARTIAL and FULL tiles that are loaded ahead have loops of their own, unless runs of tiles
are short: one loop, in which FULL tiles jump over the mask, is little more than half the code and suits short runs, and
wider heads, which lack the registers for two; but its FULL tiles wait for both products at the jump."""


def is_narrowed(problem: Problem) -> bool:
    """Whether the mask reads numbers of the call or leaves."""
    keep = problem.spec.keep
    if keep is None:
        return False
    ends = split_holes(keep)[0]
    return any(n.op in ("int_scalar", "float_scalar", "load") for n in ex.topological(ends))


def table_keys(problem: Problem) -> tuple[str, ...]:
    """What a measured choice depends on, as keys of a tuning table; the first that the table has decides.

    A mask that reads numbers of the call or leaves, as windows and documents do, is "narrowed": a tile of rows sees
    fewer keys than under one of positions alone, as a rule, so that short runs of tiles have to be quick. One
    with "holes" asks for work in every tile.
    """
    s = problem.shape
    bits = 8 * problem.dtype.itemsize
    kinds = ["full"] if problem.spec.keep is None else ["masked"]
    if mask_kind(problem.spec.keep) == 2:
        kinds.insert(0, "holes")
    if is_narrowed(problem):
        kinds.insert(0, "narrowed")
    terms = "-terms" if problem.spec.score is not None else ""
    dropout = "-dropout" if problem.spec.dropout else ""
    sizes = f"{bits}-d{padded(s.head_dim)}-{padded(s.head_dim_v)}"
    return tuple(f"{sizes}-{kind}{terms}{dropout}" for kind in kinds)


def _measured(problem: Problem, machine: Machine, kernel: str) -> tuple[int, ...] | None:
    for key in table_keys(problem):
        found = tuning.lookup(machine.name, kernel, key)
        if found is not None:
            return found
    return None


def choose_backward(problem: Problem, machine: Machine) -> BackwardTiles:
    """Tiles of the three kernels."""
    d, dv = padded(problem.shape.head_dim), padded(problem.shape.head_dim_v)
    widest = max(d, dv)
    if problem.dtype == torch.float32:
        size = 16 if widest > 128 else 32
        keys = rows = Tiles(size, size, 8 if widest > 256 else 4, 1)
    else:
        keys, rows = _key_tiles(widest, machine), _row_tiles(widest, machine)
    found_keys, found_rows = (_measured(problem, machine, f"triton.{kernel}") for kernel in ("keys", "rows"))
    swizzle = _measured(problem, machine, "triton.swizzle")
    registers = _measured(problem, machine, "triton.registers")
    keys = Tiles(*found_keys) if found_keys else _shorten(problem, keys)
    rows = Tiles(*found_rows) if found_rows else _shorten(problem, rows)
    small = 16 if problem.dtype == torch.float32 and widest > 128 else UNPIPELINED
    return BackwardTiles(
        fit_keys(keys, d, dv, problem.dtype.itemsize, machine),
        fit_rows(rows, d, dv, problem.dtype.itemsize, machine),
        fit_rows(Tiles(small, small, 4, 1), d, dv, problem.dtype.itemsize, machine),
        fit_keys(
            Tiles(small, small, 8 if widest > 256 else 4, 1),
            d,
            dv,
            problem.dtype.itemsize,
            machine,
        ),
        swizzle[0] if swizzle else (4 if problem.spec.keep is not None else 1),
        registers[0] if registers else 0,
        widest <= WIDEST_SPLIT and not is_narrowed(problem),
        _apart(problem, d, dv, machine),
    )


def _apart(problem: Problem, d: int, dv: int, machine: Machine) -> tuple[Tiles, Tiles] | None:
    """Tiles for dk and for dv alone, where a device's table has both: eight products for seven, but of tiles that half
    of the sums leave room for."""
    found = [_measured(problem, machine, f"triton.{part}") for part in ("dk", "dv")]
    if found[0] is None or found[1] is None:
        return None
    size = problem.dtype.itemsize
    return fit_keys(Tiles(*found[0]), d, dv, size, machine), fit_values(
        Tiles(*found[1]), d, dv, size, machine
    )


def _key_tiles(widest: int, machine: Machine) -> Tiles:
    """float16 and bfloat16: registers bound the choice, dk and dv are block_n x (D + DV) float32."""
    if widest > 256:
        return Tiles(32, 32, 8, 1)
    if machine.arch < 80 and machine.kind == "cuda":  # products run on the ordinary units
        return Tiles(32, 32, 4, 1)
    if widest > 128:
        return Tiles(32, 64, 8, 2)
    if machine.arch >= 90:
        return Tiles(64, 128, 8, 2)
    return Tiles(32, 64, 4, 2) if widest > 64 else Tiles(32, 128, 4, 2)


def _row_tiles(widest: int, machine: Machine) -> Tiles:
    """float16 and bfloat16: dq is block_m x D float32."""
    if widest > 256:
        return Tiles(32, 32, 8, 1)
    if machine.arch < 80 and machine.kind == "cuda":
        return Tiles(32, 32, 4, 1)
    if machine.arch >= 100:  # Triton 3.6 fails to compile 64 rows and more for Blackwell (D = 64, no mask)
        return Tiles(32, 64, 4, 2)
    if widest > 128:
        return Tiles(64, 32, 4, 2)
    if machine.arch >= 90:
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 32, 4, 2) if widest > 64 else Tiles(64, 64, 4, 2)


def _shorten(problem: Problem, tiles: Tiles) -> Tiles:
    """No tile much longer than the sequences are; under batch_invariant lengths have no say."""
    if problem.options.batch_invariant:
        return tiles
    rows, keys = (max(16, 1 << max(n - 1, 0).bit_length()) for n in
                  (rows_per_sequence(problem), keys_per_sequence(problem)))  # fmt: skip
    return tiles._replace(block_m=min(tiles.block_m, rows), block_n=min(tiles.block_n, keys))


def fit_keys(tiles: Tiles, d: int, dv: int, itemsize: int, machine: Machine) -> Tiles:
    """The key kernel's tiles, made smaller until they fit: k, v, `stages` of q and do, and a tile of ds."""

    def size(t: Tiles) -> int:
        return itemsize * ((t.block_n + max(t.stages, 1) * t.block_m) * (d + dv) + t.block_m * t.block_n)

    return _fit(tiles, size, machine.shared)


def fit_values(tiles: Tiles, d: int, dv: int, itemsize: int, machine: Machine) -> Tiles:
    """The key kernel's tiles where it makes dv alone: k and `stages` of q and do."""

    def size(t: Tiles) -> int:
        return itemsize * (t.block_n * d + max(t.stages, 1) * t.block_m * (d + dv) + t.block_m * t.block_n)

    return _fit(tiles, size, machine.shared)


def fit_rows(tiles: Tiles, d: int, dv: int, itemsize: int, machine: Machine) -> Tiles:
    """The row kernel's tiles, made smaller until they fit: q, do, `stages` of k and v, and a tile of ds."""

    def size(t: Tiles) -> int:
        return itemsize * ((t.block_m + max(t.stages, 1) * t.block_n) * (d + dv) + t.block_m * t.block_n)

    return _fit(tiles, size, machine.shared)


def _fit(tiles: Tiles, size, most: int) -> Tiles:
    while size(tiles) > most:
        if tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        elif max(tiles.block_m, tiles.block_n) > 32:
            wide = tiles.block_m > tiles.block_n
            tiles = (
                tiles._replace(block_m=tiles.block_m // 2)
                if wide
                else tiles._replace(block_n=tiles.block_n // 2)
            )
        elif tiles.stages > 1:
            tiles = tiles._replace(stages=1)
        elif max(tiles.block_m, tiles.block_n) > 16:
            wide = tiles.block_m > tiles.block_n
            tiles = (
                tiles._replace(block_m=tiles.block_m // 2)
                if wide
                else tiles._replace(block_n=tiles.block_n // 2)
            )
        else:
            break
    return tiles


def narrow(tiles: BackwardTiles) -> BackwardTiles:
    """The same for rows of which no 16 bytes can be loaded at once, so that nothing is loaded ahead."""
    keys, rows = tiles.keys, tiles.rows
    return tiles._replace(
        registers=0,
        keys=keys._replace(block_n=min(keys.block_n, UNPIPELINED), stages=1),
        rows=rows._replace(block_m=min(rows.block_m, UNPIPELINED), stages=1),
    )


MOST_ROWS = 128
"""Of a tile of the key kernel; where it loads ahead, each head's statistics fill as many."""


def workspace_bytes(problem: Problem) -> int:
    """Memory of a backward pass beside its results, at most: four numbers of every row, a mark for each head, and where
    the tiles that a mask leaves visible begin and end (32 bytes for each tile of 32 rows or keys).

    What leaves need comes on top: a float32 copy of a leaf's gradient, and a number per head and row or column.
    """
    s = problem.shape
    batch = 1 if problem.options.layout == "varlen" else s.batch
    rows = -(-s.seqlen_q // MOST_ROWS) * MOST_ROWS
    found = 4 * (4 * batch * s.num_heads_q * rows + s.batch * s.num_heads_q + 1)
    keep = problem.spec.keep
    if keep is not None:
        apart = s.num_heads_q if ex.variables(keep) & {"h", "g"} else 1
        found += (s.seqlen_q + s.seqlen_k + 64 * (s.batch + 1)) * batch * apart
    return found
