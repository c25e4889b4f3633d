"""A trace holds the library's numbers, counts its bytes, and writes a page that needs nothing beside itself."""

from __future__ import annotations

import base64
import json
import re
import struct

import pytest
import torch

import tilewise as tw
from tilewise.analysis import Trace, bytes_ordinary, bytes_tiled, trace
from tilewise.analysis.schedules import predict
from tilewise.analysis.sizes import Sizes, Tiles
from tilewise.cli.main import main
from tilewise.spec.attention import AttentionSpec, spec_text
from tilewise.spec.tiles import EMPTY, FULL, PARTIAL, TileGrid, classify_tiles
from tilewise.testing.budgets import compare

PROBLEMS = {
    "plain": {},
    "causal": {"mask": tw.causal()},
    "window and terms": {
        "mask": tw.causal() & tw.window(9, 0),
        "scores": [tw.softcap(3.0), tw.alibi(tw.alibi_slopes(4))],
    },
    "holes": {"mask": tw.custom(lambda q, k: (q > 7) & ((k < 5) | (k > 18)))},
    "sink": {"mask": tw.prefix(11), "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "by head": {"mask": tw.custom(lambda q, k, h: (q - k) % (h + 2) == 0), "scale": 1.0},
    "offsets": {"mask": tw.causal(), "q_offset": 3, "k_offset": 1},
}


def tensors(seqlen_q: int = 22, seqlen_k: int = 30, dtype: torch.dtype = torch.float32):
    sizes = ((4, seqlen_q, 8), (2, seqlen_k, 8), (2, seqlen_k, 6))
    return tuple((1.5 * torch.randn(2, h, n, d)).to(dtype) for h, n, d in sizes)


def attend(x: tuple[torch.Tensor, ...], do: torch.Tensor | None, backend: str, **problem):
    """out and lse of head 3 of entry 1, and, if do is given, the gradients of its q, k and v."""
    q, k, v = (t.detach().clone().requires_grad_() for t in x)
    out, lse = tw.attention(q, k, v, **problem, backend=backend, return_lse=True)
    if do is None:
        return {"out": out[1, 3], "lse": lse[1, 3]}
    gradients = torch.autograd.grad(out[1, 3], (q, k, v), do.to(out.dtype))
    found = {name: g[1, head] for name, g, head in zip(("dq", "dk", "dv"), gradients, (3, 1, 1), strict=True)}
    return {"out": out[1, 3], "lse": lse[1, 3], **found}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_run_gives_attention_and_its_gradients(name):
    x, problem = tensors(), PROBLEMS[name]
    made = trace(*x, **problem, batch=1, head=3, block_q=8, block_k=8)
    truth = attend(tuple(t.double() for t in x), made.head.do, "naive", **problem)
    ordinary = [attend(x, made.head.do, backend, **problem) for backend in ("naive", "blockwise")]
    for recording in made.recordings.values():
        found = {"out": made.out, "lse": made.lse}
        found |= {"dq": recording.dq[-1], "dk": recording.dk[-1], "dv": recording.dv[-1]}
        for tensor, mine in found.items():
            line = compare(tensor, mine, [other[tensor] for other in ordinary], truth[tensor])
            assert line.ratio <= 1.0, line


def test_every_entry_is_the_state_after_its_tile():
    q, k, v = tensors(13, 21)
    mask = tw.causal() & tw.window(6, 0)
    made = trace(q, k, v, mask=mask, q_offset=2, block_q=4, block_k=4)
    one = made.recording
    state = tw.OnlineSoftmaxState.empty((4,), 6)  # the second row tile, by hand
    for j in range(6):
        keys = slice(4 * j, min(4 * j + 4, 21))
        before = state
        if one.classes[1, j] != EMPTY:
            state = state.absorb(made.head.scores[4:8, keys], v[0, 0, keys])
        for mine, theirs in ((one.m, state.m), (one.l, state.l), (one.acc, state.acc)):
            assert torch.equal(mine[j, 4:8], theirs)
        if one.classes[1, j] != EMPTY:
            seen = before.m > -torch.inf
            assert torch.equal(one.alpha[j, 4:8][seen], torch.exp(before.m - state.m)[seen])
    # After two tiles of keys the answer is attention over eight keys.
    problem = {"mask": mask, "q_offset": 2}
    prefix = (q[:, :, :8], k[:, :, :8], v[:, :, :8])
    after = tw.OnlineSoftmaxState(one.m[1], one.l[1], one.acc[1]).finalize().out[:8]
    truth = tw.attention(*(x.double() for x in prefix), **problem, backend="naive")[0, 0]
    ordinary = [tw.attention(*prefix, **problem, backend=name)[0, 0] for name in ("naive", "blockwise")]
    assert compare("out", after, ordinary, truth).ratio <= 1.0


def test_classes_are_the_library_s():
    q, k, v = tensors()
    mask = tw.causal() & tw.window(14, 0)
    made = trace(q, k, v, mask=mask, block_q=4, block_k=8)
    assert made.block_q == 4 and set(made.recording.classes.flatten().tolist()) == {EMPTY, PARTIAL, FULL}
    keep = AttentionSpec.parse(spec_text(mask, (), False, False)).keep
    for (block_q, block_k), one in made.recordings.items():
        grid = TileGrid(block_q, block_k, 22, 30, 8, 8)
        assert torch.equal(one.classes, classify_tiles(keep, grid, (), mask.term.ints, ()))


def test_what_is_hidden_never_matters():
    q, k, v = tensors(9, 12)
    clean = trace(q, k, v, mask=tw.prefix(7), block_k=4)
    k[:, :, 7:], v[:, :, 7:] = torch.nan, torch.inf
    dirty = trace(q, k, v, mask=tw.prefix(7), block_k=4)
    for name in ("dq", "dk", "dv", "acc"):
        assert torch.equal(getattr(clean.recording, name), getattr(dirty.recording, name)), name
    assert torch.equal(clean.ds, dirty.ds) and torch.equal(clean.p, dirty.p)


@pytest.mark.parametrize("mask", [None, tw.causal(), tw.custom(lambda q, k: (q > 9) & (k < 12))])
def test_bytes_are_the_model_s(mask):
    q, k, v = (torch.randn(24, 8).to(torch.bfloat16) for _ in range(3))
    made = trace(q, k, v, mask=mask)
    sizes = {"batch": 1, "num_heads_q": 1, "seqlen_q": 24, "seqlen_k": 24, "head_dim": 8, "head_dim_v": 8}
    for (block_q, block_k), one in made.recordings.items():
        columns = torch.tensor([min(block_k, 24 - j * block_k) for j in range(one.classes.shape[1])])
        rows_read = int(((one.classes != EMPTY) * columns).sum())
        last = one.steps["forward", "queries outer"][-1]
        assert last.tiled == bytes_tiled(**sizes, itemsize=2, block_q=block_q, key_rows_read=rows_read)
        for loop in ("queries outer", "keys outer"):
            steps = one.steps["forward", loop]
            assert steps[-1].ordinary == bytes_ordinary(**sizes, num_heads_kv=1, itemsize=2)
            for run in (steps, one.steps["backward", loop]):
                assert all(
                    a.tiled <= b.tiled and a.ordinary <= b.ordinary
                    for a, b in zip(run, run[1:], strict=False)
                )
                visited = sorted([s.row, s.column] for s in run if s.kind == "tile")
                assert visited == (one.classes != EMPTY).nonzero().tolist()


def test_bytes_are_those_of_the_named_schedules():
    """A fast memory that holds two tiles and little more: every pass over k and v, or over the queries, is paid."""
    x = tuple(torch.randn(64, 16) for _ in range(3))
    steps = trace(*x, block_q=8, block_k=8).recording.steps
    sizes, tiles, capacity = Sizes(64, 64, 16, 16), Tiles(8, 8), 1500
    forward = predict("flash2", sizes, capacity, tiles=tiles).total
    assert steps["forward", "queries outer"][-1].tiled == 4 * forward
    # FlashAttention-1 keeps m and l apart, where a trace writes their lse at the end.
    assert steps["forward", "keys outer"][-1].tiled == 4 * (
        predict("flash1", sizes, capacity, tiles=tiles).total - 64
    )
    backward = predict("flash2", sizes, capacity, tiles=tiles, backward=True).total
    assert steps["backward", "keys outer"][-1].tiled == 4 * backward


def test_bytes_of_the_other_orders_by_hand():
    # Two tiles by two, 4 queries and 6 keys of D = 2, D_v = 3, float32: every number is counted below.
    q, k, v = torch.randn(4, 2), torch.randn(6, 2), torch.randn(6, 3)
    steps = trace(q, k, v, block_q=2, block_k=3).recording.steps
    keys, state, result = 6 * (2 + 3), 2 * (3 + 2), 2 * (3 + 1)
    # Keys outer: k, v once; q at each of four tiles; the state leaves and comes back once for each row tile.
    forward = keys + 4 * (2 * 2) + 2 * (2 * state) + 2 * result
    assert steps["forward", "keys outer"][-1].tiled == 4 * forward
    delta, row, gradients = 4 * 3 * 2 + 4, 2 * (2 + 3 + 1 + 1), 3 * (2 + 3)
    # Queries outer: q, do, lse, delta and dq once; k, v at each tile; dk, dv written, read, written.
    queries = delta + 2 * row + 4 * gradients + 2 * 3 * gradients + 2 * (2 * 2)
    assert steps["backward", "queries outer"][-1].tiled == 4 * queries
    # Keys outer: k, v, dk, dv once; the rows at each tile; dq written, read, written.
    outer = delta + 2 * gradients + 4 * row + 2 * 3 * (2 * 2) + 2 * gradients
    assert steps["backward", "keys outer"][-1].tiled == 4 * outer
    # Ordinary backward: q, do, k, v in, dq, dk, dv out, seven passes over the matrix.
    assert steps["backward", "keys outer"][-1].ordinary == 4 * ((4 + 6) * 5 + 4 * 2 + 6 * 5 + 7 * 4 * 6)


def test_refusals_name_the_remedy():
    x = torch.randn(8, 4)
    with pytest.raises(tw.ShapeError, match=r"at most|1 to 128[\s\S]*Cut a part out"):
        trace(torch.randn(129, 4), x, x)
    with pytest.raises(tw.OptionError, match="block_q is a whole number"):
        trace(x, x, x, block_q=0)
    with pytest.raises(tw.OptionError, match="head 1 is not among"):
        trace(x, x, x, head=1)
    with pytest.raises(tw.ShapeError, match="do has the shape of out"):
        trace(x, x, x, do=torch.randn(7, 4))
    with pytest.raises(tw.DTypeError, match="one dtype"):
        trace(x, x.double(), x)
    with pytest.raises(tw.ShapeError, match="one logit per query head"):
        trace(x, x, x, sink=torch.randn(2))


def data_of(document: str) -> dict:
    return json.loads(re.search(r'<script id="trace"[^>]*>(.*?)</script>', document, flags=re.DOTALL)[1])


def test_the_page_carries_the_bits_and_nothing_from_outside():
    q, k, v = (torch.randn(20, 4, dtype=torch.float64) for _ in range(3))
    made = trace(q, k, v, mask=tw.causal())
    assert isinstance(made, Trace)
    document = made.html("a </script> title & more")
    data = data_of(document)
    array = data["recordings"][0]["arrays"]["acc"]
    numbers = struct.unpack(f"<{20 * 4 * array['shape'][0]}d", base64.b64decode(array["data"]))
    first = next(iter(made.recordings.values()))
    assert torch.equal(torch.tensor(numbers, dtype=torch.float64).view(array["shape"]), first.acc)
    assert data["title"] == "a </script> title & more"
    assert "<title>a &lt;/script&gt; title &amp; more</title>" in document
    assert "<!--" not in document.replace("<!doctype", "")
    assert not re.search(r"(src|href)=\"?(https?:)?//|@import|url\(", document)


def test_command_line(tmp_path, capsys):
    path = tmp_path / "trace.html"
    problem = [
        "--seqlen",
        "24",
        "--heads",
        "4",
        "--heads-kv",
        "2",
        "--head",
        "3",
        "--mask",
        "causal & window:9",
    ]
    assert (
        main(["trace", *problem, "--softcap", "4", "--alibi", "--sink", "--output", str(path), "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == path.stat().st_size and set(told["differences"]) == {"out", "dq", "dk", "dv"}
    assert data_of(path.read_text(encoding="utf-8"))["words"]["head"] == 3


@pytest.mark.parametrize("suffix", ["pt", "npz"])
def test_command_line_reads_files(tmp_path, capsys, suffix):
    q, k, v = tensors(10, 12)
    file, page = tmp_path / f"tensors.{suffix}", tmp_path / "page.html"
    given = {"q": q, "k": k, "v": v}
    if suffix == "pt":
        torch.save(given, file)
    else:
        pytest.importorskip("numpy").savez(file, **{name: x.numpy() for name, x in given.items()})
    assert main(["trace", "--file", str(file), "--batch", "1", "--output", str(page)]) == 0
    assert "10 queries, 12 keys, head dimension 8 (6 in v)" in capsys.readouterr().out
    arrays = data_of(page.read_text(encoding="utf-8"))["arrays"]
    assert base64.b64decode(arrays["q"]["data"]) == struct.pack("<80f", *q[1, 0].flatten().tolist())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--file", "nowhere.pt"], "no such file"),
        (["--file", "nowhere.txt"], "a .pt or an .npz file"),
        (["--seqlen", "500"], "Cut a part out"),
        (["--head", "5"], "is not among"),
        (["--mask", "diagonal"], "is not a mask"),
        (["--heads", "3", "--heads-kv", "2"], "cannot share"),
    ],
)
def test_command_line_refusals(arguments, text, capsys, tmp_path):
    assert main(["trace", *arguments, "--output", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
