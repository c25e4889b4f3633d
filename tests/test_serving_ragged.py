"""pack and unpack, edges from lengths and positions, torch's jagged tensors; compiled caches and the append op."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from versions import needs_dynamo

import tilewise as tw
from tilewise.serving import (
    Batch,
    KVCache,
    PagedKVCache,
    RotaryTable,
    attention_nested,
    attention_with_cache,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    pack,
    unpack,
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


def test_pack_and_unpack_are_inverse():
    x = torch.randn(4, 2, 5, 3, dtype=torch.float64)
    lengths = torch.tensor([3, 0, 5, 1])
    kept = torch.arange(5) < lengths[:, None]
    for total in (None, 9, 12):
        tokens, edges = pack(x, lengths, total)
        assert edges.tolist() == [0, 3, 3, 8, 9] and edges.dtype == torch.int32
        assert tokens.shape == (20 if total is None else total, 2, 3) and not tokens[9:].any()
        assert torch.equal(tokens[3:8], x[2].transpose(0, 1))
        assert torch.equal(unpack(tokens, edges, 5), x * kept[:, None, :, None])
    assert unpack(tokens, edges, 7).shape == (4, 2, 7, 3) and unpack(tokens, edges, 2).shape == (4, 2, 2, 3)
    assert torch.equal(unpack(tokens[:0], torch.zeros(3, dtype=torch.int32), 2), x.new_zeros(2, 2, 2, 3))
    assert torch.autograd.gradcheck(lambda t: unpack(pack(t, lengths)[0], edges, 5), x.requires_grad_())
    with pytest.raises(tw.ShapeError):
        pack(x[0], lengths)
    with pytest.raises(tw.ShapeError):
        unpack(x, edges, 5)


def test_edges_of_positions():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]])
    assert cu_seqlens_from_position_ids(positions).tolist() == [0, 3, 4, 8]
    assert cu_seqlens_from_position_ids(positions[0], 5).tolist() == [0, 3, 4, 8, 8, 8]
    assert cu_seqlens_from_position_ids(positions[0], 3).tolist() == [0, 3, 4, 8]
    assert cu_seqlens_from_position_ids(positions[0, 1:]).tolist() == [
        0,
        2,
        3,
        7,
    ]  # cut in the middle of a sequence
    assert cu_seqlens_from_lengths(torch.tensor([3, 1, 4])).tolist() == [0, 3, 4, 8]
    with pytest.raises(tw.ShapeError):
        cu_seqlens_from_position_ids(torch.zeros(2, 3))
    with pytest.raises(tw.OptionError):
        cu_seqlens_from_position_ids(positions, 0)


def test_packed_attention_from_positions_is_attention_of_each():
    positions = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3])
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    edges = cu_seqlens_from_position_ids(positions, 4)
    out = tw.attention_varlen(q, k, v, edges, mask=tw.causal())
    for start, stop in ((0, 3), (3, 4), (4, 8)):
        part = [t[start:stop].transpose(0, 1)[None] for t in (q, k, v)]
        torch.testing.assert_close(out[start:stop], tw.attention(*part, mask=tw.causal())[0].transpose(0, 1))


def test_nested_tensors_keep_their_lengths_and_gradients():
    lengths, heads = (5, 2, 7), (4, 2, 2)
    parts = [[torch.randn(n, h, 16, requires_grad=True) for n in lengths] for h in heads]
    q, k, v = (torch.nested.as_nested_tensor(p, layout=torch.jagged) for p in parts)
    out = attention_nested(q, k, v, mask=tw.causal(), backend="blockwise")
    assert out.is_nested and out.shape[0] == 3 and torch.equal(out.offsets(), q.offsets())
    for b, piece in enumerate(out.unbind()):
        one = [p[b].transpose(0, 1)[None] for p in parts]
        want = tw.attention(*one, mask=tw.causal(), backend="blockwise")[0].transpose(0, 1)
        torch.testing.assert_close(piece, want)
        got, wanted = (
            torch.autograd.grad(t.square().sum(), parts[1][b], retain_graph=True)[0] for t in (piece, want)
        )
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    with pytest.raises(tw.DTypeError, match="jagged"):
        attention_nested(q, k, torch.randn(3, 5, 2, 16))


def _decode(cache, more, table, steps):
    outs = []
    for q, k, v in steps:
        if isinstance(more.get("sequences"), Batch):
            more["sequences"].advance(1)
        outs.append(cache(q, k, v))
    return torch.stack(outs)


@needs_dynamo
@pytest.mark.parametrize("paged", [False, True])
def test_a_step_compiles_once_for_growing_lengths(paged):
    torch.manual_seed(1)
    torch._dynamo.reset()
    table, steps = RotaryTable.make(16, 64), [[torch.randn(2, h, 1, 16) for h in (4, 2, 2)] for _ in range(5)]
    results = []
    for compiled in (False, True):
        if paged:
            cache = PagedKVCache(20, 4, 2, 16)
            more = {"sequences": cache.batch([cache.new_sequence(), cache.new_sequence()])}
        else:
            cache, more = KVCache.allocate(2, 2, 40, 16), {}

        def call(q, k, v, cache=cache, more=more):
            return attention_with_cache(q, cache, k, v, rotary=table, mask=tw.causal(), **more)

        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        function = torch.compile(call, backend=counter, fullgraph=True) if compiled else call
        with torch.no_grad():
            results.append(_decode(function, more, table, steps))
        lengths = cache.lengths if not paged else more["sequences"].lengths[0]
        assert lengths.tolist() == [5, 5]
    assert counter.frame_count == 1
    torch.testing.assert_close(*results)


def test_the_append_op_says_what_it_does():
    """Schema, fakes and mutation, as torch's own checker sees them."""
    k, v = torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 8)
    pools = torch.zeros(4, 2, 8, 16), torch.zeros(4, 2, 8, 8)
    lengths, pages = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([[2], [1]], dtype=torch.int32)
    table, q = RotaryTable.make(8, 16), torch.randn(2, 4, 3, 16)
    plain = (k, v, *pools, lengths, pages, None, None, None, None, None, False, *[None] * 5)
    turned = (k, v, *pools, lengths, pages, None, q, None, table.cos, table.sin, False, *[None] * 5)
    op = torch.ops.tilewise.append_to_cache.default
    for args in (plain, turned):
        torch.library.opcheck(
            op, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        )
    assert op(*plain).shape == (0,) and op(*turned).shape == q.shape
    assert torch.equal(pools[1][2, :, :3], v[0]) and torch.equal(pools[1][1, :, 4:7], v[1])
    with pytest.raises(tw.ShapeError, match="room for 8"):
        op(k, v, *pools, lengths + 2, *plain[5:])


def test_explain_knows_pages():
    """The plan of a read of pages: its backend, its tiles up to the lengths, the reasons of the others."""
    pool, pages = torch.zeros(6, 2, 16, 32), torch.tensor([[3, 1, 0], [5, 2, 4]])
    given = {"pages": True, "block_table": pages, "seqused_k": torch.tensor([40, 7]), "mask": tw.causal()}
    plan = tw.explain(torch.zeros(2, 4, 1, 32), pool, pool, backend="blockwise", **given)
    assert plan.backend == "blockwise" and plan.problem["seqlen_k"] == 48 and plan.pairs[1] == 47
    packed = torch.zeros(5, 4, 32), {"cu_seqlens_q": torch.tensor([0, 2, 5])}
    plan = tw.explain(packed[0], pool, pool, **given, **packed[1])
    assert plan.problem["batch"] == 2 and plan.pairs[1] == 2 * 40 + 3 * 7 and plan.flops > 0
    assert all(
        reasons or name == plan.backend
        for name, reasons in plan.candidates
        if name in ("triton", plan.backend)
    )


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_a_prepared_append_launches_what_append_launches(rotary, paged, monkeypatch):
    """The addresses that reach the kernel are the same, tensor by tensor, whichever way they are written."""
    pytest.importorskip("triton", minversion="3.6")
    from tilewise.backends.protocol import Append
    from tilewise.backends.triton import launch_append

    class Direct:
        """A launcher that notes what it is given."""

        device, slots = 0, {n: 3 * n for n in range(len(launch_append.TENSORS))}

        def __init__(self):
            self.free, self.seen = [], []

        def block(self):
            return self.free.pop() if self.free else type("Block", (), {"words": [0] * 60})()

        def __call__(self, grid, block):
            self.seen.append((grid, list(block.words)))

    direct = Direct()
    recipe = launch_append._Recipe(None, direct, (), 7)
    monkeypatch.setattr(launch_append, "_recipe", lambda *_: recipe)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)

    def inputs():
        k, v, q = (torch.randn(2, heads, 1, 16).bfloat16() for heads in (2, 2, 4))
        table = RotaryTable.make(16, 32) if rotary else (None, None, False)
        return Append(
            k, v, *(torch.zeros(4, 2, 8, 16).bfloat16() for _ in range(2)), torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, 3, dtype=torch.int32) if paged else None, q=q if rotary else None, cos=table[0],
            sin=table[1], interleaved=table[2],
        )  # fmt: skip

    prepared = launch_append.prepare(inputs())
    assert prepared is not None
    for _ in range(3):
        given = inputs()
        outs = [way(given) for way in (launch_append.append, prepared)]
        (grid, words), (grid_again, words_again) = direct.seen[-2:]
        at = Direct.slots[launch_append.OUT]
        assert grid == grid_again == 7 and [o is not None for o in outs] == [rotary, rotary]
        if rotary:
            assert words_again[at] == outs[1].data_ptr() and outs[0].stride() == outs[1].stride()
            words[at] = words_again[at]
        assert words == words_again and sum(w != 0 for w in words) == 5 + paged + 4 * rotary
    for more in ({"first": given.lengths}, {"k_scale": torch.ones(2)}):
        assert launch_append.prepare(given._replace(**more)) is None
