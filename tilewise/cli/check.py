"""`tilewise check`: every feature against the float64 oracle, on every backend and device of this machine.

Each case is one small attention problem of the conformance suite. Its output, log-sum-exp and all gradients
are held to an error budget: a multiple of ordinary attention's own rounding error. A backend may refuse what
it does not do (with a reason); a wrong value, a NaN or an exception is a failure.

Exit code: 0 everything that ran is right, 1 something is wrong, 2 the check could not run.
"""

from __future__ import annotations

import difflib
import fnmatch
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.cli.terminal import UsageError, add_output_arguments, guarded, names_list, progress

if TYPE_CHECKING:
    import argparse

    import torch

    from tilewise.testing.cases import Case

SUMMARY = "test every feature against the float64 oracle on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tilewise check`."""
    parser.add_argument("--backend", type=names_list, action="extend", metavar="NAME", help="default: all")
    parser.add_argument(
        "--device",
        type=names_list,
        action="extend",
        metavar="NAME",
        help="default: cpu, and cuda where there is one",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--full", action="store_true", help="all cases of the suite, features crossed in pairs too"
    )
    which.add_argument(
        "--case",
        action="append",
        metavar="NAME",
        help="a case by name or pattern (mask-*), with the error of every tensor; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument(
        "--report", metavar="FILE", help="write what a bug report needs (Markdown; nothing private) to FILE"
    )
    add_output_arguments(parser, "the tables")


def run(arguments: argparse.Namespace) -> int:
    """Run the check. Returns 0, 1 or 2 as the module says."""
    return guarded("check", check, arguments)


def check(arguments: argparse.Namespace) -> int:
    """Choose, run, show. Raises UsageError for what the caller can put right."""
    from tilewise.cli import check_report, check_run

    cases = choose_cases(arguments.case, arguments.full)
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return 0
    backends = choose_backends(arguments.backend)
    devices = [usable_device(name) for name in choose_devices(arguments.device)]
    if arguments.report:
        open_for_writing(arguments.report)
    start = time.perf_counter()
    results = []
    with progress(len(cases) * len(backends) * len(devices)) as step:
        for device in devices:
            for case in cases:
                for backend in backends:
                    step(f"{case.name} on {backend}, {device}")
                    results.append(check_run.run_one(case, backend, device))
    summary = check_run.Summary(tuple(results), time.perf_counter() - start)
    if arguments.report:
        Path(arguments.report).write_text(check_report.bug_report(summary), encoding="utf-8")
    if arguments.json:
        check_report.print_json(summary)
    else:
        check_report.print_tables(summary, details=bool(arguments.case))
        if arguments.report:
            print(f"Report: {arguments.report}")
    if not any(result.status != "refused" for result in results):
        print("tilewise check: nothing was checked, every case was refused", file=sys.stderr)
        return 2
    return 0 if summary.passed else 1


def choose_cases(patterns: list[str] | None, full: bool) -> list[Case]:
    """The cases asked for. Raises UsageError for a name that fits none."""
    from tilewise.cli.check_run import in_default_set
    from tilewise.testing.cases import all_cases

    cases = all_cases()
    if patterns is None:
        return [case for case in cases if full or in_default_set(case.name)]
    names = [case.name for case in cases]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = difflib.get_close_matches(pattern, names, 3, 0.3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(f"there is no case {pattern!r}{hint} (--list --full prints all)")
    return [case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]


def choose_backends(names: list[str] | None) -> list[str]:
    """The backends asked for, by default those that auto may take. Raises OptionError for an unknown name."""
    from tilewise.dispatch import registry

    for name in names or ():
        registry.get(name)
    return list(dict.fromkeys(names or registry.names))


def choose_devices(names: list[str] | None) -> list[str]:
    """The devices asked for, by default every available one."""
    from tilewise.cli.machine import available_devices

    return list(dict.fromkeys(names or available_devices()))


def usable_device(name: str) -> torch.device:
    """The device of that name. Raises UsageError if nothing can be put on it."""
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def open_for_writing(path: str) -> None:
    """Find out before a long run that its result cannot be written. Raises UsageError."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
