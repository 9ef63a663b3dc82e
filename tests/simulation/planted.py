"""Plants bugs that the service once had, and prints how many runs it takes to find each."""

from __future__ import annotations

import argparse
import sys
import time

from planted.bug import BUGS, Bug, planted
from simulation.faults import Kind
from simulation.simulate import Outcome, campaign

KINDS: dict[str, Kind] = {
    "simulation": "stream", "simulation of epochs": "epoch", "simulation of sources": "sources",
}  # fmt: skip
"""The runs that find a bug, by who is said to find it."""
SIMULATED = {name: bug for name, bug in BUGS.items() if not KINDS.keys().isdisjoint(bug.by)}


def kind_of(bug: Bug) -> Kind:
    """The runs that find it."""
    return next(KINDS[by] for by in bug.by if by in KINDS)


def search(bug: Bug, most: int) -> tuple[int, Outcome | None]:
    """Run seeds with the bug until an invariant fails, first the one that is known; returns the
    number of runs, and the one that failed."""
    seeds = () if bug.seed is None else (bug.seed,)
    num = 0
    with planted(bug):
        for outcome in campaign((*seeds, *range(most)), kind_of(bug)):
            num += 1
            if outcome.violation:
                return num, outcome
    return num, None


def main() -> int:
    """Return 1 where a bug was not found."""
    parser = argparse.ArgumentParser(prog="scripts/nightly simulate-planted", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="of that name")
    parser.add_argument("--most", type=int, default=10_000, help="runs for each bug (10000)")
    wish = parser.parse_args()
    names = wish.only or list(SIMULATED)
    num_missed = 0
    for name in names:
        began = time.process_time()
        num, outcome = search(SIMULATED[name], wish.most)
        num_missed += outcome is None
        told = "NOT FOUND" if outcome is None else outcome.violation
        took = time.process_time() - began
        print(f"{num:6} runs {took:6.1f} s  {name:38} {told[:110]}", flush=True)
    print(f"{len(names)} planted bugs, {num_missed} not found within {wish.most} runs")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
