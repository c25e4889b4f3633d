"""What the numbers of a call say to the Hopper forward: signs, bounds, divisors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.backends.hopper.algebra import WIDEST
from tilewise.backends.hopper.print_fold import most_powers, rising
from tilewise.backends.triton.layout import divisors_of, powers_of

if TYPE_CHECKING:
    from tilewise.problem import Inputs, Problem
    from tilewise.spec.attention import AttentionSpec

BOUND = 80.0
"""Powers of two that a weight may be above or below 1; 2^80 times a million keys is far below 2^127."""


def rises(spec: AttentionSpec, inputs: Inputs) -> bool:
    """Whether maxima may be taken of the score's core: its factor, a product of the call's numbers, is above 0."""
    return rising(spec) and inputs.scale > 0 and all(x > 0 for x in inputs.floats)


def bounded(problem: Problem, inputs: Inputs) -> bool:
    """Whether weights need no maximum: scores lie within BOUND powers of two of what belongs to the row.

    Weights and their sums are then float32 numbers; what still leaves their range, as with values of 2^40, is met as
    values that are not finite are. float16 has no room for such weights.
    """
    if problem.dtype != torch.bfloat16 or problem.spec.score is None or not rises(problem.spec, inputs):
        return False
    most = most_powers(problem.spec, inputs.scale, inputs.floats)
    return most is not None and most <= BOUND


def divisors(problem: Problem, inputs: Inputs) -> tuple[tuple[int, int], ...]:
    """The numbers of the call that divide integers and become literals: (slot, value); powers of two, and others where
    a block has more columns. Those below 1 are rare."""
    powers = powers_of(problem.spec, inputs.ints)
    slots = divisors_of(problem.spec)
    return tuple((n, inputs.ints[n]) for n in slots if n in powers or inputs.ints[n] < 2 * WIDEST)
