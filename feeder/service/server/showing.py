"""The figures of a served feed, read by the server's I/O thread."""

from __future__ import annotations

from feeder.errors import FeedError
from feeder.observe.figures import (
    ConsumerFigures,
    FeedFigures,
    QueueFigures,
    ServiceFigures,
    State,
)
from feeder.observe.making import Condition, make_feed
from feeder.service.server.group import Desk
from feeder.service.server.lease import Lease


def show(desk: Desk, now: float) -> FeedFigures:
    """What a feed has done, and who reads it."""
    feed, run = desk.feed, desk.feed.run
    failure = _failure(desk)
    missing = () if failure is not None else tuple(desk.seats.missing())
    condition = Condition(
        state=_state(desk, failure),
        failure=failure,
        missing=missing,
        started_at=feed.started_at,
        asked_at=feed.account.asked_at,
    )
    return make_feed(
        feed.recipe.config,
        0,
        condition,
        feed.counted,
        None if run is None else run.pipeline.ledger,
        [_queue(desk, number, now) for number in range(desk.num_queues)],
        now,
        blocked_s=feed.slots.waited.read(now),
        service=_service(desk),
    )


def _failure(desk: Desk) -> FeedError | None:
    feed = desk.feed
    endings = [] if feed.run is None else [outbox.result for outbox in feed.run.outboxes]
    found = [feed.failure, *endings]
    return next((error for error in found if isinstance(error, FeedError)), None)


def _state(desk: Desk, failure: FeedError | None) -> State:
    if failure is not None:
        return "failed"
    if desk.acknowledged:
        return "ended"
    return "waiting" if desk.feed.run is None else "running"


def _service(desk: Desk) -> ServiceFigures:
    account = desk.feed.account
    return ServiceFigures(
        opened=account.opened,
        reopened=account.reopened,
        fenced=account.fenced,
        expired=account.expired,
        rewinds=max(0, account.begun - 1),
        arena_bytes=desk.feed.slots.num_bytes,
    )


def _queue(desk: Desk, number: int, now: float) -> QueueFigures:
    account, lease, run = desk.feed.account.queues[number], desk.leases[number], desk.feed.run
    in_flight = 0 if lease is None else lease.sequence - lease.used
    return QueueFigures(
        queue=number,
        device=desk.feed.recipe.config.devices[number],
        batches=account.used.batches,
        rows=account.used.rows,
        bytes=account.used.bytes,
        waiting=in_flight + (0 if run is None else len(run.outboxes[number])),
        capacity=desk.feed.slots.num_slots(number),
        wait_s=account.wait_s(now),
        starved_s=account.starved.read(now),
        checked_s=account.most_checked_s,
        corrupt=account.corrupt,
        consumer=None if lease is None else _consumer(desk, lease, now),
    )


def _consumer(desk: Desk, lease: Lease, now: float) -> ConsumerFigures:
    plane = "" if not lease.has_attached else "shared" if lease.shared else "frames"
    return ConsumerFigures(
        who=lease.who,
        plane=plane,
        state=lease.session.state,
        credit=lease.credit,
        in_flight=lease.sequence - lease.used,
        silent_s=max(0.0, now - (lease.expires - desk.lease_s)),
    )
