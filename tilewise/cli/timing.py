"""The timing protocol: how `tilewise bench` and the scripts in benchmarks/ measure latency.

All calls that are compared run in one process, interleaved: one round times each of them once, and the order
rotates from round to round, so that a machine that warms up or is disturbed meets all alike. What is reported
is the median over the rounds and the quartiles.

CPU     wall time of one call (of several, where one is shorter than a millisecond), outputs allocated inside.
CUDA    each call is captured in a CUDA graph. Cold: one replay after 80 ms of idleness, between two events.
        Hot: replays back to back. The time the host needs to launch the plain call is a number of its own. A
        call that cannot be captured is timed as it is, and says so. Backward passes are captured only where
        their forward ran inside `side_stream`.

Source: docs/design.md, section 3.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

IDLE = 0.080
"""Seconds of idleness before a cold replay."""
SHORTEST = 1e-3
"""Seconds that one measurement on the CPU lasts at least; the clock and the interpreter are well below."""
HOT_REPLAYS = 10


@dataclass(frozen=True)
class Limits:
    """rounds: least and most; between them, rounds go on until `seconds` have passed."""

    least: int = 5
    most: int = 25
    seconds: float = 5.0


@dataclass(frozen=True)
class Series:
    """Seconds per call, one number for each round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third; the number itself if there is one only."""
        if len(self.seconds) == 1:
            return self.seconds * 2
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles over the median."""
        first, third = self.quartiles
        return (third - first) / 2 / self.median if self.median else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Seconds: median and quartiles, and the number of rounds."""
        first, third = self.quartiles
        return {
            "median_s": self.median,
            "first_quartile_s": first,
            "third_quartile_s": third,
            "rounds": len(self.seconds),
        }


@dataclass(frozen=True)
class Timing:
    """latency: one call on the CPU, a cold replay on CUDA. hot and host: CUDA only.

    captured: whether a CUDA graph was replayed; note: why not.
    """

    latency: Series
    hot: Series | None = None
    host: Series | None = None
    captured: bool = False
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text."""
        series = {name: getattr(self, name) for name in ("latency", "hot", "host")}
        plain = {name: one.to_dict() if one else None for name, one in series.items()}
        return {**plain, "captured": self.captured, "note": self.note}


def rotations(names: Sequence[str]) -> Iterator[list[str]]:
    """The names in an order that starts one further each time, every second time backwards."""
    turn = 0
    while True:
        shift = turn % len(names)
        order = [*names[shift:], *names[:shift]]
        yield order if turn % 2 == 0 else order[::-1]
        turn += 1


def time_calls(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, limits: Limits | None = None
) -> dict[str, Timing]:
    """Time calls against each other by the protocol; each must have run before.

    Args:
        calls: what to time, by name.
        device: where they compute.
        limits: rounds and seconds, together for all calls.

    Returns: a Timing for each name. Raises whatever a call raises.
    """
    if not calls:
        return {}
    limits = limits or Limits()
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return _time_cuda(calls, device, limits) if device.type == "cuda" else _time_host(calls, limits)
    finally:
        if enabled:
            gc.enable()


def _rounds(names: Sequence[str], limits: Limits) -> Iterator[list[str]]:
    start = time.perf_counter()
    for done, order in enumerate(rotations(names)):
        if done >= limits.most or (done >= limits.least and time.perf_counter() - start > limits.seconds):
            return
        yield order


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _time_host(calls: Mapping[str, Callable[[], Any]], limits: Limits) -> dict[str, Timing]:
    repeats = {name: max(1, round(SHORTEST / max(_seconds(call, 1), 1e-7))) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for order in _rounds(tuple(calls), limits):
        for name in order:
            found[name].append(_seconds(calls[name], repeats[name]))
    return {name: Timing(Series(tuple(seconds))) for name, seconds in found.items()}


# ---- CUDA --------------------------------------------------------------------------------------------------


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of its own on CUDA, nothing elsewhere.

    A backward pass runs on the stream of its forward, and the default stream cannot be captured: what is timed
    is made inside this context.
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def _capture(call: Callable[[], Any], stream: torch.cuda.Stream) -> tuple[Callable[[], Any], bool, str]:
    """(replay, True, "") of the captured call, or (the call itself, False, why it cannot be captured)."""
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=stream):
            kept = call()
    except Exception as error:
        cause = error.__context__ or error  # leaving the capture raises once more
        torch.cuda.synchronize()
        # A capture that fails leaves the random generators waiting for its end; one that succeeds ends it.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            torch.zeros(1, device=stream.device)
        return call, False, f"not captured in a CUDA graph: {str(cause).splitlines()[0]}"

    def replay(graph: torch.cuda.CUDAGraph = graph, kept: Any = kept) -> None:
        graph.replay()

    return replay, True, ""


def _between_events(run: Callable[[], Any], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / repeats


def _host_seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    seconds = _seconds(call, 1)
    torch.cuda.synchronize()
    return seconds


def _time_cuda(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, limits: Limits
) -> dict[str, Timing]:
    found: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in calls}
    outside = torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    with torch.cuda.device(device), side_stream(device) if outside else nullcontext():
        stream = torch.cuda.current_stream(device)
        captured = {name: _capture(call, stream) for name, call in calls.items()}
        for order in _rounds(tuple(calls), limits):
            for name in order:
                run = captured[name][0]
                cold, hot, host = found[name]
                torch.cuda.synchronize()
                time.sleep(IDLE)
                cold.append(_between_events(run, 1))
                hot.append(_between_events(run, HOT_REPLAYS))
                host.append(_host_seconds(calls[name]))
    timings = {}
    for name, (_, whole, note) in captured.items():
        series = [Series(tuple(seconds)) for seconds in found[name]]
        timings[name] = Timing(series[0], series[1], series[2], whole, note)
    return timings
