"""Runs worlds by their seeds: `scripts/nightly simulate --seed S --runs N`."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import zmq

from feeder import waking
from feeder.devices import host
from feeder.errors import FeedError
from feeder.service.client import consumer
from feeder.service.client import io_loop as client_loop
from feeder.service.client import lease as client_lease
from feeder.service.net import guard
from feeder.service.server import io_loop as server_loop
from feeder.service.server import run as served
from simulation import network, server, stream
from simulation.faults import Kind, Plan, draw
from simulation.fleet import Fleet, FleetPipeline
from simulation.job import Job
from simulation.world import BEGIN, Violation, World, WouldWaitError, virtual_time

SETTLE_S = 30.0
"""Seconds after the end of all trainers until everything is free."""


class Outcome(NamedTuple):
    """What became of a run."""

    plan: Plan
    num_events: int
    seconds: float
    """Seconds of virtual time."""
    violation: str
    history: list[tuple[float, str, str]]
    handed_by: list[int]
    """Batches that trainers had been handed after each minute."""
    fleets: list[Fleet]
    """The actors of each run of each server."""
    counted: Counter[str]
    """What came of edits and of calls that fail."""

    @property
    def invariant(self) -> str:
        """The invariant that does not hold."""
        return self.violation.split(":")[0]


def would_wait(*args: Any) -> Any:
    """Stands for a wait of the user's thread."""
    raise WouldWaitError


class NoThreads:
    """Stands for a `ThreadGroup`: the world has one thread."""

    def start(self, name: str, run: Callable[..., None], *args: Any) -> None:
        pass

    def close(self, seconds: float) -> None:
        pass


class NoInspector:
    """Stands for what the system knows of sockets."""

    def close(self) -> None:
        pass


class NoSocket:
    """Stands for `SocketRef`."""

    @staticmethod
    def at(descriptor: int) -> None:
        return None


def make_pipeline(
    spec: Any, run: Any, name: str, queues: Any, slots: stream.Slots, **rest: Any
) -> stream.Pipeline:
    """Stands for `Pipeline`: calls are made at once, or by actors where the plan has some."""
    kind = stream.Pipeline if slots.server.plan.workers is None else FleetPipeline
    return kind(spec, run, name, queues, slots, **rest)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Sockets, polls and threads are those of the current world."""
    replaced: list[tuple[Any, str, Any]] = [
        (zmq, "Poller", network.Poller),
        (server_loop, "read_event", server.next_event),
        (server_loop, "ConnectionGuard", network.Guard),
        (guard, "SocketRef", NoSocket),
        (guard, "SocketInspector", NoInspector),
        (guard, "are_few_left", lambda descriptor: False),
        (served, "Pipeline", make_pipeline),
        (client_loop, "Waker", network.Waker),
        (client_loop, "wait_for", lambda waker, seconds: None),
        (client_lease, "attach", network.attach),
    ]
    with ExitStack() as stack:
        for where, name, new in replaced:
            stack.enter_context(patch.object(where, name, new))
        yield


@contextmanager
def simulated() -> Iterator[None]:
    """The same, with clocks, random numbers and users of the world."""
    logger = logging.getLogger("feeder")
    is_disabled = logger.disabled
    with (
        stand_ins(),
        patch.object(consumer, "ThreadGroup", NoThreads),
        patch.object(host.HostQueue, "_wait_for_batch", would_wait),
        patch.object(waking.OneShotEvent, "wait", would_wait),
        virtual_time(),
    ):
        logger.disabled = True
        gc.disable()
        try:
            yield
        finally:
            World("no more")  # Else the last world would be kept, with its memory.
            gc.enable()
            gc.collect()
            logger.disabled = is_disabled


def run(plan: Plan, *, records: bool = False) -> Outcome:
    """Run a world, within `simulated`."""
    world = World(plan.seed, records=records, most_events=plan.most_events)
    violation = ""
    job = Job(plan)
    try:
        ends = BEGIN + plan.quiet_s + plan.bound_s
        if not world.run(lambda: job.is_over and job.is_quiet, ends):
            raise Violation(f"waits: {waiting(job)}")
        finish(world, job)
    except Violation as error:
        violation = str(error)
    except FeedError as error:
        violation = f"errors: a user gets {error!r}"
    job.forget()
    fleets = [fleet for server in job.servers for fleet in server.fleets]
    return Outcome(
        plan, world.num_events, world.now - BEGIN, violation, world.history or [],
        job.handed_by, fleets, job.counted,
    )  # fmt: skip


def waiting(job: Job) -> str:
    """Who has not come to an end."""
    told = []
    for rank in job.ranks:
        if not rank.is_done:
            process = rank.process
            what = "has no process" if process is None else process.loop.machine.describe_wait()
            told.append(f"trainer {rank.name} is not done: {what}")
    return "; ".join(told)


def finish(world: World, job: Job) -> None:
    """All trainers are gone: everything is free."""
    job.end_others()
    alive = [one for one in job.servers if not one.is_dead]

    def is_free() -> bool:
        return all(one.is_dead or not any(one.group.leases) for one in alive)

    if not world.run(is_free, world.now + SETTLE_S + 2 * job.plan.lease_s):
        raise Violation("slots: a lease outlives its trainer")
    for one in alive:
        if not one.is_dead:
            one.check_slots()


def replay(seed: int | str, kind: Kind = "stream") -> Outcome:
    """The run of a seed, with its history."""
    return run(draw(seed, kind), records=True)


def show(outcome: Outcome, most: int = 120) -> str:
    """A failed run, readable: what it was, and what happened last."""
    lines = [f"{at - BEGIN:9.4f}  {who:14} {what}" for at, who, what in outcome.history]
    left_out = max(0, len(lines) - most)
    head = [f"... {left_out} lines before"] if left_out else []
    return "\n".join(
        [str(outcome.plan), *head, *lines[left_out:], f"VIOLATION {outcome.violation}"]
    )


def campaign(seeds: Iterable[int], kind: Kind = "stream") -> Iterator[Outcome]:
    """Run these seeds."""
    with simulated():
        for i, seed in enumerate(seeds):
            yield run(draw(seed, kind))
            if i % 20 == 19:
                gc.collect()


def main() -> int:
    """Return 1 where an invariant did not hold."""
    parser = argparse.ArgumentParser(prog="scripts/nightly simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--runs", type=int, default=1000, help="how many seeds (1000)")
    parser.add_argument(
        "--rounds", choices=("stream", "epoch"), default="stream",
        help="whether a round begins in each epoch (stream)",
    )  # fmt: skip
    parser.add_argument(
        "--sources", action="store_true",
        help="feeds of sources, with rounds of either kind: they are edited while they are served, "
        "leave records out, and fail",
    )  # fmt: skip
    parser.add_argument("--history", action="store_true", help="print what happened in one run")
    wish = parser.parse_args()
    kind: Kind = "sources" if wish.sources else wish.rounds
    if wish.history:
        with simulated():
            print(show(replay(wish.seed, kind), most=100_000))
        return 0
    began = time.process_time()
    num = num_events = 0
    failed: list[Outcome] = []
    counted = Counter[str]()
    for outcome in campaign(range(wish.seed, wish.seed + wish.runs), kind):
        num, num_events = num + 1, num_events + outcome.num_events
        counted.update(outcome.counted)
        if outcome.violation:
            failed.append(outcome)
            print(f"seed {outcome.plan.seed}: {outcome.violation}", flush=True)
    took = max(time.process_time() - began, 0.001)
    with simulated():
        for outcome in failed[:1]:
            print(show(shrink(outcome, lambda plan: run(plan, records=True))))
    print(
        f"{num} runs, {num_events} events ({num_events // max(1, num)} a run), {len(failed)} "
        f"violations, {took:.1f} s of CPU time ({num * 60 / took:.0f} runs a minute)"
    )
    for what, times in sorted(counted.items()):
        print(f"{what}: {times}")
    return 1 if failed else 0


def shrink(outcome: Any, run: Callable[[Plan], Any]) -> Any:
    """The shortest run that was found in which the same invariant fails, with its history.

    The faults are halved again and again, as in Zeller's delta debugging, then each setting is put
    to what is simplest, for as long as the invariant still fails.
    """
    best = run(outcome.plan)
    if best.invariant != outcome.invariant:
        return best  # It cannot be replayed, which is worth being seen.

    def still_fails(plan: Plan) -> bool:
        nonlocal best
        tried = run(plan)
        if tried.violation and tried.invariant == outcome.invariant:
            best = tried
            return True
        return False

    reduce_faults(best.plan, still_fails)
    is_smaller = True
    while is_smaller:
        is_smaller = any(still_fails(plan) for plan in simpler(best.plan))
    return best


def reduce_faults(plan: Plan, still_fails: Callable[[Plan], bool]) -> None:
    """Leave out as many faults as can be."""
    faults, size = list(plan.faults), max(1, len(plan.faults) // 2)
    while faults:
        at, has_left_out = 0, False
        while at < len(faults):
            fewer = faults[:at] + faults[at + size :]
            if still_fails(replace(plan, faults=tuple(fewer))):
                faults, has_left_out = fewer, True
            else:
                at += size
        if size == 1 and not has_left_out:
            return
        size = max(1, size // 2)


def simpler(plan: Plan) -> Iterator[Plan]:
    """Runs that are simpler by one step."""
    feed = plan.feed
    if feed.calls > 2:
        yield replace(plan, feed=feed._replace(calls=max(2, feed.calls // 2)))
        yield replace(plan, feed=feed._replace(calls=feed.calls - 1))
    if feed.epochs > 1:
        yield replace(plan, feed=feed._replace(epochs=1))
    if (feed.batch_size, feed.chunk_rows) != (2, 2):
        yield replace(plan, feed=feed._replace(batch_size=2, chunk_rows=2))
    for name, value in (
        ("rounds", "stream"), ("last_round", "uneven"), ("skips", False), ("retries", 0),
        ("weights", feed.weights[:1]),
    ):  # fmt: skip
        if getattr(feed, name) != value:
            yield replace(plan, feed=feed._replace(**{name: value}))
    if feed.replicas > 1:
        yield replace(plan, feed=feed._replace(replicas=1))
    if feed.queues > 2:
        yield replace(plan, feed=feed._replace(queues=feed.queues - 1))
    for name, value in (
        ("addresses", 1), ("undecided", False), ("exit_when", "never"), ("delay_s", 0.0005),
        ("make_s", 0.0005), ("think_s", 0.002), ("planes", ("frames",)), ("paces", (1,)),
        ("has_disks", False), ("keeps", False),
    ):  # fmt: skip
        if getattr(plan, name) != value:
            yield replace(plan, **{name: value})


if __name__ == "__main__":
    sys.exit(main())
