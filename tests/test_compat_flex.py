"""flex_attention without torch.compile: values, gradients, BlockMask, closures, and what is refused with its line."""

from __future__ import annotations

import functools

import pytest
import torch
from flash_reference import hold, make_qkv, run, short, thin
from oracle import Dense
from versions import TORCH

import tilewise as tw
from tilewise.compat import flex

theirs = pytest.importorskip("torch.nn.attention.flex_attention")

B, H, N, M = 2, 4, 40, 52
DOC = torch.randint(0, 3, (B, 64), generator=torch.Generator().manual_seed(0))
PREFIX = torch.tensor([5, 30])
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
SPAN = 11
i, j = torch.arange(N)[:, None], torch.arange(M)[None, :]


class Holder:
    """A mask as a method, and an object with a tensor and a number."""

    def __init__(self, width):
        self.width, self.reach = width, torch.tensor([3, 5, 9, 20])

    def near(self, b, h, q, k):
        return (q - k).abs() <= self.reach[h] + self.width

    def __call__(self, b, h, q, k):
        return self.near(b, h, q, k) | (k < 3)


HOLDER = Holder(2)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding(width):
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= width

    return mask


def steered(b, h, q_idx, kv_idx, steps=3):
    """A captured number steers Python: it becomes a literal."""
    result = q_idx == kv_idx
    for n in range(steps):
        result = result | (q_idx - kv_idx == 2**n)
    return result


MASKS = {
    "noop": theirs.noop_mask,
    "our noop": flex.noop_mask,
    "causal": causal,
    "window": theirs.and_masks(causal, sliding(SPAN)),
    "document": lambda b, h, q, k: DOC[b, q] == DOC[b][k],
    "prefix": flex.or_masks(causal, lambda b, h, q, k: k < PREFIX[b]),
    "default": lambda b, h, q, k, width=SPAN: torch.logical_and(q >= k, q - k < width),
    "method": lambda b, h, q, k: HOLDER.near(b, h, q, k),
    "object": lambda b, h, q, k: HOLDER(b, h, q, k),
    "partial": functools.partial(lambda size, b, h, q, k: q // size == k // size, 8),
    "neighbours": lambda b, h, q, k: ((q % 8 - (k % 8).clamp(2, 5)).abs() <= 2) & (torch.abs(q // 8 - k // 8) <= 2),
    "from the end": lambda b, h, q, k: DOC[-1, q] == DOC[b, k],
    "wraps": lambda b, h, q, k: DOC[b, q - k] > 0,
    "steered": steered,
    "made inside": lambda b, h, q, k: torch.where(
        q < torch.tensor(7), torch.ones_like(q, dtype=torch.bool), k.to(torch.int32) % 2 == 0
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_torch_says(name):
    """The mask itself, the block lists, the picture and attention, from our BlockMask and from torch's."""
    if ((2, 11) if name == "from the end" else (2, 8)) > TORCH:
        pytest.skip("this torch lists other blocks, or cannot index from the end")
    fn = MASKS[name]
    reference = fn if name != "our noop" else theirs.noop_mask
    want = theirs.create_mask(reference, B, H, N, M, "cpu")
    assert torch.equal(flex.create_mask(fn, B, H, N, M), want)
    ours, torchs = (module.create_block_mask(f, B, H, N, M, "cpu", BLOCK_SIZE=(16, 8))
                    for module, f in ((flex, fn), (theirs, reference)))  # fmt: skip
    for field in (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
    ):
        assert torch.equal(getattr(ours, field), getattr(torchs, field)), field
    assert ours.shape == torchs.shape and ours.sparsity() == torchs.sparsity() and str(ours) == str(torchs)
    q, k, v = torch.randn(B, H, N, 16), torch.randn(B, H, M, 16), torch.randn(B, H, M, 16)
    expected = tw.attention(q, k, v, mask=want)
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=ours), expected)
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=torchs), expected)


SCORES = {
    "identity": (lambda s, b, h, q, k: s, lambda s, x: s),
    "relative": (lambda s, b, h, q, k: s + (q - k) * 0.1, lambda s, x: s + (i - j) * 0.1),
    "alibi": (lambda s, b, h, q, k: s + (k - q) * SLOPES[h],
              lambda s, x: s + (j - i) * SLOPES[:, None, None].to(s.dtype)),
    "softcap": (lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0), lambda s, x: 5.0 * torch.tanh(s / 5.0)),
    "causal": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
               lambda s, x: s.masked_fill(i < j, -torch.inf)),
    "squared": (lambda s, b, h, q, k: s * s.sigmoid() + torch.exp(-torch.abs(q - k) / 3),
                lambda s, x: s * torch.sigmoid(s) + torch.exp(-(i - j).abs() / 3).to(s.dtype)),
}  # fmt: skip
AXES = {
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "score": list(SCORES),
    "mask": [None, "causal", "window", "document", "neighbours"],
    "heads": [(4, 4), (4, 2), (4, 1)],
    "dims": [(16, 16), (64, 64), (32, 48)],
}


@pytest.mark.parametrize("case", thin(24, 11, **AXES), ids=short)
def test_values_and_gradients(case):
    inputs = make_qkv(B, (N, M), case["heads"], case["dims"][0], case["dtype"], case["dims"][1])
    do = torch.randn(B, N, 4, case["dims"][1]).to(case["dtype"])
    score, by_hand = SCORES[case["score"]]
    block_mask, keep = None, None
    if case["mask"]:
        block_mask = flex.create_block_mask(
            MASKS[case["mask"]], B, None if case["mask"] == "causal" else H, N, M
        )
        keep = theirs.create_mask(MASKS[case["mask"]], B, H, N, M, "cpu")

    def call(x):
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        out, lse = flex.flex_attention(
            q, k, v, score, block_mask, enable_gqa=case["heads"][0] != case["heads"][1], return_lse=True
        )
        return out.transpose(1, 2), lse

    hold(run(call, inputs, do), inputs, lambda x: Dense(keep=keep, score=lambda s: by_hand(s, x)), do)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_tensors_get_gradients(dtype):
    inputs = make_qkv(B, (N, N), (H, H), 32, dtype)
    inputs |= {
        "bias": torch.randn(H, 2 * N - 1).to(dtype),
        "factor": torch.rand(()).to(dtype) + 0.5,
        "gate": torch.rand(B, N).to(dtype),
    }
    do = torch.randn_like(inputs["q"])

    def call(x):
        bias, factor, gate = x["bias"], x["factor"], x["gate"]
        fn = lambda s, b, h, q, k: (s * factor + bias[h, k - q + N - 1]) * gate[b, k]  # noqa: E731
        out, lse = flex.flex_attention(*(x[name].transpose(1, 2) for name in "qkv"), fn, return_lse=True)
        return out.transpose(1, 2), lse

    def build(x):
        rows = torch.arange(N)
        return Dense(
            score=lambda s: (
                (s * x["factor"] + x["bias"][:, rows - rows[:, None] + N - 1]) * x["gate"][:, None, None]
            )
        )

    hold(run(call, inputs, do), inputs, build, do)


def test_second_order_and_lse_gradients_come_along():
    x = [torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    table = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    block_mask = flex.create_block_mask(causal, None, None, 3, 3)

    def call(q, k, v, t):
        return flex.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + t[h, i - j + 2], block_mask, return_lse=True
        )

    assert torch.autograd.gradcheck(call, (*x, table))
    assert torch.autograd.gradgradcheck(lambda *a: call(*a)[0], (*x, table))


def test_tensors_longer_than_the_call_are_cut_and_keep_their_gradient():
    q, table = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 9, requires_grad=True)
    out = flex.flex_attention(q, q, q, lambda s, b, h, i, j: s + table[b, h, i, j] + table[b, h, j, i])
    out.square().sum().backward()
    twin = table.detach().clone().requires_grad_()
    cut = twin[:, :, :6, :6]
    tw.attention(q, q, q, scores=tw.bias(cut + cut.mT)).square().sum().backward()
    torch.testing.assert_close(table.grad, twin.grad)
    with pytest.raises(tw.ShapeError, match="indexed by row"):
        flex.flex_attention(q, q, q, lambda s, b, h, i, j: s + SLOPES[i])


def test_another_number_is_the_same_kernel():
    """Captured numbers are run-time scalars: the text of the term, which names the kernel, does not change."""
    texts = {flex.create_block_mask(sliding(width), 1, 1, 8, 8).traced.term.text for width in (3, 4, 100)}
    assert len(texts) == 1


def test_what_is_returned():
    q = torch.randn(1, 2, 6, 8)
    none = flex.create_block_mask(lambda b, h, i, j: (i > 0) & (j <= i), None, None, 6, 6)
    out, lse = flex.flex_attention(q, q, q, block_mask=none, return_lse=True)
    assert not out[:, :, 0].any() and (lse[:, :, 0] == -torch.inf).all() and lse.shape == (1, 2, 6)
    again, aux = flex.flex_attention(q, q, q, block_mask=none, return_aux=flex.AuxRequest(lse=True))
    assert torch.equal(aux.lse, lse) and aux.max_scores is None and torch.equal(again, out)
    assert (
        flex.flex_attention(q, q, q, return_aux=theirs.AuxRequest())[1].lse is None
        if hasattr(theirs, "AuxRequest")
        else True
    )
    shared = flex.flex_attention(q.expand(3, -1, -1, -1), q, q, block_mask=none)
    torch.testing.assert_close(shared[2:], out)
    with pytest.warns(UserWarning, match="BLOCK_M"):
        flex.flex_attention(q, q, q, kernel_options={"BLOCK_M": 64})


def test_block_lists_decide_where_they_are_given():
    """from_kv_blocks: a full block needs no mask_mod, a listed one does, the others are hidden."""
    count, columns = (
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
    )
    full = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    made = flex.BlockMask.from_kv_blocks(count, columns, *full, BLOCK_SIZE=4, mask_mod=causal)
    keep = torch.zeros(8, 8, dtype=torch.bool)
    keep[:4, :4], keep[4:, 4:], keep[4:, :4] = (
        torch.ones(4, 4).tril().bool(),
        torch.ones(4, 4).tril().bool(),
        True,
    )
    q = torch.randn(1, 2, 8, 8)
    torch.testing.assert_close(
        flex.flex_attention(q, q, q, block_mask=made), tw.attention(q, q, q, mask=keep)
    )


@pytest.mark.skipif(TORCH < (2, 11), reason="slices of this torch keep their mask_mod")
def test_slicing_needs_a_new_mask_mod_and_adjusting_does_not():
    q = torch.randn(1, 2, 8, 8)
    whole = flex.create_block_mask(causal, 2, 2, 16, 16, BLOCK_SIZE=4)
    part = whole[0, :, :]
    assert part.shape == (1, 2, 16, 16)
    with pytest.raises((tw.SpecError, RuntimeError), match="sliced"):
        flex.flex_attention(q.repeat(1, 1, 2, 1), q.repeat(1, 1, 2, 1), q.repeat(1, 1, 2, 1), block_mask=part)
    part.mask_mod = whole.mask_mod
    long = q.repeat(1, 1, 2, 1)
    want = tw.attention(long, long, long, mask=tw.causal())
    torch.testing.assert_close(flex.flex_attention(long, long, long, block_mask=part), want)
    cropped = whole._adjust(8, 8)[:1]
    cropped.mask_mod = causal
    torch.testing.assert_close(
        flex.flex_attention(q, q, q, block_mask=cropped), tw.attention(q, q, q, mask=tw.causal())
    )
    assert whole.to("cpu").shape == whole.shape and "causal" in repr(whole)


def branches(s, b, h, q, k):
    if q > k:  # THE LINE
        return s
    return -s


def chained(b, h, q, k):
    return q - 3 <= k <= q  # THE LINE


REFUSED = {
    "branch": (branches, "only known per pair.*THE LINE"),
    "chained": (chained, "only known per pair.*THE LINE"),
    "function": (lambda s, b, h, q, k: torch.sin(s), "torch.sin.*test_compat_flex"),
    "method": (lambda s, b, h, q, k: s.cumsum(0), "cumsum.*test_compat_flex"),
    "too few indices": (lambda s, b, h, q, k: s + DOC[b], "2 dimension.*1 index"),
    "too many": (lambda s, b, h, q, k: s + SLOPES[h, q], "too many indices"),
    "slice": (lambda s, b, h, q, k: s + SLOPES[1:][h], "single numbers.*slice"),
    "tensor made inside": (lambda s, b, h, q, k: s + torch.arange(5)[q], "__getitem__"),
    "number": (lambda s, b, h, q, k: s + float(q), "cannot become a Python number"),
    "bits": (lambda s, b, h, q, k: s * (q & 1), "joins conditions"),
    "its own error": (lambda s, b, h, q, k: s + {}["missing"], "KeyError.*test_compat_flex"),
    "complex": (lambda s, b, h, q, k: s + torch.view_as_complex(torch.zeros(2)), "cannot|complex|numbers"),
    "arity": (lambda s, b, h, q: s, "4 positional arguments"),
    "no condition": (lambda b, h, q, k: q - k, "yields a int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_refused_with_reason_and_line(name):
    fn, words = REFUSED[name]
    q = torch.randn(1, 4, 8, 8)
    with pytest.raises(tw.SpecError, match=f"(?s){words}"):
        if fn.__code__.co_argcount == 4 and name != "arity":
            flex.create_block_mask(fn, 1, 4, 8, 8)
        else:
            flex.flex_attention(q, q, q, fn)


def test_sizes_that_do_not_fit_are_refused():
    q, other = torch.randn(2, 4, 8, 8), torch.randn(2, 2, 8, 8)
    with pytest.raises(tw.ShapeError, match="enable_gqa"):
        flex.flex_attention(q, other, other)
    for sizes in ((3, None, 8, 8), (None, 3, 8, 8), (None, None, 16, 8), (None, None, 8, 4)):
        with pytest.raises(tw.ShapeError, match="block_mask was made for"):
            flex.flex_attention(q, q, q, block_mask=flex.create_block_mask(causal, *sizes))
    with pytest.raises(tw.UnsupportedProblem, match="largest"):
        flex.flex_attention(q, q, q, return_aux=flex.AuxRequest(max_scores=True))
    with pytest.raises(tw.OptionError, match="return_aux"):
        flex.flex_attention(q, q, q, return_lse=True, return_aux=flex.AuxRequest(lse=True))
    with pytest.raises(tw.OptionError, match="functions"):
        flex.and_masks(causal, 3)


@pytest.mark.parametrize("base", [2.0, 0.5, 3])
def test_a_number_to_a_symbolic_power(base):
    """ALiBi's slopes as most people write them."""
    q, k, v = (torch.randn(1, 4, 9, 8, dtype=torch.float64) for _ in range(3))
    got = flex.flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + (j - i) * base ** (-8 * (h + 1) / 4)
    )
    slopes = base ** (-8 * (torch.arange(4, dtype=torch.float64) + 1) / 4)
    row = torch.arange(9)
    score = q @ k.mT / 8**0.5 + (row - row[:, None]) * slopes[:, None, None]
    torch.testing.assert_close(got, torch.softmax(score, -1) @ v)
    with pytest.raises(tw.SpecError, match="base is a positive number"):
        flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (-base) ** h)


def test_what_is_no_block_mask_is_refused():
    q = torch.randn(1, 2, 16, 8)
    for other in (torch.ones(16, 16, dtype=torch.bool), lambda b, h, i, j: i >= j):
        with pytest.raises(tw.OptionError, match="create_block_mask"):
            flex.flex_attention(q, q, q, block_mask=other)
    for size in (0, "ab", (8, -1), (8, 8, 8)):
        with pytest.raises(tw.OptionError, match="BLOCK_SIZE"):
            flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, BLOCK_SIZE=size)
