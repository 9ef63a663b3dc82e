"""Runs small feeds in many schedules of their threads, and holds each against what has to come.

All schedules of the smallest feeds with few preemptions are run, each once; and of drawn feeds some
by chance, every other one with a point before each statement.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import feeder
from planted.bug import BUGS, planted_text
from schedules.programs import Checked, Program, drawn
from schedules.search import again, all_within, by_priority, recorded
from schedules.statements import between_statements
from schedules.world import Choose, World

PLANTED = {name: bug for name, bug in BUGS.items() if "schedules" in bug.by}

SMALLEST = {
    "two batches": Program(sizes=(2, 2)),
    "one fetcher, two epochs": Program(sizes=(2,), epochs=2),
    "two fetchers": Program(sizes=(2,), num_threads=2),
    "an error": Program(sizes=(2, 2), fails=1),
    "an interrupt": Program(sizes=(2,), interrupts=True),
    "a close": Program(sizes=(2, 2), closes_after=1),
    "a call made again": Program(sizes=(2,), shaky=0),
    "a full buffer": Program(sizes=(2, 2), batch_size=1, buffered=1),
    "two devices": Program(sizes=(2, 2), devices=2),
}
"""Feeds whose schedules are all run."""


class Found(NamedTuple):
    """A schedule in which something is wrong."""

    program: Program
    statements: bool
    """Whether statements are points."""
    numbers: list[int]
    """Its choices."""
    texts: Mapping[str, str]
    error: Exception

    def __str__(self) -> str:
        return f"{self.error!r}\n  {self.program}, {self.statements=}\n  {self.numbers}"

    def again(self) -> str:
        """What is wrong in the same schedule again; empty if nothing is."""
        with Runs(self.texts) as runs:
            found = runs.run(Checked(self.program), again(self.numbers), statements=self.statements)
        return "" if found is None else str(found.error)


class Runs:
    """Runs programs, with points before statements where asked."""

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        """`texts` as in `between_statements`."""
        self._texts = texts or {}
        self._pointed: World | None = None
        self.num = 0
        self.num_points = 0

    def __enter__(self) -> Runs:
        self._context = between_statements(self._point, self._texts)
        self._context.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._context.__exit__(None, None, None)

    def _point(self) -> None:
        if self._pointed is not None:
            self._pointed.statement()

    def run(self, checked: Checked, choose: Choose, *, statements: bool) -> Found | None:
        """Run a program in one schedule; what is wrong with it."""
        numbers: list[int] = []
        world = World(recorded(choose, numbers))
        self._pointed = world if statements else None
        try:
            outcome = world.run(checked.program.run)
            self._pointed = None
            checked.check(outcome)
        except (AssertionError, RuntimeError, feeder.FeedError) as error:
            return Found(checked.program, statements, numbers, self._texts, error)
        finally:
            self._pointed = None
            self.num += 1
            self.num_points = world.num_points
        return None

    def every(self, program: Program, bound: int) -> Found | None:
        """All schedules of a program with at most so many preemptions."""
        checked = Checked(program)
        found = (self.run(checked, choose, statements=False) for choose in all_within(bound))
        return next(filter(None, found), None)

    def some(self, seeds: Iterator[int]) -> Found | None:
        """A drawn program for each eight seeds, each in one schedule."""
        checked, points = None, 50
        for seed in seeds:
            if checked is None or not seed % 8:
                checked, points = Checked(drawn(seed // 8)), 50
            statements = bool(seed % 2)
            choose = by_priority(seed, changes=1 + seed // 2 % 4, points=points)
            if (found := self.run(checked, choose, statements=statements)) is not None:
                return found
            points = max(50, self.num_points)
        return None


def main() -> int:
    """Return 1 if a schedule is wrong, or a planted bug is not found."""
    parser = argparse.ArgumentParser(prog="scripts/nightly schedules", description=__doc__)
    parser.add_argument(
        "--preemptions", type=int, default=2, help="of the smallest feeds (2); -1: none"
    )
    parser.add_argument("--runs", type=int, default=10_000, help="schedules of drawn feeds (10000)")
    parser.add_argument("--seed", type=int, default=0, help="the first of these (0)")
    parser.add_argument("--only", metavar="NAME", help="of the smallest feeds this one")
    parser.add_argument("--planted", action="store_true", help="instead: find each planted bug")
    wish = parser.parse_args()
    warnings.simplefilter("ignore", feeder.ReplayWarning)
    logging.getLogger("feeder").setLevel(logging.ERROR)  # Each edit is told.
    if wish.planted:
        return _find_planted(wish.runs, wish.seed)
    total, began = 0, time.process_time()
    with Runs() as runs:
        for name in () if wish.preemptions < 0 else [wish.only] if wish.only else SMALLEST:
            found, num = runs.every(SMALLEST[name], wish.preemptions), runs.num - total
            total = runs.num
            print(
                f"{name:24} {num:9,} schedules, all within {wish.preemptions} preemptions",
                flush=True,
            )
            if found is not None:
                print(found)
                return 1
        if (found := runs.some(iter(range(wish.seed, wish.seed + wish.runs)))) is not None:
            print(found)
            return 1
    took = time.process_time() - began
    print(f"{runs.num:,} schedules in {took:.0f} s of CPU, 0 wrong")
    return 0


def search(name: str, most: int, seed: int = 0) -> tuple[int, Found | None]:
    """Run drawn programs with a bug until one is wrong; how many that took."""
    bug = PLANTED[name]
    with Runs({bug.file: planted_text(bug)}) as runs:
        found = runs.some(iter(range(seed, seed + most)))
    return runs.num, found


def _find_planted(most: int, seed: int) -> int:
    num_missed = 0
    for name in PLANTED:
        num, found = search(name, most, seed)
        num_missed += found is None
        told = "NOT FOUND" if found is None else str(found.error).splitlines()[0]
        print(f"{num:7,} schedules  {name:38} {told[:100]}", flush=True)
    print(f"{len(PLANTED)} planted bugs, {num_missed} not found within {most} schedules")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
