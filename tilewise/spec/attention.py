"""AttentionSpec: what is computed, without any tensor.

Its text is the canonical form: cache key, argument of the ops and pickle. `AttentionSpec.parse(text)` gives
an equal spec in any process.

    tilewise/1|mask=MASK|scores=ATOM+ATOM|sink|dropout
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tilewise.errors import SpecError
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from tilewise.spec.masks import Mask
    from tilewise.spec.scores import ScoreTerm

VERSION = "tilewise/1"


class LeafType(NamedTuple):
    """A leaf as the kernels see it: kind "float", "int" or "bool", and its number of dimensions."""

    kind: str
    ndim: int


_UP_TO_ROW = ex.apply("le", ex.variable("k"), ex.variable("q"))
"""Nodes are interned: equal trees are one object."""


@dataclass(frozen=True)
class AttentionSpec:
    """The masked, biased, dropped-out softmax attention that a call asks for.

    `keep` is the visibility (None: every pair), `score` the new score as a function of s (None: s itself);
    both read the same leaves and scalar slots.
    """

    text: str
    keep: ex.Node | None
    score: ex.Node | None
    leaves: tuple[LeafType, ...]
    num_ints: int
    num_floats: int
    sink: bool
    dropout: bool
    names: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> AttentionSpec:
        """Rebuild a spec from its text.  Raises SpecError."""
        return _parse(text)

    def __reduce__(self) -> tuple[object, ...]:
        return AttentionSpec.parse, (self.text,)

    @property
    def hides_later_keys_alone(self) -> bool:
        """Whether the mask is `k <= q` and nothing else, whatever it is called."""
        return self.keep is _UP_TO_ROW

    @property
    def variables(self) -> frozenset[str]:
        """Variables that the mask or the score reads."""
        return ex.variables(self.keep) | ex.variables(self.score)


def spec_text(mask: Mask, scores: tuple[ScoreTerm, ...], sink: bool, dropout: bool) -> str:
    """Canonical text of a call's spec."""
    term = mask.term
    folded = "+".join([s.term.text for s in scores])
    parts = [VERSION, f"mask={term.text if term else ''}", f"scores={folded}"]
    if sink:
        parts.append("sink")
    if dropout:
        parts.append("dropout")
    return "|".join(parts)


_ATOM = re.compile(r"(\w+)\[([\w,]*);(\d+);(\d+)\]\{([^}]*)\}")


class _Reader:
    """Recursive descent over the text of masks and scores, numbering slots in the order of the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.leaves: list[LeafType] = []
        self.ints = 0
        self.floats = 0
        self.names: list[str] = []

    def take(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) * found
        return found

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise SpecError(f"expected {token!r} at {self.text[self.at : self.at + 40]!r}")

    def atom(self) -> ex.Node:
        match = _ATOM.match(self.text, self.at)
        if match is None:
            raise SpecError(f"expected an atom at {self.text[self.at : self.at + 40]!r}")
        self.at = match.end()
        name, kinds, ints, floats, statements = match.groups()
        types = []
        for kind in filter(None, kinds.split(",")):
            found = re.fullmatch(r"(float|int|bool)(\d+)", kind)
            if found is None:
                raise SpecError(f"not a leaf type: {kind!r}")
            types.append(LeafType(found[1], int(found[2])))
        root = ex.parse(statements, {n: t.kind for n, t in enumerate(types)})
        _check_slots(root, types, int(ints), int(floats))
        root = _shift(root, len(self.leaves), self.ints, self.floats)
        self.leaves += types
        self.ints += int(ints)
        self.floats += int(floats)
        self.names.append(name)
        return root

    def mask(self) -> ex.Node:
        if self.take("~"):
            return ex.apply("not", self.mask())
        if not self.take("("):
            keep = self.atom()
            if keep.type != "bool" or "s" in ex.variables(keep):
                raise SpecError(f"a mask is a condition that does not read s: {keep!r}")
            return keep
        left = self.mask()
        op = "and" if self.take(" & ") else "or"
        if op == "or":
            self.expect(" | ")
        right = self.mask()
        self.expect(")")
        return ex.apply(op, left, right)


def _check_slots(root: ex.Node, leaves: list[LeafType], num_ints: int, num_floats: int) -> None:
    """Raises SpecError if the atom reads what it does not declare, or a leaf with too few or many indices."""
    for node in ex.topological(root):
        if node.op == "load":
            fits = len(node.args) == leaves[int(node.value)].ndim  # type: ignore[arg-type]
        elif node.op in ("int_scalar", "float_scalar"):
            fits = int(node.value) < (num_ints if node.op == "int_scalar" else num_floats)  # type: ignore[arg-type]
        else:
            continue
        if not fits:
            raise SpecError(f"an atom reads what it does not declare: {node!r}")


def _shift(root: ex.Node, leaves: int, ints: int, floats: int) -> ex.Node:
    """Renumber an atom's own slots into the spec's."""
    new: dict[ex.Node, ex.Node] = {}
    for node in ex.topological(root):
        args = tuple(new[a] for a in node.args)
        if node.op == "load":
            new[node] = ex.load(int(node.value) + leaves, node.type, args)  # type: ignore[arg-type]
        elif node.op == "int_scalar":
            new[node] = ex.int_scalar(int(node.value) + ints)  # type: ignore[arg-type]
        elif node.op == "float_scalar":
            new[node] = ex.float_scalar(int(node.value) + floats)  # type: ignore[arg-type]
        else:
            new[node] = ex.rebuild(node, args) if args else node
    return new[root]


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> AttentionSpec:
    version, _, rest = text.partition("|mask=")
    if version != VERSION or "|scores=" not in rest:
        raise SpecError(f"not a spec of this version ({VERSION}): {text[:60]!r}")
    mask_text, _, rest = rest.rpartition("|scores=")
    scores_text, *flags = rest.split("|")
    reader = _Reader(mask_text)
    try:
        keep = reader.mask() if mask_text else None
    except RecursionError:
        raise SpecError(
            "the mask's formula is nested too deeply to be read\n"
            "Write long rows of & and | as one tilewise.custom function, or as a tensor."
        ) from None
    if reader.at != len(mask_text):
        raise SpecError(f"trailing text in the mask: {mask_text[reader.at :]!r}")
    score: ex.Node | None = None
    reader.text, reader.at = scores_text, 0
    while reader.at < len(scores_text):
        if score is not None:
            reader.expect("+")
        value = ex.cast(reader.atom(), "float")
        score = value if score is None else ex.substitute(value, {ex.variable("s"): score})
    if not set(flags) <= {"sink", "dropout"}:
        raise SpecError(f"unknown flags in a spec: {flags}")
    if keep is not None and keep.op == "const" and keep.value:
        keep = None
    return AttentionSpec(
        text, keep, score, tuple(reader.leaves), reader.ints, reader.floats,
        "sink" in flags, "dropout" in flags, tuple(reader.names),
    )  # fmt: skip
