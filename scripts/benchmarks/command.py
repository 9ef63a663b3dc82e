"""The command line that the benchmarks share: which cases to run, and how often."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from harness import Settings
from report import Report, machine, show, show_goals, write_json

REPETITIONS = 5
QUICK_REPETITIONS = 3

Cases = Mapping[str, Callable[[Settings], Report]]


def run_cases(name: str, description: str | None, cases: Cases) -> None:
    """Run the cases that the command line asks for, and print what they found."""
    arguments = _parser(name, description, cases).parse_args()
    settings = _settings(arguments)
    found = machine()
    print("; ".join(f"{name} {value}" for name, value in found.items()))
    begin = time.monotonic()
    reports = []
    for case in arguments.only or cases:
        reports.append(cases[case](settings))
        show(reports[-1])
    show_goals(reports)
    print(f"{settings.repetitions} repetitions, {time.monotonic() - begin:.0f} s")
    if arguments.json:
        write_json(arguments.json, found, settings, reports)


def _parser(name: str, description: str | None, cases: Cases) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument(
        "--reps", type=_count, metavar="N",
        help=f"repetitions of every measurement ({REPETITIONS}, or {QUICK_REPETITIONS} if quick)",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", choices=tuple(cases), metavar="CASE",
        help=f"run this case alone; may be given again: {', '.join(cases)}",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="short repetitions, rougher figures")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def _settings(arguments: argparse.Namespace) -> Settings:
    if not arguments.quick:
        return Settings(repetitions=arguments.reps or REPETITIONS)
    return Settings(
        repetitions=arguments.reps or QUICK_REPETITIONS,
        timed_s=0.06,
        warm_s=0.03,
        warm_batches=10,
        checked_batches=10,
        tries=2,
    )
