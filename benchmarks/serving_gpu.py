"""Decoding over caches on a GPU: bytes of keys and values read per second, beside what a user would pick instead.

    python benchmarks/serving_gpu.py [decode paged tree float8 capacity cascade host] [--seconds 60] [--rounds 7]
        [--output benchmarks/results/serving.jsonl]

Contenders: tilewise (backend "triton"), scaled_dot_product_attention held to cuDNN and to flash, FlashAttention 3
(`fa3_fwd_interface`, automatic splits; with a page table where its build takes one). All are called through their
public functions, outputs allocated inside. A CUDA graph of several calls is replayed, contenders in turn, the order
rotates; medians. Caches are 240 MB and more, so that nothing stays in the second-level cache from one call to the
next, but for the cell that fits there by itself and says so.

Lines: the machine; then one per cell, with each contender's seconds and TB/s; host time is microseconds of an eager
call. Scattered pages: the block table is a random permutation; `one_piece`: a cache without pages, in turn with them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from tilewise.cli.machine import describe
from tilewise.serving import CacheView, attention_with_cache

Call = Callable[[], Any]
HEAD_DIM = 128
CELLS = (
    (8, 32, 8, 32768), (1, 32, 8, 131072), (64, 32, 8, 4096), (128, 32, 8, 1024), (16, 64, 8, 16384),
    (16, 16, 1, 32768), (1, 32, 8, 8192),
)  # fmt: skip
"""(batch, query heads, KV heads, keys); the last one fits in the second-level cache of an H200."""
SHORT_BYTES = 2.0e8
HOST_CALLS = 200


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def read_bytes(cell: tuple[int, int, int, int], size: int = 2) -> int:
    """Bytes of the keys and values of a cell."""
    batch, _, heads_kv, keys = cell
    return 2 * batch * heads_kv * keys * HEAD_DIM * size


def graph_of(call: Call, count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls, warm."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def once(graph: torch.cuda.CUDAGraph) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def seconds_of(calls: dict[str, Call], count: int, rounds: int) -> dict[str, Any]:
    """Median seconds of a call of each contender, or why it has none."""
    graphs, found = {}, {}
    for name, call in calls.items():
        try:
            graphs[name] = graph_of(call, count)
        except Exception as error:  # any library may fail on any cell; that is a result
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    order = list(graphs)
    for n in range(rounds):
        for name in order[n % len(order) :] + order[: n % len(order)]:
            samples[name].append(once(graphs[name]) / count)
    for name, values in samples.items():
        found[name] = {"seconds": statistics.median(values), "least": min(values), "most": max(values)}
    return found


# ---- contenders ----------------------------------------------------------------------------------------------


def sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Call:
    def call() -> Tensor:
        for name in ("flash", "mem_efficient", "math", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == backend)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return call


def fa3(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, keys: int) -> Call:
    """FlashAttention 3 on (B, N, H, D) caches, or pages of them; prepared before, in no time."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    lengths = torch.full((q.shape[0],), keys, device="cuda", dtype=torch.int32)
    return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, num_splits=0)


def in_pages(
    cell: tuple[int, int, int, int], size: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """(k, v, block table) of scattered pages."""
    batch, _, heads_kv, keys = cell
    pages = batch * keys // size
    k, v = (draw(pages, heads_kv, size, HEAD_DIM).to(dtype) for _ in range(2))
    return k, v, torch.randperm(pages, device="cuda").reshape(batch, -1).to(torch.int32)


def over(view: CacheView, q: Tensor, **options: Any) -> Call:
    return lambda: attention_with_cache(q, view, backend="triton", **options)


def lengths_of(batch: int, keys: int) -> Tensor:
    return torch.full((batch,), keys, device="cuda", dtype=torch.int32)


# ---- sections ------------------------------------------------------------------------------------------------


def rate(
    found: dict[str, Any], cell: tuple[int, int, int, int], size: int = 2, keys: int = 0
) -> dict[str, Any]:
    """The measurements with their TB/s."""
    batch, heads, heads_kv, capacity = cell
    total = read_bytes((batch, heads, heads_kv, keys or capacity), size)
    for line in found.values():
        if "seconds" in line:
            line["tb_s"] = round(total / line["seconds"] / 1e12, 3)
    return found


def decode(rounds: int) -> Iterator[dict[str, Any]]:
    for cell in CELLS:
        batch, heads, heads_kv, keys = cell
        q, k, v = draw(batch, heads, 1, HEAD_DIM), *(draw(batch, heads_kv, keys, HEAD_DIM) for _ in range(2))
        calls: dict[str, Call] = {
            "tilewise": lambda q=q, k=k, v=v: tw.attention(q, k, v, backend="triton"),  # type: ignore[misc]
            "tilewise_cache": over(CacheView(k, v, lengths_of(batch, keys)), q),
            "sdpa_cudnn": sdpa("cudnn", q, k, v),
            "sdpa_flash": sdpa("flash", q, k, v),
        }
        with contextlib.suppress(ImportError):
            calls["fa3"] = fa3(q, k, v, None, keys)
        count = 10 if read_bytes(cell) < SHORT_BYTES else 4
        yield {"cell": cell, "contenders": rate(seconds_of(calls, count, rounds), cell)}


def paged(rounds: int) -> Iterator[dict[str, Any]]:
    for cell in CELLS:
        batch, heads, heads_kv, keys = cell
        piece = CacheView(*(draw(batch, heads_kv, keys, HEAD_DIM) for _ in range(2)), lengths_of(batch, keys))
        for size in (16, 64):
            q, (k, v, table) = draw(batch, heads, 1, HEAD_DIM), in_pages(cell, size)
            calls = {"tilewise": over(CacheView(k, v, lengths_of(batch, keys), table), q)}
            calls["one_piece"] = over(piece, q)
            with contextlib.suppress(ImportError):
                calls["fa3"] = fa3(q, k, v, table, keys)
            count = 10 if read_bytes(cell) < SHORT_BYTES else 4
            yield {
                "cell": cell,
                "page_size": size,
                "contenders": rate(seconds_of(calls, count, rounds), cell),
            }


def _sees(q: Any, k: Any, i: Any, tree: Any) -> Any:
    """Keys before the drafts, and of the drafts a row's own ancestors."""
    return (k < q - i) | tree[i, k - (q - i)]


def tree(rounds: int) -> Iterator[dict[str, Any]]:
    """8 draft tokens under a tree mask beside one token."""
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 2, 3])
    seen = torch.eye(8, dtype=torch.bool)
    for n in range(1, 8):
        seen[n] |= seen[int(parents[n])]
    mask = tw.custom(_sees, seen.to("cuda"))
    for cell in CELLS[:3]:
        batch, heads, heads_kv, keys = cell
        one, eight = draw(batch, heads, 1, HEAD_DIM), draw(batch, heads, 8, HEAD_DIM)
        k, v = (draw(batch, heads_kv, keys, HEAD_DIM) for _ in range(2))
        view = CacheView(k, v, lengths_of(batch, keys))
        calls = {"one": over(view, one), "tree8": over(view, eight, mask=mask)}
        yield {"cell": cell, "contenders": rate(seconds_of(calls, 4, rounds), cell)}


def float8(rounds: int) -> Iterator[dict[str, Any]]:
    for cell in CELLS[:3]:
        batch, heads, heads_kv, keys = cell
        q, (k, v, table) = draw(batch, heads, 1, HEAD_DIM), in_pages(cell, 64, torch.float8_e4m3fn)
        scale = torch.ones(heads_kv, device="cuda")
        view = CacheView(k, v, lengths_of(batch, keys), table, k_scale=scale, v_scale=scale)
        yield {
            "cell": cell,
            "page_size": 64,
            "contenders": rate(seconds_of({"tilewise": over(view, q)}, 4, rounds), cell, 1),
        }


def capacity(rounds: int) -> Iterator[dict[str, Any]]:
    """Calls planned for a capacity of which a sixteenth is used, beside caches of just that size."""
    for cell in CELLS[:3]:
        batch, heads, heads_kv, keys = cell
        q, k, v = draw(batch, heads, 1, HEAD_DIM), *(draw(batch, heads_kv, keys, HEAD_DIM) for _ in range(2))
        used = keys // 16
        small = [t[:, :, :used].contiguous() for t in (k, v)]
        calls = {
            "sixteenth": over(CacheView(k, v, lengths_of(batch, used)), q),
            "exact": over(CacheView(*small, lengths_of(batch, used)), q),
            "full": over(CacheView(k, v, lengths_of(batch, keys)), q),
        }
        found = seconds_of(calls, 4, rounds)
        yield {"cell": cell, "used": used, "contenders": rate(found, cell, keys=used)}


def cascade(rounds: int) -> Iterator[dict[str, Any]]:
    """A prefix of 2048 tokens that 64 sequences share, then 64 tokens of each one's own."""
    batch, heads, heads_kv, size, prefix, own = 64, 32, 8, 16, 2048, 64
    pages = prefix // size + batch * own // size
    k, v = (draw(pages, heads_kv, size, HEAD_DIM) for _ in range(2))
    shared = torch.arange(prefix // size, device="cuda").expand(batch, -1)
    rest = torch.arange(prefix // size, pages, device="cuda").reshape(batch, -1)
    view = CacheView(
        k, v, lengths_of(batch, prefix + own), torch.cat([shared, rest], 1).to(torch.int32).contiguous()
    )
    # Without the cascade every sequence reads the prefix; from its own copy, as caches without shared pages do.
    cell = (batch, heads, heads_kv, prefix + own)
    copied = CacheView(
        *(draw(batch, heads_kv, prefix + own, HEAD_DIM) for _ in range(2)), lengths_of(batch, prefix + own)
    )
    q = draw(batch, heads, 1, HEAD_DIM)
    calls = {
        "cascade": over(view, q, shared_prefix=prefix), "shared_pages": over(view, q), "own_copies": over(copied, q),
    }  # fmt: skip
    yield {"cell": cell, "prefix": prefix, "contenders": seconds_of(calls, 10, rounds)}


def host(rounds: int) -> Iterator[dict[str, Any]]:
    """Microseconds of the host for an eager decode call: plain tensors, contiguous cache, pages; and with appending."""
    cell = (8, 32, 8, 2048)
    batch, heads, heads_kv, keys = cell
    q, new = draw(batch, heads, 1, HEAD_DIM), draw(batch, heads_kv, 1, HEAD_DIM)
    k, v = (draw(batch, heads_kv, keys, HEAD_DIM) for _ in range(2))
    pages = in_pages(cell, 16)
    angles = torch.rand(keys, HEAD_DIM // 2, device="cuda")
    paged_view = CacheView(pages[0], pages[1], lengths_of(batch, 64), pages[2])
    calls: dict[str, Call] = {
        "attention": lambda: tw.attention(q, k, v, backend="triton"),
        "contiguous": over(CacheView(k, v, lengths_of(batch, 64)), q),
        "pages": over(paged_view, q),
        "pages_append_rotate": lambda: attention_with_cache(
            q, paged_view, new, new, rotary=(angles, angles), mask=tw.causal(), backend="triton"
        ),
        "sdpa_cudnn": sdpa("cudnn", q, k, v),
    }
    found = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        samples = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS // rounds):
                call()
            samples.append((time.perf_counter() - start) / (HOST_CALLS // rounds) * 1e6)
        found[name] = {"host_us": round(statistics.median(samples), 1), "least": round(min(samples), 1)}
    yield {"cell": cell, "contenders": found}


SECTIONS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "decode": decode, "paged": paged, "tree": tree, "float8": float8, "capacity": capacity, "cascade": cascade,
    "host": host,
}  # fmt: skip


def short(line: dict[str, Any]) -> str:
    """A line for the terminal."""
    words = []
    for name, found in line["contenders"].items():
        if "host_us" in found:
            words.append(f"{name} {found['host_us']} us")
        elif "seconds" in found:
            words.append(f"{name} {found['seconds'] * 1e6:.1f} us {found.get('tb_s', '')}")
        else:
            words.append(f"{name} - ({found['failed'][:60]})")
    more = f" page {line['page_size']}" if "page_size" in line else ""
    return f"{line['section']:9s}{line['cell']!s:22s}{more} " + "  ".join(words)


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    def write(line: dict[str, Any]) -> None:
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")

    write({"machine": describe(), "cudnn": torch.backends.cudnn.version(), "command": " ".join(sys.argv[1:]),
           "when": time.strftime("%Y-%m-%d %H:%M")})  # fmt: skip
    start = time.perf_counter()
    for section in options.sections:
        try:
            for line in SECTIONS[section](options.rounds):
                line["section"] = section
                write(line)
                print(short(line), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
                if time.perf_counter() - start > options.seconds:
                    print(f"its {options.seconds:g} s are over", flush=True)
                    return
        except Exception as error:  # the other sections go on
            print(f"{section}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
