"""One case on one backend, as a record; and which cases the default check takes."""

from __future__ import annotations

import fnmatch
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tilewise
from tilewise.testing import conformance
from tilewise.testing.budgets import Line, compare

if TYPE_CHECKING:
    from tilewise.testing.cases import Case

PACKAGE = Path(tilewise.__file__).parent

# First word of a case's name: the group it is shown in, in this order.
GROUPS = {
    "plain": "plain attention",
    "mask": "masks",
    "term": "score terms",
    "order": "several terms in order",
    "sink": "attention sink",
    "dropout": "dropout",
    "scale": "scale",
    "large_logits": "large logits",
    "everything": "everything at once",
    "heads": "grouped heads (GQA, MQA)",
    "head_dim": "head dimensions",
    "size": "odd sizes",
    "empty": "empty shapes",
    "layout": "layouts in memory",
    "poison": "NaN in hidden places",
    "position": "positions and offsets",
    "packed": "packed sequences",
    "cross": "features crossed",
    "packed-cross": "features crossed, packed",
}
# Every feature once and the corners that break most easily; the rest needs --full.
DEFAULT = (
    "plain-*", "mask-*", "term-*", "order-*", "sink*", "dropout*", "scale-*", "large_logits-*", "everything-*",
    "heads-*",
    "head_dim-[138]", "head_dim-72*", "head_dim-128", "head_dim-25[67]", "head_dims-192_128", "head_dims-65_1",
    "size-1x1-*", "size-3x31-*", "size-31x3-*", "size-64x64-*", "size-127x129-*", "size-decode*", "size-97x293-window",
    "empty-N*", "empty-B0*", "empty-D0", "layout-bnhd", "layout-sliced", "layout-expanded", "layout-reversed*",
    "poison-*-capped", "poison-empty_rows", "position-t*", "position-far", "position-k_shard", "position-n*",
    "packed-plain-*", "packed-holes-causal", "packed-outside-causal", "packed-terms", "packed-dropout", "packed-bias",
    "packed-document", "packed-used_q", "packed-no*", "packed-bf16", "packed-fp16", "packed-starts_late",
)  # fmt: skip


def in_default_set(name: str) -> bool:
    """Whether `tilewise check` runs a case without being asked for it."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in DEFAULT)


def group_of(name: str) -> str:
    """The group that a case is shown in."""
    first = "packed-cross" if name.startswith("packed-cross-") else name.split("-")[0]
    return GROUPS.get({"head_dims": "head_dim"}.get(first, first), "other")


@dataclass(frozen=True)
class Result:
    """One case on one backend and device.

    status: "passed", "failed" or "refused". lines: the error of each tensor beside its budget. message: what
    was wrong, or why it was refused; place: where inside the package an exception came from, innermost last.
    """

    case: Case
    backend: str
    device: str
    status: str
    seconds: float
    lines: tuple[Line, ...] = ()
    message: str = ""
    place: tuple[str, ...] = ()

    @property
    def worst(self) -> Line | None:
        """The tensor closest to its budget, or furthest beyond it."""
        return max(self.lines, key=lambda line: line.ratio, default=None)

    @property
    def command(self) -> str:
        """What repeats this run."""
        return f"tilewise check --case {self.case.name} --backend {self.backend} --device {self.device}"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, text, lists and dicts."""
        worst = self.worst
        return {
            "case": self.case.name,
            "group": group_of(self.case.name),
            "features": self.case.features,
            "backend": self.backend,
            "device": self.device,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "worst_tensor": worst.name if worst else None,
            "worst_ratio": worst.ratio if worst else None,
            "tensors": [line_to_dict(line) for line in self.lines],
            "message": self.message,
            "place": list(self.place),
        }


def line_to_dict(line: Line) -> dict[str, Any]:
    """A tensor's errors, budgets and ordinary attention's own errors, as max and root mean square."""
    numbers = {"error": line.error, "budget": line.budget, "ordinary": line.ordinary}
    flat = {
        f"{name}_{kind}": pair[n] for name, pair in numbers.items() for n, kind in enumerate(("max", "rms"))
    }
    return {"tensor": line.name, "ratio": line.ratio, **flat}


@dataclass(frozen=True)
class Summary:
    """All results of one check, in the order in which they ran."""

    results: tuple[Result, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.status == "failed"]

    def count(self, status: str) -> int:
        """Number of results with that status."""
        return sum(result.status == status for result in self.results)


def run_one(case: Case, backend: str, device: torch.device | str = "cpu") -> Result:
    """Run a case; nothing is raised, whatever the backend does (Ctrl-C apart)."""
    start = time.perf_counter()

    def result(status: str, **more: Any) -> Result:
        return Result(case, backend, str(device), status, time.perf_counter() - start, **more)

    try:
        report = conformance.run_case(case, backend, device)
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error)
        lines = _measured(case, backend, device) if isinstance(error, AssertionError) else ()
        return result("failed", lines=lines, message=_headline(text) if lines else text, place=_place(error))
    if report.refused:
        return result("refused", message=_reasons(case, backend, device) or report.refused)
    return result("passed", lines=report.lines)


def _headline(text: str) -> str:
    """The first line of the suite's message, without the problem that is told elsewhere."""
    return text.splitlines()[0].partition(" (")[0]


def _measured(case: Case, backend: str, device: torch.device | str) -> tuple[Line, ...]:
    """The errors of a run that failed, as far as they can be measured."""
    lines = []
    try:
        outcome = conformance.run(case, backend, device)
        _, truth, ordinary = conformance.expected(case)
        for name, tensor in outcome.tensors().items():
            try:
                lines.append(compare(name, tensor, ordinary[name], truth[name]))
            except AssertionError:  # NaN or a wrong shape: the message tells, and it has no error to show
                continue
    except Exception:  # a failure that does not repeat is told by the first message
        return ()
    return tuple(lines)


def _reasons(case: Case, backend: str, device: torch.device | str) -> str:
    """Why a backend does not take a case, in one line."""
    try:
        conformance.run(case, backend, device)
    except tilewise.UnsupportedProblem as refusal:
        return "; ".join(
            dict.fromkeys(line.strip() for line in str(refusal).splitlines()[1:] if line.strip())
        )
    except Exception:  # it refused before: the report keeps the refusal's first line
        return ""
    return ""


def _place(error: Exception) -> tuple[str, ...]:
    """file:line function of the library's own frames, relative to the package; the suite's are left out."""
    places = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        ours = path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] not in ("cli", "testing")
        if ours:
            places.append(f"tilewise/{path.relative_to(PACKAGE).as_posix()}:{frame.lineno} {frame.name}")
    return tuple(places)
