"""Plants bugs that the service once had, and prints how many runs it takes to find each."""

from __future__ import annotations

import argparse
import sys
import time

from planted.bug import BUGS, Bug, planted
from simulation.simulate import Outcome, campaign

SIMULATED = {name: bug for name, bug in BUGS.items() if "simulation" in " ".join(bug.by)}


def search(bug: Bug, most: int) -> tuple[int, Outcome | None]:
    """Run seeds with the bug until an invariant fails, first the one that is known; returns the
    number of runs, and the one that failed."""
    seeds = () if bug.seed is None else (bug.seed,)
    num, rounds = 0, "epoch" if "simulation of epochs" in bug.by else "stream"
    with planted(bug):
        for outcome in campaign((*seeds, *range(most)), rounds):
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
