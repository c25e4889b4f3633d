"""Each wrong call has its own error, which names the rule and the shapes. Nothing kills the process."""

import warnings

import pytest
import torch

import tilewise as tw
from tilewise.compat import sdpa


def qkv(b=2, h=4, hkv=2, n=5, m=7, d=8, dv=6, dtype=torch.float32):
    return (
        torch.zeros(b, h, n, d, dtype=dtype),
        torch.zeros(b, hkv, m, d, dtype=dtype),
        torch.zeros(b, hkv, m, dv, dtype=dtype),
    )


def call(q, k, v, **options):
    return tw.attention(q, k, v, backend="blockwise", **options)


q0, k0, v0 = qkv()

SHAPES = {
    "rank": (lambda: call(q0[0], k0, v0), "4 dimensions"),
    "batch": (lambda: call(q0[:1], k0, v0), "batch size B"),
    "head size": (lambda: call(q0[..., :4], k0, v0), "head size D"),
    "key length": (lambda: call(q0, k0, v0[:, :, :3]), "length N_k"),
    "value heads": (lambda: call(q0, k0, v0[:, :1]), "heads H_kv"),
    "group": (lambda: call(q0[:, :3], k0, v0), "multiple of H_kv"),
    "sink": (lambda: call(q0, k0, v0, sink=torch.zeros(3)), "one logit per query head"),
    "bias columns": (lambda: call(q0, k0, v0, scores=tw.bias(torch.zeros(5, 6))), "indexed by column"),
    "bias heads": (lambda: call(q0, k0, v0, scores=tw.bias(torch.zeros(3, 5, 7))), "indexed by query head"),
    "bias rank": (lambda: call(q0, k0, v0, scores=tw.bias(torch.zeros(1, 1, 1, 5, 7))), "four dimensions"),
    "slopes": (lambda: call(q0, k0, v0, scores=tw.alibi(torch.zeros(5))), "indexed by query head"),
    "table": (lambda: call(q0, k0, v0, scores=tw.relative(torch.zeros(4, 6))), "odd"),
    "document": (
        lambda: call(q0, k0, v0, mask=tw.document(torch.zeros(7, dtype=torch.int32))),
        "indexed by row",
    ),
    "padding": (lambda: call(q0, k0, v0, mask=tw.key_padding(torch.tensor([1, 2, 3]))), "indexed by batch"),
    "layout": (
        lambda: call(q0, k0, v0, mask=tw.block_sparse(torch.ones(5, 5, dtype=torch.bool), 2)),
        "indexed by",
    ),
    "q_offset": (lambda: call(q0, k0, v0, q_offset=torch.tensor([1, 2, 3])), "q_offset has shape"),
    "own leaf": (
        lambda: call(q0, k0, v0, mask=tw.custom(lambda b, t: t[b] > 0, torch.ones(3))),
        "indexed by batch",
    ),
}
OPTIONS = {
    "dropout": (lambda: call(q0, k0, v0, dropout=1.5), "probability"),
    "dropout nan": (lambda: call(q0, k0, v0, dropout=float("nan")), "probability"),
    "dropout negative": (lambda: call(q0, k0, v0, dropout=-0.1), "probability"),
    "scale": (lambda: call(q0, k0, v0, scale=float("inf")), "finite"),
    "scale tensor": (lambda: call(q0, k0, v0, scale=torch.ones(())), "learned scale"),
    "window": (lambda: tw.window(-1, 0), "at least 0"),
    "window type": (lambda: tw.window(1.5, 0), "integer"),
    "chunk": (lambda: tw.chunk(0), "at least 1"),
    "softcap": (lambda: tw.softcap(0.0), "positive"),
    "backend": (lambda: tw.attention(q0, k0, v0, backend="cuda"), "no backend 'cuda'"),
    "backend type": (lambda: tw.attention(q0, k0, v0, backend=None), "backend is a name"),
    "offset": (lambda: call(q0, k0, v0, q_offset=2**31), "int32"),
    "offset type": (lambda: call(q0, k0, v0, q_offset=1.0), "int"),
    "k_offset": (lambda: call(q0, k0, v0, k_offset=None), "k_offset"),
    "h_offset": (lambda: call(q0, k0, v0, h_offset=torch.zeros(1)), "h_offset"),
    "seed": (lambda: call(q0, k0, v0, dropout=0.1, seed=torch.zeros(2, dtype=torch.int64)), "seed"),
    "mask and": (lambda: tw.causal() and tw.chunk(2), "no truth value"),
    "config": (lambda: setattr(tw.config, "slow", "never"), "config.slow"),
}
DTYPES = {
    "mixed": (lambda: call(q0, k0.double(), v0), "one dtype"),
    "integers": (lambda: call(q0.int(), k0.int(), v0.int()), "int32 is not supported"),
    "complex": (lambda: call(*(x.to(torch.complex64) for x in (q0, k0, v0))), "complex64 is not supported"),
    "not a tensor": (lambda: call([[1.0]], k0, v0), "is a tensor, not list"),
    "float mask": (lambda: call(q0, k0, v0, mask=torch.zeros(5, 7)), r"tilewise\.bias"),
    "bool bias": (lambda: tw.bias(torch.ones(5, 7, dtype=torch.bool)), "mask=tensor"),
    "mask type": (lambda: call(q0, k0, v0, mask="causal"), "not str"),
    "tensor scores": (lambda: call(q0, k0, v0, scores=torch.zeros(5, 7)), r"tilewise\.bias"),
    "scores type": (lambda: call(q0, k0, v0, scores=[tw.causal()]), "not Mask"),
    "int sink": (lambda: call(q0, k0, v0, sink=torch.zeros(4, dtype=torch.int32)), "floating-point"),
    "float lengths": (lambda: tw.key_padding(torch.tensor([1.0])), "integers"),
    "wide ids": (lambda: tw.document(torch.tensor([2**40])), "int32"),
    "float offset": (lambda: call(q0, k0, v0, q_offset=torch.zeros(2)), "integers"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_errors(name):
    run, match = SHAPES[name]
    with pytest.raises(tw.ShapeError, match=match) as info:
        run()
    assert isinstance(info.value, ValueError)


@pytest.mark.parametrize("name", OPTIONS)
def test_option_errors(name):
    run, match = OPTIONS[name]
    with pytest.raises(tw.OptionError, match=match):
        run()


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_errors(name):
    run, match = DTYPES[name]
    with pytest.raises(tw.DTypeError, match=match):
        run()


def test_a_message_lists_each_tensor_and_a_remedy():
    with pytest.raises(tw.DTypeError) as info:
        call(q0, k0.double(), v0.half())
    text = str(info.value)
    assert "  q : shape (2, 4, 5, 8), float32, cpu" in text
    assert "  k : shape (2, 2, 7, 8), float64, cpu" in text
    assert text.splitlines()[-1].startswith("Convert them")


PACKED = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8), torch.zeros(6, 2, 6)
CU = {
    "falls": (torch.tensor([0, 4, 2]), None, "rises"),
    "beyond": (torch.tensor([0, 7]), None, "at most T_q = 6"),
    "negative": (torch.tensor([-1, 6]), None, "rises"),
    "keys beyond": (torch.tensor([0, 6]), torch.tensor([0, 9]), "cu_seqlens_k"),
    "counts": (torch.tensor([0, 6]), torch.tensor([0, 3, 6]), "same number"),
    "rank": (torch.tensor([[0, 6]]), None, "shape"),
    "empty": (torch.zeros(0, dtype=torch.int32), None, "shape"),
}


@pytest.mark.parametrize("name", CU)
def test_bad_cu_seqlens(name):
    cu_q, cu_k, match = CU[name]
    with pytest.raises(tw.ShapeError, match=match):
        tw.attention_varlen(*PACKED, cu_q, cu_k, backend="blockwise")


def test_bad_packed_arguments():
    cu = torch.tensor([0, 6])
    with pytest.raises(tw.DTypeError, match="integers"):
        tw.attention_varlen(*PACKED, cu.float(), backend="blockwise")
    with pytest.raises(tw.DTypeError, match="not list"):
        tw.attention_varlen(*PACKED, [0, 6], backend="blockwise")
    with pytest.raises(tw.ShapeError, match="one length per sequence"):
        tw.attention_varlen(*PACKED, cu, seqused_q=torch.tensor([1, 2]), backend="blockwise")
    with pytest.raises(tw.ShapeError, match="from 0 to the sequence's length"):
        tw.attention_varlen(*PACKED, cu, seqused_k=torch.tensor([7]), backend="blockwise")
    with pytest.raises(tw.OptionError, match="max_seqlen_q"):
        tw.attention_varlen(*PACKED, cu, max_seqlen_q=-3, backend="blockwise")
    with pytest.raises(tw.OptionError, match="packed"):
        tw.attention_partial(q0, k0, v0, seqused_q=torch.tensor([1]))
    with pytest.raises(TypeError, match="no option sink"):
        tw.attention_partial(q0, k0, v0, sink=torch.zeros(4))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs two devices; the meta device has its own rule"
)
def test_mixed_devices():
    with pytest.raises(tw.DeviceError, match="one device"):
        call(q0.cuda(), k0, v0)


def test_backends_refuse_instead_of_replacing(monkeypatch):
    from tilewise.backends.protocol import Reason
    from tilewise.dispatch import registry

    monkeypatch.setattr(tw.config, "slow", "quiet")
    refuse = [Reason("head size", "D = 8", "16 or more", "Pad q and k.")]
    for name in registry.names:
        if name != "naive":
            monkeypatch.setattr(type(registry.get(name)), "supports", lambda self, problem: refuse)
    with pytest.raises(tw.UnsupportedProblem, match="head size: got D = 8, allowed 16 or more. Pad q and k."):
        tw.attention(q0, k0, v0, backend="blockwise")
    with pytest.raises(tw.UnsupportedProblem, match="no backend takes this problem"):
        tw.attention(q0, k0, v0)
    tw.attention(q0, k0, v0, allow_quadratic=True)


def test_the_slow_path_is_said_once_or_refused(monkeypatch):
    from tilewise import dispatch

    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch.registry, "_entries", {"blockwise": dispatch.registry._entries["blockwise"]})
    monkeypatch.setattr(tw.config, "slow", "warn")
    with pytest.warns(tw.SlowPathWarning, match="'blockwise' for cpu tensors"):
        tw.attention(q0, k0, v0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tw.attention(q0, k0, v0)
    monkeypatch.setattr(tw.config, "slow", "raise")
    with pytest.raises(tw.UnsupportedProblem, match="slower backend"):
        tw.attention(q0, k0, v0)


def test_out_argument():
    q, k, v = (torch.randn_like(x) for x in (q0, k0, v0))
    out = torch.empty(2, 4, 5, 6)
    assert call(q, k, v, out=out) is out
    assert torch.equal(out, call(q, k, v))
    with pytest.raises(tw.ShapeError, match="out has the result's"):
        call(q, k, v, out=out[:1])
    with pytest.raises(tw.OptionError, match="autograd"):
        call(q.requires_grad_(), k, v, out=out)


NESTED = torch.nested.nested_tensor_from_jagged(torch.ones(7, 2, 8), torch.tensor([0, 3, 7]))


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "_mkldnn", "nested"])
def test_tensors_without_strides_are_refused_with_a_remedy(kind):
    """Wherever they stand in a call, and with gradients or not."""
    q = torch.randn(1, 2, 4, 8)
    convert = {
        "sparse_coo": torch.Tensor.to_sparse,
        "_mkldnn": torch.Tensor.to_mkldnn,
        "nested": lambda _: NESTED,
    }
    other = convert.get(kind, lambda t: t[0, 0].to_sparse_csr())(q)
    remedy = "attention_varlen" if kind == "nested" else r"\.to_dense\(\)"
    for call in (
        lambda: tw.attention(other, q, q),
        lambda: tw.attention(q, q, other.detach().requires_grad_() if kind == "sparse_coo" else other),
        lambda: tw.attention_varlen(other, q[0], q[0], torch.tensor([0, 2])),
        lambda: tw.explain(other, q, q),
        lambda: tw.attention(q, q, q, scores=tw.bias(torch.ones(1, 1, 4, 4).to_sparse())),
        lambda: tw.attention(q, q, q, sink=torch.ones(2).to_sparse()),
        lambda: sdpa.scaled_dot_product_attention(q, other, q),
    ):
        with pytest.raises(tw.UnsupportedProblem, match=f"(?s)with strides, not.*({remedy}|dense)"):
            call()


@pytest.mark.parametrize("name", ["q_offset", "k_offset"])
@pytest.mark.parametrize("far", [2**30 + 1, -(2**31), 2**40])
def test_offsets_in_tensors_stay_within_int32_like_those_that_are_numbers(name, far):
    q = torch.randn(2, 1, 3, 8)
    for offset in (far, torch.tensor([0, far])):
        with pytest.raises(tw.OptionError, match=f"{name} is {far}, and offsets stay within"):
            tw.attention(q, q, q, mask=tw.causal(), **{name: offset})
    with pytest.raises(tw.OptionError, match="offsets stay within"):
        tw.attention_with_cache(q, tw.KVCache.allocate(2, 1, 8, 8), q, q, **{name: torch.tensor([0, far])})


@pytest.mark.parametrize("cap", ["30", None, float("nan"), -1.0, torch.ones(2)])
def test_a_cap_that_is_no_positive_number(cap):
    with pytest.raises(tw.OptionError, match="softcap is"):
        tw.softcap(cap)
