"""Figures of a server for those who look and take nothing: monitors, and threads of this process.

All figures are read by the I/O thread, whose state they are.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError

from feeder.errors import ClosedError, FeedError
from feeder.observe.figures import (
    Condition,
    ConsumerFigures,
    FeedFigures,
    Figures,
    QueueFigures,
    ServiceFigures,
    State,
    build_feed_figures,
    build_figures,
    to_json,
)
from feeder.service.net.listener import Peer
from feeder.service.protocol import messages as say
from feeder.service.protocol.fields import RECEIPT_BYTES
from feeder.service.protocol.session import SERVER, Receipts, Session
from feeder.service.server.delivery import Lease
from feeder.service.server.group import Desk

# ---- From the state of a desk to figures.


def feed_figures(desk: Desk, now: float) -> FeedFigures:
    """The figures of a feed and of its consumers."""
    feed, run = desk.feed, desk.feed.run
    failure = _failure(desk)
    # A feed that has failed waits for nobody: that its queues are empty is not the news.
    missing = () if failure is not None else tuple(desk.membership.missing())
    condition = Condition(
        state=_state(desk, failure),
        failure=failure,
        missing=missing,
        started_at=feed.started_at,
        asked_at=feed.stats.asked_at,
    )
    return build_feed_figures(
        feed.factory.config,
        0,
        condition,
        feed.counted,
        None if run is None else run.pipeline.budget,
        [_queue(desk, seat, now) for seat in range(len(desk.leases))],
        now,
        blocked_s=feed.slots.waited.seconds(now),
        service=_service(desk),
    )


def _failure(desk: Desk) -> FeedError | None:
    # All queues end with the same error; one that ended before the failure knows nothing of it.
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
    stats = desk.feed.stats
    return ServiceFigures(
        opened=stats.opened,
        reopened=stats.reopened,
        fenced=stats.fenced,
        expired=stats.expired,
        rewinds=max(0, stats.begun - 1),
        arena_bytes=desk.feed.slots.num_bytes,
    )


def _queue(desk: Desk, seat: int, now: float) -> QueueFigures:
    stats, lease, run = desk.feed.stats.queues[seat], desk.leases[seat], desk.feed.run
    number, replica = divmod(seat, desk.replicas)
    # Credit under way counts as waiting: the consumer has it before its user asks.
    in_flight = 0 if lease is None else len(lease.under_way)
    return QueueFigures(
        queue=number,
        replica=None if desk.replicas == 1 else replica,
        device=desk.feed.factory.config.devices[number],
        batches=stats.used.batches,
        rows=stats.used.rows,
        bytes=stats.used.bytes,
        waiting=in_flight + (0 if run is None else len(run.outboxes[seat])),
        capacity=desk.feed.slots.num_slots(number),
        wait_s=stats.wait_s(now),
        starved_s=stats.starved.seconds(now),
        checked_s=stats.most_checked_s,
        corrupt=stats.corrupt,
        consumer=None if lease is None else _consumer(desk, lease, now),
    )


def _consumer(desk: Desk, lease: Lease, now: float) -> ConsumerFigures:
    # No data path is chosen before `Attached`.
    plane = "" if not lease.member.has_attached else "shared" if lease.shared else "frames"
    return ConsumerFigures(
        who=lease.member.who,
        plane=plane,
        state=lease.session.state,
        credit=lease.credit,
        in_flight=len(lease.under_way),
        # The lease is renewed by whatever is heard, so it says when that was.
        silent_s=max(0.0, now - (lease.member.expires - desk.membership.lease_s)),
    )


# Many monitors must not slow the batches down: they share one set of figures.
_FRESH_S = 0.05
"""For how long figures are used again before they are made anew."""


class Monitors:
    """Answers those who ask for figures. Owned by the server's I/O thread, but for `ask`.

    `_asked` is the only thing that other threads touch. A deque needs no lock for one append and
    one popleft.
    """

    def __init__(self, desks: dict[str, Desk]) -> None:
        self._desks = desks
        self._sessions: dict[Peer, tuple[Session, Receipts]] = {}
        self._asked: deque[Future[Figures]] = deque()
        # The last figures, when they were made, and their JSON once a monitor has asked.
        self._made_at = -math.inf
        self._figures: Figures | None = None
        self._data: bytes | None = None
        self._closed = False

    def ask(self) -> Future[Figures]:
        """Ask for the figures; any thread, which then wakes the I/O thread."""
        future: Future[Figures] = Future()
        self._asked.append(future)
        # Looked at after the append: either this thread or `close` finds the future.
        if self._closed:
            self.close()
        return future

    def answer_threads(self) -> None:
        """Give the figures to threads that have asked."""
        while self._asked:
            future = self._asked.popleft()
            # The thread that asked may have given up after its 2 s.
            with contextlib.suppress(InvalidStateError):
                future.set_result(self.figures(time.monotonic()))

    def close(self) -> None:
        """Answer all who ask, now or later, that the server is closed."""
        self._closed = True
        while self._asked:
            with contextlib.suppress(IndexError, InvalidStateError):
                self._asked.popleft().set_exception(ClosedError("the server is closed"))

    def figures(self, now: float) -> Figures:
        """The figures of all feeds, at most `_FRESH_S` old."""
        if self._figures is None or now - self._made_at >= _FRESH_S:
            feeds = [feed_figures(desk, now) for desk in self._desks.values()]
            self._figures, self._made_at = build_figures(feeds, now), now
            self._data = None
        return self._figures

    # ---- monitors

    def knows(self, peer: Peer | None) -> bool:
        """Whether a peer is a monitor."""
        return peer in self._sessions

    def answer_monitor(self, peer: Peer, message: say.Message) -> say.Seen:
        """The answer to a monitor's message. Raises `ProtocolError` where that is not `Look`, or
        where the monitor has not read its last answer."""
        if peer not in self._sessions:
            self._sessions[peer] = Session(SERVER), Receipts()
        session, answers = self._sessions[peer]
        session.on(type(message).__name__)
        assert isinstance(message, say.Look)  # No other message is legal in the session's state.
        answers.check(message.receipt)
        session.on("Seen")
        figures = self.figures(time.monotonic())
        self._data = self._data or to_json(figures)
        return say.Seen(data=self._data, receipt=answers.make(os.urandom(RECEIPT_BYTES)))

    def forget(self, peer: Peer) -> None:
        """Forget a peer that is gone or was refused."""
        self._sessions.pop(peer, None)
