#!/usr/bin/env python3
"""Sizes a reader can take in: files, functions, positional parameters.

    file                      400 lines, kernel packages 500
    function                  60 lines of code, a kernel's body 150 (without docstrings, blank lines, comments)
    positional parameters     7, self and cls not counted; kernels are free, and so are the shims of other libraries,
                              whose parameters are those of the interface they stand for

EXCEPTIONS lists what is longer, and why. One that is no longer needed is reported, too.

    python tools/check_sizes.py          prints one line per violation; exit code 1 if there is one
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tilewise", "tests", "tools", "benchmarks", "examples")
FILE, KERNEL_FILE, FUNCTION, KERNEL, PARAMETERS = 400, 500, 60, 150, 7
KERNEL_PACKAGES = ("tilewise/backends/cpu/", "tilewise/backends/triton/", "tilewise/backends/hopper/")
SHIMS = ("tilewise/compat/",)
TORCH = "the parameters of torch.nn.MultiheadAttention, in its order"
OP = "the parameters of the registered op, named as its schema names them"
EXCEPTIONS: dict[str, str] = {
    # "file" or "file::qualified name": why
    "tilewise/ops.py::_attention_op": OP,
    "tilewise/ops.py::_attention_fake": OP,
    "tilewise/ops.py::_backward_op": OP,
    "tilewise/ops.py::_backward_fake": OP,
    "tilewise/ops.py::Hvp.forward": "an autograd Function takes its tensors positionally",
    "tilewise/nn/multihead.py::MultiheadAttention.__init__": TORCH,
    "tilewise/nn/multihead.py::MultiheadAttention.forward": TORCH,
    "tests/test_semantics.py": "one test for each row of the semantics table, read side by side with it",
    "tests/test_errors.py::qkv": "the sizes of q, k and v in the order of their dimensions",
}


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: no blank lines, comments or docstrings."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{node.name}" if isinstance(node, (ast.ClassDef, *Function.__args__)) else prefix  # type: ignore[attr-defined]
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, f"{name}." if name != prefix else prefix)


def is_kernel(node: Function) -> bool:
    """True for what a just-in-time compiler reads: decorated with something called jit, njit or kernel."""
    names = [ast.unparse(decorator).split("(")[0].rsplit(".", 1)[-1] for decorator in node.decorator_list]
    return any(name in ("jit", "njit", "kernel", "gluon_jit") for name in names)


def violations(path: Path, root: Path) -> Iterator[tuple[str, str]]:
    """(key of an exception, text) for everything in a file that is too large."""
    text, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
    in_kernels = name.startswith(KERNEL_PACKAGES)
    count, limit = text.count("\n"), KERNEL_FILE if in_kernels else FILE
    if count > limit:
        yield name, f"{name}: {count} lines, at most {limit}"
    code = code_lines(text)
    for qualified, node in functions(ast.parse(text)):
        kernel = is_kernel(node)
        size = len([n for n in code if node.lineno <= n <= (node.end_lineno or n)])
        if size > (KERNEL if kernel else FUNCTION):
            yield (
                f"{name}::{qualified}",
                f"{name}:{node.lineno}: {qualified} has {size} lines of code, at most {KERNEL if kernel else FUNCTION}",
            )
        positional = [
            a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls", "ctx")
        ]
        if len(positional) > PARAMETERS and not kernel and not in_kernels and not name.startswith(SHIMS):
            yield (
                f"{name}::{qualified}",
                f"{name}:{node.lineno}: {qualified} has {len(positional)} positional parameters, at most {PARAMETERS}",
            )


def main(root: Path = ROOT) -> int:
    """Check the files under `root`."""
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    found = [entry for path in paths for entry in violations(path, root)]
    lines = [text for key, text in found if key not in EXCEPTIONS]
    lines += [f"{key}: the exception is no longer needed" for key in EXCEPTIONS if key not in dict(found)]
    print("\n".join(lines) or f"sizes: {len(paths)} files, {len(EXCEPTIONS)} exceptions, no violation")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
