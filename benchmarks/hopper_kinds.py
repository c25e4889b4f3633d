"""Kinds of call of the Hopper forward, compiled without a GPU: what registers do not hold, and products that wait.

    python benchmarks/hopper_kinds.py --output FILE [--pairs 128x128,...] [--forms sequences,...] [--kinds softcap;...]
                                      [--part 0/2] [--seconds S]
    python benchmarks/hopper_kinds.py --keep FILE [FILE ...]

A kind is what a spec holds; a form is how its tensors lie. Each is laid out as its call is, for an H200, and compiled
with the tiles that the call would take: first those of choice, then roomier ones while a kernel spills. One line each:

    spilled       bytes a thread of the kernels taken, as the assembler says
    tried         the same of each attempt
    serialised    its warnings that matrix products wait for one another
    key           what the table of `tilewise.backends.hopper.wants` knows the kind by

`--keep` writes into that table what such lines found with more than one attempt, so that calls make only one.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

import tilewise as tw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDE, WIDTH, FEW = 1000, 300, 3
"""Numbers that user masks capture: they are arguments of the kernels."""
MACHINE = ("cuda", 90, 232448, 132)
"""An H200: its kind, compute capability, shared memory and multiprocessors."""


class Form(NamedTuple):
    """How a call's tensors lie. lengths: of packed sequences, none for dense ones."""

    batch: int
    heads: int
    heads_kv: int
    rows: int
    keys: int
    lengths: int = 0
    dtype: torch.dtype = torch.bfloat16
    sink: bool = False
    partial: bool = False


FORMS = {
    "dense": Form(2, 16, 16, 4096, 4096),
    "heads": Form(64, 16, 4, 50, 900),
    "sequences": Form(16, 16, 16, 16384, 16384, 16),
    "sequences and heads": Form(64, 16, 4, 3200, 3200, 64),
    "split": Form(1, 8, 8, 300, 8192),
    "split heads": Form(1, 16, 4, 50, 8192),
    "long": Form(1, 8, 8, 32768, 32768),
    "float16": Form(2, 16, 16, 4096, 4096, 0, torch.float16),
    "sink": Form(2, 16, 16, 4096, 4096, 0, torch.bfloat16, True),
    "partial": Form(2, 16, 16, 4096, 4096, 0, torch.bfloat16, False, True),
}


def kinds(form: Form) -> dict[str, tuple[Any, Any]]:
    """(mask, scores) by name, for tensors of a form."""
    b, h, n, m = form.batch, form.heads, form.rows, form.keys
    causal, window = tw.causal(), tw.causal() & tw.window(500, 0)
    ids, others = torch.zeros(b, n, dtype=torch.int32), torch.zeros(b, m, dtype=torch.int32)
    slopes = tw.alibi_slopes(h)
    document = tw.document(ids, others)
    stripes = tw.custom(lambda q, k: (q - k) % WIDE < WIDTH)
    few = tw.custom(lambda q, k: (q - k) % 7 < FEW)
    crossed = stripes & tw.custom(lambda q, k: (q + k) % WIDE < WIDTH)
    either = tw.custom(lambda b, i, j, x, y: (x[b, i] <= y[b, j]) | (y[b, j] == 0), ids, others)
    softcap, alibi = tw.softcap(30.0), tw.alibi(slopes)
    bias = tw.bias(torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(b, h, n, m))
    relative = tw.relative(torch.zeros(h, 257, dtype=torch.bfloat16))
    exp = tw.custom_score(lambda s: s + tw.exp2(s * 0.01) * 0.1)
    bent = tw.custom_score(lambda s, q, k: s * 0.5 + tw.tanh(s * 0.1) * (q - k))
    decay = tw.custom_score(lambda s, q, k, h, y: s - y[h] * (q - k) * (q - k), slopes)
    both = tw.custom_score(lambda s, h, y: tw.tanh(s * y[h]) * 30.0 + tw.exp2(s * 0.01), slopes)
    masks = {
        "full": None, "causal": causal, "window": window, "window to both sides": tw.window(500, 300),
        "stripes": causal & stripes, "narrow stripes": causal & few, "bare stripes": stripes,
        "crossed stripes": causal & crossed, "stripes in a window": window & stripes,
        "chunks": causal & tw.chunk(512), "prefix": causal | tw.prefix(77),
        "prefix each": causal | tw.prefix(torch.full((b,), 5, dtype=torch.int32)),
        "documents": causal & document, "bare documents": document, "documents in a window": window & document,
        "documents and stripes": causal & document & stripes,
        "padding": tw.key_padding(torch.full((b,), m, dtype=torch.int32)),
        "absent keys": causal & tw.key_padding(torch.ones(b, m, dtype=torch.bool)),
        "two leaves": causal & either, "documents and two leaves": causal & either & document,
    }  # fmt: skip
    terms = {
        "softcap": softcap, "alibi": alibi, "bias": bias, "relative": relative, "exp2": exp, "bent": bent,
        "decay": decay, "softcap, alibi": [softcap, alibi], "alibi, softcap": [alibi, softcap],
        "softcap, bias": [softcap, bias], "bias, softcap": [bias, softcap], "bias, alibi": [bias, alibi],
    }  # fmt: skip
    found: dict[str, tuple[Any, Any]] = {name: (mask, ()) for name, mask in masks.items()}
    for name, term in terms.items():
        found[name] = (causal, term)
        found[f"{name}, in a window"] = (window, term)
    for name in ("softcap", "alibi", "bias", "relative", "softcap, alibi"):
        found[f"{name}, all pairs"] = (None, terms[name])
        found[f"{name}, documents"] = (causal & document, terms[name])
        found[f"{name}, stripes"] = (causal & stripes, terms[name])
    for name in ("softcap", "alibi", "bias"):
        for under in ("documents in a window", "padding", "prefix", "window to both sides"):
            found[f"{name}, {under}"] = (masks[under], terms[name])
    found["much at once"] = (causal & document & stripes, [both, bias])
    return found


class Found(NamedTuple):
    """What was compiled for a call."""

    spilled: int
    tried: tuple[int, ...]
    serialised: int
    shared: int
    tiles: tuple[Any, ...]
    key: str = ""

    def line(self) -> dict[str, Any]:
        return {**self._asdict(), "tiles": [int(x) for x in self.tiles]}


class Caught(Exception):
    """A call has reached its backend."""


def ready(pair: tuple[int, int], form: Form, mask: Any, scores: Any) -> Callable[[], Any]:
    """A call of a kind, of tensors made here on the device that torch makes them on."""

    def draw(heads: int, length: int, width: int) -> torch.Tensor:
        shape = (length, heads, width) if form.lengths else (form.batch, heads, length, width)
        return torch.zeros(shape, dtype=form.dtype)

    (d, d_v), options = pair, {"mask": mask, "scores": scores, "backend": "hopper"}
    tensors = [
        draw(form.heads, form.rows, d),
        draw(form.heads_kv, form.keys, d),
        draw(form.heads_kv, form.keys, d_v),
    ]
    if form.sink:
        options["sink"] = torch.zeros(form.heads)
    function = tw.attention_partial if form.partial else tw.attention
    if form.lengths:
        starts = torch.arange(form.lengths + 1, dtype=torch.int32) * (form.rows // form.lengths)
        function, tensors = tw.attention_varlen, [*tensors, starts, starts]
    return functools.partial(function, *tensors, **options)


def call(pair: tuple[int, int], form: Form, mask: Any, scores: Any) -> None:
    """A call of a kind."""
    made = ready(pair, form, mask, scores)
    with torch.no_grad():
        made()


def laid_out(pair: tuple[int, int], form: Form, mask: Any, scores: Any) -> tuple[Any, Any]:
    """(problem, inputs) that the backend would be handed."""
    from tilewise.backends.hopper.backend import Hopper

    seen: list[Any] = []

    def forward(self: Any, problem: Any, inputs: Any) -> None:
        seen.extend((problem, inputs))
        raise Caught

    instead = {"forward": forward, "supports": lambda s, p: [], "prepare": lambda *a: None}
    with mock.patch.multiple(Hopper, **instead), suppress(Caught):
        call(pair, form, mask, scores)
    return seen[0], seen[1]


@contextmanager
def without_a_gpu(launchers: Callable[..., Any]) -> Iterator[Any]:
    """The module of the forward's launches, which compiles by `launchers` and launches nothing."""
    from tilewise.backends.hopper import launch_forward
    from tilewise.backends.triton.machine import Machine

    ranges = SimpleNamespace(batch_step=40, head_step=0)
    changes = {
        "launchers": launchers, "machine_of": lambda device: Machine(*MACHINE),
        "make_ranges": lambda *a: ranges,
    }  # fmt: skip
    with (
        mock.patch.multiple(launch_forward, **changes),
        mock.patch.object(launch_forward.low, "_data", lambda inputs, slots: [0] * len(slots.names)),
    ):
        yield launch_forward


def assembled(compiled: Any) -> tuple[int, int]:
    """(bytes spilled, warnings of products that wait) as the assembler says of a compiled kernel's text."""
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        command = [
            assembler, "-v", "--fmad=false", "--gpu-name=sm_90a", source, "-o", f"{source}.o",
        ]  # fmt: skip
        said = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    text = said.stdout + said.stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", text))), text.count("serialized")


def compiled(pair: tuple[int, int], form: str, kind: str) -> Found:
    """What a call of a kind compiles."""
    from triton.backends.compiler import GPUTarget

    from tilewise.backends.hopper.compile import compile_gluon
    from tilewise.backends.hopper.source import module_of
    from tilewise.backends.hopper.spills import spilled
    from tilewise.backends.hopper.tiles import form_of
    from tilewise.backends.hopper.wants import key_of

    tried: list[list[tuple[int, int]]] = []

    def launchers(spec: Any, slots: Any, builds: Any, device: int) -> list[Any]:
        made = []
        for entry, build in builds.items():
            kernel = getattr(module_of(spec, slots, entry.module, (entry,)), entry.name)
            one = compile_gluon(kernel, build, GPUTarget("cuda", 90, 32))
            made.append(SimpleNamespace(spilled=spilled(one.asm["cubin"]), compiled=one, device=0))
        tried.append([(m.spilled, m.compiled.metadata.shared) for m in made])
        return made

    with without_a_gpu(launchers) as launch:
        problem, inputs = laid_out(pair, FORMS[form], *kinds(FORMS[form])[kind])
        recipe = launch.make_recipe(problem, inputs)
        spec = launch.with_literals(problem.spec, launch.divisors(problem, inputs))
    said = [assembled(run.compiled) for run in (recipe.run, recipe.again) if run is not None]
    each = tuple(sum(spill for spill, _ in attempt) for attempt in tried)
    shared = max(r.compiled.metadata.shared for r in (recipe.run, recipe.again) if r is not None)
    key = key_of(spec, pair, form_of(problem, recipe.pack > 1, recipe.splits > 1))
    return Found(sum(s for s, _ in said), each, sum(n for _, n in said), shared, tuple(recipe.tiles), key)


def keep(files: list[Path]) -> None:
    """Write what more than one attempt found into the table; of two findings of a key the one tried later."""
    from tilewise.backends.hopper import wants

    table = json.loads(wants.TABLE.read_text(encoding="utf-8"))
    choices, tries = table["choices"], {}
    for line in (
        json.loads(text) for file in files for text in file.read_text(encoding="utf-8").splitlines()
    ):
        key, count = line.get("key", ""), len(line.get("tried", ()))
        if count > max(1, tries.get(key, 0)):
            choices[key], tries[key] = line["tiles"], count
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(choices[key])}" for key in sorted(choices))
    head = json.dumps({name: value for name, value in table.items() if name != "choices"}, indent=2)[:-2]
    text = f'{head},\n  "choices": {{\n{lines}\n  }}\n}}\n'
    wants.TABLE.write_text(text, encoding="utf-8")
    print(f"{len(tries)} kinds settled; {len(choices)} in the table")


def main() -> None:
    from tilewise.backends.hopper.tiles import PAIRS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("pairs", "forms", "kinds"):
        parser.add_argument(f"--{name}", default="", help="those named, comma separated; all by default")
    parser.add_argument("--part", default="0/1", help="n/m: every m-th, the n-th first")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more after so long")
    parser.add_argument("--keep", type=Path, nargs="+", help="write the table from these lines")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if asked.keep:
        keep(asked.keep)
        return
    if asked.output is None:
        parser.error("--output or --keep")
    begin = time.monotonic()
    part, parts = map(int, asked.part.split("/"))
    everything = [
        (pair, form, kind)
        for form in FORMS
        for pair in PAIRS
        for kind in kinds(Form(1, 4, 4, 8, 8))
        if ("x".join(map(str, pair)) in asked.pairs.split(",") or not asked.pairs)
        and (form in asked.forms.split(",") or not asked.forms)
        and (kind in asked.kinds.split(";") or not asked.kinds)
    ]
    with asked.output.open("a", encoding="utf-8") as file:
        for pair, form, kind in everything[part::parts]:
            if time.monotonic() - begin > asked.seconds:
                break
            found = compiled(pair, form, kind)
            line = {"head_dims": pair, "form": form, "kind": kind, **found.line()}
            print(json.dumps(line), file=file, flush=True)
            print(pair, form, kind, *found, flush=True)


if __name__ == "__main__":
    sys.exit(main())
