"""Shrinks a failing run: fewer faults, fewer batches, no more delays than it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from simulation.faults import Plan


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
    if feed.rounds != "stream":
        yield replace(plan, feed=feed._replace(rounds="stream", last_round="uneven"))
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
