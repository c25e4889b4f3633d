"""The checks of tools/: they hold here, and they see what they are for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "tools").exists(), reason="needs the source tree")


def tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, files: dict[str, str]) -> Path:
    """Files under root; every folder of the package gets an __init__."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for folder in {path.parent for path in root.rglob("*.py")}:
        (folder / "__init__.py").touch()
    return root


@pytest.mark.parametrize("name", ["check_imports", "check_sizes"])
def test_the_repository_passes(name, capsys):
    assert tool(name).main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "line", "word"),
    [
        ("spec/masks.py", "from tilewise.problem import Problem", "above"),
        ("spec/masks.py", "from ..problem import Problem", "above"),
        ("problem.py", "def f():\n    from tilewise import api", "above"),
        ("backends/a/run.py", "from tilewise.backends.b import run", "imports the backend 'b'"),
        ("ops.py", "import numpy as np", "module level"),
        ("spec/masks.py", "import triton.language", "module level"),
    ],
)
def test_floors_are_seen(tmp_path, module, line, word):
    files = {"tilewise/problem.py": "", "tilewise/api.py": "", "tilewise/backends/b/run.py": ""}
    checker = tool("check_imports")
    found = write(tmp_path, {**files, f"tilewise/{module}": line})
    modules = {checker.module_name(path, found) for path in found.rglob("*.py")}
    lines = list(checker.violations(found / "tilewise" / module, found, modules))
    assert len(lines) == 1 and word in lines[0], lines


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("api.py", "from tilewise.problem import Problem\nfrom tilewise.backends.protocol import Backend"),
        ("spec/masks.py", "if TYPE_CHECKING:\n    from tilewise.problem import Problem"),
        (
            "backends/a/run.py",
            "from tilewise.backends.protocol import Backend\nfrom tilewise.backends.a import x",
        ),
        ("cli/bench.py", "def f():\n    import numpy, rich"),
    ],
)
def test_floors_allow_what_goes_down(tmp_path, module, text):
    checker = tool("check_imports")
    files = {"tilewise/problem.py": "", "tilewise/backends/protocol.py": "", f"tilewise/{module}": text}
    found = write(tmp_path, files)
    modules = {checker.module_name(path, found) for path in found.rglob("*.py")}
    assert list(checker.violations(found / "tilewise" / module, found, modules)) == []


def test_sizes_are_seen(tmp_path):
    checker = tool("check_sizes")
    body = "\n".join(f"    x{n} = {n}" for n in range(checker.FUNCTION))
    long = f'def long():\n    """Text.\n\n    More text, not counted.\n    """\n{body}\n'
    files = {
        "tilewise/a.py": long,
        "tilewise/b.py": "def f(a, b, c, d, e, f, g, h):\n    pass\n",
        "tilewise/c.py": "x = 1\n" * (checker.FILE + 1),
        "tilewise/d.py": "@triton.jit\n" + long + "\n\ndef g(a, b, *, c, d, e, f, g, h):\n    pass\n",
    }
    root = write(tmp_path, files)
    found = {path.name: list(checker.violations(path, root)) for path in root.rglob("*.py")}
    assert [len(found[name]) for name in ("a.py", "b.py", "c.py", "d.py")] == [1, 1, 1, 0], found
