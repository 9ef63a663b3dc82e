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
from feeder.feeds.length import progress_of
from feeder.observe.figures import (
    Condition,
    ConsumerFigures,
    FeedFigures,
    Figures,
    ProgressFigures,
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
from feeder.service.protocol.member import Member
from feeder.service.protocol.session import SERVER, Receipts, Session
from feeder.service.server.delivery import Lease
from feeder.service.server.group import ConsumerGroup

# ---- From the state of a consumer group to figures.


def feed_figures(group: ConsumerGroup, now: float) -> FeedFigures:
    """The figures of a feed and of its consumers."""
    feed, run = group.feed, group.feed.run
    failure = feed.ended_with
    # A feed that has failed waits for nobody: that its queues are empty is not the news.
    missing = () if failure is not None else tuple(group.membership.missing())
    condition = Condition(
        state=_state(group, failure),
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
        None if run is None else run.pipeline.bound,
        [_queue(group, member, now) for member in group.membership.own],
        now,
        blocked_s=feed.slots.waited.seconds(now),
        service=_service(group),
        executor=None if run is None else run.pipeline.executor_counts(),
        progress=_progress(group),
    )


def _progress(group: ConsumerGroup) -> ProgressFigures | None:
    place, factory = group.low_watermark.place, group.feed.factory
    if place is None:
        return None
    at = place.settled()
    return progress_of(factory.config, at)


def _state(group: ConsumerGroup, failure: FeedError | None) -> State:
    if failure is not None:
        return "failed"
    if group.acknowledged:
        return "ended"
    return "waiting" if group.feed.run is None else "running"


def _service(group: ConsumerGroup) -> ServiceFigures:
    stats = group.feed.stats
    return ServiceFigures(
        opened=stats.opened,
        reopened=stats.reopened,
        fenced=stats.fenced,
        expired=stats.expired,
        rewinds=max(0, stats.begun - 1),
        arena_bytes=group.feed.slots.num_bytes,
    )


def _queue(group: ConsumerGroup, member: Member, now: float) -> QueueFigures:
    stats, run = group.feed.stats.queues[member.seat], group.feed.run
    lease = member if isinstance(member, Lease) else None
    # Credit under way counts as waiting: the consumer has it before its user asks.
    in_flight = 0 if lease is None else len(lease.under_way)
    waiting = in_flight + (0 if run is None else len(run.outboxes[member.seat]))
    # Batches that lie elsewhere than in slots wait too: a queue is full, and never fuller.
    capacity = group.feed.slots.num_slots(member.queue)
    return QueueFigures(
        queue=member.queue,
        replica=None if group.replicas == 1 else member.replica,
        device=group.feed.factory.config.devices[member.queue],
        batches=stats.used.batches,
        rows=stats.used.rows,
        bytes=stats.used.bytes,
        waiting=min(waiting, capacity) if capacity else waiting,
        capacity=capacity,
        wait_s=stats.wait_s(now),
        starved_s=stats.starved.seconds(now),
        wait_p99_s=stats.starved.quantile(0.99),
        checked_s=stats.most_checked_s,
        corrupt=stats.corrupt,
        consumer=None if lease is None else _consumer(group, lease, now),
    )


def _consumer(group: ConsumerGroup, lease: Lease, now: float) -> ConsumerFigures:
    return ConsumerFigures(
        who=lease.who,
        plane=lease.plane,
        state=lease.session.state,
        credit=lease.credit,
        in_flight=len(lease.under_way),
        # The lease is renewed by whatever is heard, so it says when that was.
        silent_s=max(0.0, now - (lease.expires - group.membership.lease_s)),
    )


# Many monitors must not slow the batches down: they share one set of figures.
_FRESH_S = 0.05
"""For how long figures are used again before they are made anew."""


class Monitors:
    """Answers those who ask for figures. Owned by the server's I/O thread, but for `ask`.

    `_asked` is the only thing that other threads touch. A deque needs no lock for one append and
    one popleft.
    """

    def __init__(self, groups: dict[str, ConsumerGroup]) -> None:
        self._groups = groups
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
            feeds = [feed_figures(group, now) for group in self._groups.values()]
            self._figures, self._made_at = build_figures(feeds, now), now
            self._data = None
        return self._figures

    # ---- monitors

    def knows(self, peer: Peer | None) -> bool:
        """Whether a peer is a monitor."""
        return peer in self._sessions

    def hear(self, peer: Peer, message: say.Message) -> tuple[Session, Receipts]:
        """A monitor has sent a message. Raises `ProtocolError` if it may not."""
        if peer not in self._sessions:
            self._sessions[peer] = Session(SERVER), Receipts()
        session, answers = self._sessions[peer]
        session.on(type(message).__name__)
        return session, answers

    def answer_monitor(self, peer: Peer, message: say.Message) -> say.Seen:
        """The answer to a monitor's message. Raises `ProtocolError` if that is not `Look`, or
        if the monitor has not read its last answer."""
        session, answers = self.hear(peer, message)
        assert isinstance(message, say.Look)  # No other message is legal in the session's state.
        answers.check(message.receipt)
        session.on("Seen")
        figures = self.figures(time.monotonic())
        self._data = self._data or to_json(figures)
        return say.Seen(data=self._data, receipt=answers.make(os.urandom(RECEIPT_BYTES)))

    def forget(self, peer: Peer) -> None:
        """Forget a peer that is gone or was refused."""
        self._sessions.pop(peer, None)
