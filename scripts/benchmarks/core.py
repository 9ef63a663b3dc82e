"""The core of the feeder, measured in one process against what it must reach.

Beside it run the algorithm of Caffe2's data_workers, a copy by one thread, a loop that fetches and
copies in one thread, and a queue between two threads. All contenders take turns within each
repetition, so that a ratio is one of figures measured at the same time; medians are printed with
the lowest and the highest sample.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from busy import beside_busy
from copies import copy_constant, copy_fresh
from harness import Settings
from races import RACES, run_race
from report import Report, machine, show, show_goals, write_json
from resuming import resuming
from small import small_batches
from snapshots import snapshots, tokens
from stopping import stopping

REPETITIONS = 5
QUICK_REPETITIONS = 3

CASES: Mapping[str, Callable[[Settings], Report]] = {
    **{race.case: partial(run_race, race) for race in RACES},
    "copy-constant": copy_constant,
    "copy-fresh": copy_fresh,
    "small-batches": small_batches,
    "busy": beside_busy,
    "stop": stopping,
    "snapshot": snapshots,
    "token": tokens,
    "resume": resuming,
}


def main() -> None:
    arguments = _parser().parse_args()
    settings = _settings(arguments)
    print("; ".join(f"{name} {value}" for name, value in machine().items()))
    begin = time.monotonic()
    reports = []
    for name in arguments.only or CASES:
        reports.append(CASES[name](settings))
        show(reports[-1])
    show_goals(reports)
    print(f"{settings.repetitions} repetitions, {time.monotonic() - begin:.0f} s")
    if arguments.json:
        write_json(arguments.json, settings, reports)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench core", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument(
        "--reps", type=_count, metavar="N",
        help=f"repetitions of every measurement ({REPETITIONS}, or {QUICK_REPETITIONS} if quick)",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", choices=tuple(CASES), metavar="CASE",
        help=f"run this case alone; may be given again: {', '.join(CASES)}",
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


if __name__ == "__main__":
    main()
