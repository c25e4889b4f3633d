"""The expression tree printed as torch code, on a tile of shape (B, H, rows, columns).

`compile_torch` writes a Python function, one line per node, and compiles it; `source` shows it. The printed
function takes an `Env`: the tile's variables, the leaves and the run-time numbers.
"""

from __future__ import annotations

import functools
import linecache
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.errors import ShapeError, message
from tilewise.spec import expression as ex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

AXES = {"b": 0, "h": 1, "i": 2, "j": 3}
"""Tile axis along which a variable runs by itself."""


@dataclass
class Env:
    """What a printed function reads.

    variables: name to int32 (s, s_dot: float) tensor broadcastable to (B, H, rows, columns). ranges: for b, h,
    i, j the half-open range of the tile. leaves: any device tensors; None is a tangent that is zero.
    dtype: the floating type of the arithmetic, float32 or float64. visible: where given, float loads are 0 at
    pairs where it is False, so that what a leaf holds there takes no part even if torch differentiates.
    Numbers become 0-d tensors on the CPU, which join any device, whatever torch's default device is.
    """

    variables: dict[str, Tensor]
    ranges: dict[str, tuple[int, int]]
    leaves: Sequence[Tensor | None]
    ints: Sequence[int]
    floats: Sequence[float]
    dtype: torch.dtype
    visible: Tensor | None = None
    indices: dict[ex.Node, Tensor] = field(default_factory=dict)

    def int_scalar(self, slot: int) -> Tensor:
        return torch.tensor(self.ints[slot], dtype=torch.int32, device="cpu")

    def float_scalar(self, slot: int) -> Tensor:
        return torch.tensor(self.floats[slot], dtype=self.dtype, device="cpu")

    def const(self, value: float | int | bool) -> Tensor:
        kind = (
            torch.bool if isinstance(value, bool) else torch.int32 if isinstance(value, int) else self.dtype
        )
        return torch.tensor(value, dtype=kind, device="cpu")

    def to_float(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


# ---- the words -----------------------------------------------------------------------------------------------


def floordiv(a: Tensor, b: Tensor) -> Tensor:
    """a // b rounded down; an integer divided by zero is 0."""
    if a.dtype != torch.int32:
        return torch.floor(a / b)
    # -1 is taken out because INT_MIN / -1 traps on some processors, 0 because it traps on all of them.
    special = (b == 0) | (b == -1)
    quotient = torch.div(a, torch.where(special, 1, b).to(torch.int32), rounding_mode="floor")
    return torch.where(b == 0, 0, torch.where(b == -1, -a, quotient)).to(torch.int32)


def mod(a: Tensor, b: Tensor) -> Tensor:
    """a - floordiv(a, b) * b, with the sign of b; an integer modulo zero is 0."""
    if a.dtype != torch.int32:
        return a - torch.floor(a / b) * b
    special = (b == 0) | (b == -1)
    return torch.where(special, 0, torch.remainder(a, torch.where(special, 1, b))).to(torch.int32)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller value; where torch differentiates it, a tie goes to the first argument."""
    if a.requires_grad or b.requires_grad:
        return torch.where((a <= b) | torch.isnan(a), a, b)
    return torch.minimum(a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger value; where torch differentiates it, a tie goes to the first argument."""
    if a.requires_grad or b.requires_grad:
        return torch.where((a >= b) | torch.isnan(a), a, b)
    return torch.maximum(a, b)


def _direct(env: Env, leaf: Tensor, names: tuple[str, ...]) -> tuple[slice, ...] | None:
    """Slices that read the tile's own ranges, or None if an index would have to be clamped."""
    slices = []
    for size, name in zip(leaf.shape, names, strict=True):
        low, high = env.ranges[name]
        if size == 1:
            slices.append(slice(0, 1))
        elif low >= 0 and high <= size:
            slices.append(slice(low, high))
        else:
            return None
    return tuple(slices)


def _to_axes(t: Tensor, names: tuple[str, ...]) -> Tensor:
    """A leaf read along distinct variables, as a view with the tile's four axes."""
    order = sorted(range(len(names)), key=lambda d: AXES[names[d]])
    shape = [1, 1, 1, 1]
    for d in order:
        shape[AXES[names[d]]] = t.shape[d]
    view = t.permute(order)
    for axis in range(4):
        if not any(AXES[n] == axis for n in names):
            view = view.unsqueeze(axis)
    return view


def _clamped(leaf: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if 0 in leaf.shape and all(x.numel() for x in indices):
        raise ShapeError(message("a leaf without elements is read", {"leaf": leaf}))
    return tuple(
        x.clamp(0, size - 1).to(device=leaf.device, dtype=torch.int64)
        for x, size in zip(indices, leaf.shape, strict=True)
    )


def names_of(node: ex.Node) -> tuple[str, ...] | None:
    """Names of the variables a load runs along, if its indices are distinct ones of b h i j."""
    names = tuple(str(a.value) for a in node.args if a.op == "var")
    direct = len(names) == len(node.args) and len(set(names)) == len(names) and all(n in AXES for n in names)
    return names if direct else None


def read(env: Env, slot: int, kind: str, names: tuple[str, ...] | None, indices: Sequence[Tensor]) -> Tensor:
    """The value of a load: a slice where the tile's ranges allow it, else a gather."""
    leaf = env.leaves[slot]
    if leaf is None:
        return torch.zeros((), dtype=env.dtype, device="cpu")
    slices = None if names is None else _direct(env, leaf, names)
    if slices is not None:
        value = _to_axes(leaf[slices], names)  # type: ignore[arg-type]
    else:
        value = leaf[_clamped(leaf, indices)] if indices else leaf
    value = value.to({"float": env.dtype, "int": torch.int32, "bool": torch.bool}[kind])
    if env.visible is not None and kind == "float":
        value = torch.where(env.visible, value, 0.0)
    return value


def accumulate(env: Env, site: ex.Node, gradient: Tensor, contribution: Tensor) -> None:
    """Add a tile's contribution (B, H, rows, columns) to the gradient of the leaf that `site` loads.

    Ordered sums where the index runs along the tile's own axes; a gather's transpose otherwise.
    """
    names = names_of(site)
    slices = None if names is None else _direct(env, gradient, names)
    if slices is not None:
        target = _to_axes(gradient[slices], names)  # type: ignore[arg-type]
        target += contribution.sum_to_size(target.shape)
        return
    indices = [env.indices[a] for a in site.args]
    shape = torch.broadcast_shapes((1, 1, 1, 1), *(x.shape for x in indices))
    reduced = contribution.sum_to_size(shape)
    where = tuple(x.expand(shape) for x in _clamped(gradient, indices))
    if where and gradient.is_cuda:
        gradient.index_put_(where, reduced, accumulate=True)  # sorts, so the order of the sums is fixed
    elif where:
        # On the CPU index_put_ adds from several threads in any order; index_add_ on one dimension does not.
        flat = torch.zeros((), dtype=torch.int64, device=gradient.device)
        for x, size in zip(where, gradient.shape, strict=True):
            flat = flat * size + x
        gradient.view(-1).index_add_(0, flat.reshape(-1), reduced.reshape(-1))
    else:
        gradient += reduced.reshape(())


# ---- the printer ---------------------------------------------------------------------------------------------

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|",
}  # fmt: skip
_CALLS = {"tanh": "torch.tanh", "exp2": "torch.exp2", "log2": "torch.log2", "abs": "torch.abs",
          "min": "minimum", "max": "maximum", "where": "torch.where",
          "floordiv": "floordiv", "mod": "mod"}  # fmt: skip


def _line(node: ex.Node, a: list[str]) -> str:
    match node.op:
        case "const":
            literal = node.value if isinstance(node.value, (bool, int)) else f"float('{node.value!r}')"
            return f"env.const({literal})"
        case "var":
            return f"env.variables['{node.value}']"
        case "int_scalar" | "float_scalar":
            return f"env.{node.op}({node.value})"
        case "load":
            names = names_of(node)
            return f"read(env, {node.value}, '{node.type}', {names}, [{', '.join(a)}])"
        case "to_float":
            return f"env.to_float({a[0]})"
        case "to_int":
            return f"{a[0]}.to(torch.int32)"
        case "neg":
            return f"-{a[0]}"
        case "not":
            return f"~{a[0]}"
        case "div":
            return f"{a[0]} / {a[1]}"
    if node.op in _INFIX:
        return f"{a[0]} {_INFIX[node.op]} {a[1]}"
    return f"{_CALLS[node.op]}({', '.join(a)})"


def source(roots: tuple[ex.Node, ...], index_sites: tuple[ex.Node, ...] = ()) -> str:
    """The printed function's text."""
    names: dict[ex.Node, str] = {}
    lines = ["def fold(env):"]
    extra = [a for site in index_sites for a in site.args]
    for n, node in enumerate(ex.topological(*roots, *extra)):
        names[node] = f"t{n}"
        lines.append(f"    t{n} = {_line(node, [names[a] for a in node.args])}")
    lines += [f"    env.indices[index_nodes[{n}]] = {names[a]}" for n, a in enumerate(extra)]
    lines.append(f"    return ({', '.join(names[r] for r in roots)},)")
    return "\n".join(lines) + "\n"


@functools.lru_cache(maxsize=1024)
def compile_torch(
    roots: tuple[ex.Node, ...], index_sites: tuple[ex.Node, ...] = ()
) -> Callable[[Env], tuple[Tensor, ...]]:
    """A function from Env to the values of the roots.

    index_sites: loads whose index values are left in `env.indices`, for `accumulate`.
    """
    text = source(roots, index_sites)
    filename = f"<tilewise torch {len(linecache.cache)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope = {
        "torch": torch, "read": read, "floordiv": floordiv, "mod": mod, "minimum": minimum, "maximum": maximum,
        "index_nodes": [a for site in index_sites for a in site.args],
    }  # fmt: skip
    exec(compile(text, filename, "exec"), scope)  # our own printer's output; holds arithmetic only
    return scope["fold"]  # type: ignore[return-value]
