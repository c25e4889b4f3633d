"""Caches on the Triton backend without a GPU: the interpreter runs kernels for decoding, appending and merging, and
they compile for Hopper. The interpreter is chosen before a kernel is imported: a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_triton_cache_plans import cached_problem
from versions import needs_triton

import tilewise as tw
from tilewise.problem import Shape

pytestmark = needs_triton

CASES = (
    "cached-paged1-ragged", "cached-paged3-one", "cached-paged16-ragged", "cached-contiguous-ragged",
    "cached-leftpad-one", "cached-seqused_q-ragged", "cached-mask-window_4_2-leftpad", "cached-everything-float16",
    "cached-float8-page-float16", "cached-no-keys-sink",
)  # fmt: skip
RUN = """
import json, sys
import torch
sys.path.insert(0, "tests")
import triton_interpreter
triton_interpreter.repair()
import tilewise as tw
from tilewise.backends.protocol import Append
from tilewise.backends.reference import append as reference
from tilewise.backends.triton import launch_append
from tilewise.serving import CacheView, attend_pages
from tilewise.testing.cases_cached import cached_cases
from tilewise.testing.conformance_cached import run_cached_case

torch.set_num_threads(1)
found = {}
cases = {case.name: case for case in cached_cases()}
for name in sys.argv[1:]:
    try:
        run_cached_case(cases[name], "triton", torch.device("cpu"))
        found[name] = ""
    except AssertionError as error:
        found[name] = str(error) or "failed"

# Splits: one head of one sequence, 600 of 1024 keys; by pages, of which the last ones hold NaN.
torch.manual_seed(0)
q, k, v = torch.randn(1, 2, 2, 16), torch.randn(70, 1, 16, 16), torch.randn(70, 1, 16, 16)
table = torch.randperm(70)[:64].reshape(1, 64).to(torch.int32)
k[table[0, 38:].long()] = v[table[0, 38:].long()] = float("nan")
call = dict(block_table=table, seqused_k=torch.tensor([600], dtype=torch.int32), mask=tw.causal())
found["plan"] = tw.explain(torch.randn(1, 2, 2, 16), torch.randn(1, 1, 1024, 16), torch.randn(1, 1, 1024, 16),
                           backend="triton").schedule.splits
out, lse = attend_pages(q, k, v, backend="triton", **call)
truth, lse_truth = attend_pages(q, k, v, backend="blockwise", **call)
found["splits"] = max(float((out - truth).abs().max()), float((lse - lse_truth).abs().max()))
from tilewise.backends.triton import launch_decode
rehearses, launch_decode.rehearses = launch_decode.rehearses, lambda problem, early: True
launch_decode._recipes.clear()
again = attend_pages(q, k, v, backend="triton", **call)
found["rehearsed"] = [bool((a == b).all()) for a, b in zip(again, (out, lse))]
launch_decode.rehearses = rehearses
from tilewise.backends.triton import decode_plan, launch_decode
decode_plan.OVERLAP = 100  # as on devices whose launches do not overlap
decode_plan.plan_of.cache_clear()
launch_decode._recipes.clear()
out, lse = attend_pages(q, k, v, backend="triton", **call)
found["here"] = max(float((out - truth).abs().max()), float((lse - lse_truth).abs().max()))
found["merges"] = [recipe.plan.merge for recipe in launch_decode._recipes.values()]
decode_plan.OVERLAP = 90
decode_plan.plan_of.cache_clear()
launch_decode._recipes.clear()
invariant = attend_pages(q, k, v, backend="triton", batch_invariant=True, **call)[0]
both = {**call, "block_table": table.expand(2, 64), "seqused_k": torch.tensor([600, 3], dtype=torch.int32)}
pair = attend_pages(q.expand(2, 2, 2, 16), k, v, backend="triton", batch_invariant=True, **both)[0]
found["invariant"] = bool((pair[0] == invariant[0]).all())

# float8 keys meet queries in float16, whose rows are brought into its range first; values of wide heads come in words.
def narrow(lead, dim):
    q = torch.randn(2, 4, 2, dim).bfloat16() * torch.tensor([1e-6, 1e5, 1.0, 0.0]).view(4, 1, 1).bfloat16()
    k, v = (torch.randn(70, 2, 16, dim).to(torch.float8_e4m3fn) for _ in "kv")
    scale = torch.rand(*lead, 2) + 0.5
    call = dict(block_table=table[:, :32], seqused_k=torch.tensor([300]).int(), k_scale=scale, v_scale=scale)
    parts = [attend_pages(q[:1], k, v, backend=b, **call) for b in ("triton", "blockwise")]
    return max(float((a.float() - b.float()).abs().amax() / b.float().abs().amax()) for a, b in zip(*parts))
found["narrow"] = [narrow((), 16), narrow((70,), 16), narrow((), 64), narrow((), 96)]

# Pages 2**32 elements apart, which is more than 32 bits say; what lies between them is never touched.
far = torch.empty(2**32 + 2 * 2 * 16 * 64, dtype=torch.float8_e4m3fn)
far_k, far_v = (far.as_strided((2, 2, 16, 64), (2**32, 1024, 64, 1), n * 2048) for n in (0, 1))
near = [torch.randn(2, 2, 16, 64).to(torch.float8_e4m3fn) for _ in "kv"]
far_k.copy_(near[0]), far_v.copy_(near[1])
call = dict(block_table=torch.tensor([[1, 0]]).int(), seqused_k=torch.tensor([25]).int(), k_scale=torch.ones(2),
            v_scale=torch.ones(2), backend="triton")
q = torch.randn(1, 4, 1, 64).bfloat16()
found["far"] = bool(torch.equal(attend_pages(q, far_k, far_v, **call)[0], attend_pages(q, *near, **call)[0]))

# Pages that make tiles, of which the last one wants some; entries outside the pool hide their keys and nothing else.
def paged(size, count, dtype):
    from tilewise.problem import decode_inputs, decode_problem
    from tilewise.written import Cached, write
    keys, total = size * count, 3 * count + 2
    lengths, rows = torch.tensor([keys - 3, size + 1, 0]).int(), torch.randperm(total)[: 3 * count].reshape(3, -1).int()
    q, k, v = (torch.randn(*shape, 32).to(dtype) for shape in ((3, 4, 1), (total, 2, size), (total, 2, size)))
    for b, length in enumerate(lengths.tolist()):
        for n in range(length // size, count):
            k[rows[b, n], :, max(length - n * size, 0):] = v[rows[b, n], :, max(length - n * size, 0):] = torch.nan
    seen = torch.ones(3, 1, 1, keys, dtype=torch.bool)
    seen[0, ..., size : 2 * size] = seen[0, ..., 3 * size : 4 * size] = False
    wide = [t.double() for t in (q, k, v)]
    wanted = attend_pages(*wide, block_table=rows, seqused_k=lengths, mask=tw.dense(seen), backend="blockwise")
    wild = rows.clone()
    wild[0, 1], wild[0, 3] = -1, 10**6
    cached = Cached(None, None, lengths, wild, None, None, None)
    (*qkv, a, b), seed, numbers = write((q, k, v), cached, mask=None, scores=(), sink=None, backend="triton")
    problem = decode_problem(*qkv, [a, b], numbers.text)
    inputs = decode_inputs(problem, (*qkv, [a, b]), numbers.ints, numbers.floats, seed)
    found = launch_decode.forward(problem, inputs)
    plan = [recipe.plan for recipe in launch_decode._recipes.values()][-1]
    apart = [float((x.clamp(min=-99) - y.clamp(min=-99)).abs().max()) for x, y in zip(found, wanted)]
    return [str(decode_plan.paging(problem, plan)), *apart]
cases = [(16, 7), (32, 5), (64, 5), (128, 4), (48, 5), (16, 8)]
found["paged"] = [*[paged(*case, torch.float16) for case in cases], paged(16, 5, torch.float32)]

# Attention to other keys of the same queries enters where the splits are merged, or where there is one alone; before
# the sink, which is counted once.
def prior(tokens, used, capacity, sink, dim_v):
    from tilewise.problem import decode_inputs, decode_problem
    from tilewise.state import Partial, merge
    from tilewise.written import Cached, write
    q, pages = torch.randn(tokens, 4, 16).transpose(0, 1)[None], capacity // 16
    k, v = torch.randn(pages + 5, 2, 16, 16), torch.randn(pages + 5, 2, 16, dim_v)
    lengths, rows = torch.tensor([used]).int(), torch.randperm(pages + 5)[:pages].reshape(1, -1).int()
    given = torch.randn(tokens, 4, dim_v).transpose(0, 1)[None], torch.randn(tokens, 4).t()[None]
    given[1][0, :, 1], given[0][0, :, 1] = -torch.inf, torch.nan  # a query that has seen nothing there
    cached = Cached(None, None, lengths, rows, None, None, None)
    (*qkv, a, b, c), seed, numbers = write((q, k, v), cached, mask=None, scores=(), sink=sink, backend="triton")
    problem = decode_problem(*qkv, [a, b, c], numbers.text)
    inputs = decode_inputs(problem, (*qkv, [a, b, c]), numbers.ints, numbers.floats, seed)
    out, lse = launch_decode.forward(problem, inputs, given)
    parts = attend_pages(q, k, v, block_table=rows, seqused_k=lengths, backend="blockwise", partial=True)
    wanted = merge(Partial(*parts), Partial(*given)).with_sink(sink)
    pairs = (out, wanted.finalize(dtype=torch.float32)), (lse, wanted.lse)
    return max(float((a - b).abs().max()) for a, b in pairs)
cases = (70, 600, 1024, 16), (5, 0, 512, 24), (5, 20, 64, 24)
found["prior"] = [prior(*case[:3], torch.randn(4), case[3]) for case in cases]

# Joining: two parts of the same queries, as `merge` does; packed, with a sink, and where a part has seen nothing.
def joined(shape, sink):
    from tilewise.backends.triton.launch_join import join
    from tilewise.state import Partial, merge
    lead = shape[:-1] if len(shape) == 4 else (shape[1], shape[0])
    parts = [(torch.randn(shape), torch.randn(lead)) for _ in "ab"]
    for n, (out, lse) in enumerate(parts):
        lse[..., n], lse[..., 2] = -torch.inf, -torch.inf
        out.masked_fill_((lse if len(shape) == 4 else lse.t()).eq(-torch.inf)[..., None], float("nan"))
    parts[0] = (parts[0][0].transpose(0, 1).contiguous().transpose(0, 1), parts[0][1])
    out, lse = join(*parts, sink, torch.float32)
    wanted = merge(*(Partial(*part) for part in parts))
    wanted = wanted if sink is None else wanted.with_sink(sink)
    same = torch.allclose(out, wanted.out, atol=1e-6) and torch.allclose(lse, wanted.lse, atol=1e-6)
    return bool(same and not out.isnan().any())
cases = ((2, 3, 5, 20), None), ((2, 3, 5, 20), torch.randn(3)), ((7, 3, 16), torch.randn(3))
found["joined"] = [joined(*case) for case in cases]
def joined_with_an_infinite_sink():
    from tilewise.backends.triton.launch_join import join
    parts = [(torch.full((2, 3, 5, 20), torch.nan), torch.full((2, 3, 5), -torch.inf)) for _ in "ab"]
    out, lse = join(*parts, torch.full((3,), torch.inf), torch.float32)
    return bool((out == 0).all() and (lse == torch.inf).all())
found["joined"].append(joined_with_an_infinite_sink())

# Appending: every kind of rotation and place, bit by bit the reference's.
def append(packed, rotation, interleaved, given):
    lengths, table = torch.tensor([0, 7, 11]).int(), torch.randperm(60)[:36].reshape(3, 12).int()
    k, v = torch.randn(60, 2, 8, 20), torch.randn(60, 2, 8, 12)
    edges = torch.tensor([0, 3, 3, 9]).int()
    lead = (11,) if packed else (3,)
    shape = (lambda h, d: (11, h, d)) if packed else (lambda h, d: (3, h, 5, d))
    new_k, new_v, q = torch.randn(shape(2, 20)), torch.randn(shape(2, 12)), torch.randn(shape(4, 20))
    cos, sin = (torch.randn(40, rotation // 2) for _ in range(2))
    at = torch.randint(0, 40, (11,) if packed else (3, 5)).int() if given else None
    results = []
    for function in (reference.append, launch_append.append):
        pools = k.clone(), v.clone()
        turned = function(Append(new_k, new_v, *pools, lengths, table, edges if packed else None, q,
                                 edges if packed else None, cos, sin, interleaved, at, at, None, None, None))
        results.append((*pools, turned[:9] if packed else turned))
    return all(torch.equal(a, b) for a, b in zip(*results))
found["append"] = [append(False, 20, False, False), append(False, 12, True, True), append(True, 20, False, False)]

print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def interpreted() -> dict:
    root = Path(__file__).parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *CASES], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_interpreter_agrees_with_float64_within_the_budgets(name, interpreted):
    assert interpreted[name] == ""


def test_splits_of_the_keys_are_merged_by_the_last_of_them(interpreted):
    assert interpreted["plan"] > 1 and interpreted["here"] < 1e-5 and interpreted["merges"] == ["here"]


def test_splits_of_the_keys_are_merged_by_a_launch_of_its_own(interpreted):
    assert interpreted["splits"] < 1e-5


def test_what_is_rehearsed_before_the_splits_are_done_changes_no_bit(interpreted):
    assert interpreted["rehearsed"] == [True, True]


def test_float8_keys_meet_bfloat16_queries_of_any_size(interpreted):
    assert max(interpreted["narrow"]) < 2 * 2.0**-8  # the result is rounded to bfloat16


def test_pages_may_lie_farther_apart_than_32_bits_say(interpreted):
    assert interpreted["far"]


def test_pages_that_make_tiles_hide_what_lies_outside_the_pool(interpreted):
    kinds, *errors = zip(*interpreted["paged"], strict=True)
    assert kinds == ("16", "32", "64", "tile", "divide", "-16", "16")
    assert all(max(found[:6]) < 2e-3 and found[6] < 1e-5 for found in errors)


def test_attention_to_other_keys_enters_where_splits_are_merged(interpreted):
    assert max(interpreted["prior"]) < 3e-6


def test_two_parts_are_joined_as_the_monoid_says(interpreted):
    assert all(interpreted["joined"])


def test_invariant_calls_give_the_bits_of_a_sequence_alone(interpreted):
    assert interpreted["invariant"]


def test_appending_gives_the_bits_of_the_reference(interpreted):
    assert all(interpreted["append"])


# ---- a prepared call -----------------------------------------------------------------------------------------


def _captured(monkeypatch) -> list[tuple[int, int, bytes]]:
    """Launches of prepared calls as the driver would see them: (grid, grid_y, bytes of the arguments)."""
    import ctypes
    from types import SimpleNamespace

    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from tilewise.backends.triton import compile as compiling
    from tilewise.backends.triton import direct, launch, launch_decode
    from tilewise.backends.triton.machine import Machine

    seen: list[tuple[int, int, bytes]] = []

    def launcher(kernel, build, device):
        made = compiling.compile_kernel(kernel, build, GPUTarget("cuda", 90, 32))
        found = object.__new__(compiling.Launcher)
        found.compiled = SimpleNamespace(asm=made.asm, metadata=made.metadata, function=1)
        found.device, found.function = 0, 1
        return found

    def launch_ex(config_at, function, params, extra_at):
        config = ctypes.cast(config_at, ctypes.POINTER(direct._Config)).contents
        extra = ctypes.cast(extra_at, ctypes.POINTER(ctypes.c_void_p * 5)).contents
        size = ctypes.cast(extra[3], ctypes.POINTER(ctypes.c_size_t)).contents.value
        attribute = ctypes.cast(config.attributes, ctypes.POINTER(direct._Attribute)).contents
        assert config.count == 1 and (attribute.id, attribute.value[0]) == (
            6,
            1,
        )  # it begins while the last one ends
        seen.append((config.grid, config.grid_y, ctypes.string_at(extra[1], size)))
        return 0

    if not torch.cuda.is_available():
        monkeypatch.setattr(driver, "_active", None, raising=False)
    monkeypatch.setattr(launch, "launcher", launcher)
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(launch_decode, "machine_of", lambda device: Machine("cuda", 90, 232448, 132))
    monkeypatch.setattr(direct, "_driver", lambda: launch_ex)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    return seen


@pytest.mark.parametrize("before", (0, 7))
def test_a_prepared_call_hands_the_kernel_what_the_long_way_does(before, monkeypatch):
    """before: columns of the block table that the call leaves out; a part of a table is read where it lies."""
    import struct

    from tilewise.backends.triton import launch_decode, prepared_decode
    from tilewise.problem import Inputs

    seen = _captured(monkeypatch)
    problem = cached_problem(Shape(2, 8, 2, 1, 1024, 64, 64), tw.causal())
    assert problem.tensor_names == ("seqused_k", "block_table")

    def drawn() -> Inputs:
        q, k, v = torch.randn(2, 8, 1, 64), torch.randn(130, 2, 16, 64), torch.randn(130, 2, 16, 64)
        tensors = [t.to(torch.bfloat16) for t in (q, k, v)]
        lengths, table = torch.tensor([5, 900]).int(), torch.randperm(128).reshape(2, 64).int()
        table = torch.cat([torch.full((2, before), -1).int(), table], 1)[:, before:]
        return Inputs(
            *tensors,
            (),
            (),
            (),
            None,
            0.125,
            0.0,
            0,
            0,
            None,
            0,
            -1,
            -1,
            seqused_k=lengths,
            block_table=table,
        )

    prepared = prepared_decode.prepare(problem, drawn())
    assert prepared is not None
    recipe = prepared.recipe
    for _ in range(3):  # the second call takes the first one's argument block
        inputs = drawn()
        out, lse = prepared(inputs.q, inputs.k, inputs.v, [inputs.seqused_k, inputs.block_table], True)
        # The splits, and behind them what merges them, which begins while they end and reads the same arguments.
        (grid, grid_y, block), (lines, one, same) = seen
        seen.clear()
        assert (grid, grid_y) == (recipe.units, recipe.plan.splits) and recipe.plan.splits > 1
        assert (lines, one) == (recipe.units * recipe.plan.rows, 1) and same == block
        values = launch_decode._own_values(recipe, inputs, out, lse)
        names = [a.partition(":")[0] for a in launch_decode.DECODE.arguments]
        formats, at, found = {"i32": "<i", "u32": "<I", "i64": "<q", "fp32": "<f"}, 0, {}
        for name, kind, value in zip(names, recipe.types, values, strict=True):
            if kind == "constexpr":
                continue
            form = formats.get(kind, "<Q")
            at = -(-at // struct.calcsize(form)) * struct.calcsize(form)
            found[name] = struct.unpack_from(form, block, at)[0]
            at += struct.calcsize(form)
            own = name in ("part_ptr", "part_lse_ptr", "count_ptr")
            wanted = value.data_ptr() if isinstance(value, torch.Tensor) else value
            assert own or found[name] == wanted, name
        assert (found["table_ptr"], found["table_b"]) == (inputs.block_table.data_ptr(), 64 + before)
        room = 4 * recipe.plan.parts(recipe.units) * recipe.plan.rows * 64
        assert found["part_lse_ptr"] - found["part_ptr"] == room
        assert bool(found["count_ptr"]) == (
            recipe.merge is None
        )  # who counts is the last program, if it merges


@pytest.mark.parametrize("size", (16, 24, 64))
def test_pages_are_read_ahead_of_their_use(size, monkeypatch):
    """Keys of the next tiles are under way while a tile is worked on, whatever the pages' size."""
    from tilewise.backends.triton import decode_plan, launch_decode
    from tilewise.backends.triton.layout import describe
    from tilewise.problem import Inputs

    _captured(monkeypatch)
    problem = replace(cached_problem(Shape(256, 8, 2, 1, 1536, 64, 64)), page_size=size)
    q, k = (
        torch.empty(256, 8, 1, 64, dtype=torch.bfloat16),
        torch.empty(40, 2, size, 64, dtype=torch.bfloat16),
    )
    table, lengths = torch.zeros(256, 1536 // size).int(), torch.full((256,), 9).int()
    tensors = {"seqused_k": lengths, "block_table": table}
    inputs = Inputs(q, k, k, (), (), (), None, 1.0, 0.0, 0, 0, None, 0, -1, -1, **tensors)
    recipe = launch_decode.make_recipe(problem, inputs, describe(problem.spec, ()))
    assert decode_plan.paging(problem, recipe.plan) == (size if size != 24 else "divide")
    assert "cp.async" in recipe.run.compiled.asm["ptx"]
