"""What an installation promises: torch alone, types, one command in README and CI, a small import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).parents[1]
PACKAGE = Path(tilewise.__file__).parent
OPTIONAL = (
    "transformers",
    "gguf",
    "accelerate",
    "rich",
    "matplotlib",
    "psutil",
    "numba",
    "numpy",
    "hypothesis",
)

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the source tree")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def readme_block(marker: str) -> str:
    """The fenced block that follows a marker comment."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", text, flags=re.DOTALL)
    assert len(found) == 1, f"README.md has {len(found)} blocks marked {marker!r}"
    return found[0]


def test_import_needs_torch_alone():
    # torch looks for NumPy and does without it, so the names are hidden, not merely checked afterwards.
    done = python(
        f"""
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
import tilewise, torch
if hasattr(tilewise, "attention"):
    x = torch.ones(1, 1, 4, 8)
    print(float(tilewise.attention(x, x, x, mask=tilewise.causal()).sum()))
"""
    )
    assert done.returncode == 0, done.stderr


def test_import_brings_no_backend_along():
    heavy = (
        "transformers",
        "numba",
        "llvmlite",
        "triton",
        "matplotlib",
        "rich",
        "hypothesis",
        "pytest",
        "sympy",
    )
    done = python(
        f"""
import sys, torch
before = set(sys.modules)
import tilewise
new = set(sys.modules) - before
print([name for name in {heavy} if name in new], [name for name in new if name.startswith("tilewise.backends.")
    and name != "tilewise.backends.protocol"], [name for name in new if name.startswith("tilewise.cli")])
"""
    )
    assert done.stdout.strip() == "[] [] []", done.stdout + done.stderr


def test_names_that_the_readme_writes_out_are_there():
    """After `import tilewise` alone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"`(?:with )?(tilewise(?:\.[a-z_0-9]+)+)", text)))
    assert {"tilewise.compat.install", "tilewise.compat.sdpa.route", "tilewise.nn"} <= set(names)
    done = python("\n".join(("import tilewise", *names)))
    assert done.returncode == 0, done.stderr
    assert python("import tilewise; tilewise.no_such_name").stderr.strip().endswith("'no_such_name'")


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").exists()


def test_version_is_one_number():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "(.+)"$', text, flags=re.MULTILINE)
    assert declared is not None
    assert getattr(tilewise, "__version__", declared[1]) == declared[1]


def test_readme_has_the_two_commands():
    for marker, end in (("command: demo", "tilewise demo"), ("command: tests", "python -m pytest -n 2")):
        block = readme_block(marker)
        assert len(block.splitlines()) == 1 and block.strip().endswith(f"&& {end}")
        assert "-c constraints.txt" in block


def test_ci_runs_the_readme_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "readme_command tests" in script and "pytest -n" not in script


def test_constraints_pin_torch_and_name_no_place():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert any(re.fullmatch(r"torch==[\d.]+", pin) for pin in pins)
    assert not any("://" in line or line.startswith("-") for line in lines)


def test_readme_example_runs():
    done = python(readme_block("example"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("module", ["tilewise", "tilewise.cli"])
def test_command_line_starts(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "demo" in done.stdout
