#!/usr/bin/env python3
"""Write the package as a Hugging Face `kernels` repository: one noarch build variant per device type, nothing compiled.

    tools/hub_layout.py FOLDER [--variants cuda rocm cpu]

writes FOLDER/build/torch-cuda/, torch-rocm/, torch-cpu/, each with the whole library, metadata.json and its digest.
`kernels.get_local_kernel(FOLDER)` loads it without an installation; uploaded to a kernel repository of the Hub it is
`get_kernel("org/tilewise", version=0)`, and `attn_implementation="org/tilewise"` in transformers, which then calls
`flash_attn_func` and `flash_attn_varlen_func`.

Several versions may live in one process under names of their own, so imports become relative, names of modules are made
from the package's own name, and the ops get a namespace of their own. Left out are the command line, the tests that
ship, and what takes the place of other libraries by name.
Source: huggingface/kernels, docs/source/kernel-requirements.md, release 0.17.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tilewise"
LEFT_OUT = (
    "cli",
    "testing",
    "__main__.py",
    "compat/install.py",
    "compat/transformers.py",
    "compat/transformers_masks.py",
)
VARIANTS = ("cuda", "rocm", "cpu")
NAME, VERSION = "tilewise", 0  # by convention of the Hub, version 0 is one whose API still changes
ENTRY = """

from .compat.flash_attn2 import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ += [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]
"""
OLDER = '''"""The kernel under the path that older releases of `kernels` look at."""

import importlib.util
import sys
from pathlib import Path

_module = sys.modules.get("{id}")
if _module is None:
    _home = Path(__file__).resolve().parents[1]
    _spec = importlib.util.spec_from_file_location(
        "{id}", _home / "__init__.py", submodule_search_locations=[str(_home)]
    )
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["{id}"] = _module
    _spec.loader.exec_module(_module)
globals().update({{name: getattr(_module, name) for name in _module.__all__}})
__all__ = _module.__all__
'''


def relative(text: str, depth: int, namespace: str) -> str:
    """A module's text with its imports relative, `depth` folders below the package, and its ops in `namespace`."""
    dots = "." * (depth + 1)
    text = re.sub(
        r"^(\s*)from tilewise(?:\.([\w.]+))? import",
        lambda m: f"{m[1]}from {dots}{m[2] or ''} import",
        text,
        flags=re.M,
    )
    own = "__package__" if depth == 0 else f'__package__.rsplit(".", {depth})[0]'
    text = re.sub(r'(?<!f)"tilewise(\.[a-z_]\w*(?:\.\w+)*\.?)"', lambda m: f'{own} + "{m[1]}"', text)
    return re.sub(r"\btilewise::", f"{namespace}::", text).replace(
        "torch.ops.tilewise", f"torch.ops.{namespace}"
    )


def sources() -> list[Path]:
    """The files that go along."""
    found = sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    names = [(path, path.relative_to(PACKAGE).as_posix()) for path in found]
    return [
        path for path, name in names if not any(name == out or name.startswith(f"{out}/") for out in LEFT_OUT)
    ]


def write(folder: Path, variants: tuple[str, ...] = VARIANTS) -> str:
    """Write the layout below `folder`, in place of an older one; returns the kernel's id, a digest of the sources."""
    files = sources()
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:7]
    for backend in variants:
        kernel = f"_{NAME}_{backend}_{digest}"
        target = folder / "build" / f"torch-{backend}"
        shutil.rmtree(target, ignore_errors=True)
        for path in files:
            place = target / path.relative_to(PACKAGE)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".py":
                depth = len(path.relative_to(PACKAGE).parts) - 1
                text = relative(path.read_text(encoding="utf-8"), depth, kernel)
                if place == target / "compat" / "__init__.py":
                    text = '"""The functions of flash_attn, PyTorch and FlexAttention on Tilewise."""\n'
                place.write_text(text + (ENTRY if place == target / "__init__.py" else ""), encoding="utf-8")
            else:
                shutil.copyfile(path, place)
        (target / NAME).mkdir()
        (target / NAME / "__init__.py").write_text(OLDER.format(id=kernel), encoding="utf-8")
        written = sorted(path for path in target.rglob("*") if path.is_file())
        metadata = {
            "name": NAME,
            "id": kernel,
            "version": VERSION,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {
                "algorithm": "sha256",
                "files": {path.relative_to(target).as_posix(): sha256(path) for path in written},
            },
        }
        (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return digest


def sha256(path: Path) -> str:
    """A file's digest as the Hub writes it: base64."""
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    options = parser.parse_args()
    digest = write(options.folder, tuple(options.variants))
    print(f"{NAME} {digest}: {', '.join(options.variants)} in {options.folder / 'build'}")


if __name__ == "__main__":
    main()
