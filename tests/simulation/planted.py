"""Plants bugs in copies of the project and prints how many runs it takes to find each."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import NamedTuple

from planted.bug import Bug
from planted.plant import PlantError, copied, planted_text
from simulation.catalogue import BUGS

LIMIT_S = 1800.0
"""Seconds after which the search for a bug is ended."""


class Found(NamedTuple):
    """What became of a search."""

    bug: Bug
    runs: int
    """How many runs it took; 0 where it was not found."""
    violation: str
    seconds: float


def search(bug: Bug, most: int) -> Found:
    """Run seeds in a copy with the bug, until an invariant fails."""
    began = time.perf_counter()
    with copied() as copy:
        (copy / bug.file).write_text(planted_text(bug, copy))
        env = {**os.environ, "PYTHONHASHSEED": "0"}
        env["PYTHONPATH"] = os.pathsep.join((str(copy), str(copy / "tests")))
        command = [sys.executable, "-m", "simulation.simulate", "--runs", str(most), "--first"]
        done = subprocess.run(
            command, cwd=copy, env=env, text=True, capture_output=True, timeout=LIMIT_S, check=False
        )
    took = time.perf_counter() - began
    if done.returncode not in (0, 1) or not done.stdout:
        raise PlantError(f"{bug.name}: {done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    if done.returncode == 0:
        return Found(bug, 0, "", took)
    seed, _, violation = lines[0].removeprefix("seed ").partition(": ")
    return Found(bug, int(seed) + 1, violation, took)


def main() -> int:
    """Return 1 where a bug was not found."""
    parser = argparse.ArgumentParser(prog="scripts/simulate planted", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="of that name")
    parser.add_argument("--most", type=int, default=10_000, help="runs for each bug (10000)")
    wish = parser.parse_args()
    bugs = [bug for bug in BUGS if wish.only is None or bug.name in wish.only]
    num_found = 0
    for bug in bugs:
        found = search(bug, wish.most)
        num_found += bool(found.runs)
        told = f"{found.runs:6} runs" if found.runs else "NOT FOUND  "
        print(f"{told}  {bug.name:40} {found.violation[:100]}", flush=True)
    print(f"{num_found} of {len(bugs)} planted bugs found within {wish.most} runs")
    return 0 if num_found == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
