"""Plans of caches on the Triton backend: tiles, splits, what is refused, and which masks are left out. No GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from versions import needs_triton

import tilewise as tw
from tilewise.problem import Options, Problem, Shape
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.masks import as_mask

pytestmark = needs_triton


def cached_problem(shape: Shape, mask: tw.Mask | None = None, **options) -> Problem:
    spec = AttentionSpec.parse(spec_text(as_mask(mask), (), False, options.pop("dropout", False)))
    stored = options.pop("stored", None)
    return Problem(
        spec, Options(pages=True, block_table=True, seqused_k=True, **options), shape, torch.bfloat16, "cuda",
        page_size=16, stored_dtype=stored,
    )  # fmt: skip


def test_plans_follow_from_the_capacity_and_fill_the_machine():
    from tilewise.backends.triton.decode_plan import plan_of
    from tilewise.backends.triton.machine import Machine

    machine = Machine("cuda", 90, 232448, 132)
    for batch, heads_kv, keys in (
        (8, 8, 32768),
        (1, 8, 131072),
        (64, 8, 4096),
        (16, 1, 32768),
        (1, 1, 65536),
    ):
        plan = plan_of(cached_problem(Shape(batch, 4 * heads_kv, heads_kv, 1, keys, 128, 128)), machine)
        programs = batch * heads_kv * plan.splits
        assert programs >= 0.9 * machine.sms and plan.block_m == 16
    for batch, keys, resident in ((128, 1024, 4), (64, 64, 4), (8, 1024, 2)):
        plan = plan_of(cached_problem(Shape(batch, 32, 8, 1, keys, 128, 128)), machine)
        room = (plan.stages - 1) * plan.block_n * 2 * 128 * 2  # of keys and values, two bytes each
        assert resident * (room + 16 * 128 * 2) <= machine.shared
    few = plan_of(cached_problem(Shape(1, 32, 8, 1, 512, 128, 128)), machine)
    assert few.splits <= 2


@pytest.mark.parametrize("size", (16, 32, 64))
def test_pages_of_common_sizes_are_read_with_the_tiles_of_one_piece(size):
    from tilewise.backends.triton.decode_plan import paging, plan_of
    from tilewise.backends.triton.machine import Machine

    machine = Machine("cuda", 90, 232448, 132)
    for batch, keys in ((8, 32768), (1, 131072), (1, 32768), (1, 4096), (4, 1024)):
        problem = replace(cached_problem(Shape(batch, 32, 8, 1, keys, 128, 128)), page_size=size)
        plan = plan_of(problem, machine)
        assert plan == plan_of(replace(problem, page_size=keys), machine)
        few = size == 16 and keys <= 4 * plan.block_n * plan.splits  # tiles of a program
        assert paging(problem, plan) == (-size if few else size)
    packed = replace(cached_problem(Shape(8, 32, 8, 1, 32768, 128, 128)), page_size=24)
    assert paging(packed, plan_of(packed, machine)) == "divide"


def test_eight_drafts_of_a_group_of_four_are_one_tile():
    from tilewise.backends.triton.decode_plan import plan_of
    from tilewise.backends.triton.machine import Machine

    plan = plan_of(cached_problem(Shape(8, 32, 8, 8, 32768, 128, 128)), Machine("cuda", 90, 232448, 132))
    assert plan.row_tiles == 1 and plan.block_m == 32


@pytest.mark.parametrize(
    "options, word",
    [
        ({"dropout": True}, "dropout"),
        ({"stored": torch.float8_e5m2}, "element type of the cache"),
    ],
)
def test_refusals_name_the_rule(options, word):
    from tilewise.backends.triton.decode_plan import reasons_against

    reasons = reasons_against(cached_problem(Shape(1, 4, 2, 1, 64, 64, 64), **options))
    assert any(word in reason.rule for reason in reasons)


@pytest.mark.parametrize("apart, kind", ((2**33, "i32"), (2**34, None)))
def test_rows_are_found_with_32_bits_where_none_lies_farther(apart, kind):
    from tilewise.backends.triton.launch_decode import _row_types
    from tilewise.problem import Inputs

    pool = torch.empty((2, 2, 64, 64), device="meta").as_strided((2, 2, 64, 64), (apart, 4096, 64, 1))
    inputs = Inputs(pool, pool, pool, (), (), (), None, 1.0, 0.0, 0, 0, None, 0, -1, -1)
    assert _row_types(inputs, 8) == (
        {} if kind is None else dict.fromkeys(("k_p", "k_n", "v_p", "v_n"), kind)
    )


def test_reciprocals_divide_as_division_does():
    from tilewise.backends.triton.decode_plan import reciprocal

    for n in (2, 3, 5, 7, 8, 31, 33, 96, 127, 128, 1000, 65535):
        most = (2**32 - 1) // n  # beyond it `divides_quickly` says no
        near = [most // n * n + d for d in (-1, 0, 1)] + [most - 1, most]
        assert all(x * reciprocal(n) >> 32 == x // n for x in [*range(min(4 * n, most)), *near] if x <= most)


def test_numbers_too_large_for_reciprocals_are_divided():
    from tilewise.backends.triton.decode_plan import divides_quickly, plan_of
    from tilewise.backends.triton.machine import Machine

    machine = Machine("cuda", 90, 232448, 132)
    for batch, heads, quick in ((8, 8, True), (2**20, 128, False)):
        problem = cached_problem(Shape(batch, heads, heads, 1, 1024, 64, 64))
        assert divides_quickly(problem, plan_of(problem, machine)) == quick
    chunk = cached_problem(Shape(1, 32, 8, 512, 1024, 64, 64))
    assert not divides_quickly(chunk, plan_of(chunk, machine))  # a head has several tiles of rows


def test_explain_says_who_reads_caches_on_hopper():
    pool = torch.empty(40, 2, 16, 64, dtype=torch.bfloat16, device="meta")
    plan = tw.explain(
        torch.empty(2, 8, 1, 64, dtype=torch.bfloat16, device="meta"), pool, pool, pages=True, device="cuda",
        block_table=torch.zeros(2, 20, dtype=torch.int32), seqused_k=torch.tensor([5, 9], dtype=torch.int32),
    )  # fmt: skip
    assert plan.backend == "triton"
    assert any("pools of pages" in reason for reason in dict(plan.candidates)["hopper"])


@pytest.mark.parametrize("mask, sees", [
    (tw.causal(), True), (tw.custom(lambda q, k: k <= q), True), (tw.causal() & tw.causal(), True),
    (~tw.causal(), False), (tw.causal() & tw.window(4, 0), False), (None, False),
])  # fmt: skip
def test_a_mask_is_left_out_over_the_last_row_alone_and_for_what_it_says(mask, sees):
    """By its expression, whatever it is called: what hides every key is no causal mask."""
    from tilewise.backends.triton.decode_plan import last_row_sees_all

    spec = AttentionSpec.parse(spec_text(as_mask(mask), (), False, False))
    for rows in (1, 2):
        problem = Problem(spec, Options(), Shape(2, 4, 2, rows, 512, 64, 64), torch.bfloat16, "cuda")
        assert last_row_sees_all(problem) == (sees and rows == 1)
