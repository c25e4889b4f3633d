#!/usr/bin/env python3
"""Import floors: a module imports from its own floor and from those below, never from above.

Floors are docs/design.md's, lowest first. Imports for type checking alone are free; imports inside functions count,
except those that EXCEPTIONS lists. Backends import `protocol` and nothing of each other. Optional packages are
imported inside functions; the kernel packages may name theirs at module level, since they themselves are only
imported inside functions (tests/test_packaging.py looks at sys.modules).

    python tools/check_imports.py        prints one line per violation; exit code 1 if there is one
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    ("errors", "dtypes", "config", "memory", "spec", "tuning"),
    ("problem",),
    ("transforms", "state", "analysis", "rotary", "testing.cases", "testing.grid", "testing.poison"),
    ("backends",),
    ("dispatch",),
    ("leaf_extents", "checks", "recorders", "vmap", "ops"),
    ("api", "plan", "quick", "written"),
    ("distributed", "serving"),
    ("cli", "compat", "nn", "testing"),
)
OPTIONAL = {
    "numba", "llvmlite", "triton", "transformers", "numpy", "matplotlib", "rich", "psutil", "gguf", "accelerate",
    "hypothesis", "pytest", "jinja2", "yaml",
}  # fmt: skip
KERNELS = ("tilewise.backends.cpu.", "tilewise.backends.triton.", "tilewise.backends.hopper.")
EXCEPTIONS = {
    # (importing module, imported module): why
    ("tilewise.testing.cases_masks", "tilewise"): "a case makes the library's public object, at call time",
    ("tilewise.testing.cases_scores", "tilewise"): "a case makes the library's public object, at call time",
}


class Import(NamedTuple):
    """One import statement's target, and where it stands."""

    target: str
    line: int
    inside_function: bool


def floor_of(module: str) -> int | None:
    """The floor of a module of the package; None for the package itself and `__main__`, which see everything."""
    name = module.removeprefix("tilewise").removeprefix(".")
    matches = [
        (len(prefix), number)
        for number, floor in enumerate(FLOORS)
        for prefix in floor
        if name == prefix or name.startswith((prefix + ".", prefix + "_"))
    ]
    return max(matches)[1] if matches else None


def is_type_checking(node: ast.AST) -> bool:
    """True for `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, package: str, inside: bool = False) -> Iterator[Import]:
    """Every import below a node that runs; `package` resolves the relative ones."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            base = (base + (node.module or "")).rstrip(".")
            yield from (Import(f"{base}.{alias.name}", node.lineno, inside) for alias in node.names)
        else:
            function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(node, package, inside or function)


def module_name(path: Path, root: Path) -> str:
    """Dotted name of a file."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def backend_of(module: str) -> str | None:
    """Name of the backend a module belongs to."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["tilewise", "backends"] and len(parts) > 2 else None


def violations(path: Path, root: Path, modules: set[str]) -> Iterator[str]:
    """One line for each import of a file that breaks a rule."""
    here = module_name(path, root)
    package = here if path.name == "__init__.py" else here.rpartition(".")[0]
    for found in imports(ast.parse(path.read_text(encoding="utf-8")), package):
        # `from tilewise.spec import words` names a module, `from tilewise.errors import X` an object in one.
        target = found.target if found.target in modules else found.target.rpartition(".")[0]
        target = found.target if "." not in found.target else target
        place = f"{path.relative_to(root)}:{found.line}"
        if found.target.split(".")[0] in OPTIONAL:
            if not found.inside_function and not here.startswith(KERNELS):
                yield f"{place}: imports {found.target} at module level; import it in the function that needs it"
            continue
        if target.split(".")[0] != "tilewise" or (here, target) in EXCEPTIONS:
            continue
        mine, theirs = floor_of(here), floor_of(target)
        if mine is not None and (len(FLOORS) if theirs is None else theirs) > mine and mine < len(FLOORS) - 1:
            yield f"{place}: {here} imports {target}, which is above it"
        backends = backend_of(here), backend_of(target)
        # The reference is what a compiled backend hands a call to that its kernels cannot do exactly; hopper is built
        # on triton's printer and launch layer.
        allowed = "protocol" in backends or backends[1] == "reference" or backends == ("hopper", "triton")
        if None not in backends and backends[0] != backends[1] and not allowed:
            yield f"{place}: the backend {backends[0]!r} imports the backend {backends[1]!r}"


def main(root: Path = ROOT) -> int:
    """Check the package under `root`."""
    paths = sorted((root / "tilewise").rglob("*.py"))
    modules = {module_name(path, root) for path in paths}
    found = [line for path in paths for line in violations(path, root, modules)]
    print("\n".join(found) or f"imports: {len(paths)} files, {len(FLOORS)} floors, no violation")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
