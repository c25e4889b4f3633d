"""`tilewise bench` through its entry point: JSON, JSON lines, comparison, picture, exit codes; and the protocol."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from tilewise.backends.reference.naive import Naive
from tilewise.cli import bench, bench_contenders, bench_report, bench_run, timing
from tilewise.cli.main import main
from tilewise.cli.problem_flags import Sizes, parse_mask
from tilewise.dispatch import registry

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--seqlen", "16,24", "--heads", "2", "--head-dim", "8", "--seconds", "0.01"]
NO_FLEX = [*QUICK, "--against", "sdpa,ordinary"]
ONE = [
    "--device",
    "cpu",
    "--seqlen",
    "16",
    "--heads",
    "2",
    "--head-dim",
    "8",
    "--seconds",
    "0.01",
    "--against",
    "sdpa",
]


def run_json(capsys, *arguments: str) -> tuple[int, dict]:
    code = main(["bench", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


# the protocol


def test_order_rotates():
    orders = list(itertools.islice(timing.rotations(["a", "b", "c"]), 6))
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {"a", "b", "c"}


def test_calls_are_interleaved():
    seen: list[str] = []

    def call(name: str) -> None:
        seen.append(name)
        torch.randn(400, 400) @ torch.randn(400, 400)

    found = timing.time_calls(
        {name: lambda name=name: call(name) for name in "ab"}, CPU, timing.Limits(4, 4, 0.0)
    )
    assert {name: len(t.latency.seconds) for name, t in found.items()} == {"a": 4, "b": 4}
    runs = [name for name, _ in itertools.groupby(seen)]
    assert len(runs) >= 4
    assert all(t.latency.median > 0 and t.hot is None and t.host is None for t in found.values())


def test_rounds_follow_the_limits():
    short = timing.time_calls({"a": lambda: None}, CPU, timing.Limits(3, 9, 0.0))
    assert len(short["a"].latency.seconds) == 3
    full = timing.time_calls({"a": lambda: None}, CPU, timing.Limits(3, 9, 60.0))
    assert len(full["a"].latency.seconds) == 9
    assert timing.time_calls({}, CPU) == {}


def test_series():
    series = timing.Series((4.0, 1.0, 3.0, 2.0, 5.0))
    assert series.median == 3 and series.quartiles == (2, 4) and series.spread == pytest.approx(1 / 3)
    assert timing.Series((2.0,)).quartiles == (2.0, 2.0)


# contenders


@pytest.mark.parametrize("mask", ["none", "causal", "window:5", "documents:7", "causal & not chunk:4"])
@pytest.mark.parametrize("sizes", [(1, 2, 2, 20, 20), (2, 4, 2, 9, 21)])
def test_contenders_compute_the_same(mask, sizes):
    sizes = Sizes(*sizes, 16, 16, "float32", mask)
    q, k, v = bench_run.draw(sizes, CPU)
    found = {
        name: bench_contenders.contender(name, parse_mask(mask), sizes, CPU)(q, k, v)
        for name in ("tilewise:naive", "tilewise:blockwise", "sdpa", "ordinary")
    }
    rows, wanted = bench_contenders.reference_rows((q, k, v), parse_mask(mask), sizes)
    assert len(rows)
    seen = bench_contenders.keep_all(parse_mask(mask), sizes, CPU).any(dim=1)
    for name, out in found.items():
        torch.testing.assert_close(
            out[:, :, seen], found["ordinary"][:, :, seen], atol=2e-6, rtol=0, msg=name
        )
        torch.testing.assert_close(out[0, 0][rows].double(), wanted, atol=2e-6, rtol=0, msg=name)


def test_pairs_are_counted():
    sizes = Sizes(1, 1, 1, 3000, 3000, 8, 8, "float32", "causal")
    assert bench_contenders.visible_pairs(parse_mask("causal"), sizes, CPU) == 3000 * 3001 // 2
    assert bench_contenders.visible_pairs(parse_mask("none"), sizes, CPU) == 3000 * 3000


def test_too_large_a_matrix_is_skipped():
    sizes = Sizes(1, 64, 64, 1 << 20, 1 << 20, 8, 8, "float32", "none")
    with pytest.raises(bench_contenders.Skipped, match="GB are free"):
        bench_contenders.contender("ordinary", parse_mask("none"), sizes, CPU)


# the command


def test_json(capsys):
    code, report = run_json(capsys, *NO_FLEX, "--backend", "naive", "--heads-kv", "1", "--mask", "window:6")
    assert code == 0
    assert set(report) == {"command", "schema", "machine", "seconds", "rows", "compare"}
    keys = {(row["name"], row["problem"]["seqlen_q"], row["direction"]) for row in report["rows"]}
    names = ("tilewise", "tilewise:naive", "sdpa", "ordinary")
    assert keys == set(itertools.product(names, (16, 24), ("forward", "backward")))
    for row in report["rows"]:
        assert row["status"] == "ok" and row["memory_bytes"] >= 0 and row["flops"] > 0
        latency = row["timing"]["latency"]
        assert 0 < latency["first_quartile_s"] <= latency["median_s"] <= latency["third_quartile_s"]
        assert latency["rounds"] >= 5
        assert (row["backend"] is not None) == row["name"].startswith("tilewise")
        assert row["direction"] == "backward" or row["difference"] < 1e-5


def test_table(capsys):
    assert main(["bench", *NO_FLEX]) == 0
    captured = capsys.readouterr()
    for word in (
        "batch 1, 2 heads, head dim 8, float32, mask causal, on cpu",
        "tilewise (",
        "sdpa",
        "ordinary",
        "backward",
        "memory",
        "interleaved rounds",
        "All in",
    ):
        assert word in captured.out, word
    assert "Warning" not in captured.err


def test_flex_says_why_it_is_skipped(capsys, monkeypatch):
    def refuse(mask, sizes, device):
        raise bench_contenders.Skipped("no compiler here")

    monkeypatch.setattr(bench_contenders, "_flex", refuse)
    assert main(["bench", *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.count("flex forward skipped: no compiler here") == 1
    assert out.count("flex backward skipped: no compiler here") == 1


@pytest.mark.slow
def test_flex_runs(capsys):
    code, report = run_json(capsys, *QUICK, "--against", "flex")
    assert code == 0
    forward = [row for row in report["rows"] if row["name"] == "flex" and row["direction"] == "forward"]
    assert all(row["status"] == "ok" or row["reason"] for row in forward)


def test_output_and_compare(capsys, tmp_path):
    file = tmp_path / "earlier.jsonl"
    assert main(["bench", *ONE, "--output", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 2 * 2 and all(line["machine"]["torch"] == torch.__version__ for line in lines)
    capsys.readouterr()

    code, report = run_json(capsys, *ONE, "--compare", str(file))
    assert code == 0 and len(report["compare"]) == len(lines)
    for change in report["compare"]:
        assert change["ratio"] == pytest.approx(change["now_s"] / change["before_s"])
        assert change["verdict"] in ("slower", "faster", "within the spread") and change["differs"] == []

    for line in lines:  # an earlier run on a machine a million times as fast
        line["timing"]["latency"] = {key: 1e-12 for key in line["timing"]["latency"]}
        line["machine"]["processor"] = "another"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["bench", *ONE, "--compare", str(file), "--fail-above", "2"]) == 1
    out = capsys.readouterr().out
    assert "slower" in out and "The runs also differ in: processor." in out
    assert main(["bench", *ONE, "--compare", str(file)]) == 0


def test_compare_with_another_problem(capsys, tmp_path):
    file = tmp_path / "earlier.jsonl"
    assert main(["bench", *ONE, "--output", str(file)]) == 0
    assert main(["bench", *ONE, "--head-dim", "16", "--compare", str(file)]) == 0
    assert "has no measurement of the same problem" in capsys.readouterr().out


def test_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    assert main(["bench", *NO_FLEX, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG") and str(file) in capsys.readouterr().out


class Wrong(Naive):
    """A backend with another function's values."""

    name = "wrong"

    def forward(self, problem, inputs):
        out, lse = super().forward(problem, inputs)
        return out * 1.1, lse


class Choosy(Naive):
    """A backend that takes nothing."""

    name = "choosy"

    def supports(self, problem):
        from tilewise.backends.protocol import Reason

        return [Reason("mood", "a problem", "none")]


@pytest.fixture
def injected(monkeypatch):
    """Registers the backends for one test, behind the others."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    for kind in (Wrong, Choosy):
        registry.register(kind.name, __name__, kind.__name__)
        registry._loaded[kind.name] = kind()


def test_a_wrong_result_fails(injected, capsys):
    code, report = run_json(capsys, *ONE, "--backend", "wrong")
    assert code == 1
    forward = [
        row for row in report["rows"] if row["name"] == "tilewise:wrong" and row["direction"] == "forward"
    ]
    assert all(row["status"] == "wrong" and row["timing"] is None for row in forward)
    assert all("differs from float64" in row["reason"] for row in forward)


def test_a_refusal_is_skipped(injected, capsys):
    code, report = run_json(capsys, *ONE, "--backend", "choosy")
    assert code == 0
    refused = [row for row in report["rows"] if row["name"] == "tilewise:choosy"]
    assert all(
        row["status"] == "skipped" and "mood: got a problem, allowed none" in row["reason"] for row in refused
    )


def test_defaults_are_smaller_without_a_compiled_backend(monkeypatch):
    parser = __import__("argparse").ArgumentParser()
    bench.add_arguments(parser)
    arguments = parser.parse_args([])
    for slow, wanted in ((True, "cpu, slow"), (False, "cpu")):
        monkeypatch.setattr(bench_run, "resolve", lambda *_, slow=slow: ("some", slow))
        assert tuple(s.seqlen_q for s in bench.problems(arguments, CPU)) == bench.DEFAULTS[wanted].lengths


@pytest.mark.parametrize(
    "seconds, text", [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (3.21e-6, "3.21 us")]
)
def test_seconds_are_short(seconds, text):
    assert bench_report.seconds_text(seconds) == text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--against", "xformers"], "--against takes sdpa, flex, ordinary or none, not xformers"),
        (["--backend", "nonsense"], "there is no backend 'nonsense'"),
        (["--device", "nonsense"], "--device nonsense cannot be used here"),
        (["--mask", "casual"], "'casual' is not a mask"),
        (["--heads", "3", "--heads-kv", "2"], "3 query heads cannot share 2 KV heads"),
        (["--compare", "no/such/file"], "cannot read no/such/file"),
        (["--output", "no/such/folder/file"], "cannot write no/such/folder/file"),
        (["--fail-above", "2"], "--fail-above needs --compare FILE"),
    ],
)
def test_errors_are_one_line(capsys, arguments, words):
    assert main(["bench", *ONE, *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error


def test_a_file_of_something_else_is_refused(capsys, tmp_path):
    file = tmp_path / "other.jsonl"
    for text, words in (
        ('{"a": 1}\n', "line 1 is not a measurement"),
        ('{"schema": 99}', "has schema 99"),
        ("x", "line 1"),
    ):
        file.write_text(text)
        assert main(["bench", *ONE, "--compare", str(file)]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--seqlen", "a"], ["--seqlen", "0"], ["--dtype", "int8"], ["--heads", "0"]]
)
def test_bad_options_are_refused(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
