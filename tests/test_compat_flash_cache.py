"""flash_attn_with_kvcache of both generations: append, rotate, attend, over the grid of the original suite."""

from __future__ import annotations

import pytest
import torch
from flash_reference import Flags, short, thin
from oracle import dense_attention
from versions import needs_dynamo

import tilewise as tw
from tilewise.compat import flash_attn2 as fa2
from tilewise.compat import flash_attn3 as fa3

AXES = {
    "dtype": [torch.float16, torch.bfloat16],
    "heads": [(6, 6), (6, 1), (6, 3)],
    "dim": [32, 59, 64, 80, 128, 256],
    "new": [True, True, False],
    "causal": [False, True],
    "local": [False, True],
    "alibi": [False, True],
    "interleaved": [False, True],
    "fraction": [0.0, 0.5, 1.0],
    "layout": ["plain", "rows", "leftpad", "rows leftpad", "page 1", "page 4", "page 64", "page 256"],
    "lengths": [(1, 128), (1, 339), (3, 200), (16, 128), (64, 80), (128, 128)],
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


def turned(x, cos, sin, position, interleaved):
    """Rotary by complex multiplication, float64: x (N, H, D), position (N,)."""
    half = cos.shape[-1]
    angle = torch.complex(cos.double(), sin.double())[position][:, None]
    part = x[..., : 2 * half].double()
    pairs = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    product = torch.complex(*pairs) * angle
    result = (
        torch.stack((product.real, product.imag), -1).flatten(-2)
        if interleaved
        else torch.cat((product.real, product.imag), -1)
    )
    return torch.cat((result, x[..., 2 * half :].double()), -1)


class Setting:
    """A cache of one of the layouts, and the same keys and values as plain sequences."""

    def __init__(self, case, batch=2):
        (self.nq, self.capacity), (heads, self.heads_kv), dim, dtype = (
            case["lengths"],
            case["heads"],
            case["dim"],
            case["dtype"],
        )
        self.case, self.batch = case, batch
        make = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
        self.q = make(batch, self.nq, heads, dim)
        self.added = self.nq if case["new"] else 0
        self.k, self.v = (
            (make(batch, self.nq, self.heads_kv, dim) if case["new"] else None) for _ in range(2)
        )
        self.lengths = (
            torch.randint(1, self.capacity - self.added + 1, (batch,))
            if self.capacity > self.added
            else torch.zeros(batch).long()
        )
        self.rows = torch.randperm(batch + 3)[:batch] if "rows" in case["layout"] else None
        self.leftpad = (
            (torch.rand(batch) * (self.lengths + 1)).long() if "leftpad" in case["layout"] else None
        )
        self.table = None
        self.k_cache, self.v_cache = (
            make(batch + 3 if self.rows is not None else batch, self.capacity, self.heads_kv, dim)
            for _ in range(2)
        )
        if case["layout"].startswith("page"):
            size = int(case["layout"].split()[1])
            each = -(-self.capacity // size)
            self.table = torch.randperm(batch * each).view(batch, each).int()
            self.k_cache, self.v_cache = (make(batch * each, size, self.heads_kv, dim) for _ in range(2))
        rotary = int(case["fraction"] * dim) // 16 * 16 if case["new"] else 0
        angle = torch.rand(self.capacity, rotary // 2) * 6.28
        self.cos, self.sin = (f(angle).to(dtype) if rotary else None for f in (torch.cos, torch.sin))
        self.slopes = torch.rand(heads) * 0.3 if case["alibi"] else None
        left, right = (int(n) for n in torch.randint(0, self.capacity, (2,))) if case["local"] else (-1, -1)
        self.window = (left, right)
        self.flags = Flags(case["causal"], tuple(None if n < 0 else n for n in self.window))

    def sequence(self, cache, b):
        """Cache entries of sequence b, (capacity or more, Hkv, D)."""
        if self.table is not None:
            return cache[self.table[b].long()].flatten(0, 1)
        return cache[b if self.rows is None else self.rows[b]]

    def expected(self, dtype):
        """(out, lse, keys, values) of each sequence, in dtype, before the call has changed the cache."""
        results = []
        for b in range(self.batch):
            n, moving = int(self.lengths[b]), self.case["causal"] or self.case["local"]
            q = self.q[b].double()
            keys, values = (self.sequence(c, b)[:n].double() for c in (self.k_cache, self.v_cache))
            if self.k is not None:
                new = self.k[b].double()
                if self.cos is not None:
                    place = n + torch.arange(self.nq)
                    new = (
                        turned(new, self.cos, self.sin, place, self.case["interleaved"])
                        .to(self.q.dtype)
                        .double()
                    )
                    where = place if moving else torch.full_like(place, n)
                    q = (
                        turned(q, self.cos, self.sin, where, self.case["interleaved"])
                        .to(self.q.dtype)
                        .double()
                    )
                keys, values = torch.cat((keys, new)), torch.cat((values, self.v[b].double()))
            start = 0 if self.leftpad is None else int(self.leftpad[b])
            part = [t.transpose(0, 1)[None].to(dtype) for t in (q, keys[start:], values[start:])]
            out, lse = dense_attention(*part, self.flags.dense(self.nq, len(keys) - start, self.slopes))
            results.append((out[0].transpose(0, 1), lse[0], keys, values))
        return results

    def held(self, out, lse, truth, ordinary):
        """The suite's rule: 3 times ordinary attention's error (5 with ALiBi) + 1e-5, lse too; keys in place."""
        factor = 5 if self.case["alibi"] else 3
        for b, ((want, want_lse, keys, values), (low, low_lse, _, _)) in enumerate(
            zip(truth, ordinary, strict=True)
        ):
            own = (low.double() - want).abs().max()
            floor = torch.finfo(out.dtype).eps * want.abs().max()
            assert (out[b].double() - want).abs().max() <= factor * own + floor + 1e-5
            finite = want_lse.isfinite()
            assert torch.equal(lse[b].isfinite(), finite)
            own = (low_lse[finite].double() - want_lse[finite]).abs().max() if finite.any() else 0.0
            assert (
                not finite.any()
                or (lse[b][finite].double() - want_lse[finite]).abs().max() <= factor * own + 1e-5
            )
            total = len(keys)
            assert torch.equal(self.sequence(self.v_cache, b)[:total].double(), values)
            torch.testing.assert_close(
                self.sequence(self.k_cache, b)[:total].double(), keys, atol=1e-3, rtol=1e-3
            )


def check(case, module):
    setting = Setting(case)
    truth, ordinary = setting.expected(torch.float64), setting.expected(setting.q.dtype)
    pages = {("block_table" if module is fa2 else "page_table"): setting.table}
    if module is fa2:
        pages["alibi_slopes"] = setting.slopes
    out, lse = module.flash_attn_with_kvcache(
        setting.q, setting.k_cache, setting.v_cache, setting.k, setting.v, rotary_cos=setting.cos,
        rotary_sin=setting.sin,
        cache_seqlens=setting.lengths.int(), cache_batch_idx=setting.rows, cache_leftpad=setting.leftpad,
        causal=case["causal"], window_size=setting.window, rotary_interleaved=case["interleaved"], num_splits=1,
        return_softmax_lse=True, **pages,
    )  # fmt: skip
    setting.held(out, lse, truth, ordinary)


@pytest.mark.parametrize("case", thin(36, 6, **AXES), ids=short)
def test_step(case):
    check(case, fa2)


@pytest.mark.parametrize("case", thin(14, 7, **{**AXES, "alibi": [False]}), ids=short)
def test_step_of_the_third_generation(case):
    check(case, fa3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    thin(
        60,
        8,
        **{**AXES, "lengths": [*AXES["lengths"], (3, 799), (64, 800), (256, 256), (1, 3577), (16, 2000)]},
    ),
    ids=short,
)
def test_step_full(case):
    check(case, fa2)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("packed_new", [False, True])
def test_packed_queries_and_packed_new_keys(rotary, packed_new):
    lengths, rows, new = torch.tensor([5, 0, 17]), torch.tensor([3, 0, 2]), torch.tensor([4, 0, 2])
    cache = [torch.randn(3, 32, 2, 16) for _ in range(2)]
    q, k, v = torch.randn(5, 4, 16), *(torch.randn(6, 2, 16) for _ in range(2))
    angle = torch.rand(40, 8)
    edges = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (rows, new)]
    shift = lengths // 2
    options = (
        {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_seqlens": shift} if rotary else {}
    )
    twins = [t.clone() for t in cache]
    if packed_new:
        given = {"k": k, "v": v, "cu_seqlens_k_new": edges[1]}
    else:
        new = torch.tensor([2, 2, 2])
        given = {"k": k.view(3, 2, 2, 16), "v": v.view(3, 2, 2, 16)}
    out, lse = fa3.flash_attn_with_kvcache(
        q, *cache, **given, cache_seqlens=lengths.int(), cu_seqlens_q=edges[0], max_seqlen_q=3, causal=True,
        rotary_interleaved=False, return_softmax_lse=True, **options,
    )  # fmt: skip
    first = 0
    for b in range(3):
        at, count = slice(int(edges[0][b]), int(edges[0][b + 1])), int(new[b])
        step = {"k": k[None, first : first + count], "v": v[None, first : first + count]}
        first += count
        one = {**options, "rotary_seqlens": shift[b : b + 1]} if rotary else {}
        want, want_lse = fa3.flash_attn_with_kvcache(
            q[None, at], *(t[b : b + 1] for t in twins), **step, cache_seqlens=int(lengths[b]), causal=True,
            rotary_interleaved=False, return_softmax_lse=True, **one,
        )  # fmt: skip
        torch.testing.assert_close(out[at], want[0])
        torch.testing.assert_close(lse[:, at], want_lse[0])
    for mine, twin in zip(cache, twins, strict=True):
        assert torch.equal(mine, twin)


def test_chunks_turn_each_query_at_its_own_position():
    """As a window does: to the original both are local attention. Here neither hides a key."""
    q, k, v = torch.randn(1, 3, 4, 16), *(torch.randn(1, 3, 2, 16) for _ in range(2))
    angle = torch.rand(40, 8)
    cache = [torch.randn(1, 32, 2, 16) for _ in range(2)]
    given = {"k": k, "v": v, "rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "cache_seqlens": 9}
    chunk, window, neither = (
        fa3.flash_attn_with_kvcache(q, *(t.clone() for t in cache), **given, **options)
        for options in ({"attention_chunk": 64}, {"window_size": (64, 64)}, {})
    )
    torch.testing.assert_close(chunk, window)
    assert not torch.allclose(chunk, neither)


def test_values_beside_the_query():
    """qv adds qv . v to the scores of the cache."""
    q, qv, cache = (
        torch.randn(2, 3, 4, 16),
        torch.randn(2, 3, 4, 16),
        [torch.randn(2, 20, 2, 16) for _ in range(2)],
    )
    got = fa3.flash_attn_with_kvcache(q, *cache, qv=qv, cache_seqlens=20, causal=True)
    torch.testing.assert_close(got, fa3.flash_attn_func(q, *cache, causal=True, qv=qv))


def test_poison_beyond_the_length_and_before_the_padding_never_matters():
    q, cache = torch.randn(2, 2, 2, 16), [torch.randn(2, 20, 2, 16) for _ in range(2)]
    options = {"cache_seqlens": torch.tensor([9, 20]), "cache_leftpad": torch.tensor([4, 0]), "causal": True}
    clean = fa2.flash_attn_with_kvcache(q, *cache, **options)
    for t in cache:
        t[0, 9:], t[0, :4] = torch.nan, torch.inf
    # A compiled backend may do such a call again by the reference, so the last bits may differ.
    torch.testing.assert_close(fa2.flash_attn_with_kvcache(q, *cache, **options), clean, rtol=1e-5, atol=1e-6)


def test_lengths_are_not_advanced_and_nothing_is_recorded():
    q = torch.randn(1, 1, 2, 16, requires_grad=True)
    cache, lengths = [torch.zeros(1, 8, 2, 16) for _ in range(2)], torch.tensor([3], dtype=torch.int32)
    out = fa2.flash_attn_with_kvcache(q, *cache, q, q, cache_seqlens=lengths)
    assert lengths.item() == 3 and not out.requires_grad and not cache[0].requires_grad
    assert torch.equal(cache[0][0, 3], q[0, 0].detach()) and not cache[0][0, 4:].any()


def test_whole_cache_without_lengths():
    q, cache = torch.randn(2, 3, 2, 16), [torch.randn(2, 8, 2, 16) for _ in range(2)]
    torch.testing.assert_close(
        fa2.flash_attn_with_kvcache(q, *cache, causal=True), fa2.flash_attn_func(q, *cache, causal=True)
    )


@needs_dynamo
def test_a_compiled_step_is_one_graph():
    q, cache = torch.randn(2, 1, 2, 16), [torch.randn(2, 8, 2, 16) for _ in range(2)]
    lengths, angle = torch.tensor([3, 5], dtype=torch.int32), torch.rand(8, 8)

    def step(q, k_cache, v_cache):
        return fa2.flash_attn_with_kvcache(
            q, k_cache, v_cache, q, q, angle.cos(), angle.sin(), cache_seqlens=lengths, causal=True
        )

    twins = [t.clone() for t in cache]
    got = torch.compile(step, fullgraph=True, backend="eager")(q, *cache)
    torch.testing.assert_close(got, step(q, *twins))
    for mine, twin in zip(cache, twins, strict=True):
        assert torch.equal(mine, twin)


def step_with(**changes):
    """A decoding step with some arguments changed."""
    x = lambda *shape: torch.randn(*shape)  # noqa: E731
    given = {"q": x(2, 1, 2, 16), "k_cache": x(2, 8, 2, 16), "v_cache": x(2, 8, 2, 16), **changes}
    return fa2.flash_attn_with_kvcache(**given)


NEW = {name: torch.zeros(2, 1, 2, 16) for name in "kv"}
TABLE = {"k_cache": torch.zeros(6, 4, 2, 16), "v_cache": torch.zeros(6, 4, 2, 16)}


@pytest.mark.parametrize("changes, words", [
    ({**NEW}, "cache_seqlens"),
    ({**NEW, "cache_seqlens": 8}, "room for 8"),
    ({"cache_seqlens": torch.tensor([3, 9])}, "holds 8"),
    ({"cache_seqlens": torch.tensor([3, -1])}, "from -1"),
    ({"k": NEW["k"], "cache_seqlens": 1}, "together"),
    ({"rotary_cos": torch.zeros(9, 8), "rotary_sin": torch.zeros(9, 8)}, "give k and v"),
    ({**NEW, "cache_seqlens": 3, "rotary_cos": torch.zeros(2, 8), "rotary_sin": torch.zeros(2, 8)}, "2 rows"),
    ({**NEW, "cache_seqlens": 3, "rotary_cos": torch.zeros(9, 9), "rotary_sin": torch.zeros(9, 9)}, "rotary_dim"),
    ({**TABLE, "block_table": torch.tensor([[0, 1], [2, 6]]), "cache_seqlens": 8}, "there are 6 pages"),
    ({**TABLE, "block_table": torch.tensor([[0, 1], [2, 3]]), "cache_batch_idx": torch.tensor([0, 1])}, "exclude"),
    ({**TABLE, "block_table": torch.tensor([[0, 1], [2, 3]]), "cache_leftpad": torch.tensor([0, 1])}, "exclude"),
    ({"k_cache": torch.zeros(3, 8, 2, 16), "v_cache": torch.zeros(3, 8, 2, 16)}, "batch size"),
    ({"cache_seqlens": [3, 4]}, "not \\[3, 4\\]"),
    ({"cache_seqlens": 3.0}, "an int"),
    ({"cache_seqlens": torch.tensor([3, 4, 5])}, r"cache_seqlens is .*\(2,\)"),
    ({"cache_seqlens": torch.tensor([True, False])}, "integers"),
    ({"cache_batch_idx": torch.tensor([1])}, r"cache_batch_idx is .*\(2,\)"),
    ({"cache_batch_idx": torch.tensor([1.0, 0.0])}, "cache_batch_idx is a tensor of integers"),
    ({"cache_batch_idx": [1, 0]}, "cache_batch_idx is a tensor of integers"),
    ({"cache_leftpad": torch.tensor([1])}, r"cache_leftpad is .*\(2,\)"),
    ({**TABLE, "block_table": torch.zeros(3, 2).int(), "cache_seqlens": 3}, r"\(2, pages\)"),
    ({**TABLE, "block_table": torch.zeros(2, 2), "cache_seqlens": 3}, "page table is a tensor of integers"),
    ({**TABLE, "block_table": torch.zeros(4).int(), "cache_seqlens": 3}, r"\(2, pages\)"),
    ({"k": torch.zeros(2, 1, 4, 16), "v": torch.zeros(2, 1, 4, 16), "cache_seqlens": 3}, "k is .2, new tokens, 2, 16"),
    ({"k": torch.zeros(1, 1, 2, 16), "v": torch.zeros(1, 1, 2, 16), "cache_seqlens": 3}, "k is .2, new tokens, 2, 16"),
    ({**NEW, "v": torch.zeros(2, 2, 2, 16), "cache_seqlens": 3}, "v is .2, new tokens"),
    ({**NEW, "cache_seqlens": 3, "rotary_cos": torch.zeros(9, 8)}, "rotary_cos and rotary_sin are given together"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(tw.TilewiseError, match=words):
        step_with(**changes)
