"""What a call wants of a thread's registers, as a key: calls with the same key get the same tiles.

Tiles are chosen by a few rules (`tiles.by_kind`). Where a kernel spills with those, the tiles that it does not spill
with are kept in a table by this key (`registers.json`), so that a call of such a kind compiles once;
`benchmarks/hopper_kinds.py` compiles kinds without a GPU and writes it. A kind that the table lacks is found out by
the call itself (`roomier`).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tilewise.backends.hopper.algebra import COLUMNS, along_row, mask_of, score_of
from tilewise.backends.hopper.print_fold import stripes_of
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.spec.attention import AttentionSpec
    from tilewise.spec.expression import Node

TABLE = Path(__file__).with_name("registers.json")
FUNCTIONS = ("tanh", "exp2", "log2")


class Form(NamedTuple):
    """How the tensors of a call lie, as far as its kernel differs.

    varlen: packed sequences. heads: rows of a tile are those of several heads. parts: out is written row by row in
    float32, for splits or for a partial result. half: float16.
    """

    varlen: bool = False
    heads: bool = False
    parts: bool = False
    half: bool = False

    @property
    def words(self) -> str:
        names = {"sequences": self.varlen, "heads": self.heads, "parts": self.parts, "float16": self.half}
        return " ".join(name for name, there in names.items() if there) or "dense"


@functools.lru_cache(maxsize=1024)
def key_of(spec: AttentionSpec, pair: tuple[int, int], form: Form) -> str:
    """The key of a spec, whose divisors are literals where the kernel has them so.

    Counted are the mask's lines and what each of them reads, its stripes, operations and reads of the rest, and
    operations, functions and reads of a score: those for each column or pair, and those for a row.
    """
    return f"{pair[0]}x{pair[1]} {form.words}: {_mask(spec)}; {_score(spec)}"


@functools.lru_cache(maxsize=1)
def table() -> dict[str, tuple[int, ...]]:
    """The numbers of the tiles that kinds do not spill with, by key."""
    choices = json.loads(TABLE.read_text(encoding="utf-8"))["choices"]
    return {key: tuple(numbers) for key, numbers in choices.items()}


def known(spec: AttentionSpec, pair: tuple[int, int], form: Form) -> tuple[int, ...] | None:
    """The numbers of the tiles that the table has for a kind; None where it has none, or the first ones are right.

    A form with float16 or in parts has entries of its own only where it does not do with those of the form without.
    """
    halves, parts = dict.fromkeys((form.half, False)), dict.fromkeys((form.parts, False))
    forms = [form._replace(half=half, parts=part) for half in halves for part in parts]
    return next((table()[key] for one in forms if (key := key_of(spec, pair, one)) in table()), None)


def _mask(spec: AttentionSpec) -> str:
    if spec.keep is None:
        return "full"
    mask = mask_of(spec.keep)
    stripes, rest = stripes_of(mask)
    read = ex.loads(*mask.runs) if mask.runs else ()
    found = {
        f"{len(mask.lines)} lines" + (" from below" if mask.below else ""): mask.lines,
        f"{len(read)} reads in them": read,
        f"{len(stripes)} stripes": stripes,
    }
    words = [word for word, there in found.items() if there]
    return ", ".join(words if rest is None else [*words, _costs(rest)])


def _score(spec: AttentionSpec) -> str:
    if spec.score is None:
        return "plain"
    score = score_of(spec.score, spec.keep)
    shape = "capped" if score.slope is not None else "bounded" if score.bounded else "score"
    each = [n for n in (score.core, score.rest) if n is not None]
    of_row = [n for n in (score.rate, score.shift) if n is not None]
    read = ex.loads(*of_row) if of_row else ()
    words = [shape, *(["sum"] if score.rest is not None else []), _costs(*each)]
    return " ".join(words) + (f", {len(read)} reads of its own" if read else "")


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
