"""An hour of a served feed whose calls are made by actors that are slow and die, and the same hour
without: `scripts/nightly simulate-actors --workers N --trainers N --minutes M`."""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple
from unittest.mock import patch

import feeder
from feeder.config import RayActors, _num_threads
from feeder.service.client import machine
from simulation.faults import Fault, Plan
from simulation.fleet import MINUTE_S, Workers
from simulation.simulate import run, simulated
from simulation.sources import NAME, content
from simulation.stream import Feed, calls_of, factory_of, rows_of

CHUNK_ROWS, BATCH_SIZE = 5, 128
SLOW_SHARE, KILLED_SHARE = 0.01, 0.1
TELL_S = 5.0
CALLS_FROM, BATCHES_FROM = 1, 5
"""Counted from these minutes on. A batch comes after the slowest of the calls before it, which may
be issued three times: until then all that is handed out is late, and no less."""


def rough(num: int, seconds: float) -> Workers:
    """So many actors of which a tenth is killed each minute; one call in a hundred is slow."""
    return Workers(num, slow_share=SLOW_SHARE, killed_share=KILLED_SHARE, killed_until_s=seconds)


def feed_of(num: int, trainers: int, calls: int, epochs: int = 1) -> Feed:
    """A feed of so many calls in each epoch, with the threads that it has for so many actors."""
    feed = Feed(trainers, calls, CHUNK_ROWS, BATCH_SIZE, epochs, "keep")
    stream = factory_of(feed._replace(calls=1)).config.stream
    threads = _num_threads({"num_threads": None}, stream, RayActors(num))
    return feed._replace(threads=threads)


def plan_of(
    workers: Workers, trainers: int, seconds: float, *, seed: str = "actors",
    epochs: int = 1, faults: tuple[Fault, ...] = (),
) -> Plan:  # fmt: skip
    """A run that has work for a little longer than so many seconds."""
    calls = int(1.02 * workers.num * seconds / workers.call_s / epochs)
    return Plan(
        seed=seed, feed=feed_of(workers.num, trainers, calls, epochs), lease_s=30.0, think_s=0.2,
        workers=workers, faults=faults, quiet_s=seconds, most_events=10**8,
    )  # fmt: skip


def from_one_thread(feed: Feed) -> list[bytes]:
    """The rows of each batch as a real feed with one thread gives them, in this process."""
    coordinator = feeder.init_data_input_workers(
        ["x"], calls_of(feed), feed.batch_size, 1, NAME, epochs=feed.epochs,
        last_batch=feed.last_batch, num_threads=1, coordinator=feeder.Coordinator(),
    )  # fmt: skip
    with coordinator:
        return [content(batch) for batch in coordinator[NAME]]


class Hour(NamedTuple):
    """What became of it."""

    violation: str
    calls: float
    """Calls that were answered in a minute, once all were under way."""
    batches: float
    """Batches that trainers were handed in a minute, once slow calls were among those under way."""
    seconds: float
    """After so many all trainers had everything."""
    killed: int
    """Actors that were killed or given up."""
    slow: int
    """Calls that were slow."""


def watch(plan: Plan) -> Hour:
    """Run a plan, within `simulated`. Each trainer compares all rows that it is handed with those
    of a naive loop."""
    # Twice a second each trainer says what it has used; 64 of them would take minutes of an hour.
    with patch.object(machine, "_TELL_S", TELL_S):
        outcome = run(plan)
    fleets, minutes = outcome.fleets, int(plan.quiet_s // MINUTE_S)
    return Hour(
        outcome.violation, per_minute(fleets[-1].answered_by[:minutes], CALLS_FROM),
        per_minute(outcome.handed_by[:minutes], BATCHES_FROM), outcome.seconds,
        sum(one.num_killed for one in fleets), sum(one.num_slow for one in fleets),
    )  # fmt: skip


def per_minute(counted: list[int], begin: int) -> float:
    """What was counted in a minute, from minute number `begin` on; nothing before that."""
    if len(counted) <= begin:
        return 0.0
    return (counted[-1] - counted[begin - 1]) / (len(counted) - begin)


def main() -> int:
    """Return 1 where bytes differ, or a trainer waits for ever."""
    parser = argparse.ArgumentParser(prog="scripts/nightly simulate-actors", description=__doc__)
    parser.add_argument("--workers", type=int, default=1000, help="actors (1000)")
    parser.add_argument("--trainers", type=int, default=64, help="trainers (64)")
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes (60)")
    parser.add_argument("--seed", default="actors", help="what is drawn follows from it")
    wish = parser.parse_args()
    seconds, hours = MINUTE_S * wish.minutes, []
    for workers in (Workers(wish.workers), rough(wish.workers, seconds)):
        plan = plan_of(workers, wish.trainers, seconds, seed=wish.seed)
        if from_one_thread(plan.feed) != rows_of(plan.feed):
            print("one thread gives other rows than a naive loop")
            return 1
        began = time.perf_counter()
        with simulated():
            found = watch(plan)
        took = time.perf_counter() - began
        print(f"{found} ({took:.0f} s)", flush=True)
        if found.violation:
            return 1
        hours.append(found)
    calm, tried = hours
    print(
        f"with deaths and slow calls {1 - tried.calls / calm.calls:.1%} fewer calls and "
        f"{1 - tried.batches / calm.batches:.1%} fewer batches"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
