"""`tilewise check` through its entry point: tables, JSON, exit codes, and a report that holds nothing private."""

from __future__ import annotations

import getpass
import json
import os
import platform
from pathlib import Path

import pytest
import torch

from tilewise.backends.reference.naive import Naive
from tilewise.cli import check_run, machine
from tilewise.cli.main import main
from tilewise.dispatch import registry
from tilewise.testing.cases import all_cases

SMALL = ["--backend", "blockwise", "--device", "cpu"]
SECRET = "sesame-open-4711"


class Wrong(Naive):
    """A backend whose results are a little off."""

    name = "wrong"

    def forward(self, problem, inputs):
        out, lse = super().forward(problem, inputs)
        return out + 0.001, lse


class Broken(Naive):
    """A backend that raises, and talks about where it lives."""

    name = "broken"

    def forward(self, problem, inputs):
        raise RuntimeError(
            f"cannot open {Path.home()}/models/weights.bin, {Path.cwd()}/cache and C:\\Users\\someone\\x.dll as "
            f"{getpass.getuser()} on {platform.node()} with {SECRET} at https://someone:word@example.org/x?y=1"
        )


class Choosy(Naive):
    """A backend that takes nothing."""

    name = "choosy"

    def supports(self, problem):
        from tilewise.backends.protocol import Reason

        return [Reason("mood", "a problem", "none", "ask tomorrow")]


@pytest.fixture
def injected(monkeypatch):
    """Registers the three backends for one test."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    for kind in (Wrong, Broken, Choosy):
        registry.register(kind.name, __name__, kind.__name__)
        registry._loaded[kind.name] = kind()


def run_json(capsys, *arguments: str) -> tuple[int, dict]:
    code = main(["check", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_default_set_has_every_feature():
    chosen = [case for case in all_cases() if check_run.in_default_set(case.name)]
    alone = {case.name for case in all_cases() if case.name.startswith(("mask-", "term-"))}
    assert alone <= {case.name for case in chosen}
    assert {case.dtype for case in chosen} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    groups = {check_run.group_of(case.name) for case in chosen}
    assert groups == set(check_run.GROUPS.values()) - {"features crossed", "features crossed, packed"}
    assert len(chosen) < len(all_cases()) / 2


def test_every_case_has_a_group():
    assert "other" not in {check_run.group_of(case.name) for case in all_cases()}


def test_json_of_a_passing_check(capsys):
    code, report = run_json(capsys, "--case", "mask-causal", "--case", "sink", *SMALL)
    assert code == 0 and report["passed"] is True
    assert set(report) == {"command", "schema", "passed", "counts", "seconds", "machine", "results"}
    assert report["counts"] == {"passed": 2, "failed": 0, "refused": 0}
    for result in report["results"]:
        assert result["status"] == "passed" and result["backend"] == "blockwise" and result["device"] == "cpu"
        assert {"out", "lse", "dq", "dk", "dv"} <= {line["tensor"] for line in result["tensors"]}
        for line in result["tensors"]:
            assert 0 <= line["error_max"] <= line["budget_max"] and line["ratio"] <= 1


def test_tables(capsys):
    assert main(["check", "--case", "plain-fp32", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "plain-fp32" in out and "budget" in out and "1 passed: blockwise on cpu" in out
    assert main(["check", "--case", "term-softcap_2", "--case", "heads-3_1", *SMALL]) == 0
    assert "dq" in capsys.readouterr().out


def test_groups_are_shown_without_case(capsys, monkeypatch):
    monkeypatch.setattr(check_run, "DEFAULT", ("plain-*", "mask-causal", "empty-Nk0"))
    assert main(["check", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "plain attention" in out and "masks" in out and "empty shapes" in out and "score terms" not in out


def test_a_wrong_backend_fails(injected, capsys):
    code, report = run_json(capsys, "--case", "mask-causal", "--backend", "wrong", "--backend", "naive")
    assert code == 1 and report["passed"] is False
    wrong = next(result for result in report["results"] if result["backend"] == "wrong")
    assert wrong["status"] == "failed" and wrong["worst_tensor"] == "out" and wrong["worst_ratio"] > 100
    assert "over budget" in wrong["message"]
    assert main(["check", "--case", "mask-causal", "--backend", "wrong"]) == 1
    out = capsys.readouterr().out
    assert (
        "FAILED mask-causal on wrong" in out
        and "again: tilewise check --case mask-causal --backend wrong" in out
    )


def test_a_broken_backend_fails_without_traceback(injected, capsys):
    assert main(["check", "--case", "mask-causal", "--backend", "broken"]) == 1
    captured = capsys.readouterr()
    assert "RuntimeError: cannot open" in captured.out and "Traceback" not in captured.out + captured.err


def test_a_refusal_is_no_failure(injected, capsys):
    code, report = run_json(capsys, "--case", "mask-causal", "--backend", "choosy,naive", "--device", "cpu")
    assert code == 0 and report["counts"] == {"passed": 1, "failed": 0, "refused": 1}
    assert "mood: got a problem, allowed none. ask tomorrow" in report["results"][0]["message"]
    assert main(["check", "--case", "mask-causal", "--backend", "choosy"]) == 2
    captured = capsys.readouterr()
    assert "takes none of the 1 case on" in captured.out and "nothing was checked" in captured.err


def test_a_backend_for_other_devices_is_told_once(injected, capsys):
    assert main(["check", "--case", "mask-causal", "--backend", "choosy,naive", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "choosy takes none of the 1 case on cpu" in out and "1 passed: naive on cpu" in out


def test_report_has_what_a_bug_needs(injected, capsys, tmp_path):
    file = tmp_path / "report.md"
    assert (
        main(["check", "--case", "mask-causal", "--backend", "wrong,blockwise", "--report", str(file)]) == 1
    )
    text = file.read_text(encoding="utf-8")
    for word in (
        torch.__version__,
        platform.python_version(),
        "mask-causal on wrong, cpu",
        "seed: 0",
        "float32",
        "sizes (B, H, H_kv, N_q, N_k, D, D_v): [2, 4, 2, 19, 23, 16, 16]",
        "budget max",
        "| out |",
        "blockwise on cpu: 1 passed",
        "tilewise check --case mask-causal --backend wrong --device cpu",
    ):
        assert word in text, word


def test_report_holds_nothing_private(injected, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("A_TOKEN", SECRET)
    monkeypatch.setenv("LOGNAME", "jane.doe")
    monkeypatch.setattr("socket.gethostname", lambda: "castle-12")
    monkeypatch.setattr("platform.node", lambda: "castle-12")
    file = tmp_path / "report.md"
    assert main(["check", "--case", "mask-causal", "--backend", "broken,wrong", "--report", str(file)]) == 1
    text = file.read_text(encoding="utf-8")
    private = [
        SECRET,
        "jane.doe",
        "castle-12",
        str(Path.home()),
        str(Path.cwd()),
        str(tmp_path),
        "someone",
        "example.org",
    ]
    private += [value for value in os.environ.values() if value.startswith(("/", "http")) and len(value) > 5]
    assert [word for word in private if word in text] == []
    assert "RuntimeError: cannot open <path>" in text
    capsys.readouterr()
    main(["check", "--json", "--case", "mask-causal", "--backend", "broken"])
    out = capsys.readouterr().out
    assert [word for word in private if word in out] == []


@pytest.mark.parametrize(
    "text, scrubbed",
    [
        ("ratio 3/4, a/b and 1 / 2", "ratio 3/4, a/b and 1 / 2"),
        ("in /opt/x/y.py: 3", "in <path>: 3"),
        ("File '/opt/x y/z'", "File '<path> y/z'"),
        (r"at D:\data\k.bin now", "at <path> now"),
        ("see http://10.0.0.1:80/x", "see <url>"),
        ("~/notes.txt", "<path>"),
    ],
)
def test_scrub(text, scrubbed):
    assert machine.scrub(text) == scrubbed


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--case", "mask-casual"], "there is no case 'mask-casual'; did you mean mask-causal"),
        (["--backend", "nonsense"], "there is no backend 'nonsense'"),
        (["--device", "nonsense"], "--device nonsense cannot be used here"),
        (["--case", "sink", "--report", "no/such/folder/file"], "cannot write no/such/folder/file"),
    ],
)
def test_errors_are_one_line(capsys, arguments, words):
    assert main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error
    assert main(["check", "--traceback", *arguments]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_list_prints_names(capsys):
    assert main(["check", "--list", "--full"]) == 0
    assert capsys.readouterr().out.split() == [case.name for case in all_cases()]


def test_bad_options_are_refused():
    with pytest.raises(SystemExit) as stopped:
        main(["check", "--full", "--case", "sink"])
    assert stopped.value.code == 2
