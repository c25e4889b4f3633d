"""The demo's measurement: one model, one text, three attentions, several lengths."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tilewise.cli.demo_attention import LEGS, attention_function, backend_name, capture_layer, using
from tilewise.cli.demo_error import DemoError
from tilewise.cli.memory import ProcessPeak, count_peak

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MEAN_LIMIT = 1e-4  # of the mean |logit difference| to ordinary attention in float32
MAX_FACTOR = 2.0  # the maximum may be this many times SDPA's own
# A logit of size 10 to 50 has a float32 spacing near 2e-6; below a few of these no ratio means anything.
ROUNDING = 1e-5
MEMORY_FACTOR = 10.0  # ordinary attention's extra memory over Tilewise's, at MEMORY_LENGTH tokens and beyond
MEMORY_LENGTH = 4096
CHUNK = 256  # positions whose logits exist at one time: 50 MB for 49 152 words in float32


@dataclass
class Leg:
    """What one attention did at one length.

    prefill_seconds : one pass over the text;  decode_seconds : the generated tokens, one at a time
    pass_bytes : peak memory of that pass beyond the weights, as `memory.ProcessPeak` reads it
    attention_bytes : peak memory of one layer's attention beyond its inputs and output, as
        `memory.count_peak` counts it
    mean_difference, max_difference : |logits - ordinary logits| over all positions and words
    same_choice : the share of positions whose most likely next token is ordinary attention's
    tokens : what the model generates after the text, most likely token first
    """

    prefill_seconds: float
    decode_seconds: float
    pass_bytes: int
    attention_bytes: int
    tokens: list[int]
    text: str = ""
    mean_difference: float = 0.0
    max_difference: float = 0.0
    same_choice: float = 1.0


@dataclass
class Length:
    """All legs at one length.

    matrix_bytes : size of one layer's (H, N, N) scores in float32;  backend : the one that Tilewise took
    """

    length: int
    matrix_bytes: int
    backend: str = ""
    legs: dict[str, Leg] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One promise of the demo: what is promised, whether it held, and by which numbers."""

    name: str
    passed: bool
    detail: str


def cache_keyword(network: Any) -> str:
    """transformers renamed the cache argument; this is its name in the version installed."""
    return (
        "cache" if "cache" in inspect.signature(network.base_model.forward).parameters else "past_key_values"
    )


@torch.inference_mode()
def read_and_write(network: Any, tokens: Tensor, leg: str, new_tokens: int) -> tuple[Leg, Tensor]:
    """Let the model read `tokens` (1, N) with one attention and generate `new_tokens` greedily.

    Returns (Leg, hidden) with hidden (N, width): the last layer's output, one row for each position of the
    text.
    """
    from transformers import DynamicCache

    cache = {cache_keyword(network): DynamicCache(config=network.config)}
    head = network.get_output_embeddings()
    with using(network, leg):
        with ProcessPeak(tokens.device) as peak:
            start = time.perf_counter()
            hidden = network.base_model(input_ids=tokens, use_cache=True, **cache).last_hidden_state
            _synchronize(tokens.device)
            prefill = time.perf_counter() - start
        start = time.perf_counter()
        last = head(hidden[:, -1:]).argmax(-1)
        written = [int(last)]
        while len(written) < new_tokens:
            step = network.base_model(input_ids=last, use_cache=True, **cache).last_hidden_state
            last = head(step[:, -1:]).argmax(-1)
            written.append(int(last))
        decode = time.perf_counter() - start
    return Leg(prefill, decode, peak.bytes, 0, written[:new_tokens]), hidden[0]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Difference:
    """Mean and maximum of |logits - reference logits|, and the share of equal most likely tokens."""

    mean: float = 0.0
    largest: float = 0.0
    same_choice: float = 0.0


@torch.inference_mode()
def compare_logits(head: Any, reference: Tensor, others: dict[str, Tensor]) -> dict[str, Difference]:
    """How far the logits of `others` are from those of `reference`, over all positions and words.

    reference, others : hidden states (N, width). Logits are formed for a few positions at a time, so the demo
    itself needs no N times vocabulary matrix.
    """
    found = {name: Difference() for name in others}
    for start in range(0, len(reference), CHUNK):
        expected = head(reference[start : start + CHUNK])
        choice = expected.argmax(-1)
        for name, hidden in others.items():
            logits = head(hidden[start : start + CHUNK])
            found[name].same_choice += int((logits.argmax(-1) == choice).sum()) / len(reference)
            difference = logits.sub_(expected).abs_()
            share = difference.numel() / (len(reference) * difference.shape[-1])
            found[name].mean += float(difference.mean(dtype=torch.float64)) * share
            found[name].largest = max(found[name].largest, float(difference.max()))
    return found


@torch.inference_mode()
def attention_memory(network: Any, tokens: Tensor, layer: int = 0) -> tuple[dict[str, int], Length]:
    """Extra bytes of each attention on one layer's real q, k and v, and a Length without legs."""
    module, q, k, v, scale = capture_layer(network, tokens, layer)
    extra = {}
    for leg in LEGS:
        function = attention_function(leg)
        extra[leg] = count_peak(
            lambda function=function: function(module, q, k, v, None, scaling=scale), tokens.device
        ).extra
    matrix = q.shape[1] * q.shape[2] * k.shape[2] * 4
    return extra, Length(tokens.shape[1], matrix, backend_name(q, k, v))


def run_length(
    network: Any, tokenizer: Any, tokens: Tensor, new_tokens: int, step: Callable[[str], None]
) -> Length:
    """All three attentions at one length, tokens (1, N). `step(text)` is called before each piece."""
    n = tokens.shape[1]
    step(f"{n} tokens: memory inside attention")
    extra, result = attention_memory(network, tokens)
    hidden = {}
    for leg in LEGS:
        step(f"{n} tokens: reading with {leg} attention")
        result.legs[leg], hidden[leg] = read_and_write(network, tokens, leg, new_tokens)
        result.legs[leg].attention_bytes = extra[leg]
        if tokenizer is not None:
            result.legs[leg].text = tokenizer.decode(result.legs[leg].tokens)
    step(f"{n} tokens: comparing the logits")
    reference = hidden.pop("ordinary")
    for leg, found in compare_logits(network.get_output_embeddings(), reference, hidden).items():
        row = result.legs[leg]
        row.mean_difference, row.max_difference, row.same_choice = (
            found.mean,
            found.largest,
            found.same_choice,
        )
    return result


STEPS_PER_LENGTH = len(LEGS) + 2


def warm_up(network: Any, tokens: Tensor) -> None:
    """Let every attention run once on a short piece, so that one-time work is in no measurement."""
    for leg in LEGS:
        read_and_write(network, tokens[:, :64], leg, 2)


def check_fits(config: Any, longest: int) -> None:
    """Refuse, in words, what ordinary attention could not hold in this machine's memory (CPU only)."""
    import psutil

    # Scores and weights of one layer, and as much again for the rest of the pass.
    needed = 2 * config.num_attention_heads * longest**2 * 4 + (2 << 30)
    available = psutil.virtual_memory().available
    if needed > available:
        raise DemoError(
            f"ordinary attention over {longest} tokens needs about {needed / 2**30:.1f} GB here and "
            f"{available / 2**30:.1f} GB are free: choose shorter --lengths"
        )


def checks(results: list[Length]) -> list[Check]:
    """What the demo promises, held against what it measured."""
    found = []
    for row in results:
        ours, theirs, full = row.legs["tilewise"], row.legs["sdpa"], row.legs["ordinary"]
        limit = max(MAX_FACTOR * theirs.max_difference, ROUNDING)
        n = row.length
        equal = sum(a == b for a, b in zip(ours.tokens, full.tokens, strict=True))
        found += [
            Check(
                f"mean logit difference at {n}",
                ours.mean_difference <= MEAN_LIMIT,
                f"{ours.mean_difference:.1e}, allowed {MEAN_LIMIT:.0e}",
            ),
            Check(
                f"largest logit difference at {n}",
                ours.max_difference <= limit,
                f"{ours.max_difference:.1e}, SDPA's own {theirs.max_difference:.1e}, allowed {limit:.1e}",
            ),
            Check(
                f"generated tokens at {n}",
                ours.tokens == full.tokens,
                f"{equal} of {len(full.tokens)} equal",
            ),
        ]
        if n >= MEMORY_LENGTH:
            found.append(
                Check(
                    f"memory inside attention at {n}",
                    ours.attention_bytes * MEMORY_FACTOR < full.attention_bytes,
                    f"{ours.attention_bytes / 2**20:.1f} MB, ordinary {full.attention_bytes / 2**20:.1f} MB",
                )
            )
    return found
