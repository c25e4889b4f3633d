"""What is large in the grids of flash_attn's own suites: long rows, long caches, many splits, wide heads, repeats.

These run with `-m slow`, a seeded sample of each grid; TILEWISE_GRIDS=10 takes ten times as many points of every grid
of the compat tests; TILEWISE_GRIDS=triples as many (3617) as it takes to have every three values of different axes
together; TILEWISE_GRIDS=all every point, a million.
"""

from __future__ import annotations

import pytest
import torch
from flash_reference import Flags, hold, make_qkv, run, short, thin
from test_compat_flash_attn import check_varlen
from test_compat_flash_attn34 import check_three
from test_compat_flash_cache import AXES as CACHE
from test_compat_flash_cache import check as check_cache

import tilewise as tw
from tilewise.compat import flash_attn2 as fa2
from tilewise.compat import flash_attn3 as fa3
from tilewise.compat import flash_attn4 as fa4

pytestmark = pytest.mark.slow
HALVES = [torch.float16, torch.bfloat16]
BOTH = [False, True]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


THREE = {
    "dtype": HALVES, "heads": [(1, 1), (2, 1)], "dims": [(64, 64), (128, 128), (64, 256), (64, 512)], "causal": BOTH,
    "local": BOTH, "chunk": [0, 613], "softcap": [0.0, 15.0], "qv": [False], "deterministic": BOTH,
}  # fmt: skip


@pytest.mark.parametrize("case", thin(4, 21, pair=[(4096, 4096), (4224, 4224)], **THREE), ids=short)
def test_three_longest(case):
    check_three(case, case["pair"])


@pytest.mark.parametrize("case", thin(8, 22, pair=[(640, 128), (799, 3), (2048, 1024), (1024, 2048)],
                                      **{**THREE, "dims": [(64, 512), (192, 192), (256, 256), (128, 256)],
                                         "qv": BOTH}), ids=short)  # fmt: skip
def test_three_wide(case):
    check_three(case, case["pair"])


PACKED = [(1, 3), (2, 1), (511, 1), (3, 513), (307, 256), (64, 128), (512, 256), (1024, 1024), (2048, 2048)]
PACKED_AXES = {
    "dtype": HALVES, "heads": [(6, 6), (6, 1), (6, 2)], "dim": [64, 128, 256], "causal": BOTH, "local": BOTH,
    "alibi": [False], "softcap": [0.0, 50.0], "deterministic": BOTH,
}  # fmt: skip


@pytest.mark.parametrize("empty", ["none", "q", "k", "both"])
@pytest.mark.parametrize("case", thin(4, 23, pair=PACKED, **PACKED_AXES), ids=short)
def test_packed_with_empty_sequences(case, empty):
    """Third-of-the-length draws as in the original, and sequences of length 0 on either side."""
    longest_q, longest_k = case["pair"]
    lengths_q = torch.randint(max(1, longest_q // 3), longest_q + 1, (5,)).tolist()
    lengths_k = torch.randint(max(1, longest_k // 3), longest_k + 1, (5,)).tolist()
    lengths_q[2] = 0 if empty in ("q", "both") else lengths_q[2]
    lengths_k[3] = 0 if empty in ("k", "both") else lengths_k[3]
    check_varlen(
        {**case, "heads": (case["heads"][0] // 3, max(1, case["heads"][1] // 3))}, lengths_q, lengths_k
    )


def test_three_tokens_that_nobody_uses_change_nothing():
    """`add_unused_qkv` of the original: packed tensors hold more tokens than seqused says."""
    used_q, used_k, room = torch.tensor([20, 1, 33]), torch.tensor([40, 9, 0]), 48
    edges = torch.arange(4, dtype=torch.int32) * room
    q, k, v = torch.randn(3 * room, 4, 64), *(torch.randn(3 * room, 2, 64) for _ in range(2))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    keep_q, keep_k = ((torch.arange(room) < n[:, None]).flatten() for n in (used_q, used_k))
    with torch.no_grad():
        q[~keep_q], k[~keep_k], v[~keep_k] = torch.nan, torch.inf, torch.nan
    options = {"causal": True, "window_size": (25, -1), "return_attn_probs": True}
    out, lse = fa3.flash_attn_varlen_func(*inputs, edges, edges, room, room, used_q, used_k, **options)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, do)
    tight = [
        t.detach()[keep].requires_grad_() for t, keep in zip(inputs, (keep_q, keep_k, keep_k), strict=True)
    ]
    small = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (used_q, used_k)]
    want, want_lse = fa3.flash_attn_varlen_func(*tight, *small, room, room, **options)
    torch.testing.assert_close(out[keep_q], want)
    torch.testing.assert_close(lse[:, keep_q], want_lse)
    for got, other, keep in zip(
        grads, torch.autograd.grad(want, tight, do[keep_q]), (keep_q, keep_k, keep_k), strict=True
    ):
        torch.testing.assert_close(got[keep], other, rtol=1e-4, atol=1e-5)
        assert not got[~keep].any()


COMBINE = {
    "splits": [1, 2, 3, 5, 17, 32, 55, 97, 133, 134, 200, 257], "rows": [1, 64, 97, 128, 1024],
    "dim": [64, 96, 128, 192, 256, 512], "dtype": [torch.float32, torch.bfloat16, torch.float16], "strided": BOTH,
}  # fmt: skip


@pytest.mark.parametrize("case", thin(24, 24, **COMBINE), ids=short)
def test_combine(case):
    """Parts with -inf and rows without any key among them, contiguous or not, against float64."""
    splits, rows, dim, dtype = case["splits"], case["rows"], case["dim"], case["dtype"]
    shape = (splits, 2, rows, 3)
    lse = torch.randn(*shape) * 3
    lse[torch.rand(*shape) < 0.3] = -torch.inf
    lse[:, 0, 0] = -torch.inf
    parts = torch.randn(*shape, dim).to(dtype)
    if case["strided"]:
        lse, parts = lse.transpose(1, 3).contiguous().transpose(1, 3), parts.mT.contiguous().mT
    out, total = fa3.flash_attn_combine(parts, lse, out_dtype=torch.float32)
    want = lse.double().logsumexp(0)
    weight = torch.exp(lse.double() - want.masked_fill(want == -torch.inf, 0.0))
    truth = (weight[..., None] * parts.double()).sum(0)
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
    assert (total[0, 0] == -torch.inf).all() and not out[0, 0].any()
    flat, none = fa4.flash_attn_combine(
        parts.flatten(1, 2), lse.flatten(1, 2), out_dtype=torch.float32, return_lse=False
    )
    assert none is None and torch.equal(flat, out.flatten(0, 1))


LONG_CACHES = [(1, 8192), (4, 16384), (16, 20000), (1, 65536), (1, 131072), (64, 2048), (3, 100000)]
LONG = {**CACHE, "heads": [(6, 1), (6, 3)], "dim": [64, 128], "lengths": LONG_CACHES}


LAYOUTS = ["plain", "rows", "leftpad", "page 64", "page 256"]


@pytest.mark.parametrize("case", thin(10, 25, **{**LONG, "layout": LAYOUTS}), ids=short)
def test_long_caches(case):
    check_cache(case, fa2)


PAGES = ["plain", "page 1", "page 128"]


@pytest.mark.parametrize("case", thin(7, 26, **{**LONG, "alibi": [False], "layout": PAGES}), ids=short)
def test_long_caches_of_the_third_generation(case):
    check_cache(case, fa3)


FOUR = {
    "dtype": HALVES, "heads": [(4, 4), (4, 1), (4, 2)],
    "dims": [(8, 8), (16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)],
    "window": ["none", "two-sided", "negative right", "negative left"], "causal": BOTH, "sink": BOTH,
    "softcap": [0.0, 15.0],
    "pair": [(1, 1), (97, 97), (113, 203), (257, 131), (384, 256), (640, 128), (1023, 1024)],
}  # fmt: skip


@pytest.mark.parametrize("case", thin(32, 27, **FOUR), ids=short)
def test_four(case):
    """Head sizes from 8 to 256, windows on and off the diagonal, a learned sink with a gradient, D_v != D."""
    (nq, nk), (dim, dim_v) = case["pair"], case["dims"]
    left, right = (int(n) for n in torch.randint(0, nk, (2,)))
    kind = "two-sided" if case["causal"] and case["window"].startswith("negative") else case["window"]
    window = {
        "none": (None, None), "two-sided": (left, right), "negative right": (left + right + 1, -right - 1),
        "negative left": (-left - 1, left + right + 1),
    }[kind]  # fmt: skip
    flags = Flags(case["causal"], (window[0], 0 if case["causal"] else window[1]), softcap=case["softcap"])
    inputs = make_qkv(2, (nq, nk), case["heads"], dim, case["dtype"], dim_v)
    inputs["q"] = inputs["q"] * max(case["softcap"], 1.0)
    if case["sink"]:
        inputs["sink"] = torch.randn(4).to(case["dtype"])
    do = torch.randn(2, nq, 4, dim_v).to(case["dtype"])

    def call(x):
        return fa4.flash_attn_func(
            x["q"], x["k"], x["v"], causal=case["causal"], window_size=window, softcap=case["softcap"],
            learnable_sink=x.get("sink"),
        )  # fmt: skip

    hold(run(call, inputs, do), inputs, lambda x: flags.dense(nq, nk, sink=x.get("sink")), do)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("length", [1, 2, 5, 17, 128])
def test_large_scores_overflow_no_gradient(length, dim, dtype):
    """Scores in the hundreds and small cotangents, as the original's test of overflow in the backward."""
    inputs = make_qkv(2, (length, length), (5, 5), dim, dtype)
    inputs["q"], inputs["k"] = inputs["q"] * 5, inputs["k"] * 3
    do = torch.randn_like(inputs["q"]) * 5
    got = run(
        lambda x: fa2.flash_attn_func(x["q"], x["k"], x["v"], causal=True, return_attn_probs=True)[:2],
        inputs,
        do,
    )
    assert all(t.isfinite().all() for t in got.values())
    hold(got, inputs, lambda x: Flags(True).dense(length, length), do)


@pytest.mark.parametrize("dim", [40, 128])
def test_gradients_that_come_in_any_strides(dim):
    """do transposed, and with stride 0, as sum() makes it."""
    inputs = make_qkv(2, (65, 130), (4, 2), dim, torch.float16)
    shape = (2, 65, 4, dim)
    call = lambda x: fa2.flash_attn_func(x["q"], x["k"], x["v"], causal=True, return_attn_probs=True)[:2]  # noqa: E731
    for do in (torch.randn(2, 4, 65, dim).half().transpose(1, 2), torch.ones(()).half().expand(shape)):
        hold(run(call, inputs, do), inputs, lambda x: Flags(True).dense(65, 130), do)


@pytest.mark.parametrize("causal, packed", [(False, False), (True, False), (True, True)])
def test_fifty_repeats_are_bit_by_bit_the_same(causal, packed):
    """out, lse and all gradients; the original asks it of its deterministic flag and of out, lse, dk and dv."""
    inputs = make_qkv(6, (239, 239), (4, 2), 64, torch.float16)
    do, edges = torch.randn_like(inputs["q"]), torch.arange(7, dtype=torch.int32) * 239

    def call(x):
        options = {"causal": causal, "deterministic": True, "return_attn_probs": True}
        if not packed:
            return fa2.flash_attn_func(x["q"], x["k"], x["v"], **options)[:2]
        flat = [x[name].flatten(0, 1) for name in "qkv"]
        out, lse, _ = fa2.flash_attn_varlen_func(*flat, edges, edges, 239, 239, **options)
        return out.unflatten(0, (6, 239)), lse

    first = run(call, inputs, do)
    for _ in range(50):
        again = run(call, inputs, do)
        assert all(torch.equal(again[name], first[name]) for name in first)
