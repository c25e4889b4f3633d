"""What a call wants of a thread's registers, as a key: calls with the same key get the same tiles.

Tiles are chosen by a few rules (`tiles.by_kind`). Where a kernel spills with those, the tiles that it does not spill
with are kept in a table by this key (`tilewise.tuning`, "registers_sm90"), so that a call of such a kind compiles once;
`benchmarks/hopper_kinds.py` compiles kinds without a GPU and writes it. A kind that the table lacks is found out by
the call itself (`roomier`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tilewise import tuning
from tilewise.backends.hopper.algebra import COLUMNS, along_row, mask_of, score_of
from tilewise.backends.hopper.print_fold import stripes_of
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.spec.attention import AttentionSpec
    from tilewise.spec.expression import Node

TABLE = "registers_sm90"
FUNCTIONS = ("tanh", "exp2", "log2")


@functools.lru_cache(maxsize=1024)
def key_of(spec: AttentionSpec, pair: tuple[int, int], varlen: bool, packed: bool) -> str:
    """The key of a spec, whose divisors are literals where the kernel has them so. varlen: packed sequences; packed:
    rows of a tile are those of several heads.

    Counted are the mask's lines and what each of them reads, its stripes, operations and reads of the rest, and
    operations, functions and reads of a score: those for each column or pair, and those for a row.
    """
    form = " ".join((*(("sequences",) if varlen else ()), *(("heads",) if packed else ()))) or "dense"
    return f"{pair[0]}x{pair[1]} {form}: {_mask(spec)}; {_score(spec)}"


def known(spec: AttentionSpec, pair: tuple[int, int], varlen: bool, packed: bool) -> tuple[int, ...] | None:
    """The numbers of the tiles that the table has for a kind; None where it has none, or the first ones are right."""
    return tuning.lookup(TABLE, "hopper.forward", key_of(spec, pair, varlen, packed))


def _mask(spec: AttentionSpec) -> str:
    mask = mask_of(spec.keep)
    if spec.keep is None:
        return "full"
    stripes, rest = stripes_of(mask)
    lines = [f"{len(mask.lines)} lines" + (" from below" if mask.below else "")] if mask.lines else []
    lines += [f"{len(ex.loads(*mask.runs))} reads in them"] if mask.runs and ex.loads(*mask.runs) else []
    more = [f"{len(stripes)} stripes"] if stripes else []
    return ", ".join(lines + more + ([_costs(rest)] if rest is not None else []))


def _score(spec: AttentionSpec) -> str:
    if spec.score is None:
        return "plain"
    score = score_of(spec.score, spec.keep)
    shape = "capped" if score.slope is not None else "bounded" if score.bounded else "score"
    of_row = [n for n in (score.rate, score.shift) if n is not None]
    rows = [f"{len(ex.loads(*of_row))} reads of its own"] if of_row and ex.loads(*of_row) else []
    rest = ["sum"] if score.rest is not None else []
    return " ".join(
        [shape, *rest, ", ".join([_costs(*(n for n in (score.core, score.rest) if n is not None)), *rows])]
    )


def _costs(*roots: Node) -> str:
    """What is done for each column or pair, and what is read for a row."""
    nodes = {n for root in roots for n in ex.topological(root)}
    each = [n for n in nodes if n.args and ex.variables(n) & (COLUMNS | {"raw"})]
    reads = [n for n in nodes if n.op == "load"]
    found = {
        "operations": sum(n.op not in ("load", *FUNCTIONS) for n in each),
        "functions": sum(n.op in FUNCTIONS for n in each),
        "reads": sum(not along_row(n) for n in reads),
        "reads of rows": sum(along_row(n) for n in reads),
    }
    return " ".join(f"{count} {name}" for name, count in found.items() if count) or "nothing more"
