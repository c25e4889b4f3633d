"""The folds of plain attention: templates import them, and a printed module has a spec's folds in their place."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def score(s, i, j, q, k, b, h, g, data):
    """The score after all terms."""
    return s


@gluon.jit
def keep(s, i, j, q, k, b, h, g, data):
    """Which pairs are visible."""
    return gl.to_tensor(True)


@gluon.jit
def derive(s, i, j, q, k, b, h, g, data):
    """Score, and d score / d s."""
    return s, gl.full_like(s, 1.0)


@gluon.jit
def classify(i0, i1, j0, j1, q_offset, k_offset, b, h0, h1, g, data):
    """0 EMPTY, 1 PARTIAL, 2 FULL."""
    return gl.full_like(j0, 2)
