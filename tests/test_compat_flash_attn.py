"""flash_attn 2's dense and packed functions, over the shapes and flags of its own suite, held to float64."""

from __future__ import annotations

import inspect

import pytest
import torch
from flash_reference import Flags, hold, make_qkv, run, short, thin

import tilewise as tw
from tilewise.compat import flash_attn2 as fa2
from tilewise.compat import flash_attn2_private as private

PAIRS = [
    (113, 203), (128, 217), (113, 211), (108, 256), (64, 128), (97, 97), (1, 239), (239, 1), (3, 199), (127, 130),
    (33, 32),
]  # fmt: skip
LONG = [
    (256, 512),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (3, 799),
    (127, 512),
    (512, 127),
    (200, 1025),
]
LONGEST = [(2048, 2048), (64, 2048), (16, 20000), (20000, 16), (16, 100000), (768, 768)]
AXES = {
    "dtype": [torch.float16, torch.bfloat16],
    "heads": [(6, 6), (6, 1), (6, 2)],
    "dim": [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256],
    "causal": [False, True],
    "local": [False, True],
    "alibi": [False, True, "per batch"],
    "softcap": [0.0, 50.0],
    "deterministic": [False, True],
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


def flags_of(case, lengths):
    """Flags, the window as flash_attn spells it, and slopes."""
    window = tuple(int(n) for n in torch.randint(0, lengths[1], (2,))) if case["local"] else (-1, -1)
    flags = Flags(case["causal"], tuple(None if n < 0 else n for n in window), softcap=case["softcap"])
    shape = {False: None, True: (case["heads"][0],), "per batch": (2, case["heads"][0])}[case["alibi"]]
    return flags, window, None if shape is None else torch.rand(*shape) * 0.3


def check_dense(case, lengths):
    flags, window, slopes = flags_of(case, lengths)
    inputs = make_qkv(2, lengths, case["heads"], case["dim"], case["dtype"])
    if case["softcap"]:
        inputs["q"] = inputs["q"] * case["softcap"]  # so that the tanh matters, as in the original suite
    do = torch.randn_like(inputs["q"])

    def call(x):
        out, lse, mask = fa2.flash_attn_func(
            x["q"],
            x["k"],
            x["v"],
            0.0,
            None,
            case["causal"],
            window,
            case["softcap"],
            slopes,
            case["deterministic"],
            True,
        )
        assert mask.numel() == 0
        return out, lse

    got = run(call, inputs, do)
    assert got["out"].is_contiguous() and got["lse"].shape == (2, case["heads"][0], lengths[0])
    hold(got, inputs, lambda x: flags.dense(*lengths, slopes), do)


@pytest.mark.parametrize("case", thin(33, pair=PAIRS, **AXES), ids=short)
def test_dense(case):
    check_dense(case, case["pair"])


@pytest.mark.slow
@pytest.mark.parametrize("case", thin(36, 1, pair=LONG, **{**AXES, "heads": [(2, 2), (2, 1)]}), ids=short)
def test_dense_full(case):
    check_dense(case, case["pair"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    thin(6, 13, pair=LONGEST, **{**AXES, "heads": [(2, 1)], "dim": [32, 64], "alibi": [False, True]}),
    ids=short,
)
def test_dense_longest(case):
    check_dense(case, case["pair"])


@pytest.mark.parametrize("packing", ["qkv", "kv", "varlen qkv", "varlen kv"])
def test_packed_tensors_and_their_gradients(packing):
    flags = Flags(True, (20, None))
    inputs = make_qkv(2, (40, 40), (4, 4), 32, torch.bfloat16)
    do = torch.randn_like(inputs["q"])
    edges = torch.tensor([0, 40, 80], dtype=torch.int32)
    tail = {"causal": True, "window_size": (20, -1), "return_attn_probs": True}

    def call(x):
        q, qkv, kv = x["q"], torch.stack([x["q"], x["k"], x["v"]], 2), torch.stack([x["k"], x["v"]], 2)
        if packing == "qkv":
            out, lse, _ = fa2.flash_attn_qkvpacked_func(qkv, **tail)
        elif packing == "kv":
            out, lse, _ = fa2.flash_attn_kvpacked_func(q, kv, **tail)
        elif packing == "varlen qkv":
            out, lse, _ = fa2.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), edges, 40, **tail)
        else:
            q, kv = q.flatten(0, 1), kv.flatten(0, 1)
            out, lse, _ = fa2.flash_attn_varlen_kvpacked_func(q, kv, edges, edges, 40, 40, **tail)
        if packing.startswith("varlen"):
            return out.view(2, 40, 4, 32), lse.view(4, 2, 40).transpose(0, 1)
        return out, lse

    hold(run(call, inputs, do), inputs, lambda x: flags.dense(40, 40), do)


def check_varlen(case, lengths_q, lengths_k):
    """Each sequence against the dense reference; the lse comes as (H, T)."""
    flags, window, slopes = flags_of({**case, "alibi": bool(case["alibi"])}, (max(lengths_q), max(lengths_k)))
    edges = [
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    ]
    heads, heads_kv = case["heads"]
    q = torch.randn(sum(lengths_q), heads, case["dim"]).to(case["dtype"])
    k, v = (torch.randn(sum(lengths_k), heads_kv, case["dim"]).to(case["dtype"]) for _ in range(2))
    do = torch.randn_like(q)

    def call(x):
        out, lse, _ = fa2.flash_attn_varlen_func(
            x["q"], x["k"], x["v"], *edges, max(lengths_q), max(lengths_k), 0.0, None, case["causal"], window,
            case["softcap"], slopes, case["deterministic"], True,
        )  # fmt: skip
        return out, lse

    got = run(call, {"q": q, "k": k, "v": v}, do)
    for n, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows = slice(int(edges[0][n]), int(edges[0][n + 1]))
        keys = slice(int(edges[1][n]), int(edges[1][n + 1]))
        part = {"q": q[None, rows], "k": k[None, keys], "v": v[None, keys]}
        own = {name: got[name][None, rows] for name in ("out", "dq")}
        own |= {"lse": got["lse"][None, :, rows], "dk": got["dk"][None, keys], "dv": got["dv"][None, keys]}
        if nq and nk:
            hold(own, part, lambda x, nq=nq, nk=nk: flags.dense(nq, nk, slopes), do[None, rows])
        else:
            assert not any(own[name].any() for name in ("out", "dq", "dk", "dv"))
            assert (own["lse"] == -torch.inf).all()


@pytest.mark.parametrize("case", thin(12, 2, **AXES), ids=short)
def test_varlen(case):
    check_varlen(case, [40, 1, 0, 33, 17], [33, 60, 9, 33, 0])


@pytest.mark.slow
@pytest.mark.parametrize("case", thin(18, 3, pair=LONG, **{**AXES, "heads": [(2, 2), (2, 1)]}), ids=short)
def test_varlen_full(case):
    longest_q, longest_k = case["pair"]
    check_varlen(
        case, torch.randint(1, longest_q + 1, (5,)).tolist(), torch.randint(1, longest_k + 1, (5,)).tolist()
    )


@pytest.mark.parametrize("p", [0.17, 0.5])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_is_what_the_returned_mask_says(p, packed):
    inputs = make_qkv(2, (48, 64), (4, 2), 32, torch.float16)
    do = torch.randn_like(inputs["q"])
    edges = [torch.arange(3, dtype=torch.int32) * n for n in (48, 64)]
    seen = []

    def call(x):
        torch.manual_seed(5)
        if packed:
            flat = [x[name].flatten(0, 1) for name in "qkv"]
            out, lse, mask = fa2.flash_attn_varlen_func(
                *flat, *edges, 48, 64, p, causal=True, return_attn_probs=True
            )
            out, lse = out.view_as(x["q"]), lse.view(4, 2, 48).transpose(0, 1)
        else:
            out, lse, mask = fa2.flash_attn_func(
                x["q"], x["k"], x["v"], p, causal=True, return_attn_probs=True
            )
        seen.append(mask)
        return out, lse

    got = run(call, inputs, do)
    (mask,) = seen
    kept, weights = ~torch.signbit(mask), mask.abs().double()
    flags = Flags(True)
    visible = flags.keep(48, 64).expand(2, 4, 48, 64)
    assert abs(float((~kept)[visible].double().mean()) - p) < 0.02
    hold(got, inputs, lambda x: flags.dense(48, 64, kept=kept, p=p), do)
    q, k = (inputs[name].double().transpose(1, 2) for name in "qk")
    score = (q @ k.repeat_interleave(2, 1).mT / 32**0.5).masked_fill(~visible, -torch.inf)
    assert (weights - torch.softmax(score, -1)).abs().max() < 2e-3


@pytest.mark.parametrize("page", [1, 5, 64])
def test_varlen_reads_pages_in_any_order(page):
    lengths = torch.tensor([33, 1, 60])
    pages = int(-(-60 // page))
    table = torch.randperm(3 * pages).view(3, pages).int()
    k, v = (torch.randn(3 * pages, page, 2, 32) for _ in range(2))
    table[1, 1:] = 10**6  # beyond a length a table may hold anything
    q = torch.randn(12, 4, 32)
    edges_q = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    edges_k = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    got, lse, _ = fa2.flash_attn_varlen_func(
        q, k, v, edges_q, edges_k, 6, 60, causal=True, return_attn_probs=True, block_table=table
    )
    flat = [
        torch.cat([t[table[b].clamp(max=3 * pages - 1)].flatten(0, 1)[:n] for b, n in enumerate(lengths)])
        for t in (k, v)
    ]
    want, want_lse = tw.attention_varlen(q, *flat, edges_q, edges_k, mask=tw.causal(), return_lse=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(lse, want_lse)


def test_rows_without_a_key_give_zero_and_minus_infinity():
    q, k = torch.randn(1, 8, 2, 16, requires_grad=True), torch.randn(1, 3, 2, 16)
    out, lse, _ = fa2.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert (out[:, :5] == 0).all() and (lse[..., :5] == -torch.inf).all()
    assert not torch.autograd.grad(out.sum(), q)[0][:, :5].any()


def test_lse_under_alibi_is_the_true_one_and_has_a_gradient():
    inputs = make_qkv(1, (9, 9), (2, 2), 16, torch.float64)
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    q, k, v = (t.requires_grad_() for t in inputs.values())
    _, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    i = torch.arange(9.0, dtype=torch.float64)
    score = torch.einsum("bihd,bjhd->bhij", q, k) / 4 - slopes[:, None, None] * (i[:, None] - i).abs()
    want = score.masked_fill(i > i[:, None], -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), q)[0] for x in (lse, want)))


def test_slopes_are_learned():
    q = torch.randn(1, 12, 4, 16)
    slopes = torch.rand(4, requires_grad=True)
    fa2.flash_attn_func(q, q, q, causal=True, alibi_slopes=slopes).square().sum().backward()
    assert slopes.grad.abs().min() > 0


def test_private_functions_serve_a_ring():
    """Blocks of keys through _forward, the global out and lse through _backward, as ring attention does."""
    inputs = make_qkv(1, (24, 24), (4, 2), 16, torch.float64)
    q, k, v = inputs.values()
    do = torch.randn_like(q)
    whole = run(lambda x: fa2.flash_attn_func(x["q"], x["k"], x["v"], return_attn_probs=True)[:2], inputs, do)
    parts = [private._flash_attn_forward(q, k[:, a:b], v[:, a:b], 0.0, None, False, -1, -1, 0.0, None, False)
             for a, b in ((0, 10), (10, 24))]  # fmt: skip
    merged = tw.merge(*(tw.Partial(out.transpose(1, 2), lse) for out, lse, _, _ in parts))
    torch.testing.assert_close(merged.out.transpose(1, 2), whole["out"])
    dq = torch.zeros_like(q)
    for a, b in ((0, 10), (10, 24)):
        here, dk, dv = torch.empty_like(q), torch.empty_like(k[:, a:b]), torch.empty_like(v[:, a:b])
        delta = private._flash_attn_backward(
            do,
            q,
            k[:, a:b],
            v[:, a:b],
            whole["out"],
            whole["lse"],
            here,
            dk,
            dv,
            0.0,
            None,
            False,
            -1,
            -1,
            0.0,
            None,
            False,
        )
        dq += here
        torch.testing.assert_close(dk, whole["dk"][:, a:b])
        torch.testing.assert_close(dv, whole["dv"][:, a:b])
        assert delta.shape == (1, 4, 24)
    torch.testing.assert_close(dq, whole["dq"])


def test_private_packed_functions_replay_dropout():
    q = torch.randn(20, 2, 16, dtype=torch.float64)
    edges = torch.tensor([0, 9, 20], dtype=torch.int32)
    do = torch.randn_like(q)
    arguments = (q, q, q, edges, edges, 11, 11, 0.3, None, True)
    out, lse, mask, state = private._flash_attn_varlen_forward(*arguments, return_softmax=True)
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    private._flash_attn_varlen_backward(
        do,
        q,
        q,
        q,
        out,
        lse,
        dq,
        dk,
        dv,
        edges,
        edges,
        11,
        11,
        0.3,
        None,
        True,
        -1,
        -1,
        0.0,
        None,
        False,
        state,
    )
    x = [q.clone().requires_grad_() for _ in range(3)]
    twin = tw.attention_varlen(*x, edges, mask=tw.causal(), dropout=0.3, seed=state)
    torch.testing.assert_close(out, twin.detach())
    for got, want in zip((dq, dk, dv), torch.autograd.grad(twin, x, do), strict=True):
        torch.testing.assert_close(got, want)
    assert mask.shape == (2, 2, 11, 11)


TAIL = ("dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
        "deterministic=False, return_attn_probs=False")  # fmt: skip
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{TAIL}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {TAIL}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}


def written(fn):
    """Names and defaults of a function, as text."""
    parameters = inspect.signature(fn).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_originals(name):
    assert written(getattr(fa2, name)) == SIGNATURES[name]


@pytest.mark.parametrize("window", [(-2, 0), (0, -5), 3, ("a", 0), (1.5, 0), (True, -1), (2**40, 0)])
def test_window_sizes_that_mean_something_elsewhere_are_refused(window):
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(tw.OptionError, match="window_size"):
        fa2.flash_attn_func(q, q, q, window_size=window)


def test_tensors_in_another_layout_are_refused():
    with pytest.raises(tw.ShapeError, match="4 dimensions"):
        fa2.flash_attn_func(*(torch.randn(4, 1, 8) for _ in range(3)))
    with pytest.raises(tw.ShapeError, match="3 dimensions"):
        fa2.flash_attn_varlen_func(
            *(torch.randn(1, 4, 1, 8) for _ in range(3)), *[torch.tensor([0, 4])] * 2, 4, 4
        )


@pytest.mark.parametrize("name, shapes, packed", [
    ("flash_attn_qkvpacked_func", [(2, 5, 2, 4, 8), (2, 5, 3, 8)], []),
    ("flash_attn_kvpacked_func", [(2, 5, 3, 4, 8), (2, 5, 2)], [torch.zeros(2, 5, 4, 8)]),
    ("flash_attn_varlen_qkvpacked_func", [(5, 4, 4, 8), (5, 3, 8)], []),
    ("flash_attn_varlen_kvpacked_func", [(5, 3, 4, 8), (5, 2, 8)], [torch.zeros(5, 4, 8)]),
])  # fmt: skip
def test_packed_tensors_of_another_shape_are_refused(name, shapes, packed):
    edges = torch.tensor([0, 5])
    more = [] if "varlen" not in name else [edges, 5] if "qkv" in name else [edges, edges, 5, 5]
    for shape in shapes:
        with pytest.raises(tw.ShapeError, match="heads, head size"):
            getattr(fa2, name)(*packed, torch.zeros(*shape), *more)
