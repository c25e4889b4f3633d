"""The layout for Hugging Face `kernels`: whole, relative, digested, and it runs beside an installed Tilewise."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "tools").exists(), reason="needs the source tree")

RUN = """
import importlib.util, json, sys
import torch, tilewise
tilewise.config.slow = "quiet"
sys.path[:] = [p for p in sys.path if p]
def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py", submodule_search_locations=[str(path)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
from pathlib import Path
variant = Path(sys.argv[1])
kernel = load(variant, json.loads((variant / "metadata.json").read_text())["id"])
kernel.config.slow = "quiet"
assert kernel.attention is not tilewise.attention
torch.manual_seed(0)
q, k, v = (torch.randn(2, h, 17, 8, requires_grad=True) for h in (4, 2, 2))
found = []
for library in (tilewise, kernel):
    out = library.attention(q, k, v, mask=library.causal() & library.window(5, 0), scores=library.softcap(3.0))
    found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
assert all(torch.equal(a, b) for a, b in zip(*found))
flash = kernel.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
truth = tilewise.attention(q, k, v, mask=tilewise.causal()).transpose(1, 2)
assert torch.allclose(flash, truth, atol=1e-6)
cu = torch.tensor([0, 5, 17], dtype=torch.int32)
rows = [t[0].transpose(0, 1) for t in (q, k, v)]
assert kernel.flash_attn_varlen_func(*rows, cu, cu, 12, 12, causal=True).shape == rows[0].shape
compiled = torch.compile(lambda *t: kernel.attention(*t, mask=kernel.causal()), backend="eager", fullgraph=True)
assert torch.allclose(compiled(q, k, v), truth.transpose(1, 2), atol=1e-6)
assert kernel.nn.Attention is not tilewise.nn.Attention
older = load(variant / "tilewise", "older_path")
assert older.attention is kernel.attention and set(older.__all__) == set(kernel.__all__)
print("runs")
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("hub_layout", ROOT / "tools" / "hub_layout.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    folder = tmp_path_factory.mktemp("hub")
    tool.write(folder)
    assert sorted(path.name for path in (folder / "build").iterdir()) == [
        "torch-cpu",
        "torch-cuda",
        "torch-rocm",
    ]
    return folder / "build" / "torch-cpu"


def test_every_import_is_relative_or_of_what_may_be_there(variant):
    """Standard library and torch at module level; nothing anywhere of an installed Tilewise."""
    for path in variant.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            assert not any(name.split(".")[0] == "tilewise" for name in names), f"{path}: {names}"
        assert "torch.ops.tilewise" not in path.read_text(encoding="utf-8")


def test_metadata_names_every_file(variant):
    metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["name"] == "tilewise" and metadata["id"].isidentifier()
    assert metadata["backend"] == {"type": "cpu"} and metadata["python-depends"] == []
    files = {p.relative_to(variant).as_posix(): p for p in variant.rglob("*") if p.is_file()}
    del files["metadata.json"]
    assert set(files) == set(metadata["digest"]["files"])
    for name, path in files.items():
        expected = base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        assert metadata["digest"]["files"][name] == expected
    assert {"__init__.py", "api.py", "tilewise/__init__.py", "compat/flash_attn2.py"} <= set(files)
    assert not any(name.startswith(("cli/", "testing/")) for name in files)


def test_it_runs_beside_an_installed_library(variant):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(variant)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "runs" in done.stdout, done.stderr[-3000:]


def test_the_kernels_package_loads_it(variant):
    kernels = pytest.importorskip("kernels")
    kernel = kernels.get_local_kernel(variant.parents[1], backend="cpu")
    assert kernel.flash_attn_func.__module__.endswith("compat.flash_attn2")
