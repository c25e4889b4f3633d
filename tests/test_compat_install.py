"""`import flash_attn` finds the shim when asked, never shadows a real package, and can be undone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise.compat import install, uninstall
from tilewise.compat.install import _MODULES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="a real flash_attn is installed"
)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(tw.config, "slow", "quiet")
    yield
    uninstall("flash_attn")


def test_imports_of_every_generation():
    q = torch.randn(1, 5, 2, 8)
    with install("flash_attn"):
        import flash_attn
        import flash_attn_interface
        from flash_attn import flash_attn_func
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: F401
        from flash_attn.cute import flash_attn_func as fourth
        from flash_attn.cute.interface import flash_attn_varlen_func  # noqa: F401
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_varlen_forward  # noqa: F401
        from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb  # noqa: F401

        assert importlib.util.find_spec("flash_attn").origin == "tilewise.compat"
        assert flash_attn.__version__.startswith("2.") and flash_attn_interface.__version__.startswith("3.")
        assert flash_attn.bert_padding.pad_input is pad_input
        want = tw.attention(*(q.transpose(1, 2),) * 3, mask=tw.causal()).transpose(1, 2)
        assert torch.equal(flash_attn_func(q, q, q, causal=True), want)
        assert torch.equal(flash_attn_interface.flash_attn_func(q, q, q, None, True), want)
        assert torch.equal(fourth(q, q, q, causal=True)[0], want)
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn")
    assert not set(_MODULES) & set(sys.modules)


def test_nothing_is_there_unasked():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, tilewise.compat; print([m for m in sys.modules if 'flash_attn' in m])"],
        cwd=Path(tw.__file__).parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_nested_installations_end_with_the_outer_one():
    with install("flash_attn"):
        with install("flash_attn"):
            pass
        assert "flash_attn" in sys.modules
    assert "flash_attn" not in sys.modules


def test_undone_after_an_exception():
    with pytest.raises(ZeroDivisionError), install():
        raise ZeroDivisionError
    assert "flash_attn" not in sys.modules


def test_the_third_generation_alone():
    handle = install("flash_attn_interface")
    assert "flash_attn_interface" in sys.modules and "flash_attn" not in sys.modules
    handle.undo()
    assert "flash_attn_interface" not in sys.modules


def test_a_real_package_is_not_shadowed(tmp_path, monkeypatch):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(tw.OptionError, match="a real flash_attn is installed"):
        install("flash_attn")
    import flash_attn

    assert flash_attn.real
    uninstall("flash_attn")
    assert sys.modules.pop("flash_attn") is flash_attn


def test_unknown_names_are_refused():
    with pytest.raises(tw.OptionError, match="There are: flash_attn"):
        install("xformers")
