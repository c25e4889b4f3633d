"""flex_attention inside torch.compile: what was traced outside joins the graph, what was not says why it cannot."""

from __future__ import annotations

import pytest
import torch
from versions import TORCH, needs_dynamo

import tilewise as tw
from tilewise.compat.flex import ScoreMod, create_block_mask, flex_attention


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """A learned relative bias under a causal block mask; `traced` decides whether the function is a ScoreMod."""

    def __init__(self, traced: bool) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(4, 63, dtype=torch.float64))
        factor = 0.5

        def relative(score, b, h, q_idx, kv_idx):
            return score + factor * self.bias[h, kv_idx - q_idx + 31]

        self.score_mod = ScoreMod(relative) if traced else relative
        self.block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32)

    def forward(self, q, k, v):
        out, lse = flex_attention(
            q * 2,
            k,
            v,
            score_mod=self.score_mod,
            block_mask=self.block_mask,
            enable_gqa=True,
            return_lse=True,
        )
        return out.sin().sum() + lse.sum()


def drawn():
    return [torch.randn(2, h, 32, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]


def gradients(fn, model, x):
    return torch.autograd.grad(fn(*x), [*x, model.bias])


@needs_dynamo
def test_a_score_mod_traced_outside_joins_one_graph_with_its_gradients():
    from torch._dynamo.testing import CompileCounterWithBackend

    model, x = Model(traced=True), drawn()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    truth = gradients(model, model, x)
    torch.testing.assert_close(gradients(compiled, model, x), truth)
    with torch.no_grad():
        model.bias.mul_(2)  # what it reaches is read at each call, not at the trace
    changed = gradients(model, model, x)
    assert not torch.allclose(changed[0], truth[0])
    torch.testing.assert_close(gradients(compiled, model, x), changed)
    assert counter.frame_count == 1


def test_a_plain_score_mod_interrupts_the_graph_and_is_right():
    model, x = Model(traced=False), drawn()
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, model, x), gradients(model, model, x))


@pytest.mark.skipif(TORCH < (2, 9), reason="this dynamo gives no reasons")
def test_a_plain_score_mod_in_one_whole_graph_is_refused_with_the_remedy():
    model = Model(traced=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ScoreMod\(score_mod\)"):
        torch.compile(model, backend="eager", fullgraph=True)(*drawn())


def test_a_score_mod_is_still_the_function():
    mod = ScoreMod(lambda score, b, h, q_idx, kv_idx: score * 2 + q_idx)
    assert mod(1.5, 0, 0, 4, 5) == 7.0 and "ScoreMod(" in repr(mod)
    x = drawn()
    plain = flex_attention(*x, score_mod=mod.score_mod, enable_gqa=True)
    assert torch.equal(flex_attention(*x, score_mod=mod, enable_gqa=True), plain)

    def branches(score, b, h, q_idx, kv_idx):
        return score if q_idx > kv_idx else 0.0

    with pytest.raises(tw.SpecError, match="q_idx"):
        ScoreMod(branches)
