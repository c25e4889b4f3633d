"""Many cells of `gpu.py` in one run: a process for each, prepared side by side, then timed one after another.

    python benchmarks/gpu_table.py [long features ...] [--which forward,backward] [--cells SUBSTRING,...]
        [--contenders triton,flex,flex_tuned,sdpa_flash,sdpa_cudnn] [--rounds 4] [--prepare 140] [--end 600]
        [--output benchmarks/results/gpu_triton_table.jsonl]

What takes long is the compilation of others' kernels, for which one process uses one core or a few. Processes that
tune themselves on the GPU do it one at a time (a lock). What is not ready after --prepare seconds is left out; no cell
is begun after --end. A cell is a line, written when it is done. The forward of a backward's cell is not tuned, since it
is not timed. Where cells do not fit into the GPU's memory together, name fewer.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpu_contenders import SECTIONS, Cell

CONTENDERS = "triton,flex,flex_tuned,sdpa_flash,sdpa_cudnn"
THREADS = "4"
"""Processes with which a cell's process compiles."""
LATE, LONGEST = 12.0, 30.0
"""Seconds that a cell gets to notice that time is over, and to be timed."""
WAIT = 0.1


# ---- a cell's process ------------------------------------------------------------------------------------------


@contextmanager
def alone(box: Path) -> Iterator[None]:
    """While no other cell is inside."""
    with (box / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tune_alone(box: Path, which: str) -> None:
    """Make FlexAttention's tuning measure alone, and leave the forward of a backward's cell as it comes."""
    import torch._dynamo
    import torch._inductor.config as config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    torch._dynamo.reset = lambda: None  # contenders live side by side
    measure = AlgorithmSelectorCache.benchmark_choices
    choose = InductorChoices.get_flex_attention_fwd_configs

    def measured(*args: Any, **options: Any) -> Any:
        with alone(box):
            return measure(*args, **options)

    def chosen(*args: Any, **options: Any) -> Any:
        with config.patch(max_autotune=config.max_autotune and which == "forward"):
            return choose(*args, **options)

    if isinstance(vars(AlgorithmSelectorCache).get("benchmark_choices"), classmethod):
        AlgorithmSelectorCache.benchmark_choices = staticmethod(measured)
    InductorChoices.get_flex_attention_fwd_configs = chosen


def cell_process(box: Path, key: str, names: list[str], seconds: float, rounds: int) -> None:
    """Make a cell's contenders ready, say so, wait for the turn, time them, write the line."""
    import gpu
    import torch

    name, _, which = key.rpartition(".")
    if any(word.startswith("flex") for word in names):
        _tune_alone(box, which)
    cell = find(name)
    until = time.monotonic() + seconds
    with gpu.side_stream(gpu.DEVICE):
        calls, found = {}, {}
        for contender in names:
            made = gpu.ready(cell, which, [contender], max(1, int(until - time.monotonic())))
            calls |= made[0]
            found |= made[1]
        torch.cuda.empty_cache()
        (box / f"{key}.ready").touch()
        while not (box / f"{key}.go").exists():
            time.sleep(WAIT)
        with alone(box):
            line = gpu.timed(cell, which, calls, found, rounds)
    print(gpu.short(line) + "\n" + compared(line), flush=True)
    (box / f"{key}.part").write_text(json.dumps(line))
    (box / f"{key}.part").rename(box / f"{key}.line")


def compared(line: dict[str, Any]) -> str:
    """The first contender's speed over each other's, cold and hot."""
    rates: dict[str, Any] = line["contenders"]
    first = next(iter(rates.values()))
    words = []
    for kind in ("cold_tflops", "hot_tflops"):
        ratios = {n: round(first[kind] / f[kind], 3) for n, f in rates.items() if kind in f and kind in first}
        words.append(f"{kind.partition('_')[0]} {ratios}")
    return "    " + "  ".join(words)


# ---- the run ---------------------------------------------------------------------------------------------------


def find(name: str) -> Cell:
    """The cell of a name, in which a slash may be written as `_`."""
    return next(c for cells in SECTIONS.values() for c in cells if c.name.replace("/", "_") == name)


def _begin(box: Path, key: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, __file__, "--cell", key, "--box", str(box), "--contenders", options.contenders, "--prepare",
        str(options.prepare), "--rounds", str(options.rounds),
    ]  # fmt: skip
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": THREADS, "OMP_NUM_THREADS": "1"}
    with (box / f"{key}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _until(done: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(WAIT)
    return done()


def run(keys: list[str], options: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    """All cells; `write` gets each line."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        box = Path(folder)
        begun = {key: _begin(box, key, options) for key in keys}

        def is_ready(key: str) -> bool:
            return (box / f"{key}.ready").exists() or begun[key].poll() is not None

        _until(lambda: all(map(is_ready, keys)), options.prepare + LATE)
        passed = time.monotonic() - start
        print(f"{sum(map(is_ready, keys))} of {len(keys)} cells ready after {passed:.0f} s", flush=True)
        for key in sorted(keys, key=lambda key: not is_ready(key)):
            if time.monotonic() - start > options.end:
                print(f"{key}: the time is over", flush=True)
            else:
                found = _take_turn(box, key, begun[key])
                if found:
                    write(found)
            _end(begun[key])


def _take_turn(box: Path, key: str, process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """Let a cell's process time; its line, if there is one."""
    line = box / f"{key}.line"
    (box / f"{key}.go").touch()
    _until(lambda: line.exists() or process.poll() is not None, LONGEST)
    print("\n".join((box / f"{key}.log").read_text(errors="replace").splitlines()[-2:]), flush=True)
    return json.loads(line.read_text()) if line.exists() else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a cell's process, and those that compile for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Read the command line; be a cell's process, or run them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=["long", "features"])
    parser.add_argument("--which", default="backward,forward")
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--cells", default="")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prepare", type=float, default=140.0)
    parser.add_argument("--end", type=float, default=600.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--box", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        names = options.contenders.split(",")
        cell_process(options.box, options.cell, names, options.prepare, options.rounds)
        return
    keys = [
        f"{cell.name.replace('/', '_')}.{which}" for which in options.which.split(",") for section in options.sections
        for cell in SECTIONS[section] if any(word in cell.name for word in options.cells.split(","))
    ]  # fmt: skip

    def write(line: dict[str, Any]) -> None:
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")

    from tilewise.cli.machine import describe

    write({"machine": describe(), "command": " ".join(sys.argv[1:]), "when": time.strftime("%Y-%m-%d %H:%M")})
    run(keys, options, write)


if __name__ == "__main__":
    main()
