"""Random typed expression trees, random small calls to evaluate them in, and an interpreter in plain Python.

The interpreter is the independent statement of the arithmetic: one pair at a time, Python integers wrapped to
int32, Python floats (float64), the math module. Nothing in it comes from the library but the tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tilewise.spec import expression as ex
from tilewise.spec.print_torch import Env, compile_torch
from tilewise.spec.tiles import TileGrid

LEAF_KINDS = {0: "float", 1: "int", 2: "bool", 3: "float", 4: "float"}
LEAF_SHAPES = {0: (5,), 1: (4,), 2: (3, 6), 3: (2, 1, 6, 5), 4: ()}
NUM_INTS, NUM_FLOATS = 2, 2
FUNCTIONS = ("tanh", "exp2", "log2")


# ---- one pair, in plain Python -----------------------------------------------------------------------------


def wrap(x: int) -> int:
    """An integer as int32 keeps it."""
    return (x + 2**31) % 2**32 - 2**31


def divide(a: float, b: float) -> float:
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a) or math.isnan(b):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def floor(x: float) -> float:
    return math.copysign(float(math.floor(x)), x) if math.isfinite(x) else x


def exp2(x: float) -> float:
    try:
        return 2.0**x
    except OverflowError:
        return math.inf


def log2(x: float) -> float:
    if x == 0:
        return -math.inf
    return math.nan if math.isnan(x) or x < 0 else math.log2(x)


def first_nan(a: float, b: float, pick):
    """minimum and maximum give NaN as soon as one side is NaN."""
    return math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)


INT_RULES = {
    "neg": lambda a: wrap(-a),
    "abs": lambda a: wrap(abs(a)),
    "add": lambda a, b: wrap(a + b),
    "sub": lambda a, b: wrap(a - b),
    "mul": lambda a, b: wrap(a * b),
    "floordiv": lambda a, b: wrap(a // b) if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "min": min,
    "max": max,
}
FLOAT_RULES = {
    "neg": lambda a: -a,
    "abs": abs,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": divide,
    "floordiv": lambda a, b: floor(divide(a, b)),
    "mod": lambda a, b: a - floor(divide(a, b)) * b,
    "min": lambda a, b: first_nan(a, b, min),
    "max": lambda a, b: first_nan(a, b, max),
    "tanh": math.tanh,
    "exp2": exp2,
    "log2": log2,
}
SHARED_RULES = {
    "to_int": int,
    "to_float": float,
    "not": lambda a: not a,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "where": lambda c, a, b: a if c else b,
}


def element(leaf: torch.Tensor, index: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the element that a load reads: the nearest one inside."""
    return tuple(min(max(x, 0), size - 1) for x, size in zip(index, leaf.shape, strict=True))


def value_at(root, point: dict, leaves=(), ints=(), floats=()):
    """The tree's value where the variables have the values in `point`."""
    return values_at(root, point, leaves, ints, floats)[root]


def values_at(root, point: dict, leaves=(), ints=(), floats=()) -> dict:
    """The value of every node of the tree."""
    known = {}
    for node in ex.topological(root):
        args = tuple(known[a] for a in node.args)
        if node.op == "const":
            known[node] = node.value
        elif node.op == "var":
            known[node] = point[node.value]
        elif node.op == "int_scalar":
            known[node] = ints[node.value]
        elif node.op == "float_scalar":
            known[node] = floats[node.value]
        elif node.op == "load":
            known[node] = leaves[node.value][element(leaves[node.value], args)].item()
        else:
            rules = INT_RULES if node.type == "int" else FLOAT_RULES
            known[node] = (rules.get(node.op) or SHARED_RULES[node.op])(*args)
    return known


# ---- trees -------------------------------------------------------------------------------------------------

int_literals = st.one_of(st.integers(-4, 6), st.sampled_from([2**31 - 1, -(2**31), 46341, -65536, 2**24 + 1]))
float_literals = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, -3.25, 0.1, 100.0, 3e38, 1e39, 1e-39, math.inf])
TINY = torch.finfo(torch.float64).tiny


@st.composite
def floats_between(draw, low, high, width=64):
    """Floats; a library may have made this thread take subnormal ones for 0, as with torch 2.5: then none of them."""
    flushed = TINY / 2 == 0.0
    return draw(st.floats(low, high, width=width, allow_subnormal=False if flushed else None))


small_floats = floats_between(-4.0, 4.0, 32)


@dataclass
class Grower:
    """Grows one tree, drawing every choice; nodes already made are reused now and then."""

    draw: object
    variables: tuple[str, ...]
    functions: bool = True
    smooth: bool = False

    def __post_init__(self):
        self.pool = {"int": [], "float": [], "bool": []}

    def grow(self, kind: str, depth: int):
        if self.pool[kind] and self.draw(st.integers(0, 5)) == 0:
            return self.draw(st.sampled_from(self.pool[kind]))
        if depth <= 0 and not (kind == "bool" and not self.smooth and self.draw(st.booleans())):
            node = self.end(kind)
        else:
            node = getattr(self, f"grow_{kind}")(depth - 1)
        self.pool[kind].append(node)
        return node

    def end(self, kind: str):
        choice = self.draw(st.integers(0, 3))
        if kind == "bool":
            sides = self.end("int"), self.end("int")
            return ex.apply(self.draw(st.sampled_from(ex.COMPARISON)), *sides)
        names = [v for v in self.variables if ex.VARIABLES[v] == kind]
        if names and choice < 2:
            return ex.variable(self.draw(st.sampled_from(names)))
        if choice == 2:
            slot = self.draw(st.integers(0, 1))
            return ex.int_scalar(slot) if kind == "int" else ex.float_scalar(slot)
        if kind == "int":
            return ex.const(self.draw(int_literals))
        return ex.const(self.draw(small_floats if self.smooth else st.one_of(float_literals, small_floats)))

    def grow_int(self, depth: int):
        op = self.draw(st.sampled_from([*INT_RULES, "where", "to_int", "bool", "load"]))
        if op == "where":
            return ex.apply(op, self.grow("bool", depth), self.grow("int", depth), self.grow("int", depth))
        if op == "bool":
            return ex.cast(self.grow("bool", depth), "int")
        if op == "load":
            return ex.load(1, "int", (self.index(depth),))
        if op == "to_int":
            # What a number beyond int32, or NaN, becomes is each backend's own affair.
            x = self.grow("float", depth)
            tame = ex.apply("lt", ex.apply("abs", x), ex.const(1000.0))
            return ex.cast(ex.apply("where", tame, x, ex.const(0.0)), "int")
        return ex.apply(op, *(self.grow("int", depth) for _ in range(ex.ARITY[op])))

    def grow_float(self, depth: int):
        rules = [op for op in FLOAT_RULES if self.functions or op not in FUNCTIONS]
        op = self.draw(st.sampled_from([*rules, "where", "to_float", "load"]))
        if op == "where":
            return ex.apply(
                op, self.grow("bool", depth), self.grow("float", depth), self.grow("float", depth)
            )
        if op == "to_float":
            return ex.cast(self.grow(self.draw(st.sampled_from(["int", "bool"])), depth), "float")
        if op == "load":
            slot = self.draw(st.sampled_from([0, 3, 4]))
            names = ("b", "h", "i", "j")
            if slot == 3 and self.draw(st.booleans()):
                return ex.load(slot, "float", tuple(ex.variable(n) for n in names))
            return ex.load(slot, "float", tuple(self.index(depth) for _ in LEAF_SHAPES[slot]))
        return ex.apply(op, *(self.grow("float", depth) for _ in range(ex.ARITY[op])))

    def grow_bool(self, depth: int):
        op = self.draw(st.sampled_from([*ex.COMPARISON, *ex.COMPARISON, "and", "or", "not", "where", "load"]))
        if op in ex.COMPARISON:
            kind = self.draw(st.sampled_from(["int", "int", "float"]))
            return ex.apply(op, self.grow(kind, depth), self.grow(kind, depth))
        if op == "load":
            return ex.load(2, "bool", (self.index(depth), self.index(depth)))
        return ex.apply(op, *(self.grow("bool", depth) for _ in range(ex.ARITY[op])))

    def index(self, depth: int):
        if self.draw(st.booleans()):
            return ex.variable(self.draw(st.sampled_from(["i", "j", "b", "h"])))
        return self.grow("int", min(depth, 1))


PAIR_VARIABLES = ("q", "k", "i", "j", "b", "h", "g")


@st.composite
def trees(draw, kind=None, depth=4, variables=PAIR_VARIABLES, functions=True, smooth=False):
    """A typed tree of at most the given depth over the leaves of `LEAF_KINDS`."""
    kind = kind or draw(st.sampled_from(["int", "float", "bool"]))
    return Grower(draw, variables, functions, smooth).grow(kind, draw(st.integers(0, depth)))


# ---- calls -------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A small call: sizes, offsets per batch entry, and the data that a tree reads."""

    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    q_offset: list[int]
    k_offset: list[int]
    leaves: list[torch.Tensor]
    ints: list[int]
    floats: list[float]

    def points(self):
        """Every pair as a dict of the variables' values."""
        for b in range(len(self.q_offset)):
            for h in range(self.num_heads_q):
                for i in range(self.seqlen_q):
                    for j in range(self.seqlen_k):
                        yield self.point(b, h, i, j)

    def point(self, b: int, h: int, i: int, j: int) -> dict:
        g = h // (self.num_heads_q // self.num_heads_kv)
        return dict(b=b, h=h, i=i, j=j, g=g, q=i + self.q_offset[b], k=j + self.k_offset[b])

    def env(self, dtype: torch.dtype, b_lo: int = 0, b_hi: int | None = None) -> Env:
        """The whole call as one tile of the torch printer, batch entries b_lo..b_hi."""
        b_hi = len(self.q_offset) - 1 if b_hi is None else b_hi

        def axis(values, dim):
            return torch.tensor(values, dtype=torch.int32).reshape([-1 if d == dim else 1 for d in range(4)])

        b, h = axis(range(b_lo, b_hi + 1), 0), axis(range(self.num_heads_q), 1)
        i, j = axis(range(self.seqlen_q), 2), axis(range(self.seqlen_k), 3)
        offsets = axis(self.q_offset[b_lo : b_hi + 1], 0), axis(self.k_offset[b_lo : b_hi + 1], 0)
        g = h // (self.num_heads_q // self.num_heads_kv)
        variables = dict(b=b, h=h, g=g, i=i, j=j, q=i + offsets[0], k=j + offsets[1])
        ranges = dict(b=(b_lo, b_hi + 1), h=(0, self.num_heads_q), i=(0, self.seqlen_q), j=(0, self.seqlen_k))
        return Env(variables, ranges, self.leaves, self.ints, self.floats, dtype)

    def values(self, root, dtype: torch.dtype, b_lo: int = 0, b_hi: int | None = None) -> torch.Tensor:
        """The torch printer's value at every pair, (B, H, N_q, N_k)."""
        env = self.env(dtype, b_lo, b_hi)
        (value,) = compile_torch((root,))(env)
        return value.expand(env.variables["b"].shape[0], self.num_heads_q, self.seqlen_q, self.seqlen_k)

    def grid(self, block_q: int, block_k: int, b_lo: int = 0, b_hi: int | None = None) -> TileGrid:
        b_hi = len(self.q_offset) - 1 if b_hi is None else b_hi
        q, k = self.q_offset[b_lo : b_hi + 1], self.k_offset[b_lo : b_hi + 1]
        return TileGrid(
            block_q, block_k, self.seqlen_q, self.seqlen_k, min(q), max(q), min(k), max(k), b_lo, b_hi,
            self.num_heads_q, self.num_heads_kv,
        )  # fmt: skip


def tile_slices(grid: TileGrid):
    """((row tile, column tile), slices into (B, H, N_q, N_k)) of every tile."""
    for r in range(grid.num_q_tiles):
        for c in range(grid.num_k_tiles):
            rows = slice(r * grid.block_q, (r + 1) * grid.block_q)
            yield (r, c), (..., rows, slice(c * grid.block_k, (c + 1) * grid.block_k))


@st.composite
def calls(draw, specials=True):
    """A call of odd sizes, with offsets of any sign; specials: NaN, infinities and denormals in leaves."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def floats(shape):
        leaf = torch.randn(shape, generator=generator) * draw(
            st.sampled_from([1.0, 4.0, 1e20 if specials else 2.0])
        )
        rough = torch.rand(shape, generator=generator)
        if specials and draw(st.booleans()):
            for n, special in enumerate((math.nan, math.inf, -math.inf, 1e-40, 0.0)):
                leaf = torch.where((rough > n * 0.05) & (rough < n * 0.05 + 0.05), special, leaf)
        return leaf

    leaves = [
        floats(LEAF_SHAPES[0]),
        torch.randint(-3, 7, LEAF_SHAPES[1], generator=generator),
        torch.rand(LEAF_SHAPES[2], generator=generator) > draw(st.sampled_from([0.0, 0.2, 0.8])),
        floats(LEAF_SHAPES[3]),
        floats(LEAF_SHAPES[4]),
    ]
    num_heads_kv = draw(st.sampled_from([1, 2]))
    batch = draw(st.integers(1, 2))
    offsets = st.lists(st.integers(-9, 9), min_size=batch, max_size=batch)
    sizes = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return Call(
        2, num_heads_kv, *sizes, draw(offsets), draw(offsets), leaves,
        draw(st.lists(int_literals, min_size=NUM_INTS, max_size=NUM_INTS)),
        draw(st.lists(small_floats, min_size=NUM_FLOATS, max_size=NUM_FLOATS)),
    )  # fmt: skip
