"""`tilewise explain` through its entry point: the page, its picture, files, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise.backends.reference.naive import Naive
from tilewise.cli import tile_picture
from tilewise.cli.explain import DEFAULTS
from tilewise.cli.main import main
from tilewise.cli.problem_flags import Sizes, parse_mask
from tilewise.dispatch import registry
from tilewise.spec.tiles import EMPTY, FULL, PARTIAL

LLAMA = ["--seqlen", "8192", "--heads", "32", "--heads-kv", "8", "--head-dim", "128"]


def run_json(capsys, *arguments: str) -> tuple[int, dict]:
    code = main(["explain", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_page_says_it_all(capsys):
    assert main(["explain", *LLAMA]) == 0
    out = capsys.readouterr().out
    for word in (
        "32 heads on 8 KV heads",
        "length 8192",
        "blockwise",
        "not naive",
        "memory grows with N_q x N_k",
        "FLOP",
        "not built",
        "4 GiB for all heads",
        "workspace",
        "FLOP per byte",
        "empty, skipped",
    ):
        assert word in out, word
    assert all(len(line) <= 100 for line in out.splitlines())


def test_json_is_the_plan(capsys):
    code, report = run_json(capsys, *LLAMA, "--mask", "causal & window:1024")
    assert code == 0
    assert set(report) == {"command", "schema", "asked", "plan", "flop_per_byte_tiled", "flop_per_byte_ordinary",
                           "bound", "picture", "roofline", "measured"}  # fmt: skip
    shapes = (1, 32, 8192, 128), (1, 8, 8192, 128), (1, 8, 8192, 128)
    plan = tw.explain(*shapes, dtype=torch.bfloat16, mask=tw.causal() & tw.window(1024, 0))
    assert report["plan"] == json.loads(json.dumps(plan.to_dict()))
    assert report["flop_per_byte_tiled"] == pytest.approx(plan.flops / plan.bytes_tiled)
    assert report["asked"]["dtype"] == "bfloat16" and set(report["asked"]) == set(DEFAULTS)


def test_machine_s_roofs_and_what_was_measured(capsys, tmp_path):
    """32 heads of 8192 in bf16 on an H200: the matrix not built, traffic, bound, predicted and measured time."""
    assert main(["explain", *LLAMA, "--machine", "h200"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in ("4 GiB for all heads", "by ordinary attention", "NVIDIA H200", "limit matrix units", "on cuda",
                 "predicted at least", "twice the tile memory", "half the exponentials", "FP8"):  # fmt: skip
        assert word in out, word
    line = {"section": "forward", "library": "Somebody's", "dtype": "bf16", "B": 2, "H": 32, "H_kv": 8, "N": 8192,
            "D": 128, "causal": True, "cold_tflops": 500, "hot_tflops": 500}  # fmt: skip
    text = "\n".join(json.dumps(one) for one in ({"section": "machine", "gpus": ["NVIDIA H200"]}, line))
    (tmp_path / "gpu_peers.jsonl").write_text(text)
    _, report = run_json(capsys, *LLAMA, "--machine", "h200", "--results", str(tmp_path))
    (one,) = report["measured"]
    # 4 D FLOP a pair, half of the pairs, 32 heads, at 500 TFLOP/s; the line had two batch entries.
    assert one["seconds"] == pytest.approx(4 * 128 * 8192**2 / 2 * 32 / 500e12)
    assert one["library"] == "Somebody's" and one["what"] == "batch 2, 32 heads on 8"
    assert report["plan"]["predicted_s"] < one["seconds"]
    for other in (["--mask", "none"], ["--softcap", "30"], ["--backward"], ["--dtype", "fp16"]):
        _, report = run_json(capsys, *LLAMA, "--machine", "h200", "--results", str(tmp_path), *other)
        assert report["measured"] == []


def test_cells_of_the_gpu_benchmark_are_found(capsys, tmp_path):
    lines = [{"machine": {"gpus": ["NVIDIA H200 (9.0, 140 GiB)"]}},
             {"cell": "D128-N8192-causal", "which": "forward",
              "contenders": {"ours": {"cold_tflops": 250.0}, "not": {}}},
             {"cell": "window1024", "which": "forward", "contenders": {"ours": {"cold_tflops": 1.0}}}]  # fmt: skip
    (tmp_path / "gpu.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    _, report = run_json(capsys, *LLAMA, "--machine", "h200", "--results", str(tmp_path))
    (one,) = report["measured"]
    assert one["seconds"] == pytest.approx(4 * 128 * 8192**2 / 2 * 32 / 250e12)
    assert one["library"] == "ours, cell D128-N8192-causal"


def test_a_processor_that_the_table_lacks_is_said(capsys, monkeypatch):
    monkeypatch.setattr("tilewise.plan.machine_here", lambda kind: None)
    assert main(["explain", *LLAMA]) == 0
    out = capsys.readouterr().out
    assert "not in the table: name one with --machine" in " ".join(out.split()) and "predicted" not in out


@pytest.mark.parametrize(
    "mask", ["none", "causal", "causal & window:700", "window:300:40", "documents:500", "not chunk:600"]
)
@pytest.mark.parametrize("lengths", [(2100, 2100), (300, 2500), (1, 900)])
def test_picture_shows_the_plan_s_tiles(capsys, mask, lengths):
    code, report = run_json(
        capsys, "--seqlen", str(lengths[0]), "--seqlen-k", str(lengths[1]), "--mask", mask
    )
    assert code == 0
    schedule = report["plan"]["schedule"]
    block = min(schedule["block_q"], lengths[0]), min(schedule["block_k"], lengths[1])
    classes = tile_picture.tile_classes(block, Sizes(1, 8, 8, *lengths, 64, 64, "bfloat16", mask), None)
    counts = [int((classes == kind).sum()) for kind in (EMPTY, PARTIAL, FULL)]
    assert counts == report["plan"]["census"]


@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (32, 64), (33, 64), (200, 100), (5, 1000)])
def test_picture_is_small_and_true(tiles):
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(0, 3, tiles, generator=generator, dtype=torch.uint8)
    classes[:, : tiles[1] // 2] = FULL
    cells, (down, across) = tile_picture.shrink(classes, (128, 128))
    assert cells.shape[0] <= tile_picture.LINES and cells.shape[1] <= tile_picture.CHARACTERS
    for n in range(cells.shape[0]):
        for m in range(cells.shape[1]):
            part = classes[n * down : (n + 1) * down, m * across : (m + 1) * across]
            same = bool((part == part[0, 0]).all())
            assert int(cells[n, m]) == (int(part[0, 0]) if same else PARTIAL)


def test_file_and_flags(capsys, tmp_path):
    file = tmp_path / "problem.json"
    file.write_text(
        json.dumps(
            {"seqlen": 4096, "heads": 16, "heads-kv": 4, "mask": "causal", "dtype": "fp16", "sink": True}
        )
    )
    code, report = run_json(capsys, "--file", str(file), "--seqlen", "2048")
    assert code == 0
    asked = report["asked"]
    assert (asked["seqlen"], asked["heads"], asked["heads_kv"], asked["dtype"]) == (2048, 16, 4, "float16")
    assert "sink" in report["plan"]["spec"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML comes with Python 3.11")
def test_toml(capsys, tmp_path):
    file = tmp_path / "problem.toml"
    file.write_text(
        'seqlen = 1024\nheads = 8\nmask = "window:256"\nsoftcap = 30\nalibi = true\nbackward = true\n'
    )
    code, report = run_json(capsys, "--file", str(file))
    assert code == 0 and report["plan"]["spec"] == ["window_left", "window_right", "softcap", "alibi"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "is not JSON"),
        ("[1]", "holds no table"),
        ('{"seqlen": 8, "color": 1}', "unknown color"),
        ('{"seqlen": "8"}', "seqlen = '8' does not fit"),
        ('{"seqlen": 0}', "seqlen = 0 does not fit"),
        ('{"seqlen": true}', "does not fit"),
        ('{"seqlen": 8, "sink": 1}', "sink = 1 does not fit"),
        ('{"seqlen": 8, "dtype": "int8"}', "'int8' is none of"),
        ('{"heads": 8}', "has no length"),
    ],
)
def test_bad_files_are_one_line(capsys, tmp_path, text, words):
    file = tmp_path / "problem.json"
    file.write_text(text)
    assert main(["explain", "--file", str(file)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--file", "no/such.json"], "cannot read no/such.json"),
        ([], "has no length"),
        (["--seqlen", "8", "--mask", "casual"], "'casual' is not a mask"),
        (["--seqlen", "8", "--mask", "window:x"], "'x' in the mask"),
        (["--seqlen", "8", "--mask", "chunk:0"], "is not a mask"),
        (["--seqlen", "8", "--heads", "3", "--heads-kv", "2"], "3 query heads cannot share 2 KV heads"),
        (["--seqlen", "8", "--backend", "nonsense"], "there is no backend 'nonsense'"),
        (["--seqlen", "8", "--device", "nonsense"], "is not a device"),
        (["--seqlen", "8", "--machine", "nonsense"], "there is no machine 'nonsense'"),
        (["--seqlen", "8", "--dropout", "2"], "dropout"),
    ],
)
def test_errors_are_one_line(capsys, arguments, words):
    assert main(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error
    assert main(["explain", "--traceback", *arguments]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--seqlen", "-1"], ["--dtype", "int8"], ["--heads", "two"]])
def test_bad_options_are_refused(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", *arguments])
    assert stopped.value.code == 2


def test_a_reader_that_stops_is_no_error():
    command = [sys.executable, "-m", "tilewise", "explain", "--seqlen", "64"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(tw.__file__).parents[1]
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


def test_nobody_takes_it(capsys, monkeypatch):
    class Choosy(Naive):
        name = "choosy"

        def supports(self, problem):
            from tilewise.backends.protocol import Reason

            return [Reason("head dim", "64", "a multiple of 7")]

    monkeypatch.setattr(registry, "_entries", {"choosy": registry._entries["naive"]})
    monkeypatch.setattr(registry, "_loaded", {"choosy": Choosy()})
    assert main(["explain", "--seqlen", "64"]) == 1
    out = capsys.readouterr().out
    assert "none takes this problem" in out and "not choosy  head dim: got 64, allowed a multiple of 7" in out


@pytest.mark.parametrize(
    "text",
    [
        "causal",
        "window:3",
        "window:2:1",
        "window:*:2",
        "prefix:4",
        "chunk:3",
        "documents:4",
        "not causal",
        "causal & window:5",
        "causal & not chunk:4 & window:9",
    ],
)
@pytest.mark.parametrize("lengths", [(11, 11), (5, 13)])
def test_mask_text_means_the_same_to_all(text, lengths):
    """The formula that SDPA, FlexAttention and ordinary attention get is the mask that Tilewise gets."""
    q, k = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None, :]
    mask = parse_mask(text)
    offset = lengths[1] - lengths[0]
    keep = mask.keep(q + offset, k, q, k).expand(lengths)
    generator = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(1, 1, n, 8, generator=generator, dtype=torch.float64)
        for n in (lengths[0], lengths[1], lengths[1])
    ]
    ours = tw.attention(*qkv, mask=mask.build(*lengths), backend="naive")
    theirs = tw.attention(*qkv, mask=keep.clone(), backend="naive")
    assert torch.equal(ours, theirs)
