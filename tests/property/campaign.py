"""`python -m property.campaign --seed S --examples N` runs that many drawn programs of each kind
beside the naive stream, and counts them. A program that differs is made as small as it can be, and
shown."""

from __future__ import annotations

import argparse
import time
from collections import Counter

import hypothesis
from hypothesis import HealthCheck, Phase

from property.programs import COUNTS, ORDERS, Program, check, programs


def run(seed: int, examples: int) -> Counter[str]:
    """Run programs; how many of each kind and how many runs there were."""
    done = Counter[str]()
    for order in ORDERS:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=examples, database=None, deadline=None,
            suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
        )  # fmt: skip
        @hypothesis.given(program=programs(order))
        def run_one(program: Program) -> None:
            done["runs"] += check(program)
            done[f"programs by {program.stream.order}"] += 1

        run_one()
    return done


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--examples", type=int, default=2000)
    told, began = parser.parse_args(), time.monotonic()
    done = run(told.seed, told.examples)
    counts = ", ".join(f"{count} {what}" for what, count in (done + COUNTS).items())
    print(f"seed {told.seed}: {counts} in {time.monotonic() - began:.0f} s, 0 differ")


if __name__ == "__main__":
    main()
