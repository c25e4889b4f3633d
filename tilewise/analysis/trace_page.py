"""The page of a trace: one HTML document with its style, its script and the recorded numbers inside.

The numbers travel as the bytes of their arrays (base64, little endian), so what the page shows is what was computed,
bit by bit. The script draws; it computes nothing of the run itself beyond p = exp(s - m) of the tile on show and the
prefix answer acc / l.
"""

from __future__ import annotations

import base64
import json
import sys
from array import array
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .trace_moves import LOOPS

if TYPE_CHECKING:
    from .trace_run import Recording, Trace

FOLDER = "trace_html"
SCRIPTS = ("data.js", "draw.js", "matrix.js", "forward.js", "backward.js", "controls.js")
SCHEMA = 1


def page(trace: Trace, title: str = "") -> str:
    """The document. title: shown in the heading and in the browser's tab; empty takes the problem's own words."""
    words = heading(trace)
    text = json.dumps(to_dict(trace, title or words, words), separators=(",", ":"), allow_nan=False)
    parts = {
        "TITLE": _escaped(title or words),
        "STYLE": _read("page.css"),
        "DATA": text.replace("<", "\\u003c"),  # nothing in the data can end its element
        "SCRIPT": "\n".join(_read(name) for name in SCRIPTS),
    }
    document = _read("page.html")
    for name, part in parts.items():
        document = document.replace(f"<!--{name}-->", part, 1)
    return document


def heading(trace: Trace) -> str:
    """The problem in one line."""
    head = trace.head
    (n_q, d), n_k = head.q.shape, len(head.k)
    sizes = f"{n_q} queries, {n_k} keys, head dimension {d}"
    sizes += f" ({head.v.shape[1]} in v)" if head.v.shape[1] != d else ""
    return f"{sizes}, {head.words['dtype']}, mask {head.words['mask']}"


def to_dict(trace: Trace, title: str, words: str) -> dict[str, Any]:
    """Everything the script reads."""
    head = trace.head
    arrays = {name: getattr(head, name) for name in ("q", "k", "v", "do", "scores")}
    arrays |= {name: getattr(trace, name) for name in ("delta", "p", "dp", "ds")}
    if head.sink is not None:
        arrays["sink"] = head.sink.reshape(1)
    return {
        "schema": SCHEMA,
        "title": title,
        "problem": words,
        "words": head.words,
        "scale": head.scale,
        "block_q": trace.block_q,
        "block_k": trace.block_k,
        "loops": list(LOOPS),
        "arrays": {name: encode(x) for name, x in arrays.items()},
        "recordings": [_recording(one) for one in trace.recordings.values()],
    }


def _recording(one: Recording) -> dict[str, Any]:
    names = ("m", "l", "alpha", "acc", "out", "lse", "dq", "dk", "dv")
    steps = [
        {
            "pass": key[0],
            "loop": key[1],
            "steps": [
                [s.kind, s.row, s.column, [list(move) for move in s.moves], s.tiled, s.ordinary]
                for s in steps
            ],
        }
        for key, steps in one.steps.items()
    ]
    return {
        "block_q": one.block_q,
        "block_k": one.block_k,
        "classes": one.classes.tolist(),
        "arrays": {name: encode(getattr(one, name)) for name in names},
        "runs": steps,
    }


def encode(x: Tensor) -> dict[str, Any]:
    """A float tensor as {type, shape, data}: "f4" or "f8", and the base64 of its little-endian bytes."""
    wide = x.dtype == torch.float64
    numbers = array("d" if wide else "f", x.flatten().tolist())
    if sys.byteorder == "big":
        numbers.byteswap()
    data = base64.b64encode(numbers.tobytes()).decode("ascii")
    return {"type": "f8" if wide else "f4", "shape": list(x.shape), "data": data}


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(FOLDER, name).read_text(encoding="utf-8")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
