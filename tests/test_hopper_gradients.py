"""Gradients of the Hopper backend on its card against float64, for what the shared suite's small shapes do not reach:
several tiles of packed sequences, sinks, leaves, float16, a gradient of lse, partial results, strides. Each call with
dq added up in any order and with deterministic=True."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise as tw

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
"""Error of a gradient by the norm: about three roundings of its elements."""
WORST = 10
"""Times that for one row, by the larger of its norm and a usual row's: a small one is a difference of usual ones."""
USUAL = ((100, 100), (1, 1), (700, 700), (0, 0), (64, 64), (333, 333), (1500, 1500))
OTHER = ((130, 300), (0, 5), (257, 100), (64, 0), (1, 400), (500, 777))
"""(rows, keys) of each sequence."""
CAUSAL = tw.causal()


def _drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert torch.equal(got.isfinite(), wanted.isfinite())
    error = (got.double() - wanted).norm(dim=-1)
    rows = wanted.norm(dim=-1)
    assert float(error.norm()) <= LIMIT[dtype] * float(rows.norm())
    if wanted.ndim > 1:
        usual = rows.pow(2).mean().sqrt()
        assert float((error / torch.maximum(rows, usual)).nan_to_num().max()) < WORST * LIMIT[dtype]


class Call:
    """Tensors of a call, and the call with others in their place."""

    def __init__(
        self, d: int, d_v: int = 0, dtype: torch.dtype = torch.bfloat16, *, rows: int = 700, keys: int = 700,
        heads: int = 4, group: int = 2, packed: Any = (), used: Any = (), **options: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.dtype, self.packed, self.options, d_v = dtype, packed, options, d_v or d
        if packed:
            rows, keys = (sum(pair[side] for pair in packed) for side in (0, 1))
            self.edges = [
                torch.tensor(
                    [0, *torch.tensor([p[side] for p in packed]).cumsum(0)], dtype=torch.int32, device="cuda"
                )
                for side in (0, 1)
            ]
            for side, name in enumerate(("seqused_q", "seqused_k") if used else ()):
                lengths = [pair[side] for pair in used]
                options[name] = torch.tensor(lengths, dtype=torch.int32, device="cuda")

        def make(n: int, h: int, width: int) -> torch.Tensor:
            return _drawn(*((n, h, width) if packed else (2, h, n, width)), dtype=dtype)

        self.tensors = [make(rows, heads, d), make(keys, heads // group, d), make(keys, heads // group, d_v)]
        self.do = make(rows, heads, d_v)
        self.dlse = _drawn(*((heads, rows) if packed else (2, heads, rows)), dtype=torch.float32)

    def gradients(
        self, backend: str, leaves: tuple[torch.Tensor, ...] = (), **how: Any
    ) -> list[torch.Tensor]:
        """Gradients of q, k, v and leaves: of out and lse together. Options that are functions take the leaves."""
        wide = backend == "naive"
        tensors = [(t.double() if wide else t).detach().requires_grad_() for t in (*self.tensors, *leaves)]
        options = {n: o(*tensors[3:]) if callable(o) else o for n, o in self.options.items()}
        more = {"backend": backend, "return_lse": True, "allow_quadratic": wide} | how
        if self.packed:
            out, lse = tw.attention_varlen(*tensors[:3], *self.edges, **options, **more)
        else:
            out, lse = tw.attention(*tensors[:3], **options, **more)
        return list(
            torch.autograd.grad((out, lse), tensors, (self.do.to(out.dtype), self.dlse.to(lse.dtype)))
        )


def _check(call: Call, *leaves: torch.Tensor) -> None:
    wanted = call.gradients("naive", leaves)
    for deterministic in (None, True):
        got = call.gradients("hopper", leaves, deterministic=deterministic)
        for one, other in zip(got, wanted, strict=True):
            _close(one, other, call.dtype)
    again = call.gradients("hopper", leaves, deterministic=True)
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize(
    "sizes", ((64, 64), (80, 80), (128, 128), (128, 64), (192, 128), (192, 192), (256, 256))
)
def test_head_dimensions_of_grouped_heads(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    _check(Call(*sizes, dtype, rows=777, keys=1301, heads=8, mask=CAUSAL))


@pytest.mark.parametrize("d", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("packed", (USUAL, OTHER), ids=("same", "other-keys"))
def test_packed_sequences(d: int, packed: Any) -> None:
    _check(Call(d, packed=packed, mask=CAUSAL))


@pytest.mark.parametrize("d", (64, 128, 256))
def test_packed_sequences_of_which_a_part_is_used(d: int) -> None:
    whole, used = ((130, 300), (300, 257), (500, 777)), ((100, 200), (257, 256), (1, 700))
    _check(Call(d, packed=whole, used=used, mask=CAUSAL))


@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("packed", ((), USUAL), ids=("dense", "packed"))
def test_sinks(d: int, packed: Any) -> None:
    _check(Call(d, packed=packed, mask=CAUSAL, sink=lambda t: t), torch.randn(4, device="cuda"))


@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("name", ("softcap", "alibi", "pair", "column", "relative"))
def test_terms_and_their_leaves(d: int, name: str) -> None:
    bf16 = torch.bfloat16
    terms = {
        "softcap": (lambda: tw.softcap(5.0), ()),
        "alibi": (tw.alibi, (tw.alibi_slopes(4).cuda(),)),
        "pair": (tw.bias, (_drawn(1, 4, 700, 700, dtype=bf16),)),
        "column": (tw.bias, (_drawn(2, 1, 1, 700, dtype=bf16),)),
        "relative": (tw.relative, (torch.randn(4, 129, device="cuda"),)),
    }
    make, leaves = terms[name]
    _check(Call(d, mask=CAUSAL, scores=make), *leaves)


@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("name", ("window", "user", "documents", "from-below", "rows-without-keys"))
def test_masks(d: int, name: str) -> None:
    ids = (torch.arange(1900, device="cuda") // 170)[None].expand(2, -1)
    masks = {
        "window": CAUSAL & tw.window(300, 0),
        "user": CAUSAL & tw.custom(lambda q, k: (q - k) % 4 < 2),
        "documents": CAUSAL & tw.document(ids),
        "from-below": tw.custom(lambda q, k: k >= q + 50),
        "rows-without-keys": CAUSAL,
    }
    _check(Call(d, rows=1900, keys=700 if name == "rows-without-keys" else 1900, mask=masks[name]))


@pytest.mark.parametrize("d", (64, 128, 256))
def test_parts_of_the_keys_add_up(d: int) -> None:
    call = Call(d, rows=800, keys=1200, mask=CAUSAL)
    call.dlse.zero_()
    wanted, (q, k, v) = call.gradients("naive"), call.tensors
    for deterministic in (None, True):
        out, lse = tw.attention(q, k, v, mask=CAUSAL, return_lse=True, backend="hopper")
        parts = [
            tw.attention_partial_backward(
                q, k[:, :, a:b], v[:, :, a:b], out, lse, call.do, mask=CAUSAL, q_offset=400, k_offset=a,
                backend="hopper", deterministic=deterministic,
            )
            for a, b in ((0, 417), (417, 1200))
        ]  # fmt: skip
        _close(parts[0].dq.float() + parts[1].dq.float(), wanted[0], call.dtype)
        _close(torch.cat([p.dk for p in parts], 2), wanted[1], call.dtype)
        _close(torch.cat([p.dv for p in parts], 2), wanted[2], call.dtype)


@pytest.mark.parametrize("d", (64, 128, 192))
@pytest.mark.parametrize("packed", ((), USUAL), ids=("dense", "packed"))
def test_a_second_call_of_a_kind_works_on_its_own_tensors(d: int, packed: Any) -> None:
    calls = [Call(d, packed=packed, mask=CAUSAL) for _ in range(3)]
    for n, call in enumerate(calls):
        call.tensors = [t * (1 + n) for t in call.tensors]
    for call in calls:
        for one, other in zip(call.gradients("hopper"), call.gradients("naive"), strict=True):
            _close(one, other, call.dtype)


@pytest.mark.parametrize("d", (64, 128, 256))
def test_strides_and_offsets_of_batch_entries(d: int) -> None:
    call = Call(d, rows=300, keys=900, mask=CAUSAL, q_offset=torch.tensor([100, 600], device="cuda"))
    together = torch.stack([t.transpose(1, 2) for t in call.tensors[1:]], 2)
    call.tensors[1:] = [together[:, :, n].transpose(1, 2) for n in (0, 1)]
    call.do = call.do.transpose(1, 2).contiguous().transpose(1, 2)
    _check(call)


@pytest.mark.parametrize("packed", ((), USUAL), ids=("dense", "packed"))
def test_a_gradient_that_begins_two_bytes_late(packed: Any) -> None:
    call = Call(64, packed=packed, mask=CAUSAL)
    call.do = torch.cat((call.do.new_zeros(1), call.do.flatten()))[1:].view_as(call.do)
    assert call.do.is_contiguous() and call.do.data_ptr() & 15
    _check(call)


@pytest.mark.parametrize("d", (64, 128, 256))
def test_what_nobody_sees_may_be_anything(d: int) -> None:
    lengths = torch.tensor([570, 699], device="cuda")
    call = Call(d, mask=tw.key_padding(lengths))
    for n, end in enumerate(lengths.tolist()):
        for t, value in zip(call.tensors[1:], (0.0, 0.0), strict=True):
            t[n, :, end:] = value
    wanted = call.gradients("naive")
    for n, end in enumerate(lengths.tolist()):
        for t, value in zip(call.tensors[1:], (math.nan, math.inf), strict=True):
            t[n, :, end:] = value
    for deterministic in (None, True):
        for one, other in zip(call.gradients("hopper", deterministic=deterministic), wanted, strict=True):
            _close(one, other, call.dtype)
