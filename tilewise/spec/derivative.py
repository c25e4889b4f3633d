"""The derivative as a printer: from a score's tree to the trees of its derivatives.

Reverse mode gives d score / d s and one adjoint per load site of a float leaf; forward mode gives the
tangent along (s_dot, tangents of the leaves). At a tie abs has derivative 0, minimum and maximum give it
to the first argument.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from tilewise.spec import expression as ex
from tilewise.spec.expression import Node, apply, const

if TYPE_CHECKING:
    from collections.abc import Callable

ZERO, ONE = const(0.0), const(1.0)
S_DOT = ex._intern("var", (), "float", "s_dot")
"""The tangent of the score, a variable of forward-mode trees only."""


class Derivative(NamedTuple):
    """d score / d s, and for each load site of a float leaf (the load, d score / d load)."""

    s: Node
    loads: tuple[tuple[Node, Node], ...]


def _mul(a: Node, b: Node) -> Node:
    if a is ZERO or b is ZERO:
        return ZERO
    if a is ONE:
        return b
    return a if b is ONE else apply("mul", a, b)


def _add(a: Node, b: Node) -> Node:
    if a is ZERO:
        return b
    return a if b is ZERO else apply("add", a, b)


def _neg(a: Node) -> Node:
    return a if a is ZERO else apply("neg", a)


def _select(condition: Node, a: Node, b: Node) -> Node:
    return a if a is b else apply("where", condition, a, b)


def _chain(g: Node, local: Callable[[], Node]) -> Node:
    """g * local, where an adjoint that a select has switched off stays 0 even if the local slope is not finite."""
    if g is ZERO:
        return ZERO
    product = _mul(g, local())
    if any(n.op == "where" for n in ex.topological(g)):
        return _select(apply("eq", g, ZERO), ZERO, product)
    return product


def _partials(node: Node) -> tuple[Callable[[Node], Node], ...]:
    """For each argument, how an adjoint of the node reaches it (linear in the adjoint)."""
    a, b = (*node.args, ZERO, ZERO)[:2]
    match node.op:
        case "add":
            return (lambda g: g), (lambda g: g)
        case "sub":
            return (lambda g: g), _neg
        case "neg":
            return (_neg,)
        case "mul":
            return (lambda g: _chain(g, lambda: b)), (lambda g: _chain(g, lambda: a))
        case "div":
            return (
                lambda g: _chain(g, lambda: apply("div", ONE, b)),
                lambda g: _neg(_chain(g, lambda: apply("div", node, b))),
            )
        case "mod":
            return (lambda g: g), (lambda g: _neg(_chain(g, lambda: apply("floordiv", a, b))))
        case "abs":
            up, down = apply("gt", a, ZERO), apply("lt", a, ZERO)
            return (lambda g: _select(up, g, _select(down, _neg(g), ZERO)),)
        case "min" | "max":
            first = apply("le" if node.op == "min" else "ge", a, b)
            return (lambda g: _select(first, g, ZERO)), (lambda g: _select(first, ZERO, g))
        case "where":
            c = node.args[0]
            return (lambda g: ZERO), (lambda g: _select(c, g, ZERO)), (lambda g: _select(c, ZERO, g))
        case "tanh":
            return (lambda g: _chain(g, lambda: apply("sub", ONE, apply("mul", node, node))),)
        case "exp2":
            return (lambda g: _chain(g, lambda: apply("mul", node, const(math.log(2.0)))),)
        case "log2":
            return (lambda g: _chain(g, lambda: apply("div", const(1.0 / math.log(2.0)), a)),)
    return tuple(lambda g: ZERO for _ in node.args)


def differentiate(root: Node) -> Derivative:
    """Reverse mode on a float tree: derivative with respect to s and to every load of a float leaf."""
    adjoint: dict[Node, Node] = {root: ONE}
    order = ex.topological(root)
    for node in reversed(order):
        g = adjoint.get(node, ZERO)
        if g is ZERO or node.type != "float" or node.op == "load":
            continue
        for argument, reach in zip(node.args, _partials(node), strict=True):
            if argument.type == "float":
                adjoint[argument] = _add(adjoint.get(argument, ZERO), reach(g))
    sites = tuple(
        (node, adjoint[node])
        for node in order
        if node.op == "load" and node.type == "float" and adjoint.get(node, ZERO) is not ZERO
    )
    return Derivative(adjoint.get(ex.variable("s"), ZERO), sites)


def tangent(root: Node, num_leaves: int) -> Node:
    """Forward mode on a float tree.

    The tangent of s is the variable s_dot; the tangent of leaf n is leaf n + num_leaves.
    """
    dot: dict[Node, Node] = {}
    for node in ex.topological(root):
        if node.type != "float":
            dot[node] = ZERO
        elif node.op == "var":
            dot[node] = S_DOT if node.value == "s" else ZERO
        elif node.op == "load":
            dot[node] = ex.load(int(node.value) + num_leaves, "float", node.args)  # type: ignore[arg-type]
        else:
            total = ZERO
            for argument, reach in zip(node.args, _partials(node), strict=True):
                if dot[argument] is not ZERO:
                    total = _add(total, reach(dot[argument]))
            dot[node] = total
    return dot[root]
