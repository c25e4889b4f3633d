"""flash_attn 3 and 4: their own signatures, windows, return values and extras, held to float64."""

from __future__ import annotations

import pytest
import torch
from flash_reference import Flags, hold, make_qkv, run, short, thin
from test_compat_flash_attn import written

import tilewise as tw
from tilewise.compat import flash_attn3 as fa3
from tilewise.compat import flash_attn4 as fa4

PAIRS = [(1, 1), (64, 128), (128, 192), (113, 203), (239, 1), (97, 97), (100, 40), (1, 239), (65, 130)]
LONG = [(799, 3), (384, 256), (640, 128), (256, 512), (1024, 1024), (1023, 1024)]
AXES = {
    "dtype": [torch.float16, torch.bfloat16],
    "heads": [(6, 6), (6, 1), (6, 2)],
    "dims": [(64, 64), (128, 128), (192, 128), (64, 256), (40, 40)],
    "causal": [False, True],
    "local": [False, True],
    "chunk": [0, 0, 37],
    "softcap": [0.0, 15.0],
    "qv": [False, True],
    "deterministic": [False, True],
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


def check_three(case, lengths):
    (dim, dim_v), (heads, _) = case["dims"], case["heads"]
    window = tuple(int(n) for n in torch.randint(0, lengths[1], (2,))) if case["local"] else (-1, -1)
    flags = Flags(case["causal"], tuple(None if n < 0 else n for n in window), case["chunk"], case["softcap"])
    inputs = make_qkv(2, lengths, case["heads"], dim, case["dtype"], dim_v)
    inputs["q"] = inputs["q"] * max(case["softcap"], 1.0)
    if case["qv"]:
        inputs["qv"] = torch.randn(2, lengths[0], heads, dim_v).to(case["dtype"])
    do = torch.randn(2, lengths[0], heads, dim_v).to(case["dtype"])

    def call(x):
        return fa3.flash_attn_func(
            x["q"], x["k"], x["v"], None, case["causal"], x.get("qv"), window_size=window,
            attention_chunk=case["chunk"],
            softcap=case["softcap"], num_splits=3, pack_gqa=True, deterministic=case["deterministic"],
            return_attn_probs=True,
        )  # fmt: skip

    got = run(call, inputs, do)
    hold(got, inputs, lambda x: flags.dense(*lengths), do)


@pytest.mark.parametrize("case", thin(24, 4, pair=PAIRS, **AXES), ids=short)
def test_three(case):
    check_three(case, case["pair"])


@pytest.mark.slow
@pytest.mark.parametrize("case", thin(24, 5, pair=LONG, **{**AXES, "heads": [(2, 2), (2, 1)]}), ids=short)
def test_three_full(case):
    check_three(case, case["pair"])


def test_three_gradients_of_qv_in_float64():
    inputs = make_qkv(1, (5, 7), (2, 1), 4, torch.float64, 3)
    x = [t.requires_grad_() for t in (*inputs.values(), torch.randn(1, 5, 2, 3, dtype=torch.float64))]
    assert torch.autograd.gradcheck(lambda q, k, v, qv: fa3.flash_attn_func(q, k, v, causal=True, qv=qv), x)


def test_three_chunks_have_a_backward():
    inputs = make_qkv(1, (50, 70), (2, 1), 16, torch.float32)
    do = torch.randn_like(inputs["q"])
    options = {"causal": True, "attention_chunk": 16, "return_attn_probs": True}
    call = lambda x: fa3.flash_attn_func(x["q"], x["k"], x["v"], **options)  # noqa: E731
    hold(run(call, inputs, do), inputs, lambda x: Flags(True, chunk=16).dense(50, 70), do)


@pytest.mark.parametrize("grouped", [False, True])
def test_three_packed_tensor(grouped):
    q, k, v = torch.randn(2, 9, 4, 16), *(torch.randn(2, 9, 2 if grouped else 4, 16) for _ in range(2))
    qkv = torch.cat((q, k, v), 2) if grouped else torch.stack((q, k, v), 2)
    got = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4 if grouped else None)
    torch.testing.assert_close(got, fa3.flash_attn_func(q, k, v, causal=True))
    with pytest.raises(tw.ShapeError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(torch.randn(2, 9, 8, 16))


def test_three_used_lengths_hide_what_lies_behind_them():
    q, k = torch.randn(20, 4, 16), torch.randn(24, 2, 16)
    edges = torch.tensor([0, 8, 20]), torch.tensor([0, 10, 24])
    used = torch.tensor([8, 5]), torch.tensor([3, 14])
    k[3:10] = torch.nan
    out, lse = fa3.flash_attn_varlen_func(q, k, k, *edges, 12, 14, *used, causal=True, return_attn_probs=True)
    want = fa3.flash_attn_func(q[None, :8], k[None, :3], k[None, :3], causal=True)[0]
    torch.testing.assert_close(out[:8], want)
    torch.testing.assert_close(
        out[8:13], fa3.flash_attn_func(q[None, 8:13], k[None, 10:], k[None, 10:], causal=True)[0]
    )
    assert not out[13:].any() and (lse[:, 13:] == -torch.inf).all()


@pytest.mark.parametrize("packed", [False, True])
def test_three_fp8_uses_its_factors(packed):
    q, k, v = (torch.randn(2, 16, h, 32).to(torch.float8_e4m3fn) for h in (4, 2, 2))
    factors = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    wide = [
        t.double() * f.double().repeat_interleave(t.shape[2] // 2, 1)[:, None, :, None]
        for t, f in zip((q, k, v), factors, strict=True)
    ]
    want = fa3.flash_attn_func(*wide, causal=True)
    if packed:
        edges = torch.tensor([0, 16, 32], dtype=torch.int32)
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        got = fa3.flash_attn_varlen_func(*flat, edges, edges, 16, 16, causal=True, **names).view(2, 16, 4, 32)
    else:
        got = fa3.flash_attn_func(q, k, v, causal=True, **names)
    assert got.dtype == torch.bfloat16 and not got.requires_grad
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=1e-2)
    with pytest.raises(tw.OptionError, match="descale"):
        fa3.flash_attn_func(*(t.bfloat16() for t in (q, k, v)), q_descale=factors[0])


@pytest.mark.parametrize("splits", [1, 3, 133])
def test_combine_merges_parts_of_the_keys(splits):
    q, k = torch.randn(2, 5, 3, 64, dtype=torch.float64), torch.randn(2, 140, 3, 64, dtype=torch.float64)
    cuts = [0, *sorted(torch.randint(0, 141, (splits - 1,)).tolist()), 140]  # empty parts among them
    parts = [
        fa3.flash_attn_func(q, k[:, a:b], k[:, a:b], return_attn_probs=True)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    outs, lses = torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(1, 2) for p in parts])
    want, want_lse = fa3.flash_attn_func(q, k, k, return_attn_probs=True)
    out, lse = fa3.flash_attn_combine(outs.float(), lses.float())
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse.transpose(1, 2), atol=1e-5, rtol=1e-5)
    place = torch.empty(2, 5, 3, 64, dtype=torch.bfloat16)
    again, _ = fa3.flash_attn_combine(outs.float(), lses.float(), place, torch.bfloat16)
    assert again is place
    torch.testing.assert_close(place, out.bfloat16())
    flat, none = fa4.flash_attn_combine(outs.flatten(1, 2), lses.flatten(1, 2), return_lse=False)
    assert none is None
    torch.testing.assert_close(flat, want.flatten(0, 1))


WINDOWS = [(None, None), (10, 5), (20, -7), (-3, 12), (None, -4), (-5, None), (0, 0)]
WITH_CAUSAL = [
    (window, causal) for window in WINDOWS for causal in (False, True) if not causal or (window[0] or 0) >= 0
]


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window, causal", WITH_CAUSAL, ids=str)
def test_four(window, causal, sink):
    lengths, dtype = (33, 47), torch.bfloat16
    inputs = make_qkv(2, lengths, (4, 2), 64, dtype)
    if sink:
        inputs["sink"] = torch.randn(4).to(dtype)
    do = torch.randn_like(inputs["q"])
    flags = Flags(causal, (window[0], 0 if causal else window[1]))

    def call(x):
        return fa4.flash_attn_func(
            x["q"], x["k"], x["v"], causal=causal, window_size=window, learnable_sink=x.get("sink")
        )

    hold(run(call, inputs, do), inputs, lambda x: flags.dense(*lengths, sink=x.get("sink")), do)


def test_four_gradient_through_lse_and_sink():
    inputs = make_qkv(1, (6, 9), (2, 1), 8, torch.float64)
    x = [
        *(t.requires_grad_() for t in inputs.values()),
        torch.randn(2, dtype=torch.float64, requires_grad=True),
    ]
    call = lambda q, k, v, sink: fa4.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, softcap=3.0)  # noqa: E731
    assert torch.autograd.gradcheck(call, x)


def test_four_returns_a_pair_and_lse_where_it_is_needed():
    q = torch.randn(1, 4, 2, 8)
    assert fa4.flash_attn_func(q, q, q)[1] is None
    assert fa4.flash_attn_func(q, q, q, return_lse=True)[1].shape == (1, 2, 4)
    assert fa4.flash_attn_func(q.clone().requires_grad_(), q, q)[1].shape == (1, 2, 4)
    assert fa4.flash_attn_func(q, q, q, qv=q, return_lse=True)[1].shape == (1, 4, 2)


@pytest.mark.parametrize("packed_q", [False, True])
@pytest.mark.parametrize("keys", ["packed", "padded", "pages"])
def test_four_varlen_packed_or_padded_on_either_side(packed_q, keys):
    lengths_q, lengths_k = torch.tensor([7, 0, 12]), torch.tensor([20, 9, 5])
    q, k, v = torch.randn(3, 12, 4, 16), *(torch.randn(3, 20, 2, 16) for _ in range(2))
    sink = torch.randn(4)
    options = {"causal": True, "window_size": (6, None), "learnable_sink": sink, "return_lse": True}
    edges = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (lengths_q, lengths_k)]
    pick_q, pick_k = (torch.arange(n) < lengths[:, None] for n, lengths in ((12, lengths_q), (20, lengths_k)))
    given = {"cu_seqlens_q": edges[0]} if packed_q else {"seqused_q": lengths_q}
    if keys == "packed":
        given["cu_seqlens_k"] = edges[1]
        k_in, v_in = k[pick_k], v[pick_k]
    elif keys == "padded":
        given["seqused_k"] = lengths_k
        k_in, v_in = k, v
    else:
        order = torch.randperm(15)
        given |= {"seqused_k": lengths_k, "page_table": order.argsort().view(3, 5).int()}
        k_in, v_in = (t.reshape(15, 4, 2, 16)[order] for t in (k, v))
    out, lse = fa4.flash_attn_varlen_func(q[pick_q] if packed_q else q, k_in, v_in, **given, **options)
    for b, (nq, nk) in enumerate(zip(lengths_q.tolist(), lengths_k.tolist(), strict=True)):
        rows = slice(int(edges[0][b]), int(edges[0][b + 1]))
        got = (out[rows], lse[:, rows]) if packed_q else (out[b, :nq], lse[b, :, :nq])
        want = fa4.flash_attn_func(q[b : b + 1, :nq], k[b : b + 1, :nk], v[b : b + 1, :nk], **options)
        torch.testing.assert_close(got, (want[0][0], want[1][0]))


@pytest.mark.parametrize("name", [
    "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors", "gather_kv_indices",
    "gather_bwd_recompute_p", "gather_bwd_token_chunk",
])  # fmt: skip
def test_four_refuses_what_it_cannot_read_with_a_remedy(name):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(tw.UnsupportedProblem, match=f"{name}.*\n.+"):
        fa4.flash_attn_func(q, q, q, **{name: object()})


@pytest.mark.parametrize(
    "window, causal", [((-1, -1), False), ((-1, -1), True), ((-1, 0), False), ((3, -4), False)]
)
def test_four_refuses_windows_without_keys(window, causal):
    """The original takes these for no window, and drops causal with it."""
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(tw.OptionError, match="leaves no key"):
        fa4.flash_attn_func(q, q, q, causal=causal, window_size=window)


DESCALE = "q_descale=None, k_descale=None, v_descale=None"
THREE = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALE}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    "return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    f"seqused_k=None, softmax_scale=None, causal=False, qv=None, {DESCALE}, window_size=(-1, -1), attention_chunk=0, "
    "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    "return_attn_probs=False",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {DESCALE}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {DESCALE}, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
    "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
}
FOUR = {
    "flash_attn_func": "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
    "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None",
    "flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, "
    "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
    "virtual_batch_idx=None, return_lse=True",
    "get_scheduler_metadata": "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, "
    "pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, "
    "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, "
    "seqlen_k_per_split=None, _arch=None",
}


@pytest.mark.parametrize("module, name", [(fa3, n) for n in THREE] + [(fa4, n) for n in FOUR])
def test_signatures_are_the_originals(module, name):
    assert written(getattr(module, name)) == (THREE if module is fa3 else FOUR)[name]


def test_metadata_is_nothing_and_is_taken():
    assert fa3.get_scheduler_metadata(2, 1, 64, 4, 2, 64, torch.tensor([3, 4])) is None
    edges = torch.tensor([0, 3, 7], dtype=torch.int32)
    metadata = fa4.get_scheduler_metadata(4, 4, 2, 1, 16, 8, causal=True, cu_seqlens_q=edges)
    q = torch.randn(7, 2, 16)
    given = {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "causal": True}
    want, _ = fa4.flash_attn_varlen_func(q, q[:, :1], q[:, :1], **given)
    assert torch.equal(
        fa4.flash_attn_varlen_func(q, q[:, :1], q[:, :1], **given, scheduler_metadata=metadata)[0], want
    )
    with pytest.raises(tw.OptionError, match="how many sequences"):
        fa4.get_scheduler_metadata(4, 4, 2, 1, 16, 8)
    with pytest.raises(TypeError, match="num_splits"):
        fa4.get_scheduler_metadata(2, 1, 64, 4, 2)


def test_arguments_of_other_shapes_and_types_are_refused():
    q, k = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
    for qv in (torch.zeros(2, 5, 4, 6), torch.zeros(2, 5, 4), torch.zeros(2, 7, 4, 8)):
        with pytest.raises(tw.ShapeError, match="qv is in q's layout"):
            fa3.flash_attn_func(q, k, k, qv=qv)
    for qkv, heads in (
        (torch.zeros(2, 5, 4, 8), 6),
        (torch.zeros(2, 5, 4, 8), 4),
        (torch.zeros(2, 5, 2, 4, 8), None),
    ):
        with pytest.raises(tw.ShapeError, match="qkv is"):
            fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads)
    parts, lse = torch.zeros(3, 2, 5, 4, 8), torch.zeros(3, 2, 5, 4)
    for out in (torch.empty(1, 5, 4, 8), torch.empty(2, 5, 4, 8, dtype=torch.int32)):
        with pytest.raises(tw.ShapeError, match="out is a floating tensor"):
            fa3.flash_attn_combine(parts, lse, out=out)
    with pytest.raises(tw.DTypeError, match="floating dtype"):
        fa3.flash_attn_combine(parts, lse, out_dtype=torch.int32)
    for window in ((1.5, 0), (torch.tensor(2), 0), (2**40, 0), (True, None)):
        with pytest.raises(tw.OptionError, match="window_size counts keys"):
            fa4.flash_attn_func(q, k, k, window_size=window)
