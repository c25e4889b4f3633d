"""FP8 caches of flash_attn 3: read with their descale factors; what they do not do is refused."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.compat import flash_attn3 as fa3


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")


FP8 = torch.float8_e4m3fn


def fp8_step(layout, stored_q, new):
    """A call on an FP8 cache, and out of the same call on the numbers that it stands for, in float32."""
    batch, capacity, lengths = 2, 12, torch.tensor([5, 9])
    factors = [torch.rand(batch, 2) + 0.5 for _ in "qkv"]
    q = torch.randn(batch, 1, 4, 16)
    k, v, k_new, v_new = (torch.randn(batch, n, 2, 16).to(FP8) for n in (capacity, capacity, 1, 1))
    wide = lambda t, factor: t.float() * factor[:, None, :, None]  # noqa: E731
    q = q.to(FP8 if stored_q else torch.bfloat16)
    exact_q = wide(q, factors[0].repeat_interleave(2, 1)) if stored_q else q.float()
    options = dict(q_descale=factors[0] if stored_q else None, k_descale=factors[1], v_descale=factors[2])
    exact = [wide(t, f) for t, f in zip((k, v, k_new, v_new), (factors[1], factors[2]) * 2, strict=True)]
    given = (k_new, v_new)
    if new == "bfloat16":  # divided by their factors, rounded to FP8
        given = tuple(t.bfloat16() for t in exact[2:])
        rounded = (
            wide((t.float() / f[:, None, :, None]).to(FP8), f)
            for t, f in zip(given, factors[1:], strict=True)
        )
        exact[2:] = rounded
    wanted = fa3.flash_attn_with_kvcache(
        exact_q, exact[0].clone(), exact[1].clone(), *exact[2:], cache_seqlens=lengths, causal=True
    )
    if layout == "rows":
        rows = torch.tensor([3, 1])
        k, v = (torch.zeros(4, capacity, 2, 16).index_copy_(0, rows, t.float()).to(FP8) for t in (k, v))
        options["cache_batch_idx"] = rows
    elif layout == "pages":
        table = torch.tensor([[4, 0, 2], [1, 5, 3]])
        places = table.reshape(-1)
        k, v = (
            torch.empty(6, 4, 2, 16).index_copy_(0, places, t.float().view(6, 4, 2, 16)).to(FP8)
            for t in (k, v)
        )
        options["page_table"] = table.to(torch.int32)
        options["page_table"][0, 2] = 5  # beyond its keys: another sequence's page
    got = fa3.flash_attn_with_kvcache(q, k, v, *given, cache_seqlens=lengths, causal=True, **options)
    return got, wanted


@pytest.mark.parametrize("layout", ["plain", "rows", "pages"])
@pytest.mark.parametrize("stored_q, new", [(True, "float8"), (False, "float8"), (True, "bfloat16")])
def test_an_fp8_cache_is_read_with_its_factors(layout, stored_q, new):
    got, wanted = fp8_step(layout, stored_q, new)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wanted, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("changes, words", [
    ({"v_cache": torch.zeros(1, 8, 2, 16).to(torch.float8_e5m2)}, "float8_e4m3fn"),
    ({"q_descale": torch.ones(1, 2)}, "belongs to an FP8 q"),
    ({"k_descale": torch.ones(2)}, "shape"),
    ({"qv": torch.zeros(1, 1, 2, 16)}, "without qv"),
    ({"k_cache": torch.zeros(1, 8, 2, 16), "k_descale": torch.ones(1, 2)}, "belong to an FP8 cache"),
])  # fmt: skip
def test_what_an_fp8_cache_does_not_do_is_refused(changes, words):
    cache = torch.zeros(1, 8, 2, 16).to(FP8)
    call = {"q": torch.zeros(1, 1, 2, 16).bfloat16(), "k_cache": cache, "v_cache": cache, **changes}
    with pytest.raises(tw.TilewiseError, match=words):
        fa3.flash_attn_with_kvcache(**call)
