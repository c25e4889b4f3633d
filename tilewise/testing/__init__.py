"""The conformance suite, shipped: a new backend runs it unchanged.

    cases        named problems: every feature, crossed in pairs, odd sizes, strides, poison
    ordinary     attention with its score matrix, in any dtype, written by hand: the truth in float64 and the
                 measure of rounding
    budgets      how large an error may be: a multiple of ordinary attention's own error plus one rounding
    conformance  run_case(case, backend): forward, lse and every gradient through the public call, held to the
                 budgets
    laws         properties that need no oracle: layout invariance, no leak from the future, split = whole,
                 determinism
    poison       NaN-filled surroundings and allocations

Nothing is imported here, so that listing cases loads neither a backend nor a test runner.
"""
