"""A whole model's training loop around Tilewise's attention: precision, checkpoints, compilers, transforms."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.utils.checkpoint
from small_gpt import VOCAB, SmallGPT, batch, gradients, loss_of

import tilewise as tw


def same(found, truth):
    assert all(torch.equal(found[name], truth[name]) for name in truth)


def test_gradients_are_those_of_sdpa():
    tokens = batch()
    ours, theirs = (gradients(SmallGPT(sdpa=sdpa).double(), tokens) for sdpa in (False, True))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Parameters and gradients stay float32; the error is no larger than with SDPA under the same autocast."""
    tokens = batch()
    found = {}
    for sdpa in (False, True):
        model = SmallGPT(sdpa=sdpa)
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, tokens)
        loss.backward()
        found[sdpa] = {name: p.grad for name, p in model.named_parameters()}
        assert {g.dtype for g in found[sdpa].values()} == {torch.float32}
    truth = gradients(SmallGPT().double(), tokens)
    ours, theirs = (
        torch.stack([(f[n].double() - g).norm() for n, g in truth.items()]) for f in found.values()
    )
    assert ours.norm() <= 1.5 * theirs.norm()


def test_grad_scaler_trains_in_float16():
    tokens, model = batch(), SmallGPT()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    losses, scales = [], []
    for _ in range(60):
        optimiser.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, tokens)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    assert scales[0] == 2.0**39  # the first gradients overflow: the step is skipped, the scale halved
    assert scales[-1] == scales[-10] and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_the_same_dropout_again(reentrant):
    model, tokens = SmallGPT(dropout=0.3), batch()
    torch.manual_seed(9)
    plain = gradients(model, tokens)
    model.checkpoint = reentrant
    torch.manual_seed(9)
    same(gradients(model, tokens), plain)
    torch.manual_seed(10)
    again = gradients(model, tokens)
    assert any(not torch.equal(again[name], plain[name]) for name in plain)


def test_selective_checkpoints():
    """A policy that keeps matrix products: what it recomputes, attention included, is the same."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    model, tokens = SmallGPT(layers=1), batch()
    plain = gradients(model, tokens)
    ordinary = model.blocks[0].forward
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def run(x):
        return checkpoint(
            ordinary, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(kept)
        )

    model.blocks[0].forward = run
    same(gradients(model, tokens), plain)


def test_a_compiled_model_has_no_graph_break_and_few_recompiles():
    """Ten lengths, forward; two with gradients."""
    from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

    torch._dynamo.reset()
    model, counter = SmallGPT(layers=1), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for length in (12, 13, 7, 31, 32, 33, 64, 5, 20, 50):
            tokens = batch(3, length)
            torch.testing.assert_close(compiled(tokens), model(tokens))
    assert counter.frame_count <= 3
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    torch._dynamo.reset()
    for length in (12, 29, 17):
        tokens = batch(3, length)
        ours, truth = gradients(compiled, tokens), gradients(model, tokens)
        for name in truth:
            torch.testing.assert_close(ours[f"_orig_mod.{name}"], truth[name])
    assert counter.frame_count <= 2


def test_a_compiled_training_step_with_dropout_repeats_by_its_seed():
    torch._dynamo.reset()
    model = SmallGPT(layers=1, dropout=0.5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens = batch()
    torch.manual_seed(1)
    first = compiled(tokens)
    second = compiled(tokens)
    torch.manual_seed(1)
    assert torch.equal(compiled(tokens), first) and not torch.equal(first, second)


def test_export_with_a_dynamic_length():
    model = SmallGPT(layers=1).eval()
    rows, length = torch.export.Dim("rows", min=2, max=64), torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, (batch(),), dynamic_shapes=({0: rows, 1: length},))
    for tokens in (batch(), batch(2, 40), batch(5, 3)):
        torch.testing.assert_close(program.module()(tokens), model(tokens))
    assert any(node.target is torch.ops.tilewise.attention.default for node in program.graph.nodes)


def test_per_sample_gradients_by_vmap():
    model, tokens = SmallGPT(layers=1).double(), batch(3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, row):
        logits = torch.func.functional_call(model, parameters, (row[None],))[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), row[1:])

    ours = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, tokens)
    for n, row in enumerate(tokens):
        for name, truth in gradients(model, row[None]).items():
            # gradients() takes the loss in float32, as training does
            torch.testing.assert_close(ours[name][n], truth, rtol=1e-5, atol=1e-6)


def test_hessian_vector_products_of_the_whole_model():
    """Forward over reverse, and reverse over reverse, against central differences of the gradient."""
    model, tokens = SmallGPT(layers=1).double(), batch(2, 6)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss(parameters):
        logits = torch.func.functional_call(model, parameters, (tokens,))[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    gradient = torch.func.grad(loss)
    forward = torch.func.jvp(gradient, (parameters,), (direction,))[1]
    reverse = torch.func.vjp(gradient, parameters)[1](direction)[0]
    step = 1e-5
    ahead, behind = (
        gradient({n: p + s * direction[n] for n, p in parameters.items()}) for s in (step, -step)
    )
    for name in parameters:
        torch.testing.assert_close(forward[name], reverse[name], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(
            forward[name], (ahead[name] - behind[name]) / (2 * step), rtol=1e-4, atol=1e-7
        )


def test_anomaly_mode_finds_nothing():
    """Rows that see no key, NaN where no query may look, and a sink: no NaN on any path of the backward."""
    q, k, v = (torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(3))
    sink = torch.zeros(2, requires_grad=True)
    hidden = torch.ones(2, 6, dtype=torch.bool)
    hidden[0] = False
    hidden[1, 4:] = False
    with torch.autograd.detect_anomaly(check_nan=True):
        gradients(SmallGPT(), batch())
        k2 = torch.cat([k[:, :, :4], torch.full_like(k[:, :, 4:], float("nan"))], 2)
        for extra in ({}, {"sink": sink}):
            out = tw.attention(
                q,
                k2,
                v,
                mask=tw.causal() & tw.key_padding(hidden),
                scores=tw.softcap(5.0),
                backend="blockwise",
                **extra,
            )
            out.square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v, sink))


def test_deterministic_algorithms():
    """torch's switch reaches the backward; leaf gradients that gather repeat bit by bit, too."""
    table = torch.randn(2, 15, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = [gradients(SmallGPT(), batch()) for _ in range(2)]
        same(*runs)
        out = tw.attention(q, k, v, scores=tw.relative(table), backend="blockwise")
        first, second = (
            torch.autograd.grad(out.sum(), (q, k, v, table), retain_graph=True) for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("backend", ["naive", "blockwise"])
def test_gathered_leaves_repeat_with_several_threads(backend):
    """Entries that many pairs read, at a place that depends on the sequence: torch's own sum of them has no order."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 400, 4) for _ in range(3))
    table, threads = torch.randn(3, requires_grad=True), torch.get_num_threads()
    third = tw.custom_score(lambda s, b, q, k, t: s + t[(q * 7 + k * (b + 1)) % 3], table)
    torch.set_num_threads(2)
    try:
        out = tw.attention(q, k, v, scores=third, backend=backend, deterministic=True)
        cotangent = torch.ones_like(out)
        runs = [torch.autograd.grad(out, table, cotangent, retain_graph=True)[0] for _ in range(10)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(run, runs[0]) for run in runs)


class Biased(torch.nn.Module):
    """Terms that are made once, of parameters with fewer dimensions than the kernels read."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(2, 5, 5))
        self.slopes = torch.nn.Parameter(torch.rand(2))
        self.scores = [tw.bias(self.table), tw.alibi(self.slopes)]

    def forward(self, x):
        return tw.attention(x, x, x, scores=self.scores)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_terms_of_a_copied_module_read_its_own_parameters(how, tmp_path):
    model, x = Biased(), torch.randn(1, 2, 5, 8)
    if how == "torch.save":
        torch.save(model, tmp_path / "model.pt")
        other = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    for one in (model, other):
        one(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad)
        assert bool(mine.grad.any())
    with torch.no_grad():
        other.table.add_(torch.randn(2, 5, 5))
    assert not torch.equal(other(x), model(x))


def test_a_copied_and_a_pickled_model_train_alike(tmp_path):
    model, tokens = SmallGPT(), batch()
    torch.save(model, tmp_path / "model.pt")
    truth = gradients(model, tokens)
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        same(gradients(other, tokens), truth)


def test_training_learns_what_a_causal_model_can():
    """The next token is the sum of the last two: the loss falls well below that of guessing."""
    make, model = torch.Generator().manual_seed(0), SmallGPT(layers=1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        tokens = torch.randint(4, (16, 16), generator=make)
        for n in range(2, 16):
            tokens[:, n] = (tokens[:, n - 1] + tokens[:, n - 2]) % 4
        optimiser.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.6 < torch.log(torch.tensor(float(VOCAB)))
